// Clock: one order of time for the journals of a job, however many hosts and boots they come from.
//
// Events carry CLOCK_MONOTONIC of the boot that wrote them, so journals of one boot are compared exactly. Boots are related by
// what they did together: a communicator is ready in all its ranks at about the same time, and the median over the
// communicators counts. Boots that share none are related by the wall clocks that their sessions noted, when they opened or
// found that the clock had been set. Of a boot with several notes the first one decides until a later one says that the clock
// was set, which then decides for all: a clock that is set is mostly corrected. The order in which journals are given does not
// matter. A boot whose wall clock nobody noted is put where its first event coincides with the first event of the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/clock.h"
#include "statemachine/event.h"

namespace amem {

// The times in a journal may be any numbers. Their sums and differences wrap around, so that no journal makes them overflow.
constexpr std::int64_t WrappedSum(std::uint64_t time_ns, std::int64_t offset_ns) {
  return static_cast<std::int64_t>(time_ns + static_cast<std::uint64_t>(offset_ns));
}
constexpr std::int64_t WrappedDifference(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b));
}

// Communicators that a session had ready, by their hashes, and when: what its clock is compared with others' by. Whoever reads
// a journal collects them here, so that all commands show the same times.
class ReadyCommunicators {
 public:
  // Takes the events of a journal in their order, from its first one. Communicators are made early, so that those behind the
  // first kEvents events do not count, and nobody need read a long journal twice.
  static constexpr std::uint64_t kEvents = 65'536;
  void Take(const Event& event);
  [[nodiscard]] const std::vector<std::pair<std::uint64_t, std::uint64_t>>& all() const { return all_; }

 private:
  SequenceNumber first_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all_;
};

class JobClock {
 public:
  struct Journal {
    const SessionOpened* opened = nullptr;  // used by the constructor only
    std::uint64_t first_ns = 0;             // time of its first event; 0: it has none
    ReadyCommunicators communicators = {};  // used by the constructor only
    std::uint64_t set_ns = 0;  // when it was found that the clock had been set, if it was; `opened` is of that clock
  };
  explicit JobClock(std::span<const Journal> journals);

  // Whether a clock of such sessions is made with ReadyCommunicators: those of one boot have one clock without them.
  static bool NeedsCommunicators(std::span<const SessionOpened* const> sessions);

  // Add this to a time of that session's journal to get nanoseconds since 1970; 0 for a session of another job. If no boot
  // knows its wall clock, the origin of the sum is arbitrary and the same for all.
  [[nodiscard]] std::int64_t OffsetOf(const SessionOpened& opened) const;
  // The sum. 0, which means "no time", stays 0.
  [[nodiscard]] std::uint64_t Wall(const SessionOpened& opened, std::uint64_t time_ns) const;
  // The job's first event on this clock.
  [[nodiscard]] std::int64_t began_ns() const { return began_ns_; }

  [[nodiscard]] std::size_t boots() const { return boots_.size(); }
  [[nodiscard]] std::size_t boots_without_wall_clock() const;
  // All boots share communicators, so that none of them rests on its wall clock.
  [[nodiscard]] bool by_communicators() const { return aligned_ + 1 == boots_.size(); }

 private:
  // Puts boots that made communicators together where these coincide with those of the boot whose wall clock counts.
  void Align(std::span<const Journal> journals);

  struct Boot {
    std::map<std::pair<std::uint64_t, SessionId>, WallClock> notes;  // of the wall clock, by when and by whom
    std::uint64_t first_ns = 0;
    std::int64_t offset_ns = 0;
    bool wall_known = false;
  };
  std::map<std::string, Boot> boots_;
  std::int64_t began_ns_ = 0;
  std::size_t aligned_ = 0;  // boots that follow another one
};

// Surely one clock: both sessions ran on one boot of one host.
bool SameBoot(const SessionOpened& a, const SessionOpened& b);

// The clock of this host at this moment: what live journals of this boot are compared with.
struct ThisHost {
  std::string boot_id;
  std::uint64_t now_ns = 0;
  static ThisHost Now();
  [[nodiscard]] bool Wrote(const SessionOpened& opened) const { return !boot_id.empty() && opened.boot_id == boot_id; }
};

}  // namespace amem
