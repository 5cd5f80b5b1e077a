// cuMemAlloc memory and its IPC handles (64 bytes, which carry a token), of NCCL and of tags. AMem cuts this memory from
// allocations of its own, in slabs like NCCL's, so that a pause releases it as fast.
//
// Each method passes the gates and takes the ledger's lock itself; none is called with either. Imports go through Sharing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/cycle/coordinator.h"
#include "replay/session/lower_parts.h"
#include "replay/session/pools/chunk_space.h"
#include "replay/session/records.h"
#include "replay/session/sharing.h"

namespace amem {

class LegacyMemory : NoCopies {
 public:
  // `cycles`: of NCCL's memory. All of them must outlive it.
  LegacyMemory(const LowerParts& parts, Coordinator& cycles, PinnedSupply& pinned, Sharing& sharing);

  // kUnsupported: pass the call on to the driver, because the memory is the program's and is kept.
  Result<Address> Allocate(Bytes bytes, DeviceOrdinal device, const Origin& origin, bool for_application = false);
  Status Free(Address address);  // kNotFound: not ours
  Result<std::array<std::byte, 64>> Export(Address address);
  // Opened again, a handle gives the same address, and must be closed as often. kNotFound: not a token.
  Result<Address> Import(std::span<const std::byte, 64> handle, DeviceOrdinal device, const Origin& origin,
                         bool of_others = false);
  Status Close(Address address);
  // The same handle for memory of a tag: for the whole part that contains the address, as cudaMalloc memory is shared.
  Result<std::array<std::byte, 64>> ExportPart(Address address);  // kNotFound: not a tag's
  Result<TagPart> OpenedAt(Address address);  // what an IPC handle of a tag's memory opened there; kNotFound

 private:
  AllocationId NewPart(Bytes bytes, DeviceOrdinal device, const Origin& origin);
  Result<Address> OpenAgain(const Token& token, DeviceOrdinal device);  // zero: its memory is not open here
  Result<Address> MapImport(AllocationId id, DeviceOrdinal device, const Token& token, const CallSite& site);
  // These two release the lock while they wait for the driver.
  Result<ChunkSpace::Chunk> NewChunk(Bytes bytes, DeviceOrdinal device, const Origin& origin) REQUIRES(ledger_);
  Result<Address> Take(Bytes bytes, DeviceOrdinal device, const Origin& origin) REQUIRES(ledger_);
  void RecordRegion(AllocationId allocation, Address address, Bytes bytes, std::vector<AccessDescriptor> access,
                    const CallSite& site) REQUIRES(ledger_);
  Result<std::array<std::byte, 64>> TokenOf(Address address, AllocationId backing, Bytes offset, Bytes beyond = 0)
      REQUIRES(ledger_);
  Status DropRegion(Address address, Bytes bytes, AllocationId allocation) REQUIRES(ledger_);
  void OpenTo(DeviceOrdinal device) REQUIRES(ledger_);
  void Reach(DeviceOrdinal device, Address address) REQUIRES(ledger_);

  struct OpenedChunk {
    AllocationId allocation;
    Address address;
    Bytes asked = 0;  // by its owner
    DeviceOrdinal device;
  };

  const LowerParts parts_;
  Driver& driver_;
  Ledger& ledger_;
  Coordinator& cycles_;
  PinnedSupply& pinned_;
  Sharing& sharing_;
  std::map<DeviceOrdinal, ChunkSpace> spaces_ GUARDED_BY(ledger_);  // chunks for cuMemAlloc
  std::set<DeviceOrdinal> devices_ GUARDED_BY(ledger_);             // that may access them
  // Chunks that IPC handles opened, by owner and its id.
  std::map<std::pair<SessionId, AllocationId>, OpenedChunk> opened_ GUARDED_BY(ledger_);
  std::map<Address, std::uint64_t> opened_again_ GUARDED_BY(ledger_);  // how often handles were opened once more, by address
};

}  // namespace amem
