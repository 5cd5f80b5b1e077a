// CudaDriver on the stand-in for libcuda: waits for the device end in time, and say what they waited for.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <regex>
#include <string>

#include "journal/base/process_sight.h"
#include "replay/driver/cuda/cuda_driver.h"
#include "tests/stand_ins/cuda/control.h"

namespace amem {
namespace {

using std::chrono::milliseconds;

class IdleWaitTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(library_, nullptr) << dlerror();
    driver_ = *CudaDriver::Load([this](const char* name) { return dlsym(library_, name); });
    ASSERT_TRUE(driver_->Synchronize(kGpu, In(milliseconds(200))).ok());
    ASSERT_EQ(Find<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&primary_, 0), CUDA_SUCCESS);
  }
  void TearDown() override {
    SetBusy(primary_, 0);
    EXPECT_TRUE(driver_->Synchronize(kGpu, In(milliseconds(200))).ok()) << "works as before";
  }
  template <class F>
  F Find(const char* name) {
    return reinterpret_cast<F>(dlsym(library_, name));
  }
  void SetBusy(CUcontext context, int busy) {
    Find<decltype(&stand_in_cuda_set_busy)>("stand_in_cuda_set_busy")(context, busy);
  }
  // The failure of a call, which came in time.
  template <class Call>
  static Status InTime(const Call& call) {
    const auto began = std::chrono::steady_clock::now();
    const Status status = call();
    const auto took = std::chrono::steady_clock::now() - began;
    EXPECT_GE(took, milliseconds(200));
    EXPECT_LT(took, milliseconds(5000));
    EXPECT_FALSE(status.ok());
    // The message has what the wait took, which is some milliseconds more on a busy machine.
    return {status.code(), std::regex_replace(status.message(), std::regex("within [0-9]+ ms"), "within 2xx ms"),
            status.driver_result()};
  }

  static constexpr DeviceOrdinal kGpu{0};
  void* library_ = dlopen(AMEM_STAND_IN_CUDA, RTLD_NOW | RTLD_LOCAL);
  CUcontext primary_ = nullptr;
  std::unique_ptr<CudaDriver> driver_;
};

TEST_F(IdleWaitTest, a_device_that_does_not_become_idle_fails_in_time_each_time_and_is_named) {
  SetBusy(primary_, 1);
  for (int i = 0; i < 3; ++i) {
    const Status late = InTime([&] { return driver_->Synchronize(kGpu, In(milliseconds(200))); });
    EXPECT_EQ(late.code(), Code::kRefused);
    EXPECT_EQ(
        late.message(),
        "device 0: a kernel or copy that was submitted before the pause has not ended within 2xx ms (its default stream is "
        "busy); let the device become idle before the pause, or raise AMEM_TIMEOUT_MS");
  }
  EXPECT_EQ(std::ranges::count(SeeOwnThreads(1000), "amem-idle", &ThreadSight::name), 1) << "however often it is tried";
}

TEST_F(IdleWaitTest, a_moment_of_a_stream_is_waited_for_and_not_what_the_stream_is_given_later) {
  const auto before = driver_->MomentOf(kGpu, nullptr);
  ASSERT_TRUE(before.ok()) << before.status().message();
  SetBusy(primary_, 1);
  const auto during = driver_->MomentOf(kGpu, nullptr);
  ASSERT_TRUE(during.ok()) << during.status().message();
  EXPECT_TRUE(driver_->AwaitMoment(kGpu, **before, In(milliseconds(200))).ok());
  EXPECT_EQ(InTime([&] { return driver_->AwaitMoment(kGpu, **during, In(milliseconds(200))); }).code(), Code::kRefused);
  SetBusy(primary_, 0);
  EXPECT_TRUE(driver_->AwaitMoment(kGpu, **during, In(milliseconds(200))).ok());
}

// It would be invalidated by the question whether the event that was recorded into it is done.
TEST_F(IdleWaitTest, a_capture_that_begins_just_before_the_event_is_recorded_goes_on) {
  static decltype(&cuGetProcAddress) look_up = nullptr;
  static decltype(&cuEventRecord) record = nullptr;
  static decltype(&cuStreamBeginCapture) begin = nullptr;
  look_up = Find<decltype(look_up)>("cuGetProcAddress_v2");
  record = Find<decltype(record)>("cuEventRecord");
  begin = Find<decltype(begin)>("cuStreamBeginCapture_v2");
  decltype(look_up)
      const hurried = [](const char* name, void** found, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* why) {
        const CUresult result = look_up(name, found, version, flags, why);
        CUresult (*const hurries)(CUevent, CUstream) = [](CUevent event, CUstream of) {
          EXPECT_EQ(begin(of, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
          return record(event, of);
        };
        if (std::string_view(name) == "cuEventRecord") *found = reinterpret_cast<void*>(hurries);
        return result;
      };
  const auto driver = *CudaDriver::Load([&](const char*) { return reinterpret_cast<void*>(hurried); });
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  ASSERT_EQ(Find<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")(primary_), CUDA_SUCCESS);
  ASSERT_EQ(Find<decltype(&cuStreamCreate)>("cuStreamCreate")(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto moment = driver->MomentOf(kGpu, stream);
  EXPECT_EQ(moment.status().code(), Code::kRefused);
  EXPECT_NE(moment.status().message().find("a stream capture is running there"), std::string::npos)
      << moment.status().message();
  EXPECT_EQ(Find<decltype(&cuStreamEndCapture)>("cuStreamEndCapture")(stream, &graph), CUDA_SUCCESS);
}

TEST_F(IdleWaitTest, a_default_stream_is_that_of_the_device_that_is_named_and_not_of_the_threads) {
  constexpr DeviceOrdinal kOther{1};
  CUcontext other = nullptr;
  ASSERT_EQ(Find<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(Find<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")(primary_), CUDA_SUCCESS);
  SetBusy(other, 1);
  for (void* const stream : {static_cast<void*>(nullptr), static_cast<void*>(CU_STREAM_LEGACY)}) {
    const auto moment = driver_->MomentOf(kOther, stream);
    ASSERT_TRUE(moment.ok()) << moment.status().message();
    EXPECT_FALSE(driver_->AwaitMoment(kOther, **moment, In(milliseconds(50))).ok()) << "the other device is busy";
  }
  SetBusy(other, 0);
}

TEST_F(IdleWaitTest, a_context_of_the_programs_own_is_waited_for_once_work_was_seen_there) {
  CUcontext own = nullptr;
  ASSERT_EQ(Find<CUresult (*)(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&own, 0, 0), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(Find<decltype(&cuStreamCreate)>("cuStreamCreate")(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  SetBusy(own, 1);
  EXPECT_TRUE(driver_->Synchronize(kGpu, In(milliseconds(200))).ok()) << "nothing of NCCL's was seen there";
  driver_->NoteStream("cuLaunchKernelEx", stream);
  driver_->NoteStream("cuLaunchKernel", stream);
  const Status late = InTime([&] { return driver_->Synchronize(kGpu, In(milliseconds(200))); });
  char expected[64];
  std::snprintf(expected, sizeof expected, "NCCL's last call there was cuLaunchKernel on stream %p",
                static_cast<void*>(stream));
  EXPECT_NE(late.message().find(expected), std::string::npos) << late.message();
  SetBusy(own, 0);
  EXPECT_TRUE(driver_->Synchronize(kGpu, In(milliseconds(200))).ok());
  ASSERT_EQ(Find<CUresult (*)(CUcontext)>("cuCtxDestroy_v2")(own), CUDA_SUCCESS);
  EXPECT_TRUE(driver_->Synchronize(kGpu, In(milliseconds(200))).ok())
      << "the work of a context that was destroyed is gone with it";
}

TEST_F(IdleWaitTest, copies_that_do_not_end_fail_in_time) {
  ASSERT_TRUE(driver_->FinishCopies(kGpu, In(milliseconds(200))).ok());
  SetBusy(primary_, 2);
  const Status late = InTime([&] { return driver_->FinishCopies(kGpu, In(milliseconds(200))); });
  EXPECT_EQ(late.driver_result(), cuda::kTimeout);
  EXPECT_EQ(late.message().find("device 0: copies of contents have not ended within 2xx ms"), 0U) << late.message();
  SetBusy(primary_, 0);
  EXPECT_TRUE(driver_->FinishCopies(kGpu, In(milliseconds(200))).ok());
}

}  // namespace
}  // namespace amem
