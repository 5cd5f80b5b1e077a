#include "replay/peers/late.h"

#include <gtest/gtest.h>

namespace amem {
namespace {

TEST(WhyLate, says_only_what_explains_it) {
  ProcessSeen seen;
  EXPECT_EQ(WhyLate(seen), "");
  seen.state = "running";
  seen.where = "in Python";
  EXPECT_EQ(WhyLate(seen), "");
  seen.where = "in the CUDA driver (ioctl on /dev/nvidia0)";
  EXPECT_EQ(WhyLate(seen), "is in the CUDA driver (ioctl on /dev/nvidia0)");
  seen.state = "uninterruptible";
  EXPECT_EQ(WhyLate(seen), "cannot be interrupted in the CUDA driver (ioctl on /dev/nvidia0)");
  seen.state = "gone";
  EXPECT_EQ(WhyLate(seen), "has ended");
  seen.state = "stopped";
  EXPECT_EQ(WhyLate(seen), "is stopped (SIGSTOP?); SIGCONT lets it go on");
}

TEST(AnswerOf, is_what_a_member_said_of_itself) {
  EXPECT_EQ(AnswerOf({CycleKind::kPause}, Lifecycle::kRunning), "running, has not called ncclPause");
  EXPECT_EQ(AnswerOf({CycleKind::kResume}, Lifecycle::kPaused), "paused, has not called ncclResume");
  EXPECT_EQ(AnswerOf({CycleKind::kPause}, Lifecycle::kPaused), "paused already");
  EXPECT_EQ(AnswerOf({CycleKind::kResume}, Lifecycle::kResuming), "in the middle of a resume");
  EXPECT_EQ(AnswerOf({CycleKind::kResume}, Lifecycle::kNew), "");
}

}  // namespace
}  // namespace amem
