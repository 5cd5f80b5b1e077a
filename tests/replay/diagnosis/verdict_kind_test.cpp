// Each kind of verdict on a job that was written event by event: the kind, the rank, the step and the remedy.
#include <gtest/gtest.h>

#include <filesystem>

#include "journal/journal.h"
#include "replay/diagnosis/explanation.h"
#include "replay/diagnosis/verdict.h"
#include "replay/job/output_file.h"
#include "tests/replay/diagnosis/scripted_cycles.h"
#include "tests/replay/job/written_journal.h"

namespace amem {
namespace {

using test::CycleJob;
using test::JudgeAlone;
using test::kMiB;
using test::kSecond;
using test::Story;
using Action = Remedy::Action;
using Outlook = Remedy::Outlook;

constexpr SessionStatus kLive = SessionStatus::kLive, kClosed = SessionStatus::kClosed, kCrashed = SessionStatus::kCrashed;

TEST(VerdictKind, words_are_stable) {
  const std::vector<std::pair<VerdictKind, std::string>> words = {{VerdictKind::kHealthy, "healthy"},
                                                                  {VerdictKind::kStepFailed, "step-failed"},
                                                                  {VerdictKind::kOutOfMemory, "out-of-memory"},
                                                                  {VerdictKind::kDied, "rank-died"},
                                                                  {VerdictKind::kEnded, "ended-without-closing"},
                                                                  {VerdictKind::kNeverArrived, "never-arrived"},
                                                                  {VerdictKind::kStalled, "stalled"},
                                                                  {VerdictKind::kRefused, "refused"},
                                                                  {VerdictKind::kHalfDone, "half-done"},
                                                                  {VerdictKind::kBroken, "broken-session"},
                                                                  {VerdictKind::kReferences, "references-disagree"},
                                                                  {VerdictKind::kImpossible, "impossible-order"},
                                                                  {VerdictKind::kUnreadable, "unreadable"},
                                                                  {VerdictKind::kLeft, "rank-left"},
                                                                  {VerdictKind::kLaunchRefused, "launch-refused"},
                                                                  {VerdictKind::kNotUnderAmem, "not-under-amem"}};
  ASSERT_EQ(words.size(), kVerdictKinds);
  for (const auto& [kind, word] : words) EXPECT_EQ(ToText(kind), word);
}

// As a wrong search would make them: one has no attempt, the other no closed journal.
TEST(VerdictKind, a_cause_without_what_its_explainer_needs_is_said_to_be_a_bug) {
  CycleJob job;
  job.Pause();
  const std::vector<SessionStory> journals = {test::History(job.owner, kLive), test::History(job.importer, kLive)};
  const Roster roster(journals);
  for (const auto& [kind, missing] :
       {std::pair(VerdictKind::kStalled, "attempt != nullptr"), std::pair(VerdictKind::kLeft, "closed.has_value()")}) {
    Verdict verdict;
    Explain(roster, {.kind = kind, .session = job.owner.id()}, verdict);
    EXPECT_EQ(verdict.kind, kind);
    EXPECT_HAS(verdict.headline, "The diagnosis contradicts itself");
    EXPECT_HAS(verdict.summary, missing);
    EXPECT_EQ(verdict.remedy.action, Action::kReportJournals);
  }
}

TEST(VerdictKind, healthy_after_a_pause_and_a_resume) {
  CycleJob job;
  job.Pause();
  const Verdict paused = job.Judge(kLive, kLive);
  EXPECT_TRUE(paused.healthy()) << paused.summary;
  EXPECT_EQ(paused.totals.released, 2 * kMiB);
  EXPECT_HAS(paused.summary,
             "2 processes live, 2 paused; they hold 0 B of their own memory on devices, and have given back 2 MiB");
  job.Resume();
  job.LetGo();
  job.Close();
  const Verdict verdict = job.Judge(kClosed, kClosed);
  EXPECT_TRUE(verdict.healthy()) << verdict.summary;
  EXPECT_EQ(verdict.headline, "Nothing is wrong: 1 pause and 1 resume of 2 processes completed");
  EXPECT_EQ(verdict.remedy, Remedy{});
  EXPECT_EQ(verdict.session, std::nullopt);
  EXPECT_TRUE(verdict.evidence.empty());
}

// ---- a step or a vote failed -----------------------------------------------------------------------------------------------

// The importer's step fails in the first phase of a pause.
std::pair<Step, SequenceNumber> FailAStep(CycleJob& job, Code code, int driver_result) {
  job.BeginAll(CycleKind::kPause);
  const Step step = job.WorkInto(job.importer, PhaseKind::kPauseArrive, StepKind::kQuiesce);
  const SequenceNumber seq = job.importer.Then(StepFailed{step, code, driver_result, "quiesce device 0: it did not work"});
  job.Work(job.owner, PhaseKind::kPauseArrive);
  return {step, seq};
}
Verdict OfFailedStep(Code code, int driver_result, bool undone = true, SessionStatus now = kLive) {
  CycleJob job;
  const auto [step, seq] = FailAStep(job, code, driver_result);
  job.GiveUp(CycleKind::kPause, PhaseKind::kPauseArrive, job.importer.id(), "rank 1 failed", undone);
  const Verdict verdict = job.Judge(now, now);
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, step);
  EXPECT_EQ(verdict.seq, seq);
  EXPECT_EQ(verdict.code, code);
  EXPECT_EQ(verdict.phase, PhaseKind::kPauseArrive);
  EXPECT_HAS(verdict.headline, "Pause 1 failed on rank 1 at the step \"quiesce device 0\"");
  EXPECT_HAS(verdict.summary, "Pause 1 (2 processes) failed");
  return verdict;
}

TEST(VerdictKind, what_is_to_be_done_for_the_living_is_for_the_next_run_when_all_have_ended) {
  for (const bool ended : {false, true}) {
    CycleJob job;
    job.BeginAll(CycleKind::kPause);
    job.WorkInto(job.importer, PhaseKind::kPauseArrive, StepKind::kQuiesce);
    job.Work(job.owner, PhaseKind::kPauseArrive);
    job.GiveUp(CycleKind::kPause, PhaseKind::kPauseArrive, job.importer.id(), "rank 1 failed", true);
    const SessionStatus status = ended ? SessionStatus::kCrashed : kLive;
    const Verdict verdict = job.Judge(status, status);
    EXPECT_EQ(verdict.remedy.outlook == Outlook::kAllEnded, ended) << ToText(verdict.remedy);
    if (ended) {
      EXPECT_EQ(verdict.remedy.pid, 0);
    }
  }
}

TEST(VerdictKind, step_failed_in_the_driver) {
  const Verdict verdict = OfFailedStep(Code::kDriver, 719);
  EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed);
  EXPECT_EQ(verdict.remedy.action, Action::kRestartProcess) << "the context is dead";
  EXPECT_EQ(verdict.remedy.outlook, Outlook::kUnsaid);
  EXPECT_EQ(OfFailedStep(Code::kDriver, 400).remedy.action, Action::kFindDriverError);
  EXPECT_EQ(OfFailedStep(Code::kDriver, 400).remedy.outlook, Outlook::kCallAgain);
  EXPECT_HAS(verdict.summary, "The driver's answer was CUDA_ERROR_LAUNCH_FAILED (719, unspecified launch failure).");
  EXPECT_HAS(OfFailedStep(Code::kDriver, 12345).summary, "The driver's answer was CUresult 12345.");
  EXPECT_HAS(verdict.summary, "Rank 0 gave up because of it and undid what was done.");
}

constexpr int kEccUncorrectable = 214, kLaunchTimeout = 702;

TEST(VerdictKind, of_an_uncorrectable_memory_error_contents_may_be_wrong_and_no_call_is_to_be_repeated) {
  for (const bool undone : {true, false}) {
    const Verdict verdict = OfFailedStep(Code::kDriver, kEccUncorrectable, undone);
    EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed);
    EXPECT_HAS(verdict.summary,
               "The driver's answer was CUDA_ERROR_ECC_UNCORRECTABLE (214, uncorrectable ECC error encountered).");
    EXPECT_HAS(verdict.summary, "Device 0 of rank 1 (GPU-1) has an uncorrectable memory error: contents there may be wrong.");
    EXPECT_EQ(verdict.remedy.action, Action::kExamineGpu);
    EXPECT_EQ(verdict.remedy.outlook, Outlook::kUnsaid);
    EXPECT_HAS(ToText(verdict.remedy), "end the job and have device 0 of rank 1 (GPU-1) examined");
    EXPECT_HAS(ToText(verdict.remedy), "repeating ncclPause does not help");
  }
}

// A rank's step in a resume fails, one with memory of its own or with imported memory.
Verdict OfFailedResume(bool import, int driver_result) {
  CycleJob job;
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  job.PhaseOfAll(PhaseKind::kResumeArrive);
  Story& story = import ? job.importer : job.owner;
  if (import) job.PhaseOfAll(PhaseKind::kResumeCreateOwn);
  const PhaseKind phase = import ? PhaseKind::kResumeImport : PhaseKind::kResumeCreateOwn;
  const Step step = job.WorkInto(story, phase, import ? StepKind::kImport : StepKind::kCreate);
  story.Then(StepFailed{step, Code::kDriver, driver_result, "it did not work"});
  job.Work(import ? job.owner : job.importer, phase);
  job.GiveUp(CycleKind::kResume, phase, story.id(), "a rank failed", !import);
  Verdict verdict = job.Live(kSecond);
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{import ? 1 : 0}) << verdict.summary;
  return verdict;
}

// The ordinal of imported memory's device is that of its owner.
TEST(VerdictKind, of_a_memory_error_at_a_step_with_imported_memory_no_device_is_named) {
  for (const bool import : {false, true}) {
    const Verdict verdict = OfFailedResume(import, kEccUncorrectable);
    EXPECT_EQ(verdict.remedy.action, Action::kExamineGpu);
    EXPECT_HAS(verdict.summary, import ? "The GPU of rank 1 has an" : "Device 0 of rank 0 (GPU-0) has an");
  }
}

TEST(VerdictKind, of_a_kernel_that_ran_too_long_beside_a_display_the_context_is_lost_and_no_call_is_to_be_repeated) {
  for (const bool undone : {true, false}) {
    const Verdict verdict = OfFailedStep(Code::kDriver, kLaunchTimeout, undone);
    EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed);
    EXPECT_HAS(verdict.summary,
               "The driver's answer was CUDA_ERROR_LAUNCH_TIMEOUT (702, the launch timed out and was terminated).");
    EXPECT_HAS(verdict.summary,
               "A kernel on device 0 of rank 1 (GPU-1) ran longer than the driver allows where a display watches the GPU: the "
               "context of that process is lost.");
    EXPECT_EQ(verdict.remedy.action, Action::kAvoidDisplay);
    EXPECT_EQ(verdict.remedy.outlook, Outlook::kUnsaid);
    EXPECT_HAS(ToText(verdict.remedy), "take the display off device 0 of rank 1 (GPU-1)");
    EXPECT_HAS(ToText(verdict.remedy), "repeating ncclPause does not help");
  }
}

TEST(VerdictKind, of_a_kernel_that_ran_too_long_at_a_step_with_imported_memory_no_device_is_named) {
  for (const bool import : {false, true}) {
    const Verdict verdict = OfFailedResume(import, kLaunchTimeout);
    EXPECT_EQ(verdict.remedy.action, Action::kAvoidDisplay);
    EXPECT_EQ(verdict.remedy.outlook, Outlook::kUnsaid) << "also where the undo failed: no resume brings that context back";
    EXPECT_HAS(verdict.summary, import ? "A kernel on the GPU of rank 1 ran" : "A kernel on device 0 of rank 0 (GPU-0) ran");
    EXPECT_HAS(ToText(verdict.remedy), "repeating ncclResume does not help");
  }
}

TEST(VerdictKind, step_failed_and_the_remedy_depends_on_its_code_and_its_undo) {
  EXPECT_EQ(OfFailedStep(Code::kRefused, 900).remedy.action, Action::kEndCaptures);
  EXPECT_EQ(OfFailedStep(Code::kIo, 0).remedy.action, Action::kReadMessage);
  for (const Code code : {Code::kTimeout, Code::kPeerLost}) {
    const Verdict verdict = OfFailedStep(code, 0);
    EXPECT_EQ(verdict.remedy.action, Action::kExaminePeer);
    EXPECT_EQ(verdict.remedy.outlook, Outlook::kUnsaid);
  }
  const Verdict verdict = OfFailedStep(Code::kDriver, 400, false);
  EXPECT_EQ(verdict.remedy.outlook, Outlook::kCannotBeUndone);
  EXPECT_EQ(OfFailedStep(Code::kDriver, 400, false, SessionStatus::kCrashed).remedy.outlook, Outlook::kAllEnded);
  EXPECT_HAS(verdict.summary, "Rank 0 gave up because of it and could not undo everything: it is neither running nor paused.");
}

// The owner is told of the importer's failure and has not ended its undo.
TEST(VerdictKind, step_failed_and_another_rank_is_still_undoing) {
  for (const bool begun : {false, true}) {
    CycleJob job;
    FailAStep(job, Code::kDriver, 400);
    for (auto* story : {&job.owner, &job.importer})
      job.Decide(*story, PhaseKind::kPauseArrive, job.importer.id(), "rank 1 failed");
    if (begun) job.owner.Then(PhaseBegun{PhaseKind::kResumeCreateOwn});
    job.importer.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 failed"});
    const Verdict verdict = job.Judge(kLive, kLive);
    EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed);
    EXPECT_EQ(verdict.remedy.outlook, Outlook::kUndoing) << ToText(verdict.remedy);
    EXPECT_HAS(verdict.summary, "Rank 0 gave up because of it and did not come to the end of the undo.");
    std::string noted;
    for (const std::string& note : verdict.notes)
      if (note.find(" of the undo: ") != std::string::npos) noted += note;
    EXPECT_EQ(noted.find("came to phase \"resume: create own\" of the undo: ") != std::string::npos, begun) << noted;
    EXPECT_EQ(noted.empty(), !begun) << "its last phase is one of the pause: " << noted;
  }
}

// The culprit of the vote had a failed step of its own, which blames a peer: it was not merely late.
TEST(VerdictKind, step_failed_for_a_peers_sake_is_not_called_stalled) {
  const Verdict verdict = OfFailedStep(Code::kPeerLost, 0);
  EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed) << verdict.summary;
}

TEST(VerdictKind, step_failed_by_itself_outweighs_one_that_blamed_a_peer_before) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  const Step blames = job.WorkInto(job.importer, PhaseKind::kPauseArrive, StepKind::kQuiesce);
  job.importer.Then(StepFailed{blames, Code::kPeerLost, 0, "quiesce device 0: rank 0 has gone"});
  const Step fails = job.WorkInto(job.owner, PhaseKind::kPauseArrive, StepKind::kQuiesce);
  job.owner.Then(StepFailed{fails, Code::kDriver, 719, "quiesce device 0: it did not work"});
  job.GiveUp(CycleKind::kPause, PhaseKind::kPauseArrive, job.importer.id(), "rank 1 failed");
  const Verdict verdict = job.Judge(kLive, kLive);
  EXPECT_EQ(verdict.rank, 0) << verdict.summary;
  EXPECT_EQ(verdict.code, Code::kDriver);
}

TEST(VerdictKind, step_failed_when_only_its_vote_was_no) {
  CycleJob job;
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  job.PhaseOfAll(PhaseKind::kResumeArrive);
  job.importer.Then(PhaseBegun{PhaseKind::kResumeCreateOwn});
  job.GiveUp(CycleKind::kResume, PhaseKind::kResumeCreateOwn, job.importer.id(), "rank 1 failed: no descriptors are left");
  const Verdict verdict = JudgeAlone(job.importer, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed);
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_EQ(verdict.phase, PhaseKind::kResumeCreateOwn);
  EXPECT_EQ(verdict.remedy.action, Action::kFollowVote);
  EXPECT_EQ(verdict.remedy.cycle, CycleKind::kResume);
  EXPECT_HAS(verdict.summary, "no descriptors are left");
}

Verdict OfTooLittleMemory(bool undone) {
  CycleJob job;
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  const Step step = job.WorkInto(job.owner, PhaseKind::kResumeArrive, StepKind::kCheckMemory);
  EXPECT_EQ(step.bytes, 2 * kMiB);
  const std::string message = "check memory device 0, 2 MiB: device 0 has 1 MiB free";
  job.owner.Then(StepFailed{step, Code::kOutOfMemory, 2, message});
  job.Work(job.importer, PhaseKind::kResumeArrive);
  job.GiveUp(CycleKind::kResume, PhaseKind::kResumeArrive, job.owner.id(), "rank 0 failed: " + message, undone);
  return job.Judge(kLive, kLive);
}

TEST(VerdictKind, out_of_memory_says_how_much_must_be_free_where) {
  const Verdict verdict = OfTooLittleMemory(true);
  EXPECT_EQ(verdict.kind, VerdictKind::kOutOfMemory) << verdict.summary;
  EXPECT_EQ(verdict.rank, 0);
  EXPECT_EQ(verdict.step->kind, StepKind::kCheckMemory);
  EXPECT_EQ(verdict.cycle_kind, CycleKind::kResume);
  EXPECT_EQ(verdict.driver_result, 2);
  const Remedy& remedy = verdict.remedy;
  EXPECT_EQ(remedy.action, Action::kFreeMemory);
  EXPECT_EQ(remedy.outlook, Outlook::kCallAgain);
  EXPECT_EQ(remedy.process, "rank 0");
  EXPECT_EQ(remedy.device, DeviceOrdinal{0});
  EXPECT_EQ(remedy.gpu, "GPU-0");
  EXPECT_EQ(remedy.bytes, 2 * kMiB);
  EXPECT_EQ(remedy.cycle, CycleKind::kResume);
  EXPECT_HAS(verdict.summary, "device 0 has 1 MiB free");
  EXPECT_HAS(verdict.summary, "AMem itself checked how much memory was free");
  EXPECT_HAS(verdict.summary, "Now both processes are paused with their contents kept.");
  EXPECT_EQ(OfTooLittleMemory(false).remedy.outlook, Outlook::kCannotBeUndone);
}

TEST(VerdictKind, out_of_memory_is_told_to_the_others_without_its_whole_message_again) {
  const Verdict verdict = OfTooLittleMemory(true);
  std::size_t with_message = 0, told = 0;
  for (const Evidence& evidence : verdict.evidence) {
    with_message += test::Has(evidence.text, "1 MiB free") ? 1 : 0;
    told += evidence.text == "reported: rank 0 (pid 1000 on host alpha) failed in phase resume: arrive" ? 1 : 0;
  }
  EXPECT_EQ(with_message, 1u);
  EXPECT_EQ(told, 1u);
}

TEST(VerdictKind, out_of_memory_names_who_holds_the_device) {
  CycleJob job;
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  const Step step = job.WorkInto(job.owner, PhaseKind::kResumeArrive, StepKind::kCheckMemory);
  job.owner.Then(StepFailed{.step = step,
                            .code = Code::kOutOfMemory,
                            .driver_result = 2,
                            .message = "device 0 has 1 MiB free",
                            .holders = {{4242, Bytes{3} << 30, "python3"}, {1001, kMiB, "python3"}}});
  job.Work(job.importer, PhaseKind::kResumeArrive);
  job.GiveUp(CycleKind::kResume, PhaseKind::kResumeArrive, job.owner.id(), "rank 0 failed");
  const Verdict verdict = job.Judge(kLive, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kOutOfMemory) << verdict.summary;
  EXPECT_HAS(verdict.headline, "; pid 4242 (python3) holds 3 072 MiB and rank 1 (pid 1001 on host alpha) holds 1 MiB there");
  EXPECT_HAS(ToText(verdict.remedy), "; pid 4242 (python3) holds 3 072 MiB and rank 1 ");
  EXPECT_FALSE(test::Has(ToText(verdict.remedy), "nvidia-smi")) << "it is known";
}

TEST(VerdictKind, half_done_elsewhere_is_mended_by_a_resume) {
  CycleJob job;
  FailAStep(job, Code::kDriver, 400);
  for (auto* story : {&job.owner, &job.importer})
    job.Decide(*story, PhaseKind::kPauseArrive, job.importer.id(), "rank 1 failed");
  job.importer.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 failed"});
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, false, "rank 1 failed; undoing it failed too"});
  const Verdict verdict = job.Judge(kLive, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kStepFailed);
  EXPECT_EQ(verdict.remedy.outlook, Outlook::kCannotBeUndone);
  EXPECT_HAS(ToText(verdict.remedy), "; then call ncclResume on all ranks: the failure could not be undone");
}

TEST(VerdictKind, step_failed_within_the_undo_is_not_the_cause) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  for (auto* story : {&job.owner, &job.importer}) job.Work(*story, PhaseKind::kPauseArrive);
  job.importer.Then(PhaseDecided{PhaseKind::kPauseArrive, false, job.owner.id(), "rank 0 failed", Code::kDriver, 1});
  job.importer.Then(PhaseBegun{PhaseKind::kResumeImport});
  const Step step{.kind = StepKind::kImport, .allocation = job.imported};
  job.importer.Then(StepBegun{step});
  job.importer.Then(StepFailed{step, Code::kDriver, 1, "the owner could not make it anew"});
  job.importer.Then(CycleFailed{CycleKind::kPause, 1, false, "rank 0 failed; undoing it failed too", Code::kDriver});
  const Verdict verdict = JudgeAlone(job.importer, kLive, job.clock);
  EXPECT_EQ(verdict.session, job.owner.id()) << verdict.headline;
  EXPECT_HAS(ToText(verdict.remedy), "ncclResume");
}

// ---- what the caller calls -------------------------------------------------------------------------------------------------

TEST(VerdictKind, remedy_names_the_call_that_the_program_makes) {
  const auto remedy = [](bool python, bool requested) {
    CycleJob job;
    std::get<SessionOpened>(job.owner.events()[0].body).python = python;
    if (requested) job.owner.Then(SafepointReached{.request = 1, .step = 7});
    job.Arrive(job.owner, CycleKind::kPause);
    job.clock += 10 * kSecond;
    job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 did not come", Code::kTimeout});
    const Verdict verdict = job.Judge(kLive, kLive);
    EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
    return verdict.summary + ToText(verdict.remedy);
  };
  EXPECT_HAS(remedy(false, false), "did not call ncclPause");
  EXPECT_HAS(remedy(false, false), "call ncclPause on every rank");
  EXPECT_HAS(remedy(true, false), "did not call amem.pause()");
  EXPECT_HAS(remedy(true, false), "call amem.pause() on every rank");
  EXPECT_HAS(remedy(true, true), "the safe point that `amem pause` has set");
}

// ---- NCCL without AMem -----------------------------------------------------------------------------------------------------

TEST(VerdictKind, not_under_amem_is_a_rank_without_a_session_of_a_communicator_that_nccl_could_not_make) {
  for (const bool all_here : {false, true}) {
    CycleJob job;
    for (Story* story : {&job.owner, &job.importer}) {
      const auto rank = std::get<SessionOpened>(story->events()[0].body).rank;
      story->Then(CommunicatorBegun{.communicator = CommunicatorId{1}, .how = "init", .rank = rank, .ranks = all_here ? 2 : 4});
      story->Then(CommunicatorEnded{CommunicatorId{1}, "failed"});
    }
    job.LetGo();
    job.Close();
    const Verdict verdict = job.Judge(kClosed, kClosed);
    if (all_here) {
      EXPECT_TRUE(verdict.healthy()) << verdict.summary;
      continue;
    }
    EXPECT_EQ(verdict.kind, VerdictKind::kNotUnderAmem) << verdict.summary;
    EXPECT_EQ(verdict.ranks, (std::vector<std::int32_t>{2, 3}));
    EXPECT_EQ(verdict.headline,
              "NCCL could not make a communicator of 4 ranks, and ranks 2 and 3 have no session of AMem here");
    EXPECT_EQ(verdict.remedy.action, Action::kStartUnderAmem);
    EXPECT_HAS(ToText(verdict.remedy), "AMEM_ENABLE must be the same on all");
  }
}

// ---- a process ended -------------------------------------------------------------------------------------------------------

TEST(VerdictKind, died_in_a_pause_and_the_others_run_on) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  const Step step = job.WorkInto(job.importer, PhaseKind::kPauseArrive, StepKind::kQuiesce);
  job.Work(job.owner, PhaseKind::kPauseArrive);
  const SequenceNumber noticed = job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.Decide(job.owner, PhaseKind::kPauseArrive, job.importer.id(), "rank 1 died");
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 died"});
  const Verdict verdict = job.Judge(kLive, kCrashed);
  EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, step);
  EXPECT_EQ(verdict.seq.value, job.importer.events().size());
  EXPECT_EQ(verdict.remedy.action, Action::kFindReasonOfDeath);
  EXPECT_EQ(verdict.remedy.outlook, Outlook::kOthersRun);
  EXPECT_HAS(verdict.summary, "it had begun, and not finished, \"quiesce device 0\"");
  EXPECT_HAS(verdict.summary, "Rank 0 noticed its end at ");
  EXPECT_HAS(verdict.summary, "(event " + std::to_string(noticed.value) + ")");
  EXPECT_HAS(verdict.summary, "Now rank 0 is running and rank 1 has ended.");
}

// The importer dies in a resume, and the owner cannot go back, or can.
Verdict OfDeathInResume(bool undone) {
  CycleJob job;
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  job.importer.Then(PhaseBegun{PhaseKind::kResumeArrive});
  job.Work(job.owner, PhaseKind::kResumeArrive);
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.Decide(job.owner, PhaseKind::kResumeArrive, job.importer.id(), "rank 1 died");
  job.owner.Then(CycleFailed{CycleKind::kResume, 1, undone, "rank 1 died"});
  return job.Judge(kLive, kCrashed);
}

TEST(VerdictKind, died_in_a_resume_and_the_others_miss_its_memory) {
  const Verdict verdict = OfDeathInResume(true);
  EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.remedy.outlook, Outlook::kOthersMissMemory);
  EXPECT_EQ(OfDeathInResume(false).remedy.outlook, Outlook::kOthersHalfWay);
}

TEST(VerdictKind, died_while_paused_and_the_others_resumed_without_it) {
  CycleJob job;
  job.Pause();
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.Arrive(job.owner, CycleKind::kResume);
  job.owner.Then(CycleBegun{CycleKind::kResume, 1, {job.owner.id()}});
  for (const PhaseKind phase : CycleJob::kResumePhases) {
    job.Work(job.owner, phase);
    job.Decide(job.owner, phase);
  }
  job.owner.Then(CycleDone{CycleKind::kResume, 1, 1000});
  const Verdict verdict = job.Judge(kLive, kCrashed);
  EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_EQ(verdict.remedy.outlook, Outlook::kOthersResumed);
  EXPECT_HAS(verdict.headline, "while it was paused");
  EXPECT_HAS(verdict.summary, "After that rank 0 resumed without it.");
}

TEST(VerdictKind, died_while_paused_and_the_next_resume_of_the_others_failed) {
  CycleJob job;
  job.Pause();
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.Arrive(job.owner, CycleKind::kResume);
  job.owner.Then(CycleFailed{CycleKind::kResume, 1, true, "rank 1 has died"});
  const Verdict verdict = job.Judge(kLive, kCrashed);
  EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
  EXPECT_EQ(verdict.remedy.outlook, Outlook::kOthersMissMemory);
  EXPECT_EQ(verdict.cycle_kind, CycleKind::kResume);
  EXPECT_EQ(verdict.cycle, 1u);
  EXPECT_HAS(verdict.summary, "After that resume 1 failed on rank 0: rank 1 has died.");
}

// Whatever became of the witness afterwards.
TEST(VerdictKind, died_while_paused_and_without_a_journal) {
  for (const bool resumed : {false, true}) {
    CycleJob job;
    job.Pause();
    job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
    if (resumed) {
      job.Arrive(job.owner, CycleKind::kResume);
      job.owner.Then(CycleBegun{CycleKind::kResume, 1, {job.owner.id()}});
      for (const PhaseKind phase : CycleJob::kResumePhases) {
        job.Work(job.owner, phase);
        job.Decide(job.owner, phase);
      }
      job.owner.Then(CycleDone{CycleKind::kResume, 1, 1000});
    }
    job.clock += 10 * kSecond;
    job.owner.Then(SessionClosed{.reason = "exit"});
    const Verdict verdict = JudgeAlone(job.owner, kClosed);
    EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
    EXPECT_EQ(verdict.rank, 1);
    EXPECT_EQ(verdict.headline, "Rank 1 died, while rank 0 was paused");
    EXPECT_EQ(verdict.remedy.action, Action::kFindReasonOfDeath);
  }
}

// A rank that imports memory of the importer's.
Story ThirdRank(CycleJob& job) {
  Story third(0xca7, 2, &job.clock);
  const AllocationId own = job.importer.Create(), held = third.NextId();
  job.importer.Then(PeerConnected{.peer = third.id(), .host = "alpha", .pid = 1002, .group = 7, .rank = 2});
  job.importer.Then(Exported{.allocation = own});
  job.importer.Then(ReferenceAdded{.allocation = own, .by = third.id(), .as = held});
  third.Then(PeerConnected{.peer = job.importer.id(), .host = "alpha", .pid = 1001, .group = 7, .rank = 1});
  third.Then(
      Imported{.allocation = held, .remote = {job.importer.id(), own}, .bytes = 2 * kMiB, .properties = Story::Properties()});
  return third;
}

// Of two sessions that notice a death, the first one dates it, whatever the order of the journals.
TEST(VerdictKind, died_when_the_first_of_two_witnesses_noticed_it) {
  CycleJob job;
  Story third = ThirdRank(job);
  job.BeginAll(CycleKind::kPause);
  const SequenceNumber first = job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  job.clock += kSecond;
  third.Then(PeerLost{job.importer.id(), kPeerDied});
  for (const bool owner_first : {true, false}) {
    std::vector<SessionStory> journals = job.Read(kLive, kCrashed);
    journals.insert(owner_first ? journals.end() : journals.begin(), test::History(third, kLive, job.clock));
    const Verdict verdict = Diagnose(journals);
    EXPECT_EQ(verdict.kind, VerdictKind::kDied) << verdict.summary;
    EXPECT_EQ(verdict.rank, 1);
    EXPECT_HAS(verdict.summary, "Rank 0 noticed its end at ");
    EXPECT_HAS(verdict.summary, "(event " + std::to_string(first.value) + ")");
    EXPECT_FALSE(test::Has(verdict.summary, "Rank 2 noticed"));
  }
}

TEST(VerdictKind, ended_outside_of_any_pause_or_resume) {
  CycleJob job;
  job.owner.Then(PeerLost{job.importer.id(), kPeerDied});
  const Verdict verdict = job.Judge(kLive, kCrashed);
  EXPECT_EQ(verdict.kind, VerdictKind::kEnded);
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_EQ(verdict.cycle_kind, std::nullopt);
  EXPECT_EQ(verdict.remedy.action, Action::kFindReasonOfEnd);
  EXPECT_EQ(verdict.remedy.outlook, Outlook::kUnsaid);
  EXPECT_EQ(verdict.headline, "Rank 1 ended without closing its journal, while it was running");
}

// ---- the others waited -----------------------------------------------------------------------------------------------------

TEST(VerdictKind, never_arrived_names_the_rank_and_the_call_that_is_missing) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  job.clock += kSecond;
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "waited 1000 ms for rank 1 to come"});
  const Verdict verdict = job.Judge(kLive, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived);
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_EQ(verdict.phase, PhaseKind::kPauseArrive);
  EXPECT_EQ(verdict.code, Code::kTimeout);
  EXPECT_EQ(verdict.remedy.action, Action::kCallOnEveryRank);
  EXPECT_EQ(verdict.remedy.process, "rank 1");
  EXPECT_EQ(verdict.remedy.cycle, CycleKind::kPause);
  EXPECT_EQ(verdict.headline, "Rank 1 did not join pause 1");
  EXPECT_HAS(verdict.summary, "Rank 1 (pid 1001 on host alpha) did not call ncclPause");
}

TEST(VerdictKind, never_arrived_names_all_ranks_that_are_missing) {
  CycleJob job;
  Story third = ThirdRank(job);
  job.Arrive(job.owner, CycleKind::kPause);
  std::vector<SessionStory> journals = job.Read(kLive, kLive, 3 * kSecond);
  journals.push_back(test::History(third, kLive, job.clock + 3 * kSecond));
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived);
  EXPECT_EQ(verdict.remedy.process, "ranks 1 and 2");
  EXPECT_EQ(verdict.headline, "Ranks 1 and 2 did not join pause 1");
  EXPECT_HAS(verdict.summary, "Rank 1 (pid 1001 on host alpha) did not call ncclPause");
  EXPECT_HAS(verdict.summary, "Rank 2 (pid 1002 on host alpha) did not call ncclPause");
}

TEST(VerdictKind, never_arrived_of_a_rank_without_a_journal_says_so) {
  CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  job.clock += kSecond;
  const SequenceNumber gave_up = job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "waited 1000 ms for rank 1 to come"});
  const Verdict verdict = JudgeAlone(job.owner, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived);
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.seq, gave_up);
  EXPECT_EQ(verdict.remedy.process, "rank 1");
  ASSERT_FALSE(verdict.notes.empty());
  EXPECT_HAS(verdict.notes[0], "its journal was not given");
}

// The ranks call it one after the other, and each gives up before the next one comes.
TEST(VerdictKind, never_arrived_is_the_rank_that_came_when_the_others_had_given_up) {
  CycleJob job;
  std::get<SessionOpened>(job.owner.events()[0].body).timeout_ms = 10'000;
  std::get<SessionOpened>(job.importer.events()[0].body).timeout_ms = 20'000;
  job.Arrive(job.owner, CycleKind::kPause);
  job.clock += 10 * kSecond;
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "waited for rank 1", Code::kTimeout});
  job.clock += kSecond / 2;
  job.Arrive(job.importer, CycleKind::kPause);
  const SequenceNumber came{job.importer.events().size()};
  job.clock += 20 * kSecond;
  job.importer.Then(CycleFailed{CycleKind::kPause, 1, true, "waited for rank 0", Code::kTimeout});
  const Verdict verdict = job.Judge(kLive, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{1});
  EXPECT_EQ(verdict.seq, came);
  EXPECT_EQ(verdict.headline, "Rank 1 joined pause 1 too late");
  EXPECT_HAS(verdict.summary, "Rank 0 waited for 10.0 s since ");
  EXPECT_HAS(verdict.summary, "called ncclPause 501 ms after that.");
  EXPECT_HAS(verdict.summary, "AMEM_TIMEOUT_MS differs: 10000 on rank 0, 20000 on rank 1.");
  EXPECT_EQ(verdict.remedy.action, Action::kCallInTime);
  EXPECT_HAS(ToText(verdict.remedy), "raise AMEM_TIMEOUT_MS on all ranks, to the same value");
}

// The same, as its own journal tells alone; and one that came in time, of which it is not known who came late.
TEST(VerdictKind, never_arrived_in_time_as_its_own_journal_tells) {
  for (const bool late : {true, false}) {
    CycleJob job;
    const auto others_come = [&] {
      job.owner.Then(MemberHeard{.member = job.importer.id(), .kind = CycleKind::kPause, .rank = 1, .pid = 1001, .asks = true});
    };
    if (late) others_come();
    job.clock += 10 * kSecond;
    job.Arrive(job.owner, CycleKind::kPause);
    if (!late) others_come();
    job.clock += 10 * kSecond;
    job.owner.Then(ProcessSeen{
        .session = job.importer.id(), .pid = 1001, .state = "sleeping", .answer = "running, has not called ncclPause"});
    job.owner.Then(CycleFailed{.kind = CycleKind::kPause,
                               .cycle = 1,
                               .message = "waited for rank 1",
                               .code = Code::kTimeout,
                               .culprits = {{job.importer.id(), 1, 1001, "alpha"}}});
    const Verdict verdict = JudgeAlone(job.owner, kLive, job.clock);
    EXPECT_EQ(verdict.kind, late ? VerdictKind::kNeverArrived : VerdictKind::kRefused) << verdict.summary;
    EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{0}) << "the other one had come before";
    EXPECT_EQ(verdict.headline, late ? "Rank 0 joined pause 1 too late" : "Pause 1 could not begin");
    EXPECT_HAS(verdict.summary,
               late ? "Rank 1 had waited for it since " : "Rank 1 had joined it, too, and had given up by then");
  }
}

// Nobody has called it again but the one that is missing now.
TEST(VerdictKind, never_arrived_is_the_rank_that_does_not_try_again) {
  CycleJob job;
  Story third = ThirdRank(job);
  const auto fail = [&](std::initializer_list<Story*> stories, std::uint64_t after) {
    for (Story* story : stories) job.Arrive(*story, CycleKind::kPause);
    job.clock += after;
    for (Story* story : stories) story->Then(CycleFailed{CycleKind::kPause, 1, true, "waited in vain", Code::kTimeout});
  };
  fail({&job.owner, &third}, 10 * kSecond);
  fail({&job.importer}, 10 * kSecond);
  job.clock += 60 * kSecond;
  fail({&job.owner, &job.importer}, 10 * kSecond);
  std::vector<SessionStory> journals = job.Read(kLive, kLive);
  journals.push_back(test::History(third, kLive, job.clock));
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kNeverArrived) << verdict.summary;
  EXPECT_EQ(verdict.ranks, std::vector<std::int32_t>{2}) << verdict.headline;
}

TEST(VerdictKind, stalled_rank_that_finished_too_late_names_its_longest_step) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  job.Work(job.owner, PhaseKind::kPauseArrive);
  const Step step = job.WorkInto(job.importer, PhaseKind::kPauseArrive, StepKind::kQuiesce);
  const SequenceNumber begun{job.importer.events().size()};
  job.Decide(job.owner, PhaseKind::kPauseArrive, job.importer.id(), "no vote came");
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "no vote came"});
  job.clock += 30 * kSecond;
  job.importer.Then(StepDone{step});
  job.Decide(job.importer, PhaseKind::kPauseArrive, job.importer.id(), "no vote came");
  job.importer.Then(CycleFailed{CycleKind::kPause, 1, true, "no vote came"});
  const Verdict verdict = job.Judge(kLive, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, step);
  EXPECT_EQ(verdict.phase, PhaseKind::kPauseArrive);
  EXPECT_EQ(verdict.seq, begun);
  EXPECT_EQ(verdict.remedy.action, Action::kExamineProcess);
  EXPECT_EQ(verdict.remedy.process, "rank 1");
  EXPECT_EQ(verdict.remedy.pid, 1001);
  EXPECT_HAS(verdict.headline, "Pause 1 waited for rank 1, which spent 30.0 s at \"quiesce device 0\"");
  EXPECT_HAS(verdict.summary, "Its longest step, \"quiesce device 0\", took 30.0 s");
  EXPECT_HAS(verdict.summary, "The others reported: No vote came.");
}

TEST(VerdictKind, launch_refused_to_a_process_that_ended_while_paused) {
  CycleJob job;
  job.Pause();
  job.importer.Then(LaunchRefused{"cuLaunchKernel", 1});
  const Verdict verdict = job.Judge(kLive, SessionStatus::kCrashed);
  EXPECT_EQ(verdict.kind, VerdictKind::kLaunchRefused) << verdict.summary;
  EXPECT_EQ(verdict.headline, "Rank 1 used NCCL while it was paused");
  EXPECT_HAS(verdict.summary, "called cuLaunchKernel");
}

TEST(VerdictKind, stalled_rank_without_a_journal_is_the_one_whose_vote_is_missing) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  job.Work(job.owner, PhaseKind::kPauseArrive);
  const Verdict verdict = JudgeAlone(job.owner, kLive, job.clock + 5 * kSecond);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_TRUE(verdict.live);
  EXPECT_EQ(verdict.remedy.action, Action::kExamineProcess);
  EXPECT_EQ(verdict.remedy.pid, 0);
  EXPECT_HAS(verdict.summary, "What it does is not known: its journal was not given.");
}

// The counter of arrivals stopped before it had told the third, and the second for a reason of its own.
TEST(VerdictKind, stalled_ranks_are_all_named_also_if_one_was_not_told_that_it_has_begun) {
  CycleJob job;
  Story third = ThirdRank(job);
  for (Story* story : {&job.owner, &job.importer, &third}) job.Arrive(*story, CycleKind::kPause);
  for (Story* story : {&job.owner, &job.importer}) {
    story->Then(CycleBegun{CycleKind::kPause, 1, {job.importer.id(), third.id(), job.owner.id()}});
    job.WorkInto(*story, PhaseKind::kPauseArrive, StepKind::kQuiesce);
  }
  std::vector<SessionStory> journals = job.Read(kLive, kLive, 3 * kSecond);
  journals.push_back(test::History(third, kLive, job.clock + 3 * kSecond));
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kStalled) << verdict.summary;
  EXPECT_EQ(verdict.remedy.process, "ranks 0 and 1") << verdict.summary;
  EXPECT_EQ(verdict.headline, "Pause 1 waits for ranks 0 and 1; rank 0 is at the step \"quiesce device 0\"");
}

TEST(VerdictKind, refused_when_nobody_was_missing) {
  std::uint64_t clock = kSecond;
  Story story(0x5, 7, &clock);
  story.Then(PhaseBegun{PhaseKind::kPauseArrive});
  const SequenceNumber seq = story.Then(CycleFailed{CycleKind::kPause, 1, true, "the groups differ"});
  const Verdict verdict = JudgeAlone(story, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kRefused);
  EXPECT_EQ(verdict.rank, 7);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_EQ(verdict.seq, seq);
  EXPECT_EQ(verdict.remedy.action, Action::kFollowRefusal);
  EXPECT_EQ(verdict.remedy.cycle, CycleKind::kPause);
  EXPECT_HAS(verdict.summary, "The groups differ.");
}

// ---- sessions and journals -------------------------------------------------------------------------------------------------

TEST(VerdictKind, half_done_after_a_failure_that_could_not_be_undone) {
  CycleJob job;
  job.BeginAll(CycleKind::kPause);
  const SequenceNumber seq = job.owner.Then(CycleFailed{CycleKind::kPause, 1, false, "mapping again failed"});
  job.importer.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 0 failed"});
  const Verdict verdict = job.Judge(kLive, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kHalfDone);
  EXPECT_EQ(verdict.rank, 0);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_EQ(verdict.seq, seq);
  EXPECT_EQ(verdict.remedy.action, Action::kResumeAgain);
  EXPECT_HAS(verdict.summary, "Mapping again failed.");
  EXPECT_HAS(verdict.summary, "Now rank 1 is running and rank 0 is neither running nor paused.");
}

TEST(VerdictKind, broken_session_is_the_cause_of_what_the_others_waited_for) {
  CycleJob job;
  const SequenceNumber seq = job.importer.Then(SessionBroken{"append event: no space left on device"});
  job.Arrive(job.owner, CycleKind::kPause);
  job.clock += kSecond;
  job.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "waited 1000 ms for rank 1 to come"});
  const Verdict verdict = job.Judge(kLive, SessionStatus::kBroken);
  EXPECT_EQ(verdict.kind, VerdictKind::kBroken) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_EQ(verdict.seq, seq);
  EXPECT_EQ(verdict.code, Code::kBroken);
  EXPECT_EQ(verdict.remedy.action, Action::kRepairJournal);
  EXPECT_HAS(verdict.summary, "The reason: Append event: no space left on device.");
}

// The owner's journal does not know the importer's reference, and the importer's resume fails: at a step, or by its vote.
Verdict OfUnknownReference(bool at_a_step) {
  CycleJob job;
  std::vector<Event>& events = job.owner.events();
  std::erase_if(events, [](const Event& e) { return std::holds_alternative<ReferenceAdded>(e.body); });
  for (std::size_t i = 0; i < events.size(); ++i) events[i].seq = SequenceNumber{i + 1};
  job.Pause();
  job.BeginAll(CycleKind::kResume);
  job.PhaseOfAll(PhaseKind::kResumeArrive);
  job.PhaseOfAll(PhaseKind::kResumeCreateOwn);
  if (at_a_step) {
    const Step step = job.WorkInto(job.importer, PhaseKind::kResumeImport, StepKind::kImport);
    job.importer.Then(StepFailed{step, Code::kNotFound, 0, "the owner knows no such reference"});
  } else {
    job.importer.Then(PhaseBegun{PhaseKind::kResumeImport});
  }
  job.Work(job.owner, PhaseKind::kResumeImport);
  job.GiveUp(CycleKind::kResume, PhaseKind::kResumeImport, job.importer.id(), "the owner knows no such reference", false);
  const Verdict verdict = job.Judge(kLive, kLive);
  EXPECT_EQ(verdict.kind, VerdictKind::kReferences) << verdict.summary;
  EXPECT_EQ(verdict.rank, 1);
  EXPECT_EQ(verdict.allocation, job.imported);
  EXPECT_EQ(verdict.phase, PhaseKind::kResumeImport);
  EXPECT_EQ(verdict.remedy.action, Action::kReportReference);
  return verdict;
}

TEST(VerdictKind, references_disagree_and_a_step_failed_because_of_it) {
  EXPECT_EQ(OfUnknownReference(true).step->kind, StepKind::kImport);
}

TEST(VerdictKind, references_disagree_and_a_vote_was_no_because_of_it) {
  const Verdict verdict = OfUnknownReference(false);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_HAS(verdict.summary,
             "It holds allocation 1 (2 MiB on device 0, which belongs to rank 0 as allocation 1), and the owner's "
             "journal does not know that reference.");
}

TEST(VerdictKind, impossible_order_of_events_is_found_at_its_event) {
  std::uint64_t clock = kSecond;
  Story story(0x5, 7, &clock);
  const SequenceNumber seq = story.Then(Unmapped{.address = Address{0x7f0000000000}, .bytes = 2 * kMiB});
  test::MemoryReader reader(story.events(), story.id(), kClosed);
  Result<SessionStory> history = ReadStory(reader);
  ASSERT_TRUE(history.ok());
  const std::vector<SessionStory> journals = {*std::move(history)};
  const Verdict verdict = Diagnose(journals);
  EXPECT_EQ(verdict.kind, VerdictKind::kImpossible);
  EXPECT_EQ(verdict.rank, 7);
  EXPECT_EQ(verdict.step, std::nullopt);
  EXPECT_EQ(verdict.seq, seq);
  EXPECT_EQ(verdict.remedy.action, Action::kReportJournals);
}

// ---- journals in directories -----------------------------------------------------------------------------------------------

class VerdictOfDirectories : public ::testing::Test {
 protected:
  // The journal of a session that closed in order.
  std::filesystem::path Write(const std::filesystem::path& below) {
    std::uint64_t clock = kSecond;
    Story story(0x5, 7, &clock);
    story.Then(SessionClosed{.reason = "exit"});
    return test::WriteJournal(story, *scratch_.Get() / below);
  }
  static Result<Verdict> Judge(const std::vector<std::filesystem::path>& sessions) { return Diagnose(sessions); }

  ScratchDirectory scratch_;
};

TEST_F(VerdictOfDirectories, is_healthy_if_all_could_be_read) {
  const Result<Verdict> verdict = Judge({Write("a")});
  ASSERT_TRUE(verdict.ok()) << verdict.status().message();
  EXPECT_TRUE(verdict->healthy()) << verdict->summary;
  EXPECT_HAS(verdict->summary, "1 process has ended in order.");
}

TEST_F(VerdictOfDirectories, is_unreadable_if_a_part_could_not_be_read) {
  const Result<Verdict> verdict = Judge({Write("a"), *scratch_.Get() / "missing"});
  ASSERT_TRUE(verdict.ok()) << verdict.status().message();
  EXPECT_EQ(verdict->kind, VerdictKind::kUnreadable);
  EXPECT_EQ(verdict->rank, -1);
  EXPECT_EQ(verdict->step, std::nullopt);
  EXPECT_EQ(verdict->remedy.action, Action::kGiveWholeJournals);
  ASSERT_EQ(verdict->damage.size(), 1u);
  EXPECT_HAS(verdict->damage[0], "missing");
  EXPECT_HAS(verdict->summary, "missing");
}

TEST_F(VerdictOfDirectories, leaves_out_a_second_copy_of_a_journal_and_says_so) {
  const std::filesystem::path journal = Write("a"), copy = *scratch_.Get() / "b" / journal.filename();
  std::filesystem::create_directories(copy.parent_path());
  std::filesystem::copy(journal, copy, std::filesystem::copy_options::recursive);
  const Result<Verdict> verdict = Judge({journal, copy});
  ASSERT_TRUE(verdict.ok()) << verdict.status().message();
  EXPECT_EQ(verdict->totals.journals, 1u);
  EXPECT_TRUE(verdict->certain());
  ASSERT_EQ(verdict->notes.size(), 1u);
  EXPECT_HAS(verdict->notes[0], "is another copy of a journal that was given");
}

TEST_F(VerdictOfDirectories, a_plain_copy_of_a_live_journal_is_a_copy_and_not_a_crash) {
  std::uint64_t clock = kSecond;
  Story story(0x5, 7, &clock);
  auto writer = test::BeginJournal(story, *scratch_.Get() / "live");
  ASSERT_NE(writer, nullptr);
  ASSERT_TRUE(writer->Flush().ok());
  const std::filesystem::path journal = writer->Directory(), copy = *scratch_.Get() / "copy" / journal.filename();
  std::filesystem::create_directories(copy.parent_path());
  std::filesystem::copy(journal, copy, std::filesystem::copy_options::recursive);
  const auto status = [](const std::filesystem::path& directory) { return (*JournalReader::Open(directory))->Info()->status; };
  EXPECT_EQ(status(journal), kLive);
  EXPECT_EQ(status(copy), SessionStatus::kCopied);
  const Result<Verdict> verdict = Judge({copy});
  ASSERT_TRUE(verdict.ok());
  EXPECT_TRUE(verdict->healthy()) << verdict->summary;
  writer.reset();
  EXPECT_EQ(status(journal), kCrashed) << "the journal itself tells that its process is dead";
  EXPECT_EQ(status(copy), SessionStatus::kCopied);
}

TEST_F(VerdictOfDirectories, are_told_job_by_job_and_the_newest_failure_first) {
  std::uint64_t clock = kSecond;
  for (const std::uint64_t session : {1, 2, 3}) {  // rank 0 was started three times, and the last time it went well
    clock += 100 * kSecond;
    Story story(session, 0, &clock);
    std::get<SessionOpened>(story.events()[0].body).realtime_ns += clock;
    if (session != 3) story.Then(PhaseBegun{PhaseKind::kPauseArrive});
    if (session != 3) story.Then(CycleFailed{CycleKind::kPause, 1, true, "no", Code::kRefused});
    clock += 50 * kSecond;
    story.Then(SessionClosed{.reason = "exit"});
    test::WriteJournal(story, *scratch_.Get() / "jobs");
  }
  const Result<std::vector<Verdict>> verdicts = DiagnoseJobs(*ListSessions(*scratch_.Get() / "jobs"));
  ASSERT_TRUE(verdicts.ok()) << verdicts.status().message();
  ASSERT_EQ(verdicts->size(), 3u);
  EXPECT_EQ((*verdicts)[0].session, SessionId{2});
  EXPECT_EQ((*verdicts)[1].session, SessionId{1});
  EXPECT_TRUE((*verdicts)[2].healthy());
  EXPECT_HAS((*verdicts)[0].job, "1 process on host alpha, since ");
}

TEST_F(VerdictOfDirectories, fails_if_nothing_could_be_read) {
  EXPECT_HAS(Judge({}).status().message(), "give a directory of journals, or a pack");
  const Result<Verdict> verdict = Judge({*scratch_.Get() / "missing"});
  EXPECT_EQ(verdict.status().code(), Code::kNotFound);
  EXPECT_HAS(verdict.status().message(), "none of the journals could be read");
}

}  // namespace
}  // namespace amem
