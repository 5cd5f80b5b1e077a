// Diagnoses of journals that are written event by event: what can hardly be played, and what must not be said.
#include "replay/diagnosis/diagnosis.h"

#include <gtest/gtest.h>

#include "tests/replay/diagnosis/scripted_cycles.h"

namespace amem {
namespace {

using test::CycleJob;
using test::History;
using test::Job;
using test::kMiB;
using test::kSecond;
using test::MemoryReader;
using test::Story;

const Step kQuiesce{StepKind::kQuiesce, {}, {}, 0, DeviceOrdinal{0}};

TEST(Diagnosis, a_live_job_that_waits_for_a_rank_names_it_and_since_when) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  const Verdict verdict = job.Live(40 * kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived);
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_TRUE(verdict.live);
  EXPECT_EQ(verdict.phase, PhaseKind::kPauseArrive);
  EXPECT_HAS(verdict.summary, "Rank 0 has been waiting for 40.0 s");
  EXPECT_HAS(verdict.summary, "the process lives");
}

TEST(Diagnosis, waiting_for_less_than_a_second_is_nothing) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  const Verdict verdict = job.Live(kSecond / 2);
  EXPECT_TRUE(verdict.healthy()) << verdict.summary;
  EXPECT_HAS(verdict.summary, "under way");
}

TEST(Diagnosis, a_live_job_that_waits_for_a_step_names_rank_step_and_allocation) {
  CycleJob job;
  for (Story* story : {&job.owner, &job.importer}) {
    job.Arrive(*story, CycleKind::kPause);
    job.Begin(*story, CycleKind::kPause);
    job.Work(*story, PhaseKind::kPauseArrive, {kQuiesce});
    job.Decide(*story, PhaseKind::kPauseArrive);
    job.Work(*story, PhaseKind::kPauseSave, {});
  }
  job.Decide(job.owner, PhaseKind::kPauseSave);
  job.Decide(job.importer, PhaseKind::kPauseSave);
  job.importer.Then(PhaseBegun{PhaseKind::kPauseReleaseOwn});
  const Step unmap{StepKind::kUnmap, job.imported, job.place, 2 * kMiB, DeviceOrdinal{0}};
  const SequenceNumber begun = job.importer.Then(StepBegun{unmap});
  job.owner.Then(PhaseBegun{PhaseKind::kPauseReleaseOwn});
  for (const StepKind kind : {StepKind::kSave, StepKind::kUnmap, StepKind::kReleaseOwn}) {
    const Step step{
        kind, job.shared, kind == StepKind::kReleaseOwn ? Address{} : Address{0x7f0000000000 + 0x10000000}, 2 * kMiB, {}};
    job.owner.Then(StepBegun{step});
    job.owner.Then(StepDone{step});
  }
  const Verdict verdict = job.Live(12 * kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, unmap);
  EXPECT_EQ(verdict.allocation, job.imported);
  EXPECT_EQ(verdict.bytes, 2 * kMiB);
  EXPECT_EQ(verdict.seq, begun);
  EXPECT_HAS(verdict.summary, "it had begun, and not finished, \"unmap allocation 1");
  EXPECT_HAS(verdict.summary, "Rank 0 waits for it.");
}

TEST(Diagnosis, a_rank_that_is_slow_is_not_blamed_while_it_moves) {
  CycleJob job;
  for (Story* story : {&job.owner, &job.importer}) {
    job.Arrive(*story, CycleKind::kPause);
    job.Begin(*story, CycleKind::kPause);
  }
  job.Work(job.owner, PhaseKind::kPauseArrive, {kQuiesce});
  job.clock += 30 * kSecond;
  job.Work(job.importer, PhaseKind::kPauseArrive, {kQuiesce});
  EXPECT_TRUE(job.Live(kSecond / 10).healthy());
}

// The process that a launcher kills after another one failed is no cause.
TEST(Diagnosis, of_a_failed_step_and_later_deaths_the_step_is_the_cause) {
  CycleJob job;
  for (Story* story : {&job.owner, &job.importer}) {
    job.Arrive(*story, CycleKind::kPause);
    job.Begin(*story, CycleKind::kPause);
  }
  const Step quiesce = kQuiesce;
  job.importer.Then(PhaseBegun{PhaseKind::kPauseArrive});
  job.importer.Then(StepBegun{quiesce});
  job.importer.Then(StepFailed{quiesce, Code::kDriver, 700, "quiesce device 0: an illegal memory access was encountered"});
  job.importer.Then(PhaseDecided{PhaseKind::kPauseArrive, false, job.importer.id(), "rank 1 failed"});
  job.Work(job.owner, PhaseKind::kPauseArrive, {kQuiesce});
  job.owner.Then(PhaseDecided{PhaseKind::kPauseArrive, false, job.importer.id(), "rank 1 failed"});
  job.owner.Then(PeerLost{job.importer.id(), "died"});
  const std::vector<SessionStory> journals = {History(job.owner, SessionStatus::kCrashed),
                                              History(job.importer, SessionStatus::kCrashed)};
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.driver_result, 700);
  EXPECT_EQ(verdict.phase, PhaseKind::kPauseArrive);
  EXPECT_HAS(verdict.summary, "CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_EQ(verdict.remedy.action, Remedy::Action::kRestartProcess);
}

// The driver takes down the memory of a killed process before its locks are gone.
TEST(Diagnosis, a_process_that_others_saw_die_counts_as_dead_and_one_that_wrote_after_it_does_not) {
  CycleJob job;
  for (Story* story : {&job.owner, &job.importer}) {
    job.Arrive(*story, CycleKind::kPause);
    job.Begin(*story, CycleKind::kPause);
  }
  job.importer.Then(PhaseBegun{PhaseKind::kPauseArrive});
  job.importer.Then(StepBegun{kQuiesce});
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  const auto read = [&] {
    std::vector<SessionStory> journals = {History(job.owner, SessionStatus::kLive, job.clock),
                                          History(job.importer, SessionStatus::kLive, job.clock)};
    CountTheDying(journals);
    return journals;
  };
  const std::vector<SessionStory> journals = read();
  EXPECT_FALSE(journals[0].dying);
  EXPECT_TRUE(journals[1].dying);
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_HAS(verdict.summary, "still being taken down");
  job.importer.Then(StepDone{kQuiesce});
  EXPECT_FALSE(read()[1].dying);
}

TEST(Diagnosis, a_job_killed_while_it_waited_for_a_rank_names_that_rank) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  const std::vector<SessionStory> journals = {History(job.owner, SessionStatus::kCrashed),
                                              History(job.importer, SessionStatus::kCrashed)};
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
}

TEST(Diagnosis, a_reference_that_only_one_side_has_is_found) {
  Job job;
  job.Share();
  std::vector<Event>& events = job.owner.events();
  std::erase_if(events, [](const Event& e) { return std::holds_alternative<ReferenceAdded>(e.body); });
  for (std::size_t i = 0; i < events.size(); ++i) events[i].seq = SequenceNumber{i + 1};
  job.Close();
  const std::vector<SessionStory> journals = {History(job.owner, SessionStatus::kClosed),
                                              History(job.importer, SessionStatus::kClosed)};
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kReferences);
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_HAS(verdict.summary, "no reference added");
}

TEST(Diagnosis, a_failure_that_was_overcome_is_a_note_of_a_healthy_job) {
  Job job;
  job.Share();
  for (Story* story : {&job.owner, &job.importer}) {
    story->Then(PhaseBegun{PhaseKind::kPauseArrive});
    story->Then(CycleFailed{CycleKind::kPause, 1, true, "waited 600 ms for rank 1 to come"});
  }
  Story alone(0x5, 7, &job.clock);
  alone.Then(PhaseBegun{PhaseKind::kPauseArrive});
  alone.Then(CycleFailed{CycleKind::kPause, 1, true, "waited 600 ms for rank 1 to come"});
  alone.Then(PhaseBegun{PhaseKind::kPauseArrive});
  alone.Then(CycleBegun{CycleKind::kPause, 1, {alone.id()}});
  alone.Then(CycleDone{CycleKind::kPause, 1, 1000});
  const std::vector<SessionStory> journals = {History(alone, SessionStatus::kLive)};
  const Verdict verdict = Diagnose(journals);
  EXPECT_TRUE(verdict.healthy()) << verdict.summary;
  ASSERT_EQ(verdict.notes.size(), 1U);
  EXPECT_HAS(verdict.notes[0], "overcome");
}

TEST(Diagnosis, what_was_damaged_is_said_and_does_not_hide_the_rest) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "waited 600 ms for rank 1 (pid 1001 on host alpha) to come"});
  MemoryReader damaged(job.importer.events(), job.importer.id(), SessionStatus::kClosed);
  damaged.report = {.corrupt_records = 1, .corruption = "event 7 is damaged: 32 bytes dropped"};
  std::vector<SessionStory> journals = {History(job.owner, SessionStatus::kClosed)};
  Result<SessionStory> history = ReadStory(damaged);
  ASSERT_TRUE(history.ok());
  journals.push_back(*std::move(history));
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived);
  ASSERT_EQ(verdict.damage.size(), 1U);
  EXPECT_HAS(verdict.damage[0], "event 7 is damaged");
}

}  // namespace
}  // namespace amem
