#include "replay/job/story/story.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "replay/job/names.h"
#include "statemachine/check.h"

namespace amem {
namespace {

constexpr std::size_t kResultsKept = 64, kUnmadeKept = 16, kBallotsKept = 8;
constexpr std::uint64_t kOneLook_ns = 1'000'000'000;  // the threads of a process are recorded one right after the other

CycleKind KindOfPhase(PhaseKind phase) { return phase < PhaseKind::kResumeArrive ? CycleKind::kPause : CycleKind::kResume; }

// Whose pause or resume an event is about; what is about none is NCCL's.
PoolId PoolOf(const EventBody& body) {
  if (const auto* vote = std::get_if<VoteCast>(&body)) return vote->pool;
  if (const auto* decided = std::get_if<PhaseDecided>(&body)) return decided->pool;
  if (const auto* shown = std::get_if<BallotShown>(&body)) return shown->pool;
  return PoolOfCycle(body);
}

void NoteSilence(Attempt& attempt, const Moment& from, const Moment& now) {
  if (!from || now.time_ns < from.time_ns || now.time_ns - from.time_ns <= attempt.silence.ns()) return;
  attempt.silence = {from, now, {}, {}};
  if (!attempt.phases.empty()) attempt.silence.phase = attempt.phases.back().phase;
  if (attempt.open_step) attempt.silence.step = attempt.open_step->event;
}

bool IsOfWait(const BallotShown& shown) { return shown.cause == agreement::Cause::kUndecided; }

// Whether an event begins or ends something that a session is in the middle of.
bool IsTurn(const EventBody& body, bool begun) {
  const auto is_turn = [begun]<class Kind>(const Kind&) {
    return kIsOneOf<Kind, PhaseBegun, CycleBegun, CycleDone, CycleFailed> ||
           (begun && kIsOneOf<Kind, StepBegun, StepDone, StepFailed, VoteCast, PhaseDecided>);
  };
  return std::visit(is_turn, body);
}

}  // namespace

// One event, by its kind.
struct StoryBuilder::Taker {
  StoryBuilder& b;
  const State& before;
  SessionStory& story = b.story_;
  const Moment& now = b.now_;

  // What happens in an attempt counts only where one is known.
  template <class Body>
  void operator()(const Body& e) const {
    if constexpr (requires(Attempt & attempt) { In(attempt, e); })
      if (b.touched_ != nullptr) In(*b.touched_, e);
  }

  // ---- what the session saw of others, and was asked ----
  void operator()(const SessionOpened& e) const { story.findings.who = e; }
  void operator()(const PeerLost& e) const { story.lost.push_back({e, now}); }
  void operator()(const ProcessSeen& e) const { story.seen.push_back({e, now}); }
  void operator()(const ThreadSeen& e) const {
    if (!story.threads.empty() && now.time_ns > story.threads.back().at.time_ns + kOneLook_ns) story.threads.clear();
    story.threads.push_back({e, now});
  }
  void operator()(const LaunchRefused& e) const {
    story.launches_refused += e.count;
    if (!story.refused) {
      story.refused = Dated<LaunchRefused>{e, now};
    } else {
      story.refused->event.count += e.count;
    }
  }
  void operator()(const SafepointReached& e) const { story.outside.waits_in = Dated<SafepointReached>{e, now}; }
  void operator()(const RequestEnded& e) const {
    Outside& outside = story.outside;
    const bool done = e.code == Code::kOk, pause = e.kind == CycleKind::kPause;
    AddResult(e);
    if (done != pause) {  // a resume was done, or a pause came to nothing
      outside.waits_in.reset();
      outside.paused.reset();
    } else if (done) {
      outside.paused = Dated<RequestEnded>{e, now};
    }
  }
  void operator()(const Frozen& e) const {
    AddResult(e);
    story.outside.frozen = Dated<Frozen>{e, now};
    ++story.outside.freezes;
  }
  void AddResult(const EventBody& body) const {
    std::vector<Dated<std::string>>& results = story.outside.results;
    if (results.size() >= kResultsKept) results.erase(results.begin());
    results.push_back({ToText(body), now});
  }
  void operator()(const CommunicatorBegun& e) const {
    if (story.unmade.size() < kUnmadeKept) story.unmade.push_back({e, now, {}});
  }
  void operator()(const CommunicatorReady& e) const {
    if (e.hash != 0) story.communicators.push_back({e, now});
    std::erase_if(story.unmade, [&](const UnmadeCommunicator& one) { return one.begun.communicator == e.communicator; });
  }
  void operator()(const CommunicatorEnded& e) const {
    const auto one = std::ranges::find_if(
        story.unmade, [&](const UnmadeCommunicator& other) { return other.begun.communicator == e.communicator; });
    if (one == story.unmade.end()) return;
    if (e.how == "failed") {
      one->failed = now;
    } else {
      story.unmade.erase(one);
    }
  }
  void operator()(const SessionClosed& e) const {
    story.closed = SessionStory::Closing{e, now, before.lifecycle, story.OpenAttempt() != nullptr};
  }
  void operator()(const SessionBroken&) const {
    if (!story.broken_at) story.broken_at = now;
  }

  // ---- who came to a pause or resume, and how they voted ----
  void operator()(const VoteCast& e) const {
    story.records_votes = true;
    Attempt* attempt = b.touched_;
    if (attempt == nullptr) return;
    if (Attempt::PhaseTaken* phase = PhaseOf(*attempt, e.phase)) {
      phase->voted = now;
      phase->voted_for = e.ok;
      if (!phase->decided) phase->worked = now;
    }
    if (!e.ok && !attempt->failed_vote)
      attempt->failed_vote = Attempt::Decision{e.phase, story.who().session, e.message, now, e.code};
  }
  void operator()(const MemberHeard& e) const {
    if (e.rank >= 0 || e.pid != 0)
      story.met.try_emplace(e.member, CycleMember{.session = e.member, .rank = e.rank, .pid = e.pid, .host = {}});
    if (e.asks) return Asked(e);
    // What was heard is recorded later, on another thread: the last vote of a pause may come behind the arrival at its resume.
    Attempt* attempt = b.OpenOf({});
    if (attempt == nullptr || attempt->kind != e.kind) return;
    attempt->heard[e.member] += e.voted ? 1 : 0;
  }
  // This session had come as well and has run out of patience first. The other one will, too, within as long again, or twice as
  // long where it was in a round that lost the member that counts.
  [[nodiscard]] bool HasGivenUpWith(const MemberHeard& e) const {
    if (story.attempts.empty()) return false;
    const Attempt& last = story.attempts.back();
    if (last.kind != e.kind || last.begun || last.end != Attempt::End::kFailed) return false;
    return now.time_ns - last.ended.time_ns <= 2 * (last.ended.time_ns - last.arrived.time_ns);
  }
  void Asked(const MemberHeard& e) const {
    if (Attempt* attempt = b.OpenOf({})) {
      if (attempt->kind == e.kind && !attempt->begun) attempt->asking.insert(e.member);
      return;
    }
    if (HasGivenUpWith(e)) {
      story.attempts.back().came_late.try_emplace(e.member, now);
      return;
    }
    std::optional<Attempt>& awaited = story.awaited;
    if (!awaited || awaited->kind != e.kind) awaited = Fresh(e.kind, {});
    awaited->asking.insert(e.member);
  }
  // It has come after all.
  void TakeAwaited(Attempt& attempt) const {
    std::optional<Attempt>& awaited = story.awaited;
    if (awaited && awaited->kind == attempt.kind) {
      attempt.asking = std::move(awaited->asking);
      attempt.asked_before = awaited->arrived;
    }
    awaited.reset();
  }

  // ---- from arrival to end ----
  [[nodiscard]] std::string TagOf(PoolId id) const {
    if (!id) return {};
    const Pool* pool = FindIn(before.pools, id);
    return pool == nullptr ? ToText(id) : pool->tag;
  }
  // One that begins with an arrival.
  [[nodiscard]] Attempt Fresh(CycleKind kind, PoolId id) const {
    return {.kind = kind,
            .cycle = before.ScopeOf(id).cycles + (kind == CycleKind::kPause ? 1 : 0),
            .tag = TagOf(id),
            .arrived = now,
            .requested = story.outside.waits_in.has_value()};
  }
  static Attempt::PhaseTaken* PhaseOf(Attempt& attempt, PhaseKind phase) {
    return attempt.phases.empty() || attempt.phases.back().phase != phase ? nullptr : &attempt.phases.back();
  }
  void operator()(const PhaseBegun& e) const {
    Attempt* attempt = b.touched_;
    if (attempt != nullptr && (attempt->begun || !IsArrival(e.phase))) {
      attempt->phases.push_back({.phase = e.phase, .begun = now, .worked = now});
    } else if (IsArrival(e.phase)) {
      Attempt& arrived = b.Push(e.pool, Fresh(KindOfPhase(e.phase), e.pool));
      if (!e.pool) TakeAwaited(arrived);
    }
  }
  void operator()(const CycleBegun& e) const {
    Attempt* attempt = b.touched_;
    if (attempt == nullptr || attempt->begun || attempt->kind != e.kind)
      attempt = &b.Push(e.pool, {.kind = e.kind, .tag = TagOf(e.pool)});
    attempt->cycle = e.cycle;
    attempt->members = e.members;
    for (const CycleMember& member : e.processes) story.met.try_emplace(member.session, member);
    attempt->begun = now;
  }
  void In(Attempt& attempt, const StepBegun& e) const { attempt.open_step = Dated<Step>{e.step, now}; }
  void In(Attempt& attempt, const StepDone& e) const { StepEnded(attempt, e.step); }
  void StepEnded(Attempt& attempt, const Step& step) const {
    const std::uint64_t from = attempt.open_step ? attempt.open_step->at.time_ns : now.time_ns;
    const std::uint64_t took = now.time_ns - std::min(now.time_ns, from);
    attempt.open_step.reset();
    if (const auto kind = static_cast<std::size_t>(step.kind); kind < kStepKinds) {
      ++attempt.steps[kind].count;
      attempt.steps[kind].duration_ns += took;
    }
    if (attempt.phases.empty()) return;
    Attempt::PhaseTaken& phase = attempt.phases.back();
    phase.worked = now;
    ++phase.steps;
    if (took < phase.longest_ns) return;
    phase.longest = step;
    phase.longest_ns = took;
  }
  void In(Attempt& attempt, const StepFailed& e) const {
    StepEnded(attempt, e.step);
    if (attempt.failed_step) return;
    Attempt::Failure failure{.step = e.step, .code = e.code, .driver_result = e.driver_result, .message = e.message, .at = now};
    failure.holders = e.holders;
    failure.reported_by = e.reported_by;
    if (!attempt.phases.empty()) failure.phase = attempt.phases.back().phase;
    if (const Allocation* a = FindIn(before.allocations, e.step.allocation)) {
      failure.allocation_bytes = a->bytes;
      failure.location = a->properties.location;
      failure.remote = a->remote;
      failure.site = a->site;
    }
    for (const auto& [id, a] : before.allocations) {
      if (a.pool == e.pool && a.own() && a.on_device() && !a.resident && a.properties.location.id == e.step.device.value)
        failure.still_missing += a.bytes;
    }
    attempt.failed_step = std::move(failure);
  }
  void In(Attempt& attempt, const PhaseDecided& e) const {
    Attempt::PhaseTaken* phase = PhaseOf(attempt, e.phase);
    if (phase == nullptr || phase->decided)
      phase = &attempt.skipped.emplace_back(Attempt::PhaseTaken{.phase = e.phase, .begun = now, .worked = now});
    phase->decided = now;
    phase->passed = e.passed;
    if (!e.passed && !attempt.decided)
      attempt.decided = Attempt::Decision{e.phase, e.culprit, e.message, now, e.code, e.driver_result};
  }
  void In(Attempt& attempt, const BallotShown& e) const {
    for (const SeatShown& seat : e.seats)
      story.met.try_emplace(seat.session,
                            CycleMember{.session = seat.session, .rank = seat.rank, .pid = seat.pid, .host = seat.host});
    attempt.on_board = true;
    std::vector<Dated<BallotShown>>& ballots = attempt.ballots;
    if (!ballots.empty() && IsOfWait(ballots.back().event)) ballots.pop_back();
    if (e.cause == agreement::Cause::kAllVoted) {
      if (e.ballot == agreement::Ballot::kCome) ballots.clear();  // who had not come before has come now
      return;
    }
    if (ballots.size() >= kBallotsKept) ballots.erase(ballots.begin());
    ballots.push_back({e, now});
    std::ranges::stable_sort(ballots.back().event.seats, {}, &SeatShown::session);
  }
  void In(Attempt& attempt, const CycleDone& e) const {
    if (e.kind == CycleKind::kResume && !e.pool) story.refused.reset();
    attempt.contents = {e.changed, e.unchanged, e.zero};
    End(attempt, Attempt::End::kDone, e.pool);
  }
  void operator()(const CycleFailed& e) const {
    Attempt* attempt = b.touched_;
    if (attempt == nullptr) attempt = &b.Push(e.pool, {.kind = e.kind, .cycle = e.cycle, .tag = TagOf(e.pool)});
    attempt->failure = e.message;
    attempt->code = e.code;
    attempt->undone = e.undone;
    attempt->culprits = e.culprits;
    for (const CycleMember& who : e.culprits) story.met.try_emplace(who.session, who);
    End(*attempt, Attempt::End::kFailed, e.pool);
  }
  void End(Attempt& attempt, Attempt::End end, PoolId pool) const {
    attempt.end = end;
    attempt.ended = now;
    attempt.open_step.reset();
    if (!pool) b.over_ = &attempt;
  }
};

void StoryBuilder::Take(const Event& event, const State& before) {
  now_ = {event.seq, event.time_ns, event.thread};
  if (!story_.first) story_.first = now_;
  story_.last = now_;
  story_.for_clock.Take(event);
  if (times_) story_.times.Add(event.seq, event.time_ns, event.body.index());
  const auto* const shown = std::get_if<BallotShown>(&event.body);
  const bool acts = shown == nullptr || !IsOfWait(*shown);
  const Moment before_it = acts ? std::exchange(story_.acted, now_) : Moment{};
  Attempt* const open = OpenOf({});
  if (open != nullptr && open->begun) NoteSilence(*open, before_it, now_);
  pool_ = PoolOf(event.body);
  over_ = nullptr;
  touched_ = pool_ ? OpenOf(pool_) : open;
  std::visit(Taker{*this, before}, static_cast<const EventVariant&>(event.body));
  if (touched_ == nullptr) return;
  touched_->last = now_;
  if (!pool_ && IsTurn(event.body, static_cast<bool>(touched_->begun))) story_.since = now_;
}

void StoryBuilder::Begin(const State& before) {
  state_ = &before;
  lifecycle_ = before.lifecycle;
}

// The attempt that an event is about is the last one of its pool, or of NCCL. An event that ends it leaves none open.
Status StoryBuilder::After(const Event& event, const State& after) {
  if (touched_ != nullptr) {
    const std::vector<Attempt>* const attempts = pool_ ? FindIn(story_.pools, pool_) : &story_.attempts;
    AMEM_CHECK(attempts != nullptr, pool_);
    AMEM_CHECK(!attempts->empty(), pool_);
    AMEM_CHECK(touched_ == &attempts->back(), pool_);
    const bool ends = std::holds_alternative<CycleDone>(event.body) || std::holds_alternative<CycleFailed>(event.body);
    AMEM_CHECK(ends != touched_->open(), pool_, touched_->cycle);
  }
  if (std::exchange(lifecycle_, after.lifecycle) != after.lifecycle) story_.since = now_;
  return {};
}

bool StoryBuilder::Behind(const Event& event) {
  if (!whole_) whole_ = story_;
  Take(event, *state_);
  return true;
}

bool StoryBuilder::Finish(bool damaged) {
  const bool behind = whole_.has_value() && damaged;
  if (whole_ && !damaged) story_ = *std::move(whole_);
  Forget(story_, kept_);
  return behind;
}

SessionStory StoryBuilder::UpToBreak(std::size_t attempts) const {
  SessionStory story = whole_ ? *whole_ : story_;
  Forget(story, attempts);
  return story;
}

Attempt* StoryBuilder::OpenOf(PoolId pool) {
  std::vector<Attempt>* attempts = pool ? FindIn(story_.pools, pool) : &story_.attempts;
  return attempts == nullptr || attempts->empty() || !attempts->back().open() ? nullptr : &attempts->back();
}

Attempt& StoryBuilder::Push(PoolId pool, Attempt attempt) {
  std::vector<Attempt>& attempts = pool ? story_.pools[pool] : story_.attempts;
  const bool replaces = OpenOf(pool) != nullptr;
  if (attempts.size() >= 2 * kept_) Forget(story_, pool, kept_);
  attempts.push_back(std::move(attempt));
  if (replaces && !pool) over_ = &attempts.rbegin()[1];
  return *(touched_ = &attempts.back());
}

// A session may pause and resume for weeks. What counts is how it began and ended, and what failed: the first quarter stays,
// the last half, and of those between them the newest that failed.
void StoryBuilder::Forget(SessionStory& story, PoolId pool, std::size_t limit) {
  std::vector<Attempt>& attempts = pool ? story.pools[pool] : story.attempts;
  if (attempts.size() <= limit) return;
  const std::size_t begin = limit / 4, end = attempts.size() - limit / 2;
  std::size_t room = limit - limit / 4 - limit / 2;
  std::vector<bool> keep(attempts.size(), true);
  for (std::size_t i = end; i-- > begin;) {
    keep[i] = attempts[i].end == Attempt::End::kFailed && room > 0;
    if (keep[i]) {
      --room;
      continue;
    }
    ++story.forgotten.count;
    if (pool) continue;
    story.forgotten.Add(attempts[i]);
    story.forgotten.members.insert(attempts[i].members.begin(), attempts[i].members.end());
  }
  std::size_t at = 0;
  std::erase_if(attempts, [&](const Attempt&) { return !keep[at++]; });
}

void StoryBuilder::Forget(SessionStory& story, std::size_t limit) {
  Forget(story, PoolId{}, limit);
  for (auto& [pool, attempts] : story.pools) Forget(story, pool, limit);
}

std::string NameOf(const Attempt& attempt) {
  const std::string of_tag = attempt.tag.empty() ? "" : " of tag " + attempt.tag;
  return fmt::format("{} {}{}", ToText(attempt.kind), attempt.cycle, of_tag);
}

std::vector<Attempt::PhaseTaken> PhasesWithArrival(const Attempt& attempt) {
  std::vector<Attempt::PhaseTaken> phases;
  if (attempt.arrived) {
    phases.push_back({.phase = ArrivalOf(attempt.kind),
                      .begun = attempt.arrived,
                      .decided = attempt.begun,
                      .worked = attempt.arrived,
                      .passed = static_cast<bool>(attempt.begun)});
  }
  phases.insert(phases.end(), attempt.phases.begin(), attempt.phases.end());
  return phases;
}

void SessionStory::Sums::Add(const Attempt& attempt) {
  if (attempt.end == Attempt::End::kDone) ++(attempt.kind == CycleKind::kPause ? pauses : resumes);
  if (attempt.end == Attempt::End::kFailed) ++failures;
}

const Attempt& SessionStory::Last() const {
  static const Attempt kNone{.end = Attempt::End::kDone};
  return attempts.empty() ? kNone : attempts.back();
}

SessionStory::Sums SessionStory::AllAttempts() const {
  Sums sums = forgotten;
  for (const Attempt& attempt : attempts) sums.Add(attempt);
  return sums;
}

std::vector<const Attempt*> SessionStory::LastOfPools() const {
  std::vector<const Attempt*> all;
  for (const auto& [id, of_pool] : pools) {
    const auto it = std::find_if(of_pool.rbegin(), of_pool.rend(), [](const Attempt& a) { return a.begun.seq.value != 0; });
    if (it != of_pool.rend()) all.push_back(&*it);
  }
  return all;
}

std::vector<Attempt> TakeAttempts(SessionStory& story) {
  std::vector<Attempt> all = std::exchange(story.attempts, {});
  for (auto& [id, attempts] : story.pools) std::ranges::move(attempts, std::back_inserter(all));
  story.pools.clear();
  std::ranges::stable_sort(all, {}, [](const Attempt& attempt) { return attempt.came().time_ns; });
  return all;
}

const Attempt* LastAttempt(const SessionStory& story, const std::string& tag) {
  if (tag.empty()) return story.attempts.empty() ? nullptr : &story.attempts.back();
  for (const Attempt* attempt : story.LastOfPools())
    if (attempt->tag == tag) return attempt;
  return nullptr;
}

}  // namespace amem
