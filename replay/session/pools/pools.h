// The pools of a session: memory of the program under a tag, with pauses and resumes of its own.
//
// A pool gives out parts of chunks, takes chunks from the driver, and gives empty ones back (PoolMemory); PoolCycles pauses and
// resumes it. This is the table of tags in front of both. Any thread may call any method; each takes the table's mutex itself.
// The NCCL gate that a chunk passes on its way back is taken without that mutex.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/cycle/coordinator.h"
#include "replay/session/lower_parts.h"
#include "replay/session/pools/pool_cycles.h"
#include "replay/session/pools/pool_table.h"
#include "statemachine/event.h"

namespace amem {

// A pool as people and programs see it.
struct PoolSnapshot {
  PoolId id;
  std::string tag;
  PoolPolicy policy{};
  std::string state;                          // "resident", "pausing", "paused" or "resuming"
  std::uint64_t pause_ns = 0, resume_ns = 0;  // of the last success; 0: none
  std::string failure;                        // of the last pause or resume; empty: success
  BackupStatistics contents;
};

class Pools : NoCopies {
 public:
  // SessionOptions::first_tag is called before the first pool is opened, with the table's mutex held.
  Pools(const CycleContext& context, const LowerParts& parts) : context_(context), parts_(parts) {}

  // ---- memory
  // Returns the open pool if the policy is the same. kInvalid: another policy, or the tag is empty, "nccl" or "user".
  // `whole`: as ChunkSpace's; what the first call says holds.
  Result<PoolId> Open(const std::string& tag, PoolPolicy policy, bool whole = false);
  // The pool of a tag that a peer shares memory of, whose gate the caller then holds; this session pauses it together with the
  // owner. Opens it if necessary, with the peer's policy until the program opens it. kRefused: it is paused.
  Result<PoolId> Join(const std::string& tag, PoolPolicy policy, InTags& in);
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
  void OpenTo(DeviceOrdinal device);  // gives the device access to all chunks, as peer access does

  // ---- pauses and resumes (PoolCycles)
  Status Pause(PoolId pool, const HowToPause& how) { return cycles_.Pause(pool, how); }
  Status Resume(PoolId pool, const HowToResume& how) { return cycles_.Resume(pool, how); }
  Status Wait(PoolId pool) { return cycles_.Wait(pool); }
  Status WaitOn(PoolId pool, void* stream) { return cycles_.WaitOn(pool, stream); }

  // ---- what there is
  [[nodiscard]] std::vector<PoolSnapshot> Snapshot();
  // Calls `use` if no pool is paused, in a cycle or about to begin one, and the table's mutex is free; no pool's cycle begins
  // meanwhile, so `use` must not call the pools. False: it was not called.
  bool IfAllRun(const std::function<void()>& use);
  void FreeUnfinished();                       // frees the buffers of late copies that have ended since
  [[nodiscard]] bool IsResident(PoolId pool);  // it is not paused, and no pause was asked for

 private:
  Result<PoolId> OpenNew(const std::string& tag, PoolPolicy policy, bool joined, bool whole = false) REQUIRES(table_.mutex);
  // Until parts can be taken. Releases the mutex while it waits.
  Status AwaitUse(PoolEntry& pool) REQUIRES(table_.mutex);
  void GrantAccessEverywhere(DeviceOrdinal device) REQUIRES(table_.mutex);
  PoolEntry* Holding(Address address, DeviceOrdinal& device) REQUIRES(table_.mutex);  // null: none

  const CycleContext context_;
  const LowerParts parts_;
  PoolTable table_;
  PoolCycles cycles_{parts_, table_};  // its threads end before the table does
};

}  // namespace amem
