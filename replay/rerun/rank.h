// Where one session of a rerun is replayed: in this process (rerun_session.h), or in one of its own (rerun_process.h).
#pragma once

#include <cstdint>
#include <string>

#include "statemachine/event.h"
#include "statemachine/state.h"
#include "statemachine/types.h"

namespace amem {

class RerunRank {
 public:
  virtual ~RerunRank() = default;

  // What the session began with, from its snapshot; first everybody's own, and when all have that, what they import.
  virtual Status BuildOwn() = 0;
  virtual Status BuildImports() = 0;

  struct Outcome {
    Status failure;        // it cannot go on: of the replay itself, and no result of a call
    SequenceNumber event;  // that the rest is about
    Status mismatch;       // the event cannot follow, or the replayed result differs; its message is the replayed side
    std::string what;
    bool reproduced = false;  // a failure that was recorded happened again
  };
  // Replays an event. Without `now` it may be put off until a later call, up to Settle, and its outcome comes from that.
  virtual Outcome Take(const Event& event, bool now) = 0;
  virtual Outcome Settle() = 0;
  // The state is sound, and the driver holds what it says.
  virtual Status Compare() = 0;
  // Somebody else takes all memory of the device but this.
  virtual Status LeaveOnly(DeviceOrdinal device, Bytes bytes) = 0;

  [[nodiscard]] virtual const State& recorded() const = 0;
  struct Counts {
    std::uint64_t events = 0, calls = 0, steps = 0;
    std::uint64_t elsewhere = 0;  // address ranges that the driver would not reserve where they were
  };
  [[nodiscard]] virtual Counts counts() const = 0;
};

}  // namespace amem
