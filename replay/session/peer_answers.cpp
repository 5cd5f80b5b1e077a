#include "replay/session/peer_answers.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "replay/peers/token.h"

namespace amem {

// How long the service thread waits for the ledger before it answers "busy": others wait for that thread.
constexpr std::chrono::milliseconds kForAnAnswer{20}, kForANotice{1};

PeerAnswers::PeerAnswers(const LowerParts& parts, Records& records, const PeerIdentity& self)
    : driver_(parts.driver),
      ledger_(parts.ledger),
      tokens_(parts.tokens),
      dropped_(parts.dropped),
      allocations_(parts.allocations),
      records_(records),
      self_(ToText(self)) {}

// During a round the set does not grow: a session outside would keep the old memory, and could never pause or resume with the
// owner again. A member imports before its first vote.
Status PeerAnswers::RefuseImport(const PeerIdentity& by, AllocationId allocation, PoolId pool) const {
  const State& state = ledger_.state();
  const Lifecycle lifecycle = state.LifecycleOf(pool);
  if (lifecycle == Lifecycle::kRunning) return {};
  const auto& cycle = state.ScopeOf(pool).cycle;
  const bool member = std::ranges::find(cycle.members, by.session) != cycle.members.end();
  const bool begins = lifecycle == Lifecycle::kPausing && cycle.phase <= PhaseKind::kPauseArrive;
  if (member && begins && !cycle.after_failed_undo) return {};
  const std::string what = ToText(allocation);
  if (lifecycle == Lifecycle::kPaused) {
    const Pool* const of = FindIn(state.pools, pool);
    const std::string call = NameOf(CycleKind::kResume, of != nullptr ? of->tag : std::string());
    return {Code::kRefused, fmt::format("{} is paused at its owner, {}; call {} there", what, self_, call),
            cuda::kIllegalState};
  }
  return {Code::kRefused, fmt::format("the owner of {}, {}, is in the middle of a pause or resume; try again", what, self_),
          kNotReady};
}

Incarnation PeerAnswers::IncarnationOf(AllocationId allocation) const {
  const Ledger::Rebuilt& rebuilt = ledger_.RebuiltAs(allocation);
  return {rebuilt.number, rebuilt.stands_in.has_value()};
}

Result<SharedAllocation> PeerAnswers::Resolve(const PeerIdentity& by, const Token& token) {
  const State& state = ledger_.state();
  auto* const a = FindIn(state.allocations, token.allocation);
  auto* const secret = tokens_.SecretOf(token.allocation, ledger_);
  if (a == nullptr || secret == nullptr) {
    return Status{Code::kNotFound,
                  fmt::format("{} does not exist any more at its owner, {}; its communicator was probably destroyed",
                              ToText(token.allocation), self_),
                  cuda::kInvalidValue};
  }
  if (!SameSecret(*secret, token.secret)) {
    return Status{Code::kRefused,
                  fmt::format("the token's secret for {} is wrong; it was not made by {}", ToText(token.allocation), self_),
                  cuda::kNotPermitted};
  }
  const Allocation* memory = a->slab ? ledger_.Entry(a->slab) : a;
  if (memory == nullptr) return ledger_.Broken();
  AMEM_TRY(RefuseImport(by, token.allocation, a->pool));
  SharedAllocation shared{{a->bytes, a->properties, {}, a->tag, IncarnationOf(token.allocation)}};
  if (auto* const pool = FindIn(state.pools, a->pool)) {
    shared.pool = pool->tag;
    shared.pool_policy = pool->policy;
  }
  allocations_.GiveOwnHandle(token.allocation, ledger_);
  if (!a->slab) return shared;
  const bool first = memory->exports == 0;
  AMEM_ASSIGN(const Token of_slab, tokens_.For(a->slab, ledger_));
  shared.part = SharedPart{a->slab, of_slab.secret, a->offset};
  if (first) ledger_.Record(Exported{a->slab, 1});
  return shared;
}

Result<SharedAllocation> PeerAnswers::OnImport(const PeerIdentity& by, AllocationId as, const Token& token) {
  if (!ledger_.TryLockFor(kForAnAnswer)) return ledger_.Held();
  LedgerLock lock(ledger_, std::adopt_lock);
  AMEM_ASSIGN(auto shared, Resolve(by, token));
  // The reference comes first, so that the allocation cannot die during the export.
  ledger_.Record(ReferenceAdded{token.allocation, by.session, as});
  lock.Unlock();
  if (shared.part) return shared;
  auto descriptor = ExportWhole(token.allocation);
  if (!descriptor.ok()) {
    const NotifyingLock again(ledger_, dropped_);
    allocations_.DropReference(by.session, token.allocation, as, ledger_);
    return descriptor.status();
  }
  shared.descriptor = *std::move(descriptor);
  return shared;
}

// A slab's descriptor is kept for other peers, because an export costs ten times as much as a copy.
Result<UniqueFd> PeerAnswers::ExportWhole(AllocationId allocation) {
  const bool slab = Inspect(ledger_, [&](const State& state) { return state.slabs.contains(allocation); });
  return ledger_.Export(allocation, driver_, slab);
}

Result<SharedAllocation> PeerAnswers::OnReimport(const PeerIdentity& by, const ShareRequest& request) {
  if (!ledger_.TryLockFor(kForAnAnswer)) return ledger_.Held();
  LedgerLock lock(ledger_, std::adopt_lock);
  const auto* const found = ledger_.Find(request.allocation);
  if (found == nullptr || !found->importers.contains(Importer{by.session, request.as})) {
    return Status{Code::kRefused,
                  fmt::format("{} holds no reference to {} as {}", ToText(by), ToText(request.allocation), ToText(request.as))};
  }
  if (!found->resident) {
    return Status{Code::kNotFound, fmt::format("{} has no memory yet at its owner, {}", ToText(request.allocation), self_)};
  }
  SharedAllocation shared{{found->bytes, found->properties, {}, found->tag, IncarnationOf(request.allocation)}};
  // Memory stays until every member has voted on this phase, and the asking member has not.
  lock.Unlock();
  auto descriptor = ExportWhole(request.allocation);
  if (!descriptor.ok()) return descriptor.status().Within("export " + ToText(request.allocation));
  shared.descriptor = *std::move(descriptor);
  return shared;
}

bool PeerAnswers::OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) {
  if (!ledger_.TryLockFor(kForANotice)) return false;
  const NotifyingLock lock(ledger_, dropped_, std::adopt_lock);
  allocations_.DropReference(by.session, allocation, as, ledger_);
  return true;
}

bool PeerAnswers::OnPeerConnected(const PeerIdentity& peer) {
  if (!ledger_.TryLockFor(kForANotice)) return false;
  const LedgerLock lock(ledger_, std::adopt_lock);
  const auto* const found = FindIn(ledger_.state().peers, peer.session);
  const bool known = found != nullptr && found->connected;
  if (known && found->group == peer.group && found->rank == peer.rank) return true;
  ledger_.Record(PeerConnected{peer.session, peer.host, peer.pid, peer.group, peer.rank});
  return true;
}

bool PeerAnswers::OnPeerLost(const PeerIdentity& peer, const std::string& reason) {
  if (!ledger_.TryLockFor(kForANotice)) return false;
  const NotifyingLock lock(ledger_, dropped_, std::adopt_lock);
  const auto* const known = FindIn(ledger_.state().peers, peer.session);
  if (known == nullptr || !known->connected) return true;
  for (const auto& [id, a] : ledger_.state().allocations) {
    if (a.guest_references > 0 || a.mappings > 0 || a.importers.empty()) continue;
    if (std::ranges::all_of(a.importers, [&](const auto& one) { return one.first.by == peer.session; }))
      allocations_.GiveUpOrBreak(id, ledger_);
  }
  ledger_.Record(PeerLost{peer.session, reason});
  tokens_.LeaveAllToDescriptors(ledger_);
  allocations_.DropClosed(ledger_);
  allocations_.RetireEmptySlabs(ledger_);
  return true;
}

Result<std::vector<SessionId>> PeerAnswers::Neighbours(const std::string& tag, Deadline until) {
  if (!ledger_.TryLockFor(LeftUntil(until))) return ledger_.Held();
  const LedgerLock lock(ledger_, std::adopt_lock);
  const State& state = ledger_.state();
  std::vector<SessionId> found;
  const PoolId pool = tag.empty() ? PoolId{} : state.PoolNamed(tag);
  if (!tag.empty() && !pool) return found;
  std::set<SessionId> sought;  // a few, of which the first allocations usually tell
  for (const auto& [id, peer] : state.peers)
    if (peer.connected && id != state.session.session) sought.insert(id);
  const auto shares = [&](SessionId session) {
    if (sought.erase(session) != 0) found.push_back(session);
  };
  for (auto it = state.allocations.begin(); it != state.allocations.end() && !sought.empty(); ++it) {
    const Allocation& a = it->second;
    if (a.pool != pool) continue;
    if (a.remote) shares(a.remote->owner);
    for (const auto& [importer, count] : a.importers) shares(importer.by);
  }
  return found;
}

CycleProgress PeerAnswers::Progress(const std::string& tag) {
  if (tag.empty()) {
    const auto [lifecycle, cycle] = ledger_.Progress();
    return {lifecycle, cycle};
  }
  if (!ledger_.TryLockFor(kForAnAnswer)) return {};
  const LedgerLock lock(ledger_, std::adopt_lock);
  const auto* const pool = FindIn(ledger_.state().pools, ledger_.state().PoolNamed(tag));
  return pool == nullptr ? CycleProgress{} : CycleProgress{pool->lifecycle, pool->cycles};
}

bool PeerAnswers::OnWitnessed(std::span<const EventBody> facts, std::chrono::milliseconds patience) {
  return records_.TryNote(facts, patience);
}

}  // namespace amem
