#include "replay/driver/host_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <span>
#include <sstream>
#include <string_view>
#include <thread>

#include "journal/base/clock.h"
#include "journal/base/file.h"
#include "journal/base/no_copies.h"
#include "journal/base/process_sight.h"
#include "journal/base/unique_fd.h"
#include "statemachine/event.h"

namespace amem {
namespace {

constexpr Bytes kLeft = Bytes{256} << 20;  // for everything else, because MemAvailable's own reserve is small

constexpr std::size_t kStatisticsMost = std::size_t{1} << 16;  // of a file of the kernel's

std::optional<Bytes> NumberIn(const std::filesystem::path& file) {
  std::istringstream in(ReadSmallFile(file));
  Bytes value = 0;
  if (!(in >> value)) return std::nullopt;  // missing, or "max"
  return value;
}

// Sums the numbers behind the words that begin lines; nullopt: none of the words does.
std::optional<Bytes> SumBehind(const std::filesystem::path& file, std::span<const std::string_view> words) {
  std::istringstream in(ReadSmallFile(file, kStatisticsMost));
  std::optional<Bytes> sum;
  std::string word;
  for (Bytes value = 0; in >> word; in.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    if (std::ranges::find(words, word) == words.end() || !(in >> value))
      in.clear();
    else
      sum = sum.value_or(0) + value;
  }
  return sum;
}

// What a version of control groups calls its files and values. Nothing of it is destroyed: other threads may ask after main.
struct Version {
  std::string_view mount;
  std::span<const std::string_view> limits;  // above memory.high a process is not killed, but hardly runs
  std::string_view usage;
  // Used memory that the system takes back before it kills anybody: file contents and kernel caches (unknown in version 1), as
  // MemAvailable counts.
  std::span<const std::string_view> reclaimable;
};
constexpr std::string_view kLimit[] = {"memory.limit_in_bytes"}, kFiles[] = {"total_active_file", "total_inactive_file"};
constexpr std::string_view kLimits[] = {"memory.max", "memory.high"};
constexpr std::string_view kCaches[] = {"active_file", "inactive_file", "slab_reclaimable"};
constexpr Version kFirst{"sys/fs/cgroup/memory", kLimit, "memory.usage_in_bytes", kFiles};
constexpr Version kSecond{"sys/fs/cgroup", kLimits, "memory.current", kCaches};

void ConsiderGroup(const std::string& group, const Version& version, std::optional<HostRoom>& least) {
  const auto used = NumberIn(fmt::format("{}/{}", group, version.usage));
  if (!used) return;
  const Bytes taken = *used - std::min(*used, SumBehind(group + "/memory.stat", version.reclaimable).value_or(0));
  for (const std::string_view name : version.limits) {
    const auto limit = NumberIn(fmt::format("{}/{}", group, name));
    if (!limit) continue;
    const Bytes left = *limit - std::min(*limit, taken);
    if (!least || left < least->bytes)
      least = HostRoom{left, fmt::format("the memory limit ({}) of the cgroup {}", name, group)};
  }
}

// The group, which begins with a slash, and its ancestors. In text: without memory for it std::filesystem::path of libstdc++ 12
// frees its parts twice.
void ConsiderGroups(const std::string& root, std::string group, const Version& version, std::optional<HostRoom>& least) {
  while (true) {
    const std::size_t end = group.find_last_not_of('/');
    group.resize(end == std::string::npos ? 0 : end + 1);
    ConsiderGroup(fmt::format("{}/{}{}", root, version.mount, group), version, least);
    if (group.empty()) return;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

}  // namespace

std::optional<HostRoom> HostMemoryAvailable(const std::filesystem::path& root, const std::string& process) {
  std::optional<HostRoom> least;
  constexpr std::array<std::string_view, 1> kAvailable{"MemAvailable:"};
  if (const auto kib = SumBehind(root / "proc/meminfo", kAvailable))
    least = HostRoom{*kib << 10, "what the host has available (MemAvailable)"};
  const std::string under = root == "/" ? "" : root.string();
  std::istringstream groups(ReadSmallFile(root / "proc" / process / "cgroup", kStatisticsMost));
  for (std::string line; std::getline(groups, line);) {
    const std::size_t names = line.find(':'), path = line.find(':', names + 1);
    if (names == std::string::npos || path == std::string::npos) continue;
    const std::string controllers = line.substr(names + 1, path - names - 1), own = line.substr(path + 1);
    if (controllers.empty()) ConsiderGroups(under, own, kSecond, least);
    if (("," + controllers + ",").find(",memory,") != std::string::npos) ConsiderGroups(under, own, kFirst, least);
  }
  return least;
}

// As in the file; all zero: free.
struct HostClaims::Place {
  std::int64_t pid = 0;
  std::uint64_t start_ticks = 0, pid_namespace = 0, since_boot_ns = 0;
  Bytes bytes = 0;

  [[nodiscard]] bool IsFree() const {
    return pid <= 0 || LifeOf({static_cast<pid_t>(pid), start_ticks, pid_namespace}).HasEnded();
  }
  // A process in another pid namespace cannot be looked at. Its claim ages, and it renews the claim with each piece.
  [[nodiscard]] bool InForce() const {
    constexpr std::uint64_t kUnseen = 60'000'000'000;
    if (const std::uint64_t here = PidNamespace(); here == 0 || pid_namespace == here) return !IsFree();
    const std::uint64_t now = MonotonicNs();
    return pid > 0 && since_boot_ns <= now && now - since_boot_ns < kUnseen;
  }
};

namespace {

constexpr std::size_t kPlaces = 4096;

// Waits only a moment, because the holder may be stopped.
class BriefLock : NoCopies {
 public:
  explicit BriefLock(int file) : file_(file) {
    for (int i = 0; i < 200 && file_ >= 0 && flock(file_, LOCK_EX | LOCK_NB) != 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~BriefLock() {
    if (file_ >= 0) flock(file_, LOCK_UN);
  }

 private:
  const int file_;
};

Status Fits(Bytes bytes, const std::optional<HostRoom>& room, Bytes claimed, Bytes others) {
  const Bytes taken = kLeft + claimed + others;
  if (!room || (room->bytes >= bytes && room->bytes - bytes >= taken)) return {};
  return {Code::kOutOfMemory,
          fmt::format("pin {} of host memory: {} are left by {}, of which this process is about to take {}, other "
                      "processes {}, and {} stay free; free some, or give the job more",
                      FormatBytes(bytes), FormatBytes(room->bytes), room->limited_by, FormatBytes(claimed), FormatBytes(others),
                      FormatBytes(kLeft))};
}

}  // namespace

// The file, used by one errand at a time, and what is known of it without waiting.
class HostClaims::ClaimsFile : NoCopies {
 public:
  explicit ClaimsFile(std::filesystem::path path) : path_(std::move(path)), self_(OwnProcess()) {}

  [[nodiscard]] bool IsNowhere() const { return path_.empty(); }
  [[nodiscard]] int fd() const { return file_.get(); }

  // Opens the file again if somebody has removed it, because others then see another file. Where there is none, nobody has
  // claimed anything; who has no descriptor left to read it does not know that.
  Status Open() {
    struct stat seen {};
    if (IsNowhere() || (file_ && fstat(file_.get(), &seen) == 0 && seen.st_nlink > 0)) return {};
    place_.reset();
    file_ = UniqueFd(open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!file_ && (errno == EMFILE || errno == ENFILE || errno == ENOMEM))
      return SystemFailure("pin host memory: read what other processes are about to take of it from", path_, errno);
    if (file_ && (fstat(file_.get(), &seen) != 0 || seen.st_uid != geteuid() || !S_ISREG(seen.st_mode))) file_ = UniqueFd();
    return {};
  }

  // What others claim. Who has no place takes the first that is free; those of other pid namespaces are left alone.
  Bytes ReadOthers() {
    Bytes sum = 0;
    Place place;
    for (std::size_t i = 0; file_ && i < kPlaces; ++i) {
      const ssize_t n = pread(file_.get(), &place, sizeof(place), static_cast<off_t>(i * sizeof(place)));
      if (n < 0) break;  // somebody's place, perhaps
      const bool there = n == sizeof(place);
      if (!place_ && (!there || place.IsFree())) place_ = i;
      if (!there) break;
      if (i != place_ && place.bytes > 0 && place.InForce()) sum += std::min(place.bytes, ~Bytes{0} - sum);
    }
    others = sum;
    return sum;
  }

  // Until the file says what is claimed by then: it may have changed while the file system stood still.
  void Write() const {
    if (!place_) return;
    Bytes written = 0;
    do {
      written = claimed;
      const Place mine{self_.pid, self_.start_ticks, self_.pid_namespace, MonotonicNs(), written};
      static_cast<void>(pwrite(file_.get(), &mine, sizeof(mine), static_cast<off_t>(*place_ * sizeof(mine))));
    } while (written != claimed);
  }

  void GiveUpPlace() {
    const Place nobody;
    if (place_) static_cast<void>(pwrite(file_.get(), &nobody, sizeof(nobody), static_cast<off_t>(*place_ * sizeof(nobody))));
    place_.reset();
  }

  std::atomic<Bytes> claimed{0};  // by this session
  std::atomic<Bytes> others{0};   // as read last

 private:
  const std::filesystem::path path_;
  const ProcessIdentity self_;  // read while there are descriptors
  UniqueFd file_;
  std::optional<std::size_t> place_;
};

HostClaims::HostClaims(std::filesystem::path file, Available available)
    : available_(std::move(available)), file_(std::make_shared<ClaimsFile>(std::move(file))) {}

HostClaims::~HostClaims() {
  if (fork_.InChild()) return;
  const MutexLock lock(mutex_);
  file_->claimed = 0;
  static_cast<void>(Ask([](ClaimsFile& file) {
    file.GiveUpPlace();
    return Status{};
  }));
}

std::optional<Status> HostClaims::Ask(std::function<Status(ClaimsFile&)> work) {
  if (file_->IsNowhere()) return work(*file_);
  // One that stands still has this long; one that has just been thawed ends at once.
  constexpr std::chrono::milliseconds kPatience{500}, kForTheLast{20};
  if (asked_ && !asked_->Wait(In(kForTheLast))) return std::nullopt;
  asked_.emplace([file = file_, work = std::move(work)] { return work(*file); });
  auto answer = asked_->Wait(In(kPatience));
  if (answer) asked_.reset();
  return answer;
}

Status HostClaims::Claim(Bytes bytes) {
  if (fork_.InChild() || bytes == 0) return {};
  const MutexLock lock(mutex_);
  const auto room = available_();
  struct Decision {
    std::mutex mutex;
    std::optional<Status> made;
  };
  // The errand decides, or this call once it has waited for long enough; the other one finds the decision made.
  const auto decide = [decision = std::make_shared<Decision>(), bytes, room](ClaimsFile& file) {
    const std::lock_guard deciding(decision->mutex);
    if (!decision->made) {
      decision->made = Fits(bytes, room, file.claimed, file.others);
      if (decision->made->ok()) file.claimed += bytes;
    }
    return *decision->made;
  };
  const auto answer = Ask([decide](ClaimsFile& file) -> Status {
    AMEM_TRY(file.Open());
    const BriefLock alone(file.fd());
    file.ReadOthers();
    Status fits = decide(file);
    file.Write();
    return fits;
  });
  return answer ? *answer : decide(*file_);
}

void HostClaims::EndClaim(Bytes bytes) {
  if (fork_.InChild() || bytes == 0) return;
  const MutexLock lock(mutex_);
  file_->claimed -= std::min(file_->claimed.load(), bytes);
  static_cast<void>(Ask([](ClaimsFile& file) {
    file.Write();
    return Status{};
  }));
}

}  // namespace amem
