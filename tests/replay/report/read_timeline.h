// A timeline by itself, without a verdict on the journal.
#pragma once

#include <array>

#include "replay/job/fold.h"
#include "replay/report/timeline.h"

namespace amem::test {

inline Result<SessionTimeline> ReadTimeline(JournalReader& reader, const TimelineLimits& limits) {
  SessionTimeline timeline;
  SessionStory story;
  StoryBuilder builder(story);
  const auto collector = CollectTimeline(timeline, limits, builder);
  AMEM_TRY(FoldJournal(reader, std::array<FoldObserver*, 2>{&builder, collector.get()}).status());
  return timeline;
}

}  // namespace amem::test
