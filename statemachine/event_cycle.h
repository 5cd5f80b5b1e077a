// Events of a pause or a resume, what was seen of a process, a thread or a launch when one of them failed, and requests from
// outside. Part of event.h, which includes this file; its rules hold here as well.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "statemachine/agreement/ballot.h"
#include "statemachine/texts.h"
#include "statemachine/types.h"

namespace amem {

// ---- pause and resume
// `pool` of an event says whose pause or resume it belongs to: that pool's, or NCCL's when it is zero, as in all journals from
// before there were pools. Several may be under way at once, and then their events interleave.

enum class CycleKind : std::uint8_t { kPause = 0, kResume = 1 };
AMEM_NAMES(CycleKind, kResume, "cycle kind", "pause", "resume");
enum class PhaseKind : std::uint8_t {
  kPauseArrive = 0,
  kPauseSave,
  kPauseDropImports,
  kPauseReleaseOwn,  // imports first; in journals of the first version a phase of its own before this one
  kPauseGone,
  kResumeArrive,
  kResumeCreateOwn,
  kResumeImport,
  kResumeVerify,
  kResumeOpen,
};
AMEM_NAMES(PhaseKind, kResumeOpen, "phase kind", "pause: arrive", "pause: save", "pause: drop imports", "pause: release",
           "pause: all gone", "resume: arrive", "resume: create own", "resume: import and restore", "resume: verify",
           "resume: open");
constexpr bool IsArrival(PhaseKind phase) { return phase == PhaseKind::kPauseArrive || phase == PhaseKind::kResumeArrive; }
// As journals name what is before a ballot.
constexpr PhaseKind PhaseOf(CycleKind kind, agreement::Ballot ballot) {
  using agreement::Ballot;
  switch (ballot) {
    case Ballot::kCome:
      return kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive;
    case Ballot::kIdle:
      return PhaseKind::kPauseArrive;
    case Ballot::kSaved:
      return PhaseKind::kPauseSave;
    case Ballot::kGone:
      return PhaseKind::kPauseReleaseOwn;
    case Ballot::kMade:
      return PhaseKind::kResumeCreateOwn;
    case Ballot::kJoined:
      return PhaseKind::kResumeImport;
    case Ballot::kOpen:
      return PhaseKind::kResumeVerify;
  }
  return {};
}
enum class StepKind : std::uint8_t {
  kQuiesce = 0,    // wait until the devices are idle                 device
  kSave,           // wait until the contents are in the backup       allocation
  kUnmap,          // take the memory from under an address           allocation, address
  kReleaseImport,  // give the imported driver handle back            allocation
  kReleaseOwn,     // give the own driver handle back                 allocation
  kCheckMemory,    // free memory of a device covers what is needed   device, bytes
  kCreate,         // a new driver handle for an own allocation       allocation
  kMap,            // put the memory back under its address           allocation, address
  kSetAccess,      // as recorded                                     allocation, address
  kRestore,        // wait until the contents are back                allocation
  kImport,         // a new driver handle from the owner              allocation
  kVerify,         // state and driver agree
  kScan,           // look for what is not zero, secure host memory for it, begin to copy; device, bytes of all that is saved
  kBeginRestore,   // begin to copy contents back; device, bytes of all that this begins
  kAddDevice,      // to a multicast object that was made anew        allocation, device
  kBind,           // memory to a multicast object again              allocation (the object's), device, offset, bytes
  kUnbind,         // memory from a multicast object                  likewise
  kDrain,          // wait until cards have nothing under way, and hold what would be sent; what is not quiet in time is kept
  kDeregister,     // with a card, or keep it (RegionKept)            allocation, address, bytes, region
  kRegister,       // with a card again                               likewise
};
AMEM_NAMES(StepKind, kRegister, "step kind", "quiesce", "save", "unmap", "release import", "release own", "check memory",
           "create", "map", "set access", "restore", "import", "verify", "find contents", "begin restore", "add device", "bind",
           "unbind", "drain the network", "deregister", "register");
struct Step {
  StepKind kind{};
  AllocationId allocation;
  Address address;
  Bytes bytes = 0;
  DeviceOrdinal device;
  Bytes offset = 0;  // in a multicast object
  RegionId region;
  AMEM_STRUCT(Step, kind, allocation, address, bytes, device, IfAny{offset}, IfAny{region});
  friend auto operator<=>(const Step&, const Step&) = default;
};
struct CycleMember {  // who a session is, so that one journal alone names the ranks of a cycle
  SessionId session;
  std::int32_t rank = -1;
  std::int32_t pid = 0;
  HostName host;
  AMEM_STRUCT(CycleMember, session, rank, pid, host);
};
struct CycleBegun {
  CycleKind kind{};
  std::uint64_t cycle = 0;         // counts pauses of this session, or of the pool, from 1; a resume carries its pause's number
  std::vector<SessionId> members;  // none for a pool whose memory no other session shares
  std::vector<CycleMember> processes;  // of the members, in their order; empty in journals of builds that did not record them
  PoolId pool;
  bool keeps = false;  // a pause of a pool saves its contents, whatever the policy
  AMEM_EVENT(CycleBegun, "cycle begun", As{"cycle_kind", kind}, cycle, members, processes, IfAny{pool}, IfAny{keeps});
};
struct StepBegun {
  Step step;
  PoolId pool;
  AMEM_EVENT(StepBegun, "step begun", step, IfAny{pool});
};
struct StepDone {
  Step step;
  PoolId pool;
  AMEM_EVENT(StepDone, "step done", step, IfAny{pool});
};
struct MemoryHolder {  // a process that holds memory of a device
  std::int32_t pid = 0;
  Bytes bytes = 0;   // 0: unknown
  ProgramName name;  // empty: unknown
  AMEM_STRUCT(MemoryHolder, pid, bytes, name);
};
struct StepFailed {
  Step step;
  Code code{};
  std::int32_t driver_result = 0;
  FreeText message;
  SessionId reported_by;  // the owner that refused to hand out memory for an import, or is lost; zero: it failed here
  PoolId pool;
  std::vector<MemoryHolder> holders;  // of a device that has too little memory: other processes, as far as known
  AMEM_EVENT(StepFailed, "step failed", step, code, driver_result, message, OrNull{reported_by}, IfAny{pool}, IfAny{holders});
};
// In the pause that is under way that registration is not undone, so its memory stays until the session runs again.
struct RegionKept {
  RegionId region;
  FreeText why;
  AMEM_EVENT(RegionKept, "registration kept", region, why);
};
struct PhaseBegun {  // an arrive phase before CycleBegun: this session has come and waits for the others
  PhaseKind phase{};
  PoolId pool;
  AMEM_EVENT(PhaseBegun, "phase begun", phase, IfAny{pool});
};
struct PhaseDecided {  // the vote after a phase, as this session learned it; culprit 0 when it passed
  PhaseKind phase{};
  bool passed = true;
  SessionId culprit;
  FreeText message;
  Code code{};  // why it failed; kOk in journals of builds that did not record it
  std::int32_t driver_result = 0;
  PoolId pool;
  AMEM_EVENT(PhaseDecided, "phase decided", phase, passed, OrNull{culprit}, message, code, driver_result, IfAny{pool});
};
struct CycleDone {
  CycleKind kind{};
  std::uint64_t cycle = 0;
  std::uint64_t duration_ns = 0;
  PoolId pool;
  // Of a pause, what became of the contents: copied, as in the copy that was kept and thus not copied, and zero.
  Bytes changed = 0, unchanged = 0, zero = 0;
  AMEM_EVENT(CycleDone, "cycle done", As{"cycle_kind", kind}, cycle, duration_ns, IfAny{pool}, IfAny{changed}, IfAny{unchanged},
             IfAny{zero});
};
struct CycleFailed {  // whatever was done has been undone, unless `undone` is false; without CycleBegun: not all came
  CycleKind kind{};
  std::uint64_t cycle = 0;
  bool undone = true;
  FreeText message;
  Code code{};  // kOk: not recorded
  std::int32_t driver_result = 0;
  // Those because of whom it failed, as this session was told: they did not come, died, or are of another group. Empty: it was
  // this session itself, or it is not known.
  std::vector<CycleMember> culprits;
  PoolId pool;
  // Of a pause that could not be undone: all memory has been released again, so this session is paused, as all members are.
  bool paused = false;
  AMEM_EVENT(CycleFailed, "cycle failed", As{"cycle_kind", kind}, cycle, undone, message, OrNull{code}, driver_result, culprits,
             IfAny{pool}, IfAny{paused});
};

// ---- what was seen
// For people, and for a verdict on a cycle that failed: no state follows from these but their number.

struct VoteCast {  // this session's own vote on a phase, recorded before it waits for those of the others; also in an undo
  PhaseKind phase{};
  bool ok = true;
  Code code{};  // why it did not vote for
  FreeText message;
  PoolId pool;
  AMEM_EVENT(VoteCast, "vote cast", phase, ok, code, message, IfAny{pool});
};
// What a member said: in journals of builds in which one session counted the votes, and of requests. `voted` false: that it has
// arrived.
struct MemberHeard {
  SessionId member;
  CycleKind kind{};
  PhaseKind phase{};
  bool voted = false;
  bool ok = true;
  std::int32_t rank = -1;
  std::int32_t pid = 0;  // 0 in journals of builds that did not record it
  // By any session: a member that has called ncclPause or ncclResume has been asking it for a while with whom it shares memory,
  // and so waits for others to come. The kind of cycle is the one that this session could join.
  bool asks = false;
  AMEM_EVENT(MemberHeard, "member heard", member, As{"cycle_kind", kind}, phase, voted, ok, rank, pid, asks);
};
struct ProcessSeen {  // of another session's process: at a deadline, or when the connection to it was lost
  SessionId session;
  std::int32_t pid = 0;
  PublicText state;             // "running", "sleeping", "stopped", "uninterruptible", "zombie", "gone", or "unknown"
  FreeText where;               // for people: "in the CUDA driver", "in futex"; empty: unknown
  FreeText answer;              // what it answered itself: "running, has not called ncclPause"; empty: it was not asked
  std::int32_t exit_code = -1;  // of a zombie; 128 + N: ended by signal N; -1: unknown
  std::uint64_t waited_ns = 0;  // how long this session had waited for it
  AMEM_EVENT(ProcessSeen, "process seen", session, pid, state, where, answer, exit_code, waited_ns);
};
struct ThreadSeen {          // at a deadline: a thread of this session's own process
  std::uint32_t thread = 0;  // kernel thread id
  ThreadName name;
  PublicText state;
  FreeText where;
  std::vector<FreeText> stack;  // innermost first: "libc.so.6+0x12"; empty: it could not be had safely
  AMEM_EVENT(ThreadSeen, "thread seen", As{"of_thread", thread}, name, state, where, stack);
};
// ---- the board
// By each member of a round, what the board shows of a ballot (replay/peers/board): when it was decided, which all that read it
// read alike; and while it is undecided and this member waits, ever more rarely. So one journal alone tells who came and voted
// when, who did not, and why the ballot failed.

struct SeatShown {  // of one member, as it was then
  SessionId session;
  std::int32_t rank = -1;
  std::int32_t pid = 0;
  HostName host;  // empty: as the session's of this journal
  agreement::Vote vote{};
  std::uint64_t voted_ns = 0;  // CLOCK_MONOTONIC, when it voted, or came; 0: it has not, or that is not known
  FreeText end;                // it had ended: "died", "has closed"
  PublicText end_seen;         // by what that was seen: "pidfd", "lock"; empty: not recorded
  AMEM_STRUCT(SeatShown, session, rank, pid, IfAny{host}, vote, OrNull{voted_ns}, IfAny{end}, IfAny{end_seen});
};
struct BallotShown {
  CycleKind kind{};
  std::uint64_t cycle = 0;
  PoolId pool;
  std::uint64_t board = 0;  // random: members that name the same one have read the same
  std::uint32_t round = 0;  // of that board
  agreement::Ballot ballot{};
  agreement::Cause cause{};  // kUndecided: this member waits
  SessionId by;              // who decided
  // Of a failure, because of whom; while it is undecided, for whom this member waits. Their seats are below.
  std::vector<SessionId> culprits;
  std::uint32_t members = 0, yes = 0;  // of the round; of those, who voted for
  std::uint64_t first_ns = 0;          // CLOCK_MONOTONIC of the first such vote; 0: not known
  // Those that have not voted for, and of the others the kSeatsMost that did so last: large sets differ in few.
  std::vector<SeatShown> seats;
  FreeText message;  // as all members are told; empty: it did not fail
  Code code{};
  std::int32_t driver_result = 0;
  AMEM_EVENT(BallotShown, "ballot shown", As{"cycle_kind", kind}, cycle, IfAny{pool}, Hexadecimal{board}, round, ballot, cause,
             As{"decided_by", OrNull{by}}, As{"culprit_sessions", culprits}, As{"member_count", members}, As{"votes_for", yes},
             OrNull{first_ns}, seats, message, OrNull{code}, driver_result);
  static constexpr std::size_t kSeatsMost = 16;
};

struct LaunchRefused {  // of NCCL's: a launch, copy or fill that was refused because memory is paused
  PublicText call;
  std::uint64_t count = 1;  // how often since the last such event
  AMEM_EVENT(LaunchRefused, "launch refused", call, count);
};

// ---- requests from outside
// Nothing of the state follows from them: what a request does to memory is in the events of its pauses and resumes.

struct RequestSeen {          // this process has seen what the tool asks for
  std::uint64_t request = 0;  // counts the requests to this session, from 1
  CycleKind kind{};
  std::int32_t by_pid = 0;   // of the tool
  std::uint64_t target = 0;  // the safe point at which all are to pause; 0: not agreed on yet
  bool all_tags = false;     // the program's tags are to be paused as well
  AMEM_EVENT(RequestSeen, "request seen", request, As{"request_kind", kind}, by_pid, OrNull{target}, all_tags);
};
struct SafepointReached {  // at which the request is carried out; this process waits in it
  std::uint64_t request = 0;
  std::uint64_t step = 0;  // safe points passed so far, with this one; 0: in the program's own resume
  AMEM_EVENT(SafepointReached, "safepoint reached", request, As{"safepoint", OrNull{step}});
};
struct RequestEnded {  // on this process
  std::uint64_t request = 0;
  CycleKind kind{};
  Code code{};       // kOk: it was done
  FreeText message;  // why not
  Bytes bytes = 0;   // that a pause gave back
  AMEM_EVENT(RequestEnded, "request ended", request, As{"request_kind", kind}, code, message, bytes);
};
struct Frozen {                          // the driver had taken the whole process from its GPUs, and has brought it back
  std::uint64_t from_ns = 0, to_ns = 0;  // CLOCK_MONOTONIC of the host
  Bytes bytes = 0;                       // that the driver moved
  FreeText moved_gpus;                   // "GPU-a -> GPU-b"; empty: each came back to its own
  AMEM_EVENT(Frozen, "frozen", from_ns, to_ns, bytes, moved_gpus);
};

// What was on the GPU `from` is restored on `to`. UUIDs, "GPU-...".
struct GpuPair {
  GpuName from, to;
  AMEM_STRUCT(GpuPair, from, to);
};
struct GpuShare {  // of one process on one GPU, by UUID
  GpuName gpu;
  Bytes before = 0, taken = 0;  // before it was paused, and when the driver took it
  AMEM_STRUCT(GpuShare, gpu, before, taken);
};
struct FreezeMember {
  SessionId session;
  std::int32_t pid = 0;
  std::uint64_t start_ticks = 0;  // field 22 of /proc/PID/stat
  FreeText name;                  // "rank 1"
  AMEM_STRUCT(FreezeMember, session, pid, start_ticks, name);
};
// How a freeze or thaw of this process stands. Each event has all that a tool needs to go on where another one died: a step is
// recorded before it is made, and once more when it is known what came of it.
struct FreezeStep {
  std::uint64_t begun_ns = 0;  // the wall clock when the freeze was asked for; a thaw goes on with its freeze
  std::uint64_t command = 0;   // counts the freeze, its thaw and what else was asked of it
  PublicText goal;             // of the command: "frozen" or "running"
  PublicText step;             // the last one: "begin", "pause", "lock", "checkpoint", "restore", "unlock", "resume"
  bool done = false;           // it is known what came of that
  PublicText outcome;          // of the command: "frozen", "running", "paused", "lost", "stuck"; empty: it has not ended
  FreeText message;            // why it failed
  bool pauses = false;         // the freeze has paused the job, which was not paused before
  std::uint64_t from_ns = 0;   // when the driver had taken this process (CLOCK_MONOTONIC); 0: it has not
  std::vector<FreezeMember> members;
  std::vector<GpuShare> gpus;
  std::vector<GpuPair> pairs;  // where the last restore was to bring what
  std::vector<GpuPair> moved;  // where restores have brought what was on a GPU at the freeze; not there: where it was
  AMEM_EVENT(FreezeStep, "freeze step", begun_ns, command, goal, As{"freeze_step", step}, done, outcome, message, pauses,
             from_ns, As{"frozen_processes", members}, gpus, pairs, moved);
  friend auto Order(const FreezeStep& e) {
    return std::tuple(e.begun_ns, e.command, e.outcome.empty());
  }                                                                                                    // the last of several
  friend bool IsBack(const FreezeStep& e) { return e.outcome == "running" || e.outcome == "paused"; }  // nothing is left of it
};

}  // namespace amem
