#include "replay/diagnosis/verdict_text.h"

#include <fmt/format.h>

#include <array>

#include "replay/diagnosis/explanation.h"

namespace amem {
namespace {

// By kind; no candidate cause is healthy or unreadable.
constexpr std::array<void (*)(Explanation&), kVerdictKinds> kExplainers = {
    nullptr,        ExplainFailedStep, ExplainFailedStep, ExplainDied,   ExplainEnded,      ExplainNeverArrived,
    ExplainStalled, ExplainRefused,    ExplainHalfDone,   ExplainBroken, ExplainReferences, ExplainImpossible,
    nullptr};

}  // namespace

void Explain(const Roster& roster, const CandidateCause& cause, Verdict& verdict) {
  verdict.kind = cause.kind;
  verdict.session = cause.session;
  verdict.rank = roster.names().RankOf(cause.session);
  verdict.process = roster.names().Name(cause.session);
  verdict.wall_ns = cause.wall_ns;
  verdict.live = cause.live;
  if (cause.attempt != nullptr) {
    verdict.cycle_kind = cause.attempt->kind;
    verdict.cycle = cause.attempt->cycle;
  }
  Explanation explanation{roster, cause, verdict};
  kExplainers.at(static_cast<std::size_t>(cause.kind))(explanation);
  if (cause.attempt != nullptr && cause.attempt->begun) ExplainConsequences(explanation);
  if (cause.attempt == nullptr && cause.kind == VerdictKind::kDied) ExplainLaterAttempts(explanation);
  explanation.Say(PresentState(roster));
}

void ExplainHealth(const Roster& roster, Verdict& verdict) {
  const Verdict::Totals& t = verdict.totals;
  std::size_t live = 0, closed = 0, paused = 0, under_way = 0;
  for (const JournalHistory& j : roster.journals()) {
    live += j.findings.info.status == SessionStatus::kLive ? 1 : 0;
    closed += j.findings.info.status == SessionStatus::kClosed ? 1 : 0;
    paused += j.findings.state.lifecycle == Lifecycle::kPaused ? 1 : 0;
    under_way += !j.attempts.empty() && j.attempts.back().end == Attempt::End::kOpen ? 1 : 0;
  }
  verdict.live = live != 0;
  verdict.headline = fmt::format("Nothing is wrong: {} and {} of {} completed", Plural(t.pauses, "pause"),
                                 Plural(t.resumes, "resume"), Plural(t.journals, "session"));
  verdict.summary = fmt::format("{} were checked, and {} between sessions {} on both sides.", Plural(t.events, "event"),
                                Plural(t.references, "reference"), t.references == 1 ? "agrees" : "agree");
  if (under_way != 0) verdict.summary += " A pause or resume is under way and makes progress.";
  if (live != 0) {
    verdict.summary +=
        fmt::format(" {}{}; they hold {} of their own memory on devices{}.", Plural(live, "session lives", "sessions live"),
                    paused != 0 ? fmt::format(", {} paused", paused) : "", FormatBytes(t.held),
                    t.released != 0 ? fmt::format(", and {} are given back", FormatBytes(t.released)) : "");
  }
  if (closed != 0) verdict.summary += fmt::format(" {} in order.", Plural(closed, "session has ended", "sessions have ended"));
}

void ExplainUnreadable(Verdict& verdict) {
  verdict.kind = VerdictKind::kUnreadable;
  verdict.headline = "Nothing is wrong in what could be read, but a part could not be read";
  verdict.summary = verdict.headline + ": " + verdict.damage.front() + ".";
  verdict.remedy.action = Remedy::Action::kGiveWholeJournals;
}

}  // namespace amem
