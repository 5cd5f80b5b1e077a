#include "replay/diagnosis/roster.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "replay/job/event_json.h"
#include "statemachine/plan.h"

namespace amem {

Roster::Roster(std::span<const JournalHistory> journals) : journals_(journals) {
  for (const JournalHistory& j : journals_) {
    by_session_[j.session()] = &j;
    const SessionOpened& who = j.who();
    Introduce(j.session(), {who.host, who.pid != 0 ? who.pid : j.findings.info.pid, who.rank});
    // The first journal of a boot sets the offset for all: clocks of one host are one clock.
    if (who.monotonic_ns != 0) {
      offsets_.try_emplace(who.boot_id,
                           static_cast<std::int64_t>(who.realtime_ns) - static_cast<std::int64_t>(who.monotonic_ns));
    }
  }
  for (const JournalHistory& j : journals_) {
    for (const auto& [session, peer] : j.findings.state.peers) Introduce(session, {peer.host, peer.pid, peer.rank});
  }
}

void Roster::Introduce(SessionId session, Person person) {
  const std::int32_t rank = person.rank;
  if (people_.try_emplace(session, std::move(person)).second && rank >= 0) ++ranks_[rank];
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
  const auto it = people_.find(session);
  return it == people_.end() ? -1 : it->second.rank;
}

std::string Roster::Name(SessionId session) const {
  const auto it = people_.find(session);
  if (it == people_.end() || it->second.pid == 0) return "session " + SessionText(session);
  const Person& who = it->second;
  const std::string process = "pid " + std::to_string(who.pid) + (who.host.empty() ? "" : " on host " + who.host);
  return who.rank < 0 ? process : "rank " + std::to_string(who.rank) + " (" + process + ")";
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

std::set<SessionId> Roster::Set(SessionId session, std::uint64_t wall_ns) const {
  std::map<SessionId, std::set<SessionId>> neighbours;
  const auto meet = [&](SessionId a, SessionId b) {
    neighbours[a].insert(b);
    neighbours[b].insert(a);
  };
  for (const JournalHistory& j : journals_) {
    const auto held = [&](const auto& record) {
      return Wall(j, record.time_ns) <= wall_ns && (!record.dropped || Wall(j, record.dropped_ns) > wall_ns);
    };
    for (const auto& [id, import] : j.findings.imports) {
      if (held(import)) meet(j.session(), import.remote.owner);
    }
    for (const auto& [key, records] : j.findings.references) {
      if (std::ranges::any_of(records, held)) meet(j.session(), key.by);
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

// ---- where a session stands ------------------------------------------------------------------------------------------------

namespace {

// These are planned whenever they are asked for: what is done of them shows only in the count.
bool Repeats(StepKind kind) {
  return kind == StepKind::kQuiesce || kind == StepKind::kCheckMemory || kind == StepKind::kVerify ||
         kind == StepKind::kBeginRestore;
}

}  // namespace

Progress ProgressOf(const JournalHistory& journal) {
  Progress progress;
  if (journal.attempts.empty() || journal.attempts.back().end != Attempt::End::kOpen) return progress;
  const Attempt& attempt = journal.attempts.back();
  progress.since = attempt.begun ? attempt.begun : attempt.arrived;
  if (!attempt.begun) return progress;
  progress.undoing = attempt.decided.has_value();
  if (attempt.phases.empty()) return progress;
  const Attempt::PhaseTaken& phase = attempt.phases.back();
  progress.phase = phase.phase;
  progress.since = phase.decided ? phase.decided : phase.begun;
  progress.steps_done = phase.steps - (attempt.open_step ? 1 : 0);
  const bool pausing = phase.phase < PhaseKind::kResumeArrive;
  const Plan plan = pausing ? PlanPause(journal.findings.state) : PlanResume(journal.findings.state);
  for (const PlannedPhase& planned : plan.phases) {
    if (planned.phase != phase.phase || phase.decided || !journal.findings.whole) continue;
    std::uint64_t repeated = progress.steps_done;
    for (const Step& step : planned.steps) {
      if (Repeats(step.kind) && repeated > 0) {
        --repeated;
        continue;
      }
      if (!progress.step) progress.step = step;
      ++progress.steps_left;
    }
  }
  if (attempt.open_step) {
    progress.step = attempt.open_step->step;
    progress.step_begun = true;
    progress.since = attempt.open_step->at;
    progress.steps_left = std::max<std::uint64_t>(progress.steps_left, 1);
  } else if (journal.last.time_ns > progress.since.time_ns) {
    progress.since = journal.last;
  }
  progress.did_its_part = progress.steps_left == 0;
  return progress;
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

std::string WithoutPrefix(const std::string& message, const std::string& prefix) {
  return message.starts_with(prefix + ": ") ? message.substr(prefix.size() + 2) : message;
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
