// The story of a session: its journal, folded once into pauses and resumes with their phases, votes and undo, what it saw of
// other processes, and what it was asked from outside. `why`, `watch` and `report` show parts of it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "replay/job/postmortem.h"
#include "replay/job/story/contents.h"
#include "replay/job/story/held.h"
#include "statemachine/event.h"

namespace amem {

struct Moment {  // of one event
  SequenceNumber seq;
  std::uint64_t time_ns = 0;  // of the session's host
  std::uint32_t thread = 0;   // that recorded it
  explicit operator bool() const { return static_cast<bool>(seq); }
};

// What was recorded, and when.
template <class Event>
struct Dated {
  Event event;
  Moment at;
};

inline constexpr std::size_t kStepKinds = static_cast<std::size_t>(StepKind::kRegister) + 1;

// One try at a pause or resume, from this session's arrival to its end, as this session saw it.
struct Attempt {
  enum class End : std::uint8_t { kOpen = 0, kDone, kFailed };
  CycleKind kind{};
  std::uint64_t cycle = 0;
  std::string tag;  // of the pool that this is about; empty: NCCL
  Moment arrived;   // began to wait for the others; none: it had to wait for nobody
  Moment begun;     // all had come; none: it never began
  Moment ended;
  Moment last;  // the last event seen in it
  End end = End::kOpen;
  std::vector<SessionId> members;  // empty until begun
  bool requested = false;          // from outside (amem pause)
  std::string failure;             // as this session told its caller
  Code code{};                     // of that; kOk: not recorded
  bool undone = true;

  struct PhaseTaken {
    PhaseKind phase{};
    Moment begun, voted, decided;
    Moment worked;  // its last step ended, or its vote; what follows is waiting for the others
    bool voted_for = true, passed = false;
    std::uint64_t steps = 0;        // that ended
    std::optional<Step> longest{};  // of those
    std::uint64_t longest_ns = 0;
  };
  std::vector<PhaseTaken> phases;   // in order, those of an undo too; not the wait until all had come
  std::vector<PhaseTaken> skipped;  // that were decided, and in which this session had nothing to do

  struct StepTotal {
    std::uint64_t count = 0, duration_ns = 0;
  };
  std::array<StepTotal, kStepKinds> steps{};  // that ended, by kind
  SavedContents contents;                     // of a pause that is done
  Held before{}, after{};                     // where memory is followed

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
    std::vector<MemoryHolder> holders;
    SessionId reported_by;  // as in the event
  };
  std::optional<Failure> failed_step;  // the first

  std::map<SessionId, std::uint64_t> heard;  // members of which a leader has heard, and how many votes
  std::set<SessionId> asking;                // members that have come, because they asked this session whether it comes
  Moment asked_before;                       // when the first of them asked, where that was before this session came
  std::map<SessionId, Moment> came_late;     // members that came after this session had given up, and when that was recorded
  std::vector<CycleMember> culprits;         // because of whom it failed, as this session recorded it

  // Of a board: its failed ballots, and the one that this session waits for now, each as the board showed it last, with its
  // seats by session.
  std::vector<Dated<BallotShown>> ballots;
  bool on_board = false;  // it has read one

  std::optional<Dated<Step>> open_step;  // begun and neither done nor failed

  struct Decision {
    PhaseKind phase{};
    SessionId culprit;
    std::string message;
    Moment at;
    Code code{};  // kOk: not recorded
    int driver_result = 0;
  };
  std::optional<Decision> decided;      // the first vote that failed
  std::optional<Decision> failed_vote;  // the first no of this session's own

  struct Silence {  // the longest time without an event, between two of this attempt's
    Moment from, to;
    std::optional<PhaseKind> phase;
    std::optional<Step> step;  // that was under way
    [[nodiscard]] std::uint64_t ns() const { return to.time_ns - from.time_ns; }
  };
  Silence silence;

  [[nodiscard]] Moment came() const { return arrived ? arrived : begun ? begun : ended; }
  [[nodiscard]] bool open() const { return end == End::kOpen; }
};
inline constexpr std::size_t kAttemptsKept = 256;
std::string NameOf(const Attempt& attempt);  // "pause 3", "resume 1 of tag weights"
// Its phases, and before them the wait until all had come, where it waited.
std::vector<Attempt::PhaseTaken> PhasesWithArrival(const Attempt& attempt);

// When the events of a journal happened, in bounded memory however long it is.
class EventTimes {
 public:
  // Of the next event. A gap in the numbers forgets what came before it.
  void Add(SequenceNumber seq, std::uint64_t time_ns, std::size_t kind) {
    if (!entries_.empty() && entries_.back().seq + 1 != seq.value) *this = {};
    if (entries_.size() == older_ + 2 * kMost) {
      Thin(older_);
      while (older_ > kMost) {
        stride_ *= 2;
        Thin(0);
      }
    }
    entries_.push_back({seq.value, time_ns, static_cast<std::uint8_t>(kind)});
  }

  struct Earlier {
    SequenceNumber seq;
    std::uint64_t time_ns = 0;
    std::string_view kind;  // its name
    bool exact = true;      // false: a later event may fit as well, because the journal is long and not every event is kept
  };
  // The last event up to that time. Nothing: there is none.
  [[nodiscard]] std::optional<Earlier> LastUpTo(std::uint64_t time_ns) const {
    // Threads note their times before they wait for their turn to record, so that neighbours may be out of order by a little.
    const auto found =
        std::ranges::find_if(entries_.rbegin(), entries_.rend(), [=](const Entry& entry) { return entry.time_ns <= time_ns; });
    if (found == entries_.rend()) return std::nullopt;
    const bool exact = stride_ == 1 || std::cmp_greater(entries_.rend() - found, older_);
    return Earlier{SequenceNumber{found->seq}, found->time_ns, KindName(found->kind), exact};
  }
  // Of that event, or of one shortly before it, likewise.
  [[nodiscard]] std::optional<std::uint64_t> TimeOf(SequenceNumber seq) const {
    const auto after = std::ranges::upper_bound(entries_, seq.value, {}, &Entry::seq);
    return after == entries_.begin() ? std::nullopt : std::optional(std::prev(after)->time_ns);
  }

 private:
  struct Entry {
    std::uint64_t seq = 0, time_ns = 0;
    std::uint8_t kind = 0;
  };
  static constexpr std::size_t kMost = std::size_t{1} << 15;

  // Leaves of those from `first` on, but for the last kMost, every stride_-th.
  void Thin(std::size_t first) {
    const auto begin = entries_.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = entries_.end() - static_cast<std::ptrdiff_t>(kMost);
    entries_.erase(std::remove_if(begin, end, [this](const Entry& entry) { return entry.seq % stride_ != 0; }), end);
    older_ = entries_.size() - kMost;
  }

  std::vector<Entry> entries_;
  std::size_t older_ = 0;  // so many of them are every stride_-th of the older ones; behind them is every event
  std::uint64_t stride_ = 1;
};

// Requests from outside to this session, and freezes of its process.
struct Outside {
  std::optional<Dated<SafepointReached>> waits_in;  // where it waits: it has come for a pause, and no resume has ended
  std::optional<Dated<RequestEnded>> paused;        // the pause that holds
  std::optional<Dated<Frozen>> frozen;              // the last time
  std::uint64_t freezes = 0;
  std::vector<Dated<std::string>> results;  // of requests, and freezes: the last of them
};

// A communicator that NCCL was asked for and has not made.
struct UnmadeCommunicator {
  CommunicatorBegun begun;
  Moment at;      // it was asked for
  Moment failed;  // none: NCCL is still at it, or was when the journal ended
};

struct SessionStory {
  JournalFindings findings;
  // Oldest first; of a long journal the first ones, the last ones, and those between that failed.
  std::vector<Attempt> attempts;
  std::map<PoolId, std::vector<Attempt>> pools;  // those of each pool
  struct Sums {
    std::uint64_t pauses = 0, resumes = 0, failures = 0;
    void Add(const Attempt& attempt);
  };
  struct Forgotten : Sums {   // NCCL's attempts that are not kept
    std::uint64_t count = 0;  // those of pools, too
    std::set<SessionId> members;
  } forgotten;
  std::vector<Dated<PeerLost>> lost;                    // peers that closed or died, as recorded here
  std::vector<Dated<ProcessSeen>> seen;                 // sights of other sessions' processes
  std::vector<Dated<ThreadSeen>> threads;               // of this process, when they were recorded last
  std::vector<Dated<CommunicatorReady>> communicators;  // those with a hash
  std::vector<UnmadeCommunicator> unmade;               // the first few
  ReadyCommunicators for_clock;
  std::map<SessionId, CycleMember> met;         // other sessions, as cycles and arrivals name them
  std::optional<Dated<LaunchRefused>> refused;  // the first refused since it was paused last, with the count of all
  std::uint64_t launches_refused = 0;           // ever
  // A pause or resume to which others have come and this session has not: only `kind`, `cycle`, `asking`, and when the first
  // request came (`arrived`).
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
  Moment acted;                // the last event that is not the record of a wait
  Moment since;                // of the last change of its lifecycle, phase, step or vote
  bool records_votes = false;  // journals of older builds do not have them
  bool dying = false;          // see CountTheDying
  std::string last_text;       // of `last`
  // What the operating system says of the process now, in the words of ProcessSeen::state; empty: it cannot be asked.
  std::string process_now;

  [[nodiscard]] const SessionOpened& who() const { return findings.who; }
  [[nodiscard]] SessionId session() const { return findings.info.session; }
  // NCCL's last attempt; where there is none, one that is done and has nothing in it.
  [[nodiscard]] const Attempt& Last() const;
  [[nodiscard]] const Attempt* OpenAttempt() const { return Last().open() ? &Last() : nullptr; }  // null: none is open
  [[nodiscard]] std::vector<const Attempt*> LastOfPools() const;                                  // that has begun
  [[nodiscard]] Sums AllAttempts() const;  // NCCL's, the forgotten ones too
};

// NCCL's attempts and those of pools, by arrival; the story has none any more.
std::vector<Attempt> TakeAttempts(SessionStory& story);

// NCCL's last attempt in that journal, or the last that has begun of the pool with that tag. Null: there is none.
const Attempt* LastAttempt(const SessionStory& story, const std::string& tag = {});

// Follows a session event by event. What could not follow, and what is behind a break, it takes as well.
class StoryBuilder final : public FoldObserver {
 public:
  // `attempts`: so many of NCCL are kept, and of each pool. `times`: SessionStory::times is wanted.
  explicit StoryBuilder(SessionStory& story, std::size_t attempts = kAttemptsKept, bool times = true)
      : story_(story), kept_(attempts), times_(times) {}

  void Begin(const State& before) override;
  void Before(const Event& event, const State& before) override { Take(event, before); }
  Status After(const Event& event, const State& after) override;
  bool Behind(const Event& event) override;
  // Behind damage the state is not known any more, but what pauses and resumes did still is; behind a wrong order nothing is
  // believed. Which of them it was is known only at the end. Whether something behind damage was taken.
  bool Finish(bool damaged);
  // What was told before a break, if there is one, with so many attempts of NCCL and of each pool at most.
  [[nodiscard]] SessionStory UpToBreak(std::size_t attempts) const;

  // NCCL's attempt that the event before ended, or that another one took the place of; null: none.
  [[nodiscard]] const Attempt* over() const { return over_; }
  // The attempt that is under way, of NCCL or of a pool; null: none is.
  Attempt* OpenOf(PoolId pool);
  // The same, or the one that the event before ended.
  Attempt* OfLastEvent() { return touched_; }
  // Whose pauses and resumes the event before is about; zero: NCCL's, or it is about none.
  [[nodiscard]] PoolId PoolOfLastEvent() const { return pool_; }

 private:
  struct Taker;
  void Take(const Event& event, const State& before);
  Attempt& Push(PoolId pool, Attempt attempt);
  static void Forget(SessionStory& story, std::size_t limit);
  static void Forget(SessionStory& story, PoolId pool, std::size_t limit);

  SessionStory& story_;
  const std::size_t kept_;
  const bool times_;
  std::optional<SessionStory> whole_;  // as it was before the first event behind a break
  const State* state_ = nullptr;       // before the event; behind a break, the last that is known
  Lifecycle lifecycle_{};
  Moment now_;
  const Attempt* over_ = nullptr;
  Attempt* touched_ = nullptr;
  PoolId pool_;
};

// An observer of a journal's fold beside the story, which it may read and add to; null: there is none.
using Beside = std::function<std::unique_ptr<FoldObserver>(StoryBuilder& story)>;
// Reads and checks one journal. A failure means that nothing could be read.
Result<SessionStory> ReadStory(JournalReader& reader, const Beside& beside = {});
// The same without the checks, with so many attempts, and up to an event.
Result<SessionStory> ReadAttempts(JournalReader& reader, std::size_t attempts, SequenceNumber last = kToTheEnd);
// Opens it first; `as_of_ns` of a live journal of this boot is set to the time at which reading began.
Result<SessionStory> ReadStory(const std::filesystem::path& session_directory, const Beside& beside = {});

// Copies of one journal, as from a backup: the one that goes further stays. The directories of the others.
std::vector<std::filesystem::path> DropCopies(std::vector<SessionStory>& stories);

// A process that is killed lives on for a moment, while the driver takes down its memory, and so its journal still counts as
// live. When others saw it die after its last event, its status becomes that of the dead, and `dying` is set.
void CountTheDying(std::vector<SessionStory>& journals);

}  // namespace amem
