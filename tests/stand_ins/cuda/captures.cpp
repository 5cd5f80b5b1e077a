// Captures of the stand-in. Graphs are not simulated: a capture only exists, forbids, and ends.
#include <algorithm>

#include "tests/stand_ins/cuda/stand_in.h"

using amem::stand_in::StandIn;

namespace {

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Each thread has a default stream of its own for this handle. It goes with the thread, as its capture does.
struct OwnStream {
  CUstream_st stream{.flags = CU_STREAM_NON_BLOCKING};
  ~OwnStream() {
    if (StandIn* const stand_in = amem::stand_in::Get()) {
      const std::lock_guard lock(stand_in->mutex);
      stand_in->own_streams.erase(&stream);
    }
  }
};
thread_local OwnStream own_stream;

// The stream that is captured; null: there is none such.
CUstream Captured(StandIn& stand_in, CUstream stream) {
  const std::lock_guard lock(stand_in.mutex);
  if (stream == CU_STREAM_PER_THREAD) {
    own_stream.stream.device = amem::stand_in::CurrentDevice();
    own_stream.stream.context = amem::stand_in::CurrentContext();
    stand_in.own_streams.insert(&own_stream.stream);
    return &own_stream.stream;
  }
  return stand_in.streams.contains(stream) ? stream : nullptr;
}

bool IsDefault(CUstream stream) { return stream == nullptr || stream == CU_STREAM_LEGACY; }

}  // namespace

CUresult amem::stand_in::CheckUnsafe(StandIn& stand_in) {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const std::lock_guard lock(stand_in.mutex);
  const auto me = std::this_thread::get_id();
  const auto forbids = [&](CUstream stream) {
    // As measured: one that was broken forbids until its end.
    if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE || stream->mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    return stream->captured_by == me ||
           (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && stream->mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
  };
  bool any = false;
  for (const auto* const streams : {&stand_in.streams, &stand_in.own_streams})
    for (const CUstream stream : *streams)
      if (forbids(stream)) {
        any = true;
        stream->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
      }
  return any ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUDA_CALL CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  std::swap(thread_mode, *mode);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  STARTED_OR_RETURN(stand_in);
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (!IsDefault(stream)) {
    const CUstream known = Captured(*stand_in, stream);
    if (known == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *status = known->capture;
    return CUDA_SUCCESS;
  }
  const std::lock_guard lock(stand_in->mutex);
  const bool implicit = std::ranges::any_of(stand_in->streams, [](const CUstream other) {
    return other->device == amem::stand_in::CurrentDevice() && other->flags != CU_STREAM_NON_BLOCKING &&
           other->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  });
  return implicit ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

CUDA_CALL CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* number, CUgraph* graph,
                                             const CUgraphNode**, size_t*) {
  if (const CUresult result = cuStreamIsCapturing(stream, status); result != CUDA_SUCCESS) return result;
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  StandIn* const stand_in = amem::stand_in::Get();
  if (number != nullptr) *number = Captured(*stand_in, stream)->capture_number;
  if (graph != nullptr) *graph = nullptr;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  STARTED_OR_RETURN(stand_in);
  const CUstream known = IsDefault(stream) ? nullptr : Captured(*stand_in, stream);
  if (known == nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::lock_guard lock(stand_in->mutex);
  if (known->capture != CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_ERROR_ILLEGAL_STATE;
  known->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  known->mode = mode;
  static cuuint64_t last_number = 0;
  known->capture_number = ++last_number;
  known->captured_by = mode == CU_STREAM_CAPTURE_MODE_RELAXED ? std::thread::id() : std::this_thread::get_id();
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  STARTED_OR_RETURN(stand_in);
  const CUstream known = IsDefault(stream) ? nullptr : Captured(*stand_in, stream);
  const std::lock_guard lock(stand_in->mutex);
  if (known == nullptr || known->capture == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_ERROR_ILLEGAL_STATE;
  if (known->captured_by != std::thread::id() && known->captured_by != std::this_thread::get_id())
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  const bool valid = known->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  known->capture = CU_STREAM_CAPTURE_STATUS_NONE;
  *graph = nullptr;
  return valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}
