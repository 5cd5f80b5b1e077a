// Random worlds, in a process of their own: what breaks there is a finding with a seed, and no more than that.
//
// AMEM_WORLD_SECONDS runs each longer, AMEM_WORLD_SEED begins with another seed. AMEM_WORLD_WITHOUT leaves actions out.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace amem::world {
namespace {

std::string FromEnvironment(const char* name, const std::string& otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : text;
}

#if defined(AMEM_BY_NIGHT)
const std::string kSeconds = "1200", kLate;
#elif defined(AMEM_SANITIZED)
const std::string kSeconds = "4", kLate = " --late 60000";  // other tests run beside it
#else
const std::string kSeconds = "3", kLate = " --late 30000";
#endif

// What no program does, because the interception has the gates: deregistrations that pass by them.
const std::string kKnown = "ungated cards";

// What it says, which is told to whoever watches as well, and its exit status.
struct Ran {
  std::string said;
  int status = -1;
};
Ran Run(const std::string& arguments) {
  Ran ran;
  FILE* const program = ::popen((std::string(AMEM_WORLD) + " " + arguments + " 2>&1").c_str(), "r");
  if (program == nullptr) return ran;
  std::array<char, 4096> some{};
  while (std::fgets(some.data(), some.size(), program) != nullptr) ran.said += some.data();
  const int status = ::pclose(program);
  ran.status = WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
  return ran;
}

void NothingIsFound(const std::string& arguments) {
  const Ran ran = Run(arguments + kLate + " --seed " + FromEnvironment("AMEM_WORLD_SEED", "1") + " --seconds " +
                      FromEnvironment("AMEM_WORLD_SECONDS", kSeconds) + " --without '" +
                      FromEnvironment("AMEM_WORLD_WITHOUT", kKnown) + "'");
  EXPECT_EQ(ran.status, 0) << ran.said;
  EXPECT_NE(ran.said.find("nothing found"), std::string::npos) << ran.said;
}

TEST(RandomWorld, of_threads) { NothingIsFound(""); }
TEST(RandomWorld, of_processes) { NothingIsFound("--processes"); }

#if !defined(AMEM_SANITIZED) || defined(AMEM_BY_NIGHT)
// A world that notices nothing would pass for one in which nothing is wrong.
void IsFound(const std::string& what, const std::string& said) {
  const Ran ran = Run("--seed 2 --worlds 40 --without '" + kKnown + "' --lose " + what);
  EXPECT_EQ(ran.status, 3) << ran.said;
  EXPECT_NE(ran.said.find(said), std::string::npos) << ran.said;
}

TEST(RandomWorld, finds_a_byte_that_is_lost) { IsFound("byte", "contents are lost: "); }
TEST(RandomWorld, finds_memory_that_is_not_given_back) { IsFound("range", "all is freed, and the driver still holds"); }
TEST(RandomWorld, finds_a_call_that_does_not_return) { IsFound("thread", "a call that is lost on thread"); }
#endif
#if defined(AMEM_BY_NIGHT)
TEST(RandomWorld, of_jobs_stopped_between_launches) { NothingIsFound("--processes --between-launches"); }
TEST(RandomWorld, finds_a_launch_that_passes_by_the_gate) { IsFound("gate --processes --between-launches", "FOUND, seed "); }
TEST(RandomWorld, finds_a_tool_that_falls) { IsFound("tool --processes --between-launches", "the tool was ended by signal 6"); }
#endif

}  // namespace
}  // namespace amem::world
