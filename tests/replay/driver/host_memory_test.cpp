// What the host can still give, from files as Linux has them.
#include "replay/driver/host_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>

#include "statemachine/event.h"
#include "tests/journal/base/no_descriptors.h"
#include "tests/journal/small_disk.h"

namespace amem {
namespace {

using test::Frozen;
using test::MountDisk;
using test::NoDescriptors;
constexpr Bytes kGiB = Bytes{1} << 30;

class HostMemoryTest : public ::testing::Test {
 protected:
  HostMemoryTest() : root_(std::filesystem::temp_directory_path() / ("amem-host-memory-" + std::to_string(getpid()))) {}
  ~HostMemoryTest() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }
  [[nodiscard]] std::optional<Bytes> Available() const {
    const auto room = HostMemoryAvailable(root_);
    return room ? std::optional(room->bytes) : std::nullopt;
  }
  const std::filesystem::path root_;
};

TEST_F(HostMemoryTest, without_any_file_nothing_is_known_and_nothing_refused) {
  EXPECT_FALSE(HostMemoryAvailable(root_));
  EXPECT_TRUE(HostClaims({}, [&] { return HostMemoryAvailable(root_); }).Claim(~Bytes{0} / 2).ok());
}

TEST_F(HostMemoryTest, the_system_says_what_is_available) {
  Write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n");
  EXPECT_EQ(Available(), 8 * kGiB);
  EXPECT_TRUE(HostClaims({}, [&] { return HostMemoryAvailable(root_); }).Claim(7 * kGiB).ok());
  EXPECT_FALSE(HostClaims({}, [&] { return HostMemoryAvailable(root_); }).Claim(8 * kGiB).ok())
      << "something is left for others";
}

TEST_F(HostMemoryTest, a_control_group_and_those_around_it_leave_less) {
  Write("proc/meminfo", "MemAvailable:    8388608 kB\n");
  Write("proc/self/cgroup", "0::/job/step\n");
  Write("sys/fs/cgroup/job/step/memory.max", "max\n");
  Write("sys/fs/cgroup/job/memory.max", std::to_string(6 * kGiB));
  Write("sys/fs/cgroup/job/memory.current", std::to_string(5 * kGiB));
  EXPECT_EQ(Available(), kGiB);
  Write("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file " + std::to_string(2 * kGiB) + "\n");
  EXPECT_EQ(Available(), 3 * kGiB) << "file contents are given back at need";
}

// A container that has read its data set: nearly all that it uses is contents of files, and the kernel's caches of their names.
TEST_F(HostMemoryTest, a_warm_page_cache_is_not_memory_in_use) {
  Write("proc/meminfo", "MemAvailable:    83886080 kB\n");
  Write("proc/self/cgroup", "0::/job\n");
  Write("sys/fs/cgroup/job/memory.max", std::to_string(16 * kGiB));
  Write("sys/fs/cgroup/job/memory.current", std::to_string(16 * kGiB));
  Write("sys/fs/cgroup/job/memory.stat",
        "anon " + std::to_string(2 * kGiB) + "\nfile " + std::to_string(12 * kGiB) + "\nslab " + std::to_string(2 * kGiB) +
            "\ninactive_file " + std::to_string(3 * kGiB) + "\nactive_file " + std::to_string(8 * kGiB) +
            "\nslab_reclaimable " + std::to_string(kGiB) + "\nworkingset_activate_file " + std::to_string(9 * kGiB) + "\n");
  EXPECT_EQ(Available(), 12 * kGiB) << "shared memory is among the files and stays, as the other slabs do";
}

TEST_F(HostMemoryTest, a_group_that_is_slowed_down_from_some_use_on_has_no_more_than_that) {
  Write("proc/meminfo", "MemAvailable:    8388608 kB\n");
  Write("proc/self/cgroup", "0::/job\n");
  Write("sys/fs/cgroup/job/memory.max", std::to_string(6 * kGiB));
  Write("sys/fs/cgroup/job/memory.high", std::to_string(4 * kGiB));
  Write("sys/fs/cgroup/job/memory.current", std::to_string(kGiB));
  EXPECT_EQ(Available(), 3 * kGiB);
  EXPECT_NE(HostMemoryAvailable(root_)->limited_by.find("memory.high"), std::string::npos);
  Write("sys/fs/cgroup/job/memory.high", "max\n");
  EXPECT_EQ(Available(), 5 * kGiB);
}

TEST_F(HostMemoryTest, a_warm_page_cache_is_not_memory_in_use_in_the_first_version_and_in_nested_groups) {
  Write("proc/meminfo", "MemAvailable:    8388608 kB\n");
  Write("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", std::to_string(3 * kGiB));
  Write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", std::to_string(4 * kGiB));
  Write("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", std::to_string(4 * kGiB));
  Write("sys/fs/cgroup/memory/docker/memory.stat",
        "cache 7\nactive_file 1\nhierarchical_memory_limit " + std::to_string(4 * kGiB) + "\ntotal_cache 7\n" +
            "total_inactive_file " + std::to_string(kGiB) + "\ntotal_active_file " + std::to_string(2 * kGiB) + "\n");
  EXPECT_EQ(Available(), 3 * kGiB);
  EXPECT_TRUE(HostMemoryAvailable(root_)->limited_by.ends_with("/sys/fs/cgroup/memory/docker"));
}

TEST_F(HostMemoryTest, control_groups_of_the_first_version_count_as_well) {
  Write("proc/meminfo", "MemAvailable:    8388608 kB\n");
  Write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(2 * kGiB));
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(kGiB));
  EXPECT_EQ(Available(), kGiB);
}

TEST_F(HostMemoryTest, of_another_process_and_with_what_sets_the_limit) {
  Write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable:   800 kB\n");
  Write("proc/self/cgroup", "0::/other\n");
  Write("proc/42/cgroup", "0::/job/rank\n");
  EXPECT_EQ(HostMemoryAvailable(root_, "42")->limited_by, "what the host has available (MemAvailable)");
  Write("sys/fs/cgroup/job/memory.max", "600000\n");
  Write("sys/fs/cgroup/job/memory.current", "300000\n");
  const auto room = HostMemoryAvailable(root_, "42");
  EXPECT_EQ(room->bytes, 300'000U);
  EXPECT_TRUE(room->limited_by.ends_with("/sys/fs/cgroup/job")) << room->limited_by;
}

// ---- claims ----------------------------------------------------------------------------------------------------------------

class HostClaimsTest : public HostMemoryTest {
 protected:
  HostClaimsTest() { std::filesystem::create_directories(root_); }
  [[nodiscard]] HostClaims::Available Has(Bytes bytes) const {
    return [bytes] { return HostRoom{bytes, "a test"}; };
  }
  const std::filesystem::path file_ = root_ / "host-memory";
};

TEST_F(HostClaimsTest, of_all_processes_add_up_until_they_are_settled) {
  HostClaims one(file_, Has(3 * kGiB)), two(file_, Has(3 * kGiB));
  ASSERT_TRUE(one.Claim(2 * kGiB).ok());
  const Status refused = two.Claim(kGiB);
  EXPECT_EQ(refused.code(), Code::kOutOfMemory);
  for (const std::string& text : {FormatBytes(3 * kGiB) + " are left by a test", "other processes " + FormatBytes(2 * kGiB)})
    EXPECT_NE(refused.message().find(text), std::string::npos) << refused.message();
  EXPECT_EQ(two.Claim(kGiB).message(), refused.message()) << "it has claimed nothing";
  EXPECT_TRUE(two.Claim(kGiB / 2).ok()) << "what still fits";
  EXPECT_FALSE(one.Claim(kGiB / 2).ok());
  one.EndClaim(kGiB);
  EXPECT_TRUE(two.Claim(kGiB).ok());
}

TEST_F(HostClaimsTest, end_with_their_session) {
  HostClaims two(file_, Has(3 * kGiB));
  {
    HostClaims one(file_, Has(3 * kGiB));
    ASSERT_TRUE(one.Claim(2 * kGiB).ok());
    EXPECT_FALSE(two.Claim(kGiB).ok());
  }
  EXPECT_TRUE(two.Claim(kGiB).ok());
}

TEST_F(HostClaimsTest, of_a_process_that_was_killed_count_no_more_and_its_place_is_taken) {
  for (int round = 0; round < 3; ++round) {
    int claimed[2];
    ASSERT_EQ(pipe(claimed), 0);
    const pid_t child = fork();
    if (child == 0) {
      HostClaims one(file_, Has(3 * kGiB));
      const bool done = one.Claim(2 * kGiB).ok();
      static_cast<void>(!write(claimed[1], &done, 1));
      pause();
    }
    bool done = false;
    ASSERT_EQ(read(claimed[0], &done, 1), 1);
    EXPECT_TRUE(done);
    HostClaims two(file_, Has(3 * kGiB));
    EXPECT_FALSE(two.Claim(kGiB).ok()) << "it lives";
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    EXPECT_TRUE(two.Claim(kGiB).ok());
    for (const int end : claimed) close(end);
  }
  EXPECT_LE(std::filesystem::file_size(file_), 128U);
}

TEST_F(HostClaimsTest, stand_while_it_cannot_be_seen_whether_their_process_lives) {
  int claimed[2];
  ASSERT_EQ(pipe(claimed), 0);
  const pid_t child = fork();
  if (child == 0) {
    HostClaims one(file_, Has(3 * kGiB));
    const bool done = one.Claim(2 * kGiB).ok();
    static_cast<void>(!write(claimed[1], &done, 1));
    pause();
  }
  bool done = false;
  ASSERT_EQ(read(claimed[0], &done, 1), 1);
  HostClaims two(file_, Has(3 * kGiB)), late(file_, Has(3 * kGiB));
  ASSERT_TRUE(two.Claim(kGiB / 4).ok()) << "it has the file open";
  {
    const NoDescriptors none;
    EXPECT_EQ(two.Claim(kGiB).code(), Code::kOutOfMemory);
    const Status unread = late.Claim(kGiB / 4);
    EXPECT_EQ(unread.code(), Code::kNoDescriptors);
    EXPECT_NE(unread.message().find("ulimit -n"), std::string::npos) << unread.message();
  }
  EXPECT_EQ(late.Claim(kGiB).code(), Code::kOutOfMemory) << "the place of the first one is its own still";
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  {
    const NoDescriptors none;
    EXPECT_TRUE(two.Claim(kGiB).ok()) << "that no process has its number is known without any";
  }
  for (const int end : claimed) close(end);
}

// As of one that is stopped in the middle of a claim.
TEST_F(HostClaimsTest, do_not_wait_for_ever_for_a_lock_that_another_process_holds) {
  HostClaims one(file_, Has(3 * kGiB)), two(file_, Has(3 * kGiB));
  ASSERT_TRUE(one.Claim(2 * kGiB).ok());
  const int held = open(file_.c_str(), O_RDWR);
  ASSERT_EQ(flock(held, LOCK_EX), 0);
  const auto began = std::chrono::steady_clock::now();
  EXPECT_FALSE(two.Claim(kGiB).ok()) << "what the file says holds";
  EXPECT_TRUE(two.Claim(kGiB / 2).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
  close(held);
}

// A pause asks while it holds the supply of pinned memory.
TEST_F(HostClaimsTest, do_not_wait_for_a_file_system_that_stands_still) {
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    const auto disk = root_ / "disk";
    std::filesystem::create_directories(disk);
    if (!MountDisk(disk, "mkfs.ext4 -q", "8M")) return "cannot";
    std::string wrong;
    {
      HostClaims one(disk / "claims", Has(3 * kGiB)), two(disk / "claims", Has(3 * kGiB));
      if (!one.Claim(2 * kGiB).ok() || !two.Claim(kGiB / 4).ok()) return "they claim nothing before";
      const Frozen frozen(disk);
      if (!frozen.is()) return "cannot";
      const auto began = std::chrono::steady_clock::now();
      if (two.Claim(kGiB).code() != Code::kOutOfMemory) wrong += "what others had claimed was forgotten; ";
      for (int i = 0; i < 40; ++i) two.EndClaim(kGiB / 256);
      if (!two.Claim(kGiB / 4).ok()) wrong += "a claim that fits was refused; ";
      if (std::chrono::steady_clock::now() - began > std::chrono::seconds(5)) wrong += "they waited; ";
      frozen.Thaw();
      // What was claimed meanwhile is written now: 2 GiB + 352 MiB of 2.75 GiB.
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (one.Claim(kGiB / 2).ok() && std::chrono::steady_clock::now() < until) one.EndClaim(kGiB / 2);
      if (one.Claim(kGiB / 2).ok()) wrong += "what was claimed meanwhile is not in the file; ";
    }
    return wrong;
  });
}

TEST_F(HostClaimsTest, work_alone_where_the_file_cannot_be_and_anew_where_it_was_removed) {
  HostClaims nowhere(root_ / "not/there", Has(3 * kGiB)), one(file_, Has(3 * kGiB)), two(file_, Has(3 * kGiB));
  EXPECT_TRUE(nowhere.Claim(2 * kGiB).ok());
  EXPECT_FALSE(nowhere.Claim(kGiB).ok());
  ASSERT_TRUE(one.Claim(kGiB).ok());
  std::filesystem::remove(file_);
  ASSERT_TRUE(one.Claim(kGiB).ok());
  EXPECT_FALSE(two.Claim(kGiB).ok());
}

TEST_F(HostClaimsTest, survive_nonsense_in_the_file) {
  std::ofstream(file_) << std::string(100'001, '\xff');
  HostClaims one(file_, Has(3 * kGiB)), two(file_, Has(3 * kGiB));
  ASSERT_TRUE(one.Claim(2 * kGiB).ok());
  EXPECT_FALSE(two.Claim(kGiB).ok());
}

}  // namespace
}  // namespace amem
