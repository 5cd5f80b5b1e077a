// Histories: what a diagnosis needs of a journal - its pauses and resumes, each with its first failure and how far it came,
// besides the checks of postmortem.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "replay/job/event_times.h"
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
  std::string tag;  // of the pool that this is about; empty: NCCL
  Moment arrived;   // began to wait for the others; none in journals of older builds
  Moment begun;     // all had come; none: it never began
  Moment ended;
  End end = End::kOpen;
  std::vector<SessionId> members;  // empty until begun
  std::uint64_t duration_ns = 0;
  std::string failure;  // as this session told its caller
  Code code{};          // of that; kOk: not recorded
  bool undone = true;

  struct PhaseTaken {
    PhaseKind phase{};
    Moment begun, voted, decided;
    Moment done;  // the last of its steps that was
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

  struct Vote {  // this session's own
    PhaseKind phase{};
    bool ok = true;
    Code code{};
    std::string message;
    Moment at;
  };
  std::optional<Vote> failed_vote;  // the first vote of no

  struct Heard {  // what the session that counts the votes has heard of a member
    Moment at;
    std::uint64_t votes = 0;
  };
  std::map<SessionId, Heard> heard;
  std::set<SessionId> asking;         // have come to it, because they asked this session whether it comes
  std::vector<CycleMember> culprits;  // because of whom it failed, as this session was told

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
    Code code{};  // kOk: not recorded
    int driver_result = 0;
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

// An event of which a session keeps several, and when it was recorded.
template <class Event>
struct Dated {
  Event event;
  Moment at;
};

// What this session was asked from outside, and what the driver did to its process.
struct Outside {
  std::optional<Dated<RequestSeen>> asked;          // the last request
  std::optional<Dated<SafepointReached>> waits_in;  // where it waits: it has come for a pause, and no resume has ended
  std::optional<Dated<RequestEnded>> paused;        // the pause that holds
  std::optional<Dated<RequestEnded>> failed;        // the last request that came to nothing
  std::optional<Dated<Frozen>> frozen;              // the last time
  std::uint64_t freezes = 0;
};

struct JournalHistory {
  JournalFindings findings;
  std::vector<Attempt> attempts;    // oldest first; of a long journal the last ones
  std::map<PoolId, Attempt> pools;  // the last of each pool
  struct Forgotten {                // attempts before those
    std::uint64_t pauses = 0, resumes = 0, failures = 0;
    std::set<SessionId> members;
  } forgotten;
  std::vector<Dated<PeerLost>> lost;                    // peers that closed or died, as seen here
  std::vector<Dated<ProcessSeen>> seen;                 // processes of others, looked at here
  std::vector<Dated<ThreadSeen>> threads;               // of this process, the last ones that were looked at
  std::vector<Dated<CommunicatorReady>> communicators;  // those with a hash
  ReadyCommunicators for_clock;
  std::map<SessionId, CycleMember> met;         // who others are, as cycles and arrivals name them
  std::optional<Dated<LaunchRefused>> refused;  // the first refused since it was paused last, with the count of all
  // That others have come to and this session has not: only `kind`, `cycle`, `asking` and when the first was heard (`arrived`).
  std::optional<Attempt> awaited;
  Outside outside;
  std::optional<Moment> broken_at;
  struct Closing {
    SessionClosed event;
    Moment at;
    Lifecycle before{};  // what the session was when it closed
    bool in_attempt = false;
  };
  std::optional<Closing> closed;
  Moment first;                // event that could be read
  EventTimes times;            // of a damaged journal: those behind the damage
  Moment last;                 // event that could be read
  bool records_votes = false;  // journals of older builds do not have them
  bool dying = false;          // see CountTheDying
  std::string last_text;       // of `last`
  // What the operating system says of the process now, in the words of ProcessSeen::state; empty: it cannot be asked.
  std::string process_now;

  [[nodiscard]] const SessionOpened& who() const { return findings.who; }
  [[nodiscard]] SessionId session() const { return findings.info.session; }
};

// The attempt in that journal that is about the same as `like`: NCCL's last one, or the last of the pool with that tag. Null:
// there is none.
const Attempt* LastAttempt(const JournalHistory& journal, const std::string& tag);

// Reads and checks one journal. A failure means that nothing could be read.
Result<JournalHistory> ReadHistory(JournalReader& reader);
// Opens it first; `as_of_ns` of a live journal of this boot is set to the time at which reading began.
Result<JournalHistory> ReadHistory(const std::filesystem::path& session_directory);

// A process that is killed lives on for a moment, while the driver takes down its memory, and so its journal still counts as
// live. When others saw it die after its last event, its status becomes that of the dead, and `dying` is set.
void CountTheDying(std::vector<JournalHistory>& journals);

}  // namespace amem
