// Verdicts on pauses and resumes of pools, which concern one process each.
#include "tests/replay/diagnosis/scripted_cycles.h"
#include "tests/replay/job/scripted_pool.h"

namespace amem {
namespace {

using test::CycleJob;
using test::History;
using test::ScriptedPool;

struct PoolJob : CycleJob {
  ScriptedPool weights{owner, "weights"};
  PoolJob() {
    weights.Chunk();
    weights.Chunk(test::kMiB * 6);
  }
  Verdict Judge(SessionStatus status = SessionStatus::kLive) {
    std::vector<SessionStory> journals;
    journals.push_back(History(owner, status));
    journals.push_back(History(importer, SessionStatus::kLive));
    return Diagnose(journals);
  }
};

TEST(PoolVerdict, a_pool_that_pauses_and_resumes_is_healthy) {
  PoolJob job;
  job.weights.Run(CycleKind::kPause);
  EXPECT_TRUE(job.Judge().healthy());
  job.weights.Run(CycleKind::kResume);
  const Verdict verdict = job.Judge();
  EXPECT_TRUE(verdict.healthy()) << verdict.headline;
  EXPECT_EQ(verdict.totals.pauses, 0u) << "NCCL's only";
}

TEST(PoolVerdict, a_resume_that_failed_names_tag_rank_step_and_remedy) {
  PoolJob job;
  job.weights.Run(CycleKind::kPause);
  job.weights.Begin(CycleKind::kResume);
  const Step create = job.weights.Work(CycleKind::kResume, StepKind::kCreate, 2);
  job.weights.Fail(CycleKind::kResume, create, Code::kOutOfMemory, "create allocation 3: out of memory");
  const Verdict verdict = job.Judge();
  EXPECT_EQ(verdict.kind, VerdictKind::kOutOfMemory);
  EXPECT_EQ(verdict.tag, "weights");
  EXPECT_EQ(verdict.rank, 0);
  ASSERT_TRUE(verdict.step.has_value());
  EXPECT_EQ(verdict.step->kind, StepKind::kCreate);
  EXPECT_EQ(verdict.bytes, 6 * test::kMiB);
  EXPECT_EQ(verdict.remedy.action, Remedy::Action::kFreeMemory);
  EXPECT_EQ(verdict.remedy.bytes, 6 * test::kMiB) << "what had come back by then does not count";
  EXPECT_HAS(verdict.headline, "Resume 1 of tag weights failed on rank 0");
  EXPECT_HAS(verdict.summary, "Tag weights is paused there now, with its contents kept.");
  EXPECT_HAS(ToText(verdict.remedy), "call amem_resume for weights again");
  EXPECT_FALSE(test::Has(ToText(verdict.remedy), "all ranks")) << ToText(verdict.remedy);
}

TEST(PoolVerdict, a_pause_of_shared_memory_that_a_rank_does_not_join_names_that_rank) {
  PoolJob job;
  const PoolId pool{1};
  job.owner.Then(PhaseBegun{.phase = PhaseKind::kPauseArrive, .pool = pool});
  job.clock += 10 * test::kSecond;
  job.owner.Then(CycleFailed{.kind = CycleKind::kPause,
                             .cycle = 1,
                             .message = "waited 10000 ms for rank 1",
                             .code = Code::kTimeout,
                             .culprits = {{job.importer.id(), 1, 1001, "alpha"}},
                             .pool = pool});
  const Verdict verdict = job.Judge();
  EXPECT_EQ(verdict.kind, VerdictKind::kRefused) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  EXPECT_EQ(verdict.tag, "weights");
  EXPECT_EQ(verdict.headline, "Pause 1 of tag weights could not begin without rank 1");
  EXPECT_HAS(ToText(verdict.remedy), "call amem_pause for weights on every rank that shares memory");
}

TEST(PoolVerdict, a_try_that_worked_afterwards_is_no_longer_wrong) {
  PoolJob job;
  job.weights.Run(CycleKind::kPause);
  job.weights.Begin(CycleKind::kResume);
  const Step create = job.weights.Work(CycleKind::kResume, StepKind::kCreate);
  job.weights.Fail(CycleKind::kResume, create, Code::kOutOfMemory, "out of memory");
  job.weights.Run(CycleKind::kResume);
  EXPECT_TRUE(job.Judge().healthy());
}

TEST(PoolVerdict, a_pause_that_lacks_host_memory_says_so) {
  PoolJob job;
  job.weights.Begin(CycleKind::kPause);
  const Step scan = job.weights.Work(CycleKind::kPause, StepKind::kScan);
  job.weights.Fail(CycleKind::kPause, scan, Code::kOutOfMemory, "pinned host memory: out of memory");
  const Verdict verdict = job.Judge();
  EXPECT_EQ(verdict.kind, VerdictKind::kOutOfMemory);
  EXPECT_EQ(verdict.remedy.action, Remedy::Action::kFreeHostMemory);
  EXPECT_HAS(verdict.summary, "Tag weights is running there now.");
}

TEST(PoolVerdict, a_failure_without_a_step_is_told_by_its_message) {
  PoolJob job;
  job.weights.Begin(CycleKind::kPause);
  job.owner.Then(CycleFailed{.kind = CycleKind::kPause,
                             .cycle = 1,
                             .message = "the stream is being captured",
                             .code = Code::kRefused,
                             .pool = job.weights.id()});
  const Verdict verdict = job.Judge();
  EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed);
  EXPECT_EQ(verdict.tag, "weights");
  EXPECT_HAS(verdict.summary, "the stream is being captured");
}

TEST(PoolVerdict, a_journal_that_ends_in_the_middle_of_a_resume_names_tag_and_step) {
  PoolJob job;
  job.weights.Run(CycleKind::kPause);
  job.weights.Begin(CycleKind::kResume);
  job.weights.Work(CycleKind::kResume, StepKind::kMap);
  job.clock += test::kSecond;
  job.importer.Then(PeerConnected{.peer = job.owner.id(), .host = "alpha", .pid = 1000, .group = 7, .rank = 0});
  job.importer.Then(PeerLost{.peer = job.owner.id(), .reason = kPeerDied});
  const Verdict verdict = job.Judge(SessionStatus::kCrashed);
  EXPECT_EQ(verdict.kind, VerdictKind::kDied);
  EXPECT_EQ(verdict.tag, "weights");
  EXPECT_EQ(verdict.rank, 0);
  ASSERT_TRUE(verdict.step.has_value());
  EXPECT_EQ(verdict.step->kind, StepKind::kMap);
  EXPECT_HAS(verdict.headline, "in the middle of resume 1 of tag weights");
  EXPECT_EQ(verdict.remedy.outlook, Remedy::Outlook::kUnsaid) << "the others do not need its tensors";
}

TEST(PoolVerdict, a_failure_of_nccls_own_is_more_than_one_of_a_pool) {
  PoolJob job;
  job.weights.Begin(CycleKind::kPause);
  const Step scan = job.weights.Work(CycleKind::kPause, StepKind::kScan);
  job.weights.Fail(CycleKind::kPause, scan, Code::kOutOfMemory, "pinned host memory: out of memory");
  job.BeginAll(CycleKind::kPause);
  job.PhaseOfAll(PhaseKind::kPauseArrive);
  const Step save = job.WorkInto(job.owner, PhaseKind::kPauseSave, StepKind::kScan);
  job.owner.Then(StepFailed{.step = save, .code = Code::kDriver, .driver_result = 700, .message = "illegal address"});
  job.owner.Then(CycleFailed{.kind = CycleKind::kPause, .cycle = 1, .message = "illegal address", .code = Code::kDriver});
  const Verdict verdict = job.Judge();
  EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed) << verdict.headline;
  EXPECT_EQ(verdict.tag, "");
  ASSERT_GE(verdict.causes.size(), 2u) << "the pool's is still told";
}

TEST(PoolVerdict, a_pause_that_hangs_names_rank_tag_phase_object_and_remedy) {
  PoolJob job;
  job.weights.Begin(CycleKind::kPause);
  const Step unmap = job.weights.Work(CycleKind::kPause, StepKind::kUnmap, 2);
  EXPECT_TRUE(job.Judge().healthy()) << "it has just begun";
  const Verdict verdict = job.CycleJob::Judge(SessionStatus::kLive, SessionStatus::kLive, 3 * test::kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled);
  EXPECT_EQ(verdict.tag, "weights");
  EXPECT_EQ(verdict.rank, 0);
  EXPECT_EQ(verdict.phase, PhaseKind::kPauseReleaseOwn);
  ASSERT_TRUE(verdict.step.has_value());
  EXPECT_EQ(*verdict.step, unmap);
  EXPECT_EQ(verdict.allocation, unmap.allocation);
  EXPECT_EQ(verdict.bytes, 6 * test::kMiB);
  EXPECT_EQ(verdict.remedy.action, Remedy::Action::kExamineProcess);
  EXPECT_HAS(verdict.headline, "Pause 1 of tag weights hangs on rank 0, which is at the step \"unmap");
  EXPECT_HAS(verdict.summary, "Nothing of it has been recorded since");
  EXPECT_HAS(ToText(verdict.remedy), "gdb -p 1000");
  EXPECT_HAS(ToText(verdict.remedy), "amem-pool-out");
  EXPECT_FALSE(test::Has(verdict.summary, "others")) << verdict.summary;
  EXPECT_FALSE(test::Has(ToText(verdict.remedy), "AMEM_TIMEOUT_MS")) << "which does not bound what hangs here";
}

TEST(PoolVerdict, all_ranks_that_hang_in_the_pause_of_a_tag_are_named) {
  PoolJob job;
  ScriptedPool of_importer{job.importer, "weights"};
  of_importer.Chunk();
  for (ScriptedPool* pool : {&job.weights, &of_importer}) {
    pool->Begin(CycleKind::kPause);
    pool->Work(CycleKind::kPause, StepKind::kQuiesce);
  }
  const Verdict verdict = job.CycleJob::Judge(SessionStatus::kLive, SessionStatus::kLive, 3 * test::kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled);
  EXPECT_EQ(verdict.ranks, (std::vector<std::int32_t>{0, 1}));
  EXPECT_HAS(verdict.headline, "hangs on ranks 0 and 1");
  EXPECT_EQ(verdict.remedy.process, "ranks 0 and 1");
}

TEST(PoolVerdict, what_others_record_meanwhile_is_no_progress_of_a_pool) {
  PoolJob job;
  job.weights.Begin(CycleKind::kPause);
  job.owner.Then(PhaseBegun{.phase = PhaseKind::kPauseArrive, .pool = job.weights.id()});
  job.clock += 3 * test::kSecond;
  job.owner.Create();  // NCCL goes on
  const Verdict verdict = job.CycleJob::Judge(SessionStatus::kLive, SessionStatus::kLive, 1);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.headline;
  EXPECT_EQ(verdict.phase, PhaseKind::kPauseArrive);
  ASSERT_FALSE(verdict.evidence.empty());
  EXPECT_HAS(verdict.evidence.back().text, "nothing about pause 1 of tag weights after it");
}

TEST(PoolVerdict, a_resume_that_hangs_keeps_those_that_nobody_waits_for) {
  PoolJob job;
  ScriptedPool cache{job.owner, "cache"};
  cache.Chunk();
  for (ScriptedPool* pool : {&job.weights, &cache}) pool->Run(CycleKind::kPause);
  job.weights.Begin(CycleKind::kResume);
  job.weights.Work(CycleKind::kResume, StepKind::kCreate);
  const Verdict verdict = job.CycleJob::Judge(SessionStatus::kLive, SessionStatus::kLive, 3 * test::kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled);
  EXPECT_EQ(verdict.tag, "weights");
  EXPECT_HAS(verdict.headline, "Resume 1 of tag weights hangs on rank 0");
  EXPECT_HAS(verdict.summary, "Tag cache of the same process is not resident either");
}

TEST(PoolVerdict, a_stopped_process_is_to_be_continued) {
  PoolJob job;
  job.weights.Begin(CycleKind::kPause);
  job.weights.Work(CycleKind::kPause, StepKind::kUnmap);
  std::vector<SessionStory> journals = job.Read(SessionStatus::kLive, SessionStatus::kLive);
  journals[0].process_now = "stopped";
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << "at once: it cannot go on by itself";
  EXPECT_EQ(verdict.remedy.action, Remedy::Action::kContinueProcess);
  EXPECT_FALSE(test::Has(ToText(verdict.remedy), "the others")) << ToText(verdict.remedy);
}

TEST(PoolVerdict, a_tag_that_is_paused_when_its_process_ends_is_noted) {
  PoolJob job;
  ScriptedPool cache{job.owner, "cache", PoolPolicy::kDiscard};
  cache.Chunk();
  for (ScriptedPool* pool : {&job.weights, &cache}) pool->Run(CycleKind::kPause);
  EXPECT_TRUE(job.Judge().notes.empty()) << "it lives, and may resume yet";
  job.owner.Then(SessionClosed{.reason = "exit", .exit_code = 0});
  const Verdict verdict = job.Judge(SessionStatus::kClosed);
  EXPECT_TRUE(verdict.healthy()) << verdict.headline;
  ASSERT_EQ(verdict.notes.size(), 2u);
  EXPECT_HAS(verdict.notes[0], "tag weights of rank 0");
  EXPECT_HAS(verdict.notes[0], "its contents, 8 MiB at most, went with it");
  EXPECT_HAS(verdict.notes[0], "amem_wait");
  EXPECT_HAS(verdict.notes[1], "tag cache of rank 0");
  EXPECT_FALSE(test::Has(verdict.notes[1], "contents")) << "it discards";
}

TEST(PoolVerdict, events_of_a_pool_do_not_count_for_a_pause_of_nccl_that_is_under_way) {
  PoolJob job;
  job.BeginAll(CycleKind::kPause);
  job.PhaseOfAll(PhaseKind::kPauseArrive);
  job.weights.Run(CycleKind::kPause);
  const SessionStory history = History(job.owner, SessionStatus::kLive);
  ASSERT_EQ(history.attempts.size(), 1u);
  EXPECT_EQ(history.attempts[0].end, Attempt::End::kOpen);
  EXPECT_EQ(history.attempts[0].phases.size(), 1u);
  ASSERT_EQ(history.pools.size(), 1u);
  EXPECT_EQ(history.pools.begin()->second.back().end, Attempt::End::kDone);
}

}  // namespace
}  // namespace amem
