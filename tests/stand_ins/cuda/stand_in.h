// What the sources of the stand-in libcuda share.
#pragma once

#pragma GCC visibility push(default)
#include <cuda.h>

#include "tests/stand_ins/cuda/control.h"
#pragma GCC visibility pop

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "replay/driver/cuda/properties.h"
#include "replay/driver/simulator/simulator.h"

#define CUDA_CALL extern "C" __attribute__((visibility("default")))

struct CUctx_st {
  int device = 0;
  int retained = 0;
  std::uint64_t made = 0;
  bool primary = false;
  bool reset = false;  // and not retained since: what is current somewhere is no more
};
struct CUstream_st {
  int device = 0;
  CUcontext context = nullptr;
  unsigned flags = 0;
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t capture_number = 0;  // of all captures of the process
  std::thread::id captured_by{};  // who must end it; any, where the mode is relaxed
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
};
struct CUevent_st {
  int device = 0;
  CUcontext context = nullptr;  // of the stream that it was recorded in
  int waits_for = 0;            // what did not end there then: a bit of stand_in_cuda_set_busy
};

namespace amem::stand_in {

struct LegacyBlock {  // cuMemAlloc and the like
  Bytes asked = 0, bytes = 0;
  DriverHandle handle;
  int device = 0;
  CUcontext context = nullptr;
  int exported = -1;    // descriptor that cuIpcGetMemHandle hands out
  Bytes offset = 0;     // in what is mapped
  bool common = false;  // a part of CommonBlock
  bool managed = false;
  std::tuple<int, int, Bytes> origin{};  // of cuIpcOpenMemHandle: its process, descriptor, and offset
  int uses = 1;
};

inline constexpr Bytes kSmall = 512;
struct CommonBlock {  // for requests of up to kSmall
  Bytes bytes = 0;
  DriverHandle handle{};
  int device = 0;
  CUcontext context = nullptr;
  std::set<Bytes> free{};  // offsets
  int exported = -1;
};

struct HostBlock {                     // page-locked host memory, as long as its context lives
  std::unique_ptr<PinnedBuffer> made;  // by cuMemHostAlloc; null: the program's own, by cuMemHostRegister
  std::size_t bytes = 0;
  CUcontext context = nullptr;
};

// Everything behind the C interface. Made by the first call, never destroyed: calls may come until the process is gone.
struct StandIn {
  std::unique_ptr<Simulator> simulator;
  int devices = 0;

  std::mutex mutex;  // over all below
  std::vector<std::unique_ptr<CUctx_st>> primary;
  std::map<CUdeviceptr, LegacyBlock> legacy;
  std::map<CUdeviceptr, CommonBlock> common;
  std::map<CUdeviceptr, LegacyBlock> opened;  // cuIpcOpenMemHandle
  std::set<CUdeviceptr> synchronous;          // legacy memory with SYNC_MEMOPS
  std::map<void*, HostBlock> host;
  // Registered memory of contexts that are gone: the program's own memory stays, and no kernel reaches it any more.
  std::map<void*, std::size_t> unpinned;
  std::atomic<bool> any_unpinned{false};
  std::set<CUstream> streams, gone;  // gone: with their contexts; not deleted, so that no other gets their addresses
  std::set<CUstream> own_streams;    // CU_STREAM_PER_THREAD, of each thread that captured it
  std::set<CUevent> events;          // also of contexts that are gone, in which nobody destroys them
  std::set<CUcontext> created;       // by cuCtxCreate, and not destroyed
  std::vector<CUcontext> destroyed;  // kept, so that no other gets its address
  std::map<CUcontext, int> busy;     // stand_in_cuda_set_busy
};

StandIn* Get();       // null: cuInit was not called, or failed, or this is a forked child
CUresult Start();     // cuInit
int CurrentDevice();  // of the thread's context; -1: it has none
CUcontext CurrentContext();
void FreeAllOf(StandIn& stand_in, CUcontext context);  // memory of cuMemAlloc, cuIpcOpenMemHandle and cuMemHost*

// Maps `handle` where there is room, open to every device.
CUresult MapAnywhere(StandIn& stand_in, DriverHandle handle, Bytes bytes, CUdeviceptr* pointer);
CUresult Free(StandIn& stand_in, std::map<CUdeviceptr, LegacyBlock>& from, CUdeviceptr pointer);
std::map<CUdeviceptr, LegacyBlock>::iterator Containing(std::map<CUdeviceptr, LegacyBlock>& blocks, CUdeviceptr pointer);
// Maps a part of a handle as memory that cuMemFree frees, with a reference of its own.
CUresult MapAsLegacy(StandIn& stand_in, DriverHandle handle, Bytes bytes, Bytes asked, int device, CUdeviceptr* pointer);
bool IsManaged(StandIn& stand_in, CUdeviceptr pointer);
// Whether that is memory of cuMemAlloc. `context` (may be null): whose it is; of what cuIpcOpenMemHandle opened, too.
bool LegacyAt(StandIn& stand_in, CUdeviceptr pointer, CUcontext* context);
// The answer to a call that might disturb a capture ("potentially unsafe", as allocations and frees are), by the thread's
// capture mode. A refused call breaks this thread's captures, as a forbidden synchronisation does.
CUresult CheckUnsafe(StandIn& stand_in);
// With STAND_IN_LOOK_UPS: writes a look-up down, and gives a name that was not found (null) a function that does nothing.
void* NoteLookUp(const char* symbol, int version, const void* caller, void* found);

// What stand_in_cuda_at wants of this call, of which the simulator does not know: 0, or what the call is to answer.
int AskFault(std::string_view call);

// STAND_IN_AT: "CheckpointLock,2,fail=600", as the arguments of stand_in_cuda_at. False: it cannot be read.
bool PlanFault(std::string_view text);

CUresult Result(const Status& status);
using amem::FromCuda;
using amem::ToCuda;

inline Address At(CUdeviceptr pointer) { return Address{pointer}; }

}  // namespace amem::stand_in

namespace amem::stand_in {
// A driver call while it runs: while the process is locked or checkpointed, none begins. Calls within calls are one.
class InCall {
 public:
  InCall();
  ~InCall();
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;
  [[nodiscard]] StandIn* get() const { return stand_in_; }  // null: as Get(), or a restore has failed

 private:
  StandIn* stand_in_;
};
}  // namespace amem::stand_in

// The first lines of almost every call.
#define STARTED_OR_RETURN(name)                            \
  const amem::stand_in::InCall name##_call;                \
  amem::stand_in::StandIn* const name = name##_call.get(); \
  if (name == nullptr) return CUDA_ERROR_NOT_INITIALIZED
#define CONTEXT_OR_RETURN(name)                     \
  const int name = amem::stand_in::CurrentDevice(); \
  if (name < 0) return CUDA_ERROR_INVALID_CONTEXT
