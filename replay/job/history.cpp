#include "replay/job/history.h"

#include <algorithm>
#include <array>
#include <fstream>

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
    if (before_it && event.seq.value != before_it.seq.value + 1) {  // `times` has no gaps
      history_.times.clear();
      history_.kinds.clear();
    }
    history_.last = now_;
    history_.times.push_back(event.time_ns);
    history_.kinds.push_back(static_cast<std::uint8_t>(event.body.index()));
    if (Open() && Last().begun) NoteSilence(before_it);
    std::visit([&](const auto& body) { On(body, *state_); }, event.body);
  }

  template <class Body>
  void On(const Body&, const State&) {}

  void On(const PeerLost& e, const State&) {
    history_.lost.push_back(e);
    history_.lost_at.push_back(now_);
  }
  void On(const SessionBroken&, const State&) {
    if (!history_.broken_at) history_.broken_at = now_;
  }

  void On(const PhaseBegun& e, const State& before) {
    if (!(Open() && Last().begun) && IsArrival(e.phase)) {
      const CycleKind kind = KindOfPhase(e.phase);
      const std::uint64_t cycle = before.cycles + (kind == CycleKind::kPause ? 1 : 0);
      history_.attempts.push_back({.kind = kind, .cycle = cycle, .arrived = now_});
      return;
    }
    if (!Open()) return;
    Last().phases.push_back({.phase = e.phase, .begun = now_});
  }
  void On(const CycleBegun& e, const State&) {
    if (!Open() || Last().begun) history_.attempts.emplace_back();
    Attempt& attempt = Last();
    attempt.kind = e.kind;
    attempt.cycle = e.cycle;
    attempt.members = e.members;
    attempt.begun = now_;
  }
  void On(const StepBegun& e, const State&) {
    if (!Open()) return;
    Last().open_step = Attempt::OpenStep{e.step, now_};
    if (!Last().phases.empty()) ++Last().phases.back().steps;
  }
  void On(const StepDone&, const State&) {
    if (Open()) Last().open_step.reset();
  }
  void On(const StepFailed& e, const State& before) {
    if (!Open()) return;
    Attempt& attempt = Last();
    attempt.open_step.reset();
    if (attempt.failed_step) return;
    Attempt::Failure failure{
        .step = e.step, .code = e.code, .driver_result = e.driver_result, .message = e.message, .at = now_};
    if (!attempt.phases.empty()) failure.phase = attempt.phases.back().phase;
    if (const auto it = before.allocations.find(e.step.allocation); it != before.allocations.end()) {
      failure.allocation_bytes = it->second.bytes;
      failure.location = it->second.properties.location;
      failure.remote = it->second.remote;
      failure.site = it->second.site;
    }
    for (const auto& [id, a] : before.allocations) {
      if (a.own() && a.on_device() && !a.resident && a.properties.location.id == e.step.device.value)
        failure.still_missing += a.bytes;
    }
    attempt.failed_step = std::move(failure);
  }
  void On(const PhaseDecided& e, const State&) {
    if (!Open()) return;
    Attempt& attempt = Last();
    if (!attempt.phases.empty() && attempt.phases.back().phase == e.phase) attempt.phases.back().decided = now_;
    if (!e.passed && !attempt.decided) attempt.decided = Attempt::Decision{e.phase, e.culprit, e.message, now_};
  }
  void On(const CycleDone& e, const State&) {
    if (!Open()) return;
    Last().duration_ns = e.duration_ns;
    Finish(Attempt::End::kDone);
  }
  void On(const CycleFailed& e, const State&) {
    if (!Open()) history_.attempts.push_back({.kind = e.kind, .cycle = e.cycle});  // of a build that did not record arrivals
    Last().failure = e.message;
    Last().undone = e.undone;
    Finish(Attempt::End::kFailed);
  }

  void NoteSilence(const Moment& from) {
    Attempt& attempt = Last();
    if (!from || now_.time_ns < from.time_ns || now_.time_ns - from.time_ns <= attempt.silence.ns()) return;
    attempt.silence = {from, now_, {}, {}};
    if (!attempt.phases.empty()) attempt.silence.phase = attempt.phases.back().phase;
    if (attempt.open_step) attempt.silence.step = attempt.open_step->step;
  }
  void Finish(Attempt::End end) {
    Last().end = end;
    Last().ended = now_;
    Last().open_step.reset();
  }
  Attempt& Last() { return history_.attempts.back(); }
  [[nodiscard]] bool Open() const { return !history_.attempts.empty() && history_.attempts.back().end == Attempt::End::kOpen; }

  JournalHistory& history_;
  std::optional<JournalHistory> whole_;  // as it was before the first event behind a break
  const State* state_ = nullptr;         // before the event
  Moment now_;
};

}  // namespace

std::optional<JournalHistory::Earlier> JournalHistory::LastUpTo(std::uint64_t time_ns) const {
  // Threads note their times before they wait for their turn to record, so that neighbours may be out of order by a little.
  for (std::size_t i = times.size(); i > 0; --i) {
    if (times[i - 1] > time_ns) continue;
    return Earlier{{SequenceNumber{last.seq.value - (times.size() - i)}, times[i - 1]}, KindName(kinds[i - 1])};
  }
  return std::nullopt;
}

Result<JournalHistory> ReadHistory(JournalReader& reader) {
  JournalHistory history;
  if (const Result<JournalInfo> info = reader.Info()) {
    history.times.reserve(info->events);
    history.kinds.reserve(info->events);
  }
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
  const ThisHost began = ThisHost::Now();
  Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session_directory);
  if (!reader) return reader.status();
  Result<JournalHistory> history = ReadHistory(**reader);
  if (!history) return history.status();
  JournalFindings& found = history->findings;
  SetPresent(found, began);
  // A journal that was packed while its process lived (pack.h): the present is the moment of packing.
  std::string word;
  std::uint64_t packed_ns = 0;
  if (std::ifstream(session_directory / "status") >> word >> packed_ns && word == "live") {
    found.info.status = SessionStatus::kLive;
    found.as_of_ns = std::max(found.last_ns, packed_ns);
    std::erase_if(found.notes, [](const Violation& note) { return note.text.starts_with("crashed: "); });
  }
  return history;
}

void CountTheDying(std::vector<JournalHistory>& journals) {
  for (JournalHistory& j : journals) {
    if (j.findings.info.status != SessionStatus::kLive) continue;
    j.dying = std::ranges::any_of(journals, [&](const JournalHistory& other) {
      if (!SameBoot(other.who(), j.who())) return false;
      for (std::size_t i = 0; i < other.lost.size(); ++i) {
        const PeerLost& lost = other.lost[i];
        if (lost.peer == j.session() && lost.reason == kPeerDied && other.lost_at[i].time_ns >= j.last.time_ns) return true;
      }
      return false;
    });
    if (j.dying) j.findings.info.status = SessionStatus::kCrashed;
  }
}

}  // namespace amem
