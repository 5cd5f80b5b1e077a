"""Faults of the agreement that are planted on purpose, each as a change of the code that ships. Worlds of processes must find each."""
from typing import NamedTuple

AGREEMENT = "statemachine/agreement/agreement.cpp"
BOARD, PARTICIPANT = "replay/peers/board/board.cpp", "replay/peers/board/participant.cpp"
PAGE, MEMBERS = "replay/peers/board/session_page.cpp", "replay/peers/unix/call_members.cpp"
CALL, SHARING = "replay/cycle/board_call.cpp", "replay/session/peer_answers.cpp"
TARGETS = {AGREEMENT: "amem_statemachine", BOARD: "amem_peers", PARTICIPANT: "amem_peers", PAGE: "amem_peers",
           MEMBERS: "amem_unix_peers", CALL: "amem_cycle", SHARING: "amem_session"}


FAIL, LATE = "faults", "absences,stops"  # what the worlds have that are to find a fault (amem-world --with)


class Fault(NamedTuple):
    name: str
    changes: tuple  # (file, lines that occur once in it, what takes their place)
    worlds: str = FAIL


def fault(name, *change, worlds=FAIL):
    """Of one change: file, before, after; or of several such triples."""
    return Fault(name, (change,) if isinstance(change[0], str) else change, worlds)


# Between two stores, or its look at the board and its decision, a member may be stopped for any time. The rules hold nevertheless.
SLOW = "if (cause == Cause::kLate) ::usleep(300'000);\n  "
NOT_THE_FIRST = "if (!CellOf(ballot).compare_exchange_strong(before, after)) return false;"

FAULTS = [
    fault("a decision can change", BOARD, NOT_THE_FIRST, SLOW + "static_cast<void>(before);\n  CellOf(ballot).store(after);",
          worlds=LATE),
    fault("a member follows its own decision, not the first",
          (BOARD, NOT_THE_FIRST, SLOW + NOT_THE_FIRST),
          (PARTICIPANT, "round_.board.Decide(round_.seat, round_.number, decide->ballot, decide->cause, decide->culprit, seen);",
           "if (!round_.board.Decide(round_.seat, round_.number, decide->ballot, decide->cause, decide->culprit, seen) &&\n"
           "          decide->cause == Cause::kLate && round_.call.kind == CycleKind::kPause && decide->ballot < Ballot::kGone) {\n"
           "        member_.failed = decide->ballot;\n"
           "        member_.line = 15;  // the end of those that have released nothing\n"
           "      }"),
          worlds=LATE),
    fault("memory is released before all have saved", AGREEMENT, "VoteLine(Ballot::kSaved, 15),\n    WorkLine(Work::kRelease),",
          "WorkLine(Work::kRelease),\n    VoteLine(Ballot::kSaved, 15),"),
    fault("a vote before memory is made", AGREEMENT, "WorkLine(Work::kMake),      VoteLine(Ballot::kMade, 8),",
          "VoteLine(Ballot::kMade, 8), WorkLine(Work::kMake),"),
    fault("a vote before contents are back", AGREEMENT, "WorkLine(Work::kRestore),   VoteLine(Ballot::kOpen, 8),",
          "VoteLine(Ballot::kOpen, 8), WorkLine(Work::kRestore),"),
    fault("a release that failed is not undone", AGREEMENT, "VoteLine(Ballot::kGone, 8),", "VoteLine(Ballot::kGone, 15),"),
    fault("a member runs after an undo that failed", AGREEMENT, "UndoLine(Ballot::kMade, 16),", "UndoLine(Ballot::kMade, 14),"),
    fault("a member runs after a resume that failed", AGREEMENT, "VoteLine(Ballot::kMade, 8),", "VoteLine(Ballot::kMade, 7),"),
    fault("a death is not counted", AGREEMENT,
          "  if (count.ended) return Decide{vote.ballot, Cause::kEnded, *count.ended};\n  if (!count.absent)",
          "  if (count.ended) return Wait{vote.ballot, {}};\n  if (!count.absent)"),
    fault("who is stopped is taken for dead", CALL, "bool HasEnded(SessionId session) override { return assembly_.HasEnded(session); }",
          "bool HasEnded(SessionId session) override {\n"
          "    return assembly_.HasEnded(session) || assembly_.See(session, std::chrono::milliseconds(0)).state == \"stopped\";\n"
          "  }",
          worlds=LATE),
    fault("who is late is taken for a yes", AGREEMENT, "return Decide{vote.ballot, Cause::kLate, *count.absent};",
          "return Decide{vote.ballot, Cause::kAllVoted, view.self};", worlds=LATE),
    fault("a failure is taken for a yes", AGREEMENT, "return CastVote{vote.ballot, !member.work_failed};", "return CastVote{vote.ballot, true};"),
    fault("votes of earlier rounds count", BOARD, ": of_this_round ? vote->vote : Vote::kNone;", ": vote->vote;"),
    fault("a member comes to a round that is over", BOARD, "return cell->round + 1;", "return cell->round;"),
    fault("copies are dropped too early", CALL, "if (call_.kind == CycleKind::kPause && !saved) part_.ForgetSave(undisturbed);",
          "if (call_.kind == CycleKind::kPause) part_.ForgetSave(undisturbed && !saved);"),
    fault("a page is trusted without its version",
          (PAGE, "const FactCopy& copy = page.copies[published % 2];", "const FactCopy& copy = page.copies[(published + 1) % 2];"),
          (PAGE, "if (sum != SumOfFacts(words, published)) break;", "if (sum == 0) break;")),
    fault("a set that changes is not seen", CALL, "bool SetHasChanged() override { return assembly_.SetHasChanged(); }",
          "bool SetHasChanged() override { return false; }"),
    fault("a page names no neighbours", MEMBERS, "own_.neighbours = std::move(neighbours);", "neighbours.clear();"),
    fault("an owner that pauses is imported from", SHARING, "  if (lifecycle == Lifecycle::kRunning) return {};\n  const auto& cycle",
          "  if (lifecycle == Lifecycle::kRunning || lifecycle == Lifecycle::kPausing) return {};\n  const auto& cycle"),
]
