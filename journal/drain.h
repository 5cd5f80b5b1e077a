// The thread that moves records from the tail into LMDB. No other thread writes to LMDB. All its signals are blocked, so that
// exceeding the limit of file sizes fails a call and raises no signal, and so that no handler of the host runs on it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <ctime>
#include <mutex>
#include <thread>

#include "journal/store.h"
#include "journal/tail.h"

namespace amem {

// A futex on which one thread waits until another rings. Take a ticket, look at the condition, and wait with the ticket: a ring
// after the look is not missed. Ringing costs a system call, so ring only when a thread may be waiting.
class Doorbell {
 public:
  [[nodiscard]] std::uint32_t Ticket() const { return word_.load(std::memory_order_acquire); }
  void Ring() {
    word_.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  // Returns when the bell rang after the ticket was taken, after `timeout_ms`, when a signal handler ran, or spuriously. False:
  // it has timed out.
  bool Wait(std::uint32_t ticket, std::optional<std::uint32_t> timeout_ms = std::nullopt) const {
    const std::uint32_t ms = timeout_ms.value_or(0);
    const timespec timeout{static_cast<time_t>(ms / 1000), static_cast<long>(ms % 1000) * 1'000'000};
    const long rc = syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, ticket, timeout_ms ? &timeout : nullptr, nullptr, 0);
    return rc == 0 || errno != ETIMEDOUT;
  }

 private:
  std::atomic<std::uint32_t> word_{0};
};

class Drain {
 public:
  // A thread that appends to `tail` and calls Appended() holds `append_mutex`.
  Drain(std::filesystem::path directory, Tail& tail, Store& store, std::mutex& append_mutex)
      : directory_(std::move(directory)), tail_(tail), store_(store), append_mutex_(append_mutex) {}
  ~Drain() { Stop(); }
  Status Start();
  void Stop();  // as soon as possible; what is in the tail stays there

  [[nodiscard]] bool broken() const { return broken_.load(std::memory_order_acquire); }
  [[nodiscard]] Status reason() const;
  // Keeps the first failure for ever, and marks the directory and the tail with it, so that other processes learn of it.
  // Returns the one that is kept.
  Status Break(const Status& failure);

  // After an append, with the mutex held. Wakes the thread only when it sleeps for good or the tail fills up.
  void Appended() {
    if (std::exchange(idle_, false)) work_.Ring();
    if (!urgent_.load(std::memory_order_relaxed) && tail_.Used() > tail_.Capacity() / 4) Hurry();
  }
  // Waits until everything before `position` of the tail is in LMDB.
  Status WaitFor(std::uint64_t position);

  // A record that goes into LMDB directly, after everything in the tail. What it makes obsolete is removed afterwards.
  struct Direct {
    Table table{};
    std::uint64_t key = 0;
    std::vector<std::byte> frame;
    std::uint64_t obsolete_events_below = 0;
    std::uint64_t obsolete_snapshots_below = 0;
  };
  Status Store(Direct direct);

 private:
  void Hurry();
  void Run();
  void Gather();
  Status MoveAll();
  Status MoveSome(std::uint64_t up_to);
  Status StoreDirect();
  Status RemoveSome();

  const std::filesystem::path directory_;
  Tail& tail_;
  amem::Store& store_;
  std::mutex& append_mutex_;
  mutable std::mutex reason_mutex_;
  Status reason_;
  std::atomic<bool> broken_{false};

  Doorbell work_;      // rung for the thread
  Doorbell progress_;  // rung by it
  bool idle_ = false;  // sleeps until the next append; under append_mutex_
  std::atomic<bool> urgent_{false};
  std::atomic<bool> stop_{false};

  std::mutex store_mutex_;                   // one Store() at a time
  std::atomic<Direct*> direct_{nullptr};     // owned by whoever takes it out: the thread, or a Store() that gives up
  std::atomic<std::uint64_t> stored_{0};     // how many were stored
  std::uint64_t obsolete_events_below_ = 0;  // the thread's
  std::uint64_t obsolete_snapshots_below_ = 0;
  bool removing_ = false;

  std::thread thread_;
};

}  // namespace amem
