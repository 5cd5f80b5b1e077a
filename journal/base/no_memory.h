// What happens where the system gives this process no memory: the work fails like any other, and the program goes on.
#pragma once

#include <new>
#include <type_traits>

#include "statemachine/types.h"

namespace amem {

// Its text needs no memory. Not kOutOfMemory, which is a device's.
inline Status NoMemory() { return {Code::kIo, "no memory left"}; }

// What `body` returns, a Status or a Result; NoMemory() where it throws std::bad_alloc. For work that is not begun from the
// program's call: there nobody would catch it.
template <class Body>
std::invoke_result_t<const Body&> OrNoMemory(const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return NoMemory();
  }
}

}  // namespace amem
