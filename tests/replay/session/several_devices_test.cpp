// Threads of one process that each use a GPU of their own: all of them reach all cuMemAlloc memory, however the threads meet.
#include <gtest/gtest.h>

#include <atomic>
#include <string_view>
#include <thread>

#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::kDevice, test::kMiB;

constexpr DeviceOrdinal kSecondDevice{1};

class SeveralDevices : public ::testing::TestWithParam<Layout> {
 protected:
  static SessionOptions Options() {
    SessionOptions options;
    options.layout = GetParam();
    options.slab_bytes = 64 * kMiB;
    return options;
  }
};

TEST_P(SeveralDevices, one_that_is_first_seen_while_a_chunk_is_made_reaches_it) {
  for (const std::string_view meets : {"Create", "Map", "SetAccess"}) {
    SCOPED_TRACE(meets);
    LocalNetwork network;
    const test::Process p(1, *SimulatorWorld::InMemory(2, 512 * kMiB), network, Options());
    std::atomic<bool> met = false;
    Address other;
    p.simulator->SetHook([&](std::string_view call, std::uint64_t) {
      if (call != meets || met.exchange(true)) return 0;
      std::thread([&] { other = *p.session->legacy().Allocate(8, kSecondDevice, {}); }).join();
      return 0;
    });
    const Address here = *p.session->legacy().Allocate(8, kDevice, {});
    p.simulator->SetHook({});
    ASSERT_TRUE(met);
    for (const Address address : {here, other}) {
      const auto mapping = p.simulator->MappingAt(address);
      ASSERT_TRUE(mapping.ok());
      EXPECT_EQ(mapping->access.size(), 2U);
    }
    ASSERT_TRUE(p.session->Pause().ok());
    ASSERT_TRUE(p.session->Resume().ok());
    EXPECT_EQ(p.simulator->MappingAt(here)->access.size(), 2U) << "also what a resume maps again";
    p.JournalFolds();
    EXPECT_TRUE(p.session->Close("test").ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, SeveralDevices, ::testing::Values(Layout::kSlab, Layout::kDirect),
                         [](const auto& layout) { return layout.param == Layout::kSlab ? "slab" : "direct"; });

}  // namespace
}  // namespace amem
