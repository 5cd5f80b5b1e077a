// Copies and fills: each of them, with paused memory in each of its places.
#include <functional>
#include <vector>

#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem {
namespace {

using test::Recorded;

struct Case {
  std::string name;
  bool writes = true, reads = true;  // device memory at the first address, at the second
  std::function<CUresult(CUdeviceptr to, CUdeviceptr from)> call;
  const int* calls = nullptr;  // that reached the driver
};

class CopyTest : public test::Intercepted {
 protected:
  // `call(copy, to, from)` calls the replaced function that NCCL gets for `name`.
  template <class F, class Call>
  void Add(const char* name, bool writes, bool reads, const Call& call, int cuda_version = 13000) {
    F* copy = Replace<F>(name, &Recorded<F>::Real, cuda_version);
    cases_.push_back({name, writes, reads, [copy, call](CUdeviceptr to, CUdeviceptr from) { return call(copy, to, from); },
                      &Recorded<F>::calls});
  }
  void AddLinear();
  void AddPlanes();
  void AddFills();

  static void Passes(const Case& c, CUdeviceptr to, CUdeviceptr from) {
    const int before = *c.calls;
    EXPECT_EQ(c.call(to, from), CUDA_SUCCESS) << c.name;
    EXPECT_EQ(*c.calls, before + 1) << c.name;
  }
  static void IsRefused(const Case& c, CUdeviceptr to, CUdeviceptr from) {
    const int before = *c.calls;
    EXPECT_EQ(c.call(to, from), CUDA_ERROR_ILLEGAL_STATE) << c.name;
    EXPECT_EQ(*c.calls, before) << c.name << " reached the driver";
  }

  std::vector<Case> cases_;
};

void* Host(CUdeviceptr address) { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)
constexpr size_t kCopied = 64;

void CopyTest::AddLinear() {
  const auto both = [](auto* copy, CUdeviceptr to, CUdeviceptr from) { return copy(to, from, kCopied); };
  const auto both_async = [](auto* copy, CUdeviceptr to, CUdeviceptr from) { return copy(to, from, kCopied, nullptr); };
  Add<decltype(cuMemcpy)>("cuMemcpy", true, true, both);
  Add<decltype(cuMemcpyDtoD)>("cuMemcpyDtoD", true, true, both);
  Add<decltype(cuMemcpyAsync)>("cuMemcpyAsync", true, true, both_async);
  Add<decltype(cuMemcpyDtoDAsync)>("cuMemcpyDtoDAsync", true, true, both_async);
  Add<decltype(cuMemcpyHtoD)>("cuMemcpyHtoD", true, false,
                              [](auto* copy, CUdeviceptr to, CUdeviceptr from) { return copy(to, Host(from), kCopied); });
  Add<decltype(cuMemcpyHtoDAsync)>("cuMemcpyHtoDAsync", true, false, [](auto* copy, CUdeviceptr to, CUdeviceptr from) {
    return copy(to, Host(from), kCopied, nullptr);
  });
  Add<decltype(cuMemcpyDtoH)>("cuMemcpyDtoH", false, true,
                              [](auto* copy, CUdeviceptr to, CUdeviceptr from) { return copy(Host(to), from, kCopied); });
  Add<decltype(cuMemcpyDtoHAsync)>("cuMemcpyDtoHAsync", false, true, [](auto* copy, CUdeviceptr to, CUdeviceptr from) {
    return copy(Host(to), from, kCopied, nullptr);
  });
  Add<decltype(cuMemcpyPeer)>("cuMemcpyPeer", true, true, [](auto* copy, CUdeviceptr to, CUdeviceptr from) {
    return copy(to, nullptr, from, nullptr, kCopied);
  });
  Add<decltype(cuMemcpyPeerAsync)>("cuMemcpyPeerAsync", true, true, [](auto* copy, CUdeviceptr to, CUdeviceptr from) {
    return copy(to, nullptr, from, nullptr, kCopied, nullptr);
  });
  // A batch is refused if any of its copies touches paused memory; here the second does.
  const auto batch = [](auto* copy, CUdeviceptr to, CUdeviceptr from, auto... rest) {
    CUdeviceptr targets[] = {16, to}, sources[] = {16, from};
    size_t bytes[] = {16, kCopied};
    return copy(targets, sources, bytes, 2, nullptr, nullptr, 0, rest...);
  };
  using BatchV1 = CUresult(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, void*, size_t*, size_t, size_t*, CUstream);
  using Batch = CUresult(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, void*, size_t*, size_t, CUstream);
  Add<BatchV1>(
      "cuMemcpyBatchAsync", true, true,
      [batch](auto* copy, CUdeviceptr to, CUdeviceptr from) { return batch(copy, to, from, nullptr, nullptr); }, 12080);
  Add<Batch>("cuMemcpyBatchAsync", true, true,
             [batch](auto* copy, CUdeviceptr to, CUdeviceptr from) { return batch(copy, to, from, nullptr); });
  using WithAttributes = CUresult(CUdeviceptr, CUdeviceptr, size_t, void*, CUstream);
  Add<WithAttributes>(
      "cuMemcpyWithAttributesAsync", true, true,
      [](auto* copy, CUdeviceptr to, CUdeviceptr from) { return copy(to, from, kCopied, nullptr, nullptr); }, 13030);
}

// Copies whose operands AMem does not read, because their types are younger than the header that it is built with.
TEST_F(CopyTest, copies_of_unknown_operands_are_refused_while_anything_is_paused) {
  using One = CUresult(void*, unsigned long long, CUstream);
  using BatchV1 = CUresult(size_t, void*, size_t*, unsigned long long, CUstream);
  using Batch = CUresult(size_t, void*, unsigned long long, CUstream);
  const auto one = Replace<One>("cuMemcpy3DWithAttributesAsync", &Recorded<One>::Real, 13030);
  const auto batch_v1 = Replace<BatchV1>("cuMemcpy3DBatchAsync", &Recorded<BatchV1>::Real, 12080);
  const auto batch = Replace<Batch>("cuMemcpy3DBatchAsync", &Recorded<Batch>::Real, 13000);
  const auto expect = [&](CUresult result) {
    EXPECT_EQ(one(nullptr, 0, nullptr), result);
    EXPECT_EQ(batch_v1(0, nullptr, nullptr, 0, nullptr), result);
    EXPECT_EQ(batch(0, nullptr, 0, nullptr), result);
  };
  expect(CUDA_SUCCESS);
  ASSERT_TRUE(session().Pause().ok());
  expect(CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(Recorded<One>::calls + Recorded<BatchV1>::calls + Recorded<Batch>::calls, 3);
}

// Two rows, the second of which lies a pitch after `to` and `from`: that is where paused memory begins.
constexpr size_t kPitch = 4096;
template <class Copied>
Copied Plane(CUdeviceptr to, CUdeviceptr from) {
  Copied copy{};
  copy.dstMemoryType = copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = to - kPitch;
  copy.srcDevice = from - kPitch;
  copy.dstPitch = copy.srcPitch = kPitch;
  copy.WidthInBytes = kCopied;
  copy.Height = 2;
  if constexpr (requires { copy.Depth; }) {
    copy.Depth = 1;
    copy.dstHeight = copy.srcHeight = 2;
  }
  return copy;
}

void CopyTest::AddPlanes() {
  const auto plane = [](auto* copy, CUdeviceptr to, CUdeviceptr from, auto... stream) {
    const auto what = Plane<CUDA_MEMCPY2D>(to, from);
    return copy(&what, stream...);
  };
  const auto volume = [](auto* copy, CUdeviceptr to, CUdeviceptr from, auto... stream) {
    const auto what = Plane<CUDA_MEMCPY3D>(to, from);
    return copy(&what, stream...);
  };
  const auto peer = [](auto* copy, CUdeviceptr to, CUdeviceptr from, auto... stream) {
    const auto what = Plane<CUDA_MEMCPY3D_PEER>(to, from);
    return copy(&what, stream...);
  };
  const auto async = [](const auto& call) {
    return [call](auto* copy, CUdeviceptr to, CUdeviceptr from) { return call(copy, to, from, CUstream{}); };
  };
  Add<decltype(cuMemcpy2D)>("cuMemcpy2D", true, true, plane);
  Add<decltype(cuMemcpy2DUnaligned)>("cuMemcpy2DUnaligned", true, true, plane);
  Add<decltype(cuMemcpy2DAsync)>("cuMemcpy2DAsync", true, true, async(plane));
  Add<decltype(cuMemcpy3D)>("cuMemcpy3D", true, true, volume);
  Add<decltype(cuMemcpy3DAsync)>("cuMemcpy3DAsync", true, true, async(volume));
  Add<decltype(cuMemcpy3DPeer)>("cuMemcpy3DPeer", true, true, peer);
  Add<decltype(cuMemcpy3DPeerAsync)>("cuMemcpy3DPeerAsync", true, true, async(peer));
}

void CopyTest::AddFills() {
  const auto fill = [](auto* set, CUdeviceptr to, CUdeviceptr) { return set(to, 0, kCopied); };
  const auto fill_async = [](auto* set, CUdeviceptr to, CUdeviceptr) { return set(to, 0, kCopied, nullptr); };
  const auto plane = [](auto* set, CUdeviceptr to, CUdeviceptr) { return set(to - kPitch, kPitch, 0, kCopied, 2); };
  const auto plane_async = [](auto* set, CUdeviceptr to, CUdeviceptr) {
    return set(to - kPitch, kPitch, 0, kCopied, 2, nullptr);
  };
  Add<decltype(cuMemsetD8)>("cuMemsetD8", true, false, fill);
  Add<decltype(cuMemsetD16)>("cuMemsetD16", true, false, fill);
  Add<decltype(cuMemsetD32)>("cuMemsetD32", true, false, fill);
  Add<decltype(cuMemsetD8Async)>("cuMemsetD8Async", true, false, fill_async);
  Add<decltype(cuMemsetD16Async)>("cuMemsetD16Async", true, false, fill_async);
  Add<decltype(cuMemsetD32Async)>("cuMemsetD32Async", true, false, fill_async);
  Add<decltype(cuMemsetD2D8)>("cuMemsetD2D8", true, false, plane);
  Add<decltype(cuMemsetD2D16)>("cuMemsetD2D16", true, false, plane);
  Add<decltype(cuMemsetD2D32)>("cuMemsetD2D32", true, false, plane);
  Add<decltype(cuMemsetD2D8Async)>("cuMemsetD2D8Async", true, false, plane_async);
  Add<decltype(cuMemsetD2D16Async)>("cuMemsetD2D16Async", true, false, plane_async);
  Add<decltype(cuMemsetD2D32Async)>("cuMemsetD2D32Async", true, false, plane_async);
}

TEST_F(CopyTest, each_call_is_refused_while_it_touches_paused_memory_and_only_then) {
  AddLinear();
  AddPlanes();
  AddFills();
  constexpr std::size_t kOthers = 3 + 5 + 5;  // versions of the same calls, stream memory operations, launches
  EXPECT_EQ(cases_.size(), intercept::GatedReplacements().size() - kOthers) << "a call has no case";
  constexpr CUdeviceptr kOther = 0x100000;  // memory that no pause takes
  for (const Case& c : cases_) Passes(c, memory(), memory());
  ASSERT_TRUE(session().Pause().ok());
  for (const Case& c : cases_) {
    Passes(c, kOther, kOther);
    (c.writes ? IsRefused : Passes)(c, memory(), kOther);
    (c.reads ? IsRefused : Passes)(c, kOther, memory());
  }
  ASSERT_TRUE(session().Resume().ok());
  for (const Case& c : cases_) Passes(c, memory(), memory());
}

TEST_F(CopyTest, a_fill_reaches_as_far_as_its_elements_are_wide) {
  ASSERT_TRUE(session().Pause().ok());
  const auto before = memory() - kCopied;
  const auto set8 = Replace<decltype(cuMemsetD8)>("cuMemsetD8", &Recorded<decltype(cuMemsetD8)>::Real);
  const auto set16 = Replace<decltype(cuMemsetD16)>("cuMemsetD16", &Recorded<decltype(cuMemsetD16)>::Real);
  const auto set32 = Replace<decltype(cuMemsetD32)>("cuMemsetD32", &Recorded<decltype(cuMemsetD32)>::Real);
  EXPECT_EQ(set8(before, 0, kCopied), CUDA_SUCCESS);
  EXPECT_EQ(set8(before, 0, kCopied + 1), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(set16(before, 0, kCopied / 2), CUDA_SUCCESS);
  EXPECT_EQ(set16(before, 0, kCopied / 2 + 1), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(set32(before, 0, kCopied / 4), CUDA_SUCCESS);
  EXPECT_EQ(set32(before, 0, kCopied / 4 + 1), CUDA_ERROR_ILLEGAL_STATE);
}

struct LastArguments {
  size_t* failed = nullptr;
  CUstream stream = nullptr;
} g_last;

TEST_F(CopyTest, the_version_that_nccl_asks_for_decides_how_many_arguments_are_passed_on) {
  constexpr auto before_13 = [](CUdeviceptr*, CUdeviceptr*, size_t*, size_t, void*, size_t*, size_t, size_t* failed,
                                CUstream stream) {
    g_last = {failed, stream};
    return CUDA_SUCCESS;
  };
  constexpr auto from_13 = [](CUdeviceptr*, CUdeviceptr*, size_t*, size_t, void*, size_t*, size_t, CUstream stream) {
    g_last = {nullptr, stream};
    return CUDA_SUCCESS;
  };
  size_t failed = 0;
  const auto stream = reinterpret_cast<CUstream>(&failed + 1);
  const auto old_copy = Replace("cuMemcpyBatchAsync", +before_13, 12090);
  EXPECT_EQ(old_copy(nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0, &failed, stream), CUDA_SUCCESS);
  EXPECT_EQ(g_last.failed, &failed);
  EXPECT_EQ(g_last.stream, stream);
  const auto new_copy = Replace("cuMemcpyBatchAsync", +from_13, 13000);
  EXPECT_EQ(new_copy(nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0, stream), CUDA_SUCCESS);
  EXPECT_EQ(g_last.stream, stream);
  bool replaced = true;
  replacements::Bind("cuMemcpyBatchAsync", 12070, reinterpret_cast<void*>(+before_13), &replaced);
  EXPECT_FALSE(replaced) << "there was no such function before 12.8";
}

TEST_F(CopyTest, host_sides_and_null_descriptions_are_the_drivers) {
  using F = decltype(cuMemcpy2D);
  const auto copy = Replace<F>("cuMemcpy2D", &Recorded<F>::Real);
  ASSERT_TRUE(session().Pause().ok());
  auto plane = Plane<CUDA_MEMCPY2D>(memory(), memory());
  plane.dstMemoryType = plane.srcMemoryType = CU_MEMORYTYPE_HOST;
  const int before = Recorded<F>::calls;
  EXPECT_EQ(copy(&plane), CUDA_SUCCESS);
  EXPECT_EQ(copy(nullptr), CUDA_SUCCESS) << "the driver's answer, whatever it is";
  EXPECT_EQ(Recorded<F>::calls, before + 2);
}

}  // namespace
}  // namespace amem
