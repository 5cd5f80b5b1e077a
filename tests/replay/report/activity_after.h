// Where a session stands after some of its events.
#pragma once

#include <array>
#include <span>

#include "replay/report/activity.h"

namespace amem::test {

inline SessionActivity ActivityAfter(std::span<const Event> events, SessionStatus status) {
  Folded folded;
  SessionStory story;
  StoryBuilder builder(story);
  const std::array<FoldObserver*, 1> observers = {&builder};
  Folding folding(folded, observers);
  folding.Begin(State{});
  for (const Event& event : events) {
    if (!folded.broken) folding.Take(event);
  }
  return ActivityOf(folded, story, status);
}

}  // namespace amem::test
