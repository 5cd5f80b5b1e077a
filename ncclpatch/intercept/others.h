// What other libraries of the process share with other processes past AMem.
#pragma once

#include <span>

#include "ncclpatch/hook/replacements.h"
#include "replay/session/session.h"

namespace amem::intercept {

// For replacements::Install: what other libraries get with AMEM_SCOPE=nccl. All calls are made as they are, and counted.
const replacements::Tables& CountingTables();
// The same with AMEM_SCOPE=shared: memory that a library gets to share by cudaIpc is a tag's.
const replacements::Tables& SharingTables();

// Tells the session what other libraries share (SharedOutside), and which of them share by calls that AMem does not see. For
// Runtime::TellOfOthers.
void TellOfOthers(Session& session);

}  // namespace amem::intercept
