#include "ncclpatch/runtime/runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <spdlog/fmt/fmt.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <thread>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/file.h"
#include "journal/base/no_memory.h"
#include "journal/base/process_sight.h"
#include "ncclpatch/hook/own_names.h"
#include "ncclpatch/hook/redirects.h"
#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"
#include "ncclpatch/nccl/communicators.h"
#include "ncclpatch/runtime/last_error.h"
#include "ncclpatch/runtime/log.h"
#include "ncclpatch/runtime/read_on.h"
#include "ncclpatch/runtime/safepoint.h"
#include "ncclpatch/runtime/suspend.h"
#include "replay/driver/cuda/cuda_driver.h"
#include "replay/peers/unix/unix_peers.h"

namespace amem {
namespace {

void Report(bool failed, std::string_view message) { log::Write(failed ? log::Level::kError : log::Level::kDebug, message); }

// Of NVIDIA's driver, of the Windows subsystem for Linux, of embedded boards.
constexpr std::array kDeviceFiles = {"/dev/nvidiactl", "/dev/nvidia0",         "/dev/nvidia-caps",
                                     "/dev/dxg",       "/dev/nvhost-ctrl-gpu", "/dev/nvgpu"};

// Whether no driver can be loaded and no device is to be seen, or, if it may be asked because a session could not be started
// anyway, the driver says that there is none.
bool HasNoGpu(bool may_ask_driver) {
  static std::atomic<bool> is_there = false;
  if (!is_there.load() && ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) == nullptr)  // never closed, as CudaDriver's
    return std::ranges::none_of(kDeviceFiles, [](const char* path) { return ::access(path, F_OK) == 0; });
  is_there.store(true);
  const auto init = may_ask_driver ? AMEM_DRIVER(cuInit) : nullptr;
  return init != nullptr && init(0) == CUDA_ERROR_NO_DEVICE;
}

thread_local bool t_forking = false;  // this thread holds locks that a child must not inherit

// Makes no driver calls, because the driver may be gone at exit. A thread that hangs in the driver may hold the session's lock
// for ever; the process must end all the same.
void CloseAtExit(int exit_code, void* /*unused*/) {
  constexpr auto kPatience = std::chrono::seconds(5);
  if (replacements::inert.load()) return;
  Session* session = Runtime::Get().started();
  if (session == nullptr) return;
  std::packaged_task<Status()> close([session, exit_code = exit_code & 0xff] { return session->Close("exit", exit_code); });
  std::future<Status> result = close.get_future();
  try {
    std::thread(std::move(close)).detach();
  } catch (const std::system_error&) {
    return;
  }
  if (result.wait_for(kPatience) != std::future_status::ready)
    return log::Warn(
        "closing the journal at exit: a thread of this process is still in a driver call; the journal ends without a last "
        "event");
  if (const Status status = result.get(); !status) log::Warn("closing the journal at exit: " + status.message());
}

Result<SessionId> RandomSession() {
  std::uint64_t value = 0;
  while (value == 0)
    if (getrandom(&value, sizeof value, 0) != sizeof value)
      return Status{Code::kIo, "choosing a session id: getrandom gave nothing"};
  return SessionId{value};
}

// A UUID that cannot be read stays empty, because only people read it.
std::vector<GpuName> DeviceUuids(Driver& driver) {
  std::vector<GpuName> uuids;
  const Result<int> count = driver.DeviceCount();
  for (int device = 0; count.ok() && device < *count; ++device) {
    const Result<std::string> uuid = driver.DeviceUuid(DeviceOrdinal{device});
    uuids.push_back(uuid.ok() ? *uuid : std::string());
  }
  return uuids;
}

SessionOpened Describe(const Options& options, Driver& driver, SessionId session) {
  SessionOpened who;
  who.session = session;
  char host[256] = "unknown";
  gethostname(host, sizeof host - 1);
  who.host = host;
  who.pid = getpid();
  who.boot_id = FirstLineOf("/proc/sys/kernel/random/boot_id");
  who.amem_version = AMEM_VERSION;
  who.driver_version = driver.Version();
  if (const auto libraries = hook::Libraries(); !libraries.empty())
    who.nccl_version = hook::Describe(libraries.front()).nccl_version;
  who.gpu_uuids = DeviceUuids(driver);
  who.group = options.group;
  who.rank = options.rank;
  who.realtime_ns = RealtimeNs();
  who.monotonic_ns = MonotonicNs();
  who.layout = options.layout == Layout::kSlab ? "slab" : "direct";
  who.launcher.assign(options.launcher.begin(), options.launcher.end());
  who.program = OwnProgram();
  who.python = ::dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr;
  who.timeout_ms = static_cast<std::uint32_t>(options.deadlines.call().count());
  who.content = "preserve";
  return who;
}

}  // namespace

// Makes these locks free in the child. Once there is a session the child is inert, and nothing is waited for, because a thread
// that hangs in the driver may hold a lock for ever. No lock is held while a session starts, because libcuda forks in cuInit.
void Runtime::BeforeFork() {
  t_forking = Get().started() == nullptr;
  if (!t_forking) return;
  nccl::BeforeFork();  // first, because its observers come here with its lock held
  Get().mutex_.lock();
  hook::BeforeFork();
}
void Runtime::AfterFork() {
  if (!std::exchange(t_forking, false)) return;
  hook::AfterFork();
  Get().mutex_.unlock();
  nccl::AfterFork();
}
// Before the parent's first use of the driver a child starts afresh. Later neither the driver nor the parent's session works in
// it.
void Runtime::InChild() {
  AfterFork();
  safepoint::ForgetInChild();
  if (Get().started() != nullptr || Get().start_.load() == SessionStart::kUnderWay) replacements::inert.store(true);
}

Runtime& Runtime::Get() {
  static auto* runtime = new Runtime;
  return *runtime;
}

// Removes names that AMem does not answer here from its own symbol table.
void Runtime::ShowNames(std::span<const char* const> doorbells) {
  const bool enabled = options_.enable && settings_.ok();
  const bool serves = enabled && options_.suspend == Suspend::kServe;
  const bool preloaded = enabled && hook::IsPreloaded();
  if (!serves) hook::HideNames(suspend::kNames);
  if (!preloaded) hook::HideNames(doorbells);
  if (!enabled) return;
  using Names = std::span<const char* const>;
  hook::AnswerNames(serves ? Names(suspend::kNames) : Names(), preloaded ? doorbells : Names());
  nccl::SetObserver([](EventBody event) { Runtime::Get().Note(std::move(event)); });
  // Never destroyed, like the runtime.
  static auto* const tables = new std::vector<redirects::Table>(nccl::Tables().begin(), nccl::Tables().end());
  tables->push_back(last_error::Calls());
  if (serves) {
    tables->push_back(suspend::Calls());
    nccl::SetSuspendServer(suspend::TheServer());
  }
  redirects::Install(*tables, nccl::ThreadCalls());
  answers_.store(serves ? Answers::kNcclAndSuspend : Answers::kNccl);
}

bool Runtime::ServesSuspend() const { return answers_.load() == Answers::kNcclAndSuspend && !replacements::inert.load(); }

void Runtime::PatchIfLoaded() {
  if (answers_.load() != Answers::kNone && !replacements::inert.load()) hook::PatchIfLoaded();
}

void Runtime::Load(std::span<const char* const> doorbells) {
  std::call_once(loaded_, [this, doorbells] {
    Result<Options> options = ParseOptions([](const char* name) -> const char* { return std::getenv(name); });
    if (!options) {
      settings_ = options.status().Within("settings");
      log::Error(settings_.message() + "; AMem is off in this process");
      return ShowNames(doorbells);
    }
    options_ = *std::move(options);
    if (!options_.enable) return ShowNames(doorbells);
    log::Configure(options_.log_level, options_.rank);
    options_.unknown_variables = UnknownVariables(environ);
    for (const std::string& warning : options_.unknown_variables) log::Info(warning);  // for `amem doctor` and `amem run`
    pthread_atfork(&Runtime::BeforeFork, &Runtime::AfterFork, &Runtime::InChild);
    hook::SetReport(&Report);
    ShowNames(doorbells);
    if (options_.renews && above_.renew != nullptr) options_.network = above_.renew();
    hook::Enable();
    if (options_.scope != LibraryScope::kNccl && above_.widen != nullptr) above_.widen(options_.scope);
    hook::PatchAtLoad();
  });
}

Status Runtime::Usable() {
  if (replacements::inert.load())
    return {
        Code::kRefused,
        "this process was forked from one whose NCCL had used the GPU already; fork before the first use, or start ranks as "
        "processes of their own (spawn)"};
  return settings_;
}

bool Runtime::SwitchedOff() const { return settings_ && !options_.enable && !replacements::inert.load(); }

const char* Runtime::WhyIdle() {
  const char* const why = SwitchedOff()                                      ? "AMEM_ENABLE=0: AMem is switched off"
                          : started() != nullptr                             ? nullptr
                          : HasNoGpu(start_.load() == SessionStart::kFailed) ? "there is no GPU in this process"
                                                                             : nullptr;
  static std::atomic<bool> said = false;
  if (why != nullptr && !said.exchange(true)) log::Warn(fmt::format("{}; AMem's calls do nothing", why));
  return why;
}

Status Runtime::Attach() {
  Load();
  AMEM_TRY(Usable());
  if (SwitchedOff()) return WhyIdle(), Status::Ok();
  const Status attached = hook::Attach();
  return attached.ok() || WhyIdle() == nullptr ? attached : Status::Ok();
}

Session* Runtime::Start() {
  std::unique_lock lock(mutex_);
  start_ended_.wait(lock, [&] { return start_.load() != SessionStart::kUnderWay; });
  if (Session* session = session_.load()) return session;
  if (start_.load() == SessionStart::kFailed) return nullptr;
  start_.store(SessionStart::kUnderWay);
  lock.unlock();
  Result<std::unique_ptr<Session>> made = MakeSession();
  lock.lock();
  start_.store(made ? SessionStart::kStarted : SessionStart::kFailed);
  start_ended_.notify_all();
  if (!made) {
    failure_ = made.status();
    log::Error(failure_.message() + "; NCCL goes on without AMem, and its memory cannot be paused");
    return nullptr;
  }
  if (options_.rank <= 0)  // once a job
    for (const std::string& warning : options_.unknown_variables) log::Warn(warning);
  Session* session = (*std::move(made)).release();  // leaked
  if (std::string why = libraries_.RecordNew(*session, options_); all_stays_because_.empty())
    all_stays_because_ = std::move(why);
  for (EventBody& event : std::exchange(pending_, {})) session->records().Note(std::move(event));
  if (!all_stays_because_.empty()) session->NoteEverythingKept(all_stays_because_);
  safepoint::Begin(*session, options_.socket_directory);
  session_.store(session, std::memory_order_release);
  lock.unlock();
  RecordOthers(*session);
  ::on_exit(&CloseAtExit, nullptr);  // like atexit, but with the exit code; this library is never unloaded
  return session;
}

Result<std::unique_ptr<Session>> Runtime::MakeSession() {
  AMEM_TRY(Usable());
  if (SwitchedOff()) return Status{Code::kRefused, "AMem is switched off in this process (AMEM_ENABLE=0)"};
  libraries_.CheckBeforeSession(options_);
  try {
    return StartSession(options_, safepoint::Requests());
  } catch (const std::exception& error) {
    return Status{Code::kIo, fmt::format("starting AMem's session: {}", error.what())};
  }
}

void Runtime::RecordOthers(Session& session, bool wait) {
  if (above_.record_others != nullptr) above_.record_others(session, wait);
}

void Runtime::AttachNewLibraries() {
  std::string unproved;
  {
    const std::lock_guard lock(mutex_);
    unproved = libraries_.AttachNew(session_.load(), options_);
  }
  if (!unproved.empty()) LeaveAllInPlace(unproved);
}

Result<Session*> Runtime::IfStarted() {
  AMEM_TRY(Usable());
  if (Session* running = started()) return running;
  if (SwitchedOff() || start_.load() == SessionStart::kFailed) {
    if (WhyIdle() != nullptr) return static_cast<Session*>(nullptr);
    const std::lock_guard lock(mutex_);
    return failure_.Within("AMem could not start its session in this process");
  }
  return static_cast<Session*>(nullptr);
}

Result<Session*> Runtime::ToPause() {
  AMEM_ASSIGN(Session* const running, IfStarted());
  if (SwitchedOff() || !hook::Libraries().empty()) return running;
  const Status attached = hook::Attach().Within("NCCL is not under AMem");
  const bool nothing_to_pause =
      running != nullptr ? attached.code() == Code::kNotFound : !attached.ok() && WhyIdle() != nullptr;
  if (!attached.ok() && !nothing_to_pause) return attached;
  return running;
}

Result<Session*> Runtime::ForPools() {
  if (Session* running = started(); running != nullptr && !replacements::inert.load()) return running;
  AMEM_TRY(Usable());
  if (WhyIdle() != nullptr) return static_cast<Session*>(nullptr);
  static_cast<void>(session());
  return IfStarted();
}

void Runtime::Note(EventBody event) {
  if (Session* running = started()) return running->records().Note(std::move(event));
  if (start_.load() == SessionStart::kFailed) return;
  {
    const std::lock_guard lock(mutex_);
    if (session_.load() == nullptr) {
      pending_.push_back(std::move(event));
      return;
    }
  }
  started()->records().Note(std::move(event));
}

void Runtime::LeaveAllInPlace(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!all_stays_because_.empty()) return;
    all_stays_because_ = why;
  }
  log::Warn("pauses will leave all memory in place: " + why);
  if (Session* running = started()) running->NoteEverythingKept(why);
}

Status Runtime::Cycle(Session& session, CycleKind kind, bool patient, IdleNow idle) {
  const bool was_paused = session.paused();
  const auto pause = [&] {
    return idle == IdleNow::kHosts && !libraries_.unproved() ? session.PauseOfIdleHosts()
           : idle == IdleNow::kLaunches                      ? session.PauseBesideProgram()
                                                             : session.Pause();
  };
  const Status status = kind == CycleKind::kPause ? pause() : patient ? session.Resume() : session.ResumeInTime();
  // The pause has succeeded, and its caller is to be told so, also where there is no memory for what follows.
  if (status && kind == CycleKind::kPause && !was_paused && above_.after_pause != nullptr)
    static_cast<void>(OrNoMemory([&] { return above_.after_pause(session), Status{}; }));
  return status ? status : Failed(session, status);
}

Status Runtime::Failed(Session& session, const Status& why) {
  const std::filesystem::path journal = session.records().JournalDirectory();
  return {why.code(), why.message() + (journal.empty() ? "" : WhereToReadOn(journal)), why.driver_result()};
}

Status Runtime::RunCycle(CycleKind kind, bool patient, std::optional<WantId> want, IdleNow idle) {
  AttachNewLibraries();
  // A request from outside takes what it can, as far as it is under AMem.
  AMEM_ASSIGN(Session* const session, want ? ToPause() : IfStarted());
  if (session == nullptr) {
    log::Info("NCCL holds no GPU memory yet: nothing to pause or resume");
    return Status::Ok();
  }
  // Before the scope is taken, because the thread may have to carry out a request from outside.
  safepoint::OwnCycle own(*session, kind);
  if (kind == CycleKind::kPause) RecordOthers(*session);
  const Wants::Memory memory{"NCCL's memory", [session] { return !session->paused(); },
                             [&] { return Cycle(*session, kind, patient, idle); }};
  const auto until = kind == CycleKind::kResume && patient ? std::nullopt : std::optional(UntilCallEnds());
  const Status status =
      kind == CycleKind::kPause ? Wants::Get().Pause({}, want, *until, memory) : Wants::Get().Resume({}, want, until, memory);
  if (kind == CycleKind::kPause && status) WarnOfRemainder(*session, {}, "nccl");
  own.Ended(status);
  return status;
}

Status Runtime::SetGroup(std::int64_t group) {
  AMEM_TRY(Usable());
  WhyIdle();
  {
    std::unique_lock lock(mutex_);
    start_ended_.wait(lock, [&] { return start_.load() != SessionStart::kUnderWay; });
    if (session_.load() == nullptr) {
      options_.group = group;
      return Status::Ok();
    }
  }
  return started()->SetGroup(group);
}

Result<std::int64_t> Runtime::Group() {
  AMEM_TRY(Usable());
  if (Session* running = started()) return running->group();
  const std::lock_guard lock(mutex_);
  return options_.group;
}

Result<DeviceOrdinal> Runtime::CurrentDevice() {
  static const auto get = AMEM_DRIVER(cuCtxGetDevice);
  if (get == nullptr) return Status{Code::kUnsupported, "asking for the current device: the driver has no cuCtxGetDevice"};
  CUdevice device = 0;
  if (const CUresult result = get(&device); result != CUDA_SUCCESS)
    return Status{Code::kDriver, fmt::format("asking for the current device: the driver answered {}", static_cast<int>(result)),
                  result};
  return DeviceOrdinal{device};
}

// ---- starts a session inside NCCL's process

Result<std::unique_ptr<Session>> StartSession(const Options& options, control::RequestServer& requests) {
  AMEM_ASSIGN(const auto session, RandomSession());

  // If there is none, LoadSystem's message says so.
  const bool found = hook::DriverSymbol("cuGetProcAddress_v2") != nullptr;
  Result<std::unique_ptr<CudaDriver>> driver =
      found ? CudaDriver::Load([](const char* name) { return hook::DriverSymbol(name); }) : CudaDriver::LoadSystem();
  if (!driver) return driver.status();

  JournalOptions journaling = options.journal;
  journaling.report = [](const std::string& message) { log::Warn(message); };
  auto journal = JournalWriter::OpenLasting(journaling, session);

  const auto start_peers = [&](const PeerIdentity& self, PeerDelegate& delegate) -> Result<std::unique_ptr<Peers>> {
    UnixPeersOptions settings;
    settings.socket_directory = options.socket_directory;
    settings.deadlines = options.deadlines;
    settings.abstract_names = true;
    settings.report = journaling.report;
    settings.requests = &requests;
    // Tells whoever looks at a terminal why nothing goes on; otherwise the journals and `amem watch` tell.
    settings.waiting = [](const std::string& message) {
      ::isatty(STDERR_FILENO) == 1 ? log::Warn(message) : log::Info(message);
    };
    AMEM_ASSIGN(std::unique_ptr<Peers> peers, UnixPeers::Start(self, settings, delegate));
    return peers;
  };
  SessionOpened who = Describe(options, **driver, session);
  // The driver must outlive the session, which is never destroyed.
  SessionOptions settings = options;
  settings.pool_pinned_bytes = PinnedForPools(options);
  settings.pinned_bytes = std::min(options.pinned_bytes, settings.pool_pinned_bytes);
  // The directory may be on a shared file system.
  settings.first_tag = [] { Runtime::Get().Guard(); };
  settings.host_claims = options.socket_directory / ("host-memory-" + who.boot_id);
  return Session::Start(settings, *(*std::move(driver)).release(), std::move(who), std::move(journal), start_peers);
}

}  // namespace amem
