// state: everything AMem knew after one event.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"
#include "statemachine/apply.h"

namespace amem::tool {
namespace {

struct StateOptions {
  Directories directories;
  std::optional<std::uint64_t> at;
  std::string session;  // empty: the only one
  bool json = false;
};

void PrintCycle(Output& out, const State& state) {
  const Cycle& cycle = state.cycle;
  out << "lifecycle  " << ToText(state.lifecycle) << ", " << Plural(state.cycles, "pause") << " begun\n";
  const bool running = state.lifecycle == Lifecycle::kPausing || state.lifecycle == Lifecycle::kResuming;
  if (running)
    out << "cycle      " << ToText(cycle.kind) << " " << cycle.number << " of " << cycle.members.size() << " sessions\n";
  if (running && cycle.phase) out << "phase      " << ToText(*cycle.phase) << "\n";
  if (cycle.open_step) out << "open step  " << ToText(*cycle.open_step) << " (begun, neither done nor failed)\n";
  if (!cycle.failure.empty()) out << "failure    " << cycle.failure << "\n";
  if (!state.broken.empty()) out << "broken     " << state.broken << "\n";
}

void PrintHoldings(Output& out, const State& state) {
  const Holdings h = Measure(state);
  out << "memory     own " << Grouped(h.own_count) << " allocations " << FormatBytes(h.own_device) << ", on the device now "
      << FormatBytes(h.own_device_resident) << "\n";
  out << "           imported " << Grouped(h.imported_count) << " allocations " << FormatBytes(h.imported) << ", pinned host "
      << FormatBytes(h.host) << ", cuMemAllocAsync " << FormatBytes(h.async) << ", cuMemAlloc kept "
      << FormatBytes(h.legacy_kept) << "\n";
  if (h.user != 0)
    out << "           of the program (ncclMemAlloc) " << FormatBytes(h.user) << ", on the device now "
        << FormatBytes(h.user_resident) << "\n";
  for (const auto& [reason, bytes] : h.kept) {
    if (reason != KeepReason::kNone) {
      out << "           a pause leaves " << FormatBytes(bytes) << " in place: " << ToText(reason) << "\n";
    }
  }
}

void PrintPools(Output& out, const State& state) {
  for (const auto& [id, holdings] : MeasurePools(state)) {
    const Pool& pool = state.pools.at(id);
    out << "tag        " << pool.tag << " (" << ToText(pool.policy) << ") " << ToText(pool.lifecycle) << ", "
        << Plural(pool.cycles, "pause") << " begun, " << Plural(holdings.chunk_count, "chunk") << " "
        << FormatBytes(holdings.own) << ", on the device now " << FormatBytes(holdings.own_resident) << ", "
        << Plural(holdings.part_count, "part") << " in use " << FormatBytes(holdings.parts) << "\n";
    for (const auto& [reason, bytes] : holdings.kept)
      out << "           a pause leaves " << FormatBytes(bytes) << " in place: " << ToText(reason) << "\n";
    if (pool.cycle.phase) out << "           phase " << ToText(*pool.cycle.phase) << "\n";
    if (pool.cycle.open_step)
      out << "           open step " << ToText(*pool.cycle.open_step) << " (begun, neither done nor failed)\n";
    if (!pool.cycle.failure.empty()) out << "           failure " << pool.cycle.failure << "\n";
  }
}

void PrintPeers(Output& out, const State& state) {
  for (const auto& [id, peer] : state.peers) {
    const SessionOpened who{.host = peer.host, .pid = peer.pid, .rank = peer.rank};
    out << "peer       " << SessionText(id) << " " << NameOf(who) << ", group " << peer.group
        << (peer.connected ? "" : ", lost: " + peer.lost_reason) << "\n";
  }
}

void PrintAllocation(Output& out, AllocationId id, const Allocation& a, const std::vector<Address>& places) {
  out.Padded(id.value, 6, ' ') << "  ";
  out.Left(FormatBytes(a.bytes), 11).Left(ToText(a.properties.location), 10)
      << (a.resident ? "" : "released, ") << (a.saved ? "saved, " : "");
  if (a.remote) {
    out << "allocation " << a.remote->allocation.value << " of session " << SessionText(a.remote->owner);
  } else {
    out << (a.multicast ? "multicast" : "own");
    if (a.pool) out << ", a chunk of " << ToText(a.pool);
  }
  for (Address place : places) out << ", at " << Hex(place.value);
  for (const auto& [importer, count] : a.importers) {
    out << ", held by " << SessionText(importer.by) << " as " << importer.as.value;
    if (count != 1) out << " (" << count << " times)";
  }
  if (WhyKept(a) != KeepReason::kNone) out << ", a pause leaves it: " << ToText(WhyKept(a));
  if (a.site.frames[0] != 0) out << ", created at " << ToText(a.site);
  out << "\n";
}

void PrintText(Output& out, const State& state) {
  out << "session    " << SessionText(state.session.session) << ", " << NameOf(state.session) << "\n";
  out << "after      event " << state.last.value << ", digest " << Hex(Digest(state)) << "\n";
  PrintCycle(out, state);
  PrintHoldings(out, state);
  PrintPools(out, state);
  PrintPeers(out, state);

  std::map<AllocationId, std::vector<Address>> places;
  for (const auto& [address, mapping] : state.mappings) places[mapping.allocation].push_back(address);
  if (!state.allocations.empty()) out << "\nALLOCATIONS\n";
  for (const auto& [id, allocation] : state.allocations) {
    PrintAllocation(out, id, allocation, places[id]);
    if (out.ReaderGone()) return;
  }
  if (!state.legacy.empty()) out << "\nCUMEMALLOC\n";
  for (const auto& [address, legacy] : state.legacy) {
    out << "  " << Hex(address.value) << "  " << FormatBytes(legacy.bytes) << "  "
        << (legacy.backing ? fmt::format("in allocation {}", legacy.backing.value) : "kept by the driver: " + legacy.why)
        << "\n";
  }
}

int RunState(const StateOptions& options, Output& out) {
  bool failed = false;
  std::vector<std::filesystem::path> sessions = FindSessions(options.directories, failed);
  if (!options.session.empty() && !failed) {
    std::erase_if(sessions, [&](const auto& directory) { return directory.filename() != options.session; });
    if (sessions.empty())
      return Complain("--session: there is no session " + options.session + " here; `amem-replay ls` lists them", kUsage);
  }
  if (failed || sessions.empty()) return kCannotRead;
  if (sessions.size() > 1)
    return Complain(
        fmt::format("there are {} sessions and state is about one: give its directory, or --session, for example {}",
                    sessions.size(), sessions.front().filename().string()),
        kUsage);
  Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(sessions.front());
  if (!reader) return Complain(reader.status().message());
  std::optional<SequenceNumber> at;
  if (options.at) at = SequenceNumber{*options.at};
  ReadReport report;
  const Result<State> state = (*reader)->StateAt(at, &report);
  if (!state) return Complain(state.status().message());
  options.json ? PrintJson(out, ToJson(*state)) : PrintText(out, *state);
  return ComplainAboutDamage(sessions.front(), report) ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, StateOptions& options) {
  AddDirectories(arguments, options.directories);
  arguments.Add("--session", "ID", options.session, "The session, where there are several");
  arguments.Add("--at", "SEQ", options.at, "After this event; default: the last one");
  AddJson(arguments, options.json);
}

}  // namespace

Command StateCommand() {
  return {"state", "What AMem knew after an event: allocations, mappings, references, where a cycle stood",
          "  amem-replay state DIR\n"
          "  amem-replay state DIR --at 1200 --json\n",
          [](Arguments& arguments) { return SetUp<StateOptions>(arguments, AddOptions, RunState); }};
}

}  // namespace amem::tool
