// Roster: the sessions of a job, those with a journal and those that the journals mention, with their names, on one timeline,
// and the sets of sessions that share memory.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "replay/job/clock.h"
#include "replay/job/names.h"
#include "replay/job/story/story.h"

namespace amem {

class Roster {
 public:
  explicit Roster(std::span<const SessionStory> journals);

  [[nodiscard]] std::span<const SessionStory> journals() const { return journals_; }
  [[nodiscard]] const SessionStory* Find(SessionId session) const;  // null: its journal was not given

  [[nodiscard]] const JobNames& names() const { return names_; }

  // Nanoseconds since 1970 of a time in that journal, as JobClock has it.
  [[nodiscard]] std::uint64_t Wall(const SessionStory& journal, std::uint64_t time_ns) const {
    return clock_.Wall(journal.who(), time_ns);
  }
  // The time up to which the journal tells what its session did: of reading for a live one, of its last event otherwise.
  [[nodiscard]] std::uint64_t KnownUntil(const SessionStory& journal) const;

  // The sessions that shared memory with this one at that time, directly or through others; this one included.
  [[nodiscard]] std::set<SessionId> SharingWith(SessionId session, std::uint64_t wall_ns) const;

 private:
  std::span<const SessionStory> journals_;
  void FindNeighbours();

  struct Shared {  // memory, from a time to another, on the job's clock
    SessionId with;
    std::uint64_t from = 0, until = UINT64_MAX;
  };
  std::map<SessionId, std::vector<Shared>> neighbours_;
  std::map<SessionId, const SessionStory*> by_session_;
  JobClock clock_;
  JobNames names_;
};

}  // namespace amem
