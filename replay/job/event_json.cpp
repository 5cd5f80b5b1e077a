#include "replay/job/event_json.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "statemachine/apply.h"

namespace amem {

using Json = nlohmann::ordered_json;

Json ToJson(const Step& step) {
  return {{"kind", ToText(step.kind)},
          {"allocation", step.allocation.value},
          {"address", Hex(step.address.value)},
          {"bytes", step.bytes},
          {"device", step.device.value}};
}

namespace {

Json ToJson(const Location& location) { return {{"type", static_cast<std::uint32_t>(location.type)}, {"id", location.id}}; }

Json ToJson(const AllocationProperties& p) {
  return {{"type", p.type},
          {"handle_types", p.handle_types},
          {"location", ToJson(p.location)},
          {"compression", p.compression},
          {"gpu_direct_rdma", p.gpu_direct_rdma},
          {"usage", p.usage},
          {"reserved", p.reserved}};
}

Json ToJson(const CallSite& site) {
  Json frames = Json::array();
  for (std::uint64_t frame : site.frames) {
    if (frame == 0) break;
    frames.push_back(Hex(frame));
  }
  return frames;
}

Json ToJson(const std::vector<AccessDescriptor>& access) {
  Json list = Json::array();
  for (const AccessDescriptor& a : access) list.push_back({{"location", ToJson(a.location)}, {"flags", a.flags}});
  return list;
}

Json ToJson(const std::vector<SessionId>& sessions) {
  Json list = Json::array();
  for (SessionId session : sessions) list.push_back(SessionText(session));
  return list;
}

// ---- one overload a kind, in the order of event.h: the fields under their names --------------------------------------------

void Put(Json& j, const SessionOpened& e) {
  j["session"] = SessionText(e.session);
  j["host"] = e.host;
  j["pid"] = e.pid;
  j["boot_id"] = e.boot_id;
  j["amem_version"] = e.amem_version;
  j["driver_version"] = e.driver_version;
  j["nccl_version"] = e.nccl_version;
  j["gpu_uuids"] = e.gpu_uuids;
  j["group"] = e.group;
  j["rank"] = e.rank;
  j["realtime_ns"] = e.realtime_ns;
  j["monotonic_ns"] = e.monotonic_ns;
  j["layout"] = e.layout;
  j["content"] = e.content;
}
void Put(Json& j, const SessionClosed& e) { j["reason"] = e.reason; }
void Put(Json& j, const SessionBroken& e) { j["reason"] = e.reason; }
void Put(Json& j, const GroupChanged& e) { j["group"] = e.group; }
void Put(Json& j, const LibraryAttached& e) {
  j["path"] = e.path;
  j["build_id"] = e.build_id;
  j["way"] = e.way;
  j["nccl_version"] = e.nccl_version;
  j["load_address"] = Hex(e.load_address);
}
void Put(Json& j, const DriverSymbolBound& e) {
  j["name"] = e.name;
  j["cuda_version"] = e.cuda_version;
  j["replaced"] = e.replaced;
}
void PutPart(Json& j, AllocationId id) {  // of a slab, where an event can be about one
  if (id) j["allocation"] = id.value;
}
void Put(Json& j, const RangeReserved& e) {
  PutPart(j, e.allocation);
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
  j["alignment"] = e.alignment;
  j["hint"] = Hex(e.hint.value);
  j["flags"] = e.flags;
  j["site"] = ToJson(e.site);
}
void Put(Json& j, const RangeFreed& e) {
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
  PutPart(j, e.allocation);
}
void Put(Json& j, const AllocationCreated& e) {
  j["allocation"] = e.allocation.value;
  j["bytes"] = e.bytes;
  j["properties"] = ToJson(e.properties);
  j["flags"] = e.flags;
  j["handle"] = Hex(e.handle.value);
  j["created_seq"] = e.created.value;
  j["site"] = ToJson(e.site);
}
void Put(Json& j, const AllocationRetained& e) {
  j["allocation"] = e.allocation.value;
  j["address"] = Hex(e.address.value);
}
void Put(Json& j, const AllocationReleased& e) { j["allocation"] = e.allocation.value; }
void Put(Json& j, const Mapped& e) {
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
  j["offset"] = e.offset;
  j["allocation"] = e.allocation.value;
  j["flags"] = e.flags;
}
void Put(Json& j, const Unmapped& e) {
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
  PutPart(j, e.allocation);
}
void Put(Json& j, const AccessSet& e) {
  PutPart(j, e.allocation);
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
  j["access"] = ToJson(e.access);
}
void Put(Json& j, const Exported& e) {
  j["allocation"] = e.allocation.value;
  j["handle_type"] = e.handle_type;
}
void Put(Json& j, const Imported& e) {
  j["allocation"] = e.allocation.value;
  j["owner"] = SessionText(e.remote.owner);
  j["owner_allocation"] = e.remote.allocation.value;
  j["bytes"] = e.bytes;
  j["properties"] = ToJson(e.properties);
  j["handle_type"] = e.handle_type;
  j["handle"] = Hex(e.handle.value);
  j["created_seq"] = e.created.value;
  j["site"] = ToJson(e.site);
}
template <class Reference>
void PutReference(Json& j, const Reference& e) {
  j["allocation"] = e.allocation.value;
  j["by"] = SessionText(e.by);
  j["as"] = e.as.value;
}
void Put(Json& j, const ReferenceAdded& e) { PutReference(j, e); }
void Put(Json& j, const ReferenceDropped& e) { PutReference(j, e); }
void Put(Json& j, const PeerConnected& e) {
  j["peer"] = SessionText(e.peer);
  j["host"] = e.host;
  j["pid"] = e.pid;
  j["group"] = e.group;
  j["rank"] = e.rank;
}
void Put(Json& j, const PeerLost& e) {
  j["peer"] = SessionText(e.peer);
  j["reason"] = e.reason;
}
void Put(Json& j, const HostAllocated& e) {
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
  j["flags"] = e.flags;
  j["registered"] = e.registered;
}
void Put(Json& j, const HostFreed& e) { j["address"] = Hex(e.address.value); }
void Put(Json& j, const LegacyAllocated& e) {
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
  j["backing"] = e.backing.value;
  j["offset"] = e.offset;
  j["why"] = e.why;
  j["site"] = ToJson(e.site);
}
void Put(Json& j, const LegacyFreed& e) { j["address"] = Hex(e.address.value); }
void Put(Json& j, const LegacyExported& e) {
  j["address"] = Hex(e.address.value);
  j["backing"] = e.backing.value;
}
void Put(Json& j, const LegacyImported& e) {
  j["address"] = Hex(e.address.value);
  j["allocation"] = e.allocation.value;
}
void Put(Json& j, const LegacyClosed& e) { j["address"] = Hex(e.address.value); }
void Put(Json& j, const AsyncAllocated& e) {
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
}
void Put(Json& j, const AsyncFreed& e) { j["address"] = Hex(e.address.value); }
void Put(Json& j, const MulticastCreated& e) {
  j["allocation"] = e.allocation.value;
  j["bytes"] = e.bytes;
  j["devices"] = e.devices;
  j["handle_types"] = e.handle_types;
  j["flags"] = e.flags;
  j["handle"] = Hex(e.handle.value);
}
void Put(Json& j, const MulticastDeviceAdded& e) {
  j["multicast"] = e.multicast.value;
  j["device"] = e.device.value;
}
void Put(Json& j, const MulticastBound& e) {
  j["multicast"] = e.multicast.value;
  j["multicast_offset"] = e.multicast_offset;
  j["allocation"] = e.allocation.value;
  j["allocation_offset"] = e.allocation_offset;
  j["bytes"] = e.bytes;
  j["address"] = Hex(e.address.value);
}
void Put(Json& j, const MulticastUnbound& e) {
  j["multicast"] = e.multicast.value;
  j["device"] = e.device.value;
  j["multicast_offset"] = e.multicast_offset;
  j["bytes"] = e.bytes;
}
void Put(Json& j, const Registered& e) {
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
  j["how"] = e.how;
}
void Put(Json& j, const Deregistered& e) {
  j["address"] = Hex(e.address.value);
  j["bytes"] = e.bytes;
}
void Put(Json& j, const PassedThrough& e) {
  j["name"] = e.name;
  j["detail"] = e.detail;
  j["result"] = e.result;
}
void Put(Json& j, const CycleBegun& e) {
  j["cycle_kind"] = ToText(e.kind);
  j["cycle"] = e.cycle;
  j["members"] = ToJson(e.members);
}
void Put(Json& j, const StepBegun& e) { j["step"] = ToJson(e.step); }
void Put(Json& j, const StepDone& e) { j["step"] = ToJson(e.step); }
void Put(Json& j, const StepFailed& e) {
  j["step"] = ToJson(e.step);
  j["code"] = ToText(e.code);
  j["driver_result"] = e.driver_result;
  j["message"] = e.message;
}
void Put(Json& j, const PhaseBegun& e) { j["phase"] = ToText(e.phase); }
void Put(Json& j, const PhaseDecided& e) {
  j["phase"] = ToText(e.phase);
  j["passed"] = e.passed;
  j["culprit"] = e.culprit ? Json(SessionText(e.culprit)) : Json(nullptr);
  j["message"] = e.message;
}
void Put(Json& j, const CycleDone& e) {
  j["cycle_kind"] = ToText(e.kind);
  j["cycle"] = e.cycle;
  j["duration_ns"] = e.duration_ns;
}
void Put(Json& j, const CycleFailed& e) {
  j["cycle_kind"] = ToText(e.kind);
  j["cycle"] = e.cycle;
  j["undone"] = e.undone;
  j["message"] = e.message;
}
void Put(Json& j, const SlabOpened& e) {
  j["slab"] = e.slab.value;
  j["address"] = Hex(e.address.value);
}
void Put(Json& j, const Placed& e) {
  j["allocation"] = e.allocation.value;
  j["slab"] = e.slab.value;
  j["offset"] = e.offset;
}
void Put(Json& j, const Backed& e) {
  j["allocation"] = e.allocation.value;
  j["handle"] = Hex(e.handle.value);
}
void Put(Json& j, const PartCleared& e) {
  j["slab"] = e.slab.value;
  j["offset"] = e.offset;
  j["bytes"] = e.bytes;
}
void Put(Json& j, const Condensed& e) {
  j["through"] = e.through.value;
  j["next_allocation"] = e.next_allocation;
  j["cycles"] = e.cycles;
  j["totals"] = e.totals;
}

// ---- parts of a state ------------------------------------------------------------------------------------------------------

Json ToJson(AllocationId id, const Allocation& a) {
  Json j = {{"allocation", id.value}, {"bytes", a.bytes}, {"own", a.own()}};
  if (a.remote) {
    j["owner"] = SessionText(a.remote->owner);
    j["owner_allocation"] = a.remote->allocation.value;
  }
  j["properties"] = ToJson(a.properties);
  j["flags"] = a.flags;
  j["created_seq"] = a.created.value;
  if (a.placed()) {
    j["slab"] = a.slab.value;
    j["offset"] = a.offset;
    j["reserved"] = a.reserved;
    j["touched"] = a.touched;
  }
  j["backed"] = a.resident;
  j["saved"] = a.saved;
  j["stale"] = a.awaiting_restore;
  j["kept"] = WhyKept(a) == KeepReason::kNone ? Json(nullptr) : Json(ToText(WhyKept(a)));
  j["multicast"] = a.multicast;
  j["guest_references"] = a.guest_references;
  j["mappings"] = a.mappings;
  j["exports"] = a.exports;
  j["registrations"] = a.registrations;
  j["multicast_bindings"] = a.multicast_bindings;
  Json importers = Json::array();
  for (const auto& [importer, count] : a.importers) {
    importers.push_back({{"by", SessionText(importer.by)}, {"as", importer.as.value}, {"count", count}});
  }
  j["importers"] = std::move(importers);
  j["site"] = ToJson(a.site);
  return j;
}

Json ToJson(const Cycle& cycle) {
  Json j = {{"kind", ToText(cycle.kind)}, {"number", cycle.number}, {"members", ToJson(cycle.members)}};
  j["phase"] = cycle.phase ? Json(ToText(*cycle.phase)) : Json(nullptr);
  j["open_step"] = cycle.open_step ? ToJson(*cycle.open_step) : Json(nullptr);
  j["failure"] = cycle.failure;
  return j;
}

Json ToJson(const Holdings& h) {
  Json kept = Json::object();
  for (const auto& [reason, bytes] : h.kept) kept[std::string(ToText(reason))] = bytes;
  return {{"own_device_bytes", h.own_device},
          {"own_device_resident_bytes", h.own_device_resident},
          {"imported_bytes", h.imported},
          {"host_bytes", h.host},
          {"async_bytes", h.async},
          {"legacy_kept_bytes", h.legacy_kept},
          {"kept_bytes", std::move(kept)},
          {"own_count", h.own_count},
          {"imported_count", h.imported_count},
          {"slab_bytes", h.slabs},
          {"slab_free_bytes", h.slabs_free},
          {"slab_count", h.slab_count},
          {"imported_slab_count", h.imported_slab_count}};
}

// A list of objects that are `what` the map holds, each with its address first.
template <class Map, class Fill>
Json ByAddress(const Map& map, Fill fill) {
  Json list = Json::array();
  for (const auto& [address, value] : map) {
    Json j = {{"address", Hex(address.value)}};
    fill(j, value);
    list.push_back(std::move(j));
  }
  return list;
}

Json Slabs(const State& state) {
  Json list = Json::array();
  for (const auto& [id, slab] : state.slabs) {
    Json parts = Json::array();
    for (const auto& [offset, at] : slab.parts) {
      for (const AllocationId part : at) parts.push_back({{"offset", offset}, {"allocation", part.value}});
    }
    Json dirty = Json::array();
    for (const auto& [offset, bytes] : slab.dirty) dirty.push_back({{"offset", offset}, {"bytes", bytes}});
    list.push_back({{"slab", id.value}, {"address", Hex(slab.address.value)}, {"parts", parts}, {"dirty", dirty}});
  }
  return list;
}

Json Multicasts(const State& state) {
  Json list = Json::array();
  for (const auto& [id, multicast] : state.multicasts) {
    Json added = Json::array();
    for (DeviceOrdinal device : multicast.added) added.push_back(device.value);
    Json bindings = Json::array();
    for (const auto& [offset, bound] : multicast.bindings) {
      for (const MulticastBinding& b : bound) {
        bindings.push_back({{"multicast_offset", offset},
                            {"allocation", b.allocation.value},
                            {"address", Hex(b.address.value)},
                            {"allocation_offset", b.allocation_offset},
                            {"bytes", b.bytes}});
      }
    }
    list.push_back({{"allocation", id.value}, {"devices", multicast.devices}, {"added", added}, {"bindings", bindings}});
  }
  return list;
}

Json Peers(const State& state) {
  Json list = Json::array();
  for (const auto& [id, peer] : state.peers) {
    list.push_back({{"peer", SessionText(id)},
                    {"host", peer.host},
                    {"pid", peer.pid},
                    {"group", peer.group},
                    {"rank", peer.rank},
                    {"connected", peer.connected},
                    {"lost_reason", peer.lost_reason}});
  }
  return list;
}

Json CountsByKind(const State& state) {
  Json counts = Json::object();
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    if (state.totals.events[kind] != 0) counts[KindWord(kind)] = state.totals.events[kind];
  }
  return counts;
}

Json Libraries(const State& state) {
  Json list = Json::array();
  for (const LibraryAttached& library : state.libraries) {
    Json j;
    Put(j, library);
    list.push_back(std::move(j));
  }
  return list;
}

}  // namespace

std::string SessionText(SessionId session) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(session.value));
  return text;
}

std::string KindWord(std::size_t kind) {
  std::string word(KindName(kind));
  std::replace(word.begin(), word.end(), ' ', '-');
  return word;
}

Json ToJson(const Event& event) {
  Json j = {
      {"seq", event.seq.value}, {"time_ns", event.time_ns}, {"thread", event.thread}, {"kind", KindWord(event.body.index())}};
  std::visit([&j](const auto& body) { Put(j, body); }, event.body);
  return j;
}

Json ToJson(const State& state) {
  Json j;
  j["seq"] = state.last.value;
  j["digest"] = Hex(Digest(state));
  j["lifecycle"] = ToText(state.lifecycle);
  j["broken"] = state.broken;
  Put(j["opened"], state.session);
  j["holdings"] = ToJson(Measure(state));
  j["cycles"] = state.cycles;
  j["cycle"] = ToJson(state.cycle);
  j["next_allocation"] = state.next_allocation;
  j["libraries"] = Libraries(state);
  Json allocations = Json::array();
  for (const auto& [id, allocation] : state.allocations) allocations.push_back(ToJson(id, allocation));
  j["allocations"] = std::move(allocations);
  j["mappings"] = ByAddress(state.mappings, [](Json& m, const Mapping& mapping) {
    m["bytes"] = mapping.bytes;
    m["offset"] = mapping.offset;
    m["allocation"] = mapping.allocation.value;
    m["flags"] = mapping.flags;
    m["access"] = ToJson(mapping.access);
    m["present"] = mapping.present;
    m["accessible"] = mapping.accessible;
  });
  j["slabs"] = Slabs(state);
  j["ranges"] = ByAddress(state.ranges, [](Json& r, const Range& range) {
    r["bytes"] = range.bytes;
    r["alignment"] = range.alignment;
    r["hint"] = Hex(range.hint.value);
    r["flags"] = range.flags;
  });
  j["legacy"] = ByAddress(state.legacy, [](Json& l, const LegacyAllocation& legacy) {
    l["bytes"] = legacy.bytes;
    l["backing"] = legacy.backing.value;
    l["offset"] = legacy.offset;
    l["why"] = legacy.why;
    l["site"] = ToJson(legacy.site);
  });
  j["legacy_imports"] =
      ByAddress(state.legacy_imports, [](Json& l, AllocationId allocation) { l["allocation"] = allocation.value; });
  j["host"] = ByAddress(state.host, [](Json& h, const HostAllocation& host) {
    h["bytes"] = host.bytes;
    h["flags"] = host.flags;
    h["registered"] = host.registered;
  });
  j["async"] = ByAddress(state.async, [](Json& a, Bytes bytes) { a["bytes"] = bytes; });
  j["multicasts"] = Multicasts(state);
  j["registrations"] = ByAddress(state.registrations, [](Json& r, const Registration& registration) {
    r["bytes"] = registration.bytes;
    r["how"] = registration.how;
    r["count"] = registration.count;
  });
  j["peers"] = Peers(state);
  j["events"] = CountsByKind(state);
  return j;
}

}  // namespace amem
