// Captures and contexts: whose rules the calls about memory keep, and what goes with a context.
#include <functional>
#include <string>
#include <thread>

#include "tests/gpu/walk/walk.h"

namespace amem::walk {
namespace {

std::size_t FreeBytes() {
  std::size_t free = 0, total = 0;
  CALL(cuMemGetInfo, &free, &total);
  return free;
}

std::string Status(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = CALL(cuStreamIsCapturing, stream, &status);
  return "capturing " + std::to_string(result) + " " + std::to_string(status);
}

// Allocates and frees in this thread while the stream is being captured, in a mode.
void InMode(CUstreamCaptureMode mode, const std::string& name, CUstream stream, std::size_t bytes) {
  CUdeviceptr before = 0, during = 0;
  SAY("cuMemAlloc before", CALL(cuMemAlloc, &before, bytes));
  SAY("begin " + name, CALL(cuStreamBeginCapture, stream, mode));
  SAY("cuMemAlloc in " + name, CALL(cuMemAlloc, &during, bytes));
  SayText(Status(stream));
  SAY("cuMemFree in " + name, CALL(cuMemFree, before));
  SayText(Status(stream));
  CUgraph graph = nullptr;
  SAY("end " + name, CALL(cuStreamEndCapture, stream, &graph));
  if (graph != nullptr) CALL(cuGraphDestroy, graph);
  SAY("cuMemFree afterwards", CALL(cuMemFree, before));
  if (during != 0) SAY("cuMemFree of the other", CALL(cuMemFree, during));
}

// As all before CUDA 13 have it, which takes other arguments.
auto* CreateContext() {
  return reinterpret_cast<CUresult (*)(CUcontext*, unsigned, CUdevice)>(Driver::OfVersion("cuCtxCreate", 3020));
}

void Now(const std::function<void()>& act) { std::thread(act).join(); }

}  // namespace

void Captures() {
  Chapter("captures");
  CUcontext primary = nullptr;
  CUdeviceptr first = 0;
  SAY("cuMemAlloc", CALL(cuMemAlloc, &first, 64));  // the driver makes room for memory and kernels, and keeps it
  SAY("fill", CALL(cuMemsetD8, first, 1, 64));
  SAY("cuMemFree", CALL(cuMemFree, first));
  const std::size_t free = FreeBytes();
  CALL(cuCtxGetCurrent, &primary);
  CUstream stream = nullptr;
  SAY("cuStreamCreate", CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
  for (const std::size_t bytes : {std::size_t{4096}, 4 * kMiB}) {
    InMode(CU_STREAM_CAPTURE_MODE_RELAXED, "relaxed", stream, bytes);
    InMode(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, "thread-local", stream, bytes);
    InMode(CU_STREAM_CAPTURE_MODE_GLOBAL, "global", stream, bytes);
    // Of another thread.
    CUdeviceptr memory = 0;
    SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, bytes));
    for (const CUstreamCaptureMode mode : {CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_GLOBAL}) {
      const char* const name = mode == CU_STREAM_CAPTURE_MODE_GLOBAL ? "global" : "thread-local";
      SAY(std::string("begin ") + name, CALL(cuStreamBeginCapture, stream, mode));
      Now([&] {
        CALL(cuCtxSetCurrent, primary);
        CUdeviceptr other = 0;
        SAY(std::string("cuMemAlloc beside ") + name, CALL(cuMemAlloc, &other, bytes));
        if (other != 0) SAY(std::string("cuMemFree beside ") + name, CALL(cuMemFree, other));
      });
      CUgraph graph = nullptr;
      SAY(std::string("end ") + name, CALL(cuStreamEndCapture, stream, &graph));
      if (graph != nullptr) CALL(cuGraphDestroy, graph);
    }
    SAY("cuMemFree", CALL(cuMemFree, memory));
  }
  SAY("cuStreamDestroy", CALL(cuStreamDestroy, stream));

  // Two threads, each with its own default stream.
  CUdeviceptr memory = 0;
  SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, 4 * kMiB));
  SAY("begin mine", CALL(cuStreamBeginCapture, CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  Now([&] {
    CALL(cuCtxSetCurrent, primary);
    CUgraph graph = nullptr;
    SAY("begin another's", CALL(cuStreamBeginCapture, CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    SAY("end another's", CALL(cuStreamEndCapture, CU_STREAM_PER_THREAD, &graph));
    if (graph != nullptr) CALL(cuGraphDestroy, graph);
    SAY("cuMemFree beside mine", CALL(cuMemFree, memory));
  });
  SayText(Status(CU_STREAM_PER_THREAD));
  CUgraph graph = nullptr;
  SAY("end mine", CALL(cuStreamEndCapture, CU_STREAM_PER_THREAD, &graph));
  if (graph != nullptr) CALL(cuGraphDestroy, graph);

  // A capture that ends with its context.
  CUcontext own = nullptr;
  auto* const create = CreateContext();
  if (create == nullptr) return;  // what follows ends a capture with its context
  SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, 64 * kMiB));
  SAY("a context of its own", create == nullptr ? CUDA_ERROR_NOT_FOUND : create(&own, 0, 0));
  SAY("cuStreamCreate", CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
  SAY("begin", CALL(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  SAY("cuCtxDestroy", CALL(cuCtxDestroy, own));
  SAY("cuCtxSetCurrent", CALL(cuCtxSetCurrent, primary));
  SAY("cuMemFree", CALL(cuMemFree, memory));
  SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, 4 * kMiB));
  SAY("cuMemFree", CALL(cuMemFree, memory));
  SayText("lost: " + std::to_string((free - FreeBytes()) / kMiB) + " MiB");
}

void Contexts() {
  Chapter("contexts");
  CUcontext primary = nullptr, own = nullptr, now = nullptr;
  CALL(cuCtxGetCurrent, &primary);
  CUdeviceptr memory = 0, of_primary = 0;
  SAY("cuMemAlloc", CALL(cuMemAlloc, &of_primary, 4 * kMiB));
  auto* const create = CreateContext();
  SAY("a context of its own", create == nullptr ? CUDA_ERROR_NOT_FOUND : create(&own, 0, 0));
  for (const std::size_t bytes : {std::size_t{4096}, 4 * kMiB}) {
    SAY("cuMemAlloc " + std::to_string(bytes), CALL(cuMemAlloc, &memory, bytes));
    CUcontext whose = nullptr;
    SAY("CONTEXT", CALL(cuPointerGetAttribute, &whose, CU_POINTER_ATTRIBUTE_CONTEXT, memory),
        whose == own       ? "its own"
        : whose == primary ? "the primary"
                           : "another");
    SAY("fill", CALL(cuMemsetD8, memory, 1, bytes));
    SAY("cuMemFree", CALL(cuMemFree, memory));
  }
  SAY("free in another context", CALL(cuMemFree, of_primary));
  SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, 4 * kMiB));
  SAY("cuCtxDestroy", CALL(cuCtxDestroy, own));
  SAY("cuCtxSetCurrent", CALL(cuCtxSetCurrent, primary));
  SAY("free what went with its context", CALL(cuMemFree, memory));
  SAY("cuCtxSetCurrent of none", CALL(cuCtxSetCurrent, nullptr));
  SAY("cuMemAlloc without a context", CALL(cuMemAlloc, &memory, 4 * kMiB));
  SAY("small without a context", CALL(cuMemAlloc, &memory, 4096));
  std::size_t free = 0, total = 0;
  SAY("cuMemGetInfo without a context", CALL(cuMemGetInfo, &free, &total));
  SAY("cuCtxSetCurrent", CALL(cuCtxSetCurrent, primary));

  // The primary context, with memory in it: it goes with the last of the program's references.
  const auto state = [](const std::string& when) {
    unsigned flags = 0;
    int active = -1;
    SAY("state " + when, CALL(cuDevicePrimaryCtxGetState, 0, &flags, &active), active != 0 ? "active" : "not active");
  };
  SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, 4 * kMiB));
  Know("a", memory, 4 * kMiB);
  state("before");
  SAY("retain", CALL(cuDevicePrimaryCtxRetain, &now, 0), now == primary ? "the same" : "another");
  SAY("release", CALL(cuDevicePrimaryCtxRelease, 0));
  state("with one reference");
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  SAY("range", CALL(cuMemGetAddressRange, &base, &bytes, memory), Where(base) + " " + std::to_string(bytes));
  SAY("reset", CALL(cuDevicePrimaryCtxReset, 0));
  SAY("range after the reset", CALL(cuMemGetAddressRange, &base, &bytes, memory));
  Forget(memory);
  SAY("release after the reset", CALL(cuDevicePrimaryCtxRelease, 0));
  state("without a reference");
  SAY("release once too often", CALL(cuDevicePrimaryCtxRelease, 0));
  SAY("retain", CALL(cuDevicePrimaryCtxRetain, &primary, 0));
  SAY("cuCtxSetCurrent", CALL(cuCtxSetCurrent, primary));
  const std::size_t before = FreeBytes();
  SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, 20 * kMiB));
  SAY("release the last", CALL(cuDevicePrimaryCtxRelease, 0));
  state("at the end");
  SAY("retain", CALL(cuDevicePrimaryCtxRetain, &primary, 0));
  SAY("cuCtxSetCurrent", CALL(cuCtxSetCurrent, primary));
  SAY("range of what went", CALL(cuMemGetAddressRange, &base, &bytes, memory));
  SAY("cuMemFree of what went", CALL(cuMemFree, memory));
  SayText("lost: " + std::to_string((before - FreeBytes()) / kMiB) + " MiB");
  SAY("cuMemAlloc in the new one", CALL(cuMemAlloc, &memory, 20 * kMiB));
  SAY("fill", CALL(cuMemsetD8, memory, 4, 20 * kMiB));
  SAY("cuMemFree", CALL(cuMemFree, memory));
  SAY("release", CALL(cuDevicePrimaryCtxRelease, 0));
}

}  // namespace amem::walk
