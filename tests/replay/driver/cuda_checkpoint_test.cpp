// The CUDA driver's checkpoint of a process, on the stand-in for libcuda: this process is the one that is frozen.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "replay/driver/checkpointer.h"
#include "replay/driver/driver.h"
#include "tests/stand_ins/cuda/control.h"

namespace amem {
namespace {

using std::chrono::milliseconds;

class CudaCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    setenv("AMEM_SIM_DEVICES", "2", 1);
    library = dlopen(AMEM_STAND_IN_CUDA, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << dlerror();
    ASSERT_EQ(Open().code(), Code::kOk);
    ASSERT_TRUE(driver->StateOf(pid).ok()) << "the driver has started";
  }
  void TearDown() override { unsetenv("STAND_IN_VERSION"); }
  Status Open() {
    auto opened = OpenCudaCheckpointer();
    if (!opened.ok()) return opened.status();
    driver = *std::move(opened);
    return {};
  }
  void Fail(const char* call, int result) const {
    const auto at = reinterpret_cast<decltype(&stand_in_cuda_at)>(dlsym(library, "stand_in_cuda_at"));
    ASSERT_EQ(at(call, 1, ("fail=" + std::to_string(result)).c_str()), 0);
  }
  void Freeze() const {
    ASSERT_TRUE(driver->Lock(pid, milliseconds(1000)).ok());
    ASSERT_TRUE(driver->Checkpoint(pid).ok());
  }
  [[nodiscard]] static bool Has(const Status& status, const std::string& text) {
    return status.message().find(text) != std::string::npos;
  }

  const pid_t pid = getpid();
  void* library = nullptr;
  std::unique_ptr<Checkpointer> driver;
};

TEST_F(CudaCheckpoint, a_process_goes_through_the_drivers_states) {
  EXPECT_EQ(*driver->StateOf(pid), CheckpointState::kRunning);
  ASSERT_TRUE(driver->Lock(pid, milliseconds(1000)).ok());
  EXPECT_EQ(*driver->StateOf(pid), CheckpointState::kLocked);
  ASSERT_TRUE(driver->Checkpoint(pid).ok());
  EXPECT_EQ(*driver->StateOf(pid), CheckpointState::kCheckpointed);
  ASSERT_TRUE(driver->Restore(pid, {}).ok());
  EXPECT_EQ(*driver->StateOf(pid), CheckpointState::kLocked);
  ASSERT_TRUE(driver->Unlock(pid).ok());
  EXPECT_EQ(*driver->StateOf(pid), CheckpointState::kRunning);
}

TEST_F(CudaCheckpoint, what_the_driver_refuses_has_the_call_the_pid_and_what_to_do) {
  const Status out_of_order = driver->Checkpoint(pid);
  EXPECT_EQ(out_of_order.driver_result(), cuda::kIllegalState);
  EXPECT_TRUE(Has(out_of_order, "cuCheckpointProcessCheckpoint pid " + std::to_string(pid))) << out_of_order.message();
  EXPECT_TRUE(Has(out_of_order, "another program (cuda-checkpoint?)")) << out_of_order.message();
  EXPECT_TRUE(Has(driver->Restore(pid, {}), "cuCheckpointProcessRestore pid "));
  EXPECT_TRUE(Has(driver->Unlock(pid), "cuCheckpointProcessUnlock pid "));
  EXPECT_TRUE(Has(driver->StateOf(1).status(), "either the process uses no CUDA"));
  const std::pair<int, const char*> remedies[] = {{cuda::kNotPermitted, "CAP_SYS_PTRACE"},
                                                  {cuda::kNotSupported, "cannot take this process"},
                                                  {cuda::kOutOfMemory, "memory is short"}};
  for (const auto& [result, remedy] : remedies) {
    Fail("CheckpointTake", result);
    const Status failed = driver->Checkpoint(pid);
    EXPECT_EQ(failed.driver_result(), result);
    EXPECT_TRUE(Has(failed, remedy)) << failed.message();
  }
  Fail("CheckpointTake", 998);
  EXPECT_TRUE(driver->Checkpoint(pid).message().ends_with("CUresult 998")) << driver->Checkpoint(pid).message();
}

TEST_F(CudaCheckpoint, a_lock_that_takes_too_long_is_a_timeout_and_none_is_for_ever) {
  Fail("CheckpointLock", cuda::kNotReady);
  const Status late = driver->Lock(pid, milliseconds(0));
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_TRUE(Has(late, "did not end within 1 ms")) << late.message();
  Fail("CheckpointLock", cuda::kNotReady);
  EXPECT_TRUE(Has(driver->Lock(pid, milliseconds(70)), "did not end within 70 ms"));
  Fail("CheckpointLock", cuda::kNotReady);
  EXPECT_TRUE(Has(driver->Lock(pid, std::chrono::hours(24 * 365)), "did not end within 86400000 ms"));
}

TEST_F(CudaCheckpoint, pairs_name_every_gpu_by_its_uuid) {
  const auto gpus = driver->Gpus();
  ASSERT_TRUE(gpus.ok()) << gpus.status().message();
  ASSERT_EQ(gpus->size(), 2U);
  EXPECT_EQ((*gpus)[0].size(), std::string("GPU-01234567-0123-0123-0123-0123456789ab").size());
  for (const std::size_t at : {12U, 17U, 22U, 27U}) EXPECT_EQ((*gpus)[0][at], '-') << (*gpus)[0];
  const std::string first = (*gpus)[0], second = (*gpus)[1];
  const auto result_of = [&](const GpuPair& one, const GpuPair& other) {
    const GpuPair pairs[] = {one, other};
    return driver->Restore(pid, pairs);
  };
  // The driver knows these, and refuses because nothing was taken. A process that is locked cannot be asked about its own GPUs.
  EXPECT_EQ(result_of({first, second}, {second, first}).driver_result(), cuda::kIllegalState);
  EXPECT_EQ(result_of({first, second}, {"GPU-" + std::string(32, '9'), first}).driver_result(), cuda::kInvalidValue);
  for (const std::string& wrong :
       {first.substr(1), first + "0", first.substr(0, 39), "GPU-" + std::string(32, 'g'), std::string()}) {
    EXPECT_EQ(result_of({wrong, second}, {second, first}).code(), Code::kInvalid) << wrong;
    EXPECT_EQ(result_of({first, second}, {second, wrong}).code(), Code::kInvalid) << wrong;
  }
}

TEST_F(CudaCheckpoint, before_cuda_13_there_are_no_pairs) {
  for (const auto& [version, text, takes] : {std::tuple{"12999", "CUDA 12.99", false}, {"13000", "CUDA 13.0", true}}) {
    setenv("STAND_IN_VERSION", version, 1);
    ASSERT_TRUE(Open().ok());
    EXPECT_EQ(driver->Version(), text);
    EXPECT_EQ(driver->TakesPairs(), takes);
  }
  setenv("STAND_IN_VERSION", "12080", 1);
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(driver->Version(), "CUDA 12.8");
  Freeze();
  const GpuPair pairs[] = {{"GPU-a", "GPU-b"}};
  const Status refused = driver->Restore(pid, pairs);
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_TRUE(Has(refused, "needs a driver of CUDA 13 (580) or newer; this is CUDA 12.8")) << refused.message();
  ASSERT_TRUE(driver->Restore(pid, {}).ok());
  ASSERT_TRUE(driver->Unlock(pid).ok());
}

}  // namespace
}  // namespace amem
