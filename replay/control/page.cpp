#include "replay/control/page.h"

#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "journal/base/process_stat.h"

namespace amem::control {
namespace {

struct flock WholeFile(short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;
}

Result<Page*> Map(const File& file, const std::filesystem::path& path) {
  void* const at = ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
  if (at == MAP_FAILED) return SystemFailure("map", path, errno);
  return static_cast<Page*>(at);
}

Status Refused(const std::filesystem::path& path, std::string_view why) {
  return {Code::kRefused, fmt::format("{}: {}", path.string(), why)};
}

Status CheckFile(const File& file, const std::filesystem::path& path) {
  struct stat found {};
  if (::fstat(file.fd(), &found) != 0) return SystemFailure("look at", path, errno);
  if (!S_ISREG(found.st_mode)) return Refused(path, "it is no regular file");
  if (found.st_uid != ::geteuid())
    return Refused(path, fmt::format("it belongs to user {}, and requests come from the same user only; this is user {}",
                                     found.st_uid, ::geteuid()));
  if (found.st_size != static_cast<off_t>(kPageBytes))
    return Refused(path, fmt::format("it has {} bytes, and a control page has {}", found.st_size, kPageBytes));
  return {};
}

}  // namespace

std::string_view ToText(Phase phase) {
  switch (phase) {
    case Phase::kRunning:
      return "running";
    case Phase::kHeld:
      return "held";
    case Phase::kArrived:
      return "arrived";
    case Phase::kPausing:
      return "pausing";
    case Phase::kPaused:
      return "paused";
    case Phase::kResuming:
      return "resuming";
    case Phase::kFailed:
      return "failed";
  }
  return "unknown";
}

Result<MappedPage> MappedPage::Create(const std::filesystem::path& directory, SessionId session, std::int64_t rank) {
  const auto path = directory / kPageName;
  ::unlink(path.c_str());
  Result<File> file = File::Open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW);
  if (!file) return file.status();
  if (const int error = ::posix_fallocate(file->fd(), 0, kPageBytes); error != 0) {
    ::unlink(path.c_str());
    return SystemFailure("make", path, error);
  }
  const Result<Page*> at = Map(*file, path);
  if (!at) return at.status();
  auto* const page = new (*at) Page;
  page->pid = ::getpid();
  page->start_ticks = StartTicks(page->pid);
  page->pid_namespace = PidNamespace();
  page->session = session.value;
  page->rank = rank;
  return MappedPage(*std::move(file), page);
}

Result<MappedPage> MappedPage::Open(const std::filesystem::path& directory) {
  const auto path = directory / kPageName;
  Result<File> file = File::Open(path, O_RDWR | O_NOFOLLOW);
  if (!file) return file.status();
  AMEM_TRY(CheckFile(*file, path));
  const Result<Page*> at = Map(*file, path);
  if (!at) return at.status();
  MappedPage mapped(*std::move(file), *at);
  if (mapped->magic != Page::kMagic) return Refused(path, "it is no control page");
  if (mapped->version != Page::kVersion)
    return Refused(path, fmt::format("the process has a control page of version {}, and this program knows version {}: use the "
                                     "program that came with the process's libamem_nccl.so",
                                     mapped->version, Page::kVersion));
  return mapped;
}

MappedPage::MappedPage(MappedPage&& other) noexcept
    : file_(std::move(other.file_)), page_(std::exchange(other.page_, nullptr)) {}

MappedPage& MappedPage::operator=(MappedPage&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(page_, other.page_);
  return *this;
}

MappedPage::~MappedPage() {
  if (page_ != nullptr) ::munmap(page_, kPageBytes);
}

bool MappedPage::LockedByAnother() const {
  struct flock lock = WholeFile(F_WRLCK);
  return ::fcntl(file_.fd(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

Status MappedPage::Lock() const {
  struct flock lock = WholeFile(F_WRLCK);
  if (::fcntl(file_.fd(), F_OFD_SETLK, &lock) == 0) return {};
  if (errno != EACCES && errno != EAGAIN) return SystemFailure("lock", kPageName, errno);
  return {Code::kRefused,
          fmt::format("another request is under way, by pid {}", page_->by_pid.load(std::memory_order_acquire))};
}

void PutText(char* into, std::size_t size, std::string_view text) {
  const std::size_t length = std::min(text.size(), size - 1);
  std::memcpy(into, text.data(), length);
  into[length] = '\0';
}

std::string GetText(const char* from, std::size_t size) { return {from, ::strnlen(from, size)}; }

}  // namespace amem::control
