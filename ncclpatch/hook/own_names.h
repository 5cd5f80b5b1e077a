// Names of NCCL's that libamem_nccl.so exports itself, and who gets to see them.
//
//   served      ncclCommSuspend and the like: AMem answers them for every NCCL that is under AMem, also for one that has no
//   such
//               function
//   doorbells   with LD_PRELOAD, the functions with which a program begins to use NCCL: they come first in the search order, so
//               that AMem sees a libnccl, and the objects that call it, before their first call. Each leads on to the function
//               that the caller would have reached without AMem.
//
// A process that has no NCCL must not find them by dlsym, and nobody may if AMem is switched off.
#pragma once

#include <span>

namespace amem::hook {

// Takes names out of this library's own symbol table: whoever looks later does not find them here.
void HideNames(std::span<const char* const> names);

// Once, before any look-up: which names the dlsym that AMem puts in place of libc's answers. The arrays must stay valid.
void AnswerNames(std::span<const char* const> served, std::span<const char* const> doorbells);

// Whether AMem's dlsym answers this look-up, and not libc's, which must see the original caller.
bool AnswersName(const void* caller, void* handle, const char* name);
// The answer; stands in for dlsym, so that its own return address is the caller's.
void* AnswerName(void* handle, const char* name);

// What the object that contains `caller` would reach under this name if AMem exported nothing: first in the global scope, then
// in what that object depends on, then in the only libnccl that has it. Null: nothing. `own` is AMem's own function of the
// name.
void* WithoutUs(const char* name, const void* own, const void* caller);

// After attaching: lets the served names be found where a libnccl that was attached to lacks them, by putting this library into
// the global scope and by answering the dlsym of the objects loaded so far.
void ShowServedNames();

}  // namespace amem::hook
