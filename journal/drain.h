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
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "journal/base/clock.h"
#include "journal/base/deadline.h"
#include "journal/store.h"
#include "journal/tail.h"
#include "statemachine/state.h"

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

// The wall clock in a journal's meta data: of its beginning, and of each time that somebody set the clock since.
class ClockNotes {
 public:
  // `opened`: the clock when the session opened, if that was before this journal began.
  ClockNotes(SessionId session, std::function<WallClock()> clock, std::optional<WallClock> opened)
      : session_(session), clock_(std::move(clock)), newest_(opened) {}
  // Adds the first record, and one where the newest is not of this clock.
  Status Note(const Store::Writing& writing);

 private:
  SessionId session_;
  std::function<WallClock()> clock_;
  std::optional<WallClock> newest_;
  std::uint64_t key_ = 0;  // of the newest
};

class Drain {
 public:
  // A thread that appends to `tail` and calls Appended() holds `append_mutex`.
  Drain(std::filesystem::path directory, Tail& tail, Store& store, std::mutex& append_mutex, ClockNotes notes,
        std::uint64_t last_snapshot)
      : directory_(std::move(directory)),
        tail_(tail),
        store_(store),
        append_mutex_(append_mutex),
        notes_(std::move(notes)),
        last_snapshot_(last_snapshot) {}
  ~Drain() { Stop(); }
  Status Start();
  void Stop();  // as soon as possible; what is in the tail stays there

  [[nodiscard]] bool broken() const { return broken_.load(std::memory_order_acquire); }
  [[nodiscard]] Status reason() const;
  // Keeps the first failure for ever, and marks the directory and the tail with it, so that other processes learn of it.
  // Returns the one that is kept. `by_file` false: the file system stands still, and only the tail is marked.
  Status Break(const Status& failure, bool by_file = true);
  // The thread has waited for the file system for two seconds.
  [[nodiscard]] bool Stalled() const;

  // After an append, with the mutex held. Wakes the thread only when it sleeps for good or the tail fills up.
  void Appended() {
    if (std::exchange(idle_, false)) work_.Ring();
    if (!urgent_.load(std::memory_order_relaxed) && tail_.Used() > tail_.Capacity() / 4) Hurry();
  }
  // Waits until everything before `position` of the tail is in LMDB. kTimeout: the file system stands still.
  Status WaitFor(std::uint64_t position);
  // Waits until the thread has done all that there is to do, with a look whether the files are still there. kTimeout: it had
  // not until then.
  Status Answer(Deadline until);

  // A record that goes into LMDB directly, after everything in the tail. What a snapshot makes obsolete is removed afterwards.
  struct Direct {
    Table table{};
    std::uint64_t key = 0;
    std::vector<std::byte> frame;
    std::optional<State> state{};  // of a snapshot that the thread encodes; one that cannot be encoded is left out
    std::atomic<bool> stored{false};
  };
  Status Store(Table table, std::uint64_t key, std::vector<std::byte> frame);
  // Without waiting. Left out if another is on its way.
  void SnapshotSoon(const State& state);
  [[nodiscard]] std::uint64_t last_snapshot() const { return last_snapshot_.load(std::memory_order_acquire); }
  [[nodiscard]] Bytes snapshot_bytes() const { return snapshot_bytes_.load(std::memory_order_relaxed); }  // of the last one

 private:
  void Hurry();
  void Run();
  void Gather();
  Status WaitUntil(const std::function<bool()>& done, std::optional<Deadline> until);
  bool Offer(const std::shared_ptr<Direct>& direct);  // false: another is on its way
  std::shared_ptr<Direct> Offered(bool take);
  Status MoveAll();
  [[nodiscard]] Status FilesAreThere() const;
  Status MoveSome(std::uint64_t up_to);
  Status StoreDirect();
  Status RemoveSome();

  const std::filesystem::path directory_;
  Tail& tail_;
  amem::Store& store_;
  std::mutex& append_mutex_;
  ClockNotes notes_;  // the thread's
  mutable std::mutex reason_mutex_;
  Status reason_;
  std::atomic<bool> broken_{false};

  Doorbell work_;      // rung for the thread
  Doorbell progress_;  // rung by it
  bool idle_ = false;  // sleeps until the next append; under append_mutex_
  std::atomic<bool> urgent_{false};
  std::atomic<bool> stop_{false};

  std::mutex direct_mutex_;
  std::shared_ptr<Direct> direct_;                     // the next; under direct_mutex_
  std::atomic<std::uint64_t> asked_{0}, answered_{0};  // rounds of the thread
  std::atomic<std::uint64_t> working_since_ns_{0};     // 0: the thread does not wait for the file system
  std::atomic<std::uint64_t> last_snapshot_;
  std::atomic<Bytes> snapshot_bytes_{0};
  std::uint64_t obsolete_events_below_ = 0;  // the thread's
  std::uint64_t obsolete_snapshots_below_ = 0;
  bool removing_ = false;

  std::thread thread_;
};

}  // namespace amem
