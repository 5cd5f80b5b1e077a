// The words of a board: its ballots, what a member votes, and why a ballot was decided. Journals have them, too
// (BallotShown): a new one goes to the end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "statemachine/types.h"

namespace amem::agreement {

enum class Ballot : std::uint8_t { kCome = 0, kIdle, kSaved, kGone, kMade, kJoined, kOpen };
AMEM_NAMES(Ballot, kOpen, "ballot", "come", "idle", "saved", "gone", "made", "joined", "open");
inline constexpr std::size_t kBallots = 7;

enum class Vote : std::uint8_t { kNone = 0, kYes, kNo, kDamaged };  // kDamaged: what is written there is no vote
AMEM_NAMES(Vote, kDamaged, "vote", "none", "yes", "no", "damaged");

// What a ballot was decided for. kAllVoted passed; all later ones failed.
enum class Cause : std::uint8_t {
  kUndecided = 0,
  kAllVoted,
  kVotedNo,     // the culprit's work failed, or it cannot take part
  kEnded,       // the culprit ended before it had voted, or of `come`: before all had come
  kLate,        // the culprit had not voted at the deadline of the member that decided
  kSetChanged,  // the member that decided shares memory with others than those of this board
  kDamaged,     // something else has written over the culprit's votes, or over decisions
  kSuperseded,  // the round went on without this member, which did not see why
};
AMEM_NAMES(Cause, kSuperseded, "cause", "undecided", "all voted", "voted no", "ended", "late", "set changed", "damaged",
           "superseded");
constexpr bool IsFailure(Cause cause) { return cause > Cause::kAllVoted; }

}  // namespace amem::agreement
