// Devices, contexts, streams, events and launches of the fake.
#include <cstdio>
#include <cstring>

#include "tests/stand_ins/cuda/fake.h"

using amem::fake::Fake;

namespace {

thread_local std::vector<CUcontext> context_stack;

CUcontext Current() { return context_stack.empty() ? nullptr : context_stack.back(); }

bool Capturing(Fake& fake, int device) {
  const std::lock_guard lock(fake.mutex);
  for (const CUstream stream : fake.streams) {
    if (stream->device == device && stream->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE) return true;
  }
  return false;
}

// As measured: a forbidden synchronisation makes the running captures useless.
void InvalidateCaptures(Fake& fake, int device) {
  const std::lock_guard lock(fake.mutex);
  for (const CUstream stream : fake.streams) {
    if (stream->device == device && stream->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
      stream->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    }
  }
}

bool Legacy(CUstream stream) { return stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD; }

bool Known(Fake& fake, CUstream stream) {
  if (Legacy(stream)) return true;
  const std::lock_guard lock(fake.mutex);
  return fake.streams.contains(stream);
}

}  // namespace

int amem::fake::CurrentDevice() { return Current() == nullptr ? -1 : Current()->device; }

// ---- devices ---------------------------------------------------------------------------------------------------------------

FAKE_CUDA CUresult cuDeviceGetCount(int* count) {
  FAKE_OR_RETURN(fake);
  *count = fake->devices;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_OR_RETURN(fake);
  if (ordinal < 0 || ordinal >= fake->devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  FAKE_OR_RETURN(fake);
  if (device < 0 || device >= fake->devices) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<std::size_t>(length), "Simulated GPU");
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  FAKE_OR_RETURN(fake);
  const auto text = fake->simulator->DeviceUuid(amem::DeviceOrdinal{device});
  if (!text.ok()) return amem::fake::Result(text.status());
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

FAKE_CUDA CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  FAKE_OR_RETURN(fake);
  const auto memory = fake->simulator->Memory(amem::DeviceOrdinal{device});
  if (memory.ok()) *bytes = memory->total;
  return amem::fake::Result(memory.status());
}

FAKE_CUDA CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  FAKE_OR_RETURN(fake);
  if (device < 0 || device >= fake->devices) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02X:00.0", static_cast<unsigned>(device) + 1);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  FAKE_OR_RETURN(fake);
  if (device < 0 || device >= fake->devices) return CUDA_ERROR_INVALID_DEVICE;
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

FAKE_CUDA CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  FAKE_OR_RETURN(fake);
  *can = 1;
  return CUDA_SUCCESS;
}

// ---- contexts --------------------------------------------------------------------------------------------------------------

FAKE_CUDA CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAKE_OR_RETURN(fake);
  if (device < 0 || device >= fake->devices) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(fake->mutex);
  *context = fake->primary[static_cast<std::size_t>(device)].get();
  ++(*context)->retained;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  FAKE_OR_RETURN(fake);
  if (device < 0 || device >= fake->devices) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(fake->mutex);
  CUctx_st& context = *fake->primary[static_cast<std::size_t>(device)];
  if (context.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  --context.retained;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  FAKE_OR_RETURN(fake);
  if (device < 0 || device >= fake->devices) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(fake->mutex);
  *flags = 0;
  *active = fake->primary[static_cast<std::size_t>(device)]->retained > 0;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxSetCurrent(CUcontext context) {
  FAKE_OR_RETURN(fake);
  if (context == nullptr) {
    if (!context_stack.empty()) context_stack.pop_back();
  } else if (context_stack.empty()) {
    context_stack.push_back(context);
  } else {
    context_stack.back() = context;
  }
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxGetCurrent(CUcontext* context) {
  FAKE_OR_RETURN(fake);
  *context = Current();
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxPushCurrent(CUcontext context) {
  FAKE_OR_RETURN(fake);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  context_stack.push_back(context);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxPopCurrent(CUcontext* context) {
  FAKE_OR_RETURN(fake);
  if (context_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = context_stack.back();
  context_stack.pop_back();
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxGetDevice(CUdevice* device) {
  FAKE_OR_RETURN(fake);
  CONTEXT_OR_RETURN(current);
  *device = current;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuCtxSynchronize() {
  FAKE_OR_RETURN(fake);
  CONTEXT_OR_RETURN(device);
  if (Capturing(*fake, device)) {
    InvalidateCaptures(*fake, device);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return amem::fake::Result(fake->simulator->Synchronize(amem::DeviceOrdinal{device}));
}

FAKE_CUDA CUresult cuCtxEnablePeerAccess(CUcontext, unsigned int) {
  FAKE_OR_RETURN(fake);
  return CUDA_SUCCESS;
}

// ---- streams and events ----------------------------------------------------------------------------------------------------

FAKE_CUDA CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  thread_local CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::swap(current, *mode);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  FAKE_OR_RETURN(fake);
  CONTEXT_OR_RETURN(device);
  const std::lock_guard lock(fake->mutex);
  *stream = new CUstream_st{.device = device, .flags = flags};
  fake->streams.insert(*stream);
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) {
  return cuStreamCreate(stream, flags);
}

FAKE_CUDA CUresult cuStreamDestroy(CUstream stream) {
  FAKE_OR_RETURN(fake);
  const std::lock_guard lock(fake->mutex);
  if (fake->streams.erase(stream) == 0) return CUDA_ERROR_INVALID_HANDLE;
  delete stream;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamSynchronize(CUstream stream) {
  FAKE_OR_RETURN(fake);
  if (!Known(*fake, stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (Legacy(stream)) return CUDA_SUCCESS;
  if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_SUCCESS;
  stream->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

FAKE_CUDA CUresult cuStreamQuery(CUstream stream) { return cuStreamSynchronize(stream); }

FAKE_CUDA CUresult cuStreamWaitEvent(CUstream stream, CUevent, unsigned int) {
  FAKE_OR_RETURN(fake);
  return Known(*fake, stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

FAKE_CUDA CUresult cuStreamGetFlags(CUstream stream, unsigned int* flags) {
  FAKE_OR_RETURN(fake);
  if (!Known(*fake, stream)) return CUDA_ERROR_INVALID_HANDLE;
  *flags = Legacy(stream) ? 0 : stream->flags;
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  FAKE_OR_RETURN(fake);
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (!Known(*fake, stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!Legacy(stream)) {
    *status = stream->capture;
    return CUDA_SUCCESS;
  }
  const std::lock_guard lock(fake->mutex);
  for (const CUstream other : fake->streams) {
    if (other->device == amem::fake::CurrentDevice() && other->flags != CU_STREAM_NON_BLOCKING &&
        other->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  return CUDA_SUCCESS;
}

FAKE_CUDA CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
  FAKE_OR_RETURN(fake);
  if (Legacy(stream) || !Known(*fake, stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  stream->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

// Graphs are not simulated: a capture only exists, and ends.
FAKE_CUDA CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  FAKE_OR_RETURN(fake);
  if (Legacy(stream) || !Known(*fake, stream) || stream->capture == CU_STREAM_CAPTURE_STATUS_NONE) {
    return CUDA_ERROR_ILLEGAL_STATE;
  }
  const bool valid = stream->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  stream->capture = CU_STREAM_CAPTURE_STATUS_NONE;
  *graph = nullptr;
  return valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

FAKE_CUDA CUresult cuEventCreate(CUevent* event, unsigned int) {
  FAKE_OR_RETURN(fake);
  CONTEXT_OR_RETURN(device);
  *event = new CUevent_st{.device = device};
  return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuEventDestroy(CUevent event) {
  delete event;
  return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
FAKE_CUDA CUresult cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
FAKE_CUDA CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }

// ---- launches --------------------------------------------------------------------------------------------------------------

namespace {
CUresult Launch(CUfunction function, void** arguments, CUstream stream) {
  FAKE_OR_RETURN(fake);
  CONTEXT_OR_RETURN(device);
  static_cast<void>(device);
  const auto* kernel = reinterpret_cast<const FakeKernel*>(function);
  if (kernel == nullptr || kernel->host_function == nullptr || !Known(*fake, stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!Legacy(stream) && stream->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  kernel->host_function(arguments);
  return CUDA_SUCCESS;
}
}  // namespace

FAKE_CUDA CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  CUstream stream, void** arguments, void**) {
  return Launch(function, arguments, stream);
}

FAKE_CUDA CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  return config == nullptr ? CUDA_ERROR_INVALID_VALUE : Launch(function, arguments, config->hStream);
}

FAKE_CUDA CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                             unsigned, CUstream stream, void** arguments) {
  return Launch(function, arguments, stream);
}

FAKE_CUDA CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  FAKE_OR_RETURN(fake);
  if (!Known(*fake, stream)) return CUDA_ERROR_INVALID_HANDLE;
  function(data);
  return CUDA_SUCCESS;
}
