#include "replay/diagnosis/verdict_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "replay/diagnosis/explanation.h"

namespace amem {
namespace {

// By kind; no candidate cause is healthy or unreadable.
constexpr std::array<void (*)(Explanation&), kVerdictKinds> kExplainers = {
    nullptr,        ExplainFailedStep, ExplainFailedStep,   ExplainDied,   ExplainEnded,      ExplainNeverArrived,
    ExplainStalled, ExplainRefused,    ExplainHalfDone,     ExplainBroken, ExplainReferences, ExplainImpossible,
    nullptr,        ExplainLeft,       ExplainLaunchRefused};

// Of each weight, in their order.
constexpr std::array<std::string_view, 5> kWeights = {"cause", "absence", "consequence", "disagreement", "end"};

// "Tag weights is paused there, with its contents kept."
std::string StandingOfPool(const CandidateCause& cause, const std::string& tag) {
  if (cause.journal == nullptr || IsEnd(cause.kind)) return {};
  const State& state = cause.journal->findings.state;
  const auto pool = state.pools.find(state.PoolNamed(tag));
  if (pool == state.pools.end()) return {};
  const bool paused = pool->second.lifecycle == Lifecycle::kPaused;
  const bool between = !paused && pool->second.lifecycle != Lifecycle::kRunning;
  return fmt::format("Tag {} is {} there now{}.", tag, between ? "neither running nor paused" : ToText(pool->second.lifecycle),
                     paused && pool->second.policy == PoolPolicy::kPreserve ? ", with its contents kept" : "");
}

}  // namespace

void Consider(const Roster& roster, const std::vector<CandidateCause>& candidates, Verdict& verdict) {
  for (const CandidateCause& c : candidates) {
    if (verdict.causes.size() == Verdict::kCausesMost) break;
    std::optional<SessionId> witness;
    if (c.witness != nullptr && c.witness->session() != c.session) witness = c.witness->session();
    verdict.causes.push_back({c.kind, c.session, roster.names().RankOf(c.session), c.wall_ns, witness,
                              kWeights.at(static_cast<std::size_t>(c.weight)), c.message});
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
  verdict.sessions = explanation.Named();
  for (const SessionId session : verdict.sessions) {
    if (const std::int32_t rank = roster.names().RankOf(session); rank >= 0) verdict.ranks.push_back(rank);
  }
  std::ranges::sort(verdict.ranks);
  if (cause.reported) {
    ExplainReported(explanation);
  } else {
    kExplainers.at(static_cast<std::size_t>(cause.kind))(explanation);
  }
  const bool of_pool = !verdict.tag.empty();
  if (of_pool) explanation.Say(StandingOfPool(cause, verdict.tag));
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

void ExplainUnreadable(Verdict& verdict) {
  verdict.kind = VerdictKind::kUnreadable;
  verdict.headline = "Nothing is wrong in what could be read, but a part could not be read";
  verdict.summary = verdict.headline + ": " + verdict.damage.front() + ".";
  verdict.remedy.action = Remedy::Action::kGiveWholeJournals;
}

}  // namespace amem
