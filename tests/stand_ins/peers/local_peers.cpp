#include "tests/stand_ins/peers/local_peers.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "replay/peers/assembly.h"

namespace amem {
namespace {

using Clock = std::chrono::steady_clock;

// A delegate that cannot look at its ledger now is asked again.
void Told(const std::function<bool()>& tell) {
  while (!tell()) std::this_thread::yield();
}
Result<SharedAllocation> Answered(const std::function<Result<SharedAllocation>()>& ask) {
  auto answer = ask();
  for (; IsBusy(answer.status()); answer = ask()) std::this_thread::yield();
  return answer;
}

Status Gone(SessionId session) { return {Code::kPeerLost, ToText(session) + " is not on the network any more"}; }

struct Member {
  PeerIdentity identity;  // with the hub's mutex
  PeerDelegate* delegate;
  std::recursive_mutex calls;     // held over every call to the delegate; null delegate: it has stopped
  std::set<SessionId> connected;  // with the hub's mutex
};

}  // namespace

class LocalNetwork::Hub {
 public:
  explicit Hub(LocalScheduler* decides) : scheduler(decides) {}

  Clock::time_point Now() const { return scheduler == nullptr ? Clock::now() : scheduler->Now(); }
  void Step() {
    if (scheduler != nullptr) scheduler->Step();
  }
  // With the mutex held, both.
  void WaitUntil(std::unique_lock<std::mutex>& lock, Clock::time_point until) {
    if (scheduler != nullptr) return scheduler->Wait(lock, until);
    changed.wait_until(lock, until);
  }
  void Changed() {
    changed.notify_all();
    if (scheduler != nullptr) scheduler->Changed();
  }

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
    With(a, [&](PeerDelegate& d) { Told([&] { return d.OnPeerConnected(of_b); }); });
    With(b, [&](PeerDelegate& d) { Told([&] { return d.OnPeerConnected(of_a); }); });
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
      for (auto& [set, board] : boards) board->Nudge();
      Changed();
    }
    {
      const std::lock_guard lock(member->calls);
      member->delegate = nullptr;
    }
    for (const auto& other : connected)
      With(other, [&](PeerDelegate& d) { Told([&] { return d.OnPeerLost(IdentityOf(*member), how); }); });
  }

  // `seen`: members that were alive at an earlier look; that one of them is dead now is a failure.
  Result<std::vector<PeerIdentity>> SetOf(const PeerIdentity& self, const std::string& tag, std::set<SessionId>& seen) {
    std::map<SessionId, PeerIdentity> set;
    std::vector<SessionId> frontier{self.session};
    while (!frontier.empty()) {
      const SessionId session = frontier.back();
      frontier.pop_back();
      if (set.contains(session)) continue;
      const auto member = Find(session);
      if (member == nullptr && session != self.session && !seen.contains(session)) continue;  // dead, and of no set
      if (member == nullptr) return Gone(session);
      seen.insert(session);
      const PeerIdentity who = IdentityOf(*member);
      if (who.group != self.group) {
        return Status{Code::kRefused, fmt::format("{} of group {} shares memory with {} of group {}", ToText(self), self.group,
                                                  ToText(who), who.group)};
      }
      set[session] = who;
      With(member, [&](PeerDelegate& d) {
        const auto neighbours = d.Neighbours(tag, In(std::chrono::minutes(1)));
        frontier.insert(frontier.end(), neighbours->begin(), neighbours->end());
      });
    }
    std::vector<PeerIdentity> members_found;
    for (const auto& [session, who] : set) members_found.push_back(who);
    return members_found;
  }

  LocalScheduler* const scheduler;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<SessionId, std::shared_ptr<Member>> members;
  using SetName = std::pair<std::string, std::vector<SessionId>>;  // kind and tag; members
  std::map<SetName, std::shared_ptr<board::Board>> boards;
  std::map<std::pair<SessionId, std::string>, CycleKind> calls;  // who waits for the others in one; by session and tag
};

namespace {

// The members of a call in one process; their boards are in its own memory.
class LocalAssembly final : public Assembly {
 public:
  LocalAssembly(std::shared_ptr<LocalNetwork::Hub> hub, SessionId self, CycleKind kind, std::string tag)
      : hub_(std::move(hub)), self_(self), kind_(kind), tag_(std::move(tag)) {}
  ~LocalAssembly() override { Begun(); }

  Status Find(Deadline) override {
    hub_->Step();
    const auto me = hub_->Find(self_);
    if (me == nullptr) return Gone(self_);
    {
      const std::lock_guard lock(hub_->mutex);
      hub_->calls[{self_, tag_}] = kind_;
    }
    AMEM_ASSIGN(members_, hub_->SetOf(hub_->IdentityOf(*me), tag_, seen_));
    std::vector<SessionId> sessions;
    for (const PeerIdentity& who : members_) sessions.push_back(who.session);
    const std::lock_guard lock(hub_->mutex);
    for (const PeerIdentity& who : members_) {
      if (!CallsOtherwise(who.session)) continue;
      return Status{Code::kInvalid,
                    fmt::format("{} waits in another kind of call: call the same on all ranks that share memory", ToText(who))}
          .ReportedBy(who.session);
    }
    auto& board = hub_->boards[{std::string(ToText(kind_)) + " " + tag_, sessions}];
    if (board == nullptr) {
      AMEM_ASSIGN(auto made, board::Board::MakePrivate(tag_, sessions));
      board = std::make_shared<board::Board>(std::move(made));
    }
    board_ = board;
    return {};
  }
  [[nodiscard]] board::Board& board() override { return *board_; }
  [[nodiscard]] std::size_t seat() const override { return *board_->SeatOf(self_); }
  [[nodiscard]] std::vector<PeerIdentity> Members() const override { return members_; }
  void Begun() override {
    const std::lock_guard lock(hub_->mutex);
    hub_->calls.erase({self_, tag_});
  }
  [[nodiscard]] bool SetHasChanged() override {
    const auto me = hub_->Find(self_);
    for (const PeerIdentity& who : members_)
      if (me == nullptr || HasEnded(who.session)) return false;
    const auto now = hub_->SetOf(hub_->IdentityOf(*me), tag_, seen_);
    if (!now || *now != members_) return true;
    const std::lock_guard lock(hub_->mutex);
    return std::ranges::any_of(members_, [this](const PeerIdentity& who) { return CallsOtherwise(who.session); });
  }
  [[nodiscard]] bool HasEnded(SessionId session) override { return hub_->Find(session) == nullptr; }
  [[nodiscard]] std::string HowItEnded(SessionId) override { return kPeerDied; }
  [[nodiscard]] PeerIdentity IdentityOf(SessionId session) override {
    const auto at = std::ranges::find(members_, session, &PeerIdentity::session);
    return at == members_.end() ? PeerIdentity{.session = session} : *at;
  }
  [[nodiscard]] board::ScopeFacts FactsOf(SessionId session) override {
    board::ScopeFacts facts{.tag = tag_};
    hub_->With(hub_->Find(session), [&](PeerDelegate& d) { facts.lifecycle = d.Progress(tag_).lifecycle; });
    return facts;
  }
  [[nodiscard]] Deadline Time() override { return hub_->Now(); }
  void AwaitChange(std::uint32_t ticket, Deadline until) override {
    if (hub_->scheduler == nullptr) return board_->AwaitChange(ticket, until);
    hub_->Step();
    std::unique_lock lock(hub_->mutex);
    if (board_->Ticket() == ticket) hub_->WaitUntil(lock, until);
  }
  void EndedAs(CycleProgress now) override {
    hub_->With(hub_->Find(self_), [&](PeerDelegate& d) {
      const Lifecycle seen = d.Progress(tag_).lifecycle;
      if (seen == Lifecycle::kNew || seen == now.lifecycle) return;
      fmt::print(stderr, "a call said that it ended {}, and its scope is {}\n", ToText(now.lifecycle), ToText(seen));
      std::abort();
    });
  }
  void FailedBy(SessionId) override {}
  [[nodiscard]] ProcessSeen See(SessionId session, std::chrono::milliseconds) override { return {.session = session}; }
  void NotifyAbsent(const std::vector<SessionId>&) override {}
  void Say(const std::string&) override {}
  void Discard() override {}

 private:
  [[nodiscard]] bool CallsOtherwise(SessionId session) const {  // with the hub's mutex
    const auto* const call = FindIn(hub_->calls, std::pair(session, tag_));
    return session != self_ && call != nullptr && *call != kind_;
  }

  const std::shared_ptr<LocalNetwork::Hub> hub_;
  const SessionId self_;
  const CycleKind kind_;
  const std::string tag_;
  std::set<SessionId> seen_;
  std::vector<PeerIdentity> members_;
  std::shared_ptr<board::Board> board_;
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
  void SetReleasesNothing() override {
    const std::lock_guard lock(hub_->mutex);
    me_->identity.keeps = true;
  }

  Result<SharedAllocation> Import(const Token& token, AllocationId as) override {
    hub_->Step();
    const auto owner = hub_->Find(token.session);
    Result<SharedAllocation> shared = Gone(token.session);
    if (owner == nullptr || hub_->Find(session_) == nullptr) return shared;
    hub_->Connect(me_, owner);
    hub_->With(owner, [&](PeerDelegate& d) { shared = Answered([&] { return d.OnImport(Self(), as, token); }); });
    return shared;
  }

  Result<std::vector<SharedAllocation>> Reimport(SessionId owner, const std::vector<ShareRequest>& requests,
                                                 Deadline) override {
    hub_->Step();
    const auto member = hub_->Find(owner);
    if (member == nullptr || hub_->Find(session_) == nullptr) return Gone(owner);
    std::vector<SharedAllocation> all;
    for (const auto& request : requests) {
      Result<SharedAllocation> shared = Gone(owner);
      hub_->With(member, [&](PeerDelegate& d) { shared = Answered([&] { return d.OnReimport(Self(), request); }); });
      if (!shared) return shared.status().ReportedBy(owner);
      all.push_back(*std::move(shared));
    }
    return all;
  }

  void DropReference(const RemoteAllocation& remote, AllocationId as) override {
    if (hub_->Find(session_) == nullptr) return;
    hub_->With(hub_->Find(remote.owner),
               [&](PeerDelegate& d) { Told([&] { return d.OnReferenceDropped(Self(), remote.allocation, as); }); });
  }

  bool AwaitLoss(SessionId session, std::chrono::milliseconds /*patience*/) override {
    hub_->Step();
    if (hub_->Find(session) != nullptr) return false;
    hub_->With(me_, [&](PeerDelegate& d) { Told([&] { return d.OnPeerLost({.session = session}, kPeerDied); }); });
    return true;
  }

  std::unique_ptr<Assembly> Assemble(CycleKind kind, const std::string& tag) override {
    hub_->Step();
    return std::make_unique<LocalAssembly>(hub_, session_, kind, tag);
  }

  void Stop() override { hub_->Remove(session_, "has closed"); }

 private:
  std::shared_ptr<LocalNetwork::Hub> hub_;
  std::shared_ptr<Member> me_;
  SessionId session_;
};

}  // namespace

LocalNetwork::LocalNetwork(LocalScheduler* scheduler) : hub_(std::make_shared<Hub>(scheduler)) {}

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

void LocalNetwork::Kill(SessionId session) { hub_->Remove(session, kPeerDied); }

}  // namespace amem
