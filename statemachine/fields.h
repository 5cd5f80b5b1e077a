// The fields of every event, and of what a state holds, under their names: one description for all that walks over them, such
// as JSON (replay/job/event_json.h) and the digest.
//
//   ForEachField(event, [](const char* name, const auto& field) { ... });
//
// A field's type says how it is shown. Where it does not, a wrapper does: Hexadecimal, IfAny, OrNull, Unlisted. A field that is
// added to a struct and forgotten here does not compile. (The codec takes structs apart by itself: what is on disk must not
// follow from names.)
#pragma once

#include <cstddef>
#include <utility>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

template <class T>
struct Hexadecimal {  // an address that is a plain number
  const T& field;
};
template <class T>
struct IfAny {  // left out when it is zero
  const T& field;
};
template <class T>
struct OrNull {  // null when it is zero
  const T& field;
};
template <class T>
struct Unlisted {  // only a snapshot or the digest has a use for it
  const T& field;
};

// clang does not deduce the arguments of aggregates before version 17.
template <class T>
Hexadecimal(const T&) -> Hexadecimal<T>;
template <class T>
IfAny(const T&) -> IfAny<T>;
template <class T>
OrNull(const T&) -> OrNull<T>;
template <class T>
Unlisted(const T&) -> Unlisted<T>;

// name, field, name, field ...: fields by reference, wrappers by value. A field without a name is a struct whose own fields
// stand in its place. Parts are the bases of one struct, because std::tuple takes long to compile for hundreds of fields.
template <std::size_t I, class Part>
struct NamedPart {
  Part part;
};
template <class Indices, class... Parts>
struct NamedParts;
template <std::size_t... I, class... Parts>
struct NamedParts<std::index_sequence<I...>, Parts...> : NamedPart<I, Parts>... {
  static constexpr std::size_t kCount = sizeof...(Parts);
};
template <std::size_t I, class Part>
constexpr const Part& PartAt(const NamedPart<I, Part>& named) {
  return named.part;
}
template <class... Parts>
constexpr auto Named(Parts&&... parts) {
  return NamedParts<std::index_sequence_for<Parts...>, Parts...>{{std::forward<Parts>(parts)}...};
}

// ---- values --------------------------------------------------------------------------------------------------------------

inline auto Fields(const Location& v) { return Named("type", v.type, "id", v.id); }
inline auto Fields(const AllocationProperties& v) {
  return Named("type", v.type, "handle_types", v.handle_types, "location", v.location, "compression", v.compression,
               "gpu_direct_rdma", v.gpu_direct_rdma, "usage", v.usage, "reserved", v.reserved);
}
inline auto Fields(const AccessDescriptor& v) { return Named("location", v.location, "flags", v.flags); }
inline auto Fields(const RemoteAllocation& v) { return Named("owner", v.owner, "owner_allocation", v.allocation); }
inline auto Fields(const ByteRange& v) { return Named("offset", v.offset, "bytes", v.bytes); }
inline auto Fields(const Step& v) {
  return Named("kind", v.kind, "allocation", v.allocation, "address", v.address, "bytes", v.bytes, "device", v.device, "offset",
               IfAny{v.offset});
}
inline auto Fields(const CycleMember& v) { return Named("session", v.session, "rank", v.rank, "pid", v.pid, "host", v.host); }

// ---- events, in the order of event.h -------------------------------------------------------------------------------------

inline auto Fields(const SessionOpened& e) {
  return Named("session", e.session, "host", e.host, "pid", e.pid, "boot_id", e.boot_id, "amem_version", e.amem_version,
               "driver_version", e.driver_version, "nccl_version", e.nccl_version, "gpu_uuids", e.gpu_uuids, "group", e.group,
               "rank", e.rank, "realtime_ns", e.realtime_ns, "monotonic_ns", e.monotonic_ns, "layout", e.layout, "content",
               e.content, "launcher", IfAny{e.launcher});
}
inline auto Fields(const SessionClosed& e) { return Named("reason", e.reason, "exit_code", e.exit_code); }
inline auto Fields(const SessionBroken& e) { return Named("reason", e.reason); }
inline auto Fields(const GroupChanged& e) { return Named("group", e.group); }
inline auto Fields(const LibraryAttached& e) {
  return Named("path", e.path, "build_id", e.build_id, "way", e.way, "nccl_version", e.nccl_version, "load_address",
               Hexadecimal{e.load_address});
}
inline auto Fields(const DriverSymbolBound& e) {
  return Named("name", e.name, "cuda_version", e.cuda_version, "replaced", e.replaced);
}
inline auto Fields(const RangeReserved& e) {
  return Named("allocation", IfAny{e.allocation}, "address", e.address, "bytes", e.bytes, "alignment", e.alignment, "hint",
               e.hint, "flags", e.flags, "site", e.site, "pool", IfAny{e.pool});
}
inline auto Fields(const RangeFreed& e) {
  return Named("address", e.address, "bytes", e.bytes, "allocation", IfAny{e.allocation});
}
inline auto Fields(const AllocationCreated& e) {
  return Named("allocation", e.allocation, "bytes", e.bytes, "properties", e.properties, "flags", e.flags, "handle", e.handle,
               "created_seq", e.created, "site", e.site, "tag", IfAny{e.tag}, "communicator", IfAny{e.communicator}, "pool",
               IfAny{e.pool});
}
inline auto Fields(const AllocationRetained& e) { return Named("allocation", e.allocation, "address", e.address); }
inline auto Fields(const AllocationReleased& e) { return Named("allocation", e.allocation); }
inline auto Fields(const Mapped& e) {
  return Named("address", e.address, "bytes", e.bytes, "offset", e.offset, "allocation", e.allocation, "flags", e.flags);
}
inline auto Fields(const Unmapped& e) {
  return Named("address", e.address, "bytes", e.bytes, "allocation", IfAny{e.allocation});
}
inline auto Fields(const AccessSet& e) {
  return Named("allocation", IfAny{e.allocation}, "address", e.address, "bytes", e.bytes, "access", e.access);
}
inline auto Fields(const Exported& e) { return Named("allocation", e.allocation, "handle_type", e.handle_type); }
inline auto Fields(const Imported& e) {
  return Named("allocation", e.allocation, "", e.remote, "bytes", e.bytes, "properties", e.properties, "handle_type",
               e.handle_type, "handle", e.handle, "created_seq", e.created, "site", e.site, "tag", IfAny{e.tag}, "communicator",
               IfAny{e.communicator}, "pool", IfAny{e.pool});
}
inline auto Fields(const ReferenceAdded& e) { return Named("allocation", e.allocation, "by", e.by, "as", e.as); }
inline auto Fields(const ReferenceDropped& e) { return Named("allocation", e.allocation, "by", e.by, "as", e.as); }
inline auto Fields(const PeerConnected& e) {
  return Named("peer", e.peer, "host", e.host, "pid", e.pid, "group", e.group, "rank", e.rank);
}
inline auto Fields(const PeerLost& e) { return Named("peer", e.peer, "reason", e.reason); }
inline auto Fields(const HostAllocated& e) {
  return Named("address", e.address, "bytes", e.bytes, "flags", e.flags, "registered", e.registered);
}
inline auto Fields(const HostFreed& e) { return Named("address", e.address); }
inline auto Fields(const LegacyAllocated& e) {
  return Named("address", e.address, "bytes", e.bytes, "backing", e.backing, "offset", e.offset, "why", e.why, "site", e.site,
               "communicator", IfAny{e.communicator});
}
inline auto Fields(const LegacyFreed& e) { return Named("address", e.address); }
inline auto Fields(const LegacyExported& e) { return Named("address", e.address, "backing", e.backing); }
inline auto Fields(const LegacyImported& e) { return Named("address", e.address, "allocation", e.allocation); }
inline auto Fields(const LegacyClosed& e) { return Named("address", e.address); }
inline auto Fields(const AsyncAllocated& e) { return Named("address", e.address, "bytes", e.bytes); }
inline auto Fields(const AsyncFreed& e) { return Named("address", e.address); }
inline auto Fields(const MulticastCreated& e) {
  return Named("allocation", e.allocation, "bytes", e.bytes, "devices", e.devices, "handle_types", e.handle_types, "flags",
               e.flags, "handle", e.handle, "tag", IfAny{e.tag}, "incomplete", Unlisted{e.incomplete});
}
inline auto Fields(const MulticastDeviceAdded& e) { return Named("multicast", e.multicast, "device", e.device); }
inline auto Fields(const MulticastBound& e) {
  return Named("multicast", e.multicast, "multicast_offset", e.multicast_offset, "allocation", e.allocation,
               "allocation_offset", e.allocation_offset, "bytes", e.bytes, "address", e.address);
}
inline auto Fields(const MulticastUnbound& e) {
  return Named("multicast", e.multicast, "device", e.device, "multicast_offset", e.multicast_offset, "bytes", e.bytes);
}
inline auto Fields(const Registered& e) { return Named("address", e.address, "bytes", e.bytes, "how", e.how); }
inline auto Fields(const Deregistered& e) { return Named("address", e.address, "bytes", e.bytes); }
inline auto Fields(const PassedThrough& e) { return Named("name", e.name, "detail", e.detail, "result", e.result); }
inline auto Fields(const CycleBegun& e) {
  return Named("cycle_kind", e.kind, "cycle", e.cycle, "members", e.members, "processes", e.processes, "pool", IfAny{e.pool});
}
inline auto Fields(const StepBegun& e) { return Named("step", e.step, "pool", IfAny{e.pool}); }
inline auto Fields(const StepDone& e) { return Named("step", e.step, "pool", IfAny{e.pool}); }
inline auto Fields(const StepFailed& e) {
  return Named("step", e.step, "code", e.code, "driver_result", e.driver_result, "message", e.message, "reported_by",
               OrNull{e.reported_by}, "pool", IfAny{e.pool});
}
inline auto Fields(const PhaseBegun& e) { return Named("phase", e.phase, "pool", IfAny{e.pool}); }
inline auto Fields(const PhaseDecided& e) {
  return Named("phase", e.phase, "passed", e.passed, "culprit", OrNull{e.culprit}, "message", e.message, "code", e.code,
               "driver_result", e.driver_result, "pool", IfAny{e.pool});
}
inline auto Fields(const CycleDone& e) {
  return Named("cycle_kind", e.kind, "cycle", e.cycle, "duration_ns", e.duration_ns, "pool", IfAny{e.pool});
}
inline auto Fields(const CycleFailed& e) {
  return Named("cycle_kind", e.kind, "cycle", e.cycle, "undone", e.undone, "message", e.message, "code", e.code,
               "driver_result", e.driver_result, "culprits", e.culprits, "pool", IfAny{e.pool});
}
inline auto Fields(const Condensed& e) {
  return Named("through", e.through, "next_allocation", e.next_allocation, "cycles", e.cycles, "totals", e.totals);
}
inline auto Fields(const SlabOpened& e) { return Named("slab", e.slab, "address", e.address, "dirty", Unlisted{e.dirty}); }
inline auto Fields(const Placed& e) {
  return Named("allocation", e.allocation, "slab", e.slab, "offset", e.offset, "touched", Unlisted{e.touched});
}
inline auto Fields(const Backed& e) { return Named("allocation", e.allocation, "handle", e.handle); }
inline auto Fields(const PartCleared& e) { return Named("slab", e.slab, "offset", e.offset, "bytes", e.bytes); }

inline auto Fields(const CommunicatorBegun& e) {
  return Named("communicator", e.communicator, "parent", IfAny{e.parent}, "how", e.how, "rank", e.rank, "ranks", e.ranks);
}
inline auto Fields(const CommunicatorReady& e) {
  return Named("communicator", e.communicator, "hash", Hexadecimal{e.hash}, "rank", e.rank, "ranks", e.ranks, "device",
               e.device);
}
inline auto Fields(const CommunicatorEnded& e) { return Named("communicator", e.communicator, "how", e.how); }
inline auto Fields(const CommunicatorSuspended& e) { return Named("communicator", e.communicator, "suspended", e.suspended); }

inline auto Fields(const VoteCast& e) {
  return Named("phase", e.phase, "ok", e.ok, "code", e.code, "message", e.message, "pool", IfAny{e.pool});
}
inline auto Fields(const MemberHeard& e) {
  return Named("member", e.member, "cycle_kind", e.kind, "phase", e.phase, "voted", e.voted, "ok", e.ok, "rank", e.rank, "pid",
               e.pid, "asks", e.asks);
}
inline auto Fields(const ProcessSeen& e) {
  return Named("session", e.session, "pid", e.pid, "state", e.state, "where", e.where, "answer", e.answer, "exit_code",
               e.exit_code, "waited_ns", e.waited_ns);
}
inline auto Fields(const ThreadSeen& e) {
  return Named("of_thread", e.thread, "name", e.name, "state", e.state, "where", e.where, "stack", e.stack);
}
inline auto Fields(const LaunchRefused& e) { return Named("call", e.call, "count", e.count); }

inline auto Fields(const PoolOpened& e) {
  return Named("pool", e.pool, "pool_tag", e.tag, "policy", e.policy, "cycles", Unlisted{e.cycles});
}
inline auto Fields(const PoolAllocated& e) {
  return Named("address", e.address, "bytes", e.bytes, "device", e.device, "backing", e.backing, "offset", e.offset);
}
inline auto Fields(const PoolFreed& e) { return Named("address", e.address); }

inline auto Fields(const RequestSeen& e) {
  return Named("request", e.request, "request_kind", e.kind, "by_pid", e.by_pid, "target", OrNull{e.target}, "all_tags",
               e.all_tags);
}
inline auto Fields(const SafepointReached& e) { return Named("request", e.request, "safepoint", OrNull{e.step}); }
inline auto Fields(const RequestEnded& e) {
  return Named("request", e.request, "request_kind", e.kind, "code", e.code, "message", e.message, "bytes", e.bytes);
}
inline auto Fields(const Frozen& e) {
  return Named("from_ns", e.from_ns, "to_ns", e.to_ns, "bytes", e.bytes, "moved_gpus", e.moved_gpus);
}
inline auto Fields(const EverythingKept& e) { return Named("why", e.why); }

// ---- what a state holds --------------------------------------------------------------------------------------------------

inline auto Fields(const Range& v) {
  return Named("bytes", v.bytes, "alignment", v.alignment, "hint", v.hint, "flags", v.flags);
}
inline auto Fields(const Mapping& v) {
  return Named("bytes", v.bytes, "offset", v.offset, "allocation", v.allocation, "flags", v.flags, "access", v.access,
               "present", v.present, "accessible", v.accessible);
}
inline auto Fields(const LegacyAllocation& v) {
  return Named("bytes", v.bytes, "backing", v.backing, "offset", v.offset, "why", v.why, "site", v.site, "communicator",
               IfAny{v.communicator});
}
inline auto Fields(const HostAllocation& v) { return Named("bytes", v.bytes, "flags", v.flags, "registered", v.registered); }
inline auto Fields(const Registration& v) {
  return Named("bytes", v.bytes, "how", v.how, "count", v.count, "allocations", Unlisted{v.allocations});
}
inline auto Fields(const MulticastBinding& v) {
  return Named("allocation", v.allocation, "address", v.address, "allocation_offset", v.allocation_offset, "bytes", v.bytes,
               "device", v.device, "bound", v.bound);
}
inline auto Fields(const Peer& v) {
  return Named("host", v.host, "pid", v.pid, "group", v.group, "rank", v.rank, "connected", v.connected, "lost_reason",
               v.lost_reason);
}

inline auto Fields(const Communicator& v) {
  return Named("parent", IfAny{v.parent}, "how", v.how, "hash", Hexadecimal{v.hash}, "rank", v.rank, "ranks", v.ranks, "device",
               v.device, "ready", v.ready, "suspended", v.suspended, "ended", v.ended, "memory", Unlisted{v.memory});
}

inline auto Fields(const PoolPart& v) {
  return Named("bytes", v.bytes, "device", v.device, "backing", v.backing, "offset", v.offset);
}

// ---- walking over them ---------------------------------------------------------------------------------------------------

template <class T>
concept Described = requires(const T& value) {
  Fields(value);
};

// How many fields a struct has: as many as its initializer takes.
struct AnyField {
  template <class T>
  operator T() const;  // NOLINT(google-explicit-constructor): only named, never called
};
template <class T, class... Init>
consteval std::size_t CountFields() {
  if constexpr (requires { T{Init{}..., AnyField{}}; }) {
    return CountFields<T, Init..., AnyField>();
  } else {
    return sizeof...(Init);
  }
}

template <Described T, class Visit>
void ForEachField(const T& value, Visit&& visit) {
  const auto fields = Fields(value);
  constexpr std::size_t kParts = decltype(fields)::kCount;
  static_assert(kParts == 2 * CountFields<T>(), "a field of this struct is missing in its Fields()");
  [&]<std::size_t... I>(std::index_sequence<I...>) { (visit(PartAt<2 * I>(fields), PartAt<2 * I + 1>(fields)), ...); }
  (std::make_index_sequence<kParts / 2>());
}

}  // namespace amem
