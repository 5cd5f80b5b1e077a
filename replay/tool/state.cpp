// state: everything AMem knew after one event, or what changed between two.
#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/job/sessions.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"
#include "statemachine/apply.h"

namespace amem::tool {
namespace {

struct StateOptions {
  Targets targets{.names = {}, .ranks = {}, .one_process = true};
  std::vector<Position> at, to;  // empty: the last event
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

void PrintWhatStays(Output& out, const std::map<KeepReason, Bytes>& kept) {
  for (const auto& [reason, bytes] : kept)
    if (reason != KeepReason::kNone)
      out << "           a pause leaves " << FormatBytes(bytes) << " in place: " << ToText(reason) << "\n";
}

void PrintHoldings(Output& out, const State& state, std::string_view when) {
  const Holdings h = Measure(state);
  out << "memory     requested " << FormatBytes(h.own_device) << " in " << Plural(h.own_count, "allocation");
  if (h.slab_count != 0) out << ", most in " << Plural(h.slab_count, "slab") << " of " << FormatBytes(h.slabs) << " in all";
  out << "; held on devices " << when << " " << FormatBytes(h.own_device_resident) << "\n";
  out << "           imported " << Grouped(h.imported_count) << " allocations of " << FormatBytes(h.imported)
      << ", pinned host " << FormatBytes(h.host) << ", cuMemAllocAsync " << FormatBytes(h.async) << ", cuMemAlloc kept "
      << FormatBytes(h.legacy_kept) << "\n";
  if (h.user != 0)
    out << "           of the program (ncclMemAlloc) " << FormatBytes(h.user) << ", held on devices " << when << " "
        << FormatBytes(h.user_resident) << "\n";
  for (const auto& [what, share] : state.outside) {
    if (what.second == OutsideKind::kUnseen) continue;
    out << "           past AMem, through " << what.first << ": " << ToText(what.second) << ", "
        << Plural(share.pieces, "piece") << " " << FormatBytes(share.bytes) << "\n";
  }
  PrintWhatStays(out, h.kept);
}

void PrintPools(Output& out, const State& state, std::string_view when) {
  for (const auto& [id, holdings] : MeasurePools(state)) {
    const Pool* const known = FindIn(state.pools, id);
    const Pool unknown;
    const Pool& pool = known != nullptr ? *known : unknown;
    out << "tag        " << pool.tag << " (" << ToText(pool.policy) << ") " << ToText(pool.lifecycle) << ", "
        << Plural(pool.cycles, "pause") << " begun, " << Plural(holdings.chunk_count, "chunk") << " "
        << FormatBytes(holdings.own) << ", held on devices " << when << " " << FormatBytes(holdings.own_resident) << ", "
        << Plural(holdings.part_count, "part") << " in use " << FormatBytes(holdings.parts) << "\n";
    PrintWhatStays(out, holdings.kept);
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
  out << fmt::format("{:6}  {:<11}{:<10}{}{}", id.value, FormatBytes(a.bytes), ToText(a.properties.location),
                     a.resident ? "" : "released, ", a.saved ? "saved, " : "");
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

void PrintText(Output& out, const State& state, std::string_view when) {
  out << "session    " << SessionText(state.session.session) << ", " << NameOf(state.session) << "\n";
  out << "after      event " << state.last.value << ", digest " << Hex(Digest(state)) << "\n";
  PrintLifecycleAndMemory(out, state, when);
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

// ---- what changed ----------------------------------------------------------------------------------------------------------

struct Difference {
  char sign;  // + only in B, - only in A, ~ in both, and different
  std::string what, before, after;
};

// What there is in a state, as names and words, by kind and number.
using Described = std::map<std::pair<int, std::uint64_t>, std::pair<std::string, std::string>>;

std::string Words(const Allocation& a) {
  return fmt::format("{} on {}{}{}{}{}, {} held by NCCL, {} mapped{}", FormatBytes(a.bytes), ToText(a.properties.location),
                     a.remote ? ", of session " + SessionText(a.remote->owner) : ", own", a.resident ? "" : ", released",
                     a.saved ? ", saved" : "", a.awaiting_restore ? ", contents missing" : "", a.guest_references, a.mappings,
                     a.importers.empty() ? "" : ", " + Plural(a.importers.size(), "importer"));
}
std::string Words(const Mapping& m) {
  const char* const now = !m.present ? ", not there now" : !m.accessible ? ", without access" : "";
  return fmt::format("{} of {}{}, for {}", FormatBytes(m.bytes), ToText(m.allocation), now, Plural(m.access.size(), "device"));
}
std::string Words(const Pool& p) {
  return fmt::format("tag {} ({}), {}, {} begun, {} in use{}", p.tag, ToText(p.policy), ToText(p.lifecycle),
                     Plural(p.cycles, "pause"), Plural(p.parts.size(), "part"),
                     p.cycle.failure.empty() ? "" : ", failed: " + p.cycle.failure);
}
std::string Words(const Peer& p) {
  return (p.rank >= 0 ? fmt::format("rank {}, ", p.rank) : "") + (p.connected ? "connected" : "lost: " + p.lost_reason);
}

Described Describe(const State& state) {
  const Holdings held = Measure(state);
  Described all;
  const auto value = [&all](const char* what, std::string is) { all[{0, all.size()}] = {what, std::move(is)}; };
  value("lifecycle", std::string(ToText(state.lifecycle)));
  value("pauses begun", std::to_string(state.cycles));
  value("broken", state.broken);
  value("last failure", state.cycle.failure);
  value("own memory", FormatBytes(held.own_device));
  value("own memory on the device", FormatBytes(held.own_device_resident));
  value("imported memory", FormatBytes(held.imported));
  value("pinned host memory", FormatBytes(held.host));
  for (const auto& [id, a] : state.allocations) all[{1, id.value}] = {ToText(id), Words(a)};
  for (const auto& [address, m] : state.mappings) all[{2, address.value}] = {"mapping " + Hex(address.value), Words(m)};
  for (const auto& [address, r] : state.ranges) all[{3, address.value}] = {"range " + Hex(address.value), FormatBytes(r.bytes)};
  for (const auto& [address, l] : state.legacy)
    all[{4, address.value}] = {"cuMemAlloc " + Hex(address.value), FormatBytes(l.bytes)};
  for (const auto& [id, p] : state.pools) all[{5, id.value}] = {ToText(id), Words(p)};
  for (const auto& [session, p] : state.peers) all[{6, session.value}] = {"peer " + SessionText(session), Words(p)};
  return all;
}

std::vector<Difference> Compare(const Described& a, const Described& b) {
  std::vector<Difference> found;
  Described both = a;
  both.insert(b.begin(), b.end());
  for (const auto& [key, one] : both) {
    const auto before = a.find(key), after = b.find(key);
    const char sign = after == b.end() ? '-' : before == a.end() ? '+' : '~';
    const std::string was = sign == '+' ? "" : before->second.second, is = sign == '-' ? "" : after->second.second;
    if (sign != '~' || was != is) found.push_back({sign, one.first, was, is});
  }
  return found;
}

void PrintText(Output& out, const State& a, const State& b, const std::vector<Difference>& found) {
  out << "A: session " << SessionText(a.session.session) << " after event " << a.last.value << "\n";
  out << "B: session " << SessionText(b.session.session) << " after event " << b.last.value << "\n";
  for (const Difference& d : found) {
    out << std::string_view(&d.sign, 1) << " " << d.what << ": ";
    if (d.sign == '~') {
      out << (d.before.empty() ? "none" : d.before) << "  ->  " << (d.after.empty() ? "none" : d.after) << "\n";
    } else {
      out << (d.sign == '+' ? d.after : d.before) << "\n";
    }
  }
  out << (found.empty() ? "no difference" : Plural(found.size(), "difference")) << "\n";
}

template <class To>
void WriteFields(To& to, const Difference& d) {
  to("change", std::string(d.sign == '+' ? "added" : d.sign == '-' ? "removed" : "changed"));
  to("what", d.what);
  to("before", d.before.empty() ? std::nullopt : std::optional(d.before));
  to("after", d.after.empty() ? std::nullopt : std::optional(d.after));
}
struct Side {
  SequenceNumber seq{};
  std::uint64_t digest = 0;
};
template <class To>
void WriteFields(To& to, const Side& side) {
  to("seq", side.seq);
  to("digest", Hexadecimal{side.digest});
}
struct DifferenceAnswer {
  static constexpr const char* kSchema = "diff";
  static constexpr const char* kTitle = "amem state --to --json";
  static constexpr const char* kMeaning = "What is different between two states.";
  Side a{}, b{};
  std::vector<Difference> differences{};
};
template <class To>
void WriteFields(To& to, const DifferenceAnswer& answer) {
  to("a", answer.a);
  to("b", answer.b);
  to("differences", answer.differences, "before and after are for people; null: it was not there");
}

bool PrintDifference(const State& a, const State& b, bool json, Output& out) {
  const std::vector<Difference> found = Compare(Describe(a), Describe(b));
  if (json) {
    PrintAnswer(out, DifferenceAnswer{{a.last, Digest(a)}, {b.last, Digest(b)}, found});
  } else {
    PrintText(out, a, b, found);
  }
  return !found.empty();
}

// ---- the command -----------------------------------------------------------------------------------------------------------

// kFine: `session` is the only one of the targets.
Exit FindOnlySession(const Targets& targets, std::filesystem::path& session) {
  const std::vector<std::filesystem::path> sessions = FindSessions(targets);
  if (AnyComplaint() || sessions.empty()) return kCannotRead;
  session = sessions.front();
  if (sessions.size() == 1) return kFine;
  const Result<Opening> opening = OpeningOf(session);
  return Complain(
      fmt::format("there are {} sessions, and state is about one: give --rank, as in --rank {}", sessions.size(),
                  opening && opening->who.rank >= 0 ? std::to_string(opening->who.rank) : session.filename().string()),
      kUsage);
}

// For what is held then.
std::string_view WordFor(const std::filesystem::path& session, const std::vector<Position>& at) {
  if (!at.empty()) return "then";
  const Result<Opening> opening = OpeningOf(session);
  return opening && HasEnded(opening->info.status) ? "when it ended" : "now";
}

Result<State> StateOf(const std::filesystem::path& session, const std::vector<Position>& at) {
  AMEM_ASSIGN(const auto reader, JournalReader::Open(session));
  AMEM_ASSIGN(const auto until, EventAt(at, *reader));
  ReadReport report;
  AMEM_ASSIGN(auto state, reader->StateAt(until, &report));
  ComplainAboutDamage(session, report);
  return state;
}

int RunState(const StateOptions& options, Output& out) {
  const bool two = options.targets.names.size() == 2;
  Targets first = options.targets, second = options.targets;
  if (two) first.names.pop_back();
  if (two) second.names.erase(second.names.begin());
  std::filesystem::path of_a, of_b;
  if (const Exit code = FindOnlySession(first, of_a); code != kFine) return code;
  if (const Exit code = two ? FindOnlySession(second, of_b) : kFine; code != kFine) return code;
  const Result<State> a = StateOf(of_a, options.at);
  if (!a) return Complain(a.status().message());
  if (!two && options.to.empty()) {
    options.json ? PrintJson(out, ToJson(*a)) : PrintText(out, *a, WordFor(of_a, options.at));
    return ReadAll();
  }
  const Result<State> b = StateOf(two ? of_b : of_a, options.to);
  if (!b) return Complain(b.status().message());
  const bool different = PrintDifference(*a, *b, options.json, out);
  return AnyComplaint() ? kCannotRead : different ? kViolationFound : kFine;
}

void AddOptions(Arguments& arguments, StateOptions& options) {
  AddPosition(arguments, "--at", options.at, "After this event (--at=#1200), or at this time; default: the last event");
  AddPosition(
      arguments, "--to", options.to,
      "What changed from --at to this position; of two targets: what is different between the first, at --at, and the second");
  AddJson(arguments, options.json);
}

}  // namespace

void PrintLifecycleAndMemory(Output& out, const State& state, std::string_view when) {
  PrintCycle(out, state);
  PrintHoldings(out, state, when);
  PrintPools(out, state, when);
}

Json DifferenceSchema() { return SchemaOf<DifferenceAnswer>(); }
Json StateSchema() {
  return CompleteSchema(StateForm(), "state", "amem state --json",
                        "What AMem knew after an event. Sizes are bytes, addresses and handles strings like \"0x7f00\".");
}

Command StateCommand() {
  return WithOptions<StateOptions>({kMemoryGroup, "state", "What AMem knew after an event; --to: what changed",
                                    "  amem state DIR\n"
                                    "  amem state job.amem --rank 2 --at=#1200 --json\n"
                                    "  amem state DIR --at=#1200 --to=#1300          what changed between two events\n"
                                    "  amem state DIR --at 12.5 --to 13\n"
                                    "  amem state DIR_A DIR_B --to=#1200             between two journals\n"},
                                   AddOptions, RunState);
}

}  // namespace amem::tool
