// What the host can still give, from files as Linux has them.
#include "replay/driver/host_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace amem {
namespace {

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
  EXPECT_TRUE(HostHasRoom(~Bytes{0} / 2, root_));
}

TEST_F(HostMemoryTest, the_system_says_what_is_available) {
  Write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n");
  EXPECT_EQ(Available(), 8 * kGiB);
  EXPECT_TRUE(HostHasRoom(7 * kGiB, root_));
  EXPECT_FALSE(HostHasRoom(8 * kGiB, root_)) << "something is left for others";
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

}  // namespace
}  // namespace amem
