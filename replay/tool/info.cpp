// info: what a journal is and how far it goes. ls: all sessions of a directory, one a line.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/tool/command.h"
#include "statemachine/apply.h"

namespace amem::tool {
namespace {

using Json = nlohmann::ordered_json;

struct Facts {
  JournalInfo info;
  State state;
  ReadReport report;
};

Result<Facts> Gather(const std::filesystem::path& session) {
  Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session);
  if (!reader) return reader.status();
  Result<JournalInfo> info = (*reader)->Info();
  if (!info) return info.status();
  Facts facts{.info = *std::move(info)};
  Result<State> state = (*reader)->StateAt(std::nullopt, &facts.report);
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
  for (const char* key : {"opened", "lifecycle", "digest", "cycles", "cycle", "holdings", "libraries", "peers"}) {
    j[key] = std::move(state[key]);
  }
  j["events_by_kind"] = std::move(state["events"]);
  return j;
}

std::string Dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}

// "label     value", nothing if there is no value.
void Line(Output& out, std::string_view label, const std::string& value) {
  if (value.empty()) return;
  (out << "  ").Left(label, 12) << value << "\n";
}

std::string Joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : ", ") + word;
  return all;
}

std::string Counts(const State& state) {
  std::string all;
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    const std::uint64_t count = state.totals.events[kind];
    if (count != 0) all += (all.empty() ? "" : ", ") + std::string(KindName(kind)) + " " + Grouped(count);
  }
  return all;
}

std::string Memory(const State& state) {
  const Holdings h = Measure(state);
  std::string text = Grouped(h.own_count) + " own allocations " + FormatBytes(h.own_device) + " (" +
                     FormatBytes(h.own_device_resident) + " on the device now), " + Grouped(h.imported_count) + " imported " +
                     FormatBytes(h.imported);
  if (h.host != 0) text += ", pinned host " + FormatBytes(h.host);
  if (h.async != 0) text += ", pools " + FormatBytes(h.async);
  if (h.legacy_kept != 0) text += ", cuMemAlloc kept " + FormatBytes(h.legacy_kept);
  for (const auto& [reason, bytes] : h.kept) {
    if (reason != KeepReason::kNone) text += ", stays (" + std::string(ToText(reason)) + ") " + FormatBytes(bytes);
  }
  return text;
}

void PrintText(Output& out, const Facts& facts) {
  const JournalInfo& info = facts.info;
  const SessionOpened& who = facts.state.session;
  out << "session " << SessionText(info.session) << "  " << ToText(info.status) << "\n";
  Line(out, "process", NameOf(who) + ", group " + std::to_string(who.group));
  Line(out, "opened", DateText(who.realtime_ns));
  Line(out, "versions",
       "AMem " + who.amem_version + (who.driver_version.empty() ? "" : ", driver " + who.driver_version) +
           (who.nccl_version.empty() ? "" : ", NCCL " + who.nccl_version));
  Line(out, "GPUs", Joined(who.gpu_uuids));
  Line(out, "settings", "layout " + who.layout + ", content " + who.content);
  for (const LibraryAttached& library : facts.state.libraries) {
    Line(out, "library", library.path + " (" + library.way + "), build " + library.build_id);
  }
  Line(out, "journal",
       info.directory.string() + ", format " + std::to_string(info.format) + ", " + FormatBytes(info.file_bytes));
  Line(out, "events",
       Grouped(info.events) + ", numbers " + std::to_string(info.first.value) + " to " + std::to_string(info.last.value) +
           (facts.report.torn_tail ? ", the last append was cut short" : ""));
  Line(out, "kinds", Counts(facts.state));
  Line(out, "state",
       std::string(ToText(facts.state.lifecycle)) + ", " + Grouped(facts.state.cycles) +
           (facts.state.cycles == 1 ? " pause" : " pauses") + ", digest " + Hex(Digest(facts.state)));
  Line(out, "memory", Memory(facts.state));
  Line(out, "failure", facts.state.cycle.failure);
  Line(out, "broken", info.broken_reason.empty() ? facts.state.broken : info.broken_reason);
}

}  // namespace

int RunInfo(const InfoOptions& options, Output& out) {
  bool failed = false;
  Json list = Json::array();
  bool first = true;
  for (const auto& session : FindSessions(options.directories, failed)) {
    const Result<Facts> facts = Gather(session);
    if (!facts) {
      Complain(facts.status().message());
      failed = true;
      continue;
    }
    failed |= ComplainAboutDamage(session, facts->report);
    if (options.json) {
      list.push_back(ToJson(*facts));
    } else {
      if (!first) out << "\n";
      PrintText(out, *facts);
    }
    first = false;
  }
  if (options.json) out << Dump(list, 2) << "\n";
  return failed ? kCannotRead : kFine;
}

int RunList(const ListOptions& options, Output& out) {
  const std::filesystem::path directory = options.directory.empty() ? DefaultDirectory() : options.directory;
  bool failed = false;
  const std::vector<std::filesystem::path> sessions = FindSessions({directory}, failed);
  Json list = Json::array();
  if (!options.json && !sessions.empty()) {
    out << "SESSION           STATUS   RANK  PID      EVENTS    STATE     HELD        OPENED                   HOST\n";
  }
  for (const auto& session : sessions) {
    const Result<Facts> facts = Gather(session);
    if (!facts) {
      Complain(facts.status().message());
      failed = true;
      continue;
    }
    if (options.json) {
      list.push_back(ToJson(*facts));
      continue;
    }
    const SessionOpened& who = facts->state.session;
    out.Left(SessionText(facts->info.session), 18).Left(ToText(facts->info.status), 9);
    out.Left(who.rank < 0 ? "-" : std::to_string(who.rank), 6).Left(std::to_string(facts->info.pid), 9);
    out.Left(Grouped(facts->info.events), 10).Left(ToText(facts->state.lifecycle), 10);
    out.Left(FormatBytes(Measure(facts->state).own_device_resident), 12).Left(DateText(who.realtime_ns), 25)
        << who.host << "\n";
  }
  if (options.json) out << Dump(list, 2) << "\n";
  return failed ? kCannotRead : kFine;
}

}  // namespace amem::tool
