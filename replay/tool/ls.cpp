// ls: the sessions of a directory, one a line, or with -v all that each is and how far it goes.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "journal/session_dir.h"
#include "journal/tail.h"
#include "replay/control/job_control.h"
#include "replay/job/event_json.h"
#include "replay/job/fold.h"
#include "replay/job/jobs.h"
#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"
#include "replay/tool/control/request.h"
#include "statemachine/apply.h"
#include "statemachine/event.h"

namespace amem::tool {
namespace {

struct Facts {
  JournalInfo info;
  State state;
  ReadReport report;
  // The ballot in which it waits for other members, of NCCL's memory; of a session that may have ended, in which it waited.
  Result<std::optional<Event>> waits = std::optional<Event>();
};

// A field of a state under its own name. The state may be empty: of a form.
struct FieldOfState {
  const char* name;
  const Json& state;
};
Json Show(const FieldOfState& field) { return field.state[field.name]; }
Json FormOf(const FieldOfState& field) {
  static const Json form = StateForm();
  return form["properties"][field.name];
}

struct SessionAnswer {
  static constexpr const char* kSchema = "session";
  static constexpr const char* kTitle = "An element of what amem ls --json prints";
  static constexpr const char* kMeaning = "A session: its journal, who wrote it, and its state at the end. Sizes are bytes.";
  JournalInfo info{};
  ReadReport report{};
  Json state = amem::ToJson(State{});
};
template <class To>
void WriteFields(To& to, const SessionAnswer& answer) {
  const auto& [info, report, state] = answer;
  to("session", info.session);
  to("status", std::string(StatusText(info)), "\"live\", \"closed\", \"crashed\", ...");
  to("broken_reason", info.broken_reason);
  to("directory", std::string(PlaceOf(info.directory)));
  to("format", info.format);
  to("first", info.first);
  to("last", info.last);
  to("events", info.events);
  to("file_bytes", info.file_bytes, "On disk");
  to("snapshots", info.snapshots);
  to("torn_tail", report.torn_tail);
  to("corrupt_records", report.corrupt_records);
  to("incomplete", report.whole() ? std::nullopt : std::optional(DamageText(report)),
     "What could not be read of it, also of the pack that it came from; null: it was read whole");
  for (const char* name : {"opened", "lifecycle", "digest", "cycles", "cycle", "holdings", "pools", "libraries", "peers"})
    to(name, FieldOfState{name, state});
  to("events_by_kind", FieldOfState{"events", state}, "How many events there were of each kind");
}

// "label     value", nothing if there is no value.
void Line(Output& out, std::string_view label, const std::string& value) {
  if (value.empty()) return;
  out << fmt::format("{:<11}{}\n", label, value);
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
  Line(out, "incomplete", DamageText(facts.report));
  Line(out, "session", fmt::format("{}  {}", SessionText(info.session), StatusText(info)));
  Line(out, "process", fmt::format("{}, group {}", NameOf(who), who.group));
  Line(out, "program", who.program);
  Line(out, "opened", DateText(who.realtime_ns));
  Line(out, "launcher", fmt::format("{}", fmt::join(who.launcher, " ")));
  Line(out, "versions",
       "AMem " + who.amem_version + (who.driver_version.empty() ? "" : ", driver " + who.driver_version) +
           (who.nccl_version.empty() ? "" : ", NCCL " + who.nccl_version));
  Line(out, "GPUs", fmt::format("{}", fmt::join(who.gpu_uuids, ", ")));
  Line(out, "settings", "layout " + who.layout + ", content " + who.content);
  for (const LibraryAttached& library : facts.state.libraries)
    Line(out, "library", library.path + " (" + library.way + "), build " + library.build_id);
  Line(out, "journal", fmt::format("{}, format {}, {}", PlaceOf(info.directory), info.format, FormatBytes(info.file_bytes)));
  Line(out, "events",
       fmt::format("{}, numbers {} to {}{}", Grouped(info.events), info.first.value, info.last.value,
                   facts.report.torn_tail ? ", the last append was cut short" : ""));
  Line(out, "kinds", Counts(facts.state));
  Line(out, "digest", Hex(Digest(facts.state)));
  if (facts.state.broken.empty()) Line(out, "broken", info.broken_reason);
  if (!facts.waits)
    Line(out, "waits", "unknown: " + facts.waits.status().message());
  else if (*facts.waits)
    Line(out, info.status == SessionStatus::kLive ? "waits" : "may wait", ToText((*facts.waits)->body));
  PrintLifecycleAndMemory(out, facts.state, HasEnded(info.status) ? "when it ended" : "now");
}

// Whether the event is the end of a pause or resume of NCCL's memory.
bool EndsCycle(const EventBody& body) {
  if (const auto* const done = std::get_if<CycleDone>(&body)) return !done->pool;
  const auto* const failed = std::get_if<CycleFailed>(&body);
  return failed != nullptr && !failed->pool;
}

// What a member journals while it waits is followed by little: what is seen of those that it waits for. A session that has
// ended waits for nobody.
Result<std::optional<Event>> WaitAtTheEnd(JournalReader& reader, const JournalInfo& info) {
  if (HasEnded(info.status)) return std::optional<Event>();
  constexpr std::uint64_t kEventsBack = 64;
  const SequenceNumber from{std::max(info.first.value, info.last.value - std::min(info.last.value, kEventsBack))};
  std::optional<Event> waits;
  const auto read = reader.Read(from, info.last, [&](const Event& event) {
    const auto* const shown = std::get_if<BallotShown>(&event.body);
    const bool waits_here = shown != nullptr && !shown->pool && shown->cause == agreement::Cause::kUndecided;
    if (waits_here)
      waits = event;
    else if (EndsCycle(event.body) || (shown != nullptr && !shown->pool))
      waits.reset();
    return true;
  });
  if (!read) return read.status();
  return waits;
}

void ForEachSession(const std::vector<std::filesystem::path>& sessions, bool tell_damage,
                    const std::function<void(Facts&)>& show) {
  ForEachJournal(sessions, [&](JournalReader& reader, ReadReport& damage) -> Status {
    Facts facts;
    AMEM_ASSIGN(facts.info, reader.Info());
    AMEM_ASSIGN(facts.state, reader.StateAt(std::nullopt, &facts.report)
                                 .Within(facts.info.directory.string() +
                                         ": the state cannot be computed (`amem verify` says where it breaks)"));
    facts.waits = WaitAtTheEnd(reader, facts.info);
    if (tell_damage) damage = facts.report;
    show(facts);
    return {};
  });
}

struct ListOptions {
  Targets targets;
  bool verbose = false, live = false, json = false;
};

void PrintVerbosely(const std::vector<std::filesystem::path>& sessions, Output& out) {
  bool first = true;
  std::set<std::string> told;
  ForEachSession(sessions, true, [&](Facts& facts) {
    if (!std::exchange(first, false)) out << "\n";
    std::string& failure = facts.state.cycle.failure;  // all of a job have the same
    if (!failure.empty() && !told.insert(failure).second) failure = "the same";
    PrintText(out, facts);
  });
}

// What living processes say of themselves, by the directory of the session.
using RanksAsked = std::map<std::filesystem::path, control::RankView>;

RanksAsked AskLiving(const std::vector<std::filesystem::path>& sessions) {
  std::vector<control::RankPlace> living;
  for (const auto& session : sessions) {
    const std::optional<SessionId> id = SessionOfName(session.filename().string());
    if (id && WriterIsAlive(session / "tail")) living.push_back({.session = *id, .directory = session});
  }
  RanksAsked asked;
  if (living.empty()) return asked;
  for (control::RankView& rank : control::RanksAt(living, DefaultSocketDirectory()))
    if (rank.alive) asked.emplace(rank.process.directory, std::move(rank));
  return asked;
}

std::string Waiting(const Facts& facts) {
  if (facts.waits && !*facts.waits) return "";
  return facts.waits && facts.info.status == SessionStatus::kLive ? ", waits" : ", may wait";
}

using Row = std::vector<std::string>;

Row RowOf(const Facts& facts, const RanksAsked& asked) {
  const SessionOpened& who = facts.state.session;
  const Holdings h = Measure(facts.state);
  Row row = {SessionText(facts.info.session),
             std::string(StatusText(facts.info)) + (facts.report.whole() ? "" : ", incomplete"),
             who.rank < 0 ? "-" : std::to_string(who.rank),
             std::to_string(facts.info.pid),
             Grouped(facts.info.events),
             std::string(ToText(facts.state.lifecycle)) + Waiting(facts),
             HasEnded(facts.info.status) ? "-" : RoundedBytes(h.own_device_resident + h.pools_resident)};
  if (!asked.empty()) {
    const auto rank = asked.find(facts.info.directory);
    const bool known = rank != asked.end(), paused = known && rank->second.is.phase == control::Phase::kPaused;
    row.push_back(known ? Grouped(rank->second.is.steps) : "-");
    row.push_back(known && rank->second.paused_by_program() ? "program" : paused ? "request" : "-");
  }
  row.push_back(DateText(who.realtime_ns));
  row.push_back(who.host);
  return row;
}

// One line a session. Those of a job are together, and a line between jobs is empty.
void PrintList(const std::vector<std::filesystem::path>& sessions, Output& out) {
  const RanksAsked asked = AskLiving(sessions);
  std::vector<Row> known;
  std::vector<JobTies> ties;
  std::vector<std::string> programs;
  ForEachSession(sessions, false, [&](const Facts& facts) {
    const Result<JobTies> tied = ReadTies(facts.info.directory);
    ties.push_back(tied ? *tied : JobTies{.who = facts.state.session});
    known.push_back(RowOf(facts, asked));
    programs.push_back(facts.state.session.program);
  });
  if (sessions.empty()) return;
  std::vector<Row> rows = {{"SESSION", "STATUS", "RANK", "PID", "EVENTS", "STATE", "HELD", "OPENED", "HOST"}};
  if (!asked.empty()) rows[0].insert(rows[0].end() - 2, {"SAFE POINT", "PAUSED BY"});
  if (std::ranges::any_of(programs, std::not_fn(&std::string::empty))) {  // older builds did not record it
    rows[0].insert(rows[0].end() - 2, "PROGRAM");
    for (std::size_t i = 0; i < known.size(); ++i)
      known[i].insert(known[i].end() - 2, programs[i].empty() ? "-" : std::move(programs[i]));
  }
  for (const auto& job : GroupIntoJobs(ties)) {
    if (rows.size() > 1) rows.emplace_back();
    for (const std::size_t i : job) rows.push_back(std::move(known[i]));
  }
  PrintTable(out, rows);
}

int RunList(const ListOptions& options, Output& out) {
  if (options.live && !options.targets.ranks.empty())
    return Complain("--rank is not for --live, which asks all ranks of a job", kUsage);
  if (options.live) return PrintLive(options.targets.names, options.json, out);
  const std::vector<std::filesystem::path> sessions = FindSessions(options.targets);
  if (options.json) {
    std::vector<SessionAnswer> list;
    ForEachSession(sessions, options.verbose, [&list](const Facts& facts) {
      list.push_back({facts.info, facts.report, ToJson(facts.state)});
    });
    if (!AnyComplaint() || !list.empty()) PrintAnswers(out, list);
  } else {
    options.verbose ? PrintVerbosely(sessions, out) : PrintList(sessions, out);
  }
  return ReadAll();
}

void AddOptions(Arguments& arguments, ListOptions& options) {
  arguments.Flag("-v,--verbose", options.verbose, "All of each: process, versions, events, memory held, last failure");
  arguments.Flag(
      "--live", options.live,
      "What the ranks of a living job say of themselves: safe points, whether they are paused and by whom; TARGET is as "
      "for pause");
  AddJson(arguments, options.json, "One JSON array; with --live an object");
}

}  // namespace

Json SessionSchema() { return SchemaOf<SessionAnswer>(); }

Command ListCommand() {
  return WithOptions<ListOptions>({kFailureGroup, "ls", "The sessions, newest first; -v: all of each",
                                   "  amem ls                         sessions of this user on this host\n"
                                   "  amem ls 4711                    those of one job\n"
                                   "  amem ls /data/job17             journals that were copied from elsewhere\n"
                                   "  amem ls -v 4711 --rank 2\n"
                                   "  amem ls --json DIR | jq '.[].holdings'\n"
                                   "  amem ls --live --json | jq '.ranks[] | {rank, phase, safepoints}'\n"},
                                  AddOptions, RunList);
}

}  // namespace amem::tool
