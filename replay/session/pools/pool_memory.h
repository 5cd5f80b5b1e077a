// The memory of one pool: chunks from the driver, cut into parts for the program.
//
// The mutex of the pools (PoolTable) guards it: each method gets that mutex, locked by its caller, as an argument. Methods
// marked * release it while the driver makes or frees a chunk, when `changing` delays the pool's pauses and resumes, or while
// they wait for a stream. A chunk passes NCCL's gate on its way back, so a free waits for NCCL's cycles.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "journal/base/deadline.h"
#include "journal/base/mutex.h"
#include "journal/base/no_copies.h"
#include "replay/cycle/coordinator.h"
#include "replay/driver/driver.h"
#include "replay/session/lower_parts.h"
#include "replay/session/pools/chunk_space.h"
#include "statemachine/types.h"

namespace amem {

// A part that the program has freed, and that is given back once its stream has done what it held then.
struct FreedPart {
  Address address;
  DeviceOrdinal device;
  void* stream = nullptr;
  std::unique_ptr<StreamMoment> moment{};  // what the stream held at the free
  bool captured = false;                   // the stream was being captured, so there is no moment yet
};

class PoolMemory : NoCopies {
 public:
  // `cycles`: of the pool. `changed`: notified when `changing` falls. All of them must outlive it. `whole`: as ChunkSpace's.
  PoolMemory(const LowerParts& parts, PoolId pool, Coordinator& cycles, Condition& changed, bool whole)
      : parts_(parts), pool_(pool), cycles_(cycles), changed_(changed), whole_(whole) {}

  // Chunks are whole from now on, if there is none yet.
  void SetWhole([[maybe_unused]] Mutex& mutex) REQUIRES(mutex) { whole_ = whole_ || spaces_.empty(); }
  // A part of a chunk that is there. nullopt: a chunk must be added.
  std::optional<Address> Take(Bytes bytes, DeviceOrdinal device, Mutex& mutex) REQUIRES(mutex);
  // * The same from a new chunk, to which `devices` have access; that set may grow meanwhile.
  Result<Address> TakeNew(Bytes bytes, DeviceOrdinal device, const std::set<DeviceOrdinal>& devices, Mutex& mutex)
      REQUIRES(mutex);
  // The part that begins there, which Take or TakeNew has just returned.
  [[nodiscard]] std::optional<ChunkSpace::Part> PartAt(Address address, DeviceOrdinal device, Mutex& mutex) const
      REQUIRES(mutex);
  [[nodiscard]] std::optional<DeviceOrdinal> DeviceOf(Address part, Mutex& mutex) const REQUIRES(mutex);  // nullopt: none here

  // What becomes of a part that is freed.
  [[nodiscard]] bool IsFreed(Address part, Mutex& mutex) const REQUIRES(mutex);       // and is given back later
  Status GiveBack(Address part, DeviceOrdinal device, Mutex& mutex) REQUIRES(mutex);  // *
  void GiveBackLater(FreedPart part, [[maybe_unused]] Mutex& mutex) REQUIRES(mutex) { freed_.push_back(std::move(part)); }
  // * Gives back what could not be given back at the free. What its stream still uses stays for the next time; so does the rest
  // once `stops` says so, which is asked with the mutex held. `running`: the pool is not paused, so streams may use its memory.
  void GiveBackFreed(bool running, const std::function<bool()>& stops, Mutex& mutex) REQUIRES(mutex);
  [[nodiscard]] bool HasFreed([[maybe_unused]] Mutex& mutex) const REQUIRES(mutex) { return !freed_.empty(); }
  // Without the mutex. What the stream holds now, which may still use the memory; not while it is being captured.
  void NoteMoment(FreedPart& part) const;
  // Without the mutex. Whether all that the stream held at the free has ended. If the stream is gone, its device says.
  [[nodiscard]] bool StreamIsDone(FreedPart& part) const;

  // Gives these devices access to all chunks, as peer access does. The pool runs, and no other thread works on it.
  void GrantAccess(const std::set<DeviceOrdinal>& devices, Mutex& mutex) REQUIRES(mutex);
  [[nodiscard]] bool AllHaveAccess(const std::set<DeviceOrdinal>& devices, [[maybe_unused]] Mutex& mutex) const
      REQUIRES(mutex) {
    return granted_ == devices;
  }
  [[nodiscard]] bool changing([[maybe_unused]] Mutex& mutex) const REQUIRES(mutex) { return changing_ > 0; }

 private:
  Result<Address> MakeChunk(ChunkSpace& space, Bytes bytes, Bytes first, DeviceOrdinal device,
                            const std::set<DeviceOrdinal>& devices, Mutex& mutex) REQUIRES(mutex);  // *
  Status FreeChunk(const ChunkSpace::Chunk& chunk) const;
  Status OrBreak(Status checked) const;  // a failed check breaks the session; takes the ledger's lock

  const LowerParts parts_;
  const PoolId pool_;
  Coordinator& cycles_;
  Condition& changed_;
  bool whole_;
  std::map<DeviceOrdinal, ChunkSpace> spaces_;
  std::set<DeviceOrdinal> granted_;  // have access to all chunks
  std::vector<FreedPart> freed_;     // to give back later
  std::size_t changing_ = 0;         // chunks that are being made or given back
};

}  // namespace amem
