// The cast of a diagnosis: all journals of a job on one timeline, by name, with who shares memory with whom and where each
// stands.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "replay/job/history.h"
#include "replay/job/names.h"

namespace amem {

class Roster {
 public:
  explicit Roster(std::span<const JournalHistory> journals);

  [[nodiscard]] std::span<const JournalHistory> journals() const { return journals_; }
  [[nodiscard]] const JournalHistory* Find(SessionId session) const;  // null: its journal was not given

  // Nanoseconds since 1970 of a time in that journal. Journals of one boot share one offset, so that their order is kept.
  [[nodiscard]] std::uint64_t Wall(const JournalHistory& journal, std::uint64_t time_ns) const;
  // Until when is known what that session did: the time of reading for a live one, of its last event otherwise.
  [[nodiscard]] std::uint64_t KnownUntil(const JournalHistory& journal) const;

  [[nodiscard]] std::int32_t RankOf(SessionId session) const;              // -1: unknown
  [[nodiscard]] std::string Name(SessionId session) const;                 // "rank 2 (pid 4711 on host a)"
  [[nodiscard]] std::string ShortName(SessionId session) const;            // "rank 2", as long as that is unique
  [[nodiscard]] std::string Names(std::vector<SessionId> sessions) const;  // "ranks 0, 1 and 3"

  // Who shared memory with this session then, directly or through others, itself included.
  [[nodiscard]] std::set<SessionId> Set(SessionId session, std::uint64_t wall_ns) const;

 private:
  struct Person {
    std::string host;
    std::int32_t pid = 0, rank = -1;
  };
  void Introduce(SessionId session, Person person);

  std::span<const JournalHistory> journals_;
  std::map<SessionId, const JournalHistory*> by_session_;
  std::map<SessionId, Person> people_;
  std::map<std::int32_t, std::uint32_t> ranks_;  // how many have it
  std::map<std::string, std::int64_t> offsets_;  // by boot
};

// Where a session stands in its last attempt, which is open.
struct Progress {
  std::optional<PhaseKind> phase;  // none: it waits for the others to come
  bool undoing = false;
  bool did_its_part = false;  // nothing is left to do in that phase: it waits for the others' votes
  std::uint64_t steps_done = 0, steps_left = 0;
  std::optional<Step> step;  // begun and not finished, or else the next of those left
  bool step_begun = false;
  Moment since;  // of the last thing it recorded in this attempt
};
Progress ProgressOf(const JournalHistory& journal);

// The step's text once: failures carry it at their beginning.
std::string WithoutPrefix(const std::string& message, const std::string& prefix);

}  // namespace amem
