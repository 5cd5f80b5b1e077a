// Processes that ended without closing their journals.
#include <fmt/format.h>

#include <algorithm>

#include "replay/diagnosis/explanation.h"

namespace amem {
namespace {

using Role = Evidence::Role;

std::uint64_t TimeOfLoss(const SessionStory& witness, SessionId lost) {
  const auto it = std::ranges::find(witness.lost, lost, [](const auto& dated) { return dated.event.peer; });
  return it == witness.lost.end() ? 0 : it->at.time_ns;
}

void DescribeEnd(Explanation& e, const std::string& when) {
  const SessionStory& journal = *e.story;
  const Progress progress = e.cause.attempt != nullptr ? ProgressOf(journal, e.cause.attempt->tag) : Progress{};
  e.verdict.seq = journal.last.seq;
  e.verdict.phase = progress.phase;
  if (progress.step()) e.TakeStep(journal, *progress.step());
  e.verdict.headline = fmt::format("{} ended without closing {} journal, {}", Capitalized(e.NamesOfAll()),
                                   e.cause.together.empty() ? "its" : "their", when);
  e.Say(fmt::format("{} ended {} without closing its journal; its last event is number {}, at {}{}.",
                    Capitalized(e.verdict.process), when, journal.last.seq.value, WallText(e.Wall(journal, journal.last)),
                    journal.findings.report.torn_tail ? ", and the one after it was cut short" : ""));
  if (e.cause.attempt != nullptr && !e.cause.attempt->begun) e.Say("It waited for the others to join.");
  if (progress.phase)
    e.Say(fmt::format("It was in phase \"{}\"{}: {}", ToText(*progress.phase), progress.undoing ? " of the undo" : "",
                      e.ProgressText(journal, progress)));
  if (e.cause.witness.journal != nullptr) {
    e.Say(fmt::format("{} noticed its end at {}{}{}.", Capitalized(e.names.ShortName(e.cause.witness.journal->session())),
                      WallText(e.cause.wall_ns), EventText(e.cause.record.seq),
                      journal.dying ? "; the process was still being taken down when its journal was read" : ""));
  }
  if (e.cause.sight.exit_code >= 0) e.Say(Sentence(ExitText(e.cause.sight.exit_code)));
  if (!e.cause.together.empty())
    e.Say(fmt::format("At the same time {} ended without closing {} journal, too.", e.names.Names(e.cause.together),
                      e.cause.together.size() == 1 ? "its" : "their"));
  e.SaySight(e.cause.session);
  e.AddBeginning(journal);
  if (e.cause.attempt != nullptr && e.cause.attempt->open_step) {
    const Dated<Step>& open = *e.cause.attempt->open_step;
    e.AddEvidence(journal, open.at, Role::kCause, "step begun, and neither done nor failed: " + ToText(open.event));
  }
  e.AddEvidence(
      journal, {{}, journal.last.time_ns}, Role::kCause,
      fmt::format("the journal ends here with event {}: the process is dead, and did not close it", journal.last.seq.value));
  if (e.cause.witness.journal == nullptr) return;
  e.AddEvidence(*e.cause.witness.journal, {e.cause.record.seq, TimeOfLoss(*e.cause.witness.journal, e.cause.session)},
                Role::kConsequence, "lost " + e.names.Name(e.cause.session));
}

}  // namespace

void ExplainDied(Explanation& e) {
  const Attempt* attempt = e.cause.attempt;
  DescribeEnd(e, attempt != nullptr ? "in the middle of " + e.Cycle()
                                    : fmt::format("while it was {}", ToText(e.story->findings.state.lifecycle)));
  const bool pausing = attempt != nullptr && attempt->kind == CycleKind::kPause;
  const bool of_pool = attempt != nullptr && !attempt->tag.empty();
  if (of_pool) e.Say("Other processes did not need that memory; its contents are gone with this one.");
  if (of_pool) return e.Recommend(Remedy::Action::kFindReasonOfDeath);
  e.Recommend(Remedy::Action::kFindReasonOfDeath, pausing ? Remedy::Outlook::kOthersRun : Remedy::Outlook::kOthersMissMemory);
}

void ExplainLeft(Explanation& e) {
  const SessionStory& journal = *e.story;
  const SessionStory::Closing& closing = *journal.closed;
  const bool half = closing.in_attempt || (closing.before != Lifecycle::kRunning && closing.before != Lifecycle::kNew);
  const std::string when = closing.in_attempt && e.cause.attempt != nullptr
                               ? "in the middle of " + e.Cycle()
                               : fmt::format("while it was {}", ToText(closing.before));
  const std::string code = closing.event.exit_code >= 0 ? fmt::format(" with exit code {}", closing.event.exit_code) : "";
  const std::string status = closing.event.exit_code >= 0 ? fmt::format(" with code {}", closing.event.exit_code) : "";
  e.verdict.seq = closing.at.seq;
  e.verdict.headline = fmt::format("{} exited{}, {}", Capitalized(e.NamesOfAll()), status, when);
  e.Say(fmt::format("{} closed its journal in order ({}) at {}{}, {}{}.", Capitalized(e.verdict.process), closing.event.reason,
                    WallText(e.cause.wall_ns), EventText(closing.at.seq), when, code.empty() ? "" : "," + code));
  if (journal.refused) {
    e.Say(fmt::format("Before that NCCL's {} was refused, because its memory was away.", journal.refused->event.call));
    e.AddEvidence(journal, journal.refused->at, Role::kContext, "refused while paused: " + journal.refused->event.call);
  }
  e.AddEvidence(journal, closing.at, Role::kCause, "session closed: " + closing.event.reason + code);
  e.Recommend(half ? Remedy::Action::kStayUntilResumed : Remedy::Action::kFindReasonOfEnd);
  e.verdict.remedy.process = e.NamesOfAll();
}

void ExplainLaunchRefused(Explanation& e) {
  const SessionStory& journal = *e.story;
  const auto& [refused, at] = *journal.refused;
  e.verdict.seq = at.seq;
  e.verdict.headline = fmt::format("{} used NCCL while it was paused", Capitalized(e.NamesOfAll()));
  e.Say(fmt::format("{} called {} at {}{} while its memory was away, and AMem refused it{}.", Capitalized(e.verdict.process),
                    refused.call, WallText(e.cause.wall_ns), EventText(at.seq),
                    refused.count > 1 ? fmt::format(", {} times in all", refused.count) : ""));
  if (journal.closed && journal.closed->event.exit_code >= 0)
    e.Say(fmt::format("After that it ended: {}.", ExitText(journal.closed->event.exit_code)));
  e.AddEvidence(journal, at, Role::kCause, "refused while paused: " + refused.call);
  e.Recommend(Remedy::Action::kResumeFirst);
}

namespace {

// "in the middle of pause 3", "while rank 0 was paused".
std::string WhenItEnded(const Explanation& e) {
  if (e.cause.attempt != nullptr) return "in the middle of " + e.Cycle();
  if (e.cause.kind == VerdictKind::kEnded) return "while it was running";
  const SessionStory& witness = *e.cause.witness.journal;
  const std::string name = e.names.ShortName(witness.session());
  if (WasPausedAt(e.roster, witness, e.cause.wall_ns)) return fmt::format("while {} was paused", name);
  return fmt::format("while {} was {}", name, ToText(witness.findings.state.lifecycle));
}

// When the witness recorded it. A witness that recorded no loss has a decision, with the phase, in its place.
Moment TakeReport(Explanation& e, std::uint64_t time_ns) {
  const std::optional<Attempt::Decision>& decided = e.cause.witness.journal->Last().decided;
  if (time_ns == 0 && decided) {
    e.verdict.phase = decided->phase;
    time_ns = decided->at.time_ns;
  }
  return {e.cause.record.seq, time_ns};
}

Remedy::Action ActionForReportedEnd(VerdictKind kind) {
  if (kind == VerdictKind::kLeft) return Remedy::Action::kStayUntilResumed;
  return kind == VerdictKind::kEnded ? Remedy::Action::kFindReasonOfEnd : Remedy::Action::kFindReasonOfDeath;
}

void ExplainReportedEnd(Explanation& e) {
  Verdict& v = e.verdict;
  const SessionStory& witness = *e.cause.witness.journal;
  const std::string name = Capitalized(e.NamesOfAll()), told = Capitalized(e.names.ShortName(witness.session()));
  const std::string when = WhenItEnded(e);
  const Moment at = TakeReport(e, TimeOfLoss(witness, e.cause.session));
  v.headline = fmt::format("{} {}, {}", name, e.cause.kind == VerdictKind::kLeft ? "exited" : "died", when);
  e.Say(fmt::format("{} noticed at {}{} that {} had ended, {}.", told, WallText(e.cause.wall_ns), EventText(e.cause.record.seq),
                    v.process, when));
  if (e.cause.sight.exit_code >= 0) e.Say(Sentence(ExitText(e.cause.sight.exit_code)));
  if (!e.cause.record.message.empty()) e.Say(fmt::format("{} reported: {}", told, Sentence(e.cause.record.message)));
  e.AddEvidence(witness, at, Role::kCause, "lost " + v.process);
  e.SaySight(e.cause.session);
  const bool paused = e.cause.kind == VerdictKind::kDied && e.cause.attempt == nullptr;
  e.Recommend(ActionForReportedEnd(e.cause.kind), paused ? Remedy::Outlook::kOthersMissMemory : Remedy::Outlook::kUnsaid);
}

void ExplainReportedFailure(Explanation& e) {
  Verdict& v = e.verdict;
  const CandidateCause::Record& record = e.cause.record;
  const SessionStory& witness = *e.cause.witness.journal;
  if (e.cause.attempt != nullptr && e.cause.attempt->decided) v.phase = e.cause.attempt->decided->phase;
  if (record.shown != nullptr) v.phase = PhaseOf(record.shown->kind, record.shown->ballot);
  const Moment at = TakeReport(e, 0);
  v.headline = fmt::format("{} failed on {}{}", Capitalized(e.Cycle()), e.NamesOfAll(),
                           record.code == Code::kOk ? "" : fmt::format(": {}", ToText(record.code)));
  e.Say(fmt::format("{}{} on {}{}.", e.CycleOfAll(), e.HowItEnded(), v.process,
                    v.phase ? fmt::format(", in phase \"{}\"", ToText(*v.phase)) : ""));
  if (!record.message.empty())
    e.Say(fmt::format("{} reported: {}", Capitalized(e.names.ShortName(witness.session())), Sentence(record.message)));
  e.AddEvidence(witness, at, Role::kCause, "reported: " + record.message);
  e.SaySight(e.cause.session);
  const bool contents = v.phase && (*v.phase == PhaseKind::kPauseArrive || *v.phase == PhaseKind::kPauseSave);
  e.Recommend(ActionForFailure(record.code, record.driver_result, contents ? std::optional(StepKind::kScan) : std::nullopt,
                               Remedy::Action::kFollowVote));
}

}  // namespace

// Only others recorded it: the session's own journal was not given, or has nothing of it.
void ExplainReported(Explanation& e) {
  e.verdict.code = e.cause.record.code;
  e.verdict.driver_result = e.cause.record.driver_result;
  e.verdict.seq = e.cause.record.seq;
  IsEnd(e.cause.kind) ? ExplainReportedEnd(e) : ExplainReportedFailure(e);
  e.verdict.notes.push_back(e.story == nullptr
                                ? "the journal of " + e.verdict.process + " was not given; this is what others recorded"
                                : "the journal of " + e.verdict.process + " does not say why; this is what others recorded");
}

void ExplainEnded(Explanation& e) {
  DescribeEnd(e, "while it was running");
  e.Recommend(Remedy::Action::kFindReasonOfEnd);
}

}  // namespace amem
