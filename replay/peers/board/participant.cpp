#include "replay/peers/board/participant.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "journal/base/no_memory.h"
#include "statemachine/check.h"

namespace amem::board {

using agreement::Ballot;
using agreement::Cause;

namespace {

// How long a member sleeps at most before it reads the board again: for a decision whose maker was killed before it woke the
// others, and for an end of which nobody has a pidfd.
constexpr std::chrono::milliseconds kSleepLeast{5}, kSleepMost{250};

// One round, as its member takes part in it.
struct Round {
  Board& board;
  const std::size_t seat;
  const RoundNumber number;
  CallOnBoard& call;
  RoundHooks& hooks;
};

// What is said of a round: why a ballot failed, of a reading that shows it.
class RoundMessages {
 public:
  explicit RoundMessages(const Round& round) : round_(round) {}

  // The statement about a failure that nobody voted for.
  [[nodiscard]] Status Explain(const agreement::Decide& decide, const BoardReading& reading, Deadline waiting_since) const {
    const SessionId culprit = round_.board.members()[decide.culprit];
    const std::string in = InBallot(decide.ballot);
    switch (decide.cause) {
      case Cause::kEnded:
        return Status{Code::kPeerLost, NameOf(decide.culprit) + " " + round_.hooks.HowItEnded(culprit) + in}.ReportedBy(
            culprit);
      case Cause::kLate:
        return Status{Code::kTimeout, WhoIsLate(decide.ballot, reading, waiting_since)}.ReportedBy(culprit);
      case Cause::kSetChanged:
        return {Code::kRefused, NameOf(round_.seat) + " began to share memory with others" + in};
      case Cause::kDamaged:
        return Status{Code::kCorrupt, "the vote of " + NameOf(decide.culprit) + " has been written over" + in}.ReportedBy(
            culprit);
      default:
        return {};
    }
  }

  // Reported by its culprit, if it has one.
  [[nodiscard]] Status WhyFailed(Ballot ballot, const BoardReading& reading) const {
    const BallotDecision& decision = reading.decisions[static_cast<std::size_t>(ballot)];
    const SessionId seat = round_.board.members()[decision.culprit];
    if (decision.cause == Cause::kSuperseded)
      return {Code::kTimeout, "the others ended this round without this rank" + InBallot(ballot)};
    const bool voted_no = decision.cause == Cause::kVotedNo;
    const auto told = round_.board.StatementOf(voted_no ? decision.culprit : decision.by, ballot, round_.number);
    SessionId culprit;
    if (decision.cause != Cause::kSetChanged) culprit = told && told->reported_by() ? told->reported_by() : seat;
    if (voted_no && told && !told->ok()) {
      return Status{told->code(), NameOf(decision.culprit) + " failed" + InBallot(ballot) + ": " + told->message(),
                    told->driver_result()}
          .ReportedBy(culprit);
    }
    if (told && !told->ok()) return Status{*told}.ReportedBy(culprit);
    if (decision.cause == Cause::kDamaged || decision.cause == Cause::kAllVoted)
      return Status{Code::kCorrupt, "the board of this round has been written over" + InBallot(ballot)}.ReportedBy(culprit);
    return Status{Code::kBroken, NameOf(decision.culprit) + ": " + std::string(ToText(decision.cause)) + InBallot(ballot)}
        .ReportedBy(culprit);
  }

 private:
  [[nodiscard]] std::string NameOf(std::size_t seat) const { return round_.hooks.NameOf(round_.board.members()[seat]); }
  [[nodiscard]] std::string InBallot(Ballot ballot) const { return " " + round_.hooks.PlaceOf(round_.call.kind, ballot); }
  [[nodiscard]] std::string WhoIsLate(Ballot ballot, const BoardReading& reading, Deadline waiting_since) const {
    const auto waited = std::chrono::round<std::chrono::milliseconds>(round_.hooks.Time() - waiting_since);
    std::string names, seen;
    for (const std::size_t seat : agreement::Absent(reading.ViewOf(round_.seat), ballot)) {
      names += (names.empty() ? "" : ", ") + NameOf(seat);
      const std::string what = round_.hooks.SeenOf(round_.board.members()[seat], waited);
      if (!what.empty()) seen += (seen.empty() ? "" : "; ") + NameOf(seat) + " " + what;
    }
    const std::string waiting = fmt::format("{} waited {} ms for {}", NameOf(round_.seat), waited.count(), names);
    if (ballot == Ballot::kCome) {
      return waiting + " to come" + (seen.empty() ? "" : ", of whom " + seen) +
             OrRaiseTheTimeout(": all that share memory must call it; look at what they are doing");
    }
    return waiting + InBallot(ballot) + ": no vote came" + (seen.empty() ? "" : ": " + seen) +
           OrRaiseTheTimeout("; look at what it is doing");
  }

  const Round& round_;
};

class Participant {
 public:
  explicit Participant(const Round& round) : round_(round), program_(agreement::ProgramOf(round.call.kind)) {
    const CallOnBoard& call = round.call;
    member_.patient = call.patient;
    member_.until_ns = NsOf(call.until);
    member_.again_ns = static_cast<std::uint64_t>(call.again.count());
    member_.round_ns = static_cast<std::uint64_t>(call.round.count());
    member_.undo_ns = static_cast<std::uint64_t>(call.undo.count());
  }

  RoundOutcome Run() {
    while (true) {
      const std::uint32_t ticket = round_.board.Ticket();
      try {
        const agreement::Action action = NextAction();
        if (const auto* end = std::get_if<agreement::End>(&action)) return Outcome(*end);
        Perform(action, ticket);
        lacks_memory_ = false;
      } catch (const std::bad_alloc&) {
        if (!HasVoted() && !member_.patient && NsOf(round_.hooks.Time()) >= member_.until_ns) throw;
        LackMemory(ticket);
      }
    }
  }

 private:
  static std::uint64_t NsOf(Deadline deadline) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(deadline.time_since_epoch()).count());
  }
  static Deadline DeadlineAt(std::uint64_t ns) { return Deadline(std::chrono::nanoseconds(ns)); }

  // As the board shows it, which is read without memory once it has been read for the first time.
  [[nodiscard]] bool HasVoted() const {
    return round_.seat < reading_.seats.size() && reading_.seats[round_.seat].votes[0] != agreement::Vote::kNone;
  }

  // Who has no memory to go on with is against what it has not voted on yet. Of what it has voted on it awaits the decision,
  // for which it needs none.
  void LackMemory(std::uint32_t ticket) {
    lacks_memory_ = member_.work_failed = true;
    why_ = NoMemory();
    round_.hooks.AwaitChange(round_.board, ticket, round_.hooks.Time() + kSleepLeast);
  }

  // While it works only a decision can make another action due.
  [[nodiscard]] bool IsOvertaken(const agreement::DoWork& work) {
    round_.board.ReadDecisions(round_.number, reading_);
    return agreement::Step(program_, member_, reading_.ViewOf(round_.seat), NsOf(round_.hooks.Time())).action !=
           agreement::Action(work);
  }
  agreement::Action NextAction() {
    // Without memory only the board is read, and the hooks are asked nothing.
    const auto ended = [&](std::size_t seat) { return !lacks_memory_ && round_.hooks.HasEnded(round_.board.members()[seat]); };
    round_.board.ReadAgain(round_.number, ended, reading_);
    for (std::size_t seat = 0; seat < reading_.seats.size(); ++seat)
      reading_.seats[seat].gave_up = round_.call.gave_up.contains(round_.board.members()[seat]);
    const bool at_come = member_.line == 0;
    if (at_come && round_.call.patient)
      member_.patient =
          lacks_memory_ || NsOf(round_.hooks.Time()) < member_.until_ns || round_.hooks.MayComeYet(AbsentMembers());
    const bool set_changed = at_come && !lacks_memory_ && round_.hooks.SetHasChanged();
    // The time of a round ends for all when that of the first member to run out of it does.
    if (at_come && reading_.decisions[0].cause == Cause::kAllVoted && reading_.until_ns != 0)
      member_.until_ns = std::min(member_.until_ns, reading_.until_ns);
    const agreement::Next next =
        agreement::Step(program_, member_, reading_.ViewOf(round_.seat, set_changed), NsOf(round_.hooks.Time()));
    member_ = next.member;
    Report();
    return next.action;
  }
  // Decisions become known in the order of the ballots. A reading is of several moments, so it may have one that was made
  // after it read that there was none before: that is for the next reading, which has both.
  void Report() {
    for (const agreement::Line& line : program_) {
      if (line.kind != agreement::Line::Kind::kVote) continue;
      const Ballot ballot = line.ballot;
      const auto b = static_cast<std::size_t>(ballot);
      if (reading_.decisions[b].cause == Cause::kUndecided) return;
      if (std::exchange(reported_[b], true)) continue;
      const Status passed;
      const Status* why = &passed;     // nothing is copied, for which there may be no memory
      if (member_.failed == ballot) {  // also one that all voted for and that cannot have passed, as the agreement says
        NoteFailure(ballot);
        why = &outcome_.status;
      } else if (agreement::IsFailure(reading_.decisions[b].cause)) {
        outcome_.undo = WhyFailed(ballot);
        why = &outcome_.undo;
      }
      round_.hooks.OnDecision(ballot, reading_, *why);
    }
  }

  // Nobody votes before the ballot before is decided, and its decision is in the journal; nor on a ballot that is decided. A
  // member whose state is not true votes no, so that nothing is built on it.
  [[nodiscard]] Status CheckVote(Ballot ballot) const {
    AMEM_CHECK(!reported_[static_cast<std::size_t>(ballot)], ToText(ballot));
    std::optional<Ballot> before;
    for (const agreement::Line& line : program_.first(member_.line))
      if (line.kind == agreement::Line::Kind::kVote) before = line.ballot;
    if (before) AMEM_CHECK(reported_[static_cast<std::size_t>(*before)], ToText(*before));
    return {};
  }

  void Perform(const agreement::Action& action, std::uint32_t ticket) {
    if (const auto* work = std::get_if<agreement::DoWork>(&action)) {
      const Status done = OrNoMemory(
          [&] { return round_.hooks.Do(work->work, DeadlineAt(member_.until_ns), [&] { return IsOvertaken(*work); }); });
      if (!done.ok()) why_ = done;
      member_ = agreement::Finished(member_, done.ok());
    } else if (const auto* vote = std::get_if<agreement::CastVote>(&action)) {
      const Status sound = CheckVote(vote->ballot);
      if (!sound.ok()) why_ = sound;
      const bool had_memory = HadMemory([&] { round_.hooks.OnVote(vote->ballot, why_); });
      if (!had_memory) why_ = NoMemory();
      if (vote->ballot == Ballot::kCome) round_.board.SetUntil(round_.seat, round_.call.patient ? 0 : member_.until_ns);
      round_.board.CastVote(round_.seat, round_.number, vote->ballot, vote->yes && sound.ok() && had_memory, why_,
                            vote->ballot == Ballot::kCome && round_.call.keeps);
      why_ = {};
      sleep_ = kSleepLeast;
      if (vote->ballot != Ballot::kCome) waiting_since_ = round_.hooks.Time();
    } else if (const auto* decide = std::get_if<agreement::Decide>(&action)) {
      Status seen;
      if (!HadMemory([&] { seen = messages_.Explain(*decide, reading_, waiting_since_); })) seen = NoMemory();
      round_.board.Decide(round_.seat, round_.number, decide->ballot, decide->cause, decide->culprit, seen);
    } else if (const auto* wait = std::get_if<agreement::Wait>(&action)) {
      round_.hooks.OnWait(wait->ballot, reading_);
      const Deadline longest = round_.hooks.Time() + sleep_;
      sleep_ = std::min(2 * sleep_, kSleepMost);
      round_.hooks.AwaitChange(round_.board, ticket, wait->until_ns ? std::min(longest, DeadlineAt(*wait->until_ns)) : longest);
    }
  }

  // False: there was no memory for it.
  template <class Work>
  static bool HadMemory(const Work& work) {
    return OrNoMemory([&] { return work(), Status(); }).ok();
  }
  [[nodiscard]] std::vector<SessionId> AbsentMembers() {
    const BoardReading now = round_.board.Read(round_.number, [](std::size_t) { return false; });
    std::vector<SessionId> absent;
    for (const std::size_t seat : agreement::Absent(now.ViewOf(round_.seat), Ballot::kCome))
      if (seat != round_.seat) absent.push_back(round_.board.members()[seat]);
    return absent;
  }
  // Never ok, also where there is no memory to word it.
  [[nodiscard]] Status WhyFailed(Ballot ballot) const {
    Status why = NoMemory();
    static_cast<void>(HadMemory([&] { why = messages_.WhyFailed(ballot, reading_); }));
    return why;
  }
  void NoteFailure(Ballot ballot) {
    outcome_.failed = ballot;
    outcome_.status = WhyFailed(ballot);
    outcome_.culprit = outcome_.status.reported_by();
    if (reading_.decisions[static_cast<std::size_t>(ballot)].cause == Cause::kSuperseded) return;  // nothing says who was
    static_cast<void>(HadMemory([&] {
      for (const std::size_t seat : agreement::Absent(reading_.ViewOf(round_.seat), ballot))
        outcome_.absent.push_back(round_.board.members()[seat]);
    }));
  }
  RoundOutcome Outcome(const agreement::End& end) {
    outcome_.ending = end.ending;
    outcome_.again = end.again;
    if (member_.failed && !outcome_.failed) NoteFailure(*member_.failed);
    for (std::size_t seat = 0; end.again && seat < reading_.seats.size(); ++seat)
      if (seat != round_.seat && reading_.seats[seat].votes[0] == agreement::Vote::kYes)
        round_.call.gave_up.insert(round_.board.members()[seat]);
    return std::move(outcome_);
  }

  const Round round_;
  const RoundMessages messages_{round_};
  const agreement::Program program_;
  agreement::Member member_;
  BoardReading reading_;
  std::array<bool, agreement::kBallots> reported_{};
  Status why_;                 // this member's work failed
  bool lacks_memory_ = false;  // the last reading or step ended for want of it
  std::chrono::milliseconds sleep_ = kSleepLeast;
  Deadline waiting_since_ = round_.call.began;
  RoundOutcome outcome_;
};

}  // namespace

std::string RoundHooks::HowItEnded(SessionId /*session*/) { return "has ended"; }

std::string RoundHooks::PlaceOf(CycleKind kind, Ballot ballot) {
  return fmt::format("({}, ballot \"{}\")", ToText(kind), ToText(ballot));
}

Result<RoundOutcome> TakePart(Board& board, std::size_t seat, CallOnBoard& call, RoundHooks& hooks) {
  if (hooks.HasEnded(board.members()[seat]))
    return Status{Code::kRefused, "this session does not hold its lock, so the others take it for ended"};
  AMEM_ASSIGN(const RoundNumber round, board.NextRound());
  try {
    return Participant({board, seat, round, call, hooks}).Run();
  } catch (const std::bad_alloc&) {  // it could not even come, and the others are not to wait for it
    board.CastVote(seat, round, Ballot::kCome, false, NoMemory());
    board.Decide(seat, round, Ballot::kCome, Cause::kVotedNo, seat);
    return NoMemory();
  }
}

}  // namespace amem::board
