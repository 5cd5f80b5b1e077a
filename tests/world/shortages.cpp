#include "tests/world/shortages.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "journal/base/no_memory.h"
#include "tests/world/findings.h"

namespace amem::world {
namespace {

using Clock = std::chrono::steady_clock;

#if defined(AMEM_SANITIZED)  // a sanitizer ends its process when it gets no memory
constexpr std::uint64_t kFirstKind = 1;
#else
constexpr std::uint64_t kFirstKind = 0;
#endif
constexpr std::uint64_t kMost = 6;  // in a world, which must come to an end

std::uint64_t AddressSpace(pid_t pid) {
  std::uint64_t pages = 0;
  std::ifstream(fmt::format("/proc/{}/statm", pid)) >> pages;
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

bool NamesAShortage(Code code, std::string_view failure) {
  static constexpr std::array kErrors = {EMFILE, ENFILE, ENOMEM, EAGAIN, ENOSPC};
  return code == Code::kNoDescriptors || code == Code::kOutOfMemory || failure.find(NoMemory().message()) != failure.npos ||
         std::ranges::any_of(kErrors, [&](int error) { return failure.find(::strerror(error)) != std::string_view::npos; });
}

Shortages::Shortages(const Settings& settings, std::shared_ptr<Page> page, std::filesystem::path journals)
    : settings_(settings), page_(std::move(page)), journals_(std::move(journals)), random_(settings.seed * 50'021) {
  next_ = settings_.shortages ? Clock::now() + Pick(50, 300) : Clock::time_point::max();
  if (!settings_.shortages) return;
  std::filesystem::create_directories(journals_);
  std::filesystem::permissions(journals_, std::filesystem::perms::owner_all);
  // The mount belongs to this process and its children.
  disk_is_its_own_ = ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                     ::mount("tmpfs", journals_.c_str(), "tmpfs", 0, "mode=0700,size=256m") == 0;
}

Shortages::~Shortages() {
  End();
  if (disk_is_its_own_) ::umount2(journals_.c_str(), MNT_DETACH);
}

std::chrono::milliseconds Shortages::Pick(int from_ms, int to_ms) {
  return std::chrono::milliseconds(from_ms + static_cast<int>(random_() % static_cast<std::uint64_t>(to_ms - from_ms)));
}

void Shortages::Advance(const std::vector<pid_t>& ranks) {
  if (Clock::now() < next_) return;
  const bool ends = page_->short_of_something;
  if (ends) End();
  if (page_->stage != kRunning || page_->found || page_->shortages >= kMost) {
    next_ = Clock::time_point::max();
    return;
  }
  if (!ends) Begin(ranks);
  next_ = Clock::now() + (ends ? Pick(50, 500) : Pick(5, 300));
}

void Shortages::Begin(const std::vector<pid_t>& ranks) {
  const std::size_t rank = random_() % ranks.size();
  const pid_t pid = ranks[rank];
  const auto kind = static_cast<Kind>(kFirstKind + random_() % (3 - kFirstKind));
  if (pid <= 0 || !page_->begun[rank]) return;  // what the world itself needs to begin is no test
  // Before it begins, so that nobody meets a shortage of which the page does not know.
  ++page_->shortages;
  page_->short_of_something = true;
  bool begun = false;
  switch (kind) {
    case Kind::kAddressSpace:
      begun = Lower(pid, RLIMIT_AS, AddressSpace(pid) + ((32 + random_() % 64) << 20));
      break;
    case Kind::kThreads:
      begun = Lower(pid, RLIMIT_NPROC, 0);
      break;  // of no effect for root
    case Kind::kDisk:
      begun = FillDisk();
      break;
  }
  static constexpr std::array kNames = {"address space", "threads", "disk"};
  if (begun) return Trace(fmt::format("rank {} is short of {}", rank, kNames.at(static_cast<std::size_t>(kind))));
  page_->short_of_something = false;
}

bool Shortages::Lower(pid_t pid, __rlimit_resource resource, rlim_t to) {
  rlimit before{};
  if (::prlimit(pid, resource, nullptr, &before) != 0) return false;
  const rlimit now{std::min(to, before.rlim_max), before.rlim_max};
  if (::prlimit(pid, resource, &now, nullptr) != 0) return false;
  lowered_ = Limit{pid, resource, before};
  return true;
}

bool Shortages::FillDisk() {
  struct statvfs room {};
  if (!disk_is_its_own_ || ::statvfs(journals_.c_str(), &room) != 0) return false;
  const int ballast = ::open((journals_ / ".ballast").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (ballast < 0) return false;
  const auto bytes = static_cast<off_t>(room.f_bavail * room.f_frsize);
  const bool filled = bytes > 0 && ::posix_fallocate(ballast, 0, bytes) == 0;
  ::close(ballast);
  return filled;
}

void Shortages::End() {
  if (!page_->short_of_something) return;
  if (lowered_) ::prlimit(lowered_->pid, lowered_->resource, &lowered_->before, nullptr);
  lowered_.reset();
  if (disk_is_its_own_) ::unlink((journals_ / ".ballast").c_str());
  page_->short_of_something = false;  // after it: who reads that there is none has all that it needs
  Trace("the shortage ends");
}

}  // namespace amem::world
