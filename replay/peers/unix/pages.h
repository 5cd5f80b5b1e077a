// The shared pages of this session and of those that it knows: they travel beside hellos and welcomes, as descriptors. And the
// boards of the sets that it belongs to, which the member with the lowest id makes and hands out.
//
// A session has a page from its begin. If there is none (no descriptor was left, or its kernel has no sealed memory, without
// which nothing can be shared either), it is made by the next call; until then a call with that session fails and says why.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/no_copies.h"
#include "journal/base/unique_fd.h"
#include "replay/peers/board/board.h"
#include "replay/peers/board/life_lock.h"
#include "replay/peers/board/session_page.h"
#include "replay/peers/peers.h"

namespace amem {

// Any thread may call any method, but for Hold and LetGo.
class SharedPageTable : NoCopies {
 public:
  // Makes this session's page, which says nothing of the session but its id until Publish.
  explicit SharedPageTable(SessionId self);

  // ---- this session's page
  // On the service thread, at its begin and end: in between, all who have the page see the session as living. Hold makes the
  // page if there is none.
  void Hold();
  void LetGo();
  [[nodiscard]] int fd() const;                                     // to hand out; -1: there is none, or nobody holds it yet
  [[nodiscard]] bool HasLetGo() const;                              // the session has ended, for all that have its page
  [[nodiscard]] std::uint64_t made_ns() const { return made_ns_; }  // CLOCK_MONOTONIC: when this session began
  [[nodiscard]] Status WhyNone() const;                             // of the own page; ok: there is one
  Status Publish(const PeerIdentity& self);                         // what is said of scopes stays
  Status Publish(board::ScopeFacts of_scope);                       // what is said of other scopes stays
  [[nodiscard]] board::SessionFacts OwnFacts() const;

  // ---- pages of others
  // What came beside the hello or welcome of that session.
  void Take(SessionId session, std::span<const UniqueFd> descriptors, bool descriptors_lost);
  // kNotFound: none has come yet. Else as its opening said, or kUnsupported: that session sent none.
  [[nodiscard]] Result<std::shared_ptr<const board::PeerPage>> PageOf(SessionId session) const;

  // ---- boards
  // The board of that set, of which this session has the lowest id and `requester` is a member; it is made if there is none, or
  // if it is `instead_of`, the id of one that is damaged.
  Result<std::shared_ptr<board::Board>> HaveOwn(const std::string& scope, const std::vector<SessionId>& members,
                                                SessionId requester, std::uint64_t instead_of);
  // A descriptor of it.
  Result<UniqueFd> HandOut(const std::string& scope, const std::vector<SessionId>& members, SessionId requester,
                           std::uint64_t instead_of);
  // The board of a set, if it is here.
  [[nodiscard]] std::shared_ptr<board::Board> Find(const std::string& scope, const std::vector<SessionId>& members) const;
  Result<std::shared_ptr<board::Board>> Adopt(int fd, const std::string& scope, const std::vector<SessionId>& members);
  // It is of no use any more: the next one that wants it asks its maker.
  void Forget(const std::shared_ptr<board::Board>& board);
  // That session is known to have ended: wakes all that wait on a board with it.
  void NoteEnd(SessionId session);
  [[nodiscard]] bool HasEnded(SessionId session) const;  // known so

 private:
  using SetName = std::pair<std::string, std::vector<SessionId>>;  // scope and members
  void Make();
  Status PublishLocked();
  void Remember(const SetName& set, const std::shared_ptr<board::Board>& board);

  const SessionId self_;
  mutable std::mutex mutex_;
  std::optional<board::SessionPage> own_;
  std::optional<board::LifeHolder> life_;  // the service thread's
  bool held_ = false, let_go_ = false;
  const std::uint64_t made_ns_;
  Status why_none_;
  board::SessionFacts facts_;
  std::map<SessionId, Result<std::shared_ptr<const board::PeerPage>>> pages_;
  std::map<SetName, std::shared_ptr<board::Board>> boards_;
  std::set<SessionId> ended_;
};

}  // namespace amem
