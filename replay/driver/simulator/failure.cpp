#include "replay/driver/simulator/failure.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include "replay/driver/result_names.h"

namespace amem {

std::string Errno(const std::string& tried) { return tried + ": " + std::strerror(errno); }

Status SimulatedFailure(int result, std::string_view tried, std::string_view why) {
  return {CodeOfResult(result),
          fmt::format("{}: {} from the simulator{}{}", tried, CudaErrorText(result), why.empty() ? "" : ": ", why), result};
}

}  // namespace amem
