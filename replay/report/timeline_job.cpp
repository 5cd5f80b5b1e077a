// Many sessions on one clock, and their pauses and resumes put together.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "replay/job/clock.h"
#include "replay/report/timeline.h"

namespace amem {
namespace {

// Clocks of two hosts are set to within this, or not at all.
constexpr std::int64_t kSkew_ns = 2'000'000'000;

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

class Grouping {
 public:
  explicit Grouping(JobTimeline& job) : job_(job) {}

  void Run() {
    struct Part {
      std::int64_t begin = 0;
      std::size_t session = 0, cycle = 0;
    };
    std::vector<Part> parts;
    for (std::size_t s = 0; s < job_.sessions.size(); ++s) {
      for (std::size_t c = 0; c < job_.sessions[s].cycles.size(); ++c) parts.push_back({Begin(s, c), s, c});
    }
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
    for (const Part& part : parts) Add(part.session, part.cycle);
    for (JobCycle& cycle : job_.cycles) FindAbsent(cycle);
  }

 private:
  [[nodiscard]] const CycleRecord& At(std::size_t s, std::size_t c) const { return job_.sessions[s].cycles[c]; }
  [[nodiscard]] std::int64_t Begin(std::size_t s, std::size_t c) const {
    return WrappedSum(At(s, c).arrived_ns, job_.offsets_ns[s]);
  }
  [[nodiscard]] std::int64_t End(std::size_t s, std::size_t c) const {
    return WrappedSum(At(s, c).ended_ns, job_.offsets_ns[s]);
  }

  // A session is a part of a cycle once; they overlap in time, and where both have begun it is a member.
  [[nodiscard]] bool Fits(const JobCycle& cycle, std::size_t s, std::size_t c) const {
    const auto& [other, number] = cycle.parts.front();
    const CycleRecord &theirs = At(other, number), &mine = At(s, c);
    if (theirs.kind != mine.kind || theirs.tag != mine.tag) return false;
    for (const auto& [session, index] : cycle.parts) {
      if (session == s) return false;
    }
    const bool of_pool = !mine.tag.empty();  // each session's own affair: those of one number are shown together
    if (of_pool && theirs.number != mine.number) return false;
    if (!of_pool && theirs.begun && mine.begun) {
      const SessionId me = job_.sessions[s].info.session;
      if (std::find(theirs.members.begin(), theirs.members.end(), me) == theirs.members.end()) return false;
    }
    const bool one_clock = SameBoot(job_.sessions[s].who, job_.sessions[other].who);
    const std::int64_t slack = one_clock ? 0 : kSkew_ns;
    const auto until = [slack](std::int64_t end) { return WrappedSum(static_cast<std::uint64_t>(end), slack); };
    return Begin(s, c) <= until(End(other, number)) && Begin(other, number) <= until(End(s, c));
  }

  void Add(std::size_t s, std::size_t c) {
    const std::size_t look_back = std::min<std::size_t>(job_.cycles.size(), 64);
    for (std::size_t i = job_.cycles.size() - look_back; i < job_.cycles.size(); ++i) {
      if (Fits(job_.cycles[i], s, c)) return job_.cycles[i].parts.emplace_back(s, c), void();
    }
    job_.cycles.push_back({.kind = At(s, c).kind, .parts = {{s, c}}, .absent = {}});
  }

  void FindAbsent(JobCycle& cycle) {
    std::sort(cycle.parts.begin(), cycle.parts.end());
    if (!At(cycle.parts.front().first, cycle.parts.front().second).tag.empty()) return;
    const auto took_part = [&](SessionId session) {
      return std::any_of(cycle.parts.begin(), cycle.parts.end(),
                         [&](const auto& part) { return job_.sessions[part.first].info.session == session; });
    };
    for (const auto& [s, c] : cycle.parts) {
      for (const SessionId member : At(s, c).members) {
        const bool known = std::find(cycle.absent.begin(), cycle.absent.end(), member) != cycle.absent.end();
        if (!known && !took_part(member)) cycle.absent.push_back(member);
      }
      if (At(s, c).begun) return;  // it names all
    }
    // It never began, so no journal says for whom the others waited: presumably for the rest of the group.
    const auto& [first, number] = cycle.parts.front();
    for (std::size_t s = 0; s < job_.sessions.size(); ++s) {
      const SessionTimeline& other = job_.sessions[s];
      const bool there = WrappedSum(other.first_ns, job_.offsets_ns[s]) <= End(first, number) &&
                         WrappedSum(other.last_ns, job_.offsets_ns[s]) >= Begin(first, number);
      const bool same = other.who.group == job_.sessions[first].who.group;
      if (there && same && !took_part(other.info.session)) cycle.absent.push_back(other.info.session);
    }
  }

  JobTimeline& job_;
};

// Of a session that closed nothing, the first to notice its end dates it; its own last event may be hours older.
void FindDeaths(JobTimeline& job) {
  for (std::size_t by = 0; by < job.sessions.size(); ++by) {
    const std::vector<SeenRecord>& seen = job.sessions[by].seen;
    for (std::size_t record = 0; record < seen.size(); ++record) {
      if (!seen[record].dead) continue;
      const auto of =
          std::ranges::find_if(job.sessions, [&](const SessionTimeline& s) { return s.info.session == seen[record].of; });
      if (of == job.sessions.end()) continue;
      const std::int64_t at_ns = WrappedSum(seen[record].time_ns, job.offsets_ns[by]);
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
  Grouping(job).Run();
  FindDeaths(job);
  return job;
}

}  // namespace amem
