// Names: one spelling for a session, wherever it is met.
#include "replay/job/names.h"

#include <gtest/gtest.h>

namespace amem {
namespace {

SessionOpened Rank(std::uint64_t session, std::int32_t rank, std::int32_t pid) {
  return {.session = SessionId{session}, .host = "a", .pid = pid, .rank = rank};
}

TEST(Names, tell_as_much_of_a_process_as_is_known) {
  EXPECT_EQ(NameOf(Rank(1, 2, 4711)), "rank 2 (pid 4711 on host a)");
  EXPECT_EQ(NameOf(Rank(1, -1, 4711)), "pid 4711 on host a");
  EXPECT_EQ(NameOf({.session = SessionId{0xc0ffee}, .pid = 4711}), "pid 4711");
  EXPECT_EQ(NameOf({.session = SessionId{0xc0ffee}}), "session 0000000000c0ffee");
  EXPECT_EQ(ShortNameOf(Rank(1, 0, 4711)), "rank 0");
  EXPECT_EQ(ShortNameOf(Rank(1, -1, 4711)), "pid 4711");
}

TEST(Names, of_a_communicator_tell_its_parent_where_that_is_known_by_a_number) {
  const Communicator child{.parent = CommunicatorId{1}, .how = "split", .hash = 0xabc, .ranks = 2};
  const auto of = [&](std::uint64_t hash) { return NameOf(CommunicatorId{2}, child, {{CommunicatorId{1}, {.hash = hash}}}); };
  EXPECT_EQ(of(0xdef), "0xabc, 2 ranks, split of 0xdef");
  EXPECT_EQ(of(0), "0xabc, 2 ranks, split");
  EXPECT_EQ(NameOf(CommunicatorId{2}, child, {}), "0xabc, 2 ranks, split");
}

TEST(Names, of_a_rank_are_short_while_one_session_has_it) {
  JobNames names;
  for (std::int32_t rank = 0; rank < 3; ++rank) names.Add(Rank(1 + static_cast<std::uint64_t>(rank), rank, 100 + rank));
  EXPECT_EQ(names.ShortName(SessionId{3}), "rank 2");
  EXPECT_EQ(names.Names({SessionId{3}, SessionId{1}, SessionId{2}}), "ranks 0, 1 and 2");
  names.Add(Rank(9, 2, 999));  // the same rank of another job
  EXPECT_EQ(names.ShortName(SessionId{3}), "rank 2 (pid 102 on host a)");
  EXPECT_EQ(names.ShortName(SessionId{9}), "rank 2 (pid 999 on host a)");
  EXPECT_EQ(names.Names({SessionId{3}, SessionId{1}}), "rank 0 and rank 2 (pid 102 on host a)");
}

TEST(Names, of_peers_are_known_from_those_who_met_them) {
  State state;
  state.peers[SessionId{7}] = {.host = "b", .pid = 12, .rank = 5};
  state.peers[SessionId{1}] = {.host = "hearsay", .pid = 1, .rank = 1};
  JobNames names;
  names.Add(Rank(1, 0, 100));
  names.AddPeersOf(state);
  EXPECT_EQ(names.Name(SessionId{7}), "rank 5 (pid 12 on host b)");
  EXPECT_EQ(names.RankOf(SessionId{7}), 5);
  EXPECT_EQ(names.Name(SessionId{1}), "rank 0 (pid 100 on host a)") << "its own word counts";
  EXPECT_EQ(names.ShortName(SessionId{8}), "session 0000000000000008");
  EXPECT_EQ(names.RankOf(SessionId{8}), -1);
}

TEST(Names, numbers_lists_and_times_are_for_people) {
  EXPECT_EQ(Grouped(999), "999");
  EXPECT_EQ(Grouped(1'234'567), "1 234 567");
  EXPECT_EQ(Plural(1, "mapping"), "1 mapping");
  EXPECT_EQ(Plural(12'345, "mapping"), "12 345 mappings");
  EXPECT_EQ(Plural(0, "process", "processes"), "0 processes");
  EXPECT_EQ(Listed({"a"}), "a");
  EXPECT_EQ(Listed({"a", "b", "c"}), "a, b and c");
  EXPECT_EQ(DurationText(45'000), "45 us");
  EXPECT_EQ(DurationText(45'000'000), "45 ms");
  EXPECT_EQ(DurationText(12'345'000'000), "12.3 s");
  EXPECT_EQ(DurationText(192'999'000'000), "3 min 12 s");
  ::setenv("TZ", "UTC", 1);
  ::tzset();
  EXPECT_EQ(WallText(1'700'000'000'042'000'000), "2023-11-14 22:13:20.042 UTC");
  EXPECT_EQ(DateText(1'700'000'000'042'000'000), "2023-11-14 22:13:20 UTC");
  EXPECT_EQ(WallText(0), "unknown time");
  EXPECT_EQ(DateText(0), "unknown");
}

TEST(Names, times_are_those_of_the_readers_zone) {
  ::setenv("TZ", "EST5", 1);
  ::tzset();
  EXPECT_EQ(WallText(1'700'000'000'042'000'000), "2023-11-14 17:13:20.042 -0500");
  EXPECT_EQ(DateText(1'700'000'000'042'000'000), "2023-11-14 17:13:20 -0500");
  EXPECT_EQ(PreciseText(1'700'000'000'042'000'000), "2023-11-14 17:13:20.042000");
  ::setenv("TZ", "UTC", 1);
  ::tzset();
}

TEST(Names, the_columns_of_a_table_are_as_wide_as_what_is_in_them) {
  EXPECT_EQ(TableLines({{"A", "LONG", "C"}, {"wide", "b"}, {}, {"", "", "c"}}),
            (std::vector<std::string>{"A     LONG  C", "wide  b", "", "            c"}));
}

TEST(Names, a_phase_of_the_other_direction_takes_back) {
  EXPECT_TRUE(IsUndo(PhaseKind::kPauseSave, CycleKind::kResume));
  EXPECT_TRUE(IsUndo(PhaseKind::kResumeOpen, CycleKind::kPause));
  EXPECT_FALSE(IsUndo(PhaseKind::kPauseGone, CycleKind::kPause));
  EXPECT_FALSE(IsUndo(PhaseKind::kResumeArrive, CycleKind::kResume));
}

}  // namespace
}  // namespace amem
