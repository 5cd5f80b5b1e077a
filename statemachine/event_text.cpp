// Events, states and numbers in words for people, generated from their values.
#include <array>
#include <charconv>
#include <iterator>
#include <span>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {
namespace {

constexpr std::array<std::string_view, kEventKinds> kKindNames = {
    "session opened",
    "session closed",
    "session broken",
    "group changed",
    "library attached",
    "driver symbol bound",
    "range reserved",
    "range freed",
    "allocation created",
    "allocation retained",
    "allocation released",
    "mapped",
    "unmapped",
    "access set",
    "exported",
    "imported",
    "reference added",
    "reference dropped",
    "peer connected",
    "peer lost",
    "host allocated",
    "host freed",
    "legacy allocated",
    "legacy freed",
    "legacy exported",
    "legacy imported",
    "legacy closed",
    "async allocated",
    "async freed",
    "multicast created",
    "multicast device added",
    "multicast bound",
    "multicast unbound",
    "registered",
    "deregistered",
    "passed through",
    "cycle begun",
    "step begun",
    "step done",
    "step failed",
    "phase begun",
    "phase decided",
    "cycle done",
    "cycle failed",
    "condensed",
    "slab opened",
    "placed",
    "backed",
    "part cleared",
    "communicator begun",
    "communicator ready",
    "communicator ended",
    "communicator suspended",
    "vote cast",
    "member heard",
    "process seen",
    "thread seen",
    "launch refused",
    "pool opened",
    "pool allocated",
    "pool freed",
    "request seen",
    "safepoint reached",
    "request ended",
    "frozen",
    "everything kept",
};

template <class Enum>
constexpr std::size_t Index(Enum value) {
  return static_cast<std::size_t>(value);
}

// The name of an enumerator, of names in the order of its enumeration.
template <class Enum>
std::string_view NameIn(std::span<const std::string_view> names, Enum value) {
  return Index(value) < names.size() ? names[Index(value)] : "unknown";
}

using std::to_string;

std::string ToText(const std::vector<AccessDescriptor>& access) {
  std::string out;
  for (const auto& a : access) {
    if (!out.empty()) out += ", ";
    out += amem::ToText(a.location) + (a.flags == 3   ? " read-write"
                                       : a.flags == 1 ? " read"
                                       : a.flags == 0 ? " none"
                                                      : " flags " + to_string(a.flags));
  }
  return out.empty() ? "no device" : out;
}

std::string ToText(const AllocationProperties& p) {
  std::string out = "on " + amem::ToText(p.location);
  if (p.handle_types != 0) out += ", handle types " + Hex(p.handle_types);
  if (p.gpu_direct_rdma != 0) out += ", GPUDirect RDMA";
  if (p.compression != 0) out += ", compression " + to_string(p.compression);
  if (p.usage != 0) out += ", usage " + Hex(p.usage);
  if (p.type != 1) out += ", type " + to_string(p.type);
  return out;
}

std::string Tag(MemoryTag tag) {
  if (tag == MemoryTag::kMulticastReleased) return ", a multicast object that a pause releases";
  return tag == MemoryTag::kNccl ? "" : " for the program (ncclMemAlloc)";
}
std::string Of(CommunicatorId id) { return id ? " for " + amem::ToText(id) : ""; }
std::string Site(const CallSite& site) { return site.frames[0] == 0 ? "" : " at " + amem::ToText(site); }

std::string Process(std::int32_t rank, std::int32_t pid, const std::string& host) {
  return (rank >= 0 ? "rank " + to_string(rank) + ", " : "") + "pid " + to_string(pid) + " on " + host;
}

std::string Within(AllocationId id) { return id ? " of " + ToText(id) + " in its slab" : ""; }

std::string OfPool(PoolId id) { return id ? " of " + ToText(id) : ""; }

std::string Joined(const std::vector<std::string>& texts, const char* between) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : between) + text;
  return out;
}
std::string After(const char* between, const std::string& text) { return text.empty() ? "" : between + text; }

struct Describe {
  std::string operator()(const SessionOpened& e) const {
    return ToText(e.session) + " opened by " + Process(e.rank, e.pid, e.host) + ", group " + to_string(e.group) + ", driver " +
           e.driver_version + ", NCCL " + e.nccl_version + ", " + to_string(e.gpu_uuids.size()) + " GPUs, layout " + e.layout +
           ", content " + e.content + ", AMem " + e.amem_version + (e.launcher.empty() ? "" : ", " + Joined(e.launcher, " "));
  }
  std::string operator()(const SessionClosed& e) const {
    return "session closed: " + e.reason + (e.exit_code >= 0 ? ", exit code " + to_string(e.exit_code) : "");
  }
  std::string operator()(const SessionBroken& e) const { return "session broken: " + e.reason; }
  std::string operator()(const GroupChanged& e) const { return "group is now " + to_string(e.group); }
  std::string operator()(const LibraryAttached& e) const {
    return "attached (" + e.way + ") to " + e.path + ", NCCL " + e.nccl_version + ", build " + e.build_id + ", loaded at " +
           Hex(e.load_address);
  }
  std::string operator()(const DriverSymbolBound& e) const {
    return "NCCL asked for " + e.name + " of CUDA " + to_string(e.cuda_version) + (e.replaced ? "" : ", which passes through");
  }
  std::string operator()(const RangeReserved& e) const {
    return "range reserved " + Hex(e.address.value) + " " + FormatBytes(e.bytes) +
           (e.alignment != 0 ? " aligned to " + FormatBytes(e.alignment) : "") +
           (e.hint ? " asked at " + Hex(e.hint.value) : "") + Within(e.allocation) + (e.pool ? " for " + ToText(e.pool) : "") +
           Site(e.site);
  }
  std::string operator()(const RangeFreed& e) const {
    return "range freed " + Hex(e.address.value) + " " + FormatBytes(e.bytes) + Within(e.allocation);
  }
  std::string operator()(const AllocationCreated& e) const {
    return ToText(e.allocation) + " created, " + FormatBytes(e.bytes) + " " + ToText(e.properties) +
           (e.pool ? ", a chunk of " + ToText(e.pool) : Tag(e.tag)) + Of(e.communicator) + Site(e.site);
  }
  std::string operator()(const AllocationRetained& e) const {
    return ToText(e.allocation) + " retained" + (e.address ? " by address " + Hex(e.address.value) : "");
  }
  std::string operator()(const AllocationReleased& e) const { return ToText(e.allocation) + " released"; }
  std::string operator()(const Mapped& e) const {
    return "mapped " + Hex(e.address.value) + " " + FormatBytes(e.bytes) + " of " + ToText(e.allocation) +
           (e.offset != 0 ? " from offset " + FormatBytes(e.offset) : "");
  }
  std::string operator()(const Unmapped& e) const {
    return "unmapped " + Hex(e.address.value) + " " + FormatBytes(e.bytes) + Within(e.allocation);
  }
  std::string operator()(const AccessSet& e) const {
    return "access to " + Hex(e.address.value) + " " + FormatBytes(e.bytes) + " for " + ToText(e.access) + Within(e.allocation);
  }
  std::string operator()(const Exported& e) const {
    return ToText(e.allocation) + " exported, handle type " + to_string(e.handle_type);
  }
  std::string operator()(const Imported& e) const {
    return ToText(e.allocation) + " imported, " + FormatBytes(e.bytes) + " of " + ToText(e.remote.allocation) + " of " +
           ToText(e.remote.owner) + " " + ToText(e.properties) + Tag(e.tag) + Of(e.communicator) + Site(e.site);
  }
  std::string operator()(const ReferenceAdded& e) const {
    return "reference to " + ToText(e.allocation) + " added by " + ToText(e.by) + " as " + ToText(e.as);
  }
  std::string operator()(const ReferenceDropped& e) const {
    return "reference to " + ToText(e.allocation) + " dropped by " + ToText(e.by) + " as " + ToText(e.as);
  }
  std::string operator()(const PeerConnected& e) const {
    return "peer " + Hex(e.peer.value) + " connected: " + Process(e.rank, e.pid, e.host) + ", group " + to_string(e.group);
  }
  std::string operator()(const PeerLost& e) const { return "peer " + Hex(e.peer.value) + " lost: " + e.reason; }
  std::string operator()(const HostAllocated& e) const {
    return std::string("host memory ") + (e.registered ? "registered " : "allocated ") + Hex(e.address.value) + " " +
           FormatBytes(e.bytes);
  }
  std::string operator()(const HostFreed& e) const { return "host memory freed " + Hex(e.address.value); }
  std::string operator()(const LegacyAllocated& e) const {
    return "cuMemAlloc " + Hex(e.address.value) + " " + FormatBytes(e.bytes) +
           (e.backing ? " in " + ToText(e.backing) + " at offset " + FormatBytes(e.offset) : " kept by the driver: " + e.why) +
           Of(e.communicator) + Site(e.site);
  }
  std::string operator()(const LegacyFreed& e) const { return "cuMemFree " + Hex(e.address.value); }
  std::string operator()(const LegacyExported& e) const {
    return "IPC handle made of " + Hex(e.address.value) + " in " + ToText(e.backing);
  }
  std::string operator()(const LegacyImported& e) const {
    return "IPC handle opened at " + Hex(e.address.value) + " as " + ToText(e.allocation);
  }
  std::string operator()(const LegacyClosed& e) const { return "IPC handle closed at " + Hex(e.address.value); }
  std::string operator()(const AsyncAllocated& e) const {
    return "pool memory allocated " + Hex(e.address.value) + " " + FormatBytes(e.bytes);
  }
  std::string operator()(const AsyncFreed& e) const { return "pool memory freed " + Hex(e.address.value); }
  std::string operator()(const MulticastCreated& e) const {
    return "multicast object " + to_string(e.allocation.value) + " created, " + FormatBytes(e.bytes) + " for " +
           to_string(e.devices) + " devices" + (e.tag == MemoryTag::kMulticastReleased ? ", which a pause releases" : "");
  }
  std::string operator()(const MulticastDeviceAdded& e) const {
    return "device " + to_string(e.device.value) + " added to multicast object " + to_string(e.multicast.value);
  }
  std::string operator()(const MulticastBound& e) const {
    return (e.allocation ? ToText(e.allocation) : "address " + Hex(e.address.value)) + " " + FormatBytes(e.bytes) +
           " bound to multicast object " + to_string(e.multicast.value) + " at " + FormatBytes(e.multicast_offset);
  }
  std::string operator()(const MulticastUnbound& e) const {
    return "device " + to_string(e.device.value) + " " + FormatBytes(e.bytes) + " unbound from multicast object " +
           to_string(e.multicast.value) + " at " + FormatBytes(e.multicast_offset);
  }
  std::string operator()(const Registered& e) const {
    return "registered for RDMA (" + e.how + ") " + Hex(e.address.value) + " " + FormatBytes(e.bytes);
  }
  std::string operator()(const Deregistered& e) const {
    return "deregistered " + Hex(e.address.value) + " " + FormatBytes(e.bytes);
  }
  std::string operator()(const PassedThrough& e) const {
    return e.name + " passed through" + (e.detail.empty() ? "" : ": " + e.detail) + ", result " + to_string(e.result);
  }
  std::string operator()(const CycleBegun& e) const {
    const std::string begun = std::string(amem::ToText(e.kind)) + " " + to_string(e.cycle) + OfPool(e.pool) + " begun";
    return e.pool ? begun : begun + " with " + to_string(e.members.size()) + " sessions";
  }
  std::string operator()(const StepBegun& e) const { return "step begun: " + amem::ToText(e.step) + OfPool(e.pool); }
  std::string operator()(const StepDone& e) const { return "step done: " + amem::ToText(e.step) + OfPool(e.pool); }
  std::string operator()(const StepFailed& e) const {
    return "step failed: " + amem::ToText(e.step) + OfPool(e.pool) + ": " + std::string(amem::ToText(e.code)) + ": " +
           e.message + (e.reported_by ? ", reported by " + ToText(e.reported_by) : "");
  }
  std::string operator()(const PhaseBegun& e) const {
    return "phase begun: " + std::string(amem::ToText(e.phase)) + OfPool(e.pool);
  }
  std::string operator()(const PhaseDecided& e) const {
    return "phase " + std::string(amem::ToText(e.phase)) + (e.passed ? " passed" : " failed: " + e.message);
  }
  std::string operator()(const CycleDone& e) const {
    return std::string(amem::ToText(e.kind)) + " " + to_string(e.cycle) + OfPool(e.pool) + " done in " +
           to_string(e.duration_ns / 1000) + " us";
  }
  std::string operator()(const CycleFailed& e) const {
    return std::string(amem::ToText(e.kind)) + " " + to_string(e.cycle) + OfPool(e.pool) + " failed" +
           (e.undone ? " and was undone: " : " and could not be undone: ") + e.message;
  }
  std::string operator()(const SlabOpened& e) const {
    return "slab " + to_string(e.slab.value) + " opened at " + Hex(e.address.value);
  }
  std::string operator()(const Placed& e) const {
    return ToText(e.allocation) + " placed in slab " + to_string(e.slab.value) + " at offset " + FormatBytes(e.offset);
  }
  std::string operator()(const Backed& e) const { return ToText(e.allocation) + " left its slab for memory of its own"; }
  std::string operator()(const PartCleared& e) const {
    return "slab " + to_string(e.slab.value) + " cleared at offset " + FormatBytes(e.offset) + ", " + FormatBytes(e.bytes);
  }
  std::string operator()(const CommunicatorBegun& e) const {
    return ToText(e.communicator) + " begun by " + e.how + (e.parent ? " of " + ToText(e.parent) : "") +
           (e.rank >= 0 ? " as rank " + to_string(e.rank) : "") + (e.ranks > 0 ? " of " + to_string(e.ranks) : "");
  }
  std::string operator()(const CommunicatorReady& e) const {
    return ToText(e.communicator) + " ready, rank " + to_string(e.rank) + " of " + to_string(e.ranks) + " on device " +
           to_string(e.device.value) + (e.hash != 0 ? ", hash " + Hex(e.hash) : ", hash unknown");
  }
  std::string operator()(const CommunicatorEnded& e) const { return ToText(e.communicator) + " ended: " + e.how; }
  std::string operator()(const CommunicatorSuspended& e) const {
    return ToText(e.communicator) + (e.suspended ? " suspended" : " resumed");
  }
  std::string operator()(const VoteCast& e) const {
    return "voted " + std::string(e.ok ? "for " : "against ") + std::string(amem::ToText(e.phase)) +
           (e.ok ? "" : ": " + std::string(amem::ToText(e.code)) + After(": ", e.message));
  }
  std::string operator()(const MemberHeard& e) const {
    const std::string rank = e.rank >= 0 ? " (rank " + to_string(e.rank) + ")" : "";
    const std::string who = ToText(e.member) + rank;
    if (e.asks) return who + " waits for others to come to the " + std::string(amem::ToText(e.kind));
    if (!e.voted) return who + " has come to the " + std::string(amem::ToText(e.kind));
    return who + " voted " + (e.ok ? "for " : "against ") + std::string(amem::ToText(e.phase));
  }
  std::string operator()(const ProcessSeen& e) const {
    return "process of " + ToText(e.session) + " seen: pid " + to_string(e.pid) + " is " + e.state + After(" ", e.where) +
           (e.exit_code > 128  ? ", ended by signal " + to_string(e.exit_code - 128)
            : e.exit_code >= 0 ? ", exit code " + to_string(e.exit_code)
                               : "") +
           After(", it answered: ", e.answer) +
           (e.waited_ns != 0 ? ", waited " + to_string(e.waited_ns / 1'000'000) + " ms" : "");
  }
  std::string operator()(const ThreadSeen& e) const {
    return "thread " + to_string(e.thread) + After(" ", e.name) + " is " + e.state + After(" ", e.where) +
           After(", in ", Joined(e.stack, " < "));
  }
  std::string operator()(const LaunchRefused& e) const {
    return e.call + " refused, memory is paused" + (e.count > 1 ? " (" + to_string(e.count) + " times)" : "");
  }
  std::string operator()(const PoolOpened& e) const {
    return ToText(e.pool) + " opened for tag " + e.tag + ", policy " + std::string(amem::ToText(e.policy));
  }
  std::string operator()(const PoolAllocated& e) const {
    return "amem_alloc " + Hex(e.address.value) + " " + FormatBytes(e.bytes) + " on device " + to_string(e.device.value) +
           " in " + ToText(e.backing) + " at offset " + FormatBytes(e.offset);
  }
  std::string operator()(const PoolFreed& e) const { return "amem_free " + Hex(e.address.value); }
  std::string operator()(const RequestSeen& e) const {
    const bool pause = e.kind == CycleKind::kPause;
    return "asked from outside (request " + to_string(e.request) + ", by pid " + to_string(e.by_pid) + ") to " +
           std::string(amem::ToText(e.kind)) + (e.all_tags ? " with all tags" : "") +
           (!pause          ? ""
            : e.target != 0 ? " at safe point " + to_string(e.target)
                            : " at a safe point that is not agreed on yet");
  }
  std::string operator()(const SafepointReached& e) const {
    const std::string where = e.step != 0 ? "safe point " + to_string(e.step) : "the program's own resume";
    return "waits in " + where + " for request " + to_string(e.request);
  }
  std::string operator()(const RequestEnded& e) const {
    const std::string what = "request " + to_string(e.request) + " to " + std::string(amem::ToText(e.kind));
    if (e.code != Code::kOk) return what + " failed: " + std::string(amem::ToText(e.code)) + After(": ", e.message);
    return what + " done" + (e.bytes != 0 ? ", " + FormatBytes(e.bytes) + " given back" : "");
  }
  std::string operator()(const EverythingKept& e) const { return "from now on all memory stays: " + e.why; }
  std::string operator()(const Frozen& e) const {
    return "was frozen by the driver for " + to_string((e.to_ns - e.from_ns) / 1'000'000) + " ms, " + FormatBytes(e.bytes) +
           " moved out" + After(", on other GPUs since: ", e.moved_gpus);
  }
  std::string operator()(const Condensed& e) const {
    return "snapshot of everything up to event " + to_string(e.through.value);
  }
};

}  // namespace

std::string Hex(std::uint64_t value) {
  std::array<char, 24> buffer{'0', 'x'};
  const auto end = std::to_chars(buffer.data() + 2, buffer.data() + buffer.size(), value, 16).ptr;
  return {buffer.data(), end};
}

std::string FormatBytes(Bytes bytes) {
  const char* unit = " B";
  if (bytes != 0 && bytes % (Bytes{1} << 20) == 0) {
    bytes >>= 20;
    unit = " MiB";
  } else if (bytes != 0 && bytes % 1024 == 0) {
    bytes >>= 10;
    unit = " KiB";
  }
  std::string digits = to_string(bytes);
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ' ');
  return digits + unit;
}

std::string_view ToText(Code code) {
  static constexpr std::string_view kNames[] = {
      "ok",        "invalid",   "not found", "out of memory", "driver error", "I/O error",          "corrupt",
      "timed out", "peer lost", "refused",   "not supported", "broken",       "no descriptors left"};
  static_assert(std::size(kNames) == Index(Code::kNoDescriptors) + 1);
  return NameIn(kNames, code);
}

std::string_view KindName(std::size_t kind) { return kind < kEventKinds ? kKindNames[kind] : "unknown"; }

std::optional<std::size_t> KindOf(std::string_view name) {
  for (std::size_t i = 0; i < kEventKinds; ++i) {
    if (kKindNames[i] == name) return i;
  }
  return std::nullopt;
}

std::string_view ToText(CycleKind kind) { return kind == CycleKind::kPause ? "pause" : "resume"; }

std::string_view ToText(PhaseKind phase) {
  static constexpr std::string_view kNames[] = {
      "pause: arrive",  "pause: save",        "pause: drop imports",        "pause: release", "pause: all gone",
      "resume: arrive", "resume: create own", "resume: import and restore", "resume: verify", "resume: open"};
  static_assert(std::size(kNames) == Index(PhaseKind::kResumeOpen) + 1);
  return NameIn(kNames, phase);
}

std::string_view ToText(StepKind kind) {
  static constexpr std::string_view kNames[] = {
      "quiesce", "save",   "unmap",  "release import", "release own",   "check memory", "create", "map",   "set access",
      "restore", "import", "verify", "find contents",  "begin restore", "add device",   "bind",   "unbind"};
  static_assert(std::size(kNames) == Index(StepKind::kUnbind) + 1);
  return NameIn(kNames, kind);
}

std::string ToText(const Step& step) {
  std::string out{ToText(step.kind)};
  switch (step.kind) {
    case StepKind::kQuiesce:
    case StepKind::kCheckMemory:
    case StepKind::kScan:
    case StepKind::kBeginRestore:
      out += " device " + to_string(step.device.value);
      break;
    case StepKind::kAddDevice:
      return out + " " + to_string(step.device.value) + " to multicast object " + to_string(step.allocation.value);
    case StepKind::kBind:
    case StepKind::kUnbind:
      return out + " memory of device " + to_string(step.device.value) + (step.kind == StepKind::kBind ? " to" : " from") +
             " multicast object " + to_string(step.allocation.value) + " at " + FormatBytes(step.offset) + ", " +
             FormatBytes(step.bytes);
    default:
      break;
  }
  if (step.allocation) out += " " + ToText(step.allocation);
  if (step.address) out += " at " + Hex(step.address.value);
  if (step.bytes != 0) out += ", " + FormatBytes(step.bytes);
  return out;
}

std::string ToText(AllocationId id) { return "allocation " + to_string(id.value); }
std::string ToText(CommunicatorId id) { return "communicator " + to_string(id.value); }
std::string ToText(PoolId id) { return "pool " + to_string(id.value); }
std::string ToText(SessionId id) { return "session " + Hex(id.value); }
std::string ToText(const Location& location) {
  switch (location.type) {
    case LocationType::kDevice:
      return "device " + to_string(location.id);
    case LocationType::kHost:
      return "host";
    case LocationType::kHostNuma:
      return "host NUMA node " + to_string(location.id);
    case LocationType::kHostNumaCurrent:
      return "host current NUMA node";
    case LocationType::kInvalid:
      break;
  }
  return "location type " + to_string(static_cast<std::uint32_t>(location.type));
}

std::string ToText(const CallSite& site) {
  std::string out;
  for (const std::uint64_t frame : site.frames) {
    if (frame == 0) break;
    if (!out.empty()) out += ",";
    out += "+" + Hex(frame).substr(2);
  }
  return out;
}

std::string ToText(const EventBody& body) { return std::visit(Describe{}, body); }

std::string_view ToText(MemoryTag tag) {
  static constexpr std::string_view kNames[] = {"nccl", "user", "user-released", "multicast-released"};
  static_assert(std::size(kNames) == Index(MemoryTag::kMulticastReleased) + 1);
  return NameIn(kNames, tag);
}

std::string_view ToText(PoolPolicy policy) {
  static constexpr std::string_view kNames[] = {"preserve", "discard"};
  static_assert(std::size(kNames) == Index(PoolPolicy::kDiscard) + 1);
  return NameIn(kNames, policy);
}

std::string_view ToText(KeepReason reason) {
  static constexpr std::string_view kNames[] = {"released",
                                                "host memory",
                                                "registered with a network card",
                                                "multicast",
                                                "the program's own (ncclMemAlloc)",
                                                "held past AMem's sight",
                                                "shared by a fabric handle"};
  static_assert(std::size(kNames) == Index(KeepReason::kHandedOut) + 1);
  return NameIn(kNames, reason);
}

std::string_view ToText(Lifecycle lifecycle) {
  static constexpr std::string_view kNames[] = {"new", "running", "pausing", "paused", "resuming", "closed"};
  static_assert(std::size(kNames) == Index(Lifecycle::kClosed) + 1);
  return NameIn(kNames, lifecycle);
}

}  // namespace amem
