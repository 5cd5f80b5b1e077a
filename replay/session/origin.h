// Where a call of NCCL's that makes memory came from.
#pragma once

#include "statemachine/types.h"

namespace amem {

struct Origin {
  CallSite site;
  CommunicatorId communicator;  // that NCCL makes the memory for; zero: none, or unknown

  Origin() = default;
  Origin(const CallSite& from, CommunicatorId made_for = {})  // NOLINT(google-explicit-constructor)
      : site(from), communicator(made_for) {}
};

}  // namespace amem
