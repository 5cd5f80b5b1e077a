// The members of one call, apart from their board: what this session's page says of the call, and what the pages of the others,
// and the connections to them, show. One thread at a time.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/pages.h"
#include "replay/peers/unix/service.h"

namespace amem {

inline constexpr std::chrono::milliseconds kForOwnNeighbours{5};  // while others are waited for; they are asked for again soon

class CallMembers : NoCopies {
 public:
  // All must outlive it.
  CallMembers(const ConnectionContext& context, PeerService& service, PeerDelegate& delegate, CycleKind kind, std::string tag);
  ~CallMembers();  // the call is over, as its page says from now on

  // The set as it is now, sorted, with this session: as Assembly::Find.
  Result<std::vector<SessionId>> Find(Deadline until);
  // The set now differs from that one, for another reason than a member's end.
  [[nodiscard]] bool HaveChanged(const std::vector<SessionId>& from);
  void EndCall();  // its page says that it waits for nobody

  [[nodiscard]] SessionId self() const { return self_; }
  [[nodiscard]] CycleKind kind() const { return kind_; }
  [[nodiscard]] const std::string& tag() const { return own_.tag; }

  // ---- of one session, as Assembly
  [[nodiscard]] bool HasEnded(SessionId session);
  [[nodiscard]] std::string EndSeenBy(SessionId session);
  [[nodiscard]] std::string HowItEnded(SessionId session) const;
  [[nodiscard]] PeerIdentity IdentityOf(SessionId session) const;
  [[nodiscard]] board::ScopeFacts FactsOf(SessionId session) const;
  [[nodiscard]] ProcessSeen See(SessionId session, std::chrono::milliseconds waited);
  [[nodiscard]] std::optional<SessionId> SharesNow(const std::vector<SessionId>& sessions);
  void EndedAs(CycleProgress now) { Note(now); }
  void FailedBy(SessionId lost);

  // On which hellos were exchanged.
  Result<PeerConnection*> ConnectionTo(SessionId session, Deadline until);
  void Disconnect(SessionId session) { connections_.erase(session); }
  // What a failure means that asking this session came to.
  [[nodiscard]] Status About(SessionId session, const char* doing, const Status& why, Deadline began) const;

 private:
  [[nodiscard]] SharedPageTable& pages() const { return *context_.pages; }
  void Note(CycleProgress now);
  Status Publish(Deadline until);
  [[nodiscard]] board::SharingSet Set();
  // Exchanges hellos with a session whose page is not here. Ok also if it has ended, which is noted.
  Status Meet(SessionId session, Deadline until);
  [[nodiscard]] Status RequireOneGroup(const std::vector<SessionId>& members);
  // Nothing: all others wait in no call, or in one of this kind.
  [[nodiscard]] std::optional<SessionId> CallsOtherwise(const std::vector<SessionId>& members);
  [[nodiscard]] Status RequireOneKind(const std::vector<SessionId>& members);
  // A member that has given up because of a session that has ended, and which this call does not know of.
  [[nodiscard]] std::optional<SessionId> FailedWithoutUs(const std::vector<SessionId>& members);
  [[nodiscard]] Status FailedWith(SessionId member);
  [[nodiscard]] std::set<SessionId> ReachedNow();
  [[nodiscard]] ProcessLife LifeHere(SessionId session);

  const ConnectionContext context_;
  PeerService& service_;
  PeerDelegate& delegate_;
  const SessionId self_;
  const CycleKind kind_;
  board::ScopeFacts own_;  // of this scope, as published
  std::map<SessionId, std::unique_ptr<PeerConnection>> connections_;
  std::map<SessionId, PeerIdentity> known_;  // as last read
  std::set<SessionId> ended_;                // before this call saw them alive
};

}  // namespace amem
