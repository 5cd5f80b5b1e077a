// The hash by which NCCL itself tells communicators apart (commHash), the same in all ranks of one.
//
// For a communicator that was made from a unique id it is known: DJB2a over the id's bytes. NCCL has no call that tells it, so
// where in its communicator it keeps the hash is learned from those, and read there for the others. All functions may be called
// from any thread.
#pragma once

#include <cstdint>

#include "ncclpatch/nccl/types.h"

namespace amem::nccl {

std::uint64_t HashOf(const UniqueId& id);

// The hash that a communicator of a library (hook::Library::number) has. `expected` is what it should be if it was made from a
// unique id, else 0. Returns 0 where it cannot be told: no such communicator was seen before in this library, or the places
// where the hash may be do not agree. Reads memory that may be unmapped, without a fault. Not for one that is not ready.
std::uint64_t ReadHash(std::uint64_t library, const ncclComm* comm, std::uint64_t expected) noexcept;

}  // namespace amem::nccl
