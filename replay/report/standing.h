// Standing: where each session of a job is at this moment - running, paused, in which phase of a pause or resume, how far, and
// for whom it waits. What `amem-replay watch` draws, kept up to date event by event.
//
// Plain values and a fold; no clock, and nothing is written. An object is used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// Times are in nanoseconds of the journal's own clock (Event::time_ns).
struct Standing {
  SessionOpened who;
  SessionStatus status = SessionStatus::kLive;
  Lifecycle lifecycle = Lifecycle::kNew;
  std::uint64_t last_ns = 0;          // of the last event
  Bytes held = 0;                     // own device memory that is occupied now, that of pools too
  Bytes released = 0;                 // own device memory that a pause has given back
  std::vector<SessionId> peers;       // that it is connected with
  std::vector<SessionId> lost_peers;  // that it was connected with
  std::string trouble;                // why the rest is not known any more; empty: it is

  // A pause or resume that this session has come to and that has not ended here.
  struct Attempt {
    CycleKind kind{};
    std::uint64_t number = 0;  // of the pause, as this session counts
    bool begun = false;        // all had come
    std::uint64_t arrived_ns = 0;
    std::vector<SessionId> members;  // empty until it has begun
    std::vector<PhaseKind> phases;   // taken so far, those of an undo too; the last is the current one
    bool decided = false;            // the vote after the current phase is known
    bool voted = false;              // this session has voted on the current phase
    bool undoing = false;            // a vote failed
    std::uint64_t steps_done = 0;    // of the current phase
    std::uint64_t steps_left = 0;    // likewise, as the plan has it; what is under way counts as left
    std::optional<Step> step;        // that is under way
    [[nodiscard]] bool waits() const { return !begun || voted || (!decided && !phases.empty() && !step && steps_left == 0); }
  };
  std::optional<Attempt> attempt;
  std::uint64_t since_ns = 0;  // since when it does what it does: that step, waiting, running, being paused

  // The last one that ended.
  std::optional<CycleKind> ended_kind;
  std::uint64_t ended_number = 0, ended_ns = 0;
  std::string failure;  // empty: it was done
};

// Follows the events of one session.
class StandingBuilder {
 public:
  // `before` is the state that the first event follows.
  void Begin(State before);
  // In order. An event that cannot follow ends what is known: see Standing::trouble.
  void Take(const Event& event);
  // How things stand after the last event. Plans what is left of an open phase, so it takes longer with many allocations.
  [[nodiscard]] Standing Now(SessionStatus status) const;
  [[nodiscard]] SequenceNumber last() const { return state_.last; }

 private:
  void Follow(const Event& event);
  void OnPhase(const PhaseBegun& begun, const Event& event);
  void End(const Event& event, CycleKind kind, std::uint64_t number, const std::string& failure);

  State state_;
  Standing standing_;
};

// For each of them the sessions that it waits for, by id; empty where it waits for nobody. A session waits when it has done its
// part of a phase; then for the members that have not done theirs, or, before the beginning, for the sessions that it is
// connected with, directly or through others, and that have not come.
std::vector<std::vector<SessionId>> WhoWaitsForWhom(std::span<const Standing> sessions);

}  // namespace amem
