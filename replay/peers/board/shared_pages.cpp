#include "replay/peers/board/shared_pages.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>

#include "journal/base/file.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace amem::board {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

Status PagesFailed(const char* what) {
  return {CodeOfErrno(errno), fmt::format("shared pages: {}: {}", what, ErrnoText(errno))};
}

// Exceeding the limit of file sizes would end the process with a signal instead of failing a call.
bool LimitAllows(Bytes bytes) {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= bytes;
}

}  // namespace

Result<SharedPages> SharedPages::Make(const char* name, Bytes bytes, Writers writers, Bytes reserved) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return PagesFailed("memfd_create");
  if (!LimitAllows(bytes)) {
    return Status{
        CodeOfErrno(EFBIG),
        fmt::format("shared pages of {} bytes: {}; raise the limit of the size of files (ulimit -f)", bytes, ErrnoText(EFBIG))};
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return PagesFailed("ftruncate");
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED) return PagesFailed("mmap");
  SharedPages made(std::move(fd), static_cast<std::byte*>(at), bytes);
  AMEM_TRY(made.Reserve(0, reserved));
  const bool others_write = writers == Writers::kAll;
  if (!others_write && ::fcntl(made.fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0 && errno != EINVAL)
    return PagesFailed("sealing");
  if (::fcntl(made.fd(), F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) return PagesFailed("sealing");
  return made;
}

// A system that does not know the call, or denies it, gives memory when it is touched.
Status SharedPages::Reserve(Bytes offset, Bytes bytes) const {
  int failed = 0;
  do {
    failed = ::fallocate(fd(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (failed != 0 && errno == EINTR);
  if (failed == 0 || (errno != ENOSPC && errno != ENOMEM)) return {};
  return {Code::kOutOfMemory, fmt::format("shared pages: no host memory for {} bytes: {}", bytes, ErrnoText(errno))};
}

Result<SharedPages> SharedPages::MakePrivate(Bytes bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return PagesFailed("mmap");
  return SharedPages({}, static_cast<std::byte*>(at), bytes);
}

Result<SharedPages> SharedPages::Open(int fd, Bytes bytes_least, Writers writers) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return PagesFailed("fstat");
  const int seals = ::fcntl(fd, F_GET_SEALS);
  const auto bytes = static_cast<Bytes>(info.st_size);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals || bytes < bytes_least) {
    return Status{Code::kCorrupt, fmt::format("descriptor {} is no sealed memory of at least {} bytes (it has {}, seals {})",
                                              fd, bytes_least, bytes, seals)};
  }
  const int rights = writers == Writers::kAll ? PROT_READ | PROT_WRITE : PROT_READ;
  void* at = ::mmap(nullptr, bytes, rights, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return PagesFailed("mmap");
  return SharedPages({}, static_cast<std::byte*>(at), bytes);
}

SharedPages::~SharedPages() {
  if (at_ != nullptr) ::munmap(at_, bytes_);
}

}  // namespace amem::board
