// Diagnosis: what the journals of one job say about its last pause or resume, as a verdict for people and programs. The library
// behind `amem-replay why`.
//
// The journals are put on one timeline. The first divergence is looked for: the earliest fact on any rank that explains why the
// last pause or resume did not come to its end; what other ranks record because of it is told as consequence. Plain functions
// over readers; nothing is written. Safe on journals of live processes, which are told apart from dead ones.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "replay/job/history.h"
#include "statemachine/event.h"
#include "statemachine/types.h"

namespace amem {

// One recorded fact that the verdict rests on.
struct Evidence {
  enum class Role : std::uint8_t { kContext = 0, kCause, kConsequence };
  SessionId session;
  std::int32_t rank = -1;
  SequenceNumber seq;         // in that session's journal; 0: about the journal as a whole ("it ends here")
  std::uint64_t wall_ns = 0;  // on the common timeline, nanoseconds since 1970; 0: no time
  Role role = Role::kContext;
  std::string text;
  friend bool operator==(const Evidence&, const Evidence&) = default;
};
std::string_view ToText(Evidence::Role);  // "context", "cause", "consequence"

// What can be wrong, worst explanations first. The words are stable: programs compare them.
namespace verdict {
inline constexpr const char *kHealthy = "healthy",     // nothing is wrong
    *kStepFailed = "step-failed",                      // a rank's own step failed
        *kOutOfMemory = "out-of-memory",               // likewise, for want of memory
            *kDied = "rank-died",                      // a process ended in the middle of a pause or resume, or while paused
                *kEnded = "ended-without-closing",     // a process ended elsewhere, without closing its journal
                    *kNeverArrived = "never-arrived",  // others waited for a rank that did not come
                        *kStalled = "stalled",         // a rank came, began something, and did not finish it
                            *kRefused = "refused",     // a pause or resume could not begin for another reason
                                *kHalfDone = "half-done",         // a failure could not be undone
                                    *kBroken = "broken-session",  // a journal stopped telling the truth; its pauses are refused
                                        *kReferences =
                                            "references-disagree",  // one side has a reference that the other has not
                                            *kImpossible = "impossible-order",  // events that cannot follow each other
                                                *kUnreadable = "unreadable";    // no explanation, and not all could be read
}  // namespace verdict

struct Verdict {
  bool healthy = true;
  std::string kind = verdict::kHealthy;
  std::string headline;  // one line
  std::string summary;   // a paragraph: what was asked, who did what, who did not, since when, the driver's answer
  std::string remedy;    // what to do; empty if nothing

  // Whose fault it is, and where; as far as known.
  std::optional<SessionId> session;
  std::int32_t rank = -1;
  std::string process;  // "rank 2 (pid 4711 on host a)"
  std::optional<CycleKind> cycle_kind;
  std::uint64_t cycle = 0;
  std::optional<PhaseKind> phase;
  std::optional<Step> step;
  std::optional<AllocationId> allocation;  // of that session
  Bytes bytes = 0;                         // of the allocation, or what the step needed
  Code code = Code::kOk;
  int driver_result = 0;
  SequenceNumber seq;         // of the first divergence, in that session's journal
  std::uint64_t wall_ns = 0;  // its time
  bool live = false;          // it is so now: processes of this host are waiting

  std::vector<Evidence> evidence;   // by time
  std::vector<std::string> notes;   // what a reader should know besides: earlier failures that were overcome, open ends
  std::vector<std::string> damage;  // what could not be read, with the directory; the verdict rests on the rest

  struct Totals {
    std::uint64_t journals = 0, events = 0, pauses = 0, resumes = 0, failures = 0, references = 0;
    Bytes held = 0;      // own device memory of all sessions at their ends
    Bytes released = 0;  // likewise, of those that are paused: what the pause gave back
  } totals;
};

// Of journals that were read; pure. In any order.
Verdict Diagnose(std::span<const JournalHistory> journals);

// Reads the journals in these session directories (ListSessions finds them), side by side, and diagnoses. What cannot be read
// is in Verdict::damage; a failure means that nothing could be read at all.
Result<Verdict> Diagnose(std::span<const std::filesystem::path> sessions);

}  // namespace amem
