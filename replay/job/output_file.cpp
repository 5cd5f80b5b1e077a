#include "replay/job/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace amem {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBufferBytes = std::size_t{1} << 16;

bool IsStandardOutput(const fs::path& path) {
  struct stat named {
  }, standard{};
  return path == "-" || (stat(path.c_str(), &named) == 0 && fstat(STDOUT_FILENO, &standard) == 0 &&
                         named.st_dev == standard.st_dev && named.st_ino == standard.st_ino);
}

}  // namespace

Result<OutputFile> OutputFile::Open(const fs::path& path, unsigned mode) {
  OutputFile out;
  out.path_ = path;
  out.standard_output_ = IsStandardOutput(path);
  if (out.standard_output_) {
    out.file_ = File(fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
    if (out.file_.fd() < 0) return SystemFailure("write", path, errno);
    return out;
  }
  struct stat st {};
  const bool there = stat(path.c_str(), &st) == 0;
  std::error_code failed;
  const bool dangling = !there && fs::is_symlink(path, failed);
  if ((there && !S_ISREG(st.st_mode)) || dangling) {
    AMEM_ASSIGN(out.file_, File::Open(path, O_WRONLY | (dangling ? O_CREAT : 0), mode));
    return out;
  }
  if (there) out.path_ = fs::canonical(path, failed);
  out.unfinished_ = out.path_.string() + ".unfinished-" + std::to_string(getpid());
  AMEM_ASSIGN(out.file_, File::Open(out.unfinished_, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, mode));
  return out;
}

OutputFile::~OutputFile() {
  if (file_.fd() >= 0 && !unfinished_.empty()) unlink(unfinished_.c_str());
}

void OutputFile::Write(std::string_view bytes) {
  buffer_ += bytes;
  bytes_ += bytes.size();
  if (buffer_.size() >= kBufferBytes) Flush();
}

void OutputFile::Flush() {
  if (failure_.ok()) failure_ = file_.Write(buffer_);
  buffer_.clear();
}

Status OutputFile::Commit() {
  Flush();
  if (standard_output_ && failure_.code() == Code::kPeerLost) return {};  // as with head: whoever reads has enough
  if (!failure_.ok()) return failure_.Within("write " + path_.string() + " (-o names another file)");
  if (!unfinished_.empty() && rename(unfinished_.c_str(), path_.c_str()) != 0) return SystemFailure("write", path_, errno);
  file_ = File();
  return {};
}

}  // namespace amem
