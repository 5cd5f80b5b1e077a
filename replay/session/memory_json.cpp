// Memory by tag, for programs.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "replay/session/session.h"

namespace amem {
namespace {

using nlohmann::json;

json InMs(std::uint64_t ns) { return ns == 0 ? json(nullptr) : json(static_cast<double>(ns) / 1e6); }

std::string_view StateOf(Lifecycle lifecycle) {
  return lifecycle == Lifecycle::kPausing    ? "pausing"
         : lifecycle == Lifecycle::kPaused   ? "paused"
         : lifecycle == Lifecycle::kResuming ? "resuming"
                                             : "resident";
}

json DevicesOf(const std::vector<DeviceOrdinal>& devices) {
  json all = json::array();
  for (const DeviceOrdinal device : devices) all.push_back(device.value);
  return all;
}

json KeptOf(const std::map<KeepReason, Bytes>& kept) {
  json all = json::object();
  for (const auto& [reason, bytes] : kept) all[std::string(ToText(reason))] = bytes;
  return all;
}

Bytes SumOfKept(const std::map<KeepReason, Bytes>& kept) {
  Bytes sum = 0;
  for (const auto& [reason, bytes] : kept) sum += bytes;
  return sum;
}

// Of the last pause, and what is pinned now.
json OfContents(const BackupStatistics& s) {
  return {{"pinned_bytes", s.held_bytes},
          {"pinned_kept_bytes", s.kept_bytes},
          {"saved_bytes", s.bytes_saved},
          {"unchanged_bytes", s.bytes_unchanged},
          {"zero_bytes", s.bytes_zero}};
}

json OfPool(const Pools::Standing& pool, const PoolHoldings& held) {
  json row{{"tag", pool.tag},
           {"policy", ToText(pool.policy)},
           {"state", pool.state},
           {"bytes", held.own},
           {"resident_bytes", held.own_resident},
           {"kept_bytes", SumOfKept(held.kept)},
           {"kept", KeptOf(held.kept)},
           {"part_bytes", held.parts},
           {"parts", held.part_count},
           {"chunks", held.chunk_count},
           {"devices", DevicesOf(held.devices)},
           {"pinned_in_pause_bytes", pool.contents.pinned_in_save},
           {"not_prepared_because", pool.contents.not_prepared},
           {"last_pause_ms", InMs(pool.pause_ns)},
           {"last_resume_ms", InMs(pool.resume_ns)},
           {"failure", pool.failure}};
  row.update(OfContents(pool.contents));
  return row;
}

// NCCL's own memory, or what the program got from ncclMemAlloc.
struct OfSession {
  Bytes bytes = 0, resident = 0;
  std::uint64_t parts = 0;
  std::map<KeepReason, Bytes> kept;
  std::set<DeviceOrdinal> devices;
};

// What MemoryJson() needs of a state, which is large: it is looked at, and not copied.
struct Look {
  Lifecycle lifecycle;
  std::string failure;
  std::map<PoolId, PoolHoldings> pools;
  OfSession nccl, user;
};

Look LookAt(const State& state) {
  Look look{state.lifecycle, state.cycle.failure, MeasurePools(state), {}, {}};
  for (const auto& [id, a] : state.allocations) {
    if (!a.own() || !a.on_device() || a.multicast || a.pool) continue;
    OfSession& sum = a.tag == MemoryTag::kNccl ? look.nccl : look.user;
    sum.devices.insert(DeviceOrdinal{a.properties.location.id});
    if (!state.slabs.contains(id)) {
      ++sum.parts;
      sum.bytes += a.bytes;
    }
    if (a.placed()) continue;
    if (a.resident) sum.resident += a.bytes;
    if (const KeepReason why = WhyKept(a); why != KeepReason::kNone) sum.kept[why] += a.bytes;
  }
  return look;
}

json OfSessionMemory(const char* tag, const char* policy, const Look& look, const OfSession& sum,
                     const BackupStatistics& contents, const CycleReport& pause, const CycleReport& resume) {
  json row{{"tag", tag},
           {"policy", policy},
           {"state", StateOf(look.lifecycle)},
           {"bytes", sum.bytes},
           {"resident_bytes", sum.resident},
           {"kept_bytes", SumOfKept(sum.kept)},
           {"kept", KeptOf(sum.kept)},
           {"parts", sum.parts},
           {"devices", DevicesOf({sum.devices.begin(), sum.devices.end()})},
           {"last_pause_ms", InMs(pause.total_ns)},
           {"last_resume_ms", InMs(resume.total_ns)},
           {"failure", look.failure}};
  row.update(OfContents(contents));
  return row;
}

}  // namespace

std::string Session::MemoryJson() {
  const std::vector<Pools::Standing> standing = pools_->Stand();
  Look look = Inspect([](const State& state) { return LookAt(state); });
  json tags = json::array();
  for (const Pools::Standing& pool : standing) tags.push_back(OfPool(pool, look.pools[pool.id]));
  const CycleReport pause = coordinator_->Last(CycleKind::kPause), resume = coordinator_->Last(CycleKind::kResume);
  tags.push_back(OfSessionMemory("nccl", "preserve", look, look.nccl, coordinator_->Contents(), pause, resume));
  const bool released = options_.user_memory == UserMemory::kRelease;
  tags.push_back(OfSessionMemory("user", released ? "preserve" : "keep", look, look.user, {}, released ? pause : CycleReport{},
                                 released ? resume : CycleReport{}));
  return json{{"schema", 1}, {"tags", tags}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace amem
