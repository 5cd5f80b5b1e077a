// How the GPU programs of this folder stop: by an exception that says what was tried, caught at the top of each process.
#pragma once

#include <stdexcept>
#include <string>

namespace amem::gpu {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Cannot run here; the text says why. Waived, not passed.
struct Skip : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Another rank failed or was skipped; the text of that rank is the one to read.
struct Aborted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr int kExitPass = 0;
inline constexpr int kExitFail = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitAborted = 3;
inline constexpr int kExitSkipped = 77;

std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace amem::gpu
