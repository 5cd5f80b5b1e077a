// The fold: every observer sees the same events, and the same end of what makes sense.
#include "replay/job/fold.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "replay/job/story/story.h"
#include "statemachine/apply.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/replay/job/scripted_journal.h"

namespace amem {
namespace {

using test::MemoryReader;
using test::Story;
using Kind = Folded::Break::Kind;

class Recorder final : public FoldObserver {
 public:
  explicit Recorder(bool reads_on = false) : reads_on_(reads_on) {}
  void Begin(const State& before) override { began_with = before.last.value; }
  void Before(const Event& event, const State& before) override {
    EXPECT_EQ(before.last.value + 1, event.seq.value);
    seen.push_back(event.seq.value);
  }
  Status After(const Event& event, const State& after) override {
    EXPECT_EQ(after.last, event.seq);
    followed.push_back(event.seq.value);
    return event.seq.value == refuses ? Status{Code::kInvalid, "not like this"} : Status{};
  }
  bool Behind(const Event& event) override {
    behind.push_back(event.seq.value);
    return reads_on_;
  }

  std::uint64_t refuses = 0, began_with = 99;
  std::vector<std::uint64_t> seen, followed, behind;

 private:
  bool reads_on_;
};

using Numbers = std::vector<std::uint64_t>;

// Six events: the opening, and five allocations.
class Fold : public ::testing::Test {
 protected:
  Fold() {
    for (int i = 0; i < 5; ++i) story_.Create();
  }
  Folded Run(std::vector<FoldObserver*> observers) {
    MemoryReader reader(story_.events(), story_.id(), SessionStatus::kClosed);
    reader.report = report_;
    reader.beginning = beginning_;
    reader.no_beginning = no_beginning_;
    Result<Folded> folded = FoldJournal(reader, observers);
    EXPECT_TRUE(folded.ok()) << folded.status().message();
    return *std::move(folded);
  }

  std::uint64_t clock_ = 1'000'000'000;
  Story story_{0x51, 3, &clock_};
  ReadReport report_;
  State beginning_;
  Status no_beginning_;
  Recorder observer_;
};

TEST_F(Fold, of_a_sound_journal_shows_each_event_before_and_after) {
  Recorder other;
  const Folded folded = Run({&observer_, &other});
  EXPECT_FALSE(folded.broken);
  EXPECT_EQ(folded.events, 6U);
  EXPECT_EQ(folded.last_ns, clock_);
  EXPECT_EQ(folded.state.allocations.size(), 5U);
  EXPECT_EQ(observer_.followed, (Numbers{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(observer_.seen, other.seen);
  EXPECT_EQ(observer_.began_with, 0U);
}

TEST_F(Fold, goes_on_from_the_snapshot_where_older_events_are_gone) {
  for (std::size_t i = 0; i < 3; ++i) ASSERT_TRUE(Apply(beginning_, story_.events()[i]).ok());
  story_.events().erase(story_.events().begin(), story_.events().begin() + 3);
  const Folded folded = Run({&observer_});
  EXPECT_FALSE(folded.broken) << ToText(*folded.broken);
  EXPECT_EQ(observer_.began_with, 3U);
  EXPECT_EQ(observer_.followed, (Numbers{4, 5, 6}));
  EXPECT_EQ(folded.state.allocations.size(), 5U);
}

TEST_F(Fold, without_its_beginning_has_no_state) {
  no_beginning_ = Status{Code::kCorrupt, "a torn page"};
  story_.events().erase(story_.events().begin(), story_.events().begin() + 3);
  Recorder reads_on(true);
  const Folded folded = Run({&observer_, &reads_on});
  ASSERT_TRUE(folded.broken);
  EXPECT_EQ(folded.broken->kind, Kind::kBeginning);
  EXPECT_EQ(ToText(*folded.broken), "the journal begins with event 4, and the state before it cannot be read: a torn page");
  EXPECT_EQ(reads_on.behind, (Numbers{4, 5, 6}));
  EXPECT_EQ(folded.events, 0U);
}

TEST_F(Fold, breaks_at_a_gap_and_shows_what_lies_behind_to_those_who_want_it) {
  story_.events().erase(story_.events().begin() + 2, story_.events().begin() + 4);
  Recorder reads_on(true);
  const Folded folded = Run({&observer_, &reads_on});
  ASSERT_TRUE(folded.broken);
  EXPECT_EQ(folded.broken->kind, Kind::kSequence);
  EXPECT_EQ(folded.broken->at.value, 5U);
  EXPECT_EQ(ToText(*folded.broken), "events 3 to 4 are missing");
  EXPECT_EQ(reads_on.followed, (Numbers{1, 2}));
  EXPECT_EQ(reads_on.behind, (Numbers{5, 6}));
  EXPECT_EQ(folded.state.last.value, 2U);

  Recorder alone;
  Run({&alone});
  EXPECT_EQ(alone.behind, (Numbers{5})) << "reading ends when nobody wants more";
}

TEST_F(Fold, a_gap_of_one_event_is_named_as_one) {
  story_.events().erase(story_.events().begin() + 2);
  EXPECT_EQ(ToText(*Run({&observer_}).broken), "event 3 is missing");
}

TEST_F(Fold, breaks_at_an_event_that_comes_twice) {
  story_.events().insert(story_.events().begin() + 3, story_.events()[1]);
  const Folded folded = Run({&observer_});
  ASSERT_TRUE(folded.broken);
  EXPECT_EQ(folded.broken->kind, Kind::kSequence);
  EXPECT_EQ(ToText(*folded.broken), "event 2 comes where 4 was expected");
}

TEST_F(Fold, breaks_at_an_event_that_cannot_follow) {
  story_.events()[3].body = AllocationReleased{.allocation = AllocationId{77}};
  const Folded folded = Run({&observer_});
  ASSERT_TRUE(folded.broken);
  EXPECT_EQ(folded.broken->kind, Kind::kOrder);
  EXPECT_EQ(folded.broken->at.value, 4U);
  EXPECT_NE(ToText(*folded.broken).find("event 4 does not fit what came before it: allocation released: allocation 77"),
            std::string::npos)
      << ToText(*folded.broken);
  EXPECT_EQ(observer_.seen, (Numbers{1, 2, 3, 4}));
  EXPECT_EQ(observer_.followed, (Numbers{1, 2, 3}));
}

TEST_F(Fold, breaks_where_an_observer_finds_the_state_impossible) {
  observer_.refuses = 3;
  Recorder other;
  const Folded folded = Run({&observer_, &other});
  ASSERT_TRUE(folded.broken);
  EXPECT_EQ(folded.broken->kind, Kind::kState);
  EXPECT_EQ(ToText(*folded.broken), "event 3 left an impossible state: not like this");
  EXPECT_EQ(other.followed, (Numbers{1, 2, 3})) << "the others see that event, too";
}

TEST_F(Fold, tells_of_damage_once) {
  report_.corrupt_records = 2;
  report_.corruption = "event 3: 17 bytes";
  const Folded folded = Run({&observer_});
  EXPECT_EQ(DamageText(folded.damage), "2 damaged records were left out: event 3: 17 bytes");
  EXPECT_EQ(DamageText({}), "");
}

// What pauses did behind damage is still known; behind a wrong order nothing is believed.
TEST_F(Fold, history_reads_on_behind_damage_and_not_behind_a_wrong_order) {
  story_.Then(PeerLost{.peer = SessionId{9}, .reason = kPeerDied});
  const std::uint64_t last = story_.events().back().seq.value;
  story_.events().erase(story_.events().begin() + 2);
  for (const bool damaged : {true, false}) {
    MemoryReader reader(story_.events(), story_.id(), SessionStatus::kClosed);
    reader.report.corrupt_records = damaged ? 1 : 0;
    const Result<SessionStory> history = ReadStory(reader);
    ASSERT_TRUE(history.ok()) << history.status().message();
    EXPECT_EQ(history->lost.size(), damaged ? 1U : 0U);
    EXPECT_EQ(history->last.seq.value, damaged ? last : 2U);
    EXPECT_EQ(history->findings.violations.size(), damaged ? 0U : 1U);
    EXPECT_EQ(history->first.seq.value, 1U);
    EXPECT_EQ(history->times.LastUpTo(~std::uint64_t{0})->seq, history->last.seq);
    EXPECT_EQ(history->times.LastUpTo(history->first.time_ns).has_value(), !damaged) << "without gaps";
  }
}

// Of a long journal every event of the end is known, and of what is older every so many.
TEST(EventTimes, answer_exactly_about_the_end_and_say_when_they_do_not) {
  EventTimes times;
  constexpr std::uint64_t kEvents = 300'000;
  for (std::uint64_t seq = 1; seq <= kEvents; ++seq) times.Add(SequenceNumber{seq}, seq * 10, 3);
  EXPECT_EQ(times.LastUpTo(kEvents * 10)->seq.value, kEvents);
  EXPECT_EQ(times.LastUpTo(kEvents * 10 - 5)->seq.value, kEvents - 1);
  EXPECT_TRUE(times.LastUpTo(kEvents * 10)->exact);
  const auto old = times.LastUpTo(50'005);
  ASSERT_TRUE(old.has_value());
  EXPECT_FALSE(old->exact);
  EXPECT_LE(old->seq.value, 5'000u);
  EXPECT_GE(old->seq.value, 4'900u);
  EXPECT_FALSE(times.LastUpTo(5).has_value());
}

}  // namespace
}  // namespace amem
