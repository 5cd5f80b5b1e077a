// The clock of a job: what happened first on any host comes first.
#include "replay/job/clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace amem {
namespace {

constexpr std::uint64_t kSecond_ns = 1'000'000'000;
constexpr std::uint64_t kNoon_ns = 1'700'000'000 * kSecond_ns;  // wall clock

SessionOpened Opened(const char* host, const char* boot, std::uint64_t monotonic_ns, std::uint64_t realtime_ns) {
  static std::uint64_t session = 0;
  return {
      .session = SessionId{++session}, .host = host, .boot_id = boot, .realtime_ns = realtime_ns, .monotonic_ns = monotonic_ns};
}

JobClock ClockOf(const std::vector<SessionOpened>& sessions) {
  std::vector<JobClock::Journal> journals;
  for (const SessionOpened& opened : sessions) journals.push_back({&opened, opened.monotonic_ns});
  return JobClock(journals);
}

TEST(Clock, sessions_of_one_boot_keep_their_order_although_the_wall_clock_was_set_between) {
  const std::vector<SessionOpened> sessions = {Opened("a", "boot", 20 * kSecond_ns, kNoon_ns),  // set back by an hour
                                               Opened("a", "boot", 10 * kSecond_ns, kNoon_ns + 3600 * kSecond_ns)};
  const JobClock clock = ClockOf(sessions);
  EXPECT_EQ(clock.boots(), 1U);
  EXPECT_EQ(clock.Wall(sessions[1], 10 * kSecond_ns), kNoon_ns - 10 * kSecond_ns) << "as the clock tells it since it was set";
  EXPECT_EQ(clock.Wall(sessions[0], 20 * kSecond_ns), kNoon_ns);
  EXPECT_EQ(clock.Wall(sessions[0], 0), 0U) << "no time stays none";
}

// A clock that runs a little fast is not set; the dates of a session must not depend on who opened beside it.
TEST(Clock, of_sessions_whose_clocks_differ_by_less_than_a_second_the_first_decides) {
  const std::vector<SessionOpened> sessions = {Opened("a", "boot", 20 * kSecond_ns, kNoon_ns + 20 * kSecond_ns + 900'000'000),
                                               Opened("a", "boot", 10 * kSecond_ns, kNoon_ns + 10 * kSecond_ns)};
  EXPECT_EQ(ClockOf(sessions).Wall(sessions[0], 20 * kSecond_ns), kNoon_ns + 20 * kSecond_ns);
}

// The one that opened later has ended before the clock was set, so it knows nothing of it.
TEST(Clock, a_session_that_saw_the_clock_set_decides_for_those_that_ended_before) {
  const SessionOpened first = Opened("a", "boot", 10 * kSecond_ns, kNoon_ns + 10 * kSecond_ns);
  const SessionOpened second = Opened("a", "boot", 20 * kSecond_ns, kNoon_ns - 3600 * kSecond_ns + 20 * kSecond_ns);
  const std::vector<JobClock::Journal> journals = {{&first, 10 * kSecond_ns, {}, 100 * kSecond_ns}, {&second, 20 * kSecond_ns}};
  const JobClock clock(journals);
  EXPECT_EQ(clock.Wall(first, 10 * kSecond_ns), kNoon_ns + 10 * kSecond_ns);
  EXPECT_EQ(clock.Wall(second, 20 * kSecond_ns), kNoon_ns + 20 * kSecond_ns);
}

TEST(Clock, the_order_in_which_journals_are_given_does_not_matter) {
  std::vector<SessionOpened> sessions = {
      Opened("a", "one", 10 * kSecond_ns, kNoon_ns), Opened("a", "one", 11 * kSecond_ns, kNoon_ns),
      Opened("a", "two", 7 * kSecond_ns, kNoon_ns + 100 * kSecond_ns), Opened("b", "three", 8 * kSecond_ns, 0)};
  const JobClock forwards = ClockOf(sessions);
  std::vector<SessionOpened> reversed(sessions.rbegin(), sessions.rend());
  const JobClock backwards = ClockOf(reversed);
  for (const SessionOpened& opened : sessions) EXPECT_EQ(forwards.OffsetOf(opened), backwards.OffsetOf(opened));
  EXPECT_EQ(forwards.began_ns(), backwards.began_ns());
}

// The monotonic clock begins anew with each boot, so the later boot's times are the smaller ones.
TEST(Clock, two_boots_of_one_host_are_two_clocks) {
  const std::vector<SessionOpened> sessions = {Opened("a", "before", 90'000 * kSecond_ns, kNoon_ns),
                                               Opened("a", "after", 30 * kSecond_ns, kNoon_ns + 600 * kSecond_ns)};
  const JobClock clock = ClockOf(sessions);
  EXPECT_EQ(clock.boots(), 2U);
  EXPECT_LT(clock.Wall(sessions[0], 90'000 * kSecond_ns), clock.Wall(sessions[1], 30 * kSecond_ns));
  EXPECT_EQ(clock.Wall(sessions[1], 31 * kSecond_ns), kNoon_ns + 601 * kSecond_ns);
  EXPECT_FALSE(SameBoot(sessions[0], sessions[1]));
}

TEST(Clock, two_hosts_are_put_together_by_their_wall_clocks) {
  const std::vector<SessionOpened> sessions = {Opened("a", "one", 500 * kSecond_ns, kNoon_ns + 2 * kSecond_ns),
                                               Opened("b", "two", 9 * kSecond_ns, kNoon_ns)};
  const JobClock clock = ClockOf(sessions);
  EXPECT_EQ(clock.boots_without_wall_clock(), 0U);
  EXPECT_EQ(clock.began_ns(), static_cast<std::int64_t>(kNoon_ns)) << "b was first";
  EXPECT_EQ(clock.Wall(sessions[0], 500 * kSecond_ns) - clock.Wall(sessions[1], 9 * kSecond_ns), 2 * kSecond_ns);
}

TEST(Clock, journals_without_a_boot_are_told_apart_by_their_hosts) {
  const std::vector<SessionOpened> sessions = {Opened("a", "", 5 * kSecond_ns, kNoon_ns),
                                               Opened("b", "", 50 * kSecond_ns, kNoon_ns)};
  const JobClock clock = ClockOf(sessions);
  EXPECT_EQ(clock.boots(), 2U);
  EXPECT_EQ(clock.Wall(sessions[0], 5 * kSecond_ns), clock.Wall(sessions[1], 50 * kSecond_ns));
  EXPECT_FALSE(SameBoot(sessions[0], sessions[0])) << "it may have been another boot";
}

TEST(Clock, a_boot_without_a_wall_clock_begins_with_the_job) {
  const std::vector<SessionOpened> sessions = {Opened("a", "one", 100 * kSecond_ns, kNoon_ns),
                                               Opened("b", "two", 7 * kSecond_ns, 0)};
  const JobClock clock = ClockOf(sessions);
  EXPECT_EQ(clock.boots_without_wall_clock(), 1U);
  EXPECT_EQ(clock.Wall(sessions[1], 8 * kSecond_ns), kNoon_ns + kSecond_ns);
}

TEST(Clock, without_any_wall_clock_all_boots_begin_together) {
  const std::vector<SessionOpened> sessions = {Opened("a", "one", 100 * kSecond_ns, 0), Opened("b", "two", 7 * kSecond_ns, 0)};
  const JobClock clock = ClockOf(sessions);
  EXPECT_EQ(clock.boots_without_wall_clock(), 2U);
  EXPECT_EQ(clock.Wall(sessions[0], 101 * kSecond_ns), clock.Wall(sessions[1], 8 * kSecond_ns));
  EXPECT_EQ(clock.began_ns(), static_cast<std::int64_t>(7 * kSecond_ns));
}

TEST(Clock, only_several_boots_are_compared_by_their_communicators) {
  const auto needed = [](const std::vector<SessionOpened>& sessions) {
    std::vector<const SessionOpened*> all;
    for (const SessionOpened& one : sessions) all.push_back(&one);
    return JobClock::NeedsCommunicators(all);
  };
  EXPECT_FALSE(needed({}));
  EXPECT_FALSE(needed({Opened("a", "one", 1, 1), Opened("a", "one", 2, 2)}));
  EXPECT_TRUE(needed({Opened("a", "one", 1, 1), Opened("a", "one", 2, 2), Opened("a", "two", 3, 3)}));
  EXPECT_TRUE(needed({Opened("a", "", 1, 1), Opened("b", "", 1, 1)}));
}

TEST(Clock, this_host_knows_its_own_journals) {
  const ThisHost host = ThisHost::Now();
  EXPECT_GT(host.now_ns, 0U);
  EXPECT_FALSE(host.boot_id.empty());
  EXPECT_TRUE(host.Wrote({.boot_id = host.boot_id}));
  EXPECT_FALSE(host.Wrote({.boot_id = "another"}));
  EXPECT_FALSE(ThisHost{}.Wrote({.boot_id = ""})) << "nothing is known of either";
}

SessionOpened OnBoot(const std::string& boot, std::uint64_t realtime_ns) {
  return {.session = SessionId{boot.size()}, .host = boot, .boot_id = boot, .realtime_ns = realtime_ns, .monotonic_ns = 1'000};
}

// Communicators by their hashes, and when they were ready.
ReadyCommunicators Ready(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& all, std::uint64_t first_seq = 1) {
  ReadyCommunicators ready;
  std::uint64_t seq = 1;
  ready.Take({.seq = SequenceNumber{seq}, .time_ns = 1, .body = SessionOpened{}});
  for (const auto& [hash, time_ns] : all) {
    ready.Take({.seq = SequenceNumber{first_seq + ++seq}, .time_ns = time_ns, .body = CommunicatorReady{.hash = hash}});
  }
  return ready;
}

TEST(JobClock, communicators_count_that_are_among_the_first_events_of_a_journal) {
  EXPECT_EQ(Ready({{1, 10}, {2, 20}}).all().size(), 2U);
  EXPECT_EQ(Ready({{0, 10}}).all().size(), 0U) << "without a hash it is not known in other journals";
  EXPECT_EQ(Ready({{1, 10}}, ReadyCommunicators::kEvents).all().size(), 0U);
}

// The second host's clock is an hour ahead. Three communicators tell how its events lie.
TEST(JobClock, hosts_are_put_together_by_the_communicators_that_they_made) {
  constexpr std::uint64_t kHour = 3'600'000'000'000;
  const SessionOpened a = OnBoot("a", kHour), bb = OnBoot("bb", 2 * kHour + 5'000), other = OnBoot("ccc", 7 * kHour);
  const std::vector<JobClock::Journal> journals = {{&a, 1'000, Ready({{1, 10'000}, {2, 20'000}, {3, 30'000}})},
                                                   {&bb, 1'000, Ready({{1, 5'000}, {2, 15'000}, {3, 900'000}})},
                                                   {&other, 1'000, Ready({{9, 5'000}})}};
  const JobClock clock(journals);
  EXPECT_EQ(clock.Wall(bb, 5'000), clock.Wall(a, 10'000));
  EXPECT_EQ(clock.Wall(a, 1'000), kHour);
  EXPECT_EQ(clock.Wall(other, 1'000), 7 * kHour) << "it shares none: its wall clock counts";
  EXPECT_FALSE(clock.by_communicators()) << "of the third one";
  EXPECT_TRUE(JobClock(std::span(journals).first(2)).by_communicators());
}

TEST(JobClock, a_communicator_is_ready_on_a_host_with_the_last_of_its_ranks_there) {
  const SessionOpened a = OnBoot("a", 1'000'000'000), last = OnBoot("bb", 5'000'000'000);
  SessionOpened first = last;
  first.session = SessionId{77};
  std::vector<JobClock::Journal> journals = {
      {&a, 1'000, Ready({{1, 10'000}})}, {&first, 1'000, Ready({{1, 4'000}})}, {&last, 1'000, Ready({{1, 5'000}})}};
  for (int order = 0; order < 2; ++order) {
    const JobClock clock(journals);
    EXPECT_EQ(clock.Wall(last, 5'000), clock.Wall(a, 10'000)) << "in order " << order;
    std::swap(journals[1], journals[2]);
  }
}

}  // namespace
}  // namespace amem
