// A stop between launches, as its two sides write it: what a process says of the launches of its ranks, what it is ordered,
// and what orders follow from all that was said. Plain values and a pure class on the functions of clocks.h; it
// knows no connection, thread or GPU.
//
// A process closes its gate with the first order, whose version is 1. While the gate is closed every launch is counted under
// one lock, and a reading is made under it. So a process that says "closed at version 7, at all targets, nothing inside" makes
// no launch until it gets a later order, and if all say so of one version, all have stopped.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "statemachine/agreement/clocks.h"

namespace amem::agreement {

// `communicator` is the same in all its ranks. Of a pair: the launches from one of its ranks to another.
ClockId ClockOf(std::uint64_t communicator);
ClockId ClockOfPair(std::uint64_t communicator, std::int32_t from, std::int32_t to);

// One clock as one rank counts it.
struct ClockReading {
  std::uint64_t communicator = 0;
  std::int32_t from = -1, to = -1;  // of a pair
  std::int32_t rank = -1, ranks = 0;
  std::int32_t device = -1;
  std::uint64_t launched = 0;
  bool ended = false;  // the rank has let go of the communicator
  friend bool operator==(const ClockReading&, const ClockReading&) = default;
};

ClockId ClockOf(const ClockReading& reading);

// The launches of one process on one GPU; device -1: those on no known GPU.
struct LaunchSeat {
  std::int32_t device = -1;
  bool held = false;
  std::uint32_t let_go = 0;  // how often it launched once more, or in an order: may have
  friend bool operator==(const LaunchSeat&, const LaunchSeat&) = default;
};

struct LaunchReading {
  std::uint64_t version = 0;  // of the order that holds; 0: launches are not held
  std::vector<ClockReading> clocks{};
  std::vector<LaunchSeat> seats{};
  std::string inside{};                  // a call of NCCL's that has not returned, or goes on in the background
  std::string why_not{};                 // why this process cannot be stopped so; empty: it can
  std::vector<std::uint32_t> threads{};  // that call NCCL, some of them, as the kernel numbers them; for messages only
  friend bool operator==(const LaunchReading&, const LaunchReading&) = default;
};

struct LaunchTarget {
  std::int32_t device = -1;
  std::uint64_t clock = 0, count = 0;
  friend bool operator==(const LaunchTarget&, const LaunchTarget&) = default;
};
struct LaunchOrder {
  std::uint64_t version = 0;  // 0: a request that does not stop launches
  bool stands = false;        // all ranks have stopped
  bool parks = false;         // all are held, and nothing is released
  std::vector<LaunchTarget> targets{};
  std::vector<LaunchSeat> seats{};
  friend bool operator==(const LaunchOrder&, const LaunchOrder&) = default;
};

class LaunchStop {
 public:
  enum class Next : std::uint8_t {
    kWait,     // for other readings
    kOrder,    // each process is to get another order
    kStopped,  // all have; each is to get the order that says so
    kMissing,  // not all ranks of a communicator are among those that are asked
  };
  // `readings`: of each process, in the same order each time. `still`: none has changed for a while.
  Next Consider(std::span<const LaunchReading> readings, bool still);
  [[nodiscard]] LaunchOrder OrderOf(std::size_t process) const;
  // Of the last Consider. Why this process has not stopped, in words; empty: it has, as far as it says.
  [[nodiscard]] std::string WhyNotAtTargets(std::size_t process, const LaunchReading& reading) const;
  // Communicators of which not all ranks are among those that say what they launched: "3 of communicator 0x12 (4 ranks)". A
  // few.
  static std::vector<std::string> Incomplete(std::span<const LaunchReading> readings);
  [[nodiscard]] const std::string& missing() const { return missing_; }
  [[nodiscard]] std::uint32_t let_go() const { return let_go_; }  // launches that were let go once more

 private:
  using Place = std::pair<std::size_t, std::int32_t>;  // a process and a device
  struct Seen {
    std::vector<Place> places;
    std::vector<Launcher> launchers;  // those of `places`, then one for each process that is inside a call
    Counts ended;                     // launched by ranks that have let go of the communicator
  };
  [[nodiscard]] Seen See(std::span<const LaunchReading> readings) const;
  bool SomeAreMissing(std::span<const LaunchReading> readings);
  bool RaiseTargets(const Seen& seen);
  [[nodiscard]] bool AwaitsLaunch(const Seen& seen) const;
  Next Stop(std::span<const LaunchReading> readings, const Seen& seen, bool awaits_launch);
  Next LetGo(std::size_t seat, const Seen& seen);

  std::uint64_t version_ = 1;
  bool stands_ = false;
  std::uint32_t let_go_ = 0;
  Counts targets_;
  std::map<Place, std::uint32_t> allowed_;
  std::map<Place, std::vector<ClockId>> clocks_;  // whose it is a member
  std::string missing_;
};

}  // namespace amem::agreement
