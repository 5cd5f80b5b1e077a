// The hook between libnccl and the driver: libnccl's dlsym and dlvsym lead to AMem, which then replaces the driver functions
// that libnccl looks up.
//
// Installing allocates little, starts no thread and touches no file. All functions may be called from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ncclpatch/hook/elf_image.h"
#include "ncclpatch/hook/replacements.h"
#include "statemachine/event.h"

namespace amem::hook {

// Called with what was patched, or could not be (`failed`). Unset, nothing is reported.
using Report = void (*)(bool failed, std::string_view message);
void SetReport(Report report);

// From now on a libnccl gets AMem's functions when it calls dlsym or dlvsym. Before, everybody gets libc's answers.
void Enable();

// Whether this library was preloaded and so precedes NCCL in the search order.
bool IsPreloaded();

// Whether an object is NCCL: it has the soname libnccl.so.*, or defines NCCL's entry points and little else. A library with
// NCCL linked into it defines much else and is left alone, because most of its look-ups are its own.
bool IsNccl(const ElfImage& image);

// Patches loaded libnccls that have not looked up the driver's functions. Called by the ELF constructor, and whenever a libnccl
// may have been loaded since.
//
// A libnccl has not looked them up if its slot for dlsym is unbound, the process has no libcuda, or its data holds no address
// inside libcuda. (A bound slot alone says nothing, because Python binds all slots when it loads a library.)
void PatchAtLoad();
// PatchAtLoad, if the process has loaded an object since; otherwise it only reads a counter.
void PatchIfLoaded();

// Patches every loaded libnccl, or says why not: kNotFound (none is loaded), kRefused (too late), kUnsupported (does not import
// dlsym). Ok if all of them are under AMem already.
Status Attach();

// The libnccls under AMem in the order of patching. Unloaded ones are forgotten.
struct Library {
  std::uint64_t number = 0;  // counts from 1 in this process
  std::uintptr_t base = 0, text_begin = 0, text_end = 0;
  std::string path;
  const char* way = "";                                   // "preload", "patched", "attach"
  std::uintptr_t mem_alloc_begin = 0, mem_alloc_end = 0;  // the code of ncclMemAlloc, which allocates for the program
  std::uintptr_t window_begin = 0, window_end = 0;        // of ncclCommWindowRegister, which maps its allocation twice
};
std::vector<Library> Libraries();
// The library whose code contains `address`; null: none. Cheap; never freed.
const Library* LibraryAt(std::uintptr_t address);
LibraryAttached Describe(const Library& library);

// Every NCCL of the process. `way` is empty if it is not under AMem; `why` has the reason.
struct Presence {
  std::string path, version, way, why;
};
std::vector<Presence> Survey();
// From now on PatchAtLoad takes other libraries in, too: what each imports decides how. Imports of the functions in `names`
// lead to AMem's (Caller::kOther), and so do imports of dlsym and dlvsym, by which CUDA runtimes, Python's ctypes and NVSHMEM
// find the driver, unless the library was preloaded and so precedes libc's. The first call decides; `names` must stay valid.
// `late`: libraries have run before, so that what they did by these functions was not seen.
void ReachOthers(const replacements::Tables& names, bool late = false);
// Whether other libraries look up the driver's functions through this one, and have from the start: by the dlsym that it
// exports, which is the first of the process, or because of ReachOthers.
bool InterceptsOthers();
// Libraries that call one of these functions of the driver past AMem: they import it from libcuda, or had looked it up before
// AMem was there.
std::vector<std::string> PastAmem(std::span<const char* const> names);
// Grows when the process loads an object.
std::uint64_t LoadCount();
std::uint64_t UnloadCount();
// Grows when the process loads or unloads an object, and when imports were led here: what PastAmem finds is the same until
// then.
std::uint64_t ImportCount();

// Around fork, so that the hook's locks are free in the child.
void BeforeFork();
void AfterFork();

// libc's dlsym, and the next one in the search order, perhaps another interposer's. RTLD_NEXT means behind this library.
void* RealDlsym(void* handle, const char* name);
void* NextDlsym(void* handle, const char* name);
void* FindLibcDlsym();
// A symbol of the libcuda that NCCL opened, else the system's, as NCCL would get it without AMem, so that other interposers see
// AMem's own calls too; never a replacement of AMem's. What the library does not export, its cuGetProcAddress_v2 is asked for,
// by the name without the version's suffix. Null: no such library or symbol.
void* DriverSymbol(const char* name);
template <class F>
F* DriverFunction(const char* name) {
  return reinterpret_cast<F*>(DriverSymbol(name));
}

}  // namespace amem::hook

namespace amem {

// The one object of a type, which is its user's own and no alias of a common one: the object would be common, too. It is never
// destroyed, because other threads may call after main has returned.
template <class T>
T& Forever() {
  static auto* const only = new T;
  return *only;
}

// ---- where a call of the driver came from

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

#define AMEM_TEXT(text) #text
// A function of the driver, by its name in cuda.h, which has the name that libcuda exports (cuMemFree_v2). Null: this driver
// lacks it.
#define AMEM_DRIVER(name) ::amem::hook::DriverFunction<decltype(name)>(AMEM_TEXT(name))
