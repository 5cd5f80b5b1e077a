// Names of functions for the call sites in a journal, from the library's own symbols.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "statemachine/event.h"

namespace amem::tool {

class Symbols {
 public:
  // Reads the libraries that are still at their paths with the build that the journal names; what cannot be read has no names.
  explicit Symbols(const std::vector<LibraryAttached>& libraries);
  // "ncclMemAlloc+0x12 < ncclCommInitRank+0x40"; without a name the offset, as "libnccl+46b1c0".
  [[nodiscard]] std::string Name(const CallSite& site) const;
  // "libnccl.so.2, build abc123: no symbols for its call sites", or empty.
  [[nodiscard]] const std::string& note() const { return note_; }

 private:
  struct Function {
    std::uint64_t end = 0;
    std::string name;
  };
  void Read(const LibraryAttached& library);
  std::map<std::uint64_t, Function> functions_;  // by their first address
  std::string note_;
};

}  // namespace amem::tool
