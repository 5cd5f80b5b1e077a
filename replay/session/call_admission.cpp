#include "replay/session/call_admission.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>

namespace amem {

Status CallAdmission::RefuseWhilePaused(std::string_view call, Address at) const {
  if (!paused()) return {};
  return {Code::kRefused,
          fmt::format("{}{}: refused, this process's NCCL memory is paused; call ncclResume first", call,
                      at ? " " + Hex(at) : std::string()),
          cuda::kIllegalState};
}

Status CallAdmission::RefuseInTag(std::string_view call, Address at) {
  return {Code::kRefused, fmt::format("{} {}: refused, the tag of that memory is paused; resume the tag first", call, Hex(at)),
          cuda::kIllegalState};
}

std::shared_lock<CallGate> CallAdmission::EnterLaunch(const char* call, void* stream) {
  driver_.NoteStream(call, stream);
  auto entered = gates_.Of({}).Enter(call, stream);
  if (paused()) entered.unlock();
  return entered;
}

void CallAdmission::EnterTag(PoolId tag, InTags& in, const char* call) {
  in.gates.push_back(gates_.Of(tag).Enter(call, nullptr));
  if (ledger_.tag_places().Runs(tag)) return;
  const LedgerLock lock(ledger_);
  in.paused = in.paused || ledger_.state().LifecycleOf(tag) != Lifecycle::kRunning;
}

// Memory that a network card holds stayed in place.
InTags CallAdmission::EnterTags(std::span<const Extent> touched, const char* call) {
  InTags in;
  if (!HasTags()) return in;
  std::set<PoolId> tags;
  for (const Extent& extent : touched) tags.merge(ledger_.tag_places().In(extent.address, extent.bytes));
  for (const PoolId tag : tags) {
    EnterTag(tag, in, call);
  }
  in.away = in.paused && std::ranges::any_of(touched, [&](const Extent& e) { return TouchesPaused(e.address, e.bytes); });
  return in;
}

InTags CallAdmission::EnterTagsOf(std::span<const AllocationId> allocations, const char* call) {
  InTags in;
  if (!HasTags()) return in;
  std::set<PoolId> tags;
  LedgerLock lock(ledger_);
  for (const AllocationId id : allocations) {
    const auto* const found = ledger_.Find(id);
    if (found != nullptr && found->pool) tags.insert(found->pool);
  }
  lock.Unlock();
  for (const PoolId tag : tags) EnterTag(tag, in, call);
  return in;
}

void CallAdmission::NoteRefused(const char* call) {
  constexpr std::chrono::milliseconds kPatience{10};  // NCCL waits for the answer
  if (!ledger_.TryLockFor(kPatience)) return;
  const LedgerLock lock(ledger_, std::adopt_lock);
  if (ledger_.state().lifecycle == Lifecycle::kClosed) return;
  refused_.Add(call, ledger_);
}

bool CallAdmission::TouchesPaused(Address address, Bytes bytes) {
  if (!paused() && !HasTags()) return false;
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  // During a cycle, mapped memory may be about to leave or may not have its contents yet.
  const bool between_cycles = !paused() || state.lifecycle == Lifecycle::kPaused;
  for (const auto& [at, mapping] : Touching(state.mappings, address, bytes)) {
    if (!mapping.present) return true;
    const auto* const allocation = FindIn(state.allocations, mapping.allocation);
    if (between_cycles || allocation == nullptr || allocation->pool) continue;
    if (WhyKept(*allocation) == KeepReason::kNone) return true;
  }
  return false;
}

}  // namespace amem
