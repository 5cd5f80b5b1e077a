// The pauses and resumes of a timeline.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "replay/job/names.h"
#include "replay/report/timeline_parts.h"

namespace amem {
namespace {

std::string TextOfSeen(const ProcessSeen& seen) {
  std::string text = seen.state.empty() ? "unknown" : seen.state;
  if (!seen.where.empty()) text += " " + seen.where;
  if (seen.exit_code > 128) text += fmt::format(", ended by signal {}", seen.exit_code - 128);
  if (seen.exit_code >= 0 && seen.exit_code <= 128) text += fmt::format(", exit code {}", seen.exit_code);
  if (!seen.answer.empty()) text += "; it answered: " + seen.answer;
  if (seen.waited_ns != 0) text += "; waited for " + DurationText(seen.waited_ns);
  return text;
}

}  // namespace

CycleCollector::CycleCollector(SessionTimeline& out, std::vector<CycleRecord>& cycles, std::size_t limit, std::string tag)
    : out_(out), cycles_(cycles), limit_(std::max<std::size_t>(limit, 8)), tag_(std::move(tag)) {}

void CycleCollector::Take(const Event& event, const Held& held) {
  if (const auto* begun = std::get_if<CycleBegun>(&event.body)) return Begin(event, *begun, held);
  if (!open_ && !Arrives(event, held)) return;
  CycleRecord& cycle = cycles_.back();
  cycle.ended_ns = event.time_ns;
  cycle.after = held;
  if (const auto* e = std::get_if<PhaseBegun>(&event.body)) {
    cycle.phases.push_back({.phase = e->phase, .begun_ns = event.time_ns, .worked_ns = event.time_ns});
  } else if (std::holds_alternative<StepBegun>(event.body)) {
    step_ns_ = event.time_ns;
  } else if (const auto* done = std::get_if<StepDone>(&event.body)) {
    Step(cycle, done->step.kind, event.time_ns);
  } else if (const auto* failed = std::get_if<StepFailed>(&event.body)) {
    Step(cycle, failed->step.kind, event.time_ns);
    if (!cycle.failed) {
      cycle.failed = *failed;
      cycle.failed_seq = event.seq;
      cycle.failed_ns = event.time_ns;
    }
  } else if (const auto* vote = std::get_if<VoteCast>(&event.body)) {
    Vote(cycle, *vote, event.time_ns);
  } else if (const auto* decided = std::get_if<PhaseDecided>(&event.body)) {
    Decide(cycle, *decided, event.time_ns);
  } else if (std::holds_alternative<CycleDone>(event.body)) {
    End(cycle, event, Outcome::kDone);
  } else if (const auto* gave_up = std::get_if<CycleFailed>(&event.body)) {
    cycle.message = gave_up->message;
    cycle.number = gave_up->cycle;
    End(cycle, event, gave_up->undone ? Outcome::kUndone : Outcome::kNotUndone);
  }
}

void CycleCollector::Finish() {
  if (open_ && tag_.empty()) AddToStrip(cycles_.back());
  Thin(limit_);
}

void CycleCollector::Open(CycleKind kind, std::uint64_t now_ns, const Held& held) {
  if (open_ && tag_.empty()) AddToStrip(cycles_.back());
  if (cycles_.size() >= 2 * limit_) Thin(limit_);
  cycles_.push_back({.kind = kind, .tag = tag_, .arrived_ns = now_ns, .ended_ns = now_ns, .before = held, .after = held});
  open_ = true;
}

// An arrival opens a cycle before it begins; a failure without any (of an older build) is one too.
bool CycleCollector::Arrives(const Event& event, const Held& held) {
  if (const auto* e = std::get_if<PhaseBegun>(&event.body)) {
    Open(e->phase == PhaseKind::kPauseArrive ? CycleKind::kPause : CycleKind::kResume, event.time_ns, held);
    return true;
  }
  const auto* failed = std::get_if<CycleFailed>(&event.body);
  if (failed) Open(failed->kind, event.time_ns, held);
  return failed != nullptr;
}

void CycleCollector::Begin(const Event& event, const CycleBegun& begun, const Held& held) {
  const bool arrived = open_ && !cycles_.back().begun && cycles_.back().kind == begun.kind;
  if (!arrived) Open(begun.kind, event.time_ns, held);
  CycleRecord& cycle = cycles_.back();
  cycle.number = begun.cycle;
  cycle.members = begun.members;
  cycle.begun = event.seq;
  cycle.begun_ns = cycle.ended_ns = event.time_ns;
  for (PhaseRecord& phase : cycle.phases) {  // the wait for the others
    phase.decided_ns = event.time_ns;
    phase.passed = true;
  }
}

void CycleCollector::Step(CycleRecord& cycle, StepKind kind, std::uint64_t now_ns) {
  if (const auto at = static_cast<std::size_t>(kind); at < kStepKinds) {
    ++cycle.steps[at].count;
    cycle.steps[at].duration_ns += now_ns - std::min(now_ns, step_ns_);
  }
  if (cycle.phases.empty()) return;
  ++cycle.phases.back().steps;
  cycle.phases.back().worked_ns = now_ns;
}

void CycleCollector::Decide(CycleRecord& cycle, const PhaseDecided& decided, std::uint64_t now_ns) {
  const bool known = !cycle.phases.empty() && cycle.phases.back().phase == decided.phase && cycle.phases.back().decided_ns == 0;
  if (!known) cycle.phases.push_back({.phase = decided.phase, .begun_ns = now_ns, .worked_ns = now_ns});
  PhaseRecord& phase = cycle.phases.back();
  phase.decided_ns = now_ns;
  phase.passed = decided.passed;
  phase.culprit = decided.culprit;
  if (decided.passed) return;
  if (!cycle.culprit) cycle.culprit = decided.culprit;
  if (cycle.message.empty()) cycle.message = decided.message;
}

void CycleCollector::Vote(CycleRecord& cycle, const VoteCast& vote, std::uint64_t now_ns) {
  if (cycle.phases.empty() || cycle.phases.back().phase != vote.phase || cycle.phases.back().decided_ns != 0) return;
  PhaseRecord& phase = cycle.phases.back();
  phase.worked_ns = now_ns;
  phase.voted = true;
  phase.voted_for = vote.ok;
}

// Pairs become one when there are too many.
void CycleCollector::AddToStrip(const CycleRecord& cycle) {
  std::vector<StripRecord>& strip = out_.strip;
  const StripRecord record{.kind = cycle.kind,
                           .number = cycle.number,
                           .failed = cycle.outcome == Outcome::kDone || cycle.outcome == Outcome::kOpen ? 0U : 1U,
                           .arrived_ns = cycle.arrived_ns,
                           .ended_ns = cycle.ended_ns};
  const auto add = [](StripRecord& to, const StripRecord& next) {
    to.count += next.count;
    to.failed += next.failed;
    to.ended_ns = next.ended_ns;
  };
  if (!strip.empty() && strip.back().count < strip_width_) return add(strip.back(), record);
  strip.push_back(record);
  if (strip.size() < SessionTimeline::kStrip) return;
  for (std::size_t i = 0; 2 * i < strip.size(); ++i) {
    strip[i] = strip[2 * i];
    if (2 * i + 1 < strip.size()) add(strip[i], strip[2 * i + 1]);
  }
  strip.resize((strip.size() + 1) / 2);
  strip_width_ *= 2;
}

void CycleCollector::End(CycleRecord& cycle, const Event& event, Outcome outcome) {
  cycle.ended = event.seq;
  cycle.outcome = outcome;
  open_ = false;
  if (!tag_.empty()) return;
  AddToStrip(cycle);
  if (outcome != Outcome::kDone) {
    ++out_.cycles_failed;
  } else {
    ++(cycle.kind == CycleKind::kPause ? out_.pauses_done : out_.resumes_done);
  }
}

// Keeps the first quarter, the last half, and of the cycles between them those that failed, preferring the newest.
void CycleCollector::Thin(std::size_t limit) {
  std::vector<CycleRecord>& all = cycles_;
  if (all.size() <= limit) return;
  const std::size_t begin = limit / 4, end = all.size() - limit / 2;
  std::size_t room = limit - limit / 4 - limit / 2;
  std::vector<bool> keep(all.size(), true);
  for (std::size_t i = end; i-- > begin;) {
    keep[i] = all[i].outcome != Outcome::kDone && room > 0;
    if (keep[i]) --room;
  }
  std::size_t at = 0;
  out_.cycles_left_out += std::erase_if(all, [&](const CycleRecord&) { return !keep[at++]; });
}

void SeenCollector::Take(const Event& event) {
  if (const auto* seen = std::get_if<ProcessSeen>(&event.body)) {
    Add(seen->session, seen->state == "gone" || seen->state == "zombie", event, TextOfSeen(*seen));
  } else if (const auto* lost = std::get_if<PeerLost>(&event.body)) {
    if (lost->reason == kPeerDied) Add(lost->peer, true, event, "its connection was lost: it died");
  } else if (const auto* thread = std::get_if<ThreadSeen>(&event.body)) {
    constexpr std::uint64_t kOneLook_ns = 1'000'000'000;  // a deadline's threads are recorded one right after the other
    if (event.time_ns - std::min(event.time_ns, threads_ns_) > kOneLook_ns) out_.threads.clear();
    threads_ns_ = event.time_ns;
    if (thread->stack.size() < SessionTimeline::kSeen && out_.threads.size() < SessionTimeline::kSeen)
      out_.threads.push_back(ToText(event.body));
  } else if (const auto* refused = std::get_if<LaunchRefused>(&event.body)) {
    out_.launches_refused += refused->count;
  } else if (std::holds_alternative<RequestEnded>(event.body) || std::holds_alternative<Frozen>(event.body)) {
    if (out_.outside.size() >= SessionTimeline::kSeen) out_.outside.erase(out_.outside.begin());
    out_.outside.push_back({event.seq, event.time_ns, ToText(event.body)});
  } else if (const auto* closed = std::get_if<SessionClosed>(&event.body)) {
    out_.exit_code = closed->exit_code;
  }
}

void SeenCollector::Add(SessionId of, bool dead, const Event& event, std::string text) {
  if (out_.seen.size() >= SessionTimeline::kSeen) return;
  out_.seen.push_back({.of = of, .seq = event.seq, .time_ns = event.time_ns, .dead = dead, .text = std::move(text)});
}

}  // namespace amem
