#include "ncclpatch/runtime/safepoint.h"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <string>
#include <vector>

#include "ncclpatch/amem.h"
#include "ncclpatch/hook/hook.h"
#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/nccl/launches.h"
#include "ncclpatch/runtime/border.h"
#include "ncclpatch/runtime/runtime.h"
#include "ncclpatch/runtime/tags.h"
#include "replay/control/rank_control.h"
#include "replay/control/rank_link.h"

namespace amem::safepoint {
namespace {

constexpr const char* kNcclTag = "nccl";

std::atomic<std::uint64_t> g_steps{0};  // safe points of this process, also those before there is a session
std::atomic<control::RankControl*> g_control{nullptr};
thread_local bool t_serving = false;  // this thread does what a request asks for

// What a request does to this rank's memory; the thread that waits in the safe point calls it.
class OnSession final : public control::Actions {
 public:
  OnSession(Session& session, const std::filesystem::path& socket_directory) : session_(session), sockets_(socket_directory) {}

  // Contents are kept, whatever the policy: the program does not expect to lose them here.
  Status PauseTags() override {
    std::vector<std::string> all, by_request;
    std::vector<PoolSnapshot> pools = session_.pools().Snapshot();
    std::ranges::sort(pools, {},
                      &PoolSnapshot::tag);  // as on the ranks that share a tag, which may have opened others before
    for (const PoolSnapshot& pool : pools) {
      if (pool.state == "paused") continue;
      all.push_back(pool.tag);
      // What the program is pausing is waited for, and stays paused when the request resumes.
      if (pool.state != "pausing") by_request.push_back(pool.tag);
    }
    const Status status = CycleAll(all, CycleKind::kPause);
    if (status.ok()) paused_.insert(paused_.end(), by_request.begin(), by_request.end());
    return status;
  }
  Status ResumeTags() override {
    const Status status = CycleAll({paused_.rbegin(), paused_.rend()}, CycleKind::kResume);
    if (status.ok()) paused_.clear();
    return status;
  }
  Status PauseNccl() override {
    return CycleAll({kNcclTag}, CycleKind::kPause, launches_held_ ? IdleNow::kLaunches : IdleNow::kNothing);
  }
  bool NcclIsAway() override { return session_.StaysPaused(); }
  Status ResumeNccl() override { return CycleAll({kNcclTag}, CycleKind::kResume); }
  Bytes Held() override {
    return session_.Inspect([](const State& state) {
      const Holdings held = Measure(state);
      return held.own_device_resident + held.pools_resident;
    });
  }
  void Note(EventBody event) override { session_.records().Note(std::move(event)); }
  agreement::LaunchReading HoldLaunches(const agreement::LaunchOrder& order) override {
    launches_held_ = true;
    LetCapturesGoOn();
    agreement::LaunchReading reading = nccl::launches::Hold(order);
    if (reading.why_not.empty()) reading.why_not = WhyBesideProgramCannotPause();
    return reading;
  }
  void LetLaunchesGo() override {
    nccl::launches::LetGo();
    launches_held_ = false;
  }
  Status AwaitLaunches() override { return session_.devices().AwaitStreams(nccl::launches::Streams()); }
  std::string WhyLaunchesCannotBeHeld() override {
    const std::string why = nccl::launches::Read().why_not;
    return why.empty() ? WhyBesideProgramCannotPause() : why;
  }
  Result<control::RankStatus> Ask(SessionId rank) override { return control::StatusOf(sockets_, rank); }

 private:
  // The program's threads may capture while this one calls the driver.
  static void LetCapturesGoOn() {
    static const auto exchange = AMEM_DRIVER(cuThreadExchangeStreamCaptureMode);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (exchange != nullptr) exchange(&mode);
  }
  // Memory of ncclMemAlloc is the program's own, which may use it while it runs.
  [[nodiscard]] std::string WhyBesideProgramCannotPause() const {
    if (session_.nccl().ReleasesUserMemory()) return "with AMEM_USER_MEMORY=release a pause takes memory that the program uses";
    return "";
  }
  static Status CycleAll(const std::vector<std::string>& tags, CycleKind kind, IdleNow idle = IdleNow::kNothing) {
    std::vector<const char*> names;
    for (const std::string& tag : tags) names.push_back(tag.c_str());
    t_serving = true;
    Status status;
    try {
      tags::Request request{.want = {}, .idle = idle};
      if (kind == CycleKind::kPause) {
        request.how = HowToPause{.keeps = true};
      } else {
        request.how = HowToResume{.patient = false};
      }
      status = tags::Cycle(names, request);
    } catch (const std::exception& error) {
      status = {Code::kIo, error.what()};
    }
    t_serving = false;
    return status;
  }

  Session& session_;
  const control::ToolSockets sockets_;
  std::vector<std::string> paused_;  // by a request
  bool launches_held_ = false;
};

std::uint64_t CoarseNs() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);  // some nanoseconds where CLOCK_MONOTONIC takes thirty
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

// 0, or kInProgress: a request holds the caller still.
int InProgressUnless(const auto& served) noexcept {
  int result = kOk;
  const int failed = AtBorder("amem_safepoint", [&] {
    if (!served()) result = kInProgress;
    return Status{};
  });
  return failed != kOk ? failed : result;
}

bool ProgramUsesCuda() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return false;
  ::dlclose(driver);
  const auto current = AMEM_DRIVER(cuCtxGetCurrent);
  CUcontext context = nullptr;
  return current != nullptr && current(&context) != CUDA_ERROR_NOT_INITIALIZED;
}

// Whether the program uses CUDA is asked at the first safe points, and seldom afterwards. A session makes forked children
// inert, but so does CUDA that is in use.
void StartSession(std::uint64_t step) noexcept {
  constexpr std::uint64_t kSeldom = 64;
  static std::atomic<bool> switched_off{false};
  if (((step & (step - 1)) != 0 && step % kSeldom != 0) || replacements::inert.load() || switched_off.load()) return;
  try {
    if (!ProgramUsesCuda()) return;
    const auto session = Runtime::Get().ForPools();
    switched_off = session.ok() && *session == nullptr;
  } catch (const std::exception&) {  // no memory: the program goes on, and cannot be asked yet
  }
}

// True: something is asked.
bool Come(control::RankControl*& control, std::uint64_t& step) noexcept {
  step = g_steps.fetch_add(1, std::memory_order_relaxed) + 1;
  control = g_control.load(std::memory_order_acquire);
  if (control == nullptr) {
    StartSession(step);
    control = g_control.load(std::memory_order_acquire);
    if (control == nullptr) return false;
  }
  control->CameAt(CoarseNs());
  return control->Came(step);
}

int GoOn() noexcept {
  control::RankControl* const control = g_control.load(std::memory_order_acquire);
  if (control == nullptr) return kOk;
  return InProgressUnless([&] { return control->Serve(g_steps.load(std::memory_order_relaxed), true); });
}

int BeforeResume() noexcept {
  control::RankControl* const control = g_control.load(std::memory_order_acquire);
  Session* const session = Runtime::Get().started();
  if (control == nullptr || session == nullptr || !session->paused()) return kOk;
  return InProgressUnless([&] { return control->MayResume(true); });
}

int BeforePause() noexcept {
  control::RankControl* const control = g_control.load(std::memory_order_acquire);
  return control == nullptr ? kOk : InProgressUnless([&] { return control->MayPause(true); });
}

}  // namespace

static control::RankControl& Control() {
  // Who asks from outside reads in the journal what stays on the GPU, so that it is told there first.
  class Telling final : public control::RankControl {
    control::RankStatus CurrentStatus() override {
      if (Session* const session = Runtime::Get().started()) Runtime::Get().RecordOthersInWiderScope(*session, false);
      return RankControl::CurrentStatus();
    }
  };
  return Forever<Telling>();
}

control::RequestServer& Requests() { return Control(); }

void Begin(Session& session, const std::filesystem::path& socket_directory) {
  // Never destroyed, as the session.
  auto* const actions = new OnSession(session, socket_directory);
  const SessionId id = session.Inspect([](const State& state) { return state.session.session; });
  Control().Begin(id, *actions, g_steps.load(std::memory_order_relaxed));
  g_control.store(&Control(), std::memory_order_release);
}

void ForgetInChild() { g_control.store(nullptr, std::memory_order_relaxed); }

// Null: no request can be made, or this thread carries one out.
static control::RankControl* ControlOfProgram() { return t_serving ? nullptr : g_control.load(std::memory_order_acquire); }

OwnCycle::OwnCycle(Session& session, CycleKind kind) : session_(session), kind_(kind) {
  control::RankControl* const control = ControlOfProgram();
  if (control == nullptr) return;
  if (kind == CycleKind::kPause) control->BeginOwnPause();
  if (kind == CycleKind::kResume && session.paused()) static_cast<void>(control->MayResume(false));
}

void AwaitRequest() {
  if (control::RankControl* const control = ControlOfProgram()) static_cast<void>(control->MayPause(false));
}

OwnCycle::~OwnCycle() {
  control::RankControl* const control = ControlOfProgram();
  if (control == nullptr) return;
  if (kind_ == CycleKind::kPause) control->OwnPauseEnded(succeeded_ && session_.paused());
  if (kind_ == CycleKind::kResume) control->OwnResumeEnded(!session_.paused());
}

}  // namespace amem::safepoint

int amem_safepoint(unsigned how) {
  using namespace amem;
  if (how == AMEM_GO_ON) return safepoint::GoOn();
  if (how == AMEM_BEFORE_RESUME) return safepoint::BeforeResume();
  if (how == AMEM_BEFORE_PAUSE) return safepoint::BeforePause();
  if (how > AMEM_BEFORE_PAUSE) return Fail(kInvalidArgument, "amem_safepoint: give 0 or one of amem.h's");
  control::RankControl* control = nullptr;
  std::uint64_t step = 0;
  if (!safepoint::Come(control, step)) return kOk;
  if (how == AMEM_BEGIN) return kInProgress;
  return safepoint::InProgressUnless([&] { return control->Serve(step, false); });
}
