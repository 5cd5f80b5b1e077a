// What the sources of the stand-in for NCCL share.
//
// It reaches the driver through dlopen, dlsym("cuGetProcAddress_v2") and nothing else, at its first call; allocates, exports,
// imports and frees buffers in NCCL's order of calls; passes descriptors between ranks over Unix sockets from a proxy thread;
// and adds floats in a ring through mapped peer memory, in a "kernel" that goes through cuLaunchKernel. Every other collective
// goes through host memory that the ranks share. What lies in a symmetric window is added through a flat range, in which every
// rank maps the memory of all. Data are floats, and a call is done when it returns. A rank is a process, or
// one of several communicators of a process, whose calls are in a group as NCCL asks for.
//
//   STAND_IN_BUFFERS    buffers of a communicator (default 6): 2 MiB, every third 6 MiB; two of three are exported
//   STAND_IN_NCCL_VERSION  what ncclGetVersion says
//   STAND_IN_NVLS       1: memory bound to a multicast object of all ranks, which counts all-reduces
//   STAND_IN_WRONG      N: one bit of the Nth sum of a rank is wrong
//   NCCL_CUMEM_ENABLE   0: cuMemAlloc and cuIpc* in place of the calls above
//
// Built with STAND_IN_PAUSES, it pauses and resumes by itself, without AMem: own_pause.cpp.
#pragma once

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stand_in {

using Clock = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::seconds(60);
enum Result : int {
  kSuccess = 0,
  kUnhandledCuda = 1,
  kSystem = 2,
  kInternal = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemote = 6
};

struct Driver {
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_range;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemRetainAllocationHandle) retain;
  decltype(&cuMemGetAddressRange) range;
  decltype(&cuMemGetHandleForAddressRange) range_handle;
  decltype(&cuPointerGetAttribute) about;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAlloc) alloc;
  decltype(&cuMemFree) free;
  decltype(&cuIpcGetMemHandle) ipc_get;
  decltype(&cuIpcOpenMemHandle) ipc_open;
  decltype(&cuIpcCloseMemHandle) ipc_close;
  decltype(&cuCtxGetDevice) device;
  decltype(&cuCtxGetCurrent) context;
  decltype(&cuCtxSetCurrent) set_context;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuMemsetD8Async) clear;
  decltype(&cuStreamIsCapturing) capturing;
  // With STAND_IN_NVLS:
  decltype(&cuMulticastCreate) multicast_create;
  decltype(&cuMulticastAddDevice) multicast_add;
  decltype(&cuMulticastBindMem) multicast_bind;
  decltype(&cuMulticastUnbind) multicast_unbind;
};

Driver* TheDriver();  // null: it cannot be loaded
Result Check(const char* what, CUresult result);

#define TRY(expr)                                         \
  do {                                                    \
    if (const Result r = (expr); r != kSuccess) return r; \
  } while (false)
#define CU(call) TRY(Check(#call, call))

// ---- buffers -----------------------------------------------------------------------------------------------------------

struct Buffer {
  CUdeviceptr address = 0;
  size_t bytes = 0;
  bool imported = false;
};

bool Legacy();  // NCCL_CUMEM_ENABLE=0
Result MapAt(Driver& cu, CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes, size_t alignment,
             CUdeviceptr& address);
// The same at an address that is reserved already.
Result MapThere(Driver& cu, CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes, CUdeviceptr address);
Result Create(Driver& cu, CUdevice device, size_t bytes, CUmemGenericAllocationHandle& handle);
Result Allocate(Driver& cu, CUdevice device, size_t bytes, Buffer& buffer);
Result Free(Driver& cu, Buffer& buffer);

// ---- communicators -----------------------------------------------------------------------------------------------------

constexpr int kMaxRanks = 16;

// Memory of each rank, at one offset of that rank's part of a flat range.
struct Window {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr first = 0;  // where this rank's memory was mapped already; 0: nowhere
  size_t bytes = 0, offset = 0;
};

struct Multicast {
  CUmemGenericAllocationHandle object = 0;
  Buffer memory;
  CUdeviceptr address = 0;     // of the object
  std::uint64_t launches = 0;  // as the memory counts them
};

// The first page of the host memory that the ranks of a communicator share; areas for data come behind it.
struct Exchange {
  std::atomic<int> arrived, generation;
  std::atomic<int> pausing;
  int color[kMaxRanks], key[kMaxRanks];
};

struct Comm {
  Driver* cu = nullptr;
  std::string job;
  int rank = 0, ranks = 1, listener = -1;
  CUdevice device = 0;
  std::vector<Buffer> own, peer;
  std::thread proxy;
  std::atomic<int> served{0};
  std::atomic<bool> next_failed{false};  // the next rank hung up before it had everything
  std::atomic<bool> stop{false}, aborted{false};
  std::uint64_t chunks = 0;  // through the ring so far, as the flags in the buffers count
  Exchange* exchange = nullptr;
  std::atomic<int> exchange_descriptor{-1};
  int splits = 0;
  CUcontext context = nullptr;
  CUmemGenericAllocationHandle held = 0;  // of the library that pauses by itself: stands for all that this rank holds
  // Symmetric windows (window.cpp).
  CUmemGenericAllocationHandle offered = 0;  // what the proxy exports, while a window is made
  size_t offered_bytes = 0;
  CUdeviceptr flat = 0;  // the range of all ranks
  std::vector<Window> windows;
  Buffer resources;                          // of the first window, if they have an address of their own
  std::uint64_t epochs = 0;                  // barriers through the first window
  std::vector<std::vector<char>> offloaded;  // contents of own buffers while they are suspended
  Multicast multicast;
  struct Network* network = nullptr;  // to neighbours on other hosts; null: none (channel.h)
};

bool IsExported(int index);                        // whether a buffer is shared with the next rank
bool SharesHostWith(const Comm& comm, int other);  // memory is shared only among those
constexpr int kOffered = -2;                       // in place of a buffer's index: what a rank offers for a window
// Asks the proxy of a rank for a buffer of its, and imports that.
Result ImportFrom(Comm& comm, int rank, int index, CUmemGenericAllocationHandle& handle);
Result FreeWindows(Comm& comm);
// The sum through windows, if `send` lies in one.
bool InWindow(const Comm& comm, const void* send);
Result WindowAllReduce(Comm& comm, const float* send, float* receive, size_t count, CUstream stream);

Result ConnectMulticast(Comm& comm);  // needs all ranks
Result CountLaunch(Comm& comm);       // kInternal: the memory has lost its count
Result FreeMulticast(Comm& comm);

Result Init(Comm& comm);  // needs all ranks, and its device to be the thread's
Result Destroy(Comm* comm, bool aborted = false);

// Part of a collective on one rank. `publish` gives this rank's part to the others; after all ranks of the group have published
// theirs, `collect` takes what is for this rank. Either may be empty; without `meets` the ranks do not wait for each other.
struct Operation {
  std::function<void()> publish;
  std::function<Result()> collect;
  bool meets = true;
};
// Runs it, or keeps it for the end of the group that this thread has open.
Result Submit(Comm& comm, Operation operation);

void Corrupt(float* result, size_t count);  // a sum, as a test asks for it
Result RingAllReduce(Comm& comm, const float* input, float* output, size_t count, CUstream stream);

int Version();  // as ncclGetVersion has it: version.cpp

Result MakeExchange(Comm& comm);  // on rank 0; the others map its descriptor
Result MapExchange(Comm& comm, int descriptor);
void UnmapExchange(Comm& comm);
Result Meet(Comm& comm);  // returns when all ranks of the communicator called it

// ---- the library that pauses by itself -----------------------------------------------------------------------------------

#ifdef STAND_IN_PAUSES
Result Hold(Comm& comm);  // takes the memory that a pause gives back
void LetGo(Comm& comm);
bool IsPaused();
inline int DefaultBuffers() { return 0; }  // a pause would lose what is in them
#else
inline Result Hold(Comm&) { return kSuccess; }
inline void LetGo(Comm&) {}
inline bool IsPaused() { return false; }
inline int DefaultBuffers() { return 6; }
#endif

}  // namespace stand_in
