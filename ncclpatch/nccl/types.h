// NCCL's own types, as far as its interface passes them: their sizes and values are the same in all versions from 2.18 on.
#pragma once

struct ncclComm;  // opaque, as in nccl.h

namespace amem::nccl {

struct UniqueId {
  char bytes[128];
};
using Stream = void*;
using Config = void;

// ncclResult_t
inline constexpr int kSuccess = 0, kSystemError = 2, kInvalidUsage = 5, kInProgress = 7;

}  // namespace amem::nccl
