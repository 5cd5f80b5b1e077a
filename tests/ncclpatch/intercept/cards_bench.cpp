// What AMEM_NETWORK=renew costs NCCL's threads when nobody pauses: a send and a poll, before the first renewal and after one,
// over a card that does nothing.
//
// cards_bench [REGIONS=64]
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/ncclpatch/intercept/with_card.h"

namespace amem {
namespace {

namespace verbs = intercept::verbs;

std::size_t g_regions = 64;

[[gnu::noinline]] int NoSend(verbs::Pair*, verbs::Send*, verbs::Send**) { return 0; }
std::uint32_t g_polled = 0;  // the queue pair whose send has ended
[[gnu::noinline]] int OnePoll(verbs::Queue*, int, verbs::Completion* completions) {
  completions[0].status = completions[0].opcode = 0;
  completions[0].number = g_polled;
  return 1;
}

double ThreadNanoseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

// Processor time of a call in nanoseconds: alone, and what another one takes beyond that. Medians of runs by turns.
struct Cost {
  double alone = 0, more = 0;

  template <class Call>
  static Cost Of(const Call& alone, const Call& other) {
    constexpr int kRuns = 101, kCalls = 20'000;
    const auto run = [](const Call& call) {
      const double begun = ThreadNanoseconds();
      for (int i = 0; i < kCalls; ++i) call(static_cast<std::size_t>(i));
      return (ThreadNanoseconds() - begun) / kCalls;
    };
    const auto median = [](std::vector<double> values) {
      std::ranges::nth_element(values, values.begin() + kRuns / 2);
      return values[kRuns / 2];
    };
    std::vector<double> first, differences;
    for (int i = 0; i < kRuns; ++i) {
      first.push_back(run(alone));
      differences.push_back(run(other) - first.back());
    }
    return {median(first), median(differences)};
  }
};

class CardsBench : public test::WithCard {
 protected:
  static void SetUpTestSuite() {
    test::g_posts = &NoSend;
    test::g_polls = &OnePoll;
    test::WithCard::SetUpTestSuite();
  }
  void Measure(const char* when, const std::vector<verbs::Region*>& regions) {
    std::vector<verbs::Part> parts;
    std::vector<verbs::Send> sends;
    for (const verbs::Region* region : regions)
      parts.push_back({reinterpret_cast<std::uint64_t>(region->address) + 4096, 64, region->local_key});
    for (verbs::Part& part : parts) sends.push_back({.parts = &part, .count = 1, .flags = verbs::kSignaled});
    const auto through = [&](verbs::PostSend* posts) {
      return std::function([&, posts](std::size_t i) {
        verbs::Send* bad = nullptr;
        posts(pair_, &sends[i % sends.size()], &bad);
      });
    };
    g_polled = pair_->number;
    std::array<verbs::Completion, 4> completions{};
    verbs::Queue queue{context_};
    const auto poll = [&](verbs::PollQueue* polls) {
      return std::function(
          [&, polls](std::size_t) { polls(&queue, static_cast<int>(completions.size()), completions.data()); });
    };
    const Cost send = Cost::Of(through(&NoSend), through(context_->send));
    const Cost polls = Cost::Of(poll(&OnePoll), poll(context_->poll));  // as many as were sent
    std::printf("%-16s %4zu regions: post_send +%.1f ns, poll_cq +%.1f ns (alone: %.1f, %.1f)\n", when, regions.size(),
                send.more, polls.more, send.alone, polls.alone);
  }
};

// NCCL registers host memory as well, at both ends of a connection.
TEST_F(CardsBench, costs) {
  std::vector<verbs::Region*> regions, of_the_host;
  std::vector<std::array<char, 4096>> host(2 * g_regions);
  for (auto& memory : host)
    of_the_host.push_back(static_cast<verbs::Region*>(reg_mr(&domain_, memory.data(), memory.size(), 7)));
  OnServiceThread([&] {
    pair_ = Connect();
    for (std::size_t i = 0; i < g_regions; ++i) {
      buffer_ = Buffer(kBytes);
      regions.push_back(Register(buffer_, kBytes));
    }
  });
  Measure("before a renewal", regions);
  PauseLeaves();
  Resume();
  Measure("after a renewal", regions);
  for (const auto* const all : {&regions, &of_the_host})
    for (verbs::Region* const region : *all) EXPECT_EQ(dereg_mr(region), 0);
}

}  // namespace
}  // namespace amem

int main(int count, char** arguments) {
  ::testing::InitGoogleTest(&count, arguments);
  if (count > 1) amem::g_regions = std::strtoul(arguments[1], nullptr, 10);
  return RUN_ALL_TESTS();
}
