// The ledger: a session's state, its journal, and the driver's handles behind the state, which change together.
//
// Record() applies every event and then appends it. A call that gives something back to the driver (unmap, release, free a
// range) is made with the lock held over call and Record, so that the next owner of the address records later. Calls that only
// take hold the lock for Record alone: they are slow, and the service thread must not wait for them.
//
// Code relies on facts that Apply guarantees, such as "the allocation of a mapping exists", and checks them in release builds
// as well (Entry, Check): a fact that does not hold breaks the session and is answered with Broken(). Nothing here throws or
// ends the process, because it is NCCL's.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "journal/base/mutex.h"
#include "journal/base/unique_fd.h"
#include "journal/journal.h"
#include "replay/driver/driver.h"
#include "replay/ledger/tag_places.h"
#include "statemachine/apply.h"
#include "statemachine/state.h"

namespace amem {

// std::source_location needs a newer Clang than Debian 12's.
struct SourceLine {
  static constexpr SourceLine Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  std::string_view file;
  int line = 0;
};

// The ledger is its own lock: functions say REQUIRES(ledger), and LedgerLock holds it.
class CAPABILITY("ledger") Ledger {
 public:
  explicit Ledger(std::unique_ptr<JournalWriter> journal) : journal_(std::move(journal)) {}

  void lock() ACQUIRE();
  void unlock() RELEASE();
  // False: another thread held it all the time, perhaps in a driver call that hangs.
  [[nodiscard]] bool TryLockFor(std::chrono::milliseconds patience) TRY_ACQUIRE(true);
  // The same until then, and for a moment in any case.
  [[nodiscard]] bool TryLockUntil(Deadline until) TRY_ACQUIRE(true);
  void AssertHeld() const ASSERTS_HELD() { mutex_.AssertHeld(); }
  // Without the lock. kTimeout: which thread holds it, for how long, and where that thread is.
  [[nodiscard]] Status Held() const;
  // Without the lock: where the session is in its pauses and resumes, and in which one.
  [[nodiscard]] std::pair<Lifecycle, std::uint64_t> Progress() const;

  [[nodiscard]] const TagPlaces& tag_places() const { return tag_places_; }  // without the lock

  // Never fails towards the caller. An event that Apply refuses breaks the session (State::broken): the next pause reports it,
  // and nothing is appended after it. If the event is about memory that is only counted, it is dropped and counted instead, and
  // the journal says so. If an append fails, the journal is lost (JournalLost); the state is kept up to date, and a fresh
  // journal begins once one can be written.
  void Record(EventBody body) REQUIRES(this);
  // The same of something that has not happened unless it is recorded: false, and nothing is broken, if the system gives no
  // memory for it.
  [[nodiscard]] bool RecordIfThereIsMemory(EventBody body) REQUIRES(this);
  void LockAndRecord(EventBody body) EXCLUDES(this);
  // Without the lock, which a hanging driver call of another thread holds: how a pause or resume ended. It is recorded before
  // anything that a later holder of the lock records, or reads. Progress says it at once, whatever this one still records.
  void RecordSoon(const CycleFailed& ended);
  void Break(const std::string& reason) REQUIRES(this);  // pauses are refused with this reason from now on
  // Of work that was done without the lock: if it failed by a check (AMEM_CHECK), that breaks the session as Check does.
  void BreakIfCheckFailed(const Status& work) REQUIRES(this);
  // The same without the lock, as RecordSoon: the next pause finds the session broken.
  void BreakSoonIfCheckFailed(const Status& work);
  // An entry of the state that must exist. Null: it does not, and the session is broken.
  template <class Table>
  [[nodiscard]] const typename Table::mapped_type* Entry(const Table& table, const typename Table::key_type& key,
                                                         SourceLine where = SourceLine::Here()) REQUIRES(this) {
    auto* const it = FindIn(table, key);
    if (it != nullptr) return &*it;
    Check(false, "no entry for " + KeyText(key), where);
    return nullptr;
  }
  // The same for callers that answer with a Status: Broken() if it does not exist.
  template <class Table>
  [[nodiscard]] Result<const typename Table::mapped_type*> Known(const Table& table, const typename Table::key_type& key,
                                                                 SourceLine where = SourceLine::Here()) REQUIRES(this) {
    if (const auto* entry = Entry(table, key, where)) return entry;
    return Broken();
  }
  // The same of an allocation; and one that need not exist (null).
  [[nodiscard]] const Allocation* Entry(AllocationId id, SourceLine where = SourceLine::Here()) REQUIRES(this) {
    return Entry(state_.allocations, id, where);
  }
  [[nodiscard]] Result<const Allocation*> Known(AllocationId id, SourceLine where = SourceLine::Here()) REQUIRES(this) {
    return Known(state_.allocations, id, where);
  }
  [[nodiscard]] const Allocation* Find(AllocationId id) const REQUIRES(this) { return FindIn(state_.allocations, id); }
  // Returns `holds`. False breaks the session; `otherwise` says what is wrong.
  bool Check(bool holds, std::string_view otherwise, SourceLine where = SourceLine::Here()) REQUIRES(this);
  [[nodiscard]] Status Broken() const REQUIRES(this);  // what a caller gets after a failed check
  [[nodiscard]] std::uint64_t dropped_events() const REQUIRES(this) { return dropped_events_; }
  // Why there is no journal, so that pauses are refused; ok: there is one. A pause asks for a new one first.
  [[nodiscard]] const Status& JournalLost() const REQUIRES(this) { return lost_; }
  void RenewJournal() REQUIRES(this);
  [[nodiscard]] Status CanPause() const REQUIRES(this);  // refused: the session is broken or has no journal
  // Without the lock: before a pause, whether the journal's files can be written. kRefused: their file system stood still until
  // then. If they were removed, the next event begins them anew.
  [[nodiscard]] Status AwaitFiles(Deadline until) EXCLUDES(this);
  [[nodiscard]] const State& state() const REQUIRES(this) { return state_; }
  [[nodiscard]] JournalWriter* journal() REQUIRES(this) { return journal_.get(); }
  // A fresh id, taken before the event that creates the allocation, so that imports may wait for peers in parallel.
  [[nodiscard]] AllocationId TakeAllocationId() REQUIRES(this) { return AllocationId{next_allocation_++}; }

  // The driver's handle of a resident allocation; zero: none. Forgetting it closes the descriptor too.
  [[nodiscard]] DriverHandle HandleOf(AllocationId allocation) const REQUIRES(this);
  // What that handle of the driver stands behind; zero: nothing. Looks through all.
  [[nodiscard]] AllocationId AllocationOf(DriverHandle handle) const REQUIRES(this);
  void SetHandle(AllocationId allocation, DriverHandle handle) REQUIRES(this);
  void ForgetHandle(AllocationId allocation) REQUIRES(this);
  // A multicast object that a pause releases, or memory whose owner was lost, as a resume made it. It is no part of the state,
  // because no event tells an importer's journal what an object's owner has put in its place.
  struct Rebuilt {
    std::uint64_t number = 0;                // its incarnation (peers.h)
    std::optional<DeviceOrdinal> stands_in;  // ordinary memory there stands in for it, and is mapped repeatedly
    std::set<DeviceOrdinal> lacks;           // devices still to be added
  };
  [[nodiscard]] const Rebuilt& RebuiltAs(AllocationId allocation) const REQUIRES(this);
  void SetRebuilt(AllocationId allocation, Rebuilt rebuilt) REQUIRES(this);
  void DeviceAdded(AllocationId multicast, DeviceOrdinal device) REQUIRES(this);

  // Without the lock: a descriptor of a resident allocation, kept for the next importer if `keep`. If several threads ask at
  // once, one exports and the others get copies. kNotFound: it has no memory, or lost it meanwhile.
  Result<UniqueFd> Export(AllocationId allocation, Driver& driver, bool keep) EXCLUDES(this);

 private:
  // In a lambda of a function that requires the lock: tells Clang so.
  void CallerHoldsIt() const ASSERTS_HELD() {}
  void NoteHolder();
  void RecordWhatEnded() REQUIRES(this);
  static bool IsFailedCheck(const Status& work);
  // False: the system gives no memory for an event that has not `happened`.
  bool Recorded(EventBody body, bool happened) REQUIRES(this);
  void CannotFollow(const Event& event, const Status& why) REQUIRES(this);
  // `words` gives the reason; without memory for that a short one is good enough.
  template <class Words>
  void BreakWith(const Words& words) REQUIRES(this);
  void Append(const Event& event) REQUIRES(this);
  void SnapshotIfDue() REQUIRES(this);
  static std::string KeyText(AllocationId key) { return ToText(key); }
  static std::string KeyText(SessionId key) { return ToText(key); }
  static std::string KeyText(Address key) { return "address " + Hex(key); }
  static std::string KeyText(Bytes key) { return "offset " + Hex(key); }

  Mutex mutex_{LockRank::kLedger};
  std::atomic<std::uint32_t> holder_ = 0;  // the thread that locked it last, and when
  std::atomic<std::uint64_t> held_since_ns_ = 0;
  std::atomic<std::uint64_t> progress_ = 0;  // lifecycle in the lowest byte, then the cycle
  struct Owed {                              // by RecordSoon and BreakSoonIfCheckFailed
    std::mutex mutex;
    std::atomic<bool> any = false;
    std::vector<EventBody> events;
    std::atomic<std::uint64_t> progress = 0;  // as progress_ will be; 0: as it is
  } owed_;
  Mutex export_mutex_{LockRank::kExport};
  State state_ GUARDED_BY(this);
  TagPlaces tag_places_;  // of that state
  std::uint64_t next_allocation_ GUARDED_BY(this) = 1;
  std::uint64_t dropped_events_ GUARDED_BY(this) = 0;
  std::unique_ptr<JournalWriter> journal_ GUARDED_BY(this);
  Status lost_ GUARDED_BY(this);
  Status not_renewed_ GUARDED_BY(this);  // why the last try to begin anew failed
  std::uint64_t renew_after_ns_ GUARDED_BY(this) = 0;
  struct Backing {
    DriverHandle handle;
    std::uint64_t set_as = 0;  // handles_set_ then: the driver may give a handle again
    UniqueFd descriptor;
  };
  std::uint64_t handles_set_ GUARDED_BY(this) = 0;
  std::unordered_map<std::uint64_t, Backing> backing_ GUARDED_BY(this);
  std::unordered_map<std::uint64_t, Rebuilt> rebuilt_ GUARDED_BY(this);  // kept while it is released
};

using LedgerLock = LockOf<Ledger>;
using WithoutLedger = WithoutLock<Ledger>;

}  // namespace amem
