// The agreement: how the members of one host carry out a pause or a resume together, without a leader. A pure function says
// what a member does next; whoever runs it does that, and asks again. It knows no page, clock, thread or GPU.
//
// What the members share is a board (replay/peers/board), for one set of sessions and one scope. It has a row of ballots:
//
//   come   all members are in the same call; nobody has done anything yet
//   idle   all devices are idle and no library call is under way, so nobody imports, launches or sends anything more
//   saved  host memory for all contents is secured, and the copies are queued; nobody has released anything yet
//   gone   all own memory is released                                                               a pause ends here
//   made   all own memory exists again, so it can be imported
//   joined all imports are made again, all contents are back, and multicast objects have all devices, so they can be bound to
//   open   all memory is bound and verified                                                         a resume ends here
//
// A round of a pause goes through come, idle, saved, gone. If come, idle or saved fails, all run on at once. If gone fails, the
// same members go through made, joined and open on the same board; if that fails as well, all end paused, with their contents
// kept. A round of a resume goes through come, made, joined, open; if one fails, all end paused, with their contents kept.
// There is no other end.
//
// Two kinds of work have no ballot behind them: what a member gives up when a ballot before the release failed, and its last
// release. Whether they succeed changes nobody's outcome: a member that could not release everything ends paused too, with that
// memory in place and its contents saved, and its next resume makes only what is missing.
//
// Who writes what, in which order:
//   * A ballot has one vote of each member, written by that member only, once a round, when its work before the ballot is done
//     (yes) or has failed (no).
//   * A ballot has one decision a round, set by a compare-and-swap, by any member, and final. "Passed" needs a yes of each
//     member. "Failed" may be set by whoever sees a no, the end of a member that has not voted, or its own deadline. `come`
//     also fails by the end of a member that has come: who comes later finds a set, and so a board, without it. In the undo
//     of a pause a member that has ended is passed over, because its end is known and has nothing to undo.
//   * Votes and decisions carry the number of their round. A member comes to the round after the last one whose `come` is
//     decided, and only after it has ended its own last round; so only `come` can be decided for a later round while a member
//     is still in an earlier one, and it can pass only with that member. To that member it has failed (kSuperseded).
//   * A member leaves a round only by a decision. If its set changes while it waits for `come`, it makes that ballot fail
//     (kSetChanged), and all come again, each to the board of the set that it sees then. Likewise if its own session ends while
//     it waits for `come` (kEnded), which has no other deadline for a patient member.
//   * A vote or decision that has been written over makes its ballot fail. If that was a decision, members may end differently,
//     since nothing is agreed on any more; but none of them loses contents, or runs without its own memory.
//
// What a caller sees of the board need not be of one moment, and may be old when it acts: votes, ends and decisions of a round
// only ever appear. A decision that was not seen yet makes a compare-and-swap fail, and a driver step run once more than
// needed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "statemachine/agreement/ballot.h"
#include "statemachine/event_cycle.h"
#include "statemachine/types.h"

namespace amem::agreement {

// What a member does with the driver between two ballots. Each can be repeated, and does only what is not done yet.
enum class Work : std::uint8_t {
  kQuiesce = 0,  // close the gate, wait until the devices are idle
  kSave,         // secure host memory and queue the copies of contents to it
  kRelease,      // drop imports, then release own memory
  kMake,         // make own memory at its addresses, begin to copy contents back
  kImport,       // import from the other members; in an undo, drop each import first, because its owner may have made it anew
  kRestore,      // bind to multicast objects, verify (contents are awaited in kImport)
};
AMEM_NAMES(Work, kRestore, "work", "quiesce", "save", "release", "make", "import", "restore");

// ---- programs: what a member does in a call, line by line

enum class Ending : std::uint8_t { kRunning = 0, kPaused };

struct Line {
  enum class Kind : std::uint8_t { kWork = 0, kVote, kEnd };
  Kind kind{};
  Work work{};
  Ballot ballot{};
  std::uint8_t if_failed = 0;  // of a vote: the line after a decision that the ballot failed
  bool without_ended = false;  // of a vote: it passes without members that have ended
  Ending ending{};
};
using Program = std::span<const Line>;  // whoever uses one outlives no program: they are constants
Program ProgramOf(CycleKind kind);

// ---- a member

// What a member knows of itself; it remembers nothing else from one step to the next.
struct Member {
  bool patient = false;            // `come` has no deadline
  std::uint64_t until_ns = 0;      // when its waits end, on the clock of Step's `now_ns`
  std::uint64_t again_ns = 0;      // what must be left of that time for it to come again after somebody else's deadline
  std::uint64_t round_ns = 0;      // what a round has at least from `come` on, however late its last member came
  std::uint64_t undo_ns = 0;       // what it has from its first failure on
  std::uint8_t line = 0;           // of its program
  bool work_failed = false;        // since the last ballot
  bool again = false;              // `come` failed, nothing has happened, and there is time left
  std::optional<Ballot> failed{};  // the first ballot that failed, whose decision is the answer to the caller
  friend bool operator==(const Member&, const Member&) = default;
};

// ---- what the board shows

struct Seat {
  bool ended = false;    // its session's process, or the session, is known to have ended; "I cannot see it" is not that
  bool gave_up = false;  // it came to an earlier round of this call, so when another one has not come, it is not to blame
  std::array<Vote, kBallots> votes{};  // in this round
};
struct View {
  std::span<const Seat> seats;  // of all members
  std::size_t self = 0;         // whose view it is
  std::array<Cause, kBallots> decisions{};
  bool set_changed = false;  // this member now shares memory with others than these; asked only while it waits for `come`
};

// ---- what to do next

struct DoWork {  // then Finished. Ask again before each driver step: another answer means that the rest is not to be done
  Work work{};
  friend bool operator==(const DoWork&, const DoWork&) = default;
};
struct CastVote {  // into the own seat
  Ballot ballot{};
  bool yes = false;
  friend bool operator==(const CastVote&, const CastVote&) = default;
};
struct Decide {  // by compare-and-swap from undecided; whether it succeeded is seen in the next view
  Ballot ballot{};
  Cause cause{};
  std::size_t culprit = 0;  // of a failure: the seat that caused it, the lowest of them
  friend bool operator==(const Decide&, const Decide&) = default;
};
struct Wait {  // until something changes
  Ballot ballot{};
  std::optional<std::uint64_t> until_ns;  // at most; none: this member has no deadline here
  friend bool operator==(const Wait&, const Wait&) = default;
};
struct End {
  Ending ending{};
  bool again = false;  // nothing has happened: come again to the next round, on the board of the set as it is then
  friend bool operator==(const End&, const End&) = default;
};
using Action = std::variant<DoWork, CastVote, Decide, Wait, End>;

struct Next {
  Member member;  // in place of the one given to Step
  Action action;
};

Next Step(Program program, Member member, const View& view, std::uint64_t now_ns);
// The work that Step asked for is done, or has failed, which its vote on the next ballot says.
Member Finished(Member member, bool succeeded);

// The seats without a vote on that ballot, for messages; without those that gave up, if there are others.
std::vector<std::size_t> Absent(const View& view, Ballot ballot);

}  // namespace amem::agreement
