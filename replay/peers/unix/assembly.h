// An assembly of sessions that find each other by Unix sockets.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "replay/peers/assembly.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/pages.h"
#include "replay/peers/unix/service.h"

namespace amem {

class UnixAssembly final : public Assembly {
 public:
  // All must outlive it.
  using Sayer = std::function<void(const std::string&)>;  // empty: nobody is told
  UnixAssembly(const ConnectionContext& context, PeerService& service, PeerDelegate& delegate, Sayer say, CycleKind kind,
               std::string tag);
  ~UnixAssembly() override;

  Status Find(Deadline until) override;
  [[nodiscard]] board::Board& board() override { return *board_; }
  [[nodiscard]] std::size_t seat() const override { return seat_; }
  [[nodiscard]] std::vector<PeerIdentity> Members() const override;
  [[nodiscard]] bool SetHasChanged() override;
  [[nodiscard]] bool HasEnded(SessionId session) override;
  [[nodiscard]] std::string HowItEnded(SessionId session) override;
  [[nodiscard]] std::string EndSeenBy(SessionId session) override;
  [[nodiscard]] PeerIdentity IdentityOf(SessionId session) override;
  [[nodiscard]] board::ScopeFacts FactsOf(SessionId session) override;
  [[nodiscard]] std::optional<SessionId> SharesNow(const std::vector<SessionId>& sessions) override;
  void Begun() override;
  void FailedBy(SessionId lost) override;
  [[nodiscard]] ProcessSeen See(SessionId session, std::chrono::milliseconds waited) override;
  [[nodiscard]] std::string Hindrance(SessionId session) override;
  void NotifyAbsent(const std::vector<SessionId>& absent) override;
  void Say(const std::string& waiting) override;
  void Discard() override;

 private:
  [[nodiscard]] SharedPageTable& pages() const { return *context_.pages; }
  void NoteProgress();
  Status Publish(Deadline until);
  [[nodiscard]] board::SharingSet Set();
  // Exchanges hellos with a session whose page is not here. Ok also if it has ended, which is noted.
  Status Meet(SessionId session, Deadline until);
  // Nothing: all others wait in no call, or in one of this kind.
  [[nodiscard]] std::optional<SessionId> CallsOtherwise(const std::vector<SessionId>& members);
  [[nodiscard]] Status RequireOneKind(const std::vector<SessionId>& members);
  // A member that has given up because of a session that has ended, and which this call does not know of.
  [[nodiscard]] std::optional<SessionId> FailedWithoutUs(const std::vector<SessionId>& members);
  [[nodiscard]] std::set<SessionId> ReachedNow();
  [[nodiscard]] ProcessLife LifeHere(SessionId session);
  [[nodiscard]] std::string BoardName() const;  // a pause and a resume never meet on one board
  [[nodiscard]] Status RequireOneGroup(const std::vector<SessionId>& members);
  Status HaveBoard(const std::vector<SessionId>& members, Deadline until);
  Result<std::shared_ptr<board::Board>> AskForBoard(const std::vector<SessionId>& members, Deadline until);
  Result<PeerConnection*> ConnectionTo(SessionId session, Deadline until);
  [[nodiscard]] Status About(SessionId session, const char* doing, const Status& why, Deadline began);

  const ConnectionContext context_;
  PeerService& service_;
  PeerDelegate& delegate_;
  const Sayer say_;
  const SessionId self_;
  const CycleKind kind_;
  board::ScopeFacts own_;                                             // of this scope, as published
  std::map<SessionId, std::unique_ptr<PeerConnection>> connections_;  // on which hellos were exchanged
  std::map<SessionId, std::unique_ptr<PeerConnection>> told_;         // who is told that it is waited for; null: in vain
  std::map<SessionId, PeerIdentity> known_;                           // as last read
  std::set<SessionId> ended_;                                         // before this call saw them alive
  std::shared_ptr<board::Board> board_;
  std::size_t seat_ = 0;
  std::uint64_t damaged_ = 0;  // the board's id
};

}  // namespace amem
