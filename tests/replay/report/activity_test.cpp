// Standings: what `amem-replay watch` shows of sessions that are in a pause or resume.
#include "replay/report/activity.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/replay/diagnosis/scripted_cycles.h"
#include "tests/replay/report/activity_after.h"

namespace amem {
namespace {

SessionActivity ActivityOf(test::Story& story, SessionStatus status = SessionStatus::kLive) {
  return test::ActivityAfter(story.events(), status);
}

class ActivityInCycle : public ::testing::Test {
 protected:
  JobPicture Picture(SessionStatus importer_is = SessionStatus::kLive, SessionStatus owner_is = SessionStatus::kLive) {
    return {{ActivityOf(job_.owner, owner_is), ActivityOf(job_.importer, importer_is)},
            ThisHost{"boot-1", job_.clock + 3 * test::kSecond}};
  }
  using Late = std::vector<SessionId>;
  test::CycleJob job_;
};

TEST_F(ActivityInCycle, a_running_session_waits_for_nobody) {
  const SessionActivity now = ActivityOf(job_.owner);
  EXPECT_EQ(now.lifecycle, Lifecycle::kRunning);
  EXPECT_FALSE(now.attempt);
  EXPECT_EQ(now.held, 2 * test::kMiB);
  EXPECT_EQ(now.released, 0U);
  const JobPicture picture = Picture();
  EXPECT_EQ(picture.waits_for, (std::vector<Late>{{}, {}}));
}

TEST_F(ActivityInCycle, who_has_come_waits_for_those_it_shares_memory_with) {
  job_.Arrive(job_.owner, CycleKind::kPause);
  const JobPicture picture = Picture();
  EXPECT_EQ(picture.waits_for, (std::vector<Late>{{job_.importer.id()}, {}}));
  EXPECT_EQ(ActivitySentence(picture, 0, true), "rank 0: running, pause 1, has come, waits for rank 1");
  EXPECT_EQ(Picture(SessionStatus::kClosed).waits_for[0], Late{}) << "a session that left in order is not waited for";
}

TEST_F(ActivityInCycle, who_has_not_paused_yet_runs_since_the_session_began) {
  EXPECT_NE(job_.owner.events().front().time_ns, job_.owner.events().back().time_ns);
  EXPECT_EQ(ActivityOf(job_.owner).since_ns, job_.owner.events().front().time_ns);
}

TEST_F(ActivityInCycle, the_steps_of_a_phase_are_counted_and_the_one_under_way_is_left) {
  job_.BeginAll(CycleKind::kPause);
  const std::size_t planned = test::PlannedSteps(job_.owner, PhaseKind::kPauseSave).size();
  job_.WorkInto(job_.owner, PhaseKind::kPauseSave, StepKind::kScan);
  const SessionActivity now = ActivityOf(job_.owner);
  ASSERT_TRUE(now.attempt);
  EXPECT_TRUE(now.attempt->begun);
  EXPECT_EQ(now.progress.steps_done + now.progress.steps_left, planned);
  EXPECT_GE(now.progress.steps_left, 1U);
  ASSERT_TRUE(now.progress.open_step.has_value());
  EXPECT_EQ(now.progress.open_step->kind, StepKind::kScan);
  EXPECT_FALSE(now.progress.waits());
  EXPECT_EQ(now.since_ns, job_.owner.events().back().time_ns);
}

TEST_F(ActivityInCycle, who_is_through_waits_for_the_member_that_is_not) {
  job_.BeginAll(CycleKind::kPause);
  job_.WorkInto(job_.owner, PhaseKind::kPauseSave, StepKind::kScan);
  job_.Work(job_.importer, PhaseKind::kPauseSave);
  EXPECT_EQ(Picture().waits_for, (std::vector<Late>{{}, {job_.owner.id()}}))
      << "no vote is recorded: the plan has nothing left";
  job_.importer.Then(VoteCast{.phase = PhaseKind::kPauseSave});
  const JobPicture picture = Picture();
  EXPECT_EQ(picture.waits_for, (std::vector<Late>{{}, {job_.owner.id()}}));
  EXPECT_EQ(picture.waited_for_by.at(job_.owner.id()), 1U);
  EXPECT_TRUE(test::Has(ActivitySentence(picture, 1, false), "rank 1: pausing, pause 1, save, waits for rank 0"));
}

TEST_F(ActivityInCycle, a_member_that_is_a_phase_ahead_has_done_its_part_of_the_one_before) {
  job_.BeginAll(CycleKind::kPause);
  for (test::Story* story : {&job_.owner, &job_.importer}) job_.Work(*story, PhaseKind::kPauseSave);
  job_.Decide(job_.importer, PhaseKind::kPauseSave);
  job_.Work(job_.importer, PhaseKind::kPauseDropImports);
  EXPECT_EQ(Picture().waits_for, (std::vector<Late>{{}, {job_.owner.id()}}));
}

TEST_F(ActivityInCycle, of_many_that_are_waited_for_the_lowest_ranks_are_named) {
  job_.Arrive(job_.owner, CycleKind::kPause);
  std::vector<SessionActivity> all = {ActivityOf(job_.owner)};
  for (std::uint64_t i = 1; i <= 8; ++i) {  // sessions in the other order than ranks
    all.push_back(ActivityOf(job_.importer));
    all.back().who.session = SessionId{100 - i};
    all.back().who.rank = static_cast<std::int32_t>(i);
    all.back().peers = {job_.owner.id()};
  }
  EXPECT_HAS(ActivitySentence({all, ThisHost{}}, 0, false),
             "waits for rank 1, rank 2, rank 3, rank 4, rank 5, rank 6 and 2 more");
}

TEST_F(ActivityInCycle, a_member_that_died_is_waited_for_until_its_death_is_told) {
  job_.BeginAll(CycleKind::kPause);
  job_.Work(job_.importer, PhaseKind::kPauseSave);
  job_.WorkInto(job_.owner, PhaseKind::kPauseSave, StepKind::kScan);
  const JobPicture picture = Picture(SessionStatus::kLive, SessionStatus::kCrashed);
  EXPECT_EQ(picture.waits_for, (std::vector<Late>{{}, {job_.owner.id()}}));
  EXPECT_TRUE(test::Has(ActivitySentence(picture, 0, true), "rank 0: crashed"));
}

TEST_F(ActivityInCycle, an_undo_names_itself_and_what_failed_stays_until_the_next) {
  job_.BeginAll(CycleKind::kPause);
  job_.PhaseOfAll(PhaseKind::kPauseSave);
  job_.Work(job_.owner, PhaseKind::kPauseDropImports);
  job_.Decide(job_.owner, PhaseKind::kPauseDropImports, job_.importer.id(), "rank 1 failed");
  EXPECT_TRUE(ActivityOf(job_.owner).progress.undoing);
  job_.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 failed"});
  const SessionActivity now = ActivityOf(job_.owner);
  EXPECT_FALSE(now.attempt);
  EXPECT_EQ(now.failure(), "rank 1 failed");
  EXPECT_EQ(now.ended->cycle, 1U);
}

TEST_F(ActivityInCycle, a_long_failure_is_cut_between_characters) {
  std::string long_path;
  for (int i = 0; i < 200; ++i) long_path += "\u00e9";
  for (const char* before : {"", "/"}) {
    test::CycleJob job;
    job.BeginAll(CycleKind::kPause);
    job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, before + long_path});
    const JobPicture picture{{ActivityOf(job.owner), ActivityOf(job.importer)}, ThisHost{"boot-1", job.clock}};
    const std::string said = ActivitySentence(picture, 0, true);
    EXPECT_TRUE(said.ends_with("\u00e9 ...")) << said;
  }
}

TEST_F(ActivityInCycle, the_picture_has_a_cell_for_each_phase) {
  job_.BeginAll(CycleKind::kPause);
  job_.WorkInto(job_.owner, PhaseKind::kPauseSave, StepKind::kScan);
  job_.Work(job_.importer, PhaseKind::kPauseSave);
  const std::vector<std::string> lines = PictureLines(Picture());
  ASSERT_EQ(lines.size(), 3U);
  for (const char* head : {"RANK", "STATE", "arrive", "save", "release", "FOR", "HELD"}) EXPECT_HAS(lines[0], head);
  EXPECT_HAS(lines[1], "done");
  EXPECT_HAS(lines[1], "/");
  EXPECT_HAS(lines[1], "<- 1 waits for it");
  EXPECT_HAS(lines[2], "waits for rank 0");
  EXPECT_EQ(lines[1].find("done"), lines[2].find("done")) << "columns are aligned";
  for (const std::string& line : PictureLines(Picture(), {40, 0})) EXPECT_LE(line.size(), 40U);
}

TEST_F(ActivityInCycle, where_rows_do_not_fit_those_that_are_waited_for_stay) {
  std::vector<SessionActivity> many;
  for (std::uint64_t i = 0; i < 64; ++i) {
    SessionActivity s = ActivityOf(job_.owner);
    s.who.session = SessionId{100 + i};
    s.who.rank = static_cast<std::int32_t>(i);
    s.peers.clear();
    many.push_back(s);
  }
  many[50].status = SessionStatus::kCrashed;
  const std::vector<std::string> lines = PictureLines({many, ThisHost{}}, {120, 12});
  EXPECT_EQ(lines.size(), 12U);
  EXPECT_TRUE(lines[1].starts_with("rank 0 ")) << lines[1];
  EXPECT_TRUE(lines[lines.size() - 2].starts_with("rank 50 ")) << "in the order of the ranks: " << lines[lines.size() - 2];
  EXPECT_HAS(lines.back(), "54 more sessions");
}

TEST_F(ActivityInCycle, json_has_who_waits_for_whom_and_how_long) {
  job_.Arrive(job_.owner, CycleKind::kPause);
  const nlohmann::json json = nlohmann::json::parse(PictureJson(Picture(), 1'700'000'000'000'000'000).dump());
  const auto& owner = json["sessions"][0];
  EXPECT_EQ(owner["rank"], 0);
  EXPECT_EQ(owner["cycle"]["kind"], "pause");
  EXPECT_EQ(owner["cycle"]["waits"], true);
  EXPECT_EQ(owner["waits_for"], nlohmann::json::array({"0000000000000b0b"}));
  EXPECT_NEAR(owner["since_seconds"].get<double>(), 3.0, 0.01);
  EXPECT_EQ(json["sessions"][1]["cycle"], nullptr);
  EXPECT_TRUE(test::Has(json["at"], "2023-11-14 22:13:20"));
}

TEST_F(ActivityInCycle, an_event_that_cannot_follow_ends_what_is_known_and_says_so) {
  job_.owner.Then(Mapped{.address = Address{1}, .bytes = 1, .allocation = AllocationId{77}});
  EXPECT_TRUE(test::Has(ActivityOf(job_.owner).trouble, "does not fit"));
}

}  // namespace
}  // namespace amem
