// What a session asks of the devices beside memory: whether they are idle, whether they have room, and what AMem holds in their
// contexts.
//
// No method is called with a lock. Those that change what is pinned take the mutex of NCCL's cycles, which the session owns.
#pragma once

#include <functional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "journal/base/mutex.h"
#include "journal/base/no_copies.h"
#include "replay/cycle/coordinator.h"
#include "replay/session/lower_parts.h"
#include "replay/session/pools/pools.h"
#include "replay/session/records.h"

namespace amem {

class SessionDevices : NoCopies {
 public:
  // `cycle_mutex`: one pause or resume of NCCL's memory at a time. All of them must outlive it.
  SessionDevices(const LowerParts& parts, Mutex& cycle_mutex, PinnedSupply& pinned, Coordinator& cycles, Pools& pools,
                 Records& records);

  // Waits for what a pause waits for first: the devices that NCCL uses here are idle.
  Status AwaitIdle();
  // Waits until all is done that was submitted to these streams so far. kRefused: it is not in time, or a stream is captured.
  Status AwaitStreams(std::span<const std::pair<DeviceOrdinal, void*>> streams);
  // kOutOfMemory: a device has too little free memory for a resume of all these scopes (zero: NCCL's memory). Asks nobody else.
  Status HasRoomFor(std::span<const PoolId> scopes);

  void TrimPinned(Bytes most);  // unpins host memory that holds no contents, down to `most`; waits for a cycle's end
  // Makes the program's call that gives up a reference to a device's primary context, while AMem holds none itself: so the
  // context ends with the program's last reference. What AMem had there is then forgotten as with Forget. While memory is
  // paused, or a pause or resume is under way, AMem's reference stays, and the context with it.
  Driver::Released ReleaseContext(DeviceOrdinal device, const std::function<int()>& release);
  // The program, whose work on the device has ended, is about to reset it (cudaDeviceReset): the parts of tags there are freed,
  // as the driver frees what cudaMalloc gave. If other memory of AMem's or NCCL's is there, or contents of paused memory are in
  // host memory pinned in the context, the session breaks, so that pauses say why they are refused.
  void Forget(DeviceOrdinal device);

 private:
  [[nodiscard]] std::vector<Address> PartsOn(DeviceOrdinal device);  // of tags
  void ForgetParts(DeviceOrdinal device, std::span<const Address> parts, std::string_view did);
  void TrimPinnedUntil(Bytes most, Deadline until);  // nothing, if a cycle has not ended until then

  const LowerParts parts_;
  Driver& driver_;
  Ledger& ledger_;
  Mutex& cycle_mutex_;
  PinnedSupply& pinned_;
  Coordinator& cycles_;
  Pools& pools_;
  Records& records_;
};

}  // namespace amem
