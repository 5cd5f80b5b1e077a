#include "replay/diagnosis/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "replay/diagnosis/explanation.h"
#include "replay/job/names.h"

namespace amem {

static void ExplainByKind(Explanation& e) {
  switch (e.cause.kind) {
    case VerdictKind::kHealthy:
    case VerdictKind::kUnreadable:
      return;  // no candidate cause is one of these
    case VerdictKind::kStepFailed:
    case VerdictKind::kOutOfMemory:
      return ExplainFailedStep(e);
    case VerdictKind::kDied:
      return ExplainDied(e);
    case VerdictKind::kEnded:
      return ExplainEnded(e);
    case VerdictKind::kNeverArrived:
      return ExplainNeverArrived(e);
    case VerdictKind::kStalled:
      return ExplainStalled(e);
    case VerdictKind::kRefused:
      return ExplainRefused(e);
    case VerdictKind::kHalfDone:
      return ExplainHalfDone(e);
    case VerdictKind::kBroken:
      return ExplainBroken(e);
    case VerdictKind::kReferences:
      return ExplainReferences(e);
    case VerdictKind::kImpossible:
      return ExplainImpossible(e);
    case VerdictKind::kLeft:
      return ExplainLeft(e);
    case VerdictKind::kLaunchRefused:
      return ExplainLaunchRefused(e);
    case VerdictKind::kNotUnderAmem:
      return ExplainNotUnderAmem(e);
  }
}

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

std::string_view ToText(Evidence::Role role) {
  switch (role) {
    case Evidence::Role::kContext:
      return "context";
    case Evidence::Role::kCause:
      return "cause";
    case Evidence::Role::kConsequence:
      return "consequence";
  }
  return "unknown";
}

static std::string_view ToText(CandidateCause::Weight weight) {
  switch (weight) {
    case CandidateCause::Weight::kCause:
      return "cause";
    case CandidateCause::Weight::kAbsence:
      return "absence";
    case CandidateCause::Weight::kConsequence:
      return "consequence";
    case CandidateCause::Weight::kDisagreement:
      return "disagreement";
    case CandidateCause::Weight::kEnd:
      return "end";
  }
  return "unknown";
}

void Consider(const Roster& roster, const std::vector<CandidateCause>& candidates, Verdict& verdict) {
  for (const CandidateCause& c : candidates) {
    if (verdict.causes.size() == Verdict::kCausesMost) break;
    std::optional<SessionId> witness;
    if (c.witness.journal != nullptr && c.witness.journal->session() != c.session) witness = c.witness.journal->session();
    verdict.causes.push_back(
        {c.kind, c.session, roster.names().RankOf(c.session), c.wall_ns, witness, ToText(c.weight), c.record.message});
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
  if (const Status sound = CheckCause(explanation); !sound) {
    verdict.headline =
        fmt::format("The diagnosis contradicts itself: {} of {} cannot be explained", ToText(cause.kind), verdict.process);
    explanation.Say(Sentence("a check of AMem's own failed: " + sound.message()));
    explanation.Recommend(Remedy::Action::kReportJournals);
    return;
  }
  if (cause.witness.alone) {
    ExplainReported(explanation);
  } else {
    ExplainByKind(explanation);
  }
  if (verdict.remedy.action == Remedy::Action::kExamineGpu)
    explanation.Say(Sentence(GpuText(verdict.remedy) + " has an uncorrectable memory error: contents there may be wrong"));
  if (verdict.remedy.action == Remedy::Action::kAvoidDisplay)
    explanation.Say("A kernel on " + GpuText(verdict.remedy) +
                    " ran longer than the driver allows where a display watches the GPU: the context of that process is lost.");
  const bool of_pool = !verdict.tag.empty();
  if (of_pool) explanation.Say(PoolText(explanation, verdict.tag));
  if (cause.attempt != nullptr && cause.attempt->begun && !of_pool) ExplainConsequences(explanation);
  if (cause.attempt == nullptr && (cause.kind == VerdictKind::kDied || cause.kind == VerdictKind::kLeft))
    ExplainLaterAttempts(explanation);
  explanation.Say(PresentState(roster));
  RecommendForTheDead(explanation);
}

namespace {

// How many processes of a healthy job are in which state.
struct StatesOfHealthy {
  std::size_t live = 0, closed = 0, copied = 0;  // as far as the process is known
  std::size_t paused = 0, under_way = 0;
  bool packed = false;  // all this is of when the journals were packed
};

StatesOfHealthy CountStates(const Roster& roster) {
  StatesOfHealthy states;
  states.packed = std::ranges::any_of(roster.journals(), WasPacked);
  for (const SessionStory& j : roster.journals()) {
    const SessionStatus status = j.findings.info.status;
    states.live += status == SessionStatus::kLive ? 1 : 0;
    states.copied += status == SessionStatus::kCopied ? 1 : 0;
    states.closed += status == SessionStatus::kClosed ? 1 : 0;
    states.paused += j.findings.state.lifecycle == Lifecycle::kPaused ? 1 : 0;
    states.under_way += j.OpenAttempt() != nullptr || std::ranges::any_of(j.LastOfPools(), &Attempt::open) ? 1 : 0;
  }
  return states;
}

// " 4 processes live, 2 paused; they hold 8 MiB of their own memory on devices."
std::string TextOfLive(const StatesOfHealthy& states, const Verdict::Totals& totals) {
  if (states.live == 0) return {};
  const std::string paused = states.paused != 0 ? fmt::format(", {} paused", states.paused) : "";
  if (states.packed) {
    const std::string released = totals.released != 0 ? ", and had given back " + FormatBytes(totals.released) : "";
    return fmt::format(" {} lived when the journals were packed{}; they held {} of their own memory on devices{}.",
                       Plural(states.live, "process", "processes"), paused, FormatBytes(totals.held), released);
  }
  const std::string released = totals.released != 0 ? ", and have given back " + FormatBytes(totals.released) : "";
  return fmt::format(" {}{}; they hold {} of their own memory on devices{}.",
                     Plural(states.live, "process lives", "processes live"), paused, FormatBytes(totals.held), released);
}

std::string TextOfCopied(const StatesOfHealthy& states) {
  if (states.copied == 0) return {};
  const bool paused = states.live == 0 && states.paused != 0;
  return fmt::format(" {} of a journal that was not closed{}; whether the processes live now is not known.",
                     Plural(states.copied, "process is known from a copy", "processes are known from copies"),
                     paused ? fmt::format(", {} paused as of the copy", states.paused) : "");
}

}  // namespace

void ExplainHealth(const Roster& roster, Verdict& verdict) {
  const Verdict::Totals& t = verdict.totals;
  const StatesOfHealthy states = CountStates(roster);
  verdict.live = states.live != 0 && !states.packed;
  verdict.headline = fmt::format("Nothing is wrong: {} and {} of {} completed", Plural(t.pauses, "pause"),
                                 Plural(t.resumes, "resume"), Plural(t.journals, "process", "processes"));
  verdict.summary = fmt::format("{} were checked, and {} between processes {} on both sides.", Plural(t.events, "event"),
                                Plural(t.references, "reference"), t.references == 1 ? "agrees" : "agree");
  if (states.under_way != 0) verdict.summary += " A pause or resume is under way and makes progress.";
  verdict.summary += TextOfLive(states, t) + TextOfCopied(states);
  if (states.closed != 0)
    verdict.summary += fmt::format(" {} in order.", Plural(states.closed, "process has ended", "processes have ended"));
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

}  // namespace amem
