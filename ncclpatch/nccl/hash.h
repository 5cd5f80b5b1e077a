// The hash by which NCCL tells communicators apart (commHash), equal in all their ranks.
//
// For a communicator made from a unique id it follows from the id: by DJB2a up to NCCL 2.21, later by two accumulators over
// eight bytes at a time. No NCCL call tells it. From such communicators AMem learns which way it is and where NCCL keeps it,
// and reads it there for others. Any thread may call.
#pragma once

#include <array>
#include <cstdint>

#include "ncclpatch/nccl/types.h"

namespace amem::nccl {

// The possible hashes of a communicator; 0: none.
using ExpectedHashes = std::array<std::uint64_t, 2>;
ExpectedHashes HashesOf(const UniqueId& id);

// The hash of a communicator of a library (hook::Library::number). `expected`: what it may be if it was made from a unique id,
// else zeros. 0: unknown, because no such communicator was seen in this library, or the possible places disagree. Reads memory
// that may be unmapped, without a fault. Only for ready communicators.
std::uint64_t ReadHash(std::uint64_t library, const ncclComm* comm, const ExpectedHashes& expected) noexcept;

}  // namespace amem::nccl
