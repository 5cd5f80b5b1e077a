// Calls to a session's delegate that wait, because its journal is not always free: notifications in their order, then facts for
// the journal alone. The service thread's own.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/unix/loop.h"

namespace amem {

class PendingDelegateCalls {
 public:
  using Call = std::function<bool()>;  // false: not now
  using Time = ServiceLoop::Clock::time_point;

  explicit PendingDelegateCalls(PeerDelegate& delegate) : delegate_(delegate) {}

  void Add(Call call) {
    calls_.push_back(std::move(call));
    static_cast<void>(MakeCalls());
  }
  // True: no call is left.
  bool MakeCalls() {
    for (; !calls_.empty(); calls_.pop_front())
      if (!calls_.front()()) return false;
    return true;
  }
  void AddFact(EventBody fact) {
    if (facts_.size() < kFactsMax) facts_.push_back(std::move(fact));
  }
  void AddNote(EventBody note) { facts_.push_back(std::move(note)); }  // of a tool, which does nothing before it is written
  // Calls and facts. True: nothing is left; otherwise call it again after kAgain.
  bool Flush() {
    const bool all = MakeCalls() && (facts_.empty() || delegate_.OnWitnessed(facts_, std::chrono::milliseconds(0)));
    again_ = all ? std::nullopt : std::optional(ServiceLoop::Clock::now() + kAgain);
    if (all) facts_.clear();
    return all;
  }
  [[nodiscard]] bool empty() const { return calls_.empty() && facts_.empty(); }
  [[nodiscard]] bool IsDue(Time now) const { return !empty() && (!again_ || now >= *again_); }
  // When Flush is due again; none: it has nothing to do, or is due now.
  [[nodiscard]] std::optional<Time> again() const { return empty() ? std::nullopt : again_; }

 private:
  static constexpr std::size_t kFactsMax = 8192;  // more are let go
  static constexpr std::chrono::milliseconds kAgain{5};

  PeerDelegate& delegate_;
  std::deque<Call> calls_;
  std::vector<EventBody> facts_;
  std::optional<Time> again_;
};

}  // namespace amem
