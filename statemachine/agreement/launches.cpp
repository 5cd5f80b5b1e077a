#include "statemachine/agreement/launches.h"

#include <algorithm>
#include <set>

namespace amem::agreement {
namespace {

constexpr std::uint64_t Mixed(std::uint64_t value) {
  value = (value ^ (value >> 32U)) * 0x9e3779b97f4a7c15U;
  return value ^ (value >> 29U);
}

std::string Hex(std::uint64_t value) {
  std::string digits;
  do digits.insert(digits.begin(), "0123456789abcdef"[value % 16]);
  while ((value /= 16) != 0);
  return "0x" + digits;
}

std::string NameOf(const ClockReading& of) {
  std::string name = "communicator " + Hex(of.communicator) + " (" + std::to_string(of.ranks) + " ranks)";
  if (of.from >= 0) name += ", from its rank " + std::to_string(of.from) + " to " + std::to_string(of.to);
  return name;
}

// A process inside a call of NCCL's is behind until it returns, on a clock of its own.
ClockId CallOf(std::size_t process) { return ClockId{Mixed(process + 1)}; }

}  // namespace

ClockId ClockOf(std::uint64_t communicator) { return ClockId{Mixed(communicator) | 1U}; }
ClockId ClockOfPair(std::uint64_t communicator, std::int32_t from, std::int32_t to) {
  const auto pair = (static_cast<std::uint64_t>(static_cast<std::uint32_t>(from)) << 32U) | static_cast<std::uint32_t>(to);
  return ClockId{Mixed(Mixed(communicator) * 0xd1342543de82ef95U + Mixed(pair + 1)) | 1U};
}

ClockId ClockOf(const ClockReading& reading) {
  return reading.from < 0 ? ClockOf(reading.communicator) : ClockOfPair(reading.communicator, reading.from, reading.to);
}

LaunchStop::Seen LaunchStop::See(std::span<const LaunchReading> readings) const {
  Seen seen;
  std::map<Place, std::size_t> at;
  std::map<std::pair<std::uint64_t, std::int32_t>, std::size_t> ranks;  // of each communicator; where it is
  for (std::size_t process = 0; process < readings.size(); ++process) {
    for (const LaunchSeat& seat : readings[process].seats) {
      at[{process, seat.device}] = seen.places.size();
      seen.places.emplace_back(process, seat.device);
      seen.launchers.push_back({.launched = {}, .held = seat.held, .let_go = seat.let_go, .ended = false});
    }
    for (const ClockReading& one : readings[process].clocks) {
      const auto seat = at.find({process, one.device});
      if (!one.ended && seat != at.end()) ranks[{one.communicator, one.rank}] = seat->second;
    }
  }
  for (std::size_t process = 0; process < readings.size(); ++process) {
    for (const ClockReading& one : readings[process].clocks) {
      const auto seat = at.find({process, one.device});
      if (!one.ended && seat == at.end()) continue;
      // Who has let go of a communicator launches no more on it, whatever the others do.
      std::uint64_t& launched = one.ended ? seen.ended[ClockOf(one)] : seen.launchers[seat->second].launched[ClockOf(one)];
      launched = std::max(launched, one.launched);
      // The other side of a pair is a member, too, also where it has launched nothing to it yet.
      for (const std::int32_t side : {one.from, one.to})
        if (const auto other = ranks.find({one.communicator, side}); side >= 0 && other != ranks.end())
          seen.launchers[other->second].launched.try_emplace(ClockOf(one), 0);
    }
  }
  return seen;
}

namespace {

struct Members {
  std::set<std::int32_t> ranks;
  bool lives = false;
  ClockReading one;

  [[nodiscard]] bool AreAll() const { return !lives || static_cast<std::int32_t>(ranks.size()) >= one.ranks; }
};

std::map<std::uint64_t, Members> MembersIn(std::span<const LaunchReading> readings) {
  std::map<std::uint64_t, Members> communicators;
  for (const LaunchReading& reading : readings) {
    for (const ClockReading& one : reading.clocks) {
      if (one.from >= 0) continue;
      Members& members = communicators[one.communicator];
      members.ranks.insert(one.rank);
      members.lives = members.lives || !one.ended;
      members.one = one;
    }
  }
  return communicators;
}

}  // namespace

bool LaunchStop::SomeAreMissing(std::span<const LaunchReading> readings) {
  for (const auto& [communicator, members] : MembersIn(readings)) {
    if (members.AreAll()) continue;
    missing_ =
        NameOf(members.one) + ": only " + std::to_string(members.ranks.size()) + " of them are asked, or known by their rank";
    return true;
  }
  return false;
}

std::vector<std::string> LaunchStop::Incomplete(std::span<const LaunchReading> readings) {
  constexpr std::size_t kMost = 3;
  std::vector<std::string> names;
  for (const auto& [communicator, members] : MembersIn(readings))
    if (!members.AreAll() && names.size() < kMost)
      names.push_back(std::to_string(members.ranks.size()) + " of " + NameOf(members.one));
  return names;
}

LaunchStop::Next LaunchStop::LetGo(std::size_t seat, const Seen& seen) {
  allowed_[seen.places[seat]] = seen.launchers[seat].let_go + 1;
  ++let_go_;
  ++version_;
  return Next::kOrder;
}

// A rank may become a member of a clock whose target the others have already. True: the ranks need another order.
bool LaunchStop::RaiseTargets(const Seen& seen) {
  std::map<Place, std::vector<ClockId>> clocks;
  for (std::size_t i = 0; i < seen.places.size(); ++i)
    for (const auto& [clock, count] : seen.launchers[i].launched) clocks[seen.places[i]].push_back(clock);
  Counts targets = targets_;
  for (const auto& [clock, count] : TargetsOf(seen.launchers)) {
    const auto ended = seen.ended.find(clock);
    targets[clock] = std::max({targets[clock], count, ended == seen.ended.end() ? 0 : ended->second});
  }
  if (targets == targets_ && clocks == clocks_) return false;
  targets_ = std::move(targets);
  clocks_ = std::move(clocks);
  return true;
}

// One that was let go once more, and has not launched.
bool LaunchStop::AwaitsLaunch(const Seen& seen) const {
  for (std::size_t i = 0; i < seen.places.size(); ++i) {
    const auto allowed = allowed_.find(seen.places[i]);
    if (allowed != allowed_.end() && allowed->second > seen.launchers[i].let_go) return true;
  }
  return false;
}

// Nobody is behind any more.
LaunchStop::Next LaunchStop::Stop(std::span<const LaunchReading> readings, const Seen& seen, bool awaits_launch) {
  if (awaits_launch) {  // it need not any more
    for (std::size_t i = 0; i < seen.places.size(); ++i) allowed_[seen.places[i]] = seen.launchers[i].let_go;
    ++version_;
    return Next::kOrder;
  }
  if (SomeAreMissing(readings)) return Next::kMissing;
  stands_ = true;
  ++version_;
  return Next::kStopped;
}

LaunchStop::Next LaunchStop::Consider(std::span<const LaunchReading> readings, bool still) {
  if (std::ranges::any_of(readings, [](const LaunchReading& one) { return one.version == 0; })) return Next::kWait;
  Seen seen = See(readings);
  if (RaiseTargets(seen)) {
    ++version_;
    return Next::kOrder;
  }
  if (std::ranges::any_of(readings, [&](const LaunchReading& one) { return one.version != version_; })) return Next::kWait;
  const bool awaits_launch = AwaitsLaunch(seen);
  Counts targets = targets_;
  for (std::size_t process = 0; process < readings.size(); ++process) {
    if (readings[process].inside.empty()) continue;
    seen.launchers.push_back({.launched = {{CallOf(process), 0}}, .held = false, .let_go = 0, .ended = false});
    targets[CallOf(process)] = 1;
  }
  if (Behind(seen.launchers, targets).empty()) return Stop(readings, seen, awaits_launch);
  if (awaits_launch) return Next::kWait;
  for (std::size_t i = 0; i < seen.places.size(); ++i)
    if (MayLaunch(seen.launchers, i, targets, still) == Launch::kOnceMore) return LetGo(i, seen);
  return Next::kWait;
}

LaunchOrder LaunchStop::OrderOf(std::size_t process) const {
  LaunchOrder order{.version = version_, .stands = stands_};
  for (const auto& [place, clocks] : clocks_) {
    if (place.first != process) continue;
    for (const ClockId clock : clocks) {
      const auto target = targets_.find(clock);
      if (target != targets_.end()) order.targets.push_back({place.second, clock.value, target->second});
    }
  }
  for (const auto& [place, let_go] : allowed_)
    if (place.first == process) order.seats.push_back({.device = place.second, .held = false, .let_go = let_go});
  return order;
}

std::string LaunchStop::WhyNotAtTargets(std::size_t process, const LaunchReading& reading) const {
  if (!reading.inside.empty()) return "is inside " + reading.inside;
  for (const ClockReading& one : reading.clocks) {
    const auto target = targets_.find(ClockOf(one));
    if (one.ended || target == targets_.end() || one.launched >= target->second) continue;
    return "has made " + std::to_string(one.launched) + " of " + std::to_string(target->second) + " launches on " + NameOf(one);
  }
  for (const auto& [place, clocks] : clocks_) {
    if (place.first != process) continue;
    for (const ClockId clock : clocks) {
      const bool known = std::ranges::any_of(reading.clocks, [&](const auto& one) { return ClockOf(one) == clock; });
      if (!known && targets_.contains(clock)) return "has not launched what another rank waits for on a pair with it";
    }
  }
  return reading.version == 0 ? "has not closed its gate" : "";
}

}  // namespace amem::agreement
