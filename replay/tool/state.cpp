// state: everything AMem knew after one event, or what changed between two.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/tool/command.h"
#include "replay/tool/position.h"
#include "statemachine/apply.h"

namespace amem::tool {
namespace {

struct StateOptions {
  Targets targets{.names = {}, .ranks = {}, .one_process = true};
  std::string at, to;  // positions; empty: the last event
  bool json = false;
};

void PrintCycle(Output& out, const State& state) {
  const Cycle& cycle = state.cycle;
  out << "lifecycle  " << ToText(state.lifecycle) << ", " << Plural(state.cycles, "pause") << " begun\n";
  const bool running = state.lifecycle == Lifecycle::kPausing || state.lifecycle == Lifecycle::kResuming;
  if (running)
    out << "cycle      " << ToText(cycle.kind) << " " << cycle.number << " of " << cycle.members.size() << " processes\n";
  if (running && cycle.phase) out << "phase      " << ToText(*cycle.phase) << "\n";
  if (cycle.open_step) out << "open step  " << ToText(*cycle.open_step) << " (begun, neither done nor failed)\n";
  if (!cycle.failure.empty()) out << "failure    " << cycle.failure << "\n";
  if (!state.broken.empty()) out << "broken     " << state.broken << "\n";
}

void PrintHoldings(Output& out, const State& state) {
  const Holdings h = Measure(state);
  out << "memory     requested " << FormatBytes(h.own_device) << " in " << Plural(h.own_count, "allocation");
  if (h.slab_count != 0) out << ", most in " << Plural(h.slab_count, "slab") << " of " << FormatBytes(h.slabs) << " in all";
  out << "; held on devices now " << FormatBytes(h.own_device_resident) << "\n";
  out << "           imported " << Grouped(h.imported_count) << " allocations of " << FormatBytes(h.imported)
      << ", pinned host " << FormatBytes(h.host) << ", cuMemAllocAsync " << FormatBytes(h.async) << ", cuMemAlloc kept "
      << FormatBytes(h.legacy_kept) << "\n";
  if (h.user != 0)
    out << "           of the program (ncclMemAlloc) " << FormatBytes(h.user) << ", held on devices now "
        << FormatBytes(h.user_resident) << "\n";
  for (const auto& [what, share] : state.outside) {
    if (what.second == OutsideKind::kUnseen) continue;
    out << "           past AMem, through " << what.first << ": " << ToText(what.second) << ", "
        << Plural(share.pieces, "piece") << " " << FormatBytes(share.bytes) << "\n";
  }
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
        << FormatBytes(holdings.own) << ", held on devices now " << FormatBytes(holdings.own_resident) << ", "
        << Plural(holdings.part_count, "part") << " in use " << FormatBytes(holdings.parts) << "\n";
    for (const auto& [reason, bytes] : holdings.kept)
      out << "           a pause leaves " << FormatBytes(bytes) << " in place: " << ToText(reason) << "\n";
    if (pool.cycle.phase) out << "           phase " << ToText(*pool.cycle.phase) << "\n";
    if (pool.cycle.open_step)
      out << "           open step " << ToText(*pool.cycle.open_step) << " (begun, neither done nor failed)\n";
    if (!pool.cycle.failure.empty()) out << "           failure " << pool.cycle.failure << "\n";
  }
}

}  // namespace

void PrintStanding(Output& out, const State& state) {
  PrintCycle(out, state);
  PrintHoldings(out, state);
  PrintPools(out, state);
}

namespace {

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
  PrintStanding(out, state);
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

// As --rank takes it.
std::string RankOrSession(const std::filesystem::path& session) {
  const auto reader = JournalReader::Open(session);
  const auto opening = reader ? ReadOpening(**reader) : Result<Opening>(reader.status());
  return opening && opening->who.rank >= 0 ? std::to_string(opening->who.rank) : session.filename().string();
}

// The only session of a target. Nothing: it was complained about.
std::optional<std::filesystem::path> OnlySession(const Targets& targets, Exit& code) {
  bool failed = false;
  const std::vector<std::filesystem::path> sessions = FindSessions(targets, failed);
  code = kCannotRead;
  if (failed || sessions.empty()) return std::nullopt;
  if (sessions.size() == 1) return sessions.front();
  code = Complain(fmt::format("there are {} sessions, and state is about one: give --rank, as in --rank {}", sessions.size(),
                              RankOrSession(sessions.front())),
                  kUsage);
  return std::nullopt;
}

// The state at a position of the target's only session; `failed`: some of its journal could not be read.
std::optional<State> StateOf(const Targets& targets, const char* option, const std::string& text, Exit& code, bool& failed) {
  std::optional<SequenceNumber> at;
  const std::optional<std::filesystem::path> session = OnlySession(targets, code);
  if (!session) return std::nullopt;
  const Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(*session);
  if (reader && !text.empty()) {
    const Result<Position> position = UnderstandPosition(option, text);
    const Result<SequenceNumber> seq = position ? EventAt(*position, **reader) : position.status();
    if (!seq) return code = Complain(seq.status().message(), position ? kCannotRead : kUsage), std::nullopt;
    at = *seq;
  }
  ReadReport report;
  Result<State> state = reader ? (*reader)->StateAt(at, &report) : reader.status();
  if (!state) return code = Complain(state.status().message()), std::nullopt;
  failed |= ComplainAboutDamage(*session, report);
  return *std::move(state);
}

int RunState(const StateOptions& options, Output& out) {
  const bool two = options.targets.names.size() == 2;
  Targets first = options.targets, second = options.targets;
  if (two) first.names.pop_back();
  if (two) second.names.erase(second.names.begin());
  Exit code = kFine;
  bool failed = false;
  const std::optional<State> a = StateOf(first, "--at", options.at, code, failed);
  if (!a) return code;
  if (!two && options.to.empty()) {
    options.json ? PrintJson(out, ToJson(*a)) : PrintText(out, *a);
    return failed ? kCannotRead : kFine;
  }
  const std::optional<State> b = StateOf(second, "--to", options.to, code, failed);
  if (!b) return code;
  const bool different = PrintDifference(*a, *b, options.json, out);
  return failed ? kCannotRead : different ? kViolationFound : kFine;
}

void AddOptions(Arguments& arguments, StateOptions& options) {
  AddTargets(arguments, options.targets);
  arguments.Add("--at", kPosition, options.at, "After this event (--at=#1200), or then; default: the last event");
  arguments.Add(
      "--to", kPosition, options.to,
      "What changed from --at to there; of two targets: what is different between the first, at --at, and the second");
  AddJson(arguments, options.json);
}

}  // namespace

Command StateCommand() {
  return {kMemoryGroup, "state", "What AMem knew after an event; --to: what changed",
          "  amem state DIR\n"
          "  amem state job.amem --rank 2 --at=#1200 --json\n"
          "  amem state DIR --at=#1200 --to=#1300          what changed between two events\n"
          "  amem state DIR --at 12.5 --to 13\n"
          "  amem state DIR_A DIR_B --to=#1200             between two journals\n",
          [](Arguments& arguments) { return SetUp<StateOptions>(arguments, AddOptions, RunState); }};
}

}  // namespace amem::tool
