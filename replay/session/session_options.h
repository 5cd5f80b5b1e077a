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
  Layout layout = Layout::kSlab;               // AMEM_LAYOUT
  Bytes slab_bytes = Bytes{256} << 20;         // the largest slab, of AMEM_LAYOUT too; a power of two, at least 2 MiB
  UserMemory user_memory = UserMemory::kKeep;  // AMEM_USER_MEMORY: what a pause does with ncclMemAlloc memory
  // AMEM_NVLS: what a pause does with multicast objects that this session makes, and with what is bound to them. Importers
  // follow the owner. kRelease has never run on hardware.
  Nvls nvls = Nvls::kKeep;
  Deadlines deadlines;                       // AMEM_TIMEOUT_MS
  bool compare = false;                      // AMEM_VERIFY: compare all bytes after each resume with what was saved
  Bytes pinned_bytes = Bytes{4} << 30;       // host memory pinned ahead for NCCL's memory, at most
  std::filesystem::path host_claims;         // one file for all ranks of the host; empty: none
  Bytes pool_pinned_bytes = Bytes{4} << 30;  // the same for all pools together
};

}  // namespace amem
