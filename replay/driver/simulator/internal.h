// What the simulator's source files share; no other production file includes this.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include "journal/base/mutex.h"
#include "journal/base/unique_fd.h"
#include "replay/driver/simulator/simulator.h"
#include "statemachine/types.h"

namespace amem {

inline constexpr std::uint32_t kPosixDescriptor = 1, kFabric = 8;  // CUmemAllocationHandleType

inline constexpr std::string_view kNoSuchDevice = "there is no such device";
inline constexpr std::string_view kNoSuchHandle = "no such handle exists (it was released, or never made)";

inline constexpr std::string_view kNotMulticastGranular =
    "sizes, offsets and addresses must be multiples of the multicast granularity, and sizes not zero";
inline constexpr std::string_view kIncompleteTeam = "not all of its devices were added; the driver would let this call wait";

inline Address AddressOf(const void* pointer) { return Address{reinterpret_cast<std::uint64_t>(pointer)}; }
inline void* Pointer(Address address) { return reinterpret_cast<void*>(address.value); }  // NOLINT(performance-no-int-to-ptr)

struct Simulator::Physical {
  SimulatorWorld::Key key;
  Bytes bytes = 0;
  AllocationProperties properties;  // location in this process's ordinals
  std::int32_t world_device = SimulatorWorld::kHostMemory;
  UniqueFd descriptor;  // made when it is first needed
  DriverHandle handle;
  std::uint32_t references = 0;
  std::uint32_t mappings = 0;
  bool imported = false;
  bool multicast = false;  // `properties` say so too (kMulticastUsage)
};

// Marks a multicast object in its properties, through export and import; the simulator makes it of host memory.
inline constexpr std::uint16_t kMulticastUsage = 0x6d63;

struct Simulator::PinnedRegistry {
  Mutex mutex{LockRank::kLast};
  std::map<Address, Bytes> buffers GUARDED_BY(mutex);

  bool Holds(const std::byte* from, Bytes bytes) {
    const MutexLock lock(mutex);
    const Address address = AddressOf(from);
    const auto it = Containing(buffers, address);
    return it != buffers.end() && bytes <= it->second - (address.value - it->first.value);
  }
};

// How a simulated call fails: with a CUresult, the CUDA driver's words, and the broken rule.
// "cuMemMap ...: CUDA_ERROR_INVALID_VALUE (1, invalid argument) from the simulator: why"; the code is CodeOfResult's.
Status SimulatedFailure(int result, std::string_view tried, std::string_view why);

// "open FILE: no such file", of errno.
std::string Errno(const std::string& tried);

// fail(result, why) for a call described by `tried()`, which is called only on failure.
template <class Tried>
auto Failing(Tried tried) {
  return [tried](int result, std::string_view why) { return SimulatedFailure(result, tried(), why); };
}

}  // namespace amem
