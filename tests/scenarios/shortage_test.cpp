// Pauses and resumes of a program in which memory is refused, through all of the C interface and on the stand-in for the
// driver: the program goes on, and what it calls next works. At a part of the allocations, by night at more of them.
#include <gtest/gtest.h>

#include "tests/scenarios/job.h"

namespace amem {
namespace {

class Shortage : public ::testing::TestWithParam<int> {
 protected:
  void IsFine(const std::string& call, int in_a_row) {
    job::Job job;
    job.environment["AMEM_TIMEOUT_MS"] = "2000";
    const job::Rank ran = job::RunProgram({AMEM_SHORTAGE_PROGRAM, call, std::to_string(in_a_row), std::to_string(AMEM_EVERY)},
                                          job.environment, job.directory());
    EXPECT_EQ(ran.status, 0) << ran.err;
    EXPECT_EQ(ran.out, "fine\n");
  }
};
INSTANTIATE_TEST_SUITE_P(InARow, Shortage, ::testing::Values(1, 3, 0),
                         [](const auto& one) { return one.param == 0 ? std::string("all") : std::to_string(one.param); });

TEST_P(Shortage, a_pause_of_nccls_memory_ends_nothing) { IsFine("pause", GetParam()); }
// It is patient, and waits for memory as long as there is none.
TEST_P(Shortage, a_resume_of_nccls_memory_ends_nothing) { IsFine("resume", GetParam() == 0 ? 300 : GetParam()); }
TEST_P(Shortage, a_pause_of_two_tags_leaves_them_to_a_plain_resume) { IsFine("tags", GetParam()); }

}  // namespace
}  // namespace amem
