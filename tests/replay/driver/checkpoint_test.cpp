// The simulated driver's checkpoint of a process: states, refusals, room and pairs, as the CUDA driver has them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "replay/driver/driver.h"
#include "replay/driver/simulator/world.h"
#include "tests/replay/sizes.h"

namespace amem {
namespace {

using enum SimulatorWorld::ProcessState;
using Pair = SimulatorWorld::DevicePair;
using test::kMiB;
constexpr Bytes kDevice = 100 * kMiB;

class SimulatedCheckpoint : public testing::Test {
 protected:
  std::shared_ptr<SimulatorWorld> world = *SimulatorWorld::InMemory(3, kDevice);
  std::uint32_t rank = *world->Attach();
  const pid_t pid = getpid();
};

TEST_F(SimulatedCheckpoint, goes_through_its_states_and_no_others) {
  EXPECT_EQ(world->StateOf(pid), kRunning);
  EXPECT_EQ(world->CheckpointProcess(pid), cuda::kIllegalState);
  EXPECT_EQ(world->RestoreProcess(pid, {}), cuda::kIllegalState);
  EXPECT_EQ(world->UnlockProcess(pid), cuda::kIllegalState);
  EXPECT_EQ(world->LockProcess(pid, 100), 0);
  EXPECT_EQ(world->LockProcess(pid, 100), cuda::kIllegalState);
  EXPECT_EQ(world->CheckpointProcess(pid), 0);
  EXPECT_EQ(world->UnlockProcess(pid), cuda::kIllegalState);
  EXPECT_EQ(world->RestoreProcess(pid, {}), 0);
  EXPECT_EQ(world->StateOf(pid), kLocked);
  EXPECT_EQ(world->UnlockProcess(pid), 0);
  EXPECT_EQ(world->StateOf(pid), kRunning);
  EXPECT_EQ(world->LockProcess(1, 100), cuda::kInvalidValue) << "it uses no CUDA";
}

TEST_F(SimulatedCheckpoint, memory_leaves_the_device_and_comes_back_if_there_is_room) {
  ASSERT_TRUE(world->Add(rank, 1, 60 * kMiB));
  ASSERT_EQ(world->LockProcess(pid, 100), 0);
  ASSERT_EQ(world->CheckpointProcess(pid), 0);
  EXPECT_EQ(world->InUse(1), 0U);
  const auto other = *world->Attach();
  const auto taken = world->Add(other, 1, 50 * kMiB);
  ASSERT_TRUE(taken);
  EXPECT_EQ(world->RestoreProcess(pid, {}), cuda::kOutOfMemory);
  EXPECT_EQ(world->StateOf(pid), kCheckpointed);
  world->DropReference(other, *taken);
  EXPECT_EQ(world->RestoreProcess(pid, {}), 0);
  EXPECT_EQ(world->InUse(1), 60 * kMiB);
}

TEST_F(SimulatedCheckpoint, of_shared_memory_is_taken_and_never_restored) {
  const auto key = world->Add(rank, 0, 10 * kMiB);
  world->MarkExported(*key);
  const auto other = *world->Attach();
  ASSERT_TRUE(world->AddReference(other, *key, 0, 10 * kMiB));
  ASSERT_EQ(world->LockProcess(pid, 100), 0);
  EXPECT_EQ(world->CheckpointProcess(pid), 0);
  EXPECT_EQ(world->RestoreProcess(pid, {}), cuda::kNotSupported);
  EXPECT_EQ(world->StateOf(pid), kFailed);
  EXPECT_FALSE(world->EnterCall(rank)) << "its calls fail from then on";
}

TEST_F(SimulatedCheckpoint, pairs_name_every_device_and_move_the_process) {
  ASSERT_TRUE(world->Add(rank, 0, 10 * kMiB));
  ASSERT_TRUE(world->Add(rank, 1, 20 * kMiB));
  ASSERT_EQ(world->LockProcess(pid, 100), 0);
  ASSERT_EQ(world->CheckpointProcess(pid), 0);
  const Pair one[] = {{0, 2}};
  EXPECT_EQ(world->RestoreProcess(pid, one), cuda::kInvalidValue);
  const Pair swapped[] = {{0, 1}, {1, 0}};
  EXPECT_EQ(world->RestoreProcess(pid, swapped), 0);
  EXPECT_EQ(world->InUse(0), 20 * kMiB);
  EXPECT_EQ(world->InUse(1), 10 * kMiB);
  EXPECT_EQ(world->DeviceNow(rank, 0), 1);
  EXPECT_EQ(world->DeviceNow(rank, 2), 2);
}

TEST_F(SimulatedCheckpoint, waits_for_calls_and_work_and_holds_up_new_ones) {
  ASSERT_TRUE(world->EnterCall(rank));
  EXPECT_EQ(world->LockProcess(pid, 20), cuda::kNotReady);
  EXPECT_EQ(world->StateOf(pid), kRunning);
  world->LeaveCall(rank);
  world->SetBusy(rank, true);
  EXPECT_EQ(world->LockProcess(pid, 20), cuda::kNotReady);
  world->SetBusy(rank, false);
  ASSERT_EQ(world->LockProcess(pid, 20), 0);
  std::atomic<bool> entered = false;
  std::thread caller([&] {
    world->EnterCall(rank);
    entered = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(entered);
  EXPECT_EQ(world->UnlockProcess(pid), 0);
  caller.join();
  EXPECT_TRUE(entered);
}

}  // namespace
}  // namespace amem
