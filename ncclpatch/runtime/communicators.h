// Communicators in the journal.
#pragma once

#include "ncclpatch/nccl/communicators.h"

namespace amem {

// Journals what happens to communicators. Lives as long as the process.
nccl::Observer* JournalOfCommunicators();

}  // namespace amem
