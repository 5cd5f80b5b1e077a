// Copies that follow or lead the program's streams, and independent copiers.
#include <fmt/format.h>

#include "replay/driver/cuda/core.h"
#include "replay/driver/cuda/nonzero.h"

namespace amem {

// A stream that the program made has its own context, so any context will do. A default stream is that of the thread's context
// if this is on that device; otherwise the device's own, as in the CUDA runtime.
static CUcontext ContextFor(const CudaCalls& calls, DeviceOrdinal device, CUcontext primary, void* stream) {
  CUcontext current = nullptr;
  if (calls.context_current(&current) != CUDA_SUCCESS || current == nullptr) return primary;
  CUdevice on = -1;
  const bool is_default = stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
  if (is_default && (calls.context_device(&on) != CUDA_SUCCESS || on != device.value)) return primary;
  return current;
}

// An event belongs to its stream's context, which may be the program's own: what was queued there ends with it, and so does
// the event, which nobody may touch then.
struct CudaDriver::CudaStreamMoment final : StreamMoment, NoCopies {
  CudaStreamMoment(std::shared_ptr<Core> of, CUcontext in, CUevent made)
      : core(std::move(of)), context(in), event(made), context_number(Number()) {}
  ~CudaStreamMoment() override {
    if (Lives()) InContext(core->calls, context).Call(core->calls.event_destroy, event);
  }
  // Another context may have got the address.
  [[nodiscard]] bool Lives() const { return InContext(core->calls, context).ok() && Number() == context_number; }
  [[nodiscard]] unsigned long long Number() const {
    unsigned long long number = 0;
    if (core->calls.context_id == nullptr || core->calls.context_id(context, &number) != CUDA_SUCCESS) return 0;
    return number;
  }

  const std::shared_ptr<Core> core;
  const CUcontext context;
  const CUevent event;
  const unsigned long long context_number;  // 0: this driver has none
};

Status CudaDriver::OnProgramStream(DeviceOrdinal device, const char* call, void* stream,
                                   const std::function<int(void* stream)>& use, Capture after) {
  AMEM_ASSIGN(const auto opened, core_->Open(device));
  const CudaCalls& calls = core_->calls;
  InContext current(calls, ContextFor(calls, device, opened.context, stream));
  const auto is_captured = [&] {
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    current.Call(calls.stream_is_capturing, static_cast<CUstream>(stream), &capture);
    return current.result() == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || capture != CU_STREAM_CAPTURE_STATUS_NONE;
  };
  bool captured = is_captured();
  if (!captured) current.Call([&] { return static_cast<CUresult>(use(stream)); });
  if (!captured && after == Capture::kRefused) captured = is_captured();
  if (captured)
    return {Code::kRefused, fmt::format("{} on device {}: a stream capture is running there; end it first", call, device.value),
            cuda::kCaptureUnsupported};
  return current.ok() ? Status{} : core_->Failure(current.result(), fmt::format("{} device {}", call, device.value));
}

Result<std::unique_ptr<StreamMoment>> CudaDriver::MomentOf(DeviceOrdinal device, void* stream) {
  const CudaCalls& calls = core_->calls;
  if (calls.event_create == nullptr || calls.event_record == nullptr || calls.event_destroy == nullptr ||
      calls.event_query == nullptr || calls.stream_context == nullptr || calls.stream_wait == nullptr)
    return Status{Code::kUnsupported, "the CUDA driver has no events"};
  std::unique_ptr<StreamMoment> moment;
  AMEM_TRY(OnProgramStream(
      device, "cuEventRecord", stream,
      [&](void* theirs) -> int {
        CUcontext context = nullptr;
        CUevent event = nullptr;
        if (const CUresult result = calls.stream_context(static_cast<CUstream>(theirs), &context); result != CUDA_SUCCESS)
          return result;
        InContext current(calls, context);
        current.Call(calls.event_create, &event, CU_EVENT_DISABLE_TIMING);
        if (!current.ok()) return current.result();
        moment = std::make_unique<CudaStreamMoment>(core_, context, event);
        return calls.event_record(event, static_cast<CUstream>(theirs));
      },
      Capture::kRefused));
  return moment;
}

Status CudaDriver::Follow(DeviceOrdinal device, const StreamMoment& moment) {
  const auto* const held = dynamic_cast<const CudaStreamMoment*>(&moment);
  if (held == nullptr || !held->Lives()) return {};  // it stands for nothing
  return OnStream(device, "cuStreamWaitEvent", {}, 0,
                  [&](void* stream) -> int { return core_->calls.stream_wait(static_cast<CUstream>(stream), held->event, 0); });
}

Status CudaDriver::MakeStreamWaitForCopies(DeviceOrdinal device, void* stream, Deadline until) {
  Status led;
  AMEM_TRY(OnProgramStream(device, "cuStreamWaitEvent", stream, [&](void* theirs) -> int {
    led = nonzero_->On(device).MakeStreamWaitForCopies(static_cast<CUstream>(theirs));
    return CUDA_SUCCESS;
  }));
  return led.code() == Code::kUnsupported ? FinishCopies(device, until) : led;
}

Status CudaDriver::AwaitMoment(DeviceOrdinal device, const StreamMoment& moment, Deadline until) {
  const auto* const held = dynamic_cast<const CudaStreamMoment*>(&moment);
  if (held == nullptr || !held->Lives()) return {};  // it stands for nothing
  const Deadline began = Now();
  InContext current(core_->calls, held->context);
  current.Call(Core::Await, until, [&] { return core_->calls.event_query(held->event); });
  if (current.result() == CUDA_ERROR_NOT_READY) return NotIdle(device, began, "");
  return current.ok() ? Status{} : core_->Failure(current.result(), fmt::format("cuEventQuery device {}", device.value));
}

Result<std::unique_ptr<Copier>> CudaDriver::OpenLane() {
  auto core = std::make_shared<Core>();  // with streams of its own
  core->calls = core_->calls;
  core->shared = core_->shared;
  return std::unique_ptr<Copier>(new CudaDriver(std::move(core), true));
}

}  // namespace amem
