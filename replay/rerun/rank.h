// One session of a rerun, replayed in this process (session.h) or in one of its own (process.h).
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

  // Builds what the session began with, from its snapshot: own memory of all sessions first, so that it can be imported.
  virtual Status BuildOwn() = 0;
  virtual Status BuildImports() = 0;

  struct Outcome {
    Status failure;           // of the replay itself, which cannot go on; not the result of a call
    SequenceNumber event;     // the one that all below is about
    Status mismatch;          // the event cannot follow, or its result differs; the message is the replayed side
    std::string what;         // was compared: "result of step ..."
    bool reproduced = false;  // a failure that was recorded happened again
  };
  // Replays an event. Without `now` the event may be put off until a later Take or Settle, which then returns its outcome.
  virtual Outcome Take(const Event& event, bool now) = 0;
  virtual Outcome Settle() = 0;
  // OK: the state is sound, and the driver holds what the state says.
  virtual Status Compare() = 0;
  // Takes all memory of the device but this, as if another program held it.
  virtual Status LeaveOnly(DeviceOrdinal device, Bytes bytes) = 0;

  [[nodiscard]] virtual const State& recorded() const = 0;
  struct Counts {
    std::uint64_t events = 0, calls = 0, steps = 0;
    std::uint64_t elsewhere = 0;  // address ranges that the driver would not reserve where they were
  };
  [[nodiscard]] virtual Counts counts() const = 0;
};

}  // namespace amem
