// The story of a job: which attempts of its sessions are one pause or resume, and what the last ones moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "replay/job/story/story.h"

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

}  // namespace amem
