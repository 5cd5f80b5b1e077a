// The tool's side of a request against ranks that do and say what the test wants: their pages, played by a thread.
#include "replay/control/job_control.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "journal/base/clock.h"
#include "replay/control/look.h"
#include "tests/journal/temporary.h"
#include "tests/replay/control/ranks.h"

namespace amem::control {
namespace {

using amem::test::TemporaryDirectory;
using std::chrono::milliseconds;
using test::Has, test::kLong;

constexpr milliseconds kBriefly{60};

// The pages of a job. While a tool is at work, `play` is called for each page again and again.
class PlayedRanks : public testing::Test {
 protected:
  using Play = std::function<void(std::size_t rank, Page& page)>;

  void Make(std::size_t count) {
    for (std::size_t rank = 0; rank < count; ++rank) {
      directories.push_back(directory.path() / std::to_string(rank));
      std::filesystem::create_directory(directories.back());
      pages.push_back(*MappedPage::Create(directories.back(), SessionId{rank + 1}, static_cast<std::int64_t>(rank)));
    }
  }
  void TearDown() override { Stop(); }
  void Begin(Play played) {
    play = std::move(played);
    player = std::thread([this] {
      while (!stop) {
        for (std::size_t rank = 0; rank < pages.size(); ++rank) play(rank, pages[rank].page());
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
  }
  void Stop() {
    stop = true;
    if (player.joinable()) player.join();
    stop = false;
  }

  static void Say(Page& page, Phase phase, Stage done = Stage::kCome) {
    page.stage_done = static_cast<std::uint32_t>(done);
    page.phase = static_cast<std::uint32_t>(phase);
    page.about = page.asked.load();
  }
  static void Fail(Page& page, Phase phase, const std::string& why) {
    PutText(page.message, sizeof page.message, why);
    page.code = static_cast<std::uint32_t>(Code::kOutOfMemory);
    Say(page, phase);
  }
  static bool Is(const Page& page, Ask ask, Stage stage) {
    return page.asked != 0 && page.kind == static_cast<std::uint32_t>(ask) && page.stage == static_cast<std::uint32_t>(stage);
  }
  // A rank that does as it is asked, at once.
  static void Obey(Page& page) {
    if (Is(page, Ask::kPause, Stage::kCome)) Say(page, Phase::kArrived);
    if (Is(page, Ask::kPause, Stage::kTags)) Say(page, Phase::kPausing, Stage::kTags);
    if (Is(page, Ask::kPause, Stage::kNccl)) Say(page, Phase::kPaused, Stage::kNccl);
    if (Is(page, Ask::kResume, Stage::kTags)) Say(page, Phase::kResuming, Stage::kTags);
    if (Is(page, Ask::kResume, Stage::kNccl)) Say(page, Phase::kRunning, Stage::kNccl);
  }
  [[nodiscard]] Result<JobControl> Open() const { return JobControl::Open(directories); }
  [[nodiscard]] Page& Of(std::size_t rank) const { return pages[rank].page(); }

  TemporaryDirectory directory;
  std::vector<std::filesystem::path> directories;
  std::vector<MappedPage> pages;
  Play play;
  std::atomic<bool> stop = false;
  std::thread player;
};

// ---- a step --------------------------------------------------------------------------------------------------------------

// The step that is agreed on among ranks that stand so; nothing is paused.
class Steps : public PlayedRanks {
 protected:
  void SetUp() override { Make(3); }
  Status Ask(std::optional<std::uint64_t> at_step = {}) {
    auto job = Open();
    if (!job.ok()) return job.status();
    AskOptions options{.deadline = kLong, .at_step = at_step};
    options.may_pause = [&]() -> std::optional<Status> {
      for (std::size_t rank = 0; rank < 3; ++rank) targets.push_back(Of(rank).target);
      return Status{Code::kUnsupported, "seen enough"};
    };
    return job->Pause(options);
  }
  std::vector<std::uint64_t> targets;
};

TEST_F(Steps, the_step_is_the_next_one_of_the_rank_that_is_ahead) {
  Of(0).steps = 5;
  Of(1).steps = 9;
  EXPECT_EQ(Ask().message(), "seen enough");
  EXPECT_EQ(targets, (std::vector<std::uint64_t>{10, 10, 10}));
}

TEST_F(Steps, a_program_that_has_not_begun_comes_to_its_first) {
  EXPECT_EQ(Ask().message(), "seen enough");
  EXPECT_EQ(targets.at(0), 1U);
}

TEST_F(Steps, what_is_paused_has_no_say) {
  Of(0).steps = 5;
  Of(1).steps = 90;
  Of(1).phase = static_cast<std::uint32_t>(Phase::kPaused);
  Of(2).steps = 80;
  Of(2).own_pause = static_cast<std::uint32_t>(OwnPause::kPaused);
  EXPECT_EQ(Ask().message(), "seen enough");
  EXPECT_EQ(targets.at(0), 6U);
}

TEST_F(Steps, one_that_is_named_may_be_the_next_and_no_earlier) {
  Of(1).steps = 9;
  EXPECT_EQ(Ask(10).message(), "seen enough");
  EXPECT_EQ(targets.at(2), 10U);
  const Status early = Ask(9);
  EXPECT_EQ(early.code(), Code::kRefused);
  EXPECT_TRUE(Has(early.message(), "rank 1 has come to safe point 9 already; choose a later one than 9")) << early.message();
  for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_EQ(Of(rank).asked, 0U) << "it is withdrawn";
}

// ---- coming --------------------------------------------------------------------------------------------------------------

TEST_F(PlayedRanks, one_that_is_held_past_the_step_is_asked_once_more_for_its_own) {
  Make(2);
  Of(0).steps = 4;
  std::atomic<std::uint64_t> last = 0;
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 1) return Obey(page);
    if (!Is(page, Ask::kPause, Stage::kCome)) return Obey(page);
    last = page.asked.load();
    page.steps = 7;  // it had got so far when it saw the request
    page.at = std::max<std::uint64_t>(page.target, 7);
    Say(page, page.target >= 7 ? Phase::kArrived : Phase::kHeld);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong});
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_GE(last, 2U);
  EXPECT_GE(Of(0).target, 7U);
}

TEST_F(PlayedRanks, a_request_that_does_not_fit_is_put_again_more_and_more_seldom) {
  Make(1);
  Begin([&](std::size_t, Page& page) {
    page.at = page.target + 1;
    Say(page, Phase::kHeld);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job->Pause({.deadline = milliseconds(300)}).code(), Code::kTimeout);
  EXPECT_GE(Of(0).last_request, 2U);
  EXPECT_LE(Of(0).last_request, 7U) << "after 10 ms, 20, 40 and so on";
}

TEST_F(PlayedRanks, who_does_not_come_is_named_and_nobody_else) {
  Make(3);
  Begin([&](std::size_t rank, Page& page) {
    if (rank != 1) Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const auto began = std::chrono::steady_clock::now();
  const Status late = job->Pause({.deadline = kBriefly});
  EXPECT_GE(std::chrono::steady_clock::now() - began, kBriefly);
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_TRUE(Has(late.message(), "rank 1: has made no safe point")) << late.message();
  EXPECT_FALSE(Has(late.message(), "rank 0") || Has(late.message(), "rank 2")) << late.message();
  for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_EQ(Of(rank).asked, 0U);
}

TEST_F(PlayedRanks, nothing_is_paused_while_the_caller_does_not_know) {
  Make(1);
  std::atomic<bool> told = false;
  Begin([&](std::size_t, Page& page) {
    told = told || Is(page, Ask::kPause, Stage::kTags);
    Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  AskOptions options{.deadline = kBriefly};
  options.may_pause = [] { return std::optional<Status>(); };
  EXPECT_EQ(job->Pause(options).code(), Code::kTimeout);
  EXPECT_FALSE(told);
}

TEST_F(PlayedRanks, one_that_ends_before_it_comes_ends_the_request) {
  Make(2);
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 0) return Obey(page);
    if (Is(page, Ask::kPause, Stage::kCome)) page.start_ticks = 1;  // the pid is another process's now
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status lost = job->Pause({.deadline = kLong});
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_EQ(lost.message(), "rank 1 has ended before it paused; nothing was paused");
  EXPECT_EQ(Of(0).asked, 0U);
}

TEST_F(PlayedRanks, a_resume_of_the_program_that_some_have_begun_is_let_through) {
  Make(2);
  Of(0).own_pause = static_cast<std::uint32_t>(OwnPause::kPaused);
  Of(1).own_pause = static_cast<std::uint32_t>(OwnPause::kResuming);
  std::atomic<int> requests = 0;
  std::uint64_t seen = 0;
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 0 && page.asked != 0 && page.asked != seen) {
      seen = page.asked;
      if (++requests == 2) Of(0).own_pause = Of(1).own_pause = static_cast<std::uint32_t>(OwnPause::kNo);  // both are through
    }
    if (requests >= 2) Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong});
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_GE(requests, 2);
}

TEST_F(PlayedRanks, one_that_resumes_by_itself_while_no_other_waits_to_is_left_in_peace) {
  for (const OwnPause own : {OwnPause::kResuming, OwnPause::kPaused}) {
    pages.clear();
    directories.clear();
    Make(2);
    Of(0).own_pause = static_cast<std::uint32_t>(own);
    auto job = Open();
    ASSERT_TRUE(job.ok());
    EXPECT_EQ(job->Pause({.deadline = kBriefly}).code(), Code::kTimeout);
    EXPECT_EQ(Of(1).last_request, 1U);
  }
}

// ---- stages --------------------------------------------------------------------------------------------------------------

TEST_F(PlayedRanks, NCCL_is_paused_when_all_tags_are_and_not_before) {
  Make(3);
  std::atomic<bool> slow_is_done = false, too_early = false;
  const auto slow_until = std::chrono::steady_clock::now() + milliseconds(150);
  Begin([&](std::size_t rank, Page& page) {
    if (Is(page, Ask::kPause, Stage::kNccl) && !slow_is_done) too_early = true;
    if (rank == 2 && Is(page, Ask::kPause, Stage::kTags)) {
      if (std::chrono::steady_clock::now() < slow_until) return Say(page, Phase::kPausing, Stage::kCome);
      slow_is_done = true;
    }
    Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong, .all_tags = true});
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_TRUE(slow_is_done);
  EXPECT_FALSE(too_early);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(Of(rank).all_tags, 1U);
    EXPECT_EQ(GetText(Of(rank).told_first, sizeof Of(rank).told_first), directories[0].string());
  }
}

TEST_F(PlayedRanks, a_pause_is_no_pause_before_the_rank_says_that_it_is_paused) {
  Make(1);
  const auto until = std::chrono::steady_clock::now() + milliseconds(100);
  Begin([&](std::size_t, Page& page) {
    if (Is(page, Ask::kPause, Stage::kNccl) && std::chrono::steady_clock::now() < until)
      return Say(page, Phase::kPausing, Stage::kNccl);
    Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  EXPECT_TRUE(job->Pause({.deadline = kLong}).ok());
  EXPECT_EQ(Of(0).phase, static_cast<std::uint32_t>(Phase::kPaused));
}

TEST_F(PlayedRanks, tags_that_fail_on_one_withdraw_the_request_from_all) {
  Make(2);
  std::atomic<bool> failed = false;
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 1 && Is(page, Ask::kPause, Stage::kTags)) {
      failed = true;
      return Fail(page, Phase::kFailed, "no room");
    }
    if (failed && page.asked == 0) return Say(page, Phase::kRunning);
    Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status status = job->Pause({.deadline = kLong, .all_tags = true});
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_EQ(status.message(), "rank 1: no room");
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(Of(rank).asked, 0U);
}

TEST_F(PlayedRanks, NCCL_that_fails_on_one_is_resumed_where_it_was_paused) {
  Make(2);
  std::atomic<bool> resumed = false;
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 1 && Is(page, Ask::kPause, Stage::kNccl)) return Fail(page, Phase::kFailed, "no room");
    if (rank == 0 && Is(page, Ask::kResume, Stage::kNccl)) resumed = true;
    if (rank == 0 || page.phase != static_cast<std::uint32_t>(Phase::kFailed)) Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status status = job->Pause({.deadline = kLong});
  EXPECT_EQ(status.message(), "rank 1: no room");
  EXPECT_TRUE(resumed);
  EXPECT_EQ(Of(0).phase, static_cast<std::uint32_t>(Phase::kRunning));
}

TEST_F(PlayedRanks, one_that_ends_while_it_pauses_is_named) {
  Make(2);
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 1 && Is(page, Ask::kPause, Stage::kTags)) {
      page.start_ticks = 1;
      return;
    }
    if (rank == 0 && page.asked == 0) return Say(page, Phase::kRunning);
    Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status lost = job->Pause({.deadline = kLong, .all_tags = true});
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_EQ(lost.message(), "rank 1 has ended while it paused");
}

// ---- a resume ------------------------------------------------------------------------------------------------------------

class PausedRanks : public PlayedRanks {
 protected:
  void SetUp() override {
    Make(2);
    Begin([](std::size_t, Page& page) { Obey(page); });
    ASSERT_TRUE(Open()->Pause({.deadline = kLong, .all_tags = true}).ok());
    Stop();
    for (std::size_t rank = 0; rank < 2; ++rank) ASSERT_NE(Of(rank).asked, 0U) << "a pause stands without its tool";
  }
};

TEST_F(PausedRanks, resume_tags_first_and_NCCL_when_all_have_theirs) {
  std::atomic<bool> both = false, too_early = false;
  const auto until = std::chrono::steady_clock::now() + milliseconds(100);
  Begin([&](std::size_t rank, Page& page) {
    if (Is(page, Ask::kResume, Stage::kNccl) && !both) too_early = true;
    if (rank == 1 && Is(page, Ask::kResume, Stage::kTags)) {
      if (std::chrono::steady_clock::now() < until) return;
      both = true;
    }
    Obey(page);
  });
  std::vector<std::string> said;
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status resumed = job->Resume(kLong, [&](const std::string& sentence) { said.push_back(sentence); });
  EXPECT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_TRUE(both);
  EXPECT_FALSE(too_early);
  EXPECT_EQ(said, std::vector<std::string>{"2 of 2 ranks resume"});
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Of(rank).asked, 0U);
    EXPECT_EQ(Of(rank).stage, static_cast<std::uint32_t>(Stage::kCome));
  }
}

TEST_F(PausedRanks, whoever_runs_already_is_not_waited_for) {
  Say(Of(1), Phase::kRunning);
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 0) Obey(page);
  });
  const Status resumed = Open()->Resume(kLong);
  EXPECT_TRUE(resumed.ok()) << resumed.message();
}

TEST_F(PausedRanks, that_do_not_answer_are_named_and_may_be_asked_again) {
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 0) Obey(page);
  });
  {
    auto job = Open();
    ASSERT_TRUE(job.ok());
    const auto began = std::chrono::steady_clock::now();
    const Status late = job->Resume(kBriefly);
    EXPECT_GE(std::chrono::steady_clock::now() - began, kBriefly);
    EXPECT_EQ(late.code(), Code::kTimeout);
    EXPECT_TRUE(Has(late.message(), "rank 1 has not resumed in time: is paused")) << late.message();
  }
  EXPECT_NE(Of(1).asked, 0U) << "it is not forgotten when the tool goes";
  Stop();
  Begin([](std::size_t, Page& page) { Obey(page); });
  EXPECT_TRUE(Open()->Resume(kLong).ok());
}

TEST_F(PausedRanks, one_whose_resume_fails_keeps_all_paused_and_its_message_is_told) {
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 1 && page.kind == static_cast<std::uint32_t>(Ask::kResume)) return Fail(page, Phase::kPaused, "no room");
    Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status failed = job->Resume(kLong);
  EXPECT_EQ(failed.code(), Code::kOutOfMemory);
  EXPECT_EQ(failed.message(), "rank 1: no room");
  EXPECT_TRUE(Is(Of(0), Ask::kPause, Stage::kNccl)) << "tags that are back are paused again";
  EXPECT_EQ(Of(0).all_tags, 1U);
}

TEST_F(PausedRanks, one_that_has_ended_is_not_waited_for) {
  Begin([&](std::size_t rank, Page& page) {
    if (rank == 0) return Obey(page);
    if (Is(page, Ask::kResume, Stage::kTags)) page.start_ticks = 1;
  });
  EXPECT_TRUE(Open()->Resume(kLong).ok());
}

// ---- opening -------------------------------------------------------------------------------------------------------------

TEST_F(PlayedRanks, what_a_tool_that_died_has_asked_is_withdrawn_and_numbers_go_on) {
  Make(2);
  for (std::size_t rank = 0; rank < 2; ++rank) Of(rank).asked = 3 + rank;
  Of(1).last_request = 9;
  auto job = Open();
  ASSERT_TRUE(job.ok());
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Of(rank).asked, 0U);
    EXPECT_EQ(Of(rank).by_pid, getpid());
  }
  Begin([](std::size_t, Page& page) { Obey(page); });
  ASSERT_TRUE(job->Pause({.deadline = kLong}).ok());
  EXPECT_EQ(Of(0).asked, 10U);
  EXPECT_EQ(Of(0).last_request, 10U);
}

TEST_F(PlayedRanks, what_a_tool_that_died_has_told_one_is_told_the_rest) {
  Make(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    Page& page = Of(rank);
    page.asked = 3;
    page.kind = static_cast<std::uint32_t>(Ask::kPause);
    page.stage = static_cast<std::uint32_t>(rank == 0 ? Stage::kNccl : Stage::kTags);
    Say(page, Phase::kPausing, Stage::kTags);
  }
  std::atomic<bool> rest_is_told = false;
  Begin([&](std::size_t, Page& page) {
    if (Is(Of(1), Ask::kPause, Stage::kNccl)) rest_is_told = true;
    if (rest_is_told) Obey(page);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  EXPECT_TRUE(rest_is_told);
  EXPECT_EQ(Of(1).asked, 3U) << "and stands";
  EXPECT_EQ(Of(1).phase, static_cast<std::uint32_t>(Phase::kPaused));
}

TEST_F(PlayedRanks, a_job_whose_processes_have_ended_is_not_found) {
  Make(1);
  pages[0].page().start_ticks = 1;
  EXPECT_EQ(Open().status().code(), Code::kNotFound);
}

TEST_F(PlayedRanks, of_another_pid_namespace_are_asked_from_inside) {
  Make(1);
  ++pages[0].page().pid_namespace;
  const auto job = Open();
  EXPECT_EQ(job.status().code(), Code::kRefused);
  EXPECT_TRUE(Has(job.status().message(), "another pid namespace")) << job.status().message();
}

TEST_F(PlayedRanks, a_note_is_for_the_session_that_it_names) {
  Make(2);
  auto job = Open();
  ASSERT_TRUE(job.ok());
  ASSERT_TRUE(job->LeaveNote(SessionId{2}, {.from_ns = 5, .to_ns = 9, .bytes = 77, .moved_gpus = "a -> b"}).ok());
  EXPECT_EQ(Of(0).note, 0U);
  EXPECT_EQ(Of(1).note, 1U);
  EXPECT_EQ(Of(1).note_from_ns, 5U);
  EXPECT_EQ(Of(1).note_to_ns, 9U);
  EXPECT_EQ(Of(1).note_bytes, 77U);
  EXPECT_EQ(GetText(Of(1).note_gpus, sizeof Of(1).note_gpus), "a -> b");
  EXPECT_EQ(job->LeaveNote(SessionId{3}, {}).code(), Code::kNotFound);
}

// ---- what is said --------------------------------------------------------------------------------------------------------

class WhatIsSaid : public PlayedRanks {
 protected:
  void SetUp() override { Make(1); }
  std::string Of(Phase phase) {
    pages[0]->phase = static_cast<std::uint32_t>(phase);
    return LookAt(directories).at(0).doing;
  }
};

TEST_F(WhatIsSaid, of_each_phase) {
  Page& page = pages[0].page();
  PutText(page.message, sizeof page.message, "no room");
  EXPECT_EQ(Of(Phase::kRunning), "has made no safe point; it comes when its program pauses by itself");
  page.steps = 1;
  page.last_step_ns = MonotonicNs() - 3'000'000'000;
  EXPECT_EQ(Of(Phase::kRunning), "has come to 1 safe point, to the last one 3.0 s ago");
  page.steps = 2;
  EXPECT_EQ(Of(Phase::kFailed), "has come to 2 safe points, to the last one 3.0 s ago; its last pause failed: no room");
  page.at = 12;
  page.at_ns = MonotonicNs() + kLong.count();
  EXPECT_EQ(Of(Phase::kHeld), "waits in safe point 12 until a step is agreed on");
  EXPECT_EQ(Of(Phase::kArrived), "waits in safe point 12 for the others, came 0.0 s ago");
  EXPECT_EQ(Of(Phase::kPausing), "pauses");
  EXPECT_EQ(Of(Phase::kResuming), "resumes");
  EXPECT_EQ(Of(Phase::kPaused), "is paused, waits in safe point 12 for a resume");
  page.code = 1;
  page.at = 0;
  EXPECT_EQ(Of(Phase::kPaused), "is paused, waits in its program's own resume for a resume; the last one failed: no room");
  page.own_pause = static_cast<std::uint32_t>(OwnPause::kPaused);
  EXPECT_EQ(Of(Phase::kRunning), "is paused by its program");
  page.start_ticks = 0;
  EXPECT_EQ(Of(Phase::kPaused), "has ended");
}

TEST_F(WhatIsSaid, of_a_rank_is_what_its_page_has) {
  Page& page = pages[0].page();
  page.steps = 8;
  page.held_bytes = 100;
  page.freed_bytes = 50;
  page.own_pause = static_cast<std::uint32_t>(OwnPause::kPaused);
  RankLook look = LookAt(directories).at(0);
  EXPECT_EQ(look.session, SessionId{1});
  EXPECT_EQ(look.rank_name, "rank 0");
  EXPECT_EQ(look.directory, directories[0]);
  EXPECT_TRUE(look.alive && look.paused_by_program);
  EXPECT_EQ(look.pid, getpid());
  EXPECT_EQ(look.start_ticks, page.start_ticks);
  EXPECT_EQ(look.steps, 8U);
  EXPECT_EQ(look.held, 100U);
  EXPECT_EQ(look.freed, 50U);
  page.rank = -1;
  ++page.start_ticks;
  look = LookAt(directories).at(0);
  EXPECT_EQ(look.rank_name, "pid " + std::to_string(getpid()));
  EXPECT_FALSE(look.alive);
}

}  // namespace
}  // namespace amem::control
