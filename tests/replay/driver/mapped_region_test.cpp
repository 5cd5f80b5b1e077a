// The guards of driver memory, with every call of the driver failing in turn.
#include "replay/driver/mapped_region.h"

#include <gtest/gtest.h>

#include "replay/driver/simulator/simulator.h"

namespace amem {
namespace {

constexpr Bytes kBytes = Bytes{4} << 20;

class MappedRegionTest : public ::testing::Test {
 protected:
  MappedRegionTest() {
    properties.location = access.location;
    properties.handle_types = 1;
    handle = *simulator->Create(kBytes, properties, 0);
  }
  void NothingIsMappedOrReserved() const {
    EXPECT_TRUE(simulator->Snapshot().ranges.empty());
    EXPECT_TRUE(simulator->Snapshot().mappings.empty());
    EXPECT_EQ(simulator->Snapshot().handles.size(), 1U) << "the handle belongs to its own guard";
  }
  Result<MappedRegion> MapAnywhere() { return MappedRegion::Map(*simulator, handle, kBytes, 0, std::span(&access, 1)); }

  std::unique_ptr<Simulator> simulator = *Simulator::Open({.devices = 1});
  AllocationProperties properties;
  AccessDescriptor access{{LocationType::kDevice, 0}, 3};
  DriverHandle handle;
};

TEST_F(MappedRegionTest, a_call_that_fails_leaves_nothing_behind) {
  for (const char* call : {"Reserve", "Map", "SetAccess"}) {
    ASSERT_TRUE(simulator->FailNext(call, 1, cuda::kUnknown).ok());
    const auto region = MapAnywhere();
    EXPECT_EQ(region.status().driver_result(), cuda::kUnknown) << call;
    NothingIsMappedOrReserved();
  }
}

TEST_F(MappedRegionTest, a_call_that_fails_in_a_range_of_the_callers_leaves_the_range) {
  const Address range = *simulator->Reserve(kBytes, 0, {}, 0);
  for (const char* call : {"Map", "SetAccess"}) {
    ASSERT_TRUE(simulator->FailNext(call, 1, cuda::kUnknown).ok());
    EXPECT_FALSE(MappedRegion::MapAt(*simulator, range, handle, kBytes, std::span(&access, 1)).ok()) << call;
    EXPECT_TRUE(simulator->Snapshot().mappings.empty()) << call;
    EXPECT_EQ(simulator->Snapshot().ranges, (std::vector<Extent>{{range, kBytes}})) << call;
  }
  { EXPECT_EQ(MappedRegion::MapAt(*simulator, range, handle, kBytes, std::span(&access, 1))->address(), range); }
  EXPECT_TRUE(simulator->Snapshot().mappings.empty()) << "a guard that was not kept";
  EXPECT_EQ(simulator->Snapshot().ranges.size(), 1U);
}

TEST_F(MappedRegionTest, a_guard_that_was_not_kept_gives_everything_back_once) {
  {
    auto region = MapAnywhere();
    ASSERT_TRUE(region.ok());
    EXPECT_EQ(simulator->Snapshot().mappings.size(), 1U);
    const MappedRegion moved = *std::move(region);
    EXPECT_EQ(simulator->Snapshot().mappings.size(), 1U);
  }
  NothingIsMappedOrReserved();
  EXPECT_EQ(simulator->Calls("Unmap"), 1U);
  EXPECT_EQ(simulator->Calls("FreeRange"), 1U);
}

TEST_F(MappedRegionTest, what_was_kept_stays_and_is_reachable) {
  Address address;
  {
    auto region = MapAnywhere();
    ASSERT_TRUE(region.ok());
    address = region->Detach();
  }
  *reinterpret_cast<std::byte*>(address.value) = std::byte{7};  // NOLINT(performance-no-int-to-ptr)
  EXPECT_TRUE(simulator->Unmap(address, kBytes).ok());
  EXPECT_TRUE(simulator->FreeRange(address, kBytes).ok());
}

TEST_F(MappedRegionTest, without_access_none_is_set) {
  const auto region = MappedRegion::Map(*simulator, handle, kBytes, 0, {});
  ASSERT_TRUE(region.ok());
  EXPECT_EQ(simulator->Calls("SetAccess"), 0U);
}

TEST_F(MappedRegionTest, a_range_that_cannot_be_unmapped_is_not_freed_under_its_mapping) {
  {
    const auto region = MapAnywhere();
    ASSERT_TRUE(region.ok());
    ASSERT_TRUE(simulator->FailNext("Unmap", 1, cuda::kUnknown).ok());
  }
  EXPECT_EQ(simulator->Calls("FreeRange"), 0U);
  EXPECT_EQ(simulator->Snapshot().mappings.size(), 1U);
}

TEST_F(MappedRegionTest, a_handle_that_was_not_kept_is_released_once) {
  const DriverHandle kept = *simulator->Create(kBytes, properties, 0), dropped = *simulator->Create(kBytes, properties, 0);
  {
    OwnedHandle first(*simulator, kept);
    EXPECT_EQ(first.get(), kept);
    EXPECT_EQ(first.Detach(), kept);
    OwnedHandle second(*simulator, dropped);
    const OwnedHandle moved = std::move(second);
  }
  EXPECT_EQ(simulator->Calls("Release"), 1U);
  EXPECT_TRUE(simulator->PropertiesOf(kept).ok());
  EXPECT_FALSE(simulator->PropertiesOf(dropped).ok());
}

}  // namespace
}  // namespace amem
