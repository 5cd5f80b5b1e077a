// Ranks that others waited for: they did not join a pause or resume, or joined it and did not finish.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "replay/diagnosis/explanation.h"

namespace amem {
namespace {

using Action = Remedy::Action;
using Role = Evidence::Role;

constexpr std::size_t kWaitingMost = 16;  // whose events are shown

// That session's wait for the others, at the time of the cause's. Null: it did not wait then.
const Attempt* WaitOf(const Explanation& e, const SessionStory& j) {
  const std::uint64_t from = e.cause.wall_ns, until = from + e.cause.wait.waited_ns;
  for (auto attempt = j.attempts.rbegin(); attempt != j.attempts.rend(); ++attempt) {
    if (!SameTry(*attempt, *e.cause.attempt) || attempt->begun || attempt->end == Attempt::End::kDone) continue;
    const bool ended_before = attempt->ended && e.Wall(j, attempt->ended) < from;
    if (!ended_before && e.Wall(j, attempt->came()) <= until) return &*attempt;
  }
  return nullptr;
}

// The sessions that joined the cycle, which did not begin.
std::vector<SessionId> AddWaiting(Explanation& e) {
  std::vector<SessionId> waiting;
  const std::vector<SessionId> absent = e.Named();
  for (const SessionStory& j : e.roster.journals()) {
    const bool named = std::ranges::find(absent, j.session()) != absent.end();
    const Attempt* const attempt = named ? nullptr : WaitOf(e, j);
    if (attempt == nullptr) continue;
    waiting.push_back(j.session());
    if (waiting.size() > kWaitingMost) continue;
    if (attempt->arrived)
      e.AddEvidence(j, attempt->arrived, Role::kContext, "joined " + e.Cycle() + " and waits for the others");
    if (attempt->ended) e.AddEvidence(j, attempt->ended, Role::kConsequence, "gave up: " + attempt->failure);
  }
  return waiting;
}

// When a session that others had waited for joined after all; told_by null: as far as is known it did not.
struct LateArrival {
  const SessionStory* told_by = nullptr;
  Moment at;
};
LateArrival LateArrivalOf(const Explanation& e, SessionId session) {
  const std::uint64_t until = e.cause.wall_ns + e.cause.wait.waited_ns;
  if (const SessionStory* j = e.roster.Find(session)) {
    for (const Attempt& attempt : j->attempts)
      if (SameTry(attempt, *e.cause.attempt) && attempt.arrived && e.Wall(*j, attempt.arrived) >= until)
        return {j, attempt.arrived};
    return {};
  }
  for (const SessionStory& j : e.roster.journals()) {
    for (const Attempt& attempt : j.attempts) {
      const Moment* const at = FindIn(attempt.came_late, session);
      if (SameTry(attempt, *e.cause.attempt) && at != nullptr) return {&j, *at};
    }
  }
  return {};
}

// "AMEM_TIMEOUT_MS differs: 700 on rank 0, 3000 on ranks 1 and 2."; empty: it does not, as far as recorded.
std::string TimeoutsText(const Explanation& e) {
  std::map<std::uint32_t, std::vector<SessionId>> ranks;
  for (const SessionStory& j : e.roster.journals())
    if (j.who().timeout_ms != 0) ranks[j.who().timeout_ms].push_back(j.session());
  if (ranks.size() < 2) return {};
  std::string text;
  for (const auto& [timeout_ms, sessions] : ranks)
    text += fmt::format("{}{} on {}", text.empty() ? "" : ", ", timeout_ms, e.names.Names(sessions));
  return "AMEM_TIMEOUT_MS differs: " + text + ".";
}

std::string PresenceText(const Roster& roster, const SessionStory& j) {
  switch (j.findings.info.status) {
    case SessionStatus::kLive:
      return WasPacked(j) ? "the process lived when this was packed" : "the process lives";
    case SessionStatus::kClosed:
      return "it closed its journal in order at " + WallText(roster.Wall(j, j.last.time_ns));
    case SessionStatus::kCrashed:
      return "the process is dead now";
    case SessionStatus::kCopied:
      return "whether it lived when this copy was made is not known";
    case SessionStatus::kUnknown:
      return "whether the process lives cannot be seen from here";
    default:
      return "its journal is broken";
  }
}

// What is known of a session that should have joined. `late`: it did, after that time.
void SayWhereabouts(Explanation& e, SessionId session, const LateArrival& late) {
  const SessionStory* j = e.roster.Find(session);
  if (late.told_by != nullptr) {
    const std::uint64_t when = e.Wall(*late.told_by, late.at), gave_up = e.cause.wall_ns + e.cause.wait.waited_ns;
    const std::string after = DurationText(when - std::min(when, gave_up));
    if (j != nullptr) e.Say(fmt::format("{} called {} {} after that.", Capitalized(e.names.Name(session)), e.Call(), after));
    if (j == nullptr)
      e.Say(fmt::format("According to others {} called {} {} after that.", e.names.Name(session), e.Call(), after));
    e.AddEvidence(*late.told_by, late.at, Role::kCause,
                  fmt::format("{} after they had given up: {} joined {}", after, e.names.ShortName(session), e.Cycle()));
    e.verdict.seq = late.at.seq;
    return;
  }
  e.SaySight(session);
  if (j == nullptr) return;
  // The journal counts in its host's time, and the waiting is dated in that of the job.
  const std::uint64_t shift = e.Wall(*j, j->last) - j->last.time_ns;
  const auto before = j->times.LastUpTo(e.cause.wall_ns > shift ? e.cause.wall_ns - shift : 0);
  std::string text = "it did not exist yet when they began to wait";
  if (before) {
    text = fmt::format("its last event before that is {}number {} ({}), {} earlier", before->exact ? "" : "about ",
                       before->seq.value, before->kind, DurationText(e.cause.wall_ns - e.roster.Wall(*j, before->time_ns)));
    const std::uint64_t since = j->last.seq.value - before->seq.value;
    text += since == 0 ? ", followed by none" : ", followed by " + Plural(since, "event");
    if (since != 0) text += since == 1 ? ", which is no call of it" : ", none of which is a call of it";
  }
  e.Say(fmt::format("{} did not call {}: {}; {}.", Capitalized(e.names.Name(session)), e.Call(), text,
                    PresenceText(e.roster, *j)));
  const Moment shown = before ? Moment{before->seq, before->time_ns} : j->last;
  e.AddEvidence(*j, shown, Role::kCause,
                before ? fmt::format("the last event before the others began to wait ({}); nothing about {} after it",
                                     before->kind, e.Cycle())
                       : "nothing about " + e.Cycle() + " here");
  if (!e.verdict.seq) e.verdict.seq = shown.seq;
}

// Its last attempt is open: the session is still in it, or was when its journal ended.
void SayWhereItHangs(Explanation& e, const SessionStory& j, const Progress& progress) {
  const Moment since = progress.since ? progress.since : j.last;
  e.verdict.seq = since.seq;
  if (progress.phase) e.Say(Capitalized(e.ProgressText(j, progress)));
  const bool of_pool = !e.cause.attempt->tag.empty();  // the process may well record something else
  e.Say(fmt::format("{} since {}{}{}.", of_pool ? "Nothing of it has been recorded" : "It has recorded nothing",
                    WallText(e.Wall(j, since)), EventText(since.seq),
                    e.cause.wait.waited_ns != 0 ? ", for " + DurationText(e.cause.wait.waited_ns) : ""));
  if (e.cause.attempt->open_step) {
    const Dated<Step>& open = *e.cause.attempt->open_step;
    e.AddEvidence(j, open.at, Role::kCause, "step begun, and neither done nor failed: " + ToText(open.event));
  } else {
    const bool last = since.seq == j.last.seq;  // what NCCL and other pools did later is not about this
    e.AddEvidence(j, since, Role::kCause,
                  last ? "the last thing it did: " + j.last_text : "nothing about " + e.Cycle() + " after it");
  }
}

// The session did its part in the end, too late for the others.
void SayWhatTookLong(Explanation& e, const SessionStory& j) {
  const Attempt::Silence& silence = e.cause.attempt->silence;
  e.verdict.headline = fmt::format("{} waited for {}", Capitalized(e.Cycle()), e.names.ShortName(e.cause.session));
  e.verdict.seq = silence.from.seq;
  if (silence.ns() == 0) {  // it did not begin
    e.verdict.seq = e.cause.attempt->ended.seq;
    e.AddEvidence(j, e.cause.attempt->ended, Role::kCause, "gave up: " + e.cause.attempt->failure);
    return;
  }
  if (silence.phase) e.verdict.phase = silence.phase;
  const std::string duration = DurationText(silence.ns());
  std::string longest = "its longest gap between events was " + duration;
  if (silence.step) {
    e.TakeStep(j, *silence.step);
    longest = fmt::format("its longest step, \"{}\", took {}", ToText(*silence.step), duration);
    e.verdict.headline += fmt::format(", which spent {} at \"{}\"", duration, ToText(*silence.step));
  }
  const bool about = silence.step && silence.step->allocation;
  e.Say(Capitalized(longest) + EventText(silence.from.seq) +
        (about ? "; it is about " + e.AllocationText(j, silence.step->allocation) + "." : "."));
  e.AddEvidence(j, silence.from, Role::kCause, longest);
}

// What its threads did when its own deadline passed.
void SayThreads(Explanation& e, const SessionStory& j) {
  constexpr std::size_t kShown = 4;
  std::size_t shown = 0;
  for (const auto& [thread, at] : j.threads) {
    if (thread.stack.empty() && thread.where.empty()) continue;
    if (++shown > kShown) break;
    std::string text = fmt::format("thread {} ({}) {}", thread.thread, thread.name, thread.state);
    if (!thread.where.empty()) text += ", " + thread.where;
    for (std::size_t i = 0; i < thread.stack.size() && i < kShown; ++i) text += (i == 0 ? ": " : " < ") + thread.stack[i];
    e.AddEvidence(j, at, Role::kContext, text);
  }
}

}  // namespace

// The session came after a wait that only its own journal has recorded.
static void ExplainCameLate(Explanation& e) {
  const SessionStory& j = *e.cause.witness.journal;
  const std::string who = e.NamesOfAll(),
                    others = e.names.Names({e.cause.attempt->asking.begin(), e.cause.attempt->asking.end()});
  e.verdict.headline = fmt::format("{} joined {} too late", Capitalized(who), e.Cycle());
  e.verdict.seq = e.cause.attempt->arrived.seq;
  e.Say(fmt::format("{} had waited for it since {} or before; it called {} {} later, and waited for them in vain.",
                    Capitalized(others), WallText(e.cause.wall_ns), e.Call(), DurationText(e.cause.wait.waited_ns)));
  e.Say(Sentence("it reported: " + e.cause.attempt->failure));
  e.AddEvidence(j, e.cause.attempt->asked_before, Role::kContext, others + " had joined " + e.Cycle() + " and waited for it");
  e.AddEvidence(j, e.cause.attempt->arrived, Role::kCause, "joined " + e.Cycle());
  e.AddEvidence(j, e.cause.attempt->ended, Role::kConsequence, "gave up: " + e.cause.attempt->failure);
  e.Recommend(Action::kCallInTime, Remedy::Outlook::kCallAgain);
}

namespace {

// All that had come and waited: also those of which the board alone tells, or the journal of the missing rank.
std::vector<SessionId> AllWaiting(Explanation& e) {
  std::vector<SessionId> waiting = AddWaiting(e);
  if (e.cause.record.shown != nullptr) {
    std::set<SessionId> known(waiting.begin(), waiting.end());
    for (const SeatShown& seat : e.cause.record.shown->seats)
      if (seat.vote == agreement::Vote::kYes && e.roster.Find(seat.session) == nullptr && known.insert(seat.session).second)
        waiting.push_back(seat.session);
  }
  if (!waiting.empty()) return waiting;
  waiting.assign(e.cause.attempt->asking.begin(), e.cause.attempt->asking.end());
  e.AddEvidence(*e.cause.witness.journal, e.cause.attempt->arrived, Role::kContext,
                e.names.Names(waiting) + " had joined " + e.Cycle() + " and waited for others");
  return waiting;
}

void SayWait(Explanation& e, const std::vector<SessionId>& waiting) {
  const bool one = waiting.size() == 1;
  const std::string_view verb = !e.cause.live ? "waited" : one ? "has been waiting" : "have been waiting";
  e.Say(fmt::format("{} {} for {} since {} for {} to join {}.", Capitalized(e.names.Names(waiting)), verb,
                    DurationText(e.cause.wait.waited_ns), WallText(e.cause.wall_ns), e.NamesOfAll(), e.Cycle()));
  if (!e.cause.record.message.empty()) e.Say((one ? "It reported: " : "They reported: ") + Sentence(e.cause.record.message));
}

// What the absent sessions did instead. True: all joined it in the end, too late.
bool SayAbsent(Explanation& e) {
  constexpr std::size_t kDescribedMost = 4;  // the others are named
  const std::vector<SessionId> absent = e.Named();
  std::size_t described = 0, late = 0;
  for (const SessionId session : absent) {
    const LateArrival arrival = LateArrivalOf(e, session);
    late += arrival.told_by != nullptr ? 1 : 0;
    if (++described <= kDescribedMost) SayWhereabouts(e, session, arrival);
  }
  return late == absent.size();
}

}  // namespace

void ExplainNeverArrived(Explanation& e) {
  e.verdict.phase = ArrivalOf(e.cause.attempt->kind);
  e.verdict.code = Code::kTimeout;
  if (e.cause.attempt->asked_before && e.cause.witness.journal->session() == e.cause.session) return ExplainCameLate(e);
  SayWait(e, AllWaiting(e));
  const bool too_late = SayAbsent(e);
  e.verdict.headline = fmt::format("{} {} {}{}", Capitalized(e.NamesOfAll()), too_late ? "joined" : "did not join", e.Cycle(),
                                   too_late ? " too late" : "");
  if (too_late) {
    e.Recommend(Action::kCallInTime, Remedy::Outlook::kCallAgain);
  } else {
    e.Recommend(Action::kCallOnEveryRank);
  }
  e.verdict.remedy.process = e.NamesOfAll();
  const std::string timeouts = TimeoutsText(e);
  e.Say(timeouts);
  e.verdict.remedy.timeouts_differ = !timeouts.empty();
  e.RecommendForStopped();
  if (e.story != nullptr) return;
  if (!e.verdict.seq) e.verdict.seq = e.cause.record.seq;
  e.verdict.notes.push_back("what the missing rank did is not known: its journal was not given");
}

// Sessions that share memory must be of one group (AMEM_GROUPID).
static bool OfOtherGroup(const CandidateCause& cause) {
  return std::holds_alternative<CandidateCause::OtherGroup>(cause.detail);
}

// What prevented a pause or resume from beginning, by the code of its failure.
static void RecommendForRefusal(Explanation& e) {
  const SessionStory& j = *e.cause.witness.journal;
  if (OfOtherGroup(e.cause)) {
    e.Recommend(Action::kOneGroup);
    e.verdict.remedy.process = e.NamesOfAll();
    return;
  }
  const bool other_settings = std::ranges::any_of(e.roster.SharingWith(j.session(), e.cause.wall_ns), [&](SessionId session) {
    const SessionStory* other = e.roster.Find(session);
    return other != nullptr && (other->who().amem_version != j.who().amem_version || other->who().layout != j.who().layout ||
                                other->who().content != j.who().content);
  });
  switch (e.cause.record.code) {
    case Code::kTimeout:
      e.Recommend(e.cause.session != j.session() ? Action::kCallOnEveryRank : Action::kFollowRefusal);
      e.verdict.remedy.process = e.NamesOfAll();
      return;
    case Code::kNoDescriptors:
    case Code::kIo:  // a socket could not be made or watched
      return e.Recommend(Action::kRaiseDescriptors);
    case Code::kNotFound:
    case Code::kCorrupt:
      return e.Recommend(Action::kReachPeer);
    case Code::kInvalid:
      return e.Recommend(Action::kCallTheSame);
    case Code::kUnsupported:
      return e.Recommend(Action::kSameSettings);
    case Code::kBroken:
      return e.Recommend(Action::kRepairJournal);
    case Code::kRefused:
    case Code::kOk:
      return e.Recommend(other_settings && e.cause.record.message.empty() ? Action::kSameSettings : Action::kFollowRefusal);
    default:
      return e.Recommend(Action::kFollowRefusal);
  }
}

void ExplainRefused(Explanation& e) {
  const std::string cycle = Capitalized(e.Cycle());
  const Moment at = e.cause.attempt->ended ? e.cause.attempt->ended : e.cause.attempt->arrived;
  e.verdict.headline = cycle + " could not begin";
  if (e.cause.record.code == Code::kTimeout && e.cause.session != e.cause.witness.journal->session())
    e.verdict.headline += " without " + e.NamesOfAll();
  if (OfOtherGroup(e.cause))
    e.verdict.headline += fmt::format(": {} {} of another group", e.NamesOfAll(), e.cause.together.empty() ? "is" : "are");
  e.verdict.code = e.cause.record.code;
  e.Say(fmt::format("{} could not begin on {}, at {} after {}{}.", cycle, e.names.Name(e.cause.witness.journal->session()),
                    WallText(e.Wall(*e.cause.witness.journal, at)), DurationText(e.cause.wait.waited_ns),
                    EventText(e.cause.record.seq)));
  if (!e.cause.record.message.empty()) e.Say(Sentence(e.cause.record.message));
  if (e.cause.record.code == Code::kTimeout && !e.cause.attempt->culprits.empty() &&
      e.cause.session == e.cause.witness.journal->session()) {
    std::vector<SessionId> others;
    for (const CycleMember& who : e.cause.attempt->culprits) others.push_back(who.session);
    e.Say(fmt::format("{} had joined it, too, and had given up by then; AMEM_TIMEOUT_MS may be shorter there.",
                      Capitalized(e.names.Names(others))));
  }
  for (const SessionId session : OfOtherGroup(e.cause) ? e.Named() : std::vector<SessionId>{}) {
    if (const SessionStory* j = e.roster.Find(session))
      e.Say(fmt::format("{} is of group {}.", Capitalized(e.names.ShortName(session)), j->who().group));
  }
  e.verdict.seq = e.cause.record.seq;
  e.AddEvidence(*e.cause.witness.journal, at, Role::kCause,
                e.Cycle() + " could not begin" + (e.cause.record.message.empty() ? "" : ": " + e.cause.record.message));
  RecommendForRefusal(e);
}

// The other tags of that process whose memory is away, or on its way. One thread does what was asked for without waiting, a
// pause or a resume of one tag after the other, so they may wait behind the one that hangs.
static void SayTagsBehind(Explanation& e, const SessionStory& j) {
  std::vector<std::string> behind;
  for (const auto& [id, pool] : j.findings.state.pools)
    if (pool.tag != e.cause.attempt->tag && pool.lifecycle != Lifecycle::kRunning) behind.push_back(pool.tag);
  if (behind.empty()) return;
  const bool several = behind.size() > 1;
  e.Say(fmt::format(
      "{} {} of the same process {} not resident either; a resume of {} that does not wait (wait=False) is queued behind "
      "this one.",
      several ? "Tags" : "Tag", fmt::join(behind, ", "), several ? "are" : "is", several ? "them" : "it"));
}

namespace {

// The phase in which it hangs: by its own journal, else by the board, else by the witness.
std::optional<PhaseKind> StalledPhase(const Explanation& e, const Progress& progress) {
  const SessionStory* const witness = e.cause.witness.journal;
  const BallotShown* const shown = e.cause.record.shown;
  if (progress.phase) return progress.phase;
  if (shown != nullptr) return PhaseOf(shown->kind, shown->ballot);
  if (witness != nullptr && witness->Last().decided) return witness->Last().decided->phase;
  return std::nullopt;
}

// ", which is at the step "import allocation 3""; empty: no step of it is known.
std::string StepText(const Explanation& e) {
  if (!e.verdict.step) return {};
  const std::string who = e.cause.together.empty() ? ", which" : "; " + e.names.ShortName(e.cause.session);
  return fmt::format("{} is at the step \"{}\"", who, ToText(*e.verdict.step));
}

std::string ProcessesText(const Explanation& e) { return e.cause.together.empty() ? e.verdict.process : e.NamesOfAll(); }

// A pause or resume of a pool waits for no other session: the process itself does not finish it.
void SayStalledPool(Explanation& e) {
  const std::string cycle = Capitalized(e.Cycle()) + e.HowItEnded();
  e.verdict.headline = fmt::format("{} on {}{}", cycle, e.NamesOfAll(), StepText(e));
  const std::string phase = e.verdict.phase ? fmt::format(", in phase \"{}\"", ToText(*e.verdict.phase)) : "";
  e.Say(fmt::format("{} on {}{}.", cycle, ProcessesText(e), phase));
}

// Other members wait for the session.
void SayStalledMember(Explanation& e) {
  e.verdict.headline =
      fmt::format("{} {} for {}{}", Capitalized(e.Cycle()), e.cause.live ? "waits" : "waited", e.NamesOfAll(), StepText(e));
  const std::string part = e.verdict.phase ? fmt::format("phase \"{}\"", ToText(*e.verdict.phase)) : "its part";
  e.Say(
      fmt::format("{}{}, because {} joined it and did not finish {}.", e.CycleOfAll(), e.HowItEnded(), ProcessesText(e), part));
}

}  // namespace

void ExplainStalled(Explanation& e) {
  const SessionStory* const j = e.story;
  const std::string tag = e.cause.attempt != nullptr ? e.cause.attempt->tag : "";
  const bool of_pool = !tag.empty();
  const Progress progress = j != nullptr ? ProgressOf(*j, tag) : Progress{};
  e.verdict.code = Code::kTimeout;
  e.verdict.phase = StalledPhase(e, progress);
  if (progress.step()) e.TakeStep(*j, *progress.step());
  of_pool ? SayStalledPool(e) : SayStalledMember(e);
  if (j == nullptr) {
    e.Say("What it does is not known: its journal was not given.");
    e.verdict.seq = e.cause.record.seq;
  } else {
    e.AddBeginning(*j);
    of_pool || j->OpenAttempt() != nullptr ? SayWhereItHangs(e, *j, progress) : SayWhatTookLong(e, *j);
  }
  if (of_pool && e.cause.attempt->kind == CycleKind::kResume) SayTagsBehind(e, *j);
  if (!e.cause.record.message.empty()) e.Say("The others reported: " + Sentence(e.cause.record.message));
  e.SaySight(e.cause.session);
  if (j != nullptr) SayThreads(e, *j);
  e.Recommend(Action::kExamineProcess);
  Remedy& remedy = e.verdict.remedy;
  remedy.process = e.NamesOfAll();
  if (remedy.pid == 0 && e.cause.sight.seen != nullptr) remedy.pid = e.cause.sight.seen->pid;
  e.RecommendForStopped();
}

}  // namespace amem
