// Requests from outside, between processes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "replay/control/page.h"
#include "tests/guards.h"
#include "tests/replay/control/ranks.h"

namespace amem::control {
namespace {

using std::chrono::milliseconds;
using test::Has, test::kLong, test::Ranks;

constexpr milliseconds kShort{300};
#ifdef AMEM_SANITIZED
constexpr int kRepeats = 5, kKills = 25;
#else
constexpr int kRepeats = 25, kKills = 120;
#endif

void PausesAtOneStep(Ranks& ranks, int repeats) {
  std::mt19937 random(7);
  for (int i = 0; i < repeats; ++i) {
    Result<JobControl> job = ranks.Open();
    ASSERT_TRUE(job.ok()) << job.status().message();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    const Status paused = job->Pause({.deadline = kLong, .all_tags = i % 2 == 0});
    ASSERT_TRUE(paused.ok()) << paused.message();
    ASSERT_TRUE(ranks.AllArePaused());
    for (int rank = 1; rank < ranks.count(); ++rank) ASSERT_EQ(ranks[rank].paused_at, ranks[0].paused_at) << "rank " << rank;
    for (const RankLook& look : job->Look()) {
      EXPECT_EQ(look.phase, Phase::kPaused) << look.doing;
      EXPECT_EQ(look.freed, 990U);
    }
    const Status resumed = job->Resume(kLong);
    ASSERT_TRUE(resumed.ok()) << resumed.message();
    ASSERT_TRUE(ranks.AllGoOn());
  }
  for (int rank = 0; rank < ranks.count(); ++rank) {
    const auto all = static_cast<std::uint64_t>(repeats);
    EXPECT_EQ(ranks[rank].seen, 2 * all);
    EXPECT_EQ(ranks[rank].reached, all);
    EXPECT_EQ(ranks[rank].ended, 2 * all);
    EXPECT_EQ(ranks[rank].tag_pauses, ranks[rank].tag_resumes);
  }
}

TEST(Control, two_to_eight_ranks_pause_at_one_step_however_far_apart_they_are) {
  for (int count = 2; count <= 8; ++count) {
    Ranks ranks(count, false);
    PausesAtOneStep(ranks, kRepeats);
  }
}

TEST(Control, ranks_that_wait_for_each_other_in_each_step_pause_at_one_step) {
  for (const int count : {2, 4, 8}) {
    Ranks ranks(count, true, count == 2 ? 0 : 200);
    PausesAtOneStep(ranks, kRepeats);
  }
}

TEST(Control, a_step_that_is_named_is_kept_and_one_that_has_passed_is_refused) {
  Ranks ranks(3, true);
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  ASSERT_TRUE(ranks.AllGoOn());
  const std::uint64_t ahead = ranks[0].steps + 200;
  ASSERT_TRUE(job->Pause({.deadline = kLong, .at_step = ahead}).ok());
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[rank].paused_at, ahead);
  ASSERT_TRUE(job->Resume(kLong).ok());
  const Status passed = job->Pause({.deadline = kLong, .at_step = ahead - 1});
  EXPECT_EQ(passed.code(), Code::kRefused);
  EXPECT_TRUE(Has(passed.message(), "choose a later one")) << passed.message();
  EXPECT_TRUE(ranks.AllGoOn());
}

TEST(Control, a_rank_that_does_not_come_costs_nobody_anything_and_is_named) {
  Ranks ranks(3);
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[1].steps > 0; }));
  ranks[1].away = true;
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[0].steps > 5; }));
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const Status late = job->Pause({.deadline = kShort});
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_TRUE(Has(late.message(), "rank 1: has come to")) << late.message();
  EXPECT_TRUE(Has(late.message(), "its process is")) << late.message();
  EXPECT_FALSE(Has(late.message(), "rank 0:")) << late.message();
  EXPECT_EQ(ranks[0].pauses, 0U);
  ranks[1].away = false;
  EXPECT_TRUE(ranks.AllGoOn());
  const Status second = job->Pause({.deadline = kLong});
  EXPECT_TRUE(second.ok()) << second.message();
  EXPECT_TRUE(job->Resume(kLong).ok());
  EXPECT_TRUE(ranks.AllGoOn());
}

TEST(Control, a_rank_that_dies_while_it_is_asked_is_named_and_the_others_go_on) {
  Ranks ranks(3);
  ranks[2].away = true;
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const Status died = job->Pause({.deadline = kLong}, [&](const std::string&) {
    if (ranks.pid(2) != 0) ranks.Kill(2);
  });
  EXPECT_EQ(died.code(), Code::kPeerLost);
  EXPECT_TRUE(Has(died.message(), "rank 2 has ended")) << died.message();
  EXPECT_TRUE(ranks.AllGoOn());
  EXPECT_EQ(ranks[0].pauses, 0U);
}

TEST(Control, a_pause_that_fails_leaves_every_rank_as_it_was_and_is_told) {
  Ranks ranks(3, true);
  for (const test::Fails fails : {test::kPauseTagsFails, test::kPauseNcclFails}) {
    Result<JobControl> job = ranks.Open();
    ASSERT_TRUE(job.ok());
    ranks[1].fails = fails;
    const Status failed = job->Pause({.deadline = kLong, .all_tags = true});
    EXPECT_EQ(failed.code(), Code::kOutOfMemory) << failed.message();
    EXPECT_TRUE(Has(failed.message(), fails == test::kPauseTagsFails ? "rank 1: no memory for the tag" : "the device is full"))
        << failed.message();
    EXPECT_TRUE(ranks.AllGoOn());
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ranks[rank].pauses, ranks[rank].resumes);
      EXPECT_EQ(ranks[rank].tag_pauses, ranks[rank].tag_resumes);
    }
    const Status second = job->Pause({.deadline = kLong, .all_tags = true});
    EXPECT_TRUE(second.ok()) << second.message();
    EXPECT_TRUE(job->Resume(kLong).ok());
  }
}

TEST(Control, a_resume_that_fails_leaves_all_paused_and_can_be_tried_again) {
  Ranks ranks(3, true);
  for (const test::Fails fails : {test::kResumeTagsFails, test::kResumeNcclFails}) {
    Result<JobControl> job = ranks.Open();
    ASSERT_TRUE(job.ok());
    ASSERT_TRUE(job->Pause({.deadline = kLong, .all_tags = true}).ok());
    ranks[2].fails = fails;
    const Status failed = job->Resume(kLong);
    EXPECT_EQ(failed.code(), Code::kOutOfMemory) << failed.message();
    EXPECT_TRUE(Ranks::Becomes([&] {
      for (int rank = 0; rank < 3; ++rank)
        if (ranks[rank].tag_pauses != ranks[rank].tag_resumes + 1) return false;
      return true;
    })) << "tags that were back are paused again";
    EXPECT_TRUE(ranks.AllArePaused());
    const Status second = job->Resume(kLong);
    EXPECT_TRUE(second.ok()) << second.message();
    EXPECT_TRUE(ranks.AllGoOn());
  }
}

TEST(Control, a_second_tool_is_told_who_is_at_work) {
  Ranks ranks(2);
  const Result<JobControl> first = ranks.Open();
  ASSERT_TRUE(first.ok());
  const Result<JobControl> second = ranks.Open();
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), Code::kRefused);
  EXPECT_TRUE(Has(second.status().message(), "another request is under way, by pid " + std::to_string(::getpid())))
      << second.status().message();
}

TEST(Control, a_pause_outlives_its_tool_and_any_other_resumes_it) {
  Ranks ranks(3, true);
  {
    Result<JobControl> job = ranks.Open();
    ASSERT_TRUE(job.ok());
    ASSERT_TRUE(job->Pause({.deadline = kLong}).ok());
  }
  EXPECT_TRUE(ranks.AllArePaused());
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  EXPECT_TRUE(job->Pause({.deadline = kLong}).ok()) << "it is paused already";
  EXPECT_TRUE(job->Resume(kLong).ok());
  EXPECT_TRUE(ranks.AllGoOn());
  EXPECT_TRUE(job->Resume(kLong).ok()) << "nothing is paused";
  EXPECT_TRUE(ranks.AllGoOn());
}

// The tool is killed after every length of time up to the one that a pause and a resume take. Whatever it had done, the ranks
// run on or are paused together, and the next tool brings them back.
TEST(Control, a_tool_that_is_killed_at_any_point_leaves_a_job_that_can_be_resumed) {
  Ranks ranks(3);
  int paused = 0, running = 0;
  amem::test::Kills kill_tool(kKills / 5);  // late ones find a tool that has ended
  for (int kill = 0; kill < kKills; ++kill) {
    const pid_t tool = ::fork();
    if (tool == 0) {
      Result<JobControl> job = ranks.Open();
      if (job.ok() && job->Pause({.deadline = kLong, .all_tags = true}).ok()) static_cast<void>(job->Resume(kLong));
      ::_exit(0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(kill * 12'000 / kKills));
    kill_tool(tool);
    Result<JobControl> job = ranks.Open();
    ASSERT_TRUE(job.ok()) << job.status().message();
    std::this_thread::sleep_for(milliseconds(15));
    (job->Look().front().phase == Phase::kPaused ? paused : running) += 1;
    const Status resumed = job->Resume(kLong);
    ASSERT_TRUE(resumed.ok()) << resumed.message();
    ASSERT_TRUE(ranks.AllGoOn()) << "kill " << kill;
    for (int rank = 0; rank < 3; ++rank) ASSERT_EQ(ranks[rank].tag_pauses, ranks[rank].tag_resumes) << "kill " << kill;
  }
  EXPECT_GT(running, 0);
  EXPECT_GT(ranks[0].tag_pauses, 0) << "no tool came to ask for anything";
}

// As a tool has them, which dies when they go.
std::vector<MappedPage> LockPages(const Ranks& ranks) {
  std::vector<MappedPage> pages;
  for (const std::filesystem::path& directory : ranks.directories()) {
    auto page = MappedPage::Open(directory);
    EXPECT_TRUE(page.ok() && page->Lock().ok()) << directory;
    if (page.ok()) pages.push_back(*std::move(page));
  }
  return pages;
}

// Rank 0 has been told to bring NCCL's memory back, and the tool died before it told the others.
TEST(Control, a_resume_whose_tool_died_between_two_ranks_is_ended_by_the_next) {
  Ranks ranks(3, true);
  {
    Result<JobControl> job = ranks.Open();
    ASSERT_TRUE(job.ok());
    ASSERT_TRUE(job->Pause({.deadline = kLong}).ok());
  }
  {
    std::vector<MappedPage> pages = LockPages(ranks);
    ASSERT_EQ(pages.size(), 3U);
    const std::uint64_t request = pages[0]->last_request + 1;
    for (MappedPage& page : pages) {
      page->last_request = request;
      page->kind = static_cast<std::uint32_t>(Ask::kResume);
      page->stage = static_cast<std::uint32_t>(&page == &pages[0] ? Stage::kNccl : Stage::kTags);
      page->asked = request;
      page->bell.Ring();
    }
    ASSERT_TRUE(Ranks::Becomes([&] { return pages[0]->phase == static_cast<std::uint32_t>(Phase::kResuming); }));
  }
  Result<JobControl> next = ranks.Open();
  ASSERT_TRUE(next.ok()) << next.status().message();
  const auto from = std::chrono::steady_clock::now();
  const Status resumed = next->Resume(kLong);
  EXPECT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_LT(std::chrono::steady_clock::now() - from, milliseconds(5'000)) << "rank 0 waited in vain";
  EXPECT_TRUE(ranks.AllGoOn());
}

// Rank 0 has been told to pause NCCL's memory, and the tool died before it told the others.
void DieBetweenTwoRanks(const Ranks& ranks) {
  const std::vector<MappedPage> pages = LockPages(ranks);
  ASSERT_EQ(pages.size(), 3U);
  const auto all_are = [&](Phase phase, Stage done) {
    return Ranks::Becomes([&] {
      return std::ranges::all_of(pages, [&](const MappedPage& page) {
        return page->about == page->asked && page->phase == static_cast<std::uint32_t>(phase) &&
               page->stage_done == static_cast<std::uint32_t>(done);
      });
    });
  };
  std::uint64_t step = 0;
  for (const MappedPage& page : pages) {
    page->void_after_ns = ~0ULL;
    page->kind = static_cast<std::uint32_t>(Ask::kPause);
    PutText(page->told_first, sizeof page->told_first, ranks.directories().front().string());
    page->last_request = 1;
    page->asked = 1;
  }
  ASSERT_TRUE(all_are(Phase::kHeld, Stage::kCome));
  for (const MappedPage& page : pages) step = std::max(step, page->at.load());
  for (const MappedPage& page : pages) page->target = step;
  for (const MappedPage& page : pages) page->bell.Ring();
  ASSERT_TRUE(all_are(Phase::kArrived, Stage::kCome));
  for (const MappedPage& page : pages) {
    page->stage = static_cast<std::uint32_t>(Stage::kTags);
    page->bell.Ring();
  }
  ASSERT_TRUE(all_are(Phase::kPausing, Stage::kTags));
  pages[0]->stage = static_cast<std::uint32_t>(Stage::kNccl);
  pages[0]->bell.Ring();
}

TEST(Control, a_pause_whose_tool_died_between_two_ranks_goes_through) {
  Ranks ranks(3);
  DieBetweenTwoRanks(ranks);
  const auto from = std::chrono::steady_clock::now();
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[0].pauses == 1 && ranks[1].pauses == 1 && ranks[2].pauses == 1; }))
      << "rank 0 waited in vain";
  EXPECT_LT(std::chrono::steady_clock::now() - from, milliseconds(5'000));
  Result<JobControl> next = ranks.Open();
  ASSERT_TRUE(next.ok()) << next.status().message();
  EXPECT_TRUE(ranks.AllArePaused());
  EXPECT_TRUE(next->Resume(kLong).ok());
  EXPECT_TRUE(ranks.AllGoOn());
}

TEST(Control, a_pause_whose_tool_died_between_two_ranks_is_ended_by_the_next) {
  Ranks ranks(3);
  DieBetweenTwoRanks(ranks);
  const auto from = std::chrono::steady_clock::now();
  Result<JobControl> next = ranks.Open();
  ASSERT_TRUE(next.ok()) << next.status().message();
  const Status resumed = next->Resume(kLong);
  EXPECT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_LT(std::chrono::steady_clock::now() - from, milliseconds(5'000)) << "rank 0 waited in vain";
  EXPECT_TRUE(ranks.AllGoOn());
  for (int rank = 0; rank < ranks.count(); ++rank) EXPECT_EQ(ranks[rank].pauses, 1U);
}

// Ranks that do nothing have passed the step that they told last: the next one is it, and no second request is needed.
TEST(Control, the_step_is_the_next_of_the_rank_that_is_ahead) {
  Ranks ranks(3);
  ASSERT_TRUE(ranks.AllGoOn());
  for (int rank = 0; rank < ranks.count(); ++rank) ranks[rank].away = true;
  std::this_thread::sleep_for(milliseconds(50));
  std::uint64_t ahead = 0;
  for (int rank = 0; rank < ranks.count(); ++rank) ahead = std::max(ahead, ranks[rank].steps.load());
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const auto go_on = [&]() -> std::optional<Status> {  // when the step is agreed on
    for (int rank = 0; rank < ranks.count(); ++rank) ranks[rank].away = false;
    return Status();
  };
  ASSERT_TRUE(job->Pause({.deadline = kLong, .may_pause = go_on}).ok());
  for (int rank = 0; rank < ranks.count(); ++rank) EXPECT_EQ(ranks[rank].paused_at, ahead + 1);
  const auto page = MappedPage::Open(ranks.directories().front());
  ASSERT_TRUE(page.ok());
  EXPECT_EQ((*page)->last_request, 1U);
  EXPECT_TRUE(job->Resume(kLong).ok());
}

TEST(Control, nothing_is_paused_before_the_caller_says_so) {
  Ranks ranks(2);
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  int asked = 0;
  const Status refused = job->Pause({.deadline = kLong, .may_pause = [&]() -> std::optional<Status> {
                                       if (++asked < 200) return std::nullopt;
                                       return Status(Code::kRefused, "the checks found something");
                                     }});
  EXPECT_EQ(refused.message(), "the checks found something");
  for (int rank = 0; rank < ranks.count(); ++rank) EXPECT_EQ(ranks[rank].pauses, 0U);
  for (int rank = 0; rank < ranks.count(); ++rank) EXPECT_EQ(ranks[rank].tag_pauses, 0U);
  EXPECT_TRUE(ranks.AllGoOn());
  bool waited = true;
  asked = 0;
  const Status paused = job->Pause({.deadline = kLong, .may_pause = [&]() -> std::optional<Status> {
                                      for (int rank = 0; rank < 2; ++rank) waited = waited && ranks[rank].pauses == 0;
                                      return ++asked < 200 ? std::nullopt : std::optional<Status>(Status());
                                    }});
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_TRUE(waited);
  EXPECT_TRUE(job->Resume(kLong).ok());
}

TEST(Control, without_a_tool_ranks_that_wait_go_on) {
  Ranks ranks(2);
  ranks[1].away = true;
  const pid_t tool = ::fork();
  if (tool == 0) {
    Result<JobControl> job = ranks.Open();
    if (job.ok()) static_cast<void>(job->Pause({.deadline = kLong}));
    ::_exit(0);
  }
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[0].reached == 1; }));
  const std::uint64_t at = ranks[0].steps;
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(ranks[0].steps, at) << "it waits while the tool lives";
  ::kill(tool, SIGKILL);
  ::waitpid(tool, nullptr, 0);
  EXPECT_TRUE(Ranks::Becomes([&] { return ranks[0].steps > at + 3; }));
  EXPECT_EQ(ranks[0].failed, 1U) << "the journal says that it came to nothing";
}

TEST(Control, a_program_that_pauses_by_itself_is_held_in_its_resume) {
  Ranks ranks(2);
  for (int rank = 0; rank < 2; ++rank) ranks[rank].makes_no_safepoints = true;
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const Status none = job->Pause({.deadline = kShort});
  EXPECT_EQ(none.code(), Code::kTimeout);
  const auto pause_own = [&](bool holds) {
    for (int rank = 0; rank < 2; ++rank) ranks[rank].own_pause = holds;
  };
  // The request waits for the program's next own pause, and holds its resume.
  bool begun = false;
  const Status paused = job->Pause({.deadline = kLong, .all_tags = true}, [&](const std::string&) {
    if (!std::exchange(begun, true)) pause_own(true);
  });
  ASSERT_TRUE(paused.ok()) << paused.message();
  EXPECT_TRUE(job->Look().front().paused_by_program);
  pause_own(false);
  EXPECT_TRUE(Ranks::Becomes([&] { return ranks[0].reached == 1 && ranks[1].reached == 1; }));
  std::this_thread::sleep_for(milliseconds(150));
  EXPECT_EQ(ranks[0].own_resumes + ranks[1].own_resumes, 0U);
  EXPECT_EQ(ranks[0].tag_pauses, 1U) << "the thread that waits in the resume pauses the tags";
  const Status resumed = job->Resume(kLong);
  ASSERT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_TRUE(Ranks::Becomes([&] { return ranks[0].own_resumes == 1 && ranks[1].own_resumes == 1; }));
  EXPECT_EQ(ranks[0].pauses + ranks[0].resumes, 0U) << "the request itself has paused nothing of NCCL's";
  EXPECT_EQ(ranks[0].tag_resumes, 1U);
}

TEST(Control, a_program_may_make_safe_points_inside_its_own_pause) {
  Ranks ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].safepoints_inside = true;
    ranks[rank].own_pause = true;
  }
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[0].own_pauses == 1 && ranks[1].own_pauses == 1; }));
  ASSERT_TRUE(ranks.AllGoOn());
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong, .all_tags = true});
  ASSERT_TRUE(paused.ok()) << paused.message();
  EXPECT_TRUE(Ranks::Becomes([&] { return ranks[0].tag_pauses == 1 && ranks[1].tag_pauses == 1; }));
  const Status resumed = job->Resume(kLong);
  ASSERT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_TRUE(ranks.AllGoOn());
  EXPECT_TRUE(Ranks::Becomes([&] { return ranks[0].tag_resumes == 1 && ranks[1].tag_resumes == 1; }));
  EXPECT_EQ(ranks[0].pauses + ranks[0].resumes, 0U) << "what the program paused, the request does not bring back";
  for (int rank = 0; rank < 2; ++rank) ranks[rank].own_pause = false;
  EXPECT_TRUE(Ranks::Becomes([&] { return ranks[0].own_resumes == 1 && ranks[1].own_resumes == 1; }));
}

// Rank 0 has begun its own resume and waits for rank 1, which has not: the request must not hold rank 1 for ever.
TEST(Control, a_resume_of_the_program_that_some_ranks_have_begun_is_let_through) {
  Ranks ranks(2);
  for (int rank = 0; rank < 2; ++rank) ranks[rank].own_pause = true;
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[0].own_pauses == 1 && ranks[1].own_pauses == 1; }));
  ranks[0].own_pause = false;
  std::this_thread::sleep_for(milliseconds(30));
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  bool let = false;
  const Status paused = job->Pause({.deadline = kLong}, [&](const std::string&) {
    if (!std::exchange(let, true)) ranks[1].own_pause = false;
  });
  ASSERT_TRUE(paused.ok()) << paused.message();
  EXPECT_EQ(ranks[0].own_resumes, 1U);
  EXPECT_TRUE(ranks.AllArePaused());
  EXPECT_TRUE(job->Resume(kLong).ok());
  EXPECT_TRUE(ranks.AllGoOn());
}

TEST(Control, a_note_about_a_freeze_is_written_down_once) {
  Ranks ranks(2);
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  ASSERT_TRUE(job->Pause({.deadline = kLong}).ok());
  ASSERT_TRUE(job->LeaveNote(SessionId{2}, {.from_ns = 5, .to_ns = 9, .bytes = 77, .moved_gpus = "a -> b"}).ok());
  EXPECT_EQ(job->LeaveNote(SessionId{99}, {}).code(), Code::kNotFound);
  ASSERT_TRUE(job->Resume(kLong).ok());
  ASSERT_TRUE(job->Pause({.deadline = kLong}).ok());
  ASSERT_TRUE(job->Resume(kLong).ok());
  EXPECT_EQ(ranks[0].frozen, 0U);
  EXPECT_EQ(ranks[1].frozen, 1U);
  EXPECT_EQ(ranks[1].frozen_bytes, 77U);
}

void Overwrite(const std::filesystem::path& file, std::streamoff at, const std::string& bytes) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(at);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

TEST(Control, pages_of_others_and_of_other_versions_are_refused) {
  Ranks ranks(1);
  const auto refused = [&](const std::string& why) {
    const Result<JobControl> job = ranks.Open();
    ASSERT_FALSE(job.ok());
    EXPECT_EQ(job.status().code(), Code::kRefused);
    EXPECT_TRUE(Has(job.status().message(), why)) << job.status().message();
    EXPECT_TRUE(LookAt(ranks.directories()).empty());
  };
  const auto page = ranks.directories().front() / kPageName;
  Overwrite(page, 8, std::string("\x09\0\0\0", 4));
  refused("of version 9, and this program knows version 1");
  Overwrite(page, 0, "nonsense");
  refused("it is no control page");
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(page.c_str(), 65534, 65534), 0);
    refused("it belongs to user 65534");
    ASSERT_EQ(::chown(page.c_str(), 0, 0), 0);
  }
  std::filesystem::resize_file(page, 100);
  refused("it has 100 bytes");
}

TEST(Control, a_link_is_not_followed_and_an_ended_process_is_left_out) {
  Ranks ranks(2);
  ranks.Kill(1);
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok()) << job.status().message();
  EXPECT_EQ(job->Look().size(), 1U);
  const auto page = ranks.directories()[1] / kPageName;
  std::filesystem::rename(page, page.string() + "2");
  std::filesystem::create_symlink(page.string() + "2", page);
  EXPECT_FALSE(MappedPage::Open(ranks.directories()[1]).ok());
}

}  // namespace
}  // namespace amem::control
