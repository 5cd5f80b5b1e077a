// The hash by which NCCL itself tells communicators apart (commHash), the same in all ranks of one.
//
// For a communicator that was made from a unique id it follows from the id's bytes: DJB2a up to NCCL 2.21, and later two
// accumulators that take eight bytes at a time. NCCL has no call that tells it, so which of the two it is, and where in its
// communicator NCCL keeps it, is learned from those, and read there for the others. All functions may be called from any
// thread.
#pragma once

#include <array>
#include <cstdint>

#include "ncclpatch/nccl/types.h"

namespace amem::nccl {

// What the hash of a communicator may be; 0: nothing is expected.
using ExpectedHashes = std::array<std::uint64_t, 2>;
ExpectedHashes HashesOf(const UniqueId& id);

// The hash that a communicator of a library (hook::Library::number) has. `expected` is what it may be if it was made from a
// unique id, else zeros. Returns 0 where it cannot be told: no such communicator was seen before in this library, or the places
// where the hash may be do not agree. Reads memory that may be unmapped, without a fault. Not for one that is not ready.
std::uint64_t ReadHash(std::uint64_t library, const ncclComm* comm, const ExpectedHashes& expected) noexcept;

}  // namespace amem::nccl
