#include "tests/scenarios/job.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

extern char** environ;

namespace amem::job {
namespace {

namespace fs = std::filesystem;
constexpr auto kPatience = std::chrono::seconds(90);

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The parent's environment without the variables that would change the ranks, but for how these agree, and with `more`.
std::vector<std::string> Merge(const Environment& more) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry), name = text.substr(0, text.find('='));
    const bool changes = name.starts_with("AMEM_");
    if (!changes && name != "LD_PRELOAD" && !more.contains(name)) merged.push_back(text);
  }
  for (const auto& [name, value] : more) merged.push_back(name + "=" + value);
  return merged;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

pid_t Spawn(std::vector<std::string> command, const Environment& environment, const fs::path& out, const fs::path& err) {
  std::vector<std::string> merged = Merge(environment);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t child = -1;
  if (posix_spawnp(&child, command[0].c_str(), &actions, nullptr, Pointers(command).data(), Pointers(merged).data()) != 0)
    child = -1;
  posix_spawn_file_actions_destroy(&actions);
  return child;
}

int Wait(pid_t child, std::chrono::steady_clock::time_point deadline) {
  if (child < 0) return -1;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) kill(child, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

}  // namespace

std::string Rank::Said(const std::string& command, int nth) const {
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(command + ": ") && nth-- == 0) return line.substr(command.size() + 2);
  return "(not run)";
}

Job::Job() {
  std::string name = (fs::temp_directory_path() / "amem-job-XXXXXX").string();
  directory_ = mkdtemp(name.data());
  environment = {{"AMEM_JOURNAL_DIR", journals()},    {"AMEM_TIMEOUT_MS", "30000"},   {"AMEM_SIM_WORLD", directory_ / "world"},
                 {"LD_LIBRARY_PATH", AMEM_STAND_INS}, {"JOB", directory_.filename()}, {"JOB_AMEM", AMEM_LIBRARY_FILE},
                 {"BARRIER", directory_ / "barrier"}};
}

Job::~Job() {
  if (!children_.empty()) Finish(std::chrono::milliseconds(0));
  std::error_code error;
  fs::permissions(directory_, fs::perms::owner_all, error);
  fs::remove_all(directory_, error);
}

std::vector<Rank> Job::Run(int ranks, const std::vector<std::string>& commands) {
  Start(ranks, commands);
  return Finish(kPatience);
}

void Job::Start(int ranks, const std::vector<std::string>& commands) {
  std::ofstream(directory_ / "barrier") << std::string(8, '\0');
  std::vector<std::string> command = {AMEM_JOB_RANK};
  command.insert(command.end(), commands.begin(), commands.end());
  children_.clear();
  for (int rank = 0; rank < ranks; ++rank) {
    Environment own = environment;
    own["RANK"] = std::to_string(rank);
    own["WORLD"] = std::to_string(ranks);
    for (const auto& [name, value] : environment_of[rank]) own[name] = value;
    children_.push_back(
        Spawn(command, own, directory_ / ("out" + std::to_string(rank)), directory_ / ("err" + std::to_string(rank))));
  }
}

Rank Job::SoFar(int rank) const {
  Rank result;
  result.out = ReadFile(directory_ / ("out" + std::to_string(rank)));
  result.err = ReadFile(directory_ / ("err" + std::to_string(rank)));
  return result;
}

std::vector<Rank> Job::Finish(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::vector<int> statuses;
  for (const pid_t child : children_) statuses.push_back(Wait(child, deadline));
  std::vector<Rank> results;
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    results.push_back(SoFar(static_cast<int>(rank)));
    results.back().status = statuses[rank];
  }
  children_.clear();
  return results;
}

Rank RunProgram(const std::vector<std::string>& command, const Environment& environment, const fs::path& scratch) {
  Rank result;
  const fs::path out = scratch / "program.out", err = scratch / "program.err";
  result.status = Wait(Spawn(command, environment, out, err), std::chrono::steady_clock::now() + kPatience);
  result.out = ReadFile(out);
  result.err = ReadFile(err);
  return result;
}

}  // namespace amem::job
