// The gate between calls and cycles. Calls share a gate; a pause or resume closes it. NCCL's memory has a gate that every call
// of NCCL passes, and each tag has one for the calls that touch its memory.
//
// A call that finds the gate closed waits until the pause or resume has ended, so a pause that fails makes no call fail.
// Closing waits for the calls that are inside, but not for ever: a launch does not return while its stream's queue is full of
// work that does not end. The message names these calls.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "journal/base/no_copies.h"
#include "statemachine/types.h"

namespace amem {

// Thread-safe. A shared lockable: std::shared_lock holds a call inside.
class CallGate {
 public:
  // Holds a call inside, named in messages with the stream that it submits to.
  [[nodiscard]] std::shared_lock<CallGate> Enter(const char* call, const void* stream) {
    Lock(call, stream);
    return {*this, std::adopt_lock};
  }
  void lock_shared() { Lock("a memory call", nullptr); }
  void unlock_shared();

  // Waits until no call is inside, and keeps others out until Open, which the same thread calls. kRefused: some calls did not
  // return in time; the message names them, if there is memory for it. The gate is then open as before.
  Status Close(std::chrono::milliseconds patience);
  void Open();

 private:
  struct alignas(64) Place {  // one thread's; beyond this many threads share places, and only messages suffer
    std::atomic<const char*> inside = nullptr;
    std::atomic<const void*> stream = nullptr;
    std::atomic<std::int32_t> thread = 0;
  };
  void Lock(const char* call, const void* stream);
  Place& Of(std::size_t place);
  [[nodiscard]] std::string CallsInside() const;

  std::shared_mutex mutex_;
  std::atomic<std::int32_t> closed_ = 0;  // how many close it, or wait to
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
  std::map<PoolId, CallGate> tags_;  // never erased
};

struct OpenAtEnd : NoCopies {
  explicit OpenAtEnd(CallGate& closed) : gate(closed) {}
  ~OpenAtEnd() { gate.Open(); }
  CallGate& gate;
};

}  // namespace amem
