// What `amem-replay why` says of jobs whose failure is known: packed journals of golden/, and scenarios played anew.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/replay/tool_scenario.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

struct Answer {
  int exit = -1;
  std::string text;
};

Answer Run(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  Answer answer;
  char buffer[4096];
  while (const std::size_t got = pipe != nullptr ? ::fread(buffer, 1, sizeof buffer, pipe) : 0) answer.text.append(buffer, got);
  const int status = pipe != nullptr ? ::pclose(pipe) : -1;
  answer.exit = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return answer;
}

// Every value of `expected` is in `actual`; of objects, only the keys named are compared.
void ExpectPart(const Json& expected, const Json& actual, const std::string& where) {
  for (const auto& [key, value] : expected.items()) {
    if (key == "exit" || key == "says" || key == "remedy_says") continue;
    ASSERT_TRUE(actual.contains(key)) << where << "." << key;
    if (value.is_object()) {
      ExpectPart(value, actual[key], where + "." + key);
    } else {
      EXPECT_EQ(value, actual[key]) << where << "." << key;
    }
  }
}

void ExpectVerdict(const fs::path& journals, const fs::path& expectation) {
  const Json expected = Json::parse(std::ifstream(expectation), nullptr, false);
  ASSERT_TRUE(expected.is_object()) << expectation;
  const Answer answer = Run("'" AMEM_REPLAY "' why --json '" + journals.string() + "'");
  const Json verdict = Json::parse(answer.text, nullptr, false);
  ASSERT_TRUE(verdict.is_object()) << answer.text;
  ExpectPart(expected, verdict, expectation.stem());
  EXPECT_EQ(expected.value("exit", 0), answer.exit) << answer.text;
  for (const auto& [list, text] : {std::pair("says", "summary"), std::pair("remedy_says", "remedy")}) {
    if (!expected.contains(list)) continue;
    for (const std::string part : expected[list])
      EXPECT_NE(std::string(verdict[text]).find(part), std::string::npos) << part << "\nis not in\n" << verdict[text];
  }
  const Answer text = Run("'" AMEM_REPLAY "' why '" + journals.string() + "'");
  EXPECT_NE(text.text.find(std::string(verdict["headline"])), std::string::npos) << text.text;
  EXPECT_NE(verdict["healthy"], !verdict["evidence"].empty());
}

std::vector<std::string> GoldenNames() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(AMEM_GOLDEN)) {
    if (entry.path().extension() == ".amem") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string Name(const ::testing::TestParamInfo<std::string>& info) { return info.param; }

class Golden : public ::testing::TestWithParam<std::string> {};

TEST_P(Golden, gets_its_verdict) {
  const fs::path file = fs::path(AMEM_GOLDEN) / (GetParam() + ".amem");
  fs::path expectation = file;
  expectation.replace_extension(".json");
  ASSERT_TRUE(fs::exists(expectation)) << "a golden journal needs its expectation";
  ExpectVerdict(file, expectation);
}
INSTANTIATE_TEST_SUITE_P(Journals, Golden, ::testing::ValuesIn(GoldenNames()), Name);

class Scenario : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string pattern = fs::temp_directory_path() / "amem-scenario-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }
  fs::path directory_;
};

TEST_P(Scenario, played_anew_gets_its_verdict) {
  const Status played = test::PlayScenario(GetParam(), directory_);
  ASSERT_TRUE(played.ok()) << played.message();
  ExpectVerdict(directory_ / "journal", fs::path(AMEM_GOLDEN) / ("sim_" + GetParam() + ".json"));
}
INSTANTIATE_TEST_SUITE_P(Simulator, Scenario, ::testing::ValuesIn(test::kScenarios), Name);

}  // namespace
}  // namespace amem
