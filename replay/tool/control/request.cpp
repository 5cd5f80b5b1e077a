#include "replay/tool/control/request.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"

namespace amem::tool {

static Json JsonOf(const control::RankLook& rank) {
  Json stays = Json::array();
  for (const control::Staying& one : rank.stays)
    stays.push_back({{"what", one.what}, {"pieces", one.pieces ? Json(*one.pieces) : Json()}, {"bytes", one.bytes}});
  return {{"session", SessionText(rank.process.session)},
          {"rank", rank.rank < 0 ? Json() : Json(rank.rank)},
          {"pid", rank.process.pid},
          {"start_ticks", rank.process.start_ticks},
          {"directory", rank.process.directory.string()},
          {"alive", rank.alive},
          {"phase", rank.phase()},
          {"safepoints", rank.is.steps},
          {"paused_by_program", rank.paused_by_program()},
          {"held_bytes", rank.is.held},
          {"freed_bytes", rank.is.freed},
          {"stays", std::move(stays)},
          {"doing", rank.Doing()}};
}

// "; a pause leaves 24.0 MiB (cuMemAllocAsync), 2.00 MiB (...)"; empty: nothing.
static std::string StaysOf(const control::RankLook& rank) {
  std::string text;
  for (const control::Staying& one : rank.stays)
    text += fmt::format("{} {} ({}{})", text.empty() ? "; a pause leaves" : ",", RoundedBytes(one.bytes), one.what,
                        one.pieces.value_or(1) == 1 ? "" : fmt::format(", {} pieces", *one.pieces));
  return text;
}

void AddRequest(Arguments& arguments, RequestOptions& options, const char* deadline) {
  arguments.Add(
      "JOB", "JOB", options.job,
      "The pid of a rank or of its launcher, a directory of journals, the launcher's id of the job, or several pids of "
      "ranks; default: the only living job of this user on this host");
  arguments.Add("--deadline", "SECONDS", options.deadline_s, deadline, 1);
}

Exit ComplainOf(const Status& why, Exit code) {
  for (const std::string& line : Split(why.message(), '\n')) Complain(line, code);
  return code;
}

void PrintRanks(Output& out, const std::vector<control::RankLook>& ranks, const FoundJob& job, const std::string& done,
                double seconds, bool json) {
  std::vector<control::RankLook> sorted = ranks;
  std::ranges::sort(sorted, {}, [](const control::RankLook& rank) { return std::pair(rank.rank, rank.process.pid); });
  if (json) {
    Json all = Json::array();
    for (const control::RankLook& rank : sorted) all.push_back(JsonOf(rank));
    return PrintJson(out, {{"command", running_command}, {"seconds", seconds}, {"elsewhere", job.elsewhere}, {"ranks", all}},
                     "control");
  }
  if (!done.empty()) out << done << "\n";
  for (const control::RankLook& rank : sorted)
    out << fmt::format("{}{}: {}{}{}\n", rank.process.name, rank.rank < 0 ? "" : fmt::format(" (pid {})", rank.process.pid),
                       rank.Doing(), rank.is.held != 0 ? "; holds " + RoundedBytes(rank.is.held) : "", StaysOf(rank));
  if (job.elsewhere > 0)
    out << fmt::format("The launcher counts {}: those of other hosts are asked there.\n", Plural(job.elsewhere, "more rank"));
}

}  // namespace amem::tool
