// The pools of a session: memory of the program under a tag, with pauses and resumes of its own.
//
// A pool gives out parts of chunks, takes chunks from the driver, and gives empty ones back. A pool has one pause or resume
// under way at a time; different pools, and NCCL's memory, may overlap. Requests without waiting are done by two threads, one
// for pauses and one for resumes: the highest priority first, then in the order of asking; for one pool always in the order of
// asking.
//
// Any thread may call any method. Sources: pools.cpp (memory), pool_cycles.cpp (pauses and resumes).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "journal/base/fork_guard.h"
#include "journal/base/mutex.h"
#include "replay/cycle/call_gate.h"
#include "replay/cycle/coordinator.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "replay/session/chunk_space.h"
#include "statemachine/event.h"

namespace amem {

// How long the end of a cycle waits for the ledger, which a driver call that hangs may hold.
inline constexpr std::chrono::milliseconds kToTidyUp{1000};

class Pools : NoCopies {
 public:
  // Unmaps a chunk, releases it and frees its range.
  using Drop = std::function<Status(const ChunkSpace::Chunk&)>;
  // `gates` must outlive the pools; `ended` is called at the end of each cycle, without locks; `first` before the first pool is
  // opened, and must not call the pools.
  Pools(const CycleContext& context, ScopeGates& gates, Drop drop, std::function<void()> ended,
        std::function<void()> first = {});
  ~Pools();  // waits for what is under way and drops what is only asked for; memory stays

  [[nodiscard]] bool any() const { return any_.load(std::memory_order_acquire); }  // whether one was ever opened

  // ---- memory
  // Returns the open pool if the policy is the same. kInvalid: another policy, or the tag is empty, "nccl" or "user".
  // `whole`: as ChunkSpace's; what the first call says holds.
  Result<PoolId> Open(const std::string& tag, PoolPolicy policy, bool whole = false);
  // The pool of a tag that a peer shares memory of. Opens it if necessary, with the peer's policy until the program opens it.
  Result<PoolId> Join(const std::string& tag, PoolPolicy policy);
  Result<PoolId> Find(std::string_view tag);  // kNotFound: the message names the open ones
  // Between Enter and Leave a thread allocates from the pool, perhaps through an allocator that keeps a reserve. So a paused
  // pool cannot be entered (kRefused), nor an entered one be paused.
  Status Enter(PoolId pool);
  void Leave(PoolId pool);
  // kRefused: the pool is paused or about to be; waits for a resume that is under way. kOutOfMemory: from the driver. Zero
  // bytes get an address as well. Aligned to 512 bytes; in a whole pool to the granularity.
  Result<Address> Allocate(PoolId pool, Bytes bytes, DeviceOrdinal device);
  void Made(PoolId pool, Bytes bytes);  // memory of the pool that is no chunk
  // Call it before such memory is given back (Coordinator::AwaitCopies).
  Status AwaitCopies(PoolId pool);
  // As cudaFree, waits for what was submitted to `stream`, where the memory was used last; none: the caller has waited for the
  // device. If the stream is being captured, or the pool is in a pause or resume, the memory is given back later. kNotFound: no
  // part begins there.
  Status Free(Address address, std::optional<void*> stream);
  void OpenTo(DeviceOrdinal device);  // lets the device access all chunks, as peer access does

  // ---- pauses and resumes
  // With `wait` the result is that of the pause or resume, after all earlier requests. Otherwise a failure is returned by the
  // next Wait, or by the next Pause that finds the pool still paused; another Resume tries again.
  struct HowToPause {
    bool wait = true;
    // Saves all contents after what this stream holds now, without waiting for other streams: the program must not touch the
    // memory from then on. Otherwise waits for the pool's devices.
    std::optional<void*> after;
    bool keeps = false;  // saves contents, whatever the policy
  };
  Status Pause(PoolId pool, const HowToPause& how);
  struct HowToResume {
    bool wait = true;
    int priority = 0;  // higher first
    // waits for sessions that share the memory while they live and stay paused; otherwise until the deadline
    bool patient = true;
  };
  Status Resume(PoolId pool, const HowToResume& how);
  // Waits for all that is under way, and returns the failure that nobody has heard of yet. OK if nothing is under way.
  Status Wait(PoolId pool);
  // Waits until all copies of a resume are queued, and makes the stream wait for them. kRefused: the pool is paused, and no
  // resume was requested.
  Status WaitOn(PoolId pool, void* stream);

  // ---- what there is
  struct Standing {
    PoolId id;
    std::string tag;
    PoolPolicy policy{};
    std::string state;                          // "resident", "pausing", "paused" or "resuming"
    std::uint64_t pause_ns = 0, resume_ns = 0;  // of the last success; 0: none
    std::string failure;                        // of the last pause or resume; empty: success
    BackupStatistics contents;
  };
  [[nodiscard]] std::vector<Standing> Stand();
  // Calls `use` unless a pool is paused, or on its way, or that cannot be told at once; no cycle of one begins meanwhile.
  // False: it was not called.
  bool IfAllRun(const std::function<void()>& use);
  void FreeUnfinished();                       // what copies used that had not ended, and have by now
  [[nodiscard]] bool IsResident(PoolId pool);  // it is not paused, and no pause was asked for

 private:
  struct Late {  // memory to give back later
    Address address;
    DeviceOrdinal device;
    void* stream = nullptr;
    std::unique_ptr<StreamMoment> moment{};  // what the stream held at the free
    bool captured = false;                   // the stream was being captured, so there is no moment yet
  };
  struct Entry {
    PoolId id;
    std::string tag;
    PoolPolicy policy{};
    bool joined = false;  // opened for a peer's memory, not by the program
    bool whole = false;
    std::unique_ptr<Coordinator> cycle;
    std::map<DeviceOrdinal, ChunkSpace> spaces;
    std::set<DeviceOrdinal> let_in;  // may access all chunks
    std::vector<Late> late;
    std::size_t changing = 0;          // chunks that are being made or given back
    std::optional<CycleKind> running;  // under way
    std::size_t waiting = 0;           // tasks that wait
    std::size_t inside = 0;            // how often threads have entered it
    CycleKind last_asked = CycleKind::kResume;
    bool queued = false;  // all copies of the current resume
    bool led = false;     // and a stream goes on behind them
    Status unheard;       // a failure that nobody has heard of
    std::string failure;  // of the last pause or resume
  };
  struct Task {
    Entry* pool = nullptr;
    CycleKind kind{};
    int priority = 0;
    bool patient = false;
    bool keeps = false;
    std::unique_ptr<StreamMoment> after;
  };

  Entry* Find(PoolId pool) REQUIRES(mutex_) {  // null: there is none
    const auto* const entry = FindIn(pools_, pool);
    return entry == nullptr ? nullptr : entry->get();
  }
  Result<Entry*> Known(PoolId pool) REQUIRES(mutex_);   // for callers that answer with a Status
  Entry* Named(std::string_view tag) REQUIRES(mutex_);  // null: none
  Result<PoolId> OpenNew(const std::string& tag, PoolPolicy policy, bool joined, bool whole = false) REQUIRES(mutex_);
  [[nodiscard]] Lifecycle LifecycleOf(const Entry& pool);
  [[nodiscard]] bool Busy(const Entry& pool) const REQUIRES(mutex_) { return pool.running || pool.waiting > 0; }
  // Functions with a star release the mutex while they wait.
  Status AwaitUse(Entry& pool) REQUIRES(mutex_);  // * until parts can be taken
  [[nodiscard]] Status CanAsk(const Entry& pool, CycleKind kind) const REQUIRES(mutex_);
  Result<Address> AddChunk(Entry& pool, ChunkSpace& space, Bytes bytes, DeviceOrdinal device) REQUIRES(mutex_);
  Result<Address> MakeChunk(Entry& pool, ChunkSpace& space, Bytes bytes, Bytes first, DeviceOrdinal device) REQUIRES(mutex_);
  void LetInEverywhere(DeviceOrdinal device) REQUIRES(mutex_);
  void LetAllIn(Entry& pool) REQUIRES(mutex_);                              // the pool runs, and no other thread works on it
  Entry* Holding(Address address, DeviceOrdinal& device) REQUIRES(mutex_);  // null: none
  void NoteMoment(Late& late) const;
  [[nodiscard]] bool Idle(Late& late) const;
  Status GiveBack(Entry& pool, Address address, DeviceOrdinal device) REQUIRES(mutex_);  // *
  Status DropNow(Entry& pool, const ChunkSpace::Chunk& chunk) REQUIRES(mutex_);          // *
  enum class Who : std::uint8_t { kAnybody, kCycle };    // kCycle: the pool's own pause or resume, at its end
  void GiveLate(Entry& pool, Who who) REQUIRES(mutex_);  // *

  // The pools until the end of a call's own time; another thread may be in the driver with them.
  [[nodiscard]] bool TryLock(Deadline until) TRY_ACQUIRE(true, mutex_);
  [[nodiscard]] Status TooLate(const Entry* pool, CycleKind kind, const char* why) const;
  Status AwaitTurn(Entry& pool, CycleKind kind, bool alone, Deadline until) REQUIRES(mutex_);  // *
  Status Now(const Task& task, Deadline until) REQUIRES(mutex_);                               // *
  Status Later(Task task) REQUIRES(mutex_);
  Status Run(Entry& pool, const Task& task) REQUIRES(mutex_);  // *
  Status StartWorker(CycleKind kind) REQUIRES(mutex_);
  void Work(CycleKind kind);
  std::list<Task>::iterator Due(CycleKind kind) REQUIRES(mutex_);

  const CycleContext context_;
  Driver& driver_;
  Ledger& ledger_;
  ScopeGates& gates_;
  const Drop drop_;
  const std::function<void()> ended_, first_;
  std::atomic<bool> any_ = false;
  const ForkGuard fork_;

  Mutex mutex_{LockRank::kPools};  // guards all below; released while a pool pauses or resumes
  const ForgottenInChild<Condition> changed_{fork_};
  std::map<PoolId, std::unique_ptr<Entry>> pools_ GUARDED_BY(mutex_);  // never erased
  std::set<DeviceOrdinal> devices_ GUARDED_BY(mutex_);                 // with chunks
  std::list<Task> tasks_ GUARDED_BY(mutex_);                           // in the order of asking
  const ForgottenInChild<std::map<CycleKind, std::thread>> workers_{fork_};
  bool stop_ GUARDED_BY(mutex_) = false;
};

}  // namespace amem
