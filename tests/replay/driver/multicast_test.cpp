// The simulator's multicast objects: the rules that the CUDA driver's manual states, each by name.
#include <gtest/gtest.h>

#include "replay/driver/simulator/simulator.h"
#include "tests/replay/driver/simulated.h"

namespace amem {
namespace {

constexpr Bytes kPiece = Bytes{8} << 20;  // the granularity of multicast objects here, four times that of memory
constexpr DeviceOrdinal kFirst{0}, kSecond{1}, kThird{2};

class SimulatedMulticast : public ::testing::Test {
 protected:
  void SetUp() override {
    world = *SimulatorWorld::InMemory(3, Bytes{1} << 30);
    one = Open();
    other = Open();
  }
  [[nodiscard]] std::unique_ptr<Simulator> Open() const {
    SimulatorOptions options;
    options.in_memory = world;
    options.multicast_granularity = kPiece;
    return *Simulator::Open(options);
  }
  static DriverHandle Memory(Simulator& process, DeviceOrdinal device, Bytes bytes, std::uint32_t handle_types = 1) {
    AllocationProperties properties;
    properties.handle_types = handle_types;
    properties.location = {LocationType::kDevice, device.value};
    return *process.Create(bytes, properties, 0);
  }
  static Address Map(Simulator& process, DriverHandle handle, Bytes bytes) {
    const Address address = *process.Reserve(bytes, kPiece, {}, 0);
    EXPECT_TRUE(process.Map(address, bytes, 0, handle, 0).ok());
    return address;
  }
  static int Refused(const Status& status) { return status.driver_result(); }
  // Of two pieces and two devices, which both processes have.
  void Share() {
    object = *one->CreateMulticast({2 * kPiece, 2, 1, 0});
    imported = *other->Import(*one->Export(object));
  }
  void Complete() {
    Share();
    ASSERT_TRUE(one->AddDevice(object, kFirst).ok());
    ASSERT_TRUE(other->AddDevice(imported, kSecond).ok());
  }

  std::shared_ptr<SimulatorWorld> world;
  std::unique_ptr<Simulator> one, other;
  DriverHandle object, imported;
};

TEST_F(SimulatedMulticast, sizes_devices_flags_and_handles_of_an_object_are_checked) {
  EXPECT_EQ(*one->MulticastGranularity(), kPiece);
  EXPECT_EQ(Refused(one->CreateMulticast({kPiece / 2, 2, 1, 0}).status()), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->CreateMulticast({0, 2, 1, 0}).status()), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->CreateMulticast({kPiece, 0, 1, 0}).status()), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->CreateMulticast({kPiece, 4, 1, 0}).status()), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->CreateMulticast({kPiece, 2, 1, 1}).status()), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->CreateMulticast({kPiece, 2, 8, 0}).status()), cuda::kNotPermitted);
}

TEST_F(SimulatedMulticast, a_device_is_added_once_and_no_more_than_the_object_is_for) {
  Share();
  EXPECT_EQ(Refused(one->AddDevice(object, DeviceOrdinal{7})), cuda::kInvalidDevice);
  EXPECT_EQ(Refused(one->AddDevice(Memory(*one, kFirst, kPiece), kFirst)), cuda::kInvalidValue) << "no multicast object";
  ASSERT_TRUE(one->AddDevice(object, kFirst).ok());
  EXPECT_EQ(Refused(one->AddDevice(object, kFirst)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(other->AddDevice(imported, kFirst)), cuda::kInvalidValue) << "nor by another process";
  ASSERT_TRUE(other->AddDevice(imported, kSecond).ok());
  EXPECT_EQ(Refused(one->AddDevice(object, kThird)), cuda::kInvalidValue);
}

TEST_F(SimulatedMulticast, nothing_is_bound_or_mapped_before_all_processes_have_added_their_devices) {
  Share();
  ASSERT_TRUE(one->AddDevice(object, kFirst).ok());
  const DriverHandle memory = Memory(*one, kFirst, kPiece);
  const Address range = *one->Reserve(2 * kPiece, kPiece, {}, 0);
  EXPECT_EQ(Refused(one->BindMemory(object, 0, memory, 0, kPiece)), cuda::kNotReady);
  EXPECT_EQ(Refused(one->Map(range, 2 * kPiece, 0, object, 0)), cuda::kNotReady);
  ASSERT_TRUE(other->AddDevice(imported, kSecond).ok());
  EXPECT_TRUE(one->BindMemory(object, 0, memory, 0, kPiece).ok());
  EXPECT_TRUE(one->Map(range, 2 * kPiece, 0, object, 0).ok());
}

TEST_F(SimulatedMulticast, offsets_sizes_and_addresses_are_multiples_of_its_granularity_and_inside) {
  Complete();
  const DriverHandle memory = Memory(*one, kFirst, 2 * kPiece);
  const Address at = Map(*one, memory, 2 * kPiece);
  const Bytes half = kPiece / 2;
  EXPECT_EQ(Refused(one->BindMemory(object, half, memory, 0, kPiece)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->BindMemory(object, 0, memory, half, kPiece)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->BindMemory(object, 0, memory, 0, half)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->BindMemory(object, 0, memory, 0, 0)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->BindMemory(object, 0, memory, kPiece, 2 * kPiece)), cuda::kInvalidValue) << "past the memory";
  EXPECT_EQ(Refused(one->BindMemory(object, 2 * kPiece, memory, 0, kPiece)), cuda::kInvalidValue) << "past the object";
  EXPECT_EQ(Refused(one->BindAddress(object, 0, at + half, kPiece)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->BindAddress(object, 0, at + 4 * kPiece, kPiece)), cuda::kInvalidValue) << "nothing is mapped there";
  EXPECT_EQ(Refused(one->Map(at, 2 * kPiece, 0, object, 0)), cuda::kInvalidValue) << "something is mapped there";
  EXPECT_TRUE(one->BindMemory(object, kPiece, memory, kPiece, kPiece).ok());
}

TEST_F(SimulatedMulticast, only_shareable_memory_of_an_added_device_is_bound_and_bindings_of_a_device_do_not_overlap) {
  Complete();
  EXPECT_EQ(Refused(one->BindMemory(object, 0, Memory(*one, kThird, kPiece), 0, kPiece)), cuda::kInvalidDevice);
  EXPECT_EQ(Refused(one->BindMemory(object, 0, Memory(*one, kFirst, kPiece, 0), 0, kPiece)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->BindMemory(object, 0, object, 0, kPiece)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->BindMemory(object, 0, DriverHandle{5}, 0, kPiece)), cuda::kInvalidValue);
  ASSERT_TRUE(one->BindMemory(object, 0, Memory(*one, kFirst, 2 * kPiece), 0, 2 * kPiece).ok());
  EXPECT_EQ(Refused(one->BindMemory(object, kPiece, Memory(*one, kFirst, kPiece), 0, kPiece)), cuda::kInvalidValue);
  EXPECT_TRUE(other->BindMemory(imported, kPiece, Memory(*other, kSecond, kPiece), 0, kPiece).ok()) << "another device";
}

TEST_F(SimulatedMulticast, what_is_unbound_is_what_this_process_bound) {
  Complete();
  ASSERT_TRUE(one->BindMemory(object, 0, Memory(*one, kFirst, 2 * kPiece), 0, 2 * kPiece).ok());
  EXPECT_EQ(Refused(one->Unbind(object, kFirst, 0, kPiece)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->Unbind(object, kSecond, 0, 2 * kPiece)), cuda::kInvalidValue);
  EXPECT_EQ(Refused(one->Unbind(object, DeviceOrdinal{9}, 0, 2 * kPiece)), cuda::kInvalidDevice);
  EXPECT_EQ(Refused(other->Unbind(imported, kFirst, 0, 2 * kPiece)), cuda::kInvalidValue);
  EXPECT_TRUE(one->Unbind(object, kFirst, 0, 2 * kPiece).ok());
  EXPECT_EQ(Refused(one->Unbind(object, kFirst, 0, 2 * kPiece)), cuda::kInvalidValue) << "once";
}

TEST_F(SimulatedMulticast, bound_memory_exists_until_it_is_unbound_or_the_object_or_the_process_is_gone) {
  Complete();
  const auto bind_and_release = [](Simulator& process, DriverHandle to, DeviceOrdinal device, Bytes offset) {
    const DriverHandle memory = Memory(process, device, kPiece);
    ASSERT_TRUE(process.BindMemory(to, offset, memory, 0, kPiece).ok());
    ASSERT_TRUE(process.Release(memory).ok());
  };
  bind_and_release(*one, object, kFirst, 0);
  bind_and_release(*one, object, kFirst, kPiece);
  bind_and_release(*other, imported, kSecond, 0);
  EXPECT_EQ(one->BytesInUse(kFirst), 2 * kPiece);
  ASSERT_TRUE(one->Unbind(object, kFirst, 0, kPiece).ok());
  EXPECT_EQ(one->BytesInUse(kFirst), kPiece);
  other.reset();
  EXPECT_EQ(one->BytesInUse(kSecond), 0U);
  ASSERT_TRUE(one->Release(object).ok());
  EXPECT_EQ(one->BytesInUse(kFirst), 0U);
}

TEST_F(SimulatedMulticast, a_store_reaches_what_every_device_has_bound_at_that_offset) {
  Complete();
  const DriverHandle mine = Memory(*one, kFirst, 2 * kPiece), theirs = Memory(*other, kSecond, kPiece);
  const Address at = Map(*one, mine, 2 * kPiece), through = Map(*other, imported, 2 * kPiece);
  EXPECT_TRUE(Reach(*other, through).empty()) << "nothing is bound";
  ASSERT_TRUE(one->BindAddress(object, 0, at + kPiece, kPiece).ok());
  ASSERT_TRUE(other->BindMemory(imported, 0, theirs, 0, kPiece).ok());
  const auto reached = Reach(*other, through + 64);
  ASSERT_EQ(reached.size(), 2U);
  EXPECT_EQ(reached[0], (Reached{0, *MemoryAt(*one, at), kPiece + 64}));
  EXPECT_EQ(reached[1].device, 1);
  EXPECT_TRUE(Reach(*other, through + kPiece).empty());
  ASSERT_TRUE(one->Unbind(object, kFirst, 0, kPiece).ok());
  const auto left = Reach(*other, through);
  ASSERT_EQ(left.size(), 1U) << "what was unbound is reached no more";
  EXPECT_EQ(left[0].device, 1);
}

}  // namespace
}  // namespace amem
