// The rank's side of a request, one look at a time: the test is the tool, and the program that comes to its safe points.
#include "replay/control/rank_control.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "journal/base/clock.h"
#include "tests/replay/control/ranks.h"

namespace amem::control {
namespace {

using test::Has;

constexpr Bytes kResident = 1000, kTagBytes = 300, kNcclBytes = 600;

class Memory final : public Actions {
 public:
  Status PauseTags() override { return Do("pause tags", &tags); }
  Status ResumeTags() override { return Do("resume tags", &tags); }
  Status PauseNccl() override {
    meanwhile();
    return Do("pause NCCL", &nccl);
  }
  bool NcclIsAway() override { return nccl; }
  Status ResumeNccl() override { return Do("resume NCCL", &nccl); }
  Bytes Held() override { return kResident - (tags ? kTagBytes : 0) - (nccl ? kNcclBytes : 0) + grown; }
  void Note(EventBody event) override {
    Allocate("note");
    notes.push_back(std::move(event));
  }
  agreement::LaunchReading HoldLaunches(const agreement::LaunchOrder& order) override {
    Allocate("hold launches");
    held = order.version;
    return {.version = order.version};
  }
  void LetLaunchesGo() override {
    held = 0;
    ++let_go;
  }
  Status AwaitLaunches() override { return Do("await launches", &awaited); }
  std::string WhyLaunchesCannotBeHeld() override { return ""; }
  Result<RankStatus> Ask(SessionId rank) override {
    asked.push_back(rank);
    return other;
  }

  // For lack of memory, in the nth such call from now on.
  void Throw(const char* what, int nth) {
    calls_until_it_throws_ = nth;
    throws_ = what;
  }
  [[nodiscard]] bool has_thrown() const { return throws_ == nullptr; }

  template <class Kind>
  [[nodiscard]] std::vector<Kind> All() const {
    std::vector<Kind> found;
    for (const EventBody& note : notes)
      if (const auto* one = std::get_if<Kind>(&note)) found.push_back(*one);
    return found;
  }

  std::vector<std::string> calls;
  std::vector<EventBody> notes;
  std::vector<SessionId> asked;
  Result<RankStatus> other = Status{Code::kPeerLost, "it has ended"};
  std::string fails;
  std::string throws;               // for lack of memory, once
  bool tags = false, nccl = false;  // are paused
  bool undo_fails = false;          // of what fails
  bool awaited = false;
  std::function<void()> meanwhile = [] {};  // by another thread of the program, while NCCL's memory is paused
  std::atomic<std::uint64_t> held = 0;      // the version of the order that holds launches
  std::atomic<int> let_go = 0;
  Bytes grown = 0;

 private:
  void Allocate(const std::string& what) {
    const char* const named = throws_.load();
    if (named == nullptr || what != named || --calls_until_it_throws_ != 0) return;
    throws_ = nullptr;
    throw std::bad_alloc();
  }
  Status Do(const std::string& what, bool* paused) {
    Allocate(what);
    calls.push_back(what);
    if (what == fails) {
      if (undo_fails) *paused = true;
      return {Code::kOutOfMemory, "no room to " + what};
    }
    *paused = what.starts_with("pause");
    return {};
  }

  std::atomic<const char*> throws_{nullptr};
  std::atomic<int> calls_until_it_throws_{0};
};

using Calls = std::vector<std::string>;

constexpr SessionId kSelf{1}, kOther{2};

class RankControlTest : public testing::Test {
 protected:
  void SetUp() override {
    Restart();
    control->Begin(kSelf, memory, 0);
    order.by_pid = 77;
  }
  // Its waits are short, and it takes a tool for stopped by the clock of the test.
  void Restart() {
    control.emplace(ServeTimes{.slice = std::chrono::milliseconds(5), .now = [this] { return now; }});
  }
  [[nodiscard]] RankStatus is() { return control->CurrentStatus(); }
  void Give() { control->OnOrder(order); }
  void AskFor(std::uint64_t request, Ask ask, std::uint64_t target = 0, bool all_tags = false) {
    order = {
        .request = request, .ask = ask, .all_tags = all_tags, .target = target, .by_pid = 77, .told_first = order.told_first};
    Give();
  }
  void Allow(Stage stage) {
    order.stage = stage;
    Give();
  }
  void Agree(std::uint64_t target) {
    order.target = target;
    Give();
  }
  void Withdraw() {
    order.ask = Ask::kNothing;
    Give();
  }
  void ToolDies() { control->OnToolGone(); }

  // Whether the program goes on from this safe point; false: it has to wait.
  bool GoesOnAt(std::uint64_t step) { return !control->Came(step) || control->Serve(step, true); }
  [[nodiscard]] Phase phase() { return is().phase; }
  [[nodiscard]] Stage done() { return is().stage_done; }
  [[nodiscard]] OwnPause own() { return is().own_pause; }
  [[nodiscard]] std::string Message() { return is().failure.message(); }
  [[nodiscard]] Code FailedWith() { return is().failure.code(); }
  void PauseAt(std::uint64_t step, bool all_tags = true) {
    AskFor(1, Ask::kPause, step, all_tags);
    ASSERT_FALSE(GoesOnAt(step));
    Allow(Stage::kNccl);
    ASSERT_FALSE(GoesOnAt(step));
    ASSERT_EQ(phase(), Phase::kPaused);
    memory.calls.clear();
  }

  Memory memory;
  Deadline now = Now();
  std::optional<RankControl> control;
  Order order;
};

// ---- checks --------------------------------------------------------------------------------------------------------------

TEST_F(RankControlTest, one_whose_state_is_not_true_says_so_to_each_request_and_runs_on) {
  Restart();  // and nobody has given it what it acts on
  AskFor(1, Ask::kPause, 5);
  EXPECT_TRUE(GoesOnAt(5));
  EXPECT_EQ(phase(), Phase::kFailed);
  EXPECT_EQ(is().about, 1U);
  EXPECT_NE(Message().find("actions_ != nullptr"), std::string::npos) << Message();
  control->Begin(kSelf, memory, 5);
  AskFor(2, Ask::kPause, 6);
  EXPECT_TRUE(GoesOnAt(6)) << "what was not true once is not trusted again";
  EXPECT_EQ(is().about, 2U);
  EXPECT_EQ(memory.All<RequestEnded>().at(0).code, Code::kInvalid);
  EXPECT_TRUE(memory.calls.empty());
}

// ---- coming --------------------------------------------------------------------------------------------------------------

TEST_F(RankControlTest, while_nothing_is_asked_a_safe_point_is_counted_and_no_more) {
  control->Begin(kSelf, memory, 4);
  EXPECT_EQ(is().steps, 4U);
  EXPECT_FALSE(control->Came(9));
  EXPECT_FALSE(control->Came(7)) << "of another thread, which is behind";
  EXPECT_EQ(is().steps, 9U);
  control->CameAt(123);
  EXPECT_EQ(is().last_step_ns, 123U);
  EXPECT_TRUE(control->Serve(9, true)) << "the request was withdrawn before this thread had looked";
  EXPECT_TRUE(memory.notes.empty());
}

TEST_F(RankControlTest, until_a_step_is_agreed_on_the_rank_is_held_where_it_comes) {
  AskFor(1, Ask::kPause);
  EXPECT_FALSE(GoesOnAt(5));
  EXPECT_EQ(phase(), Phase::kHeld);
  EXPECT_EQ(is().at, 5U);
  EXPECT_EQ(is().about, 1U);
  EXPECT_TRUE(memory.notes.empty()) << "it can still be withdrawn without a trace";
  Agree(7);
  EXPECT_TRUE(GoesOnAt(5));
  EXPECT_EQ(phase(), Phase::kRunning);
  EXPECT_TRUE(GoesOnAt(6));
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(phase(), Phase::kArrived);
}

TEST_F(RankControlTest, one_that_is_past_the_step_is_held_there) {
  AskFor(1, Ask::kPause, 7);
  EXPECT_FALSE(GoesOnAt(8));
  EXPECT_EQ(phase(), Phase::kHeld);
  EXPECT_EQ(is().at, 8U);
}

TEST_F(RankControlTest, what_is_held_runs_again_when_the_request_is_withdrawn) {
  AskFor(1, Ask::kPause);
  ASSERT_FALSE(GoesOnAt(5));
  Withdraw();
  EXPECT_TRUE(control->Serve(5, true));
  EXPECT_EQ(phase(), Phase::kRunning);
}

TEST_F(RankControlTest, at_the_agreed_step_it_says_what_it_holds_and_waits) {
  AskFor(3, Ask::kPause, 7, true);
  const std::uint64_t before = MonotonicNs();
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(is().at, 7U);
  EXPECT_GE(is().at_ns, before);
  EXPECT_EQ(is().held, kResident);
  EXPECT_EQ(is().about, 3U);
  EXPECT_FALSE(GoesOnAt(7)) << "no stage is allowed yet";
  EXPECT_TRUE(memory.calls.empty());
  EXPECT_EQ(memory.All<RequestSeen>(), (std::vector<RequestSeen>{{3, CycleKind::kPause, 77, 7, true}}));
  EXPECT_EQ(memory.All<SafepointReached>(), (std::vector<SafepointReached>{{3, 7}}));
}

TEST_F(RankControlTest, a_tool_that_is_dead_holds_nobody) {
  AskFor(1, Ask::kPause);
  ASSERT_FALSE(GoesOnAt(7));
  ToolDies();
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_EQ(phase(), Phase::kRunning);
  EXPECT_FALSE(control->Came(8)) << "and nothing of it is left";
}

TEST_F(RankControlTest, a_tool_that_is_stopped_holds_nobody_for_long) {
  AskFor(1, Ask::kPause, 5);
  ASSERT_FALSE(GoesOnAt(5));
  now += std::chrono::milliseconds(29'999);
  EXPECT_FALSE(GoesOnAt(5));
  control->OnOrder({});  // a sign of life
  now += std::chrono::milliseconds(29'999);
  EXPECT_FALSE(GoesOnAt(5));
  now += std::chrono::milliseconds(1);
  EXPECT_TRUE(GoesOnAt(5));
  EXPECT_EQ(memory.All<RequestEnded>().at(0).code, Code::kPeerLost);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(6)) << "a request that was void once stays void";
  EXPECT_FALSE(memory.nccl);
}

// ---- a pause -------------------------------------------------------------------------------------------------------------

TEST_F(RankControlTest, tags_are_paused_at_their_stage_and_NCCL_at_its_own) {
  AskFor(1, Ask::kPause, 7, true);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kTags);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, Calls{"pause tags"});
  EXPECT_EQ(phase(), Phase::kPausing);
  EXPECT_EQ(done(), Stage::kTags);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, Calls{"pause tags"}) << "once";
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, (Calls{"pause tags", "pause NCCL"}));
  EXPECT_EQ(phase(), Phase::kPaused);
  EXPECT_EQ(done(), Stage::kNccl);
  EXPECT_EQ(is().freed, kTagBytes + kNcclBytes);
  EXPECT_EQ(is().held, kResident - kTagBytes - kNcclBytes);
  EXPECT_EQ(memory.All<RequestEnded>(),
            (std::vector<RequestEnded>{{1, CycleKind::kPause, Code::kOk, "", kTagBytes + kNcclBytes}}));
}

TEST_F(RankControlTest, tags_that_nobody_asked_for_stay) {
  AskFor(1, Ask::kPause, 7, false);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, Calls{"pause NCCL"});
  EXPECT_EQ(is().freed, kNcclBytes);
}

TEST_F(RankControlTest, a_pause_that_holds_more_than_before_has_freed_nothing) {
  AskFor(1, Ask::kPause, 7);
  ASSERT_FALSE(GoesOnAt(7));
  memory.grown = 10'000;  // another thread
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(is().freed, 0U);
}

TEST_F(RankControlTest, a_failure_is_told_the_tags_come_back_and_the_rank_runs_on) {
  for (const auto& [request, what] : {std::pair{1U, "pause tags"}, {2U, "pause NCCL"}}) {
    memory.fails = what;
    memory.calls.clear();
    AskFor(request, Ask::kPause, 6 + request, true);
    ASSERT_FALSE(GoesOnAt(6 + request));
    Allow(Stage::kNccl);
    EXPECT_TRUE(GoesOnAt(6 + request));
    EXPECT_EQ(phase(), Phase::kFailed);
    EXPECT_EQ(FailedWith(), Code::kOutOfMemory);
    EXPECT_EQ(Message(), std::string("no room to ") + what);
    EXPECT_EQ(memory.calls.back(), "resume tags");
    EXPECT_FALSE(memory.tags || memory.nccl);
    EXPECT_EQ(memory.All<RequestEnded>().back().code, Code::kOutOfMemory);
    EXPECT_TRUE(GoesOnAt(20)) << "nothing more is to be done about this request";
    EXPECT_EQ(phase(), Phase::kFailed) << "which the tool may still have to read";
  }
}

TEST_F(RankControlTest, the_failure_of_an_earlier_request_is_none_of_the_next) {
  memory.fails = "pause NCCL";
  AskFor(1, Ask::kPause, 7);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kNccl);
  ASSERT_TRUE(GoesOnAt(7));
  ASSERT_NE(FailedWith(), Code::kOk);
  AskFor(2, Ask::kPause);
  ASSERT_FALSE(GoesOnAt(8));
  EXPECT_EQ(FailedWith(), Code::kOk);
}

TEST_F(RankControlTest, tags_that_do_not_come_back_keep_the_rank_until_a_resume_from_outside) {
  AskFor(1, Ask::kPause, 7, true);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kTags);
  ASSERT_FALSE(GoesOnAt(7));
  memory.fails = "resume tags";
  Withdraw();
  EXPECT_FALSE(GoesOnAt(7) && control->Serve(7, true));
  EXPECT_EQ(phase(), Phase::kPaused);
  EXPECT_TRUE(Has(Message(), "withdrawn; then its tags could not be resumed: no room")) << Message();
  memory.fails.clear();
  memory.calls.clear();
  EXPECT_FALSE(control->Serve(7, true));
  EXPECT_EQ(memory.calls, Calls{}) << "nobody has asked for it";
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, Calls{"resume tags"}) << "NCCL's memory never went";
  EXPECT_EQ(phase(), Phase::kRunning);
  EXPECT_EQ(memory.All<RequestEnded>().back().request, 2U);
}

TEST_F(RankControlTest, a_pause_whose_undo_failed_too_keeps_the_rank_until_a_resume_from_outside) {
  memory.fails = "pause NCCL";
  memory.undo_fails = true;
  AskFor(1, Ask::kPause, 7, true);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7)) << "its launches would be refused";
  EXPECT_FALSE(control->Serve(7, true));
  EXPECT_EQ(phase(), Phase::kPaused);
  EXPECT_EQ(Message(), "no room to pause NCCL");
  EXPECT_EQ(memory.calls, (Calls{"pause tags", "pause NCCL"}));
  EXPECT_EQ(memory.All<RequestEnded>().back().kind, CycleKind::kPause);
  EXPECT_EQ(memory.All<RequestEnded>().back().code, Code::kOutOfMemory);
  Withdraw();
  ToolDies();
  EXPECT_FALSE(control->Serve(7, true));
  memory.calls.clear();
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  EXPECT_TRUE(control->Serve(7, true));
  EXPECT_EQ(memory.calls, (Calls{"resume tags", "resume NCCL"}));
  EXPECT_FALSE(memory.tags || memory.nccl);
  EXPECT_EQ(phase(), Phase::kRunning);
}

TEST_F(RankControlTest, NCCL_that_the_program_itself_has_paused_meanwhile_is_left_to_it) {
  memory.fails = "pause NCCL";
  memory.meanwhile = [&] {
    memory.nccl = true;
    control->OwnPauseEnded(true);
  };
  AskFor(1, Ask::kPause, 7, true);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_EQ(phase(), Phase::kFailed);
  EXPECT_EQ(memory.calls, (Calls{"pause tags", "pause NCCL", "resume tags"}));
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(8));
  EXPECT_TRUE(memory.nccl);
}

TEST_F(RankControlTest, a_second_pause_tries_again_what_the_first_could_not_undo) {
  memory.fails = "pause NCCL";
  memory.undo_fails = true;
  AskFor(1, Ask::kPause, 7);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kNccl);
  ASSERT_FALSE(GoesOnAt(7));
  AskFor(2, Ask::kPause, 7);
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(Message(), "no room to pause NCCL");
  EXPECT_NE(done(), Stage::kNccl);
  EXPECT_EQ(memory.All<RequestEnded>().back(), (RequestEnded{2, CycleKind::kPause, Code::kOutOfMemory, Message(), 0}));
  memory.fails = "resume NCCL";  // it could not be undone either, for all that is known
  AskFor(3, Ask::kResume);
  Allow(Stage::kNccl);
  EXPECT_FALSE(control->Serve(7, true));
  AskFor(4, Ask::kPause, 7);
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(done(), Stage::kNccl);
  EXPECT_EQ(memory.All<RequestEnded>().back(), (RequestEnded{4, CycleKind::kPause, Code::kOk, "", 0}));
  memory.fails.clear();
  AskFor(5, Ask::kPause, 7);
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, (Calls{"pause NCCL", "pause NCCL", "resume tags", "resume NCCL", "pause NCCL"}));
}

TEST_F(RankControlTest, a_second_pause_that_fails_and_is_undone_lets_the_rank_run) {
  memory.fails = "pause NCCL";
  memory.undo_fails = true;
  AskFor(1, Ask::kPause, 7, true);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kNccl);
  ASSERT_FALSE(GoesOnAt(7));
  memory.undo_fails = memory.nccl = false;
  AskFor(2, Ask::kPause, 7);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_EQ(phase(), Phase::kFailed);
  EXPECT_FALSE(memory.tags);
}

TEST_F(RankControlTest, a_request_that_is_withdrawn_leaves_the_rank_as_it_was) {
  AskFor(1, Ask::kPause, 7, true);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kTags);
  ASSERT_FALSE(GoesOnAt(7));
  Withdraw();
  EXPECT_TRUE(control->Serve(7, true));
  EXPECT_FALSE(memory.tags);
  EXPECT_EQ(phase(), Phase::kRunning);
  const RequestEnded ended = memory.All<RequestEnded>().at(0);
  EXPECT_EQ(ended.code, Code::kRefused);
  EXPECT_EQ(ended.message, "the request was withdrawn");
}

TEST_F(RankControlTest, one_that_is_replaced_while_the_rank_waits_is_withdrawn) {
  AskFor(1, Ask::kPause, 7);
  ASSERT_FALSE(GoesOnAt(7));
  AskFor(2, Ask::kPause, 9);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(7)) << "it is to come to step 9";
  EXPECT_FALSE(memory.nccl);
  EXPECT_EQ(is().about, 2U);
}

// ---- the tool dies -------------------------------------------------------------------------------------------------------

// Another rank of the job, which was told first, and says so when it is asked.
class AnotherRank : public RankControlTest {
 protected:
  void SetUp() override {
    RankControlTest::SetUp();
    order.told_first = kOther;
    AskFor(1, Ask::kPause, 7, true);
    ASSERT_FALSE(GoesOnAt(7));
    Allow(Stage::kTags);
    ASSERT_FALSE(GoesOnAt(7));
    told = {.request = 1, .ask = Ask::kPause, .stage = Stage::kNccl};
  }
  bool GivesUp() {
    RankStatus other;
    other.asked = told;
    memory.other = other;
    ToolDies();
    const bool goes_on = GoesOnAt(7);
    EXPECT_EQ(memory.asked, (std::vector<SessionId>{kOther}));
    EXPECT_EQ(phase(), goes_on ? Phase::kRunning : Phase::kPaused);
    EXPECT_EQ(memory.tags && memory.nccl, !goes_on);
    return goes_on;
  }
  Order told;
};

TEST_F(AnotherRank, was_told_and_so_this_one_goes_through) { EXPECT_FALSE(GivesUp()); }

TEST_F(AnotherRank, was_not_told_and_so_this_one_gives_up) {
  told.stage = Stage::kTags;
  EXPECT_TRUE(GivesUp());
  EXPECT_FALSE(memory.tags || memory.nccl);
  EXPECT_EQ(memory.All<RequestEnded>().at(0).code, Code::kPeerLost);
}

TEST_F(AnotherRank, was_told_of_another_request) {
  told.request = 2;
  EXPECT_TRUE(GivesUp());
}

TEST_F(AnotherRank, was_told_to_resume) {
  told.ask = Ask::kResume;
  EXPECT_TRUE(GivesUp());
}

TEST_F(AnotherRank, has_ended) {
  ToolDies();
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_FALSE(memory.nccl);
}

TEST_F(AnotherRank, does_not_answer_and_is_asked_again_until_it_does) {
  memory.other = Status{Code::kTimeout, "it is stopped"};
  ToolDies();
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_FALSE(memory.nccl);
  EXPECT_EQ(phase(), Phase::kPausing);
  memory.asked.clear();
  EXPECT_FALSE(GivesUp());
}

TEST_F(AnotherRank, cannot_be_asked_and_may_have_been_told_all_the_same) {
  for (const Code code : {Code::kIo, Code::kRefused, Code::kInvalid}) {
    memory.other = Status{code, "there are no descriptors left"};
    ToolDies();
    EXPECT_FALSE(GoesOnAt(7)) << ToText(code);
    EXPECT_EQ(phase(), Phase::kPausing);
  }
  memory.asked.clear();
  EXPECT_FALSE(GivesUp()) << "it was told, and says so now";
}

TEST_F(AnotherRank, counts_only_from_the_stage_of_tags_on) {
  Allow(Stage::kCome);
  ToolDies();
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_TRUE(memory.asked.empty());
}

TEST_F(RankControlTest, the_one_that_was_told_first_asks_nobody) {
  order.told_first = kSelf;
  AskFor(1, Ask::kPause, 7, true);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kTags);
  ASSERT_FALSE(GoesOnAt(7));
  ToolDies();
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_TRUE(memory.asked.empty());
  EXPECT_FALSE(memory.tags || memory.nccl);
}

TEST_F(RankControlTest, a_pause_that_was_told_goes_through_without_the_tool) {
  AskFor(1, Ask::kPause, 7, true);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kNccl);
  ToolDies();
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_TRUE(memory.tags && memory.nccl);
}

// ---- paused, and a resume ------------------------------------------------------------------------------------------------

TEST_F(RankControlTest, paused_it_stays_until_it_is_asked) {
  PauseAt(7);
  EXPECT_FALSE(GoesOnAt(7));
  Withdraw();  // by a tool that tidied up
  EXPECT_FALSE(control->Serve(7, true));
  EXPECT_TRUE(memory.calls.empty());
}

TEST_F(RankControlTest, a_resume_brings_tags_first_and_NCCL_when_all_have_theirs) {
  PauseAt(7);
  AskFor(2, Ask::kResume);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, Calls{"resume tags"});
  EXPECT_EQ(phase(), Phase::kResuming);
  EXPECT_EQ(done(), Stage::kTags);
  EXPECT_EQ(is().about, 2U);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls.size(), 1U);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, (Calls{"resume tags", "resume NCCL"}));
  EXPECT_EQ(phase(), Phase::kRunning);
  EXPECT_EQ(done(), Stage::kNccl);
  EXPECT_EQ(is().held, kResident);
  EXPECT_EQ(memory.All<RequestSeen>().back(), (RequestSeen{2, CycleKind::kResume, 77, 0, false}));
  EXPECT_EQ(memory.All<RequestEnded>().back(), (RequestEnded{2, CycleKind::kResume, Code::kOk, "", 0}));
  EXPECT_TRUE(GoesOnAt(8)) << "the request is settled";
  EXPECT_EQ(memory.All<RequestSeen>().size(), 2U);
}

TEST_F(RankControlTest, a_resume_goes_on_without_its_tool) {
  PauseAt(7);
  AskFor(2, Ask::kResume);
  ToolDies();
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_FALSE(memory.tags || memory.nccl);
}

TEST_F(RankControlTest, a_resume_that_fails_leaves_it_paused_and_the_next_one_mends_it) {
  PauseAt(7);
  for (const auto& [request, what] : {std::pair{2U, "resume tags"}, {3U, "resume NCCL"}}) {
    memory.fails = what;
    AskFor(request, Ask::kResume);
    Allow(Stage::kNccl);
    EXPECT_FALSE(GoesOnAt(7));
    EXPECT_EQ(phase(), Phase::kPaused);
    EXPECT_EQ(FailedWith(), Code::kOutOfMemory);
    EXPECT_EQ(Message(), std::string("no room to ") + what);
    EXPECT_EQ(memory.All<RequestEnded>().back(),
              (RequestEnded{request, CycleKind::kResume, Code::kOutOfMemory, std::string("no room to ") + what, 0}));
    const std::size_t calls = memory.calls.size();
    EXPECT_FALSE(GoesOnAt(7));
    EXPECT_EQ(memory.calls.size(), calls) << "it is not tried again by itself";
  }
  memory.fails.clear();
  AskFor(4, Ask::kResume);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_FALSE(memory.tags || memory.nccl);
}

TEST_F(RankControlTest, what_is_paused_may_be_asked_to_pause_once_more) {
  PauseAt(7, false);
  AskFor(2, Ask::kPause, 0, true);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_TRUE(memory.calls.empty()) << "the others have not come";
  EXPECT_EQ(phase(), Phase::kPaused);
  EXPECT_EQ(done(), Stage::kCome);
  Allow(Stage::kTags);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, Calls{"pause tags"}) << "which the first had left";
  EXPECT_EQ(phase(), Phase::kPaused);
  EXPECT_EQ(done(), Stage::kTags);
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(done(), Stage::kNccl);
  EXPECT_EQ(is().about, 2U);
  EXPECT_EQ(is().held, kResident - kTagBytes - kNcclBytes);
  EXPECT_EQ(memory.All<RequestSeen>().back(), (RequestSeen{2, CycleKind::kPause, 77, 0, true}));
  EXPECT_EQ(memory.All<RequestEnded>().back(), (RequestEnded{2, CycleKind::kPause, Code::kOk, "", 0}));
  AskFor(3, Ask::kPause, 0, false);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(memory.calls, Calls{"pause tags"});
}

TEST_F(RankControlTest, tags_that_fail_in_a_second_pause_leave_it_paused) {
  PauseAt(7, false);
  memory.fails = "pause tags";
  AskFor(2, Ask::kPause, 0, true);
  Allow(Stage::kTags);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(phase(), Phase::kPaused);
  EXPECT_EQ(done(), Stage::kCome);
  EXPECT_EQ(FailedWith(), Code::kOutOfMemory);
}

// Others do not come, or the tool dies; what the rank said of an earlier failure is still true.
TEST_F(RankControlTest, a_second_pause_that_comes_to_nothing_changes_nothing) {
  memory.fails = "pause NCCL";
  memory.undo_fails = true;
  AskFor(1, Ask::kPause, 7);
  ASSERT_FALSE(GoesOnAt(7));
  Allow(Stage::kNccl);
  ASSERT_FALSE(GoesOnAt(7));
  memory.calls.clear();
  for (const bool dies : {false, true}) {
    AskFor(dies ? 3 : 2, Ask::kPause, 7, true);
    EXPECT_FALSE(GoesOnAt(7));
    EXPECT_EQ(phase(), Phase::kPaused) << "it has come";
    EXPECT_EQ(FailedWith(), Code::kOk) << "this request has not failed";
    dies ? ToolDies() : Withdraw();
    EXPECT_FALSE(control->Serve(7, true));
    EXPECT_EQ(phase(), Phase::kPaused);
    EXPECT_EQ(Message(), "no room to pause NCCL");
    EXPECT_EQ(is().asked, Order());
    EXPECT_EQ(memory.All<RequestEnded>().back().code, dies ? Code::kPeerLost : Code::kRefused);
    EXPECT_EQ(memory.All<RequestEnded>().back().kind, CycleKind::kPause);
  }
  EXPECT_TRUE(memory.calls.empty());
  AskFor(4, Ask::kResume);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_FALSE(memory.nccl);
}

// It may have ended its resume just then. No tool would end that request, and an own resume would wait for it.
TEST_F(RankControlTest, a_pause_that_has_begun_without_it_is_none_for_one_that_runs) {
  AskFor(1, Ask::kPause, 0, true);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(3));
  EXPECT_EQ(is().asked, Order());
  EXPECT_TRUE(control->MayResume(true));
  EXPECT_TRUE(memory.calls.empty());
}

// The request that had paused the rank has ended, and the next one came before the thread could see that.
TEST_F(RankControlTest, a_thread_that_would_resume_what_is_back_comes_for_no_request) {
  AskFor(1, Ask::kPause, 5);
  EXPECT_FALSE(control->MayResume(true)) << "another thread has to come";
  EXPECT_NE(phase(), Phase::kArrived);
  ASSERT_FALSE(GoesOnAt(5));
  EXPECT_EQ(phase(), Phase::kArrived);
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(5));
  EXPECT_EQ(phase(), Phase::kPaused);
  EXPECT_EQ(memory.calls, (Calls{"pause NCCL"}));
  EXPECT_FALSE(control->MayResume(true));
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  EXPECT_TRUE(GoesOnAt(5));
  EXPECT_TRUE(control->MayResume(true));
}

TEST_F(RankControlTest, a_thread_that_would_resume_what_is_back_tells_a_request_that_the_rank_runs) {
  PauseAt(7, false);
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  ASSERT_TRUE(GoesOnAt(7));
  AskFor(3, Ask::kPause, 0, true);  // others are paused, and are to stay so
  Allow(Stage::kNccl);
  (void)control->MayResume(true);
  EXPECT_TRUE(GoesOnAt(8));
  EXPECT_EQ(is().asked, Order());
  EXPECT_TRUE(control->MayResume(true));
}

TEST_F(RankControlTest, a_thread_that_waits_for_another_ones_coming_is_asked_seldom) {
  AskFor(1, Ask::kPause, 5);
  int asked = 0;
  for (const auto begun = std::chrono::steady_clock::now();
       std::chrono::steady_clock::now() < begun + std::chrono::milliseconds(200);)
    asked += control->MayResume(true) ? 0 : 1;
  EXPECT_GT(asked, 0);
  EXPECT_LT(asked, 100);
}

TEST_F(RankControlTest, a_resume_where_nothing_is_paused_is_settled_at_once) {
  AskFor(1, Ask::kResume);
  EXPECT_TRUE(GoesOnAt(5));
  EXPECT_EQ(is().about, 1U);
  EXPECT_EQ(phase(), Phase::kRunning);
  EXPECT_EQ(done(), Stage::kNccl);
  EXPECT_TRUE(memory.calls.empty());
  EXPECT_FALSE(control->Came(6)) << "and nothing is asked any more";
}

// ---- the program's own pauses --------------------------------------------------------------------------------------------

TEST_F(RankControlTest, the_program_resumes_by_itself_while_nothing_is_asked) {
  control->OwnPauseEnded(true);
  EXPECT_EQ(own(), OwnPause::kPaused);
  EXPECT_TRUE(control->MayResume(true));
  EXPECT_EQ(own(), OwnPause::kResuming);
  control->OwnResumeEnded(false);
  EXPECT_EQ(own(), OwnPause::kPaused);
  EXPECT_TRUE(control->MayResume(true));
  control->OwnResumeEnded(true);
  EXPECT_EQ(own(), OwnPause::kNo);
  EXPECT_TRUE(control->MayResume(true));
  EXPECT_EQ(own(), OwnPause::kNo) << "there was no pause of its own";
}

TEST_F(RankControlTest, asked_in_its_own_pause_it_waits_in_its_resume_and_leaves_NCCL_to_the_program) {
  control->OwnPauseEnded(true);
  memory.nccl = true;
  AskFor(1, Ask::kPause, 0, true);
  EXPECT_FALSE(control->MayResume(true));
  EXPECT_EQ(own(), OwnPause::kPaused);
  EXPECT_EQ(phase(), Phase::kArrived) << "at whatever step";
  EXPECT_EQ(memory.All<SafepointReached>(), (std::vector<SafepointReached>{{1, 0}}));
  Allow(Stage::kNccl);
  EXPECT_FALSE(control->MayResume(true));
  EXPECT_EQ(phase(), Phase::kPaused);
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  EXPECT_TRUE(control->MayResume(true));
  EXPECT_EQ(own(), OwnPause::kResuming);
  EXPECT_EQ(memory.calls, (Calls{"pause tags", "resume tags"}));
}

TEST_F(RankControlTest, the_program_pauses_while_a_request_is_still_on_its_way_and_the_rank_comes_after_that) {
  AskFor(1, Ask::kPause);
  ASSERT_FALSE(GoesOnAt(5)) << "held until there is a step";
  control->BeginOwnPause();
  EXPECT_EQ(own(), OwnPause::kPausing);
  Agree(5);
  EXPECT_FALSE(GoesOnAt(5));
  EXPECT_EQ(phase(), Phase::kHeld) << "all ranks make that pause, and this one is needed for it";
  EXPECT_TRUE(memory.All<RequestSeen>().empty());
  control->OwnPauseEnded(false);
  EXPECT_EQ(own(), OwnPause::kNo);
  EXPECT_FALSE(GoesOnAt(5));
  EXPECT_EQ(phase(), Phase::kArrived);
}

TEST_F(RankControlTest, while_the_program_resumes_the_rank_does_not_come) {
  control->OwnPauseEnded(true);
  ASSERT_TRUE(control->MayResume(true));
  AskFor(1, Ask::kPause, 5);
  EXPECT_FALSE(GoesOnAt(5));
  EXPECT_NE(phase(), Phase::kArrived);
  control->OwnResumeEnded(true);
  EXPECT_FALSE(GoesOnAt(5));
  EXPECT_EQ(phase(), Phase::kArrived);
}

// Else the program would have it paused on ranks that came before the resume, and the resume would wait for these on the
// others.
TEST_F(RankControlTest, a_pause_of_the_program_waits_for_a_request_that_has_the_rank) {
  for (const bool withdrawn : {true, false}) {
    const std::uint64_t request = withdrawn ? 1 : 2;
    AskFor(request, Ask::kPause, 7);
    ASSERT_FALSE(GoesOnAt(7));
    if (!withdrawn) {
      Allow(Stage::kNccl);
      ASSERT_FALSE(GoesOnAt(7));
    }
    std::atomic<bool> pauses = false;
    std::thread program([&] {
      control->BeginOwnPause();
      pauses = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(pauses);
    EXPECT_EQ(own(), OwnPause::kNo);
    if (withdrawn)
      Withdraw();
    else {
      AskFor(3, Ask::kResume);
      Allow(Stage::kNccl);
    }
    program.join();
    EXPECT_EQ(own(), OwnPause::kPausing);
    EXPECT_FALSE(memory.nccl);
    control->OwnPauseEnded(false);
  }
}

TEST_F(RankControlTest, a_pause_of_what_the_program_has_paused_already_waits_for_nobody) {
  control->OwnPauseEnded(true);
  AskFor(1, Ask::kPause, 3);
  ASSERT_FALSE(GoesOnAt(3));
  control->BeginOwnPause();
  control->OwnPauseEnded(true);
  EXPECT_EQ(own(), OwnPause::kPaused);
}

TEST_F(RankControlTest, a_safe_point_inside_its_own_pause_has_come_as_well) {
  control->OwnPauseEnded(true);
  AskFor(1, Ask::kPause, 3);
  EXPECT_FALSE(GoesOnAt(900));
  EXPECT_EQ(phase(), Phase::kArrived);
}

TEST_F(RankControlTest, while_one_thread_is_inside_another_comes_back_after_a_moment_or_waits) {
  PauseAt(7);
  std::thread inside([&] { EXPECT_TRUE(control->Serve(7, false)); });
  while (control->Serve(8, true)) std::this_thread::yield();  // false: the other is inside, or this one is asked to wait
  std::thread also([&] { EXPECT_TRUE(control->Serve(8, false)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  inside.join();
  also.join();
  EXPECT_EQ(memory.calls, (Calls{"resume tags", "resume NCCL"}));
}

// ---- what the tool hears -------------------------------------------------------------------------------------------------

TEST_F(RankControlTest, each_change_is_told_and_a_safe_point_is_none) {
  int told = 0;
  control->NotifyOfChanges([&] { ++told; });
  EXPECT_TRUE(GoesOnAt(1));
  EXPECT_TRUE(control->MayResume(true));
  EXPECT_EQ(told, 0);
  AskFor(1, Ask::kPause, 7);
  EXPECT_TRUE(GoesOnAt(2));
  const int on_its_way = std::exchange(told, 0);
  EXPECT_GT(on_its_way, 0);
  EXPECT_TRUE(GoesOnAt(3));
  EXPECT_EQ(told, 0) << "it is on its way still";
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_GT(told, 0);
  control->NotifyOfChanges({});
  told = 0;
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(told, 0) << "nobody listens any more";
}

TEST_F(RankControlTest, numbers_go_up_and_what_is_settled_stays_so) {
  AskFor(5, Ask::kPause);
  EXPECT_EQ(is().last_request, 5U);
  EXPECT_EQ(is().asked, order);
  AskFor(4, Ask::kPause, 9);
  EXPECT_EQ(is().asked.request, 5U);
  order.request = 5;
  Withdraw();
  EXPECT_EQ(is().asked, Order());
  AskFor(6, Ask::kResume);
  EXPECT_TRUE(GoesOnAt(1));
  Allow(Stage::kNccl);
  EXPECT_EQ(is().asked, Order());
  EXPECT_EQ(is().last_request, 6U);
}

TEST_F(RankControlTest, a_thread_that_waits_goes_on_with_the_next_order) {
  control.emplace(ServeTimes{.slice = std::chrono::seconds(30), .now = [this] { return now; }});
  control->Begin(kSelf, memory, 0);
  AskFor(1, Ask::kPause, 5);
  std::thread program([&] { EXPECT_TRUE(!control->Came(5) || control->Serve(5, false)); });
  EXPECT_TRUE(test::Ranks::Becomes([&] { return phase() == Phase::kArrived; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it sleeps
  const auto began = std::chrono::steady_clock::now();
  Withdraw();
  program.join();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(15));
}

// ---- between launches: by a thread of AMem's own ---------------------------------------------------------------------------

class BetweenLaunches : public RankControlTest {
 protected:
  void Hold(std::uint64_t request, bool parks = false) {
    order = {.request = request, .ask = Ask::kPause, .by_pid = 77, .told_first = order.told_first};
    order.launches = {.version = 1, .stands = false, .parks = parks};
    Give();
  }
  void Stand() {
    order.launches.version = 2;
    order.launches.stands = true;
    Give();
  }
  bool Becomes(Phase wanted) {
    return test::Ranks::Becomes([&] { return phase() == wanted; });
  }
};

TEST_F(BetweenLaunches, launches_are_held_then_awaited_then_the_memory_goes_while_the_program_runs) {
  Hold(1);
  ASSERT_TRUE(Becomes(Phase::kHeld));
  EXPECT_EQ(is().launches.version, 1U);
  EXPECT_TRUE(GoesOnAt(1)) << "a safe point is passed: what the others wait for may come behind it";
  Stand();
  ASSERT_TRUE(Becomes(Phase::kArrived));
  Allow(Stage::kNccl);
  ASSERT_TRUE(Becomes(Phase::kPaused));
  EXPECT_EQ(memory.calls, (Calls{"await launches", "pause NCCL"}));
  EXPECT_NE(memory.held, 0U);
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  ASSERT_TRUE(Becomes(Phase::kRunning));
  ASSERT_TRUE(test::Ranks::Becomes([&] { return memory.held == 0; }));
  EXPECT_FALSE(memory.nccl);
}

// The thread is AMem's own, and an exception in it would end the process.
TEST_F(BetweenLaunches, without_memory_a_turn_is_made_again_and_the_process_lives) {
  std::uint64_t request = 0;
  for (const auto& [what, nth] : {std::pair("hold launches", 1), {"await launches", 1}, {"pause NCCL", 1}, {"note", 3}}) {
    SCOPED_TRACE(what);
    memory.Throw(what, nth);
    Hold(++request);
    ASSERT_TRUE(Becomes(Phase::kHeld));
    Stand();
    ASSERT_TRUE(Becomes(Phase::kArrived));
    Allow(Stage::kNccl);
    ASSERT_TRUE(Becomes(Phase::kPaused));
    EXPECT_TRUE(memory.has_thrown());
    EXPECT_EQ(done(), Stage::kNccl);
    EXPECT_EQ(FailedWith(), Code::kOk);
    EXPECT_TRUE(memory.nccl);
    memory.Throw("resume NCCL", 1);
    AskFor(++request, Ask::kResume);
    Allow(Stage::kNccl);
    ASSERT_TRUE(Becomes(Phase::kRunning));
    ASSERT_TRUE(test::Ranks::Becomes([&] { return memory.held == 0; }));
    EXPECT_TRUE(memory.has_thrown());
    EXPECT_FALSE(memory.nccl);
  }
}

TEST_F(RankControlTest, without_memory_a_thread_of_the_program_does_not_go_on_in_the_middle_of_a_request) {
  AskFor(1, Ask::kPause, 7);
  memory.Throw("note", 1);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(phase(), Phase::kArrived);
  Allow(Stage::kNccl);
  memory.Throw("note", 1);
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_FALSE(GoesOnAt(7));
  EXPECT_EQ(phase(), Phase::kPaused);
  EXPECT_EQ(done(), Stage::kNccl);
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  memory.Throw("note", 1);
  EXPECT_TRUE(GoesOnAt(7));
  EXPECT_TRUE(memory.has_thrown());
  EXPECT_FALSE(memory.nccl);
}

TEST_F(BetweenLaunches, a_stop_that_is_put_again_begins_with_an_open_gate) {
  Hold(1);
  ASSERT_TRUE(Becomes(Phase::kHeld));
  const int before = memory.let_go;
  Hold(2);
  ASSERT_TRUE(test::Ranks::Becomes([&] { return is().about == 2 && phase() == Phase::kHeld; }));
  EXPECT_EQ(memory.let_go, before + 1);
  EXPECT_EQ(memory.held, 1U);
}

TEST_F(BetweenLaunches, a_parked_rank_keeps_its_memory) {
  Hold(1, true);
  ASSERT_TRUE(Becomes(Phase::kHeld));
  Stand();
  ASSERT_TRUE(Becomes(Phase::kArrived));
  Allow(Stage::kNccl);
  ASSERT_TRUE(Becomes(Phase::kPaused));
  EXPECT_TRUE(is().parked);
  EXPECT_EQ(memory.calls, Calls{"await launches"});
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  ASSERT_TRUE(test::Ranks::Becomes([&] { return memory.held == 0; }));
  EXPECT_FALSE(is().parked);
}

TEST_F(BetweenLaunches, a_second_pause_takes_no_tags_from_under_the_program) {
  for (const bool parks : {false, true}) {
    Hold(1 + 3 * parks, parks);
    ASSERT_TRUE(Becomes(Phase::kHeld));
    Stand();
    ASSERT_TRUE(Becomes(Phase::kArrived));
    Allow(Stage::kNccl);
    ASSERT_TRUE(Becomes(Phase::kPaused));
    AskFor(2 + 3 * parks, Ask::kPause, 0, true);
    Allow(Stage::kNccl);
    ASSERT_TRUE(test::Ranks::Becomes([&] { return FailedWith() == Code::kRefused; }));
    EXPECT_TRUE(Has(Message(), "its program runs on and uses its tags")) << Message();
    EXPECT_FALSE(memory.tags);
    EXPECT_EQ(phase(), Phase::kPaused);
    EXPECT_EQ(memory.All<RequestEnded>().back().kind, CycleKind::kPause);
    AskFor(3 + 3 * parks, Ask::kResume);
    Allow(Stage::kNccl);
    ASSERT_TRUE(Becomes(Phase::kRunning));
    ASSERT_TRUE(test::Ranks::Becomes([&] { return memory.held == 0; }));
  }
  AskFor(7, Ask::kPause, 9, true);
  EXPECT_FALSE(GoesOnAt(9)) << "at a safe point the program does not run";
  Allow(Stage::kNccl);
  EXPECT_FALSE(GoesOnAt(9));
  EXPECT_TRUE(memory.tags);
}

TEST_F(BetweenLaunches, launches_go_on_when_the_request_is_withdrawn_when_the_tool_dies_and_when_the_pause_fails) {
  Hold(1);
  ASSERT_TRUE(Becomes(Phase::kHeld));
  Withdraw();
  ASSERT_TRUE(test::Ranks::Becomes([&] { return memory.held == 0; }));
  Hold(2);
  ASSERT_TRUE(Becomes(Phase::kHeld));
  ToolDies();
  ASSERT_TRUE(test::Ranks::Becomes([&] { return memory.held == 0; }));
  memory.fails = "await launches";
  Hold(3);
  ASSERT_TRUE(Becomes(Phase::kHeld));
  Stand();
  Allow(Stage::kNccl);
  ASSERT_TRUE(Becomes(Phase::kFailed));
  ASSERT_TRUE(test::Ranks::Becomes([&] { return memory.held == 0; }));
  EXPECT_FALSE(memory.nccl);
}

TEST_F(BetweenLaunches, launches_stay_held_where_the_undo_of_a_pause_failed_too) {
  memory.fails = "pause NCCL";
  memory.undo_fails = true;
  Hold(1);
  ASSERT_TRUE(Becomes(Phase::kHeld));
  Stand();
  Allow(Stage::kNccl);
  ASSERT_TRUE(Becomes(Phase::kPaused));
  EXPECT_EQ(Message(), "no room to pause NCCL");
  Withdraw();
  ToolDies();
  EXPECT_FALSE(control->Serve(1, true)) << "the thread that holds launches is inside";
  EXPECT_NE(memory.held, 0U);
  AskFor(2, Ask::kResume);
  Allow(Stage::kNccl);
  ASSERT_TRUE(test::Ranks::Becomes([&] { return memory.held == 0; }));
  EXPECT_FALSE(memory.nccl);
  EXPECT_EQ(phase(), Phase::kRunning);
}

}  // namespace
}  // namespace amem::control
