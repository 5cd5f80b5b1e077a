// Memory of the whole program with AMEM_SCOPE=all, beside what the driver answers for memory of its own.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "ncclpatch/intercept/others.h"
#include "ncclpatch/runtime/tags.h"
#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem::test {
namespace {

constexpr const char* kTags[] = {"program"};

class Program : public Intercepted {
 protected:
  static void SetUpTestSuite() {
    Intercepted::SetUpTestSuite();
    intercept::Widen(LibraryScope::kAll);
    intercept::JournalOthers(session());
  }
  static void TearDownTestSuite() {
    intercept::Widen(LibraryScope::kShared);
    replacements::Install(intercept::CountingTables(), replacements::Caller::kOther);
  }
  void TearDown() override {
    EXPECT_TRUE(Resume().ok());
    EXPECT_TRUE(Parts().empty());
    EXPECT_TRUE(Left().empty());
    session().devices().TrimPinned(0);  // ends the thread that pins
    Intercepted::TearDown();
  }

  static Status Pause() { return tags::Cycle(kTags, {.how = HowToPause{}}); }
  static Status Resume() { return tags::Cycle(kTags, {.how = HowToResume{.patient = false}}); }
  static std::map<Address, PoolAllocated> Parts() {
    const State state = session().CopyState();
    return state.pools.at(state.PoolNamed("program")).parts;
  }
  static std::map<std::string, OutsideShare> Left(bool wait = true) {
    intercept::JournalOthers(session(), wait);
    std::map<std::string, OutsideShare> left;
    for (const auto& [what, share] : session().CopyState().outside)
      if (what.second == OutsideKind::kLeft) left[what.first] = share;
    return left;
  }
  CUdeviceptr Take(std::size_t bytes) const {
    CUdeviceptr address = 0;
    EXPECT_EQ(alloc(&address, bytes), CUDA_SUCCESS);
    return address;
  }
  [[nodiscard]] std::size_t FreeBytes() const {
    std::size_t bytes = 0, total = 0;
    EXPECT_EQ(info(&bytes, &total), CUDA_SUCCESS);
    return bytes;
  }
  static void* At(CUdeviceptr address) { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)

  decltype(cuMemAlloc)* alloc = OF_DRIVER(cuMemAlloc);
  decltype(cuMemFree)* free = OF_DRIVER(cuMemFree);
  decltype(cuMemGetInfo)* info = PLAIN(cuMemGetInfo);
  decltype(cuMemGetAddressRange)* range = OF_DRIVER(cuMemGetAddressRange);
  decltype(cuPointerGetAttribute)* attribute = OF_DRIVER(cuPointerGetAttribute);
  decltype(cuPointerGetAttributes)* attributes = OF_DRIVER(cuPointerGetAttributes);

  // What the driver says of a pointer, relative to where its memory begins.
  using Said = std::tuple<std::uint64_t, unsigned, int, std::uint64_t, std::size_t, int, std::uint64_t, int, std::size_t>;
  struct Ways {
    decltype(cuMemGetAddressRange)* range;
    decltype(cuPointerGetAttribute)* one;
    decltype(cuPointerGetAttributes)* all;
  };
  static Said SaidOf(CUdeviceptr base, const Ways& ways) {
    const CUdeviceptr inside = base + 4096;
    CUcontext context = nullptr;
    unsigned type = 0;
    int ordinal = -1, legacy = -1, managed = -1;
    CUdeviceptr begin = 0, begin_of_range = 0, device_pointer = 0;
    std::size_t size = 0, size_of_range = 0;
    std::uint64_t handle_types = 77;
    std::vector<std::pair<CUpointer_attribute, void*>> asked = {{CU_POINTER_ATTRIBUTE_CONTEXT, &context},
                                                                {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, &type},
                                                                {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, &ordinal},
                                                                {CU_POINTER_ATTRIBUTE_DEVICE_POINTER, &device_pointer},
                                                                {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, &begin},
                                                                {CU_POINTER_ATTRIBUTE_RANGE_SIZE, &size},
                                                                {CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, &legacy},
                                                                {CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, &handle_types},
                                                                {CU_POINTER_ATTRIBUTE_IS_MANAGED, &managed}};
    if (ways.all != nullptr) {
      std::vector<CUpointer_attribute> names;
      std::vector<void*> values;
      for (const auto& [name, value] : asked) {
        names.push_back(name);
        values.push_back(value);
      }
      EXPECT_EQ(ways.all(static_cast<unsigned>(names.size()), names.data(), values.data(), inside), CUDA_SUCCESS);
    } else {
      for (const auto& [name, value] : asked) EXPECT_EQ(ways.one(value, name, inside), CUDA_SUCCESS) << name;
    }
    EXPECT_EQ(ways.range(&begin_of_range, &size_of_range, inside), CUDA_SUCCESS);
    EXPECT_EQ(device_pointer, inside);
    EXPECT_EQ(begin_of_range, base);
    return {reinterpret_cast<std::uint64_t>(context),
            type,
            ordinal,
            begin - base,
            size,
            legacy,
            handle_types,
            managed,
            size_of_range};
  }
};

TEST_F(Program, memory_of_the_program_answers_as_memory_of_the_driver_does) {
  const CUdeviceptr ours = Take(kBytes);
  CUdeviceptr plain = 0;
  ASSERT_EQ(PLAIN(cuMemAlloc)(&plain, kBytes), CUDA_SUCCESS);
  const auto one_by_one = [&](auto* range_of, auto* one) { return Ways{range_of, one, nullptr}; };
  const auto stock = one_by_one(PLAIN(cuMemGetAddressRange), PLAIN(cuPointerGetAttribute));
  const Said expected = SaidOf(plain, stock);
  EXPECT_NE(std::get<0>(expected), 0U) << "a context";
  EXPECT_EQ(SaidOf(ours, one_by_one(range, attribute)), expected);
  EXPECT_EQ(SaidOf(ours, {range, attribute, attributes}), expected);
  EXPECT_EQ(SaidOf(plain, {range, attribute, attributes}), expected) << "what is not ours passes through";
  EXPECT_EQ(PLAIN(cuMemFree)(plain), CUDA_SUCCESS);
  for (const auto& [address, part] : Parts()) EXPECT_EQ(free(address.value), CUDA_SUCCESS);
  EXPECT_EQ(free(ours), CUDA_ERROR_INVALID_VALUE) << "a second time";
}

TEST_F(Program, it_is_paused_and_comes_back_and_what_is_allocated_meanwhile_is_the_drivers_and_counted) {
  const CUdeviceptr kept = Take(kBytes), freed = Take(kBytes);
  std::memset(At(kept), 0x5a, kBytes);
  const std::size_t before = FreeBytes();
  ASSERT_TRUE(Pause().ok());
  EXPECT_GE(FreeBytes(), before + 2 * kBytes);
  unsigned type = 0;
  EXPECT_EQ(attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, kept), CUDA_SUCCESS);
  EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE)) << "as if it were there";
  const CUdeviceptr meanwhile = Take(kBytes);
  std::memset(At(meanwhile), 1, kBytes);
  EXPECT_EQ(Left(), (std::map<std::string, OutsideShare>{{"cuMemAlloc", {1, kBytes}}}));
  EXPECT_EQ(free(freed), CUDA_SUCCESS);
  ASSERT_TRUE(Resume().ok());
  EXPECT_EQ(FreeBytes(), before) << "one was freed, and one allocated";
  const auto* const bytes = static_cast<const unsigned char*>(At(kept));
  EXPECT_TRUE(std::all_of(bytes, bytes + kBytes, [](unsigned char byte) { return byte == 0x5a; }));
  EXPECT_EQ(free(meanwhile), CUDA_SUCCESS);
  EXPECT_TRUE(Left().empty());
  EXPECT_EQ(free(kept), CUDA_SUCCESS);
}

TEST_F(Program, a_tag_of_its_own_is_paused_apart_and_is_no_memory_of_the_program) {
  Pools& pools = session().pools();
  const PoolId own = *pools.Open("own", PoolPolicy::kPreserve);
  const Address tagged = *pools.Allocate(own, kBytes, DeviceOrdinal{0});
  const CUdeviceptr memory = Take(kBytes);
  EXPECT_EQ(Parts().size(), 1U);
  ASSERT_TRUE(Pause().ok());
  EXPECT_TRUE(session().calls().TouchesPaused(Address{memory}, 1));
  EXPECT_FALSE(session().calls().TouchesPaused(tagged, 1));
  ASSERT_TRUE(pools.Pause(own, {}).ok());
  ASSERT_TRUE(Resume().ok());
  EXPECT_FALSE(session().calls().TouchesPaused(Address{memory}, 1));
  EXPECT_TRUE(session().calls().TouchesPaused(tagged, 1));
  ASSERT_TRUE(pools.Resume(own, {}).ok());
  EXPECT_EQ(free(tagged.value), CUDA_SUCCESS) << "cudaFree takes what is a tag's, whoever allocated it";
  EXPECT_EQ(free(memory), CUDA_SUCCESS);
}

TEST_F(Program, what_is_small_stays_the_drivers_and_is_counted) {
  const CUdeviceptr small = Take(kBytes - 1), large = Take(kBytes);
  EXPECT_EQ(Left(), (std::map<std::string, OutsideShare>{{"cuMemAlloc", {1, kBytes - 1}}}));
  EXPECT_EQ(Parts().size(), 1U);
  EXPECT_EQ(Parts().at(Address{large}).bytes, kBytes);
  EXPECT_EQ(free(large), CUDA_SUCCESS);
  EXPECT_EQ(free(small), CUDA_SUCCESS);
}

TEST_F(Program, sizes_that_no_gpu_has_are_answered_by_the_driver) {
  constexpr std::size_t kNone = 0;
  CUdeviceptr memory = 0;
  std::size_t pitch = 0;
  for (const std::size_t bytes : {kNone - 1, kNone - 511, kNone - 512, kNone - 513, kNone - 4096, kNone - kBytes,
                                  std::size_t{1} << 63, std::size_t{1} << 50})
    EXPECT_EQ(alloc(&memory, bytes), CUDA_ERROR_OUT_OF_MEMORY) << bytes;
  EXPECT_EQ(OF_DRIVER(cuMemAllocPitch)(&memory, &pitch, kNone - 1, 2, 4), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(OF_DRIVER(cuMemAllocPitch)(&memory, &pitch, std::size_t{1} << 20, kNone - 1, 4), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_TRUE(Pause().ok());
  EXPECT_TRUE(Resume().ok());
}

TEST_F(Program, a_stream_ordered_free_takes_it) {
  const auto free_async = OF_DRIVER(cuMemFreeAsync);
  const std::size_t before = FreeBytes();
  const CUdeviceptr memory = Take(kBytes);
  EXPECT_EQ(free_async(memory + 512, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(free_async(memory, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(free_async(memory, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(free(memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(FreeBytes(), before);
}

TEST_F(Program, what_was_freed_in_a_capture_and_went_with_a_reset_is_not_freed_where_new_memory_is) {
  constexpr int kReset = 2;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  ASSERT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuDevicePrimaryCtxRetain)(&context, kReset), CUDA_SUCCESS);
  ASSERT_EQ(OF_DRIVER(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxPushCurrent)(context), CUDA_SUCCESS);
  const CUdeviceptr first = Take(kBytes);
  EXPECT_EQ(free(first), CUDA_SUCCESS);
  EXPECT_EQ(Parts().size(), 1U) << "later";
  ASSERT_EQ(OF_DRIVER(cuDevicePrimaryCtxReset)(kReset), CUDA_SUCCESS);
  EXPECT_TRUE(Parts().empty());
  const CUdeviceptr second = Take(kBytes);
  ASSERT_EQ(second, first) << "the case that matters";
  ASSERT_EQ(PLAIN(cuCtxPopCurrent)(nullptr), CUDA_SUCCESS);
  ASSERT_EQ(OF_DRIVER(cuStreamEndCapture)(stream, &graph), CUDA_SUCCESS);
  EXPECT_EQ(free(Take(512)), CUDA_SUCCESS);
  EXPECT_EQ(Parts().size(), 1U);
  EXPECT_EQ(free(second), CUDA_SUCCESS);
  EXPECT_EQ(OF_DRIVER(cuStreamDestroy)(stream), CUDA_SUCCESS);
}

TEST_F(Program, the_last_release_of_the_primary_context_takes_it_and_what_is_in_it) {
  constexpr int kReleased = 3;
  const auto release = OF_DRIVER(cuDevicePrimaryCtxRelease);
  const auto state = PLAIN(cuDevicePrimaryCtxGetState);
  const auto active = [&] {
    unsigned flags = 0;
    int is = -1;
    EXPECT_EQ(state(kReleased, &flags, &is), CUDA_SUCCESS);
    return is;
  };
  for (unsigned char round = 1; round <= 2; ++round) {
    CUcontext context = nullptr;
    ASSERT_EQ(PLAIN(cuDevicePrimaryCtxRetain)(&context, kReleased), CUDA_SUCCESS);
    ASSERT_EQ(PLAIN(cuDevicePrimaryCtxRetain)(&context, kReleased), CUDA_SUCCESS);
    ASSERT_EQ(PLAIN(cuCtxPushCurrent)(context), CUDA_SUCCESS);
    const CUdeviceptr memory = Take(kBytes);
    std::memset(At(memory), round, kBytes);
    ASSERT_TRUE(Pause().ok());
    ASSERT_TRUE(Resume().ok());
    EXPECT_EQ(release(kReleased), CUDA_SUCCESS);
    EXPECT_EQ(active(), 1);
    EXPECT_EQ(*static_cast<const unsigned char*>(At(memory)), round);
    EXPECT_EQ(release(kReleased), CUDA_SUCCESS);
    EXPECT_EQ(active(), 0) << "AMem's own reference does not keep it";
    EXPECT_TRUE(Parts().empty());
    EXPECT_EQ(free(memory), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(release(kReleased), CUDA_ERROR_INVALID_CONTEXT) << "one too many";
    EXPECT_TRUE(session().CopyState().broken.empty());
    ASSERT_EQ(PLAIN(cuCtxPopCurrent)(nullptr), CUDA_SUCCESS);
  }
}

// Another thread makes the next context before anybody can see that there is none.
TEST_F(Program, a_primary_context_that_is_made_anew_within_its_last_release_is_another_one) {
  constexpr int kReleased = 3;
  CUcontext context = nullptr;
  ASSERT_EQ(PLAIN(cuDevicePrimaryCtxRetain)(&context, kReleased), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxPushCurrent)(context), CUDA_SUCCESS);
  const CUdeviceptr memory = Take(kBytes);
  ASSERT_EQ(Parts().count(Address{memory}), 1U);
  ASSERT_EQ(Plain<int(const char*, std::uint64_t, const char*)>("stand_in_cuda_at")("ReleasePrimary", 1, "fail=1"), 0);
  EXPECT_EQ(OF_DRIVER(cuDevicePrimaryCtxRelease)(kReleased), CUDA_SUCCESS);
  EXPECT_TRUE(Parts().empty()) << "it went with its context";
  EXPECT_EQ(free(memory), CUDA_ERROR_INVALID_VALUE);
  const CUdeviceptr next = Take(kBytes);
  std::memset(At(next), 7, kBytes);
  ASSERT_TRUE(Pause().ok());
  ASSERT_TRUE(Resume().ok());
  EXPECT_EQ(*static_cast<const unsigned char*>(At(next)), 7);
  EXPECT_EQ(free(next), CUDA_SUCCESS);
  EXPECT_EQ(OF_DRIVER(cuDevicePrimaryCtxRelease)(kReleased), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxPopCurrent)(nullptr), CUDA_SUCCESS);
}

// What is pinned for the contents, and what brings them back, belongs to the context.
TEST_F(Program, the_primary_context_stays_while_memory_in_it_is_paused) {
  constexpr int kReleased = 3;
  CUcontext context = nullptr;
  ASSERT_EQ(PLAIN(cuDevicePrimaryCtxRetain)(&context, kReleased), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxPushCurrent)(context), CUDA_SUCCESS);
  const CUdeviceptr memory = Take(kBytes);
  std::memset(At(memory), 5, kBytes);
  ASSERT_TRUE(Pause().ok());
  EXPECT_EQ(OF_DRIVER(cuDevicePrimaryCtxRelease)(kReleased), CUDA_SUCCESS);
  unsigned flags = 0;
  int active = -1;
  EXPECT_EQ(PLAIN(cuDevicePrimaryCtxGetState)(kReleased, &flags, &active), CUDA_SUCCESS);
  EXPECT_EQ(active, 1);
  const Status resumed = Resume();
  ASSERT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_EQ(*static_cast<const unsigned char*>(At(memory)), 5);
  EXPECT_EQ(free(memory), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxPopCurrent)(nullptr), CUDA_SUCCESS);
}

TEST_F(Program, a_pitched_allocation_has_rows_as_the_drivers) {
  const auto pitched = OF_DRIVER(cuMemAllocPitch);
  CUdeviceptr ours = 0, plain = 0;
  std::size_t pitch = 0, expected = 0;
  ASSERT_EQ(pitched(&ours, &pitch, 1000, 7000, 4), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuMemAllocPitch)(&plain, &expected, 1000, 7000, 4), CUDA_SUCCESS);
  EXPECT_EQ(pitch, expected);
  EXPECT_EQ(Parts().at(Address{ours}).bytes, pitch * 7000);
  EXPECT_EQ(PLAIN(cuMemFree)(plain), CUDA_SUCCESS);
  EXPECT_EQ(free(ours), CUDA_SUCCESS);
}

TEST_F(Program, a_free_during_a_capture_does_not_break_it_and_is_done_later) {
  const auto begin = OF_DRIVER(cuStreamBeginCapture);
  const auto end = OF_DRIVER(cuStreamEndCapture);
  const auto destroy = OF_DRIVER(cuStreamDestroy);
  const CUdeviceptr other = Take(kBytes);
  for (const bool ends : {true, false}) {
    const CUdeviceptr memory = Take(kBytes);
    CUstream stream = nullptr;
    CUgraph graph = nullptr;
    ASSERT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    ASSERT_EQ(begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
    EXPECT_NE(begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS) << "it goes on";
    std::thread([&] { EXPECT_EQ(end(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) << "and on"; }).join();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;  // in which frees may disturb captures, and must not
    ASSERT_EQ(PLAIN(cuThreadExchangeStreamCaptureMode)(&mode), CUDA_SUCCESS);
    EXPECT_EQ(free(memory), CUDA_SUCCESS);
    ASSERT_EQ(PLAIN(cuThreadExchangeStreamCaptureMode)(&mode), CUDA_SUCCESS);
    EXPECT_EQ(Parts().size(), 2U);
    if (ends) {
      EXPECT_EQ(end(stream, &graph), CUDA_SUCCESS) << "the capture is valid";
    }
    EXPECT_EQ(destroy(stream), CUDA_SUCCESS);
    EXPECT_EQ(free(Take(512)), CUDA_SUCCESS);
    EXPECT_EQ(Parts().size(), 1U) << "given back";
  }
  EXPECT_EQ(free(other), CUDA_SUCCESS);
}

TEST_F(Program, what_the_driver_forbids_during_a_capture_is_forbidden) {
  const auto begin = OF_DRIVER(cuStreamBeginCapture);
  const auto end = OF_DRIVER(cuStreamEndCapture);
  const CUdeviceptr memory = Take(kBytes);
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  ASSERT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  for (const bool frees : {true, false}) {
    CUdeviceptr other = 0;
    ASSERT_EQ(begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    EXPECT_EQ(frees ? free(memory) : alloc(&other, kBytes), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_EQ(end(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  EXPECT_EQ(free(memory), CUDA_SUCCESS);
  EXPECT_EQ(OF_DRIVER(cuStreamDestroy)(stream), CUDA_SUCCESS);
}

TEST_F(Program, each_thread_captures_its_own_default_stream) {
  const auto begin = OF_DRIVER(cuStreamBeginCapture);
  const auto end = OF_DRIVER(cuStreamEndCapture);
  const CUdeviceptr memory = Take(kBytes);
  CUcontext context = nullptr;
  CUgraph graph = nullptr;
  ASSERT_EQ(PLAIN(cuCtxGetCurrent)(&context), CUDA_SUCCESS);
  ASSERT_EQ(begin(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
  std::thread([&] {
    CUgraph other = nullptr;
    EXPECT_EQ(PLAIN(cuCtxSetCurrent)(context), CUDA_SUCCESS);
    EXPECT_EQ(begin(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
    EXPECT_EQ(end(CU_STREAM_PER_THREAD, &other), CUDA_SUCCESS);
    EXPECT_EQ(free(memory), CUDA_SUCCESS);
    EXPECT_EQ(free(memory), CUDA_ERROR_INVALID_VALUE) << "also before it is given back";
  }).join();
  EXPECT_EQ(end(CU_STREAM_PER_THREAD, &graph), CUDA_SUCCESS) << "the capture is valid";
  EXPECT_EQ(free(Take(512)), CUDA_SUCCESS);
  EXPECT_TRUE(Parts().empty());
}

TEST_F(Program, a_capture_that_goes_with_its_context_or_thread_holds_no_memory) {
  const auto begin = OF_DRIVER(cuStreamBeginCapture);
  CUcontext context = nullptr;
  ASSERT_EQ(PLAIN(cuCtxGetCurrent)(&context), CUDA_SUCCESS);
  static CUcontext own = nullptr;
  using Create = CUresult(CUcontext*, unsigned, CUdevice);
  ASSERT_EQ(Plain<Create>("cuCtxCreate_v2")(&own, 0, 0), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  ASSERT_EQ(OF_DRIVER(cuCtxDestroy)(own), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxSetCurrent)(context), CUDA_SUCCESS);
  std::thread([&] {
    EXPECT_EQ(PLAIN(cuCtxSetCurrent)(context), CUDA_SUCCESS);
    EXPECT_EQ(begin(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  }).join();
  const std::size_t before = FreeBytes();
  EXPECT_EQ(free(Take(kBytes)), CUDA_SUCCESS);
  EXPECT_EQ(FreeBytes(), before);
  EXPECT_TRUE(Parts().empty());
}

TEST_F(Program, memory_of_a_context_that_the_program_made_stays_the_drivers) {
  static CUcontext context = nullptr;  // which the stand-in never deletes
  using Create = CUresult(CUcontext*, unsigned, CUdevice);
  ASSERT_EQ(Plain<Create>("cuCtxCreate_v2")(&context, 0, 0), CUDA_SUCCESS);
  const CUdeviceptr memory = Take(kBytes);
  EXPECT_EQ(Left(), (std::map<std::string, OutsideShare>{{"cuMemAlloc", {1, kBytes}}}));
  EXPECT_EQ(free(memory), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxDestroy)(context), CUDA_SUCCESS);
}

TEST_F(Program, memory_goes_with_the_context_that_the_program_made) {
  static CUcontext context = nullptr;  // which the stand-in never deletes
  using Create = CUresult(CUcontext*, unsigned, CUdevice);
  ASSERT_EQ(Plain<Create>("cuCtxCreate_v2")(&context, 0, 0), CUDA_SUCCESS);
  static_cast<void>(Take(kBytes));
  EXPECT_EQ(Left(), (std::map<std::string, OutsideShare>{{"cuMemAlloc", {1, kBytes}}}));
  const auto destroy = OF_DRIVER(cuCtxDestroy);
  EXPECT_NE(destroy(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(Left().size(), 1U);
  ASSERT_EQ(destroy(context), CUDA_SUCCESS);
  EXPECT_TRUE(Left().empty());
}

TEST_F(Program, a_reset_of_a_device_frees_its_memory_and_later_pauses_work) {
  constexpr int kReset = 2;
  const auto reset = OF_DRIVER(cuDevicePrimaryCtxReset);
  static constexpr CUdeviceptr kManaged = 0x7000'0000;
  const auto managed = ForOthers<decltype(cuMemAllocManaged)>(
      "cuMemAllocManaged", [](CUdeviceptr* pointer, std::size_t, unsigned) { return *pointer = kManaged, CUDA_SUCCESS; });
  const auto retain = PLAIN(cuDevicePrimaryCtxRetain);
  const auto push = PLAIN(cuCtxPushCurrent);
  const auto pop = PLAIN(cuCtxPopCurrent);
  for (unsigned char round = 1; round <= 2; ++round) {
    const CUdeviceptr elsewhere = round == 1 ? Take(kBytes) : 0;
    CUcontext context = nullptr;
    ASSERT_EQ(retain(&context, kReset), CUDA_SUCCESS);
    ASSERT_EQ(push(context), CUDA_SUCCESS);
    const std::size_t free_before = FreeBytes();
    const CUdeviceptr memory = Take(kBytes);
    std::memset(At(memory), round, kBytes);
    const Status paused = Pause();
    ASSERT_TRUE(paused.ok()) << paused.message();
    ASSERT_TRUE(Resume().ok());
    const auto* const bytes = static_cast<const unsigned char*>(At(memory));
    EXPECT_TRUE(std::all_of(bytes, bytes + kBytes, [&](unsigned char byte) { return byte == round; }));
    CUdeviceptr left = 0;
    ASSERT_EQ(managed(&left, kBytes, 1), CUDA_SUCCESS);
    EXPECT_EQ(Left().size(), 1U);
    ASSERT_EQ(reset(kReset), CUDA_SUCCESS);
    EXPECT_EQ(Parts().size(), round == 1 ? 1U : 0U) << "on another device";
    EXPECT_TRUE(Left().empty());
    EXPECT_EQ(free(memory), CUDA_ERROR_INVALID_VALUE) << "it was freed";
    EXPECT_EQ(FreeBytes(), free_before);
    EXPECT_TRUE(session().CopyState().broken.empty());
    ASSERT_EQ(pop(nullptr), CUDA_SUCCESS);
    EXPECT_EQ(free(elsewhere), CUDA_SUCCESS);
  }
}

TEST_F(Program, a_device_with_peer_access_reaches_all_of_it) {
  const CUdeviceptr before = Take(kBytes);
  CUcontext first = nullptr, second = nullptr;
  ASSERT_EQ(PLAIN(cuCtxGetCurrent)(&first), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuDevicePrimaryCtxRetain)(&second, 1), CUDA_SUCCESS);
  const auto on_second = [&](const auto& act) {
    EXPECT_EQ(PLAIN(cuCtxPushCurrent)(second), CUDA_SUCCESS);
    act();
    EXPECT_EQ(PLAIN(cuCtxPopCurrent)(nullptr), CUDA_SUCCESS);
  };
  on_second([&] {
    EXPECT_NE(PLAIN(cuMemsetD8)(before, 1, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(OF_DRIVER(cuCtxEnablePeerAccess)(first, 0), CUDA_SUCCESS);
  });
  const CUdeviceptr after = Take(std::size_t{256} << 20);
  on_second([&] {
    for (const CUdeviceptr memory : {before, after}) EXPECT_EQ(PLAIN(cuMemsetD8)(memory, 1, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(free(after), CUDA_SUCCESS) << "whose device is not the current one";
  });
  EXPECT_EQ(free(before), CUDA_SUCCESS);
}

TEST_F(Program, what_is_not_taken_is_counted_by_the_function_that_made_it) {
  static constexpr CUdeviceptr kThere = 0x7000'0000;
  static const auto kArray = reinterpret_cast<CUarray>(0x7100);
  const auto managed = ForOthers<decltype(cuMemAllocManaged)>(
      "cuMemAllocManaged", [](CUdeviceptr* pointer, std::size_t, unsigned) { return *pointer = kThere, CUDA_SUCCESS; });
  const auto freed = ForOthers<decltype(cuMemFree)>("cuMemFree", [](CUdeviceptr) { return CUDA_SUCCESS; });
  const auto array = ForOthers<decltype(cuArrayCreate)>(
      "cuArrayCreate", [](CUarray* made, const CUDA_ARRAY_DESCRIPTOR*) { return *made = kArray, CUDA_SUCCESS; });
  const auto destroy = ForOthers<decltype(cuArrayDestroy)>("cuArrayDestroy", [](CUarray) { return CUDA_SUCCESS; });
  const auto async = OF_DRIVER(cuMemAllocAsync);
  const auto free_async = OF_DRIVER(cuMemFreeAsync);
  const auto create = OF_DRIVER(cuMemCreate);
  const auto release = OF_DRIVER(cuMemRelease);
  CUdeviceptr one = 0, two = 0;
  CUarray made = nullptr;
  CUmemGenericAllocationHandle handle = 0;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  ASSERT_EQ(managed(&one, 4096, 1), CUDA_SUCCESS);
  ASSERT_EQ(array(&made, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(async(&two, kBytes, nullptr), CUDA_SUCCESS);
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
  ASSERT_EQ(create(&handle, kBytes, &properties, 0), CUDA_SUCCESS);
  const std::map<std::string, OutsideShare> all = {{"cuMemAllocManaged", {1, 4096}},
                                                   {"cuArrayCreate", {1, 0}},
                                                   {"cuMemAllocAsync", {1, kBytes}},
                                                   {"cuMemCreate", {1, kBytes}}};
  bool told = false;  // who asks how the process stands waits for nobody
  for (int time = 0; time < 1000 && !told; ++time) told = Left(false) == all;
  EXPECT_TRUE(told);
  EXPECT_EQ(Left(), all);
  EXPECT_NE(session().statistics().MemoryJson().find(R"("cuMemAllocAsync":{"allocations":1,"bytes":2097152})"),
            std::string::npos);
  EXPECT_EQ(freed(one), CUDA_SUCCESS);
  EXPECT_EQ(destroy(made), CUDA_SUCCESS);
  EXPECT_EQ(free_async(two, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(release(handle), CUDA_SUCCESS);
  EXPECT_TRUE(Left().empty());
}

// As PyTorch's expandable segments do.
TEST_F(Program, private_memory_of_cumemcreate_is_paused_where_it_is_mapped) {
  const auto create = OF_DRIVER(cuMemCreate);
  const auto map = OF_DRIVER(cuMemMap);
  const auto unmap = OF_DRIVER(cuMemUnmap);
  const auto release = OF_DRIVER(cuMemRelease);
  const auto open = OF_DRIVER(cuMemSetAccess);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUdeviceptr range = 0;
  CUmemGenericAllocationHandle handles[3] = {};
  ASSERT_EQ(PLAIN(cuMemAddressReserve)(&range, 8 * kBytes, 0, 0, 0), CUDA_SUCCESS);
  const auto add = [&](std::size_t piece) {
    const CUdeviceptr at = range + piece * kBytes;
    ASSERT_EQ(create(&handles[piece], kBytes, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(map(at, kBytes, 0, handles[piece], 0), CUDA_SUCCESS);
    ASSERT_EQ(open(at, kBytes, &access, 1), CUDA_SUCCESS);
    std::memset(At(at), static_cast<int>(piece) + 1, kBytes);
  };
  add(0);
  add(1);
  EXPECT_TRUE(Left().empty());
  const std::size_t before = FreeBytes();
  ASSERT_TRUE(Pause().ok());
  EXPECT_GE(FreeBytes(), before + 2 * kBytes);
  add(2);
  EXPECT_EQ(Left(), (std::map<std::string, OutsideShare>{{"cuMemCreate", {1, kBytes}}})) << "while it is paused";
  ASSERT_TRUE(Resume().ok());
  for (std::size_t piece = 0; piece < 3; ++piece) {
    const auto* const bytes = static_cast<const unsigned char*>(At(range + piece * kBytes));
    EXPECT_TRUE(std::all_of(bytes, bytes + kBytes, [&](unsigned char byte) { return byte == piece + 1; })) << piece;
    EXPECT_EQ(unmap(range + piece * kBytes, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(release(handles[piece]), CUDA_SUCCESS);
  }
  EXPECT_EQ(PLAIN(cuMemAddressFree)(range, 8 * kBytes), CUDA_SUCCESS);
}

TEST_F(Program, threads_allocate_and_free_while_it_is_paused_and_resumed) {
  constexpr int kThreads = 4, kRounds = 60;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      CUcontext context = nullptr;
      PLAIN(cuDevicePrimaryCtxRetain)(&context, 0);
      PLAIN(cuCtxSetCurrent)(context);
      std::minstd_rand random(static_cast<unsigned>(thread) + 1);
      std::vector<CUdeviceptr> held;
      for (int round = 0; round < kRounds; ++round) {
        CUdeviceptr address = 0;
        if (alloc(&address, 1 + random() % (std::size_t{3} << 20)) != CUDA_SUCCESS || address % 512 != 0) ++wrong;
        held.push_back(address);
        if (held.size() < 8) continue;
        std::swap(held[random() % held.size()], held.back());
        if (free(held.back()) != CUDA_SUCCESS) ++wrong;
        held.pop_back();
      }
      for (const CUdeviceptr one : held)
        if (free(one) != CUDA_SUCCESS) ++wrong;
    });
  }
  for (int cycle = 0; cycle < 5; ++cycle) {
    EXPECT_TRUE(Pause().ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_TRUE(Resume().ok());
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace amem::test
