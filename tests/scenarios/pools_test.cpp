// Pools by the C interface: libamem_nccl.so in a process without NCCL, on the stand-in for the driver.
#include <gtest/gtest.h>

#include "tests/scenarios/job.h"

namespace amem {
namespace {

using job::Environment;
using job::Job;

class PoolsOfAProgram : public ::testing::Test {
 protected:
  job::Rank Run(const std::string& what, const Environment& also = {}) {
    Environment environment = job_.environment;
    for (const auto& [name, value] : also) environment[name] = value;
    return job::RunProgram({AMEM_POOLS_PROGRAM, what}, environment, job_.directory());
  }
  void IsFine(const std::string& what, const Environment& also = {}) {
    const job::Rank ran = Run(what, also);
    EXPECT_EQ(ran.status, 0) << ran.err;
    EXPECT_EQ(ran.out, "fine\n") << ran.err;
  }
  Job job_;
};

TEST_F(PoolsOfAProgram, tags_are_paused_and_resumed_without_nccl) { IsFine("cycles"); }
TEST_F(PoolsOfAProgram, without_a_tag_memory_is_of_tag_default_and_nccl_is_a_tag) { IsFine("default-tag"); }
TEST_F(PoolsOfAProgram, wrong_use_is_answered_and_changes_nothing) { IsFine("wrong-use"); }
TEST_F(PoolsOfAProgram, out_of_memory_is_null_and_prints_nothing) {
  const job::Rank ran = Run("out-of-memory", {{"AMEM_SIM_CAPACITY_MIB", "256"}});
  EXPECT_EQ(ran.out, "fine\n") << ran.err;
  EXPECT_EQ(ran.err, "");
}
TEST_F(PoolsOfAProgram, what_is_not_waited_for_is_heard_of_at_the_wait) { IsFine("without-waiting"); }
TEST_F(PoolsOfAProgram, several_tags_in_one_call_are_all_done_or_none) { IsFine("together"); }
TEST_F(PoolsOfAProgram, threads_use_tags_side_by_side) { IsFine("threads"); }
TEST_F(PoolsOfAProgram, a_forked_child_is_inert_and_the_parent_goes_on) { IsFine("forked"); }
TEST_F(PoolsOfAProgram, a_pool_comes_before_cuda_and_cuda_forks_when_it_starts) {
  IsFine("forked-by-cuda", {{"STAND_IN_FAULT", "fork"}});
}
TEST_F(PoolsOfAProgram, many_ranks_share_the_memory_of_their_host) { IsFine("crowded", {{"LOCAL_WORLD_SIZE", "10000000"}}); }
TEST_F(PoolsOfAProgram, a_higher_priority_comes_first) { IsFine("priorities"); }
TEST_F(PoolsOfAProgram, the_innermost_of_nested_pools_is_allocated_from) { IsFine("nested"); }
TEST_F(PoolsOfAProgram, memory_is_paused_while_any_want_names_it) { IsFine("wants"); }
TEST_F(PoolsOfAProgram, no_want_is_left_by_a_call_that_fails_for_lack_of_memory) { IsFine("without-memory"); }
TEST_F(PoolsOfAProgram, memory_does_not_come_back_while_another_thread_wants_it_away) { IsFine("wants-of-threads"); }
TEST_F(PoolsOfAProgram, switched_off_or_without_a_gpu_every_call_does_nothing_and_one_line_says_so) {
  const std::map<std::string, Environment> ways{{"AMEM_ENABLE=0: AMem is switched off", {{"AMEM_ENABLE", "0"}}},
                                                {"there is no GPU in this process", {{"LD_LIBRARY_PATH", "/none"}}}};
  for (const auto& [reason, environment] : ways) {
    if (environment.contains("LD_LIBRARY_PATH") && std::filesystem::exists("/dev/nvidiactl")) continue;  // there is a GPU
    const job::Rank ran = Run("nothing", environment);
    EXPECT_EQ(ran.out, "fine\n") << reason << ran.err;
    const auto said = ran.err.find(reason + "; AMem's calls do nothing");
    EXPECT_NE(said, std::string::npos) << ran.err;
    EXPECT_EQ(ran.err.find("do nothing", said + reason.size() + 20), std::string::npos) << ran.err;
  }
}
TEST_F(PoolsOfAProgram, switched_off_there_is_plain_memory_and_nothing_fails) {
  const job::Rank ran = Run("off", {{"AMEM_ENABLE", "0"}, {"AMEM_SIM_DEVICES", "2"}});
  EXPECT_EQ(ran.out, "fine\n") << ran.err;
  EXPECT_EQ(ran.err.find("amem_alloc"), std::string::npos) << ran.err;
  EXPECT_NE(ran.err.find("it is left alone"), std::string::npos) << "of memory that was freed twice";
}

// What the programs for real GPUs check beside other libraries and contexts, here on the stand-in driver.
class Guards : public PoolsOfAProgram, public ::testing::WithParamInterface<const char*> {
 protected:
  void Passes(const char* check) {
    job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job_.environment["AMEM_SCOPE"] = GetParam();
    const job::Rank ran = job::RunProgram({AMEM_GUARDS, check, "--mib", "8"}, job_.environment, job_.directory());
    EXPECT_EQ(ran.status, 0) << ran.out << ran.err;
  }
};
INSTANTIATE_TEST_SUITE_P(InScope, Guards, ::testing::Values("nccl", "shared", "all"),
                         [](const auto& scope) { return std::string(scope.param); });

TEST_P(Guards, a_pause_works_after_the_context_in_which_an_earlier_one_was_made_is_gone) { Passes("own-context"); }
TEST_P(Guards, memory_that_a_library_has_retained_and_mapped_again_stays) { Passes("retained"); }
TEST_P(Guards, memory_behind_a_dma_buf_of_a_library_stays) { Passes("dma-buf"); }
TEST_P(Guards, memory_that_a_library_retains_or_registers_by_imported_functions_stays_as_long) {
  Passes("imported");
  Passes("imported-later");
}

}  // namespace
}  // namespace amem
