#include <bit>
#include <cstddef>
#include <span>
#include <type_traits>

#include "statemachine/apply.h"
#include "statemachine/fnv1a.h"

namespace amem {
namespace {

// FNV-1a over the 64-bit words of every field, in the order of the state's containers.
class Hasher {
 public:
  void Add(std::uint64_t word) { hash_.Add(word); }
  template <class Tag, class Rep>
  void Add(Id<Tag, Rep> id) {
    Add(static_cast<std::uint64_t>(id.value));
  }
  void Add(std::int64_t value) { Add(static_cast<std::uint64_t>(value)); }
  void Add(const std::string& text) {
    Add(std::uint64_t{text.size()});
    hash_.Add(std::as_bytes(std::span(text)));
  }
  void Add(const Location& l) {
    Add(std::uint64_t{static_cast<std::uint32_t>(l.type)});
    Add(std::int64_t{l.id});
  }
  void Add(const AllocationProperties& p) {
    Add(std::uint64_t{p.type});
    Add(std::uint64_t{p.handle_types});
    Add(p.location);
    Add(std::uint64_t{p.compression});
    Add(std::uint64_t{p.gpu_direct_rdma});
    Add(std::uint64_t{p.usage});
    Add(std::uint64_t{p.reserved});
  }
  void Add(const CallSite& site) {
    for (const std::uint64_t frame : site.frames) Add(frame);
  }
  [[nodiscard]] std::uint64_t value() const { return hash_.value(); }

 private:
  Fnv1a hash_;
};

template <class... Values>
void AddAll(Hasher& h, const Values&... values) {
  (h.Add(values), ...);
}

std::uint64_t Bit(bool b) { return b ? 1 : 0; }

void AddAllocation(Hasher& h, const Allocation& a) {
  AddAll(h, a.bytes, a.properties, a.flags, a.site, a.created, Bit(a.remote.has_value()), Bit(a.multicast),
         std::uint64_t{a.guest_references}, std::uint64_t{a.mappings}, std::uint64_t{a.exports}, std::uint64_t{a.registrations},
         std::uint64_t{a.multicast_bindings}, std::uint64_t{a.importers.size()}, Bit(a.resident), Bit(a.saved),
         Bit(a.awaiting_restore));
  if (a.placed()) AddAll(h, a.slab, a.offset, std::uint64_t{a.reserved}, Bit(a.touched));
  if (a.remote) AddAll(h, a.remote->owner, a.remote->allocation);
  for (const auto& [importer, count] : a.importers) AddAll(h, importer.by, importer.as, std::uint64_t{count});
}

void AddCycle(Hasher& h, const Cycle& c) {
  AddAll(h, std::uint64_t{static_cast<std::uint8_t>(c.kind)}, c.number, std::uint64_t{c.members.size()},
         c.phase ? 1 + std::uint64_t{static_cast<std::uint8_t>(*c.phase)} : std::uint64_t{0}, Bit(c.open_step.has_value()),
         c.failure, Bit(c.after_failed_undo));
  for (const SessionId member : c.members) h.Add(member);
  if (c.open_step) {
    AddAll(h, std::uint64_t{static_cast<std::uint8_t>(c.open_step->kind)}, c.open_step->allocation, c.open_step->address);
  }
}

}  // namespace

std::uint64_t Digest(const State& s) {
  Hasher h;
  AddAll(h, s.last, std::uint64_t{static_cast<std::uint8_t>(s.lifecycle)}, s.session.session, s.session.host,
         std::int64_t{s.session.pid}, s.session.group, std::int64_t{s.session.rank}, s.broken, s.next_allocation, s.cycles);
  for (const auto& l : s.libraries) AddAll(h, l.path, l.build_id, l.way, l.nccl_version, l.load_address);
  for (const auto& [address, r] : s.ranges) AddAll(h, address, r.bytes, r.alignment, r.hint, r.flags);
  for (const auto& [id, a] : s.allocations) {
    h.Add(id);
    AddAllocation(h, a);
  }
  for (const auto& [address, m] : s.mappings) {
    AddAll(h, address, m.bytes, m.offset, m.allocation, m.flags, Bit(m.present), Bit(m.accessible));
    for (const auto& d : m.access) AddAll(h, d.location, std::uint64_t{d.flags});
  }
  for (const auto& [id, slab] : s.slabs) {
    AddAll(h, id, slab.address, std::uint64_t{slab.parts.size()}, std::uint64_t{slab.dirty.size()});
    for (const auto& [offset, parts] : slab.parts) {
      for (const AllocationId part : parts) AddAll(h, offset, part);
    }
    for (const auto& [offset, bytes] : slab.dirty) AddAll(h, offset, bytes);
  }
  for (const auto& [address, l] : s.legacy) AddAll(h, address, l.bytes, l.backing, l.offset, l.why, l.site);
  for (const auto& [address, id] : s.legacy_imports) AddAll(h, address, id);
  for (const auto& [address, m] : s.host) AddAll(h, address, m.bytes, std::uint64_t{m.flags}, Bit(m.registered));
  for (const auto& [address, bytes] : s.async) AddAll(h, address, bytes);
  for (const auto& [id, m] : s.multicasts) {
    AddAll(h, id, std::uint64_t{m.devices});
    for (const DeviceOrdinal d : m.added) h.Add(d);
    for (const auto& [offset, bindings] : m.bindings) {
      for (const auto& b : bindings) AddAll(h, offset, b.allocation, b.address, b.allocation_offset, b.bytes);
    }
  }
  for (const auto& [address, r] : s.registrations) {
    AddAll(h, address, r.bytes, r.how, std::uint64_t{r.count});
    for (const AllocationId id : r.allocations) h.Add(id);
  }
  for (const auto& [id, p] : s.peers) {
    AddAll(h, id, p.host, std::int64_t{p.pid}, p.group, std::int64_t{p.rank}, Bit(p.connected), p.lost_reason);
  }
  AddCycle(h, s.cycle);
  for (const std::uint64_t n : s.totals.events) h.Add(n);
  return h.value();
}

}  // namespace amem
