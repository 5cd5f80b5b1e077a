// Jobs whose ranks are on hosts of their own and send through a network card: real processes, the library, the stand-ins for
// libcuda and NCCL, and for libibverbs a card that refuses what a card refuses. Whatever is wrong with a key or with memory
// under one is a finding of the card's.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/scenarios/job.h"

namespace amem {
namespace {

using job::Job;
using job::Rank;
using Commands = std::vector<std::string>;

#ifdef AMEM_BY_NIGHT
constexpr int kCycles = 20;
#else
constexpr int kCycles = 4;
#endif
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kBuffer = 4 * kMiB;  // of one connection, in one direction

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

const Commands kBegin = {"cuda", "load", "init", "reduce", "barrier", "bytes", "card=bytes"};
const Commands kCycle = {"barrier", "pause", "barrier", "bytes", "card=bytes", "barrier", "resume", "reduce"};
const Commands kEnd = {"barrier", "card=findings", "destroy", "barrier", "card=regions"};
// Few bytes and many, of which only the latter need a flush, to the next rank and from the one before.
const Commands kMessages = {"send=100", "receive=100", "send=300000", "receive=300000"};

class NetworkJob : public ::testing::Test {
 protected:
  NetworkJob() {
    job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job_.environment["LD_LIBRARY_PATH"] += std::string(":") + AMEM_CARD;
    job_.environment["AMEM_SIM_CARD_FINDINGS"] = findings();
    job_.environment["STAND_IN_RANKS_PER_HOST"] = "1";
    job_.environment["STAND_IN_NET"] = "ib";
  }
  [[nodiscard]] std::filesystem::path findings() const { return job_.directory() / "findings"; }
  [[nodiscard]] std::string Found() const {
    std::ifstream file(findings());
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void ExpectNothingFound() const { EXPECT_EQ(Found(), ""); }
  // All ranks end well, add up to the same sums each time, and no message differs.
  void ExpectWell(const std::vector<Rank>& ranks, int sums) const {
    const std::string sum = ranks[0].Said("reduce");
    EXPECT_TRUE(sum.starts_with("sum ")) << All(ranks);
    for (const Rank& rank : ranks) {
      EXPECT_EQ(rank.status, 0) << All(ranks);
      for (int i = 0; i < sums; ++i) EXPECT_EQ(rank.Said("reduce", i), sum) << i << "\n" << All(ranks);
      EXPECT_EQ(rank.Said("reduce", sums), "(not run)");
      EXPECT_EQ(rank.out.find("differs"), rank.out.npos) << All(ranks);
      EXPECT_TRUE(rank.out.ends_with("card: 0\n")) << "what was registered to the end\n" << All(ranks);
    }
    ExpectNothingFound();
  }
  static std::uint64_t Number(const Rank& rank, const std::string& command, int nth) {
    const std::string said = rank.Said(command, nth);
    return said.empty() || said.find_first_not_of("0123456789") != said.npos ? ~std::uint64_t{0} : std::stoull(said);
  }

  Job job_;
};

TEST_F(NetworkJob, without_AMem_the_job_is_right_as_well) {
  job_.environment.erase("LD_PRELOAD");
  const auto ranks = job_.Run(3, kBegin + kMessages + Commands{"reduce"} + kEnd);
  ExpectWell(ranks, 2);
  for (const Rank& rank : ranks) EXPECT_GT(Number(rank, "card", 0), 2 * kMiB) << "all went through the card";
}

// By default what the card holds stays, and nothing around it.
TEST_F(NetworkJob, pauses_leave_what_the_card_holds) {
  job_.environment["AMEM_NETWORK"] = "keep";
  const auto ranks = job_.Run(2, kBegin + kCycles * (kCycle + kMessages) + kEnd);
  ExpectWell(ranks, 1 + kCycles);
  for (const Rank& rank : ranks) {
    for (int cycle = 1; cycle <= kCycles; ++cycle) {
      EXPECT_EQ(Number(rank, "bytes", cycle), 2 * kBuffer) << cycle << All(ranks);
      EXPECT_EQ(Number(rank, "card", cycle), Number(rank, "card", 0));
    }
  }
}

// Beside so few other buffers that is more than a tenth of what was asked for.
TEST_F(NetworkJob, a_pause_that_leaves_much_says_so_once) {
  job_.environment["AMEM_NETWORK"] = "keep";
  job_.environment["AMEM_LAYOUT"] = "direct";
  const auto ranks = job_.Run(2, kBegin + kCycles * (kCycle + kMessages) + kEnd);
  ExpectWell(ranks, 1 + kCycles);
  for (const Rank& rank : ranks) {
    const std::string line = "a pause of tag nccl leaves ";
    const std::size_t at = rank.err.find(line);
    ASSERT_NE(at, std::string::npos) << All(ranks);
    EXPECT_NE(rank.err.find(" where it is: ", at), std::string::npos) << rank.err;
    EXPECT_NE(rank.err.find("registered with a network card", at), std::string::npos) << rank.err;
    EXPECT_EQ(rank.err.find(line, at + 1), std::string::npos) << rank.err;
  }
}

// With tags, AMem sees what the plugin does with the card's library, too.
TEST_F(NetworkJob, pauses_leave_what_a_plugin_registers) {
  job_.environment["STAND_IN_NET"] = AMEM_RDMA_PLUGIN;
  job_.environment["AMEM_NETWORK"] = "keep";
  const auto ranks =
      job_.Run(2, Commands{"cuda", "load", "tags"} + kBegin + 2 * (kCycle + kMessages) + Commands{"read tags"} + kEnd);
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("read tags"), "as written") << All(ranks);
    for (int cycle = 1; cycle <= 2; ++cycle) EXPECT_EQ(rank.Said("card", cycle), rank.Said("card", 0));
  }
  ExpectWell(ranks, 3);
}

// ---- AMEM_NETWORK=renew

const Commands kRenewalBegins = {"barrier", "pause idle", "barrier", "bytes", "card=regions"};
const Commands kRenewal = kRenewalBegins + Commands{"barrier", "resume", "reduce"};

// What is registered is given up and made anew: of NCCL's own network, and of a plugin.
class Renewal : public NetworkJob, public ::testing::WithParamInterface<const char*> {
 protected:
  Renewal() {
    job_.environment["AMEM_NETWORK"] = "renew";
    job_.environment["STAND_IN_NET"] = GetParam();
  }
  static bool ByPlugin() { return std::string(GetParam()) != "ib"; }
  // The nth pause left nothing on this rank's GPU, and nothing with its card.
  static void ExpectAllGone(const std::vector<Rank>& ranks, int pauses) {
    for (const Rank& rank : ranks)
      for (int nth = 0; nth < pauses; ++nth) {
        EXPECT_EQ(rank.Said("pause idle", nth), "0") << All(ranks);
        EXPECT_EQ(rank.Said("resume", nth), "0") << All(ranks);
        EXPECT_EQ(rank.Said("bytes", nth + 1), "0") << nth << All(ranks);
        EXPECT_EQ(rank.Said("card", nth + 1), "0") << nth << All(ranks);
      }
  }
};
const auto Named = [](const auto& info) { return std::string(info.param).size() == 2 ? "ByNccl" : "ByPlugin"; };

// Where NCCL's own network and a plugin differ in nothing but who registers; by day of the former alone.
class RenewalOfOne : public Renewal {};

TEST_P(Renewal, pauses_give_everything_back_and_no_key_is_missed) {
  const auto ranks = job_.Run(2, kBegin + kCycles * (kRenewal + kMessages) + kEnd);
  ExpectAllGone(ranks, kCycles);
  ExpectWell(ranks, 1 + kCycles);
}

TEST_P(Renewal, messages_that_nobody_has_received_yet_wait_across_a_pause) {
  const Commands across = {"send=100",     "send=300000", "barrier", "pause idle",  "barrier",       "bytes",
                           "card=regions", "barrier",     "resume",  "receive=100", "receive=300000"};
  const auto ranks = job_.Run(2, kBegin + 2 * across + Commands{"reduce"} + kEnd);
  ExpectAllGone(ranks, 2);
  ExpectWell(ranks, 2);
}

TEST_P(Renewal, several_communicators_of_three_hosts_are_renewed) {
  const auto ranks = job_.Run(3, Commands{"cuda", "load", "init", "init", "reduce", "barrier", "bytes", "card=bytes"} +
                                     kRenewal + kMessages + Commands{"destroy"} + kRenewal + kEnd);
  ExpectAllGone(ranks, 2);
  ExpectWell(ranks, 3);
}

TEST_P(RenewalOfOne, ranks_that_share_a_host_go_on_sharing_memory) {
  job_.environment["STAND_IN_RANKS_PER_HOST"] = "2";
  const auto ranks = job_.Run(4, kBegin + 2 * kRenewal + kEnd);
  ExpectAllGone(ranks, 2);
  ExpectWell(ranks, 3);
}

TEST_P(Renewal, memory_of_cudaMalloc_is_renewed_as_well) {
  job_.environment["NCCL_CUMEM_ENABLE"] = "0";
  const auto ranks = job_.Run(2, kBegin + kRenewal + kMessages + kRenewal + kEnd);
  ExpectAllGone(ranks, 2);
  ExpectWell(ranks, 3);
}

// Nobody has said that all hosts are idle.
TEST_P(RenewalOfOne, a_plain_pause_leaves_what_the_card_holds) {
  const auto ranks = job_.Run(2, kBegin + kCycle + kRenewal + kCycle + kMessages + kEnd);
  ExpectWell(ranks, 4);
  for (const Rank& rank : ranks)
    for (const int cycle : {1, 3}) EXPECT_EQ(Number(rank, "bytes", cycle), 2 * kBuffer) << cycle << All(ranks);
}

// Not all were idle, whatever the caller said: the peer's receive comes while this rank is paused, whose send then waits.
TEST_P(Renewal, what_a_peer_waits_for_is_sent_after_the_resume) {
  const auto ranks = job_.Run(2, kBegin +
                                     Commands{"0:send=300000", "0:pause idle", "0:card=regions", "barrier", "0:sleep=400",
                                              "0:resume", "1:receive=300000", "reduce"} +
                                     kEnd);
  ExpectWell(ranks, 2);
  EXPECT_EQ(ranks[0].Said("card", 1), "0") << All(ranks);
  EXPECT_EQ(ranks[1].Said("receive"), "as sent") << All(ranks);
}

TEST_P(Renewal, communicators_may_be_destroyed_while_paused_and_others_made_afterwards) {
  const auto ranks = job_.Run(2, Commands{"cuda", "load", "init", "init", "reduce", "barrier", "bytes", "card=bytes"} +
                                     kRenewalBegins + Commands{"destroy", "barrier", "resume", "reduce"} + kRenewalBegins +
                                     Commands{"destroy", "resume", "barrier", "init", "reduce"} + kRenewal + kEnd);
  ExpectAllGone(ranks, 3);
  ExpectWell(ranks, 4);
}

// The launch is refused, but NCCL's proxy begins to receive, and waits at the gate.
TEST_P(Renewal, a_communicator_can_be_aborted_while_its_thread_waits_for_the_card) {
  const auto ranks = job_.Run(2, kBegin +
                                     Commands{"barrier", "pause idle", "barrier", "receive=100", "sleep=100", "abort",
                                              "barrier", "resume", "init", "reduce"} +
                                     kRenewal + kEnd);
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("receive"), "failed 1") << All(ranks);
    EXPECT_EQ(rank.Said("abort"), "0") << All(ranks);
  }
  ExpectWell(ranks, 3);
}

// NCCL's threads cannot say which of the two they serve; a send of the one that lives waits for the resume.
TEST_P(Renewal, one_that_ends_while_paused_takes_nothing_from_another_of_its_group) {
  for (const std::string how : {"abort", "destroy"}) {
    const auto ranks = job_.Run(
        2, Commands{"cuda",          "load",         "init two",         "reduce",  "swap",        "reduce",   "barrier",
                    "0:send=300000", "0:pause idle", "0:card=regions",   "barrier", "0:sleep=200", "0:swap",   "0:" + how,
                    "0:sleep=200",   "0:resume",     "1:receive=300000", "barrier", "1:swap",      "1:" + how, "reduce"} +
               kEnd);
    ExpectWell(ranks, 3);
    EXPECT_EQ(ranks[0].Said("card", 0), "0") << All(ranks);
    EXPECT_EQ(ranks[0].Said(how), "0") << All(ranks);
    EXPECT_EQ(ranks[1].Said("receive"), "as sent") << All(ranks);
  }
}

// Nobody has received yet what ncclCommDestroy has NCCL's thread complete.
TEST_P(RenewalOfOne, a_communicator_that_is_being_destroyed_when_a_pause_begins_completes_its_sends) {
  const auto ranks = job_.Run(2, Commands{"cuda", "load", "init", "init", "reduce", "barrier", "0:send=300000", "0:hang",
                                          "0:pause idle", "0:card=regions", "barrier", "0:sleep=200", "0:resume",
                                          "1:receive=300000", "barrier", "1:destroy", "reduce"} +
                                     kEnd);
  ExpectWell(ranks, 2);
  EXPECT_NE(ranks[0].Said("card", 0), "0") << "the buffers stay\n" << All(ranks);
  EXPECT_EQ(ranks[1].Said("receive"), "as sent") << All(ranks);
}

// In a pause that follows traffic the card has requests under way, of which some are told to have ended much later.
TEST_P(Renewal, a_slow_card_is_waited_for) {
  job_.environment["AMEM_SIM_CARD_FAULTS"] = "late=400,ack=20000";
  const auto ranks = job_.Run(2, kBegin + 2 * (kMessages + kRenewal) + kEnd);
  ExpectAllGone(ranks, 2);
  ExpectWell(ranks, 3);
}

// From the first tag on AMem sees what a plugin does with the card's library as well.
TEST_P(Renewal, with_tags_nothing_is_taken_for_another_librarys) {
  const auto ranks =
      job_.Run(2, Commands{"cuda", "load", "tags"} + kBegin + kRenewal + kMessages + Commands{"read tags"} + kEnd);
  ExpectWell(ranks, 2);
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("read tags"), "as written") << All(ranks);
    EXPECT_EQ(rank.Said("card", 1), "0") << All(ranks);
  }
}

// ---- failures of the card

// Two ranks a host, of which one sends to the other host and one receives; what a host shares pauses and resumes together.
TEST_P(Renewal, a_registration_that_fails_keeps_its_host_paused_until_it_works) {
  job_.environment["STAND_IN_RANKS_PER_HOST"] = "2";
  constexpr int kRegions = 2;
  const auto failing = [](int nth) {
    return kRenewalBegins + Commands{"1:faults=register=" + std::to_string(nth),
                                     "barrier",
                                     "0,1:resume",
                                     "barrier",
                                     "0,1:bytes",
                                     "0,1:card=regions",
                                     "barrier",
                                     "resume",
                                     "reduce"};
  };
  const auto ranks = job_.Run(4, kBegin + failing(1) + failing(kRegions) + kEnd);
  ExpectWell(ranks, 3);
  for (const int rank : {0, 1})
    for (const int nth : {0, 1}) {
      const std::string said = ranks.at(rank).Said("resume", 2 * nth);
      EXPECT_NE(said.find(std::string("rank 1")), said.npos) << All(ranks);
      EXPECT_NE(said.find("did not register"), said.npos) << All(ranks);
      EXPECT_NE(said.find(ByPlugin() ? "IBext_v8" : "amem_card0"), said.npos) << All(ranks);
      EXPECT_EQ(ranks.at(rank).Said("bytes", 2 + 2 * nth), "0") << All(ranks);
      EXPECT_EQ(ranks.at(rank).Said("card", 2 + 2 * nth), "0") << "what was registered again is given up\n" << All(ranks);
      EXPECT_EQ(ranks.at(rank).Said("resume", 2 * nth + 1), "0") << All(ranks);
    }
}

TEST_P(Renewal, what_the_card_does_not_let_go_of_stays_this_time) {
  const auto ranks = job_.Run(2, kBegin + Commands{"1:faults=deregister=1"} + 2 * kRenewal + kEnd);
  ExpectWell(ranks, 3);
  EXPECT_EQ(ranks[0].Said("bytes", 1), "0") << All(ranks);
  EXPECT_EQ(Number(ranks[1], "bytes", 1), kBuffer) << "the whole buffer, as another region of it may be\n" << All(ranks);
  EXPECT_EQ(ranks[0].Said("bytes", 2), "0");
  EXPECT_EQ(ranks[1].Said("bytes", 2), "0") << All(ranks);
}

TEST_P(RenewalOfOne, a_card_that_is_not_quiet_in_time_keeps_its_memory) {
  job_.environment["AMEM_TIMEOUT_MS"] = "4000";
  const auto ranks =
      job_.Run(2, kBegin +
                      Commands{"0:faults=ack=60000000", "send=100", "receive=100", "barrier", "pause idle", "barrier", "bytes",
                               "card=regions", "0:faults=ack=0", "barrier", "resume", "reduce"} +
                      kRenewal + kEnd);
  ExpectWell(ranks, 3);
  EXPECT_GT(Number(ranks[0], "bytes", 1), 0U) << All(ranks);
  EXPECT_EQ(ranks[1].Said("bytes", 1), "0") << All(ranks);
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("pause idle", 0), "0") << All(ranks);
    EXPECT_EQ(rank.Said("bytes", 2), "0") << All(ranks);
  }
}

// ---- a rank that dies

// In each phase, by the card's calls and the driver's; its host's other rank and the other host go on, with all memory back.
class Death : public NetworkJob, public ::testing::WithParamInterface<const char*> {};

TEST_P(Death, leaves_the_others_with_their_memory_and_their_card) {
  const std::string dies = GetParam();
  const bool in_resume = dies.starts_with("resume ");
  const std::string how = dies.substr(dies.find(' ') + 1);
  job_.environment["AMEM_NETWORK"] = "renew";
  job_.environment["AMEM_TIMEOUT_MS"] = "5000";
  job_.environment["STAND_IN_RANKS_PER_HOST"] = "2";
  job_.environment["AMEM_LAYOUT"] = "direct";  // so that what is registered is the last that is unmapped
  const std::string planned = "1:" + how;
  Commands commands = kBegin + Commands{"barrier"};
  commands = in_resume ? commands + Commands{"pause idle", "barrier", planned, "resume"}
                       : commands + Commands{planned, "pause idle", "resume"};
  const auto ranks = job_.Run(4, commands + Commands{"resume", "abort", "card=findings"});
  EXPECT_EQ(ranks[1].status, 256 + 9) << All(ranks);
  for (const int rank : {0, 2, 3}) {
    EXPECT_EQ(ranks.at(rank).status, 0) << All(ranks);
    EXPECT_EQ(ranks.at(rank).Said("resume", 1), "0") << "it runs\n" << All(ranks);
    EXPECT_EQ(ranks.at(rank).Said("abort"), "0") << All(ranks);
  }
  ExpectNothingFound();
}

INSTANTIATE_TEST_SUITE_P(At, Death,
                         ::testing::Values("pause faults=kill-deregister=1", "pause faults=kill-deregister=2",
                                           "pause at=Unmap,13,KILL", "pause at=Release,13,KILL", "resume at=Create,1,KILL",
                                           "resume at=SetAccess,1,KILL", "resume faults=kill-register=1",
                                           "resume faults=kill-register=2"));

// By the 13th unmap without slabs, as in Death, and by the 8th of few buffers, as in the table of failures, the card has let
// go.
TEST_P(RenewalOfOne, the_driver_does_not_take_back_what_the_card_has_let_go_of) {
  job_.environment["AMEM_LAYOUT"] = "direct";
  job_.environment["STAND_IN_RANKS_PER_HOST"] = "2";
  for (const bool few : {false, true}) {
    if (few) job_.environment["STAND_IN_BUFFERS"] = "3";
    const auto ranks = job_.Run(4, kBegin +
                                       Commands{"barrier", few ? "1:at=Unmap,8,fail=1" : "1:at=Unmap,13,fail=1", "pause idle",
                                                "card=deregistrations", "card=regions", "barrier", "resume", "reduce"} +
                                       kRenewal + kEnd);
    ExpectWell(ranks, 3);
    EXPECT_NE(ranks[1].Said("pause idle"), "0") << All(ranks);
    EXPECT_GT(Number(ranks[1], "card", 1), 0U) << All(ranks);
    EXPECT_EQ(Number(ranks[1], "card", 2), Number(ranks[1], "card", 1)) << "all are registered again\n" << All(ranks);
  }
}

// What a request that failed has done is not known, until its communicator is gone.
TEST_P(RenewalOfOne, a_card_whose_link_is_down_keeps_its_memory_and_a_new_communicator_is_renewed_again) {
  const auto ranks =
      job_.Run(2, kBegin + Commands{"0:faults=down", "0:receive=100"} + kRenewalBegins +
                      Commands{"0:faults=down=0", "barrier", "resume", "abort", "barrier", "init", "reduce"} + kRenewal + kEnd);
  ExpectWell(ranks, 3);
  EXPECT_EQ(ranks[0].Said("receive"), "failed 6") << All(ranks);
  EXPECT_GT(Number(ranks[0], "bytes", 1), 0U) << All(ranks);
  EXPECT_EQ(ranks[1].Said("bytes", 1), "0") << All(ranks);
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("resume", 0), "0") << All(ranks);
    EXPECT_EQ(rank.Said("bytes", 2), "0") << All(ranks);
  }
}

INSTANTIATE_TEST_SUITE_P(Over, Renewal, ::testing::Values("ib", AMEM_RDMA_PLUGIN), Named);
#ifdef AMEM_BY_NIGHT
INSTANTIATE_TEST_SUITE_P(Over, RenewalOfOne, ::testing::Values("ib", AMEM_RDMA_PLUGIN), Named);
#else
INSTANTIATE_TEST_SUITE_P(Over, RenewalOfOne, ::testing::Values("ib"), Named);
#endif

}  // namespace
}  // namespace amem
