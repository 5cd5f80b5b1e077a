// NCCL's allocations, address ranges and mappings: the driver's calls of cuMemCreate's family, in AMem's terms, and multicast
// objects. Where an allocation is part of a slab, the driver is not asked, because the slab is mapped already.
//
// Memory that another library makes under a tag comes the same way; then the tag's gate is passed beside NCCL's.
//
// Each method passes the gate and takes the ledger's lock itself; none is called with either. Status::driver_result of a
// failure is the CUresult for NCCL.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/cycle/coordinator.h"
#include "replay/session/lower_parts.h"
#include "replay/session/pools/pools.h"
#include "statemachine/event.h"

namespace amem {

class NcclMemory : NoCopies {
 public:
  // `cycles`: of NCCL's memory. Both must outlive it.
  NcclMemory(const LowerParts& parts, Coordinator& cycles, Pools& pools);

  // `for_application`: memory for the program (ncclMemAlloc), which may hand it to libraries that ask the driver about it. So
  // it is never part of a slab; its tag says that it is the program's, and SessionOptions say what a pause does with it.
  // `tag`: it is another library's, under that tag. kRefused: the tag is paused.
  Result<AllocationId> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags, const Origin& origin,
                              bool for_application = false, const std::string& tag = {});
  Status Release(AllocationId allocation);
  Result<AllocationId> Retain(Address address);  // kNotFound: not an address of ours
  Result<Address> Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site);
  Status FreeRange(Address address, Bytes bytes);  // kNotFound: not a range of ours
  Status Map(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags);
  Status Unmap(Address address, Bytes bytes);  // kNotFound: not a mapping of ours
  Status SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access);

  Result<AllocationProperties> Properties(AllocationId allocation);
  // The base and size of our allocation or mapping that contains `address`; kNotFound: none (cuMemGetAddressRange).
  Result<std::pair<Address, Bytes>> AddressRange(Address address);
  // The driver handle behind an allocation, and the allocation's offset in it; handle zero: none.
  [[nodiscard]] std::pair<DriverHandle, Bytes> Backing(AllocationId allocation);
  // Own memory that a pause took from under an address. kNotFound: none is missing there.
  Result<AllocationProperties> PausedAt(Address address);

  // Whether a pause releases what ncclMemAlloc made, which is the program's own.
  [[nodiscard]] bool ReleasesUserMemory() const { return options_.user_memory == UserMemory::kRelease; }

  // ---- multicast objects: the caller makes the driver's calls itself, with handles from Backing, and records them
  // (Records::Note) while it holds the gate (CallAdmission::EnterCall), which these do not pass.
  // Records a multicast object that the driver made. The fresh id becomes NCCL's handle.
  AllocationId NoteMulticast(MulticastCreated created);
  // Call it before memory is bound: an allocation in a slab that has no address leaves the slab, because bound memory must not
  // move.
  void PrepareBind(AllocationId memory);
  // Call it before memory is unbound. True: do not ask the driver, because a pause unbound the memory, or a resume could not
  // make the object again; this is recorded.
  bool ForgetUnbound(AllocationId multicast, DeviceOrdinal device, Bytes offset, Bytes bytes);

 private:
  void RememberLastHandle(AllocationId allocation) const { LastHandle::OfThread() = {session_, allocation}; }
  Status MapOnce(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags);
  bool CutUpSlabOf(AllocationId allocation);  // false: not possible
  // The place of this thread's last allocation, if the range can be meant for it. kNotFound: it cannot.
  Result<Address> ReservePart(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site);
  Status PutBackPart(Address address, Bytes bytes, AllocationId allocation);

  // These calls for parts of slabs.
  Status FreePart(Address address, Bytes bytes, AllocationId slab) REQUIRES(ledger_);
  // False: the driver must map it.
  Result<bool> MapPart(Address address, Bytes bytes, Bytes offset, AllocationId allocation) REQUIRES(ledger_);
  Status MoveTo(Address address, AllocationId allocation, AllocationId other) REQUIRES(ledger_);
  Status UnmapPart(Address address, Bytes bytes, AllocationId slab) REQUIRES(ledger_);
  const std::vector<AllocationId>& PartsAt(Address address) REQUIRES(ledger_);
  AllocationId MappedPartAt(Address address) REQUIRES(ledger_);
  // Mapped there with that size.
  Result<AllocationId> WholePartAt(std::string_view call, Address address, Bytes bytes) REQUIRES(ledger_);

  const SessionOptions& options_;
  const SessionId session_;
  Driver& driver_;
  Ledger& ledger_;
  CallAdmission& calls_;
  Tokens& tokens_;
  DroppedImports& dropped_;
  Slabs& slabs_;
  Allocations& allocations_;
  Coordinator& cycles_;
  Pools& pools_;
};

}  // namespace amem
