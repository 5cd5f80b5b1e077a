// The story of a job: which attempts of its sessions are one pause or resume, and what the last ones moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "replay/job/story/story.h"
#include "statemachine/event.h"

namespace amem {

// A session's attempts, and what puts their times on the job's clock.
struct TimedStory {
  const SessionOpened* who = nullptr;
  std::int64_t offset_ns = 0;  // add to a time of that session
  std::uint64_t first_ns = 0, last_ns = 0;
  std::span<const Attempt> attempts;
};

// The same pause or resume in all sessions that took part: (session, attempt of it) by index.
struct JobCycle {
  CycleKind kind{};
  std::vector<std::pair<std::size_t, std::size_t>> parts;
  std::vector<SessionId> absent;  // members without a part of their own; if it never began, sessions that did not come
};
// By time.
std::vector<JobCycle> JoinAttempts(std::span<const TimedStory> sessions);

// Of the last pauses, where it is recorded: NCCL's first, then by tag.
std::vector<PauseContents> LastContents(std::span<const SessionStory> stories);

// ---- what a session does now in a pause or resume that is open

struct Progress {
  enum class Stage : std::uint8_t {
    kArriving = 0,  // waits for the others to join
    kBegun,         // all have come, and no phase has begun
    kWorking,       // in `phase`
    kVoted,         // on that phase
    kDecided,       // that phase, with this session's vote
    kDecidedEarly,  // that phase, before this session voted, or in a journal without votes
  };
  Stage stage = Stage::kArriving;
  bool undoing = false;
  bool did_its_part = false;       // it voted, or nothing is left to do in that phase: it waits for the others' votes
  std::optional<PhaseKind> phase;  // none: kArriving or kBegun
  std::uint64_t steps_done = 0, steps_left = 0;
  std::optional<Step> open_step;  // begun, and neither done nor failed
  std::optional<Step> next_step;  // of those left, where none is open
  Moment since;                   // of the last thing it recorded in this attempt

  [[nodiscard]] bool begun() const { return stage != Stage::kArriving; }
  [[nodiscard]] bool voted() const { return stage == Stage::kVoted || stage == Stage::kDecided; }
  [[nodiscard]] bool decided() const { return stage == Stage::kDecided || stage == Stage::kDecidedEarly; }
  // For the others: until all have come, or when its own part of a phase is done.
  [[nodiscard]] bool waits() const { return !begun() || voted() || (stage == Stage::kWorking && steps_left == 0); }
  [[nodiscard]] const std::optional<Step>& step() const { return open_step ? open_step : next_step; }
};
// Of its last attempt, or of the last one of the pool with that tag; nothing is set when that has ended.
Progress ProgressOf(const SessionStory& story, const std::string& tag = {});
// The same of that attempt of a session that goes on, in this state; null: it is not known.
Progress ProgressOf(const SessionStory& story, const Attempt& attempt, const State* state);

// A freeze that stands, in a sentence. `here`: its processes are this host's, and not those of a copy of their journals.
std::string TextOf(const FreezeStep& standing, bool here);

}  // namespace amem
