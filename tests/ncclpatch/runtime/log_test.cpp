// What AMem writes to stderr, line by line.
#include "ncclpatch/runtime/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

namespace amem {
namespace {

std::string Written(const std::string& level, int rank) {
  log::Configure(level, rank);
  testing::internal::CaptureStderr();
  log::Write(log::Level::kDebug, "a");
  log::Info("b {} %s");
  log::Warn("c");
  log::Error("d");
  std::string written = testing::internal::GetCapturedStderr();
  log::Configure("warn", -1);
  return written;
}

TEST(Log, a_line_has_process_rank_and_level) {
  const std::string pid = std::to_string(getpid());
  EXPECT_EQ(Written("warn", -1), "[amem " + pid + "] warning c\n[amem " + pid + "] error d\n");
  const std::string who = "[amem " + pid + " rank 3] ";
  EXPECT_EQ(Written("info", 3), who + "info b {} %s\n" + who + "warning c\n" + who + "error d\n");
}

TEST(Log, what_is_below_the_level_is_left_out) {
  EXPECT_EQ(Written("off", 0), "");
  EXPECT_EQ(Written("error", 0), "[amem " + std::to_string(getpid()) + " rank 0] error d\n");
  EXPECT_NE(Written("trace", 0).find("debug a\n"), std::string::npos);
}

TEST(Log, repeated_errors_are_counted) {
  log::Limited often;
  testing::internal::CaptureStderr();
  for (int i = 0; i < 100; ++i) often.Error("again");
  const std::string written = testing::internal::GetCapturedStderr();
  EXPECT_EQ(written.find("again"), written.rfind("again"));
}

}  // namespace
}  // namespace amem
