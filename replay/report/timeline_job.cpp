// Many sessions on one clock, their pauses and resumes put together, and who held a device when its memory ran out.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/report/timeline.h"

namespace amem {
namespace {

void SetClocks(JobTimeline& job) {
  std::vector<JobClock::Journal> journals;
  for (const SessionTimeline& s : job.sessions)
    journals.push_back({&s.who, s.first_ns, s.for_clock, s.info.set_clock.monotonic_ns});
  const JobClock clock(journals);
  std::int64_t end = clock.began_ns();
  for (const SessionTimeline& s : job.sessions) {
    job.offsets_ns.push_back(WrappedDifference(clock.OffsetOf(s.who), clock.began_ns()));
    if (s.events != 0) end = std::max(end, WrappedSum(s.last_ns, clock.OffsetOf(s.who)));
  }
  job.duration_ns = static_cast<std::uint64_t>(WrappedDifference(end, clock.began_ns()));
  job.began_ns = static_cast<std::uint64_t>(clock.began_ns());
  job.wall_known = clock.boots_without_wall_clock() < clock.boots();
  if (clock.boots() < 2) return;
  job.notes.push_back(fmt::format("The journals come from {} clocks (hosts or boots), put together by {}", clock.boots(),
                                  clock.by_communicators()
                                      ? "the communicators that they made: times of different hosts may be off by a few "
                                        "milliseconds."
                                      : "their wall clocks: times of different hosts may be off by as much as those differ."));
  if (const std::size_t unknown = clock.boots_without_wall_clock(); unknown != 0)
    job.notes.push_back(
        fmt::format("{} of them did not note the wall clock; there, times count from the job's first event.", unknown));
}

// Of a session that closed nothing, the first to notice its end dates it; its own last event may be hours older.
void FindDeaths(JobTimeline& job) {
  for (std::size_t by = 0; by < job.sessions.size(); ++by) {
    for (const SeenRecord& seen : job.sessions[by].seen) {
      if (!seen.dead) continue;
      const auto of = std::ranges::find_if(job.sessions, [&](const SessionTimeline& s) { return s.info.session == seen.of; });
      if (of == job.sessions.end()) continue;
      const std::int64_t at_ns = WrappedSum(seen.at.time_ns, job.offsets_ns[by]);
      const auto index = static_cast<std::size_t>(of - job.sessions.begin());
      const bool over = of->info.status == SessionStatus::kCrashed && at_ns >= WrappedSum(of->last_ns, job.offsets_ns[index]);
      if (!over) continue;
      const auto [known, fresh] = job.deaths.try_emplace(index, DeathNotice{by, seen.at.seq, at_ns});
      if (!fresh && at_ns < known->second.at_ns) known->second = {by, seen.at.seq, at_ns};
    }
  }
}

constexpr std::size_t kShortages = 4;  // the latest; each costs reading a part of some journals

// The last event up to that time, by halving: events are in the order of their times but for neighbours.
std::optional<SequenceNumber> LastUpTo(JournalReader& reader, const JournalInfo& info, std::uint64_t time_ns) {
  std::uint64_t low = info.first.value, high = info.last.value;  // `low` is the answer, or there is none
  std::optional<SequenceNumber> last;
  while (low <= high && low != 0) {
    const std::uint64_t middle = low + (high - low) / 2;
    const auto event = ReadEvent(reader, SequenceNumber{middle});
    if (!event || !*event) return last;  // damaged there
    if ((*event)->time_ns <= time_ns) {
      last = SequenceNumber{middle};
      low = middle + 1;
    } else {
      high = middle - 1;
    }
  }
  return last;
}

// The device of that session that is the given one; nothing: it does not see it.
std::optional<std::int32_t> SameDevice(const SessionOpened& who, const SessionOpened& failed, std::int32_t device) {
  if (who.host != failed.host) return std::nullopt;
  const std::string uuid = GpuOf(failed, device);
  if (uuid.empty() || who.gpu_uuids.empty()) return device;
  const auto at = std::ranges::find(who.gpu_uuids, uuid);
  if (at == who.gpu_uuids.end()) return std::nullopt;
  return static_cast<std::int32_t>(at - who.gpu_uuids.begin());
}

MemoryShortage::Holder HeldOn(const State& state, std::int32_t device, std::size_t session) {
  MemoryShortage::Holder holder{.session = session};
  for (const auto& [id, a] : state.allocations) {
    const bool counts = a.own() && a.on_device() && !a.placed() && !a.multicast && a.properties.location.id == device;
    if (counts) (a.resident ? holder.held : holder.released) += a.bytes;
  }
  for (const auto& [address, a] : state.async) holder.elsewhere += a.bytes;
  for (const auto& [address, legacy] : state.legacy) holder.elsewhere += legacy.backing ? 0 : legacy.bytes;
  return holder;
}

// The device that a step needed memory of.
std::optional<std::int32_t> DeviceOf(const Step& step, const State& state) {
  if (step.kind == StepKind::kCheckMemory) return step.device.value;
  if (step.kind != StepKind::kCreate) return std::nullopt;
  const Allocation* a = FindIn(state.allocations, step.allocation);
  return a == nullptr || !a->on_device() ? std::nullopt : std::optional(a->properties.location.id);
}

// When a session's memory was gone: at its last event or, where that was noticed later, then.
std::int64_t EndOf(const JobTimeline& job, std::size_t session) {
  const DeathNotice* death = FindIn(job.deaths, session);
  return death != nullptr ? death->at_ns : WrappedSum(job.sessions[session].last_ns, job.offsets_ns[session]);
}

void AddHolder(const JobTimeline& job, const ReaderOf& reader_of, MemoryShortage& shortage, std::size_t session,
               std::int64_t at_ns) {
  const SessionTimeline& s = job.sessions[session];
  const auto device = SameDevice(s.who, job.sessions[shortage.session].who, shortage.device);
  JournalReader* const reader = device ? reader_of(session) : nullptr;
  if (reader == nullptr) return;
  const auto time = static_cast<std::uint64_t>(WrappedDifference(at_ns, job.offsets_ns[session]));
  // A process that has ended holds nothing any more.
  const bool over = s.info.status != SessionStatus::kLive && session != shortage.session && EndOf(job, session) < at_ns;
  const auto last = over ? std::nullopt : LastUpTo(*reader, s.info, time);
  if (!last) return;
  const Result<State> state = reader->StateAt(session == shortage.session ? shortage.seq : *last);
  if (!state) return;
  const MemoryShortage::Holder holder = HeldOn(*state, *device, session);
  if (holder.held + holder.released != 0) shortage.holders.push_back(holder);
}

void AddShortage(JobTimeline& job, const ReaderOf& reader_of, std::size_t session, const Attempt::Failure& failure) {
  JournalReader* const reader = reader_of(session);
  if (reader == nullptr) return;
  const Result<State> state = reader->StateAt(failure.at.seq);
  const auto device = state ? DeviceOf(failure.step, *state) : std::nullopt;
  if (!device) return;
  const SessionOpened& who = job.sessions[session].who;
  MemoryShortage shortage{.session = session, .seq = failure.at.seq, .device = *device, .uuid = GpuOf(who, *device)};
  const std::int64_t at_ns = WrappedSum(failure.at.time_ns, job.offsets_ns[session]);
  for (std::size_t s = 0; s < job.sessions.size(); ++s) AddHolder(job, reader_of, shortage, s, at_ns);
  job.shortages.push_back(std::move(shortage));
}

}  // namespace

JobTimeline JoinTimelines(std::vector<SessionTimeline> sessions) {
  JobTimeline job;
  job.sessions = std::move(sessions);
  std::ranges::stable_sort(job.sessions, {}, [](const SessionTimeline& s) {
    return std::pair(s.who.rank < 0 ? std::numeric_limits<std::int32_t>::max() : s.who.rank, s.first_ns);
  });
  SetClocks(job);
  std::vector<TimedStory> stories;
  for (std::size_t i = 0; i < job.sessions.size(); ++i) {
    const SessionTimeline& s = job.sessions[i];
    stories.push_back({&s.who, job.offsets_ns[i], s.first_ns, s.last_ns, s.cycles});
  }
  job.cycles = JoinAttempts(stories);
  FindDeaths(job);
  return job;
}

void FindShortages(JobTimeline& job, const ReaderOf& reader_of) {
  for (auto cycle = job.cycles.rbegin(); cycle != job.cycles.rend(); ++cycle) {
    for (const auto& [session, index] : cycle->parts) {
      const auto& failure = job.sessions[session].cycles[index].failed_step;
      const bool memory = failure && failure->code == Code::kOutOfMemory;
      if (memory && job.shortages.size() < kShortages) AddShortage(job, reader_of, session, *failure);
    }
  }
}

}  // namespace amem
