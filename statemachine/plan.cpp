#include "statemachine/plan.h"

#include <algorithm>
#include <set>
#include <utility>

namespace amem {
namespace {

// Where each allocation is mapped, and how. It refers to the state that it was made of.
class Places {
 public:
  using Place = std::map<Address, Mapping>::value_type;
  using Registered = std::map<RegionId, Region>::value_type;
  explicit Places(const State& state) {
    for (const Place& place : state.mappings) places_[place.second.allocation].push_back(&place);
    for (const Registered& region : state.regions) regions_[region.second.allocation].push_back(&region);
  }
  [[nodiscard]] const std::vector<const Place*>& Of(AllocationId id) const {
    const auto* const found = FindIn(places_, id);
    return found == nullptr ? none_ : *found;
  }
  // Appends a step on each registration of the allocation whose presence on the card is `present`, but for those that a pause
  // left.
  void OnRegions(StepKind kind, AllocationId id, const Allocation& a, bool present, std::vector<Step>& steps) const {
    const auto* const found = FindIn(regions_, id);
    if (found == nullptr) return;
    for (const Registered* const one : *found) {
      const Region& region = one->second;
      if (region.present != present || !region.kept.empty()) continue;
      steps.push_back({kind, id, region.address, region.bytes, DeviceOrdinal{a.properties.location.id}, 0, one->first});
    }
  }

 private:
  std::map<AllocationId, std::vector<const Place*>> places_;
  std::map<AllocationId, std::vector<const Registered*>> regions_;
  std::vector<const Place*> none_;
};

// A pause left the allocation in place, for a reason that may have gone since: it stays until the next pause. If the undo of a
// resume saved its contents, the contents that are saved already would be at risk.
bool LeftByPause(const State& state, const Allocation& a) {
  return state.LifecycleOf(a.pool) == Lifecycle::kResuming && a.resident && !a.saved && state.Preserves(a);
}

bool Leaves(const State& state, const Allocation& a) {
  return !a.placed() && WhyKept(a) == KeepReason::kNone && !LeftByPause(state, a);
}

Step On(StepKind kind, AllocationId id, const Allocation& a, Address address = {}) {
  return {kind, id, address, a.bytes, a.on_device() ? DeviceOrdinal{a.properties.location.id} : DeviceOrdinal{}};
}

// Whether a copy can reach the contents there: it is a mapping of the whole allocation that its own device may access.
bool Reaches(const Mapping& m, const Allocation& a) {
  return m.offset == 0 && m.bytes == a.bytes && Allows(m.access, {a.properties.location, 3});
}

// Where it can, `now` or once all is mapped; 0: nowhere.
Address Reachable(AllocationId id, const Allocation& a, const Places& places, bool now) {
  for (const Places::Place* const place : places.Of(id)) {
    const auto& [address, m] = *place;
    if (Reaches(m, a) && (!now || (m.present && m.accessible))) return address;
  }
  return {};
}

bool NeedsSaving(const State& state, const Allocation& a) {
  return state.Preserves(a) && Leaves(state, a) && a.resident && !a.saved;
}

void MapAll(AllocationId id, const Allocation& a, const Places& places, std::vector<Step>& steps) {
  for (const Places::Place* const place : places.Of(id)) {
    const auto& [address, m] = *place;
    if (!m.present) steps.push_back(On(StepKind::kMap, id, a, address));
    if (!m.accessible && !m.access.empty()) steps.push_back(On(StepKind::kSetAccess, id, a, address));
  }
}

void UnmapAll(AllocationId id, const Allocation& a, const Places& places, std::vector<Step>& steps) {
  for (const Places::Place* const place : places.Of(id))
    if (place->second.present) steps.push_back(On(StepKind::kUnmap, id, a, place->first));
}

// Steps for the bindings of an object that are not `bound` yet, or, if false, still are.
void BindAll(const State& state, AllocationId object, bool bound, std::vector<Step>& steps) {
  const auto* const multicast = FindIn(state.multicasts, object);
  if (multicast == nullptr) return;
  for (const auto& [offset, b] : multicast->bindings)
    if (b.bound != bound) steps.push_back({bound ? StepKind::kBind : StepKind::kUnbind, object, {}, b.bytes, b.device, offset});
}

// Unmaps the multicast objects that this session owns, or those that it imported, and unbinds its memory from them.
void PlanUnbind(const State& state, const Places& places, bool own, std::vector<Step>& steps) {
  for (const auto& [id, a] : state.allocations) {
    if (!a.rebuilt() || a.own() != own) continue;
    UnmapAll(id, a, places, steps);
    BindAll(state, id, false, steps);
  }
}

// Binding and mapping of multicast objects, after every session has added its devices: until then the driver blocks these
// calls.
void PlanBind(const State& state, const Places& places, std::vector<Step>& steps) {
  for (const auto& [id, a] : state.allocations) {
    if (!a.rebuilt()) continue;
    BindAll(state, id, true, steps);
    MapAll(id, a, places, steps);
  }
}

void PlanDrop(const State& state, PoolId pool, const Places& places, bool own, StepKind release, std::vector<Step>& steps) {
  for (const auto& [id, a] : state.allocations) {
    if (a.pool != pool || a.own() != own || !Leaves(state, a)) continue;
    if (NeedsSaving(state, a)) steps.push_back(On(StepKind::kSave, id, a, Reachable(id, a, places, true)));
    places.OnRegions(StepKind::kDeregister, id, a, true, steps);
    if (!a.multicast) UnmapAll(id, a, places, steps);
    if (a.resident) steps.push_back(On(release, id, a));
  }
}

// Where the substitute for a lost owner's memory is: on a device that the mappings give access to, if possible one that this
// process allocates on, because clearing the memory on any other would open a context there. (The properties name a device by
// the ordinal that it had in the owner's process.)
DeviceOrdinal SubstituteDevice(const State& state, AllocationId id, const Places& places) {
  std::vector<DeviceOrdinal> used, reached;
  for (const auto& [other, a] : state.allocations)
    if (a.own() && a.on_device()) used.emplace_back(a.properties.location.id);
  for (const Places::Place* const place : places.Of(id)) {
    for (const AccessDescriptor& d : place->second.access)
      if (d.location.type == LocationType::kDevice) reached.emplace_back(d.location.id);
  }
  const auto both = std::ranges::find_first_of(reached, used);
  if (both != reached.end()) return *both;
  return !reached.empty() ? reached.front() : !used.empty() ? used.front() : DeviceOrdinal{};
}

void PlanReturn(const State& state, PoolId pool, const Places& places, bool own, StepKind acquire, std::vector<Step>& steps) {
  for (const auto& [id, a] : state.allocations) {
    if (a.pool != pool || a.own() != own) continue;
    const bool lost = state.IsSubstitute(id, a);
    if (!a.resident && lost) steps.push_back({StepKind::kCreate, id, {}, a.bytes, SubstituteDevice(state, id, places)});
    if (!a.resident && !lost) steps.push_back(On(acquire, id, a));
    if (!a.rebuilt()) MapAll(id, a, places, steps);
    places.OnRegions(StepKind::kRegister, id, a, false, steps);
    const auto* const multicast = a.rebuilt() && !lost ? FindIn(state.multicasts, id) : nullptr;
    if (multicast == nullptr) continue;
    for (const DeviceOrdinal device : multicast->missing) steps.push_back({StepKind::kAddDevice, id, {}, 0, device});
  }
}

std::vector<Step> Quiesce(const State& state, PoolId pool) {
  std::set<std::int32_t> devices;
  for (const auto& [id, a] : state.allocations)
    if (a.pool == pool && a.on_device() && a.own()) devices.insert(a.properties.location.id);
  for (const auto& [address, m] : state.mappings) {
    const auto* const a = FindIn(state.allocations, m.allocation);
    if (a == nullptr || a->pool != pool) continue;
    for (const AccessDescriptor& d : m.access)
      if (d.location.type == LocationType::kDevice) devices.insert(d.location.id);
  }
  std::vector<Step> steps;
  for (const std::int32_t device : devices) steps.push_back({StepKind::kQuiesce, {}, {}, 0, DeviceOrdinal{device}});
  return steps;
}

std::vector<Step> CheckMemory(const State& state, PoolId pool, const Places& places) {
  std::map<std::int32_t, Bytes> needed;
  std::set<std::pair<std::int32_t, Bytes>> substitutes;  // pieces of one size on one device are the same memory
  for (const auto& [id, a] : state.allocations) {
    if (a.pool != pool || a.resident || !a.on_device()) continue;
    if (a.own()) needed[a.properties.location.id] += a.bytes;
    if (state.Orphaned(a)) substitutes.emplace(SubstituteDevice(state, id, places).value, SubstitutePiece(a.bytes));
  }
  for (const auto& [device, bytes] : substitutes) needed[device] += bytes;
  std::vector<Step> steps;
  for (const auto& [device, bytes] : needed) steps.push_back({StepKind::kCheckMemory, {}, {}, bytes, DeviceOrdinal{device}});
  return steps;
}

// Adds a step of kind `begin` for each device of `contents`.
void BeginCopies(StepKind begin, const std::vector<Step>& contents, PlannedPhase& phase) {
  std::map<DeviceOrdinal, std::vector<Step>> by_device;
  for (const Step& step : contents) by_device[step.device].push_back(step);
  for (auto& [device, own] : by_device) {
    Bytes bytes = 0;
    for (const Step& step : own) bytes += step.bytes;
    phase.steps.push_back({begin, {}, {}, bytes, device});
    phase.copies.push_back(std::move(own));
  }
}

PlannedPhase PlanSave(const State& state, PoolId pool, const Places& places, bool drains) {
  std::vector<Step> saves;
  for (const auto& [id, a] : state.allocations)
    if (a.pool == pool && NeedsSaving(state, a)) saves.push_back(On(StepKind::kSave, id, a, Reachable(id, a, places, true)));
  PlannedPhase phase{PhaseKind::kPauseSave, {}};
  if (drains) phase.steps.push_back({StepKind::kDrain, {}, {}, 0, {}});
  BeginCopies(StepKind::kScan, saves, phase);
  return phase;
}

}  // namespace

Plan PlanPause(const State& state, PoolId pool) {
  const Places places(state);
  std::vector<Step> release;
  if (!pool) {
    PlanUnbind(state, places, false, release);
    PlanUnbind(state, places, true, release);
  }
  PlanDrop(state, pool, places, false, StepKind::kReleaseImport, release);
  PlanDrop(state, pool, places, true, StepKind::kReleaseOwn, release);
  // What undoes a resume finds the network as the pause has left it.
  const bool undo = state.LifecycleOf(pool) == Lifecycle::kResuming;
  const bool drains = !undo && std::ranges::find(release, StepKind::kDeregister, &Step::kind) != release.end();
  return {CycleKind::kPause,
          {{PhaseKind::kPauseArrive, Quiesce(state, pool)},
           PlanSave(state, pool, places, drains),
           {PhaseKind::kPauseReleaseOwn, std::move(release)},
           {PhaseKind::kPauseGone, {{StepKind::kVerify, {}, {}, 0, {}}}}}};
}

namespace {

// Whether owners may have given back the memory that is still imported here, and make it anew: then what is mapped here is a
// copy that nobody else sees. Imports are in doubt after a failed undo, and from the phase before the release on, because this
// session may be stopped before it reads that the phase has passed.
bool ImportsInDoubt(const State& state, PoolId pool) {
  const Lifecycle lifecycle = state.LifecycleOf(pool);
  const Cycle& cycle = state.ScopeOf(pool).cycle;
  if (lifecycle == Lifecycle::kResuming) return !cycle.phase;  // begun with imports in place
  if (lifecycle != Lifecycle::kPausing || !cycle.phase) return false;
  const bool undone_already = *cycle.phase > PhaseKind::kPauseGone;
  return !undone_already && (cycle.after_failed_undo || *cycle.phase >= PhaseKind::kPauseSave);
}

// Own multicast objects that were made anew and then lost a member, so that they can never be complete.
void DropHopeless(const State& state, const Places& places, std::vector<Step>& drop) {
  for (const auto& [id, multicast] : state.multicasts) {
    const auto* const a = FindIn(state.allocations, id);
    if (a == nullptr || !a->own() || !a->rebuilt() || !a->resident || !multicast.fresh || !multicast.incomplete) continue;
    UnmapAll(id, *a, places, drop);
    BindAll(state, id, false, drop);
    drop.push_back(On(StepKind::kReleaseOwn, id, *a));
  }
}

void Forget(AllocationId released, State& after) {
  if (auto* const a = FindIn(after.allocations, released)) a->resident = false;
  auto* const multicast = FindIn(after.multicasts, released);
  if (multicast == nullptr) return;
  multicast->missing = multicast->added;
  for (auto& [offset, b] : multicast->bindings) b.bound = false;
}

// The state once what is in doubt, and what cannot be completed, was dropped.
State WithoutDoubts(const State& state, PoolId pool, const Places& places, std::vector<Step>& drop) {
  const bool imports_too = ImportsInDoubt(state, pool);
  if (imports_too && !pool) PlanUnbind(state, places, false, drop);
  if (imports_too) PlanDrop(state, pool, places, false, StepKind::kReleaseImport, drop);
  if (!pool) DropHopeless(state, places, drop);
  if (drop.empty()) return state;
  State after = state;
  for (const Step& step : drop) {
    if (step.kind == StepKind::kReleaseImport || step.kind == StepKind::kReleaseOwn) Forget(step.allocation, after);
    const auto unmapped = step.kind == StepKind::kUnmap ? after.mappings.find(step.address) : after.mappings.end();
    if (unmapped != after.mappings.end()) unmapped->second.present = unmapped->second.accessible = false;
  }
  return after;
}

bool NeedsRestoring(const Allocation& a) { return a.saved && (a.awaiting_restore || !a.resident); }

// The phase that creates own memory, with copies back as soon as there is enough to copy to. `begun`: the allocations whose
// contents are then on their way.
PlannedPhase PlanCreateOwn(const State& state, std::vector<Step> steps, std::set<AllocationId>& begun) {
  PlannedPhase phase{PhaseKind::kResumeCreateOwn, {}};
  std::vector<Step> reachable;
  Bytes bytes = 0;
  const auto begin = [&] {
    BeginCopies(StepKind::kBeginRestore, std::exchange(reachable, {}), phase);
    bytes = 0;
  };
  for (const Step& step : steps) {
    phase.steps.push_back(step);
    if (step.kind != StepKind::kSetAccess) continue;
    const auto* const a = FindIn(state.allocations, step.allocation);
    const auto mapping = state.mappings.find(step.address);
    if (a == nullptr || mapping == state.mappings.end()) continue;
    if (!NeedsRestoring(*a) || !Reaches(mapping->second, *a)) continue;
    if (!begun.insert(step.allocation).second) continue;
    reachable.push_back(On(StepKind::kRestore, step.allocation, *a, step.address));
    bytes += a->bytes;
    if (bytes >= kRestoreAtOnce) begin();
  }
  begin();
  return phase;
}

struct OwnersSteps {
  std::vector<std::vector<Step>> batches;
  AllocationId last;
};

// Puts a step into its owner's last batch, or into a new one. Steps of one allocation stay together.
void AddToBatches(const Step& step, OwnersSteps& owner) {
  constexpr std::size_t kMost = 24;  // some 8 allocations: import, map, access
  auto& batches = owner.batches;
  const std::size_t enough = kMost >> (3 - std::min<std::size_t>(batches.size(), 3));
  if (batches.empty() || (batches.back().size() >= enough && step.allocation != owner.last)) batches.emplace_back();
  batches.back().push_back(step);
  owner.last = step.allocation;
}

void AppendBatch(SessionId owner, const std::vector<Step>& steps, PlannedPhase& phase) {
  ImportBatch batch{owner, {}};
  for (const Step& step : steps) {
    phase.steps.push_back(step);
    if (step.kind == StepKind::kImport) batch.imports.push_back(step.allocation);
  }
  if (!batch.imports.empty()) phase.imports.push_back(std::move(batch));
}

void AppendImports(const State& state, const std::vector<Step>& steps, PlannedPhase& phase) {
  std::map<SessionId, OwnersSteps> owners;
  for (const Step& step : steps) {
    const auto* const a = FindIn(state.allocations, step.allocation);
    const bool imported = a != nullptr && a->remote;
    AddToBatches(step, owners[imported ? a->remote->owner : SessionId{}]);
  }
  const auto after_self = owners.upper_bound(state.session.session);
  std::size_t turns = 0;
  for (const auto& [id, owner] : owners) turns = std::max(turns, owner.batches.size());
  for (std::size_t turn = 0; turn < turns; ++turn) {
    const auto take = [&](auto begin, auto end) {
      for (auto it = begin; it != end; ++it)
        if (turn < it->second.batches.size()) AppendBatch(it->first, it->second.batches[turn], phase);
    };
    take(after_self, owners.end());
    take(owners.begin(), after_self);
  }
}

// `begun`: the allocations whose contents are on their way already.
PlannedPhase PlanImport(const State& state, PoolId pool, const Places& places, const std::set<AllocationId>& begun) {
  PlannedPhase phase{PhaseKind::kResumeImport, {}};
  std::vector<Step> returns, imports, late, restores;
  PlanReturn(state, pool, places, false, StepKind::kImport, returns);
  for (const Step& step : returns) {
    // Substitutes for lost memory come first: clearing one waits for all copies of its device.
    const auto* const a = FindIn(state.allocations, step.allocation);
    (a != nullptr && state.Orphaned(*a) ? phase.steps : imports).push_back(step);
  }
  for (const auto& [id, a] : state.allocations) {
    if (a.pool != pool || !NeedsRestoring(a)) continue;
    restores.push_back(On(StepKind::kRestore, id, a, Reachable(id, a, places, false)));
    if (!begun.contains(id)) late.push_back(restores.back());
  }
  BeginCopies(StepKind::kBeginRestore, late, phase);
  AppendImports(state, imports, phase);
  phase.steps.insert(phase.steps.end(), restores.begin(), restores.end());
  return phase;
}

Plan PlanReturnOfAll(const State& state, PoolId pool, std::vector<Step> create) {
  const Places places(state);
  std::set<AllocationId> begun;
  PlanReturn(state, pool, places, true, StepKind::kCreate, create);
  PlannedPhase create_own = PlanCreateOwn(state, std::move(create), begun);
  std::vector<Step> bind;
  if (!pool) PlanBind(state, places, bind);
  bind.push_back({StepKind::kVerify, {}, {}, 0, {}});
  return {CycleKind::kResume,
          {{PhaseKind::kResumeArrive, CheckMemory(state, pool, places)},
           std::move(create_own),
           PlanImport(state, pool, places, begun),
           {PhaseKind::kResumeVerify, std::move(bind)},
           {PhaseKind::kResumeOpen, {}}}};
}

}  // namespace

Bytes SubstitutePiece(Bytes whole) {
  constexpr Bytes kMost = Bytes{32} << 20;
  return std::min(whole & (~whole + 1), kMost);
}

Plan PlanResume(const State& state, PoolId pool) {
  std::vector<Step> drop;
  const State after = WithoutDoubts(state, pool, Places(state), drop);
  return PlanReturnOfAll(after, pool, std::move(drop));
}

}  // namespace amem
