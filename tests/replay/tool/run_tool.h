// amem-replay as people and scripts use it, for tests: a shell command in a directory of its own, and what came of it.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace amem::test {

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (part) << "\nis not in\n" << (text)

inline std::string Contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Ran {
  int code = -1;                              // exit status, or minus the signal
  double seconds = 0, processor_seconds = 0;  // the latter do not depend on what else the machine does
  long peak_kib = 0;                          // of memory, of the largest process
  std::string out, err;
  [[nodiscard]] std::vector<std::string> lines() const {
    std::vector<std::string> all;
    std::istringstream stream(out);
    for (std::string line; std::getline(stream, line);) all.push_back(line);
    return all;
  }
  [[nodiscard]] nlohmann::json json() const { return nlohmann::json::parse(out, nullptr, false); }
};

class ToolTest : public ::testing::Test {
 protected:
  ToolTest() {
    setenv("TOOL", AMEM_REPLAY, 1);
    setenv("TZ", "UTC", 1);
  }
  void SetUp() override { scratch_ = NewDirectory(); }
  void TearDown() override {
    std::filesystem::permissions(scratch_, std::filesystem::perms::owner_all);
    std::filesystem::remove_all(scratch_);
  }
  static std::filesystem::path NewDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "amem-tool-XXXXXX").string();
    EXPECT_NE(::mkdtemp(pattern.data()), nullptr) << pattern;
    return pattern;
  }

  // By bash; $TOOL is amem-replay, $S is scratch_.
  [[nodiscard]] Ran Shell(const std::string& command) const {
    const auto out = scratch_ / "out", err = scratch_ / "err";
    const std::string line =
        "S='" + scratch_.string() + "'; { " + command + "\n} >'" + out.string() + "' 2>'" + err.string() + "'";
    const auto began = std::chrono::steady_clock::now();
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::execlp("bash", "bash", "-c", line.c_str(), nullptr);
      ::_exit(127);
    }
    int status = 0;
    rusage usage{};
    ::wait4(pid, &status, 0, &usage);
    Ran ran;
    ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    ran.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    ran.processor_seconds = Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
    ran.peak_kib = usage.ru_maxrss;
    ran.out = Contents(out);
    ran.err = Contents(err);
    return ran;
  }

  static double Seconds(const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; }

  std::filesystem::path scratch_;
};

}  // namespace amem::test
