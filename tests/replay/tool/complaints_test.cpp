// What the tool says on stderr, from whichever thread.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>

#include "replay/tool/command.h"

namespace amem::tool {
namespace {

TEST(Complaints, of_several_threads_are_all_said_each_on_its_line) {
  constexpr int kThreads = 4, kEach = 10'000;
  testing::internal::CaptureStderr();
  {
    std::barrier together(kThreads);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&together] {
        together.arrive_and_wait();
        for (int n = 0; n < kEach; ++n) Complain("it is longer than a string that needs no memory of its own");
      });
    }
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(said, '\n'), kThreads * kEach);
  EXPECT_TRUE(AnyComplaint());
}

}  // namespace
}  // namespace amem::tool
