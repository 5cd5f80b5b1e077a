// Multicast objects and the memory that is bound to them.
#include <algorithm>

#include "statemachine/fold.h"

namespace amem {

static std::string Object(AllocationId id) { return "multicast object " + std::to_string(id.value); }

// Whose memory is bound: its own device's; of memory that is not this session's own, that of the only device added here.
static DeviceOrdinal DeviceOf(const Allocation* memory, const Multicast& object) {
  if (memory != nullptr && memory->own() && memory->on_device()) return DeviceOrdinal{memory->properties.location.id};
  return object.added.size() == 1 ? object.added.front() : DeviceOrdinal{-1};
}

Status Fold::operator()(const MulticastCreated& e) {
  Allocation a{.bytes = e.bytes, .flags = e.flags, .tag = e.tag, .multicast = true};
  a.properties.handle_types = e.handle_types;
  AMEM_TRY(Add(e.allocation, std::move(a)));
  s_.multicasts[e.allocation] = {.devices = e.devices, .incomplete = e.incomplete};
  return {};
}

Multicast* Fold::FindMulticast(AllocationId id) {
  if (auto* const known = FindIn(s_.multicasts, id)) return known;
  const Allocation* a = Find(id);
  return a == nullptr || a->own() || a->on_device() || a->placed() ? nullptr : &s_.multicasts[id];
}

Status Fold::operator()(const MulticastDeviceAdded& e) {
  Multicast* object = FindMulticast(e.multicast);
  if (object == nullptr) return Bad("it does not exist");
  object->added.push_back(e.device);
  return {};
}

Status Fold::FindMemory(AllocationId id, BoundMemory& memory) {
  memory = {id ? Find(id) : nullptr, nullptr};
  if (memory.part == nullptr || !memory.part->placed()) return {};
  memory.slab = Find(memory.part->slab);
  const Allocation* whole = memory.slab;
  AMEM_CHECK(whole != nullptr, id, memory.part->slab);
  return {};
}

Status Fold::operator()(const MulticastBound& e) {
  AllocationId id = e.allocation;
  if (!id) {
    if (const auto m = s_.MappingAt(e.address); m != s_.mappings.end()) id = m->second.allocation;
  }
  BoundMemory memory;
  AMEM_TRY(FindMemory(id, memory));
  if (e.allocation && memory.part == nullptr) return Bad(ToText(e.allocation) + " does not exist");
  Multicast* object = FindMulticast(e.multicast);
  if (object == nullptr) return Bad("it does not exist");
  const bool released = Find(e.multicast) != nullptr && Find(e.multicast)->rebuilt();
  for (Allocation* bound : {memory.part, memory.slab}) {  // the slab's memory is what is bound
    if (bound == nullptr) continue;
    ++bound->multicast_bindings;
    bound->released_bindings += released ? 1 : 0;
  }
  const DeviceOrdinal device = DeviceOf(memory.part, *object);
  object->bindings.emplace(e.multicast_offset, MulticastBinding{id, e.address, e.allocation_offset, e.bytes, device, true});
  return {};
}

Status Fold::operator()(const MulticastUnbound& e) {
  const auto it = s_.multicasts.find(e.multicast);
  if (it == s_.multicasts.end()) return Bad("it does not exist");
  auto& bindings = it->second.bindings;
  const auto [first, end] = bindings.equal_range(e.multicast_offset);
  if (first == end) return Bad("nothing is bound at offset " + FormatBytes(e.multicast_offset));
  const auto mine =
      std::find_if(first, end, [&](const auto& one) { return one.second.device == e.device || one.second.device.value < 0; });
  if (mine == end) return Bad("device " + std::to_string(e.device.value) + " has nothing bound there");
  const Allocation* object = Find(e.multicast);
  AMEM_TRY(CountUnbound(mine->second.allocation, object != nullptr && object->rebuilt()));
  bindings.erase(mine);
  const bool imported = object != nullptr && !object->own();
  if (imported && bindings.empty() && it->second.added.empty()) s_.multicasts.erase(it);
  return {};
}

Status Fold::CountUnbound(AllocationId id, bool released) {
  BoundMemory memory;
  AMEM_TRY(FindMemory(id, memory));
  for (Allocation* bound : {memory.part, memory.slab}) {
    if (bound == nullptr || bound->multicast_bindings == 0) continue;  // a part that was bound before it moved counts elsewhere
    --bound->multicast_bindings;
    if (released && bound->released_bindings > 0) --bound->released_bindings;
  }
  return {};
}

// With the last hold on an object its bindings go. Memory that was bound to an object that pauses leave stays in place
// nevertheless, because a peer may still hold the object.
Status Fold::EraseMulticast(AllocationId id) {
  const auto it = s_.multicasts.find(id);
  if (it == s_.multicasts.end()) return {};
  const Allocation* a = Find(id);
  if (a != nullptr && a->rebuilt()) {
    for (const auto& [offset, b] : it->second.bindings) AMEM_TRY(CountUnbound(b.allocation, true));
  }
  s_.multicasts.erase(it);
  return {};
}

void Fold::LeaveMulticast(AllocationId id, const Allocation& a, SessionId peer) {
  if (!a.own() || !a.rebuilt()) return;
  const bool holds = std::ranges::any_of(a.importers, [&](const auto& one) { return one.first.by == peer; });
  if (auto* const object = FindIn(s_.multicasts, id); object != nullptr && !holds) object->incomplete = true;
}

Status Fold::DoMulticastStep(const Step& step) {
  const Allocation* object = Find(step.allocation);
  auto* const multicast = FindIn(s_.multicasts, step.allocation);
  if (object == nullptr || multicast == nullptr) return Bad("it does not exist");
  if (!object->rebuilt()) return Bad("it stays in a pause");
  if (!object->resident) return Bad("it is released");
  if (step.kind == StepKind::kAddDevice) {
    const auto missing = std::ranges::find(multicast->missing, step.device);
    if (missing == multicast->missing.end()) return Bad("it is there already");
    multicast->missing.erase(missing);
    return {};
  }
  const auto [first, end] = multicast->bindings.equal_range(step.offset);
  if (first == end) return Bad("that was never bound");
  const bool bind = step.kind == StepKind::kBind;
  const auto at =
      std::find_if(first, end, [&](const auto& one) { return one.second.device == step.device && one.second.bound != bind; });
  if (at == end) return Bad(bind ? "it is bound already" : "it is not bound");
  if (bind && !multicast->missing.empty()) return Bad("not all devices of this session were added to it");
  BoundMemory memory;
  AMEM_TRY(FindMemory(at->second.allocation, memory));
  if (bind && memory.part != nullptr && !(memory.slab != nullptr ? memory.slab : memory.part)->resident)
    return Bad(ToText(at->second.allocation) + " has no memory yet");
  at->second.bound = bind;
  return {};
}

bool Fold::IsBound(AllocationId id) const {
  for (const auto& [object, multicast] : s_.multicasts) {
    for (const auto& [offset, b] : multicast.bindings) {
      const auto* const memory = FindIn(s_.allocations, b.allocation);
      if (b.bound && (object == id || b.allocation == id || (memory != nullptr && memory->slab == id))) return true;
    }
  }
  return false;
}

Status Fold::AllBound(bool bound) const {
  for (const auto& [id, multicast] : s_.multicasts) {
    const auto* const object = FindIn(s_.allocations, id);
    if (object == nullptr || !object->rebuilt()) continue;
    for (const auto& [offset, b] : multicast.bindings) {
      if (b.bound != bound)
        return Bad((bound ? "memory is not bound to " : "memory is bound to ") + Object(id) + " at " + FormatBytes(offset));
    }
  }
  return {};
}

}  // namespace amem
