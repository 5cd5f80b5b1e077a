// The allocations of a timeline, and the memory that sessions hold of each other.
#include <algorithm>
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
bool WorthMore(const AllocationRecord& a, const AllocationRecord& b) {
  const auto key = [](const AllocationRecord& r) { return std::tuple(!r.note.empty(), !r.ended, r.bytes, r.created); };
  return key(b) < key(a);
}
// Leaves so many of them, in any order. Returns the bytes of the others.
Bytes KeepTheBest(std::vector<AllocationRecord>& records, std::size_t limit) {
  if (records.size() <= limit) return 0;
  const auto cut = records.begin() + static_cast<std::ptrdiff_t>(limit);
  std::nth_element(records.begin(), cut, records.end(), WorthMore);
  Bytes left_out = 0;
  for (auto it = cut; it != records.end(); ++it) left_out += it->bytes;
  records.erase(cut, records.end());
  return left_out;
}
bool Earlier(const AllocationRecord& a, const AllocationRecord& b) {
  return std::tie(a.created, a.id, a.address) < std::tie(b.created, b.id, b.address);
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
    const auto it = after.allocations.find(id);
    if (it != after.allocations.end()) c.Begin(id, it->second, event.seq, event.time_ns);
  }
  template <class Ignored>
  void operator()(const Ignored&) const {}
  void operator()(const AllocationCreated& e) const { Created(e.allocation); }
  void operator()(const MulticastCreated& e) const { Created(e.allocation); }
  void operator()(const Imported& e) const {
    Created(e.allocation);
    HoldMore(c.out_.imports[e.remote.owner], e.bytes);
  }
  // One that has ended is forgotten by the state with its last memory, and remembered here.
  void Keep(CommunicatorId id) const {
    if (const auto it = after.communicators.find(id); it != after.communicators.end()) c.out_.communicators[id] = it->second;
  }
  void operator()(const CommunicatorBegun& e) const { Keep(e.communicator); }
  void operator()(const CommunicatorReady& e) const { Keep(e.communicator); }
  void operator()(const CommunicatorSuspended& e) const { Keep(e.communicator); }
  void operator()(const CommunicatorEnded& e) const {
    c.out_.communicators[e.communicator].ended = e.how;
    c.out_.communicators[e.communicator].suspended = false;
  }
  void operator()(const Mapped& e) const { c.Place(e.allocation, e.address); }
  void operator()(const SlabOpened& e) const { c.BecomeSlab(e.slab); }
  void operator()(const Placed& e) const { c.BecomePart(e.allocation, after); }
  void operator()(const Backed& e) const {
    if (const auto it = c.live_.find(e.allocation); it != c.live_.end()) it->second.slab = {};
  }
  void operator()(const ReferenceAdded& e) const {
    const auto it = c.live_.find(e.allocation);
    if (it == c.live_.end()) return;
    it->second.most_importers = std::max(it->second.most_importers, ++it->second.importers);
    if (!IsSlab(it->second)) HoldMore(c.out_.importers[e.by], it->second.bytes);
  }
  void operator()(const ReferenceDropped& e) const {
    const auto it = c.live_.find(e.allocation);
    if (it == c.live_.end()) return;
    it->second.importers -= std::min<std::uint64_t>(1, it->second.importers);
    if (!IsSlab(it->second)) HoldLess(c.out_.importers[e.by], it->second.bytes);
  }
  void operator()(const PeerLost& e) const {
    c.out_.importers[e.peer].bytes = c.out_.importers[e.peer].count = 0;
    for (auto it = c.live_.begin(); it != c.live_.end();) {
      const auto known = after.allocations.find(it->first);
      if (known == after.allocations.end()) {
        c.End(it++, event);
        continue;
      }
      it->second.importers = 0;
      for (const auto& [importer, count] : known->second.importers) it->second.importers += count;
      ++it;
    }
  }
  void operator()(const StepFailed& e) const {
    if (const auto it = c.live_.find(e.step.allocation); it != c.live_.end()) {
      it->second.note = std::string(ToText(e.step.kind)) + " failed: " + e.message;
    }
  }
  void operator()(const HostAllocated& e) const {
    c.Begin(AllocationKind::kHost, e.address, e.bytes, event.seq, event.time_ns, {});
  }
  void operator()(const HostFreed& e) const { c.End(AllocationKind::kHost, e.address, event); }
  void operator()(const AsyncAllocated& e) const {
    c.Begin(AllocationKind::kPool, e.address, e.bytes, event.seq, event.time_ns, {});
  }
  void operator()(const AsyncFreed& e) const { c.End(AllocationKind::kPool, e.address, event); }
  void operator()(const LegacyAllocated& e) const {
    if (!e.backing) c.Begin(AllocationKind::kDriver, e.address, e.bytes, event.seq, event.time_ns, e.site, e.communicator);
  }
  void operator()(const LegacyFreed& e) const { c.End(AllocationKind::kDriver, e.address, event); }
};

void AllocationCollector::Take(const Event& event, const State& after) {
  std::visit(Taker{*this, event, after}, static_cast<const EventVariant&>(event.body));
}

void AllocationCollector::StartFrom(const State& state, std::uint64_t now_ns) {
  out_.communicators = state.communicators;
  for (const auto& [id, a] : state.allocations) {
    AllocationRecord& record = Begin(id, a, a.created, now_ns);
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
  for (const auto& [address, h] : state.host) Begin(AllocationKind::kHost, address, h.bytes, {}, now_ns, {});
  for (const auto& [address, bytes] : state.async) Begin(AllocationKind::kPool, address, bytes, {}, now_ns, {});
  for (const auto& [address, l] : state.legacy) {
    if (!l.backing) Begin(AllocationKind::kDriver, address, l.bytes, {}, now_ns, l.site, l.communicator);
  }
}

void AllocationCollector::Check(AllocationId id, const Event& event, const State& state) {
  const auto it = live_.find(id);
  if (it != live_.end() && !state.allocations.contains(id)) End(it, event);
}

void AllocationCollector::Finish(const State& state) {
  for (auto& [id, record] : live_) {
    if (const auto it = state.allocations.find(id); it != state.allocations.end()) {
      const auto whole = state.allocations.find(it->second.placed() ? it->second.slab : id);
      record.resident = whole != state.allocations.end() && whole->second.resident;
      record.kept = it->second.own() ? WhyKept(it->second) : KeepReason::kNone;
    }
    out_.allocations.push_back(std::move(record));
  }
  for (auto& [key, record] : other_) out_.allocations.push_back(std::move(record));
  Thin(limit_ - std::min(limit_, out_.allocations.size()));
  std::move(ended_.begin(), ended_.end(), std::back_inserter(out_.allocations));
  std::sort(out_.allocations.begin(), out_.allocations.end(), Earlier);
}

void AllocationCollector::BecomeSlab(AllocationId id) {
  const auto it = live_.find(id);
  if (it == live_.end()) return;
  const bool imported = it->second.kind == AllocationKind::kImported;
  it->second.kind = imported ? AllocationKind::kImportedSlab : AllocationKind::kSlab;
  if (!imported) return;
  LinkRecord& link = out_.imports[it->second.remote.owner];  // it was counted when it was imported
  HoldLess(link, it->second.bytes);
  --link.total;
}
void AllocationCollector::BecomePart(AllocationId id, const State& state) {
  const auto it = live_.find(id);
  const auto known = state.allocations.find(id);
  if (it == live_.end() || known == state.allocations.end() || !known->second.placed()) return;
  it->second.slab = known->second.slab;
  it->second.address = state.PlaceOf(known->second);
}
AllocationRecord& AllocationCollector::Begin(AllocationId id, const Allocation& a, SequenceNumber seq, std::uint64_t now_ns) {
  ++out_.allocations_total;
  AllocationRecord& record = live_[id];
  record = {.id = id,
            .bytes = a.bytes,
            .location = a.properties.location,
            .site = a.site,
            .communicator = a.communicator,
            .created = seq,
            .created_ns = now_ns};
  record.pool = a.pool;
  record.kind = a.pool        ? AllocationKind::kTagged
                : !a.own()    ? AllocationKind::kImported
                : a.multicast ? AllocationKind::kMulticast
                              : AllocationKind::kOwn;
  if (a.remote) record.remote = *a.remote;
  return record;
}
void AllocationCollector::Begin(AllocationKind kind, Address address, Bytes bytes, SequenceNumber seq, std::uint64_t now_ns,
                                const CallSite& site, CommunicatorId communicator) {
  ++out_.allocations_total;
  other_[{kind, address}] = {.kind = kind,
                             .address = address,
                             .bytes = bytes,
                             .site = site,
                             .communicator = communicator,
                             .created = seq,
                             .created_ns = now_ns};
}
void AllocationCollector::Place(AllocationId id, Address address) {
  const auto it = live_.find(id);
  if (it != live_.end() && !it->second.address) it->second.address = address;
}
void AllocationCollector::End(AllocationKind kind, Address address, const Event& event) {
  const auto it = other_.find({kind, address});
  if (it == other_.end()) return;
  Ended(std::move(it->second), event);
  other_.erase(it);
}
void AllocationCollector::End(Live::iterator it, const Event& event) {
  if (it->second.kind == AllocationKind::kImported) HoldLess(out_.imports[it->second.remote.owner], it->second.bytes);
  Ended(std::move(it->second), event);
  live_.erase(it);
}
void AllocationCollector::Ended(AllocationRecord record, const Event& event) {
  record.ended = event.seq;
  record.ended_ns = event.time_ns;
  record.resident = false;
  ended_.push_back(std::move(record));
  if (ended_.size() >= 2 * limit_) Thin(limit_);
}
void AllocationCollector::Thin(std::size_t limit) { out_.allocations_left_out_bytes += KeepTheBest(ended_, limit); }

void ThinAllocations(SessionTimeline& timeline, std::size_t limit) {
  timeline.allocations_left_out_bytes += KeepTheBest(timeline.allocations, limit);
  std::sort(timeline.allocations.begin(), timeline.allocations.end(), Earlier);
}

}  // namespace amem
