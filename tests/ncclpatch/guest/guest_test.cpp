// A guest's manners: what libamem_nccl.so does, by being preloaded, to programs that have nothing to do with GPUs.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/scenarios/job.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using job::Environment;
using job::Job;

struct Way {
  const char* name;
  std::vector<std::string> preload;
};

class Guest : public ::testing::TestWithParam<std::string> {
 protected:
  // Preloaded alone, and as the partner of a patched copy.
  [[nodiscard]] std::vector<Way> Ways() const {
    const fs::path copy = job_.directory() / "patched";
    EXPECT_EQ(job::RunProgram({AMEM_PATCH, AMEM_STAND_INS "/libnccl.so.2", "-o", copy}, {}, job_.directory()).status, 0);
    return {{"the library", {AMEM_LIBRARY_FILE}}, {"a patched copy", {copy / "libnccl.so.2"}}};
  }
  void RunsWith(const std::vector<std::string>& command, const std::string& preload, const std::string& what) {
    for (const char* enabled : {"0", "1"}) {
      Environment environment = job_.environment;
      environment["LD_PRELOAD"] = preload;
      environment["AMEM_ENABLE"] = enabled;
      environment["ASAN_OPTIONS"] =
          "verify_asan_link_order=0";  // gcc's runtime wants to be the first library; clang's is static
      const auto run = job::RunProgram(command, environment, job_.directory());
      EXPECT_EQ(run.status, 0) << what << ", AMEM_ENABLE=" << enabled << "\n" << run.err;
      EXPECT_EQ(run.out, "fine\n") << what << ", AMEM_ENABLE=" << enabled;
      EXPECT_EQ(run.err, "") << what << ", AMEM_ENABLE=" << enabled;
    }
  }
  Job job_;
};

TEST_P(Guest, does_not_disturb) {
  const fs::path program = fs::path(AMEM_GUESTS) / GetParam();
  if (!fs::exists(program)) GTEST_SKIP() << program << " was not built: its compiler is not installed";
  for (const Way& way : Ways()) RunsWith({program}, way.preload.front(), way.name);
}
INSTANTIATE_TEST_SUITE_P(Programs, Guest,
                         ::testing::Values("plain", "clang_address", "clang_thread", "clang_memory", "gcc_address",
                                           "gcc_thread"),
                         [](const auto& test) { return test.param; });

TEST_F(Guest, lives_beside_a_wrapper_of_dl_iterate_phdr_in_either_order) {
  const std::string wrapper = AMEM_GUESTS "/libwraps_phdr.so", program = AMEM_GUESTS "/plain";
  for (const Way& way : Ways()) {
    RunsWith({program}, wrapper + " " + way.preload.front(), std::string(way.name) + " behind the wrapper");
    RunsWith({program}, way.preload.front() + " " + wrapper, std::string(way.name) + " before the wrapper");
  }
}

// HAMi and others limit each container's part of a GPU by a dlsym of their own.
class BesideAnotherDlsym : public Guest {
 protected:
  // Each is preloaded before and behind the other.
  static std::vector<Way> Orders(const std::vector<Way>& ways) {
    const std::string other = AMEM_GUESTS "/liblimits_memory.so";
    std::vector<Way> orders;
    for (const Way& way : ways) {
      orders.push_back({"AMem behind it", {other + " " + way.preload.front()}});
      orders.push_back({"AMem before it", {way.preload.front() + " " + other}});
    }
    return orders;
  }
  std::string InitWith(const std::string& preload, const char* enabled, const char* limit_mib) {
    job_.environment["LD_PRELOAD"] = preload;
    job_.environment["AMEM_ENABLE"] = enabled;
    job_.environment["LIMIT_MIB"] = limit_mib;
    const auto ranks = job_.Run(1, {"cuda", "load", "init", "reduce"});
    return ranks[0].Said("init") + ", " + ranks[0].Said("reduce");
  }
};

TEST_F(BesideAnotherDlsym, everybody_gets_what_that_one_answers) {
  const char* const look = "import ctypes; ctypes.CDLL(None).limits_memory; print('fine')";
  for (const Way& order : Orders(Ways())) RunsWith({"/usr/bin/env", "python3", "-c", look}, order.preload.front(), order.name);
}

TEST_F(BesideAnotherDlsym, nccl_keeps_to_that_ones_limit) {
  const std::string alone = AMEM_GUESTS "/liblimits_memory.so";
  const std::string refused = InitWith(alone, "0", "1"), made = InitWith(alone, "0", "65536");
  ASSERT_NE(refused, made);
  for (const Way& order : Orders(Ways())) {
    for (const char* enabled : {"0", "1"}) {
      EXPECT_EQ(InitWith(order.preload.front(), enabled, "1"), refused) << order.name << ", AMEM_ENABLE=" << enabled;
      EXPECT_EQ(InitWith(order.preload.front(), enabled, "65536"), made) << order.name << ", AMEM_ENABLE=" << enabled;
    }
  }
}

// AMem would allocate by a function that the other does not watch.
TEST_F(BesideAnotherDlsym, a_program_keeps_to_that_ones_limit_in_every_scope) {
  const auto pieces = [&](const std::string& preload, const std::string& scope) {
    Environment environment = job_.environment;
    environment["LD_PRELOAD"] = preload;
    environment["LIMIT_ALLOC"] = "1";
    environment["LIMIT_MIB"] = "32";
    environment["AMEM_SCOPE"] = scope;
    const auto run = job::RunProgram({AMEM_GUESTS "/allocates"}, environment, job_.directory());
    EXPECT_EQ(run.status, 0) << run.err;
    return run.out;
  };
  ASSERT_EQ(pieces(AMEM_GUESTS "/liblimits_memory.so", "nccl"), "8\n");
  for (const Way& order : Orders({{"the library", {AMEM_LIBRARY_FILE}}}))
    for (const char* scope : {"nccl", "shared", "all"})
      EXPECT_EQ(pieces(order.preload.front(), scope), "8\n") << order.name << scope;
  EXPECT_EQ(pieces(AMEM_LIBRARY_FILE, "all"), "64\n");
}

TEST_F(Guest, lives_beside_jemalloc) {
  for (const char* library : {"/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2"}) {
    if (!fs::exists(library)) continue;
    for (const Way& way : Ways()) RunsWith({AMEM_GUESTS "/plain"}, std::string(library) + " " + way.preload.front(), way.name);
    return;
  }
  GTEST_SKIP() << "jemalloc is not installed (Debian: libjemalloc2)";
}

TEST_F(Guest, python_starts_workers_by_fork_and_by_spawn) {
  for (const Way& way : Ways())
    for (const char* method : {"fork", "spawn"})
      RunsWith({"/usr/bin/env", "python3", AMEM_GUEST_SOURCES "/workers.py", method}, way.preload.front(),
               std::string(way.name) + ", " + method);
}

// vLLM starts its workers by fork. Each child that uses NCCL first has a session of its own, and pauses.
TEST_F(Guest, children_forked_before_the_first_use_pause_on_their_own) {
  job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks =
      job_.Run(2, {"load", "child", "cuda", "init", "reduce", "barrier", "pause", "bytes", "barrier", "resume", "reduce"});
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank.Said("pause"), "0") << rank.out << rank.err;
    EXPECT_EQ(rank.Said("bytes"), "0") << rank.out;
    EXPECT_EQ(rank.Said("resume"), "0") << rank.out;
    EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce")) << rank.out;
  }
}

TEST_F(Guest, a_child_forked_after_the_first_use_is_told_why_it_cannot_pause) {
  job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks = job_.Run(1, {"cuda", "load", "init", "child", "pause"});
  EXPECT_NE(ranks[0].Said("pause").find("fork before the first use"), std::string::npos) << ranks[0].out << ranks[0].err;
}

// A thread that never comes back from the driver, as behind a GPU that hangs, holds the session's lock while the process exits.
TEST_F(Guest, exit_does_not_wait_for_a_thread_that_hangs_in_the_driver) {
  job_.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job_.environment["STAND_IN_FAULT"] = "hang-unmap";
  const auto ranks = job_.Run(1, {"cuda", "load", "init", "hang"});
  EXPECT_EQ(ranks[0].status, 0) << ranks[0].out << ranks[0].err;
  EXPECT_NE(ranks[0].err.find("a driver call of another thread has not returned"), std::string::npos) << ranks[0].err;
}

}  // namespace
}  // namespace amem
