// A stop between launches: each rank is told how far the others have launched, until all have launched as much and none
// launches more. What is decided is LaunchStop's; here are the connections.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "replay/control/job_control.h"

namespace amem::control {

namespace {

constexpr std::chrono::seconds kTellOfStop{1};
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

Status JobControl::StopLaunches(const AskOptions& options, Deadline until, const Progress& progress) {
  agreement::LaunchStop stop;
  std::vector<agreement::LaunchReading> before;
  std::chrono::milliseconds patience = kStill;
  Deadline still_at = In(patience), tell = In(kTellOfStop);
  std::map<SessionId, std::string> told;  // the same is not told again
  for (bool stand = false;;) {
    const auto allowed = options.may_pause ? options.may_pause() : Status();
    if (allowed && !allowed->ok()) return *allowed;
    std::vector<agreement::LaunchReading> readings;
    bool all_hold = true, all_came = true;
    for (const RankLink& rank : ranks_) {
      if (!rank->alive) return {Code::kPeerLost, rank.name() + " " + rank->lost + " before it paused; nothing was paused"};
      if (HasGivenUp(rank)) return {Code::kPeerLost, rank.name() + " has not heard of this program for too long, and runs on"};
      const agreement::LaunchReading& says = rank->is.launches;
      if (Has(rank, Phase::kHeld) && !says.why_not.empty())
        return {Code::kRefused,
                fmt::format("{} cannot be stopped between launches: {}; nothing was changed", rank.name(), says.why_not)};
      all_came = all_came && HasCome(rank);
      all_hold = all_hold && (Has(rank, Phase::kHeld) || Has(rank, Phase::kArrived)) && says.version != 0;
      readings.push_back(says);
    }
    AMEM_TRY(FirstFailure(Ask::kPause));
    if (stand && all_came && allowed) return {};
    if (Passed(until)) return AreNotAtTargets(stop, options.deadline);
    if (!stand && all_hold) {
      if (readings != before) {
        before = readings;
        still_at = In(patience);
      }
      using Next = agreement::LaunchStop::Next;
      const std::uint32_t let_go = stop.let_go();
      const Next next = stop.Consider(readings, Passed(still_at));
      if (next == Next::kMissing) return {Code::kRefused, stop.missing() + "; nothing was changed"};
      if (stop.let_go() != let_go) {
        patience = std::min(2 * patience, kMostStill);
        still_at = In(patience);
      }
      if (next == Next::kOrder || next == Next::kStand) GiveLaunches(stop, options.parks);
      stand = next == Next::kStand;
      if (next == Next::kOrder) continue;
    }
    if (progress && Passed(tell)) {
      tell = In(kTellOfStop);
      for (std::size_t i = 0; i < ranks_.size(); ++i) {
        const std::string why = stop.WhyNotAtTargets(i, ranks_[i]->is.launches);
        std::string& last = told[ranks_[i]->process.session];
        if (!why.empty() && why != last) progress(ranks_[i].name() + " " + why);
        last = why;
      }
    }
    Wait(std::min<std::chrono::milliseconds>(std::chrono::milliseconds(20), LeftUntil(until)));
  }
}

Status JobControl::AreNotAtTargets(const agreement::LaunchStop& stop, std::chrono::milliseconds deadline) const {
  std::string all;
  std::vector<agreement::LaunchReading> readings;
  for (const RankLink& rank : ranks_) readings.push_back(rank->is.launches);
  const std::vector<std::string> incomplete = agreement::LaunchStop::Incomplete(readings);
  const std::string silent = "has not held its launches" +
                             (incomplete.empty() ? "" : fmt::format("; those that have are {}", fmt::join(incomplete, ", ")));
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const RankLink& rank = ranks_[i];
    const bool answers = Has(rank, Phase::kHeld) || HasCome(rank);
    const std::string why = answers ? stop.WhyNotAtTargets(i, rank->is.launches) : silent;
    if (why.empty()) continue;
    all += fmt::format("\n{} {}; it {}", rank.name(), why, rank.DoingInDetail());
  }
  if (all.empty()) all = "\nall stood in the end";
  return {Code::kTimeout,
          fmt::format("not all ranks came to stand between launches within {}, and nothing was paused; all run on{}",
                      Seconds(deadline), all)};
}

}  // namespace amem::control
