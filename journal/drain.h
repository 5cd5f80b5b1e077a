// The thread that moves records from the tail into LMDB: Transfer is what it writes, Drain when it does. No other thread writes
// to LMDB. All its signals are blocked, so that exceeding the limit of file sizes fails a call and raises no signal, and so
// that no handler of the host runs on it.
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

// A futex on which one thread waits until another rings. Take a ticket, check the condition, and wait with the ticket: a ring
// after the check is not missed. Ringing costs a system call, so ring only when a thread may be waiting.
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

// Why a journal has failed: the first reason, which stays.
class JournalFailure {
 public:
  JournalFailure(std::filesystem::path directory, Tail& tail) : directory_(std::move(directory)), tail_(tail) {}
  // Marks the tail with it, and the directory, so that other processes learn of it. Returns the first one. `by_file` false: the
  // file system has not answered, and only the tail is marked.
  Status Break(const Status& failure, bool by_file);
  void MarkDirectory() const;  // for whoever could not wait for the file system
  [[nodiscard]] bool broken() const { return broken_.load(std::memory_order_acquire); }
  [[nodiscard]] Status reason() const;
  [[nodiscard]] const std::filesystem::path& directory() const { return directory_; }

 private:
  const std::filesystem::path directory_;
  Tail& tail_;
  mutable std::mutex mutex_;
  Status reason_;
  std::atomic<bool> broken_{false};
};

// A record that goes into LMDB directly, after everything in the tail.
struct Direct {
  Table table{};
  std::uint64_t key = 0;
  std::vector<std::byte> frame;
  std::optional<State> state{};  // of a snapshot that the thread encodes; one that cannot be encoded is left out
  std::atomic<bool> stored{false};
};

// What the thread writes. Only Offer, HasOffer and the numbers of the last snapshot are for other threads.
class Transfer {
 public:
  Transfer(Tail& tail, Store& store, ClockNotes notes, std::uint64_t last_snapshot)
      : tail_(tail), store_(store), notes_(std::move(notes)), last_snapshot_(last_snapshot) {}

  bool Offer(const std::shared_ptr<Direct>& direct);  // false: another is on its way
  [[nodiscard]] bool HasOffer();
  [[nodiscard]] std::uint64_t last_snapshot() const { return last_snapshot_.load(std::memory_order_acquire); }
  [[nodiscard]] Bytes snapshot_bytes() const { return snapshot_bytes_.load(std::memory_order_relaxed); }  // of the last one

  [[nodiscard]] Status CheckFiles() const {
    const Status tail = tail_.CheckFiles();
    return tail.ok() ? store_.CheckFiles() : tail;
  }
  Status MoveSome(std::uint64_t up_to);  // one commit
  Status StoreDirect();                  // what was offered; what a snapshot makes obsolete is removed by RemoveSome
  Status RemoveSome();
  [[nodiscard]] bool removing() const { return obsolete_.removing; }

 private:
  struct Obsolete {
    std::uint64_t events_below = 0, snapshots_below = 0;
    bool removing = false;  // there may be more
  };

  Tail& tail_;
  Store& store_;
  ClockNotes notes_;
  Obsolete obsolete_;
  std::mutex mutex_;
  std::shared_ptr<Direct> offered_;  // under mutex_
  std::atomic<std::uint64_t> last_snapshot_;
  std::atomic<Bytes> snapshot_bytes_{0};
};

class Drain {
 public:
  // A thread that appends to `tail` and calls Appended() holds `append_mutex`.
  Drain(const std::filesystem::path& directory, Tail& tail, Store& store, std::mutex& append_mutex, ClockNotes notes,
        std::uint64_t last_snapshot)
      : tail_(tail),
        append_mutex_(append_mutex),
        failure_(directory, tail),
        transfer_(tail, store, std::move(notes), last_snapshot) {}
  ~Drain() { Stop(); }
  Status Start();
  void Stop();  // as soon as possible; what is in the tail stays there

  [[nodiscard]] bool broken() const { return failure_.broken(); }
  [[nodiscard]] Status reason() const { return failure_.reason(); }
  Status Break(const Status& failure, bool by_file = true) { return failure_.Break(failure, by_file); }
  // The thread has waited for the file system for two seconds.
  [[nodiscard]] bool Stalled() const;

  // After an append, with the mutex held. Wakes the thread only when it sleeps for good or the tail fills up.
  void Appended() {
    if (std::exchange(idle_, false)) work_.Ring();
    if (wanted_.load(std::memory_order_relaxed) == Wanted::kNothing && tail_.Used() > tail_.Capacity() / 4) Hurry();
  }
  // Waits until everything before `position` of the tail is in LMDB. kTimeout: the file system has not answered.
  Status WaitFor(std::uint64_t position);
  // Waits until the thread has done all that there is to do, and has checked that the files are still there. kTimeout: it had
  // not until then.
  Status Answer(Deadline until);
  // Waits until the record is in LMDB, after everything in the tail. What a snapshot makes obsolete is removed afterwards.
  Status StoreRecord(Table table, std::uint64_t key, std::vector<std::byte> frame);
  // Without waiting. Left out if another is on its way.
  void SnapshotSoon(const State& state);
  [[nodiscard]] std::uint64_t last_snapshot() const { return transfer_.last_snapshot(); }
  [[nodiscard]] Bytes snapshot_bytes() const { return transfer_.snapshot_bytes(); }

 private:
  enum class Wanted : std::uint8_t { kNothing, kWorkAtOnce, kEnd };  // of the thread; kEnd is final

  void Hurry();
  void Run();
  void Gather();
  Status WaitUntil(const std::function<bool()>& done, std::optional<Deadline> until);
  Status MoveAll();
  [[nodiscard]] bool Ends() const { return wanted_.load(std::memory_order_acquire) == Wanted::kEnd; }

  Tail& tail_;
  std::mutex& append_mutex_;
  JournalFailure failure_;
  Transfer transfer_;

  std::thread thread_;
  // What each append reads, apart from what the thread writes in each round.
  alignas(64) Doorbell work_;  // rung for the thread
  bool idle_ = false;          // sleeps until the next append; under append_mutex_
  std::atomic<Wanted> wanted_{Wanted::kNothing};
  alignas(64) Doorbell progress_;                      // rung by the thread
  std::atomic<std::uint64_t> asked_{0}, answered_{0};  // its rounds
  std::atomic<std::uint64_t> working_since_ns_{0};     // 0: it does not wait for the file system
};

}  // namespace amem
