// Memory of AMem's own choosing: what it makes for cuMemAlloc and for pools.
#pragma once

#include <cstdint>
#include <optional>
#include <set>

#include "replay/driver/driver.h"
#include "replay/driver/mapped_region.h"
#include "replay/ledger/ledger.h"
#include "replay/session/chunk_space.h"
#include "statemachine/types.h"

namespace amem {

// Reachable for network cards, as cuMemAlloc memory is, where the device can do that.
inline constexpr std::uint8_t kWithAndWithoutRdma[] = {1, 0};

// Of memory on a device that can be exported.
AllocationProperties PropertiesOn(DeviceOrdinal device, std::uint8_t rdma);
AccessDescriptor ReadWrite(DeviceOrdinal device);

Result<Bytes> Rounded(Driver& driver, Bytes bytes, const AllocationProperties& properties);  // up, to the granularity

// Lets a device reach memory of another one. nullopt: devices without a link to each other stay apart, as they would with
// cudaMalloc. Else what is to be recorded.
std::optional<AccessSet> LetIn(Driver& driver, DeviceOrdinal device, const Extent& memory);

struct ChunkOwner {
  MemoryTag tag{};
  PoolId pool;
  CallSite site;
};
// A chunk of at least `bytes` with a handle and an address range of its own, which its device reaches, and those of `others`
// that can; recorded. Without the ledger's lock.
Result<ChunkSpace::Chunk> MakeChunk(Driver& driver, Ledger& ledger, Bytes bytes, DeviceOrdinal device, const ChunkOwner& owner,
                                    const std::set<DeviceOrdinal>& others);

}  // namespace amem
