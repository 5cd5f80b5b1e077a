// Roster: the sessions of a job, those with a journal and those that the journals mention, with their names, on one timeline,
// and the sets of sessions that share memory.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "replay/job/history.h"

namespace amem {

class Roster {
 public:
  explicit Roster(std::span<const JournalHistory> journals);

  [[nodiscard]] std::span<const JournalHistory> journals() const { return journals_; }
  [[nodiscard]] const JournalHistory* Find(SessionId session) const;  // null: its journal was not given

  // Nanoseconds since 1970 of a time in that journal. Journals of one boot share one offset, so that their order is kept.
  [[nodiscard]] std::uint64_t Wall(const JournalHistory& journal, std::uint64_t time_ns) const;
  // The time up to which the journal tells what its session did: of reading for a live one, of its last event otherwise.
  [[nodiscard]] std::uint64_t KnownUntil(const JournalHistory& journal) const;

  [[nodiscard]] std::int32_t RankOf(SessionId session) const;              // -1: unknown
  [[nodiscard]] std::string Name(SessionId session) const;                 // "rank 2 (pid 4711 on host a)"
  [[nodiscard]] std::string ShortName(SessionId session) const;            // "rank 2", as long as that is unique
  [[nodiscard]] std::string Names(std::vector<SessionId> sessions) const;  // "ranks 0, 1 and 3"

  // The sessions that shared memory with this one at that time, directly or through others; this one included.
  [[nodiscard]] std::set<SessionId> SharingWith(SessionId session, std::uint64_t wall_ns) const;

 private:
  struct Process {
    std::string host;
    std::int32_t pid = 0, rank = -1;
  };
  void Enter(SessionId session, Process process);

  std::span<const JournalHistory> journals_;
  std::map<SessionId, const JournalHistory*> by_session_;
  std::map<SessionId, Process> processes_;
  std::map<std::int32_t, std::uint32_t> ranks_;  // how many sessions have that rank
  std::map<std::string, std::int64_t> offsets_;  // by boot
};

// "3 m 12 s", "12.3 s", "45 ms".
std::string DurationText(std::uint64_t nanoseconds);
// "2025-11-21 07:34:01.203 UTC"; "unknown time" for 0.
std::string WallText(std::uint64_t wall_ns);
// "a", "a and b", "a, b and c".
std::string Listed(const std::vector<std::string>& words);

}  // namespace amem
