// Preloaded, it makes a process believe that it runs on another host: STAND_IN_HOST is the host's name, STAND_IN_BOOT_ID a file
// to read in place of the kernel's boot id, STAND_IN_CLOCK_S how many seconds the host's wall clock is ahead (or, negative,
// behind).
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#define EXPORTED extern "C" [[gnu::visibility("default")]]

namespace {

const char* Redirected(const char* path) {
  const char* boot_id = std::getenv("STAND_IN_BOOT_ID");
  const bool asked = boot_id != nullptr && path != nullptr && std::strcmp(path, "/proc/sys/kernel/random/boot_id") == 0;
  return asked ? boot_id : path;
}

int Open(int directory, const char* path, int flags, unsigned mode) {
  return static_cast<int>(syscall(SYS_openat, directory, Redirected(path), flags, mode));
}

unsigned ModeOf(int flags, va_list arguments) { return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, unsigned) : 0; }

using Fopen = FILE*(const char*, const char*);

}  // namespace

EXPORTED int gethostname(char* name, size_t bytes) noexcept {
  const char* host = std::getenv("STAND_IN_HOST");
  std::snprintf(name, bytes, "%s", host == nullptr ? "localhost" : host);
  return 0;
}

EXPORTED int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto rc = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  const char* ahead = std::getenv("STAND_IN_CLOCK_S");
  if (rc == 0 && clock == CLOCK_REALTIME && ahead != nullptr) time->tv_sec += std::atoi(ahead);
  return rc;
}

#define OPENS(name, leading, directory)                         \
  EXPORTED int name(leading const char* path, int flags, ...) { \
    va_list arguments;                                          \
    va_start(arguments, flags);                                 \
    const unsigned mode = ModeOf(flags, arguments);             \
    va_end(arguments);                                          \
    return Open(directory, path, flags, mode);                  \
  }
#define NOTHING
#define DIRECTORY int from,
OPENS(open, NOTHING, AT_FDCWD)
OPENS(open64, NOTHING, AT_FDCWD)
OPENS(openat, DIRECTORY, from)
OPENS(openat64, DIRECTORY, from)

EXPORTED FILE* fopen(const char* path, const char* mode) {
  static auto* const real = reinterpret_cast<Fopen*>(dlsym(RTLD_NEXT, "fopen"));
  return real(Redirected(path), mode);
}
EXPORTED FILE* fopen64(const char* path, const char* mode) {
  static auto* const real = reinterpret_cast<Fopen*>(dlsym(RTLD_NEXT, "fopen64"));
  return real(Redirected(path), mode);
}
