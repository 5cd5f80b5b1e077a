// The hook between libnccl and the driver: libnccl's dlsym and dlvsym lead to AMem, which then replaces the driver functions
// that libnccl looks up.
//
// Installing allocates little, starts no thread and touches no file. All functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ncclpatch/hook/elf_image.h"
#include "statemachine/event.h"

namespace amem::hook {

// Called with what was patched (`failed` false) and with what could not be patched. Until it is set, nothing is reported.
using Report = void (*)(bool failed, std::string_view message);
void SetReport(Report report);

// From here on a libnccl that calls dlsym or dlvsym through AMem's versions gets AMem's functions. Before, every caller gets
// libc's answers.
void Enable();

// Whether this library was preloaded, and so comes before NCCL in the search order.
bool IsPreloaded();

// Whether an object is NCCL: it has the soname libnccl.so.*, or defines NCCL's entry points and little else (a build under
// another name). A library with NCCL linked into it defines much else; its look-ups are its own for the most part, and are left
// alone.
bool IsNccl(const ElfImage& image);

// Patches the loaded libnccls that have not looked up the driver's functions yet; the others are left alone. For the ELF
// constructor, and again whenever a libnccl may have been loaded since.
//
// A libnccl has not looked them up if its slot for dlsym is still unbound, if the process has no libcuda, or if its data holds
// no address inside libcuda. (A bound slot alone says nothing: Python binds all slots when it loads a library.)
void PatchAtLoad();
// The same if the process has loaded an object since the last time; otherwise no more than a look at a counter.
void PatchIfLoaded();

// Patches every loaded libnccl, or says why that is impossible: kNotFound (none is loaded), kRefused (too late), kUnsupported
// (does not import dlsym). Succeeds if all of them lead to AMem already.
Status Attach();

// The libnccls under AMem, in the order in which they were patched; those that the program has unloaded are forgotten.
struct Library {
  std::uint64_t number = 0;  // counts the libnccls of this process from 1
  std::uintptr_t base = 0, text_begin = 0, text_end = 0;
  std::string path;
  const char* way = "";                                   // "preload", "patched", "attach"
  std::uintptr_t mem_alloc_begin = 0, mem_alloc_end = 0;  // the code of ncclMemAlloc, which allocates for the program
  std::uintptr_t window_begin = 0, window_end = 0;  // of ncclCommWindowRegister, which maps what it allocates in a window, too
};
std::vector<Library> Libraries();
// The library whose code contains `address`; null if none. Cheap. What it points to is never freed.
const Library* LibraryAt(std::uintptr_t address);
LibraryAttached Describe(const Library& library);

// Every NCCL of the process. `way` is empty for one that is not under AMem, and `why` says the reason.
struct Presence {
  std::string path, version, way, why;
};
std::vector<Presence> Survey();
// Grows whenever the process loads an object.
std::uint64_t LoadCount();

// Around fork: no thread of the parent holds a lock of the hook's in the child.
void BeforeFork();
void AfterFork();

// libc's dlsym; and the next in the search order behind this library, which may be another interposer's. `handle` RTLD_NEXT
// means behind this library.
void* RealDlsym(void* handle, const char* name);
void* NextDlsym(void* handle, const char* name);
void* FindLibcDlsym();
// A symbol of the libcuda that NCCL opened, else of the system's, as NCCL would get it without AMem: other interposers have
// their part in AMem's own calls, too. Null: there is no such library or symbol.
void* DriverSymbol(const char* name);

}  // namespace amem::hook
