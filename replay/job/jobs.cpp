#include "replay/job/jobs.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <string_view>

#include "journal/base/clock.h"
#include "journal/journal.h"
#include "replay/job/opening.h"
#include "replay/job/sessions.h"

namespace amem {
namespace {

// Ranks start one after the other, and a rank that dies at once overlaps with no other.
constexpr std::uint64_t kStartTogether_ns = 60'000'000'000, kSlack_ns = 5'000'000'000;

std::uint64_t Apart(std::uint64_t a, std::uint64_t b) { return a < b ? b - a : a - b; }

// What the launcher said of the job, without what it said of the rank. Values that every job has do not tell jobs apart.
struct Launcher {
  std::string job;  // empty: not known
  std::string restart, world_size;
};

Launcher LauncherOf(const SessionOpened& who) {
  Launcher launcher;
  constexpr std::array<std::string_view, 4> kOfRank = {"RANK", "PROCID", "NODEID", "LOCALID"};
  std::vector<std::string> job;
  for (const std::string& variable : who.launcher) {
    const std::size_t equals = variable.find('=');
    const std::string name = variable.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : variable.substr(equals + 1);
    if (name == "WORLD_SIZE") {
      launcher.world_size = value;
    } else if (name == "TORCHELASTIC_RESTART_COUNT") {
      launcher.restart = value;
    } else if (value.empty() || value == "none" || name.find("SIZE") != std::string::npos ||
               std::ranges::any_of(kOfRank, [&](std::string_view part) { return name.find(part) != std::string::npos; })) {
      continue;
    } else {
      job.push_back(variable);
    }
  }
  std::ranges::sort(job);
  for (const std::string& variable : job) launcher.job += variable + "\n";
  return launcher;
}

struct Life {  // on the wall clock of its host
  std::uint64_t from = 0, to = 0;
};

Life LifeOf(const JobTies& ties) {
  const std::uint64_t from = ties.who.realtime_ns;
  const std::uint64_t lasted = ties.last_ns - std::min(ties.last_ns, ties.who.monotonic_ns);
  Life life{from, from + lasted};
  if (ties.live) life.to = std::max(life.to, RealtimeNs());
  return life;
}

bool Overlap(const Life& a, const Life& b) { return a.from <= b.to + kSlack_ns && b.from <= a.to + kSlack_ns; }

bool Differ(const std::string& a, const std::string& b) { return !a.empty() && !b.empty() && a != b; }

// Joins sessions to jobs, first by what is certain.
class Grouping {
 public:
  explicit Grouping(std::span<const JobTies> sessions) : sessions_(sessions), above_(sessions.size()) {
    std::iota(above_.begin(), above_.end(), std::size_t{0});
    for (const JobTies& ties : sessions) {
      lives_.push_back(LifeOf(ties));
      launchers_.push_back(LauncherOf(ties.who));
    }
  }

  std::vector<std::vector<std::size_t>> Run(Ties ties) {
    JoinThoseWhoMet();
    JoinRanksOfCommunicators();
    JoinLaunches();
    if (ties == Ties::kProbable) {
      JoinCompatible([this](std::size_t a, std::size_t b) {
        return !launchers_[a].job.empty() && launchers_[a].job == launchers_[b].job;
      });
      JoinCompatible([this](std::size_t a, std::size_t b) { return StartedTogether(a, b); });
    }
    std::vector<std::vector<std::size_t>> jobs;
    for (auto& [root, members] : Members()) jobs.push_back(std::move(members));
    const auto reach = [this](const std::vector<std::size_t>& job) {
      std::uint64_t to = 0;
      for (const std::size_t i : job) to = std::max(to, lives_[i].to);
      return to;
    };
    std::ranges::stable_sort(jobs, std::greater{}, reach);
    return jobs;
  }

 private:
  std::size_t Root(std::size_t i) {
    while (above_[i] != i) i = above_[i] = above_[above_[i]];
    return i;
  }
  void Join(std::size_t a, std::size_t b) { above_[Root(a)] = Root(b); }

  std::map<std::size_t, std::vector<std::size_t>> Members() {
    std::map<std::size_t, std::vector<std::size_t>> members;
    for (std::size_t i = 0; i < sessions_.size(); ++i) members[Root(i)].push_back(i);
    return members;
  }

  // Two that met the same third one met each other, whether or not the third one's journal is here.
  void JoinThoseWhoMet() {
    std::map<SessionId, std::size_t> first;
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      const auto tie = [&](SessionId session) {
        if (const auto [at, fresh] = first.try_emplace(session, i); !fresh) Join(i, at->second);
      };
      tie(sessions_[i].who.session);
      for (const SessionId other : sessions_[i].met) tie(other);
    }
  }

  // A hash is as good as unique, but a job that is started anew may come to the same one: then its ranks are the same, or it
  // began when the other one had ended.
  void JoinRanksOfCommunicators() {
    struct Place {
      std::size_t session;
      std::int32_t rank;
    };
    std::map<std::uint64_t, std::vector<Place>> places;
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      for (const CommunicatorReady& ready : sessions_[i].communicators) {
        std::vector<Place>& of_hash = places[ready.hash];
        for (const Place& place : of_hash) {
          if (Root(place.session) == Root(i)) break;
          const bool taken = std::ranges::any_of(of_hash, [&](const Place& other) {
            return other.rank == ready.rank && Root(other.session) == Root(place.session);
          });
          if (taken || !Compatible(place.session, i)) continue;
          Join(i, place.session);
          break;
        }
        of_hash.push_back({i, ready.rank});
      }
    }
  }

  void JoinLaunches() {
    std::map<std::string_view, std::size_t> first;
    for (std::size_t i = 0; i < sessions_.size(); ++i)
      if (!sessions_[i].launch.empty()) Join(i, first.try_emplace(sessions_[i].launch, i).first->second);
  }

  // One by one: whoever came to a job before may be in the way of the next.
  template <class Tied>
  void JoinCompatible(Tied tied) {
    auto jobs = Members();
    for (auto a = jobs.begin(); a != jobs.end(); ++a) {
      for (auto b = std::next(a); b != jobs.end();) {
        const bool join = tied(a->second.front(), b->second.front()) && AllCompatible(a->second, b->second);
        if (join) {
          Join(a->second.front(), b->second.front());
          a->second.insert(a->second.end(), b->second.begin(), b->second.end());
        }
        b = join ? jobs.erase(b) : std::next(b);
      }
    }
  }

  [[nodiscard]] bool AllCompatible(const std::vector<std::size_t>& a, const std::vector<std::size_t>& b) const {
    std::set<std::int32_t> ranks;
    for (const std::size_t i : a) ranks.insert(sessions_[i].who.rank);
    const bool clash = std::ranges::any_of(
        b, [&](std::size_t i) { return sessions_[i].who.rank >= 0 && ranks.contains(sessions_[i].who.rank); });
    return !clash && Compatible(a.front(), b.front());
  }

  // Nothing speaks against it that they are of one job.
  [[nodiscard]] bool Compatible(std::size_t a, std::size_t b) const {
    const SessionOpened &one = sessions_[a].who, &other = sessions_[b].who;
    if (Differ(launchers_[a].restart, launchers_[b].restart) || Differ(launchers_[a].world_size, launchers_[b].world_size) ||
        Differ(launchers_[a].job, launchers_[b].job))
      return false;
    return !SameBoot(one, other) || Overlap(lives_[a], lives_[b]);
  }

  [[nodiscard]] bool StartedTogether(std::size_t a, std::size_t b) const {
    const SessionOpened &one = sessions_[a].who, &other = sessions_[b].who;
    const bool ranked = one.rank >= 0 && other.rank >= 0;
    if (!ranked && (one.rank >= 0 || other.rank >= 0)) return false;
    return one.group == other.group && lives_[a].from != 0 && Overlap(lives_[a], lives_[b]) &&
           Apart(lives_[a].from, lives_[b].from) <= (ranked ? kStartTogether_ns : kSlack_ns);
  }

  std::span<const JobTies> sessions_;
  std::vector<std::size_t> above_;
  std::vector<Life> lives_;
  std::vector<Launcher> launchers_;
};

void AddFromState(JobTies& ties, const State& state) {
  const auto share = [&](SessionId with, const Allocation& a) {
    ties.met.insert(with);
    const Peer* const peer = FindIn(state.peers, with);
    if (!a.pool && peer != nullptr && peer->connected) ties.shares_with.emplace(with, *peer);
  };
  for (const auto& [session, peer] : state.peers) ties.met.insert(session);
  for (const auto& [id, a] : state.allocations) {
    if (a.remote) share(a.remote->owner, a);
    for (const auto& [importer, count] : a.importers) share(importer.by, a);
  }
  for (const SessionId member : state.cycle.members) ties.met.insert(member);
}

}  // namespace

JobTies TiesOf(const SessionStory& history) {
  const bool live = history.findings.info.status == SessionStatus::kLive;
  JobTies ties{.who = history.who(), .live = live, .last_ns = std::max(history.last.time_ns, history.findings.as_of_ns)};
  AddFromState(ties, history.findings.state);
  for (const auto& [id, import] : history.findings.imports) ties.met.insert(import.remote.owner);
  for (const auto& [key, records] : history.findings.references) ties.met.insert(key.by);
  ties.met.insert(history.forgotten.members.begin(), history.forgotten.members.end());
  for (const Attempt& attempt : history.attempts) ties.met.insert(attempt.members.begin(), attempt.members.end());
  for (const auto& [ready, at] : history.communicators) ties.communicators.push_back(ready);
  return ties;
}

Result<JobTies> ReadTies(const std::filesystem::path& session) {
  AMEM_ASSIGN(const auto reader, JournalReader::Open(session));
  AMEM_ASSIGN(const auto opening, ReadOpening(*reader));
  AMEM_ASSIGN(const auto state, reader->StateAt(std::nullopt));
  JobTies ties{.who = opening.who, .live = opening.info.status == SessionStatus::kLive, .last_ns = opening.last_ns};
  ties.directory = session;
  AddFromState(ties, state);
  for (const auto& [id, c] : state.communicators)
    if (c.hash != 0) ties.communicators.push_back({.communicator = id, .hash = c.hash, .rank = c.rank, .ranks = c.ranks});
  return ties;
}

std::vector<JobTies> ReadTies(std::span<const std::filesystem::path> sessions, std::vector<std::filesystem::path>& unreadable) {
  std::vector<Result<JobTies>> read(sessions.size(), Status{});
  SideBySide(sessions.size(), [&](std::size_t i) { read[i] = ReadTies(sessions[i]); });
  std::vector<JobTies> all;
  for (std::size_t i = 0; i < sessions.size(); ++i)
    read[i] ? all.push_back(*std::move(read[i])) : unreadable.push_back(sessions[i]);
  return all;
}

std::vector<std::vector<std::size_t>> GroupIntoJobs(std::span<const JobTies> sessions, Ties ties) {
  return Grouping(sessions).Run(ties);
}

JobSelection SelectLatestJob(std::span<const std::filesystem::path> sessions) {
  JobSelection selection;
  const std::vector<JobTies> ties = ReadTies(sessions, selection.latest);
  const auto jobs = GroupIntoJobs(ties);
  for (const auto& job : jobs) {
    auto& part = &job == &jobs.front() ? selection.latest : selection.earlier;
    for (const std::size_t i : job) part.push_back(ties[i].directory);
  }
  return selection;
}

}  // namespace amem
