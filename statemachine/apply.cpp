#include "statemachine/apply.h"

#include <algorithm>

namespace amem {
namespace {

using std::to_string;

Status Bad(std::string message) { return {Code::kInvalid, std::move(message)}; }

template <class Map>
bool Overlaps(const Map& map, Address address, Bytes bytes, Address* where) {
  auto it = map.lower_bound(address);
  if (it != map.end() && it->first.value - address.value < bytes) {
    *where = it->first;
    return true;
  }
  if (it == map.begin()) return false;
  --it;
  *where = it->first;
  return address.value - it->first.value < it->second.bytes;
}

// A function object with one overload per event: checks first, changes afterwards, so that a failure leaves the state alone.
class Fold {
 public:
  Fold(State& state, SequenceNumber seq) : s_(state), seq_(seq) {}

  Status operator()(const SessionOpened& e) {
    if (s_.lifecycle != Lifecycle::kNew) return Bad("open session: it is open already");
    s_.session = e;
    s_.lifecycle = Lifecycle::kRunning;
    return {};
  }
  Status operator()(const SessionClosed&) {  // also while paused, or in the middle of a cycle: a process may end at any time
    if (s_.lifecycle == Lifecycle::kNew || s_.lifecycle == Lifecycle::kClosed) return Bad("close session: it is not open");
    s_.lifecycle = Lifecycle::kClosed;
    return {};
  }
  Status operator()(const SessionBroken& e) {
    if (s_.broken.empty()) s_.broken = e.reason;
    return {};
  }
  Status operator()(const GroupChanged& e) {
    AMEM_TRY(Open("change group"));
    s_.session.group = e.group;
    return {};
  }
  Status operator()(const LibraryAttached& e) {
    s_.libraries.push_back(e);
    return {};
  }
  Status operator()(const DriverSymbolBound&) { return {}; }

  Status operator()(const RangeReserved& e) {
    const std::string doing = "reserve " + Hex(e.address.value);
    AMEM_TRY(Open(doing));
    if (e.allocation) {
      AMEM_TRY(AtItsPlace(doing, e.allocation, e.address, e.bytes));
      ++Find(e.allocation)->reserved;
      return {};
    }
    if (e.bytes == 0 || !e.address) return Bad(doing + ": a range needs an address and a size");
    if (Address where; Overlaps(s_.ranges, e.address, e.bytes, &where)) {
      return Bad(doing + ": overlaps the range reserved at " + Hex(where.value) + ", which was not freed");
    }
    s_.ranges.emplace(e.address, Range{e.bytes, e.alignment, e.hint, e.flags});
    return {};
  }
  Status operator()(const RangeFreed& e) {
    const std::string doing = "free range " + Hex(e.address.value);
    if (e.allocation) {
      AMEM_TRY(AtItsPlace(doing, e.allocation, e.address, e.bytes));
      Allocation& a = *Find(e.allocation);
      if (a.reserved == 0) return Bad(doing + ": it is not reserved");
      if (a.reserved <= a.mappings) return Bad(doing + ": " + ToText(e.allocation) + " is still mapped there");
      --a.reserved;
      EraseIfDead(e.allocation);
      return {};
    }
    const auto it = s_.ranges.find(e.address);
    if (it == s_.ranges.end()) return Bad(doing + ": no range is reserved there");
    if (it->second.bytes != e.bytes) {
      return Bad(doing + ": its size is " + FormatBytes(it->second.bytes) + ", not " + FormatBytes(e.bytes));
    }
    if (Address where; Overlaps(s_.mappings, e.address, e.bytes, &where)) {
      return Bad(doing + ": something is still mapped at " + Hex(where.value));
    }
    s_.ranges.erase(it);
    return {};
  }

  Status operator()(const AllocationCreated& e) {
    Allocation a;
    a.bytes = e.bytes;
    a.properties = e.properties;
    a.flags = e.flags;
    a.site = e.site;
    a.created = e.created ? e.created : seq_;
    return Add("create", e.allocation, std::move(a));
  }
  Status operator()(const AllocationRetained& e) {
    Allocation* a = Find(e.allocation);
    if (a == nullptr) return Bad("retain " + ToText(e.allocation) + ": it does not exist");
    if (a->mappings == 0)
      return Bad("retain " + ToText(e.allocation) + " by " + Hex(e.address.value) + ": it is not mapped anywhere");
    ++a->guest_references;
    return {};
  }
  Status operator()(const AllocationReleased& e) {
    Allocation* a = Find(e.allocation);
    if (a == nullptr) return Bad("release " + ToText(e.allocation) + ": it does not exist");
    if (a->guest_references == 0) return Bad("release " + ToText(e.allocation) + ": all references were released before");
    --a->guest_references;
    EraseIfDead(e.allocation);
    return {};
  }
  Status operator()(const Mapped& e) {
    const std::string doing = "map " + Hex(e.address.value) + " of " + ToText(e.allocation);
    AMEM_TRY(Open(doing));
    Allocation* a = Find(e.allocation);
    if (a == nullptr) return Bad(doing + ": the allocation does not exist");
    if (a->placed()) {
      AMEM_TRY(AtItsPlace(doing, e.allocation, e.address, e.bytes));
      if (e.offset != 0) return Bad(doing + ": a part of a slab is mapped whole");
      if (a->reserved == 0) return Bad(doing + ": the address range is not reserved");
      if (a->mappings >= a->reserved) return Bad(doing + ": that range is mapped already");
      ++a->mappings;
      a->touched = true;
      return {};
    }
    if (!a->resident) return Bad(doing + ": its memory is released");
    if (e.bytes == 0 || e.offset > a->bytes || e.bytes > a->bytes - e.offset) {
      return Bad(doing + ": " + FormatBytes(e.bytes) + " from offset " + FormatBytes(e.offset) + " is outside its " +
                 FormatBytes(a->bytes));
    }
    const auto range = s_.RangeAt(e.address);
    if (range == s_.ranges.end() || e.bytes > range->second.bytes - (e.address.value - range->first.value)) {
      return Bad(doing + ": the address range is not reserved");
    }
    if (Address where; Overlaps(s_.mappings, e.address, e.bytes, &where)) {
      return Bad(doing + ": that range is mapped already (at " + Hex(where.value) + ")");
    }
    Mapping m;
    m.bytes = e.bytes;
    m.offset = e.offset;
    m.allocation = e.allocation;
    m.flags = e.flags;
    s_.mappings.emplace(e.address, std::move(m));
    ++a->mappings;
    return {};
  }
  Status operator()(const Unmapped& e) {
    const std::string doing = "unmap " + Hex(e.address.value);
    if (e.allocation) {
      AMEM_TRY(AtItsPlace(doing, e.allocation, e.address, e.bytes));
      Allocation& a = *Find(e.allocation);
      if (a.mappings == 0) return Bad(doing + ": " + ToText(e.allocation) + " is not mapped");
      --a.mappings;
      EraseIfDead(e.allocation);
      return {};
    }
    for (auto it = s_.mappings.lower_bound(e.address); it != s_.mappings.end() && it->first < e.address + e.bytes; ++it) {
      const auto slab = s_.slabs.find(it->second.allocation);
      if (slab != s_.slabs.end() && !slab->second.parts.empty())
        return Bad(doing + ": that slab has " + to_string(slab->second.parts.size()) + " allocations");
    }
    AMEM_TRY(CoversWhole(doing, e.address, e.bytes));
    const Address end = e.address + e.bytes;
    for (auto it = s_.mappings.find(e.address); it != s_.mappings.end() && it->first < end;) {
      const AllocationId id = it->second.allocation;
      it = s_.mappings.erase(it);
      --Find(id)->mappings;
      EraseIfDead(id);
    }
    return {};
  }
  Status operator()(const AccessSet& e) {
    const std::string doing = "set access to " + Hex(e.address.value);
    AMEM_TRY(Open(doing));
    if (e.allocation) {
      AMEM_TRY(AtItsPlace(doing, e.allocation, e.address, e.bytes));
      return Allows(doing, s_.mappings.at(s_.slabs.at(Find(e.allocation)->slab).address), e.access);
    }
    AMEM_TRY(CoversWhole(doing, e.address, e.bytes));
    const Address end = e.address + e.bytes;
    for (auto it = s_.mappings.find(e.address); it != s_.mappings.end() && it->first < end; ++it) {
      if (!it->second.present) return Bad(doing + ": its memory is released");
    }
    for (auto it = s_.mappings.find(e.address); it != s_.mappings.end() && it->first < end; ++it) Merge(it->second, e.access);
    return {};
  }

  Status operator()(const Exported& e) {
    Allocation* a = Find(e.allocation);
    if (a == nullptr) return Bad("export " + ToText(e.allocation) + ": it does not exist");
    ++a->exports;
    return {};
  }
  Status operator()(const Imported& e) {
    Allocation a;
    a.bytes = e.bytes;
    a.properties = e.properties;
    a.site = e.site;
    a.created = e.created ? e.created : seq_;
    a.remote = e.remote;
    if (!e.remote.owner || !e.remote.allocation) return Bad("import " + ToText(e.allocation) + ": it names no owner");
    return Add("import", e.allocation, std::move(a));
  }
  Status operator()(const ReferenceAdded& e) {
    const std::string doing = "add reference of " + ToText(e.by) + " to " + ToText(e.allocation);
    Allocation* a = Find(e.allocation);
    if (a == nullptr) return Bad(doing + ": it does not exist");
    if (!a->own()) return Bad(doing + ": it is itself imported");
    if (a->exports == 0) return Bad(doing + ": it was never exported");
    ++a->importers[Importer{e.by, e.as}];
    a->touched = true;
    return {};
  }
  Status operator()(const ReferenceDropped& e) {
    const std::string doing = "drop reference of " + ToText(e.by) + " to " + ToText(e.allocation);
    Allocation* a = Find(e.allocation);
    if (a == nullptr) return Bad(doing + ": it does not exist");
    const auto it = a->importers.find(Importer{e.by, e.as});
    if (it == a->importers.end()) return Bad(doing + ": that session holds none as " + ToText(e.as));
    if (--it->second == 0) a->importers.erase(it);
    EraseIfDead(e.allocation);
    return {};
  }
  Status operator()(const PeerConnected& e) {
    s_.peers[e.peer] = Peer{e.host, e.pid, e.group, e.rank, true, {}};
    return {};
  }
  Status operator()(const PeerLost& e) {
    const auto peer = s_.peers.find(e.peer);
    if (peer == s_.peers.end()) return Bad("lose peer " + Hex(e.peer.value) + ": it was never connected");
    peer->second.connected = false;
    peer->second.lost_reason = e.reason;
    for (auto it = s_.allocations.begin(); it != s_.allocations.end();) {
      const AllocationId id = it->first;
      std::erase_if(it->second.importers, [&](const auto& entry) { return entry.first.by == e.peer; });
      ++it;
      EraseIfDead(id);
    }
    return {};
  }

  Status operator()(const HostAllocated& e) {
    const auto [it, fresh] = s_.host.emplace(e.address, HostAllocation{e.bytes, e.flags, e.registered});
    return fresh ? Status{} : Bad("host memory at " + Hex(e.address.value) + " is known already");
  }
  Status operator()(const HostFreed& e) {
    return s_.host.erase(e.address) == 1 ? Status{} : Bad("free host memory " + Hex(e.address.value) + ": none is known there");
  }
  Status operator()(const LegacyAllocated& e) {
    if (e.backing && Find(e.backing) == nullptr)
      return Bad("cuMemAlloc " + Hex(e.address.value) + ": " + ToText(e.backing) + " does not exist");
    const auto [it, fresh] = s_.legacy.emplace(e.address, LegacyAllocation{e.bytes, e.backing, e.offset, e.why, e.site});
    return fresh ? Status{} : Bad("cuMemAlloc " + Hex(e.address.value) + ": that address is allocated already");
  }
  Status operator()(const LegacyFreed& e) {
    return s_.legacy.erase(e.address) == 1 ? Status{}
                                           : Bad("cuMemFree " + Hex(e.address.value) + ": nothing is allocated there");
  }
  Status operator()(const LegacyExported& e) {
    Allocation* a = Find(e.backing);
    if (a == nullptr) return Bad("IPC handle of " + Hex(e.address.value) + ": " + ToText(e.backing) + " does not exist");
    ++a->exports;
    return {};
  }
  Status operator()(const LegacyImported& e) {
    if (Find(e.allocation) == nullptr)
      return Bad("open IPC handle at " + Hex(e.address.value) + ": " + ToText(e.allocation) + " does not exist");
    const auto [it, fresh] = s_.legacy_imports.emplace(e.address, e.allocation);
    return fresh ? Status{} : Bad("open IPC handle at " + Hex(e.address.value) + ": one is open there");
  }
  Status operator()(const LegacyClosed& e) {
    return s_.legacy_imports.erase(e.address) == 1
               ? Status{}
               : Bad("close IPC handle at " + Hex(e.address.value) + ": none is open there");
  }
  Status operator()(const AsyncAllocated& e) {
    s_.async[e.address] = e.bytes;
    return {};
  }
  Status operator()(const AsyncFreed& e) {
    return s_.async.erase(e.address) == 1 ? Status{}
                                          : Bad("free pool memory " + Hex(e.address.value) + ": none is known there");
  }

  Status operator()(const MulticastCreated& e) {
    Allocation a;
    a.bytes = e.bytes;
    a.properties.handle_types = e.handle_types;
    a.flags = e.flags;
    a.multicast = true;
    AMEM_TRY(Add("create multicast", e.allocation, std::move(a)));
    s_.multicasts[e.allocation].devices = e.devices;
    return {};
  }
  Status operator()(const MulticastDeviceAdded& e) {
    const auto it = s_.multicasts.find(e.multicast);
    if (it == s_.multicasts.end())
      return Bad("add device to multicast object " + to_string(e.multicast.value) + ": it does not exist");
    it->second.added.push_back(e.device);
    return {};
  }
  Status operator()(const MulticastBound& e) {
    const std::string doing = "bind memory to multicast object " + to_string(e.multicast.value);
    const auto it = s_.multicasts.find(e.multicast);
    if (it == s_.multicasts.end()) return Bad(doing + ": it does not exist");
    AllocationId id = e.allocation;
    if (!id) {
      if (const auto m = s_.MappingAt(e.address); m != s_.mappings.end()) id = m->second.allocation;
    }
    Allocation* a = id ? Find(id) : nullptr;
    if (e.allocation && a == nullptr) return Bad(doing + ": " + ToText(e.allocation) + " does not exist");
    if (a != nullptr) ++a->multicast_bindings;
    if (a != nullptr && a->placed()) ++Find(a->slab)->multicast_bindings;
    it->second.bindings[e.multicast_offset].push_back(MulticastBinding{id, e.address, e.allocation_offset, e.bytes});
    return {};
  }
  Status operator()(const MulticastUnbound& e) {
    const std::string doing = "unbind memory from multicast object " + to_string(e.multicast.value);
    const auto it = s_.multicasts.find(e.multicast);
    if (it == s_.multicasts.end()) return Bad(doing + ": it does not exist");
    const auto at = it->second.bindings.find(e.multicast_offset);
    if (at == it->second.bindings.end()) return Bad(doing + ": nothing is bound at offset " + FormatBytes(e.multicast_offset));
    auto& list = at->second;
    const auto mine = std::find_if(list.begin(), list.end(), [&](const MulticastBinding& b) {
      const Allocation* a = b.allocation ? Find(b.allocation) : nullptr;
      return a == nullptr || a->properties.location.id == e.device.value;
    });
    if (mine == list.end()) return Bad(doing + ": device " + to_string(e.device.value) + " has nothing bound there");
    if (Allocation* a = mine->allocation ? Find(mine->allocation) : nullptr; a != nullptr && a->multicast_bindings > 0)
      CountUnbound(*a);
    list.erase(mine);
    if (list.empty()) it->second.bindings.erase(at);
    return {};
  }

  Status operator()(const Registered& e) {
    Registration& r = s_.registrations[e.address];
    if (++r.count > 1) return {};
    r.bytes = e.bytes;
    r.how = e.how;
    auto it = s_.MappingAt(e.address);
    if (it == s_.mappings.end()) it = s_.mappings.lower_bound(e.address);
    for (; it != s_.mappings.end() && it->first < e.address + e.bytes; ++it) {
      r.allocations.push_back(it->second.allocation);
      ++Find(it->second.allocation)->registrations;
    }
    return {};
  }
  Status operator()(const Deregistered& e) {
    const auto it = s_.registrations.find(e.address);
    if (it == s_.registrations.end()) return Bad("deregister " + Hex(e.address.value) + ": it was not registered");
    if (--it->second.count > 0) return {};
    for (const AllocationId id : it->second.allocations) {
      if (Allocation* a = Find(id); a != nullptr && a->registrations > 0) --a->registrations;
    }
    s_.registrations.erase(it);
    return {};
  }
  Status operator()(const PassedThrough&) { return {}; }

  Status operator()(const CycleBegun& e) {
    const std::string doing = "begin " + std::string(ToText(e.kind)) + " " + to_string(e.cycle);
    const bool half = s_.lifecycle == Lifecycle::kPausing || s_.lifecycle == Lifecycle::kResuming;
    if (e.kind == CycleKind::kPause) {
      if (s_.lifecycle != Lifecycle::kRunning && !half)
        return Bad(doing + ": the session is " + std::string(ToText(s_.lifecycle)));
      s_.lifecycle = Lifecycle::kPausing;
    } else {
      if (s_.lifecycle != Lifecycle::kPaused && !half)
        return Bad(doing + ": the session is " + std::string(ToText(s_.lifecycle)));
      s_.lifecycle = Lifecycle::kResuming;
    }
    s_.cycles = std::max(s_.cycles, e.cycle);
    s_.cycle = Cycle{e.kind, e.cycle, e.members, {}, {}, {}, half};
    return {};
  }
  Status operator()(const StepBegun& e) {
    const std::string doing = "begin step " + ToText(e.step);
    AMEM_TRY(InCycle(doing));
    if (s_.cycle.open_step)
      return Bad(doing + ": the step before it (" + ToText(*s_.cycle.open_step) + ") is neither done nor failed");
    s_.cycle.open_step = e.step;
    return {};
  }
  Status operator()(const StepDone& e) {
    const std::string doing = "finish step " + ToText(e.step);
    AMEM_TRY(InCycle(doing));
    if (s_.cycle.open_step != e.step) return Bad(doing + ": that step was not begun");
    AMEM_TRY(DoStep(doing, e.step));
    s_.cycle.open_step.reset();
    return {};
  }
  Status operator()(const StepFailed& e) {
    const std::string doing = "fail step " + ToText(e.step);
    AMEM_TRY(InCycle(doing));
    if (s_.cycle.open_step != e.step) return Bad(doing + ": that step was not begun");
    s_.cycle.open_step.reset();
    s_.cycle.failure = e.message;
    return {};
  }
  Status operator()(const PhaseBegun& e) {
    if (Waits(e.phase)) return {};  // for the others; a cycle begins once all have come
    AMEM_TRY(InCycle("begin phase " + std::string(ToText(e.phase))));
    s_.cycle.phase = e.phase;
    return {};
  }
  Status operator()(const PhaseDecided& e) {
    AMEM_TRY(InCycle("decide phase " + std::string(ToText(e.phase))));
    if (!e.passed) s_.cycle.failure = e.message;
    return {};
  }
  Status operator()(const CycleDone& e) {
    const std::string doing = "finish " + std::string(ToText(e.kind)) + " " + to_string(e.cycle);
    AMEM_TRY(InCycle(doing));
    if (s_.cycle.kind != e.kind || s_.cycle.number != e.cycle) return Bad(doing + ": another cycle is under way");
    if (s_.cycle.open_step) return Bad(doing + ": step " + ToText(*s_.cycle.open_step) + " is open");
    AMEM_TRY(e.kind == CycleKind::kPause ? AllGone(doing) : AllBack(doing));
    s_.lifecycle = e.kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
    if (e.kind == CycleKind::kResume) ForgetSaved();
    s_.cycle = {};
    return {};
  }
  Status operator()(const CycleFailed& e) {
    const std::string doing = "fail " + std::string(ToText(e.kind)) + " " + to_string(e.cycle);
    if (Waits(e.kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive)) {
      // It never began, because not all have come, and is not counted.
      s_.cycle = Cycle{e.kind, std::min(e.cycle, s_.cycles), {}, {}, {}, e.message};
      return {};
    }
    AMEM_TRY(InCycle(doing));
    if (e.undone) {
      AMEM_TRY(e.kind == CycleKind::kPause ? AllBack(doing) : AllGone(doing));
      s_.lifecycle = e.kind == CycleKind::kPause ? Lifecycle::kRunning : Lifecycle::kPaused;
      if (e.kind == CycleKind::kPause) ForgetSaved();
      s_.cycle.after_failed_undo = false;
    }
    s_.cycle.open_step.reset();
    s_.cycle.phase.reset();
    s_.cycle.failure = e.message;
    return {};
  }
  Status operator()(const Condensed& e) {
    if (s_.lifecycle != Lifecycle::kNew) return Bad("load snapshot: the state is not empty");
    if (e.totals.size() % 2 != 0) return Bad("load snapshot: its totals are damaged");
    s_.last = e.through;
    s_.next_allocation = e.next_allocation;
    s_.cycles = e.cycles;
    for (std::size_t i = 0; i + 1 < e.totals.size(); i += 2) {
      if (e.totals[i] < kEventKinds) s_.totals.events[e.totals[i]] = e.totals[i + 1];
    }
    return {};
  }

  Status operator()(const SlabOpened& e) {
    const std::string doing = "open slab " + to_string(e.slab.value);
    AMEM_TRY(Open(doing));
    const auto m = s_.mappings.find(e.address);
    if (m == s_.mappings.end() || m->second.allocation != e.slab)
      return Bad(doing + ": it is not mapped at " + Hex(e.address.value));
    if (m->second.offset != 0 || m->second.bytes != Find(e.slab)->bytes) return Bad(doing + ": it is not mapped whole");
    if (Find(e.slab)->placed()) return Bad(doing + ": it is itself a part of a slab");
    Slab slab{e.address, {}, {}};
    for (const ByteRange& d : e.dirty) slab.dirty.emplace(d.offset, d.bytes);
    if (!s_.slabs.emplace(e.slab, std::move(slab)).second) return Bad(doing + ": it is one already");
    return {};
  }
  Status operator()(const Placed& e) {
    const std::string doing = "place " + ToText(e.allocation) + " in slab " + to_string(e.slab.value);
    AMEM_TRY(Open(doing));
    Allocation* a = Find(e.allocation);
    const auto slab = s_.slabs.find(e.slab);
    if (a == nullptr || slab == s_.slabs.end() || s_.slabs.contains(e.allocation))
      return Bad(doing + ": there is no such allocation, or no such slab");
    const Allocation& whole = *Find(e.slab);
    if (!a->untouched()) return Bad(doing + ": it is in use where it is");
    if (e.offset > whole.bytes || a->bytes > whole.bytes - e.offset) return Bad(doing + ": it ends outside");
    if (a->own() != whole.own() || (a->remote && a->remote->owner != whole.remote->owner))
      return Bad(doing + ": they are not the same session's");
    if (a->own()) AMEM_TRY(IsFree(doing, slab->second, e.offset, a->bytes));
    RemoveFromSlab(e.allocation, *a);
    a->slab = e.slab;
    a->offset = e.offset;
    a->touched = e.touched;
    slab->second.parts[e.offset].push_back(e.allocation);
    return {};
  }
  Status operator()(const Backed& e) {
    const std::string doing = "back " + ToText(e.allocation) + " by itself";
    AMEM_TRY(Open(doing));
    Allocation* a = Find(e.allocation);
    if (a == nullptr || !a->placed()) return Bad(doing + ": it is not part of a slab");
    if (!a->untouched()) return Bad(doing + ": it is in use where it is");
    RemoveFromSlab(e.allocation, *a);
    return {};
  }
  Status operator()(const PartCleared& e) {
    const auto slab = s_.slabs.find(e.slab);
    if (slab == s_.slabs.end()) return Bad("clear part of slab " + to_string(e.slab.value) + ": it does not exist");
    MarkClean(slab->second, e.offset, e.bytes);
    return {};
  }

 private:
  Allocation* Find(AllocationId id) {
    const auto it = s_.allocations.find(id);
    return it == s_.allocations.end() ? nullptr : &it->second;
  }
  void EraseIfDead(AllocationId id) {
    const auto it = s_.allocations.find(id);
    if (!it->second.dead()) return;
    RemoveFromSlab(id, it->second);
    s_.slabs.erase(id);
    s_.multicasts.erase(id);
    s_.allocations.erase(it);
  }
  void CountUnbound(Allocation& a) {
    --a.multicast_bindings;
    if (Allocation* slab = a.placed() ? Find(a.slab) : nullptr; slab != nullptr && slab->multicast_bindings > 0)
      --slab->multicast_bindings;
  }

  // Takes an allocation out of its slab. What it may have written there is dirty.
  void RemoveFromSlab(AllocationId id, Allocation& a) {
    const auto slab = s_.slabs.find(a.slab);
    if (slab == s_.slabs.end()) return;
    const auto at = slab->second.parts.find(a.offset);
    std::erase(at->second, id);
    if (at->second.empty()) slab->second.parts.erase(at);
    if (a.own() && a.touched) MarkDirty(slab->second, a.offset, a.bytes);
    a.slab = {};
    a.offset = 0;
  }
  static void MarkDirty(Slab& slab, Bytes offset, Bytes bytes) {
    MarkClean(slab, offset, bytes);
    auto next = slab.dirty.lower_bound(offset);
    if (next != slab.dirty.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = slab.dirty.erase(next);
    }
    if (next != slab.dirty.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    slab.dirty.emplace(offset, bytes);
  }
  static void MarkClean(Slab& slab, Bytes offset, Bytes bytes) {
    for (const ByteRange& part : DirtyWithin(slab, offset, bytes)) {
      const auto it = std::prev(slab.dirty.upper_bound(part.offset));
      const Bytes from = it->first, to = it->first + it->second, end = part.offset + part.bytes;
      slab.dirty.erase(it);
      if (from < part.offset) slab.dirty.emplace(from, part.offset - from);
      if (end < to) slab.dirty.emplace(end, to - end);
    }
  }
  // New memory may be anything where no part is.
  void MarkGapsDirty(AllocationId id) {
    const auto slab = s_.slabs.find(id);
    if (slab == s_.slabs.end() || !Find(id)->own()) return;
    slab->second.dirty.clear();
    Bytes at = 0;
    for (const auto& [offset, parts] : slab->second.parts) {
      if (at < offset) slab->second.dirty.emplace(at, offset - at);
      at = offset + Find(parts.front())->bytes;
    }
    if (const Bytes end = Find(id)->bytes; at < end) slab->second.dirty.emplace(at, end - at);
  }
  Status IsFree(const std::string& doing, const Slab& slab, Bytes offset, Bytes bytes) const {
    auto next = slab.parts.lower_bound(offset);
    if (next != slab.parts.end() && next->first < offset + bytes)
      return Bad(doing + ": " + ToText(next->second.front()) + " is there");
    if (next != slab.parts.begin()) {
      --next;
      const AllocationId before = next->second.front();
      if (next->first + s_.allocations.at(before).bytes > offset) return Bad(doing + ": " + ToText(before) + " is there");
    }
    if (!DirtyWithin(slab, offset, bytes).empty()) return Bad(doing + ": what was there before was not cleared");
    return {};
  }
  Status AtItsPlace(const std::string& doing, AllocationId id, Address address, Bytes bytes) const {
    const auto a = s_.allocations.find(id);
    if (a == s_.allocations.end()) return Bad(doing + ": " + ToText(id) + " does not exist");
    if (!a->second.placed()) return Bad(doing + ": " + ToText(id) + " is not part of a slab");
    if (s_.PlaceOf(a->second) != address || a->second.bytes != bytes) {
      return Bad(doing + ": " + ToText(id) + " is " + FormatBytes(a->second.bytes) + " at " + Hex(s_.PlaceOf(a->second).value));
    }
    return {};
  }
  static Status Allows(const std::string& doing, const Mapping& mapping, const std::vector<AccessDescriptor>& access) {
    for (const AccessDescriptor& wanted : access) {
      const bool allowed = std::any_of(mapping.access.begin(), mapping.access.end(), [&](const AccessDescriptor& has) {
        return has.location == wanted.location && (has.flags & wanted.flags) == wanted.flags;
      });
      if (!allowed) return Bad(doing + ": its slab has no such access for " + ToText(wanted.location));
    }
    return {};
  }
  Status Open(const std::string& doing) const {
    if (s_.lifecycle == Lifecycle::kRunning) return {};
    return Bad(doing + ": the session is " + std::string(ToText(s_.lifecycle)));
  }
  Status InCycle(const std::string& doing) const {
    if (s_.lifecycle == Lifecycle::kPausing || s_.lifecycle == Lifecycle::kResuming) return {};
    if (!seq_) return {};  // a snapshot repeats the last failure of a session that runs again
    return Bad(doing + ": no pause or resume is under way, the session is " + std::string(ToText(s_.lifecycle)));
  }
  // In this phase of a cycle that has not begun.
  [[nodiscard]] bool Waits(PhaseKind phase) const {
    return seq_ && ((s_.lifecycle == Lifecycle::kRunning && phase == PhaseKind::kPauseArrive) ||
                    (s_.lifecycle == Lifecycle::kPaused && phase == PhaseKind::kResumeArrive));
  }
  Status Add(const char* verb, AllocationId id, Allocation a) {
    const std::string doing = std::string(verb) + " " + ToText(id);
    AMEM_TRY(Open(doing));
    if (!id) return Bad(doing + ": zero is no id");
    if (a.bytes == 0) return Bad(doing + ": its size is zero");
    if (s_.allocations.contains(id)) return Bad(doing + ": that id is in use");
    a.guest_references = 1;
    s_.allocations.emplace(id, std::move(a));
    s_.next_allocation = std::max(s_.next_allocation, id.value + 1);
    return {};
  }
  // [address, address + bytes) is exactly a row of adjacent mappings.
  Status CoversWhole(const std::string& doing, Address address, Bytes bytes) const {
    Address at = address;
    const Address end = address + bytes;
    auto it = s_.mappings.find(address);
    while (at < end) {
      if (it == s_.mappings.end() || it->first != at) return Bad(doing + ": nothing is mapped at " + Hex(at.value));
      at = at + it->second.bytes;
      ++it;
    }
    if (at != end || bytes == 0) return Bad(doing + ": " + FormatBytes(bytes) + " would cut a mapping in two");
    return {};
  }
  static void Merge(Mapping& mapping, const std::vector<AccessDescriptor>& access) {
    for (const AccessDescriptor& a : access) {
      auto& list = mapping.access;
      const auto at =
          std::lower_bound(list.begin(), list.end(), a, [](const auto& l, const auto& r) { return l.location < r.location; });
      const bool found = at != list.end() && at->location == a.location;
      if (a.flags == 0) {
        if (found) list.erase(at);
      } else if (found) {
        at->flags = a.flags;
      } else {
        list.insert(at, a);
      }
    }
  }

  Status DoStep(const std::string& doing, const Step& step) {
    switch (step.kind) {
      case StepKind::kQuiesce:
      case StepKind::kCheckMemory:
      case StepKind::kVerify:
      case StepKind::kScan:
      case StepKind::kBeginRestore:
        return {};
      case StepKind::kUnmap:
      case StepKind::kMap:
      case StepKind::kSetAccess:
        return DoMappingStep(doing, step);
      default:
        return DoAllocationStep(doing, step);
    }
  }
  Status DoMappingStep(const std::string& doing, const Step& step) {
    const auto it = s_.mappings.find(step.address);
    if (it == s_.mappings.end()) return Bad(doing + ": there is no such mapping");
    Mapping& m = it->second;
    if (m.allocation != step.allocation) return Bad(doing + ": that address belongs to " + ToText(m.allocation));
    switch (step.kind) {
      case StepKind::kUnmap:
        if (!m.present) return Bad(doing + ": it is unmapped already");
        m.present = m.accessible = false;
        return {};
      case StepKind::kMap:
        if (m.present) return Bad(doing + ": it is mapped already");
        if (!Find(m.allocation)->resident) return Bad(doing + ": " + ToText(m.allocation) + " has no memory yet");
        m.present = true;
        return {};
      default:
        if (!m.present) return Bad(doing + ": it is not mapped");
        m.accessible = true;
        return {};
    }
  }
  Status DoAllocationStep(const std::string& doing, const Step& step) {
    Allocation* a = Find(step.allocation);
    if (a == nullptr) return Bad(doing + ": the allocation does not exist");
    switch (step.kind) {
      case StepKind::kSave:
        if (!a->resident || a->awaiting_restore) return Bad(doing + ": it has no contents to save");
        a->saved = true;
        return {};
      case StepKind::kRestore:
        if (!a->resident || !a->saved) return Bad(doing + ": it has no memory, or no saved contents");
        a->awaiting_restore = false;
        return {};
      case StepKind::kReleaseImport:
      case StepKind::kReleaseOwn:
        if (a->own() != (step.kind == StepKind::kReleaseOwn)) return Bad(doing + ": it is " + (a->own() ? "own" : "imported"));
        if (!a->resident) return Bad(doing + ": it is released already");
        if (a->own() && !a->saved) return Bad(doing + ": its contents were not saved");
        if (WhyKept(*a) != KeepReason::kNone) return Bad(doing + ": it must stay: " + std::string(ToText(WhyKept(*a))));
        a->resident = a->awaiting_restore = false;
        return {};
      case StepKind::kCreate:
      case StepKind::kImport:
        // An orphan is made anew; it may also have been imported in the moment in which its owner was lost.
        if (a->own() != (step.kind == StepKind::kCreate) && !(step.kind == StepKind::kCreate && s_.Orphaned(*a)))
          return Bad(doing + ": it is " + (a->own() ? "own" : "imported"));
        if (a->resident) return Bad(doing + ": it has memory already");
        a->resident = true;
        if (a->saved) MarkGapsDirty(step.allocation);
        a->awaiting_restore = a->saved;
        return {};
      default:
        return Bad(doing + ": not a step on an allocation");
    }
  }
  Status AllGone(const std::string& doing) const {
    for (const auto& [id, a] : s_.allocations) {
      if (a.resident && !a.placed() && WhyKept(a) == KeepReason::kNone)
        return Bad(doing + ": " + ToText(id) + " still has memory");
    }
    return {};
  }
  Status AllBack(const std::string& doing) const {
    for (const auto& [id, a] : s_.allocations) {
      if (!a.resident) return Bad(doing + ": " + ToText(id) + " has no memory");
      if (a.awaiting_restore) return Bad(doing + ": the contents of " + ToText(id) + " were not restored");
    }
    for (const auto& [address, m] : s_.mappings) {
      if (!m.present || (!m.accessible && !m.access.empty()))
        return Bad(doing + ": " + Hex(address.value) + " is not mapped with access");
    }
    return {};
  }
  void ForgetSaved() {
    for (auto& [id, a] : s_.allocations) a.saved = a.awaiting_restore = false;
    for (auto& [address, m] : s_.mappings) m.accessible = true;
  }

  State& s_;
  SequenceNumber seq_;
};

}  // namespace

Status Apply(State& state, const Event& event) {
  if (event.seq && event.seq.value != state.last.value + 1) {
    return Bad("event " + to_string(event.seq.value) + " does not follow event " + to_string(state.last.value));
  }
  AMEM_TRY(std::visit(Fold{state, event.seq}, event.body));
  if (event.seq) {
    state.last = event.seq;
    ++state.totals.events[event.body.index()];
  }
  return {};
}

}  // namespace amem
