// A stop between launches: each rank is ordered to launch as far as the others have, until all have launched as much and none
// launches more. What is decided is LaunchStop's; here are the connections.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "replay/control/changes_report.h"
#include "replay/control/job_control.h"

namespace amem::control {

namespace {

// For as long nothing changes before a rank that is held is let go once more; longer each time, because a rank that computes
// changes nothing either.
constexpr std::chrono::milliseconds kStill{100}, kMostStill{500};

std::string Seconds(std::chrono::milliseconds time) { return fmt::format("{:.1f} s", static_cast<double>(time.count()) / 1e3); }

}  // namespace

Result<bool> JobControl::StopsBetweenLaunches(const AskOptions& options) const {
  if (options.where != Where::kBetweenLaunches) return false;  // parking, too, is there
  std::string why_not;
  for (const RankLink& rank : ranks_) {
    const RankStatus& is = rank->is;
    const bool stands = is.phase == Phase::kPaused || is.own_pause == OwnPause::kPaused;
    if (!is.launches.why_not.empty() && !stands) why_not += fmt::format("\n{}: {}", rank.name(), is.launches.why_not);
  }
  const char* const excludes = options.all_tags && !options.tags_at_safepoint_only ? "with the program's tags"
                               : options.at_step                                   ? "at a step that was chosen"
                                                                                   : nullptr;
  if (excludes != nullptr)
    return Status{Code::kRefused, fmt::format("a job that is stopped between launches cannot be paused {}: its program runs on "
                                              "until it launches",
                                              excludes)};
  if (!why_not.empty())
    return Status{Code::kRefused, "the job cannot be stopped between launches, and nothing was changed" + why_not};
  return true;
}

void JobControl::GiveLaunches(const agreement::LaunchStop& stop, bool parks) {
  order_.by_pid = ::getpid();
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    order_.launches = stop.OrderOf(i);
    order_.launches.parks = parks;
    ranks_[i].Give(order_);
  }
  order_.launches.targets.clear();  // of the last rank; a later order says only that launches are held
  order_.launches.seats.clear();
}

Result<JobControl::LaunchReadings> JobControl::ReadLaunches() const {
  LaunchReadings now{.of_ranks = {}, .all_hold = true, .all_came = true};
  for (const RankLink& rank : ranks_) {
    if (!rank->alive) return Status{Code::kPeerLost, rank.name() + " " + rank->lost + " before it paused; nothing was paused"};
    if (HasGivenUp(rank)) return LostContact(rank);
    const agreement::LaunchReading& says = rank->is.launches;
    if (Has(rank, Phase::kHeld) && !says.why_not.empty())
      return Status{Code::kRefused,
                    fmt::format("{} cannot be stopped between launches: {}; nothing was changed", rank.name(), says.why_not)};
    now.all_came = now.all_came && HasCome(rank);
    now.all_hold = now.all_hold && (Has(rank, Phase::kHeld) || Has(rank, Phase::kArrived)) && says.version != 0;
    now.of_ranks.push_back(says);
  }
  AMEM_TRY(FirstFailure(Ask::kPause));
  return now;
}

namespace {

// How long nothing has changed. A rank that is let go once more is waited for longer each time.
class Stillness {
 public:
  void See(const std::vector<agreement::LaunchReading>& readings) {
    if (readings == before_) return;
    before_ = readings;
    at_ = In(patience_);
  }
  void LetGo() {
    patience_ = std::min(2 * patience_, kMostStill);
    at_ = In(patience_);
  }
  [[nodiscard]] bool IsStill() const { return Passed(at_); }

 private:
  std::vector<agreement::LaunchReading> before_;
  std::chrono::milliseconds patience_ = kStill;
  Deadline at_ = In(patience_);
};

}  // namespace

Status JobControl::StopLaunches(const AskOptions& options, Deadline until, const Progress& progress) {
  using Next = agreement::LaunchStop::Next;
  agreement::LaunchStop stop;
  Stillness stillness;
  ChangesReport report(progress, options.progress_every);
  for (bool stand = false;;) {
    const auto allowed = options.may_pause ? options.may_pause() : Status();
    if (allowed && !allowed->ok()) return *allowed;
    AMEM_ASSIGN(const LaunchReadings now, ReadLaunches());
    if (stand && now.all_came && allowed) return {};
    if (Passed(until)) return AreNotAtTargets(stop, options.deadline);
    if (!stand && now.all_hold) {
      stillness.See(now.of_ranks);
      const std::uint32_t let_go = stop.let_go();
      const Next next = stop.Consider(now.of_ranks, stillness.IsStill());
      if (next == Next::kMissing) return {Code::kRefused, stop.missing() + "; nothing was changed"};
      if (stop.let_go() != let_go) stillness.LetGo();
      if (next == Next::kOrder || next == Next::kStopped) GiveLaunches(stop, options.parks);
      stand = next == Next::kStopped;
      if (next == Next::kOrder) continue;
    }
    report.IfDue(ranks_, [&](std::size_t i) { return stop.WhyNotAtTargets(i, ranks_[i]->is.launches); });
    Wait(std::min<std::chrono::milliseconds>(std::chrono::milliseconds(20), LeftUntil(until)));
  }
}

Status JobControl::AreNotAtTargets(const agreement::LaunchStop& stop, std::chrono::milliseconds deadline) const {
  std::string all;
  std::vector<agreement::LaunchReading> readings;
  for (const RankLink& rank : ranks_) readings.push_back(rank->is.launches);
  const std::vector<std::string> incomplete = agreement::LaunchStop::Incomplete(readings);
  const std::string silent =
      "has not closed its launch gate" +
      (incomplete.empty() ? "" : fmt::format("; communicators with some ranks that have: {}", fmt::join(incomplete, ", ")));
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const RankLink& rank = ranks_[i];
    const bool answers = Has(rank, Phase::kHeld) || HasCome(rank);
    const std::string why = answers ? stop.WhyNotAtTargets(i, rank->is.launches) : silent;
    if (why.empty()) continue;
    all += fmt::format("\n{} {}; it {}", rank.name(), why, rank.DoingInDetail());
  }
  if (all.empty()) all = "\nall had stopped after the deadline";
  return {Code::kTimeout, fmt::format("not all ranks stopped between launches within {}; nothing was paused, and all run on{}",
                                      Seconds(deadline), all)};
}

}  // namespace amem::control
