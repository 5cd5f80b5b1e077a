// What `amem-replay why` says of jobs whose failure is known: packed journals of golden/, and scenarios played anew.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "tests/replay/tool/run_tool.h"
#include "tests/replay/tool/scenario.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Every value of `expected` is in `actual`; of objects, only the keys named are compared.
void ExpectPart(const Json& expected, const Json& actual, const std::string& where) {
  for (const auto& [key, value] : expected.items()) {
    if (key == "exit" || key == "says" || key == "remedy_says" || key.starts_with("reproduces")) continue;
    ASSERT_TRUE(actual.contains(key)) << where << "." << key;
    if (value.is_object()) {
      ExpectPart(value, actual[key], where + "." + key);
    } else {
      EXPECT_EQ(value, actual[key]) << where << "." << key;
    }
  }
}

class VerdictTest : public test::ToolTest, public ::testing::WithParamInterface<std::string> {
 protected:
  void ExpectVerdict(const fs::path& journals, const fs::path& expectation) const {
    const Json expected = Json::parse(std::ifstream(expectation), nullptr, false);
    ASSERT_TRUE(expected.is_object()) << expectation;
    const test::Ran answer = Shell("$TOOL why --json '" + journals.string() + "'");
    const Json verdict = answer.json();
    ASSERT_TRUE(verdict.is_object()) << answer.out << answer.err;
    ExpectPart(expected, verdict, expectation.stem());
    EXPECT_EQ(expected.value("exit", 0), answer.code) << answer.out << answer.err;
    for (const auto& [list, text] : {std::pair("says", "summary"), std::pair("remedy_says", "remedy")}) {
      if (!expected.contains(list)) continue;
      for (const std::string part : expected[list]) EXPECT_HAS(std::string(verdict[text]), part);
    }
    EXPECT_HAS(Shell("$TOOL why '" + journals.string() + "'").out, std::string(verdict["headline"]));
    EXPECT_NE(verdict["healthy"], !verdict["evidence"].empty());
    for (const auto& [list, code] : {std::pair("reproduces", 0), std::pair("reproduces_not", 3)}) {
      for (const std::string options : expected.value(list, Json::array())) {
        const test::Ran ran = Shell("$TOOL replay '" + journals.string() + "' " + options);
        EXPECT_EQ(ran.code, code) << list << " with '" << options << "'\n" << ran.out << ran.err;
      }
    }
  }
};

std::vector<std::string> GoldenNames(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".amem") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string Name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::ranges::replace(name, '-', '_');
  return name;
}

class Golden : public VerdictTest {};

TEST_P(Golden, gets_its_verdict) {
  const fs::path file = fs::path(AMEM_GOLDEN) / (GetParam() + ".amem");
  fs::path expectation = file;
  expectation.replace_extension(".json");
  ASSERT_TRUE(fs::exists(expectation)) << "a golden journal needs its expectation";
  ExpectVerdict(file, expectation);
}
INSTANTIATE_TEST_SUITE_P(Journals, Golden, ::testing::ValuesIn(GoldenNames(AMEM_GOLDEN)), Name);

// Journals of runs on GPUs.
constexpr const char* kNoneYet = "none yet";

fs::path GpuFolder() {
  const char* other = std::getenv("AMEM_GOLDEN_GPU");
  return other != nullptr ? fs::path(other) : fs::path(AMEM_GOLDEN) / "gpu";
}
std::vector<std::string> GpuNames() {
  const auto names = GoldenNames(GpuFolder());
  return names.empty() ? std::vector<std::string>{kNoneYet} : names;
}
std::string GpuName(const ::testing::TestParamInfo<std::string>& info) {
  return info.param == kNoneYet ? "none_yet" : Name(info);
}

class GpuGolden : public VerdictTest {};

TEST_P(GpuGolden, gets_its_verdict_and_is_done_again_on_the_simulator) {
  if (GetParam() == kNoneYet) GTEST_SKIP() << "no journals of runs on GPUs in " << GpuFolder() << " (see README.md there)";
  const fs::path file = GpuFolder() / (GetParam() + ".amem"), expectation = fs::path(file).replace_extension(".json");
  ASSERT_TRUE(fs::exists(expectation)) << "a golden journal needs its expectation";
  ExpectVerdict(file, expectation);
}
INSTANTIATE_TEST_SUITE_P(Journals, GpuGolden, ::testing::ValuesIn(GpuNames()), GpuName);

class Scenario : public VerdictTest {};

TEST_P(Scenario, played_anew_gets_its_verdict) {
  const Status played = test::PlayScenario(GetParam(), scratch_);
  ASSERT_TRUE(played.ok()) << played.message();
  // What depends on the build that plays has expectations of its own.
  const fs::path own = fs::path(AMEM_GOLDEN) / ("played_" + GetParam() + ".json");
  ExpectVerdict(scratch_ / "journal", fs::exists(own) ? own : fs::path(AMEM_GOLDEN) / ("sim_" + GetParam() + ".json"));
}
INSTANTIATE_TEST_SUITE_P(Simulator, Scenario, ::testing::ValuesIn(test::kScenarios), Name);

// The commands that a text tells people to run, as they would paste them: on a line of their own, or between backticks, where a
// line may be broken.
std::vector<std::string> CommandsIn(const std::string& text) {
  std::vector<std::string> commands;
  const std::string joined = std::regex_replace(text, std::regex("\\n *"), " ");
  for (const auto& [where, pattern] :
       {std::pair(&text, "(?:^|\\n)  (amem-replay [^\\n]*)"), std::pair(&joined, "`(amem-replay [^`]*)`")}) {
    const std::regex command(pattern);
    for (std::sregex_iterator at(where->begin(), where->end(), command), end; at != end; ++at) commands.push_back((*at)[1]);
  }
  return commands;
}

class Printed : public test::ToolTest {};

TEST_F(Printed, commands_run) {
  std::vector<fs::path> packs;
  for (const fs::path& folder : {fs::path(AMEM_GOLDEN), fs::path(AMEM_GOLDEN) / "gpu"})
    for (const std::string& name : GoldenNames(folder)) packs.push_back(folder / (name + ".amem"));
  std::set<std::string> commands;
  std::size_t of_evidence = 0;
  for (const fs::path& pack : packs) {
    for (const char* const command : {"why", "replay"}) {
      const test::Ran ran = Shell(std::string("$TOOL ") + command + " '" + pack.string() + "'");
      for (const std::string& printed : CommandsIn(ran.out + ran.err)) {
        commands.insert(printed);
        of_evidence += printed.starts_with("amem-replay log ") ? 1 : 0;
      }
    }
  }
  const std::string empty =
      "$TOOL ls; $TOOL why 4194999; $TOOL log '" + packs[0].string() + "' --from '#17'; $TOOL nothing; $TOOL info";
  const test::Ran in_vain = Shell("export AMEM_JOURNAL_DIR=$S/none; { " + empty + "; } 2>&1");
  for (const std::string& printed : CommandsIn(in_vain.out)) commands.insert(printed);
  EXPECT_GE(of_evidence, packs.size() / 2) << "each failure has one";
  EXPECT_GT(commands.size(), 10U);
  for (const std::string& command : commands) {
    const std::string words = command.substr(std::string("amem-replay ").size());
    const test::Ran ran = Shell("cd $S; export AMEM_JOURNAL_DIR=$S/none; $TOOL " + words);
    const bool about_a_pack = words.find(".amem") != std::string::npos;
    EXPECT_TRUE(ran.code == 0 || ran.code == 3 || (ran.code == 2 && !about_a_pack)) << command << "\n" << ran.out << ran.err;
    if (words.starts_with("log ")) {
      EXPECT_FALSE(ran.out.empty()) << command;
    }
    if (words.starts_with("replay ")) {
      EXPECT_EQ(ran.code, 0) << command << "\n" << ran.out;
      EXPECT_HAS(ran.out, "the failure included");
    }
  }
}

class Unpacking : public test::ToolTest {};

TEST_F(Unpacking, takes_few_addresses) {
#ifdef AMEM_SANITIZED
  GTEST_SKIP() << "a sanitizer reserves more";
#endif
  const test::Ran answer = Shell("ulimit -v $((32 << 20)); $TOOL why " AMEM_GOLDEN "/gpu/golden-healthy-2gpus.amem");
  EXPECT_EQ(answer.code, 0) << answer.err;
}

}  // namespace
}  // namespace amem
