// No memory for a part of a thread's work.
#pragma once

#include "journal/base/no_copies.h"

namespace amem::nccl {

// Meanwhile each `new` of this thread fails, in all of the process.
class WithoutMemory : NoCopies {
 public:
  WithoutMemory();
  ~WithoutMemory();
};

}  // namespace amem::nccl
