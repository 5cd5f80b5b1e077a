#include "ncclpatch/runtime/runtime.h"

#include <pthread.h>
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/runtime/log.h"
#include "ncclpatch/runtime/start.h"

namespace amem {
namespace {

void Report(bool failed, std::string_view message) { log::Write(failed ? log::Level::kError : log::Level::kDebug, message); }

void InertInChild() { replacements::inert.store(true); }

// Makes no driver calls, because at exit the driver may be gone already.
void CloseAtExit() {
  if (replacements::inert.load()) return;
  Session* session = Runtime::Get().started();
  if (session == nullptr) return;
  if (const Status status = session->Close("exit"); !status) log::Warn("closing the journal at exit: " + status.message());
}

}  // namespace

Runtime& Runtime::Get() {
  static auto* runtime = new Runtime;
  return *runtime;
}

void Runtime::Load() {
  std::call_once(loaded_, [this] {
    Result<Options> options = ParseOptions([](const char* name) -> const char* { return std::getenv(name); });
    if (!options) {
      settings_ = options.status().Within("settings");
      log::Error(settings_.message() + "; AMem is off in this process");
      return;
    }
    options_ = *std::move(options);
    if (!options_.enable) return;
    log::Configure(options_.log_level, options_.rank);
    for (const std::string& warning : UnknownVariables(environ)) log::Warn(warning);
    pthread_atfork(nullptr, nullptr, &InertInChild);
    hook::SetReport(&Report);
    hook::Enable();
    hook::PatchAtLoad();
  });
}

Status Runtime::Usable() {
  if (replacements::inert.load())
    return {Code::kRefused, "this process was forked from one that uses AMem; start ranks as processes of their own (spawn)"};
  if (!settings_) return settings_;
  if (!options_.enable) return {Code::kRefused, "AMem is switched off in this process (AMEM_ENABLE=0)"};
  return Status::Ok();
}

Status Runtime::Attach() {
  Load();
  AMEM_TRY(Usable());
  return hook::Attach();
}

Session* Runtime::Start() {
  const std::lock_guard lock(mutex_);
  if (Session* session = session_.load()) return session;
  if (failed_.load()) return nullptr;
  Result<std::unique_ptr<Session>> made = MakeSession();
  if (!made) {
    failure_ = made.status();
    log::Error(failure_.message() + "; NCCL goes on without AMem, and its memory cannot be paused");
    failed_.store(true);
    return nullptr;
  }
  Session* session = (*std::move(made)).release();  // leaked on purpose
  for (const hook::Library& library : hook::Libraries()) session->Note(hook::Describe(library));
  for (EventBody& event : std::exchange(pending_, {})) session->Note(std::move(event));
  session_.store(session, std::memory_order_release);
  std::atexit(&CloseAtExit);
  return session;
}

Result<std::unique_ptr<Session>> Runtime::MakeSession() {
  AMEM_TRY(Usable());
  Status status;
  try {
    return StartSession(options_);
  } catch (const std::exception& error) {
    status = {Code::kIo, fmt::format("starting AMem's session: {}", error.what())};
  }
  return status;
}

Result<Session*> Runtime::ToPause() {
  AMEM_TRY(Usable());
  if (Session* running = started()) return running;
  if (failed_.load()) {
    const std::lock_guard lock(mutex_);
    return failure_.Within("AMem could not start its session in this process");
  }
  if (hook::Libraries().empty()) AMEM_TRY(hook::Attach().Within("NCCL is not under AMem"));
  return static_cast<Session*>(nullptr);
}

void Runtime::Note(EventBody event) {
  if (Session* running = started()) return running->Note(std::move(event));
  if (failed_.load()) return;
  {
    const std::lock_guard lock(mutex_);
    if (session_.load() == nullptr) {
      pending_.push_back(std::move(event));
      return;
    }
  }
  started()->Note(std::move(event));
}

Status Runtime::SetGroup(std::int64_t group) {
  AMEM_TRY(Usable());
  {
    const std::lock_guard lock(mutex_);
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
  using CtxGetDevice = CUresult (*)(CUdevice*);
  static const auto get = reinterpret_cast<CtxGetDevice>(hook::DriverSymbol("cuCtxGetDevice"));
  if (get == nullptr) return Status{Code::kUnsupported, "asking for the current device: the driver has no cuCtxGetDevice"};
  CUdevice device = 0;
  if (const CUresult result = get(&device); result != CUDA_SUCCESS)
    return Status{Code::kDriver, fmt::format("asking for the current device: the driver answered {}", static_cast<int>(result)),
                  result};
  return DeviceOrdinal{device};
}

}  // namespace amem
