// State: everything AMem knows about one session, as the fold of its events.
//
// A plain value; copyable, comparable. `Apply` (apply.h) is its only writer. Containers are ordered, so that two machines that
// fold the same events walk the same state in the same order and compute the same digest.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "statemachine/event.h"

namespace amem {

struct Range {  // a reserved address range
  Bytes bytes = 0;
  Bytes alignment = 0;
  Address hint;
  std::uint64_t flags = 0;
  AMEM_STRUCT(Range, bytes, alignment, hint, flags);
};

struct Mapping {  // memory under an address; `present` false while paused
  Bytes bytes = 0;
  Bytes offset = 0;
  AllocationId allocation;
  std::uint64_t flags = 0;
  std::vector<AccessDescriptor> access;  // by location, last setting wins
  bool present = true;
  bool accessible = true;  // the driver has `access` in force; false between kMap and kSetAccess of a resume
  AMEM_STRUCT(Mapping, bytes, offset, allocation, flags, access, present, accessible);
};

struct Importer {  // a peer's hold on an allocation of ours
  SessionId by;
  AllocationId as;
  friend auto operator<=>(const Importer&, const Importer&) = default;
};

struct Allocation {
  Bytes bytes = 0;
  AllocationProperties properties;
  std::uint64_t flags = 0;
  CallSite site;
  SequenceNumber created;
  std::optional<RemoteAllocation> remote;  // set: imported from there
  MemoryTag tag{};
  PoolId pool;                         // a chunk of that pool, whose pauses take it; zero: those of NCCL do
  CommunicatorId communicator;         // that NCCL made it for; zero: none, or unknown
  bool multicast = false;              // an own multicast object, or an imported one that a pause releases
  std::uint32_t guest_references = 0;  // NCCL's: create, import and retain, less release
  std::uint32_t mappings = 0;
  std::uint32_t exports = 0;    // tokens made
  std::uint32_t pinned = 0;     // network cards and libraries that hold its pages
  std::uint32_t held = 0;       // of those, other libraries than NCCL
  std::uint32_t renewable = 0;  // registrations that a pause undoes and a resume does again (State::regions)
  std::uint32_t multicast_bindings = 0;
  std::uint32_t released_bindings = 0;  // of those, to multicast objects that a pause releases
  std::map<Importer, std::uint32_t> importers;
  // Not zero: no memory of its own, but `bytes` at `offset` of that slab. What follows up to `touched` is only used then.
  AllocationId slab;
  Bytes offset = 0;
  std::uint32_t reserved = 0;     // address ranges that NCCL holds at its place
  bool touched = false;           // NCCL mapped it, or a peer imported it: its bytes may be anything
  bool resident = true;           // a driver handle stands behind it now; always true for a part of a slab
  bool saved = false;             // its contents are in the backup; until the cycle ends
  bool handed_out = false;        // exported as the driver's own handle
  std::string handed_to;          // to that library; empty: by NCCL
  bool kept_with_all = false;     // State::kept_whole has a reason
  bool awaiting_restore = false;  // resident in new memory that does not have the saved contents yet
  friend bool operator==(const Allocation&, const Allocation&) = default;

  [[nodiscard]] bool own() const { return !remote.has_value(); }
  [[nodiscard]] bool on_device() const { return properties.location.type == LocationType::kDevice; }
  // A multicast object, own or imported, that a pause releases.
  [[nodiscard]] bool rebuilt() const { return multicast && tag == MemoryTag::kMulticastReleased; }
  [[nodiscard]] bool placed() const { return static_cast<bool>(slab); }
  // May still leave its place: nothing knows its address, and nothing was written.
  [[nodiscard]] bool untouched() const {
    return !touched && reserved == 0 && mappings == 0 && exports == 0 && multicast_bindings == 0;
  }
  // Nobody holds it any more; Apply removes it at once.
  [[nodiscard]] bool dead() const { return guest_references == 0 && mappings == 0 && importers.empty() && reserved == 0; }
};

// What an allocation that is a slab is cut into. An own slab's parts do not overlap; of an imported one, several parts may be
// the same memory, imported more than once.
struct Slab {
  Address address;
  std::map<Bytes, std::vector<AllocationId>> parts;  // by offset
  std::map<Bytes, Bytes> dirty;                      // offset and bytes of what is free, and may not be zero
  friend bool operator==(const Slab&, const Slab&) = default;
};

// Why a pause leaves an allocation where it is; kNone: it is released. The pause is that of its pool if it is a chunk of one,
// own or imported, and NCCL's otherwise. kHandedOut: whoever has the driver's own handle (fabric) maps these very pages.
// kUnseen: State::kept_whole says who may hold its pages. kHeld: another library than NCCL has retained, exported, registered
// or bound it (LibrariesHolding).
enum class KeepReason : std::uint8_t { kNone = 0, kHostMemory, kRegistered, kMulticast, kUser, kUnseen, kHandedOut, kHeld };
AMEM_NAMES(KeepReason, kHeld, "reason", "released", "host memory", "registered with a network card", "multicast",
           "the program's own (ncclMemAlloc)", "held past AMem's sight", "shared by a fabric handle",
           "held by another library");
KeepReason WhyKept(const Allocation&);

struct Registration {
  Bytes bytes = 0;
  std::string how;
  std::uint32_t count = 0;
  std::vector<AllocationId> allocations;  // whose pages it holds
  std::string pins, card;                 // as in Registered, of the first
  AMEM_STRUCT(Registration, bytes, how, count, Unlisted{allocations}, IfAny{pins}, IfAny{card});
};
// A registration with a network card that a pause undoes and a resume does again. Its keys change, and are no state.
struct Region {
  Address address;
  Bytes bytes = 0;
  std::string how;
  AllocationId allocation;  // own, on a device, in no pool, and mapped over all of the region
  std::string card;
  std::uint64_t domain = 0;
  std::uint32_t access = 0;
  std::uint64_t flags = 0;
  bool present = true;  // the card has it now
  std::string kept;  // why this pause leaves it, so that it counts as pinned until the session runs again; empty: it does not
  AMEM_STRUCT(Region, address, bytes, how, allocation, card, domain, access, flags, present, IfAny{kept});
};
// What another library shares past AMem (SharedOutside).
struct OutsideShare {
  std::uint64_t pieces = 0;
  Bytes bytes = 0;
  AMEM_STRUCT(OutsideShare, pieces, bytes);
};
struct MulticastBinding {
  AllocationId allocation;
  Address address;
  Bytes allocation_offset = 0;
  Bytes bytes = 0;
  DeviceOrdinal device{-1};  // whose memory it is; -1: not known, so that it cannot be unbound
  bool bound = true;         // false while paused
  AMEM_STRUCT(MulticastBinding, allocation, address, allocation_offset, bytes, device, bound);
};
struct Multicast {
  std::uint32_t devices = 0;
  std::vector<DeviceOrdinal> added;
  std::multimap<Bytes, MulticastBinding> bindings;  // by offset in the multicast object; at one, as they were bound
  std::vector<DeviceOrdinal> missing;               // of those added, which the driver's object of today has not yet
  // Of an own object: a session that had imported it has let go of all of it, or was lost. Its devices can never be added to a
  // new object, which would accept no memory, so that once released the object is replaced by ordinary memory.
  bool incomplete = false;
  bool fresh = false;  // an own object, made anew in the pause or resume that is under way
  friend bool operator==(const Multicast&, const Multicast&) = default;
};
struct Peer {
  std::string host;
  std::int32_t pid = 0;
  std::int64_t group = 0;
  std::int32_t rank = -1;
  bool connected = true;
  std::string lost_reason;
  AMEM_STRUCT(Peer, host, pid, group, rank, connected, lost_reason);
};

// A communicator that has ended is remembered for as long as memory is left that was made for it.
struct Communicator {
  CommunicatorId parent;
  std::string how;
  std::uint64_t hash = 0;  // 0: unknown
  std::int32_t rank = -1;
  std::int32_t ranks = 0;
  DeviceOrdinal device;
  bool ready = false;
  bool suspended = false;
  std::string ended;         // how; empty: it lives
  std::uint64_t memory = 0;  // allocations made for it that exist
  AMEM_STRUCT(Communicator, IfAny{parent}, how, Hexadecimal{hash}, rank, ranks, device, ready, suspended, ended,
              Unlisted{memory});
};

enum class Lifecycle : std::uint8_t { kNew = 0, kRunning, kPausing, kPaused, kResuming, kClosed };
AMEM_NAMES(Lifecycle, kClosed, "lifecycle", "new", "running", "pausing", "paused", "resuming", "closed");

// Where a pause or resume stands; meaningful while pausing or resuming, and after a failure until the next begins.
struct Cycle {
  CycleKind kind{};
  std::uint64_t number = 0;
  std::vector<SessionId> members;
  std::optional<PhaseKind> phase;
  std::optional<Step> open_step;   // begun and neither done nor failed: where a crash happened
  std::string failure;             // of the last failed cycle, empty otherwise
  bool after_failed_undo = false;  // begun neither running nor paused
  AMEM_STRUCT(Cycle, kind, number, members, phase, open_step, failure, Unlisted{after_failed_undo});
};

// What pauses and resumes as a whole: NCCL's memory, or a pool's.
struct Scope {
  Lifecycle lifecycle =
      Lifecycle::kRunning;  // of a pool: running, pausing, paused or resuming; not touched by the end of the session
  Cycle cycle;
  std::uint64_t cycles = 0;  // pauses begun
  friend bool operator==(const Scope&, const Scope&) = default;
};

// Memory of the program under a tag, with pauses and resumes of its own. Its chunks are the allocations that name it.
struct Pool : Scope {
  std::string tag;
  PoolPolicy policy{};
  bool keeps = false;                      // in this pause contents are saved, whatever the policy
  std::map<Address, PoolAllocated> parts;  // what amem_alloc gave out of the chunks
  [[nodiscard]] bool Preserves() const { return policy == PoolPolicy::kPreserve || keeps; }
  friend bool operator==(const Pool&, const Pool&) = default;
};

struct Totals {
  std::array<std::uint64_t, kEventKinds> events{};  // by kind (index in EventBody)
  friend bool operator==(const Totals&, const Totals&) = default;
};

struct State : Scope {  // NCCL's
  State();
  State(const State&);
  State(State&&) noexcept;
  State& operator=(const State&);
  State& operator=(State&&) noexcept;
  ~State();

  SequenceNumber last;  // of the last event applied
  SessionOpened session;
  std::string broken;      // why, once latched
  std::string kept_whole;  // why pauses leave all memory in place, once latched
  std::vector<LibraryAttached> libraries;
  std::map<Address, Range> ranges;
  std::map<AllocationId, Allocation> allocations;
  std::map<Address, Mapping> mappings;  // the driver's: of a slab one, of its parts none
  std::map<AllocationId, Slab> slabs;   // each is an allocation, too
  std::map<Address, LegacyAllocated> legacy;
  std::map<Address, LegacyImported> legacy_imports;
  std::map<Address, HostAllocated> host;
  std::map<Address, AsyncAllocated> async;
  std::map<AllocationId, Multicast> multicasts;
  std::map<std::pair<Address, std::string>, Registration> registrations;  // that pin; by library, too; empty: NCCL's
  std::map<RegionId, Region> regions;
  std::map<std::pair<std::string, OutsideKind>, OutsideShare> outside;  // by library and kind
  std::map<SessionId, Peer> peers;
  std::map<CommunicatorId, Communicator> communicators;
  std::uint64_t next_allocation = 1;  // the id that the next create or import must use
  std::map<PoolId, Pool> pools;
  std::optional<FreezeStep> freeze;  // the last step of the last one
  Totals totals;
  friend bool operator==(const State&, const State&);

  // An import whose owner was lost. Its memory cannot come back from there after a pause: a resume puts memory of its own in
  // its place, all zero, so that nothing that still touches its addresses faults, and everything can be freed in order.
  [[nodiscard]] bool Orphaned(const Allocation&) const;
  // Whether ordinary memory, all zero, takes the place of allocation `id` when a resume makes it again: it is an orphan, or an
  // own multicast object that can never be complete again.
  [[nodiscard]] bool IsSubstitute(AllocationId id, const Allocation&) const;
  // The mapping, range or cuMemAlloc memory that contains an address, end() if none.
  [[nodiscard]] auto MappingAt(Address address) const { return Containing(mappings, address); }
  [[nodiscard]] auto RangeAt(Address address) const { return Containing(ranges, address); }
  [[nodiscard]] auto LegacyAt(Address address) const { return Containing(legacy, address); }
  // The slab whose mapping contains an address, and the part there (of several the first); zero if none.
  [[nodiscard]] AllocationId SlabAt(Address) const;
  [[nodiscard]] AllocationId PartAt(Address) const;
  // Where a part of a slab lies; zero for any other allocation.
  [[nodiscard]] Address PlaceOf(const Allocation&) const;
  // The pool with a tag; zero if there is none.
  [[nodiscard]] PoolId PoolNamed(std::string_view tag) const;
  // The pools whose chunks are mapped somewhere in [address, address + bytes).
  [[nodiscard]] std::set<PoolId> PoolsIn(Address address, Bytes bytes) const;
  // Whether a pool has memory that this session made. Its policy is what becomes of that memory's contents.
  [[nodiscard]] bool HasOwnMemory(PoolId pool) const;
  // How the memory of a pool stands, or NCCL's for zero. A pool that does not exist runs.
  [[nodiscard]] Lifecycle LifecycleOf(PoolId pool) const;
  [[nodiscard]] const Scope& ScopeOf(PoolId pool) const;  // of a pool that does not exist, NCCL's
  // Whether a step on that allocation has begun, and is neither done nor failed: the driver may be ahead of this state.
  [[nodiscard]] bool StepUnderWay(AllocationId id, const Allocation&) const;
  // Whether a pause saves the contents of an allocation that it releases.
  [[nodiscard]] bool Preserves(const Allocation&) const;
};

// The first free place for `bytes` in an own slab, at a multiple of `alignment`, beside what is `kept` free (bytes by offset).
std::optional<Bytes> FindRoom(const State&, AllocationId slab, Bytes bytes, Bytes alignment,
                              const std::multimap<Bytes, Bytes>& kept = {});
// What of [offset, offset + bytes) must be cleared before it is used.
std::vector<ByteRange> DirtyWithin(const Slab&, Bytes offset, Bytes bytes);

// Sums over a state, for statistics and reports; bytes. Chunks of pools are in none of them but the last.
struct Holdings {
  Bytes own_device = 0;           // own device allocations, as NCCL asked for them
  Bytes own_device_resident = 0;  // what they occupy now: slabs whole
  Bytes user = 0;                 // of own_device, the program's (ncclMemAlloc)
  Bytes user_resident = 0;        // of own_device_resident, likewise
  Bytes imported = 0;             // peers' memory mapped here, as NCCL imported it
  Bytes slabs = 0;                // own slabs, whole
  Bytes slabs_free = 0;           // of those, in no allocation
  Bytes host = 0;                 // pinned host memory of NCCL
  Bytes async = 0;
  Bytes legacy_kept = 0;             // cuMemAlloc memory that is the driver's own
  Bytes legacy_user = 0;             // of that, the program's (ncclMemAlloc with NCCL_CUMEM_ENABLE=0)
  std::map<KeepReason, Bytes> kept;  // own device memory a pause leaves in place, by reason
  std::uint64_t own_count = 0, imported_count = 0, slab_count = 0, imported_slab_count = 0;
  Bytes pools = 0;           // chunks of all pools
  Bytes pools_resident = 0;  // of that, on the device now
};
Holdings Measure(const State&);

// What one pool holds; bytes.
struct PoolHoldings {
  Bytes own = 0;                         // its chunks
  Bytes own_resident = 0;                // of that, on the device now
  Bytes parts = 0;                       // what amem_alloc gave out of them and amem_free did not take back
  std::map<KeepReason, Bytes> kept;      // of own, what a pause leaves in place, by reason
  std::map<std::string, Bytes> held_by;  // of own, what other libraries hold, by their names
  std::uint64_t chunk_count = 0, part_count = 0;
  std::set<DeviceOrdinal> devices;  // that have chunks
  friend bool operator==(const PoolHoldings&, const PoolHoldings&) = default;
};
// The libraries for which a pause leaves that allocation in place (KeepReason::kHeld).
std::set<std::string> LibrariesHolding(const State&, AllocationId id);
// By pool; every open one is there, also when it holds nothing.
std::map<PoolId, PoolHoldings> MeasurePools(const State&);
// The same for NCCL's own device memory, or what the program got from ncclMemAlloc: its allocations are the parts.
PoolHoldings MeasureTag(const State&, bool program);

// What a pause of a pool, or of NCCL's memory (zero), would save now; bytes. Most of what NCCL makes for itself is zero, and
// hardly anything of what a program does.
struct Savable {
  Bytes nccl = 0, program = 0;
  friend bool operator==(const Savable&, const Savable&) = default;
};
Savable MeasureSavable(const State&, PoolId scope);

// What was made for one communicator; bytes, as NCCL asked for them.
struct CommunicatorHoldings {
  Bytes own = 0;          // own device memory, with cuMemAlloc's
  Bytes own_present = 0;  // of that, what is on the device now
  Bytes own_kept = 0;     // of that, what a pause leaves in place
  Bytes imported = 0;     // peers' memory mapped here
  std::uint64_t own_count = 0, imported_count = 0;
  friend bool operator==(const CommunicatorHoldings&, const CommunicatorHoldings&) = default;
};
// By communicator; under zero, NCCL's memory of which the communicator is not known. Memory of the program (ncclMemAlloc, and
// pools) belongs to no communicator and is left out. The sums are those of Measure, less the program's.
std::map<CommunicatorId, CommunicatorHoldings> MeasureCommunicators(const State&);

// What network cards hold of NCCL's, in bytes as it was registered.
struct CardHoldings {
  struct Regions {
    std::uint64_t count = 0;
    Bytes bytes = 0;
    void Add(Bytes more) { ++count, bytes += more; }
    friend bool operator==(const Regions&, const Regions&) = default;
  };
  Regions renewable;                      // what a pause gives up
  Bytes renewable_now = 0;                // of that, what the card holds now: nothing in a pause
  Regions pinned;                         // what stays
  std::map<std::string, Regions> by_why;  // of pinned; without AMEM_NETWORK=renew by how it was registered
  friend bool operator==(const CardHoldings&, const CardHoldings&) = default;
};
// By the card's or the plugin's name; empty: it is not known, as without AMEM_NETWORK=renew.
std::map<std::string, CardHoldings> MeasureCards(const State&);

}  // namespace amem
