// Amounts of memory in messages that compare them. FormatBytes (event.h) is exact, and so may use another unit for each.
#pragma once

#include <string>

#include "statemachine/event.h"

namespace amem {

// All that are not small are in MiB, to a tenth: "31.5 MiB", "143 155.9 MiB". Below 1 MiB they are exact. What is there is
// rounded down; what is needed is rounded up, for then it is enough.
std::string RoundedBytes(Bytes);
std::string RoundedUpBytes(Bytes);

}  // namespace amem
