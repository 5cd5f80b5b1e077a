#include "replay/diagnosis/roster.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "replay/job/event_json.h"

namespace amem {

Roster::Roster(std::span<const JournalHistory> journals) : journals_(journals) {
  for (const JournalHistory& j : journals_) {
    by_session_[j.session()] = &j;
    const SessionOpened& opened = j.who();
    Enter(j.session(), {opened.host, opened.pid != 0 ? opened.pid : j.findings.info.pid, opened.rank});
    // All journals of one boot count by one clock, so the first of them sets the offset for all.
    if (opened.monotonic_ns != 0) {
      offsets_.try_emplace(opened.boot_id,
                           static_cast<std::int64_t>(opened.realtime_ns) - static_cast<std::int64_t>(opened.monotonic_ns));
    }
  }
  for (const JournalHistory& j : journals_) {
    for (const auto& [session, peer] : j.findings.state.peers) Enter(session, {peer.host, peer.pid, peer.rank});
  }
}

void Roster::Enter(SessionId session, Process process) {
  const std::int32_t rank = process.rank;
  if (processes_.try_emplace(session, std::move(process)).second && rank >= 0) ++ranks_[rank];
}

const JournalHistory* Roster::Find(SessionId session) const {
  const auto it = by_session_.find(session);
  return it == by_session_.end() ? nullptr : it->second;
}

std::uint64_t Roster::Wall(const JournalHistory& journal, std::uint64_t time_ns) const {
  const auto it = offsets_.find(journal.who().boot_id);
  if (it == offsets_.end() || time_ns == 0) return time_ns;
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(time_ns) + it->second);
}

std::uint64_t Roster::KnownUntil(const JournalHistory& journal) const {
  const bool live = journal.findings.info.status == SessionStatus::kLive;
  return Wall(journal, std::max(journal.last.time_ns, live ? journal.findings.as_of_ns : 0));
}

std::int32_t Roster::RankOf(SessionId session) const {
  const auto it = processes_.find(session);
  return it == processes_.end() ? -1 : it->second.rank;
}

std::string Roster::Name(SessionId session) const {
  const auto it = processes_.find(session);
  if (it == processes_.end() || it->second.pid == 0) return "session " + SessionText(session);
  const auto& [host, pid, rank] = it->second;
  const std::string process = "pid " + std::to_string(pid) + (host.empty() ? "" : " on host " + host);
  return rank < 0 ? process : "rank " + std::to_string(rank) + " (" + process + ")";
}

std::string Roster::ShortName(SessionId session) const {
  const std::int32_t rank = RankOf(session);
  const auto it = ranks_.find(rank);
  return it != ranks_.end() && it->second == 1 ? "rank " + std::to_string(rank) : Name(session);
}

std::string Roster::Names(std::vector<SessionId> sessions) const {
  std::ranges::sort(sessions, {}, [this](SessionId s) { return std::pair(RankOf(s), s); });
  const bool ranks = sessions.size() > 1 && std::ranges::all_of(sessions, [this](SessionId s) {
                       return ShortName(s).starts_with("rank ") && ShortName(s).find('(') == std::string::npos;
                     });
  std::vector<std::string> words;
  for (const SessionId s : sessions) words.push_back(ranks ? std::to_string(RankOf(s)) : ShortName(s));
  return (ranks ? "ranks " : "") + Listed(words);
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

// ---- words -----------------------------------------------------------------------------------------------------------------

std::string DurationText(std::uint64_t ns) {
  char text[64];
  const double seconds = static_cast<double>(ns) / 1e9;
  if (ns >= 60'000'000'000) {
    const std::uint64_t whole = ns / 1'000'000'000;
    std::snprintf(text, sizeof text, "%llu min %llu s", static_cast<unsigned long long>(whole / 60),
                  static_cast<unsigned long long>(whole % 60));
  } else if (ns >= 1'000'000'000) {
    std::snprintf(text, sizeof text, "%.1f s", seconds);
  } else if (ns >= 1'000'000) {
    std::snprintf(text, sizeof text, "%.0f ms", seconds * 1e3);
  } else {
    std::snprintf(text, sizeof text, "%.0f us", seconds * 1e6);
  }
  return text;
}

std::string WallText(std::uint64_t wall_ns) {
  if (wall_ns == 0) return "unknown time";
  const std::time_t seconds = static_cast<std::time_t>(wall_ns / 1'000'000'000);
  std::tm utc{};
  if (!::gmtime_r(&seconds, &utc)) return "unknown time";
  char date[40], text[64];
  if (std::strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", &utc) == 0) return "unknown time";
  std::snprintf(text, sizeof text, "%s.%03u UTC", date, static_cast<unsigned>(wall_ns / 1'000'000 % 1000));
  return text;
}

std::string Listed(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " and " : ", ";
    text += words[i];
  }
  return text;
}

}  // namespace amem
