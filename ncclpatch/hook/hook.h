// Getting between a libnccl and the driver: its dlsym and dlvsym lead to AMem (DESIGN.md 1).
//
// Installing allocates little, starts no thread and touches no file. All functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ncclpatch/hook/elf_image.h"
#include "statemachine/event.h"

namespace amem::hook {

// Who is told what was patched (`failed` false) and what could not be. Nobody until it is set.
using Report = void (*)(bool failed, std::string_view message);
void SetReport(Report report);

// From here on a libnccl that calls dlsym or dlvsym through AMem's versions gets AMem's functions. Before, and after
// Disable(), everybody gets libc's answers.
void Enable();
bool enabled();

// Object that is NCCL: has the soname libnccl.so.*, or defines NCCL's entry points (a build under another name).
bool IsNccl(const ElfImage& image);

// Patches the libnccls that are loaded and have not looked up the driver's functions. Others are left alone. For the ELF
// constructor.
//
// Whether one has is told by its slot for dlsym, while the loader has not bound it; by there being no libcuda in the process;
// and else by its data, which holds addresses inside libcuda from then on. (Python binds everything when it loads a library, so
// that a bound slot alone says nothing.)
void PatchAtLoad();

// Patches every loaded libnccl, or says why that is impossible: kNotFound (none is loaded), kRefused (too late), kUnsupported
// (does not import dlsym). Fine if all of them lead to AMem already.
Status Attach();

// The libnccls under AMem, in the order in which they came.
struct Library {
  std::uintptr_t base = 0, text_begin = 0, text_end = 0;
  const char* path = "";
  const char* way = "";                                   // "preload", "patched", "attach"
  std::uintptr_t mem_alloc_begin = 0, mem_alloc_end = 0;  // the code of ncclMemAlloc, which allocates for the program
};
std::vector<Library> Libraries();
// The one whose code contains `address`; null if none. Cheap.
const Library* LibraryAt(std::uintptr_t address);
LibraryAttached Describe(const Library& library);

// libc's dlsym, and the libcuda that NCCL opened, as `dlsym` saw it (null until then).
void* RealDlsym(void* handle, const char* name);
void* DriverLibrary();
// A symbol of that libcuda, untouched; null if NCCL has not opened it or there is no such symbol.
void* DriverSymbol(const char* name);

}  // namespace amem::hook
