// For the census of tests: which locks (mutex.h) a thread holds. Only builds that check their order know it.
#pragma once

#include <string>

namespace amem::lock_order {

std::string Held();  // the ranks of what this thread holds, in the order in which it took them: "ledger, driver state"

}  // namespace amem::lock_order
