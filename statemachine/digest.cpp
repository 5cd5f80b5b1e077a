#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "statemachine/apply.h"
#include "statemachine/fields.h"
#include "statemachine/fnv1a.h"

namespace amem {
namespace {

// Kinds that later versions added count only where there are any, so that a journal keeps the digest it was written with.
constexpr std::size_t kFirstKinds = 49;

template <class T>
constexpr bool kIsList = false;
template <class T>
constexpr bool kIsList<std::vector<T>> = true;
template <class T>
constexpr bool kIsList<Unlisted<T>> = kIsList<T>;

// FNV-1a over the 64-bit words of every field, in the order of the state's containers. Journals' expectations and comparisons
// between machines rest on it: what is added, and in which order, must not change.
class Hasher {
 public:
  void Add(std::uint64_t word) { hash_.Add(word); }
  void Add(const std::string& text) {
    Add(std::uint64_t{text.size()});
    hash_.Add(std::as_bytes(std::span(text)));
  }
  template <class What>
  void Add(const Text<What>& text) {
    Add(static_cast<const std::string&>(text));
  }
  void Add(const CallSite& site) {
    for (const std::uint64_t frame : site.frames) Add(frame);
  }
  template <class Tag, class Rep>
  void Add(Id<Tag, Rep> id) {
    Add(static_cast<std::uint64_t>(id.value));
  }
  template <class T>
  void Add(const std::vector<T>& list) {
    for (const T& element : list) Add(element);
  }
  template <class T>
  void Add(const IfAny<T>& value) {  // younger than the journals whose digests are known
    if (value.field != T{}) Add(value.field);
  }
  template <class Key, class Value>
  void Add(const std::map<Key, Value>& map) {
    for (const auto& [key, value] : map) {
      if constexpr (!requires { Value::kKind; }) Add(key);  // an event begins with it
      Add(value);
    }
  }
  void Add(const Allocation& a) {
    AddAll(a.bytes, a.properties, a.flags, a.site, a.created, a.remote.has_value(), a.multicast, a.guest_references, a.mappings,
           a.exports, a.pinned, a.multicast_bindings, a.importers.size(), a.resident, a.saved, a.awaiting_restore);
    if (a.placed()) AddAll(a.slab, a.offset, a.reserved, a.touched);
    AddAll(IfAny{a.tag}, IfAny{a.communicator}, IfAny{a.pool}, IfAny{a.handed_out}, IfAny{a.kept_with_all},
           IfAny{a.released_bindings}, IfAny{a.held}, IfAny{a.handed_to}, IfAny{a.renewable});
    if (a.remote) Add(*a.remote);
    for (const auto& [importer, count] : a.importers) AddAll(importer.by, importer.as, count);
  }
  void Add(const Slab& slab) {
    AddAll(slab.address, slab.parts.size(), slab.dirty.size());
    for (const auto& [offset, parts] : slab.parts)
      for (const AllocationId part : parts) AddAll(offset, part);
    Add(slab.dirty);
  }
  void Add(const Multicast& m) {
    AddAll(m.devices, m.added);
    for (const auto& [offset, b] : m.bindings) {
      AddAll(offset, b.allocation, b.address, b.allocation_offset, b.bytes);
      if (!b.bound) AddAll(b.device, b.bound);
    }
    if (!m.missing.empty() || m.incomplete || m.fresh) AddAll(m.missing.size(), m.missing, m.incomplete, m.fresh);
  }
  void Add(const Cycle& c) {
    const int phase = c.phase ? 1 + static_cast<int>(*c.phase) : 0;
    AddAll(c.kind, c.number, c.members.size(), phase, c.open_step.has_value(), c.failure, c.after_failed_undo, c.members);
    if (const auto& open = c.open_step)
      AddAll(open->kind, open->allocation, open->address, IfAny{open->offset}, IfAny{open->region});
  }
  void Add(const Pool& pool) {
    AddAll(pool.tag, pool.policy, pool.lifecycle, pool.cycles, pool.parts.size(), pool.parts, pool.cycle, IfAny{pool.keeps});
  }
  template <class T>
  void Add(const T& value) {
    if constexpr (Described<T>) {  // lists last
      ForEachField(value, [this](std::string_view, const auto& field) { AddIf<false>(field); });
      ForEachField(value, [this](std::string_view, const auto& field) { AddIf<true>(field); });
    } else if constexpr (requires { value.field; }) {
      Add(value.field);
    } else {
      Add(static_cast<std::uint64_t>(value));  // a number, an enumerator or a truth value
    }
  }
  template <class... Values>
  void AddAll(const Values&... values) {
    (Add(values), ...);
  }
  [[nodiscard]] std::uint64_t value() const { return hash_.value(); }

 private:
  template <bool list, class T>
  void AddIf(const T& field) {
    if constexpr (kIsList<T> == list) Add(field);
  }

  Fnv1a hash_;
};

}  // namespace

std::uint64_t Digest(const State& s) {
  Hasher h;
  h.AddAll(s.last, s.lifecycle, s.session.session, s.session.host, s.session.pid, s.session.group, s.session.rank, s.broken,
           s.next_allocation, s.cycles, s.libraries, s.ranges, s.allocations, s.mappings, s.slabs, s.legacy, s.legacy_imports,
           s.host, s.async, s.multicasts);
  for (const auto& [of, registration] : s.registrations) h.AddAll(of.first, IfAny{of.second}, registration);
  h.AddAll(s.peers, s.cycle);
  for (std::size_t kind = 0; kind < s.totals.events.size(); ++kind)
    if (kind < kFirstKinds || s.totals.events[kind] != 0) h.Add(s.totals.events[kind]);
  if (!s.kept_whole.empty()) h.Add(s.kept_whole);
  h.AddAll(s.communicators, s.pools);
  if (s.freeze) h.Add(*s.freeze);
  for (const auto& [what, share] : s.outside) h.AddAll(what.first, what.second, share);
  for (const auto& [id, region] : s.regions) h.AddAll(id, region);
  return h.value();
}

}  // namespace amem
