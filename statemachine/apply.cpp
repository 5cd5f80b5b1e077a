#include "statemachine/apply.h"

#include <algorithm>

#include "statemachine/fold.h"

namespace amem {

Status Fold::operator()(const SessionOpened& e) {
  if (s_.lifecycle != Lifecycle::kNew) return Bad("it is open already");
  s_.session = e;
  s_.lifecycle = Lifecycle::kRunning;
  return {};
}

// A process may end at any time, so this is right while paused and in the middle of a cycle, too.
Status Fold::operator()(const SessionClosed&) {
  if (s_.lifecycle == Lifecycle::kNew || s_.lifecycle == Lifecycle::kClosed) return Bad("it is not open");
  s_.lifecycle = Lifecycle::kClosed;
  return {};
}

Status Fold::operator()(const SessionBroken& e) {
  if (s_.broken.empty()) s_.broken = e.reason;
  return {};
}

Status Fold::operator()(const GroupChanged& e) {
  AMEM_TRY(Running());
  s_.session.group = e.group;
  return {};
}

Status Fold::operator()(const LibraryAttached& e) {
  s_.libraries.push_back(e);
  return {};
}

Status Fold::operator()(const Condensed& e) {
  if (s_.lifecycle != Lifecycle::kNew) return Bad("the state is not empty");
  if (e.totals.size() % 2 != 0) return Bad("its totals are damaged");
  s_.last = e.through;
  s_.next_allocation = e.next_allocation;
  s_.cycles = e.cycles;
  for (std::size_t i = 0; i + 1 < e.totals.size(); i += 2)
    if (e.totals[i] < kEventKinds) s_.totals.events[e.totals[i]] = e.totals[i + 1];
  return {};
}

Status Fold::EraseIfDead(AllocationId id) {
  Allocation* const a = Find(id);
  if (a == nullptr || !a->dead()) return {};
  AMEM_TRY(RemoveFromSlab(id, *a));
  if (const Slab* const slab = FindIn(s_.slabs, id)) AMEM_CHECK(slab->parts.empty(), id);
  s_.slabs.erase(id);
  AMEM_TRY(EraseMulticast(id));
  const CommunicatorId communicator = a->communicator;
  s_.allocations.erase(id);
  return UncountMemory(communicator);
}

Status Fold::Running(PoolId pool) const {
  const bool open = s_.lifecycle != Lifecycle::kNew && s_.lifecycle != Lifecycle::kClosed;
  const Owner owner = OwnerOf(open ? pool : PoolId{});
  if (owner.scope == nullptr) return Bad(ToText(pool) + " does not exist");
  return owner->lifecycle == Lifecycle::kRunning ? Status{} : Bad(LifecycleText(owner));
}

Status Fold::Add(AllocationId id, Allocation a) {
  // A multicast object that stays takes no part in a pause, and the driver has made it already.
  if (!a.multicast || a.rebuilt()) AMEM_TRY(Running(a.pool));
  if (!id) return Bad("zero is no id");
  if (a.bytes == 0) return Bad("its size is zero");
  if (s_.allocations.contains(id)) return Bad("that id is in use");
  a.guest_references = 1;
  a.kept_with_all = !s_.kept_whole.empty();
  CountMemory(a.communicator);
  s_.allocations.emplace(id, std::move(a));
  s_.next_allocation = std::max(s_.next_allocation, id.value + 1);
  return {};
}

Status Apply(State& state, const Event& event) {
  if (event.seq && event.seq.value != state.last.value + 1) {
    return {Code::kInvalid,
            "event " + std::to_string(event.seq.value) + " does not follow event " + std::to_string(state.last.value)};
  }
  if (const Status folded = std::visit(Fold{state, event.seq}, event.body); !folded) return folded.Within(ToText(event.body));
  if (event.seq) {
    state.last = event.seq;
    ++state.totals.events[event.body.index()];
  }
  return {};
}

}  // namespace amem
