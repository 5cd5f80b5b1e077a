// What the tool says on stderr, from whichever thread.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <string>
#include <thread>
#include <vector>

#include "replay/tool/command.h"

namespace amem::tool {
namespace {

TEST(Complaints, of_several_threads_are_all_said_each_on_its_line) {
  constexpr int kThreads = 4, kEach = 500;
  testing::internal::CaptureStderr();
  {
    std::barrier together(kThreads);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&together, i] {
        together.arrive_and_wait();
        for (int n = 0; n < kEach; ++n)
          Complain("thread " + std::to_string(i) + " has complaint " + std::to_string(n) + ", which is said once");
      });
    }
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(said, '\n'), kThreads * kEach);
  EXPECT_TRUE(AnyComplaint());
  testing::internal::CaptureStderr();
  Complain("thread 0 has complaint 0, which is said once");  // as each session of an incomplete pack says
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace amem::tool
