// Verdict: what is wrong with a job, where, since when and what to do about it. The headline, the summary and the notes are for
// people; everything else is for programs as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "replay/diagnosis/remedy.h"
#include "replay/job/story/contents.h"
#include "statemachine/event.h"
#include "statemachine/types.h"

namespace amem {

enum class VerdictKind : std::uint8_t {
  kHealthy = 0,    // nothing is wrong
  kStepFailed,     // a step of one rank failed
  kOutOfMemory,    // likewise, for lack of device memory
  kDied,           // a process ended during a pause or resume, or while it was paused
  kEnded,          // a process ended at another time without closing its journal
  kNeverArrived,   // the others waited for a rank that did not call ncclPause or ncclResume
  kStalled,        // a rank joined a pause or resume and did not finish its part
  kRefused,        // a pause or resume could not begin for another reason
  kHalfDone,       // a failure could not be undone
  kBroken,         // a journal is incomplete since a failed write; pauses of that session are refused
  kReferences,     // one side has a reference that the other side does not have
  kImpossible,     // events that cannot follow each other
  kUnreadable,     // nothing wrong was found, and a part could not be read
  kLeft,           // a process ended in order while others needed it, or with an exit code that says of an error
  kLaunchRefused,  // NCCL was used while its memory was away, and nothing else is wrong
  kNotUnderAmem,   // NCCL could not make a communicator, of which some ranks have no session
};
// These words are stable: programs compare them.
AMEM_NAMES(VerdictKind, kNotUnderAmem, "kind of verdict", "healthy", "step-failed", "out-of-memory", "rank-died",
           "ended-without-closing", "never-arrived", "stalled", "refused", "half-done", "broken-session", "references-disagree",
           "impossible-order", "unreadable", "rank-left", "launch-refused", "not-under-amem");
inline constexpr std::size_t kVerdictKinds = std::size(kNamesOfVerdictKind);

// One recorded fact that the verdict rests on.
struct Evidence {
  enum class Role : std::uint8_t { kContext = 0, kCause, kConsequence };
  SessionId session;
  std::int32_t rank = -1;
  SequenceNumber seq;         // in that session's journal; 0: about the journal as a whole ("it ends here")
  std::uint64_t wall_ns = 0;  // on the common timeline, nanoseconds since 1970; 0: no time
  Role role = Role::kContext;
  std::string text;
};
std::string_view ToText(Evidence::Role);  // "context", "cause", "consequence"

// One reason that was considered, in the order in which they are believed.
struct ConsideredCause {
  VerdictKind kind{};
  SessionId session;
  std::int32_t rank = -1;
  std::uint64_t wall_ns = 0;         // when it became true
  std::optional<SessionId> witness;  // that recorded it, where it was not the session itself
  std::string_view weight;           // "cause", "absence", "consequence", "disagreement", "end"
  std::string text;                  // as recorded; may be empty
};

struct Verdict {
  VerdictKind kind = VerdictKind::kHealthy;
  std::string headline;  // one line
  std::string summary;   // a paragraph: which cycle, which rank did or did not do its part, since when, the driver's answer
  Remedy remedy;
  [[nodiscard]] bool healthy() const { return kind == VerdictKind::kHealthy; }
  // Of journals that were read in part neither health nor the remedy is certain: `damage` says what is missing.
  [[nodiscard]] bool certain() const { return damage.empty(); }
  [[nodiscard]] std::string RemedyText() const;

  // The session that the cause was found in, and where; as far as known.
  std::optional<SessionId> session;
  std::int32_t rank = -1;
  std::string process;              // "rank 2 (pid 4711 on host a)"
  std::vector<std::int32_t> ranks;  // of all that the verdict names, as several roots of one kind; as far as known, ascending
  std::optional<CycleKind> cycle_kind;
  std::uint64_t cycle = 0;
  std::string tag;  // of the pool whose pause or resume it is; empty: NCCL's
  std::optional<PhaseKind> phase;
  std::optional<Step> step;
  std::optional<AllocationId> allocation;  // of that session
  Bytes bytes = 0;                         // of the allocation, or what the step needed
  Code code = Code::kOk;
  int driver_result = 0;
  SequenceNumber seq;         // of the first divergence, in that session's journal
  std::uint64_t wall_ns = 0;  // its time
  bool live = false;          // processes of this host are waiting now

  std::vector<Evidence> evidence;       // by time
  std::vector<ConsideredCause> causes;  // the first of them is the verdict's; at most kCausesMost
  static constexpr std::size_t kCausesMost = 16;
  std::vector<PauseContents> contents;  // of the last pauses, where it is recorded
  std::vector<std::string> notes;   // what a reader should know besides: earlier failures that were overcome, missing journals
  std::vector<std::string> damage;  // what could not be read, sentences that name the place; the verdict rests on the rest

  std::string job;  // "4 sessions on host a, since 2025-11-21 07:34:01 UTC"

  struct Totals {
    std::uint64_t journals = 0, events = 0, pauses = 0, resumes = 0, failures = 0, references = 0;
    Bytes held = 0;      // own device memory of all sessions at the ends of their journals
    Bytes released = 0;  // likewise, what paused sessions have given back
  } totals;
};

}  // namespace amem
