// Whoever looks for NCCL's functions, however, finds those that lead to AMem; and who must not find them does not.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <tuple>

#include "tests/scenarios/job.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using job::Environment;
using job::Job;

// How a program looks, how AMem comes in, whether NCCL has a suspend of its own, and AMEM_SUSPEND.
using Case = std::tuple<std::string, std::string, bool, std::string>;

class NamesBase {
 protected:
  [[nodiscard]] static fs::path Plain(bool has_suspend) { return fs::path(has_suspend ? AMEM_CALLS_SUSPENDING : AMEM_CALLS); }
  // The libnccl that the program gets: patched, or as it is.
  [[nodiscard]] fs::path Library(const std::string& way, bool has_suspend) const {
    if (way != "patched") return Plain(has_suspend);
    const auto patch =
        job::RunProgram({AMEM_PATCH, Plain(has_suspend), "-o", job_.directory() / "patched"}, {}, job_.directory());
    EXPECT_EQ(patch.status, 0) << patch.err;
    return job_.directory() / "patched" / "libnccl.so.2";
  }
  [[nodiscard]] Environment With(const std::string& way, const fs::path& library, const std::string& suspend) const {
    Environment environment = job_.environment;
    environment["LD_LIBRARY_PATH"] = library.parent_path();
    environment["AMEM_SUSPEND"] = suspend;
    if (way == "preload") environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    return environment;
  }
  [[nodiscard]] job::Rank RunWith(const std::vector<std::string>& arguments, const Environment& environment) const {
    std::vector<std::string> command = {AMEM_NAMES_PROGRAM};
    command.insert(command.end(), arguments.begin(), arguments.end());
    auto run = job::RunProgram(command, environment, job_.directory());
    EXPECT_EQ(run.status, 0) << run.out << run.err;
    return run;
  }
  Job job_;
};

class Names : public NamesBase, public ::testing::TestWithParam<Case> {};
class NamesOnce : public NamesBase, public ::testing::Test {};

std::string Caller(const std::string& look, bool imports_suspend) {
  if (look == "lazy") return imports_suspend ? AMEM_CALLER_LAZY : AMEM_CALLER_LAZY_WITHOUT;
  return imports_suspend ? AMEM_CALLER_NOW : AMEM_CALLER_NOW_WITHOUT;
}

TEST_P(Names, lead_to_amem) {
  const auto& [look, way, has_suspend, suspend] = GetParam();
  const fs::path library = Library(way, has_suspend);
  Environment environment = With(way, library, suspend);
  const bool answered = suspend == "serve" || has_suspend;  // otherwise a program that imports it is as broken as without AMem
  std::vector<std::string> arguments = {look, library};
  if (look == "lazy" || look == "now") {
    arguments = {"import", Caller(look, answered)};
    // What is bound at load needs the name at load; on a libnccl that lacks it, attaching must come first.
    const bool early = look == "now" && !has_suspend && answered;
    if (way == "attach") environment[early ? "ATTACH" : "LATE_ATTACH"] = AMEM_LIBRARY_FILE;
    if (early) arguments.push_back(library);
  } else if (way == "attach") {
    environment["ATTACH"] = AMEM_LIBRARY_FILE;
  }
  const auto run = RunWith(arguments, environment);
  EXPECT_EQ(run.Said("init"), "through 0") << run.out << run.err;
  EXPECT_EQ(run.Said("destroy"), "through 0") << run.out << run.err;
  const std::string who = run.Said("suspend");
  EXPECT_EQ(suspend == "serve" ? who.substr(0, 4) : who, suspend == "serve" ? "amem"
                                                         : has_suspend      ? "plain 0"
                                                                            : "none")
      << run.out << run.err;
  EXPECT_EQ(run.Said("pointer"), look == "lazy" || look == "now" ? "through" : "(not run)") << run.out << run.err;
}
INSTANTIATE_TEST_SUITE_P(All, Names,
                         ::testing::Combine(::testing::Values("handle", "default", "lazy", "now"),
                                            ::testing::Values("patched", "preload", "attach"), ::testing::Bool(),
                                            ::testing::Values("serve", "native")),
                         [](const auto& one) {
                           return std::get<0>(one.param) + "_" + std::get<1>(one.param) +
                                  (std::get<2>(one.param) ? "_new_" : "_old_") + std::get<3>(one.param);
                         });

TEST_F(NamesOnce, switched_off_everything_is_nccls_own) {
  for (const bool has_suspend : {false, true}) {
    for (const char* way : {"patched", "preload"}) {
      const fs::path library = Library(way, has_suspend);
      Environment environment = With(way, library, "serve");
      environment["AMEM_ENABLE"] = "0";
      for (const char* look : {"handle", "default", "lazy", "now"}) {
        const bool imports = std::string(look) == "lazy" || std::string(look) == "now";
        const auto run = RunWith(
            imports ? std::vector<std::string>{"import", Caller(look, has_suspend)} : std::vector<std::string>{look, library},
            environment);
        EXPECT_EQ(run.Said("init"), "plain 0") << look << " " << way << run.out << run.err;
        EXPECT_EQ(run.Said("suspend"), has_suspend ? "plain 0" : "none") << look << " " << way << run.out;
        EXPECT_EQ(run.Said("destroy"), "plain 0") << look << " " << way << run.out;
      }
    }
  }
}

TEST_F(NamesOnce, two_nccls_at_once_each_get_their_own_calls) {
  for (const char* way : {"preload", "attach"}) {
    Environment environment = With(way, Plain(false), "serve");
    if (std::string(way) == "attach") environment["LATE_ATTACH"] = AMEM_LIBRARY_FILE;
    const auto run = RunWith({"two", AMEM_CALLER_LAZY, AMEM_CALLS_OTHER}, environment);
    for (const int nth : {0, 1}) {
      EXPECT_EQ(run.Said("init", nth), "through 0") << way << nth << run.out << run.err;
      EXPECT_TRUE(run.Said("suspend", nth).starts_with("amem")) << way << nth << run.out << run.err;
      EXPECT_EQ(run.Said("destroy", nth), "through 0") << way << nth << run.out << run.err;
    }
  }
}

TEST_F(NamesOnce, what_amem_does_not_know_is_for_nccls_own_functions) {
  for (const char* way : {"patched", "preload", "attach"}) {
    const fs::path library = Library(way, true);
    Environment environment = With(way, library, "serve");
    if (std::string(way) == "attach") environment["ATTACH"] = AMEM_LIBRARY_FILE;
    const auto run = RunWith({"unknown", library}, environment);
    // "plain": AMem jumps to NCCL's function, which returns to the program.
    const auto answered_by_nccl = [&](const char* what, int nth) {
      const std::string who = run.Said(what, nth);
      EXPECT_TRUE(who == "through 0" || who == "plain 0") << way << " " << what << nth << run.out << run.err;
    };
    for (const char* what : {"suspend", "resume", "figure"}) {
      for (const int nth : {0, 1}) answered_by_nccl(what, nth);
    }
    EXPECT_EQ(run.Said("resume", 2), "amem 5") << way << ": it was resumed already\n" << run.out << run.err;
  }
}

TEST_F(NamesOnce, an_old_nccl_has_nothing_for_what_amem_does_not_know) {
  const auto run = RunWith({"unknown", Library("preload", false)}, With("preload", Plain(false), "serve"));
  EXPECT_EQ(run.Said("suspend"), "amem 5") << run.out << run.err;
  EXPECT_EQ(run.Said("suspend", 1), "amem 4") << run.out << run.err;
  EXPECT_EQ(run.Said("figure", 1), "amem 4") << run.out << run.err;
}

TEST_F(NamesOnce, a_program_that_is_linked_with_nccl_is_seen) {
  for (const char* way : {"patched", "preload"}) {
    const auto run = job::RunProgram({AMEM_NAMES_DIRECT}, With(way, Library(way, false), "serve"), job_.directory());
    EXPECT_EQ(run.status, 0) << way << run.err;
    EXPECT_EQ(run.Said("init"), "through") << way << run.out;
    EXPECT_EQ(run.Said("destroy"), "through") << way << run.out;
  }
}

TEST_F(NamesOnce, a_process_without_nccl_finds_no_functions_of_it) {
  const auto run = RunWith({"none"}, With("preload", Plain(false), "serve"));
  EXPECT_EQ(run.out, "looked: 0\n");
  EXPECT_EQ(run.err, "");
}

// The one look-up that a preloaded library cannot keep from finding it.
TEST_F(NamesOnce, a_weak_import_without_nccl_is_answered_with_invalid_usage) {
  EXPECT_EQ(RunWith({"weak"}, With("preload", Plain(false), "serve")).Said("weak"), "5");
  EXPECT_EQ(RunWith({"weak"}, With("", Plain(false), "serve")).Said("weak"), "-1");
}

TEST_F(NamesOnce, a_forked_child_that_uses_nccl_first_is_seen) {
  for (const char* way : {"patched", "preload"}) {
    const fs::path library = Library(way, false);
    Environment environment = With(way, library, "serve");
    environment["CHILD"] = "1";
    const auto run = RunWith({"import", AMEM_CALLER_NOW}, environment);
    EXPECT_EQ(run.Said("init"), "through 0") << way << run.out << run.err;
    EXPECT_EQ(run.Said("destroy"), "through 0") << way << run.out << run.err;
  }
}

}  // namespace
}  // namespace amem
