// The gates between calls and pauses: calls share a gate, and a pause or resume closes it behind them. NCCL's memory has one,
// which every call of NCCL's passes, and each tag has one for the calls that touch its memory.
//
// A call that comes while the gate is closed, or about to be, waits until the pause or resume has ended, so that a pause that
// fails has cost no call its success. Closing waits for the calls that are inside, and not for ever: a launch does not return
// while its stream is full of work that does not end. Which calls those are is known, for the message.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "statemachine/types.h"

namespace amem {

// Thread-safe. A shared lockable: std::shared_lock holds a call inside.
class CallGate {
 public:
  // What the thread's next call is named, and the stream that it submits to, if any. Without this it is a memory call.
  static void Announce(const char* call, const void* stream);
  void lock_shared();
  void unlock_shared();

  // Waits until no call is inside, and keeps others out until Open, on the same thread; those who close it take turns.
  // kRefused: some did not return in time, which are named; then the gate is open as before.
  Status Close(std::chrono::milliseconds patience);
  void Open();

 private:
  struct alignas(64) Place {  // of a thread; threads beyond their number share places, and only the message suffers
    std::atomic<const char*> inside = nullptr;
    std::atomic<const void*> stream = nullptr;
    std::atomic<std::int32_t> thread = 0;
  };
  Place& Mine();
  [[nodiscard]] std::string CallsInside() const;

  std::shared_mutex mutex_;
  std::atomic<std::int32_t> closed_ = 0;  // by so many, or about to be
  std::array<Place, 64> places_;
};

// Thread-safe.
class ScopeGates {
 public:
  CallGate& Of(PoolId scope) {  // zero: NCCL's memory
    if (!scope) return nccl_;
    const std::lock_guard lock(mutex_);
    return tags_[scope];
  }

 private:
  CallGate nccl_;
  std::mutex mutex_;
  std::map<PoolId, CallGate> tags_;  // none ever goes
};

struct OpenAtEnd {
  CallGate& gate;
  ~OpenAtEnd() { gate.Open(); }
};

}  // namespace amem
