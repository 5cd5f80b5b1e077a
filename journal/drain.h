// The thread that moves records from the tail into LMDB. No other thread writes to LMDB. All its signals are blocked, so that
// exceeding the limit of file sizes fails a call and raises no signal, and so that no handler of the host runs on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "journal/doorbell.h"
#include "journal/store.h"
#include "journal/tail.h"

namespace amem {

class Drain {
 public:
  // A thread that appends to `tail` and calls Appended() holds `append_mutex`.
  Drain(std::filesystem::path directory, Tail& tail, Store& store, std::mutex& append_mutex)
      : directory_(std::move(directory)), tail_(tail), store_(store), append_mutex_(append_mutex) {}
  ~Drain() { Stop(); }
  Drain(const Drain&) = delete;
  Drain& operator=(const Drain&) = delete;
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
