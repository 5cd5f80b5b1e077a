// Remedies: every action and outlook has a sentence, and the facts are in it.
#include "replay/diagnosis/remedy.h"

#include <gtest/gtest.h>

#include <set>

namespace amem {
namespace {

using Action = Remedy::Action;
using Outlook = Remedy::Outlook;

Remedy Of(Action action, Outlook outlook = Outlook::kUnsaid) {
  return {.action = action,
          .outlook = outlook,
          .cycle = CycleKind::kResume,
          .process = "rank 2",
          .pid = 4711,
          .device = DeviceOrdinal{3},
          .gpu = "GPU-abc",
          .bytes = Bytes{36} << 20};
}
bool Has(const Remedy& remedy, const std::string& part) { return ToText(remedy).find(part) != std::string::npos; }

TEST(Remedy, of_nothing_is_silent) { EXPECT_EQ(ToText(Remedy{}), ""); }

TEST(Remedy, each_action_and_each_outlook_has_a_sentence_of_its_own) {
  std::set<std::string> actions, outlooks;
  for (std::size_t i = 0; i < kRemedyActions; ++i) actions.insert(ToText(Of(static_cast<Action>(i))));
  for (std::size_t i = 0; i < kRemedyOutlooks; ++i) outlooks.insert(ToText(Of(Action::kNone, static_cast<Outlook>(i))));
  EXPECT_EQ(actions.size(), kRemedyActions);
  EXPECT_EQ(outlooks.size(), kRemedyOutlooks);
  for (const std::string& text : actions) EXPECT_EQ(text.find_first_of("{}"), std::string::npos) << text;
  for (const std::string& text : outlooks) EXPECT_EQ(text.find_first_of("{}"), std::string::npos) << text;
}

// One phrase of each, in the order of the enumerations: a sentence must not slip to its neighbour.
TEST(Remedy, each_action_has_the_sentence_that_belongs_to_it) {
  for (const auto& [action, part] : std::initializer_list<std::pair<Action, const char*>>{
           {Action::kFreeMemory, "free memory on device 3 of rank 2 until 36 MiB fit (GPU-abc); `nvidia-smi -i GPU-abc` lists"},
           {Action::kEndCaptures, "end stream captures"},
           {Action::kFindDriverError, "earlier CUDA error"},
           {Action::kExaminePeer, "the peer that the reason above names"},
           {Action::kReadMessage, "remove the reason given above; `amem log`"},
           {Action::kFollowVote, "otherwise call ncclResume again on all ranks"},
           {Action::kFollowRefusal, "remove the reason given above, then call ncclResume again on all ranks"},
           {Action::kCallOnEveryRank,
            "call ncclResume on every rank that shares memory, in any order; find out what prevents rank 2"},
           {Action::kExamineProcess, "inspect the stacks of rank 2 (gdb -p 4711, py-spy dump --pid 4711)"},
           {Action::kFindReasonOfDeath, "find what ended that process"},
           {Action::kFindReasonOfEnd, "if it was not meant to end"},
           {Action::kRepairJournal, "AMEM_JOURNAL_DIR"},
           {Action::kResumeAgain, "call ncclResume again on all ranks to finish"},
           {Action::kReportReference, "the owner does not know the reference"},
           {Action::kReportJournals, "this should not be possible"},
           {Action::kGiveWholeJournals, "supply complete journals"},
           {Action::kExamineGpu, "end the job and have device 3 of rank 2 (GPU-abc) examined"},
           {Action::kAvoidDisplay, "take the display off device 3 of rank 2 (GPU-abc)"}}) {
    EXPECT_TRUE(Has(Of(action), part)) << ToText(Of(action)) << "\nhas not: " << part;
  }
  for (const auto& [outlook, part] : std::initializer_list<std::pair<Outlook, const char*>>{
           {Outlook::kCallAgain, "; then call ncclResume again on all ranks"},
           {Outlook::kUndoing, "has returned on all ranks"},
           {Outlook::kCannotBeUndone, "; then call ncclResume on all ranks: the failure could not be undone"},
           {Outlook::kOthersRun, "; the others run on"},
           {Outlook::kOthersMissMemory, "cannot get back the memory"},
           {Outlook::kOthersHalfWay, "need memory that it had"},
           {Outlook::kOthersResumed, "have their own memory back"}}) {
    EXPECT_TRUE(Has(Of(Action::kReadMessage, outlook), part)) << ToText(Of(Action::kReadMessage, outlook));
    EXPECT_TRUE(Has(Of(Action::kReadMessage, outlook), "remove the reason given above; `amem log` has the events before it; "));
  }
}

TEST(Remedy, for_the_dead_is_about_the_next_run_and_looks_at_no_process) {
  EXPECT_EQ(ToText(Of(Action::kReadMessage, Outlook::kAllEnded)),
            "all have ended, so for the next run: remove the reason given above; `amem log` has the events before it");
  EXPECT_TRUE(Has(Of(Action::kExamineProcess, Outlook::kAllEnded), "for the next run: inspect the stacks of rank 2: a kernel"));
  Remedy of_tag = Of(Action::kResumeAgain, Outlook::kAllEnded);
  of_tag.tag = "weights";
  EXPECT_TRUE(Has(of_tag, "all have ended, so for the next run: call amem_resume for weights again to finish"));
}

TEST(Remedy, the_call_is_that_of_the_cycle) {
  Remedy remedy = Of(Action::kCallOnEveryRank);
  remedy.cycle = CycleKind::kPause;
  EXPECT_TRUE(Has(remedy, "call ncclPause on every rank"));
}

TEST(Remedy, unknown_facts_leave_no_gap) {
  Remedy remedy = Of(Action::kFreeMemory);
  remedy.gpu.clear();
  EXPECT_TRUE(Has(remedy, "until 36 MiB fit; nvidia-smi"));
  remedy = Of(Action::kExamineProcess);
  remedy.pid = 0;
  EXPECT_TRUE(Has(remedy, "inspect the stacks of rank 2 (py-spy dump, gdb)"));
  remedy = Of(Action::kExamineGpu);
  remedy.gpu.clear();
  EXPECT_TRUE(Has(remedy, "have device 3 of rank 2 examined"));
  remedy.device.reset();
  EXPECT_TRUE(Has(remedy, "have the GPU of rank 2 examined"));
  remedy.action = Action::kAvoidDisplay;
  EXPECT_TRUE(Has(remedy, "take the display off the GPU of rank 2"));
}

}  // namespace
}  // namespace amem
