// ncclGetLastError, served: a call of NCCL's that AMem made fail ends there with AMem's reason. NCCL itself knows a number
// only.
#pragma once

#include <string>

#include "ncclpatch/hook/redirects.h"

namespace amem::last_error {

// AMem has refused a call of NCCL's, or one in NCCL's name. This thread's amem_last_error, and what ncclGetLastError says until
// NCCL has an error of its own that is another one; NCCL has one text for all threads, too.
void NoteRefusal(const std::string& message) noexcept;

redirects::Table Calls();  // for redirects::Install

}  // namespace amem::last_error
