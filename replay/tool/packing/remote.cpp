#include "replay/tool/packing/remote.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "replay/job/pack.h"

namespace amem::tool {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kHostsAtOnce = 32;
constexpr int kTimedOut = 124, kNotFound = 127;  // of timeout(1)

// As one word of a shell.
std::string ShellWord(const std::string& text) {
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

// A command of the shell that runs for a while beside this program; what it prints goes to `output`, and errors beside it.
class Running {
 public:
  Running(const std::string& command, const fs::path& output, std::uint64_t limit_s)
      : errors_(output.string() + ".err"),
        pipe_(::popen(fmt::format("exec timeout --foreground {} {} </dev/null >{} 2>{}", limit_s, command,
                                  ShellWord(output.string()), ShellWord(errors_.string()))
                          .c_str(),
                      "re")) {}
  int Wait() {  // its exit code; 128 + N: ended by signal N
    const int status = pipe_ == nullptr ? -1 : ::pclose(pipe_);
    return status == -1 || WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  [[nodiscard]] std::string LastError() const {
    std::string line, last;
    for (std::ifstream lines(errors_); std::getline(lines, line);)
      if (line.find_first_not_of(" \r") != std::string::npos) last = line.substr(0, line.find('\r'));
    return last;
  }

 private:
  fs::path errors_;
  FILE* pipe_;
};

// What ssh is to run there: amem-replay pack where it is installed, else tar. Either writes to standard output.
std::string RemoteCommand(const std::string& directory, const RemoteOptions& options) {
  std::string script =
      "d=" + (directory.empty() ? "\"${AMEM_JOURNAL_DIR:-/tmp/amem-$(id -u)/journal}\"" : ShellWord(directory)) +
      "\n[ -d \"$d\" ] || { echo \"there is no directory $d\" >&2; exit 3; }\n";
  if (!options.tar)
    script += "t=" + ShellWord(options.tool) + "\ncommand -v \"$t\" >/dev/null 2>&1 && exec \"$t\" pack \"$d\" -o -\n";
  return "exec sh -c " + ShellWord(script + "cd \"$d\" && exec tar -cf - .\n");  // the login's own shell may be another
}

// The name of an IPv6 address is within brackets.
std::string SshCommand(const std::string& host, const RemoteOptions& options) {
  const std::size_t bracket = host.find(']');
  const std::size_t colon = host.find(':', bracket == std::string::npos ? 0 : bracket);
  std::string name = host.substr(0, colon);
  std::erase_if(name, [](char c) { return c == '[' || c == ']'; });
  return fmt::format("{} -o BatchMode=yes -o ConnectTimeout=10 -- {} {}", options.ssh, ShellWord(name),
                     ShellWord(RemoteCommand(host.substr(colon + 1), options)));
}

std::string Problem(int code, const std::string& said, const RemoteOptions& options) {
  if (code == 0) return {};
  if (code == kTimedOut) return fmt::format("gave up after {} s (--timeout)", options.limit_s);
  if (code == kNotFound) return fmt::format("{} could not be started: {}", options.ssh, said);
  return said.empty() ? fmt::format("ended with exit code {}", code) : said;
}

// What came, with a tar's contents in a directory beside it.
Fetched Understand(const fs::path& file, std::string problem, const RemoteOptions& options) {
  std::error_code failed;
  if (fs::file_size(file, failed) == 0 || failed) return {{}, problem.empty() ? "sent nothing" : problem};
  if (IsPack(file)) return {file, std::move(problem)};
  const fs::path directory = file.string() + ".d";
  fs::create_directory(directory, failed);
  Running tar(fmt::format("tar -xf {} -C {} --no-same-owner", ShellWord(file.string()), ShellWord(directory.string())),
              file.string() + ".out", options.limit_s);
  if (tar.Wait() != 0 && problem.empty()) problem = "what it sent is cut short: " + tar.LastError();
  return {directory, std::move(problem)};
}

}  // namespace

std::vector<Fetched> FetchAll(const std::vector<std::string>& hosts, const RemoteOptions& options, const fs::path& scratch) {
  std::vector<Fetched> fetched;
  while (fetched.size() < hosts.size()) {
    std::vector<Running> running;
    const std::size_t first = fetched.size(), last = std::min(hosts.size(), first + kHostsAtOnce);
    const auto file = [&](std::size_t host) { return scratch / fmt::format("host-{}", host); };
    for (std::size_t i = first; i < last; ++i) running.emplace_back(SshCommand(hosts[i], options), file(i), options.limit_s);
    for (std::size_t i = first; i < last; ++i) {
      const int code = running[i - first].Wait();
      fetched.push_back(Understand(file(i), Problem(code, running[i - first].LastError(), options), options));
    }
  }
  return fetched;
}

}  // namespace amem::tool
