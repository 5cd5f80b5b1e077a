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

// Copies the library, adds libamem_nccl.so to what it needs and $ORIGIN to its search path, and puts AMem's libraries beside
// the copy. The original is never touched; an earlier copy is replaced in one step.
Result<Patched> MakePatchedCopy(const Request& request);

// Where the loader would find a library's partner: in its own search path, then in LD_LIBRARY_PATH. nullopt: in neither.
std::optional<std::filesystem::path> FindPartner(const LibraryFile& file);

}  // namespace amem::patch
