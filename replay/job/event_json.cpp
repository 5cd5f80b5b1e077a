#include "replay/job/event_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "statemachine/apply.h"
#include "statemachine/fields.h"

namespace amem {

using Json = nlohmann::ordered_json;

namespace {

// What is told of a part of a state, in its order. `to` shows a value as JSON (Shown), or says of which form any value is
// (Form): JSON and its schema cannot disagree, because there is one telling of both. (Declared here for the templates below.)
template <class To>
void Tell(To& to, const Holdings& holdings);
template <class To>
void Tell(To& to, const State& state);
template <class To, Described T>
void Tell(To& to, const T& value) {
  ForEachField(value, to);
}

template <class T>
concept Word = std::is_enum_v<T> && !std::is_same_v<T, LocationType>;  // shown as one; a location's type as CUDA's number

// Not inlined into the hundreds of fields that events have, which would take long to compile; so are others below.
[[gnu::noinline]] void Set(Json& j, std::string_view name, Json value) { j[std::string(name)] = std::move(value); }

// ---- a value as JSON -------------------------------------------------------------------------------------------------------

template <class T>
Json Show(const T& value);
Json Show(const std::string& text) { return text; }
template <class What>
Json Show(const Text<What>& text) {
  return static_cast<const std::string&>(text);
}
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
  return value.field != T{} ? Show(value.field) : Json(nullptr);
}
template <class T>
Json Show(const std::optional<T>& value) {
  return value ? Show(*value) : Json(nullptr);
}
template <class T>
Json Show(const std::vector<T>& list) {
  Json shown = Json::array();
  for (const T& element : list) shown.push_back(Show(element));
  return shown;
}
template <Word Key, class T>
Json Show(const std::map<Key, T>& map) {
  Json shown = Json::object();
  for (const auto& [key, value] : map) Set(shown, ToText(key), Show(value));
  return shown;
}

Json Show(const Totals& totals) {
  Json counts = Json::object();
  for (std::size_t kind = 0; kind < kEventKinds; ++kind)
    if (totals.events[kind] != 0) counts[KindWord(kind)] = totals.events[kind];
  return counts;
}

struct Shown {
  Json json = Json::object();

  template <class T>
  [[gnu::noinline]] void operator()(std::string_view name, const T& field, const char* /*description*/ = nullptr) {
    Set(json, name, Show(field));
  }
  template <class T>
  [[gnu::noinline]] void operator()(std::string_view name, const IfAny<T>& value) {
    If(value.field != T{}, name, value.field);
  }
  template <class T>
  void operator()(std::string_view, const Unlisted<T>&) {}
  void operator()(std::string_view, const RemoteAllocation& remote) { Tell(*this, remote); }
  // A field that is there only when something holds.
  template <class T>
  void If(bool told, std::string_view name, const T& field, const char* /*description*/ = nullptr) {
    if (told) Set(json, name, Show(field));
  }
  // A list of objects, pairs of a key and what is under it: `each` tells one.
  template <class List, class Each>
  void Rows(std::string_view name, const List& list, const Each& each, const char* /*description*/ = nullptr) {
    Json rows = Json::array();
    for (const auto& [key, value] : list) {
      Shown row;
      each(row, key, value);
      rows.push_back(std::move(row.json));
    }
    Set(json, name, std::move(rows));
  }
};

template <class T>
Json Object(const T& value) {
  Shown object;
  Tell(object, value);
  return std::move(object.json);
}
template <class T>
Json Show(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return ToText(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return value;
  } else {
    return Object(value);
  }
}

// ---- the form of any value of a type, in words of JSON Schema --------------------------------------------------------------

const char* const kSessionRef = "#/$defs/session";
const char* const kHex = "#/$defs/hex";

template <class T>
Json FormOf(const T& any);
Json FormOf(const std::string&) { return {{"type", "string"}}; }
template <class What>
Json FormOf(const Text<What>& text) {
  return FormOf(static_cast<const std::string&>(text));
}
Json FormOf(SessionId) { return {{"$ref", kSessionRef}}; }
Json FormOf(Address) { return {{"$ref", kHex}}; }
Json FormOf(DriverHandle) { return {{"$ref", kHex}}; }
Json FormOf(const CallSite&) { return {{"type", "array"}, {"items", {{"$ref", kHex}}}}; }
template <class Tag, class Rep>
Json FormOf(Id<Tag, Rep>) {
  return FormOf(Rep{});
}
template <class T>
Json FormOf(const Hexadecimal<T>&) {
  return {{"$ref", kHex}};
}
Json OrNothing(Json form) { return {{"anyOf", {std::move(form), {{"type", "null"}}}}}; }
template <class T>
Json FormOf(const OrNull<T>&) {
  return OrNothing(FormOf(T{}));
}
template <class T>
Json FormOf(const std::optional<T>&) {
  return OrNothing(FormOf(T{}));
}
template <class T>
Json FormOf(const std::vector<T>&) {
  return {{"type", "array"}, {"items", FormOf(T{})}};
}
template <Word Key, class T>
Json FormOf(const std::map<Key, T>&) {
  return {{"type", "object"}, {"additionalProperties", FormOf(T{})}};
}

Json FormOf(const Totals&) { return {{"type", "object"}, {"additionalProperties", FormOf(std::uint64_t{})}}; }

struct Form {
  Json json = {{"type", "object"}, {"required", Json::array()}, {"properties", Json::object()}};

  template <class T>
  [[gnu::noinline]] void operator()(std::string_view name, const T& field, const char* description = nullptr) {
    Add(true, name, FormOf(field), description);
  }
  template <class T>
  [[gnu::noinline]] void operator()(std::string_view name, const IfAny<T>& value) {
    If(true, name, value.field);
  }
  template <class T>
  void operator()(std::string_view, const Unlisted<T>&) {}
  void operator()(std::string_view, const RemoteAllocation& remote) { Tell(*this, remote); }
  template <class T>
  void If(bool, std::string_view name, const T& field, const char* description = nullptr) {
    Add(false, name, FormOf(field), description);
  }
  template <class List, class Each>
  void Rows(std::string_view name, const List&, const Each& each, const char* description = nullptr) {
    Form row;
    const typename List::value_type any{};
    each(row, any.first, any.second);
    Add(true, name, {{"type", "array"}, {"items", std::move(row.json)}}, description);
  }

 private:
  [[gnu::noinline]] void Add(bool required, std::string_view name, Json form, const char* description) {
    if (description != nullptr) form["description"] = description;
    if (required) json["required"].push_back(name);
    Set(json["properties"], name, std::move(form));
  }
};

template <class T>
Json FormOf(const T& any) {
  if constexpr (Word<T>) {
    Json words = Json::array();
    for (unsigned i = 0; i <= static_cast<unsigned>(EnumeratorsOf(T{}).last); ++i) words.push_back(ToText(static_cast<T>(i)));
    return {{"enum", std::move(words)}};
  } else if constexpr (std::is_same_v<T, bool>) {
    return {{"type", "boolean"}};
  } else if constexpr (std::is_enum_v<T> || std::is_unsigned_v<T>) {
    return {{"type", "integer"}, {"minimum", 0}};
  } else if constexpr (std::is_signed_v<T>) {
    return {{"type", "integer"}};
  } else {
    Form form;
    Tell(form, any);
    return std::move(form.json);
  }
}

// ---- parts of a state ------------------------------------------------------------------------------------------------------

// A row with its key first, an address or the id of a peer, and then the fields or the one value of what is held.
auto Keyed(const char* key) {
  return [key](auto& to, const auto& id, const auto& value) {
    to(key, id);
    Tell(to, value);
  };
}
auto Keyed(const char* key, const char* name) {
  return [key, name](auto& to, const auto& id, const auto& value) {
    to(key, id);
    to(name, value);
  };
}

constexpr auto kAllocation = [](auto& to, AllocationId id, const Allocation& a) {
  to("allocation", id);
  to("bytes", a.bytes);
  to("own", a.own());
  const RemoteAllocation remote = a.remote.value_or(RemoteAllocation{});
  to.If(!a.own(), "owner", remote.owner);
  to.If(!a.own(), "owner_allocation", remote.allocation);
  to("properties", a.properties);
  to("flags", a.flags);
  to("created_seq", a.created);
  to.If(a.placed(), "slab", a.slab);
  to.If(a.placed(), "offset", a.offset);
  to.If(a.placed(), "reserved", a.reserved);
  to.If(a.placed(), "touched", a.touched);
  to("backed", a.resident);
  to("saved", a.saved);
  to("stale", a.awaiting_restore);
  to("kept", WhyKept(a) == KeepReason::kNone ? std::nullopt : std::optional(WhyKept(a)), "Why a pause leaves it in place");
  to("tag", IfAny{a.tag});
  to.If(static_cast<bool>(a.pool), "pool", a.pool, "Whose chunk it is");
  to("communicator", IfAny{a.communicator});
  to("multicast", a.multicast);
  to("guest_references", a.guest_references);
  to("mappings", a.mappings);
  to("exports", a.exports);
  to("registrations", a.pinned);
  to("renewable", IfAny{a.renewable});
  to("multicast_bindings", a.multicast_bindings);
  to.Rows("importers", a.importers, [](auto& row, const Importer& importer, std::uint32_t count) {
    row("by", importer.by);
    row("as", importer.as);
    row("count", count);
  });
  to("site", a.site);
};

template <class To>
void Tell(To& to, const Holdings& h) {
  to("own_device_bytes", h.own_device);
  to("own_device_resident_bytes", h.own_device_resident);
  to("user_bytes", h.user);
  to("user_resident_bytes", h.user_resident);
  to("imported_bytes", h.imported);
  to("host_bytes", h.host);
  to("async_bytes", h.async);
  to("legacy_kept_bytes", h.legacy_kept);
  to("kept_bytes", h.kept);
  to("own_count", h.own_count);
  to("imported_count", h.imported_count);
  to("slab_bytes", h.slabs);
  to("slab_free_bytes", h.slabs_free);
  to("slab_count", h.slab_count);
  to("imported_slab_count", h.imported_slab_count);
  to("pool_bytes", h.pools, "Chunks of all pools");
  to("pool_resident_bytes", h.pools_resident);
}

constexpr auto kSlab = [](auto& to, AllocationId id, const Slab& slab) {
  to("slab", id);
  to("address", slab.address);
  std::vector<std::pair<Bytes, AllocationId>> parts;
  for (const auto& [offset, at] : slab.parts)
    for (const AllocationId part : at) parts.emplace_back(offset, part);
  to.Rows("parts", parts, Keyed("offset", "allocation"));
  to.Rows("dirty", slab.dirty, Keyed("offset", "bytes"));
};

constexpr auto kMulticast = [](auto& to, AllocationId id, const Multicast& multicast) {
  to("allocation", id);
  to("devices", multicast.devices);
  to("added", multicast.added);
  to.Rows("bindings", multicast.bindings, Keyed("multicast_offset"));
};

void TellPool(auto& to, PoolId id, const PoolHoldings& holdings, const Pool& pool) {
  to("pool", id);
  to("tag", pool.tag);
  to("policy", pool.policy);
  to("lifecycle", pool.lifecycle);
  to("cycles", pool.cycles, "Pauses of it begun");
  to("cycle", pool.cycle);
  to("bytes", holdings.own, "Of its chunks");
  to("resident_bytes", holdings.own_resident, "Of these, on devices now");
  to("kept_bytes", holdings.kept, "What a pause leaves in place, by reason");
  to("part_bytes", holdings.parts, "In use: given out by amem_alloc");
  to("chunk_count", holdings.chunk_count);
  to("part_count", holdings.part_count);
  to("devices", std::vector(holdings.devices.begin(), holdings.devices.end()));
}

template <class To>
void Tell(To& to, const State& state) {
  const std::uint64_t digest = Digest(state);
  const auto pools = MeasurePools(state);
  to("seq", state.last);
  to("digest", Hexadecimal{digest}, "The same for the same events on every machine");
  to("lifecycle", state.lifecycle);
  to("broken", state.broken);
  to("opened", state.session, "Who wrote it");
  to("holdings", Measure(state), "Bytes that it holds");
  to("cycles", state.cycles);
  to("cycle", state.cycle);
  to("next_allocation", state.next_allocation);
  to("libraries", state.libraries);
  to.Rows("allocations", state.allocations, kAllocation);
  to.Rows("mappings", state.mappings, Keyed("address"));
  to.Rows("slabs", state.slabs, kSlab);
  to.Rows("ranges", state.ranges, Keyed("address"));
  const auto held = [](auto& row, const auto&, const auto& event) { Tell(row, event); };
  to.Rows("legacy", state.legacy, held, "cuMemAlloc");
  to.Rows("legacy_imports", state.legacy_imports, held);
  to.Rows("host", state.host, held);
  to.Rows("async", state.async, held, "cuMemAllocAsync");
  to.Rows("multicasts", state.multicasts, kMulticast);
  to.Rows("registrations", state.registrations, [](auto& row, const auto& of, const Registration& registration) {
    row("address", of.first);
    row("library", IfAny{of.second});
    Tell(row, registration);
  });
  to.Rows("regions", state.regions, Keyed("region"),
          "Registrations with network cards that a pause undoes and a resume does again");
  to.Rows(
      "shared_outside", state.outside,
      [](auto& row, const auto& of, const OutsideShare& share) {
        row("library", of.first);
        row("sharing", of.second);
        Tell(row, share);
      },
      "What other libraries share with other processes past AMem");
  to.Rows("peers", state.peers, Keyed("peer"));
  to.Rows(
      "pools", pools,
      [&](auto& row, PoolId id, const PoolHoldings& holdings) {
        const auto pool = state.pools.find(id);
        TellPool(row, id, holdings, pool == state.pools.end() ? Pool{} : pool->second);
      },
      "Memory of the program under tags");
  to.Rows("communicators", state.communicators, Keyed("communicator"));
  to("events", state.totals, "How many events there were of each kind");
}

template <class Kind>
[[gnu::noinline]] Json FormOfKind() {
  return FormOf(Kind{});
}

}  // namespace

std::string SessionText(SessionId session) { return fmt::format("{:016x}", session.value); }

std::string KindWord(std::size_t kind) {
  std::string word(KindName(kind));
  std::replace(word.begin(), word.end(), ' ', '-');
  return word;
}

Json ToJson(const Step& step) { return Object(step); }
Json ToJson(const SavedContents& contents) { return Object(contents); }
Json ToJson(const PauseContents& contents) { return Object(contents); }

Json ToJson(const Event& event) {
  Shown to{
      {{"seq", event.seq.value}, {"time_ns", event.time_ns}, {"thread", event.thread}, {"kind", KindWord(event.body.index())}}};
  std::visit([&to](const auto& body) { Tell(to, body); }, event.body);
  return std::move(to.json);
}

Json ToJson(const State& state) { return Object(state); }

Json EventForms() {
  Json forms = Json::array();
  const auto add = [&forms](Json then) {
    then.erase("type");
    forms.push_back({{"if", {{"properties", {{"kind", {{"const", KindWord(forms.size())}}}}}}}, {"then", std::move(then)}});
  };
  [&]<class... Kinds>(const std::variant<Kinds...>*) {
    (add(FormOfKind<Kinds>()), ...);
  }(static_cast<const EventVariant*>(nullptr));
  return forms;
}

Json StateForm() { return FormOf(State{}); }

}  // namespace amem
