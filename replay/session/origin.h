// Which call of NCCL makes memory.
#pragma once

#include "statemachine/types.h"

namespace amem {

struct Origin {
  CallSite site;
  CommunicatorId communicator;  // for which NCCL makes the memory; zero: none, or unknown

  Origin() = default;
  Origin(const CallSite& from, CommunicatorId made_for = {})  // NOLINT(google-explicit-constructor)
      : site(from), communicator(made_for) {}
};

}  // namespace amem
