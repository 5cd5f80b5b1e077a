// Whose memory is whose: communicators over their lives, and sums by communicator.
#include <gtest/gtest.h>

#include "folding.h"

namespace amem::testing {
namespace {

constexpr CommunicatorId kFirst{1}, kChild{2};

AllocationCreated For(CommunicatorId communicator, AllocationId id, Bytes bytes) {
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, 0};
  return {id, bytes, properties, 0, {}, {}, {}, MemoryTag::kNccl, communicator};
}

class Communicators : public ::testing::Test {
 protected:
  Communicators() {
    f.Ok(CommunicatorBegun{kFirst, {}, "init", 0, 2});
    f.Ok(CommunicatorReady{kFirst, 0x51, 0, 2, DeviceOrdinal{0}});
    f.Ok(CommunicatorBegun{kChild, kFirst, "split"});
  }
  [[nodiscard]] const Communicator* Find(CommunicatorId id) const {
    const auto it = f.state.communicators.find(id);
    return it == f.state.communicators.end() ? nullptr : &it->second;
  }
  Folding f;
};

TEST_F(Communicators, one_that_ended_is_known_until_its_last_memory_is_gone) {
  f.Ok(For(kFirst, AllocationId{1}, k2M));
  f.Ok(LegacyAllocated{kA, 4096, {}, 0, "why", {}, kFirst});
  f.Ok(CommunicatorEnded{kFirst, "destroyed"});
  ASSERT_NE(Find(kFirst), nullptr);
  EXPECT_EQ(Find(kFirst)->ended, "destroyed");
  EXPECT_EQ(Find(kFirst)->memory, 2U);
  f.Ok(AllocationReleased{AllocationId{1}});
  EXPECT_NE(Find(kFirst), nullptr);
  f.Ok(LegacyFreed{kA});
  EXPECT_EQ(Find(kFirst), nullptr);
  EXPECT_TRUE(CheckInvariants(f.state).ok());
  f.Ok(CommunicatorEnded{kChild, "left out"});
  EXPECT_EQ(Find(kChild), nullptr) << "it had no memory";
}

TEST_F(Communicators, sums_by_communicator_account_for_all_of_NCCLs_memory_and_none_of_the_programs) {
  f.Ok(For(kFirst, AllocationId{1}, k2M));
  f.Ok(For(kChild, AllocationId{2}, 2 * k2M));
  f.Ok(For({}, AllocationId{3}, k2M));
  AllocationCreated user = For({}, AllocationId{4}, k2M);
  user.tag = MemoryTag::kUser;
  f.Ok(user);
  f.Ok(PeerConnected{SessionId{9}, "h", 1, 0, 1});
  f.Ok(Imported{AllocationId{5}, {SessionId{9}, AllocationId{1}}, k2M, {}, 1, {}, {}, {}, MemoryTag::kNccl, kFirst});
  f.Ok(For({}, AllocationId{6}, k2M));  // a block of cuMemAlloc memory, which is counted by what lies in it
  f.Ok(LegacyAllocated{kA, 4096, AllocationId{6}, 0, "", {}, kChild});
  f.Ok(LegacyAllocated{kA + k2M, 512, {}, 0, "the driver's own", {}, kChild});
  auto sums = MeasureCommunicators(f.state);
  EXPECT_EQ(sums.size(), 3U);
  EXPECT_EQ(sums[kFirst], (CommunicatorHoldings{k2M, k2M, 0, k2M, 1, 1}));
  EXPECT_EQ(sums[kChild], (CommunicatorHoldings{2 * k2M + 4096 + 512, 2 * k2M + 4096 + 512, 512, 0, 3, 0}));
  EXPECT_EQ(sums[CommunicatorId{}], (CommunicatorHoldings{k2M, k2M, 0, 0, 1, 0}));
}

TEST_F(Communicators, a_snapshot_has_them_with_their_memory_and_their_ends) {
  f.Ok(For(kFirst, AllocationId{1}, k2M));
  f.Ok(LegacyAllocated{kA, 4096, {}, 0, "why", {}, kFirst});
  f.Ok(CommunicatorEnded{kFirst, "destroyed"});
  f.Ok(CommunicatorReady{kChild, 0, 1, 2, DeviceOrdinal{3}});
  f.Ok(CommunicatorSuspended{kChild, true});
  const auto events = ToSnapshotEvents(f.state);
  ASSERT_TRUE(events.ok()) << events.status().message();
  State again;
  for (const EventBody& body : *events) ASSERT_TRUE(Apply(again, Event{{}, 0, 0, body}).ok()) << ToText(body);
  EXPECT_EQ(again, f.state);
  EXPECT_EQ(Digest(again), Digest(f.state));
}

TEST_F(Communicators, memory_that_was_made_before_its_communicator_was_known_counts_for_it) {
  f.Ok(For(CommunicatorId{3}, AllocationId{1}, k2M));
  f.Ok(CommunicatorBegun{CommunicatorId{3}, {}, "init"});
  EXPECT_EQ(Find(CommunicatorId{3})->memory, 1U);
  EXPECT_TRUE(CheckInvariants(f.state).ok());
}

TEST_F(Communicators, each_difference_shows_in_the_digest) {
  const std::uint64_t before = Digest(f.state);
  State other = f.state;
  other.communicators.at(kFirst).hash = 0x52;
  EXPECT_NE(Digest(other), before);
  other = f.state;
  other.communicators.at(kChild).suspended = true;
  EXPECT_NE(Digest(other), before);
}

}  // namespace
}  // namespace amem::testing
