// Makes a patched copy of a libnccl, and tells whether a library is one.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "statemachine/types.h"

namespace amem::patch {

inline constexpr const char* kPartner = "libamem_nccl.so";

// The facts about a shared library on disk.
struct LibraryFile {
  std::filesystem::path path;
  std::string soname;
  std::vector<std::string> needed;
  std::vector<std::string> search;  // DT_RUNPATH, or DT_RPATH without it, split at colons; $ORIGIN unexpanded
  bool is_nccl = false;             // by its soname or its functions
  [[nodiscard]] bool Needs(const std::string& name) const;
};

std::vector<std::string> SplitAtColons(const std::string& text);  // without empty parts

// kIo: cannot be read; kCorrupt: not an ELF shared library of this machine, or one that contradicts itself.
Result<LibraryFile> Inspect(const std::filesystem::path& path);

struct Request {
  std::filesystem::path library;
  std::filesystem::path directory;  // made if missing
  bool link = false;                // link to AMem's libraries instead of copying them
};

struct Patched {
  std::filesystem::path library;                  // the patched copy, under its soname
  std::vector<std::filesystem::path> companions;  // libamem_nccl.so and what it needs
  bool was_patched = false;                       // the input was a patched copy and is used as it is
};

// Copies the library, adds libamem_nccl.so to its needed libraries and $ORIGIN to its search path, and puts AMem's libraries
// beside it. Never touches the original; replaces an earlier copy in one step.
Result<Patched> MakePatchedCopy(const Request& request);

// Where the loader would find a library's partner: its own search path, then LD_LIBRARY_PATH. nullopt: nowhere.
std::optional<std::filesystem::path> FindPartner(const LibraryFile& file);

}  // namespace amem::patch
