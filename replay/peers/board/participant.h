// A member's part in one round: asks the agreement's Step what to do, does it on the board, has the work done by the engine,
// and waits. A member begins a round by coming to a board; that needs no service thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "journal/base/deadline.h"
#include "replay/peers/board/board.h"

namespace amem::board {

// What the engine does for a round. All are called by the thread that is in TakePart, which holds no lock.
class RoundHooks {
 public:
  virtual ~RoundHooks() = default;
  // The driver steps of that work that are not done yet. Before each of them it asks `is_overtaken`: true means that the others
  // go on without it, so that the rest must not be done (and the result does not matter).
  // `until`: when the time of the round, or of its undo, ends.
  virtual Status Do(agreement::Work work, Deadline until, const std::function<bool()>& is_overtaken) = 0;
  [[nodiscard]] virtual bool HasEnded(SessionId session) = 0;       // known for certain: PeerPage::Life
  [[nodiscard]] virtual std::string HowItEnded(SessionId session);  // for messages: "died"
  [[nodiscard]] virtual bool SetHasChanged() = 0;                   // asked while it waits for `come`
  [[nodiscard]] virtual std::string NameOf(SessionId session) = 0;  // for messages: "rank 2 (pid 4711 on host a)"
  // Of a patient member, when its own time is up: whether those that have not come may come yet. False: it waits no longer.
  [[nodiscard]] virtual bool MayComeYet(const std::vector<SessionId>& /*absent*/) { return true; }
  // What is seen of a member that has not voted after that time: "is stopped (SIGSTOP?)"; empty: nothing.
  virtual std::string SeenOf(SessionId session, std::chrono::milliseconds waited) = 0;
  // Before a vote is cast, so that a journal has it before anybody acts on it. `mine`: ok, or why it is a no.
  virtual void OnVote(agreement::Ballot ballot, const Status& mine) = 0;
  // Before each sleep: for whom it waits, for those who watch. At most some hundred times in the first second, then four times.
  virtual void OnWait(agreement::Ballot ballot, const BoardReading& reading) = 0;
  // A ballot is decided: what to journal. Called once for each ballot whose decision this member reads, in their order, even
  // when memory has run out; so the engine must note what it has to know before it allocates. `why`: of a failure, as
  // RoundOutcome::status.
  virtual void OnDecision(agreement::Ballot ballot, const BoardReading& reading, const Status& why) = 0;
  // The clock of all deadlines of the round, and how to wait on the board: the system's, but in tests that simulate time.
  [[nodiscard]] virtual Deadline Time() { return Now(); }
  virtual void AwaitChange(const Board& board, std::uint32_t ticket, Deadline until) { board.AwaitChange(ticket, until); }
  // Where in a call that ballot is, for messages.
  [[nodiscard]] virtual std::string PlaceOf(CycleKind kind, agreement::Ballot ballot);
};

// A pause or resume of this session, over all its rounds: the caller passes the same object to each TakePart.
struct CallOnBoard {
  CycleKind kind{};
  Deadline until{};                  // of the call
  std::chrono::nanoseconds again{};  // what must be left of it to come again after somebody else's deadline
  std::chrono::nanoseconds round{};  // what a round has at least from `come` on, however late its last member came
  std::chrono::nanoseconds undo{};   // what an undo has
  bool patient = false;              // `come` has no deadline
  bool keeps = false;                // this member's memory stays in place
  Deadline began = Now();
  std::set<SessionId> gave_up{};  // came to an earlier round; kept by TakePart
};

struct RoundOutcome {
  agreement::Ending ending{};
  bool again = false;                         // nothing has happened; come again, on the board of the set as it is now
  std::optional<agreement::Ballot> failed{};  // the first ballot that failed; none: the call succeeded
  Status undo{};                              // why the undo of a pause failed, so that it ends paused; ok: it did not
  Status status{};                            // why; the same for all members that could read it
  SessionId culprit{};                        // of the failure; zero: nobody
  std::vector<SessionId> absent{};            // members that had not voted when it was decided, as this member saw it
};

// Takes part in a whole round. Waits at most until the call's times are up, except for a patient `come`. If the round cannot
// begin, nothing has happened, but that a lack of memory is a vote against it: kRefused, if this session itself counts as ended
// (LifeHolder), so that it must not take part; kCorrupt, if the board cannot be used, so that its set needs another one.
Result<RoundOutcome> TakePart(Board& board, std::size_t seat, CallOnBoard& call, RoundHooks& hooks);

}  // namespace amem::board
