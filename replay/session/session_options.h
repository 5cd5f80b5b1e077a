// The settings of a session. The other settings of the process are in ncclpatch/runtime/options.h.
#pragma once

#include <cstdint>
#include <filesystem>

#include "journal/base/deadline.h"
#include "statemachine/types.h"

namespace amem {

enum class Layout : std::uint8_t { kDirect, kSlab };
enum class UserMemory : std::uint8_t { kKeep, kRelease };
enum class Nvls : std::uint8_t { kKeep, kRelease };

struct SessionOptions {
  Layout layout = Layout::kSlab;               // AMEM_LAYOUT=slab|direct
  Bytes slab_bytes = Bytes{256} << 20;         // AMEM_SLAB_MB: the largest slab; a power of two of at least 2 MiB
  UserMemory user_memory = UserMemory::kKeep;  // AMEM_USER_MEMORY=keep|release: what a pause does with ncclMemAlloc memory
  // AMEM_NVLS=keep|release: what a pause does with multicast objects that this session makes, and with what is bound to them.
  // Who imports one does as its owner. kRelease was never run on hardware.
  Nvls nvls = Nvls::kKeep;
  Deadlines deadlines;                       // AMEM_TIMEOUT_MS: how long a pause or resume may take
  bool compare = false;                      // AMEM_VERIFY=0|1: all bytes after each resume with what was saved
  Bytes pinned_bytes = Bytes{4} << 30;       // AMEM_PINNED_MB: the most host memory that is pinned ahead of a pause of NCCL
  std::filesystem::path host_claims;         // HostClaims: the same file for all ranks; empty: none
  Bytes pool_pinned_bytes = Bytes{4} << 30;  // the same for all pools together
};

}  // namespace amem
