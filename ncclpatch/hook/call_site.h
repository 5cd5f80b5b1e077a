// Where a call of the driver came from.
#pragma once

#include <string>

#include "ncclpatch/hook/elf_image.h"
#include "statemachine/types.h"

namespace amem {

// The innermost return addresses inside libnccl on this thread's stack, as offsets from its load address. `for_application`:
// one of them is in ncclMemAlloc, which allocates for the program; `for_window`: one is in ncclCommWindowRegister, which maps
// its allocation at a second address.
CallSite CaptureCallSite(bool* for_application = nullptr, bool* for_window = nullptr) noexcept;

// An object's file name, for people.
std::string FileName(const ElfImage& image);
// The library whose call this thread is in: the innermost that is neither AMem nor one of those that only pass calls on
// (libcudart, libcuda, libffi). False: none is known.
bool CallingImage(ElfImage* found);
std::string CallingLibrary();  // its file name

}  // namespace amem
