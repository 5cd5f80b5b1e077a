// A stop between launches: each rank is ordered to launch as far as the others have, until all have launched as much and none
// launches more. What is decided is LaunchStop's; here are the connections.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <span>
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

void JobControl::GiveLaunches(const agreement::LaunchStop& stop, std::span<const std::size_t> to, bool parks) {
  order_.by_pid = ::getpid();
  for (std::size_t i = 0; i < to.size(); ++i) {
    order_.launches = stop.OrderOf(i);
    order_.launches.parks = parks;
    ranks_[to[i]].Give(order_);
  }
  order_.launches.targets.clear();  // of the last rank; a later order says only that launches are held
  order_.launches.seats.clear();
}

// Those that are paused already launch nothing, and say nothing of what they launched.
std::vector<std::size_t> JobControl::ThatAreToStop() const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < ranks_.size(); ++i)
    if (!Has(ranks_[i], Phase::kPaused)) found.push_back(i);
  return found;
}

Result<JobControl::LaunchReadings> JobControl::ReadLaunches() const {
  LaunchReadings now{.ranks = ThatAreToStop(), .of_ranks = {}, .all_hold = true, .all_came = true};
  for (const RankLink& rank : ranks_) {
    if (!rank->alive) return Status{Code::kPeerLost, rank.name() + " " + rank->lost + " before it paused; nothing was paused"};
    if (HasGivenUp(rank)) return LostContact(rank);
    const agreement::LaunchReading& says = rank->is.launches;
    if (Has(rank, Phase::kHeld) && !says.why_not.empty())
      return Status{Code::kRefused,
                    fmt::format("{} cannot be stopped between launches: {}; nothing was changed", rank.name(), says.why_not)};
    now.all_came = now.all_came && HasCome(rank);
  }
  for (const std::size_t i : now.ranks) {
    const agreement::LaunchReading& says = ranks_[i]->is.launches;
    now.all_hold = now.all_hold && (Has(ranks_[i], Phase::kHeld) || Has(ranks_[i], Phase::kArrived)) && says.version != 0;
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

Status JobControl::StopLaunches(const AskOptions& options, const agreement::LaunchOrder& closes, Deadline until,
                                const Progress& progress) {
  using Next = agreement::LaunchStop::Next;
  agreement::LaunchStop stop;
  Stillness stillness;
  ChangesReport report(progress, options.progress_every);
  std::chrono::milliseconds between = kFirstBetween;
  for (bool stand = false;;) {
    const auto allowed = options.may_pause ? options.may_pause() : Status();
    if (allowed && !allowed->ok()) return *allowed;
    AMEM_ASSIGN(const LaunchReadings now, ReadLaunches());
    const bool some_wait = AllAnswered() && SomeWaitForOthers();
    if (stand && now.all_came && allowed && !some_wait) return {};
    if (Passed(until)) return AreNotAtTargets(stop, options.deadline);
    if (some_wait) {  // those are let go, and the stop begins anew
      PostOnceMore(false, closes, between);
      stop = {};
      stillness = {};
      stand = false;
    }
    if (!stand && !some_wait && now.all_hold) {
      stillness.See(now.of_ranks);
      const std::uint32_t let_go = stop.let_go();
      const Next next = stop.Consider(now.of_ranks, stillness.IsStill());
      if (next == Next::kMissing) return {Code::kRefused, stop.missing() + WhoIsPaused() + "; nothing was changed"};
      if (stop.let_go() != let_go) stillness.LetGo();
      if (next == Next::kOrder || next == Next::kStopped) GiveLaunches(stop, now.ranks, options.parks);
      stand = next == Next::kStopped;
      if (next == Next::kOrder) continue;
    }
    report.IfDue(ranks_, [&](std::size_t i) {
      const auto at = std::ranges::find(now.ranks, i);
      return at == now.ranks.end()
                 ? std::string()
                 : stop.WhyNotAtTargets(static_cast<std::size_t>(at - now.ranks.begin()), ranks_[i]->is.launches);
    });
    Wait(std::min<std::chrono::milliseconds>(std::chrono::milliseconds(20), LeftUntil(until)));
  }
}

std::string JobControl::WhoIsPaused() const {
  const auto one = std::ranges::find_if(ranks_, [&](const RankLink& rank) { return Has(rank, Phase::kPaused); });
  return one == ranks_.end()
             ? ""
             : "; " + one->name() + " is paused already, and does not say what it launched: resume the job first";
}

Status JobControl::AreNotAtTargets(const agreement::LaunchStop& stop, std::chrono::milliseconds deadline) const {
  std::string all;
  const std::vector<std::size_t> to_stop = ThatAreToStop();
  std::vector<agreement::LaunchReading> readings;
  for (const std::size_t i : to_stop) readings.push_back(ranks_[i]->is.launches);
  const std::vector<std::string> incomplete = agreement::LaunchStop::Incomplete(readings);
  const std::string silent =
      "has not closed its launch gate" +
      (incomplete.empty() ? "" : fmt::format("; communicators with some ranks that have: {}", fmt::join(incomplete, ", ")));
  for (std::size_t i = 0; i < to_stop.size(); ++i) {
    const RankLink& rank = ranks_[to_stop[i]];
    const bool answers = Has(rank, Phase::kHeld) || HasCome(rank);
    const std::string why = answers ? stop.WhyNotAtTargets(i, rank->is.launches) : silent;
    if (why.empty()) continue;
    all += fmt::format("\n{} {}; it {}", rank.name(), why, rank.DoingInDetail());
  }
  if (all.empty()) all = "\nall had stopped after the deadline";
  return {Code::kTimeout, fmt::format("not all ranks stopped between launches within {}; nothing was paused, and {} run on{}",
                                      Seconds(deadline), to_stop.size() == ranks_.size() ? "all" : "those that ran", all)};
}

}  // namespace amem::control
