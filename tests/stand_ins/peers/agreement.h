// How the sessions of a test agree: through a leader, or with AMEM_AGREEMENT=board on the board of their set.
#pragma once

#include <cstdlib>
#include <string_view>

namespace amem::test {

inline bool AgreesOnBoard() {
  const char* const how = std::getenv("AMEM_AGREEMENT");
  return how != nullptr && std::string_view(how) == "board";
}

}  // namespace amem::test
