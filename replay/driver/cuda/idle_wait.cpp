#include "replay/driver/cuda/idle_wait.h"

#include <fmt/format.h>

#include "journal/base/thread.h"

namespace amem {

// The whole wait for one context, on its own thread.
static CUresult WaitFor(const CudaCalls& calls, CUcontext context) {
  const InContext current(calls, context);
  if (!current.ok()) return current.result();
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = calls.stream_is_capturing(CU_STREAM_LEGACY, &capturing);
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || capturing != CU_STREAM_CAPTURE_STATUS_NONE)
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return calls.context_synchronize();
}

// On an H200 (driver 580) a destroyed context can still be made current, and answers the wait with 709.
static bool Destroyed(CUresult result) {
  return result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

Status CudaDriver::IdleWait::Await(DeviceOrdinal device, Deadline until, const std::function<bool()>& breaks_off) {
  const Deadline began = Now();
  AMEM_ASSIGN(const auto active, core_->HasContext(device));
  std::set<CUcontext> contexts;
  {
    const MutexLock lock(mutex_);
    if (const auto* const noted = FindIn(noted_, device)) contexts = *noted;
  }
  CUcontext primary = nullptr;
  if (active) {  // nothing of this process runs without a context, and a new one would stay for good
    AMEM_ASSIGN(const auto opened, core_->Open(device));
    primary = opened.context;
    contexts.insert(primary);
  }
  for (const CUcontext context : contexts) {
    AMEM_ASSIGN(const auto waited, AwaitContext(context, until, breaks_off));
    if (!waited) return Passed(until) ? NotIdle(device, began, Details(context)) : BrokenOff(device);
    const CUresult result = *waited;
    if (result == CUDA_SUCCESS) continue;
    if (context != primary && Destroyed(result)) {  // the program destroyed it, and its work with it
      Forget(device, context);
      continue;
    }
    const Status failure = core_->Failure(result, fmt::format("cuCtxSynchronize device {}", device.value));
    if (result != CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) return failure;
    return {Code::kRefused, failure.message() + ": a stream capture is running; end it first", static_cast<int>(result)};
  }
  return {};
}

bool CudaDriver::IdleWait::Ends(const Wait& wait, Clock::time_point until, const std::function<bool()>& breaks_off) {
  constexpr std::chrono::milliseconds kOften{20};
  while (wait.wait_until(std::min(until, Clock::now() + kOften)) != std::future_status::ready)
    if (Clock::now() >= until || (breaks_off && breaks_off())) return false;
  return true;
}

Result<std::optional<CUresult>> CudaDriver::IdleWait::AwaitContext(CUcontext context, Clock::time_point until,
                                                                   const std::function<bool()>& breaks_off) {
  Wait before;
  {
    const MutexLock lock(mutex_);
    if (const auto* const known = FindIn(unfinished_, context)) before = *known;
  }
  // An earlier wait that is still under way began before the work that this one must wait for.
  if (before.valid() && !Ends(before, until, breaks_off)) return std::optional<CUresult>();
  const auto task =
      std::make_shared<std::packaged_task<CUresult()>>([core = core_, context] { return WaitFor(core->calls, context); });
  const Wait wait = task->get_future();
  AMEM_ASSIGN(auto started, StartThread("amem-idle", [task] { (*task)(); }));
  started.detach();
  const bool ended = Ends(wait, until, breaks_off);
  const MutexLock lock(mutex_);
  if (!ended) unfinished_[context] = wait;
  if (ended) unfinished_.erase(context);
  return ended ? std::optional(wait.get()) : std::nullopt;
}

// The default stream's state tells whether the program's own streams are busy. Those are not asked, because a destroyed stream
// must not be touched.
std::string CudaDriver::IdleWait::Details(CUcontext context) const {
  std::string text;
  if (core_->calls.stream_query != nullptr) {
    const InContext current(core_->calls, context);
    const bool busy = current.ok() && core_->calls.stream_query(CU_STREAM_LEGACY) == CUDA_ERROR_NOT_READY;
    text = busy ? "its default stream is busy" : "its default stream is idle, so another one is busy";
  }
  if (last_context_ == context) {
    text += fmt::format("{}NCCL's last call there was {} on stream {}", text.empty() ? "" : "; ", last_call_.load(),
                        fmt::ptr(last_stream_.load()));
  }
  return text.empty() ? text : " (" + text + ")";
}

void CudaDriver::IdleWait::NoteStream(const char* call, void* stream) {
  const CudaCalls& calls = core_->calls;
  CUcontext context = nullptr;
  if (calls.stream_context == nullptr || calls.stream_context(static_cast<CUstream>(stream), &context) != CUDA_SUCCESS)
    static_cast<void>(calls.context_current(&context));
  if (context == nullptr) return;
  last_call_.store(call, std::memory_order_relaxed);
  last_stream_.store(stream, std::memory_order_relaxed);
  last_context_.store(context, std::memory_order_relaxed);
  if (Recent(context).load(std::memory_order_relaxed) == context) return;
  CUdevice device = 0;
  const InContext current(calls, context);
  if (!current.ok() || calls.context_device(&device) != CUDA_SUCCESS) return;
  const MutexLock lock(mutex_);
  noted_[DeviceOrdinal{device}].insert(context);
  Recent(context) = context;
}

void CudaDriver::IdleWait::Forget(DeviceOrdinal device, CUcontext context) {
  const MutexLock lock(mutex_);
  noted_[device].erase(context);
  Recent(context) = nullptr;
}

}  // namespace amem
