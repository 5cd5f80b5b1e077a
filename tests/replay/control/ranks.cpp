#include "tests/replay/control/ranks.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <random>
#include <thread>

#include "journal/base/clock.h"

namespace amem::control::test {
namespace {

using std::chrono::milliseconds;
using SteadyClock = std::chrono::steady_clock;

void Nap(std::chrono::microseconds time) { std::this_thread::sleep_for(time); }

class Numbers final : public Actions {
 public:
  Numbers(Shared& shared, int rank, int count, const std::filesystem::path& sockets)
      : shared_(shared), words_(shared.ranks[static_cast<std::size_t>(rank)]), count_(count), sockets_(sockets) {}

  std::uint64_t step = 0;  // at which this rank is

  Status PauseTags() override {
    if (words_.tag_pauses != words_.tag_resumes) return {};  // they are paused
    return Local(kPauseTagsFails, words_.tag_pauses);
  }
  Status ResumeTags() override {
    if (words_.tag_resumes == words_.tag_pauses) return {};
    return Local(kResumeTagsFails, words_.tag_resumes);
  }
  Status PauseNccl() override {
    if (NcclIsAway()) return {};
    words_.paused_at = step;
    return Together(kPauseNcclFails, words_.pauses);
  }
  bool NcclIsAway() override { return words_.pauses != words_.resumes; }
  Status ResumeNccl() override { return Together(kResumeNcclFails, words_.resumes); }
  Bytes Held() override { return (words_.pauses - words_.resumes) == 0 ? 1000 : 10; }
  void Note(EventBody event) override {
    if (std::holds_alternative<RequestSeen>(event)) ++words_.seen;
    if (std::holds_alternative<SafepointReached>(event)) ++words_.reached;
    if (const auto* ended = std::get_if<RequestEnded>(&event)) ++(ended->code == Code::kOk ? words_.ended : words_.failed);
  }
  agreement::LaunchReading HoldLaunches(const agreement::LaunchOrder& order) override {
    const std::uint32_t thread = words_.launches_by;
    if (thread == 0) return {.why_not = kNoLaunches};
    constexpr std::uint32_t kNobodys = 1;  // as a container may number the main thread
    if (thread == kStopsBetween) return {.version = order.version};
    return {.version = order.version, .inside = "ncclAllReduce", .threads = {kNobodys, thread}};
  }
  void LetLaunchesGo() override {}
  Status AwaitLaunches() override { return {}; }
  std::string WhyLaunchesCannotBeHeld() override { return words_.launches_by == 0 ? kNoLaunches : ""; }
  Result<RankStatus> Ask(SessionId rank) override { return StatusOf(sockets_, rank); }
  // Fails on all ranks, as NCCL's pause does, when one of them fails or does not come.
  Status Together(Fails fails, std::atomic<std::uint64_t>& counter) {
    // No rank gets past a call before this one has come to it, so its number is known before, and so is a failure.
    const auto n = static_cast<std::uint64_t>(count_);
    const std::uint64_t call = shared_.collective.load() / n + 1;
    if (fails != kNothingFails && words_.fails.load() == fails) {
      words_.fails = kNothingFails;
      shared_.failed_call = call;
    }
    ++shared_.collective;
    const auto until = SteadyClock::now() + milliseconds(10'000);
    for (std::uint64_t come = shared_.collective.load(); come < call * n; come = shared_.collective.load()) {
      Nap(std::chrono::microseconds(50));
      if (SteadyClock::now() < until) continue;
      // Who gives up has not come; the next try counts anew.
      if (shared_.collective.compare_exchange_strong(come, come - 1)) return {Code::kTimeout, "another rank did not come"};
    }
    if (shared_.failed_call.load() == call) return {Code::kOutOfMemory, "the device is full"};
    ++counter;
    return {};
  }

 private:
  Status Local(Fails fails, std::atomic<std::uint64_t>& counter) {
    if (words_.fails.load() == fails) {
      words_.fails = kNothingFails;
      return {Code::kOutOfMemory, "no memory for the tag"};
    }
    ++counter;
    return {};
  }
  Shared& shared_;
  RankWords& words_;
  const int count_;
  const ToolSockets sockets_;
};

}  // namespace

Ranks::Ranks(int count, bool lockstep, std::uint32_t most_us) {
  std::string name = std::filesystem::temp_directory_path() / "amem-control-XXXXXX";
  root_ = ::mkdtemp(name.data());
  shared_ = new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared;
  for (int rank = 0; rank < count; ++rank) {
    places_.push_back({NewSession(), root_ / std::to_string(rank), rank});
    std::filesystem::create_directory(places_.back().directory);
  }
  static_cast<void>(OpenSocketDirectory(sockets()));
  pids_.resize(static_cast<std::size_t>(count));
  for (int rank = 0; rank < count; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      BeRank(rank, lockstep, most_us);
      ::_exit(0);
    }
    pids_[static_cast<std::size_t>(rank)] = child;
  }
  Becomes([&] {
    for (const RankPlace& place : places_)
      if (!std::filesystem::exists(place.directory / "ready")) return false;
    return true;
  });
}

void Ranks::BeRank(int rank, bool lockstep, std::uint32_t most_us) {
  const RankPlace& place = places_[static_cast<std::size_t>(rank)];
  RankWords& words = (*this)[rank];
  Numbers actions(*shared_, rank, count(), sockets());
  RankControl control;
  control.Begin(place.session, actions, 0);
  Alone alone;
  UnixPeersOptions options{.socket_directory = sockets(), .deadlines = {}, .expected_uid = {}};
  options.requests = &control;
  const auto peers =
      UnixPeers::Start({.session = place.session, .host = "here", .pid = ::getpid(), .rank = rank}, options, alone);
  if (!peers.ok()) ::_exit(1);
  std::filesystem::create_directory(place.directory / "ready");
  std::mt19937 random(static_cast<unsigned>(::getpid()));
  std::uint64_t step = 0;
  while (!shared_->stop) {
    if (words.forks.exchange(false) && ::fork() == 0) {
      while (!shared_->stop) Nap(milliseconds(1));
      ::_exit(0);
    }
    if (most_us > 0) Nap(std::chrono::microseconds(random() % most_us));
    if (words.own_pause) {
      control.BeginOwnPause();
      control.OwnPauseEnded(actions.Together(kNothingFails, words.own_pauses).ok());
      while (words.own_pause && !shared_->stop) {
        Nap(milliseconds(1));
        if (!words.safepoints_inside) continue;
        bool inside_goes_on = !control.Came(++step);
        while (!inside_goes_on && !shared_->stop) inside_goes_on = control.Serve(step, true);
        words.steps = step;
      }
      while (!control.MayResume(true) && !shared_->stop) {
      }
      if (!shared_->stop) control.OwnResumeEnded(actions.Together(kNothingFails, words.own_resumes).ok());
    }
    if (words.away || words.makes_no_safepoints) {
      Nap(milliseconds(1));
      continue;
    }
    actions.step = ++step;
    control.CameAt(MonotonicNs());
    bool goes_on = !control.Came(step);
    while (!goes_on && !shared_->stop) goes_on = control.Serve(step, true);
    words.steps = step;
    for (int other = 0; lockstep && other < count() && !shared_->stop;)
      (*this)[other].steps.load() < step ? Nap(std::chrono::microseconds(20)) : static_cast<void>(++other);
  }
}

Ranks::~Ranks() {
  shared_->stop = true;
  for (const pid_t pid : pids_) {
    if (pid == 0) continue;
    const auto until = SteadyClock::now() + milliseconds(2000);
    while (::waitpid(pid, nullptr, WNOHANG) == 0) {
      if (SteadyClock::now() > until) ::kill(pid, SIGKILL);
      Nap(milliseconds(1));
    }
  }
  ::munmap(shared_, sizeof(Shared));
  std::error_code ignored;
  std::filesystem::remove_all(root_, ignored);
}

void Ranks::Kill(int rank) {
  pid_t& pid = pids_[static_cast<std::size_t>(rank)];
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  pid = 0;
}

bool Ranks::Becomes(const std::function<bool()>& condition) {
  const auto until = SteadyClock::now() + milliseconds(20'000);
  while (!condition()) {
    if (SteadyClock::now() > until) return false;
    Nap(milliseconds(1));
  }
  return true;
}

bool Ranks::AllGoOn() {
  std::vector<std::uint64_t> before;
  for (int rank = 0; rank < count(); ++rank) before.push_back((*this)[rank].steps);
  return Becomes([&] {
    for (int rank = 0; rank < count(); ++rank)
      if (pid(rank) != 0 && (*this)[rank].steps < before[static_cast<std::size_t>(rank)] + 3) return false;
    return true;
  });
}

bool Ranks::AllArePaused() {
  std::vector<std::uint64_t> before;
  for (int rank = 0; rank < count(); ++rank) before.push_back((*this)[rank].steps);
  Nap(milliseconds(20));
  for (int rank = 0; rank < count(); ++rank) {
    RankWords& words = (*this)[rank];
    if (words.steps != before[static_cast<std::size_t>(rank)] || words.pauses != words.resumes + 1) return false;
  }
  return true;
}

}  // namespace amem::control::test
