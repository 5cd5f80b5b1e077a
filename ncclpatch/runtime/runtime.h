// The one global of libamem_nccl.so: settings, and the session once NCCL uses the driver.
//
// Load() runs in the ELF constructor and does no more than read settings and install the hook. The session - journal, sockets,
// driver - is started by NCCL's first memory call. If it cannot be started, NCCL goes on without AMem, and a pause says why.
// Never destroyed: NCCL's threads may call after main has returned. All methods may be called from any thread.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ncclpatch/runtime/on_failure.h"
#include "ncclpatch/runtime/options.h"
#include "replay/session/session.h"

namespace amem {

class Runtime {
 public:
  static Runtime& Get();

  // Once, from the ELF constructor. `doorbells`: the functions of NCCL's that the library exports for LD_PRELOAD.
  void Load(std::span<const char* const> doorbells = {});
  Status Attach();  // amem_attach

  // Whether ncclCommSuspend and the like are AMem's here: not with AMEM_SUSPEND=native, switched off, or in an inert child.
  [[nodiscard]] bool ServesSuspend() const;
  // A program begins to use NCCL: puts what was loaded since under AMem.
  void LookForNames();

  // The session, started now if need be. Null: it could not be started, and the call must be passed through.
  Session* session() {
    Session* session = session_.load(std::memory_order_acquire);
    return session != nullptr || failed_.load(std::memory_order_acquire) ? session : Start();
  }
  // Null while NCCL has made no memory call. One load.
  [[nodiscard]] Session* started() const { return session_.load(std::memory_order_acquire); }

  // Puts libnccls that were loaded since under AMem, and warns of each one for which that is impossible: its memory stays.
  void LookForLibraries();

  [[nodiscard]] bool SwitchedOff() const;  // AMEM_ENABLE=0
  // The session, or why there can be none. Ok(null): none has been needed yet.
  Result<Session*> IfStarted();
  // For the C interface: the session to pause. Ok(null): NCCL is under AMem and has used no memory yet.
  Result<Session*> ToPause();

  // Journals an event, now or as soon as the session starts.
  void Note(EventBody event);

  // From now on pauses leave all memory in place, because somebody whom AMem cannot ask may hold its pages. Not with the gate
  // held.
  void KeepEverything(const std::string& why);
  // NCCL shares memory by handles that are not AMem's (fabric), which a pause leaves in place; NCCL's own suspend takes it.
  void NoteForeignSharing() { shares_foreign_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool SharesForeign() const { return shares_foreign_.load(std::memory_order_relaxed); }
  Status Cycle(Session& session, CycleKind kind, bool patient = false);
  // A pause or resume as the program asks for it; nothing to do before NCCL has used memory.
  // `patient`: as Session::Resume, else as Session::ResumeInTime.
  Status RunCycle(CycleKind kind, bool patient = false);
  // The failure of a pause or resume with where to read on; the user's command is run (AMEM_ON_FAILURE).
  Status Failed(Session& session, const Status& why);
  // For pools: the session, started now if need be, also without NCCL. Ok(null): AMem is switched off, and the program's calls
  // are answered as if there were no tags.
  Result<Session*> ForPools();
  // Called in the pausing thread after each pause that succeeded, when the devices are idle. It cannot make the pause fail.
  using AfterPause = void (*)(Session& session);
  void AfterPauses(AfterPause call) { after_pause_.store(call, std::memory_order_release); }

  Status SetGroup(std::int64_t group);
  Result<std::int64_t> Group();

  // The device of this thread's current context, as the real driver says.
  Result<DeviceOrdinal> CurrentDevice();

 private:
  Runtime() = default;
  void ShowNames(std::span<const char* const> doorbells);
  Session* Start();
  Result<std::unique_ptr<Session>> MakeSession();
  Status Usable();  // a failure says why AMem does not work in this process
  void NoteLibraries(Session& session);
  static void BeforeFork();
  static void AfterFork();
  static void InChild();

  std::once_flag loaded_;
  Options options_;
  OnFailure on_failure_;
  Status settings_;  // the result of reading the environment
  std::atomic<bool> enabled_{false}, serves_suspend_{false};
  std::atomic<Session*> session_{nullptr};
  std::atomic<bool> failed_{false}, shares_foreign_{false};
  std::atomic<AfterPause> after_pause_{nullptr};
  std::mutex mutex_;       // over all below
  bool starting_ = false;  // a thread makes the session, without the lock
  std::condition_variable start_ended_;
  Status failure_;
  std::vector<EventBody> pending_;
  std::uint64_t noted_libraries_ = 0, surveyed_at_ = 0;  // hook::Library::number, hook::LoadCount
  std::string keep_everything_;                          // why, if so
  std::set<std::string> not_under_amem_;                 // said already
};

}  // namespace amem
