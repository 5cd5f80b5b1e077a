// Preloaded, it makes the disk full on which a rank keeps its journal (AMEM_JOURNAL_DIR), as soon as the file exists that
// STAND_IN_FULL_DISK names. What has space on that disk already can be written over.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORTED extern "C" [[gnu::visibility("default")]]

namespace {

bool IsFull(int fd, off_t end) {
  const char* full = std::getenv("STAND_IN_FULL_DISK");
  const char* directory = std::getenv("AMEM_JOURNAL_DIR");
  if (full == nullptr || directory == nullptr || access(full, F_OK) != 0) return false;
  char name[32], path[4096];
  std::snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(name, path, sizeof path - 1);
  struct stat status {};
  if (length <= 0 || fstat(fd, &status) != 0) return false;
  path[length] = '\0';
  return std::strncmp(path, directory, std::strlen(directory)) == 0 && end > status.st_size;
}

ssize_t NoSpace() {
  errno = ENOSPC;
  return -1;
}

ssize_t WriteAt(int fd, const void* data, size_t bytes, off_t offset) {
  return IsFull(fd, offset + static_cast<off_t>(bytes)) ? NoSpace() : syscall(SYS_pwrite64, fd, data, bytes, offset);
}
ssize_t WriteAllAt(int fd, const iovec* parts, int count, off_t offset) {
  off_t end = offset;
  for (int i = 0; i < count; ++i) end += static_cast<off_t>(parts[i].iov_len);
  return IsFull(fd, end) ? NoSpace() : syscall(SYS_pwritev, fd, parts, count, offset, 0);
}

}  // namespace

EXPORTED ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) { return WriteAt(fd, data, bytes, offset); }
EXPORTED ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) { return WriteAt(fd, data, bytes, offset); }
EXPORTED ssize_t pwritev(int fd, const iovec* parts, int count, off_t offset) { return WriteAllAt(fd, parts, count, offset); }
EXPORTED ssize_t pwritev64(int fd, const iovec* parts, int count, off64_t offset) {
  return WriteAllAt(fd, parts, count, offset);
}
