// What is said of a member that has not come to a call, or has not voted.
#pragma once

#include <string>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

struct CallOfSet {  // in which its members meet
  CycleKind kind{};
  std::string tag{};  // whose memory it is about; empty: NCCL's
};

// What a missing member said of itself: "running, has not called ncclPause"; empty: nothing.
std::string AnswerOf(const CallOfSet& call, Lifecycle lifecycle);
// The same for a message about the member: "is running and has not called ncclPause".
std::string WhatItDoes(const CallOfSet& call, Lifecycle lifecycle);
// What explains why a process is late, for messages: "is stopped (SIGSTOP?)"; empty: nothing.
std::string WhyLate(const ProcessSeen& seen);

}  // namespace amem
