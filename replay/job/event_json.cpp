#include "replay/job/event_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "statemachine/apply.h"
#include "statemachine/fields.h"

namespace amem {

using Json = nlohmann::ordered_json;

namespace {

Json Object(const auto& value);
template <class T>
Json Show(const T& value);

// ---- one overload for each way in which a field is shown -----------------------------------------------------------------

Json Show(const std::string& text) { return text; }
Json Show(SessionId id) { return SessionText(id); }
Json Show(Address address) { return Hex(address.value); }
Json Show(DriverHandle handle) { return Hex(handle.value); }
Json Show(LocationType type) { return static_cast<std::uint32_t>(type); }
Json Show(const CallSite& site) {
  Json frames = Json::array();
  for (const std::uint64_t frame : site.frames) {
    if (frame == 0) break;
    frames.push_back(Hex(frame));
  }
  return frames;
}
template <class Tag, class Rep>
Json Show(Id<Tag, Rep> id) {
  return id.value;
}
template <class T>
Json Show(const Hexadecimal<T>& hexadecimal) {
  return Hex(hexadecimal.field);
}
template <class T>
Json Show(const OrNull<T>& value) {
  return value.field ? Show(value.field) : Json(nullptr);
}
template <class T>
Json Show(const std::vector<T>& list) {
  Json shown = Json::array();
  for (const T& element : list) shown.push_back(Show(element));
  return shown;
}
template <class T>
Json Show(const T& value) {
  if constexpr (Described<T>) {
    return Object(value);
  } else if constexpr (std::is_enum_v<T>) {
    return ToText(value);
  } else {
    static_assert(std::is_arithmetic_v<T>);
    return value;
  }
}

// Not inlined into the hundreds of fields that events have, which would take long to compile.
[[gnu::noinline]] void Set(Json& j, std::string_view name, Json value) { j[std::string(name)] = std::move(value); }

template <class T>
void PutField(Json& j, std::string_view name, const T& field) {
  Set(j, name, Show(field));
}
template <class T>
void PutField(Json& j, std::string_view name, const IfAny<T>& value) {
  if (value.field != T{}) Set(j, name, Show(value.field));
}
template <class T>
void PutField(Json&, std::string_view, const Unlisted<T>&) {}

// Adds the fields of an event, or of a part of a state, to an object.
template <class T>
void Put(Json& j, const T& value) {
  ForEachField(value, [&j](std::string_view name, const auto& field) {
    if constexpr (std::is_same_v<decltype(field), const RemoteAllocation&>) {
      Put(j, field);
    } else {
      PutField(j, name, field);
    }
  });
}

Json Object(const auto& value) {
  Json j = Json::object();
  Put(j, value);
  return j;
}

// ---- parts of a state ------------------------------------------------------------------------------------------------------

Json ToJson(AllocationId id, const Allocation& a) {
  Json j = {{"allocation", id.value}, {"bytes", a.bytes}, {"own", a.own()}};
  if (a.remote) Put(j, *a.remote);
  j["properties"] = Object(a.properties);
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
  if (a.tag != MemoryTag::kNccl) j["tag"] = ToText(a.tag);
  if (a.pool) j["pool"] = a.pool.value;
  if (a.communicator) j["communicator"] = a.communicator.value;
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
  j["site"] = Show(a.site);
  return j;
}

Json ToJson(const Cycle& cycle) {
  Json j = {{"kind", ToText(cycle.kind)}, {"number", cycle.number}, {"members", Show(cycle.members)}};
  j["phase"] = cycle.phase ? Json(ToText(*cycle.phase)) : Json(nullptr);
  j["open_step"] = cycle.open_step ? Object(*cycle.open_step) : Json(nullptr);
  j["failure"] = cycle.failure;
  return j;
}

Json ToJson(const Holdings& h) {
  Json kept = Json::object();
  for (const auto& [reason, bytes] : h.kept) kept[std::string(ToText(reason))] = bytes;
  return {{"own_device_bytes", h.own_device},
          {"own_device_resident_bytes", h.own_device_resident},
          {"user_bytes", h.user},
          {"user_resident_bytes", h.user_resident},
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
          {"imported_slab_count", h.imported_slab_count},
          {"pool_bytes", h.pools},
          {"pool_resident_bytes", h.pools_resident}};
}

// A list of objects, each with its key first: an address, or the id of a peer.
template <class Map>
Json Listed(const char* key, const Map& map) {
  Json list = Json::array();
  for (const auto& [id, value] : map) {
    Json j = {{key, Show(id)}};
    Put(j, value);
    list.push_back(std::move(j));
  }
  return list;
}

// The same where what is held is one value.
template <class Map>
Json Listed(const char* key, const Map& map, const char* name) {
  Json list = Json::array();
  for (const auto& [id, value] : map) list.push_back({{key, Show(id)}, {name, Show(value)}});
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
    Json bindings = Json::array();
    for (const auto& [offset, bound] : multicast.bindings) {
      for (const MulticastBinding& b : bound) {
        Json j = {{"multicast_offset", offset}};
        Put(j, b);
        bindings.push_back(std::move(j));
      }
    }
    list.push_back(
        {{"allocation", id.value}, {"devices", multicast.devices}, {"added", Show(multicast.added)}, {"bindings", bindings}});
  }
  return list;
}

Json Pools(const State& state) {
  Json list = Json::array();
  for (const auto& [id, holdings] : MeasurePools(state)) {
    const Pool& pool = state.pools.at(id);
    Json kept = Json::object(), devices = Json::array();
    for (const auto& [reason, bytes] : holdings.kept) kept[std::string(ToText(reason))] = bytes;
    for (const DeviceOrdinal device : holdings.devices) devices.push_back(device.value);
    list.push_back({{"pool", id.value},
                    {"tag", pool.tag},
                    {"policy", ToText(pool.policy)},
                    {"lifecycle", ToText(pool.lifecycle)},
                    {"cycles", pool.cycles},
                    {"cycle", ToJson(pool.cycle)},
                    {"bytes", holdings.own},
                    {"resident_bytes", holdings.own_resident},
                    {"kept_bytes", std::move(kept)},
                    {"part_bytes", holdings.parts},
                    {"chunk_count", holdings.chunk_count},
                    {"part_count", holdings.part_count},
                    {"devices", std::move(devices)}});
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

}  // namespace

std::string SessionText(SessionId session) { return fmt::format("{:016x}", session.value); }

std::string KindWord(std::size_t kind) {
  std::string word(KindName(kind));
  std::replace(word.begin(), word.end(), ' ', '-');
  return word;
}

Json ToJson(const Step& step) { return Object(step); }

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
  j["libraries"] = Show(state.libraries);
  Json allocations = Json::array();
  for (const auto& [id, allocation] : state.allocations) allocations.push_back(ToJson(id, allocation));
  j["allocations"] = std::move(allocations);
  j["mappings"] = Listed("address", state.mappings);
  j["slabs"] = Slabs(state);
  j["ranges"] = Listed("address", state.ranges);
  j["legacy"] = Listed("address", state.legacy);
  j["legacy_imports"] = Listed("address", state.legacy_imports, "allocation");
  j["host"] = Listed("address", state.host);
  j["async"] = Listed("address", state.async, "bytes");
  j["multicasts"] = Multicasts(state);
  j["registrations"] = Listed("address", state.registrations);
  j["peers"] = Listed("peer", state.peers);
  j["pools"] = Pools(state);
  j["communicators"] = Listed("communicator", state.communicators);
  j["events"] = CountsByKind(state);
  return j;
}

}  // namespace amem
