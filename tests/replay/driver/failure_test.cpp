// How simulated calls fail, in words; and the memfds behind simulated memory, whose names come from other processes.
#include "replay/driver/simulator/failure.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <limits>
#include <string>

#include "replay/driver/driver.h"
#include "replay/driver/result_names.h"
#include "replay/driver/simulator/memfd.h"

namespace amem {
namespace {

TEST(SimulatedFailure, has_the_call_the_drivers_words_and_the_broken_rule) {
  const Status failure = SimulatedFailure(cuda::kInvalidValue, "cuMemMap 0x1000, 4096 bytes", "this range was not reserved");
  EXPECT_EQ(failure.message(),
            "cuMemMap 0x1000, 4096 bytes: CUDA_ERROR_INVALID_VALUE (1, invalid argument) from the simulator: this range was "
            "not reserved");
  EXPECT_EQ(failure.driver_result(), cuda::kInvalidValue);
  EXPECT_EQ(SimulatedFailure(12345, "cuMemMap", "").message(), "cuMemMap: CUresult 12345 from the simulator");
}

TEST(SimulatedFailure, does_not_describe_a_call_that_succeeds) {
  int described = 0;
  const auto fail = Failing([&] {
    ++described;
    return std::string("cuMemRelease");
  });
  EXPECT_EQ(described, 0);
  EXPECT_EQ(fail(cuda::kUnknown, "why").driver_result(), cuda::kUnknown);
  EXPECT_EQ(described, 1);
}

TEST(ResultNames, tell_the_failures_apart_that_amem_treats_differently) {
  EXPECT_EQ(CodeOfResult(cuda::kOutOfMemory), Code::kOutOfMemory);
  EXPECT_EQ(CodeOfResult(cuda::kCaptureUnsupported), Code::kRefused);
  EXPECT_EQ(CodeOfResult(cuda::kInvalidValue), Code::kDriver);
  EXPECT_EQ(CodeOfResult(12345), Code::kDriver);
  EXPECT_EQ(CudaErrorName(cuda::kOutOfMemory), "CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_EQ(CudaErrorDescription(cuda::kOutOfMemory), "out of memory");
  EXPECT_EQ(CudaErrorName(12345), "");
  EXPECT_EQ(CudaErrorDescription(-1), "");
}

MemfdTag Tag() {
  MemfdTag tag{0x123456789abcdef0, {77, 0xfedcba9876543210}, {}};
  tag.properties.type = 1;
  tag.properties.handle_types = 8;
  tag.properties.location = {LocationType::kHostNuma, -1};
  tag.properties.compression = 0xff;
  tag.properties.gpu_direct_rdma = 1;
  tag.properties.usage = 0xffff;
  tag.properties.reserved = std::numeric_limits<std::uint32_t>::max();
  return tag;
}

std::string LinkOf(int fd) {
  std::string link(400, '\0');
  const ssize_t length = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), link.data(), link.size());
  link.resize(length < 0 ? 0 : static_cast<std::size_t>(length));
  return link;
}

TEST(Memfd, its_name_carries_the_whole_tag) {
  const auto made = MakeTaggedMemfd(Tag(), 8192);
  ASSERT_TRUE(made) << made.status().message();
  const auto read = ReadTaggedMemfd(made->get());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->tag, Tag());
  EXPECT_EQ(read->bytes, Bytes{8192});
}

TEST(Memfd, a_name_that_was_cut_or_changed_is_no_tag) {
  const auto made = MakeTaggedMemfd(Tag(), 8192);
  ASSERT_TRUE(made);
  const std::string link = LinkOf(made->get()), suffix = " (deleted)";
  ASSERT_TRUE(ParseMemfdLink(link));
  ASSERT_TRUE(link.ends_with(suffix));
  const std::string name = link.substr(0, link.size() - suffix.size());
  ASSERT_TRUE(ParseMemfdLink(name));
  const std::size_t last_field = name.rfind(':') + 1;
  for (std::size_t n = 0; n < last_field; ++n) EXPECT_FALSE(ParseMemfdLink(name.substr(0, n))) << n;
  EXPECT_FALSE(ParseMemfdLink(name + ":1"));
  EXPECT_FALSE(ParseMemfdLink(name + "g"));
  EXPECT_FALSE(ParseMemfdLink("x" + name));
  std::string overlong = name;
  overlong.insert(overlong.find(':', overlong.find("sim:")) + 1, "11111111111111111");
  EXPECT_FALSE(ParseMemfdLink(overlong)) << "a number of more than 64 bits";
}

TEST(Memfd, one_of_that_name_that_could_shrink_under_a_mapping_is_not_ours) {
  const auto made = MakeTaggedMemfd(Tag(), 8192);
  ASSERT_TRUE(made);
  EXPECT_NE(::ftruncate(made->get(), 4096), 0) << "it is sealed";
  const std::string link = LinkOf(made->get());
  const std::string name = link.substr(7, link.size() - 7 - 10);  // without "/memfd:" and " (deleted)"
  const UniqueFd forged(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(forged);
  ASSERT_TRUE(ParseMemfdLink(LinkOf(forged.get()))) << "the name is the same";
  EXPECT_FALSE(ReadTaggedMemfd(forged.get()));
}

}  // namespace
}  // namespace amem
