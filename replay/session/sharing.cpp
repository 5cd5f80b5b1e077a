// Exports and imports of NCCL, and what peers ask of this session.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <thread>
#include <tuple>

#include "replay/peers/token.h"
#include "replay/session/session.h"

namespace amem {

// How long the service thread waits for the ledger before it answers "busy": others wait for that thread.
constexpr std::chrono::milliseconds kForAnAnswer{20}, kForANotice{1};

Result<Secret> Session::SecretOf(AllocationId allocation) {
  if (auto* const it = FindIn(secrets_, allocation)) return *it;
  auto secret = RandomSecret();
  if (secret.ok()) secrets_.emplace(allocation, *secret);
  return secret;
}

Result<UniqueFd> Session::Export(AllocationId allocation) {
  const auto gate = EnterCall();
  const PeerIdentity self = peers_->Self();
  Token token{self.session, allocation, {}, 0, self.pid};
  {
    const LedgerLock lock(ledger_);
    auto* const it = ledger_.Find(allocation);
    if (it == nullptr) return WrongCall("export", ToText(allocation), "it does not exist");
    if (!it->own() && !it->pool)
      return Status{Code::kUnsupported, "export " + ToText(allocation) + ": it is itself imported; export it from its owner",
                    cuda::kNotSupported};
    if (it->remote) std::tie(token.session, token.allocation) = std::pair(it->remote->owner, it->remote->allocation);
    AMEM_ASSIGN(token.secret, SecretOf(allocation));
    if (it->own()) ledger_.Record(Exported{allocation, 1});
    if (it->pool) return CountedDescriptor(allocation, token);
  }
  return MakeTokenDescriptor(token);
}

Result<UniqueFd> Session::CountedDescriptor(AllocationId allocation, const Token& token) {
  if (const auto* const made = FindIn(exported_, allocation)) return OpenCounted(made->get());
  AMEM_ASSIGN(auto made, MakeTokenDescriptor(token));
  AMEM_ASSIGN(auto descriptor, OpenCounted(made.get()));
  exported_.emplace(allocation, std::move(made));
  ledger_.Record(AllocationRetained{allocation, {}});
  return descriptor;
}

void Session::DropClosed(AllocationId touched) {
  if (exported_.contains(touched)) left_to_descriptors_.insert(touched);
  std::vector<AllocationId> closed;
  std::erase_if(left_to_descriptors_, [&](AllocationId id) REQUIRES(ledger_) {
    const auto* const token = FindIn(exported_, id);
    const Allocation* const a = ledger_.Find(id);
    if (token == nullptr || a == nullptr) return true;
    if (a->guest_references > 1 || a->mappings > 0 || !a->importers.empty()) return true;  // this is called again for it
    if (AnyOpen(token->get())) return false;
    closed.push_back(id);
    return true;
  });
  for (const AllocationId id : closed)
    if (!ReleaseOne(id).ok()) left_to_descriptors_.insert(id);
}

void Session::TagCycleEnded() {
  if (!ledger_.TryLockFor(kForANotice)) return;
  const Locked lock(*this, std::adopt_lock);
  DropClosed();
}

Result<AllocationId> Session::Import(int descriptor, const Origin& origin, bool of_others) {
  auto gate = EnterCall();
  if (!of_others) AMEM_TRY(RefuseWhilePaused("import an allocation"));
  pinned_.Busy();
  AMEM_ASSIGN(auto token, ReadTokenDescriptor(descriptor));
  return ImportToken(token, origin, gate);
}

Result<AllocationId> Session::ImportToken(const Token& token, const Origin& origin, std::shared_lock<CallGate>& gate) {
  constexpr std::chrono::milliseconds kOften{5};  // an owner's pause or resume takes some 25 ms, but may wait for others
  const Deadline until = In(options_.deadlines.call());
  auto imported = TryImport(token, origin);
  const auto in_a_cycle = [&] { return imported.status().driver_result() == kNotReady && !IsBusy(imported.status()); };
  while (in_a_cycle() && !Passed(until)) {
    gate.unlock();  // or a pause of this session, which the owner's may wait for, would wait for this call
    std::this_thread::sleep_for(kOften);
    gate.lock();
    imported = TryImport(token, origin);
  }
  return imported;
}

// The pool here that memory under a tag belongs to; this session pauses it together with the owner.
Result<PoolId> Session::JoinTag(const std::string& tag, PoolPolicy policy, InTags& in) {
  AMEM_ASSIGN(const auto pool, pools_->Join(tag, policy));
  EnterTag(pool, in);
  if (!in.paused) return pool;
  return Status{Code::kRefused, fmt::format("import memory of tag {}: refused, that tag is paused here; resume it first", tag),
                cuda::kIllegalState};
}

Result<AllocationId> Session::TryImport(const Token& token, const Origin& origin) {
  AllocationId as;
  {
    const LedgerLock lock(ledger_);
    as = ledger_.TakeAllocationId();
  }
  // Without the lock, because the owner may be waiting for this session.
  AMEM_ASSIGN(auto shared, peers_->Import(token, as));
  const Status refused = shared.pool.empty() ? RefuseWhilePaused("import an allocation") : Status{};
  auto imported = !refused.ok() ? Result<AllocationId>(refused)
                  : shared.part ? slabs_.Import(token, as, shared, origin, *peers_)
                                : ImportWhole(token, as, shared, origin);
  if (imported.ok()) {
    RememberLastHandle(*imported);
  } else {
    peers_->DropReference({token.session, token.allocation}, as);
  }
  return imported;
}

Result<AllocationId> Session::ImportWhole(const Token& token, AllocationId as, const SharedAllocation& shared,
                                          const Origin& origin) {
  InTags in;
  PoolId pool;
  if (!shared.pool.empty()) {
    AMEM_ASSIGN(pool, JoinTag(shared.pool, shared.pool_policy, in));
  }
  AMEM_ASSIGN(const auto handle, driver_.Import(shared.descriptor));
  const LedgerLock lock(ledger_);
  ledger_.SetHandle(as, handle);
  secrets_.emplace(as, token.secret);
  const auto stands_in = shared.incarnation.stands_in ? std::optional(DeviceOrdinal{}) : std::nullopt;
  if (shared.tag == MemoryTag::kMulticastReleased) ledger_.SetRebuilt(as, {shared.incarnation.number, stands_in, {}});
  const RemoteAllocation remote{token.session, token.allocation};
  ledger_.Record(
      Imported{as, remote, shared.bytes, shared.properties, 1, handle, origin.site, {}, shared.tag, origin.communicator, pool});
  return as;
}

// NCCL maps most allocations before it shares them. What it shares first, such as memory behind a symmetric window, it maps at
// addresses of its own choosing in all processes, where a part of a slab cannot be mapped.
void Session::GiveOwnHandle(AllocationId allocation) {
  const Allocation* a = ledger_.Entry(allocation);
  if (ledger_.state().lifecycle != Lifecycle::kRunning) return;
  if (a == nullptr || !a->placed() || a->reserved > 0 || a->mappings > 0 || !a->importers.empty()) return;
  const AllocationId slab = a->slab;
  if (slabs_.Back(allocation).ok()) RetireIfEmpty(slab);
}

// During a round the set does not grow: a session outside would keep the old memory, and could never pause or resume with the
// owner again. A member imports before its first vote.
Status Session::RefuseImport(const PeerIdentity& by, AllocationId allocation, PoolId pool) const {
  const State& state = ledger_.state();
  const Lifecycle lifecycle = state.LifecycleOf(pool);
  if (lifecycle == Lifecycle::kRunning) return {};
  const auto& cycle = state.ScopeOf(pool).cycle;
  const bool member = std::ranges::find(cycle.members, by.session) != cycle.members.end();
  const bool begins = lifecycle == Lifecycle::kPausing && cycle.phase <= PhaseKind::kPauseArrive;
  if (member && begins && !cycle.after_failed_undo) return {};
  const std::string what = ToText(allocation), self = ToText(peers_->Self());
  if (lifecycle == Lifecycle::kPaused) {
    const Pool* const of = FindIn(state.pools, pool);
    const std::string call = NameOf(CycleKind::kResume, of != nullptr ? of->tag : std::string());
    return {Code::kRefused, fmt::format("{} is paused at its owner, {}; call {} there", what, self, call), cuda::kIllegalState};
  }
  return {Code::kRefused, fmt::format("the owner of {}, {}, is in the middle of a pause or resume; try again", what, self),
          kNotReady};
}

Incarnation Session::IncarnationOf(AllocationId allocation) const {
  const Ledger::Rebuilt& rebuilt = ledger_.RebuiltAs(allocation);
  return {rebuilt.number, rebuilt.stands_in.has_value()};
}

Result<SharedAllocation> Session::Resolve(const PeerIdentity& by, const Token& token) {
  const State& state = ledger_.state();
  const std::string self = ToText(peers_->Self());
  auto* const a = FindIn(state.allocations, token.allocation);
  auto* const secret = FindIn(secrets_, token.allocation);
  if (a == nullptr || secret == nullptr) {
    return Status{Code::kNotFound,
                  fmt::format("{} does not exist any more at its owner, {}; its communicator was probably destroyed",
                              ToText(token.allocation), self),
                  cuda::kInvalidValue};
  }
  if (!SameSecret(*secret, token.secret)) {
    return Status{Code::kRefused,
                  fmt::format("the token's secret for {} is wrong; it was not made by {}", ToText(token.allocation), self),
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
  GiveOwnHandle(token.allocation);
  if (!a->slab) return shared;
  const bool first = memory->exports == 0;
  AMEM_ASSIGN(auto slab_secret, SecretOf(a->slab));
  shared.part = SharedPart{a->slab, slab_secret, a->offset};
  if (first) ledger_.Record(Exported{a->slab, 1});
  return shared;
}

Result<SharedAllocation> Session::OnImport(const PeerIdentity& by, AllocationId as, const Token& token) {
  if (!ledger_.TryLockFor(kForAnAnswer)) return ledger_.Held();
  LedgerLock lock(ledger_, std::adopt_lock);
  AMEM_ASSIGN(auto shared, Resolve(by, token));
  // The reference comes first, so that the allocation cannot die during the export.
  ledger_.Record(ReferenceAdded{token.allocation, by.session, as});
  lock.Unlock();
  if (shared.part) return shared;
  auto descriptor = ExportWhole(token.allocation);
  if (!descriptor.ok()) {
    const Locked again(*this);
    Dropped(by, token.allocation, as);
    return descriptor.status();
  }
  shared.descriptor = *std::move(descriptor);
  return shared;
}

// A slab's descriptor is kept for other peers, because an export costs ten times as much as a copy.
Result<UniqueFd> Session::ExportWhole(AllocationId allocation) {
  const bool slab = Inspect([&](const State& state) { return state.slabs.contains(allocation); });
  return ledger_.Export(allocation, driver_, slab);
}

Result<SharedAllocation> Session::OnReimport(const PeerIdentity& by, const ShareRequest& request) {
  if (!ledger_.TryLockFor(kForAnAnswer)) return ledger_.Held();
  LedgerLock lock(ledger_, std::adopt_lock);
  const auto* const found = ledger_.Find(request.allocation);
  if (found == nullptr || !found->importers.contains(Importer{by.session, request.as})) {
    return Status{Code::kRefused,
                  fmt::format("{} holds no reference to {} as {}", ToText(by), ToText(request.allocation), ToText(request.as))};
  }
  if (!found->resident) {
    return Status{Code::kNotFound,
                  fmt::format("{} has no memory yet at its owner, {}", ToText(request.allocation), ToText(peers_->Self()))};
  }
  SharedAllocation shared{{found->bytes, found->properties, {}, found->tag, IncarnationOf(request.allocation)}};
  // Memory stays until every member has voted on this phase, and the asking member has not.
  lock.Unlock();
  auto descriptor = ExportWhole(request.allocation);
  if (!descriptor.ok()) return descriptor.status().Within("export " + ToText(request.allocation));
  shared.descriptor = *std::move(descriptor);
  return shared;
}

void Session::LetGoOrBreak(AllocationId allocation) {
  if (const Status released = LetGo(allocation); !released.ok()) ledger_.Break(released.message());
}

bool Session::OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) {
  if (!ledger_.TryLockFor(kForANotice)) return false;
  const Locked lock(*this, std::adopt_lock);
  Dropped(by, allocation, as);
  return true;
}

void Session::Dropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) {
  const auto* const a = ledger_.Find(allocation);
  if (a == nullptr) return;
  const auto* const importer = FindIn(a->importers, Importer{by.session, as});
  if (importer == nullptr) return;
  if (a->importers.size() == 1 && *importer == 1 && a->guest_references == 0 && a->mappings == 0) LetGoOrBreak(allocation);
  const AllocationId slab = ledger_.state().slabs.contains(allocation) ? allocation : a->slab;
  ledger_.Record(ReferenceDropped{allocation, by.session, as});
  slabs_.Vacate(allocation);
  RetireIfEmpty(slab);
  DropClosed(allocation);
}

bool Session::OnPeerConnected(const PeerIdentity& peer) {
  if (!ledger_.TryLockFor(kForANotice)) return false;
  const LedgerLock lock(ledger_, std::adopt_lock);
  const auto* const found = FindIn(ledger_.state().peers, peer.session);
  const bool known = found != nullptr && found->connected;
  if (known && found->group == peer.group && found->rank == peer.rank) return true;
  ledger_.Record(PeerConnected{peer.session, peer.host, peer.pid, peer.group, peer.rank});
  return true;
}

bool Session::OnPeerLost(const PeerIdentity& peer, const std::string& reason) {
  if (!ledger_.TryLockFor(kForANotice)) return false;
  const Locked lock(*this, std::adopt_lock);
  const auto* const known = FindIn(ledger_.state().peers, peer.session);
  if (known == nullptr || !known->connected) return true;
  for (const auto& [id, a] : ledger_.state().allocations) {
    if (a.guest_references > 0 || a.mappings > 0 || a.importers.empty()) continue;
    if (std::ranges::all_of(a.importers, [&](const auto& one) { return one.first.by == peer.session; })) LetGoOrBreak(id);
  }
  ledger_.Record(PeerLost{peer.session, reason});
  for (const auto& [id, token] : exported_) left_to_descriptors_.insert(id);
  DropClosed();
  RetireEmptySlabs();
  return true;
}

Result<std::vector<SessionId>> Session::Neighbours(const std::string& tag, Deadline until) {
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

CycleProgress Session::Progress(const std::string& tag) {
  if (tag.empty()) {
    const auto [lifecycle, cycle] = ledger_.Progress();
    return {lifecycle, cycle};
  }
  if (!ledger_.TryLockFor(kForAnAnswer)) return {};
  const LedgerLock lock(ledger_, std::adopt_lock);
  const auto* const pool = FindIn(ledger_.state().pools, ledger_.state().PoolNamed(tag));
  return pool == nullptr ? CycleProgress{} : CycleProgress{pool->lifecycle, pool->cycles};
}

}  // namespace amem
