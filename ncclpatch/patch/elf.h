// The facts about a shared library on disk that amem-patch needs.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "statemachine/types.h"

namespace amem::patch {

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

}  // namespace amem::patch
