#include "replay/diagnosis/roster.h"

#include <algorithm>

namespace amem {

static std::vector<JobClock::Journal> ForClock(std::span<const SessionStory> journals) {
  std::vector<JobClock::Journal> all;
  for (const SessionStory& j : journals)
    all.push_back({&j.who(), j.first.time_ns, j.for_clock, j.findings.info.set_clock.monotonic_ns});
  return all;
}

Roster::Roster(std::span<const SessionStory> journals) : journals_(journals), clock_(ForClock(journals)) {
  for (const SessionStory& j : journals_) {
    by_session_[j.session()] = &j;
    names_.Add(j.who());
  }
  for (const SessionStory& j : journals_) names_.AddPeersOf(j.findings.state);
  for (const SessionStory& j : journals_) {
    for (const auto& [session, met] : j.met)  // members share a host, also where only a number is known of it
      names_.Add({.session = session, .host = met.host.empty() ? j.who().host : met.host, .pid = met.pid, .rank = met.rank});
  }
  FindNeighbours();
}

const SessionStory* Roster::Find(SessionId session) const {
  const auto it = by_session_.find(session);
  return it == by_session_.end() ? nullptr : it->second;
}

std::uint64_t Roster::KnownUntil(const SessionStory& journal) const {
  const bool live = journal.findings.info.status == SessionStatus::kLive;
  return Wall(journal, std::max(journal.last.time_ns, live ? journal.findings.as_of_ns : 0));
}

// A session shares many allocations with its neighbours, for times that overlap: they are joined to one.
void Roster::FindNeighbours() {
  std::map<std::pair<SessionId, SessionId>, std::map<std::uint64_t, std::uint64_t>> times;
  const auto connect = [&](const SessionStory& j, SessionId with, const auto& record) {
    const std::uint64_t from = Wall(j, record.time_ns), until = record.dropped ? Wall(j, record.dropped_ns) : UINT64_MAX;
    auto& intervals = times[std::minmax(j.session(), with)];
    auto next = intervals.upper_bound(from);
    if (next != intervals.begin() && std::prev(next)->second >= from) {
      --next;
      next->second = std::max(next->second, until);
    } else {
      next = intervals.emplace_hint(next, from, until);
    }
    for (auto after = std::next(next); after != intervals.end() && after->first <= next->second;) {
      next->second = std::max(next->second, after->second);
      after = intervals.erase(after);
    }
  };
  for (const SessionStory& j : journals_) {
    for (const auto& [id, import] : j.findings.imports) connect(j, import.remote.owner, import);
    for (const auto& [key, records] : j.findings.references)
      for (const ReferenceRecord& record : records) connect(j, key.by, record);
  }
  for (const auto& [pair, intervals] : times) {
    for (const auto& [from, until] : intervals) {
      neighbours_[pair.first].push_back({pair.second, from, until});
      neighbours_[pair.second].push_back({pair.first, from, until});
    }
  }
}

std::set<SessionId> Roster::SharingWith(SessionId session, std::uint64_t wall_ns) const {
  std::set<SessionId> set{session};
  std::vector<SessionId> frontier{session};
  while (!frontier.empty()) {
    const auto shared = neighbours_.find(frontier.back());
    frontier.pop_back();
    if (shared == neighbours_.end()) continue;
    for (const Shared& s : shared->second)
      if (s.from <= wall_ns && s.until > wall_ns && set.insert(s.with).second) frontier.push_back(s.with);
  }
  return set;
}

}  // namespace amem
