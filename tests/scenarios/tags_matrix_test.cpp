// Crash at every step of a tag's pause and resume: one rank of two is killed before each driver call and before each append to
// its journal, or one call fails there, or all from there on. The other rank never notices more than a peer's death; the pool
// is as before or done, its contents are kept, it can be tried again, and the journal tells it.
//
// The expected memory is computed here from the scenario (rank_process.h), and not taken from AMem's own account.
#include <gtest/gtest.h>

#include <csignal>
#include <map>

#include "replay/diagnosis/diagnosis.h"
#include "replay/job/postmortem.h"
#include "replay/job/sessions.h"
#include "tests/scenarios/rank_checks.h"
#include "tests/scenarios/rank_process.h"

namespace amem::test {
namespace {

constexpr std::uint64_t kTagVersion = 4;
constexpr Bytes kNccls = kRing + kOwn + kBare + kLeft;  // of a rank whose next rank lives

const char* NameOfOp(Op op) { return op == Op::kPauseTag ? "pause of the tag" : "resume of the tag"; }

class TagMatrix : public ::testing::Test {
 protected:
  static std::unique_ptr<RankProcesses> Start(Op op) {
    auto job = std::make_unique<RankProcesses>(2, Layout::kDirect, kPatienceMs, false, true);
    AllOk(*job, {.op = Op::kFill, .version = kTagVersion}, "fill");
    if (op == Op::kResumeTag) ExpectOk(job->Do(0, {.op = Op::kPauseTag}), "first pause of the tag");
    return job;
  }
  static void ExpectOk(const std::optional<Reply>& reply, const std::string& what) {
    ASSERT_TRUE(reply.has_value()) << what << ": it died";
    EXPECT_TRUE(reply->ok()) << what << ": " << reply->text.data();
  }

  // How many driver calls and appends rank 0 makes when nothing fails.
  static std::pair<std::uint64_t, std::uint64_t> Survey(Op op) {
    auto job = Start(op);
    ExpectOk(job->Do(0, {.op = Op::kArm}), "arm");
    const auto reply = job->Do(0, {.op = op});
    ExpectOk(reply, NameOfOp(op));
    return reply ? std::pair(reply->calls, reply->appends) : std::pair(std::uint64_t{0}, std::uint64_t{0});
  }

  // All journals fold and agree; the verdict of the dead one's names the tag if it died in the middle.
  void Judge(const RankProcesses& job, const std::string& where) {
    auto sessions = ListSessions(job.directory() / "journal");
    ASSERT_TRUE(sessions.ok());
    std::vector<JournalFindings> findings;
    for (const auto& path : *sessions) {
      auto reader = JournalReader::Open(path);
      ASSERT_TRUE(reader.ok()) << reader.status().message();
      auto found = VerifyJournal(**reader);
      ASSERT_TRUE(found.ok()) << found.status().message();
      for (const Violation& v : found->violations) ADD_FAILURE() << where << ": event " << v.seq.value << ": " << v.text;
      findings.push_back(*std::move(found));
    }
    for (const Violation& v : VerifyJob(findings).violations)
      ADD_FAILURE() << where << ": " << Hex(v.session.value) << " event " << v.seq.value << ": " << v.text;
    const auto dead = std::ranges::find(findings, RankProcesses::SessionOf(0), [](const auto& f) { return f.info.session; });
    ASSERT_NE(dead, findings.end());
    if (dead->info.status != SessionStatus::kCrashed) return;
    const Pool& pool = dead->state.pools.begin()->second;
    if (pool.cycle.open_step) ++named_[pool.cycle.open_step->kind];
    const Result<Verdict> verdict = Diagnose(*sessions);
    ASSERT_TRUE(verdict.ok()) << verdict.status().message();
    EXPECT_EQ(verdict->rank, 0) << where << ": " << verdict->headline;
    if (pool.lifecycle != Lifecycle::kPausing && pool.lifecycle != Lifecycle::kResuming) return;
    ++in_the_middle_;
    EXPECT_EQ(verdict->kind, VerdictKind::kDied) << where << ": " << verdict->headline;
    EXPECT_EQ(verdict->tag, "weights") << where << ": " << verdict->headline;
    if (pool.cycle.open_step) {
      EXPECT_EQ(verdict->step, pool.cycle.open_step) << where;
    }
  }

  void KillAt(Op op, Fault fault, std::uint64_t nth) {
    const std::string where = "killed before " + std::string(fault == Fault::kKillAtCall ? "driver call " : "append ") +
                              std::to_string(nth) + " of the " + NameOfOp(op);
    SCOPED_TRACE(where);
    auto job = Start(op);
    job->Do(0, {.op = Op::kArm, .fault = fault, .nth = nth});
    job->Do(0, {.op = op});
    ++tried_;
    if (job->alive(0)) return;
    ++killed_;
    EXPECT_EQ(job->Wait(0), SIGKILL);
    // The other rank has its tensors, and pauses and resumes them and NCCL's memory.
    for (const Op each : {Op::kPauseTag, Op::kPause, Op::kResumeTag, Op::kResume}) {
      ExpectOk(job->Do(1, {.op = each}), "the other rank");
      ExpectOk(job->Do(1, {.op = Op::kCheck, .version = kTagVersion}), "check of the other rank");
    }
    ExpectInUse(*job, 1, kRing + kOwn + kBare + kChunk + kPage, where);  // a page stands in for what the dead one had shared
    ExpectOk(job->Do(1, {.op = Op::kFree}), "free");
    ExpectOk(job->Do(1, {.op = Op::kClose}), "close");
    EXPECT_EQ(job->Wait(1), 0);
    Judge(*job, where);
  }
  void KillEverywhere(Op op) {
    const auto [calls, appends] = Survey(op);
    ASSERT_GT(calls, 0U);
    ASSERT_GT(appends, 0U);
    for (std::uint64_t nth = 1; nth <= calls && !HasFailure(); ++nth) KillAt(op, Fault::kKillAtCall, nth);
    for (std::uint64_t nth = 1; nth <= appends && !HasFailure(); ++nth) KillAt(op, Fault::kKillAtAppend, nth);
    std::printf("%s: killed at %lu of %lu points, %lu in the middle\n", NameOfOp(op), killed_, tried_, in_the_middle_);
    for (const auto& [step, times] : named_)
      std::printf("  %d journals end in step \"%s\"\n", times, std::string(ToText(step)).c_str());
    if (HasFailure()) return;
    EXPECT_GE(10 * killed_, 9 * tried_) << "ranks that were to die lived on";
    const std::vector<StepKind> always =
        op == Op::kPauseTag ? std::vector{StepKind::kQuiesce, StepKind::kUnmap, StepKind::kReleaseOwn}
                            : std::vector{StepKind::kCheckMemory, StepKind::kCreate, StepKind::kMap, StepKind::kSetAccess};
    for (const StepKind step : always) EXPECT_GT(named_[step], 0) << "nobody died in step \"" << ToText(step) << "\"";
  }

  // One job for all points: what failed is undone and tried again, and then the next point can be tried.
  void FailEverywhere(Op op, Fault fault) {
    auto job = Start(op);
    const Lifecycle before = op == Op::kPauseTag ? Lifecycle::kRunning : Lifecycle::kPaused;
    std::uint64_t failed = 0;
    for (std::uint64_t nth = 1; !HasFailure(); ++nth) {
      const std::string where = NameOfOp(op) +
                                std::string(fault == Fault::kFailCall ? ", driver call " : ", all from driver call ") +
                                std::to_string(nth) + " fail";
      SCOPED_TRACE(where);
      job->Do(0, {.op = Op::kArm, .fault = fault, .nth = nth});
      const auto reply = job->Do(0, {.op = op});
      job->Do(0, {.op = Op::kArm});
      ASSERT_TRUE(reply.has_value());
      if (!reply->ok()) {
        ++failed;
        EXPECT_TRUE(reply->fired) << reply->text.data();
        EXPECT_NE(std::string(reply->text.data()).find("weights"), std::string::npos) << reply->text.data();
        if (fault == Fault::kFailCall) {
          EXPECT_EQ(reply->tag, before) << reply->text.data();
          ExpectInUse(*job, 0, kNccls + (before == Lifecycle::kRunning ? kChunk : 0), where);
        }
      }
      EXPECT_EQ(reply->lifecycle, Lifecycle::kRunning) << "NCCL's memory is none of a tag's business";
      ExpectOk(job->Do(0, {.op = Op::kCheck, .fault = fault, .version = kTagVersion}), "check");
      // What was half done is mended by a resume.
      ExpectOk(job->Do(0, {.op = Op::kResumeTag}), "resume after that");
      ExpectOk(job->Do(0, {.op = Op::kCheck, .version = kTagVersion}), "check after the resume");
      ExpectInUse(*job, 0, kNccls + kChunk, where);
      if (op == Op::kResumeTag) ExpectOk(job->Do(0, {.op = Op::kPauseTag}), "pause after that");
      if (!reply->fired) break;  // the whole cycle was walked
    }
    EXPECT_GT(failed, 0U) << "no failure of a call made a pause or resume fail";
    if (op == Op::kResumeTag) ExpectOk(job->Do(0, {.op = Op::kResumeTag}), "last resume");
    AllOk(*job, {.op = Op::kCheck, .version = kTagVersion}, "check at the end");
    AllOk(*job, {.op = Op::kFree}, "free");
    ExpectInUse(*job, 0, 0, "all freed");
    AllOk(*job, {.op = Op::kClose}, "close");
    for (const int rank : {0, 1}) EXPECT_EQ(job->Wait(rank), 0);
    Judge(*job, "at the end");
    std::printf("%s: %s, %lu failed\n", NameOfOp(op), fault == Fault::kFailCall ? "a call failed" : "all calls from one on",
                failed);
  }

  std::uint64_t tried_ = 0, killed_ = 0, in_the_middle_ = 0;
  std::map<StepKind, int> named_;  // the steps that journals of the dead leave open
};

TEST_F(TagMatrix, killed_anywhere_in_a_pause) { KillEverywhere(Op::kPauseTag); }
TEST_F(TagMatrix, killed_anywhere_in_a_resume) { KillEverywhere(Op::kResumeTag); }
TEST_F(TagMatrix, a_call_of_a_pause_fails) { FailEverywhere(Op::kPauseTag, Fault::kFailCall); }
TEST_F(TagMatrix, a_call_of_a_resume_fails) { FailEverywhere(Op::kResumeTag, Fault::kFailCall); }
TEST_F(TagMatrix, all_calls_of_a_pause_fail_from_one_on) { FailEverywhere(Op::kPauseTag, Fault::kFailAllCalls); }
TEST_F(TagMatrix, all_calls_of_a_resume_fail_from_one_on) { FailEverywhere(Op::kResumeTag, Fault::kFailAllCalls); }

TEST_F(TagMatrix, a_tag_and_nccl_pause_and_resume_in_any_order) {
  auto job = Start(Op::kPauseTag);
  for (const bool tag_first : {true, false}) {
    for (const bool tag_back_first : {true, false}) {
      AllOk(*job, {.op = tag_first ? Op::kPauseTag : Op::kPause}, "first pause");
      ExpectInUse(*job, 0, tag_first ? kNccls : kChunk, "one is paused");
      AllOk(*job, {.op = tag_first ? Op::kPause : Op::kPauseTag}, "second pause");
      ExpectInUse(*job, 0, 0, "both are paused");
      AllOk(*job, {.op = tag_back_first ? Op::kResumeTag : Op::kResume}, "first resume");
      ExpectInUse(*job, 0, tag_back_first ? kChunk : kNccls, "one is back");
      AllOk(*job, {.op = Op::kCheck, .version = kTagVersion}, "check");
      AllOk(*job, {.op = tag_back_first ? Op::kResume : Op::kResumeTag}, "second resume");
      ExpectInUse(*job, 0, kNccls + kChunk, "both are back");
      AllOk(*job, {.op = Op::kCheck, .version = kTagVersion}, "check");
    }
  }
}

TEST_F(TagMatrix, a_device_filled_meanwhile_fails_the_resume_which_leaves_the_tag_paused_and_intact) {
  auto job = Start(Op::kResumeTag);
  ASSERT_TRUE(job->Do(0, {.op = Op::kHog, .version = 1})->ok());
  const auto reply = job->Do(0, {.op = Op::kResumeTag});
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->code, Code::kOutOfMemory) << reply->text.data();
  EXPECT_EQ(reply->tag, Lifecycle::kPaused);
  auto sessions = ListSessions(job->directory() / "journal");
  ASSERT_TRUE(sessions.ok());
  const Result<Verdict> verdict = Diagnose(*sessions);
  ASSERT_TRUE(verdict.ok()) << verdict.status().message();
  EXPECT_EQ(verdict->kind, VerdictKind::kOutOfMemory) << verdict->headline;
  EXPECT_EQ(verdict->tag, "weights");
  EXPECT_EQ(verdict->rank, 0);
  EXPECT_EQ(verdict->remedy.action, Remedy::Action::kFreeMemory);
  ASSERT_TRUE(job->Do(0, {.op = Op::kHog, .version = 0})->ok());
  ExpectOk(job->Do(0, {.op = Op::kResumeTag}), "resume");
  ExpectOk(job->Do(0, {.op = Op::kCheck, .version = kTagVersion}), "check");
}

}  // namespace
}  // namespace amem::test
