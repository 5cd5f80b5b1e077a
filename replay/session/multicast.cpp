// Multicast objects, and the memory that NCCL binds to them.
#include <algorithm>

#include "replay/session/session.h"

namespace amem {

AllocationId Session::NoteMulticast(MulticastCreated created) {
  const LedgerLock lock(ledger_);
  created.allocation = ledger_.TakeAllocationId();
  created.tag = options_.nvls == Nvls::kRelease ? MemoryTag::kMulticastReleased : MemoryTag::kNccl;
  ledger_.SetHandle(created.allocation, created.handle);
  ledger_.Record(created);
  return created.allocation;
}

void Session::PrepareBind(AllocationId memory) {
  const LedgerLock lock(ledger_);
  if (ledger_.Find(memory) != nullptr) GiveOwnHandle(memory);
}

bool Session::ForgetUnbound(AllocationId multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) {
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  const auto* const a = FindIn(state.allocations, multicast);
  if (a == nullptr || !a->rebuilt()) return false;
  if (ledger_.RebuiltAs(multicast).stands_in) return true;
  const auto* const object = FindIn(state.multicasts, multicast);
  if (object == nullptr) return false;
  const bool unbound = std::ranges::any_of(object->bindings, [&](const auto& one) {
    const MulticastBinding& b = one.second;
    return one.first == offset && b.device == device && b.bytes == bytes && !b.bound;
  });
  if (unbound) ledger_.Record(MulticastUnbound{multicast, device, offset, bytes});
  return unbound;
}

}  // namespace amem
