// Devices, contexts, streams, events and launches of the stand-in.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "tests/stand_ins/cuda/stand_in.h"

using amem::stand_in::StandIn;

namespace {

thread_local std::vector<CUcontext> context_stack;

CUcontext Current() { return context_stack.empty() ? nullptr : context_stack.back(); }

bool Capturing(StandIn& stand_in, int device) {
  const std::lock_guard lock(stand_in.mutex);
  for (const auto* const streams : {&stand_in.streams, &stand_in.own_streams})
    for (const CUstream stream : *streams)
      if (stream->device == device && stream->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE) return true;
  return false;
}

// As measured: a forbidden synchronisation makes the running captures useless.
void InvalidateCaptures(StandIn& stand_in, int device) {
  const std::lock_guard lock(stand_in.mutex);
  for (const auto* const streams : {&stand_in.streams, &stand_in.own_streams})
    for (const CUstream stream : *streams)
      if (stream->device == device && stream->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE)
        stream->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

bool Legacy(CUstream stream) { return stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD; }

bool Busy(StandIn& stand_in, CUcontext context, int bit) {
  const std::lock_guard lock(stand_in.mutex);
  const auto it = stand_in.busy.find(context);
  return it != stand_in.busy.end() && (it->second & bit) != 0;
}

// A context that was destroyed is refused, as the driver does.
bool Alive(StandIn& stand_in, CUcontext context) {
  const std::lock_guard lock(stand_in.mutex);
  return stand_in.created.contains(context) ||
         std::any_of(stand_in.primary.begin(), stand_in.primary.end(), [&](const auto& one) { return one.get() == context; });
}

// What an event was recorded in is gone, and the event with it.
bool Gone(StandIn& stand_in, CUevent event) {
  return event != nullptr && event->context != nullptr && !Alive(stand_in, event->context);
}

bool Known(StandIn& stand_in, CUstream stream) {
  if (Legacy(stream)) return true;
  const std::lock_guard lock(stand_in.mutex);
  return stand_in.streams.contains(stream);
}

}  // namespace

CUcontext amem::stand_in::CurrentContext() { return Current(); }
int amem::stand_in::CurrentDevice() { return Current() == nullptr ? -1 : Current()->device; }

// ---- devices ---------------------------------------------------------------------------------------------------------------

CUDA_CALL CUresult cuDeviceGetCount(int* count) {
  STARTED_OR_RETURN(stand_in);
  *count = stand_in->devices;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  STARTED_OR_RETURN(stand_in);
  if (ordinal < 0 || ordinal >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  if (device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<std::size_t>(length), "Simulated GPU");
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  const auto text = stand_in->simulator->DeviceUuid(amem::DeviceOrdinal{device});
  if (!text.ok()) return amem::stand_in::Result(text.status());
  std::size_t nibble = 0;
  std::memset(uuid, 0, sizeof(*uuid));
  for (const char c : text->substr(4)) {
    if (c == '-') continue;
    const int value = c <= '9' ? c - '0' : c - 'a' + 10;
    auto& byte = reinterpret_cast<unsigned char*>(uuid->bytes)[nibble / 2];
    byte = static_cast<unsigned char>(byte | (nibble % 2 == 0 ? value << 4 : value));
    ++nibble;
  }
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  const auto memory = stand_in->simulator->Memory(amem::DeviceOrdinal{device});
  if (memory.ok()) *bytes = memory->total;
  return amem::stand_in::Result(memory.status());
}

CUDA_CALL CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  if (device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02X:00.0", static_cast<unsigned>(device) + 1);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  if (device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      *value = 1;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      *value = device + 1;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  STARTED_OR_RETURN(stand_in);
  *can = 1;
  return CUDA_SUCCESS;
}

// ---- contexts --------------------------------------------------------------------------------------------------------------

namespace {
// What was made in a context goes with it.
void DestroyAllOf(StandIn& stand_in, CUcontext context) {
  amem::stand_in::FreeAllOf(stand_in, context);
  const std::lock_guard lock(stand_in.mutex);
  for (const CUstream stream : stand_in.streams)
    if (stream->context == context) stand_in.gone.insert(stream);
  for (const CUstream stream : stand_in.gone) stand_in.streams.erase(stream);
}
}  // namespace

CUDA_CALL CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  if (device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(stand_in->mutex);
  *context = stand_in->primary[static_cast<std::size_t>(device)].get();
  if ((*context)->retained++ == 0) ++(*context)->made;
  (*context)->reset = false;
  return CUDA_SUCCESS;
}

namespace {
CUcontext retained_at_once = nullptr;  // by nobody
}  // namespace

CUDA_CALL CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  if (device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  CUctx_st& context = *stand_in->primary[static_cast<std::size_t>(device)];
  {
    const std::lock_guard lock(stand_in->mutex);
    if (context.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--context.retained > 0) return CUDA_SUCCESS;
  }
  DestroyAllOf(*stand_in, &context);
  if (amem::stand_in::AskFault("ReleasePrimary") != 0) return cuDevicePrimaryCtxRetain(&retained_at_once, device);
  return CUDA_SUCCESS;
}

// Each context has a number of its own, also the primary one that follows another.
CUDA_CALL CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
  STARTED_OR_RETURN(stand_in);
  if (context == nullptr) context = Current();
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (context == nullptr || !Alive(*stand_in, context)) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(stand_in->mutex);
  *id = context->primary ? 1 + context->made * 64 + static_cast<unsigned>(context->device)
                         : reinterpret_cast<std::uintptr_t>(context);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  STARTED_OR_RETURN(stand_in);
  if (device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(stand_in->mutex);
  *flags = 0;
  *active = stand_in->primary[static_cast<std::size_t>(device)]->retained > 0;
  return CUDA_SUCCESS;
}

// Memory of cuMemCreate belongs to no context.
CUDA_CALL CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  if (device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  CUctx_st* const context = stand_in->primary[static_cast<std::size_t>(device)].get();
  DestroyAllOf(*stand_in, context);
  const std::lock_guard lock(stand_in->mutex);
  context->reset = true;
  return CUDA_SUCCESS;
}

#undef cuCtxCreate
CUDA_CALL CUresult cuCtxCreate_v2(CUcontext* context, unsigned int, CUdevice device);
CUDA_CALL CUresult cuCtxCreate_v2(CUcontext* context, unsigned int, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  if (device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_DEVICE;
  *context = new CUctx_st{.device = device};
  const std::lock_guard lock(stand_in->mutex);
  stand_in->created.insert(*context);
  context_stack.push_back(*context);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuCtxDestroy(CUcontext context) {
  STARTED_OR_RETURN(stand_in);
  {
    const std::lock_guard lock(stand_in->mutex);
    if (stand_in->created.erase(context) == 0) return CUDA_ERROR_INVALID_CONTEXT;
  }
  DestroyAllOf(*stand_in, context);
  const std::lock_guard lock(stand_in->mutex);
  stand_in->destroyed.push_back(context);
  std::erase(context_stack, context);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuCtxSetCurrent(CUcontext context) {
  STARTED_OR_RETURN(stand_in);
  if (context == nullptr) {
    if (!context_stack.empty()) context_stack.pop_back();
  } else if (!Alive(*stand_in, context)) {
    return CUDA_ERROR_INVALID_CONTEXT;
  } else if (context_stack.empty()) {
    context_stack.push_back(context);
  } else {
    context_stack.back() = context;
  }
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuCtxGetCurrent(CUcontext* context) {
  STARTED_OR_RETURN(stand_in);
  *context = Current();
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuCtxPushCurrent(CUcontext context) {
  STARTED_OR_RETURN(stand_in);
  if (context == nullptr || !Alive(*stand_in, context)) return CUDA_ERROR_INVALID_CONTEXT;
  context_stack.push_back(context);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuCtxPopCurrent(CUcontext* context) {
  STARTED_OR_RETURN(stand_in);
  if (context_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = context_stack.back();
  context_stack.pop_back();
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuCtxGetDevice(CUdevice* device) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(current);
  *device = current;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuCtxSynchronize() {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  if (Capturing(*stand_in, device)) {
    InvalidateCaptures(*stand_in, device);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  while (Busy(*stand_in, Current(), 1)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return amem::stand_in::Result(
      stand_in->simulator->Synchronize(amem::DeviceOrdinal{device}, amem::In(std::chrono::minutes(1))));
}

CUDA_CALL CUresult cuCtxEnablePeerAccess(CUcontext, unsigned int) {
  STARTED_OR_RETURN(stand_in);
  return CUDA_SUCCESS;
}

// ---- streams and events ----------------------------------------------------------------------------------------------------

CUDA_CALL CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  const std::lock_guard lock(stand_in->mutex);
  *stream = new CUstream_st{.device = device, .context = Current(), .flags = flags};
  stand_in->streams.insert(*stream);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) {
  return cuStreamCreate(stream, flags);
}

CUDA_CALL CUresult cuStreamDestroy(CUstream stream) {
  STARTED_OR_RETURN(stand_in);
  const std::lock_guard lock(stand_in->mutex);
  if (stand_in->streams.erase(stream) == 0) return CUDA_ERROR_INVALID_HANDLE;
  delete stream;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuStreamSynchronize(CUstream stream) {
  STARTED_OR_RETURN(stand_in);
  if (!Known(*stand_in, stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (Legacy(stream)) return CUDA_SUCCESS;
  if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_SUCCESS;
  stream->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUDA_CALL CUresult cuStreamQuery(CUstream stream) {
  const char* fault = std::getenv("STAND_IN_FAULT");
  if (fault != nullptr && std::strcmp(fault, "hang") == 0) return CUDA_ERROR_NOT_READY;
  STARTED_OR_RETURN(stand_in);
  if (const int wanted = amem::stand_in::AskFault("Query"); wanted != 0) return static_cast<CUresult>(wanted);
  if (!Known(*stand_in, stream)) return CUDA_ERROR_INVALID_HANDLE;
  const bool busy = Legacy(stream) ? Busy(*stand_in, Current(), 1) : Busy(*stand_in, stream->context, 2);
  return busy ? CUDA_ERROR_NOT_READY : cuStreamSynchronize(stream);
}

CUDA_CALL CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  STARTED_OR_RETURN(stand_in);
  if (!Known(*stand_in, stream)) return CUDA_ERROR_INVALID_HANDLE;
  *context = Legacy(stream) ? Current() : stream->context;
  return *context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUDA_CALL CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  STARTED_OR_RETURN(stand_in);
  if (Gone(*stand_in, event)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return Known(*stand_in, stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUDA_CALL CUresult cuStreamGetFlags(CUstream stream, unsigned int* flags) {
  STARTED_OR_RETURN(stand_in);
  if (!Known(*stand_in, stream)) return CUDA_ERROR_INVALID_HANDLE;
  *flags = Legacy(stream) ? 0 : stream->flags;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuEventCreate(CUevent* event, unsigned int) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  *event = new CUevent_st{.device = device};
  const std::lock_guard lock(stand_in->mutex);
  stand_in->events.insert(*event);
  return CUDA_SUCCESS;
}
CUDA_CALL CUresult cuEventDestroy(CUevent event) {
  if (StandIn* const stand_in = amem::stand_in::Get()) {
    const std::lock_guard lock(stand_in->mutex);
    stand_in->events.erase(event);
  }
  delete event;
  return CUDA_SUCCESS;
}
CUDA_CALL CUresult cuEventRecord(CUevent event, CUstream stream) {
  STARTED_OR_RETURN(stand_in);
  if (!Known(*stand_in, stream)) return CUDA_ERROR_INVALID_HANDLE;
  event->context = Legacy(stream) ? Current() : stream->context;
  const int bit = Legacy(stream) ? 1 : 2;
  event->waits_for = Busy(*stand_in, event->context, bit) ? bit : 0;
  return CUDA_SUCCESS;
}
CUDA_CALL CUresult cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
CUDA_CALL CUresult cuEventQuery(CUevent event) {
  STARTED_OR_RETURN(stand_in);
  if (Gone(*stand_in, event)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (event->waits_for != 0 && Busy(*stand_in, event->context, event->waits_for)) return CUDA_ERROR_NOT_READY;
  event->waits_for = 0;
  return static_cast<CUresult>(amem::stand_in::AskFault("Query"));
}

// ---- launches --------------------------------------------------------------------------------------------------------------

namespace {
CUresult Launch(CUfunction function, void** arguments, CUstream stream) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  static_cast<void>(device);
  const auto* kernel = reinterpret_cast<const HostKernel*>(function);
  if (kernel == nullptr || kernel->host_function == nullptr || !Known(*stand_in, stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!Legacy(stream) && stream->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  kernel->host_function(arguments);
  return CUDA_SUCCESS;
}
}  // namespace

CUDA_CALL CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  CUstream stream, void** arguments, void**) {
  return Launch(function, arguments, stream);
}

CUDA_CALL CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  return config == nullptr ? CUDA_ERROR_INVALID_VALUE : Launch(function, arguments, config->hStream);
}

CUDA_CALL CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                             unsigned, CUstream stream, void** arguments) {
  return Launch(function, arguments, stream);
}

CUDA_CALL CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  STARTED_OR_RETURN(stand_in);
  if (!Known(*stand_in, stream)) return CUDA_ERROR_INVALID_HANDLE;
  function(data);
  return CUDA_SUCCESS;
}
