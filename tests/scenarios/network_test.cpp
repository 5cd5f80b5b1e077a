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
    job_.environment["AMEM_CARD_FINDINGS"] = findings();
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
TEST_F(NetworkJob, twenty_pauses_leave_what_the_card_holds) {
  job_.environment["AMEM_NETWORK"] = "keep";
  const auto ranks = job_.Run(2, kBegin + 20 * (kCycle + kMessages) + kEnd);
  ExpectWell(ranks, 21);
  for (const Rank& rank : ranks)
    for (int cycle = 1; cycle <= 20; ++cycle) {
      EXPECT_EQ(Number(rank, "bytes", cycle), 2 * kBuffer) << cycle << All(ranks);
      EXPECT_EQ(Number(rank, "card", cycle), Number(rank, "card", 0));
    }
}

// With tags, AMem sees what the plugin does with the card's library, too.
TEST_F(NetworkJob, pauses_leave_what_a_plugin_registers) {
  job_.environment["STAND_IN_NET"] = AMEM_RDMA_PLUGIN;
  job_.environment["AMEM_NETWORK"] = "keep";
  const auto ranks =
      job_.Run(2, Commands{"cuda", "load", "tags"} + kBegin + 3 * (kCycle + kMessages) + Commands{"read tags"} + kEnd);
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("read tags"), "as written") << All(ranks);
    for (int cycle = 1; cycle <= 3; ++cycle) EXPECT_EQ(rank.Said("card", cycle), rank.Said("card", 0));
  }
  ExpectWell(ranks, 4);
}

}  // namespace
}  // namespace amem
