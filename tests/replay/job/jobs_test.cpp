// Which sessions are one job.
#include "replay/job/jobs.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "tests/replay/job/written_journal.h"

namespace amem {
namespace {

constexpr std::uint64_t kMinuteInNs = 60'000'000'000;

// A session that opened at that minute of its host's wall clock, and lived for ten.
JobTies Session(std::uint64_t session, std::int32_t rank, std::uint64_t minute = 0, const std::string& boot = "boot-1") {
  JobTies ties;
  ties.who = {.session = SessionId{session},
              .boot_id = boot,
              .rank = rank,
              .realtime_ns = 1'700'000'000'000'000'000 + minute * kMinuteInNs,
              .monotonic_ns = (minute + 1) * kMinuteInNs};
  ties.last_ns = ties.who.monotonic_ns + 10 * kMinuteInNs;
  return ties;
}

// The numbers of the sessions of each job, in ascending order.
std::vector<std::vector<std::uint64_t>> Jobs(const std::vector<JobTies>& sessions) {
  std::vector<std::vector<std::uint64_t>> jobs;
  for (const auto& job : GroupIntoJobs(sessions)) {
    auto& numbers = jobs.emplace_back();
    for (const std::size_t i : job) numbers.push_back(sessions[i].who.session.value);
    std::ranges::sort(numbers);
  }
  std::ranges::sort(jobs);
  return jobs;
}

using JobsOf = std::vector<std::vector<std::uint64_t>>;

TEST(Jobs, sessions_that_met_are_one_job_also_through_one_without_a_journal) {
  std::vector<JobTies> sessions = {Session(1, 0), Session(2, 1, 600), Session(3, 0)};
  sessions[0].met = {SessionId{99}};
  sessions[1].met = {SessionId{99}};
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2}, {3}}));
}

TEST(Jobs, a_long_lived_neighbour_in_the_same_directory_is_its_own_job) {
  std::vector<JobTies> sessions = {Session(1, 0), Session(2, 1), Session(3, 0), Session(4, -1)};
  sessions[2].last_ns += 100 * kMinuteInNs;
  sessions[2].met = {SessionId{4}};
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2}, {3, 4}}));
}

TEST(Jobs, a_quick_restart_is_a_job_of_its_own) {
  std::vector<JobTies> sessions = {Session(1, 0), Session(2, 1), Session(3, 0), Session(4, 1)};
  for (std::size_t i = 0; i < 2; ++i) sessions[i].last_ns = sessions[i].who.monotonic_ns + 1'000'000'000;
  for (std::size_t i = 2; i < 4; ++i)
    sessions[i].who.realtime_ns += 3'000'000'000, sessions[i].who.monotonic_ns += 3'000'000'000;
  for (std::size_t i = 0; i < 4; i += 2) sessions[i].met = {sessions[i + 1].who.session};
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2}, {3, 4}}));
  for (JobTies& session : sessions) session.met.clear();
  for (std::size_t i = 0; i < 4; ++i)
    sessions[i].who.launcher = {"TORCHELASTIC_RUN_ID=x", "TORCHELASTIC_RESTART_COUNT=" + std::to_string(i / 2)};
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2}, {3, 4}}));
}

TEST(Jobs, hosts_are_one_job_by_a_communicator_however_far_their_clocks_are_apart) {
  std::vector<JobTies> sessions = {Session(1, 0, 0, "a"), Session(2, 1, 0, "a"), Session(3, 2, 60, "b"),
                                   Session(4, 3, 60, "b")};
  for (std::int32_t i = 0; i < 4; ++i) {
    sessions[static_cast<std::size_t>(i)].communicators = {{.hash = 0xfeed, .rank = i, .ranks = 4}};
  }
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2, 3, 4}}));
  for (JobTies& session : sessions) session.communicators.clear();
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2}, {3, 4}})) << "nothing but clocks is left";
}

TEST(Jobs, the_same_rank_of_the_same_communicator_is_another_job) {
  std::vector<JobTies> sessions = {Session(1, 0), Session(2, 1), Session(3, 0)};
  for (JobTies& session : sessions) session.communicators = {{.hash = 0xfeed, .rank = session.who.rank, .ranks = 2}};
  const JobsOf jobs = Jobs(sessions);
  EXPECT_EQ(jobs.size(), 2u);
  std::swap(sessions[1], sessions[2]);
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2}, {3}})) << "the other rank is of one of them only";
}

TEST(Jobs, a_communicator_whose_hash_is_not_known_ties_nobody) {
  const std::filesystem::path directory = testing::TempDir() + "amem-ties-" + std::to_string(getpid());
  std::uint64_t clock = 1'000'000'000;
  test::Story story(0x51, 0, &clock);
  for (const std::uint64_t id : {1U, 2U}) story.Then(CommunicatorBegun{CommunicatorId{id}});
  story.Then(CommunicatorReady{CommunicatorId{2}, 0xfeed, 0, 4, DeviceOrdinal{0}});
  const Result<JobTies> ties = ReadTies(test::WriteJournal(story, directory));
  std::filesystem::remove_all(directory);
  ASSERT_TRUE(ties.ok()) << ties.status().message();
  ASSERT_EQ(ties->communicators.size(), 1U);
  EXPECT_EQ(ties->communicators[0].hash, 0xfeedU);
}

TEST(Jobs, the_launcher_tells_what_belongs_together_and_its_words_of_the_rank_do_not_tell_apart) {
  std::vector<JobTies> sessions = {Session(1, 0, 0, "a"), Session(2, 1, 60, "b"), Session(3, 0, 0, "a"), Session(4, 2, 0, "a")};
  const std::vector<std::string> job = {"17", "17", "17", "18"};
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    sessions[i].who.launcher = {"SLURM_JOB_ID=" + job[i], "SLURM_PROCID=" + std::to_string(i), "WORLD_SIZE=2",
                                "LOCAL_RANK=" + std::to_string(i)};
  }
  // The third has the rank of the first: another step of the same allocation, as an inference engine beside the training.
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2}, {3}, {4}}));
}

TEST(Jobs, a_rank_that_died_before_it_met_anybody_belongs_to_those_that_started_with_it) {
  std::vector<JobTies> sessions = {Session(1, 0), Session(2, 1), Session(3, 2)};
  sessions[0].met = {SessionId{2}};
  sessions[2].last_ns = sessions[2].who.monotonic_ns;
  EXPECT_EQ(Jobs(sessions), (JobsOf{{1, 2, 3}}));
}

TEST(Jobs, the_job_that_went_on_for_longest_comes_first) {
  const std::vector<JobTies> sessions = {Session(1, 0), Session(2, 0, 30), Session(3, 0, 15)};
  const auto jobs = GroupIntoJobs(sessions);
  ASSERT_EQ(jobs.size(), 3u);
  EXPECT_EQ(jobs[0], std::vector<std::size_t>{1});
  EXPECT_EQ(jobs[2], std::vector<std::size_t>{0});
}

TEST(Jobs, what_is_asked_for_something_is_certainly_one_job) {
  std::vector<JobTies> sessions = {Session(1, -1), Session(2, -1), Session(3, 0), Session(4, 1), Session(5, 2), Session(6, 3)};
  for (std::size_t i = 2; i < 6; ++i) sessions[i].who.launcher = {"RAY_JOB_ID=7", "MASTER_PORT=29500", "WORLD_SIZE=4"};
  const auto certain = [&] {
    std::vector<std::size_t> sizes;
    for (const auto& job : GroupIntoJobs(sessions, Ties::kCertain)) sizes.push_back(job.size());
    std::ranges::sort(sizes);
    return sizes;
  };
  EXPECT_EQ(GroupIntoJobs(sessions).size(), 2u);
  EXPECT_EQ(certain(), (std::vector<std::size_t>{1, 1, 1, 1, 1, 1}));
  sessions[2].launch = sessions[3].launch = "torchrun none 0 4711";
  EXPECT_EQ(certain(), (std::vector<std::size_t>{1, 1, 1, 1, 2}));
  sessions[4].communicators = {{.hash = 0xfeed, .rank = 2, .ranks = 4}};
  sessions[5].communicators = {{.hash = 0xfeed, .rank = 3, .ranks = 4}};
  EXPECT_EQ(certain(), (std::vector<std::size_t>{1, 1, 2, 2}));
  sessions[5].met = {SessionId{3}};
  EXPECT_EQ(certain(), (std::vector<std::size_t>{1, 1, 4}));
}

}  // namespace
}  // namespace amem
