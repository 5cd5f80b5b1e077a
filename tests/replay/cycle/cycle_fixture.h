// One session's ledger on a simulator, with peers that a test scripts: what the executor and the coordinator work on.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "replay/cycle/executor.h"
#include "replay/driver/simulator/simulator.h"
#include "replay/peers/assembly.h"
#include "statemachine/plan.h"
#include "tests/journal/memory_journal.h"
#include "tests/replay/sizes.h"

namespace amem::test {

inline constexpr Bytes k2M = 2 * kMiB;
inline constexpr SessionId kSelf{0x50}, kOwner{0x60}, kOther{0x70};

// A set of this session and the owner, on a board in memory. The owner votes once this session has, as the test says; by
// default it is content.
class ScriptedSet {
 public:
  // Why it votes against that ballot; ok: it does not.
  std::function<Status(agreement::Ballot)> votes = [](agreement::Ballot) { return Status{}; };
  std::optional<agreement::Ballot> ends_at{}, silent_at{};  // it votes no more from there on
  std::optional<agreement::Ballot> ahead{};  // that it is against is decided before this session knows that all have come
  std::function<void()> named = [] {};       // called whenever a member's name is asked for
  std::set<SessionId> dead_strangers;        // sessions that have ended, and are no members
  bool shares_now = true;                    // the owner
  std::function<void()> said = [] {};        // called when people are told for whom a resume waits
  Status unfound;                            // why the set cannot be found
  std::vector<agreement::Ballot> asked;      // on what it has voted

  class Call final : public Assembly {
   public:
    explicit Call(ScriptedSet& set) : set_(set) {}
    Status Find(Deadline) override {
      if (!set_.unfound.ok()) return set_.unfound;
      AMEM_ASSIGN(round_, set_.board_.NextRound());
      return {};
    }
    [[nodiscard]] board::Board& board() override { return set_.board_; }
    [[nodiscard]] std::size_t seat() const override { return 0; }
    [[nodiscard]] std::vector<PeerIdentity> Members() const override { return {kMe, kPeer}; }
    void Begun() override {}
    [[nodiscard]] bool SetHasChanged() override { return false; }
    [[nodiscard]] bool HasEnded(SessionId session) override {
      return (session == kOwner && set_.ended_) || set_.dead_strangers.contains(session);
    }
    [[nodiscard]] std::string HowItEnded(SessionId) override { return kPeerDied; }
    [[nodiscard]] PeerIdentity IdentityOf(SessionId session) override {
      set_.named();
      return session == kSelf ? kMe : kPeer;
    }
    [[nodiscard]] board::ScopeFacts FactsOf(SessionId) override { return {.lifecycle = Lifecycle::kRunning}; }
    void FailedBy(SessionId) override {}
    [[nodiscard]] ProcessSeen See(SessionId session, std::chrono::milliseconds) override { return {.session = session}; }
    void NotifyAbsent(const std::vector<SessionId>&) override {}
    [[nodiscard]] std::optional<SessionId> SharesNow(const std::vector<SessionId>& sessions) override {
      return set_.shares_now ? Assembly::SharesNow(sessions) : std::nullopt;
    }
    void Say(const std::string&) override { set_.said(); }
    void AwaitChange(std::uint32_t ticket, Deadline until) override {
      const board::BoardReading reading = set_.board_.Read(round_, [](std::size_t) { return false; });
      for (std::size_t b = 0; b < agreement::kBallots; ++b) {
        const auto ballot = static_cast<agreement::Ballot>(b);
        const bool due = reading.seats[0].votes[b] != agreement::Vote::kNone &&
                         reading.seats[1].votes[b] == agreement::Vote::kNone &&
                         reading.decisions[b].cause == agreement::Cause::kUndecided;
        if (!due) continue;
        if (set_.silent_at && ballot >= *set_.silent_at) return set_.board_.AwaitChange(ticket, until);
        set_.ended_ = set_.ended_ || (set_.ends_at && ballot >= *set_.ends_at);
        if (set_.ended_) return;
        set_.asked.push_back(ballot);
        const Status why = set_.votes(ballot);
        set_.board_.CastVote(1, round_, ballot, why.ok(), why);
        if (set_.ahead && ballot == agreement::Ballot::kCome) DecideAhead(*set_.ahead);
        return;
      }
      set_.board_.AwaitChange(ticket, until);
    }
    void Discard() override {}

   private:
    void DecideAhead(agreement::Ballot ballot) {
      set_.board_.Decide(1, round_, agreement::Ballot::kCome, agreement::Cause::kAllVoted, 1);
      set_.board_.CastVote(1, round_, ballot, false, {Code::kDriver, "a call failed"});
      set_.board_.Decide(1, round_, ballot, agreement::Cause::kVotedNo, 1);
    }

    ScriptedSet& set_;
    board::RoundNumber round_ = 0;
  };

 private:
  static inline const PeerIdentity kMe{kSelf, "host", 1, 0, 0}, kPeer{kOwner, "host", 2, 0, 1};
  board::Board board_ = *board::Board::MakePrivate("", {kSelf, kOwner});
  bool ended_ = false;
};

class ScriptedPeers final : public Peers {
 public:
  [[nodiscard]] PeerIdentity Self() const override { return {kSelf, "host", 1, 0, 0}; }
  void SetGroup(std::int64_t) override {}
  void SetReleasesNothing() override {}
  Result<SharedAllocation> Import(const Token&, AllocationId) override {
    return Status{Code::kUnsupported, "not in this test"};
  }
  Result<std::vector<SharedAllocation>> Reimport(SessionId owner, const std::vector<ShareRequest>& requests,
                                                 Deadline) override {
    return reimport(owner, requests);
  }
  void DropReference(const RemoteAllocation&, AllocationId) override {}
  bool AwaitLoss(SessionId lost, std::chrono::milliseconds) override { return await_loss(lost); }
  std::unique_ptr<Assembly> Assemble(CycleKind, const std::string&) override {
    return std::make_unique<ScriptedSet::Call>(set);
  }
  void Stop() override {}

  std::function<Result<std::vector<SharedAllocation>>(SessionId, const std::vector<ShareRequest>&)> reimport;
  std::function<bool(SessionId)> await_loss = [](SessionId) { return true; };
  ScriptedSet set;
};

class CycleFixture : public ::testing::Test {
 protected:
  CycleFixture()
      : world_(*SimulatorWorld::InMemory(2, 512 * kMiB)),
        sim_(*Simulator::Open({.in_memory = world_})),
        owner_(*Simulator::Open({.in_memory = world_})),
        ledger_(std::make_unique<MemoryJournal>(events_)) {
    SessionOpened opened;
    opened.session = kSelf;
    opened.host = "host";
    Record(opened);
    Record(PeerConnected{kOwner, "host", 2, 0, 1});
    peers_.reimport = [this](SessionId, const std::vector<ShareRequest>& requests) { return Share(requests); };
    peers_.await_loss = [this](SessionId lost) {  // as a session does
      const auto known = ledger_.state().peers.find(lost);
      if (known != ledger_.state().peers.end() && known->second.connected) Record(PeerLost{lost, kPeerDied});
      return true;
    };
  }
  // Whatever a test does, the journal alone leads to the session's state, and nothing that happened was refused.
  void TearDown() override {
    sim_->SetHook({});
    if (broken_) return;
    State folded;
    for (const Event& event : events_) {
      const Status applied = Apply(folded, event);
      ASSERT_TRUE(applied.ok()) << applied.message();
    }
    EXPECT_EQ(folded, ledger_.state());
    EXPECT_EQ(ledger_.state().broken, "");
  }

  void Record(EventBody body) {
    const LedgerLock lock(ledger_);
    ledger_.Record(std::move(body));
  }

  // As NCCL does it: create, and where `mapped`, reserve, map and set access.
  AllocationId Create(Bytes bytes = k2M, bool mapped = true) {
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, 0};
    const DriverHandle handle = *sim_->Create(bytes, properties, 0);
    const AllocationId id{ledger_.state().next_allocation};
    Record(AllocationCreated{id, bytes, properties, 0, handle, {}, {}});
    Adopt(id, handle, bytes, mapped);
    return id;
  }
  // Memory of the owner's simulator.
  AllocationId Import(Bytes bytes = k2M, SessionId owner = kOwner) {
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, 1};
    const AllocationId theirs{shared_.size() + 1};
    shared_[theirs] = *owner_->Create(bytes, properties, 0);
    const DriverHandle handle = *sim_->Import(*owner_->Export(shared_[theirs]));
    const AllocationId id{ledger_.state().next_allocation};
    Record(Imported{id, {owner, theirs}, bytes, properties, 1, handle, {}, {}});
    Adopt(id, handle, bytes, true);
    return id;
  }
  Result<std::vector<SharedAllocation>> Share(const std::vector<ShareRequest>& requests) {
    std::vector<SharedAllocation> all;
    for (const ShareRequest& request : requests) {
      auto descriptor = owner_->Export(shared_.at(request.allocation));
      if (!descriptor.ok()) return descriptor.status();
      all.push_back({{k2M, {}, {}}, *std::move(descriptor)});
    }
    return all;
  }

  // Once more, also what a piece stands in for.
  void Map(AllocationId id, Bytes bytes) {
    const Address address = *sim_->Reserve(bytes, 0, {}, 0);
    const std::vector<AccessDescriptor> access{{{LocationType::kDevice, 0}, 3}};
    const LedgerLock lock(ledger_);
    const DriverHandle handle = ledger_.HandleOf(id);
    const bool stands_in = ledger_.RebuiltAs(id).stands_in.has_value();
    ASSERT_TRUE((stands_in ? MapRepeatedly(*sim_, address, bytes, handle, 0) : sim_->Map(address, bytes, 0, handle, 0)).ok());
    ASSERT_TRUE(sim_->SetAccess(address, bytes, access).ok());
    ledger_.Record(RangeReserved{address, bytes, 0, {}, 0, {}, {}});
    ledger_.Record(Mapped{address, bytes, 0, id, 0});
    ledger_.Record(AccessSet{address, bytes, access, {}});
  }

  [[nodiscard]] Address PlaceOf(AllocationId id) const {
    for (const auto& [address, m] : ledger_.state().mappings) {
      if (m.allocation == id) return address;
    }
    return {};
  }
  [[nodiscard]] std::byte* Memory(AllocationId id) const { return reinterpret_cast<std::byte*>(PlaceOf(id).value); }
  [[nodiscard]] DriverHandle HandleOf(AllocationId id) {
    const LedgerLock lock(ledger_);
    return ledger_.HandleOf(id);
  }
  [[nodiscard]] bool Resident(AllocationId id) const { return ledger_.state().allocations.at(id).resident; }
  [[nodiscard]] Bytes InUse() const { return sim_->BytesInUse(DeviceOrdinal{0}); }
  template <class Kind>
  [[nodiscard]] std::vector<Kind> All() const {
    std::vector<Kind> all;
    for (const Event& event : events_) {
      if (const auto* kind = std::get_if<Kind>(&event.body)) all.push_back(*kind);
    }
    return all;
  }
  void Break(const std::string& reason) {
    broken_ = true;
    const LedgerLock lock(ledger_);
    ledger_.Break(reason);
  }
  // The nth next call of that name finds this done.
  void At(const std::string& call, std::uint64_t nth, std::function<void()> action) {
    const std::uint64_t when = sim_->Calls(call) + nth;
    sim_->SetHook([call, when, action = std::move(action)](std::string_view name, std::uint64_t count) {
      if (name == call && count == when) action();
      return 0;
    });
  }

  std::shared_ptr<SimulatorWorld> world_;
  std::unique_ptr<Simulator> sim_, owner_;
  std::vector<Event> events_;
  Ledger ledger_;
  ScriptedPeers peers_;
  std::map<AllocationId, DriverHandle> shared_;  // the owner's
  bool broken_ = false;                          // by the test

 private:
  void Adopt(AllocationId id, DriverHandle handle, Bytes bytes, bool mapped) {
    {
      const LedgerLock lock(ledger_);
      ledger_.SetHandle(id, handle);
    }
    if (mapped) Map(id, bytes);
  }
};

}  // namespace amem::test
