// critical-path: who made each phase of a pause or resume slow.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"
#include "replay/tool/critical_path/cycles.h"

namespace amem::tool {
namespace {

using Json = nlohmann::ordered_json;

struct CriticalPathOptions {
  Directories directories;
  std::uint64_t last = 2;
  bool all = false, json = false;
};

// Phases take milliseconds, of which a tenth matters.
std::string Time(std::uint64_t ns) {
  const bool milliseconds = ns >= 1'000'000 && ns < 1'000'000'000;
  return milliseconds ? fmt::format("{:.1f} ms", static_cast<double>(ns) / 1e6) : DurationText(ns);
}

std::string WaitText(const CyclePhase& phase, const JobNames& names) {
  if (phase.waits.size() < 2) return "";
  const auto longest = std::ranges::max_element(phase.waits, {}, &PhaseWait::waited_ns);
  return fmt::format("{} ({})", Time(longest->waited_ns), names.ShortName(longest->session));
}

void PrintCycle(Output& out, const JobCycle& cycle, const JobNames& names) {
  out.Styled(Output::Style::kHeading,
             fmt::format("{} of {} at {}: {} in {}", CycleName(cycle), Plural(cycle.members, "session"),
                         WallText(cycle.began_ns), cycle.outcome, Time(cycle.took_ns)))
      << "\n";
  if (cycle.seen < cycle.members)
    out << "  of " << Plural(cycle.members - cycle.seen, "session")
        << " there is no journal here: who was last among the others is told\n";
  out << "  PHASE                       TOOK      LAST      OTHERS WAITED       LONGEST STEP OF THE LAST\n";
  for (const CyclePhase& phase : cycle.phases) {
    (out << "  ").Left(phase.name, 28).Left(Time(phase.took_ns), 10).Left(names.ShortName(phase.last), 10);
    const std::string waited = WaitText(phase, names);
    const std::string step = phase.step.empty() ? "" : fmt::format("{}: {}", phase.step, Time(phase.step_ns));
    out.Left(waited, step.empty() ? 0 : 20) << step << "\n";
  }
}

struct Share {
  std::uint64_t times_last = 0, cost_ns = 0;
};

// How often each session was the last one, and how much sooner the phases would have been over without it.
std::map<SessionId, Share> Shares(const std::vector<JobCycle>& cycles) {
  std::map<SessionId, Share> shares;
  for (const JobCycle& cycle : cycles) {
    for (const CyclePhase& phase : cycle.phases) {
      if (phase.waits.size() < 2) continue;
      Share& share = shares[phase.last];
      ++share.times_last;
      share.cost_ns += phase.cost_ns;
    }
  }
  return shares;
}

void PrintShares(Output& out, const std::map<SessionId, Share>& shares, std::size_t cycles, const JobNames& names) {
  std::vector<std::pair<SessionId, Share>> sorted(shares.begin(), shares.end());
  std::ranges::stable_sort(sorted, std::greater(), [](const auto& s) { return s.second.cost_ns; });
  out << "\nOver " << Plural(cycles, "pause and resume", "pauses and resumes")
      << ":\n  LAST      PHASES   COST (had it been as fast as the next one)\n";
  for (const auto& [session, share] : sorted) {
    (out << "  ").Left(names.ShortName(session), 10).Left(Grouped(share.times_last), 9) << Time(share.cost_ns) << "\n";
  }
}

Json ToJson(const JobCycle& cycle, const JobNames& names) {
  const auto rank = [&names](SessionId session) {
    return names.RankOf(session) < 0 ? Json(nullptr) : Json(names.RankOf(session));
  };
  Json phases = Json::array();
  for (const CyclePhase& phase : cycle.phases) {
    Json waits = Json::array();
    for (const PhaseWait& wait : phase.waits)
      waits.push_back({{"session", SessionText(wait.session)}, {"rank", rank(wait.session)}, {"waited_ns", wait.waited_ns}});
    Json step = nullptr;
    if (!phase.step.empty()) step = {{"text", phase.step}, {"took_ns", phase.step_ns}};
    phases.push_back({{"phase", phase.name},
                      {"took_ns", phase.took_ns},
                      {"last", {{"session", SessionText(phase.last)}, {"rank", rank(phase.last)}}},
                      {"cost_ns", phase.cost_ns},
                      {"waits", waits},
                      {"longest_step", step}});
  }
  return {{"cycle", CycleName(cycle)}, {"outcome", cycle.outcome},  {"began_wall_ns", cycle.began_ns},
          {"took_ns", cycle.took_ns},  {"sessions", cycle.members}, {"journals", cycle.seen},
          {"phases", phases}};
}

Json ToJson(const std::vector<JobCycle>& cycles, const JobNames& names) {
  Json list = Json::array(), shares = Json::array();
  for (const JobCycle& cycle : cycles) list.push_back(ToJson(cycle, names));
  for (const auto& [session, share] : Shares(cycles))
    shares.push_back({{"session", SessionText(session)},
                      {"rank", names.RankOf(session) < 0 ? Json(nullptr) : Json(names.RankOf(session))},
                      {"phases_last", share.times_last},
                      {"cost_ns", share.cost_ns}});
  return {{"cycles", list}, {"last", shares}};
}

int RunCriticalPath(const CriticalPathOptions& options, Output& out) {
  bool failed = false;
  JobNames names;
  std::vector<SessionCycles> sessions;
  ForEachJournal(SelectSessions(options.directories, options.all, failed).latest, failed,
                 [&](const std::filesystem::path&, JournalReader& reader, ReadReport& damage) -> Status {
                   Result<SessionCycles> read = ReadCycles(reader, damage);
                   if (!read) return read.status();
                   names.Add(read->who);
                   sessions.push_back(*std::move(read));
                   return {};
                 });
  if (sessions.empty()) return kCannotRead;
  std::vector<JobCycle> cycles = JoinCycles(sessions);
  if (cycles.size() > options.last) cycles.erase(cycles.begin(), cycles.end() - static_cast<std::ptrdiff_t>(options.last));
  if (options.json) {
    PrintJson(out, ToJson(cycles, names));
  } else if (cycles.empty()) {
    out << "no pause or resume has begun\n";
  } else {
    for (std::size_t i = 0; i < cycles.size(); ++i) {
      out << (i == 0 ? "" : "\n");
      PrintCycle(out, cycles[i], names);
    }
    if (const auto shares = Shares(cycles); !shares.empty()) PrintShares(out, shares, cycles.size(), names);
  }
  return failed ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, CriticalPathOptions& options) {
  AddDirectories(arguments, options.directories);
  arguments.Add("--last", "N", options.last, "The last N pauses and resumes; 2 by default", std::uint64_t{1});
  arguments.Flag("--all", options.all, "All sessions, not only those of the latest job");
  AddJson(arguments, options.json);
}

}  // namespace

Command CriticalPathCommand() {
  return {"critical-path", "Who made each phase of a pause or resume slow, and how long the others waited",
          "  amem-replay critical-path DIR                 the last pause and the last resume\n"
          "  amem-replay critical-path DIR --last 100      and who was the last one most often\n",
          [](Arguments& arguments) { return SetUp<CriticalPathOptions>(arguments, AddOptions, RunCriticalPath); }};
}

}  // namespace amem::tool
