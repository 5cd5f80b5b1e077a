// NCCL's own suspend, served by AMem: programs that call ncclCommSuspend, ncclCommResume and ncclCommMemStats, and not AMem.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "statemachine/types.h"
#include "tests/scenarios/job.h"

namespace amem {
namespace {

using job::Job;
using job::Rank;
using Steps = std::vector<std::string>;

std::string Everything(const std::vector<Rank>& ranks) {
  std::string text;
  for (const Rank& rank : ranks)
    text += "-- status " + std::to_string(rank.status) + "\n" + rank.out + "-- stderr\n" + rank.err + "\n";
  return text;
}

// As ncclCommMemStats numbers them.
std::vector<std::uint64_t> FiguresOf(const Rank& rank, int nth) {
  std::istringstream said(rank.Said("figures", nth));
  std::vector<std::uint64_t> all;
  for (std::uint64_t value = 0; said >> value;) all.push_back(value);
  return all.size() == 4 ? all : std::vector<std::uint64_t>(4);
}

class ServedSuspends : public ::testing::Test {
 protected:
  ServedSuspends() { job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE; }
  std::vector<Rank> Run(const Steps& steps, int ranks = 2) {
    Steps all = {"cuda", "load"};
    all.insert(all.end(), steps.begin(), steps.end());
    std::vector<Rank> done = job_.Run(ranks, all);
    for (const Rank& rank : done) EXPECT_EQ(rank.status, steps.back() == "die" ? 256 + 9 : 0) << Everything(done);
    return done;
  }
  Job job_;
};

TEST_F(ServedSuspends, the_process_pauses_with_the_last_communicator_and_resumes_with_the_first) {
  const auto ranks =
      Run({"init", "init", "reduce", "bytes", "suspend first", "bytes", "reduce", "suspend last", "barrier", "bytes", "barrier",
           "resume last", "barrier", "bytes", "reduce", "resume first", "barrier", "reduce", "bytes"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("suspend first"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes", 1), rank.Said("bytes", 0)) << "released with the others', and not before";
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << "the other one goes on";
    EXPECT_EQ(rank.Said("suspend last"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes", 2), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("resume last"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes", 3), rank.Said("bytes", 0));
    EXPECT_EQ(rank.Said("reduce", 2), rank.Said("reduce", 0));
    EXPECT_EQ(rank.Said("resume first"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 3), rank.Said("reduce", 0));
  }
}

TEST_F(ServedSuspends, many_cycles_give_the_same_results_and_hold_the_same_memory) {
  Steps steps = {"init", "init", "reduce", "barrier", "bytes"};
  for (int cycle = 0; cycle < 20; ++cycle)
    for (const char* step : {"suspend first", "suspend last", "resume first", "resume last", "reduce"})
      steps.emplace_back(step);
  steps.insert(steps.end(), {"barrier", "bytes"});
  const auto ranks = Run(steps);
  for (const Rank& rank : ranks) {
    for (int cycle = 0; cycle < 20; ++cycle) {
      EXPECT_EQ(rank.Said("suspend last", cycle), "0") << Everything(ranks);
      EXPECT_EQ(rank.Said("resume first", cycle), "0");
      EXPECT_EQ(rank.Said("reduce", cycle + 1), rank.Said("reduce", 0));
    }
    EXPECT_EQ(rank.Said("bytes", 1), rank.Said("bytes", 0));
  }
}

TEST_F(ServedSuspends, wrong_use_gets_NCCLs_answers) {
  const auto ranks = Run({"init", "init", "suspend null", "resume null", "resume first", "suspend first", "suspend first",
                          "barrier", "suspend last", "reduce", "barrier", "resume last", "resume last", "reduce", "barrier"});
  for (const Rank& rank : ranks) {
    EXPECT_TRUE(rank.Said("suspend null").starts_with("4 ")) << Everything(ranks);
    EXPECT_TRUE(rank.Said("resume null").starts_with("4 "));
    EXPECT_TRUE(rank.Said("resume first").starts_with("5 ncclCommResume: communicator 1 is not suspended"))
        << Everything(ranks);
    EXPECT_EQ(rank.Said("suspend first", 0), "0");
    EXPECT_TRUE(rank.Said("suspend first", 1).starts_with("5 ncclCommSuspend: communicator 1 is suspended already"));
    EXPECT_EQ(rank.Said("reduce", 0), "failed 5") << "with one that is suspended";
    EXPECT_NE(rank.err.find("ncclAllReduce: communicator 2 is suspended; call ncclCommResume first"), std::string::npos)
        << rank.err;
    EXPECT_EQ(rank.Said("resume last", 0), "0");
    EXPECT_TRUE(rank.Said("resume last", 1).starts_with("5 "));
    EXPECT_TRUE(rank.Said("reduce", 1).starts_with("sum ")) << Everything(ranks);
  }
}

TEST_F(ServedSuspends, figures_are_NCCLs_four) {
  const auto ranks =
      Run({"init", "init", "figures", "suspend first", "suspend last", "figures", "barrier", "resume last", "figures"});
  for (const Rank& rank : ranks) {
    const auto before = FiguresOf(rank, 0), suspended = FiguresOf(rank, 1), after = FiguresOf(rank, 2);
    EXPECT_GT(before[0], 10U << 20) << Everything(ranks);
    EXPECT_EQ(before[1], 0U);
    EXPECT_EQ(before[3], before[0] + before[2]);
    EXPECT_EQ(suspended[1], 1U);
    EXPECT_EQ(suspended[3], before[3]);
    EXPECT_EQ(after, before);
  }
}

TEST_F(ServedSuspends, in_a_group_the_process_pauses_and_resumes_at_its_end) {
  const auto ranks =
      Run({"init", "init", "init", "reduce", "barrier", "suspend all", "bytes", "barrier", "resume all", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("suspend all"), "0, 0, 0, 0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes"), "0");
    EXPECT_EQ(rank.Said("resume all"), "0, 0, 0, 0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
  }
}

TEST_F(ServedSuspends, a_refused_group_leaves_the_callers_context) {
  const auto ranks = Run({"init", "init", "reduce", "barrier", "resume all", "suspend all", "suspend all", "bytes", "barrier",
                          "resume all", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_TRUE(rank.Said("resume all", 0).starts_with("5 ncclCommResume: ")) << Everything(ranks);
    EXPECT_EQ(rank.Said("suspend all", 0), "0, 0, 0") << Everything(ranks);
    EXPECT_TRUE(rank.Said("suspend all", 1).starts_with("5 ncclCommSuspend: ")) << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes"), "0");
    EXPECT_EQ(rank.Said("resume all", 1), "0, 0, 0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
  }
}

// NCCL launches what a group asked for after its resumes and before its suspends, so that neither loses a collective.
TEST_F(ServedSuspends, a_group_resumes_before_its_collectives_and_suspends_after_them) {
  const auto ranks =
      Run({"init", "init", "reduce", "barrier", "reduce and suspend all", "bytes", "barrier", "resume all and reduce", "reduce",
           "barrier", "reduce and suspend all", "bytes", "barrier", "resume all and reduce", "barrier"});
  for (const Rank& rank : ranks) {
    const std::string sum = rank.Said("reduce", 0);
    EXPECT_TRUE(sum.starts_with("sum ")) << Everything(ranks);
    for (int cycle = 0; cycle < 2; ++cycle) {
      EXPECT_EQ(rank.Said("reduce and suspend all", cycle), "0 0 0 0 " + sum) << Everything(ranks);
      EXPECT_EQ(rank.Said("bytes", cycle), "0");
      EXPECT_EQ(rank.Said("resume all and reduce", cycle), "0 0 0 0 " + sum) << Everything(ranks);
    }
    EXPECT_EQ(rank.Said("reduce", 1), sum);
  }
}

TEST_F(ServedSuspends, a_suspended_communicator_can_be_destroyed_and_another_made) {
  const auto ranks = Run({"init", "reduce", "suspend last", "barrier", "destroy", "bytes", "barrier", "init", "reduce",
                          "barrier", "suspend last", "barrier", "bytes", "init", "reduce", "barrier", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("destroy"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes", 0), "0");
    EXPECT_EQ(rank.Said("init", 1), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
    EXPECT_EQ(rank.Said("bytes", 1), "0");
    EXPECT_EQ(rank.Said("init", 2), "0") << "making one while all others are suspended brings the memory back\n"
                                         << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 2), rank.Said("reduce", 0));
  }
}

TEST_F(ServedSuspends, the_process_pauses_when_the_last_that_was_not_suspended_is_destroyed) {
  const auto ranks = Run({"init", "init", "reduce", "barrier", "suspend first", "destroy", "barrier", "bytes", "barrier",
                          "resume first", "reduce", "barrier"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("destroy"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes"), "0") << "nothing holds the suspended one's memory back\n" << Everything(ranks);
    EXPECT_EQ(rank.Said("resume first"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
  }
}

TEST_F(ServedSuspends, one_that_ends_on_one_rank_only_ends_and_all_run_on) {
  job_.environment["AMEM_TIMEOUT_MS"] = "1500";
  const auto ranks = Run({"init", "init", "reduce", "barrier", "suspend first", "barrier", "0:destroy", "barrier", "1:destroy",
                          "resume first", "reduce", "barrier"});
  EXPECT_EQ(ranks[0].Said("destroy"), "0") << Everything(ranks);
  for (const Rank& rank : ranks) EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << Everything(ranks);
}

TEST_F(ServedSuspends, ranks_of_a_part_make_a_communicator_while_the_world_stays_suspended) {
  for (const char* cumem : {"1", "0"}) {
    job_.environment["NCCL_CUMEM_ENABLE"] = cumem;
    const auto ranks = Run({"init",    "reduce",         "suspend last",   "barrier",       "init part",     "reduce",
                            "barrier", "0:suspend last", "1:suspend last", "0:resume last", "1:resume last", "reduce",
                            "barrier", "resume first",   "0:reduce",       "1:reduce",      "0:destroy",     "1:destroy",
                            "reduce",  "barrier",        "suspend last",   "barrier",       "resume last",   "reduce"},
                           3);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const Rank& one = ranks[rank];
      const bool of_part = rank < 2;
      EXPECT_EQ(one.Said("init part"), "0") << Everything(ranks);
      EXPECT_EQ(one.Said("reduce", 1).starts_with("sum "), of_part) << "the world stays suspended\n" << Everything(ranks);
      EXPECT_EQ(one.Said("reduce", 2), one.Said("reduce", 1)) << Everything(ranks);
      EXPECT_EQ(one.Said("resume first"), "0") << Everything(ranks);
      if (of_part) {
        EXPECT_EQ(one.Said("reduce", 3), one.Said("reduce", 1)) << Everything(ranks);
      }
      EXPECT_EQ(one.Said("reduce", of_part ? 4 : 3), one.Said("reduce", 0)) << Everything(ranks);
      EXPECT_EQ(one.Said("reduce", of_part ? 5 : 4), one.Said("reduce", 0)) << Everything(ranks);
    }
  }
}

// NCCL makes it all the same, with memory of its own.
TEST_F(ServedSuspends, one_is_made_beside_suspended_ones_that_cannot_be_resumed) {
  const auto ranks = Run({"init", "reduce", "barrier", "suspend last", "barrier", "1:at=Create,1,fail=2", "init", "barrier",
                          "1:at=nothing,1,fail=1", "reduce", "resume first", "barrier", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("init", 1), "0") << Everything(ranks);
    EXPECT_NE(rank.err.find("is made while other communicators of the process stay suspended"), std::string::npos)
        << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << Everything(ranks);
    EXPECT_EQ(rank.Said("resume first"), "0") << Everything(ranks);
  }
}

TEST_F(ServedSuspends, making_one_does_not_undo_a_pause_that_the_program_asked_for) {
  const auto ranks = Run({"init", "reduce", "suspend last", "barrier", "resume", "barrier", "pause", "barrier", "init",
                          "barrier", "bytes", "barrier"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("pause"), "0") << Everything(ranks);
    EXPECT_NE(rank.Said("init", 1), "0") << "it is refused, as after any pause\n" << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes"), "0") << Everything(ranks);
  }
}

TEST_F(ServedSuspends, a_rank_that_does_not_come_fails_the_others_and_all_run_on) {
  job_.environment["AMEM_TIMEOUT_MS"] = "1500";
  const auto ranks = Run({"init", "init", "reduce", "suspend first", "barrier", "0:suspend last", "barrier", "reduce",
                          "barrier", "suspend last", "barrier", "bytes", "barrier", "resume last", "reduce"});
  EXPECT_TRUE(ranks[0].Said("suspend last", 0).starts_with("6 ")) << Everything(ranks);
  EXPECT_NE(ranks[0].Said("suspend last", 0).find("rank 1"), std::string::npos) << "it names who did not come";
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << "the communicator is as it was\n" << Everything(ranks);
    EXPECT_EQ(rank.Said("suspend last", rank.Said("suspend last", 1) == "(not run)" ? 0 : 1), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes"), "0");
    EXPECT_EQ(rank.Said("reduce", 2), rank.Said("reduce", 0));
  }
}

TEST_F(ServedSuspends, a_thread_waits_for_another_ones_resume_until_its_own_deadline) {
  job_.environment["AMEM_TIMEOUT_MS"] = "6000";
  const auto ranks = Run({"init", "init", "reduce", "suspend first", "suspend last", "barrier", "0:resume last beside",
                          "0:resume first", "barrier", "1:resume last", "0:join", "resume first", "reduce"});
  EXPECT_EQ(ranks[0].Said("resume last beside"), "waits") << "for the other rank, as long as that likes\n" << Everything(ranks);
  EXPECT_TRUE(ranks[0].Said("resume first", 0).starts_with("6 ")) << Everything(ranks);
  EXPECT_NE(ranks[0].Said("resume first", 0).find("another thread of this process"), std::string::npos) << Everything(ranks);
  EXPECT_EQ(ranks[0].Said("join"), "0") << Everything(ranks);
  EXPECT_EQ(ranks[0].Said("resume first", 1), "0") << "its mark was undone\n" << Everything(ranks);
  for (const Rank& rank : ranks) EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << Everything(ranks);
}

TEST_F(ServedSuspends, a_suspend_that_fails_on_one_rank_leaves_all_as_they_were_and_a_second_try_works) {
  for (const char* fault : {"AllocatePinned|HostRegister,1,fail-all=2", "Unmap,1,fail=1", "Release,1,fail=1"}) {
    SCOPED_TRACE(fault);
    Job job;
    job.environment = job_.environment;
    job.environment["AMEM_PINNED_MB"] = "0";  // nothing is pinned before the suspend
    const auto ranks = job.Run(2, {"cuda",         "load",
                                   "init",         "init",
                                   "reduce",       "barrier",
                                   "bytes",        "suspend first",
                                   "barrier",      std::string("1:at=") + fault,
                                   "suspend last", "barrier",
                                   "bytes",        "reduce",
                                   "barrier",      "1:at=nothing,1,fail=1",
                                   "suspend last", "barrier",
                                   "bytes",        "barrier",
                                   "resume last",  "reduce"});
    for (const Rank& rank : ranks) {
      EXPECT_NE(rank.Said("suspend last", 0), "0") << "success would be no proof\n" << Everything(ranks);
      EXPECT_EQ(rank.Said("bytes", 1), rank.Said("bytes", 0)) << "no half of it stays paused\n" << Everything(ranks);
      EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << Everything(ranks);
      EXPECT_EQ(rank.Said("suspend last", 1), "0") << Everything(ranks);
      EXPECT_EQ(rank.Said("bytes", 2), "0") << Everything(ranks);
      EXPECT_EQ(rank.Said("reduce", 2), rank.Said("reduce", 0)) << Everything(ranks);
    }
  }
}

TEST_F(ServedSuspends, a_resume_that_fails_on_one_rank_leaves_all_suspended_and_a_second_try_works) {
  const auto ranks =
      Run({"init", "init", "reduce", "barrier", "suspend first", "suspend last", "barrier", "1:at=Create,1,fail=2",
           "resume last", "barrier", "bytes", "barrier", "1:at=nothing,1,fail=1", "resume last", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_NE(rank.Said("resume last", 0), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("resume last", 1), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << Everything(ranks);
  }
}

// NCCL's part of the group cannot be launched then; the answer is why the resume failed, and not that a launch was refused.
TEST_F(ServedSuspends, a_group_whose_resume_fails_says_why_and_a_second_group_works) {
  const auto ranks =
      Run({"init", "init", "reduce", "barrier", "suspend all", "barrier", "1:at=Create,1,fail=2", "resume all and reduce",
           "barrier", "bytes", "barrier", "1:at=nothing,1,fail=1", "resume all and reduce", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_TRUE(rank.Said("resume all and reduce", 0).starts_with("0 0 0 1 ncclGroupEnd: rank 1 (pid ")) << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("resume all and reduce", 1), "0 0 0 0 " + rank.Said("reduce", 0)) << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << Everything(ranks);
  }
}

// All are suspended but the first, of which the same group says that it shall be: the process is paused for another want.
TEST_F(ServedSuspends, a_group_whose_resume_fails_undoes_its_suspends_too) {
  const auto ranks = Run({"init", "init", "reduce", "barrier", "suspend last", "pause", "barrier", "1:at=Create,1,fail=2",
                          "resume last, suspend first", "barrier", "1:at=nothing,1,fail=1", "barrier",
                          "resume last, suspend first", "barrier", "resume first", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("resume last, suspend first", 0), "0 0 1 first 0") << Everything(ranks);
    EXPECT_EQ(rank.Said("resume last, suspend first", 1), "0 0 0 first 1") << Everything(ranks);
    EXPECT_EQ(rank.Said("resume first"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << Everything(ranks);
  }
}

// The process is still paused, and its last communicator suspended, as before the group: it can be resumed.
TEST_F(ServedSuspends, a_group_that_resumes_and_suspends_one_leaves_it_suspended_if_the_resume_fails) {
  const auto ranks = Run({"init", "init", "reduce", "barrier", "suspend all", "barrier", "1:at=Create,1,fail=2",
                          "resume last, suspend last", "barrier", "1:at=nothing,1,fail=1", "barrier", "resume all", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("resume last, suspend last"), "0 0 1 last 1") << Everything(ranks);
    EXPECT_EQ(rank.Said("resume all"), "0, 0, 0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << Everything(ranks);
  }
}

TEST_F(ServedSuspends, frees_as_much_without_cuMem) {
  job_.environment["NCCL_CUMEM_ENABLE"] = "0";
  const auto ranks =
      Run({"init", "init", "reduce", "barrier", "suspend first", "suspend last", "bytes", "barrier", "resume last", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("suspend last"), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("bytes"), "0");
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
  }
}

TEST_F(ServedSuspends, top_names_each_communicator_with_its_memory_in_all_ranks) {
  const auto ranks = Run({"init", "init", "reduce", "barrier", "suspend first", "barrier", "die"});
  const Rank top =
      job::RunProgram({AMEM_REPLAY, "top", "--by", "communicator", "--json", job_.journals()}, {}, job_.directory());
  const auto groups = nlohmann::json::parse(top.out, nullptr, false);
  ASSERT_TRUE(groups.is_array()) << top.out << top.err;
  Bytes named = 0, all = 0;
  int suspended = 0;
  for (const auto& group : groups) {
    const std::string name = group["communicator"];
    all += group["bytes"].get<Bytes>();
    if (!name.starts_with("0x")) continue;
    EXPECT_NE(name.find(", 2 ranks, init"), std::string::npos) << name;
    named += group["bytes"].get<Bytes>();
    suspended += name.ends_with(", suspended") ? 1 : 0;
  }
  EXPECT_EQ(groups.size(), 2U) << top.out;
  EXPECT_EQ(suspended, 1);
  EXPECT_EQ(named, all) << top.out;
}

TEST_F(ServedSuspends, AMems_own_calls_beside_them_do_what_they_say) {
  const auto ranks =
      Run({"init",         "init",    "reduce",      "barrier", "pause",       "suspend first", "barrier", "bytes",
           "suspend last", "barrier", "resume last", "barrier", "reduce",      "suspend last",  "barrier", "bytes",
           "barrier",      "resume",  "barrier",     "bytes",   "resume last", "reduce"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("bytes", 0), "0") << "suspending some does not resume a process that was paused\n" << Everything(ranks);
    EXPECT_EQ(rank.Said("resume last", 0), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0));
    EXPECT_EQ(rank.Said("bytes", 1), "0");
    EXPECT_EQ(rank.Said("resume", 0), "0") << Everything(ranks);
    EXPECT_NE(rank.Said("bytes", 2), "0");
    EXPECT_EQ(rank.Said("resume last", 1), "0") << Everything(ranks);
    EXPECT_EQ(rank.Said("reduce", 2), rank.Said("reduce", 0));
  }
}

// A pause keeps what other hosts have mapped; NCCL's own suspend gives it back.
TEST_F(ServedSuspends, is_nccls_own_where_memory_is_shared_by_fabric_handles) {
  job_.environment["LD_LIBRARY_PATH"] = AMEM_NCCL_SUSPENDING ":" AMEM_STAND_INS;
  job_.environment["AMEM_SIM_FABRIC"] = "1";
  for (const char* shares : {"fabric", "barrier"}) {
    const auto ranks = Run({"init", shares, "suspend last", "malloc", "resume last"}, 1);
    EXPECT_EQ(ranks[0].Said(shares), "0") << Everything(ranks);
    EXPECT_EQ(ranks[0].Said("suspend last"), "0") << Everything(ranks);
    EXPECT_EQ(ranks[0].Said("malloc") == "0", std::string(shares) == "fabric") << "a pause of AMem's refuses it\n"
                                                                               << Everything(ranks);
    EXPECT_EQ(ranks[0].Said("resume last"), "0") << Everything(ranks);
  }
}

}  // namespace
}  // namespace amem
