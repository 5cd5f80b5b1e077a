// How simulated calls fail, in words; and the memfds behind simulated memory, whose names come from other processes.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <limits>
#include <set>
#include <string>
#include <vector>

#include "replay/driver/driver.h"
#include "replay/driver/result_names.h"
#include "replay/driver/simulator/internal.h"
#include "replay/driver/simulator/memfd.h"
#include "replay/driver/simulator/world_table.h"

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
  EXPECT_STREQ(FindCudaError(cuda::kOutOfMemory)->name, "CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_STREQ(FindCudaError(cuda::kOutOfMemory)->description, "out of memory");
  EXPECT_EQ(FindCudaError(12345), nullptr);
  EXPECT_EQ(FindCudaError(-1), nullptr);
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

TEST(Memfd, more_than_the_soft_limit_of_descriptors_is_there_for_them) {
  const pid_t child = ::fork();
  if (child == 0) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 32;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    std::vector<UniqueFd> kept;
    for (int i = 0; i < 64; ++i) {
      auto made = MakeTaggedMemfd(Tag(), 4096);
      if (!made.ok()) ::_exit(i + 1);
      kept.push_back(*std::move(made));
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the first that failed, counted from 1";
}

TEST(Memfd, a_world_finds_its_own_among_the_open_files_of_a_process) {
  MemfdTag ours = Tag(), theirs = Tag();
  ours.key.id = 5;
  theirs.key.id = 6;
  ++theirs.world;
  const auto one = MakeTaggedMemfd(ours, 4096), other = MakeTaggedMemfd(theirs, 4096);
  ASSERT_TRUE(one && other);
  std::set<std::uint64_t> ids;
  EXPECT_TRUE(InsertOpenIds(::getpid(), ours.world, ids));
  EXPECT_EQ(ids, std::set<std::uint64_t>{5});
}

}  // namespace
}  // namespace amem
