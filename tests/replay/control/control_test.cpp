// Requests from outside, between processes.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "journal/base/process_sight.h"
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
    for (const RankView& look : job->Ranks()) {
      EXPECT_EQ(look.phase(), "paused") << look.Doing();
      EXPECT_EQ(look.is.freed, 990U);
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

// Any thread of the process with that number, but its first.
std::uint32_t OtherThreadOf(pid_t pid) {
  for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid)))
    if (const int thread = std::atoi(entry.path().filename().c_str()); thread != pid) return static_cast<std::uint32_t>(thread);
  return 0;
}

TEST(Control, threads_that_call_nccl_are_told_of_if_they_can_be_seen) {
  Ranks ranks(1);
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[0].steps > 0; }));
  const std::uint32_t thread = OtherThreadOf(ranks.pid(0));
  ASSERT_NE(thread, 0U);
  ranks[0].launches_by = thread;
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  AskOptions options{.deadline = kShort, .at_step = {}, .may_pause = {}};
  options.where = Where::kBetweenLaunches;
  const Status late = job->Pause(options);
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_TRUE(Has(late.message(), fmt::format("its thread {}, which calls NCCL, is ", thread))) << late.message();
  EXPECT_FALSE(Has(late.message(), "is unknown")) << late.message();
}

TEST(Control, a_rank_that_does_not_come_costs_nobody_anything_and_is_named) {
  Ranks ranks(3);
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[1].steps > 0; }));
  ranks[1].away = true;
  ASSERT_TRUE(Ranks::Becomes([&] { return ranks[0].steps > 5; }));
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const auto processor_ms = [] {
    timespec used{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return static_cast<std::int64_t>(used.tv_sec) * 1'000 + used.tv_nsec / 1'000'000;
  };
  const std::int64_t before_ms = processor_ms();
  const Status late = job->Pause({.deadline = kShort});
  EXPECT_LT(processor_ms() - before_ms, kShort.count() / 2) << "the tool sleeps while it waits";
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_TRUE(Has(late.message(), "rank 1: runs, and has made ")) << late.message();
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
  const auto start_tool = [&] {
    const pid_t tool = ::fork();
    if (tool != 0) return tool;
    Result<JobControl> job = ranks.Open();
    if (job.ok() && job->Pause({.deadline = kLong, .all_tags = true}).ok()) static_cast<void>(job->Resume(kLong));
    ::_exit(0);
  };
  const auto began = std::chrono::steady_clock::now();
  ::waitpid(start_tool(), nullptr, 0);
  const auto whole = std::chrono::steady_clock::now() - began;  // on this machine, as busy as it is
  for (int kill = 0; kill < kKills; ++kill) {
    const pid_t tool = start_tool();
    std::this_thread::sleep_for(whole * kill / kKills);
    kill_tool(tool);
    Result<JobControl> job = ranks.Open();
    ASSERT_TRUE(job.ok()) << job.status().message();
    std::this_thread::sleep_for(milliseconds(15));
    (job->Ranks().front().phase() == "paused" ? paused : running) += 1;
    const Status resumed = job->Resume(kLong);
    ASSERT_TRUE(resumed.ok()) << resumed.message();
    ASSERT_TRUE(ranks.AllGoOn()) << "kill " << kill;
    for (int rank = 0; rank < 3; ++rank) ASSERT_EQ(ranks[rank].tag_pauses, ranks[rank].tag_resumes) << "kill " << kill;
  }
  EXPECT_GT(running, 0);
  EXPECT_GT(ranks[0].tag_pauses, 0) << "no tool came to ask for anything";
}

// A tool that gives each rank an order of its own, and dies when it goes.
class Tool {
 public:
  explicit Tool(const Ranks& ranks) : sockets_(ranks.sockets()) {
    for (const RankPlace& place : ranks.places()) {
      auto link = RankLink::Connect(sockets_, place);
      EXPECT_TRUE(link.ok() && link->has_value()) << link.status().message();
      if (link.ok() && *link) links_.push_back(**std::move(link));
    }
    GiveAll({});
    for (const RankLink& link : links_) last_ = std::max(last_, link->is.last_request);
  }
  void Give(std::size_t rank, Order order) {
    order.request = last_ + 1;
    order.by_pid = ::getpid();
    order.told_first = links_.front()->process.session;
    links_[rank].Give(order);
  }
  void GiveAll(const Order& order) {
    for (std::size_t rank = 0; rank < links_.size(); ++rank) order == Order() ? links_[rank].Give(order) : Give(rank, order);
    EXPECT_TRUE(Becomes([](const RankLink& link) { return link.answered(); }));
  }
  bool Becomes(const std::function<bool(const RankLink&)>& so) {
    const auto all = [&] { return std::ranges::all_of(links_, so); };
    Await(links_, In(milliseconds(20'000)), all);
    return all();
  }
  bool AllAre(Phase phase, Stage done) {
    return Becomes([&](const RankLink& link) {
      const RankStatus& is = link->is;
      return is.about == last_ + 1 && is.phase == phase && is.stage_done == done;
    });
  }
  std::vector<RankLink>& links() { return links_; }

 private:
  const ToolSockets sockets_;
  std::vector<RankLink> links_;
  std::uint64_t last_ = 0;
};

// Rank 0 has been told to bring NCCL's memory back, and the tool died before it told the others.
TEST(Control, a_resume_whose_tool_died_between_two_ranks_is_ended_by_the_next) {
  for (const auto& [told, pauses] : {std::pair(3, false), {3, true}, {2, false}, {2, true}}) {  // 2: the last knows of none
    SCOPED_TRACE(testing::Message() << told << (pauses ? ", next is a pause" : ", next is a resume"));
    Ranks ranks(3, true);
    {
      Result<JobControl> job = ranks.Open();
      ASSERT_TRUE(job.ok());
      ASSERT_TRUE(job->Pause({.deadline = kLong}).ok());
    }
    {
      Tool tool(ranks);
      ASSERT_EQ(tool.links().size(), 3U);
      for (std::size_t rank = 0; rank < static_cast<std::size_t>(told); ++rank)
        tool.Give(rank, {.ask = Ask::kResume, .stage = rank == 0 ? Stage::kNccl : Stage::kTags});
      const RankLink* const untold = tool.links().data() + told;
      ASSERT_TRUE(tool.Becomes([&](const RankLink& link) { return link->is.phase == Phase::kResuming || &link == untold; }));
    }
    Result<JobControl> next = ranks.Open();
    ASSERT_TRUE(next.ok()) << next.status().message();
    const Status done = pauses ? next->Pause({.deadline = kLong}) : next->Resume(kLong);
    EXPECT_TRUE(done.ok()) << done.message();
    if (pauses) {
      EXPECT_TRUE(ranks.AllArePaused());
      EXPECT_TRUE(next->Resume(kLong).ok());
    }
    EXPECT_TRUE(ranks.AllGoOn());
    for (int rank = 0; rank < ranks.count(); ++rank) {
      EXPECT_EQ(ranks[rank].failed, 0U) << "rank " << rank << " waited in vain";
      EXPECT_EQ(ranks[rank].resumes, pauses ? 2U : 1U);
    }
  }
}

// Rank 0 has been told to pause NCCL's memory, and the tool died before it told the others.
void DieBetweenTwoRanks(const Ranks& ranks) {
  Tool tool(ranks);
  ASSERT_EQ(tool.links().size(), 3U);
  Order order{.ask = Ask::kPause};
  tool.GiveAll(order);
  ASSERT_TRUE(tool.AllAre(Phase::kHeld, Stage::kCome));
  for (const RankLink& link : tool.links()) order.target = std::max(order.target, link->is.at);
  tool.GiveAll(order);
  ASSERT_TRUE(tool.AllAre(Phase::kArrived, Stage::kCome));
  order.stage = Stage::kTags;
  tool.GiveAll(order);
  ASSERT_TRUE(tool.AllAre(Phase::kPausing, Stage::kTags));
  order.stage = Stage::kNccl;
  tool.Give(0, order);
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
  const ToolSockets sockets(ranks.sockets());
  const auto standing = [&] { return StatusOf(sockets, ranks.places().front().session); };
  const auto go_on = [&]() -> std::optional<Status> {  // when the step is agreed on
    if (standing()->asked.target == 0) return std::nullopt;
    for (int rank = 0; rank < ranks.count(); ++rank) ranks[rank].away = false;
    return Status();
  };
  ASSERT_TRUE(job->Pause({.deadline = kLong, .may_pause = go_on}).ok());
  for (int rank = 0; rank < ranks.count(); ++rank) EXPECT_EQ(ranks[rank].paused_at, ahead + 1);
  EXPECT_EQ(standing()->last_request, 1U);
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
  EXPECT_TRUE(job->Ranks().front().paused_by_program());
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

// Between launches the program runs on, to its own pause for example, and no rank may get there before the resume.
TEST(Control, a_program_pauses_by_itself_when_the_request_has_ended) {
  Ranks ranks(2);
  for (int rank = 0; rank < 2; ++rank) ranks[rank].launches_by = test::kStopsBetween;
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong, .where = Where::kBetweenLaunches});
  ASSERT_TRUE(paused.ok()) << paused.message();
  for (int rank = 0; rank < 2; ++rank) ranks[rank].own_pause = true;
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(ranks[0].own_pauses + ranks[1].own_pauses, 0U);
  const Status resumed = job->Resume(kLong);
  ASSERT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_TRUE(Ranks::Becomes([&] { return ranks[0].own_pauses == 1 && ranks[1].own_pauses == 1; }));
  for (int rank = 0; rank < 2; ++rank) ranks[rank].own_pause = false;
  EXPECT_TRUE(Ranks::Becomes([&] { return ranks[0].own_resumes == 1 && ranks[1].own_resumes == 1; }));
  EXPECT_TRUE(ranks.AllGoOn());
}

// Rank 0 has begun its own pause and waits for rank 1, which has come for the request before it got there.
TEST(Control, a_pause_of_the_program_that_some_ranks_have_begun_is_let_through) {
  Ranks ranks(2);
  ASSERT_TRUE(ranks.AllGoOn());
  ranks[0].own_pause = true;
  std::this_thread::sleep_for(milliseconds(30));
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong, .progress_every = milliseconds(20)},
                                   [&](const std::string&) { ranks[1].own_pause = true; });
  ASSERT_TRUE(paused.ok()) << paused.message();
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(job->Ranks().at(static_cast<std::size_t>(rank)).paused_by_program());
  EXPECT_TRUE(job->Resume(kLong).ok());
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

TEST(Control, a_rank_that_is_stopped_is_named_and_takes_part_when_it_goes_on) {
  Ranks ranks(2);
  ASSERT_TRUE(ranks.AllGoOn());
  ASSERT_EQ(::kill(ranks.pid(1), SIGSTOP), 0);
  ASSERT_TRUE(Ranks::Becomes([&] { return StateOfProcess(ranks.pid(1)) == "stopped"; }));
  {
    Result<JobControl> job = ranks.Open();
    ASSERT_TRUE(job.ok()) << job.status().message();
    EXPECT_EQ(job->Ranks().at(1).phase(), "silent");
    const Status late = job->Pause({.deadline = kShort});
    EXPECT_EQ(late.code(), Code::kTimeout);
    EXPECT_TRUE(Has(late.message(), "rank 1: does not answer; its process is stopped")) << late.message();
    EXPECT_FALSE(Has(late.message(), "rank 0:")) << late.message();
  }
  EXPECT_EQ(ranks[0].pauses, 0U);
  ASSERT_EQ(::kill(ranks.pid(1), SIGCONT), 0);
  EXPECT_TRUE(ranks.AllGoOn());
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok()) << job.status().message();
  const Status second = job->Pause({.deadline = kLong});
  EXPECT_TRUE(second.ok()) << second.message();
  EXPECT_TRUE(job->Resume(kLong).ok());
  EXPECT_TRUE(ranks.AllGoOn());
}

TEST(Control, a_rank_that_has_ended_is_left_out_also_where_a_child_of_it_lives) {
  Ranks ranks(3);
  ranks[1].forks = true;
  ASSERT_TRUE(Ranks::Becomes([&] { return !ranks[1].forks; }));
  ranks.Kill(1);
  ranks.Kill(2);
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok()) << job.status().message();
  EXPECT_EQ(job->Ranks().size(), 1U);
  EXPECT_EQ(job->LeaveNote(SessionId{99}, {}).code(), Code::kNotFound);
}

TEST(Control, a_rank_that_dies_while_it_is_asked_is_seen_also_where_a_child_of_it_lives) {
  Ranks ranks(2);
  ranks[1].forks = true;
  ASSERT_TRUE(Ranks::Becomes([&] { return !ranks[1].forks; }));
  ranks[1].away = true;
  Result<JobControl> job = ranks.Open();
  ASSERT_TRUE(job.ok());
  const Status died = job->Pause({.deadline = kLong}, [&](const std::string&) {
    if (ranks.pid(1) != 0) ranks.Kill(1);
  });
  EXPECT_EQ(died.code(), Code::kPeerLost) << died.message();
  EXPECT_TRUE(ranks.AllGoOn());
}

}  // namespace
}  // namespace amem::control
