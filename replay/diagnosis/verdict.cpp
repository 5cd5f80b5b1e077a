#include "replay/diagnosis/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "replay/diagnosis/explanation.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"

namespace amem {

// By kind; no candidate cause is healthy or unreadable.
constexpr std::array<void (*)(Explanation&), kVerdictKinds> kExplainers = {
    nullptr,        ExplainFailedStep, ExplainFailedStep,    ExplainDied,        ExplainEnded,      ExplainNeverArrived,
    ExplainStalled, ExplainRefused,    ExplainHalfDone,      ExplainBroken,      ExplainReferences, ExplainImpossible,
    nullptr,        ExplainLeft,       ExplainLaunchRefused, ExplainNotUnderAmem};

constexpr std::array<std::string_view, 3> kRoles = {"context", "cause", "consequence"};
// Of each weight, in their order.
constexpr std::array<std::string_view, 5> kWeights = {"cause", "absence", "consequence", "disagreement", "end"};

// "Tag weights is paused there, with its contents kept."
static std::string PoolText(const Explanation& e, const std::string& tag) {
  if (e.story == nullptr || IsEnd(e.cause.kind)) return {};
  const State& state = e.story->findings.state;
  const Pool* pool = FindIn(state.pools, state.PoolNamed(tag));
  if (pool == nullptr) return {};
  const bool paused = pool->lifecycle == Lifecycle::kPaused;
  const bool between = !paused && pool->lifecycle != Lifecycle::kRunning;
  return fmt::format("Tag {} is {} there now{}.", tag, between ? "neither running nor paused" : ToText(pool->lifecycle),
                     paused && pool->Preserves() ? ", with its contents kept" : "");
}

std::string_view ToText(Evidence::Role role) { return kRoles.at(static_cast<std::size_t>(role)); }

void Consider(const Roster& roster, const std::vector<CandidateCause>& candidates, Verdict& verdict) {
  for (const CandidateCause& c : candidates) {
    if (verdict.causes.size() == Verdict::kCausesMost) break;
    std::optional<SessionId> witness;
    if (c.witness.journal != nullptr && c.witness.journal->session() != c.session) witness = c.witness.journal->session();
    verdict.causes.push_back({c.kind, c.session, roster.names().RankOf(c.session), c.wall_ns, witness,
                              kWeights.at(static_cast<std::size_t>(c.weight)), c.record.message});
  }
}

void Explain(const Roster& roster, const CandidateCause& cause, Verdict& verdict) {
  verdict.kind = cause.kind;
  verdict.session = cause.session;
  verdict.rank = roster.names().RankOf(cause.session);
  verdict.process = roster.names().Name(cause.session);
  verdict.wall_ns = cause.wall_ns;
  verdict.live = cause.live && std::ranges::none_of(roster.journals(), WasPacked);
  if (cause.attempt != nullptr) {
    verdict.cycle_kind = cause.attempt->kind;
    verdict.cycle = cause.attempt->cycle;
    verdict.tag = cause.attempt->tag;
  }
  Explanation explanation{roster, cause, verdict};
  for (const SessionId session : explanation.Named())
    if (const std::int32_t rank = roster.names().RankOf(session); rank >= 0) verdict.ranks.push_back(rank);
  if (cause.kind == VerdictKind::kNotUnderAmem) verdict.ranks = DetailOf<CandidateCause::RanksWithoutSession>(cause).ranks;
  std::ranges::sort(verdict.ranks);
  if (cause.witness.alone) {
    ExplainReported(explanation);
  } else {
    kExplainers.at(static_cast<std::size_t>(cause.kind))(explanation);
  }
  const bool of_pool = !verdict.tag.empty();
  if (of_pool) explanation.Say(PoolText(explanation, verdict.tag));
  if (cause.attempt != nullptr && cause.attempt->begun && !of_pool) ExplainConsequences(explanation);
  if (cause.attempt == nullptr && (cause.kind == VerdictKind::kDied || cause.kind == VerdictKind::kLeft))
    ExplainLaterAttempts(explanation);
  explanation.Say(PresentState(roster));
  RecommendForTheDead(explanation);
}

void ExplainHealth(const Roster& roster, Verdict& verdict) {
  const Verdict::Totals& t = verdict.totals;
  std::size_t live = 0, closed = 0, paused = 0, under_way = 0, copied = 0;
  const bool packed = std::ranges::any_of(roster.journals(), WasPacked);
  for (const SessionStory& j : roster.journals()) {
    live += j.findings.info.status == SessionStatus::kLive ? 1 : 0;
    copied += j.findings.info.status == SessionStatus::kCopied ? 1 : 0;
    closed += j.findings.info.status == SessionStatus::kClosed ? 1 : 0;
    paused += j.findings.state.lifecycle == Lifecycle::kPaused ? 1 : 0;
    under_way += j.OpenAttempt() != nullptr || std::ranges::any_of(j.LastOfPools(), &Attempt::open) ? 1 : 0;
  }
  verdict.live = live != 0 && !packed;
  verdict.headline = fmt::format("Nothing is wrong: {} and {} of {} completed", Plural(t.pauses, "pause"),
                                 Plural(t.resumes, "resume"), Plural(t.journals, "process", "processes"));
  verdict.summary = fmt::format("{} were checked, and {} between processes {} on both sides.", Plural(t.events, "event"),
                                Plural(t.references, "reference"), t.references == 1 ? "agrees" : "agree");
  if (under_way != 0) verdict.summary += " A pause or resume is under way and makes progress.";
  if (live != 0) {
    verdict.summary += fmt::format(
        " {}{}; they {} {} of their own memory on devices{}.",
        packed ? Plural(live, "process", "processes") + " lived when the journals were packed"
               : Plural(live, "process lives", "processes live"),
        paused != 0 ? fmt::format(", {} paused", paused) : "", packed ? "held" : "hold", FormatBytes(t.held),
        t.released != 0 ? fmt::format(", and {} given back {}", packed ? "had" : "have", FormatBytes(t.released)) : "");
  }
  if (copied != 0) {
    verdict.summary += fmt::format(" {} of a journal that was not closed{}; whether the processes live now is not known.",
                                   Plural(copied, "process is known from a copy", "processes are known from copies"),
                                   live == 0 && paused != 0 ? fmt::format(", {} paused as of the copy", paused) : "");
  }
  if (closed != 0) verdict.summary += fmt::format(" {} in order.", Plural(closed, "process has ended", "processes have ended"));
}

void SayWhatIsMissing(Verdict& verdict) {
  if (verdict.certain()) return;
  constexpr std::size_t kMissingMost = 300;
  const std::string& first = verdict.damage.front();
  const std::string missing = Capitalized(first.size() > kMissingMost ? CutTo(first, kMissingMost) + "..." : first);
  if (verdict.healthy()) {
    verdict.kind = VerdictKind::kUnreadable;
    verdict.headline = missing + ". No failure is recorded in what could be read";
    verdict.summary = "What could be read is too little to say that all is well. " + verdict.headline + ".";
    verdict.remedy.action = Remedy::Action::kGiveWholeJournals;
  } else {
    verdict.headline = missing + ". What could be read says: " + verdict.headline;
    verdict.summary =
        "What follows rests on a part of the journals, and may be a consequence of what is missing. " + verdict.summary;
  }
}

std::string Verdict::RemedyText() const {
  const std::string text = ToText(remedy);
  if (certain() || text.empty() || remedy.action == Remedy::Action::kGiveWholeJournals) return text;
  Remedy first;
  first.action = Remedy::Action::kGiveWholeJournals;
  return ToText(first) + "; then: " + text;
}

using Json = nlohmann::ordered_json;

Json ToJson(const Verdict& v) {
  const auto maybe = [](bool known, Json value) { return known ? std::move(value) : Json(nullptr); };
  Json j = {{"healthy", maybe(v.certain(), v.healthy())},
            {"kind", ToText(v.kind)},
            {"headline", v.headline},
            {"summary", v.summary},
            {"job", maybe(!v.job.empty(), v.job)},
            {"remedy_action", ToText(v.remedy.action)},
            {"remedy", maybe(v.remedy.action != Remedy::Action::kNone, v.RemedyText())},
            {"live", v.live}};
  j["session"] = maybe(v.session.has_value(), SessionText(v.session.value_or(SessionId{})));
  j["rank"] = maybe(v.rank >= 0, v.rank);
  j["ranks"] = v.ranks;
  j["process"] = maybe(!v.process.empty(), v.process);
  j["cycle_kind"] = maybe(v.cycle_kind.has_value(), ToText(v.cycle_kind.value_or(CycleKind::kPause)));
  j["cycle"] = maybe(v.cycle_kind.has_value(), v.cycle);
  j["tag"] = maybe(!v.tag.empty(), v.tag);
  j["phase"] = maybe(v.phase.has_value(), ToText(v.phase.value_or(PhaseKind::kPauseArrive)));
  j["step"] = v.step ? ToJson(*v.step) : Json(nullptr);
  j["allocation"] = maybe(v.allocation.has_value(), v.allocation.value_or(AllocationId{}).value);
  j["bytes"] = maybe(v.bytes != 0, v.bytes);
  j["code"] = maybe(v.code != Code::kOk, ToText(v.code));
  j["driver_result"] = maybe(v.driver_result != 0, v.driver_result);
  j["seq"] = maybe(static_cast<bool>(v.seq), v.seq.value);
  j["realtime_ns"] = maybe(v.wall_ns != 0, v.wall_ns);
  Json evidence = Json::array();
  for (const Evidence& e : v.evidence) {
    evidence.push_back({{"session", SessionText(e.session)},
                        {"rank", maybe(e.rank >= 0, e.rank)},
                        {"seq", maybe(static_cast<bool>(e.seq), e.seq.value)},
                        {"realtime_ns", maybe(e.wall_ns != 0, e.wall_ns)},
                        {"role", ToText(e.role)},
                        {"text", e.text}});
  }
  j["evidence"] = std::move(evidence);
  Json causes = Json::array();
  for (const ConsideredCause& c : v.causes) {
    causes.push_back({{"kind", ToText(c.kind)},
                      {"session", SessionText(c.session)},
                      {"rank", maybe(c.rank >= 0, c.rank)},
                      {"realtime_ns", maybe(c.wall_ns != 0, c.wall_ns)},
                      {"witness", maybe(c.witness.has_value(), SessionText(c.witness.value_or(SessionId{})))},
                      {"weight", c.weight},
                      {"text", c.text}});
  }
  j["causes"] = std::move(causes);
  j["contents"] = Json::array();
  for (const PauseContents& contents : v.contents) j["contents"].push_back(ToJson(contents));
  j["notes"] = v.notes;
  j["damage"] = v.damage;
  j["totals"] = {{"journals", v.totals.journals}, {"events", v.totals.events},          {"pauses", v.totals.pauses},
                 {"resumes", v.totals.resumes},   {"failures", v.totals.failures},      {"references", v.totals.references},
                 {"held_bytes", v.totals.held},   {"released_bytes", v.totals.released}};
  return j;
}

}  // namespace amem
