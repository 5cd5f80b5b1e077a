// NCCL's names that libamem_nccl.so exports itself, and who sees them.
//
//   served      ncclCommSuspend and the like: AMem answers them for every NCCL under AMem, even one without such a function
//   doorbells   with LD_PRELOAD, the functions with which a program begins to use NCCL. They come first in the search order, so
//               AMem sees a libnccl and its callers before their first call, and lead on to the function that the caller would
//               have reached without AMem.
//
// A process without NCCL must not find them by dlsym; with AMem switched off, nobody may.
#pragma once

#include <span>

namespace amem::hook {

// Removes names from this library's symbol table, so that later look-ups do not find them.
void HideNames(std::span<const char* const> names);

// Called once, before any look-up: the names that AMem's dlsym answers in place of libc's. The arrays must stay valid.
void AnswerNames(std::span<const char* const> served, std::span<const char* const> doorbells);

// Whether AMem's dlsym answers this look-up. If not, libc's must see the original caller.
bool AnswersName(const void* caller, void* handle, const char* name);
// The answer. It stands in for dlsym, so its return address is the caller's.
void* AnswerName(void* handle, const char* name);

// What the object that contains `caller` would reach under this name if AMem exported nothing: in the global scope, then in
// what that object depends on, then in the only libnccl that has it. Null: nothing. `own`: AMem's function of that name.
void* WithoutUs(const char* name, const void* own, const void* caller);

// After attaching: lets served names be found although an attached libnccl lacks them, by putting this library into the global
// scope and by answering the dlsym of the objects loaded so far.
void ShowServedNames();

}  // namespace amem::hook
