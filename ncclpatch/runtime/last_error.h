// ncclGetLastError, served: a call of NCCL's that AMem made fail ends there with AMem's reason. NCCL itself knows a number
// only.
#pragma once

#include <string>

#include "ncclpatch/hook/redirects.h"

namespace amem::last_error {

// AMem has refused a call of NCCL's, or one in NCCL's name. Sets this thread's amem_last_error and, for all threads as in NCCL,
// what ncclGetLastError returns until NCCL's own text changes.
void NoteRefusal(const std::string& message) noexcept;

redirects::Table Calls();  // for redirects::Install

}  // namespace amem::last_error
