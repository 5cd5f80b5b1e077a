#include "replay/session/sharing.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <tuple>

#include "replay/peers/token.h"

namespace amem {

Sharing::Sharing(const LowerParts& parts, Peers& peers, PinnedSupply& pinned, Pools& pools)
    : options_(parts.options),
      session_(parts.session),
      driver_(parts.driver),
      ledger_(parts.ledger),
      calls_(parts.calls),
      tokens_(parts.tokens),
      allocations_(parts.allocations),
      slabs_(parts.slabs),
      peers_(peers),
      pinned_(pinned),
      pools_(pools) {}

Result<UniqueFd> Sharing::Export(AllocationId allocation) {
  const auto gate = calls_.EnterCall();
  LedgerLock lock(ledger_);
  auto* const it = ledger_.Find(allocation);
  if (it == nullptr) return WrongCall("export", ToText(allocation), "it does not exist");
  if (!it->own() && !it->pool)
    return Status{Code::kUnsupported, "export " + ToText(allocation) + ": it is itself imported; export it from its owner",
                  cuda::kNotSupported};
  AMEM_ASSIGN(Token token, tokens_.For(allocation, ledger_));
  if (it->remote) std::tie(token.session, token.allocation) = std::pair(it->remote->owner, it->remote->allocation);
  if (it->own()) ledger_.Record(Exported{allocation, 1});
  if (it->pool) {
    allocations_.DropUnused(ledger_);
    return tokens_.CountedDescriptor(allocation, token, ledger_);
  }
  lock.Unlock();
  return MakeTokenDescriptor(token);
}

Result<AllocationId> Sharing::Import(int descriptor, const Origin& origin, bool of_others) {
  auto gate = calls_.EnterCall();
  if (!of_others) AMEM_TRY(calls_.RefuseWhilePaused("import an allocation"));
  pinned_.Busy();
  AMEM_ASSIGN(auto token, ReadTokenDescriptor(descriptor));
  return ImportToken(token, origin, gate);
}

Result<AllocationId> Sharing::ImportToken(const Token& token, const Origin& origin, std::shared_lock<CallGate>& gate) {
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

Result<AllocationId> Sharing::TryImport(const Token& token, const Origin& origin) {
  AllocationId as;
  {
    const LedgerLock lock(ledger_);
    as = ledger_.TakeAllocationId();
  }
  // Without the lock, because the owner may be waiting for this session.
  AMEM_ASSIGN(auto shared, peers_.Import(token, as));
  const Status refused = shared.pool.empty() ? calls_.RefuseWhilePaused("import an allocation") : Status{};
  auto imported = !refused.ok() ? Result<AllocationId>(refused)
                  : shared.part ? slabs_.Import(token, as, shared, origin, peers_)
                                : ImportWhole(token, as, shared, origin);
  if (imported.ok()) {
    LastHandle::OfThread() = {session_, *imported};
  } else {
    peers_.DropReference({token.session, token.allocation}, as);
  }
  return imported;
}

Result<AllocationId> Sharing::ImportWhole(const Token& token, AllocationId as, const SharedAllocation& shared,
                                          const Origin& origin) {
  InTags in;
  PoolId pool;
  if (!shared.pool.empty()) {
    AMEM_ASSIGN(pool, pools_.Join(shared.pool, shared.pool_policy, in));
  }
  AMEM_ASSIGN(const auto handle, driver_.Import(shared.descriptor));
  const LedgerLock lock(ledger_);
  ledger_.SetHandle(as, handle);
  tokens_.SetSecret(as, token.secret, ledger_);
  const auto stands_in = shared.incarnation.stands_in ? std::optional(DeviceOrdinal{}) : std::nullopt;
  if (shared.tag == MemoryTag::kMulticastReleased) ledger_.SetRebuilt(as, {shared.incarnation.number, stands_in, {}});
  const RemoteAllocation remote{token.session, token.allocation};
  ledger_.Record(
      Imported{as, remote, shared.bytes, shared.properties, 1, handle, origin.site, {}, shared.tag, origin.communicator, pool});
  return as;
}

}  // namespace amem
