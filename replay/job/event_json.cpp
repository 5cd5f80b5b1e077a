#include "replay/job/event_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "replay/job/json_form.h"
#include "statemachine/apply.h"

namespace amem {

namespace {

// ---- parts of a state ------------------------------------------------------------------------------------------------------

// A row with its key first, an address or the id of a peer, and then the fields or the one value of what is held.
auto Keyed(const char* key) {
  return [key](auto& to, const auto& id, const auto& value) {
    to(key, id);
    WriteFields(to, value);
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

void WritePool(auto& to, PoolId id, const PoolHoldings& holdings, const Pool& pool) {
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

template <class Kind>
[[gnu::noinline]] Json FormOfKind() {
  return FormOf(Kind{});
}

struct KindOfEvent {
  std::size_t index;
};
Json Show(KindOfEvent kind) { return KindWord(kind.index); }
Json FormOf(KindOfEvent) { return {{"type", "string"}, {"pattern", "^[a-z0-9-]+$"}}; }  // an open list

// What events of every kind have.
void WriteHead(auto& to, const Event& event) {
  to("seq", event.seq, "Its number in the journal, from 1");
  to("time_ns", event.time_ns, "CLOCK_MONOTONIC of the host");
  to("thread", event.thread);
  to("kind", KindOfEvent{event.body.index()});
}

}  // namespace

template <class To>
void WriteFields(To& to, const Holdings& h) {
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

template <class To>
void WriteFields(To& to, const State& state) {
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
  const auto held = [](auto& row, const auto&, const auto& event) { WriteFields(row, event); };
  to.Rows("legacy", state.legacy, held, "cuMemAlloc");
  to.Rows("legacy_imports", state.legacy_imports, held);
  to.Rows("host", state.host, held);
  to.Rows("async", state.async, held, "cuMemAllocAsync");
  to.Rows("multicasts", state.multicasts, kMulticast);
  to.Rows("registrations", state.registrations, [](auto& row, const auto& of, const Registration& registration) {
    row("address", of.first);
    row("library", IfAny{of.second});
    WriteFields(row, registration);
  });
  to.Rows("regions", state.regions, Keyed("region"),
          "Registrations with network cards that a pause undoes and a resume does again");
  to.Rows(
      "shared_outside", state.outside,
      [](auto& row, const auto& of, const OutsideShare& share) {
        row("library", of.first);
        row("sharing", of.second);
        WriteFields(row, share);
      },
      "What other libraries share with other processes past AMem");
  to.Rows("peers", state.peers, Keyed("peer"));
  to.Rows(
      "pools", pools,
      [&](auto& row, PoolId id, const PoolHoldings& holdings) {
        const auto pool = state.pools.find(id);
        WritePool(row, id, holdings, pool == state.pools.end() ? Pool{} : pool->second);
      },
      "Memory of the program under tags");
  to.Rows("communicators", state.communicators, Keyed("communicator"));
  to("events", state.totals, "How many events there were of each kind");
}

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
  Shown to;
  WriteHead(to, event);
  std::visit([&to](const auto& body) { WriteFields(to, body); }, event.body);
  return std::move(to.json);
}

Json ToJson(const State& state) { return Object(state); }

Json EventForm() {
  Form form;
  WriteHead(form, Event{});
  Json& forms = form.json["allOf"] = Json::array();
  const auto add = [&forms](Json then) {
    then.erase("type");
    forms.push_back({{"if", {{"properties", {{"kind", {{"const", KindWord(forms.size())}}}}}}}, {"then", std::move(then)}});
  };
  [&]<class... Kinds>(const std::variant<Kinds...>*) {
    (add(FormOfKind<Kinds>()), ...);
  }(static_cast<const EventVariant*>(nullptr));
  return std::move(form.json);
}

Json StateForm() { return FormOf(State{}); }

}  // namespace amem
