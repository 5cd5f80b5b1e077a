#include "replay/tool/control/request.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "replay/job/names.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

nlohmann::ordered_json JsonOf(const control::RankLook& rank) {
  auto stays = nlohmann::ordered_json::array();
  for (const control::Staying& one : rank.stays)
    stays.push_back({{"what", one.what},
                     {"pieces", one.pieces ? nlohmann::ordered_json(*one.pieces) : nlohmann::ordered_json()},
                     {"bytes", one.bytes}});
  return {{"session", fmt::format("{:016x}", rank.session.value)},
          {"rank", rank.rank < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(rank.rank)},
          {"pid", rank.pid},
          {"start_ticks", rank.start_ticks},
          {"directory", rank.directory.string()},
          {"alive", rank.alive},
          {"phase", std::string(rank.phase)},
          {"safepoints", rank.steps},
          {"paused_by_program", rank.paused_by_program},
          {"held_bytes", rank.held},
          {"freed_bytes", rank.freed},
          {"stays", std::move(stays)},
          {"doing", rank.doing}};
}

// "; a pause leaves 24.0 MiB (cuMemAllocAsync), 2.00 MiB (...)"; empty: nothing.
std::string StaysOf(const control::RankLook& rank) {
  std::string text;
  for (const control::Staying& one : rank.stays)
    text += fmt::format("{} {} ({}{})", text.empty() ? "; a pause leaves" : ",", RoundedBytes(one.bytes), one.what,
                        one.pieces.value_or(1) == 1 ? "" : fmt::format(", {} pieces", *one.pieces));
  return text;
}

}  // namespace

void AddRequest(Arguments& arguments, RequestOptions& options) {
  arguments.Add("JOB", "JOB", options.job, kJobHelp);
  arguments.Add("--deadline", "SECONDS", options.deadline_s,
                "Give up after so many seconds, and leave the job as it was; default: 60", 1U);
  AddJson(arguments, options.json);
}

Exit ComplainOf(const Status& why, Exit code) {
  std::string_view rest = why.message();
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    Complain(std::string(rest.substr(0, end)), code);
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return code;
}

std::filesystem::path DefaultSocketDirectory() {
  if (const char* set = std::getenv("AMEM_SOCKET_DIR"); set && *set) return set;
  return fmt::format("/tmp/amem-{}/sockets", ::getuid());
}

void PrintProgress(const std::string& sentence) { std::fprintf(stderr, "%s\n", Escaped(sentence).c_str()); }

void PrintRanks(Output& out, const std::vector<control::RankLook>& ranks, const FoundJob& job, const std::string& done,
                double seconds, bool json) {
  std::vector<control::RankLook> sorted = ranks;
  std::ranges::sort(sorted, {}, [](const control::RankLook& rank) { return std::pair(rank.rank, rank.pid); });
  if (json) {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (const control::RankLook& rank : sorted) all.push_back(JsonOf(rank));
    return PrintJson(out, {{"command", running_command}, {"seconds", seconds}, {"elsewhere", job.elsewhere}, {"ranks", all}},
                     "control");
  }
  if (!done.empty()) out << done << "\n";
  for (const control::RankLook& rank : sorted)
    out << fmt::format("{}: {}\n", rank.rank < 0 ? rank.rank_name : fmt::format("{} (pid {})", rank.rank_name, rank.pid),
                       rank.doing + (rank.held != 0 ? "; holds " + RoundedBytes(rank.held) : "") + StaysOf(rank));
  if (job.elsewhere > 0)
    out << fmt::format("The launcher counts {}: those of other hosts are asked there.\n", Plural(job.elsewhere, "more rank"));
}

}  // namespace amem::tool
