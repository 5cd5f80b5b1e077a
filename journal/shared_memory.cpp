#include "journal/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "journal/base/directory.h"

namespace amem {
namespace {

constexpr const char* kPlace = "/dev/shm/amem-";
constexpr Bytes kPage = 4096;
constexpr Bytes kLeast = Bytes{64} << 10;
constexpr Bytes kPart = 128;  // at most such a part of what is free: many ranks and NCCL share a container's 64 MiB

bool IsOfKind(int fd, std::initializer_list<unsigned long> kinds) {
  struct statfs fs {};
  if (fstatfs(fd, &fs) != 0) return false;
  return std::ranges::find(kinds, static_cast<unsigned long>(fs.f_type)) != kinds.end();
}

// 0: as much as is wanted.
Bytes FreeIn(int fd) {
  struct statfs fs {};
  if (fstatfs(fd, &fs) != 0 || fs.f_blocks == 0) return 0;
  return static_cast<Bytes>(fs.f_bavail) * static_cast<Bytes>(fs.f_bsize);
}

}  // namespace

bool IsInMemory(int fd) { return IsOfKind(fd, {TMPFS_MAGIC}); }

bool WritesInPlace(int fd) {
  constexpr unsigned long kXfs = 0x58465342;
  return IsOfKind(fd, {TMPFS_MAGIC, EXT4_SUPER_MAGIC, kXfs});
}

std::filesystem::path MemoryOf(SessionId session, const struct stat& tail) {
  return std::filesystem::path(kPlace + std::to_string(tail.st_uid)) /
         (Hex(session.value).substr(2) + "-" + Hex(tail.st_ino).substr(2));
}

bool IsOwnSharedMemory(const std::filesystem::path& path) { return path.parent_path() == kPlace + std::to_string(geteuid()); }

Result<SharedMemory> MakeSharedMemory(const std::filesystem::path& path, Bytes bytes) {
  const std::string doing = "make room for " + std::to_string(bytes) + " bytes in";
  AMEM_ASSIGN(const auto place, OpenOwnDirectory("use for what must outlive the process", path.parent_path()));
  if (!IsInMemory(place.get())) return Status{Code::kUnsupported, doing + " " + path.string() + ": it is not in memory"};
  const Bytes free = FreeIn(place.get()), least = std::min(bytes, kLeast);
  if (free != 0) bytes = std::min(bytes, free / kPart / kPage * kPage);
  if (bytes < least) return SystemFailure(doing, path, ENOSPC);
  SharedMemory made{.bytes = bytes};
  AMEM_ASSIGN(made.file, File::Open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW));
  if (const int error = posix_fallocate(made.file.fd(), 0, static_cast<off_t>(bytes)); error != 0) {
    unlink(path.c_str());
    return SystemFailure(doing, path, error);
  }
  return made;
}

}  // namespace amem
