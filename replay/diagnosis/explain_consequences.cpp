// What a failure did to the other sessions of the job.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "journal/session_dir.h"
#include "replay/diagnosis/explanation.h"
#include "replay/job/sessions.h"

namespace amem {
namespace {

using Action = Remedy::Action;
using Outlook = Remedy::Outlook;
using Role = Evidence::Role;

constexpr std::size_t kEvidenceOfOthersMax = 32;

bool IsOver(const SessionStory& j) {
  return HasEnded(j.findings.info.status) || j.findings.state.lifecycle == Lifecycle::kClosed;
}

// The other members of an attempt that did not complete.
struct Others {
  std::vector<SessionId> gave_up, undoing, half_way, waiting;
  std::size_t left_out = 0;  // beyond kEvidenceOfOthersMax
};

void AddMember(Explanation& e, const SessionStory& j, Others& others) {
  const Attempt& attempt = j.Last();
  const Progress progress = ProgressOf(j);
  if (attempt.decided || attempt.failed_step) {
    (attempt.open() ? others.undoing : attempt.undone ? others.gave_up : others.half_way).push_back(j.session());
    if (attempt.decided) {
      // The failed step is evidence already, and its message would be repeated for every member.
      const bool known = attempt.decided->culprit == e.cause.session && e.cause.attempt->failed_step;
      e.AddEvidence(
          j, attempt.decided->at, Role::kConsequence,
          "reported: " + (known ? fmt::format("{} failed in phase {}", e.verdict.process, ToText(attempt.decided->phase))
                                : attempt.decided->message));
    } else {
      e.AddEvidence(j, attempt.failed_step->at, Role::kConsequence, "step failed: " + attempt.failed_step->message);
    }
  } else {
    others.waiting.push_back(j.session());
    e.AddEvidence(j, progress.since, Role::kConsequence,
                  progress.did_its_part ? fmt::format("did its part of phase \"{}\" and waits for the votes of the others",
                                                      progress.phase ? ToText(*progress.phase) : "")
                                        : "is still busy with its own steps");
  }
  // Between the decision that a call has failed and the undo's first phase, the last phase is one of the call.
  if (progress.undoing && progress.phase && IsUndo(*progress.phase, attempt.kind)) {
    std::string text = e.ProgressText(j, progress);
    text.pop_back();  // a note ends without a full stop
    e.verdict.notes.push_back(
        fmt::format("{} came to phase \"{}\" of the undo: {}", e.names.Name(j.session()), ToText(*progress.phase), text));
  }
  if (attempt.end == Attempt::End::kFailed && !attempt.undone)
    e.verdict.notes.push_back(e.names.Name(j.session()) + " could not undo what it had done: " + attempt.failure);
}

Others AddOthers(Explanation& e) {
  Others others;
  const std::vector<SessionId> roots = e.Named();
  for (const SessionStory& j : e.roster.journals()) {
    if (std::ranges::find(roots, j.session()) != roots.end()) continue;
    const Attempt& attempt = j.Last();
    if (attempt.kind != e.cause.attempt->kind || attempt.end == Attempt::End::kDone || !attempt.begun) continue;
    if (others.gave_up.size() + others.undoing.size() + others.half_way.size() + others.waiting.size() < kEvidenceOfOthersMax) {
      AddMember(e, j, others);
    } else {
      ++others.left_out;
    }
  }
  return others;
}

// For members that are neither running nor paused: unless memory is lost or faulty, or a context is dead, a resume brings them
// back.
void RecommendForHalfWay(Explanation& e) {
  Remedy& remedy = e.verdict.remedy;
  if (e.cause.kind == VerdictKind::kDied) {
    remedy.outlook = Outlook::kOthersHalfWay;
  } else if (!EndsTheJob(remedy.action) && remedy.action != Action::kResumeAgain) {
    remedy.outlook = Outlook::kCannotBeUndone;
  }
}

void SaySurvivors(Explanation& e) {
  std::vector<SessionId> resumed;
  for (const SessionStory& j : e.roster.journals()) {
    if (j.session() == e.cause.session) continue;
    const Attempt& attempt = j.Last();
    const bool done = attempt.end == Attempt::End::kDone && attempt.kind == CycleKind::kResume;
    if (done && e.Wall(j, attempt.ended) > e.cause.wall_ns) resumed.push_back(j.session());
  }
  if (resumed.empty()) return;
  e.Say("After that " + e.names.Names(resumed) + " resumed without it.");
  e.verdict.remedy.outlook = Outlook::kOthersResumed;
}

}  // namespace

void ExplainConsequences(Explanation& e) {
  const Attempt& own = *e.cause.attempt;
  if (e.story != nullptr && own.end == Attempt::End::kFailed)
    e.AddEvidence(*e.story, own.ended, Role::kConsequence, e.Cycle() + " failed" + (own.undone ? ", undone" : ", NOT undone"));
  const Others others = AddOthers(e);
  const auto say = [&e](const std::vector<SessionId>& sessions, std::string_view one, std::string_view many = {}) {
    const bool as_one = sessions.size() == 1 || many.empty();
    if (!sessions.empty()) e.Say(fmt::format("{} {}.", Capitalized(e.names.Names(sessions)), as_one ? one : many));
  };
  say(others.gave_up, "gave up because of it and undid what was done");
  say(others.undoing, "gave up because of it and did not come to the end of the undo");
  std::vector<SessionId> undoing = others.undoing;
  if (e.story != nullptr && own.open()) undoing.push_back(e.story->session());
  const auto ended = [&](SessionId session) { return IsOver(*e.roster.Find(session)); };
  if (!undoing.empty() && e.verdict.remedy.outlook == Outlook::kCallAgain)
    e.verdict.remedy.outlook = std::ranges::any_of(undoing, ended) ? Outlook::kUnsaid : Outlook::kUndoing;
  say(others.half_way, "gave up because of it and could not undo everything: it is neither running nor paused",
      "gave up because of it and could not undo everything: they are neither running nor paused");
  const bool own_half_way = e.story != nullptr && own.end == Attempt::End::kFailed && !own.undone;
  if (!others.half_way.empty() || own_half_way) RecommendForHalfWay(e);
  say(others.waiting, "waits for it", "wait for it");
  if (others.left_out != 0)
    e.verdict.notes.push_back("and " + Plural(others.left_out, "more rank") + " with the same consequence");
}

void ExplainLaterAttempts(Explanation& e) {
  std::vector<SessionId> failed;
  const Attempt* example = nullptr;
  for (const SessionStory& j : e.roster.journals()) {
    if (j.session() == e.cause.session) continue;
    const Attempt& attempt = j.Last();
    if (attempt.end == Attempt::End::kDone || !attempt.ended || e.Wall(j, attempt.ended) < e.cause.wall_ns) continue;
    failed.push_back(j.session());
    example = &attempt;
    if (failed.size() <= kEvidenceOfOthersMax)
      e.AddEvidence(j, attempt.ended, Role::kConsequence, "gave up: " + attempt.failure);
  }
  if (example == nullptr) return SaySurvivors(e);
  e.verdict.cycle_kind = example->kind;
  e.verdict.cycle = example->cycle;
  e.Say(fmt::format("After that {} {} failed on {}: {}.", ToText(example->kind), example->cycle, e.names.Names(failed),
                    example->failure));
}

void RecommendForTheDead(Explanation& e) {
  constexpr std::array kForTheLiving = {Action::kExamineProcess, Action::kCallOnEveryRank, Action::kFollowVote,
                                        Action::kFollowRefusal,  Action::kContinueProcess, Action::kCallTheSame};
  Remedy& remedy = e.verdict.remedy;
  const bool for_the_living =
      remedy.outlook == Outlook::kCallAgain || remedy.outlook == Outlook::kCannotBeUndone ||
      (remedy.outlook == Outlook::kUnsaid && std::ranges::find(kForTheLiving, remedy.action) != kForTheLiving.end());
  if (!for_the_living || !std::ranges::all_of(e.roster.journals(), IsOver)) return;
  remedy.outlook = Outlook::kAllEnded;
  remedy.pid = 0;
}

bool WasPacked(const SessionStory& journal) { return PackedAt(journal.findings.info.directory) != 0; }

namespace {

// What a process is now, or was when the journals were packed.
enum class Present : std::uint8_t { kRunning = 0, kPaused, kHalfWay, kEnded };

struct PresentText {
  Present present{};
  std::string_view one, many, one_packed, many_packed;
};
// In the order of the sentence.
constexpr std::array<PresentText, 4> kPresentTexts = {{
    {Present::kRunning, " is running", " are running", " was running", " were running"},
    {Present::kPaused, " is paused with its contents kept", " are paused with their contents kept",
     " was paused with its contents kept", " were paused with their contents kept"},
    {Present::kHalfWay, " is neither running nor paused", " are neither running nor paused", " was neither running nor paused",
     " were neither running nor paused"},
    {Present::kEnded, " has ended", " have ended", " had ended", " had ended"},
}};

Present PresentOf(const SessionStory& j) {
  if (IsOver(j)) return Present::kEnded;
  const Lifecycle lifecycle = j.findings.state.lifecycle;
  if (lifecycle == Lifecycle::kRunning) return Present::kRunning;
  return lifecycle == Lifecycle::kPaused ? Present::kPaused : Present::kHalfWay;
}

// "rank 0 and rank 2", "both processes".
std::string NamesAmong(const Roster& roster, const std::vector<SessionId>& sessions) {
  const std::size_t all = roster.journals().size();
  if (sessions.size() != all || all == 1) return roster.names().Names(sessions);
  return all == 2 ? "both processes" : fmt::format("all {} processes", all);
}

}  // namespace

std::string PresentState(const Roster& roster) {
  std::map<Present, std::vector<SessionId>> sessions;
  for (const SessionStory& j : roster.journals()) {
    if (!j.findings.whole && IsLive(j)) return {};  // its state is not known
    sessions[PresentOf(j)].push_back(j.session());
  }
  const std::size_t all = roster.journals().size();
  if (sessions[Present::kEnded].size() == all) return all == 1 ? "" : "All have ended since.";
  const bool packed = std::ranges::any_of(roster.journals(), WasPacked);
  std::vector<std::string> parts;
  for (const PresentText& text : kPresentTexts) {
    const std::vector<SessionId>& those = sessions[text.present];
    if (those.empty()) continue;
    const bool one = those.size() == 1;
    const std::string_view state = packed ? (one ? text.one_packed : text.many_packed) : (one ? text.one : text.many);
    parts.push_back(NamesAmong(roster, those) + std::string(state));
  }
  return (packed ? "When the journals were packed, " : "Now ") + Listed(parts) + ".";
}

}  // namespace amem
