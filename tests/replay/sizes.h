// Sizes that tests count in.
#pragma once

#include "statemachine/types.h"

namespace amem::test {

inline constexpr Bytes kMiB = Bytes{1} << 20;

}  // namespace amem::test
