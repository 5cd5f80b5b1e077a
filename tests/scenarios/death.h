// How a rank that is a thread dies in the middle of a call. A dead process does nothing more; this one would go on
// to vote, so its call ends where it died.
#pragma once

#include <exception>

#include "replay/driver/driver.h"

namespace amem::test {

struct Died {};
inline thread_local bool may_die_here = false;

// Of a rank that is dead: the result of its driver calls, where its call cannot be ended.
inline int DeadEnd() {
  if (may_die_here && std::uncaught_exceptions() == 0) throw Died{};
  return cuda::kUnknown;
}

template <class Call>
Status UntilDeath(const Call& call) {
  may_die_here = true;
  Status status;
  try {
    status = call();
  } catch (const Died&) {
    status = {Code::kPeerLost, "this rank has died"};
  }
  may_die_here = false;
  return status;
}

}  // namespace amem::test
