// The one global of libamem_nccl.so: settings, and the session once NCCL uses the driver.
//
// Load() runs in the ELF constructor, reads settings and installs the hook. NCCL's first memory call starts the session:
// journal, sockets, driver. If it cannot start, NCCL goes on without AMem, and a pause says why. Never destroyed, because
// NCCL's threads may call after main has returned. Any thread may call any method.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/runtime/attached_libraries.h"
#include "ncclpatch/runtime/options.h"
#include "ncclpatch/runtime/wants.h"
#include "replay/peers/requests.h"
#include "replay/session/session.h"

namespace amem {

// What the caller of a pause knows to be idle: nothing, so that the devices are waited for; the GPUs of all hosts
// (Session::PauseOfIdleHosts); or NCCL's launches, beside which the program may run (Session::PauseBesideProgram).
enum class IdleNow : std::uint8_t { kNothing, kHosts, kLaunches };

class Runtime {
  // Which of NCCL's functions AMem answers.
  enum class Answers : std::uint8_t { kNone, kNccl, kNcclAndSuspend };
  // The session's start. While a thread makes it, that thread holds no lock, because libcuda forks in cuInit.
  enum class SessionStart : std::uint8_t { kNotNeededYet, kUnderWay, kStarted, kFailed };

 public:
  static Runtime& Get();

  // Once, from the ELF constructor. `doorbells`: NCCL's functions that the library exports for LD_PRELOAD.
  void Load(std::span<const char* const> doorbells = {});
  Status Attach();  // amem_attach

  // Whether AMem answers ncclCommSuspend and the like: not with AMEM_SUSPEND=native, switched off, or in an inert child.
  [[nodiscard]] bool ServesSuspend() const;
  // A program begins to use NCCL: attaches what was loaded since, if that can be known at once.
  void PatchIfLoaded();

  // The session, started now if necessary. Null: it could not start; pass the call through.
  Session* session() {
    Session* session = session_.load(std::memory_order_acquire);
    return session != nullptr || start_.load(std::memory_order_acquire) == SessionStart::kFailed ? session : Start();
  }
  // Null before NCCL's first memory call. One load.
  [[nodiscard]] Session* started() const { return session_.load(std::memory_order_acquire); }

  // Attaches newly loaded libnccls, and warns of each that cannot be attached: its memory stays.
  void AttachNewLibraries();

  // Null: the calls of the C interface work in this process. Otherwise they do nothing and succeed, for this reason, which is
  // logged once: AMEM_ENABLE=0, or there is no GPU.
  const char* WhyIdle();
  // The session, or why there can be none. Ok(null): none has been needed yet, or calls do nothing (WhyIdle).
  Result<Session*> IfStarted();
  // The same for a call that needs NCCL, which fails where none is under AMem. A process with a session and without an NCCL has
  // nothing of NCCL's to pause, which is Ok.
  Result<Session*> ToPause();

  // Journals an event, now or as soon as the session starts.
  void Note(EventBody event);

  // From now on pauses leave all memory in place, because somebody whom AMem cannot ask may hold its pages. The caller must not
  // hold the gate.
  void LeaveAllInPlace(const std::string& why);
  // NCCL shares memory by fabric handles, which a pause leaves in place; NCCL's own suspend releases it.
  void NoteForeignSharing() { shares_foreign_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool SharesForeign() const { return shares_foreign_.load(std::memory_order_relaxed); }
  Status Cycle(Session& session, CycleKind kind, bool patient = false, IdleNow idle = IdleNow::kNothing);
  // The program's pause or resume of NCCL's memory, for a want (Wants); nothing before NCCL has used memory. `patient`:
  // Session::Resume, else ResumeInTime. `idle`: of a pause.
  Status RunCycle(CycleKind kind, bool patient = false, std::optional<WantId> want = kPlainWant,
                  IdleNow idle = IdleNow::kNothing);
  // When a call that begins now gives up.
  [[nodiscard]] Deadline UntilCallEnds() const { return In(options_.deadlines.call()); }
  // The same failure with where to read on.
  static Status Failed(Session& session, const Status& why);
  // The session for pools, started now if necessary, even without NCCL. Ok(null): calls do nothing (WhyIdle), and are answered
  // as if there were no tags.
  Result<Session*> ForPools();
  // What the rooms above do for this one; null: nothing. Set before Load().
  struct Above {
    // In the pausing thread after each successful pause, while the devices are idle. It cannot make the pause fail.
    void (*after_pause)(Session& session) = nullptr;
    // When the session has started, before each pause, and before a report: records what other libraries share.
    void (*record_others)(Session& session, bool wait) = nullptr;
    // With AMEM_SCOPE=shared or all, to take other libraries in.
    void (*widen)(LibraryScope scope) = nullptr;
    // With AMEM_NETWORK=renew, before NCCL opens a network card: what renews its registrations, and lives as long as the
    // process.
    Network* (*renew)() = nullptr;
    // Before the first tag, in any scope: what other libraries hold of AMem's memory is to be seen from now on.
    void (*guard)() = nullptr;
  };
  void SetAbove(const Above& above) { above_ = above; }
  void RecordOthers(Session& session, bool wait = true);
  void Guard() const {
    if (above_.guard != nullptr) above_.guard();
  }
  // The same for a report of memory, if AMEM_SCOPE is wider than `nccl`.
  void RecordOthersInWiderScope(Session& session, bool wait = true) {
    if (options_.scope != LibraryScope::kNccl) RecordOthers(session, wait);
  }

  Status SetGroup(std::int64_t group);
  Result<std::int64_t> Group();

  // The device of this thread's current context, from the real driver.
  Result<DeviceOrdinal> CurrentDevice();

 private:
  Runtime() = default;
  void ShowNames(std::span<const char* const> doorbells);
  Session* Start();
  Result<std::unique_ptr<Session>> MakeSession();
  Status Usable();  // a failure says why AMem does not work in this process, where it is not switched off
  [[nodiscard]] bool SwitchedOff() const;  // AMEM_ENABLE=0
  static void BeforeFork();
  static void AfterFork();
  static void InChild();

  std::once_flag loaded_;
  Above above_;
  Options options_;
  Status settings_;  // of reading the environment
  std::atomic<Answers> answers_{Answers::kNone};
  std::atomic<Session*> session_{nullptr};  // set last in a start that succeeds
  std::atomic<SessionStart> start_{SessionStart::kNotNeededYet};
  std::atomic<bool> shares_foreign_{false};
  std::mutex mutex_;  // guards all below, and changes of start_
  std::condition_variable start_ended_;
  Status failure_;                  // of the start
  std::vector<EventBody> pending_;  // of before the start
  AttachedLibraries libraries_;
  std::string all_stays_because_;  // empty: it does not
};

// Opens the journal, the driver (the libcuda that NCCL opened) and the peers. A failure's message says which failed, and what
// to do. `requests` answers what is asked from outside, and outlives the session.
Result<std::unique_ptr<Session>> StartSession(const Options& options, control::RequestServer& requests);

// Warns, after a pause of that scope, which libraries keep how much of its memory in place, and for what other reasons more
// than a tenth of it stays, if that is news.
void WarnOfRemainder(Session& session, PoolId scope, const std::string& tag);

// ---- contexts of the driver, for AMem's own calls

CUcontext CurrentContext();  // this thread's; null: none
// Makes none. Null: this process has none.
CUcontext PrimaryContext(DeviceOrdinal device);
void ForgetPrimaryContext(DeviceOrdinal device);  // it is being destroyed

template <class Body>
CUresult InContext(CUcontext context, const Body& body) {
  static const auto push = AMEM_DRIVER(cuCtxPushCurrent);
  static const auto pop = AMEM_DRIVER(cuCtxPopCurrent);
  CUresult result = push(context);
  if (result != CUDA_SUCCESS) return result;
  result = body();
  pop(&context);
  return result;
}

}  // namespace amem
