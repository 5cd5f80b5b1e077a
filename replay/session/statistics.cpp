#include "replay/session/statistics.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "statemachine/account.h"

namespace amem {
namespace {

using nlohmann::json;

double Ms(std::uint64_t ns) { return static_cast<double>(ns) / 1e6; }

json Phases(const CycleReport& report) {
  json phases = json::array();
  for (const PhaseTime& p : report.phases) {
    phases.push_back({{"phase", ToText(p.phase)},
                      {"work_ms", Ms(p.work_ns)},
                      {"wait_ms", Ms(p.wait_ns)},
                      {"voted_at_ms", Ms(p.voted_at_ns)},
                      {"decided_at_ms", Ms(p.decided_at_ns)}});
  }
  return {{"cycle", report.cycle}, {"total_ms", Ms(report.total_ns)}, {"sessions", report.members}, {"phases", phases}};
}

// Each phase of the operation is there from the start, at zero: a counter that appears with its first failure hides that
// failure from whoever watches for an increase.
json Sums(CycleTotals totals, PhaseKind first, PhaseKind last) {
  for (int phase = static_cast<int>(first); phase <= static_cast<int>(last); ++phase)
    totals.phases.try_emplace(static_cast<PhaseKind>(phase));
  json phases = json::object();
  for (const auto& [phase, sum] : totals.phases) {
    phases[std::string(ToText(phase))] = {
        {"work_ms", Ms(sum.work_ns)}, {"wait_ms", Ms(sum.wait_ns)}, {"failures", sum.failures}};
  }
  return {{"done", totals.done}, {"total_ms", Ms(totals.total_ns)}, {"phases", phases}};
}

json Pauses(CycleTotals totals) { return Sums(std::move(totals), PhaseKind::kPauseArrive, PhaseKind::kPauseGone); }
json Resumes(CycleTotals totals) { return Sums(std::move(totals), PhaseKind::kResumeArrive, PhaseKind::kResumeOpen); }

json Contents(const BackupStatistics& s) {
  return {{"bytes", s.bytes_total},
          {"saved_bytes", s.bytes_saved},
          {"unchanged_bytes", s.bytes_unchanged},
          {"zero_bytes", s.bytes_zero},
          {"pinned_bytes", s.pinned_bytes},
          {"pinned_kept_bytes", s.kept_bytes},
          {"pinned_in_pause_bytes", s.pinned_in_save},
          {"scan_ms", Ms(s.scan_ns)},
          {"pin_ms", Ms(s.pin_ns)},
          {"save_copy_ms", Ms(s.save_copy_ns)},
          {"restore_ms", Ms(s.restore_ns)},
          {"copied_whole_because", s.unscanned},
          {"not_prepared_because", s.not_prepared}};
}

json ByCallSite(const State& state) {
  struct Sum {
    std::uint64_t count = 0;
    Bytes bytes = 0;
  };
  std::map<std::string, Sum> sums;
  for (const auto& [id, a] : state.allocations) {
    if (!a.own() || a.pool) continue;
    Sum& sum = sums[ToText(a.site)];
    ++sum.count;
    sum.bytes += a.bytes;
  }
  json out = json::array();
  for (const auto& [site, sum] : sums) out.push_back({{"call_site", site}, {"allocations", sum.count}, {"bytes", sum.bytes}});
  return out;
}

json ByKind(const Account& account) {
  json out = json::array();
  for (const auto& [kind, sum] : account.kinds) out.push_back({{"kind", kind}, {"bytes", sum.bytes}, {"stays", sum.stays}});
  return out;
}

// As its directory is called.
std::string Name(SessionId session) { return fmt::format("{:016x}", session.value); }

json ByPeer(const State& state) {
  std::map<SessionId, std::pair<Bytes, Bytes>> sums;  // imported from, lent to
  for (const auto& [id, a] : state.allocations) {
    if (a.remote) sums[a.remote->owner].first += a.bytes;
    for (const auto& [importer, count] : a.importers) sums[importer.by].second += a.bytes;
  }
  json out = json::array();
  for (const auto& [id, peer] : state.peers) {
    const auto& [imported, lent] = sums[id];
    out.push_back({{"session", Name(id)},
                   {"host", peer.host},
                   {"pid", peer.pid},
                   {"rank", peer.rank < 0 ? json() : json(peer.rank)},
                   {"group", peer.group},
                   {"connected", peer.connected},
                   {"imported_bytes", imported},
                   {"lent_bytes", lent}});
  }
  return out;
}

// Living communicators and what was made for each; the last entry is NCCL's memory of unknown communicators.
json ByCommunicator(const State& state) {
  std::map<CommunicatorId, CommunicatorHoldings> sums = MeasureCommunicators(state);
  const auto figures = [&](CommunicatorId id) {
    const CommunicatorHoldings& sum = sums[id];
    return json{{"bytes", sum.own},
                {"released_bytes", sum.own - std::min(sum.own, sum.own_present)},
                {"kept_bytes", sum.own_kept},
                {"imported_bytes", sum.imported},
                {"allocations", sum.own_count}};
  };
  json out = json::array();
  for (const auto& [id, c] : state.communicators) {
    json one = {{"communicator", id.value}, {"hash", c.hash == 0 ? json(nullptr) : json(Hex(c.hash))},
                {"rank", c.rank},           {"ranks", c.ranks},
                {"device", c.device.value}, {"how", c.how},
                {"parent", c.parent.value}, {"suspended", c.suspended},
                {"ended", c.ended}};
    one.update(figures(id));
    out.push_back(std::move(one));
  }
  json unknown = {{"communicator", nullptr}};
  unknown.update(figures({}));
  out.push_back(std::move(unknown));
  return out;
}

Bytes Kept(const PoolHoldings& held) {
  Bytes sum = 0;
  for (const auto& [reason, bytes] : held.kept) sum += bytes;
  return sum;
}

json ByReason(const std::map<KeepReason, Bytes>& kept) {
  json all = json::object();
  for (const auto& [reason, bytes] : kept) all[std::string(ToText(reason))] = bytes;
  return all;
}

json ByWhy(const std::map<std::string, CardHoldings::Regions>& pinned) {
  json all = json::object();
  for (const auto& [why, regions] : pinned) all[why] = regions.bytes;
  return all;
}

json ByCard(const std::map<std::string, CardHoldings>& cards) {
  json all = json::array();
  for (const auto& [name, card] : cards)
    all.push_back({{"card", name.empty() ? json() : json(name)},
                   {"renewable_regions", card.renewable.count},
                   {"renewable_bytes", card.renewable.bytes},
                   {"renewable_now_bytes", card.renewable_now},
                   {"pinned_regions", card.pinned.count},
                   {"pinned_bytes", card.pinned.bytes},
                   {"pinned", ByWhy(card.by_why)}});
  return all;
}

// The same of all cards.
CardHoldings SumOf(const std::map<std::string, CardHoldings>& cards) {
  CardHoldings all;
  const auto add = [](CardHoldings::Regions& sum, const CardHoldings::Regions& more) {
    sum.count += more.count;
    sum.bytes += more.bytes;
  };
  for (const auto& [name, card] : cards) {
    add(all.pinned, card.pinned);
    add(all.renewable, card.renewable);
    for (const auto& [why, pinned] : card.by_why) add(all.by_why[why], pinned);
  }
  return all;
}

// Own slabs that stay whole because a card holds one of their parts.
std::uint64_t SlabsOfCards(const State& state) {
  std::uint64_t slabs = 0;
  for (const auto& [id, slab] : state.slabs) {
    const auto* const whole = FindIn(state.allocations, id);
    if (whole != nullptr && whole->own() && WhyKept(*whole) == KeepReason::kRegistered) ++slabs;
  }
  return slabs;
}

json OfCards(const State& state) {
  const std::map<std::string, CardHoldings> cards = MeasureCards(state);
  const CardHoldings all = SumOf(cards);
  return {{"regions", all.pinned.count},
          {"bytes", all.pinned.bytes},
          {"slabs", SlabsOfCards(state)},
          {"renewable_regions", all.renewable.count},
          {"renewable_bytes", all.renewable.bytes},
          {"pins", ByWhy(all.by_why)},
          {"cards", ByCard(cards)}};
}

// NCCL's memory and the program's; `kept`: what a pause leaves in place.
json ByTag(const State& state, const Holdings& held) {
  const auto figures = [](const PoolHoldings& sum, Bytes bytes, Bytes legacy = 0) {
    json one = {{"bytes", bytes + legacy},
                {"released_bytes", bytes - std::min(bytes, sum.own_resident)},
                {"kept_bytes", Kept(sum) + legacy}};
    if (!sum.held_by.empty()) one["held_by"] = sum.held_by;
    return one;
  };
  const PoolHoldings nccl = MeasureTag(state, false), user = MeasureTag(state, true);
  json tags = {{"nccl", figures(nccl, nccl.parts, held.legacy_kept - held.legacy_user)},
               {"user", figures(user, user.parts, held.legacy_user)}};
  for (const auto& [id, of_pool] : MeasurePools(state)) {
    const Pool* const pool = FindIn(state.pools, id);
    json& tag = tags[pool != nullptr ? pool->tag : ToText(id)];
    tag = figures(of_pool, of_pool.own);
    tag["lifecycle"] = ToText(state.LifecycleOf(id));
  }
  return tags;
}

json MsOrNull(std::uint64_t ns) { return ns == 0 ? json(nullptr) : json(Ms(ns)); }

std::string StateOf(Lifecycle lifecycle) {
  const bool cycle_or_paused = lifecycle >= Lifecycle::kPausing && lifecycle <= Lifecycle::kResuming;
  return cycle_or_paused ? std::string(ToText(lifecycle)) : "resident";
}

json MemoryOf(const PoolSnapshot& now, const PoolHoldings& held) {
  json devices = json::array();
  for (const DeviceOrdinal device : held.devices) devices.push_back(device.value);
  return {{"tag", now.tag},
          {"policy", ToText(now.policy)},
          {"state", now.state},
          {"bytes", held.own},
          {"resident_bytes", held.own_resident},
          {"kept_bytes", Kept(held)},
          {"kept", ByReason(held.kept)},
          {"held_by", held.held_by},
          {"parts", held.part_count},
          {"devices", devices},
          {"pinned_bytes", now.contents.held_bytes},
          {"pinned_kept_bytes", now.contents.kept_bytes},
          {"saved_bytes", now.contents.bytes_saved},
          {"unchanged_bytes", now.contents.bytes_unchanged},
          {"zero_bytes", now.contents.bytes_zero},
          {"last_pause_ms", MsOrNull(now.pause_ns)},
          {"last_resume_ms", MsOrNull(now.resume_ns)},
          {"failure", now.failure}};
}

json ByFunction(const State& state) {
  json left = json::object();
  for (const auto& [what, share] : state.outside)
    if (what.second == OutsideKind::kLeft) left[what.first] = {{"allocations", share.pieces}, {"bytes", share.bytes}};
  return left;
}

std::string Mebibytes(Bytes bytes) { return fmt::format("{} MiB", bytes >> 20); }

std::string ForPeople(CycleKind kind, const CycleReport& report) {
  if (report.phases.empty()) return {};
  std::string text = fmt::format("  last {:<16}{:.1f} ms with {} sessions:", ToText(kind), Ms(report.total_ns), report.members);
  for (const PhaseTime& p : report.phases) {
    const std::string_view name = ToText(p.phase);
    const std::size_t colon = name.find(": ");
    text += fmt::format("{} {} {:.1f}", &p == &report.phases.front() ? "" : ",",
                        colon == std::string_view::npos ? name : name.substr(colon + 2), Ms(p.work_ns));
    if (p.wait_ns >= 100'000) text += fmt::format(" + {:.1f} waiting", Ms(p.wait_ns));
  }
  return text + "\n";
}

}  // namespace

State SessionStatistics::CopyState() const {
  const LedgerLock lock(ledger_);
  return ledger_.state();
}

std::string SessionStatistics::Text() const {
  const State state = CopyState();
  const Holdings held = Measure(state);
  std::string text = fmt::format("AMem " AMEM_VERSION ", session {}, {}, {} pauses\n", Name(state.session.session),
                                 ToText(state.lifecycle), state.cycles);
  text += fmt::format("  own device memory    {} in {} allocations, {} of it on the device now\n", Mebibytes(held.own_device),
                      held.own_count, Mebibytes(held.own_device_resident));
  text += fmt::format("  imported from peers  {} in {} allocations\n", Mebibytes(held.imported), held.imported_count);
  text += fmt::format("  NCCL's host memory   {}\n", Mebibytes(held.host));
  if (held.user != 0)
    text += fmt::format("  of the program       {} (ncclMemAlloc), {} of it on the device now\n", Mebibytes(held.user),
                        Mebibytes(held.user_resident));
  for (const auto& [reason, bytes] : held.kept)
    text += fmt::format("  kept by a pause      {} ({})\n", Mebibytes(bytes), ToText(reason));
  const std::map<std::string, CardHoldings> cards = MeasureCards(state);
  if (const CardHoldings all = SumOf(cards); all.pinned.count != 0)
    text += fmt::format("  network cards hold   {} in {} regions, and {} slabs whole around some\n",
                        Mebibytes(all.pinned.bytes), all.pinned.count, SlabsOfCards(state));
  for (const auto& [name, card] : cards) {
    if (card.renewable.count != 0)
      text += fmt::format("  a pause undoes       {} in {} regions that {} holds\n", Mebibytes(card.renewable.bytes),
                          card.renewable.count, name);
    for (const auto& [why, pinned] : card.by_why)
      if (!name.empty())
        text += fmt::format("  stays                {} that {} holds: {}\n", Mebibytes(pinned.bytes), name, why);
  }
  for (const auto& [id, pool] : MeasurePools(state)) {
    const Pool* const known = FindIn(state.pools, id);
    const std::string tag = known != nullptr ? "tag " + known->tag : ToText(id);
    text += fmt::format("  {:<20} {} in {} chunks, {} of it on the device now, {}\n", tag, Mebibytes(pool.own),
                        pool.chunk_count, Mebibytes(pool.own_resident), ToText(state.LifecycleOf(id)));
    for (const auto& [library, bytes] : pool.held_by)
      text += fmt::format("  kept by a pause      {} (held by {})\n", Mebibytes(bytes), library);
  }
  if (held.legacy_kept != 0) text += fmt::format("  kept by a pause      {} (cuMemAlloc)\n", Mebibytes(held.legacy_kept));
  if (held.async != 0) text += fmt::format("  kept by a pause      {} (asynchronous pools)\n", Mebibytes(held.async));
  const BackupStatistics contents = coordinator_.Contents();
  text += fmt::format("  contents             {} saved, {} unchanged, {} zero, {} of host memory pinned\n",
                      Mebibytes(contents.bytes_saved), Mebibytes(contents.bytes_unchanged), Mebibytes(contents.bytes_zero),
                      Mebibytes(contents.pinned_bytes));
  for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) text += ForPeople(kind, coordinator_.Last(kind));
  if (!state.broken.empty()) text += fmt::format("  broken: {}\n", state.broken);
  return text;
}

std::string SessionStatistics::JsonWithoutSession(std::string_view reason) {
  return json{{"session", nullptr}, {"reason", reason}, {"pauses", Pauses({})}, {"resumes", Resumes({})}}.dump();
}

std::string SessionStatistics::Json() const {
  const State state = CopyState();
  const Holdings held = Measure(state);
  std::uint64_t events = 0;
  for (const std::uint64_t n : state.totals.events) events += n;
  json out = {{"version", AMEM_VERSION},
              {"session", Name(state.session.session)},
              {"pid", state.session.pid},
              {"rank", state.session.rank < 0 ? json() : json(state.session.rank)},
              {"group", state.session.group},
              {"lifecycle", ToText(state.lifecycle)},
              {"broken", state.broken},
              {"layout", state.session.layout},
              {"content", state.session.content},
              {"driver", driver_.Name()},
              {"cycles", state.cycles},
              {"last_failure", state.cycle.failure},
              {"own_allocations", held.own_count},
              {"own_device_bytes", held.own_device},
              {"own_device_resident_bytes", held.own_device_resident},
              {"released_bytes", held.own_device - std::min(held.own_device, held.own_device_resident)},
              {"slabs", held.slab_count},
              {"slab_bytes", held.slabs},
              {"slab_free_bytes", held.slabs_free},
              {"imported_slabs", held.imported_slab_count},
              {"wrong_guesses", slabs_.wrong_guesses()},
              {"imported_allocations", held.imported_count},
              {"imported_bytes", held.imported},
              {"kept_bytes", ByReason(held.kept)},
              {"registered", OfCards(state)},
              {"tags", ByTag(state, held)},
              {"kinds", ByKind(MeasureAccount(state))},
              {"communicators", ByCommunicator(state)},
              {"legacy_kept_bytes", held.legacy_kept},
              {"pool_bytes", held.async},
              {"host_bytes", held.host},
              {"address_ranges", state.ranges.size()},
              {"mappings", state.mappings.size()},
              {"contents", Contents(coordinator_.Contents())},
              {"pause", Phases(coordinator_.Last(CycleKind::kPause))},
              {"resume", Phases(coordinator_.Last(CycleKind::kResume))},
              {"pauses", Pauses(coordinator_.Totals(CycleKind::kPause))},
              {"resumes", Resumes(coordinator_.Totals(CycleKind::kResume))},
              {"call_sites", ByCallSite(state)},
              {"peers", ByPeer(state)},
              {"events", events}};
  const LedgerLock lock(ledger_);
  out["dropped_events"] = ledger_.dropped_events();
  if (ledger_.journal() != nullptr) out["journal"] = ledger_.journal()->Directory().string();
  if (!ledger_.JournalLost().ok()) out["no_journal_because"] = ledger_.JournalLost().message();
  return out.dump();
}

std::string SessionStatistics::MemoryJson() const {
  const std::vector<PoolSnapshot> snapshots = pools_.Snapshot();
  // A state is large, so it is not copied.
  auto [lifecycle, failure, pools, nccl, user, left, cards] = [this] {
    const LedgerLock lock(ledger_);
    const State& state = ledger_.state();
    return std::tuple(state.lifecycle, state.cycle.failure, MeasurePools(state), MeasureTag(state, false),
                      MeasureTag(state, true), ByFunction(state), MeasureCards(state));
  }();
  json tags = json::array();
  for (const PoolSnapshot& pool : snapshots) {
    const PoolHoldings& held = pools[pool.id];
    tags.push_back(MemoryOf(pool, held));
    tags.back().update({{"part_bytes", held.parts},
                        {"chunks", held.chunk_count},
                        {"pinned_in_pause_bytes", pool.contents.pinned_in_save},
                        {"not_prepared_because", pool.contents.not_prepared}});
  }
  PoolSnapshot now{.tag = "nccl", .state = StateOf(lifecycle), .failure = failure, .contents = coordinator_.Contents()};
  now.pause_ns = coordinator_.Last(CycleKind::kPause).total_ns;
  now.resume_ns = coordinator_.Last(CycleKind::kResume).total_ns;
  tags.push_back(MemoryOf(now, nccl));
  tags.back()["part_bytes"] = nccl.parts;
  tags.back()["cards"] = ByCard(cards);
  now.tag = "user";
  now.contents = {};
  const bool released = options_.user_memory == UserMemory::kRelease;
  if (!released) now.pause_ns = now.resume_ns = 0;
  tags.push_back(MemoryOf(now, user));
  tags.back()["part_bytes"] = user.parts;
  if (!released) tags.back()["policy"] = "keep";
  return json{{"schema", 1}, {"tags", tags}, {"left", left}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

static Account MeasureAccountOf(Ledger& ledger) {
  const LedgerLock lock(ledger);
  return MeasureAccount(ledger.state());
}

std::string SessionStatistics::AccountJson() const {
  const Account account = MeasureAccountOf(ledger_);
  json devices = json::array();
  for (const auto& [device, here] : account.devices) {
    const Result<MemoryInfo> memory = driver_.Memory(device);
    devices.push_back({{"device", device.value},
                       {"used_bytes", memory.ok() ? json(memory->total - memory->free) : json()},
                       {"taken", here.taken},
                       {"running", here.running},
                       {"kept", here.kept}});
  }
  json unplaced = json::object();
  for (const auto& [whose, share] : account.unplaced) unplaced[whose] = share.bytes;
  return json{{"schema", 1}, {"devices", devices}, {"unplaced", unplaced}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string SessionStatistics::ProcessesJson() const {
  const Account account = MeasureAccountOf(ledger_);
  json devices = json::array();
  for (const auto& [device, here] : account.devices) {
    json processes = json::array();
    for (const MemoryHolder& one : driver_.MemoryHolders(device))
      processes.push_back({{"pid", one.pid}, {"name", one.name}, {"bytes", one.bytes}});
    devices.push_back({{"device", device.value}, {"processes", std::move(processes)}});
  }
  return json{{"schema", 1}, {"devices", devices}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace amem
