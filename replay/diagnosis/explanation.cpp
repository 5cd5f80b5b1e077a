#include "replay/diagnosis/explanation.h"

#include <fmt/format.h>

#include <algorithm>

#include "statemachine/check.h"

namespace amem {

std::string Capitalized(std::string text) {
  const std::string first = text.substr(0, text.find(' '));
  const bool word = std::ranges::all_of(first, [](char c) { return (c >= 'a' && c <= 'z') || c == ','; });
  if (word && !text.empty()) text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

std::string Sentence(std::string text) {
  text = Capitalized(std::move(text));
  if (!text.empty() && text.back() != '.') text += '.';
  return text;
}

std::string EventText(SequenceNumber seq) { return seq ? fmt::format(" (event {})", seq.value) : ""; }

void Explanation::Say(const std::string& sentence) {
  if (sentence.empty()) return;
  if (!verdict.summary.empty()) verdict.summary += " ";
  verdict.summary += sentence;
}

void Explanation::AddEvidence(const SessionStory& journal, const Moment& at, Evidence::Role role, std::string text) {
  verdict.evidence.push_back({.session = journal.session(),
                              .rank = names.RankOf(journal.session()),
                              .seq = at.seq,
                              .wall_ns = roster.Wall(journal, at.time_ns),
                              .role = role,
                              .text = std::move(text)});
}

void Explanation::AddBeginning(const SessionStory& journal) {
  if (cause.attempt == nullptr || !cause.attempt->begun) return;
  const bool of_pool = !cause.attempt->tag.empty();
  AddEvidence(journal, cause.attempt->begun, Evidence::Role::kContext,
              fmt::format("{} begun{}", Cycle(),
                          of_pool ? "" : " by " + Plural(cause.attempt->members.size(), "process", "processes")));
}

void Explanation::TakeStep(const SessionStory& journal, const Step& step) {
  verdict.step = step;
  verdict.bytes = step.bytes;
  if (!step.allocation) return;
  verdict.allocation = step.allocation;
  if (const Allocation* a = FindIn(journal.findings.state.allocations, step.allocation)) verdict.bytes = a->bytes;
}

void Explanation::Recommend(Remedy::Action action, Remedy::Outlook outlook) {
  Remedy& remedy = verdict.remedy;
  remedy.action = action;
  remedy.outlook = outlook;
  remedy.process = names.ShortName(cause.session);
  remedy.caller = Caller();
  if (action == Remedy::Action::kRepairJournal) remedy.reason = cause.record.message;
  if (cause.attempt != nullptr) remedy.cycle = cause.attempt->kind;
  if (cause.attempt != nullptr) remedy.tag = cause.attempt->tag;
  if (story != nullptr) remedy.pid = story->who().pid;
}

Remedy::Caller Explanation::Caller() const {
  if (cause.attempt != nullptr && cause.attempt->requested) return Remedy::Caller::kCommand;
  const bool python = std::ranges::any_of(roster.journals(), [](const SessionStory& j) {
    return j.who().python || j.who().program.starts_with("python");  // builds that do not record the one may the other
  });
  return python ? Remedy::Caller::kPython : Remedy::Caller::kC;
}

std::string Explanation::Call() const { return CallText(Caller(), cause.attempt->kind, cause.attempt->tag); }

std::vector<SessionId> Explanation::Named() const {
  std::vector<SessionId> named{cause.session};
  named.insert(named.end(), cause.together.begin(), cause.together.end());
  return named;
}

std::string Explanation::NamesOfAll() const { return names.Names(Named()); }

void Explanation::SaySight(SessionId session) {
  const SessionStory* j = roster.Find(session);
  const std::string name = Capitalized(names.ShortName(session));
  if (j != nullptr && j->process_now == "stopped") Say(name + " is stopped now (SIGSTOP, a debugger, or job control).");
  for (const SessionStory& witness : roster.journals()) {
    for (const auto& [seen, at] : witness.seen) {
      if (seen.session != session || seen.state.empty()) continue;
      std::string text = fmt::format("found that the process of {} {}", names.ShortName(session),
                                     seen.state == "gone"      ? "is gone"
                                     : seen.state == "unknown" ? "cannot be seen from here"
                                                               : "is " + seen.state);
      if (!seen.where.empty()) text += ", " + seen.where;
      if (!seen.answer.empty()) text += "; it answered: " + seen.answer;
      if (seen.exit_code >= 0) text += "; " + ExitText(seen.exit_code);
      AddEvidence(witness, at, Evidence::Role::kContext, text);
      if (&seen == cause.sight.seen && session == cause.session)
        Say(fmt::format("{} {}.", Capitalized(names.ShortName(witness.session())), text));
    }
  }
}

void Explanation::RecommendForStopped() {
  std::vector<SessionId> stopped;
  for (const SessionId session : Named()) {
    const SessionStory* j = roster.Find(session);
    const bool now = j != nullptr && j->process_now == "stopped";
    if (now || (session == cause.session && cause.sight.state == "stopped")) stopped.push_back(session);
  }
  if (stopped.empty()) return;
  verdict.remedy.action = Remedy::Action::kContinueProcess;
  verdict.remedy.process = names.Names(stopped);
  const SessionStory* j = roster.Find(stopped.front());
  verdict.remedy.pid = j != nullptr ? j->who().pid : cause.sight.seen != nullptr ? cause.sight.seen->pid : 0;
}

std::string ExitText(std::int32_t exit_code) {
  if (exit_code < 0) return "how it ended is not known";
  constexpr std::int32_t kSignal = 128;
  if (exit_code <= kSignal) return fmt::format("it exited with code {}", exit_code);
  const int signal = exit_code - kSignal;
  const std::string_view hint = signal == 9    ? " (SIGKILL: the OOM killer, the launcher, or a person)"
                                : signal == 15 ? " (SIGTERM)"
                                : signal == 2  ? " (SIGINT)"
                                : signal == 11 ? " (SIGSEGV)"
                                : signal == 6  ? " (SIGABRT)"
                                : signal == 7  ? " (SIGBUS)"
                                               : "";
  return fmt::format("it was ended by signal {}{}", signal, hint);
}

std::string Explanation::Cycle() const { return cause.attempt == nullptr ? "" : NameOf(*cause.attempt); }

std::string Explanation::CycleOfAll() const {
  const std::size_t members = cause.attempt->members.size();
  return Capitalized(Cycle()) + (members > 1 ? fmt::format(" ({} processes)", members) : "");
}

std::string Explanation::HowItEnded() const {
  if (cause.attempt->end == Attempt::End::kFailed) return " failed";
  return cause.live ? " hangs" : " did not complete";
}

std::string Explanation::AllocationText(const SessionStory& journal, AllocationId id) const {
  const State& state = journal.findings.state;
  const Allocation* a = FindIn(state.allocations, id);
  if (a == nullptr) return ToText(id);
  std::string text = fmt::format("{} ({} on {}", ToText(id), FormatBytes(a->bytes), ToText(a->properties.location));
  if (a->remote) {
    text += fmt::format(", which belongs to {} as {}", names.ShortName(a->remote->owner), ToText(a->remote->allocation));
  } else if (!a->importers.empty()) {
    std::set<SessionId> importers;
    for (const auto& [importer, count] : a->importers) importers.insert(importer.by);
    text += ", shared with " + names.Names({importers.begin(), importers.end()});
  }
  if (const Slab* slab = FindIn(state.slabs, id))
    text += fmt::format(", a slab with {} of NCCL's", Plural(slab->parts.size(), "allocation"));
  if (a->site.frames[0] != 0) text += ", made at libnccl" + ToText(a->site);
  return text + ")";
}

std::string Explanation::ProgressText(const SessionStory& journal, const Progress& p) const {
  if (p.did_its_part) return "its own steps there were done, and it waited for the others.";
  std::string text = fmt::format("{} done there and {} left; ", Plural(p.steps_done, "step was", "steps were"), p.steps_left);
  const std::optional<Step>& step = p.step();
  if (!step) return text + "none was under way.";
  text += fmt::format("{} \"{}\"", p.open_step ? "it had begun, and not finished," : "the next was", ToText(*step));
  if (step->allocation) text += ", about " + AllocationText(journal, step->allocation);
  return text + ".";
}

namespace {

// Whether the explainer of that kind is about a pause or resume.
bool IsOfAttempt(const CandidateCause& cause) {
  switch (cause.kind) {
    case VerdictKind::kStepFailed:
    case VerdictKind::kOutOfMemory:
    case VerdictKind::kNeverArrived:
    case VerdictKind::kStalled:
    case VerdictKind::kRefused:
    case VerdictKind::kHalfDone:
      return true;
    case VerdictKind::kBroken:
      return cause.witness.alone;
    default:
      return false;
  }
}

// Whether the explainer of that kind goes by the session's own journal.
bool IsOfOwnJournal(const CandidateCause& cause) {
  if (cause.witness.alone) return false;
  switch (cause.kind) {
    case VerdictKind::kNeverArrived:
    case VerdictKind::kRefused:
    case VerdictKind::kNotUnderAmem:
      return false;
    case VerdictKind::kStalled:  // of NCCL's memory others wait for it; a pool's concerns it alone
      return !cause.attempt->tag.empty();
    default:
      return true;
  }
}

}  // namespace

Status CheckCause(const Explanation& e) {
  const CandidateCause& cause = e.cause;
  const bool waited_for = cause.kind == VerdictKind::kNeverArrived || cause.kind == VerdictKind::kRefused;
  AMEM_CHECK(cause.kind != VerdictKind::kHealthy);
  AMEM_CHECK(cause.kind != VerdictKind::kUnreadable);
  if (cause.witness.alone || waited_for) AMEM_CHECK(cause.witness.journal != nullptr, cause.kind, cause.session);
  if (IsOfAttempt(cause)) AMEM_CHECK(cause.attempt != nullptr, cause.kind, cause.session);
  if (!IsOfOwnJournal(cause)) return {};
  AMEM_CHECK(e.story != nullptr, cause.kind, cause.session);
  if (cause.kind == VerdictKind::kLeft) AMEM_CHECK(e.story->closed.has_value(), cause.session);
  if (cause.kind == VerdictKind::kLaunchRefused) AMEM_CHECK(e.story->refused.has_value(), cause.session);
  const bool failed = cause.kind == VerdictKind::kStepFailed || cause.kind == VerdictKind::kOutOfMemory;
  if (!cause.attempt || !cause.attempt->tag.empty() || !(failed || cause.kind == VerdictKind::kReferences)) return {};
  const Attempt& attempt = *cause.attempt;
  const bool says_how = attempt.failed_step || attempt.failed_vote || attempt.decided;
  AMEM_CHECK(says_how, cause.kind, cause.session, attempt.cycle);
  return {};
}

}  // namespace amem
