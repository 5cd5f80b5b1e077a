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
#include <vector>

#include "replay/driver/cuda/properties.h"
#include "replay/driver/simulator/simulator.h"

#define CUDA_CALL extern "C" __attribute__((visibility("default")))

struct CUctx_st {
  int device = 0;
  int retained = 0;
  std::uint64_t made = 0;
  bool primary = false;
};
struct CUstream_st {
  int device = 0;
  CUcontext context = nullptr;
  unsigned flags = 0;
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  std::thread::id captured_by{};  // who must end it; any, where the mode is relaxed
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
  int exported = -1;  // descriptor that cuIpcGetMemHandle hands out
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
  std::map<CUdeviceptr, LegacyBlock> opened;  // cuIpcOpenMemHandle
  std::map<void*, HostBlock> host;
  // Registered memory of contexts that are gone: the program's own memory stays, and no kernel reaches it any more.
  std::map<void*, std::size_t> unpinned;
  std::atomic<bool> any_unpinned{false};
  std::set<CUstream> streams, gone;  // gone: with their contexts; not deleted, so that no other gets their addresses
  std::set<CUcontext> created;       // by cuCtxCreate, and not destroyed
  std::vector<CUcontext> destroyed;  // kept, so that no other gets its address
  std::map<CUcontext, int> busy;     // stand_in_cuda_set_busy
};

StandIn* Get();       // null: cuInit was not called, or failed, or this is a forked child
CUresult Start();     // cuInit
int CurrentDevice();  // of the thread's context; -1: it has none
CUcontext CurrentContext();
void FreeAllOf(StandIn& stand_in, CUcontext context);  // memory of cuMemAlloc, cuIpcOpenMemHandle and cuMemHost*

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
