#include "replay/diagnosis/roster.h"

#include <algorithm>

namespace amem {
namespace {

std::vector<JobClock::Journal> ForClock(std::span<const JournalHistory> journals) {
  std::vector<JobClock::Journal> all;
  for (const JournalHistory& j : journals) all.push_back({&j.who(), j.first.time_ns});
  return all;
}

}  // namespace

Roster::Roster(std::span<const JournalHistory> journals) : journals_(journals), clock_(ForClock(journals)) {
  for (const JournalHistory& j : journals_) {
    by_session_[j.session()] = &j;
    names_.Add(j.who());
  }
  for (const JournalHistory& j : journals_) names_.AddPeersOf(j.findings.state);
}

const JournalHistory* Roster::Find(SessionId session) const {
  const auto it = by_session_.find(session);
  return it == by_session_.end() ? nullptr : it->second;
}

std::uint64_t Roster::KnownUntil(const JournalHistory& journal) const {
  const bool live = journal.findings.info.status == SessionStatus::kLive;
  return Wall(journal, std::max(journal.last.time_ns, live ? journal.findings.as_of_ns : 0));
}

std::set<SessionId> Roster::SharingWith(SessionId session, std::uint64_t wall_ns) const {
  std::map<SessionId, std::set<SessionId>> neighbours;
  const auto connect = [&](SessionId a, SessionId b) {
    neighbours[a].insert(b);
    neighbours[b].insert(a);
  };
  for (const JournalHistory& j : journals_) {
    const auto held = [&](const auto& record) {
      return Wall(j, record.time_ns) <= wall_ns && (!record.dropped || Wall(j, record.dropped_ns) > wall_ns);
    };
    for (const auto& [id, import] : j.findings.imports) {
      if (held(import)) connect(j.session(), import.remote.owner);
    }
    for (const auto& [key, records] : j.findings.references) {
      if (std::ranges::any_of(records, held)) connect(j.session(), key.by);
    }
  }
  std::set<SessionId> set{session};
  std::vector<SessionId> frontier{session};
  while (!frontier.empty()) {
    const SessionId at = frontier.back();
    frontier.pop_back();
    for (const SessionId next : neighbours[at]) {
      if (set.insert(next).second) frontier.push_back(next);
    }
  }
  return set;
}

}  // namespace amem
