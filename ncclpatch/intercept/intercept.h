// Interception: what the replaced driver functions of this folder have in common.
//
// Rules of conduct in there: NCCL gets the driver's answers unless memory is AMem's; what is not AMem's passes through and is
// journaled as such; a null argument is CUDA_ERROR_INVALID_VALUE and never a crash; nothing but NCCL's own calls is seen.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>
#include <string>

#include "ncclpatch/hook/symbols.h"
#include "ncclpatch/runtime/runtime.h"
#include "replay/session/session.h"

namespace amem::intercept {

// The handles that NCCL holds: an allocation id under a tag. A driver's handle is a host pointer, whose top bits are clear.
inline constexpr std::uint64_t kTagMask = 0xFFFF'0000'0000'0000, kHandleTag = 0xA3E3'0000'0000'0000;

inline CUmemGenericAllocationHandle ToGuest(AllocationId allocation) { return kHandleTag | allocation.value; }
inline bool IsGuest(CUmemGenericAllocationHandle handle) { return (handle & kTagMask) == kHandleTag; }
inline AllocationId ToAllocation(CUmemGenericAllocationHandle handle) { return AllocationId{handle & ~kTagMask}; }

// What NCCL is told: the driver's own result if it made one, and otherwise the nearest to the class of failure. A failure that
// the driver did not make is logged, because NCCL will report its number only.
CUresult ToDriver(const char* call, const Status& status);

// Records a call that was about memory that is not AMem's, and returns its result.
CUresult PassedOn(Session& session, const char* call, std::uint64_t subject, CUresult result);

AllocationProperties FromDriver(const CUmemAllocationProp& properties);
CUmemAllocationProp ToDriver(const AllocationProperties& properties);

// One file a family of driver calls, each with its table; Tables() has them all, for symbols::Install.
std::span<const symbols::Replacement> CopyReplacements();
std::span<const symbols::Replacement> CudaIpcReplacements();
std::span<const symbols::Replacement> GetProcAddressReplacements();
std::span<const symbols::Replacement> HostMemoryReplacements();
std::span<const symbols::Replacement> LaunchReplacements();
std::span<const symbols::Replacement> MemoryReplacements();
std::span<const symbols::Replacement> MulticastReplacements();
std::span<const symbols::Replacement> SharingReplacements();
std::span<const symbols::Replacement> VerbsReplacements();
const symbols::Tables& Tables();

}  // namespace amem::intercept
