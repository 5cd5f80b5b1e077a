// Histories: what a diagnosis needs of a journal - its pauses and resumes, each with its first failure and how far it came,
// besides the checks of postmortem.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/job/postmortem.h"
#include "statemachine/event.h"

namespace amem {

struct Moment {  // of one event
  SequenceNumber seq;
  std::uint64_t time_ns = 0;  // of the session's host
  explicit operator bool() const { return static_cast<bool>(seq); }
};

// One try at a pause or resume, from this session's arrival to its end, as this session saw it.
struct Attempt {
  enum class End : std::uint8_t { kOpen = 0, kDone, kFailed };
  CycleKind kind{};
  std::uint64_t cycle = 0;
  Moment arrived;  // began to wait for the others; none in journals of older builds
  Moment begun;    // all had come; none: it never began
  Moment ended;
  End end = End::kOpen;
  std::vector<SessionId> members;  // empty until begun
  std::uint64_t duration_ns = 0;
  std::string failure;  // as this session told its caller
  bool undone = true;

  struct PhaseTaken {
    PhaseKind phase{};
    Moment begun, decided;
    std::uint64_t steps = 0;
  };
  std::vector<PhaseTaken> phases;  // in order, those of an undo too

  struct Failure {
    Step step;
    Code code{};
    int driver_result = 0;
    std::string message;
    PhaseKind phase{};
    Moment at;
    Bytes allocation_bytes = 0;
    Location location;                       // of the allocation
    std::optional<RemoteAllocation> remote;  // of an imported one
    CallSite site;
    Bytes still_missing = 0;  // own memory on that device that was not back yet
  };
  std::optional<Failure> failed_step;  // the first

  struct OpenStep {
    Step step;
    Moment at;
  };
  std::optional<OpenStep> open_step;  // begun and neither done nor failed

  struct Decision {
    PhaseKind phase{};
    SessionId culprit;
    std::string message;
    Moment at;
  };
  std::optional<Decision> decided;  // the first vote that failed

  struct Silence {  // the longest time without an event, between two of this attempt's
    Moment from, to;
    std::optional<PhaseKind> phase;
    std::optional<Step> step;  // that was under way
    [[nodiscard]] std::uint64_t ns() const { return to.time_ns - from.time_ns; }
  };
  Silence silence;
};

struct JournalHistory {
  JournalFindings findings;
  std::vector<Attempt> attempts;  // oldest first
  std::vector<Moment> lost_at;    // parallel to `lost`
  std::vector<PeerLost> lost;     // peers that closed or died, as seen here
  std::optional<Moment> broken_at;
  Moment first;                      // event that could be read
  std::vector<std::uint64_t> times;  // of all events (of a damaged journal: behind the damage), the last of which is `last`
  std::vector<std::uint8_t> kinds;   // likewise
  Moment last;                       // event that could be read
  bool dying = false;                // see CountTheDying
  std::string last_text;             // of it

  // The last event up to that time: its number and its kind's name. Nothing: there is none.
  struct Earlier {
    Moment at;
    std::string_view kind;
  };
  [[nodiscard]] std::optional<Earlier> LastUpTo(std::uint64_t time_ns) const;

  [[nodiscard]] const SessionOpened& who() const { return findings.who; }
  [[nodiscard]] SessionId session() const { return findings.info.session; }
};

// Reads and checks one journal. A failure means that nothing could be read.
Result<JournalHistory> ReadHistory(JournalReader& reader);
// Opens it first; `as_of_ns` of a live journal of this boot is set to the time at which reading began.
Result<JournalHistory> ReadHistory(const std::filesystem::path& session_directory);

// A process that is killed lives on for a moment, while the driver takes down its memory, and so its journal still counts as
// live. When others saw it die after its last event, its status becomes that of the dead, and `dying` is set.
void CountTheDying(std::vector<JournalHistory>& journals);

}  // namespace amem
