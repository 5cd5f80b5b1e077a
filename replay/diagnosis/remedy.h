// Remedy: what to do about a verdict, made from recorded facts and never from the text of a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "statemachine/event.h"
#include "statemachine/types.h"

namespace amem {

struct Remedy {
  enum class Action : std::uint8_t {
    kNone = 0,
    kFreeMemory,         // on `device` of `process`, until `bytes` fit
    kEndCaptures,        // streams were busy with what a pause must not interrupt
    kFindDriverError,    // the driver refused; an earlier error of the process is the usual reason
    kExaminePeer,        // the message names a peer that died or does not answer
    kReadMessage,        // only the recorded message says what was wrong with a step
    kFollowVote,         // likewise, with a vote that `process` failed
    kFollowRefusal,      // likewise, with a cycle that could not begin
    kCallOnEveryRank,    // `process` did not call it
    kExamineProcess,     // `process` does not finish
    kFindReasonOfDeath,  // of a process that the others needed
    kFindReasonOfEnd,    // of a process that nobody waited for
    kRepairJournal,      // the journal could not be written
    kResumeAgain,        // a failure left a rank neither running nor paused
    kReportReference,    // a bug: an owner does not know a reference, and a resume failed because of it
    kReportJournals,     // a bug, at no harm so far
    kGiveWholeJournals,  // a part of them could not be read
    kFreeHostMemory,     // pinned host memory for contents could not be had
    kRaiseDescriptors,   // a process had no descriptor left
    kRestartProcess,     // a CUDA context is dead: every later call of the process fails as well
    kOneGroup,           // sessions that share memory are of different groups
    kSameSettings,       // sessions that share memory run with different settings
    kReachPeer,          // a session could not be reached: no socket or network in common
    kContinueProcess,    // `process` is stopped
    kResumeFirst,        // NCCL was used while its memory was away
    kStayUntilResumed,   // `process` ended while the others needed it
    kCallTheSame,        // some called ncclPause, others ncclResume
    kCallInTime,         // `process` called it when the others had given up
    kStartUnderAmem,     // `process` has no session, and NCCL could not share memory with it
    kExamineCard,        // a network card did not let go of memory, or did not register it again
    kExamineGpu,         // a GPU's memory has an error that it could not correct: contents there may be wrong
    kAvoidDisplay,       // a kernel ran longer than the driver allows where a display watches the GPU: a context is lost
  };
  // What follows for the job.
  enum class Outlook : std::uint8_t {
    kUnsaid = 0,
    kCallAgain,         // the failure was undone
    kUndoing,           // a rank has not ended its undo of the failed call
    kCannotBeUndone,    // the failure was not undone
    kOthersRun,         // the other ranks run, and the job needs the dead one
    kOthersMissMemory,  // the other ranks are paused and need memory that the dead one shared
    kOthersHalfWay,     // the other ranks are neither running nor paused, for want of such memory
    kOthersResumed,     // the other ranks resumed without the dead one
    kAllEnded,          // nobody lives for whom anything could be done
  };
  // What makes the calls.
  enum class Caller : std::uint8_t {
    kC = 0,    // ncclPause
    kPython,   // amem.pause()
    kCommand,  // amem pause
  };
  Action action = Action::kNone;
  Outlook outlook = Outlook::kUnsaid;
  Caller caller = Caller::kC;
  CycleKind cycle{};                    // that failed
  std::string tag;                      // of the pool whose pause or resume it was; empty: NCCL's
  std::string process;                  // "rank 2"; of several "ranks 1 and 2"
  std::int32_t pid = 0;                 // of `process`; 0: unknown
  std::optional<DeviceOrdinal> device;  // of `process`; none: unknown
  std::string gpu;                      // its UUID; empty: unknown
  Bytes bytes = 0;                      // that must fit on `device`
  std::string holders;                  // who holds memory there: "pid 7 (python3) holds 3 072 MiB"; empty: unknown
  std::string reason;                   // why the journal could not be written, as recorded; empty: unknown
  bool timeouts_differ = false;         // AMEM_TIMEOUT_MS is not the same on all ranks
  friend bool operator==(const Remedy&, const Remedy&) = default;
};

inline constexpr std::size_t kRemedyActions = static_cast<std::size_t>(Remedy::Action::kAvoidDisplay) + 1;
inline constexpr std::size_t kRemedyOutlooks = static_cast<std::size_t>(Remedy::Outlook::kAllEnded) + 1;

// "free-memory", "end-captures", ...; "none". These words are stable: programs compare them.
std::string_view ToText(Remedy::Action action);
// "ncclPause", "amem.pause()", "`amem pause`"; of a tag "amem_pause for weights", "amem.pause("weights")".
std::string CallText(Remedy::Caller caller, CycleKind kind, const std::string& tag);
// "device 3 of rank 2 (GPU-1234)"; "the GPU of rank 2" where it is not known which.
std::string GpuText(const Remedy& remedy);
// A sentence without its full stop; empty for kNone.
std::string ToText(const Remedy& remedy);

}  // namespace amem
