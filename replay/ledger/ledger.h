// The ledger: one session's state, its journal, and the driver handles that stand behind it today, moved forward together.
//
// Record() is the only way an event comes into being: Apply, then append to the journal. A call that gives something back to
// the driver (unmap, release, free a range) is made with the lock held over call and Record, so that the next owner of the same
// address records its call later. Calls that only take need the lock for their Record alone: they are slow, and the service
// thread must not wait for them.
//
// Code that works on the ledger relies on facts that Apply guarantees, such as "the allocation of a mapping exists". It checks
// them in release builds as well (Entry, Check): a fact that does not hold breaks the session and is answered with Broken().
// Nothing here throws or ends the process, because it is NCCL's.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "journal/base/mutex.h"
#include "journal/base/unique_fd.h"
#include "journal/journal.h"
#include "replay/driver/driver.h"
#include "statemachine/apply.h"
#include "statemachine/state.h"

namespace amem {

// Where a call stands in the source. std::source_location needs a newer Clang than Debian 12's.
struct SourceLine {
  static constexpr SourceLine Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  std::string_view file;
  int line = 0;
};

// It is itself what is locked: a function that needs the lock says REQUIRES(ledger), and LedgerLock holds it.
class CAPABILITY("ledger") Ledger {
 public:
  explicit Ledger(std::unique_ptr<JournalWriter> journal) : journal_(std::move(journal)) {}

  void lock() ACQUIRE();
  void unlock() RELEASE();
  // False: another thread has held it all the time. Some driver calls are made with the lock held, and may hang.
  [[nodiscard]] bool TryLockFor(std::chrono::milliseconds patience) TRY_ACQUIRE(true);
  void AssertHeld() const ASSERTS_HELD() { mutex_.AssertHeld(); }
  // Without the lock: kTimeout, which thread holds it, for how long, and where that thread is.
  [[nodiscard]] Status Held() const;
  // Without the lock: where the session stands in its pauses and resumes, and in which it is.
  [[nodiscard]] std::pair<Lifecycle, std::uint64_t> Progress() const;

  // Never fails towards the caller. An event that Apply refuses breaks the session (State::broken), and the next pause reports
  // it; nothing is appended after the event that broke it. But an event about memory that is only counted breaks nothing: it is
  // dropped and counted, and the journal says so. An append that fails costs the journal (JournalLost): the state goes on, and
  // with it a fresh journal as soon as there can be one.
  void Record(EventBody body) REQUIRES(this);
  void Break(const std::string& reason) REQUIRES(this);  // latches the reason why pauses are refused from now on
  // The entry of a table of the state that must be there. Null: it is not, and the session is broken.
  template <class Table>
  [[nodiscard]] const typename Table::mapped_type* Entry(const Table& table, const typename Table::key_type& key,
                                                         SourceLine where = SourceLine::Here()) REQUIRES(this) {
    const auto it = table.find(key);
    if (it != table.end()) return &it->second;
    Check(false, "no entry for " + KeyText(key), where);
    return nullptr;
  }
  // `holds` itself; when it is false the session is broken, and `otherwise` says what is wrong.
  bool Check(bool holds, std::string_view otherwise, SourceLine where = SourceLine::Here()) REQUIRES(this);
  [[nodiscard]] Status Broken() const REQUIRES(this);  // what a caller gets after a failed check
  [[nodiscard]] std::uint64_t dropped_events() const REQUIRES(this) { return dropped_events_; }
  // Why there is no journal now, which refuses pauses; ok: there is one. A pause asks for a new one first.
  [[nodiscard]] const Status& JournalLost() const REQUIRES(this) { return lost_; }
  void RenewJournal() REQUIRES(this);
  [[nodiscard]] Status CanPause() const REQUIRES(this);  // no: the session is broken, or has no journal
  [[nodiscard]] const State& state() const REQUIRES(this) { return state_; }
  [[nodiscard]] JournalWriter* journal() REQUIRES(this) { return journal_.get(); }
  // A fresh allocation id. Given out before the event that creates it, so that imports may wait for peers side by side.
  [[nodiscard]] AllocationId TakeAllocationId() REQUIRES(this) { return AllocationId{next_allocation_++}; }

  // The driver's handle for an allocation that is resident; zero if there is none. Forgetting it closes the descriptor too.
  [[nodiscard]] DriverHandle HandleOf(AllocationId allocation) const REQUIRES(this);
  void SetHandle(AllocationId allocation, DriverHandle handle) REQUIRES(this);
  void ForgetHandle(AllocationId allocation) REQUIRES(this);
  // What is known of a multicast object that a pause releases.
  struct Rebuilt {
    std::uint64_t number = 0;       // its incarnation (peers.h)
    bool stands_in = false;         // likewise
    std::set<DeviceOrdinal> lacks;  // devices that are still to be added to this incarnation
  };
  [[nodiscard]] const Rebuilt& RebuiltAs(AllocationId multicast) const REQUIRES(this);
  void SetRebuilt(AllocationId multicast, Rebuilt rebuilt) REQUIRES(this);
  void DeviceAdded(AllocationId multicast, DeviceOrdinal device) REQUIRES(this);

  // A copy of the exported descriptor that is kept for further importers (slabs have several); empty if none is kept.
  [[nodiscard]] UniqueFd CopyOfDescriptor(AllocationId allocation) const REQUIRES(this);
  void KeepDescriptor(AllocationId allocation, const UniqueFd& descriptor) REQUIRES(this);

  // Without the lock: a descriptor of a resident allocation, kept for the next importer if `keep`. Of several threads that ask
  // at the same time one exports, and the others wait and get a copy.
  Result<UniqueFd> Export(AllocationId allocation, Driver& driver, bool keep) EXCLUDES(this);

 private:
  void NoteHolder();
  void Append(const Event& event) REQUIRES(this);
  void SnapshotIfDue() REQUIRES(this);
  static std::string KeyText(AllocationId key) { return ToText(key); }
  static std::string KeyText(SessionId key) { return ToText(key); }
  static std::string KeyText(Address key) { return "address " + Hex(key.value); }
  static std::string KeyText(Bytes key) { return "offset " + Hex(key); }

  Mutex mutex_{LockRank::kLedger};
  std::atomic<std::uint32_t> holder_ = 0;  // the thread that locked it last, and when
  std::atomic<std::uint64_t> held_since_ns_ = 0;
  std::atomic<std::uint64_t> progress_ = 0;  // the lifecycle in the lowest byte, then the cycle
  Mutex export_mutex_{LockRank::kExport};
  State state_ GUARDED_BY(this);
  std::uint64_t next_allocation_ GUARDED_BY(this) = 1;
  std::uint64_t dropped_events_ GUARDED_BY(this) = 0;
  std::unique_ptr<JournalWriter> journal_ GUARDED_BY(this);
  Status lost_ GUARDED_BY(this);
  std::uint64_t renew_after_ns_ GUARDED_BY(this) = 0;
  struct Backing {
    DriverHandle handle;
    UniqueFd descriptor;
  };
  std::unordered_map<std::uint64_t, Backing> backing_ GUARDED_BY(this);
  std::unordered_map<std::uint64_t, Rebuilt> rebuilt_ GUARDED_BY(this);  // kept while an object is released
};

using LedgerLock = LockOf<Ledger>;
using WithoutLedger = WithoutLock<Ledger>;

}  // namespace amem
