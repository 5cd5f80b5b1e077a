// What journals and messages say of a failure, in real processes: who said what, what was seen of whom, where to read on.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "journal/journal.h"
#include "tests/guards.h"
#include "tests/scenarios/job.h"

namespace amem {
namespace {

using job::Job;
using job::Rank;

std::string Printed(const std::vector<Rank>& ranks) {
  std::string text;
  for (const Rank& rank : ranks)
    text += "-- status " + std::to_string(rank.status) + "\n" + rank.out + "-- stderr\n" + rank.err + "\n";
  return text;
}

// The events of each session of a job.
std::vector<std::vector<Event>> Journals(const Job& job) {
  std::vector<std::vector<Event>> all;
  const auto sessions = ListSessions(job.journals());
  if (!sessions.ok()) return all;
  for (const auto& session : *sessions) {
    const auto reader = JournalReader::Open(session);
    if (!reader.ok()) continue;
    all.emplace_back();
    EXPECT_TRUE((*reader)
                    ->Read(SequenceNumber{1}, kToTheEnd,
                           [&](const Event& event) {
                             all.back().push_back(event);
                             return true;
                           })
                    .ok());
  }
  return all;
}

template <class Kind>
std::vector<Kind> Of(const std::vector<Event>& events) {
  std::vector<Kind> found;
  for (const Event& event : events) {
    if (const auto* one = std::get_if<Kind>(&event.body)) found.push_back(*one);
  }
  return found;
}

TEST(Facts, of_a_rank_that_does_not_come_are_in_the_journals_of_those_that_waited) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["AMEM_TIMEOUT_MS"] = "800";
  const auto ranks = job.Run(3, {"cuda", "load", "init", "reduce", "barrier", "0:pause", "1:pause", "barrier", "reduce"});
  std::size_t waited = 0, deciders = 0;
  for (const auto& events : test::Each(Journals(job))) {
    const auto seen = Of<ProcessSeen>(events);
    if (Of<CycleFailed>(events).empty()) {
      EXPECT_TRUE(seen.empty());
      continue;
    }
    ++waited;
    const auto absent = std::ranges::find(seen, "running, has not called ncclPause", &ProcessSeen::answer);
    ASSERT_NE(absent, seen.end()) << Printed(ranks);
    EXPECT_GT(absent->pid, 0);
    EXPECT_TRUE(absent->state == "sleeping" || absent->state == "running") << absent->state;
    // Who decides has waited for the whole time; the other one came a moment later, and is told.
    const auto ballots = Of<BallotShown>(events);
    const auto late = std::ranges::find(ballots, agreement::Cause::kLate, &BallotShown::cause);
    ASSERT_NE(late, ballots.end()) << Printed(ranks);
    const bool decides = late->by == Of<SessionOpened>(events).at(0).session;
    deciders += decides ? 1 : 0;
    EXPECT_GE(absent->waited_ns, decides ? 800'000'000U : 1U);
    const auto threads = Of<ThreadSeen>(events);
    ASSERT_FALSE(threads.empty());
    EXPECT_TRUE(
        std::ranges::any_of(threads[0].stack, [](const std::string& f) { return f.starts_with("libamem_nccl.so+0x"); }));
  }
  EXPECT_EQ(waited, 2U) << Printed(ranks);
  EXPECT_EQ(deciders, 1U) << Printed(ranks);
}

TEST(Facts, of_a_cycle_that_went_well_are_the_votes_and_what_was_decided) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["SLURM_JOB_ID"] = "17";
  job.environment["WORLD_SIZE"] = "3";
  const auto ranks =
      job.Run(3, {"cuda", "load", "init", "reduce", "barrier", "pause", "resume", "reduce", "barrier", "destroy", "barrier"});
  const auto journals = Journals(job);
  EXPECT_EQ(journals.size(), 3U) << Printed(ranks);
  for (const auto& events : journals) {
    const auto opened = Of<SessionOpened>(events);
    ASSERT_EQ(opened.size(), 1U);
    for (const char* said : {"SLURM_JOB_ID=17", "WORLD_SIZE=3"}) {
      EXPECT_EQ(std::ranges::count(opened[0].launcher, said), 1) << said;
    }
    const auto decided = Of<PhaseDecided>(events);
    EXPECT_EQ(decided.size(), 6U) << "three ballots each of a pause and a resume, after all have come\n" << Printed(ranks);
    EXPECT_TRUE(std::ranges::all_of(decided, &PhaseDecided::passed));
    EXPECT_EQ(Of<VoteCast>(events).size(), decided.size()) << Printed(ranks);
    std::size_t ballots = 0;
    for (const BallotShown& shown : Of<BallotShown>(events)) {
      if (shown.cause == agreement::Cause::kUndecided) continue;  // it took a while
      ++ballots;
      EXPECT_EQ(shown.cause, agreement::Cause::kAllVoted) << ToText(shown);
      EXPECT_EQ(shown.yes, 3U);
      EXPECT_EQ(shown.seats.size(), 3U);
      EXPECT_TRUE(shown.by && shown.culprits.empty() && shown.message.empty()) << ToText(shown);
      for (const SeatShown& seat : shown.seats) EXPECT_TRUE(seat.rank >= 0 && seat.pid > 0 && seat.voted_ns != 0);
    }
    EXPECT_EQ(ballots, 2 + decided.size()) << "of `come` no phase is";
    EXPECT_TRUE(Of<ThreadSeen>(events).empty() && Of<LaunchRefused>(events).empty());
  }
}

TEST(Facts, a_launch_that_was_refused_is_in_the_journal) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks =
      job.Run(2, {"cuda", "load", "init", "reduce", "barrier", "pause", "barrier", "reduce", "barrier", "resume"});
  for (const auto& events : test::Each(Journals(job))) {
    const auto refused = Of<LaunchRefused>(events);
    ASSERT_FALSE(refused.empty()) << Printed(ranks);
    EXPECT_TRUE(refused[0].call.starts_with("cu")) << refused[0].call;
    EXPECT_EQ(refused[0].count, 1U);
  }
}

TEST(Facts, the_code_that_a_process_gave_to_exit_is_its_journals_last_word) {
  for (const bool exits : {true, false}) {
    Job job;
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    const auto ranks = exits ? job.Run(1, {"cuda", "load", "init", "exit"}) : job.Run(1, {"cuda", "load", "init"});
    EXPECT_EQ(ranks[0].status, exits ? 3 : 0) << Printed(ranks);
    const auto journals = Journals(job);
    ASSERT_EQ(journals.size(), 1U);
    const auto closed = Of<SessionClosed>(journals[0]);
    ASSERT_EQ(closed.size(), 1U);
    EXPECT_EQ(closed[0].exit_code, exits ? 3 : 0);
  }
}

TEST(Failure, its_message_ends_with_the_command_that_explains_it) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["AMEM_TIMEOUT_MS"] = "500";
  const auto ranks = job.Run(2, {"cuda", "load", "init", "reduce", "barrier", "0:pause", "barrier"});
  const std::string said = ranks[0].Said("pause");
  EXPECT_NE(said.find("; journal " + job.journals().string() + "/"), std::string::npos) << Printed(ranks);
  EXPECT_TRUE(said.ends_with("; to see why: amem-replay why " + job.journals().string())) << said;
  EXPECT_NE(ranks[0].err.find("to see why: amem-replay why " + job.journals().string()), std::string::npos) << ranks[0].err;
}

}  // namespace
}  // namespace amem
