// What is looked up in the stand-in, written down for the tests of stock NCCLs (STAND_IN_LOOK_UPS in control.h).
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "tests/stand_ins/cuda/stand_in.h"

namespace amem::stand_in {
namespace {

// The answer of every driver function that the stand-in does not have.
CUresult NotSupported() { return CUDA_ERROR_NOT_SUPPORTED; }

std::string LibraryOf(const void* code) {
  Dl_info info{};
  if (dladdr(code, &info) == 0 || info.dli_fname == nullptr) return "unknown";
  return info.dli_fname;
}

}  // namespace

void* NoteLookUp(const char* symbol, int version, const void* caller, void* found) {
  const char* file = std::getenv("STAND_IN_LOOK_UPS");
  if (file == nullptr || *file == '\0') return found;
  const std::string line = std::string(symbol) + " " + std::to_string(version) + " " + LibraryOf(caller) + "\n";
  // One write for each line: several threads may look up at once, and the process may end at any time.
  const int descriptor = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (descriptor >= 0) {
    [[maybe_unused]] const auto written = write(descriptor, line.data(), line.size());
    close(descriptor);
  }
  return found != nullptr ? found : reinterpret_cast<void*>(&NotSupported);
}

}  // namespace amem::stand_in
