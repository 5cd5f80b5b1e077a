#include "journal/base/directory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <string>

#include "journal/base/file.h"

#ifndef XFS_SUPER_MAGIC
#define XFS_SUPER_MAGIC 0x58465342
#endif

namespace amem {

constexpr int kWalk = O_PATH | O_DIRECTORY | O_CLOEXEC;

static Status Planted(std::string_view doing, const std::filesystem::path& path, const std::string& what) {
  return {Code::kRefused, std::string(doing) + " " + path.string() + ": it " + what +
                              ", in a directory where any user may put things; remove it, or choose another place"};
}

// One component below `parent`. `anyone`: any user may create entries there.
static Result<UniqueFd> Enter(std::string_view doing, int parent, const std::filesystem::path& name, bool anyone,
                              const std::filesystem::path& path) {
  const int flags = kWalk | (anyone ? O_NOFOLLOW : 0);
  UniqueFd next(::openat(parent, name.c_str(), flags));
  if (!next && errno == ENOENT) {
    if (::mkdirat(parent, name.c_str(), 0700) != 0 && errno != EEXIST) return SystemFailure(doing, path, errno);
    next = UniqueFd(::openat(parent, name.c_str(), flags | O_NOFOLLOW));
  }
  const int error = errno;
  struct stat st {};
  if (!next && anyone && ::fstatat(parent, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode))
    return Planted(doing, path, "is a symbolic link");
  if (!next) return SystemFailure(doing, path, error);
  if (!anyone) return next;
  if (::fstat(next.get(), &st) != 0) return SystemFailure(doing, path, errno);
  if (st.st_uid != ::geteuid() && st.st_uid != 0)
    return Planted(
        doing, path,
        "belongs to user " + std::to_string(st.st_uid) + ", and this process runs as user " + std::to_string(::geteuid()));
  return next;
}

Result<UniqueFd> OpenOwnDirectory(std::string_view doing, const std::filesystem::path& path) {
  std::filesystem::path so_far = path.is_absolute() ? "/" : ".";
  UniqueFd at(::open(so_far.c_str(), kWalk));
  if (!at) return SystemFailure(doing, so_far, errno);
  for (const auto& part : path.relative_path()) {
    if (part.empty()) continue;  // after the last slash
    struct stat st {};
    if (::fstat(at.get(), &st) != 0) return SystemFailure(doing, so_far, errno);
    so_far /= part;
    auto next = Enter(doing, at.get(), part, (st.st_mode & S_IWOTH) != 0, so_far);
    if (!next) return next;
    at = *std::move(next);
  }
  UniqueFd readable(::openat(at.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return readable ? std::move(readable) : Result<UniqueFd>(SystemFailure(doing, path, errno));
}

bool IsOnLocalFileSystem(int fd) {
  struct statfs info {};
  if (::fstatfs(fd, &info) != 0) return false;
  const auto type = static_cast<unsigned long>(info.f_type);
  return type == TMPFS_MAGIC || type == EXT4_SUPER_MAGIC || type == XFS_SUPER_MAGIC || type == BTRFS_SUPER_MAGIC ||
         type == OVERLAYFS_SUPER_MAGIC;
}

}  // namespace amem
