#include "replay/tool/collect/remote.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "journal/base/unique_fd.h"

namespace amem::tool {
namespace {

constexpr std::size_t kErrorsMost = 2'000;  // bytes of stderr that are kept
constexpr auto kAskAgain = std::chrono::milliseconds(20);

// As one word of a shell.
std::string ShellWord(const std::string& text) {
  std::string word = "'";
  for (const char c : text) {
    if (c == '\'') {
      word += "'\\''";
    } else {
      word += c;
    }
  }
  return word + "'";
}

// Reads what is there, and keeps the end of it.
void Drain(int descriptor, std::string& errors) {
  char buffer[4096];
  for (ssize_t got; (got = ::read(descriptor, buffer, sizeof buffer)) > 0;) {
    errors.append(buffer, static_cast<std::size_t>(got));
    if (errors.size() > kErrorsMost) errors.erase(0, errors.size() - kErrorsMost);
  }
}

}  // namespace

Result<Finished> RunProgram(const std::vector<std::string>& argv, const std::filesystem::path& output,
                            std::chrono::seconds limit) {
  const UniqueFd file(::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  int ends[2];
  if (!file || !nothing || ::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    return Status{Code::kIo, "write " + output.string() + ": " + std::strerror(errno) + "; TMPDIR names another place"};
  const UniqueFd from(ends[0]);
  UniqueFd to(ends[1]);
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) return Status{Code::kIo, "start " + argv[0] + ": " + std::strerror(errno)};
  if (pid == 0) {  // only calls that are safe while other threads hold locks
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it does not outlive the tool, nor the thread that waits for it
    ::dup2(nothing.get(), STDIN_FILENO);
    ::dup2(file.get(), STDOUT_FILENO);
    ::dup2(to.get(), STDERR_FILENO);
    ::fcntl(STDERR_FILENO, F_SETFL, 0);
    ::signal(SIGPIPE, SIG_DFL);
    ::execvp(words[0], words.data());
    ::_exit(127);
  }
  to = UniqueFd();
  Finished finished;
  const auto end = std::chrono::steady_clock::now() + limit;
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    Drain(from.get(), finished.errors);
    if (!finished.timed_out && std::chrono::steady_clock::now() >= end) {
      finished.timed_out = true;
      ::kill(-pid, SIGKILL);
    }
    std::this_thread::sleep_for(kAskAgain);
  }
  Drain(from.get(), finished.errors);
  finished.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return finished;
}

RemoteHost ParseHost(const std::string& text) {
  const std::size_t bracket = text.find(']');  // of an IPv6 address
  const std::size_t colon = text.find(':', bracket == std::string::npos ? 0 : bracket);
  RemoteHost host{text.substr(0, colon), colon == std::string::npos ? "" : text.substr(colon + 1)};
  std::erase(host.name, '[');
  std::erase(host.name, ']');
  return host;
}

std::string RemoteCommand(const RemoteHost& host, const std::string& tool, bool tar) {
  const std::string directory =
      host.directory.empty() ? "\"${AMEM_JOURNAL_DIR:-/tmp/amem-$(id -u)/journal}\"" : ShellWord(host.directory);
  std::string script = "d=" + directory + "\n[ -d \"$d\" ] || { echo \"there is no directory $d\" >&2; exit 3; }\n";
  if (!tar) script += "t=" + ShellWord(tool) + "\ncommand -v \"$t\" >/dev/null 2>&1 && exec \"$t\" pack \"$d\" -o -\n";
  script += "cd \"$d\" && exec tar -cf - .\n";
  return "exec sh -c " + ShellWord(script);  // the login's own shell may be another
}

}  // namespace amem::tool
