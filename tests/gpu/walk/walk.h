// A walk through the driver: every call that it makes is one line of output, the call and what the driver answered. Addresses
// are relative to the memory that the walk made, handles and ids are only compared, so that two runs on one machine print the
// same unless the driver, or who stands before it, answers otherwise.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

namespace amem::walk {

// How a function is found: as CUDA runtimes do, by the driver's own look-up, or by its exported name.
enum class Way : std::uint8_t { kRuntime, kDlsym };

class Driver {
 public:
  static void Open(Way way);  // loads libcuda.so.1; ends the program if there is none
  // Null: this driver lacks it. `exported` has the suffix of the version (cuMemAlloc_v2).
  static void* Find(const char* name, const char* exported);
  static void* OfVersion(const char* name, int version);  // as a runtime of that version finds it: 13000 is CUDA 13.0
};
template <class F>
F* FindAs(const char* name, const char* exported) {
  return reinterpret_cast<F*>(Driver::Find(name, exported));
}
#define WALK_TEXT(text) #text
// The driver's answer; a driver that lacks the function "answers" CUDA_ERROR_NOT_FOUND.
#define CALL(name, ...)                                                                     \
  [&]() -> CUresult {                                                                       \
    static auto* const call = ::amem::walk::FindAs<decltype(name)>(#name, WALK_TEXT(name)); \
    return call == nullptr ? CUDA_ERROR_NOT_FOUND : call(__VA_ARGS__);                      \
  }()

// One line: what was asked, the driver's result, and what it wrote, if it succeeded.
void Say(const std::string& asked, CUresult result, const std::string& wrote = {});
// The call comes first, so that what it wrote is said.
#define SAY(asked, call, ...)                      \
  do {                                             \
    const CUresult said = (call);                  \
    ::amem::walk::Say(asked, said, ##__VA_ARGS__); \
  } while (false)
void SayText(const std::string& line);
// Before each line from now on.
void Chapter(const std::string& name);

// Memory that the walk made, by the name that lines give it.
void Know(const std::string& name, CUdeviceptr base, std::size_t bytes);
void Forget(CUdeviceptr base);
std::string Where(CUdeviceptr address);  // "a+16", "0" or "elsewhere"

// cuMemGetAddressRange.
void SayRange(const std::string& asked, CUdeviceptr at);

inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline CUdeviceptr Number(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }
inline void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// The chapters. Each leaves the driver as it found it, apart from what the last one takes with the context.
void Sizes();       // allocations of many sizes: ranges, attributes, access, ends, frees
void WrongSizes();  // that no GPU has
void Pitched();
void Frees();       // stream-ordered, twice, elsewhere
void FreeMemory();  // cuMemGetInfo
void Handles();     // cuMemCreate and what is made of its handles
void Sparse();      // arrays
void Ipc();         // with another process
void More();        // fills, copies, dma-bufs, what is asked less often
void ByRuntime();   // by a libcudart, if there is one
void Captures();
void Contexts();
// Before the driver is used. False: this is the other process, and has done its part (ipc.cpp).
bool StartOther();

}  // namespace amem::walk
