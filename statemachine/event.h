// Events: what happened, in the field's words. A journal is a sequence of these; state is their fold (apply.h).
//
// Rules: an event is a fact about the past and is never edited. What is in a journal follows from what is declared here
// (journal/layout.h), so members and kinds are only added: a member at the end of its struct, with a default that means the old
// behaviour, and a kind at the end of EventBody, where its index is its number. The order within AMEM_EVENT is what people see.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "statemachine/event_cycle.h"
#include "statemachine/texts.h"
#include "statemachine/types.h"

namespace amem {

// ---- life of a session

struct SessionOpened {
  SessionId session;
  HostName host;
  std::int32_t pid = 0;
  BootId boot_id;  // of the host; a journal from another boot cannot have a live process
  PublicText amem_version;
  PublicText driver_version;  // empty while unknown
  PublicText nccl_version;    // empty while unknown
  std::vector<GpuName> gpu_uuids;
  std::int64_t group = 0;         // AMEM_GROUPID
  std::int32_t rank = -1;         // RANK or the like, for messages only; -1 unknown
  std::uint64_t realtime_ns = 0;  // wall clock when Event::time_ns was `monotonic_ns`
  std::uint64_t monotonic_ns = 0;
  PublicText layout;   // "direct" or "slab"
  PublicText content;  // "preserve" or "discard"
  // What the launcher said of the job, as NAME=VALUE of those variables that are set: "SLURM_JOB_ID=17", "WORLD_SIZE=8".
  std::vector<LauncherSetting> launcher;
  ProgramName program;           // "python3 train.py"; empty in journals of builds that did not record it
  bool python = false;           // the program calls AMem from Python
  std::uint32_t timeout_ms = 0;  // AMEM_TIMEOUT_MS; 0 in journals of builds that did not record it
  AMEM_EVENT(SessionOpened, "session opened", session, host, pid, boot_id, amem_version, driver_version, nccl_version,
             gpu_uuids, group, rank, realtime_ns, monotonic_ns, layout, content, IfAny{launcher}, IfAny{program}, IfAny{python},
             IfAny{timeout_ms});
};
struct SessionClosed {
  FreeText reason;              // "exit", "detach"
  std::int32_t exit_code = -1;  // what the process gave to exit(), 0 to 255; -1: unknown
  AMEM_EVENT(SessionClosed, "session closed", reason, exit_code);
};
// Latched: after this every pause is refused with `reason`, because the journal no longer tells the whole truth.
struct SessionBroken {
  FreeText reason;
  AMEM_EVENT(SessionBroken, "session broken", reason);
};
struct GroupChanged {  // ncclSetGroupID
  std::int64_t group = 0;
  AMEM_EVENT(GroupChanged, "group changed", group);
};
// A libnccl came under AMem. `build_id` is the ELF build id in hex (or a content hash), `way` = "preload", "patched", "attach".
struct LibraryAttached {
  FilePath path;
  PublicText build_id, way, nccl_version;
  std::uint64_t load_address = 0;
  AMEM_EVENT(LibraryAttached, "library attached", path, build_id, way, nccl_version, Hexadecimal{load_address});
};
// NCCL asked for a driver entry point. `replaced` false: it passes AMem untouched, and if its name says memory, that is noted
// here.
struct DriverSymbolBound {
  PublicText name;
  std::int32_t cuda_version = 0;
  bool replaced = false;
  AMEM_EVENT(DriverSymbolBound, "driver symbol bound", name, cuda_version, replaced);
};

// ---- address ranges, allocations, mappings

// `allocation` here and in the events below: NCCL did this at the place that a slab gives that allocation (Placed), and the
// driver was not asked. Zero: a call of the driver's.
struct RangeReserved {
  Address address;
  Bytes bytes = 0;
  Bytes alignment = 0;
  Address hint;
  std::uint64_t flags = 0;
  CallSite site;
  AllocationId allocation;
  PoolId pool;  // for a chunk of that pool
  AMEM_EVENT(RangeReserved, "range reserved", IfAny{allocation}, address, bytes, alignment, hint, flags, site, IfAny{pool});
};
struct RangeFreed {
  Address address;
  Bytes bytes = 0;
  AllocationId allocation;
  AMEM_EVENT(RangeFreed, "range freed", address, bytes, IfAny{allocation});
};
struct AllocationCreated {
  AllocationId allocation;
  Bytes bytes = 0;
  AllocationProperties properties;
  std::uint64_t flags = 0;
  DriverHandle handle;  // for reading along with other tools; never used in a redo
  CallSite site;
  SequenceNumber created;  // in a snapshot: of the original event; 0: this event's own
  MemoryTag tag{};
  CommunicatorId communicator;  // that NCCL made it for; zero: none, or unknown
  PoolId pool;  // a chunk of that pool, or a library's under its tag (MemoryTag); pauses of NCCL leave it; zero: no pool's
  AMEM_EVENT(AllocationCreated, "allocation created", allocation, bytes, properties, flags, handle, As{"created_seq", created},
             site, IfAny{tag}, IfAny{communicator}, IfAny{pool});
};
struct AllocationRetained {  // by a mapped address, or imported again (no address); NCCL holds one reference more
  AllocationId allocation;
  Address address;
  AMEM_EVENT(AllocationRetained, "allocation retained", allocation, address);
};
struct AllocationReleased {  // NCCL holds one reference less; the memory lives on while mapped or referenced by a peer
  AllocationId allocation;
  AMEM_EVENT(AllocationReleased, "allocation released", allocation);
};
struct Mapped {  // of an allocation in a slab: at its place, and the driver was not asked
  Address address;
  Bytes bytes = 0;
  Bytes offset = 0;
  AllocationId allocation;
  std::uint64_t flags = 0;
  AMEM_EVENT(Mapped, "mapped", address, bytes, offset, allocation, flags);
};
struct Unmapped {
  Address address;
  Bytes bytes = 0;
  AllocationId allocation;
  AMEM_EVENT(Unmapped, "unmapped", address, bytes, IfAny{allocation});
};
struct AccessSet {
  Address address;
  Bytes bytes = 0;
  std::vector<AccessDescriptor> access;
  AllocationId allocation;  // NCCL asked it for this allocation in a slab; the slab's mapping allowed it already
  AMEM_EVENT(AccessSet, "access set", IfAny{allocation}, address, bytes, access);
};

// ---- sharing

inline constexpr std::uint32_t kFabricHandle = 8;  // CU_MEM_HANDLE_TYPE_FABRIC
// NCCL has a way to share it; no peer holds anything yet. A descriptor (1) is of a token. Any other type (8 is fabric) is the
// driver's own handle, and who imports that is never known, so that the allocation stays in place for the rest of its life.
struct Exported {
  AllocationId allocation;
  std::uint32_t handle_type = 1;
  FilePath library;  // another library than NCCL shared these very pages, by a handle of any type; empty: NCCL did
  AMEM_EVENT(Exported, "exported", allocation, handle_type, IfAny{library});
};
struct Imported {  // `allocation` is the new local id
  AllocationId allocation;
  RemoteAllocation remote;
  Bytes bytes = 0;
  AllocationProperties properties;
  std::uint32_t handle_type = 1;
  DriverHandle handle;
  CallSite site;
  SequenceNumber created;       // as in AllocationCreated
  MemoryTag tag{};              // the owner's: both sides keep memory of the program's, or both release it
  CommunicatorId communicator;  // of this process, as in AllocationCreated
  PoolId pool;                  // that has the tag of the owner's chunk; zero: it is no chunk
  AMEM_EVENT(Imported, "imported", allocation, remote, bytes, properties, handle_type, handle, As{"created_seq", created}, site,
             IfAny{tag}, IfAny{communicator}, IfAny{pool});
};
struct ReferenceAdded {  // at the owner: session `by` imported `allocation`, and calls it `as`
  AllocationId allocation;
  SessionId by;
  AllocationId as;
  AMEM_EVENT(ReferenceAdded, "reference added", allocation, by, as);
};
struct ReferenceDropped {
  AllocationId allocation;
  SessionId by;
  AllocationId as;
  AMEM_EVENT(ReferenceDropped, "reference dropped", allocation, by, as);
};
struct PeerConnected {
  SessionId peer;
  HostName host;
  std::int32_t pid = 0;
  std::int64_t group = 0;
  std::int32_t rank = -1;
  AMEM_EVENT(PeerConnected, "peer connected", peer, host, pid, group, rank);
};
inline constexpr const char* kPeerDied = "died";
struct PeerLost {  // all references held by `peer` are gone with it
  SessionId peer;
  FreeText reason;  // kPeerDied if it did not close; else in words
  AMEM_EVENT(PeerLost, "peer lost", peer, reason);
};

// ---- other kinds of memory

struct HostAllocated {  // pinned host memory: counted, never released
  Address address;
  Bytes bytes = 0;
  std::uint32_t flags = 0;
  bool registered = false;  // cuMemHostRegister of memory that NCCL had already
  AMEM_EVENT(HostAllocated, "host allocated", address, bytes, flags, registered);
};
struct HostFreed {
  Address address;
  AMEM_EVENT(HostFreed, "host freed", address);
};
// cuMemAlloc by NCCL. AMem backs it by `bytes` at `offset` of allocation `backing`, mapped at address - offset; backing 0: the
// driver's own memory, which stays (why = reason for people).
struct LegacyAllocated {
  Address address;
  Bytes bytes = 0;
  AllocationId backing;
  Bytes offset = 0;
  FreeText why;
  CallSite site;
  CommunicatorId communicator;  // as in AllocationCreated
  AMEM_EVENT(LegacyAllocated, "legacy allocated", address, bytes, backing, offset, why, site, IfAny{communicator});
};
struct LegacyFreed {
  Address address;
  AMEM_EVENT(LegacyFreed, "legacy freed", address);
};
struct LegacyExported {  // cuIpcGetMemHandle on an address of ours
  Address address;
  AllocationId backing;
  AMEM_EVENT(LegacyExported, "legacy exported", address, backing);
};
struct LegacyImported {  // cuIpcOpenMemHandle; `allocation` was Imported and mapped just before, for this
  Address address;
  AllocationId allocation;
  AMEM_EVENT(LegacyImported, "legacy imported", address, allocation);
};
struct LegacyClosed {
  Address address;
  AMEM_EVENT(LegacyClosed, "legacy closed", address);
};
struct AsyncAllocated {  // cuMemAllocAsync or FromPool: the pool's, counted, never released
  Address address;
  Bytes bytes = 0;
  AMEM_EVENT(AsyncAllocated, "async allocated", address, bytes);
};
struct AsyncFreed {
  Address address;
  AMEM_EVENT(AsyncFreed, "async freed", address);
};
struct MulticastCreated {
  AllocationId allocation;  // a multicast object has an id of the same kind: it is mapped and exported the same way
  Bytes bytes = 0;
  std::uint32_t devices = 0;
  std::uint32_t handle_types = 0;
  std::uint64_t flags = 0;
  DriverHandle handle;
  MemoryTag tag{};          // kMulticastReleased, or the object stays in a pause
  bool incomplete = false;  // in a snapshot: a session that had imported it has let go of it
  AMEM_EVENT(MulticastCreated, "multicast created", allocation, bytes, devices, handle_types, flags, handle, IfAny{tag},
             Unlisted{incomplete});
};
struct MulticastDeviceAdded {
  AllocationId multicast;
  DeviceOrdinal device;
  AMEM_EVENT(MulticastDeviceAdded, "multicast device added", multicast, device);
};
struct MulticastBound {
  AllocationId multicast;
  Bytes multicast_offset = 0;
  AllocationId allocation;  // 0 when bound by address
  Bytes allocation_offset = 0;
  Bytes bytes = 0;
  Address address;  // when bound by address
  AMEM_EVENT(MulticastBound, "multicast bound", multicast, multicast_offset, allocation, allocation_offset, bytes, address);
};
struct MulticastUnbound {
  AllocationId multicast;
  DeviceOrdinal device;
  Bytes multicast_offset = 0;
  Bytes bytes = 0;
  AMEM_EVENT(MulticastUnbound, "multicast unbound", multicast, device, multicast_offset, bytes);
};
// Pinned, for a network card or by another library: physical pages must not move, so a pause leaves this memory alone.
struct Registered {
  Address address;
  Bytes bytes = 0;
  PublicText how;    // "dma-buf", "ibv_reg_mr", "cuMemRetainAllocationHandle"
  FilePath library;  // whose call it was; empty: NCCL's
  // Not zero: it pins nothing, because a pause undoes it and a resume does it again (AMEM_NETWORK=renew), as what follows says.
  RegionId region;
  PublicText card;                 // "mlx5_0"
  std::uint64_t domain = 0;        // which of the card's protection domains, by a number that this process gives
  std::uint32_t access_flags = 0;  // as the card was asked (ibv_access_flags)
  std::uint64_t flags = 0;         // that made the dma-buf
  PublicText pins;                 // why it pins nevertheless, with AMEM_NETWORK=renew; empty: nobody asked
  AMEM_EVENT(Registered, "registered", address, bytes, how, IfAny{library}, IfAny{region}, IfAny{card}, IfAny{domain},
             IfAny{access_flags}, IfAny{flags}, IfAny{pins});
};
struct Deregistered {
  Address address;
  Bytes bytes = 0;
  FilePath library;
  RegionId region;  // as in Registered
  AMEM_EVENT(Deregistered, "deregistered", address, bytes, IfAny{library}, IfAny{region});
};
// From now on pauses leave all memory of this session in place, tags' and imports too: somebody whom AMem cannot ask may hold
// its pages, here or in a session that shares memory with this one.
struct EverythingKept {
  FreeText why;
  AMEM_EVENT(EverythingKept, "everything kept", why);
};
// What another library of the process shares with other processes past AMem, from now on; no pieces: nothing any more.
struct SharedOutside {
  FilePath library;  // its file's name; of kUnseen empty where any library may be meant
  OutsideKind kind{};
  std::uint64_t pieces = 0;
  Bytes bytes = 0;
  AMEM_EVENT(SharedOutside, "shared outside", library, As{"sharing", kind}, pieces, bytes);
};
struct PassedThrough {  // seen and not understood, or about memory that is not ours; no effect on state but a count
  PublicText name;
  FreeText detail;
  std::int32_t result = 0;
  AMEM_EVENT(PassedThrough, "passed through", name, detail, result);
};

// ---- pause and resume, and what was seen when one failed: event_cycle.h

// First event of a snapshot, which stands for all events up to `through`: the totals they had added up to (State::totals, as
// pairs of kind and count). The events of a snapshot have sequence number 0 and do not move State::last; this one sets it.
struct Condensed {
  SequenceNumber through;
  std::uint64_t next_allocation = 1;
  std::uint64_t cycles = 0;
  std::vector<std::uint64_t> totals;
  AMEM_EVENT(Condensed, "condensed", through, next_allocation, cycles, totals);
};

// ---- slabs
// A slab is an allocation of AMem's own, or of a peer's AMem, mapped once as a whole. NCCL's allocations are parts of it.

struct ByteRange {  // a part of a slab
  Bytes offset = 0;
  Bytes bytes = 0;
  AMEM_STRUCT(ByteRange, offset, bytes);
};
struct SlabOpened {  // `slab` was created, or imported, and mapped at `address` just before, to be cut into allocations
  AllocationId slab;
  Address address;
  std::vector<ByteRange> dirty;  // in a snapshot: free, and not cleared since somebody could write there
  AMEM_EVENT(SlabOpened, "slab opened", slab, address, Unlisted{dirty});
};
struct Placed {  // `allocation` has no memory of its own, but that part of a slab; also when it moves, while it is untouched
  AllocationId allocation;
  AllocationId slab;
  Bytes offset = 0;
  bool touched = false;  // in a snapshot: it was mapped, or a peer imported it
  AMEM_EVENT(Placed, "placed", allocation, slab, offset, Unlisted{touched});
};
struct Backed {  // `allocation` left its place in a slab, where nobody could reach it, for a driver handle of its own
  AllocationId allocation;
  DriverHandle handle;
  AMEM_EVENT(Backed, "backed", allocation, handle);
};
struct PartCleared {  // zeros were written to a part of a slab that nobody holds
  AllocationId slab;
  Bytes offset = 0;
  Bytes bytes = 0;
  AMEM_EVENT(PartCleared, "part cleared", slab, offset, bytes);
};

// ---- communicators
// Numbered by AMem, because an allocation may be made before NCCL has an address for its communicator.

struct CommunicatorBegun {  // NCCL was asked to make one
  CommunicatorId communicator;
  CommunicatorId parent;   // that it was split, shrunk or grown from; zero: none
  PublicText how;          // "init", "init all", "split", "shrink", "grow"
  std::int32_t rank = -1;  // as asked for; -1: not known yet
  std::int32_t ranks = 0;  // 0: not known yet
  AMEM_EVENT(CommunicatorBegun, "communicator begun", communicator, IfAny{parent}, how, rank, ranks);
};
struct CommunicatorReady {  // NCCL made it
  CommunicatorId communicator;
  std::uint64_t hash = 0;  // its name, the same in all its ranks (ncclpatch/nccl/names.h); 0: unknown
  std::int32_t rank = -1;
  std::int32_t ranks = 0;
  DeviceOrdinal device;
  AMEM_EVENT(CommunicatorReady, "communicator ready", communicator, Hexadecimal{hash}, rank, ranks, device);
};
struct CommunicatorEnded {
  CommunicatorId communicator;
  PublicText how;  // "destroyed", "aborted", "failed" (it was never made), "left out" (a split without a color)
  AMEM_EVENT(CommunicatorEnded, "communicator ended", communicator, how);
};
struct CommunicatorSuspended {  // ncclCommSuspend or ncclCommResume on it, which AMem serves
  CommunicatorId communicator;
  bool suspended = true;
  AMEM_EVENT(CommunicatorSuspended, "communicator suspended", communicator, suspended);
};

// ---- pools
// A pool holds memory of the program under a tag: "weights", "optimizer". It takes memory from the driver in chunks, each an
// allocation of its own that is mapped once as a whole, and amem_alloc's parts lie in them. A pool has pauses and resumes of
// its own; they concern no other session.

struct PoolOpened {
  PoolId pool;
  PublicText tag;  // of one pool in a session; never "nccl" or "user"
  PoolPolicy policy{};
  std::uint64_t cycles = 0;  // in a snapshot: its pauses so far
  AMEM_EVENT(PoolOpened, "pool opened", pool, As{"pool_tag", tag}, policy, Unlisted{cycles});
};
struct PoolAllocated {  // amem_alloc: a part of chunk `backing`, whose mapping begins at address - offset
  Address address;
  Bytes bytes = 0;
  DeviceOrdinal device;
  AllocationId backing;
  Bytes offset = 0;
  AMEM_EVENT(PoolAllocated, "pool allocated", address, bytes, device, backing, offset);
};
struct PoolFreed {  // amem_free, also while the pool is paused
  Address address;
  AMEM_EVENT(PoolFreed, "pool freed", address);
};

using EventVariant =
    std::variant<SessionOpened, SessionClosed, SessionBroken, GroupChanged, LibraryAttached, DriverSymbolBound, RangeReserved,
                 RangeFreed, AllocationCreated, AllocationRetained, AllocationReleased, Mapped, Unmapped, AccessSet, Exported,
                 Imported, ReferenceAdded, ReferenceDropped, PeerConnected, PeerLost, HostAllocated, HostFreed, LegacyAllocated,
                 LegacyFreed, LegacyExported, LegacyImported, LegacyClosed, AsyncAllocated, AsyncFreed, MulticastCreated,
                 MulticastDeviceAdded, MulticastBound, MulticastUnbound, Registered, Deregistered, PassedThrough, CycleBegun,
                 StepBegun, StepDone, StepFailed, PhaseBegun, PhaseDecided, CycleDone, CycleFailed, Condensed, SlabOpened,
                 Placed, Backed, PartCleared, CommunicatorBegun, CommunicatorReady, CommunicatorEnded, CommunicatorSuspended,
                 VoteCast, MemberHeard, ProcessSeen, ThreadSeen, LaunchRefused, PoolOpened, PoolAllocated, PoolFreed,
                 RequestSeen, SafepointReached, RequestEnded, Frozen, EverythingKept, FreezeStep, SharedOutside, RegionKept,
                 BallotShown>;

template <class T, class... Kinds>
inline constexpr bool kIsOneOf = (std::is_same_v<T, Kinds> || ...);
template <class T, class Variant>
inline constexpr bool kIsAlternative = false;
template <class T, class... Kinds>
inline constexpr bool kIsAlternative<T, std::variant<Kinds...>> = kIsOneOf<T, Kinds...>;

// One event's content. Making, copying, comparing and destroying are compiled once, in event.cpp: they are large for so many
// kinds.
struct EventBody : EventVariant {
  EventBody();
  template <class Kind>
  requires kIsAlternative<Kind, EventVariant> EventBody(Kind kind) : EventBody(None{}) {  // NOLINT(google-explicit-constructor)
    Become(std::move(kind));
  }
  EventBody(const EventBody&);
  EventBody(EventBody&&) noexcept;
  EventBody& operator=(const EventBody&);
  EventBody& operator=(EventBody&&) noexcept;
  ~EventBody();
  friend bool operator==(const EventBody&, const EventBody&);

 private:
  struct None {};
  explicit EventBody(None);  // holds a kind that costs nothing to make and to destroy
  template <class Kind>
  void Become(Kind&& kind);
};

struct Event {
  SequenceNumber seq;
  std::uint64_t time_ns = 0;  // CLOCK_MONOTONIC of the host
  std::uint32_t thread = 0;   // kernel thread id
  EventBody body;
  friend bool operator==(const Event&, const Event&) = default;
};

// Whose pause or resume an event belongs to: that pool's; zero for NCCL's, and for all events of other kinds.
PoolId PoolOfCycle(const EventBody& body);

inline constexpr std::size_t kEventKinds = std::variant_size_v<EventVariant>;

// "allocation created", the name of a kind as people and filters write it; `KindOf` is the inverse (nullopt: no such kind).
std::string_view KindName(std::size_t kind);
std::optional<std::size_t> KindOf(std::string_view name);
std::string ToText(const Step&);
std::string ToText(const Location&);
std::string ToText(AllocationId);    // "allocation 7"
std::string ToText(SessionId);       // "session 0x1f"
std::string ToText(CommunicatorId);  // "communicator 2"
std::string ToText(PoolId);          // "pool 2"
std::string ToText(RegionId);        // "registration 2"
std::string ToText(const CallSite&);
// One line without the sequence number, time and thread: "mapped: address 0x7f00, 2 MiB, allocation 3".
std::string ToText(const EventBody&);

// Amounts of memory. Exact, and so each in its own unit: "2 MiB", "8 280 MiB", "17 B".
std::string FormatBytes(Bytes);
// For messages that compare amounts: all that are not small in MiB, to a tenth: "31.5 MiB", "143 155.9 MiB". Below 1 MiB they
// are exact. What is there is rounded down; what is needed is rounded up, for then it is enough.
std::string RoundedBytes(Bytes);
std::string RoundedUpBytes(Bytes);

}  // namespace amem
