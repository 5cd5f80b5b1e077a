// Standing: where each session of a job is at this moment - running, paused, in which phase of a pause or resume, how far, and
// for whom it waits. What `amem-replay watch` draws.
//
// Plain values, of one moment of a story; no clock, and nothing is written.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "replay/job/fold.h"
#include "replay/job/story/progress.h"
#include "replay/job/story/story.h"

namespace amem {

struct Standing {
  SessionOpened who;
  SessionStatus status = SessionStatus::kLive;
  Lifecycle lifecycle = Lifecycle::kNew;
  Bytes held = 0;                     // own device memory that is occupied now, that of pools too
  Bytes released = 0;                 // own device memory that a pause has given back
  std::vector<SessionId> peers;       // that it is connected with
  std::vector<SessionId> lost_peers;  // that it was connected with
  std::string trouble;                // why the rest is not known any more; empty: it is

  std::optional<Attempt> attempt;             // a pause or resume that it has come to and that has not ended here
  Progress progress;                          // in that
  std::optional<Attempt> ended;               // the last one that ended
  std::uint64_t last_ns = 0, since_ns = 0;    // of the last event; when it began what it does
  [[nodiscard]] std::string failure() const;  // of the last one that ended; empty: it was done
};
Standing StandingOf(const Folded& folded, const SessionStory& story, SessionStatus status);

// For each of them the sessions that it waits for, by id; empty where it waits for nobody. A session waits when it has done its
// part of a phase; then for the members that have not done theirs, or, before the beginning, for the sessions that it is
// connected with, directly or through others, and that have not come.
std::vector<std::vector<SessionId>> WhoWaitsForWhom(std::span<const Standing> sessions);

}  // namespace amem
