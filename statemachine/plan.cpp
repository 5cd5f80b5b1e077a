#include "statemachine/plan.h"

#include <algorithm>
#include <set>
#include <utility>

namespace amem {
namespace {

using Places = std::map<AllocationId, std::vector<Address>>;

Places PlacesOf(const State& state) {
  Places places;
  for (const auto& [address, m] : state.mappings) places[m.allocation].push_back(address);
  return places;
}

bool Leaves(const Allocation& a) { return !a.placed() && WhyKept(a) == KeepReason::kNone; }

Step On(StepKind kind, AllocationId id, const Allocation& a, Address address = {}) {
  return {kind, id, address, a.bytes, a.on_device() ? DeviceOrdinal{a.properties.location.id} : DeviceOrdinal{}};
}

// Where the contents can be reached by a copy: a mapping of the whole allocation that its own device may access; 0 if none.
Address Reachable(const State& state, AllocationId id, const Allocation& a, const Places& places, bool now) {
  const auto it = places.find(id);
  if (it == places.end()) return {};
  for (const Address address : it->second) {
    const Mapping& m = state.mappings.at(address);
    if (now && !(m.present && m.accessible)) continue;
    if (m.offset != 0 || m.bytes != a.bytes) continue;
    for (const AccessDescriptor& d : m.access) {
      if (d.location == a.properties.location && d.flags == 3) return address;
    }
  }
  return {};
}

bool NeedsSaving(const Allocation& a) { return a.own() && Leaves(a) && a.resident && !a.saved; }

void PlanDrop(const State& state, const Places& places, bool own, StepKind release, std::vector<Step>& steps) {
  for (const auto& [id, a] : state.allocations) {
    if (a.own() != own || !Leaves(a)) continue;
    if (NeedsSaving(a)) steps.push_back(On(StepKind::kSave, id, a, Reachable(state, id, a, places, true)));
    if (const auto it = places.find(id); it != places.end()) {
      for (const Address address : it->second) {
        if (state.mappings.at(address).present) steps.push_back(On(StepKind::kUnmap, id, a, address));
      }
    }
    if (a.resident) steps.push_back(On(release, id, a));
  }
}

// Where memory stands in for a lost owner's: on a device that the mappings give access to. (The properties name a device by the
// ordinal that it had in the owner's process.)
DeviceOrdinal StandInDevice(const State& state, AllocationId id, const Places& places) {
  if (const auto it = places.find(id); it != places.end()) {
    for (const Address address : it->second) {
      for (const AccessDescriptor& d : state.mappings.at(address).access) {
        if (d.location.type == LocationType::kDevice) return DeviceOrdinal{d.location.id};
      }
    }
  }
  for (const auto& [other, a] : state.allocations) {
    if (a.own() && a.on_device()) return DeviceOrdinal{a.properties.location.id};
  }
  return {};
}

Step StandIn(const State& state, AllocationId id, const Allocation& a, const Places& places) {
  return {StepKind::kCreate, id, {}, a.bytes, StandInDevice(state, id, places)};
}

void PlanReturn(const State& state, const Places& places, bool own, StepKind acquire, std::vector<Step>& steps) {
  for (const auto& [id, a] : state.allocations) {
    if (a.own() != own) continue;
    if (!a.resident) steps.push_back(state.Orphaned(a) ? StandIn(state, id, a, places) : On(acquire, id, a));
    const auto it = places.find(id);
    if (it == places.end()) continue;
    for (const Address address : it->second) {
      const Mapping& m = state.mappings.at(address);
      if (!m.present) steps.push_back(On(StepKind::kMap, id, a, address));
      if (!m.accessible && !m.access.empty()) steps.push_back(On(StepKind::kSetAccess, id, a, address));
    }
  }
}

std::vector<Step> Quiesce(const State& state) {
  std::set<std::int32_t> devices;
  for (const auto& [id, a] : state.allocations) {
    if (a.on_device() && a.own()) devices.insert(a.properties.location.id);
  }
  for (const auto& [address, m] : state.mappings) {
    for (const AccessDescriptor& d : m.access) {
      if (d.location.type == LocationType::kDevice) devices.insert(d.location.id);
    }
  }
  std::vector<Step> steps;
  for (const std::int32_t device : devices) steps.push_back({StepKind::kQuiesce, {}, {}, 0, DeviceOrdinal{device}});
  return steps;
}

std::vector<Step> CheckMemory(const State& state, const Places& places) {
  std::map<std::int32_t, Bytes> needed;
  std::set<std::pair<std::int32_t, Bytes>> stand_ins;  // pieces of one size on one device are the same memory
  for (const auto& [id, a] : state.allocations) {
    if (a.resident || !a.on_device()) continue;
    if (a.own()) needed[a.properties.location.id] += a.bytes;
    if (state.Orphaned(a)) stand_ins.emplace(StandInDevice(state, id, places).value, StandInPiece(a.bytes));
  }
  for (const auto& [device, bytes] : stand_ins) needed[device] += bytes;
  std::vector<Step> steps;
  for (const auto& [device, bytes] : needed) steps.push_back({StepKind::kCheckMemory, {}, {}, bytes, DeviceOrdinal{device}});
  return steps;
}

// One step for each device that has contents to save.
std::vector<Step> Find(const State& state) {
  std::map<std::int32_t, Bytes> bytes;
  for (const auto& [id, a] : state.allocations) {
    if (NeedsSaving(a)) bytes[a.properties.location.id] += a.bytes;
  }
  std::vector<Step> steps;
  for (const auto& [device, sum] : bytes) steps.push_back({StepKind::kScan, {}, {}, sum, DeviceOrdinal{device}});
  return steps;
}

}  // namespace

std::vector<Step> ContentsToSave(const State& state) {
  const Places places = PlacesOf(state);
  std::vector<Step> steps;
  for (const auto& [id, a] : state.allocations) {
    if (NeedsSaving(a)) steps.push_back(On(StepKind::kSave, id, a, Reachable(state, id, a, places, true)));
  }
  return steps;
}

std::optional<Step> ContentsToRestore(const State& state, AllocationId id, Address address) {
  const auto it = state.allocations.find(id);
  if (it == state.allocations.end() || !it->second.saved || !it->second.awaiting_restore) return std::nullopt;
  const Address at = Reachable(state, id, it->second, {{id, {address}}}, true);
  if (!at) return std::nullopt;
  return On(StepKind::kRestore, id, it->second, at);
}

Plan PlanPause(const State& state) {
  const Places places = PlacesOf(state);
  std::vector<Step> release;
  PlanDrop(state, places, false, StepKind::kReleaseImport, release);
  PlanDrop(state, places, true, StepKind::kReleaseOwn, release);
  return {CycleKind::kPause,
          {{PhaseKind::kPauseArrive, Quiesce(state)},
           {PhaseKind::kPauseSave, Find(state)},
           {PhaseKind::kPauseReleaseOwn, std::move(release)},
           {PhaseKind::kPauseGone, {{StepKind::kVerify, {}, {}, 0, {}}}}}};
}

namespace {

// Whether owners may have given back the memory that is still imported here, and make it anew: then what is mapped here is a
// copy that nobody else sees. So it is where an undo has failed, and from the phase before the release on: when whoever counts
// the votes dies, some may have heard that it passed, and others not.
bool ImportsInDoubt(const State& state) {
  if (state.lifecycle == Lifecycle::kResuming) return !state.cycle.phase;  // begun with imports in place
  if (state.lifecycle != Lifecycle::kPausing || !state.cycle.phase) return false;
  const bool undone_already = *state.cycle.phase > PhaseKind::kPauseGone;
  return !undone_already && (state.cycle.after_failed_undo || *state.cycle.phase >= PhaseKind::kPauseSave);
}

State WithoutImports(const State& state, const Places& places, std::vector<Step>& drop) {
  PlanDrop(state, places, false, StepKind::kReleaseImport, drop);
  State after = state;
  for (const Step& step : drop) {
    if (step.kind == StepKind::kReleaseImport) after.allocations.at(step.allocation).resident = false;
    if (step.kind == StepKind::kUnmap) after.mappings.at(step.address).present = false;
    if (step.kind == StepKind::kUnmap) after.mappings.at(step.address).accessible = false;
  }
  return after;
}

Plan PlanReturnOfAll(const State& state, std::vector<Step> create) {
  const Places places = PlacesOf(state);
  std::vector<Step> import;
  PlanReturn(state, places, true, StepKind::kCreate, create);
  PlanReturn(state, places, false, StepKind::kImport, import);
  for (const auto& [id, a] : state.allocations) {
    if (a.saved && (a.awaiting_restore || !a.resident))
      import.push_back(On(StepKind::kRestore, id, a, Reachable(state, id, a, places, false)));
  }
  return {CycleKind::kResume,
          {{PhaseKind::kResumeArrive, CheckMemory(state, places)},
           {PhaseKind::kResumeCreateOwn, std::move(create)},
           {PhaseKind::kResumeImport, std::move(import)},
           {PhaseKind::kResumeVerify, {{StepKind::kVerify, {}, {}, 0, {}}}},
           {PhaseKind::kResumeOpen, {}}}};
}

}  // namespace

Bytes StandInPiece(Bytes whole) {
  constexpr Bytes kMost = Bytes{32} << 20;
  return std::min(whole & (~whole + 1), kMost);
}

Plan PlanResume(const State& state) {
  std::vector<Step> drop;
  if (!ImportsInDoubt(state)) return PlanReturnOfAll(state, {});
  const State after = WithoutImports(state, PlacesOf(state), drop);
  return PlanReturnOfAll(after, std::move(drop));
}

}  // namespace amem
