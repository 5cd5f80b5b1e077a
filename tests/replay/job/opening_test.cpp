// Who wrote a journal is known also when its first event is gone.
#include "replay/job/opening.h"

#include <gtest/gtest.h>

#include "statemachine/apply.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/replay/job/scripted_journal.h"

namespace amem {
namespace {

using test::MemoryReader;
using test::Story;

Opening Read(MemoryReader& reader) {
  const Result<Opening> opening = ReadOpening(reader);
  EXPECT_TRUE(opening.ok()) << opening.status().message();
  return *opening;
}

TEST(Opening, of_a_whole_journal_is_its_first_event) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x51, 3, &clock);
  story.Create();
  MemoryReader reader(story.events(), story.id(), SessionStatus::kClosed);
  const Opening opening = Read(reader);
  EXPECT_EQ(opening.who, std::get<SessionOpened>(story.events()[0].body));
  EXPECT_EQ(opening.before, State{});
  EXPECT_EQ(opening.first_ns, 1'001'000'000U);
  EXPECT_EQ(opening.last_ns, 1'002'000'000U);
}

TEST(Opening, of_a_journal_without_its_beginning_is_in_the_snapshot) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x51, 3, &clock);
  const SessionOpened opened = std::get<SessionOpened>(story.events()[0].body);
  for (int i = 0; i < 4; ++i) story.Create();
  State before;
  for (std::size_t i = 0; i < 3; ++i) ASSERT_TRUE(Apply(before, story.events()[i]).ok());
  MemoryReader reader({story.events().begin() + 3, story.events().end()}, story.id(), SessionStatus::kClosed);
  reader.beginning = before;
  const Opening opening = Read(reader);
  EXPECT_EQ(opening.who, opened);
  EXPECT_EQ(opening.before.last.value, 3U);
  EXPECT_EQ(opening.first_ns, story.events()[3].time_ns);
}

TEST(Opening, that_cannot_be_read_is_told_with_what_is_missing) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x51, 3, &clock);
  for (int i = 0; i < 4; ++i) story.Create();
  MemoryReader reader({story.events().begin() + 3, story.events().end()}, story.id(), SessionStatus::kClosed);
  reader.no_beginning = Status{Code::kCorrupt, "a torn page"};
  const Result<Opening> opening = ReadOpening(reader);
  EXPECT_EQ(opening.status().code(), Code::kCorrupt);
  EXPECT_EQ(opening.status().message(), "the journal begins with event 4, and the state before it cannot be read: a torn page");
}

TEST(Opening, that_was_never_written_is_filled_in_from_the_files) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x51, 3, &clock);
  story.Create();
  MemoryReader no_event({}, SessionId{0x51}, SessionStatus::kCrashed);
  const Opening none = Read(no_event);
  EXPECT_EQ(none.who.session, SessionId{0x51});
  EXPECT_EQ(none.first_ns, 0U);
  std::get<SessionOpened>(story.events()[0].body).monotonic_ns = 0;
  MemoryReader no_clock(story.events(), story.id(), SessionStatus::kClosed);
  EXPECT_EQ(Read(no_clock).who.monotonic_ns, story.events()[0].time_ns) << "relative times count from the first event";
}

}  // namespace
}  // namespace amem
