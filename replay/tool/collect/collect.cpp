// What `amem pack HOST:DIR` fetches: the journals of other hosts, over ssh.
#include "replay/tool/collect/collect.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "replay/job/pack.h"
#include "replay/tool/collect/remote.h"

namespace amem::tool {
namespace {

constexpr std::size_t kHostsAtOnce = 16;

std::string LastLine(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

std::string Problem(const Finished& ran, const RemoteOptions& options) {
  if (ran.timed_out) return fmt::format("gave up after {} s (--timeout)", options.limit_s);
  const std::string said = LastLine(ran.errors);
  if (ran.exit_code == 127)
    return options.ssh + " could not be started" + (said.empty() ? ": --ssh names another program" : ": " + said);
  return said.empty() ? fmt::format("ended with exit code {}", ran.exit_code) : said;
}

// A tar's contents, in a directory beside it.
Fetched Untar(const std::filesystem::path& file, std::string problem, const RemoteOptions& options) {
  const std::filesystem::path directory = file.string() + ".d";
  std::error_code failed;
  std::filesystem::create_directory(directory, failed);
  const Result<Finished> ran = RunProgram({"tar", "-xf", file.string(), "-C", directory.string(), "--no-same-owner"},
                                          file.string() + ".out", std::chrono::seconds(options.limit_s));
  if (!ran) return {{}, ran.status().message()};
  if (ran->exit_code != 0 && problem.empty()) problem = "what it sent is cut short: " + LastLine(ran->errors);
  return {directory, std::move(problem)};
}

Fetched Fetch(const std::string& given, const std::filesystem::path& file, const RemoteOptions& options) {
  const RemoteHost host = ParseHost(given);
  if (host.name.empty() || host.name.starts_with('-')) return {{}, "is no host name"};
  // The shell takes the command apart, which may have options.
  const Result<Finished> ran =
      RunProgram({"sh", "-c", fmt::format("exec {} -o BatchMode=yes -o ConnectTimeout=10 -- \"$1\" \"$2\"", options.ssh), "sh",
                  host.name, RemoteCommand(host, options.tool, options.tar)},
                 file, std::chrono::seconds(options.limit_s));
  if (!ran) return {{}, ran.status().message()};
  std::error_code failed;
  const bool any = std::filesystem::file_size(file, failed) != 0 && !failed;
  std::string problem = ran->exit_code == 0 && !ran->timed_out ? "" : Problem(*ran, options);
  if (!any) return {{}, problem.empty() ? "sent nothing" : problem};
  if (IsPack(file)) return {file, problem};
  return Untar(file, problem, options);
}

}  // namespace

std::vector<Fetched> FetchAll(const std::vector<std::string>& hosts, const RemoteOptions& options,
                              const std::filesystem::path& scratch) {
  std::vector<Fetched> fetched(hosts.size());
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < fetched.size(); i = next++)
      fetched[i] = Fetch(hosts[i], scratch / fmt::format("host-{}", i), options);
  };
  std::vector<std::jthread> threads;
  while (threads.size() < std::min(kHostsAtOnce, fetched.size())) threads.emplace_back(work);
  threads.clear();
  return fetched;
}

}  // namespace amem::tool
