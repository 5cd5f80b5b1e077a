// Jobs of several hosts with AMEM_NETWORK=renew, over the stand-in card: what connections hold leaves in a pause and comes back
// under new keys. The card gives no key twice, and reports each use of one that has ended, and memory that was mapped anew
// under a registration.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/scenarios/job.h"

namespace amem {
namespace {

using job::Job;
using job::Rank;
using Commands = std::vector<std::string>;

std::string All(const std::vector<Rank>& ranks) {
  std::string text;
  for (const Rank& rank : ranks)
    text += "-- status " + std::to_string(rank.status) + "\n" + rank.out + "-- stderr\n" + rank.err + "\n";
  return text;
}
Commands operator+(Commands commands, const Commands& more) {
  commands.insert(commands.end(), more.begin(), more.end());
  return commands;
}
Commands operator*(int times, const Commands& commands) {
  Commands all;
  for (int i = 0; i < times; ++i) all = all + commands;
  return all;
}

const Commands kBegin = {"cuda", "load", "init", "reduce", "barrier"};
const Commands kPaused = {"barrier", "pause idle", "barrier", "bytes", "card=bytes", "barrier"};
const Commands kResumed = {"resume", "reduce"};
const Commands kEnd = {"barrier", "card=findings", "destroy", "barrier", "card=regions"};
const Commands kMessages = {"send=100", "receive=100", "send=300000", "receive=300000"};

class RenewJob : public ::testing::Test {
 protected:
  RenewJob() {
    job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job_.environment["LD_LIBRARY_PATH"] += std::string(":") + AMEM_CARD;
    job_.environment["AMEM_CARD_FINDINGS"] = findings();
    job_.environment["STAND_IN_RANKS_PER_HOST"] = "1";
    job_.environment["STAND_IN_NET"] = "ib";
    job_.environment["AMEM_NETWORK"] = "renew";
  }
  [[nodiscard]] std::filesystem::path findings() const { return job_.directory() / "findings"; }
  // All ranks end well, add up to the same sums each time, no message differs, and the card has found nothing.
  void ExpectWell(const std::vector<Rank>& ranks, int sums) const {
    const std::string sum = ranks[0].Said("reduce");
    EXPECT_TRUE(sum.starts_with("sum ")) << All(ranks);
    for (const Rank& rank : ranks) {
      EXPECT_EQ(rank.status, 0) << All(ranks);
      for (int i = 0; i < sums; ++i) EXPECT_EQ(rank.Said("reduce", i), sum) << i << "\n" << All(ranks);
      EXPECT_EQ(rank.out.find("differs"), rank.out.npos) << All(ranks);
      EXPECT_TRUE(rank.out.ends_with("card: 0\n")) << "what was registered to the end\n" << All(ranks);
    }
    std::ifstream file(findings());
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "");
  }

  Job job_;
};

TEST_F(RenewJob, twenty_pauses_leave_nothing_with_the_card) {
  const auto ranks = job_.Run(3, kBegin + 20 * (kPaused + kResumed + kMessages) + kEnd);
  ExpectWell(ranks, 21);
  for (const Rank& rank : ranks)
    for (int cycle = 0; cycle < 20; ++cycle) {
      EXPECT_EQ(rank.Said("bytes", cycle), "0") << cycle << All(ranks);
      EXPECT_EQ(rank.Said("card", cycle), "0") << cycle;
    }
}

// The message is in the buffer, and the peer asks for it only after the resume.
TEST_F(RenewJob, an_unmatched_send_waits_across_a_pause) {
  const auto ranks = job_.Run(
      2, kBegin + 3 * (Commands{"send=100", "send=300000"} + kPaused + Commands{"resume", "receive=100", "receive=300000"}) +
             kEnd);
  ExpectWell(ranks, 1);
  for (const Rank& rank : ranks) {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(rank.Said("card", i), "0") << All(ranks);
    for (int i = 0; i < 6; ++i) EXPECT_EQ(rank.Said("receive", i), "as sent") << All(ranks);
  }
}

// Not all were idle, whatever the caller said: the peer's receive comes while this rank is paused, whose send then waits.
TEST_F(RenewJob, what_a_peer_waits_for_is_sent_after_the_resume) {
  const auto ranks = job_.Run(2, kBegin +
                                     Commands{"0:send=300000", "0:pause idle", "0:card=bytes", "barrier", "0:sleep=400",
                                              "0:resume", "1:receive=300000", "reduce"} +
                                     kEnd);
  ExpectWell(ranks, 2);
  EXPECT_EQ(ranks[0].Said("card"), "0") << All(ranks);
  EXPECT_EQ(ranks[1].Said("receive"), "as sent") << All(ranks);
}

TEST_F(RenewJob, without_the_word_that_all_hosts_are_idle_what_the_card_holds_stays) {
  const auto ranks = job_.Run(
      2, kBegin + Commands{"card=bytes", "barrier", "pause", "barrier", "card=bytes", "barrier"} + kResumed + kMessages + kEnd);
  ExpectWell(ranks, 2);
  for (const Rank& rank : ranks) {
    EXPECT_NE(rank.Said("card", 0), "0") << All(ranks);
    EXPECT_EQ(rank.Said("card", 1), rank.Said("card", 0));
  }
}

TEST_F(RenewJob, a_card_that_refuses_to_deregister_keeps_that_buffer_and_no_other) {
  const auto ranks = job_.Run(
      2, kBegin + Commands{"card=bytes", "faults=deregister=1"} + kPaused + kResumed + kPaused + kResumed + kMessages + kEnd);
  ExpectWell(ranks, 3);
  for (const Rank& rank : ranks) {
    EXPECT_NE(rank.Said("card", 1), "0") << All(ranks);
    EXPECT_NE(rank.Said("card", 1), rank.Said("card", 0)) << All(ranks);
    EXPECT_EQ(rank.Said("card", 2), "0") << All(ranks);
  }
}

TEST_F(RenewJob, a_registration_that_fails_leaves_the_rank_paused_and_the_next_resume_mends_it) {
  for (const char* const fault : {"faults=register=1", "faults=register=3"}) {
    Job one;
    one.environment = job_.environment;
    const auto ranks =
        one.Run(2, kBegin + kPaused + Commands{fault, "resume", "bytes", "barrier", "resume", "reduce"} + kMessages + kEnd);
    ExpectWell(ranks, 2);
    for (const Rank& rank : ranks) {
      EXPECT_NE(rank.Said("resume", 0), "0") << All(ranks);
      EXPECT_NE(rank.Said("resume", 0).find("did not register"), std::string::npos) << All(ranks);
      EXPECT_EQ(rank.Said("bytes", 1), "0") << All(ranks);
    }
  }
}

TEST_F(RenewJob, a_pause_waits_for_a_slow_card) {
  job_.environment["AMEM_CARD_FAULTS"] = "late=3000";
  const auto ranks = job_.Run(2, kBegin + 5 * (kMessages + kPaused + kResumed) + kEnd);
  ExpectWell(ranks, 6);
  for (const Rank& rank : ranks)
    for (int cycle = 0; cycle < 5; ++cycle) EXPECT_EQ(rank.Said("card", cycle), "0") << All(ranks);
}

TEST_F(RenewJob, a_communicator_may_be_destroyed_and_another_made_around_a_pause) {
  const auto ranks =
      job_.Run(2, kBegin + kPaused + Commands{"destroy", "resume", "barrier", "init", "reduce"} + kPaused + kResumed + kEnd);
  ExpectWell(ranks, 3);
}

}  // namespace
}  // namespace amem
