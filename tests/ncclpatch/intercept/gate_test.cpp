// The gate: no copy, fill or stream memory operation of NCCL's is under way when a pause begins, and none reaches memory that
// is away.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <thread>
#include <vector>

#include "ncclpatch/runtime/log.h"
#include "tests/ncclpatch/intercept/intercepted.h"

// The loader frees a thread's variables past ThreadSanitizer, which then sees the next thread's memory race with them.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();  // NOLINT: its name
extern "C" const char* __tsan_default_suppressions() { return "race:_dl_deallocate_tls\n"; }

namespace amem {
namespace {

class Gate : public test::Intercepted {
 protected:
  decltype(cuMemcpyHtoDAsync)* to_device = Driver<decltype(cuMemcpyHtoDAsync)>("cuMemcpyHtoDAsync");
  decltype(cuMemcpyDtoH)* to_host = Driver<decltype(cuMemcpyDtoH)>("cuMemcpyDtoH");
  decltype(cuMemcpyDtoDAsync)* within = Driver<decltype(cuMemcpyDtoDAsync)>("cuMemcpyDtoDAsync");
  decltype(cuMemsetD32Async)* fill = Driver<decltype(cuMemsetD32Async)>("cuMemsetD32Async");
  decltype(cuStreamWriteValue32)* write_32 = Driver<decltype(cuStreamWriteValue32)>("cuStreamWriteValue32");
  decltype(cuStreamWriteValue64)* write_64 = Driver<decltype(cuStreamWriteValue64)>("cuStreamWriteValue64");
  decltype(cuStreamWaitValue32)* wait_32 = Driver<decltype(cuStreamWaitValue32)>("cuStreamWaitValue32");
  decltype(cuStreamWaitValue64)* wait_64 = Driver<decltype(cuStreamWaitValue64)>("cuStreamWaitValue64");
  decltype(cuStreamBatchMemOp)* batch = Driver<decltype(cuStreamBatchMemOp)>("cuStreamBatchMemOp");

  static constexpr size_t kFilled = 16'384;  // words
  CUresult BatchWrite(CUdeviceptr address, std::uint32_t value) const {
    CUstreamBatchMemOpParams one{};
    one.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    one.writeValue.address = address;
    one.writeValue.value = value;
    return batch(nullptr, 1, &one, 0);
  }
  // Writes `value` to the word at `address`, each time in another way.
  CUresult Write(CUdeviceptr address, std::uint32_t value) const {
    switch (value % 5) {
      case 0:
        return to_device(address, &value, sizeof value, nullptr);
      case 1:
        return fill(address - (kFilled - 1) * sizeof value, value, kFilled, nullptr);  // the word at `address` comes last
      case 2:
        return write_32(nullptr, address, value, 0);
      case 3:
        return BatchWrite(address, value);
      default: {
        const CUdeviceptr aside = address + 64;
        const CUresult result = write_64(nullptr, aside, value, 0);
        return result == CUDA_SUCCESS ? within(address, aside, sizeof value, nullptr) : result;
      }
    }
  }
  // Each driver function is held in one call; the same gate is shut to all.
  template <class F, class Make>
  void HoldsAPauseBack(const char* name, const Make& make) {
    SCOPED_TRACE(name);
    F* const call = Replace<F>(name, &test::Held<F>::Real);
    test::Held<F>::Reset();
    std::thread calls([&] { EXPECT_EQ(make(call), CUDA_SUCCESS); });
    test::Held<F>::AwaitInside(1);
    EXPECT_FALSE(APauseGoesOnBefore([] { test::Held<F>::Release(); })) << "a pause went on under the call";
    calls.join();
    EXPECT_TRUE(session().Resume().ok());
  }
  // What one thread of NCCL's does: every write that was answered with success is there at the next look.
  void WriteAndLook(CUdeviceptr address, const std::atomic<bool>& stop, std::atomic<int>& writes, std::atomic<int>& refused) {
    std::uint32_t there = 0, next = 0;
    const auto count = [&](CUresult result) {
      if (result == CUDA_SUCCESS) return true;
      EXPECT_EQ(result, CUDA_ERROR_ILLEGAL_STATE);
      ++refused;
      return false;
    };
    while (!stop) {
      if (count(Write(address, ++next))) {
        there = next;
        ++writes;
      }
      std::uint32_t found = 0;
      if (count(to_host(&found, address, sizeof found))) {
        EXPECT_EQ(found, there) << "a write that succeeded is lost";
      }
      if (testing::Test::HasFailure()) return;
      std::this_thread::yield();
    }
  }
};

// Whole pauses and resumes; AMEM_GATE_CYCLES=100000 for a long run.
TEST_F(Gate, no_write_of_four_threads_is_lost_or_faults_over_many_pauses) {
  const char* asked = std::getenv("AMEM_GATE_CYCLES");
  const int cycles = asked == nullptr ? 200 : std::atoi(asked);
  std::atomic<bool> stop{false};
  std::atomic<int> writes{0}, refused{0};
  std::vector<std::thread> threads;
  CUcontext context = nullptr;
  ASSERT_EQ(PLAIN(cuCtxGetCurrent)(&context), CUDA_SUCCESS);
  for (CUdeviceptr i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      PLAIN(cuCtxSetCurrent)(context);
      WriteAndLook(memory() + i * kBytes / 4 + kBytes / 8, stop, writes, refused);
    });
  for (int i = 0; i < cycles && !HasFailure(); ++i) {
    EXPECT_TRUE(session().Pause().ok());
    std::this_thread::yield();
    EXPECT_TRUE(session().Resume().ok());
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  std::printf("%d writes, %d calls refused, in %d cycles\n", writes.load(), refused.load(), cycles);
  EXPECT_GT(writes, 0);
  EXPECT_GT(refused, 0);
}

// A call that is inside the driver holds a pause back, and no other call.
TEST_F(Gate, memory_that_is_asked_for_in_a_pause_is_refused_and_that_is_said) {
  ASSERT_TRUE(session().Pause().ok());
  log::Configure("warn", -1);
  testing::internal::CaptureStderr();
  CUmemGenericAllocationHandle handle{};
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  const CUresult refused = Driver<decltype(cuMemCreate)>("cuMemCreate")(&handle, kBytes, &properties, 0);
  const std::string said = testing::internal::GetCapturedStderr();
  log::Configure("off", -1);
  EXPECT_EQ(refused, CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_NE(said.find("refused, this process's NCCL memory is paused; call ncclResume first (NCCL gets CUresult 401)"),
            std::string::npos)
      << said;
}

TEST_F(Gate, a_pause_waits_for_a_copy_that_is_under_way_and_other_copies_do_not) {
  using Real = decltype(cuMemcpyPeer);
  const auto slow = Replace<Real>("cuMemcpyPeer", &test::Held<Real>::Real);
  test::Held<Real>::Reset();
  const auto copy = [&] { EXPECT_EQ(slow(memory(), nullptr, memory() + 4096, nullptr, 64), CUDA_SUCCESS); };
  std::thread copies(copy);
  test::Held<Real>::AwaitInside(1);
  std::thread copies_too(copy);
  test::Held<Real>::AwaitInside(2);
  EXPECT_FALSE(APauseGoesOnBefore([] { test::Held<Real>::Release(); })) << "memory was taken away under a copy";
  copies.join();
  copies_too.join();
}

// One call of each family, which the driver has begun when the pause comes.
TEST_F(Gate, a_pause_waits_for_a_call_of_any_kind) {
  using A = CUdeviceptr;
  using S = CUstream;
  HoldsAPauseBack<decltype(cuMemcpyDtoHAsync)>("cuMemcpyDtoHAsync",
                                               [&](auto call) { return call(nullptr, memory(), 64, nullptr); });
  HoldsAPauseBack<decltype(cuMemcpy2DAsync)>("cuMemcpy2DAsync", [&](auto call) { return call(nullptr, nullptr); });
  HoldsAPauseBack<decltype(cuMemsetD8Async)>("cuMemsetD8Async", [&](auto call) { return call(memory(), 7, 64, nullptr); });
  HoldsAPauseBack<CUresult(S, A, cuuint32_t, unsigned)>("cuStreamWriteValue32",
                                                        [&](auto call) { return call(nullptr, memory(), 7, 0); });
  HoldsAPauseBack<CUresult(S, A, cuuint64_t, unsigned)>("cuStreamWaitValue64",
                                                        [&](auto call) { return call(nullptr, memory(), 7, 0); });
  HoldsAPauseBack<decltype(cuStreamBatchMemOp)>("cuStreamBatchMemOp", [&](auto call) { return call(nullptr, 0, nullptr, 0); });
  HoldsAPauseBack<decltype(cuLaunchKernel)>(
      "cuLaunchKernel", [&](auto call) { return call(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr); });
  HoldsAPauseBack<decltype(cuGraphLaunch)>("cuGraphLaunch", [&](auto call) { return call(nullptr, nullptr); });
}

TEST_F(Gate, stream_memory_operations_are_refused_while_they_touch_paused_memory_and_only_then) {
  alignas(8) std::array<std::uint64_t, 2> host{};  // the stand-in takes host addresses, as unified addressing does
  const auto elsewhere = reinterpret_cast<CUdeviceptr>(host.data());
  const std::vector<std::function<CUresult(CUdeviceptr)>> calls = {
      [&](CUdeviceptr at) { return write_32(nullptr, at, 7, 0); },
      [&](CUdeviceptr at) { return write_64(nullptr, at, 7, 0); },
      [&](CUdeviceptr at) { return wait_32(nullptr, at, 7, CU_STREAM_WAIT_VALUE_GEQ); },
      [&](CUdeviceptr at) { return wait_64(nullptr, at, 7, CU_STREAM_WAIT_VALUE_GEQ); },
      [&](CUdeviceptr at) { return BatchWrite(at, 7); },
  };
  for (const auto& call : calls) EXPECT_EQ(call(memory()), CUDA_SUCCESS);
  ASSERT_TRUE(session().Pause().ok());
  for (const auto& call : calls) {
    EXPECT_EQ(call(memory()), CUDA_ERROR_ILLEGAL_STATE);
    EXPECT_EQ(call(elsewhere), CUDA_SUCCESS);
  }
  std::array<CUstreamBatchMemOpParams, 2> two{};  // the second is what counts
  for (auto& one : two) one.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  two[0].writeValue.address = elsewhere;
  two[1].writeValue.address = memory();
  EXPECT_EQ(batch(nullptr, 2, two.data(), 0), CUDA_ERROR_ILLEGAL_STATE);
  CUstreamBatchMemOpParams unknown{};  // its kind is 0, which stands for nothing
  EXPECT_EQ(batch(nullptr, 1, &unknown, 0), CUDA_ERROR_ILLEGAL_STATE) << "nobody knows what it touches";
}

#ifndef AMEM_SANITIZED
TEST_F(Gate, is_cheap) {
  using Real = decltype(cuMemcpyPeerAsync);
  const auto copy = Replace<Real>("cuMemcpyPeerAsync", &test::Recorded<Real>::Real);
  constexpr int kCalls = 200'000;
  const auto processor_ns = [] {  // other processes have no part in it
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e9 + static_cast<double>(time.tv_nsec);
  };
  const double begin = processor_ns();
  for (int i = 0; i < kCalls; ++i) copy(memory(), nullptr, memory(), nullptr, 64, nullptr);
  const double each = (processor_ns() - begin) / kCalls;
  std::printf("a copy through the gate: %.0f ns of processor time\n", each);
  EXPECT_LT(each, 2'000) << "some 50 ns on an idle machine";
}
#endif

}  // namespace
}  // namespace amem
