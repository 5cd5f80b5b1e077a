// Processes that ended without closing their journals.
#include <fmt/format.h>

#include <algorithm>

#include "replay/diagnosis/explanation.h"

namespace amem {
namespace {

using Role = Evidence::Role;

std::uint64_t TimeOfLoss(const JournalHistory& witness, SessionId lost) {
  const auto it = std::ranges::find(witness.lost, lost, &PeerLost::peer);
  return it == witness.lost.end() ? 0 : witness.lost_at[static_cast<std::size_t>(it - witness.lost.begin())].time_ns;
}

void SayWhatItDid(Explanation& e, const Progress& progress) {
  if (e.cause.attempt != nullptr && !e.cause.attempt->begun) e.Say("It waited for the others to join.");
  if (!progress.phase) return;
  e.Say(fmt::format("It was in phase \"{}\"{}: {}", ToText(*progress.phase), progress.undoing ? " of the undo" : "",
                    e.ProgressText(*e.cause.journal, progress)));
}

void AddDeath(Explanation& e) {
  const JournalHistory& journal = *e.cause.journal;
  e.AddBeginning(journal);
  if (e.cause.attempt != nullptr && e.cause.attempt->open_step) {
    const Attempt::OpenStep& open = *e.cause.attempt->open_step;
    e.AddEvidence(journal, open.at, Role::kCause, "step begun, and neither done nor failed: " + ToText(open.step));
  }
  e.AddEvidence(
      journal, {{}, journal.last.time_ns}, Role::kCause,
      fmt::format("the journal ends here with event {}: the process is dead, and did not close it", journal.last.seq.value));
  if (e.cause.witness == nullptr) return;
  e.AddEvidence(*e.cause.witness, {e.cause.witness_seq, TimeOfLoss(*e.cause.witness, e.cause.session)}, Role::kConsequence,
                "lost " + e.roster.names().Name(e.cause.session));
}

void TellEnd(Explanation& e, const std::string& when) {
  const JournalHistory& journal = *e.cause.journal;
  const Progress progress = e.cause.attempt != nullptr ? ProgressOf(journal) : Progress{};
  e.verdict.seq = journal.last.seq;
  e.verdict.phase = progress.phase;
  if (progress.step) e.TakeStep(&journal, *progress.step);
  e.verdict.headline =
      fmt::format("{} ended without closing its journal, {}", Capitalized(e.roster.names().ShortName(e.cause.session)), when);
  e.Say(fmt::format("{} ended {} without closing its journal; its last event is number {}, at {}{}.",
                    Capitalized(e.verdict.process), when, journal.last.seq.value,
                    WallText(e.roster.Wall(journal, journal.last.time_ns)),
                    journal.findings.report.torn_tail ? ", and the one after it was cut short" : ""));
  SayWhatItDid(e, progress);
  if (e.cause.witness != nullptr) {
    e.Say(fmt::format("{} noticed its end at {}{}{}.", Capitalized(e.roster.names().ShortName(e.cause.witness->session())),
                      WallText(e.cause.wall_ns), EventText(e.cause.witness_seq),
                      journal.dying ? "; the process was still being taken down when its journal was read" : ""));
  }
  AddDeath(e);
}

}  // namespace

void ExplainDied(Explanation& e) {
  const Attempt* attempt = e.cause.attempt;
  TellEnd(e, attempt != nullptr ? "in the middle of " + e.Cycle()
                                : fmt::format("while it was {}", ToText(e.cause.journal->findings.state.lifecycle)));
  const bool pausing = attempt != nullptr && attempt->kind == CycleKind::kPause;
  e.Recommend(Remedy::Action::kFindReasonOfDeath, pausing ? Remedy::Outlook::kOthersRun : Remedy::Outlook::kOthersMissMemory);
}

void ExplainEnded(Explanation& e) {
  TellEnd(e, "while it was running");
  e.Recommend(Remedy::Action::kFindReasonOfEnd);
}

}  // namespace amem
