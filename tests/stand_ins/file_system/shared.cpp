// Preloaded, it makes every file system one that hosts share and that knows no locks, as some NFS and Lustre mounts are.
#include <linux/magic.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

#define EXPORTED extern "C" [[gnu::visibility("default")]]

EXPORTED int flock(int, int) noexcept {
  errno = ENOLCK;
  return -1;
}

EXPORTED int fstatfs(int fd, struct statfs* info) noexcept {
  const int rc = static_cast<int>(syscall(SYS_fstatfs, fd, info));
  info->f_type = NFS_SUPER_MAGIC;
  return rc;
}
