// The timeline of a job: its journals folded into what a report shows. Memory held over time, pauses and resumes with their
// phases, allocations, references between sessions, and the events worth listing.
//
// Each journal is read once, from beginning to end, in memory that does not grow with its length: what does not fit is counted.
// Plain functions over readers; no clock, nothing is written. Safe on journals of live processes.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "replay/job/story/job_cycles.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

struct TimelineLimits {  // for one session
  std::size_t points = 1500;
  std::size_t rows = 2000;         // of the event list
  std::size_t allocations = 4000;  // those alive at the end stay in any case
  std::size_t cycles = 200;        // failed ones come first
};

// Memory held at a time.
struct SeriesPoint {
  std::uint64_t time_ns = 0;
  SequenceNumber seq;
  Held held{};
};

// How much a person wants to see an event; when there is no room, the last of this list go first.
enum class Weight : std::uint8_t {
  kFailure = 0,  // something went wrong
  kLandmark,     // the life of the session; cycles begun and ended
  kPhase,        // phases of cycles
  kNear,         // close to a failure
  kBoundary,     // next to a phase's or a cycle's beginning or end
  kUnusual,      // seldom kinds: peers, symbols, multicast, registrations, calls that passed through
  kMemory,       // memory made, imported, referenced, freed
  kDetail,       // ranges, mappings, access, exports
  kStep,         // steps of cycles
};

struct EventRow {
  Weight weight = Weight::kDetail;
  // One event, or (when empty) `count` consecutive events that are not listed.
  std::optional<Event> event;
  SequenceNumber first, last;
  std::uint64_t begin_ns = 0, end_ns = 0;
  std::uint64_t count = 1;
  std::vector<std::pair<std::uint8_t, std::uint64_t>> kinds;  // of a count: (kind, how many), most first when taken
};

enum class Outcome : std::uint8_t {
  kDone = 0,
  kUndone,     // failed, and what was done has been undone
  kNotUndone,  // failed, and could not be undone
  kOpen,       // the journal ends in the middle of it
};
Outcome OutcomeOf(const Attempt& attempt);

enum class AllocationKind : std::uint8_t {
  kOwn = 0,
  kImported,
  kMulticast,
  kHost,
  kPool,
  kDriver,
  kSlab,
  kImportedSlab,
  kTagged,  // a chunk of a pool
};
AMEM_NAMES(AllocationKind, kTagged, "kind of allocation", "own", "imported", "multicast", "pinned host", "pool", "cuMemAlloc",
           "slab", "imported slab", "tagged");

// One piece of memory of a session, from its making to its end.
struct AllocationRecord {
  AllocationKind kind{};
  AllocationId id;  // 0: has none (host, pool, the driver's own); its address names it
  Address address;  // where it was mapped first
  Bytes bytes = 0;
  Location location;
  CallSite site;
  CommunicatorId communicator;    // that it was made for; 0: none, or unknown
  PoolId pool;                    // whose chunk it is; 0: none's
  SequenceNumber created, ended;  // ended 0: there at the end of the journal
  std::uint64_t created_ns = 0, ended_ns = 0;
  AllocationId slab;            // whose part it is; 0: it has memory of its own
  RemoteAllocation remote;      // of an imported one
  std::uint64_t importers = 0;  // holds of peers at the end, or at its own end
  std::uint64_t most_importers = 0;
  bool resident = true;                 // occupies memory at the end
  KeepReason kept = KeepReason::kNone;  // at the end
  std::string note;                     // the last step that failed on it
};

// What one session holds of another's memory, in allocations; slabs that they lie in do not count.
struct LinkRecord {
  Bytes bytes = 0, most_bytes = 0;  // at the end, and at most
  std::uint64_t count = 0, most_count = 0;
  std::uint64_t total = 0;  // imports ever made
};

// What this session saw of another one's process: it lost the connection, or looked at a deadline.
struct SeenRecord {
  SessionId of;
  Moment at;
  bool dead = false;  // the process had ended
  std::string text;   // what was seen: "stopped in the CUDA driver, silent, waited 5 s"
};

// A pause or resume in the strip of all of them, or several that follow each other.
struct StripRecord {
  CycleKind kind{};
  std::uint64_t number = 0;  // of the first
  std::uint64_t count = 1, failed = 0;
  std::uint64_t arrived_ns = 0, ended_ns = 0;
  void Add(const StripRecord& next) {
    count += next.count;
    failed += next.failed;
    ended_ns = next.ended_ns;
  }
};

// A journal, folded.
struct SessionTimeline {
  JournalInfo info;
  // Up to when the journal tells what a live session did, on its own clock: the moment of reading, or of packing. 0: it has
  // ended, or that is not known.
  std::uint64_t as_of_ns = 0;
  ReadReport damage;
  SessionOpened who;
  std::string stopped;  // why memory and cycles end before the journal does; empty: they do not
  bool beginning_dropped = false;
  std::uint64_t events = 0;
  std::uint64_t first_ns = 0, last_ns = 0;
  ReadyCommunicators for_clock;
  std::array<std::uint64_t, kEventKinds> kinds{};
  State state;  // after the last event that could be applied

  std::vector<SeriesPoint> series;
  std::uint64_t changes = 0;  // of memory held, of which `series` keeps some
  Held most{};                // each class at its own peak
  SeriesPoint peak;           // when DeviceBytes was highest

  SessionStory story;              // up to where it stopped
  std::vector<Attempt> cycles;     // its attempts by arrival, those of pools too
  std::vector<StripRecord> strip;  // every one of NCCL, in order
  SessionStory::Sums done;         // likewise

  std::vector<AllocationRecord> allocations;  // in order of creation
  std::uint64_t allocations_total = 0;
  Bytes allocations_left_out_bytes = 0;
  std::map<CommunicatorId, Communicator> communicators;  // all that there ever were, as they were last
  std::map<SessionId, LinkRecord> imports;               // by owner
  std::map<SessionId, LinkRecord> importers;             // by importer, as this session's journal says
  std::vector<EventRow> rows;
  std::vector<SeenRecord> seen;  // of other sessions' processes, the first kSeen
  static constexpr std::size_t kSeen = 64, kStrip = 4096;
};

// Fills `out` while a journal is folded from its beginning to its end, behind `story`, which observes the same fold. Where its
// events stop making sense (damage, a wrong order), memory and cycles end, and `stopped` says why; the list of events goes on.
std::unique_ptr<FoldObserver> CollectTimeline(SessionTimeline& out, const TimelineLimits& limits, StoryBuilder& story);

// The end of a process that closed nothing, as somebody else noticed it: which session, by index, at which of its events, and
// the time on the job's clock.
struct DeathNotice {
  std::size_t by = 0;
  SequenceNumber seq;
  std::int64_t at_ns = 0;
};

// A step that failed for lack of device memory, and what the sessions of the job held of that device at that moment.
struct MemoryShortage {
  struct Holder {
    std::size_t session = 0;
    Bytes held = 0, released = 0;  // own memory on that device; `released`: given back by a pause
    Bytes elsewhere = 0;           // of pools and cuMemAlloc, whose device is not recorded
  };
  std::size_t session = 0;  // whose step failed
  SequenceNumber seq;
  std::int32_t device = 0;  // as that session counts
  std::string uuid;         // empty: unknown
  std::vector<Holder> holders;
};

struct JobTimeline {
  std::vector<SessionTimeline> sessions;  // by rank, then by the time of their opening
  std::vector<std::int64_t> offsets_ns;   // add to a time of that session: nanoseconds since the job's first event
  std::uint64_t began_ns = 0;             // the job's first event on the common clock (job/clock.h)
  bool wall_known = false;                // that clock counts from 1970
  std::uint64_t duration_ns = 0;
  std::vector<JobCycle> cycles;               // by time
  std::map<std::size_t, DeathNotice> deaths;  // by session
  std::vector<MemoryShortage> shortages;      // filled by FindShortages
  std::vector<std::string> notes;             // about the clocks
};
// Leaves out half of the allocations that are listed, and of the events: what matters most stays.
void Halve(JobTimeline& job);
// Puts the sessions of a job on one clock, and the parts of one pause or resume together.
JobTimeline JoinTimelines(std::vector<SessionTimeline> sessions);

// Fills JobTimeline::shortages with the latest few steps that failed for lack of device memory. The states of that moment are
// read from the journals again: `reader_of` gives that of a session (by index in the job), null where it cannot be read.
using ReaderOf = std::function<JournalReader*(std::size_t session)>;
void FindShortages(JobTimeline& job, const ReaderOf& reader_of);

}  // namespace amem
