// A state as the payload of a snapshot's record: the messages of ToSnapshotEvents(state), each behind its length.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "statemachine/state.h"

namespace amem {

Result<std::vector<std::byte>> EncodeSnapshot(const State& state);
// Any bytes may be given; kCorrupt names what is wrong with them.
Result<State> DecodeSnapshot(std::span<const std::byte> payload);

}  // namespace amem
