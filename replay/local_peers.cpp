#include "replay/local_peers.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "replay/unix_peers_board.h"

namespace amem {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLookAgain = std::chrono::milliseconds(5);

Status Gone(SessionId session) {
  return {Code::kPeerLost, "session " + Hex(session.value) + " is not on the network any more"};
}

struct Member {
  PeerIdentity identity;  // with the hub's mutex
  PeerDelegate* delegate;
  std::recursive_mutex calls;     // held over every call to the delegate; null delegate: it has stopped
  std::set<SessionId> connected;  // with the hub's mutex
};

}  // namespace

class LocalNetwork::Hub {
 public:
  explicit Hub(std::uint32_t timeout) : timeout_ms(timeout) {}

  std::shared_ptr<Member> Find(SessionId session) {
    const std::lock_guard lock(mutex);
    const auto at = members.find(session);
    return at == members.end() ? nullptr : at->second;
  }

  PeerIdentity IdentityOf(const Member& member) {
    const std::lock_guard lock(mutex);
    return member.identity;
  }

  // Calls `work` with the delegate, unless that session is gone.
  template <class Work>
  bool With(const std::shared_ptr<Member>& member, const Work& work) {
    if (member == nullptr) return false;
    const std::lock_guard lock(member->calls);
    if (member->delegate == nullptr) return false;
    work(*member->delegate);
    return true;
  }

  void Connect(const std::shared_ptr<Member>& a, const std::shared_ptr<Member>& b) {
    if (a == b) return;
    PeerIdentity of_a, of_b;
    {
      const std::lock_guard lock(mutex);
      of_a = a->identity;
      of_b = b->identity;
      if (!a->connected.insert(of_b.session).second) return;
      b->connected.insert(of_a.session);
    }
    With(a, [&](PeerDelegate& d) { d.OnPeerConnected(of_b); });
    With(b, [&](PeerDelegate& d) { d.OnPeerConnected(of_a); });
  }

  void Remove(SessionId session, const std::string& how) {
    std::shared_ptr<Member> member;
    std::vector<std::shared_ptr<Member>> connected;
    {
      const std::lock_guard lock(mutex);
      const auto at = members.find(session);
      if (at == members.end()) return;
      member = at->second;
      members.erase(at);
      for (const SessionId other : member->connected) {
        if (auto found = members.find(other); found != members.end()) connected.push_back(found->second);
      }
      for (auto& [leader, board] : boards) board->Closed(session.value, how);
      boards.erase(session);  // its votes are not counted any more
      changed.notify_all();
    }
    {
      const std::lock_guard lock(member->calls);
      member->delegate = nullptr;
    }
    for (const auto& other : connected) With(other, [&](PeerDelegate& d) { d.OnPeerLost(IdentityOf(*member), how); });
  }

  // With the mutex held. A member's one connection to every board is its session.
  RoundBoard& BoardOf(SessionId leader) {
    auto& board = boards[leader];
    if (board == nullptr) {
      board = std::make_unique<RoundBoard>([this](std::uint64_t to, MessageBody body) {
        mail[to].push_back(std::move(body));
        changed.notify_all();
      });
    }
    return *board;
  }

  Result<std::vector<PeerIdentity>> SetOf(const PeerIdentity& self) {
    std::map<SessionId, PeerIdentity> set;
    std::vector<SessionId> frontier{self.session};
    while (!frontier.empty()) {
      const SessionId session = frontier.back();
      frontier.pop_back();
      if (set.contains(session)) continue;
      const auto member = Find(session);
      if (member == nullptr) return Gone(session);
      const PeerIdentity who = IdentityOf(*member);
      if (who.group != self.group) {
        return Status{Code::kRefused, ToText(self) + " of group " + std::to_string(self.group) + " shares memory with " +
                                          ToText(who) + " of group " + std::to_string(who.group)};
      }
      set[session] = who;
      With(member, [&](PeerDelegate& d) {
        for (const SessionId neighbour : d.Neighbours()) frontier.push_back(neighbour);
      });
    }
    std::vector<PeerIdentity> members_found;
    for (const auto& [session, who] : set) members_found.push_back(who);
    return members_found;
  }

  const std::uint32_t timeout_ms;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<SessionId, std::shared_ptr<Member>> members;
  std::map<SessionId, std::unique_ptr<RoundBoard>> boards;  // by leader
  std::map<std::uint64_t, std::deque<MessageBody>> mail;    // by session
};

namespace {

class LocalRound final : public Round {
 public:
  LocalRound(std::shared_ptr<LocalNetwork::Hub> hub, SessionId self, BegunMessage begun)
      : hub_(std::move(hub)), self_(self), id_(begun.round), members_(std::move(begun.members)) {}
  ~LocalRound() override {
    const std::lock_guard lock(hub_->mutex);
    if (auto board = hub_->boards.find(leader()); board != hub_->boards.end()) board->second->Left(self_.value, id_);
    hub_->mail.erase(self_.value);
  }
  [[nodiscard]] std::vector<PeerIdentity> Members() const override { return members_; }

  Status Vote(PhaseKind phase, const Status& mine, SessionId* culprit) override {
    std::unique_lock lock(hub_->mutex);
    const auto answer = [&](SessionId whose, const Status& status) {
      if (culprit != nullptr) *culprit = whose;
      return status;
    };
    if (!hub_->members.contains(leader())) return answer(leader(), Gone(leader()));
    hub_->BoardOf(leader()).Voted(self_.value, {id_, ++index_, phase, hub_->timeout_ms, mine}, Clock::now());
    while (true) {
      auto& mail = hub_->mail[self_.value];
      while (!mail.empty()) {
        const MessageBody body = std::move(mail.front());
        mail.pop_front();
        if (const auto* failure = std::get_if<FailureMessage>(&body)) return answer(self_, failure->status);
        const auto* decision = std::get_if<DecisionMessage>(&body);
        if (decision != nullptr && decision->round == id_ && decision->index == index_)
          return answer(decision->culprit, decision->status);
      }
      if (!hub_->members.contains(leader())) return answer(leader(), Gone(leader()));
      RoundBoard& board = hub_->BoardOf(leader());
      hub_->changed.wait_until(lock, board.NextDeadline().value_or(Clock::now() + kLookAgain));
      if (hub_->members.contains(leader())) hub_->BoardOf(leader()).Tick(Clock::now());
    }
  }

 private:
  [[nodiscard]] SessionId leader() const { return members_.front().session; }

  std::shared_ptr<LocalNetwork::Hub> hub_;
  SessionId self_;
  std::uint64_t id_;
  std::vector<PeerIdentity> members_;
  std::uint32_t index_ = 0;
};

class LocalPeers final : public Peers {
 public:
  LocalPeers(std::shared_ptr<LocalNetwork::Hub> hub, std::shared_ptr<Member> me) : hub_(std::move(hub)), me_(std::move(me)) {
    session_ = hub_->IdentityOf(*me_).session;
  }
  ~LocalPeers() override { Stop(); }

  [[nodiscard]] PeerIdentity Self() const override { return hub_->IdentityOf(*me_); }
  void SetGroup(std::int64_t group) override {
    const std::lock_guard lock(hub_->mutex);
    me_->identity.group = group;
  }

  Result<SharedAllocation> Import(const Token& token, AllocationId as) override {
    const auto owner = hub_->Find(token.session);
    Result<SharedAllocation> shared = Gone(token.session);
    if (owner == nullptr || hub_->Find(session_) == nullptr) return shared;
    hub_->Connect(me_, owner);
    hub_->With(owner, [&](PeerDelegate& d) { shared = d.OnImport(Self(), as, token); });
    return shared;
  }

  Result<std::vector<SharedAllocation>> Reimport(SessionId owner, const std::vector<ShareRequest>& requests) override {
    const auto member = hub_->Find(owner);
    if (member == nullptr || hub_->Find(session_) == nullptr) return Gone(owner);
    std::vector<SharedAllocation> all;
    for (const auto& request : requests) {
      Result<SharedAllocation> shared = Gone(owner);
      hub_->With(member, [&](PeerDelegate& d) { shared = d.OnReimport(Self(), request); });
      if (!shared) return shared.status();
      all.push_back(*std::move(shared));
    }
    return all;
  }

  void DropReference(const RemoteAllocation& remote, AllocationId as) override {
    if (hub_->Find(session_) == nullptr) return;
    hub_->With(hub_->Find(remote.owner), [&](PeerDelegate& d) { d.OnReferenceDropped(Self(), remote.allocation, as); });
  }

  Result<std::unique_ptr<Round>> Arrive(CycleKind kind, std::uint64_t cycle) override {
    const auto deadline = Clock::now() + std::chrono::milliseconds(hub_->timeout_ms);
    std::optional<SessionId> leader;
    while (true) {
      auto set = hub_->SetOf(Self());
      std::unique_lock lock(hub_->mutex);
      if (auto news = TakeMail(); news.has_value()) return std::move(*news);
      const auto withdraw = [&] {
        if (leader && hub_->members.contains(*leader)) hub_->BoardOf(*leader).Closed(session_.value, "withdrew");
        hub_->mail.erase(session_.value);
      };
      if (!set) {
        withdraw();
        return set.status();
      }
      if (Clock::now() >= deadline) return TimedOut(*leader);
      const SessionId lowest = set->front().session;
      if (leader && *leader != lowest) withdraw();
      leader = lowest;
      hub_->BoardOf(lowest).Arrived(session_.value, me_->identity, {kind, cycle, *set});
      if (hub_->mail[session_.value].empty()) hub_->changed.wait_until(lock, std::min(deadline, Clock::now() + kLookAgain));
      if (auto news = TakeMail(); news.has_value()) return std::move(*news);
    }
  }

  void Stop() override { hub_->Remove(session_, "has closed"); }

 private:
  // With the hub's mutex held.
  std::optional<Result<std::unique_ptr<Round>>> TakeMail() {
    auto& mail = hub_->mail[session_.value];
    while (!mail.empty()) {
      const MessageBody body = std::move(mail.front());
      mail.pop_front();
      if (const auto* begun = std::get_if<BegunMessage>(&body))
        return std::unique_ptr<Round>(new LocalRound(hub_, session_, *begun));
      if (const auto* failure = std::get_if<FailureMessage>(&body)) return failure->status;
    }
    return std::nullopt;
  }

  Status TimedOut(SessionId leader) {
    hub_->BoardOf(leader).Withdrew(session_.value);
    std::vector<PeerIdentity> missing;
    for (const auto& body : hub_->mail[session_.value]) {
      if (const auto* withdrawn = std::get_if<WithdrawnMessage>(&body)) missing = withdrawn->missing;
    }
    hub_->mail.erase(session_.value);
    return {Code::kTimeout, "waited " + std::to_string(hub_->timeout_ms) + " ms for " + ToText(missing) + " to come"};
  }

  std::shared_ptr<LocalNetwork::Hub> hub_;
  std::shared_ptr<Member> me_;
  SessionId session_;
};

}  // namespace

LocalNetwork::LocalNetwork(std::uint32_t timeout_ms) : hub_(std::make_shared<Hub>(timeout_ms)) {}

std::unique_ptr<Peers> LocalNetwork::Join(const PeerIdentity& self, PeerDelegate& delegate) {
  auto member = std::make_shared<Member>();
  member->identity = self;
  member->delegate = &delegate;
  {
    const std::lock_guard lock(hub_->mutex);
    hub_->members[self.session] = member;
  }
  return std::make_unique<LocalPeers>(hub_, std::move(member));
}

void LocalNetwork::Kill(SessionId session) { hub_->Remove(session, "died"); }

}  // namespace amem
