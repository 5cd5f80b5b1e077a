// Making a patched copy of a libnccl, and telling whether a library is one.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ncclpatch/patch/elf.h"
#include "statemachine/types.h"

namespace amem::patch {

inline constexpr const char* kPartner = "libamem_nccl.so";

struct Request {
  std::filesystem::path library;
  std::filesystem::path directory;  // made if it is missing
  bool link = false;                // symbolic links to AMem's libraries in place of copies
};

struct Patched {
  std::filesystem::path library;                  // the patched copy, under its soname
  std::vector<std::filesystem::path> companions;  // libamem_nccl.so and what that needs
  bool was_patched = false;                       // the input was a patched copy already; it was taken as it is
};

// Copies, adds libamem_nccl.so as a needed library and $ORIGIN as a place to look, and puts AMem's libraries beside it. The
// original is never touched; a copy that was there before is replaced in one step.
Result<Patched> MakePatchedCopy(const Request& request);

// Where a library's partner would be found: in its own search path, then LD_LIBRARY_PATH. nullopt: nowhere there.
std::optional<std::filesystem::path> FindPartner(const LibraryFile& file);

}  // namespace amem::patch
