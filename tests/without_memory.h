// No memory for a part of a thread's work. Not for a sanitizer's programs.
#pragma once

#include <cstdint>
#include <limits>

#include "journal/base/no_copies.h"

namespace amem::test {

// Meanwhile `new` of this thread fails, in all of the process: after the first `spared`, and `most` times in a row.
class WithoutMemory : NoCopies {
 public:
  static constexpr std::uint64_t kAlways = std::numeric_limits<std::uint64_t>::max();
  explicit WithoutMemory(std::uint64_t spared = 0, std::uint64_t most = kAlways);
  ~WithoutMemory();
  [[nodiscard]] static bool HasRefused();  // since the last one began
};

// Meanwhile this thread has memory again: in what a test puts in place of another library, which has its own.
class WithMemory : NoCopies {
 public:
  WithMemory();
  ~WithMemory();

 private:
  const bool before_;
};

}  // namespace amem::test
