// ls: the sessions of a directory, one a line, or with -v all that each is and how far it goes.
#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "journal/session_dir.h"
#include "journal/tail.h"
#include "replay/control/job_control.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "replay/tool/command.h"
#include "replay/tool/control/request.h"
#include "replay/tool/targets.h"
#include "statemachine/apply.h"
#include "statemachine/event.h"

namespace amem::tool {
namespace {

using Json = nlohmann::ordered_json;

struct Facts {
  JournalInfo info;
  State state;
  ReadReport report;
};

Result<Facts> Gather(const std::filesystem::path& session, JournalReader& reader) {
  Result<JournalInfo> info = reader.Info();
  if (!info) return info.status();
  Facts facts{.info = *std::move(info)};
  Result<State> state = reader.StateAt(std::nullopt, &facts.report);
  if (!state) {
    return state.status().Within(session.string() + ": the state cannot be computed (`amem verify` says where it breaks)");
  }
  facts.state = *std::move(state);
  return facts;
}

Json ToJson(const Facts& facts) {
  const JournalInfo& info = facts.info;
  Json snapshots = Json::array();
  for (SequenceNumber snapshot : info.snapshots) snapshots.push_back(snapshot.value);
  Json j = {{"session", SessionText(info.session)},
            {"status", ToText(info.status)},
            {"broken_reason", info.broken_reason},
            {"directory", PlaceOf(info.directory)},
            {"format", info.format},
            {"first", info.first.value},
            {"last", info.last.value},
            {"events", info.events},
            {"file_bytes", info.file_bytes},
            {"snapshots", std::move(snapshots)},
            {"torn_tail", facts.report.torn_tail},
            {"corrupt_records", facts.report.corrupt_records}};
  Json state = amem::ToJson(facts.state);
  for (const char* key : {"opened", "lifecycle", "digest", "cycles", "cycle", "holdings", "pools", "libraries", "peers"}) {
    j[key] = std::move(state[key]);
  }
  j["events_by_kind"] = std::move(state["events"]);
  return j;
}

// "label     value", nothing if there is no value.
void Line(Output& out, std::string_view label, const std::string& value) {
  if (value.empty()) return;
  out.Left(label, 11) << value << "\n";
}

std::string Counts(const State& state) {
  std::string all;
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    const std::uint64_t count = state.totals.events[kind];
    if (count != 0) all += fmt::format("{}{} {}", all.empty() ? "" : ", ", KindName(kind), Grouped(count));
  }
  return all;
}

void PrintText(Output& out, const Facts& facts) {
  const JournalInfo& info = facts.info;
  const SessionOpened& who = facts.state.session;
  Line(out, "session", fmt::format("{}  {}", SessionText(info.session), ToText(info.status)));
  Line(out, "process", fmt::format("{}, group {}", NameOf(who), who.group));
  Line(out, "opened", DateText(who.realtime_ns));
  Line(out, "versions",
       "AMem " + who.amem_version + (who.driver_version.empty() ? "" : ", driver " + who.driver_version) +
           (who.nccl_version.empty() ? "" : ", NCCL " + who.nccl_version));
  Line(out, "GPUs", fmt::format("{}", fmt::join(who.gpu_uuids, ", ")));
  Line(out, "settings", "layout " + who.layout + ", content " + who.content);
  for (const LibraryAttached& library : facts.state.libraries) {
    Line(out, "library", library.path + " (" + library.way + "), build " + library.build_id);
  }
  Line(out, "journal", fmt::format("{}, format {}, {}", PlaceOf(info.directory), info.format, FormatBytes(info.file_bytes)));
  Line(out, "events",
       fmt::format("{}, numbers {} to {}{}", Grouped(info.events), info.first.value, info.last.value,
                   facts.report.torn_tail ? ", the last append was cut short" : ""));
  Line(out, "kinds", Counts(facts.state));
  Line(out, "digest", Hex(Digest(facts.state)));
  if (facts.state.broken.empty()) Line(out, "broken", info.broken_reason);
  PrintStanding(out, facts.state);
}

// Shows the facts of each journal, or all of them as one JSON array.
int ShowAll(const std::vector<std::filesystem::path>& sessions, bool json, bool failed, bool tell_damage, Output& out,
            const std::function<void(const Facts&)>& show) {
  Json list = Json::array();
  ForEachJournal(sessions, failed, [&](const std::filesystem::path& session, JournalReader& reader, ReadReport& damage) {
    const Result<Facts> facts = Gather(session, reader);
    if (!facts) return facts.status();
    if (tell_damage) damage = facts->report;
    json ? list.push_back(ToJson(*facts)) : show(*facts);
    return Status{};
  });
  if (json && (!failed || !list.empty())) PrintJson(out, list, "session");
  return failed ? kCannotRead : kFine;
}

struct ListOptions {
  Targets targets;
  bool verbose = false, live = false, json = false;
};

int PrintVerbosely(const std::vector<std::filesystem::path>& sessions, Output& out, bool failed) {
  bool first = true;
  return ShowAll(sessions, false, failed, true, out, [&](const Facts& facts) {
    if (!std::exchange(first, false)) out << "\n";
    PrintText(out, facts);
  });
}

// What living processes say of themselves, by the directory of the session.
using Looks = std::map<std::filesystem::path, control::RankLook>;

Looks LookAtLiving(const std::vector<std::filesystem::path>& sessions) {
  std::vector<control::RankPlace> living;
  for (const auto& session : sessions) {
    const std::optional<SessionId> id = SessionOfName(session.filename().string());
    if (id && WriterIsAlive(session / "tail")) living.push_back({.session = *id, .directory = session});
  }
  Looks looks;
  if (living.empty()) return looks;
  for (control::RankLook& look : control::LookAt(living, DefaultSocketDirectory()))
    if (look.alive) looks.emplace(look.directory, std::move(look));
  return looks;
}

std::string PausedBy(const control::RankLook& look) {
  return look.paused_by_program ? "program" : look.paused ? "request" : "-";
}

void PrintRow(Output& out, const Facts& facts, const Looks& looks) {
  const SessionOpened& who = facts.state.session;
  const bool lived = facts.info.status == SessionStatus::kLive && !LivesNow(facts.info);  // when it was packed
  out.Left(SessionText(facts.info.session), 18).Left(lived ? "packed" : ToText(facts.info.status), 9);
  out.Left(who.rank < 0 ? "-" : std::to_string(who.rank), 6).Left(std::to_string(facts.info.pid), 9);
  out.Left(Grouped(facts.info.events), 10).Left(ToText(facts.state.lifecycle), 10);
  const Holdings h = Measure(facts.state);
  out.Left(RoundedBytes(h.own_device_resident + h.pools_resident), 12);
  if (!looks.empty()) {
    const auto look = looks.find(facts.info.directory);
    const bool known = look != looks.end();
    out.Left(known ? Grouped(look->second.steps) : "-", 12).Left(known ? PausedBy(look->second) : "-", 11);
  }
  out.Left(DateText(who.realtime_ns), 25) << who.host << "\n";
}

int RunList(const ListOptions& options, Output& out) {
  if (options.live) return PrintLive(options.targets.names, options.json, out);
  bool failed = false;
  const std::vector<std::filesystem::path> sessions = FindSessions(options.targets, failed);
  if (options.verbose && !options.json) return PrintVerbosely(sessions, out, failed);
  const Looks looks = options.json ? Looks{} : LookAtLiving(sessions);
  if (!options.json && !sessions.empty()) {
    out.Styled(
        Output::Style::kHeading,
        fmt::format("SESSION           STATUS   RANK  PID      EVENTS    STATE     HELD        {}OPENED                   HOST",
                    looks.empty() ? "" : "SAFE POINT  PAUSED BY  "))
        << "\n";
  }
  return ShowAll(sessions, options.json, failed, options.verbose, out,
                 [&](const Facts& facts) { PrintRow(out, facts, looks); });
}

void AddOptions(Arguments& arguments, ListOptions& options) {
  AddTargets(arguments, options.targets);
  arguments.Flag("-v,--verbose", options.verbose, "All of each: process, versions, events, memory held, last failure");
  arguments.Flag(
      "--live", options.live,
      "What the ranks of a living job say of themselves: safe points, whether they are paused and by whom; TARGET is as "
      "for pause");
  AddJson(arguments, options.json, "One JSON array; with --live an object");
}

}  // namespace

Command ListCommand() {
  return {kFailureGroup, "ls", "The sessions, newest first; -v: all of each",
          "  amem ls                         sessions of this user on this host\n"
          "  amem ls 4711                    those of one job\n"
          "  amem ls /data/job17             journals that were copied from elsewhere\n"
          "  amem ls -v 4711 --rank 2\n"
          "  amem ls --json DIR | jq '.[].holdings'\n"
          "  amem ls --live --json | jq '.ranks[] | {rank, phase, safepoints}'\n",
          [](Arguments& arguments) { return SetUp<ListOptions>(arguments, AddOptions, RunList); }};
}

}  // namespace amem::tool
