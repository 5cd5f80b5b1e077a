// info: what a journal is and how far it goes. ls: all sessions of a directory, one a line.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"
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
    return state.status().Within(session.string() +
                                 ": the state cannot be computed (`amem-replay verify` says where it breaks)");
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
            {"directory", info.directory.string()},
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
  (out << "  ").Left(label, 12) << value << "\n";
}

std::string Counts(const State& state) {
  std::string all;
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    const std::uint64_t count = state.totals.events[kind];
    if (count != 0) all += fmt::format("{}{} {}", all.empty() ? "" : ", ", KindName(kind), Grouped(count));
  }
  return all;
}

std::string Memory(const State& state) {
  const Holdings h = Measure(state);
  std::string text = fmt::format("{} own allocations {} ({} on the device now), {} imported {}", Grouped(h.own_count),
                                 FormatBytes(h.own_device), FormatBytes(h.own_device_resident), Grouped(h.imported_count),
                                 FormatBytes(h.imported));
  if (h.host != 0) text += ", pinned host " + FormatBytes(h.host);
  if (h.async != 0) text += ", cuMemAllocAsync " + FormatBytes(h.async);
  if (h.legacy_kept != 0) text += ", cuMemAlloc kept " + FormatBytes(h.legacy_kept);
  if (h.user != 0) text += ", of the program (ncclMemAlloc) " + FormatBytes(h.user);
  for (const auto& [reason, bytes] : h.kept) {
    if (reason != KeepReason::kNone) text += fmt::format(", stays ({}) {}", ToText(reason), FormatBytes(bytes));
  }
  return text;
}

std::string Tags(const State& state) {
  std::string text;
  for (const auto& [id, holdings] : MeasurePools(state)) {
    const Pool& pool = state.pools.at(id);
    text += fmt::format("{}{} ({}, {}) {}, on the device now {}", text.empty() ? "" : "; ", pool.tag, ToText(pool.policy),
                        ToText(pool.lifecycle), FormatBytes(holdings.own), FormatBytes(holdings.own_resident));
    if (!pool.cycle.failure.empty()) text += ", failed: " + pool.cycle.failure;
  }
  return text;
}

void PrintText(Output& out, const Facts& facts) {
  const JournalInfo& info = facts.info;
  const SessionOpened& who = facts.state.session;
  out << "session " << SessionText(info.session) << "  " << ToText(info.status) << "\n";
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
  Line(out, "journal", fmt::format("{}, format {}, {}", info.directory.string(), info.format, FormatBytes(info.file_bytes)));
  Line(out, "events",
       fmt::format("{}, numbers {} to {}{}", Grouped(info.events), info.first.value, info.last.value,
                   facts.report.torn_tail ? ", the last append was cut short" : ""));
  Line(out, "kinds", Counts(facts.state));
  Line(out, "state",
       fmt::format("{}, {}, digest {}", ToText(facts.state.lifecycle), Plural(facts.state.cycles, "pause"),
                   Hex(Digest(facts.state))));
  Line(out, "memory", Memory(facts.state));
  Line(out, "tags", Tags(facts.state));
  Line(out, "failure", facts.state.cycle.failure);
  Line(out, "broken", info.broken_reason.empty() ? facts.state.broken : info.broken_reason);
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

struct InfoOptions {
  Directories directories;
  bool json = false;
};

int RunInfo(const InfoOptions& options, Output& out) {
  bool failed = false;
  bool first = true;
  const std::vector<std::filesystem::path> sessions = FindSessions(options.directories, failed);
  return ShowAll(sessions, options.json, failed, true, out, [&](const Facts& facts) {
    if (!std::exchange(first, false)) out << "\n";
    PrintText(out, facts);
  });
}

void AddOptions(Arguments& arguments, InfoOptions& options) {
  AddDirectories(arguments, options.directories);
  AddJson(arguments, options.json, "One JSON array");
}

struct ListOptions {
  Directories directories;
  bool json = false;
};

void PrintRow(Output& out, const Facts& facts) {
  const SessionOpened& who = facts.state.session;
  out.Left(SessionText(facts.info.session), 18).Left(ToText(facts.info.status), 9);
  out.Left(who.rank < 0 ? "-" : std::to_string(who.rank), 6).Left(std::to_string(facts.info.pid), 9);
  out.Left(Grouped(facts.info.events), 10).Left(ToText(facts.state.lifecycle), 10);
  const Holdings h = Measure(facts.state);
  out.Left(RoundedBytes(h.own_device_resident + h.pools_resident), 12).Left(DateText(who.realtime_ns), 25) << who.host << "\n";
}

int RunList(const ListOptions& options, Output& out) {
  bool failed = false;
  const std::vector<std::filesystem::path> sessions = FindSessions(options.directories, failed);
  if (!options.json && !sessions.empty()) {
    out.Styled(Output::Style::kHeading,
               "SESSION           STATUS   RANK  PID      EVENTS    STATE     HELD        OPENED                   HOST")
        << "\n";
  }
  return ShowAll(sessions, options.json, failed, false, out, [&out](const Facts& facts) { PrintRow(out, facts); });
}

void AddOptions(Arguments& arguments, ListOptions& options) {
  AddDirectories(arguments, options.directories);
  AddJson(arguments, options.json, "One JSON array");
}

}  // namespace

Command InfoCommand() {
  return {"info", "What a journal is: process, versions, events, memory held, last failure",
          "  amem-replay info /tmp/amem-1000/journal/00c0ffee00c0ffee\n"
          "  amem-replay info --json DIR | jq '.[].holdings'\n",
          [](Arguments& arguments) { return SetUp<InfoOptions>(arguments, AddOptions, RunInfo); }};
}

Command ListCommand() {
  return {"ls", "The sessions of a directory, newest first",
          "  amem-replay ls                  sessions of this user on this host\n"
          "  amem-replay ls /data/job17      journals that were copied from elsewhere\n",
          [](Arguments& arguments) { return SetUp<ListOptions>(arguments, AddOptions, RunList); }};
}

}  // namespace amem::tool
