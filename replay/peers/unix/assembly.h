// An assembly of sessions that find each other by Unix sockets: the members of a call (call_members.h), and the board on which
// they vote.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "replay/peers/assembly.h"
#include "replay/peers/unix/call_members.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/pages.h"
#include "replay/peers/unix/service.h"

namespace amem {

class UnixAssembly final : public Assembly {
 public:
  // All must outlive it.
  using Sayer = std::function<void(const std::string&)>;  // empty: nothing is said
  UnixAssembly(const ConnectionContext& context, PeerService& service, PeerDelegate& delegate, Sayer say, CycleKind kind,
               std::string tag);

  Status Find(Deadline until) override;
  [[nodiscard]] board::Board& board() override { return *board_; }
  [[nodiscard]] std::size_t seat() const override { return seat_; }
  [[nodiscard]] std::vector<PeerIdentity> Members() const override;
  [[nodiscard]] bool SetHasChanged() override { return members_.HaveChanged(board_->members()); }
  [[nodiscard]] bool HasEnded(SessionId session) override { return members_.HasEnded(session); }
  [[nodiscard]] std::string HowItEnded(SessionId session) override { return members_.HowItEnded(session); }
  [[nodiscard]] std::string EndSeenBy(SessionId session) override { return members_.EndSeenBy(session); }
  [[nodiscard]] PeerIdentity IdentityOf(SessionId session) override { return members_.IdentityOf(session); }
  [[nodiscard]] board::ScopeFacts FactsOf(SessionId session) override { return members_.FactsOf(session); }
  [[nodiscard]] std::optional<SessionId> SharesNow(const std::vector<SessionId>& sessions) override {
    return members_.SharesNow(sessions);
  }
  void Begun() override;
  void EndedAs(CycleProgress now) override { members_.EndedAs(now); }
  void FailedBy(SessionId lost) override { members_.FailedBy(lost); }
  [[nodiscard]] ProcessSeen See(SessionId session, std::chrono::milliseconds waited) override {
    return members_.See(session, waited);
  }
  [[nodiscard]] std::string Hindrance(SessionId session) override;
  void NotifyAbsent(const std::vector<SessionId>& absent) override;
  void Say(const std::string& waiting) override;
  void Discard() override;

 private:
  [[nodiscard]] SharedPageTable& pages() const { return *context_.pages; }
  [[nodiscard]] std::string BoardName() const;
  Status HaveBoard(const std::vector<SessionId>& members, Deadline until);
  Result<std::shared_ptr<board::Board>> AskForBoard(const std::vector<SessionId>& members, Deadline until);

  const ConnectionContext context_;
  PeerService& service_;
  const Sayer say_;
  std::map<SessionId, std::unique_ptr<PeerConnection>> notified_;  // absent members; null: could not be reached
  std::shared_ptr<board::Board> board_;
  std::size_t seat_ = 0;
  std::uint64_t damaged_ = 0;  // the board's id
  CallMembers members_;        // goes first: what this session's page says of the call precedes the end of its connections
};

}  // namespace amem
