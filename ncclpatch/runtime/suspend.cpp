#include "ncclpatch/runtime/suspend.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ncclpatch/hook/own_names.h"
#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/communicators.h"
#include "ncclpatch/runtime/border.h"
#include "ncclpatch/runtime/last_error.h"
#include "ncclpatch/runtime/log.h"
#include "ncclpatch/runtime/runtime.h"
#include "ncclpatch/runtime/safepoint.h"

namespace amem::suspend {
namespace {

constexpr int kSuspendMemory = 1;                                                           // NCCL_SUSPEND_MEM
enum class Figure : int { kSuspendable = 0, kSuspended = 1, kPersistent = 2, kTotal = 3 };  // ncclCommMemStat_t

struct Change {
  CommunicatorId id;
  std::size_t place;  // of its library
  bool suspended;
  // It is settled when this thread's group of that library ends, and not before.
  [[nodiscard]] bool waits() const { return nccl::t_state.groups[place].is_open(); }
};
// Communicators that NCCL's own function suspended, with flags that AMem does not know: NCCL resumes them too.
struct NcclsOwn {
  std::mutex mutex;
  std::set<const ncclComm*> all;
};
// Whether it is one; from now on it is one or not, as `set` says.
bool SuspendedByNccl(const ncclComm* comm, std::optional<bool> set = {}) {
  auto& own = Forever<NcclsOwn>();
  const std::lock_guard lock(own.mutex);
  const bool known = own.all.contains(comm);
  if (set) *set ? static_cast<void>(own.all.insert(comm)) : static_cast<void>(own.all.erase(comm));
  return known;
}

// What this thread has marked and not yet settled; several inside groups, of which each library has its own.
thread_local std::vector<Change> t_changes;
thread_local std::string t_failed_resume;  // why, of the group that this thread ends

// Held while marks become a pause or a resume, and a resume may wait for other processes as long as they like.
constinit std::timed_mutex g_settling;
// The number of the pause that began here because all communicators were suspended. Whoever resumes the process ends it;
// whoever pauses it again begins another.
constinit std::atomic<std::uint64_t> g_paused_here = 0;

Result<std::unique_lock<std::timed_mutex>> AloneUntilCallEnds() {
  std::unique_lock alone(g_settling, Runtime::Get().UntilCallEnds());
  if (alone.owns_lock()) return alone;
  return Status{Code::kTimeout,
                "another thread of this process is suspending or resuming communicators, and had not ended by the deadline of "
                "this call; call again when it has"};
}

bool Paused() {
  Session* session = Runtime::Get().started();
  return session != nullptr && session->paused();
}
bool PausedHere() { return Paused() && Runtime::Get().started()->Progress().cycle == g_paused_here; }

bool AllSuspended() {
  bool any = false;
  for (const nccl::Communicator& one : nccl::All()) {
    if (!one.usable()) continue;
    if (!one.suspended) return false;
    any = true;
  }
  return any;
}

// Whether it was made beside the current pause.
bool IsAside(const nccl::Communicator& one) { return one.aside != 0 && PausedHere() && one.aside == g_paused_here; }

// Whether a suspended communicator has ranks that the new one lacks.
bool IsPart(const nccl::Communicator& asked) {
  return std::ranges::any_of(nccl::All(), [&](const auto& one) { return one.suspended && one.ranks > asked.ranks; });
}

// One communicator may have been marked both ways, so the last goes first.
void UndoChanges() noexcept {
  for (auto change = t_changes.end(); change != t_changes.begin();) {
    --change;
    if (change->waits()) continue;
    nccl::registry::SetSuspended(change->id, !change->suspended);
    change = t_changes.erase(change);
  }
}

Status PauseOrResume(bool pauses) {
  if (pauses) safepoint::AwaitRequest();  // before other threads' calls wait for this one
  const auto alone = AloneUntilCallEnds();
  Status status = alone.status();
  if (status.ok() && !pauses && Paused()) {
    status = Runtime::Get().RunCycle(CycleKind::kResume, true);
  } else if (status.ok() && pauses && AllSuspended()) {
    // It may be paused for another want already, which may end before these are resumed; or for a request, which ends first.
    const auto cycle = [] {
      Session* const session = Runtime::Get().started();
      return session == nullptr ? 0 : session->Progress().cycle;
    };
    const auto before = cycle();
    status = Runtime::Get().RunCycle(CycleKind::kPause);
    if (status.ok() && Paused() && cycle() != before) g_paused_here = cycle();
  }
  return status;
}

// Pauses the process once all its communicators are suspended, or resumes it with the first that is resumed. If that fails,
// all marks of this thread that are not settled are undone.
Status CarryOut(CycleKind kind) {
  const bool pauses = kind == CycleKind::kPause;
  Status status;
  try {
    status = PauseOrResume(pauses);
  } catch (...) {
    UndoChanges();
    throw;
  }
  // A pause took the memory of all that are marked, those of a group that is still open in another NCCL included.
  const bool all = status.ok() && pauses && Paused();
  if (status.ok())
    std::erase_if(t_changes, [&](const Change& change) { return change.suspended == pauses && (all || !change.waits()); });
  else
    UndoChanges();
  return status;
}

Result<nccl::Communicator> Known(const ncclComm* comm) {
  const std::optional<nccl::Communicator> found = nccl::Find(comm);
  if (found) return *found;
  return Status{Code::kNotFound,
                "AMem does not know this communicator, because it was made before its NCCL came under AMem; attach first, or "
                "preload libamem_nccl.so"};
}

Status Mark(const ncclComm* comm, bool suspended) {
  AMEM_ASSIGN(const auto one, Known(comm));
  if (one.stage != nccl::Stage::kReady)
    return {Code::kRefused, ToText(one.id) + (one.stage == nccl::Stage::kMaking
                                                  ? " is still being made; wait until ncclCommGetAsyncError says ncclSuccess"
                                                  : " was finalized or revoked; destroy it, which frees its memory")};
  if (one.suspended == suspended)
    return {Code::kRefused, ToText(one.id) + (suspended ? " is suspended already" : " is not suspended")};
  if (IsAside(one)) {  // no pause took its memory, and the others cannot be waited for
    nccl::registry::SetSuspended(one.id, suspended);
    return Status::Ok();
  }
  t_changes.push_back({one.id, one.place, suspended});
  nccl::registry::SetSuspended(one.id, suspended);
  nccl::Group& group = nccl::t_state.groups[one.place];
  if (group.is_open()) {
    group.Add(suspended ? nccl::Effect::kMayPause : nccl::Effect::kResumes);
    return Status::Ok();
  }
  return CarryOut(suspended ? CycleKind::kPause : CycleKind::kResume);
}

// AtBorder for what NCCL's calls answer, whose reason ncclGetLastError says as well.
template <class Body>
int AtNcclsBorder(const char* call, const Body& body) noexcept {
  const int result = AtBorder(call, body);
  if (result != kOk) last_error::NoteRefusal(std::string(LastError()));
  return result;
}

int Suspend(ncclComm* comm, int flags) {
  if (comm == nullptr) return Fail(kInvalidArgument, "ncclCommSuspend: the communicator is null");
  if (flags != kSuspendMemory)
    return Fail(kInvalidArgument,
                fmt::format("ncclCommSuspend: flags are {:#x}, and only NCCL_SUSPEND_MEM (1) is known", flags));
  return AtNcclsBorder("ncclCommSuspend", [&] { return Mark(comm, true); });
}

int Resume(ncclComm* comm) {
  if (comm == nullptr) return Fail(kInvalidArgument, "ncclCommResume: the communicator is null");
  return AtNcclsBorder("ncclCommResume", [&] { return Mark(comm, false); });
}

Status Read(const ncclComm* comm, Figure figure, std::uint64_t& value) {
  AMEM_ASSIGN(const auto one, Known(comm));
  CommunicatorHoldings held;
  if (Session* session = Runtime::Get().started())
    session->Inspect([&](const State& state) { held = MeasureCommunicators(state)[one.id]; });
  const Bytes figures[] = {held.own - held.own_kept, one.suspended ? 1U : 0U, held.own_kept, held.own};  // in Figure's order
  value = figures[static_cast<std::size_t>(figure)];
  return Status::Ok();
}

int MemoryStatistics(ncclComm* comm, int stat, std::uint64_t* value) {
  if (comm == nullptr || value == nullptr)
    return Fail(kInvalidArgument, "ncclCommMemStats: the communicator or the pointer for the answer is null");
  if (stat < 0 || stat > static_cast<int>(Figure::kTotal))
    return Fail(kInvalidArgument, fmt::format("ncclCommMemStats: there is no figure {}; 0 to 3 are known", stat));
  return AtBorder("ncclCommMemStats", [&] { return Read(comm, static_cast<Figure>(stat), *value); });
}

class Server : public nccl::SuspendServer {
 public:
  int Refuse(const char* call, CommunicatorId id) noexcept override {
    return AtNcclsBorder(call, [&]() -> Status {
      return {Code::kRefused, ToText(id) + " is suspended; call ncclCommResume first"};
    });
  }
  // Collective, like making the communicator. Suspended ones stay so, and their memory is released with the next pause. If
  // ranks of a suspended communicator have no part in the new one, they cannot be waited for, and it is made beside the pause.
  int BeforeMaking(const nccl::Communicator& asked) noexcept override {
    return AtNcclsBorder("making way for a communicator", [&]() -> Status {
      AMEM_ASSIGN(const auto alone, AloneUntilCallEnds());
      if (!PausedHere() && Paused())  // before ranks wait for each other, or NCCL fails with a number
        return {Code::kRefused,
                fmt::format("\"{}\" is refused while NCCL's memory is paused; call ncclResume (Python: amem.resume) first",
                            asked.how)};
      if (!PausedHere()) return Status::Ok();
      Status status;
      if (!IsPart(asked)) status = Runtime::Get().RunCycle(CycleKind::kResume);
      if (PausedHere()) {
        nccl::registry::SetAside(asked.id, g_paused_here);
        log::Warn(fmt::format(
            "{} (\"{}\") is made while other communicators of the process stay suspended: its memory is not AMem's, "
            "and pauses leave it in place",
            ToText(asked.id), asked.how));
        return Status::Ok();
      }
      return status.Within(fmt::format("\"{}\" while all communicators of the process are suspended", asked.how));
    });
  }
  int CarryOutResumes(const char* call) noexcept override {
    const int result = AtNcclsBorder(call, [] { return suspend::CarryOut(CycleKind::kResume); });
    try {
      if (result != kOk) t_failed_resume = LastError();
    } catch (...) {  // no memory for the text
    }
    return result;
  }
  void UndoSuspends() noexcept override { UndoChanges(); }  // the group's resumes are settled, or undone already
  void ResumeFailedFirst() noexcept override { last_error::NoteRefusal(t_failed_resume); }
  int CarryOutSuspends(const char* call) noexcept override {
    return AtNcclsBorder(call, [] { return suspend::CarryOut(CycleKind::kPause); });
  }
};

// NCCL's own function does what AMem cannot: communicators made before AMem, flags of later versions, and memory shared by
// fabric handles.
bool SuspendIsForNccl(const ncclComm* comm, int flags) {
  return comm != nullptr && (flags != kSuspendMemory || Runtime::Get().SharesForeign() || !nccl::Find(comm));
}
bool ResumeIsForNccl(const ncclComm* comm) {
  if (comm == nullptr) return false;
  const std::optional<nccl::Communicator> known = nccl::Find(comm);
  return !known || (!known->suspended && SuspendedByNccl(comm));
}
bool FigureIsForNccl(const ncclComm* comm, int stat, std::uint64_t* /*value*/) {
  return comm != nullptr && (stat > static_cast<int>(Figure::kTotal) || SuspendedByNccl(comm) || !nccl::Find(comm));
}

struct SuspendCall : redirects::Around<SuspendCall, "ncclCommSuspend"> {
  static int With(std::size_t, const redirects::Pass& pass, ncclComm* comm, int flags) {
    if (!SuspendIsForNccl(comm, flags)) return Suspend(comm, flags);
    const int result = pass();
    if (nccl::Accepted(result)) SuspendedByNccl(comm, true);
    return result;
  }
};

struct ResumeCall : redirects::Around<ResumeCall, "ncclCommResume"> {
  static int With(std::size_t, const redirects::Pass& pass, ncclComm* comm) {
    if (!ResumeIsForNccl(comm)) return Resume(comm);
    SuspendedByNccl(comm, false);
    return pass();
  }
};

struct MemStatsCall : redirects::Around<MemStatsCall, "ncclCommMemStats"> {
  static int With(std::size_t, const redirects::Pass& pass, ncclComm* comm, int stat, std::uint64_t* value) {
    return FigureIsForNccl(comm, stat, value) ? pass() : MemoryStatistics(comm, stat, value);
  }
};

// What an export does: AMem's call, or that of the function which `caller` would have reached without AMem.
template <class... A>
int Answer(const char* name, int (*own)(ncclComm*, A...), const void* caller, bool (*for_nccl)(const ncclComm*, A...),
           int (*serve)(ncclComm*, A...), ncclComm* comm, std::type_identity_t<A>... arguments) {
  const bool serves = Runtime::Get().ServesSuspend();
  if (serves && !for_nccl(comm, arguments...)) return serve(comm, arguments...);
  int (*real)(ncclComm*, A...) = nullptr;
  try {
    real = reinterpret_cast<decltype(own)>(hook::WithoutUs(name, reinterpret_cast<const void*>(own), caller));
    if (real == nullptr && !serves)
      return Fail(kInvalidUsage, fmt::format("{}: AMem does not serve it in this process (AMEM_ENABLE, AMEM_SUSPEND, or a "
                                             "fork), and this NCCL has no such function",
                                             name));
  } catch (...) {
    if (!serves) return kSystemError;
  }
  return real != nullptr ? real(comm, arguments...) : serve(comm, arguments...);
}

}  // namespace

nccl::SuspendServer* TheServer() { return &Forever<Server>(); }

redirects::Table Calls() { return redirects::MakeTable<SuspendCall, ResumeCall, MemStatsCall>(); }

}  // namespace amem::suspend

#define AMEM_EXPORTED __attribute__((visibility("default")))

using namespace amem::suspend;

AMEM_EXPORTED int ncclCommSuspend(ncclComm* comm, int flags) {
  return Answer("ncclCommSuspend", &ncclCommSuspend, __builtin_return_address(0), &SuspendIsForNccl, &Suspend, comm, flags);
}

AMEM_EXPORTED int ncclCommResume(ncclComm* comm) {
  return Answer("ncclCommResume", &ncclCommResume, __builtin_return_address(0), &ResumeIsForNccl, &Resume, comm);
}

AMEM_EXPORTED int ncclCommMemStats(ncclComm* comm, int stat, std::uint64_t* value) {
  return Answer("ncclCommMemStats", &ncclCommMemStats, __builtin_return_address(0), &FigureIsForNccl, &MemoryStatistics, comm,
                stat, value);
}
