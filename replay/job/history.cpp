#include "replay/job/history.h"

#include <algorithm>
#include <array>

#include "journal/base/process_sight.h"
#include "journal/tail.h"

namespace amem {
namespace {

CycleKind KindOfPhase(PhaseKind phase) { return phase < PhaseKind::kResumeArrive ? CycleKind::kPause : CycleKind::kResume; }

bool IsArrival(PhaseKind phase) { return phase == PhaseKind::kPauseArrive || phase == PhaseKind::kResumeArrive; }

// Follows a session through its pauses and resumes, event by event. Behind damage the state is not known any more, but what
// pauses and resumes did still is; behind a wrong order nothing is believed.
class HistoryBuilder final : public FoldObserver {
 public:
  explicit HistoryBuilder(JournalHistory& history) : history_(history) {}

  void Begin(const State& before) override { state_ = &before; }
  void Before(const Event& event, const State&) override { Take(event); }
  bool Behind(const Event& event) override {
    if (!whole_) whole_ = history_;
    Take(event);
    return true;
  }
  // Whether the break was damage is known only at the end.
  void Finish(JournalFindings& found) {
    if (!whole_) return;
    if (found.report.corrupt_records == 0) {
      history_ = *std::move(whole_);
    } else {
      found.last_ns = history_.last.time_ns;
    }
  }

 private:
  void Take(const Event& event) {
    const Moment before_it = now_;
    now_ = {event.seq, event.time_ns};
    if (!history_.first) history_.first = now_;
    history_.last = now_;
    history_.for_clock.Take(event);
    history_.times.Add(event.seq, event.time_ns, event.body.index());
    if (Open() && Last().begun) NoteSilence(before_it);
    std::visit([&](const auto& body) { On(body, *state_); }, event.body);
  }

  template <class Body>
  void On(const Body&, const State&) {}

  void On(const PeerLost& e, const State&) { history_.lost.push_back({e, now_}); }
  void On(const ProcessSeen& e, const State&) { history_.seen.push_back({e, now_}); }
  void On(const ThreadSeen& e, const State&) {
    constexpr std::size_t kThreadsMost = 256;  // the threads of a process are recorded together
    if (history_.threads.size() >= kThreadsMost) history_.threads.erase(history_.threads.begin());
    history_.threads.push_back({e, now_});
  }
  void On(const LaunchRefused& e, const State&) {
    if (!history_.refused) {
      history_.refused = Dated<LaunchRefused>{e, now_};
    } else {
      history_.refused->event.count += e.count;
    }
  }
  void On(const RequestSeen& e, const State&) { history_.outside.asked = Dated<RequestSeen>{e, now_}; }
  void On(const SafepointReached& e, const State&) { history_.outside.waits_in = Dated<SafepointReached>{e, now_}; }
  void On(const RequestEnded& e, const State&) {
    Outside& outside = history_.outside;
    const bool done = e.code == Code::kOk, pause = e.kind == CycleKind::kPause;
    if (!done) outside.failed = Dated<RequestEnded>{e, now_};
    if (done != pause) {  // a resume was done, or a pause came to nothing
      outside.waits_in.reset();
      outside.paused.reset();
    } else if (done) {
      outside.paused = Dated<RequestEnded>{e, now_};
    }
  }
  void On(const Frozen& e, const State&) {
    history_.outside.frozen = Dated<Frozen>{e, now_};
    ++history_.outside.freezes;
  }
  void On(const CommunicatorReady& e, const State&) {
    if (e.hash != 0) history_.communicators.push_back({e, now_});
  }
  void On(const SessionClosed& e, const State& before) {
    history_.closed = JournalHistory::Closing{e, now_, before.lifecycle, Open()};
  }
  void On(const VoteCast& e, const State&) {
    history_.records_votes = true;
    if (!Open()) return;
    Attempt& attempt = Last();
    if (!attempt.phases.empty() && attempt.phases.back().phase == e.phase) attempt.phases.back().voted = now_;
    if (!e.ok && !attempt.failed_vote) attempt.failed_vote = Attempt::Vote{e.phase, e.ok, e.code, e.message, now_};
  }
  void On(const MemberHeard& e, const State& before) {
    if (e.rank >= 0 || e.pid != 0)
      history_.met.try_emplace(e.member, CycleMember{.session = e.member, .rank = e.rank, .pid = e.pid, .host = {}});
    if (e.asks) return Asked(e, before);
    // What was heard is recorded later, on another thread: the last vote of a pause may come behind the arrival at its resume.
    if (!Open() || Last().kind != e.kind) return;
    Attempt::Heard& heard = Last().heard[e.member];
    heard.at = now_;
    heard.votes += e.voted ? 1 : 0;
  }
  // This session had come as well and has run out of patience first. The other one will, too, within as long again, or twice as
  // long where it was in a round that lost the member that counts.
  [[nodiscard]] bool HasGivenUpWith(const MemberHeard& e) const {
    if (history_.attempts.empty()) return false;
    const Attempt& last = history_.attempts.back();
    if (last.kind != e.kind || last.begun || last.end != Attempt::End::kFailed) return false;
    return now_.time_ns - last.ended.time_ns <= 2 * (last.ended.time_ns - last.arrived.time_ns);
  }
  void Asked(const MemberHeard& e, const State& before) {
    if (Open()) {
      if (Last().kind == e.kind && !Last().begun) Last().asking.insert(e.member);
      return;
    }
    if (HasGivenUpWith(e)) return;
    std::optional<Attempt>& awaited = history_.awaited;
    if (!awaited || awaited->kind != e.kind) {
      awaited = Attempt{.kind = e.kind, .cycle = before.cycles + (e.kind == CycleKind::kPause ? 1 : 0), .arrived = now_};
    }
    awaited->asking.insert(e.member);
  }
  void On(const SessionBroken&, const State&) {
    if (!history_.broken_at) history_.broken_at = now_;
  }

  void On(const PhaseBegun& e, const State& before) {
    if (e.pool) {
      if (Attempt* attempt = OpenOf(e.pool)) attempt->phases.push_back({.phase = e.phase, .begun = now_});
      return;
    }
    if (!(Open() && Last().begun) && IsArrival(e.phase)) {
      const CycleKind kind = KindOfPhase(e.phase);
      const std::uint64_t cycle = before.cycles + (kind == CycleKind::kPause ? 1 : 0);
      Forget();
      history_.attempts.push_back({.kind = kind, .cycle = cycle, .arrived = now_});
      TakeAwaited();
      return;
    }
    if (!Open()) return;
    Last().phases.push_back({.phase = e.phase, .begun = now_});
  }
  void On(const CycleBegun& e, const State& before) {
    if (e.pool) {
      const auto pool = before.pools.find(e.pool);
      const std::string tag = pool == before.pools.end() ? ToText(e.pool) : pool->second.tag;
      history_.pools[e.pool] = Attempt{.kind = e.kind, .cycle = e.cycle, .tag = tag, .begun = now_};
      return;
    }
    if (!Open() || Last().begun) {
      Forget();
      history_.attempts.emplace_back();
    }
    Attempt& attempt = Last();
    attempt.kind = e.kind;
    attempt.cycle = e.cycle;
    attempt.members = e.members;
    for (const CycleMember& member : e.processes) history_.met.try_emplace(member.session, member);
    attempt.begun = now_;
  }
  void On(const StepBegun& e, const State&) {
    Attempt* attempt = OpenOf(e.pool);
    if (attempt == nullptr) return;
    attempt->open_step = Attempt::OpenStep{e.step, now_};
    if (!attempt->phases.empty()) ++attempt->phases.back().steps;
  }
  void On(const StepDone& e, const State&) {
    Attempt* attempt = OpenOf(e.pool);
    if (attempt == nullptr) return;
    attempt->open_step.reset();
    if (!attempt->phases.empty()) attempt->phases.back().done = now_;
  }
  void On(const StepFailed& e, const State& before) {
    Attempt* attempt = OpenOf(e.pool);
    if (attempt == nullptr) return;
    attempt->open_step.reset();
    if (attempt->failed_step) return;
    Attempt::Failure failure{
        .step = e.step, .code = e.code, .driver_result = e.driver_result, .message = e.message, .at = now_};
    if (!attempt->phases.empty()) failure.phase = attempt->phases.back().phase;
    if (const auto it = before.allocations.find(e.step.allocation); it != before.allocations.end()) {
      failure.allocation_bytes = it->second.bytes;
      failure.location = it->second.properties.location;
      failure.remote = it->second.remote;
      failure.site = it->second.site;
    }
    for (const auto& [id, a] : before.allocations) {
      if (a.pool == e.pool && a.own() && a.on_device() && !a.resident && a.properties.location.id == e.step.device.value)
        failure.still_missing += a.bytes;
    }
    attempt->failed_step = std::move(failure);
  }
  void On(const PhaseDecided& e, const State&) {
    if (!Open()) return;
    Attempt& attempt = Last();
    if (!attempt.phases.empty() && attempt.phases.back().phase == e.phase) attempt.phases.back().decided = now_;
    if (!e.passed && !attempt.decided)
      attempt.decided = Attempt::Decision{e.phase, e.culprit, e.message, now_, e.code, e.driver_result};
  }
  void On(const CycleDone& e, const State&) {
    Attempt* attempt = OpenOf(e.pool);
    if (attempt == nullptr) return;
    attempt->duration_ns = e.duration_ns;
    if (e.kind == CycleKind::kResume && !e.pool) history_.refused.reset();
    Finish(*attempt, Attempt::End::kDone);
  }
  void On(const CycleFailed& e, const State&) {
    if (e.pool && OpenOf(e.pool) == nullptr) return;
    if (!e.pool && !Open())
      history_.attempts.push_back({.kind = e.kind, .cycle = e.cycle});  // of a build that did not record arrivals
    Attempt& attempt = *OpenOf(e.pool);
    attempt.failure = e.message;
    attempt.code = e.code;
    attempt.undone = e.undone;
    attempt.culprits = e.culprits;
    for (const CycleMember& who : e.culprits) history_.met.try_emplace(who.session, who);
    Finish(attempt, Attempt::End::kFailed);
  }

  // It has come after all.
  void TakeAwaited() {
    std::optional<Attempt>& awaited = history_.awaited;
    if (awaited && awaited->kind == Last().kind) Last().asking = std::move(awaited->asking);
    awaited.reset();
  }

  // A session may pause and resume for weeks. What counts is how that ended.
  void Forget() {
    constexpr std::size_t kKept = 256;
    std::vector<Attempt>& attempts = history_.attempts;
    if (attempts.size() < 2 * kKept) return;
    const auto end = attempts.end() - kKept;
    for (auto it = attempts.begin(); it != end; ++it) {
      JournalHistory::Forgotten& sum = history_.forgotten;
      if (it->end == Attempt::End::kDone) ++(it->kind == CycleKind::kPause ? sum.pauses : sum.resumes);
      if (it->end == Attempt::End::kFailed) ++sum.failures;
      sum.members.insert(it->members.begin(), it->members.end());
    }
    attempts.erase(attempts.begin(), end);
  }

  void NoteSilence(const Moment& from) {
    Attempt& attempt = Last();
    if (!from || now_.time_ns < from.time_ns || now_.time_ns - from.time_ns <= attempt.silence.ns()) return;
    attempt.silence = {from, now_, {}, {}};
    if (!attempt.phases.empty()) attempt.silence.phase = attempt.phases.back().phase;
    if (attempt.open_step) attempt.silence.step = attempt.open_step->step;
  }
  void Finish(Attempt& attempt, Attempt::End end) const {
    attempt.end = end;
    attempt.ended = now_;
    attempt.open_step.reset();
  }
  // The attempt that is under way, of NCCL or of a pool; null: none is.
  Attempt* OpenOf(PoolId pool) {
    if (!pool) return Open() ? &Last() : nullptr;
    const auto it = history_.pools.find(pool);
    return it == history_.pools.end() || it->second.end != Attempt::End::kOpen ? nullptr : &it->second;
  }
  Attempt& Last() { return history_.attempts.back(); }
  [[nodiscard]] bool Open() const { return !history_.attempts.empty() && history_.attempts.back().end == Attempt::End::kOpen; }

  JournalHistory& history_;
  std::optional<JournalHistory> whole_;  // as it was before the first event behind a break
  const State* state_ = nullptr;         // before the event
  Moment now_;
};

}  // namespace

const Attempt* LastAttempt(const JournalHistory& journal, const std::string& tag) {
  if (tag.empty()) return journal.attempts.empty() ? nullptr : &journal.attempts.back();
  const auto it = std::ranges::find(journal.pools, tag, [](const auto& pool) -> const std::string& { return pool.second.tag; });
  return it == journal.pools.end() ? nullptr : &it->second;
}

namespace {

// As ProcessSeen::state has it; empty: it cannot be seen from here.
std::string StateOfWriter(const std::filesystem::path& session) {
  const std::int32_t pid = ProcessOfWriter(session / "tail");
  if (pid == 0) return {};
  return StateOfProcess(pid);
}

}  // namespace

Result<JournalHistory> ReadHistory(JournalReader& reader) {
  JournalHistory history;
  HistoryBuilder builder(history);
  Result<JournalFindings> found = VerifyJournal(reader, std::array<FoldObserver*, 1>{&builder});
  if (!found) return found.status();
  builder.Finish(*found);
  history.findings = *std::move(found);
  const Result<ReadReport> last = reader.Read(history.last.seq, history.last.seq, [&](const Event& event) {
    history.last_text = ToText(event.body);
    return false;
  });
  if (!last) return last.status();
  return history;
}

Result<JournalHistory> ReadHistory(const std::filesystem::path& session_directory) {
  Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session_directory);
  if (!reader) return reader.status();
  Result<JournalHistory> history = ReadHistory(**reader);
  if (history && history->findings.info.status == SessionStatus::kLive) history->process_now = StateOfWriter(session_directory);
  return history;
}

void CountTheDying(std::vector<JournalHistory>& journals) {
  std::map<SessionId, JournalHistory*> unsure;
  for (JournalHistory& j : journals) {
    const SessionStatus status = j.findings.info.status;
    if (status == SessionStatus::kLive || status == SessionStatus::kCopied) unsure[j.session()] = &j;
  }
  for (const JournalHistory& other : journals) {
    for (const auto& [lost, at] : other.lost) {
      const auto found = unsure.find(lost.peer);
      if (found == unsure.end() || lost.reason != kPeerDied) continue;
      JournalHistory& j = *found->second;
      if (!SameBoot(other.who(), j.who()) || at.time_ns < j.last.time_ns) continue;
      j.dying = j.findings.info.status == SessionStatus::kLive;
      j.findings.info.status = SessionStatus::kCrashed;
      unsure.erase(found);
    }
  }
}

}  // namespace amem
