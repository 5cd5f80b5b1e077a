// What follows a pause that has succeeded: its caller is told of the success although there is no memory for that.
#include <new>
#include <string>

#include "ncclpatch/runtime/runtime.h"
#include "tests/ncclpatch/intercept/intercepted.h"
#include "tests/without_memory.h"

namespace amem {
namespace {

class AfterPause : public test::Intercepted {
 protected:
  void TearDown() override {
    Runtime::Get().SetAbove({});
    EXPECT_TRUE(session().Resume().ok());
    Intercepted::TearDown();
  }
};

TEST_F(AfterPause, pools_that_cannot_be_trimmed_fail_nothing) {
  Runtime::Get().SetAbove({.after_pause = [](Session&) { throw std::bad_alloc(); }});
  EXPECT_NO_THROW(EXPECT_TRUE(Runtime::Get().Cycle(session(), CycleKind::kPause).ok()));
  EXPECT_TRUE(session().paused());
}

#ifndef AMEM_SANITIZED
TEST_F(AfterPause, a_remainder_for_which_there_are_no_words_fails_nothing) {
  const std::string tag = "nccl";
  const test::WithoutMemory none;
  EXPECT_NO_THROW(WarnOfRemainder(session(), {}, tag));
}
#endif

}  // namespace
}  // namespace amem
