// Many sessions on one clock, and their pauses and resumes put together.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "replay/job/clock.h"
#include "replay/report/timeline.h"

namespace amem {
namespace {

void SetClocks(JobTimeline& job) {
  std::vector<JobClock::Journal> journals;
  for (const SessionTimeline& s : job.sessions) journals.push_back({&s.who, s.first_ns, s.for_clock});
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
    const std::vector<SeenRecord>& seen = job.sessions[by].seen;
    for (std::size_t record = 0; record < seen.size(); ++record) {
      if (!seen[record].dead) continue;
      const auto of =
          std::ranges::find_if(job.sessions, [&](const SessionTimeline& s) { return s.info.session == seen[record].of; });
      if (of == job.sessions.end()) continue;
      const std::int64_t at_ns = WrappedSum(seen[record].at.time_ns, job.offsets_ns[by]);
      const auto index = static_cast<std::size_t>(of - job.sessions.begin());
      const bool over = of->info.status == SessionStatus::kCrashed && at_ns >= WrappedSum(of->last_ns, job.offsets_ns[index]);
      if (!over) continue;
      const auto [known, fresh] = job.deaths.try_emplace(index, DeathNotice{by, record, at_ns});
      if (!fresh && at_ns < known->second.at_ns) known->second = {by, record, at_ns};
    }
  }
}

}  // namespace

JobTimeline JoinTimelines(std::vector<SessionTimeline> sessions) {
  JobTimeline job;
  job.sessions = std::move(sessions);
  std::stable_sort(job.sessions.begin(), job.sessions.end(), [](const SessionTimeline& a, const SessionTimeline& b) {
    const auto key = [](const SessionTimeline& s) {
      return std::pair(s.who.rank < 0 ? std::numeric_limits<std::int32_t>::max() : s.who.rank, s.first_ns);
    };
    return key(a) < key(b);
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

}  // namespace amem
