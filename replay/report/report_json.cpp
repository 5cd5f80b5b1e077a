#include "replay/report/report_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "replay/job/event_json.h"
#include "replay/job/names.h"

namespace amem {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kTextBytes = 320, kFailureTextBytes = 2000;  // of an event
constexpr std::size_t kKindsInACount = 6;

std::string Shortened(std::string text, std::size_t limit) {
  return text.size() <= limit ? text : CutTo(std::move(text), limit) + " \u2026";
}

// Sessions by index: those with a journal first, then those that were only heard of.
class SessionIndex {
 public:
  explicit SessionIndex(const JobTimeline& job) {
    for (const SessionTimeline& s : job.sessions) {
      index_.emplace(s.info.session, index_.size());
      names_.Add(s.who);
    }
    for (const SessionTimeline& s : job.sessions) names_.AddPeersOf(s.state);
  }
  std::size_t Of(SessionId session) {
    const auto [it, fresh] = index_.emplace(session, index_.size());
    if (fresh) others_.push_back({{"id", SessionText(session)}, {"name", Name(session)}});
    return it->second;
  }
  Json OfOrNone(SessionId session) { return session ? Json(Of(session)) : Json(-1); }
  [[nodiscard]] std::string Name(SessionId session) const { return names_.ShortName(session); }
  [[nodiscard]] const Json& others() const { return others_; }

 private:
  JobNames names_;
  std::map<SessionId, std::size_t> index_;
  Json others_ = Json::array();
};

std::int64_t At(const JobTimeline& job, std::size_t session, std::uint64_t time_ns) {
  return WrappedSum(time_ns, job.offsets_ns[session]);
}

// A number of each point, written as differences from point to point, which are short.
template <class Of>
Json Differences(const std::vector<SeriesPoint>& points, const Of& of) {
  Json all = Json::array();
  std::int64_t last = 0;
  for (const SeriesPoint& point : points) all.push_back(WrappedDifference(of(point), std::exchange(last, of(point))));
  return all;
}

// A class that is never held is an empty list.
Json SeriesJson(const JobTimeline& job, std::size_t index) {
  const SessionTimeline& s = job.sessions[index];
  Json classes = Json::array();
  for (std::size_t c = 0; c < kMemoryClasses; ++c) {
    const auto held = [c](const SeriesPoint& point) { return static_cast<std::int64_t>(point.held[c]); };
    classes.push_back(s.most[c] == 0 ? Json::array() : Differences(s.series, held));
  }
  const auto time = [&](const SeriesPoint& point) { return At(job, index, point.time_ns); };
  return {{"t", Differences(s.series, time)}, {"h", std::move(classes)}};
}

// Every pause and resume, as columns: beginning (differences), length, kind, number of the first, how many, how many failed.
// Taken from the session that has most of them.
Json StripJson(const JobTimeline& job) {
  Json columns = {{"t", Json::array()}, {"d", Json::array()}, {"k", Json::array()},
                  {"m", Json::array()}, {"n", Json::array()}, {"f", Json::array()}};
  const auto longest = std::ranges::max_element(job.sessions, {}, [](const SessionTimeline& s) {
    std::uint64_t count = 0;
    for (const StripRecord& record : s.strip) count += record.count;
    return count;
  });
  if (longest == job.sessions.end()) return columns;
  std::int64_t last = 0;
  for (const StripRecord& record : longest->strip) {
    const std::int64_t begin = At(job, static_cast<std::size_t>(longest - job.sessions.begin()), record.arrived_ns);
    columns["t"].push_back(WrappedDifference(begin, last));
    columns["d"].push_back(record.ended_ns - std::min(record.ended_ns, record.arrived_ns));
    columns["k"].push_back(static_cast<int>(record.kind));
    columns["m"].push_back(record.number);
    columns["n"].push_back(record.count);
    columns["f"].push_back(record.failed);
    last = begin;
  }
  return columns;
}

// What others saw of a session's process, [by, event, time, text], and what it saw of its own threads.
Json SeenJson(const JobTimeline& job, std::size_t session) {
  Json others = Json::array();
  for (std::size_t by = 0; by < job.sessions.size(); ++by) {
    for (const SeenRecord& seen : job.sessions[by].seen) {
      if (seen.of != job.sessions[session].info.session) continue;
      others.push_back({by, seen.at.seq.value, At(job, by, seen.at.time_ns), seen.text});
    }
  }
  Json threads = Json::array();
  for (const auto& [thread, at] : job.sessions[session].story.threads) {
    const bool room = thread.stack.size() < SessionTimeline::kSeen && threads.size() < SessionTimeline::kSeen;
    if (room) threads.push_back(ToText(EventBody(thread)));
  }
  return {{"by", std::move(others)}, {"threads", std::move(threads)}};
}

// When, and by whom, the end of a session was noticed, [time, by, event]; null: nobody did.
Json DeathJson(const JobTimeline& job, std::size_t session) {
  const DeathNotice* notice = FindIn(job.deaths, session);
  return notice == nullptr ? Json(nullptr) : Json{notice->at_ns, notice->by, notice->seq.value};
}

// What came of requests from outside, and freezes: [event, time, text].
Json OutsideJson(const JobTimeline& job, std::size_t session) {
  Json all = Json::array();
  for (const auto& [text, at] : job.sessions[session].story.outside.results)
    all.push_back({at.seq.value, At(job, session, at.time_ns), text});
  return all;
}

Json ShortagesJson(const JobTimeline& job) {
  Json all = Json::array();
  for (const MemoryShortage& shortage : job.shortages) {
    Json holders = Json::array();
    for (const MemoryShortage::Holder& h : shortage.holders) holders.push_back({h.session, h.held, h.released, h.elsewhere});
    all.push_back({{"s", shortage.session},
                   {"q", shortage.seq.value},
                   {"device", shortage.device},
                   {"uuid", shortage.uuid},
                   {"holders", std::move(holders)}});
  }
  return all;
}

Json SessionJson(const JobTimeline& job, std::size_t index, const SessionIndex& names) {
  const SessionTimeline& s = job.sessions[index];
  Json kinds = Json::array();
  for (std::size_t kind = 0; kind < kEventKinds; ++kind)
    if (s.kinds[kind] != 0) kinds.push_back({kind, s.kinds[kind]});
  return {{"id", SessionText(s.info.session)},
          {"name", names.Name(s.info.session)},
          {"rank", s.who.rank},
          {"pid", s.who.pid},
          {"host", s.who.host},
          {"gpus", s.who.gpu_uuids},
          {"nccl", s.who.nccl_version},
          {"driver", s.who.driver_version},
          {"amem", s.who.amem_version},
          {"layout", s.who.layout},
          {"content", s.who.content},
          {"status", ToText(s.info.status)},
          {"lifecycle", ToText(s.state.lifecycle)},
          {"broken", s.state.broken},
          {"stopped", s.stopped},
          {"damaged", s.damage.corrupt_records},
          {"damage", s.damage.corruption},
          {"incomplete", s.damage.incomplete},
          {"torn", s.damage.torn_tail},
          {"dropped", s.beginning_dropped},
          {"events", s.events},
          {"first", s.info.first.value},
          {"start", At(job, index, s.first_ns)},
          {"end", At(job, index, s.last_ns)},
          {"kinds", std::move(kinds)},
          {"pauses", s.done.pauses},
          {"resumes", s.done.resumes},
          {"failed", s.done.failures},
          {"most", std::vector<Bytes>(s.most.begin(), s.most.end())},
          {"peak", {At(job, index, s.peak.time_ns), DeviceBytes(s.peak.held)}},
          {"changes", s.changes},
          {"allocations", s.allocations_total},
          {"seen", SeenJson(job, index)},
          {"died", DeathJson(job, index)},
          {"refused", s.story.launches_refused},
          {"outside", OutsideJson(job, index)},
          {"exit", s.story.closed ? s.story.closed->event.exit_code : -1},
          {"as_of", s.as_of_ns == 0 ? Json(nullptr) : Json(At(job, index, s.as_of_ns))},
          {"series", SeriesJson(job, index)}};
}

// ---- pauses and resumes ----------------------------------------------------------------------------------------------------

Json PhasesJson(const JobTimeline& job, std::size_t session, const Attempt& cycle) {
  Json phases = Json::array();
  std::vector<Attempt::PhaseTaken> all = PhasesWithArrival(cycle);
  all.insert(all.end(), cycle.skipped.begin(), cycle.skipped.end());
  std::ranges::stable_sort(all, {}, [](const Attempt::PhaseTaken& p) { return p.begun.seq; });
  for (const Attempt::PhaseTaken& p : all) {
    phases.push_back({static_cast<int>(p.phase), At(job, session, p.begun.time_ns), At(job, session, p.worked.time_ns),
                      p.decided ? Json(At(job, session, p.decided.time_ns)) : Json(nullptr), p.passed ? 1 : 0, p.steps,
                      p.voted ? (p.voted_for ? 1 : -1) : 0});
  }
  return phases;
}

Json PartJson(const JobTimeline& job, std::size_t session, const Attempt& cycle, SessionIndex& names) {
  Json steps = Json::array();
  for (std::size_t kind = 0; kind < kStepKinds; ++kind)
    if (cycle.steps[kind].count != 0) steps.push_back({kind, cycle.steps[kind].count, cycle.steps[kind].duration_ns});
  Json part = {{"s", session},
               {"n", cycle.begun || cycle.ended ? cycle.cycle : 0},
               {"a", At(job, session, cycle.came().time_ns)},
               {"b", cycle.begun ? Json(At(job, session, cycle.begun.time_ns)) : Json(nullptr)},
               {"e", At(job, session, cycle.last.time_ns)},
               {"q", {cycle.begun.seq.value, cycle.ended.seq.value}},
               {"o", static_cast<int>(OutcomeOf(cycle))},
               {"d", {DeviceBytes(cycle.before), DeviceBytes(cycle.after)}},
               {"p", PhasesJson(job, session, cycle)},
               {"st", std::move(steps)}};
  const std::string& message = cycle.open() && cycle.decided ? cycle.decided->message : cycle.failure;
  if (!message.empty()) part["m"] = message;
  if (cycle.contents) part["x"] = {cycle.contents.changed, cycle.contents.unchanged, cycle.contents.zero};
  if (cycle.decided && cycle.decided->culprit) part["c"] = names.Of(cycle.decided->culprit);
  if (cycle.failed_step) {
    part["f"] = {{"step", amem::ToText(cycle.failed_step->step)},
                 {"code", ToText(cycle.failed_step->code)},
                 {"message", cycle.failed_step->message},
                 {"seq", cycle.failed_step->at.seq.value}};
  }
  return part;
}

Json CyclesJson(const JobTimeline& job, SessionIndex& names) {
  Json cycles = Json::array();
  for (const JobCycle& cycle : job.cycles) {
    Json parts = Json::array(), absent = Json::array();
    for (const auto& [session, index] : cycle.parts)
      parts.push_back(PartJson(job, session, job.sessions[session].cycles[index], names));
    for (const SessionId session : cycle.absent) absent.push_back(names.Of(session));
    const auto& [session, first] = cycle.parts.front();
    cycles.push_back({{"kind", static_cast<int>(cycle.kind)},
                      {"tag", job.sessions[session].cycles[first].tag},
                      {"parts", std::move(parts)},
                      {"absent", std::move(absent)}});
  }
  return cycles;
}

// ---- allocations -----------------------------------------------------------------------------------------------------------

// Texts that are repeated, by number.
struct Texts {
  Json list = Json::array();
  std::map<std::string, std::size_t> known = {};
  std::size_t Of(const std::string& text) {
    const auto [it, fresh] = known.emplace(text, known.size());
    if (fresh) list.push_back(text);
    return it->second;
  }
};

// 0 held, 1 given back by a pause, 2 freed, 3 and on: held, and a pause leaves it in place for this reason.
int StateOf(const AllocationRecord& a) {
  if (a.ended) return 2;
  if (!a.resident) return 1;
  return a.kept == KeepReason::kNone ? 0 : 2 + static_cast<int>(a.kept);
}
// The communicator that it was made for, or the tag that it is under.
std::string OwnerOf(const SessionTimeline& session, const AllocationRecord& a) {
  if (const Pool* pool = FindIn(session.state.pools, a.pool)) return "tag " + pool->tag;
  const auto it = session.communicators.find(a.communicator);
  return it == session.communicators.end() ? std::string() : NameOf(it->first, it->second, session.communicators);
}

Json AllocationsJson(const JobTimeline& job, SessionIndex& names) {
  Json columns = Json::object(), notes = Json::object();
  for (const char* column :
       {"s", "kind", "id", "addr", "bytes", "loc", "site", "q", "t", "qe", "te", "peer", "pid", "imp", "most", "state", "comm"})
    columns[column] = Json::array();
  Texts sites, locations, communicators;
  std::uint64_t total = 0, listed = 0;
  Bytes left_out = 0;
  for (std::size_t s = 0; s < job.sessions.size(); ++s) {
    const SessionTimeline& session = job.sessions[s];
    for (const AllocationRecord& a : session.allocations) {
      const auto put = [&columns](const char* column, auto&& value) { columns[column].push_back(value); };
      if (!a.note.empty()) notes[std::to_string(listed)] = Shortened(a.note, kFailureTextBytes);
      put("s", s);
      put("kind", static_cast<int>(a.kind));
      put("id", a.id.value);
      put("addr", a.address ? Hex(a.address.value).substr(2) : std::string());
      put("bytes", a.bytes);
      put("loc", locations.Of(a.location.type == LocationType::kInvalid ? "" : amem::ToText(a.location)));
      put("site", sites.Of(amem::ToText(a.site)));
      put("q", a.created.value);
      put("t", At(job, s, a.created_ns));
      put("qe", a.ended.value);
      put("te", a.ended ? At(job, s, a.ended_ns) : 0);
      put("peer", names.OfOrNone(a.remote.owner));
      put("pid", a.remote.allocation.value);
      put("imp", a.importers);
      put("most", a.most_importers);
      put("slab", a.slab.value);
      put("state", StateOf(a));
      put("comm", communicators.Of(OwnerOf(session, a)));
      ++listed;
    }
    total += session.allocations_total;
    left_out += session.allocations_left_out_bytes;
  }
  return {{"columns", std::move(columns)},
          {"sites", std::move(sites.list)},
          {"locations", std::move(locations.list)},
          {"communicators", std::move(communicators.list)},
          {"notes", std::move(notes)},
          {"total", total},
          {"left_out", total - listed},
          {"left_out_bytes", left_out}};
}

// The memory that sessions hold of each other: from the importer's journal, or from the owner's where that is absent.
Json LinksJson(const JobTimeline& job, SessionIndex& names) {
  Json links = Json::array();
  const auto add = [&](std::size_t importer, std::size_t owner, const LinkRecord& l) {
    links.push_back({importer, owner, l.bytes, l.count, l.most_bytes, l.most_count, l.total});
  };
  for (std::size_t s = 0; s < job.sessions.size(); ++s) {
    for (const auto& [owner, link] : job.sessions[s].imports) add(s, names.Of(owner), link);
    for (const auto& [importer, link] : job.sessions[s].importers)
      if (const std::size_t index = names.Of(importer); index >= job.sessions.size()) add(index, s, link);
  }
  return links;
}

// ---- events ----------------------------------------------------------------------------------------------------------------

std::string TextOf(const EventRow& row) {
  if (row.event) return Shortened(ToText(row.event->body), row.weight == Weight::kFailure ? kFailureTextBytes : kTextBytes);
  std::string text;
  for (std::size_t i = 0; i < row.kinds.size() && i < kKindsInACount; ++i)
    text += fmt::format("{}{} \u00d7 {}", i == 0 ? "" : ", ", Grouped(row.kinds[i].second), KindName(row.kinds[i].first));
  if (row.kinds.size() > kKindsInACount) text += fmt::format(" and {} other kinds", row.kinds.size() - kKindsInACount);
  return text;
}

Json EventsJson(const JobTimeline& job) {
  Json columns = Json::object();
  for (const char* column : {"s", "q", "n", "t", "d", "k", "w", "th", "x"}) columns[column] = Json::array();
  std::uint64_t left_out = 0;
  for (std::size_t s = 0; s < job.sessions.size(); ++s) {
    std::uint64_t seq = 0;
    std::int64_t time = 0;
    for (const EventRow& row : job.sessions[s].rows) {
      const std::int64_t begin = At(job, s, row.begin_ns);
      columns["s"].push_back(s);
      columns["q"].push_back(row.first.value - seq);
      columns["n"].push_back(row.event ? 1 : row.count);
      columns["t"].push_back(WrappedDifference(begin, time));
      columns["d"].push_back(row.end_ns - row.begin_ns);
      columns["k"].push_back(row.event ? static_cast<int>(row.event->body.index()) : -1);
      columns["w"].push_back(static_cast<int>(row.weight));
      columns["th"].push_back(row.event ? row.event->thread : 0);
      columns["x"].push_back(TextOf(row));
      seq = row.first.value;
      time = begin;
      if (!row.event) left_out += row.count;
    }
  }
  return {{"columns", std::move(columns)}, {"left_out", left_out}};
}

Json VerdictJson(const JobTimeline& job, const Verdict& v, SessionIndex& names) {
  Json evidence = Json::array();
  for (const Evidence& e : v.evidence) {
    evidence.push_back({{"s", names.OfOrNone(e.session)},
                        {"q", e.seq.value},
                        {"t", e.wall_ns != 0 ? Json(static_cast<std::int64_t>(e.wall_ns - job.began_ns)) : Json(nullptr)},
                        {"role", static_cast<int>(e.role)},
                        {"x", e.text}});
  }
  return {{"healthy", v.certain() ? Json(v.healthy()) : Json(nullptr)},
          {"kind", amem::ToText(v.kind)},
          {"headline", v.headline},
          {"summary", v.summary},
          {"remedy", v.RemedyText()},
          {"process", v.process},
          {"evidence", std::move(evidence)},
          {"notes", v.notes},
          {"damage", v.damage},
          {"s", v.session ? names.OfOrNone(*v.session) : Json(-1)},
          {"q", v.seq.value}};
}

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const char* entity = c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : c == '"' ? "&quot;" : nullptr;
    entity != nullptr ? out.append(entity) : out.append(1, c);
  }
  return out;
}

// Inside a script element only "<" can end it; in JSON it stands in strings only.
std::string ForScript(const std::string& json) {
  std::string out;
  out.reserve(json.size() + 64);
  for (const char c : json) c == '<' ? out.append("\\u003c") : out.append(1, c);
  return out;
}

// The page with its marks replaced, which are given in its order. Replacements are not searched for marks again.
std::string Filled(std::string page, std::span<const std::pair<std::string_view, std::string>> marks) {
  std::size_t from = 0;
  for (const auto& [mark, text] : marks) {
    const std::size_t at = page.find(mark, from);
    if (at == page.npos) continue;
    page.replace(at, mark.size(), text);
    from = at + text.size();
  }
  return page;
}

}  // namespace

TimelineLimits LimitsOf(std::size_t sessions, const ReportLimits& limits) {
  const std::size_t n = std::max<std::size_t>(sessions, 1);
  return {.points = std::clamp<std::size_t>(12'000 / n, 60, 1500),
          .rows = std::clamp<std::size_t>(limits.rows / n, 100, 8000),
          .allocations = std::clamp<std::size_t>(limits.allocations / n, 50, 8000),
          .cycles = std::clamp<std::size_t>(1600 / n, 8, 200)};
}

std::string ReportJson(const JobTimeline& job, const Verdict& verdict, std::string_view version, std::string_view made_at) {
  SessionIndex names(job);
  Json json = {{"version", version}, {"made_at", made_at}};
  Json sessions = Json::array();
  std::uint64_t events = 0, bytes = 0, cycles_left_out = 0;
  for (std::size_t s = 0; s < job.sessions.size(); ++s) {
    sessions.push_back(SessionJson(job, s, names));
    events += job.sessions[s].events;
    bytes += job.sessions[s].info.file_bytes;
    cycles_left_out = std::max(cycles_left_out, job.sessions[s].story.forgotten.count);
  }
  json["job"] = {{"began_ms", job.wall_known ? job.began_ns / 1'000'000 : 0},
                 {"duration", job.duration_ns},
                 {"events", events},
                 {"bytes", bytes},
                 {"notes", job.notes},
                 {"cycles_left_out", cycles_left_out}};
  Json kinds = Json::array();
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) kinds.push_back(KindName(kind));
  json["kinds"] = std::move(kinds);
  json["phases"] = kNamesOfPhaseKind;
  json["steps"] = kNamesOfStepKind;
  json["allocation_kinds"] = kNamesOfAllocationKind;
  json["verdict"] = VerdictJson(job, verdict, names);
  json["sessions"] = std::move(sessions);
  json["cycles"] = CyclesJson(job, names);
  json["strip"] = StripJson(job);
  json["shortages"] = ShortagesJson(job);
  json["allocations"] = AllocationsJson(job, names);
  json["links"] = LinksJson(job, names);
  json["events"] = EventsJson(job);
  json["others"] = names.others();
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string ReportPage(std::string_view page, JobTimeline job, const Verdict& verdict, const ReportLimits& limits,
                       std::string_view version, std::string_view made_at) {
  std::string data = ForScript(ReportJson(job, verdict, version, made_at));
  for (int attempt = 0; attempt < 6 && page.size() + data.size() > limits.page_bytes; ++attempt) {
    Halve(job);
    data = ForScript(ReportJson(job, verdict, version, made_at));
  }
  const std::pair<std::string_view, std::string> marks[] = {
      {"@TITLE@", Escaped(verdict.headline.empty() ? "AMem report" : "AMem: " + verdict.headline)},
      {"@WITHOUT_SCRIPT@", Escaped(verdict.headline + " " + verdict.summary + " " + verdict.RemedyText())},
      {"@DATA@", std::move(data)}};
  return Filled(std::string(page), marks);
}

}  // namespace amem
