// The members of one call, as their pages show them, and the board on which they vote. One thread at a time.
//
//   Find publishes what this session is about to do, finds the set, and gets the set's board. It waits for another session's
//   service thread only at the first contact with it, and for a board's first descriptor.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/deadline.h"
#include "replay/peers/board/board.h"
#include "replay/peers/board/session_page.h"
#include "replay/peers/peers.h"

namespace amem {

class Assembly {
 public:
  // Destroy it as the last thing that a call does: from then on this session's page says that it is in no call.
  virtual ~Assembly() = default;

  // The set as it is now, and its board. A session that has ended before this call saw it alive is no member. kRefused: a
  // member has another group. kInvalid: one waits in a call of the other kind. kPeerLost: a member's call failed because a
  // session ended that is no longer a member, so it will not come unless it calls again. kTimeout: a member did not answer when
  // asked for its page or for the board. Other codes: that session has no page, or the page cannot be read. The message names
  // it, and so does Status::reported_by.
  virtual Status Find(Deadline until) = 0;

  // ---- after Find has succeeded
  [[nodiscard]] virtual board::Board& board() = 0;
  [[nodiscard]] virtual std::size_t seat() const = 0;
  [[nodiscard]] virtual std::vector<PeerIdentity> Members() const = 0;  // sorted by session; with this one
  // All have come. From now on this session's page says that it waits for nobody, so that a faster member's next call of the
  // other kind does not clash with this one.
  virtual void Begun() = 0;
  // What RoundHooks asks. False if the set differs because a member ended: that makes the call fail, so that its caller learns
  // of it.
  [[nodiscard]] virtual bool SetHasChanged() = 0;
  [[nodiscard]] virtual bool HasEnded(SessionId session) = 0;
  [[nodiscard]] virtual std::string HowItEnded(SessionId session) = 0;  // "died", "has closed"
  // By what an end was seen, for journals: "lock", "pidfd"; empty: it is not known.
  [[nodiscard]] virtual std::string EndSeenBy(SessionId /*session*/) { return {}; }
  // As its page says now, or said last.
  [[nodiscard]] virtual PeerIdentity IdentityOf(SessionId session) = 0;
  [[nodiscard]] virtual board::ScopeFacts FactsOf(SessionId session) = 0;
  // The first of these with which this session shares memory now, directly or through others. A link of that chain counts if
  // the page of its nearer end shows it and that session is in this call, or if the page of its farther end shows it, which is
  // as new as that session's own last call. A link that only an older page shows does not count: the sessions behind it are
  // members only until the session of that page has come.
  [[nodiscard]] virtual std::optional<SessionId> SharesNow(const std::vector<SessionId>& sessions) {
    return sessions.empty() ? std::nullopt : std::optional(sessions.front());
  }
  // Where the scope is now that the call has ended, for this session's page: the delegate, which is asked as well, cannot say
  // that while a driver call holds the ledger.
  virtual void EndedAs(CycleProgress /*now*/) {}
  // The call failed by that session's end before all had come: those that come later, and find only the living, fail too.
  virtual void FailedBy(SessionId lost) = 0;
  // What is seen now of that session's process, which has been waited for for so long.
  [[nodiscard]] virtual ProcessSeen See(SessionId session, std::chrono::milliseconds waited) = 0;
  // Why that session cannot come: a driver call of its program holds its ledger and hangs. Empty: it does not say so. Waits for
  // an answer for milliseconds.
  [[nodiscard]] virtual std::string Hindrance(SessionId /*session*/) { return {}; }
  // Says to these members that they are waited for, so that the journal of one that does not come has it. Once to each; waits
  // for none of them.
  virtual void NotifyAbsent(const std::vector<SessionId>& absent) = 0;
  // Says to people for whom a resume waits beyond its time.
  virtual void Say(const std::string& waiting) = 0;
  // The clock of the call's deadlines, and how to wait on the board: the system's, but in tests that simulate time.
  [[nodiscard]] virtual Deadline Time() { return Now(); }
  virtual void AwaitChange(std::uint32_t ticket, Deadline until) { board().AwaitChange(ticket, until); }
  // The board is damaged, or was of no use: Find has another one.
  virtual void Discard() = 0;
};

// Of a session that shares memory of a tag with nobody: it is the only member, and waits for nobody.
class LoneAssembly final : public Assembly {
 public:
  // `board`: of this session alone, in memory of its own; it is used for call after call.
  LoneAssembly(PeerIdentity self, std::shared_ptr<board::Board> board) : self_(std::move(self)), board_(std::move(board)) {}

  Status Find(Deadline) override { return {}; }
  [[nodiscard]] board::Board& board() override { return *board_; }
  [[nodiscard]] std::size_t seat() const override { return 0; }
  [[nodiscard]] std::vector<PeerIdentity> Members() const override { return {self_}; }
  void Begun() override {}
  [[nodiscard]] bool SetHasChanged() override { return false; }
  [[nodiscard]] bool HasEnded(SessionId) override { return false; }
  [[nodiscard]] std::string HowItEnded(SessionId) override { return {}; }
  [[nodiscard]] PeerIdentity IdentityOf(SessionId) override { return self_; }
  [[nodiscard]] board::ScopeFacts FactsOf(SessionId) override { return {}; }
  void FailedBy(SessionId) override {}
  [[nodiscard]] ProcessSeen See(SessionId, std::chrono::milliseconds) override { return {}; }
  void NotifyAbsent(const std::vector<SessionId>&) override {}
  void Say(const std::string&) override {}
  void Discard() override {}

 private:
  const PeerIdentity self_;
  const std::shared_ptr<board::Board> board_;
};

}  // namespace amem
