// Progress: how far a session has come in an attempt that is open.
#include <gtest/gtest.h>

#include "replay/job/story/job_cycles.h"
#include "tests/replay/diagnosis/scripted_cycles.h"

namespace amem {
namespace {

using test::CycleJob;
using test::Story;

Progress Of(Story& story) { return ProgressOf(test::History(story, SessionStatus::kLive)); }

TEST(Progress, is_nothing_before_and_after_an_attempt) {
  CycleJob job;
  EXPECT_FALSE(Of(job.owner).since);
  job.Pause();
  EXPECT_FALSE(Of(job.owner).since);
  EXPECT_EQ(Of(job.owner).phase, std::nullopt);
}

TEST(Progress, of_a_session_that_waits_for_the_others_has_no_phase) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  const Progress progress = Of(job.owner);
  EXPECT_EQ(progress.phase, std::nullopt);
  EXPECT_FALSE(progress.did_its_part);
  EXPECT_EQ(progress.since.seq.value, job.owner.events().size());
}

TEST(Progress, counts_steps_and_names_the_open_one_or_the_next) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  job.PhaseOfAll(PhaseKind::kPauseArrive);
  job.PhaseOfAll(PhaseKind::kPauseSave);
  const std::vector<Step> planned = test::PlannedSteps(job.owner, PhaseKind::kPauseReleaseOwn);
  ASSERT_GE(planned.size(), 2u);
  job.Work(job.owner, PhaseKind::kPauseReleaseOwn, {planned[0]});
  Progress progress = Of(job.owner);
  EXPECT_EQ(progress.phase, PhaseKind::kPauseReleaseOwn);
  EXPECT_EQ(progress.steps_done, 1u);
  EXPECT_EQ(progress.steps_left, planned.size() - 1);
  EXPECT_EQ(progress.step(), planned[1]);
  EXPECT_FALSE(progress.open_step.has_value());
  const SequenceNumber begun = job.owner.Then(StepBegun{planned[1]});
  progress = Of(job.owner);
  EXPECT_EQ(progress.step(), planned[1]);
  EXPECT_TRUE(progress.open_step.has_value());
  EXPECT_EQ(progress.since.seq, begun);
  EXPECT_EQ(progress.steps_done, 1u);
  EXPECT_FALSE(progress.did_its_part);
}

// Waiting for a device is planned again whenever it is asked for.
TEST(Progress, does_not_ask_again_for_steps_that_only_the_count_shows_as_done) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  job.owner.Then(PhaseBegun{PhaseKind::kPauseArrive});
  EXPECT_EQ(Of(job.owner).steps_left, 1u);
  job.Work(job.importer, PhaseKind::kPauseArrive);
  const Progress progress = Of(job.importer);
  EXPECT_EQ(progress.steps_left, 0u);
  EXPECT_TRUE(progress.did_its_part);
  EXPECT_FALSE(progress.undoing);
}

TEST(Progress, after_a_vote_that_failed_is_that_of_the_undo) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  job.PhaseOfAll(PhaseKind::kPauseArrive);
  job.Work(job.owner, PhaseKind::kPauseSave);
  job.Decide(job.owner, PhaseKind::kPauseSave, job.importer.id(), "rank 1 failed");
  const Progress progress = Of(job.owner);
  EXPECT_TRUE(progress.undoing);
  EXPECT_EQ(progress.phase, PhaseKind::kPauseSave);
  EXPECT_TRUE(progress.did_its_part);
}

}  // namespace
}  // namespace amem
