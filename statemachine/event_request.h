// Events of requests from outside, and of what the driver did to the whole process meanwhile. Part of event.h, which includes
// this file; its rules hold here as well. Nothing of the state follows from them: what a request does to memory is in the
// events of its pauses and resumes.
#pragma once

#include <cstdint>
#include <string>

#include "statemachine/event_cycle.h"
#include "statemachine/types.h"

namespace amem {

struct RequestSeen {          // this process has seen what the tool asks for
  std::uint64_t request = 0;  // counts the requests to this session, from 1
  CycleKind kind{};
  std::int32_t by_pid = 0;   // of the tool
  std::uint64_t target = 0;  // the safe point at which all are to pause; 0: not agreed on yet
  bool all_tags = false;     // the program's tags are to be paused as well
  friend bool operator==(const RequestSeen&, const RequestSeen&) = default;
};
struct SafepointReached {  // at which the request is carried out; this process waits in it
  std::uint64_t request = 0;
  std::uint64_t step = 0;  // safe points passed so far, with this one; 0: in the program's own resume
  friend bool operator==(const SafepointReached&, const SafepointReached&) = default;
};
struct RequestEnded {  // on this process
  std::uint64_t request = 0;
  CycleKind kind{};
  Code code{};          // kOk: it was done
  std::string message;  // why not
  Bytes bytes = 0;      // that a pause gave back
  friend bool operator==(const RequestEnded&, const RequestEnded&) = default;
};
struct Frozen {                          // the driver had taken the whole process from its GPUs, and has brought it back
  std::uint64_t from_ns = 0, to_ns = 0;  // CLOCK_MONOTONIC of the host
  Bytes bytes = 0;                       // that the driver moved
  std::string moved_gpus;                // "GPU-a -> GPU-b"; empty: each came back to its own
  friend bool operator==(const Frozen&, const Frozen&) = default;
};

}  // namespace amem
