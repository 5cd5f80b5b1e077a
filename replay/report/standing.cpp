#include "replay/report/standing.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "statemachine/apply.h"
#include "statemachine/plan.h"

namespace amem {
namespace {

bool IsArrive(PhaseKind phase) { return phase == PhaseKind::kPauseArrive || phase == PhaseKind::kResumeArrive; }
CycleKind CycleOf(PhaseKind phase) { return phase < PhaseKind::kResumeArrive ? CycleKind::kPause : CycleKind::kResume; }

// These are planned whenever they are asked for, so that only the count shows which of them are done.
bool IsPlannedAgain(StepKind kind) {
  return kind == StepKind::kQuiesce || kind == StepKind::kCheckMemory || kind == StepKind::kVerify ||
         kind == StepKind::kBeginRestore;
}

std::uint64_t StepsLeft(const State& state, const Standing::Attempt& attempt) {
  const PhaseKind phase = attempt.phases.back();
  const Plan plan = CycleOf(phase) == CycleKind::kPause ? PlanPause(state) : PlanResume(state);
  std::uint64_t left = 0, repeated = attempt.steps_done;
  for (const PlannedPhase& planned : plan.phases) {
    if (planned.phase != phase) continue;
    for (const Step& step : planned.steps) {
      const bool done = IsPlannedAgain(step.kind) && repeated > 0;
      done ? --repeated : ++left;
    }
  }
  return attempt.step ? std::max<std::uint64_t>(left, 1) : left;
}

}  // namespace

void StandingBuilder::Begin(State before) { state_ = std::move(before); }

void StandingBuilder::Take(const Event& event) {
  if (!standing_.trouble.empty()) return;
  standing_.last_ns = std::max(standing_.last_ns, event.time_ns);
  const Lifecycle before = state_.lifecycle;
  if (const Status applied = Apply(state_, event); !applied) {
    standing_.trouble = "event " + std::to_string(event.seq.value) + " does not fit what came before it: " + applied.message();
    standing_.attempt.reset();
    return;
  }
  if (state_.lifecycle != before) standing_.since_ns = event.time_ns;
  if (!PoolOfCycle(event.body)) Follow(event);
}

void StandingBuilder::Follow(const Event& event) {
  std::optional<Standing::Attempt>& attempt = standing_.attempt;
  const auto since = [&] { standing_.since_ns = event.time_ns; };
  if (const auto* phase = std::get_if<PhaseBegun>(&event.body)) {
    OnPhase(*phase, event);
  } else if (const auto* begun = std::get_if<CycleBegun>(&event.body)) {
    if (!attempt || attempt->kind != begun->kind) attempt = Standing::Attempt{.kind = begun->kind, .arrived_ns = event.time_ns};
    attempt->begun = true;
    attempt->number = begun->cycle;
    attempt->members = begun->members;
    attempt->phases.clear();
    since();
  } else if (const auto* done = std::get_if<CycleDone>(&event.body)) {
    End(event, done->kind, done->cycle, {});
  } else if (const auto* failed = std::get_if<CycleFailed>(&event.body)) {
    End(event, failed->kind, failed->cycle, failed->message.empty() ? "failed" : failed->message);
  }
  if (!attempt || !attempt->begun) return;
  if (const auto* step = std::get_if<StepBegun>(&event.body)) {
    attempt->step = step->step;
    since();
  } else if (std::holds_alternative<StepDone>(event.body) || std::holds_alternative<StepFailed>(event.body)) {
    attempt->step.reset();
    ++attempt->steps_done;
    since();
  } else if (std::holds_alternative<VoteCast>(event.body)) {
    attempt->voted = true;
    since();
  } else if (const auto* decided = std::get_if<PhaseDecided>(&event.body)) {
    attempt->decided = true;
    attempt->undoing |= !decided->passed;
    since();
  }
}

void StandingBuilder::OnPhase(const PhaseBegun& begun, const Event& event) {
  std::optional<Standing::Attempt>& attempt = standing_.attempt;
  standing_.since_ns = event.time_ns;
  if (attempt && attempt->begun) {
    attempt->phases.push_back(begun.phase);
    attempt->decided = attempt->voted = false;
    attempt->steps_done = 0;
    attempt->step.reset();
  } else if (IsArrive(begun.phase)) {
    const CycleKind kind = CycleOf(begun.phase);
    const std::uint64_t number = state_.cycles + (kind == CycleKind::kPause ? 1 : 0);
    attempt = Standing::Attempt{.kind = kind, .number = number, .arrived_ns = event.time_ns, .phases = {begun.phase}};
  }
}

void StandingBuilder::End(const Event& event, CycleKind kind, std::uint64_t number, const std::string& failure) {
  standing_.attempt.reset();
  standing_.ended_kind = kind;
  standing_.ended_number = number;
  standing_.ended_ns = standing_.since_ns = event.time_ns;
  standing_.failure = failure;
}

Standing StandingBuilder::Now(SessionStatus status) const {
  Standing now = standing_;
  now.who = state_.session;
  now.status = status;
  now.lifecycle = state_.lifecycle;
  const Holdings holdings = Measure(state_);
  const Bytes whole = holdings.own_device + holdings.slabs_free + holdings.pools;
  now.held = holdings.own_device_resident + holdings.pools_resident;
  now.released = whole - std::min(whole, now.held);
  for (const auto& [id, peer] : state_.peers) {
    (peer.connected ? now.peers : now.lost_peers).push_back(id);
  }
  const bool in_a_phase = now.attempt && now.attempt->begun && !now.attempt->phases.empty() && !now.attempt->decided;
  if (in_a_phase) now.attempt->steps_left = StepsLeft(state_, *now.attempt);
  return now;
}

namespace {

class Waits {
 public:
  explicit Waits(std::span<const Standing> sessions) : sessions_(sessions) {
    for (const Standing& s : sessions) by_id_.emplace(s.who.session, &s);
  }

  [[nodiscard]] std::vector<SessionId> Of(const Standing& who) const {
    std::vector<SessionId> late;
    if (who.status != SessionStatus::kLive || !who.attempt || !who.attempt->waits()) return late;
    for (const SessionId id : who.attempt->begun ? who.attempt->members : Connected(who)) {
      const auto it = by_id_.find(id);
      const bool known = it != by_id_.end() && id != who.who.session;
      if (known && !HasDoneItsPart(*it->second, who)) late.push_back(id);
    }
    return late;
  }

 private:
  // Those that share memory with it, directly or through others, and live.
  [[nodiscard]] std::vector<SessionId> Connected(const Standing& who) const {
    std::set<SessionId> seen{who.who.session};
    std::vector<SessionId> found{who.who.session};
    for (std::size_t i = 0; i < found.size(); ++i) {
      for (const auto& [id, other] : by_id_) {
        const auto knows = [](const Standing& s, SessionId peer) { return std::ranges::find(s.peers, peer) != s.peers.end(); };
        const bool linked = knows(*other, found[i]) || knows(*by_id_.at(found[i]), id);
        const bool counts = other->status == SessionStatus::kLive && other->who.group == who.who.group;
        if (linked && counts && seen.insert(id).second) found.push_back(id);
      }
    }
    return found;
  }

  // Whether `other` is as far as `who`, which waits: the members of a pause or resume take the same phases one after the other.
  [[nodiscard]] static bool HasDoneItsPart(const Standing& other, const Standing& who) {
    const Standing::Attempt& mine = *who.attempt;
    if (other.attempt && other.attempt->kind == mine.kind) {
      const Standing::Attempt& theirs = *other.attempt;
      if (!mine.begun || !theirs.begun) return theirs.begun || !mine.begun;
      if (theirs.phases.size() != mine.phases.size()) return theirs.phases.size() > mine.phases.size();
      return theirs.decided || theirs.waits();
    }
    // It may be through with it already. Members are of one host, and have one clock.
    return !other.attempt && other.ended_kind == mine.kind && other.ended_ns >= mine.arrived_ns;
  }

  std::span<const Standing> sessions_;
  std::map<SessionId, const Standing*> by_id_;
};

}  // namespace

std::vector<std::vector<SessionId>> WhoWaitsForWhom(std::span<const Standing> sessions) {
  const Waits waits(sessions);
  std::vector<std::vector<SessionId>> all;
  for (const Standing& s : sessions) all.push_back(waits.Of(s));
  return all;
}

}  // namespace amem
