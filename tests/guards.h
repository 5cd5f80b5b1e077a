// For tests that loop or kill: what would make them pass without having tested anything fails them.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <iterator>
#include <utility>

namespace amem::test {

// The range, for a loop over it; the test fails where there is nothing to loop over.
template <class Range>
Range Each(Range&& range) {
  EXPECT_FALSE(std::empty(range)) << "the loop over it would test nothing";
  return std::forward<Range>(range);
}

// Kills children of this process, and takes their status. At its end the test fails if fewer than so many were alive until
// then.
class Kills {
 public:
  explicit Kills(int least) : least_(least) {}
  Kills(const Kills&) = delete;
  Kills& operator=(const Kills&) = delete;
  ~Kills() { EXPECT_GE(done_, least_) << "so many were killed; the others had ended by themselves"; }
  // Whether it was the kill that ended it.
  bool operator()(pid_t child) {
    int status = 0;
    const bool killed = ::kill(child, SIGKILL) == 0 && ::waitpid(child, &status, 0) == child && WIFSIGNALED(status) &&
                        WTERMSIG(status) == SIGKILL;
    done_ += killed ? 1 : 0;
    return killed;
  }

 private:
  int least_, done_ = 0;
};

}  // namespace amem::test
