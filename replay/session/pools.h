// The pools of a session: memory of the program under a tag, with pauses and resumes of its own.
//
// A pool gives out parts of chunks, which it takes from the driver and gives back when they have emptied. Of one pool, one
// pause or resume is under way at a time; those of different pools, and NCCL's, may be under way side by side. What was asked
// for without waiting is done by two threads, one for pauses and one for resumes: of what is due, the highest priority first,
// then in the order of asking; of one pool, always in the order of asking.
//
// All methods may be called from any thread. The sources: pools.cpp (memory), pool_cycles.cpp (pauses and resumes).
#pragma once

#include <atomic>
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

class Pools {
 public:
  // Unmaps a chunk, releases it and frees its range, as the session does it for NCCL's memory.
  using Drop = std::function<Status(const ChunkSpace::Chunk&)>;
  Pools(const CycleContext& context, ScopeGates& gates, Drop drop);  // `gates` must outlive the pools
  ~Pools();  // waits for what is under way; what is only asked for is not done. Memory stays as it is.
  Pools(const Pools&) = delete;
  Pools& operator=(const Pools&) = delete;

  [[nodiscard]] bool any() const { return any_.load(std::memory_order_acquire); }  // was ever opened

  // ---- memory ------------------------------------------------------------------------------------------------------------
  // The same again is no change. kInvalid: it is open with another policy, or the tag is empty, "nccl" or "user".
  Result<PoolId> Open(const std::string& tag, PoolPolicy policy);
  // The pool of a tag under which a peer has shared memory with this session; opened, if it was not, with the peer's policy
  // until the program opens it.
  Result<PoolId> Join(const std::string& tag, PoolPolicy policy);
  Result<PoolId> Find(std::string_view tag);  // kNotFound: the message names those that are open
  // Between the two a thread allocates from the pool, perhaps through an allocator that has memory of it in reserve, so the
  // pool can neither be paused when it is entered (kRefused) nor be paused before it is left as often.
  Status Enter(PoolId pool);
  void Leave(PoolId pool);
  // kRefused: the pool is paused, or about to be; a resume that is under way is waited for. kOutOfMemory: as the driver says.
  // A request for nothing gets an address as well. Aligned to 512 bytes.
  Result<Address> Allocate(PoolId pool, Bytes bytes, DeviceOrdinal device);
  // As cudaFree, waits for what was submitted to `stream` before, on which the memory was used last. While that is being
  // captured, or the pool is in a pause or resume, the memory is given back later. kNotFound: no part of a pool begins there.
  Status Free(Address address, void* stream);

  // ---- pauses and resumes ------------------------------------------------------------------------------------------------
  // With `wait` the result is that of the pause or resume, after what was asked for before. Without, a failure comes at the
  // next Wait, or at the next Pause that finds the pool still paused; another Resume tries again.
  struct HowToPause {
    bool wait = true;
    // Contents are saved, whole, after what this stream holds now, and no other stream is waited for: the program must not
    // touch the memory from there on. Otherwise the devices of the pool are waited for.
    std::optional<void*> after;
  };
  Status Pause(PoolId pool, const HowToPause& how);
  struct HowToResume {
    bool wait = true;
    int priority = 0;     // higher first
    bool patient = true;  // waits for sessions that share the memory, live and stay paused; else until the deadline
  };
  Status Resume(PoolId pool, const HowToResume& how);
  // Waits for all that is under way, and hands out the failure that nobody has heard of. Of a pool that stands still: OK.
  Status Wait(PoolId pool);
  // Waits until all copies of a resume are queued, and lets the stream wait for them. kRefused: the pool is paused, and no
  // resume was asked for.
  Status WaitOn(PoolId pool, void* stream);

  // ---- what there is -----------------------------------------------------------------------------------------------------
  struct Standing {
    PoolId id;
    std::string tag;
    PoolPolicy policy{};
    std::string state;                          // "resident", "pausing", "paused" or "resuming"
    std::uint64_t pause_ns = 0, resume_ns = 0;  // the last that succeeded; 0: none
    std::string failure;                        // of the last pause or resume; empty: it succeeded
    BackupStatistics contents;
  };
  [[nodiscard]] std::vector<Standing> Stand();

 private:
  struct Late {  // to be given back
    Address address;
    DeviceOrdinal device;
    void* stream = nullptr;
    std::unique_ptr<StreamMoment> moment{};  // what the stream held when it was freed
    bool captured = false;                   // the stream was being captured, so that there is no moment yet
  };
  struct Entry {
    PoolId id;
    std::string tag;
    PoolPolicy policy{};
    bool joined = false;  // opened for memory of a peer, and not by the program
    std::unique_ptr<Coordinator> cycle;
    std::map<DeviceOrdinal, ChunkSpace> spaces;
    std::set<DeviceOrdinal> let_in;  // devices that were given access to all chunks
    std::vector<Late> late;
    std::size_t dropping = 0;          // chunks that are being given back just now
    std::optional<CycleKind> running;  // under way
    std::size_t waiting = 0;           // tasks
    std::size_t inside = 0;            // how often threads have entered it
    CycleKind last_asked = CycleKind::kResume;
    bool queued = false;  // all copies of the resume that is under way
    Status unheard;       // the failure that nobody has heard of
    std::string failure;  // of the last pause or resume
  };
  struct Task {
    Entry* pool = nullptr;
    CycleKind kind{};
    int priority = 0;
    bool patient = false;
    std::unique_ptr<StreamMoment> after;
  };

  Entry& At(PoolId pool) REQUIRES(mutex_) { return *pools_.at(pool); }
  Entry* Named(std::string_view tag) REQUIRES(mutex_);  // null: none
  Result<PoolId> OpenNew(const std::string& tag, PoolPolicy policy, bool joined) REQUIRES(mutex_);
  [[nodiscard]] Lifecycle LifecycleOf(const Entry& pool);
  [[nodiscard]] bool Busy(const Entry& pool) const REQUIRES(mutex_) { return pool.running || pool.waiting > 0; }
  // Those with a star let go of the mutex while they wait.
  Status AwaitUse(Entry& pool) REQUIRES(mutex_);  // * until parts can be taken
  [[nodiscard]] Status CanAsk(const Entry& pool, CycleKind kind) const REQUIRES(mutex_);
  Result<Address> AddChunk(Entry& pool, ChunkSpace& space, Bytes bytes, DeviceOrdinal device) REQUIRES(mutex_);
  Result<Address> MakeChunk(Entry& pool, ChunkSpace& space, Bytes bytes, Bytes first, DeviceOrdinal device) REQUIRES(mutex_);
  void LetInEverywhere(DeviceOrdinal device) REQUIRES(mutex_);
  void LetAllIn(Entry& pool) REQUIRES(mutex_);  // is running, and nothing of it is under way on another thread
  Entry* Holding(Address address, DeviceOrdinal& device) REQUIRES(mutex_);  // null: none
  void NoteMoment(Late& late) const;
  [[nodiscard]] bool Idle(Late& late) const;
  Status GiveBack(Entry& pool, Address address, DeviceOrdinal device) REQUIRES(mutex_);  // *
  enum class Who : std::uint8_t { kAnybody, kCycle };    // a pause or resume of the pool, at its end
  void GiveLate(Entry& pool, Who who) REQUIRES(mutex_);  // *

  Status Now(const Task& task) REQUIRES(mutex_);  // *
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
  std::atomic<bool> any_ = false;
  const ForkGuard fork_;

  Mutex mutex_{LockRank::kPools};  // over all below; not held while a pool pauses or resumes
  Condition changed_;
  std::map<PoolId, std::unique_ptr<Entry>> pools_ GUARDED_BY(mutex_);  // none ever goes
  std::set<DeviceOrdinal> devices_ GUARDED_BY(mutex_);                 // on which chunks were made
  std::list<Task> tasks_ GUARDED_BY(mutex_);                           // in the order of asking
  std::map<CycleKind, std::thread> workers_;
  bool stop_ GUARDED_BY(mutex_) = false;
};

}  // namespace amem
