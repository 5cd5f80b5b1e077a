#include "replay/report/activity.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "replay/job/json_form.h"
#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "statemachine/event.h"

namespace amem {

SessionActivity ActivityOf(const Folded& folded, const SessionStory& story, SessionStatus status) {
  const State& state = folded.state;
  SessionActivity now{.who = state.session, .status = status, .lifecycle = state.lifecycle};
  const Holdings holdings = Measure(state);
  const Bytes whole = holdings.own_device + holdings.slabs_free + holdings.pools;
  if (!HasEnded(status)) {
    now.held = holdings.own_device_resident + holdings.pools_resident;
    now.released = whole - std::min(whole, now.held);
  }
  for (const auto& [id, peer] : state.peers) (peer.connected ? now.peers : now.lost_peers).push_back(id);
  now.last_ns = story.last.time_ns;
  now.since_ns = story.since.time_ns;
  const auto ended = std::ranges::find_if(story.attempts.rbegin(), story.attempts.rend(), std::not_fn(&Attempt::open));
  if (ended != story.attempts.rend()) now.ended = *ended;
  if (folded.broken) {
    now.trouble = ToText(*folded.broken);
  } else if (const Attempt* attempt = story.OpenAttempt()) {
    now.attempt = *attempt;
    now.progress = ProgressOf(story, *attempt, &state);
  }
  return now;
}

std::string SessionActivity::failure() const {
  if (!ended || ended->end != Attempt::End::kFailed) return {};
  return ended->failure.empty() ? "failed" : ended->failure;
}

namespace {

// For whom sessions wait. One waits when it has done its part of a phase; then for the members that have not done theirs, or,
// before the beginning, for the sessions that it is connected with, directly or through others, and that have not come.
class Waits {
 public:
  explicit Waits(std::span<const SessionActivity> sessions) {
    for (const SessionActivity& s : sessions) by_id_.emplace(s.who.session, &s);
  }

  [[nodiscard]] std::vector<SessionId> Of(const SessionActivity& who) const {
    std::vector<SessionId> late;
    if (who.status != SessionStatus::kLive || !who.attempt || !who.progress.waits()) return late;
    for (const SessionId id : who.attempt->begun ? who.attempt->members : Connected(who)) {
      const auto it = by_id_.find(id);
      const bool known = it != by_id_.end() && id != who.who.session;
      if (known && !HasDoneItsPart(*it->second, who)) late.push_back(id);
    }
    return late;
  }

 private:
  // Those that share memory with it, directly or through others, and live.
  [[nodiscard]] std::vector<SessionId> Connected(const SessionActivity& who) const {
    const auto knows = [](const SessionActivity& s, SessionId peer) {
      return std::ranges::find(s.peers, peer) != s.peers.end();
    };
    std::set<SessionId> seen{who.who.session};
    std::vector<SessionId> found{who.who.session};
    std::vector<const SessionActivity*> reached{&who};
    for (std::size_t i = 0; i < reached.size(); ++i) {
      const SessionActivity& from = *reached[i];
      for (const auto& [id, other] : by_id_) {
        const bool linked = knows(*other, from.who.session) || knows(from, id);
        const bool counts = other->status == SessionStatus::kLive && other->who.group == who.who.group;
        if (!linked || !counts || !seen.insert(id).second) continue;
        found.push_back(id);
        reached.push_back(other);
      }
    }
    return found;
  }

  // Whether `other` is as far as `who`, which waits: the members of a pause or resume take the same phases one after the other.
  [[nodiscard]] static bool HasDoneItsPart(const SessionActivity& other, const SessionActivity& who) {
    const Attempt& mine = *who.attempt;
    if (other.attempt && other.attempt->kind == mine.kind) {
      const Attempt& theirs = *other.attempt;
      if (!mine.begun || !theirs.begun) return theirs.begun || !mine.begun;
      if (theirs.phases.size() != mine.phases.size()) return theirs.phases.size() > mine.phases.size();
      return other.progress.decided() || other.progress.waits();
    }
    // It may be through with it already. Members are of one host, and have one clock.
    return !other.attempt && other.ended && other.ended->kind == mine.kind && other.ended->ended.time_ns >= mine.came().time_ns;
  }

  std::map<SessionId, const SessionActivity*> by_id_;
};

using Json = nlohmann::ordered_json;

constexpr std::size_t kPhases = 5;  // of a pause, and of a resume
constexpr std::array<std::array<std::string_view, kPhases>, 2> kPhaseHeads = {
    {{"arrive", "save", "imports", "release", "gone"}, {"arrive", "create", "import", "verify", "open"}}};
constexpr std::size_t kFewNames = 6;               // so many sessions are listed by name
constexpr std::uint64_t kLong_ns = 1'000'000'000;  // a step that takes so long is named
constexpr std::size_t kFailureLength = 160;

JobNames NamesIn(const JobPicture& picture) {
  JobNames names;
  for (const SessionActivity& s : picture.sessions) names.Add(s.who);
  return names;
}

std::string FewNames(const JobNames& names, std::vector<SessionId> sessions) {
  if (sessions.size() <= kFewNames) return names.Names(std::move(sessions));
  std::ranges::sort(sessions, {}, [&](SessionId s) { return std::pair(names.RankOf(s), s); });
  const std::size_t more = sessions.size() - kFewNames;
  sessions.resize(kFewNames);
  std::vector<std::string> words;
  for (const SessionId s : sessions) words.push_back(names.ShortName(s));
  return fmt::format("{} and {} more", fmt::join(words, ", "), more);
}

std::string StateWord(const SessionActivity& s) {
  const bool may_live =
      s.status == SessionStatus::kLive || s.status == SessionStatus::kCopied || s.status == SessionStatus::kUnknown;
  if (!may_live) return std::string(ToText(s.status));
  return std::string(ToText(s.lifecycle));
}

std::uint64_t SinceNs(const JobPicture& picture, const SessionActivity& s) {
  const bool here = s.status == SessionStatus::kLive && picture.now.Wrote(s.who);
  const std::uint64_t now = here ? picture.now.now_ns : s.last_ns;
  return now - std::min(now, s.since_ns);
}

// "pause 3", with what happens in it.
std::string AttemptText(const SessionActivity& s, bool with_steps) {
  if (!s.attempt) return {};
  const Progress& p = s.progress;
  std::string text = NameOf(*s.attempt);
  if (!p.begun()) return text + ", has come";
  if (p.undoing) text += ", undoing";
  if (!p.phase) return text;
  text += fmt::format(", {}", PhaseWord(*p.phase));
  if (p.decided()) return text + " is done by all";
  if (with_steps && p.steps_done + p.steps_left != 0)
    text += fmt::format(", {} of {} steps done", p.steps_done, p.steps_done + p.steps_left);
  return text;
}

std::string Trouble(const SessionActivity& s) {
  std::string text = s.trouble;
  if (text.empty() && !s.failure().empty()) text = fmt::format("{} failed: {}", NameOf(*s.ended), s.failure());
  return text.size() <= kFailureLength ? text : CutTo(std::move(text), kFailureLength) + " ...";
}

// ---- the picture -----------------------------------------------------------------------------------------------------------

using Row = std::vector<std::string>;

class PictureTable {
 public:
  PictureTable(const JobPicture& picture, CycleKind kind) : picture_(picture), names_(NamesIn(picture)), kind_(kind) {}

  [[nodiscard]] Row Head() const {
    Row row = {"RANK", "PID", "STATE", "CYCLE"};
    for (const std::string_view head : kPhaseHeads[static_cast<std::size_t>(kind_)]) row.emplace_back(head);
    for (const char* head : {"FOR", "HELD", "RELEASED", ""}) row.emplace_back(head);
    return row;
  }
  [[nodiscard]] Row RowOf(std::size_t index) const {
    const SessionActivity& s = picture_.sessions[index];
    Row row = {names_.ShortName(s.who.session), std::to_string(s.who.pid), StateWord(s),
               s.attempt ? NameOf(*s.attempt) : std::string()};
    for (std::size_t phase = 0; phase < kPhases; ++phase) row.push_back(Cell(s, phase));
    row.push_back(DurationText(SinceNs(picture_, s)));
    row.push_back(HasEnded(s.status) ? "-" : RoundedBytes(s.held));
    row.push_back(s.released == 0 ? std::string() : RoundedBytes(s.released));
    row.push_back(Note(index));
    return row;
  }

 private:
  [[nodiscard]] std::string Cell(const SessionActivity& s, std::size_t phase) const {
    if (!s.attempt || s.attempt->kind != kind_) return {};
    const Progress& p = s.progress;
    if (phase == 0) return p.begun() ? "done" : "waits";
    const auto wanted = static_cast<PhaseKind>(phase + (kind_ == CycleKind::kPause ? 0 : kPhases));
    const auto& phases = s.attempt->phases;
    const auto at = std::ranges::find(phases, wanted, &Attempt::PhaseTaken::phase);
    if (!p.begun() || at == phases.end()) return {};
    const bool last = at + 1 == phases.end();
    if (!last || p.decided()) return p.undoing && last ? "failed" : "done";
    if (p.waits()) return "waits";
    return fmt::format("{}/{}", p.steps_done, p.steps_done + p.steps_left);
  }

  [[nodiscard]] std::string Note(std::size_t index) const {
    const SessionActivity& s = picture_.sessions[index];
    std::vector<std::string> parts;
    if (const auto by = picture_.waited_for_by.find(s.who.session); by != picture_.waited_for_by.end())
      parts.push_back(fmt::format("<- {} for it", by->second == 1 ? "1 waits" : fmt::format("{} wait", by->second)));
    if (const auto& late = picture_.waits_for[index]; !late.empty()) parts.push_back("waits for " + FewNames(names_, late));
    if (s.attempt && (s.progress.undoing || s.attempt->kind != kind_)) parts.push_back(AttemptText(s, true));
    if (s.progress.open_step && SinceNs(picture_, s) >= kLong_ns) parts.push_back(ToText(*s.progress.open_step));
    if (const std::string trouble = Trouble(s); !trouble.empty()) parts.push_back(trouble);
    return fmt::format("{}", fmt::join(parts, "; "));
  }

  const JobPicture& picture_;
  const JobNames names_;
  const CycleKind kind_;
};

// What most of them are in or, where none is, the kind of the last that ended.
CycleKind KindShown(const JobPicture& picture) {
  std::array<std::size_t, 2> open{}, ended{};
  for (const SessionActivity& s : picture.sessions) {
    if (s.attempt) ++open[static_cast<std::size_t>(s.attempt->kind)];
    if (s.ended) ++ended[static_cast<std::size_t>(s.ended->kind)];
  }
  const auto& votes = open[0] + open[1] != 0 ? open : ended;
  return votes[1] > votes[0] ? CycleKind::kResume : CycleKind::kPause;
}

// The rows for which there is room, in their order.
std::vector<std::size_t> RowsShown(const JobPicture& picture, std::size_t room) {
  std::vector<std::size_t> shown(picture.sessions.size());
  std::iota(shown.begin(), shown.end(), std::size_t{0});
  if (room == 0 || shown.size() <= room) return shown;
  const auto dull = [&](std::size_t i) {
    const SessionActivity& s = picture.sessions[i];
    if (picture.waited_for_by.contains(s.who.session)) return 0;
    if (s.status != SessionStatus::kLive || !s.failure().empty() || !s.trouble.empty()) return 1;
    return s.attempt ? 2 : 3;
  };
  std::ranges::stable_sort(shown, {}, dull);
  shown.resize(room);
  std::ranges::sort(shown);
  return shown;
}

}  // namespace

JobPicture::JobPicture(std::vector<SessionActivity> activities, ThisHost moment)
    : sessions(std::move(activities)), now(std::move(moment)) {
  std::ranges::stable_sort(sessions, {}, [](const SessionActivity& s) { return std::pair(s.who.rank < 0, s.who.rank); });
  const Waits waits(sessions);
  for (const SessionActivity& s : sessions)
    for (const SessionId session : waits_for.emplace_back(waits.Of(s))) ++waited_for_by[session];
}

std::vector<std::string> PictureLines(const JobPicture& picture, PictureSize size) {
  const PictureTable table(picture, KindShown(picture));
  const std::vector<std::size_t> shown = RowsShown(picture, size.rows > 2 ? size.rows - 2 : size.rows);
  std::vector<Row> rows = {table.Head()};
  for (const std::size_t index : shown) rows.push_back(table.RowOf(index));
  std::vector<std::string> lines = TableLines(rows);
  if (const std::size_t hidden = picture.sessions.size() - shown.size(); hidden != 0)
    lines.push_back(Plural(hidden, "more session") + " for which there is no room");
  for (std::string& line : lines)
    if (size.columns != 0) line = CutTo(std::move(line), size.columns);
  return lines;
}

std::string ActivitySentence(const JobPicture& picture, std::size_t index, bool with_steps) {
  const SessionActivity& s = picture.sessions[index];
  const JobNames names = NamesIn(picture);
  std::string text = fmt::format("{}: {}", names.ShortName(s.who.session), StateWord(s));
  if (const std::string attempt = AttemptText(s, with_steps); !attempt.empty()) text += ", " + attempt;
  if (!picture.waits_for[index].empty()) text += ", waits for " + FewNames(names, picture.waits_for[index]);
  if (const std::string trouble = Trouble(s); !trouble.empty()) text += "; " + trouble;
  return text;
}

// ---- as JSON ---------------------------------------------------------------------------------------------------------------

namespace {

struct CycleRow {
  Attempt attempt;
  Progress progress;
};
template <class To>
void WriteFields(To& to, const CycleRow& row) {
  const Progress& p = row.progress;
  const bool between = p.begun() && !p.phase;
  to("kind", row.attempt.kind);
  to("number", row.attempt.cycle);
  to("begun", p.begun());
  to("phase", between ? std::nullopt : std::optional(p.phase.value_or(ArrivalOf(row.attempt.kind))));
  to("undoing", p.undoing);
  to("waits", p.waits());
  to("steps_done", p.steps_done);
  to("steps_left", p.steps_left);
  to("step", p.open_step ? std::optional(ToText(*p.open_step)) : std::nullopt, "Begun and not finished");
}

struct SessionRow {
  SessionActivity of;
  double since_seconds = 0;
  std::vector<SessionId> waits_for;
};
template <class To>
void WriteFields(To& to, const SessionRow& row) {
  const SessionActivity& s = row.of;
  to("session", s.who.session);
  to("rank", RankShown(s.who.rank), "null: unknown");
  to("pid", AtLeast<0>{s.who.pid});
  to("host", static_cast<const std::string&>(s.who.host));
  to("status", s.status);
  to("state", s.lifecycle);
  to("since_seconds", row.since_seconds, "How long it has been where it is");
  to("held_bytes", s.held);
  to("released_bytes", s.released);
  to("cycle", s.attempt ? std::optional(CycleRow{*s.attempt, s.progress}) : std::nullopt);
  to("failure", s.failure());
  to("trouble", s.trouble);
  to("waits_for", row.waits_for, "Who have not come or voted");
}

struct PictureRows {
  std::uint64_t wall_ns = 0;
  std::vector<SessionRow> sessions{};
};
template <class To>
void WriteFields(To& to, const PictureRows& rows) {
  to("at", WallText(rows.wall_ns));
  to("at_ns", rows.wall_ns, "Nanoseconds since 1970");
  to("sessions", rows.sessions);
}

}  // namespace

nlohmann::ordered_json PictureJson(const JobPicture& picture, std::uint64_t wall_ns) {
  PictureRows rows{.wall_ns = wall_ns};
  for (std::size_t i = 0; i < picture.sessions.size(); ++i) {
    const SessionActivity& s = picture.sessions[i];
    rows.sessions.push_back({s, static_cast<double>(SinceNs(picture, s)) / 1e9, picture.waits_for[i]});
  }
  return Object(rows);
}

nlohmann::ordered_json PictureForm() { return FormOf(PictureRows{}); }

}  // namespace amem
