// A board: the ballots of one set of sessions, for one kind of call and one scope, in memory that all of them map.
// statemachine/agreement says what a member does; this class reads and writes the board.
//
//   * Header: magic, version, number of members, random id, scope and sessions. By its maker, before it is handed out.
//   * Cells, one a ballot: the decision, with its round, its cause, who decided and the culprit. By any member, by
//     compare-and-swap.
//   * Changes, a counter that rises with each decision, and on which members wait. Written by any member.
//   * Seats, one a member. For each ballot: the vote with its round and time, and a statement: why it is a no, or what the
//     member saw when it decided that the ballot failed. And when the member's own time ends. Written by that member only.
//
// A board belongs to its set, not to a process: when its maker ends, the others still map it. It is made once for a set, used
// for one round after another, and no word of it is ever reset. Each word carries a round and a checksum that depends on the
// board and on the word's place, so a word that was overwritten is told from one not yet written.
//
// Order. A member stores its vote before it reads the others', sequentially consistently: so at least one of the last voters
// sees that all have voted. It decides, and wakes the others. A statement is complete before the vote or decision that it is
// about.
//
// Any thread may read and wait; one thread at a time acts for a seat. Nothing here waits but AwaitChange.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/base/deadline.h"
#include "replay/peers/board/shared_pages.h"
#include "statemachine/agreement/agreement.h"

namespace amem::board {

inline constexpr std::size_t kMembersMost = 1024;
inline constexpr std::size_t kStatementBytes = 992;  // a longer message is cut

using RoundNumber = std::uint32_t;  // from 1

struct BallotDecision {  // as a cell has it
  agreement::Cause cause{};
  std::size_t by = 0;       // the seat that set it
  std::size_t culprit = 0;  // of a failure
  friend bool operator==(const BallotDecision&, const BallotDecision&) = default;
};

// What a member sees of one round at about one moment.
struct BoardReading {
  RoundNumber round = 0;
  std::vector<agreement::Seat> seats;
  std::vector<std::array<std::uint64_t, agreement::kBallots>> voted_at_ns;  // CLOCK_MONOTONIC; 0: not voted, or not known
  // The earliest deadline of the members that have come; 0: none of them has one.
  std::uint64_t until_ns = 0;
  std::vector<bool> keeps;  // of those that have come: all its memory stays in place, so that of the others has to
  std::array<BallotDecision, agreement::kBallots> decisions{};
  // The encoded votes, as last read: a vote whose word is the same at the next reading is not decoded again.
  std::vector<std::array<std::uint64_t, agreement::kBallots>> vote_words;
  [[nodiscard]] agreement::View ViewOf(std::size_t seat, bool set_changed = false) const;
};

class Board {
 public:
  // `members`: sorted. kInvalid: too many, or none. `scope`: a tag; empty: NCCL's memory.
  static Result<Board> Make(const std::string& scope, const std::vector<SessionId>& members);
  // The same in memory of this process alone: for a session that shares memory with nobody, and for members that are threads.
  static Result<Board> MakePrivate(const std::string& scope, const std::vector<SessionId>& members);
  // One that another process made, for the same scope and members. kUnsupported: of another version of AMem. kCorrupt: no
  // board. kInvalid: another set's.
  static Result<Board> Open(int fd, const std::string& scope, const std::vector<SessionId>& members);

  [[nodiscard]] int fd() const { return pages_.fd(); }    // to hand out; of the maker of a shared one only
  [[nodiscard]] std::uint64_t id() const { return id_; }  // random
  [[nodiscard]] const std::vector<SessionId>& members() const { return members_; }
  [[nodiscard]] std::optional<std::size_t> SeatOf(SessionId session) const;

  // The round to come to, for a member that has ended its last one. kCorrupt: the board is damaged; its set needs another one.
  [[nodiscard]] Result<RoundNumber> NextRound() const;
  // `ended`: whether the session of a seat is known to have ended.
  [[nodiscard]] BoardReading Read(RoundNumber round, const std::function<bool(std::size_t)>& ended) const;
  // The same in place of an earlier reading of this board; needs no memory.
  void ReadAgain(RoundNumber round, const std::function<bool(std::size_t)>& ended, BoardReading& reading) const;
  // The decisions alone, in a reading of that round: cheap enough to ask before every driver step.
  void ReadDecisions(RoundNumber round, BoardReading& reading) const;
  // What member `seat` said on that ballot in that round; nothing: it said nothing, or it is damaged.
  [[nodiscard]] std::optional<Status> StatementOf(std::size_t seat, agreement::Ballot ballot, RoundNumber round) const;

  // Before the vote on `come`: when the time of that member ends; 0: it has no deadline.
  void SetUntil(std::size_t seat, std::uint64_t until_ns);
  // `why`: of a no.
  // `keeps`: of a vote on `come`, for all to read beside it.
  void CastVote(std::size_t seat, RoundNumber round, agreement::Ballot ballot, bool yes, const Status& why = {},
                bool keeps = false);
  // Sets the decision if there is none; false: there is, or the cell is damaged. `seen`: what explains a failure that is not a
  // no, for all members.
  bool Decide(std::size_t seat, RoundNumber round, agreement::Ballot ballot, agreement::Cause cause, std::size_t culprit,
              const Status& seen = {});

  // What to give AwaitChange, taken before a reading.
  [[nodiscard]] std::uint32_t Ticket() const { return ChangesWord().load(); }
  // Returns when something has been decided or Nudge was called since the ticket, or at `until`; also earlier.
  void AwaitChange(std::uint32_t ticket, Deadline until) const;
  // Wakes all that wait on this board: called by whoever learns that a member has ended.
  void Nudge();

 private:
  explicit Board(SharedPages pages, std::vector<SessionId> members);
  static Result<Board> MakeIn(Result<SharedPages> pages, const std::string& scope, const std::vector<SessionId>& members);
  [[nodiscard]] bool HeaderIsWhole() const;
  [[nodiscard]] std::atomic<std::uint64_t>& CellOf(agreement::Ballot ballot) const;
  [[nodiscard]] std::atomic<std::uint32_t>& ChangesWord() const;
  [[nodiscard]] struct SeatWords& Seat(std::size_t seat) const;
  void ReadVote(std::size_t seat, agreement::Ballot ballot, std::uint64_t word, BoardReading& reading) const;
  void WriteStatement(std::size_t seat, agreement::Ballot ballot, RoundNumber round, const Status& what);

  SharedPages pages_;
  std::vector<SessionId> members_;
  std::uint64_t id_ = 0;
};

// The encoded words, for tests. `place` is different for each word of a board, and `board` its id.
namespace words {
struct VoteWord {
  RoundNumber round = 0;
  agreement::Vote vote{};
  bool keeps = false;
};
struct CellWord {
  RoundNumber round = 0;
  BallotDecision decision;
};
std::uint64_t Encode(const VoteWord& vote, std::uint64_t board, std::uint64_t place);
std::uint64_t Encode(const CellWord& cell, std::uint64_t board, std::uint64_t place);
std::optional<VoteWord> VoteIn(std::uint64_t word, std::uint64_t board, std::uint64_t place);  // nothing: damaged
std::optional<CellWord> CellIn(std::uint64_t word, std::uint64_t board, std::uint64_t place);
}  // namespace words

}  // namespace amem::board
