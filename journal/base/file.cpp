#include "journal/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace amem {

static const char* Advice(std::string_view doing, int error) {
  if (error == ENOSPC || error == EDQUOT) return "; free space there, or put the journal elsewhere (AMEM_JOURNAL_DIR)";
  if (error == EACCES && (doing.starts_with("list") || doing.starts_with("read")))
    return "; only whom its owner lets may read it: run this as that user, or have them send a pack (amem pack -o job.amem)";
  if (error == EACCES || error == EPERM || error == EROFS)
    return "; make it writable for this user, or put the journal elsewhere (AMEM_JOURNAL_DIR)";
  if (error == EMFILE || error == ENFILE) return "; raise the limit of open files (ulimit -n)";
  return error == EFBIG ? "; raise the limit of the size of files (ulimit -f)" : "";
}

std::string ErrnoText(int error) { return std::generic_category().message(error); }

Code CodeOfErrno(int error) {
  if (error == EMFILE || error == ENFILE) return Code::kNoDescriptors;
  return error == ENOENT || error == ESRCH ? Code::kNotFound : Code::kIo;
}

Status SystemFailure(std::string_view doing, const std::filesystem::path& path, int error) {
  return {CodeOfErrno(error), std::string(doing) + " " + path.string() + ": " + ErrnoText(error) + " (errno " +
                                  std::to_string(error) + ")" + Advice(doing, error)};
}

Result<File> File::Open(const std::filesystem::path& path, int flags, unsigned mode) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return SystemFailure((flags & O_CREAT) != 0 ? "create" : "open", path, errno);
  return File(fd);
}

Result<File> File::OpenToRead(const std::filesystem::path& path, Links links) {
  AMEM_ASSIGN(auto file, Open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | (links == Links::kRefused ? O_NOFOLLOW : 0)));
  struct stat st {};
  if (fstat(file.fd(), &st) != 0) return SystemFailure("fstat", path, errno);
  if (!S_ISREG(st.st_mode)) return Status{Code::kInvalid, "open " + path.string() + ": it is no regular file"};
  return file;
}

Result<Bytes> File::Size() const {
  struct stat st {};
  if (fstat(fd(), &st) != 0) return Status{Code::kIo, "fstat: " + ErrnoText(errno)};
  return static_cast<Bytes>(st.st_size);
}

Result<std::size_t> File::ReadAt(Bytes offset, std::span<std::byte> into) const {
  std::size_t done = 0;
  while (done < into.size()) {
    const ssize_t n = pread(fd(), into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Status{CodeOfErrno(errno), "read: " + ErrnoText(errno)};
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  return done;
}

Status File::Write(std::string_view text) const {
  while (!text.empty()) {
    const ssize_t n = ::write(fd(), text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return {errno == EPIPE ? Code::kPeerLost : Code::kIo, "write: " + ErrnoText(errno)};
    text.remove_prefix(static_cast<std::size_t>(n));
  }
  return {};
}

std::string LinkOf(const std::filesystem::path& link) {
  std::error_code unknown;
  return std::filesystem::read_symlink(link, unknown);
}

std::string PathOf(int fd) { return LinkOf("/proc/self/fd/" + std::to_string(fd)); }

std::string ReadSmallFile(const std::filesystem::path& path, std::size_t limit) {
  const auto file = File::OpenToRead(path);
  if (!file) return {};
  std::string text(limit, '\0');
  const auto n = file->ReadAt(0, std::as_writable_bytes(std::span(text)));
  text.resize(n ? *n : 0);
  return text;
}

std::string FirstLineOf(const std::filesystem::path& path) {
  const std::string text = ReadSmallFile(path);
  return text.substr(0, text.find('\n'));
}

}  // namespace amem
