#include "replay/cycle/call_gate.h"

#include <spdlog/fmt/fmt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "journal/base/addressed_once.h"
#include "journal/base/deadline.h"
#include "journal/base/mutex.h"
#include "journal/base/no_memory.h"

namespace amem {
namespace {

struct ThisThread {
  std::int32_t id = 0;  // of the kernel's; 0: this thread has come to no gate yet
  std::size_t place = 0;
  struct Passed {
    const CallGate* gate = nullptr;
    int depth = 0;
    bool closed_here = false;
  };
  std::array<Passed, 8> passed{};  // the gates that the thread is inside of, or has closed
  std::size_t used = 0;            // of these; the last one has a gate

  // Null: the thread is not inside this gate, or inside too many to remember; then it waits like any other.
  Passed* At(const CallGate* gate) {
    for (std::size_t i = 0; i < used; ++i)
      if (passed[i].gate == gate) return &passed[i];
    return nullptr;
  }
  Passed* Free() {
    Passed* const between = At(nullptr);
    return between != nullptr || used == passed.size() ? between : &passed[used++];
  }
  void Forget(Passed& left) {
    left = {};
    while (used > 0 && passed[used - 1].gate == nullptr) --used;
  }
};
constinit thread_local ThisThread t_self;

ThisThread& Self() {
  ThisThread& self = AddressedOnce(t_self);
  if (self.id == 0) [[unlikely]] {
    static constinit std::atomic<std::size_t> threads = 0;
    self.place = threads.fetch_add(1, std::memory_order_relaxed);
    self.id = static_cast<std::int32_t>(::syscall(SYS_gettid));
  }
  return self;
}

}  // namespace

CallGate::Place& CallGate::Of(std::size_t place) { return places_[place % places_.size()]; }

// A call made inside another must not wait for the gate, because whoever closes it waits for the outer call. Nor must one of
// the thread that has closed it: a library that watches the driver's calls may let go of memory while AMem unmaps.
void CallGate::Lock(const char* call, const void* stream) {
  ThisThread& self = Self();
  ThisThread::Passed* passed = self.At(this);
  if (passed != nullptr && passed->closed_here) {
    ++passed->depth;
    return;
  }
  if (passed == nullptr) {
    for (auto closed = closed_.load(std::memory_order_acquire); closed != 0; closed = closed_.load(std::memory_order_acquire))
      closed_.wait(closed, std::memory_order_acquire);
    passed = self.Free();
  }
  mutex_.lock_shared();
  if (passed != nullptr) *passed = {this, passed->depth + 1, false};
  Place& mine = Of(self.place);
  mine.thread.store(self.id, std::memory_order_relaxed);
  mine.stream.store(stream, std::memory_order_relaxed);
  mine.inside.store(call, std::memory_order_relaxed);
}

void CallGate::unlock_shared() {
  ThisThread& self = Self();
  ThisThread::Passed* const passed = self.At(this);
  if (passed != nullptr && passed->closed_here) {
    --passed->depth;
    return;
  }
  if (passed != nullptr && --passed->depth == 0) self.Forget(*passed);
  Of(self.place).inside.store(nullptr, std::memory_order_relaxed);
  mutex_.unlock_shared();
}

Status CallGate::Close(std::chrono::milliseconds patience) {
  closed_.fetch_add(1, std::memory_order_release);
  if (TryLockUntil(mutex_, In(patience))) {
    if (ThisThread::Passed* const own = Self().Free(); own != nullptr) *own = {this, 0, true};
    return {};
  }
  const Status refused = OrNoMemory([&]() -> Status {
    return {Code::kRefused,
            fmt::format("a call that began before has not returned within {} ms: {}", patience.count(), CallsInside())};
  });
  closed_.fetch_sub(1, std::memory_order_release);
  closed_.notify_all();
  return refused;
}

void CallGate::Open() {
  ThisThread& self = Self();
  if (ThisThread::Passed* const own = self.At(this); own != nullptr) self.Forget(*own);
  mutex_.unlock();
  closed_.fetch_sub(1, std::memory_order_release);
  closed_.notify_all();
}

std::string CallGate::CallsInside() const {
  std::string text;
  for (const Place& place : places_) {
    const char* call = place.inside.load(std::memory_order_relaxed);
    if (call == nullptr) continue;
    text += fmt::format("{}{} on thread {}", text.empty() ? "" : ", ", call, place.thread.load(std::memory_order_relaxed));
    if (const void* stream = place.stream.load(std::memory_order_relaxed)) text += fmt::format(" for stream {}", stream);
  }
  return text.empty() ? "a call of NCCL" : text;
}

}  // namespace amem
