#include "statemachine/agreement/agreement.h"

#include <algorithm>

namespace amem::agreement {
namespace {

constexpr Line WorkLine(Work work) { return {.kind = Line::Kind::kWork, .work = work}; }
constexpr Line VoteLine(Ballot ballot, std::uint8_t if_failed) {
  return {.kind = Line::Kind::kVote, .ballot = ballot, .if_failed = if_failed};
}
constexpr Line UndoLine(Ballot ballot, std::uint8_t if_failed) {
  return {.kind = Line::Kind::kVote, .ballot = ballot, .if_failed = if_failed, .without_ended = true};
}
constexpr Line EndLine(Ending ending) { return {.kind = Line::Kind::kEnd, .ending = ending}; }

// Contents may still be on their way when a peer imports the memory: nobody runs before `open`, whose votes wait for them.
constexpr std::array kPauseLines{
    VoteLine(Ballot::kCome, 15),  // 0
    WorkLine(Work::kQuiesce),    VoteLine(Ballot::kIdle, 15), WorkLine(Work::kSave),         VoteLine(Ballot::kSaved, 15),
    WorkLine(Work::kRelease),    VoteLine(Ballot::kGone, 8),  EndLine(Ending::kPaused),
    WorkLine(Work::kMake),  // 8: the undo
    UndoLine(Ballot::kMade, 16), WorkLine(Work::kImport),     UndoLine(Ballot::kJoined, 16), WorkLine(Work::kRestore),
    UndoLine(Ballot::kOpen, 16), EndLine(Ending::kRunning),
    EndLine(Ending::kRunning),  // 15: nothing has been released
    WorkLine(Work::kRelease),   // 16: the undo has failed
    EndLine(Ending::kPaused),
};
constexpr std::array kResumeLines{
    VoteLine(Ballot::kCome, 9),  // 0
    WorkLine(Work::kMake),      VoteLine(Ballot::kMade, 8), WorkLine(Work::kImport),   VoteLine(Ballot::kJoined, 8),
    WorkLine(Work::kRestore),   VoteLine(Ballot::kOpen, 8), EndLine(Ending::kRunning),
    WorkLine(Work::kRelease),  // 8
    EndLine(Ending::kPaused),  // 9: nothing has been made
};

// The ballot that ends the present part of the program; the line of an end if no ballot is left.
std::size_t EndOfPart(Program program, std::size_t line) {
  while (program[line].kind == Line::Kind::kWork) ++line;
  return line;
}

constexpr bool MayComeAgain(Cause cause) {
  return cause == Cause::kLate || cause == Cause::kSetChanged || cause == Cause::kSuperseded;
}

void FollowFailure(Member& member, const Line& vote, Cause cause, std::uint64_t now_ns) {
  if (vote.ballot == Ballot::kCome)
    member.again = MayComeAgain(cause) && (member.patient || now_ns + member.again_ns < member.until_ns);
  if (!member.failed) {
    member.failed = vote.ballot;
    member.until_ns = now_ns + member.undo_ns;
  }
  member.line = vote.if_failed;
  member.work_failed = false;
}

struct Count {
  std::optional<std::size_t> no, damaged, ended,
      absent;  // the first of each; of the absent one that did not give up, if there is
};

Count CountVotes(const View& view, const Line& vote) {
  Count count;
  for (std::size_t i = view.seats.size(); i-- > 0;) {
    const Seat& seat = view.seats[i];
    switch (seat.votes[static_cast<std::size_t>(vote.ballot)]) {
      case Vote::kYes:
        // Those that have not come yet find a set without it, and so another board: this one would be waited on for ever.
        if (seat.ended && vote.ballot == Ballot::kCome) count.ended = i;
        break;
      case Vote::kNo:
        count.no = i;
        break;
      case Vote::kDamaged:
        count.damaged = i;
        break;
      case Vote::kNone:
        if (!seat.ended && (!seat.gave_up || !count.absent || view.seats[*count.absent].gave_up)) count.absent = i;
        if (seat.ended && !vote.without_ended) count.ended = i;
        break;
    }
  }
  return count;
}

// At an undecided ballot. A no comes first, because it says what went wrong.
Action AtBallot(const Member& member, const Line& vote, const View& view, std::uint64_t now_ns) {
  const bool comes = vote.ballot == Ballot::kCome;
  if (comes && view.seats[view.self].ended) return Decide{vote.ballot, Cause::kEnded, view.self};
  if (comes && view.set_changed) return Decide{vote.ballot, Cause::kSetChanged, view.self};
  if (view.seats[view.self].votes[static_cast<std::size_t>(vote.ballot)] == Vote::kNone)
    return CastVote{vote.ballot, !member.work_failed};
  const Count count = CountVotes(view, vote);
  if (count.no) return Decide{vote.ballot, Cause::kVotedNo, *count.no};
  if (count.damaged) return Decide{vote.ballot, Cause::kDamaged, *count.damaged};
  if (count.ended) return Decide{vote.ballot, Cause::kEnded, *count.ended};
  if (!count.absent) return Decide{vote.ballot, Cause::kAllVoted, view.self};
  if (comes && member.patient) return Wait{vote.ballot, {}};
  if (now_ns >= member.until_ns) return Decide{vote.ballot, Cause::kLate, *count.absent};
  return Wait{vote.ballot, member.until_ns};
}

}  // namespace

Program ProgramOf(CycleKind kind) { return kind == CycleKind::kPause ? Program(kPauseLines) : Program(kResumeLines); }

Next Step(Program program, Member member, const View& view, std::uint64_t now_ns) {
  while (true) {
    const Line& line = program[member.line];
    if (line.kind == Line::Kind::kEnd) return {member, End{line.ending, member.again}};
    const std::size_t end = EndOfPart(program, member.line);
    const Line& vote = program[end];
    if (vote.kind == Line::Kind::kVote) {
      Cause cause = view.decisions[static_cast<std::size_t>(vote.ballot)];
      // It cannot have passed before this member voted.
      if (cause == Cause::kAllVoted && member.line != end) cause = Cause::kDamaged;
      if (IsFailure(cause)) {
        FollowFailure(member, vote, cause, now_ns);
        continue;
      }
      if (cause == Cause::kAllVoted) {
        if (vote.ballot == Ballot::kCome) member.until_ns = std::max(member.until_ns, now_ns + member.round_ns);
        member.line = static_cast<std::uint8_t>(end + 1);
        continue;
      }
      if (member.work_failed && member.line != end) {
        member.line = static_cast<std::uint8_t>(end);
        continue;
      }
    }
    if (line.kind == Line::Kind::kWork) return {member, DoWork{line.work}};
    return {member, AtBallot(member, vote, view, now_ns)};
  }
}

Member Finished(Member member, bool succeeded) {
  ++member.line;
  member.work_failed = member.work_failed || !succeeded;
  return member;
}

std::vector<std::size_t> Absent(const View& view, Ballot ballot) {
  std::vector<std::size_t> absent, never_came;
  for (std::size_t i = 0; i < view.seats.size(); ++i) {
    if (view.seats[i].votes[static_cast<std::size_t>(ballot)] != Vote::kNone) continue;
    absent.push_back(i);
    if (!view.seats[i].gave_up) never_came.push_back(i);
  }
  return never_came.empty() ? absent : never_came;
}

}  // namespace amem::agreement
