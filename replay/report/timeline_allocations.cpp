// The allocations of a timeline, and the memory that sessions hold of each other.
#include <algorithm>
#include <functional>
#include <iterator>
#include <tuple>

#include "replay/report/timeline_parts.h"

namespace amem {
namespace {

void HoldMore(LinkRecord& link, Bytes bytes) {
  link.bytes += bytes;
  ++link.count;
  ++link.total;
  link.most_bytes = std::max(link.most_bytes, link.bytes);
  link.most_count = std::max(link.most_count, link.count);
}
void HoldLess(LinkRecord& link, Bytes bytes) {
  link.bytes -= std::min(bytes, link.bytes);
  link.count -= std::min<std::uint64_t>(1, link.count);
}

bool IsSlab(const AllocationRecord& r) { return r.kind == AllocationKind::kSlab || r.kind == AllocationKind::kImportedSlab; }

// When not all allocations can stay, the order is: those that failed, those alive at the end, the large, the new.
auto Worth(const AllocationRecord& r) { return std::tuple(!r.note.empty(), !r.ended, r.bytes, r.created); }
// Leaves so many of them, in any order. Returns the bytes of the others.
Bytes LeaveTheBest(std::vector<AllocationRecord>& records, std::size_t limit) {
  if (records.size() <= limit) return 0;
  const auto cut = records.begin() + static_cast<std::ptrdiff_t>(limit);
  std::ranges::nth_element(records, cut, std::greater{}, Worth);
  Bytes left_out = 0;
  for (auto it = cut; it != records.end(); ++it) left_out += it->bytes;
  records.erase(cut, records.end());
  return left_out;
}
auto Age(const AllocationRecord& r) { return std::tie(r.created, r.id, r.address); }

AllocationRecord RecordOf(AllocationId id, const Allocation& a, SequenceNumber seq, std::uint64_t now_ns) {
  return {.kind = a.pool        ? AllocationKind::kTagged
                  : !a.own()    ? AllocationKind::kImported
                  : a.multicast ? AllocationKind::kMulticast
                                : AllocationKind::kOwn,
          .id = id,
          .bytes = a.bytes,
          .location = a.properties.location,
          .site = a.site,
          .communicator = a.communicator,
          .pool = a.pool,
          .created = seq,
          .created_ns = now_ns,
          .remote = a.remote.value_or(RemoteAllocation{})};
}
AllocationRecord RecordOf(AllocationKind kind, Address address, const auto& memory, SequenceNumber seq, std::uint64_t now_ns) {
  AllocationRecord record{.kind = kind, .address = address, .bytes = memory.bytes, .created = seq, .created_ns = now_ns};
  if constexpr (requires { memory.site; }) record.site = memory.site;
  if constexpr (requires { memory.communicator; }) record.communicator = memory.communicator;
  return record;
}

}  // namespace

AllocationCollector::AllocationCollector(SessionTimeline& out, std::size_t limit)
    : out_(out), limit_(std::max<std::size_t>(limit, 8)) {}

// An event that was applied, by its kind.
struct AllocationCollector::Taker {
  AllocationCollector& c;
  const Event& event;
  const State& after;

  void Created(AllocationId id) const {
    if (const Allocation* a = FindIn(after.allocations, id)) c.Begin(RecordOf(id, *a, event.seq, event.time_ns));
  }
  void Created(AllocationKind kind, const auto& e) const { c.Begin(RecordOf(kind, e.address, e, event.seq, event.time_ns)); }
  void Freed(AllocationKind kind, Address address) const { c.End(c.live_.find({{}, kind, address}), event); }
  template <class Body>
  void operator()(const Body& e) const {
    if constexpr (kIsOneOf<Body, AllocationCreated, MulticastCreated>) Created(e.allocation);
    if constexpr (kIsOneOf<Body, CommunicatorBegun, CommunicatorReady, CommunicatorSuspended>) Remember(e.communicator);
  }
  void operator()(const Imported& e) const {
    Created(e.allocation);
    HoldMore(c.out_.imports[e.remote.owner], e.bytes);
  }
  // One that has ended is forgotten by the state with its last memory, and remembered here.
  void Remember(CommunicatorId id) const {
    if (const Communicator* known = FindIn(after.communicators, id)) c.out_.communicators[id] = *known;
  }
  void operator()(const CommunicatorEnded& e) const {
    c.out_.communicators[e.communicator].ended = e.how;
    c.out_.communicators[e.communicator].suspended = false;
  }
  void operator()(const Mapped& e) const { c.Place(e.allocation, e.address); }
  void operator()(const SlabOpened& e) const { c.BecomeSlab(e.slab); }
  void operator()(const Placed& e) const { c.BecomePart(e.allocation, after); }
  void operator()(const Backed& e) const {
    if (AllocationRecord* record = c.Find(e.allocation)) record->slab = {};
  }
  void operator()(const ReferenceAdded& e) const {
    AllocationRecord* record = c.Find(e.allocation);
    if (record == nullptr) return;
    record->most_importers = std::max(record->most_importers, ++record->importers);
    if (!IsSlab(*record)) HoldMore(c.out_.importers[e.by], record->bytes);
  }
  void operator()(const ReferenceDropped& e) const {
    AllocationRecord* record = c.Find(e.allocation);
    if (record == nullptr) return;
    record->importers -= std::min<std::uint64_t>(1, record->importers);
    if (!IsSlab(*record)) HoldLess(c.out_.importers[e.by], record->bytes);
  }
  void operator()(const PeerLost& e) const {
    c.out_.importers[e.peer].bytes = c.out_.importers[e.peer].count = 0;
    for (auto it = c.live_.begin(); it != c.live_.end();) {
      const auto record = it++;
      const Allocation* known = FindIn(after.allocations, record->second.id);
      record->second.importers = 0;
      if (known != nullptr) {
        for (const auto& [importer, count] : known->importers) record->second.importers += count;
      } else if (record->second.id) {
        c.End(record, event);
      }
    }
  }
  void operator()(const StepFailed& e) const {
    if (AllocationRecord* record = c.Find(e.step.allocation))
      record->note = std::string(ToText(e.step.kind)) + " failed: " + e.message;
  }
  void operator()(const HostAllocated& e) const { Created(AllocationKind::kHost, e); }
  void operator()(const HostFreed& e) const { Freed(AllocationKind::kHost, e.address); }
  void operator()(const AsyncAllocated& e) const { Created(AllocationKind::kPool, e); }
  void operator()(const AsyncFreed& e) const { Freed(AllocationKind::kPool, e.address); }
  void operator()(const LegacyAllocated& e) const {
    if (!e.backing) Created(AllocationKind::kDriver, e);
  }
  void operator()(const LegacyFreed& e) const { Freed(AllocationKind::kDriver, e.address); }
};

void AllocationCollector::Take(const Event& event, const State& after) {
  std::visit(Taker{*this, event, after}, static_cast<const EventVariant&>(event.body));
}

void AllocationCollector::StartFrom(const State& state, std::uint64_t now_ns) {
  out_.communicators = state.communicators;
  for (const auto& [id, a] : state.allocations) {
    AllocationRecord& record = Begin(RecordOf(id, a, a.created, now_ns));
    if (a.remote) HoldMore(out_.imports[a.remote->owner], a.bytes);
    for (const auto& [importer, count] : a.importers) {
      record.importers += count;
      const std::uint32_t counted = state.slabs.contains(id) ? 0 : count;
      for (std::uint32_t i = 0; i < counted; ++i) HoldMore(out_.importers[importer.by], a.bytes);
    }
    record.most_importers = record.importers;
  }
  for (const auto& [address, m] : state.mappings) Place(m.allocation, address);
  for (const auto& [id, slab] : state.slabs) BecomeSlab(id);
  for (const auto& [id, a] : state.allocations) BecomePart(id, state);
  for (const auto& [address, h] : state.host) Begin(RecordOf(AllocationKind::kHost, address, h, {}, now_ns));
  for (const auto& [address, a] : state.async) Begin(RecordOf(AllocationKind::kPool, address, a, {}, now_ns));
  for (const auto& [address, l] : state.legacy)
    if (!l.backing) Begin(RecordOf(AllocationKind::kDriver, address, l, {}, now_ns));
}

void AllocationCollector::Check(AllocationId id, const Event& event, const State& state) {
  if (!state.allocations.contains(id)) End(live_.find({id, {}, {}}), event);
}

void AllocationCollector::Finish(const State& state) {
  for (auto& [key, record] : live_) {
    if (const Allocation* a = FindIn(state.allocations, record.id)) {
      const Allocation* whole = a->placed() ? FindIn(state.allocations, a->slab) : a;
      record.resident = whole != nullptr && whole->resident;
      record.kept = a->own() ? WhyKept(*a) : KeepReason::kNone;
    }
    out_.allocations.push_back(std::move(record));
  }
  Thin(limit_ - std::min(limit_, out_.allocations.size()));
  std::ranges::move(ended_, std::back_inserter(out_.allocations));
  std::ranges::sort(out_.allocations, {}, Age);
}

AllocationRecord& AllocationCollector::Begin(AllocationRecord record) {
  ++out_.allocations_total;
  const Live::key_type key = record.id ? Live::key_type{record.id, {}, {}} : Live::key_type{{}, record.kind, record.address};
  return live_[key] = std::move(record);
}
void AllocationCollector::BecomeSlab(AllocationId id) {
  AllocationRecord* record = Find(id);
  if (record == nullptr) return;
  const bool imported = record->kind == AllocationKind::kImported;
  record->kind = imported ? AllocationKind::kImportedSlab : AllocationKind::kSlab;
  if (!imported) return;
  LinkRecord& link = out_.imports[record->remote.owner];  // it was counted when it was imported
  HoldLess(link, record->bytes);
  --link.total;
}
void AllocationCollector::BecomePart(AllocationId id, const State& state) {
  AllocationRecord* record = Find(id);
  const Allocation* known = FindIn(state.allocations, id);
  if (record == nullptr || known == nullptr || !known->placed()) return;
  record->slab = known->slab;
  record->address = state.PlaceOf(*known);
}
void AllocationCollector::Place(AllocationId id, Address address) {
  AllocationRecord* record = Find(id);
  if (record != nullptr && !record->address) record->address = address;
}
void AllocationCollector::End(Live::iterator it, const Event& event) {
  if (it == live_.end()) return;
  AllocationRecord& record = it->second;
  if (record.kind == AllocationKind::kImported) HoldLess(out_.imports[record.remote.owner], record.bytes);
  record.ended = event.seq;
  record.ended_ns = event.time_ns;
  record.resident = false;
  ended_.push_back(std::move(record));
  live_.erase(it);
  if (ended_.size() >= 2 * limit_) Thin(limit_);
}
void AllocationCollector::Thin(std::size_t limit) { out_.allocations_left_out_bytes += LeaveTheBest(ended_, limit); }

void Halve(JobTimeline& job) {
  for (SessionTimeline& s : job.sessions) {
    RowBuilder::Thin(s.rows, std::max<std::size_t>(s.rows.size() / 2, 100));
    s.allocations_left_out_bytes += LeaveTheBest(s.allocations, s.allocations.size() / 2);
    std::ranges::sort(s.allocations, {}, Age);
  }
}

}  // namespace amem
