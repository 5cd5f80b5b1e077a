#include "replay/job/clock.h"

#include <algorithm>
#include <limits>
#include <set>

#include "journal/base/clock.h"
#include "journal/base/file.h"

namespace amem {
namespace {

// Journals of builds that did not note the boot are told apart by their hosts.
std::string BootOf(const SessionOpened& opened) {
  return opened.boot_id.empty() ? BootId("host " + opened.host) : opened.boot_id;
}

}  // namespace

void ReadyCommunicators::Take(const Event& event) {
  if (!first_) first_ = event.seq;
  if (event.seq.value - first_.value >= kEvents) return;
  const auto* ready = std::get_if<CommunicatorReady>(&event.body);
  if (ready != nullptr && ready->hash != 0) all_.emplace_back(ready->hash, event.time_ns);
}

JobClock::JobClock(std::span<const Journal> journals) {
  for (const auto& [opened, first_ns, communicators, set_ns] : journals) {
    Boot& boot = boots_[BootOf(*opened)];
    if (first_ns != 0 && (boot.first_ns == 0 || first_ns < boot.first_ns)) boot.first_ns = first_ns;
    const WallClock clock{opened->realtime_ns, opened->monotonic_ns};
    if (clock.realtime_ns != 0 && clock.monotonic_ns != 0)
      boot.notes[{std::max(clock.monotonic_ns, set_ns), opened->session}] = clock;
  }
  for (auto& [id, boot] : boots_) {
    if (boot.notes.empty()) continue;
    WallClock current = boot.notes.begin()->second;
    for (const auto& [when, clock] : boot.notes)
      if (clock.IsSetSince(current)) current = clock;
    boot.offset_ns = current.Offset();
    boot.wall_known = true;
    boot.notes.clear();
  }
  Align(journals);
  constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  std::int64_t first_known = kNever, first_of_any = kNever;
  for (const auto& [id, boot] : boots_) {
    if (boot.first_ns == 0) continue;
    const auto first = static_cast<std::int64_t>(boot.first_ns);
    first_of_any = std::min(first_of_any, first);
    if (boot.wall_known) first_known = std::min(first_known, WrappedSum(boot.first_ns, boot.offset_ns));
  }
  if (first_of_any == kNever) return;
  began_ns_ = first_known != kNever ? first_known : first_of_any;
  for (auto& [id, boot] : boots_) {
    if (!boot.wall_known && boot.first_ns != 0)
      boot.offset_ns = WrappedDifference(began_ns_, static_cast<std::int64_t>(boot.first_ns));
  }
}

bool JobClock::NeedsCommunicators(std::span<const SessionOpened* const> sessions) {
  return std::ranges::any_of(sessions, [&](const SessionOpened* one) { return BootOf(*one) != BootOf(*sessions.front()); });
}

void JobClock::Align(std::span<const Journal> journals) {
  if (boots_.size() < 2) return;
  // When the last rank of a boot had each communicator: no rank has it before all of them came.
  std::map<std::string, std::map<std::uint64_t, std::uint64_t>> ready;
  for (const Journal& journal : journals) {
    for (const auto& [hash, time_ns] : journal.communicators.all()) {
      std::uint64_t& last = ready[BootOf(*journal.opened)][hash];
      last = std::max(last, time_ns);
    }
  }
  // Boots follow one that is settled. The first of each group that shares communicators is one with a wall clock.
  std::set<std::string> settled;
  const auto follow = [&](const std::string& id, Boot& boot) {
    std::vector<std::int64_t> differences;
    for (const auto& [hash, time_ns] : ready[id]) {
      for (const std::string& other : settled) {
        const auto there = ready[other].find(hash);
        if (there == ready[other].end()) continue;
        const std::int64_t wall = WrappedSum(there->second, boots_[other].offset_ns);
        differences.push_back(WrappedDifference(wall, static_cast<std::int64_t>(time_ns)));
        break;
      }
    }
    if (differences.empty()) return false;
    const auto middle = differences.begin() + static_cast<std::ptrdiff_t>(differences.size() / 2);
    std::ranges::nth_element(differences, middle);
    boot.offset_ns = *middle;
    boot.wall_known = true;
    ++aligned_;
    return true;
  };
  while (settled.size() < boots_.size()) {
    bool moved = false;
    for (auto& [id, boot] : boots_) {
      if (settled.contains(id) || !follow(id, boot)) continue;
      settled.insert(id);
      moved = true;
    }
    if (moved) continue;
    const auto next = std::ranges::find_if(boots_, [&](const auto& boot) {
      return !settled.contains(boot.first) && boot.second.wall_known && ready.contains(boot.first);
    });
    if (next == boots_.end()) return;
    settled.insert(next->first);
  }
}

std::int64_t JobClock::OffsetOf(const SessionOpened& opened) const {
  const auto boot = boots_.find(BootOf(opened));
  return boot == boots_.end() ? 0 : boot->second.offset_ns;
}

std::uint64_t JobClock::Wall(const SessionOpened& opened, std::uint64_t time_ns) const {
  return time_ns == 0 ? 0 : static_cast<std::uint64_t>(WrappedSum(time_ns, OffsetOf(opened)));
}

std::size_t JobClock::boots_without_wall_clock() const {
  return static_cast<std::size_t>(std::ranges::count_if(boots_, [](const auto& boot) { return !boot.second.wall_known; }));
}

bool SameBoot(const SessionOpened& a, const SessionOpened& b) { return !a.boot_id.empty() && a.boot_id == b.boot_id; }

ThisHost ThisHost::Now() { return {.boot_id = FirstLineOf("/proc/sys/kernel/random/boot_id"), .now_ns = MonotonicNs()}; }

}  // namespace amem
