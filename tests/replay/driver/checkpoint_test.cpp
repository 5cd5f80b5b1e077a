// The simulated driver's checkpoint of a process: states, refusals, room and pairs, as the CUDA driver has them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "replay/driver/driver.h"
#include "replay/driver/simulator/world.h"
#include "tests/replay/sizes.h"
#include "tests/stand_ins/checkpoint/world_checkpoint.h"

namespace amem {
namespace {

using enum checkpoint::ProcessState;
using Pair = checkpoint::DevicePair;
using test::kMiB;
constexpr Bytes kDevice = 100 * kMiB;

class SimulatedCheckpoint : public testing::Test {
 protected:
  std::shared_ptr<SimulatorWorld> world = *SimulatorWorld::InMemory(3, kDevice);
  std::uint32_t rank = *world->Attach();
  const pid_t pid = getpid();
};

TEST_F(SimulatedCheckpoint, goes_through_its_states_and_no_others) {
  EXPECT_EQ(checkpoint::StateOf(*world, pid), kRunning);
  EXPECT_EQ(checkpoint::CheckpointProcess(*world, pid), cuda::kIllegalState);
  EXPECT_EQ(checkpoint::RestoreProcess(*world, pid, {}), cuda::kIllegalState);
  EXPECT_EQ(checkpoint::UnlockProcess(*world, pid), cuda::kIllegalState);
  EXPECT_EQ(checkpoint::LockProcess(*world, pid, 100), 0);
  EXPECT_EQ(checkpoint::LockProcess(*world, pid, 100), cuda::kIllegalState);
  EXPECT_EQ(checkpoint::CheckpointProcess(*world, pid), 0);
  EXPECT_EQ(checkpoint::UnlockProcess(*world, pid), cuda::kIllegalState);
  EXPECT_EQ(checkpoint::RestoreProcess(*world, pid, {}), 0);
  EXPECT_EQ(checkpoint::StateOf(*world, pid), kLocked);
  EXPECT_EQ(checkpoint::UnlockProcess(*world, pid), 0);
  EXPECT_EQ(checkpoint::StateOf(*world, pid), kRunning);
  EXPECT_EQ(checkpoint::LockProcess(*world, 1, 100), cuda::kInvalidValue) << "it uses no CUDA";
}

TEST_F(SimulatedCheckpoint, memory_leaves_the_device_and_comes_back_if_there_is_room) {
  ASSERT_TRUE(world->Add(rank, 1, 60 * kMiB));
  ASSERT_EQ(checkpoint::LockProcess(*world, pid, 100), 0);
  ASSERT_EQ(checkpoint::CheckpointProcess(*world, pid), 0);
  EXPECT_EQ(world->InUse(1), 0U);
  const auto other = *world->Attach();
  const auto taken = world->Add(other, 1, 50 * kMiB);
  ASSERT_TRUE(taken);
  EXPECT_EQ(checkpoint::RestoreProcess(*world, pid, {}), cuda::kOutOfMemory);
  EXPECT_EQ(checkpoint::StateOf(*world, pid), kCheckpointed);
  world->DropReference(other, *taken);
  EXPECT_EQ(checkpoint::RestoreProcess(*world, pid, {}), 0);
  EXPECT_EQ(world->InUse(1), 60 * kMiB);
}

TEST_F(SimulatedCheckpoint, of_shared_memory_is_taken_and_never_restored) {
  const auto key = world->Add(rank, 0, 10 * kMiB);
  world->MarkExported(*key);
  const auto other = *world->Attach();
  ASSERT_TRUE(world->AddReference(other, *key, 0, 10 * kMiB));
  ASSERT_EQ(checkpoint::LockProcess(*world, pid, 100), 0);
  EXPECT_EQ(checkpoint::CheckpointProcess(*world, pid), 0);
  EXPECT_EQ(checkpoint::RestoreProcess(*world, pid, {}), cuda::kNotSupported);
  EXPECT_EQ(checkpoint::StateOf(*world, pid), kFailed);
  EXPECT_FALSE(checkpoint::EnterCall(*world, rank)) << "its calls fail from then on";
}

TEST_F(SimulatedCheckpoint, pairs_name_every_device_and_move_the_process) {
  ASSERT_TRUE(world->Add(rank, 0, 10 * kMiB));
  ASSERT_TRUE(world->Add(rank, 1, 20 * kMiB));
  ASSERT_EQ(checkpoint::LockProcess(*world, pid, 100), 0);
  ASSERT_EQ(checkpoint::CheckpointProcess(*world, pid), 0);
  const Pair one[] = {{0, 2}};
  EXPECT_EQ(checkpoint::RestoreProcess(*world, pid, one), cuda::kInvalidValue);
  const Pair swapped[] = {{0, 1}, {1, 0}};
  EXPECT_EQ(checkpoint::RestoreProcess(*world, pid, swapped), 0);
  EXPECT_EQ(world->InUse(0), 20 * kMiB);
  EXPECT_EQ(world->InUse(1), 10 * kMiB);
  EXPECT_EQ(world->DeviceNow(rank, 0), 1);
  EXPECT_EQ(world->DeviceNow(rank, 2), 2);
}

TEST_F(SimulatedCheckpoint, waits_for_calls_and_work_and_holds_up_new_ones) {
  ASSERT_TRUE(checkpoint::EnterCall(*world, rank));
  EXPECT_EQ(checkpoint::LockProcess(*world, pid, 20), cuda::kNotReady);
  EXPECT_EQ(checkpoint::StateOf(*world, pid), kRunning);
  checkpoint::LeaveCall(*world, rank);
  checkpoint::SetBusy(*world, rank, true);
  EXPECT_EQ(checkpoint::LockProcess(*world, pid, 20), cuda::kNotReady);
  checkpoint::SetBusy(*world, rank, false);
  ASSERT_EQ(checkpoint::LockProcess(*world, pid, 20), 0);
  std::atomic<bool> entered = false;
  std::thread caller([&] {
    checkpoint::EnterCall(*world, rank);
    entered = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(entered);
  EXPECT_EQ(checkpoint::UnlockProcess(*world, pid), 0);
  caller.join();
  EXPECT_TRUE(entered);
}

}  // namespace
}  // namespace amem
