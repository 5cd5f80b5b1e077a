// Memory that AMem makes for cuMemAlloc and for pools.
#pragma once

#include <cstdint>
#include <optional>
#include <set>

#include "replay/driver/driver.h"
#include "replay/driver/mapped_region.h"
#include "replay/ledger/ledger.h"
#include "replay/session/pools/chunk_space.h"
#include "statemachine/types.h"

namespace amem {

// With RDMA, as cuMemAlloc memory, if the device can do it.
inline constexpr std::uint8_t kWithAndWithoutRdma[] = {1, 0};

Result<Bytes> Rounded(Driver& driver, Bytes bytes, const AllocationProperties& properties);  // up to the granularity

// The driver's answer to a size that cannot be (ChunkSpace::kTooMany).
Status NoSuchSize(const char* call, Bytes bytes);

// Gives a device access to another one's memory. nullopt: devices without a link stay apart, as with cudaMalloc. Otherwise the
// event to record.
std::optional<AccessSet> GrantAccess(Driver& driver, DeviceOrdinal device, const Extent& memory);

struct ChunkOwner {
  MemoryTag tag{};
  PoolId pool;
  CallSite site;
};
// Makes and records a chunk of at least `bytes` with its own handle and address range. Its device may access it, and those of
// `others` that can. Without the ledger's lock.
Result<ChunkSpace::Chunk> MakeChunk(Driver& driver, Ledger& ledger, Bytes bytes, DeviceOrdinal device, const ChunkOwner& owner,
                                    const std::set<DeviceOrdinal>& others);

}  // namespace amem
