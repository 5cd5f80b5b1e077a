// The inside of Apply: one overload an event, in the files that are named like the sections of event.h.
//
// Each overload checks first and changes afterwards, so that a refused event leaves the state as it was. AMEM_CHECK guards what
// the events before this one must have ensured. A refusal says why; what is refused is the event's own text, and only a refusal
// needs that: nearly all events fit, and a large job has millions.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "statemachine/check.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

class Fold {
 public:
  Fold(State& state, SequenceNumber seq) : s_(state), seq_(seq) {}

  // Life of a session: apply.cpp.
  Status operator()(const SessionOpened& e);
  Status operator()(const SessionClosed& e);
  Status operator()(const SessionBroken& e);
  Status operator()(const GroupChanged& e);
  Status operator()(const LibraryAttached& e);
  Status operator()(const Condensed& e);
  // Address ranges, allocations, mappings: apply_memory.cpp.
  Status operator()(const RangeReserved& e);
  Status operator()(const RangeFreed& e);
  Status operator()(const AllocationCreated& e);
  Status operator()(const AllocationRetained& e);
  Status operator()(const AllocationReleased& e);
  Status operator()(const Mapped& e);
  Status operator()(const Unmapped& e);
  Status operator()(const AccessSet& e);
  // Sharing: apply_sharing.cpp.
  Status operator()(const Exported& e);
  Status operator()(const Imported& e);
  Status operator()(const ReferenceAdded& e);
  Status operator()(const ReferenceDropped& e);
  Status operator()(const PeerConnected& e);
  Status operator()(const PeerLost& e);
  // Other kinds of memory: apply_other_memory.cpp, and apply_multicast.cpp.
  Status operator()(const HostAllocated& e);
  Status operator()(const HostFreed& e);
  Status operator()(const LegacyAllocated& e);
  Status operator()(const LegacyFreed& e);
  Status operator()(const LegacyExported& e);
  Status operator()(const LegacyImported& e);
  Status operator()(const LegacyClosed& e);
  Status operator()(const AsyncAllocated& e);
  Status operator()(const AsyncFreed& e);
  Status operator()(const MulticastCreated& e);
  Status operator()(const MulticastDeviceAdded& e);
  Status operator()(const MulticastBound& e);
  Status operator()(const MulticastUnbound& e);
  Status operator()(const Registered& e);
  Status operator()(const Deregistered& e);
  Status operator()(const RegionKept& e);
  Status operator()(const EverythingKept& e);
  Status operator()(const SharedOutside& e);
  // Pause and resume: apply_cycle.cpp.
  Status operator()(const CycleBegun& e);
  Status operator()(const StepBegun& e);
  Status operator()(const StepDone& e);
  Status operator()(const StepFailed& e);
  Status operator()(const PhaseBegun& e);
  Status operator()(const PhaseDecided& e);
  Status operator()(const CycleDone& e);
  Status operator()(const CycleFailed& e);
  // What was seen: nothing follows from it, and it is never refused, because it is about moments in which much is wrong. What
  // requests from outside do to memory is told by the events of pauses and resumes.
  using Seen = std::variant<DriverSymbolBound, PassedThrough, VoteCast, MemberHeard, ProcessSeen, ThreadSeen, BallotShown,
                            LaunchRefused, RequestSeen, SafepointReached, RequestEnded, Frozen>;
  template <class Kind>
  requires kIsAlternative<Kind, Seen> Status operator()(const Kind&) { return {}; }
  Status operator()(const FreezeStep& e) {
    s_.freeze = e;
    return {};
  }
  // Slabs: apply_slabs.cpp.
  Status operator()(const SlabOpened& e);
  Status operator()(const Placed& e);
  Status operator()(const Backed& e);
  Status operator()(const PartCleared& e);
  // Communicators: apply_sharing.cpp.
  Status operator()(const CommunicatorBegun& e);
  Status operator()(const CommunicatorReady& e);
  Status operator()(const CommunicatorEnded& e);
  Status operator()(const CommunicatorSuspended& e);
  // Pools: apply_other_memory.cpp.
  Status operator()(const PoolOpened& e);
  Status operator()(const PoolAllocated& e);
  Status operator()(const PoolFreed& e);

 private:
  [[nodiscard]] static Status Bad(std::string message) { return {Code::kInvalid, std::move(message)}; }
  // An export leaves nothing that lives, and a snapshot repeats each that is counted: no more are than tell few from many.
  static void Count(std::uint32_t& exports) {
    constexpr std::uint32_t kMany = 64;
    exports = std::min(exports + 1, kMany);
  }
  [[nodiscard]] Allocation* Find(AllocationId id) { return FindIn(s_.allocations, id); }
  [[nodiscard]] Result<Allocation*> Known(AllocationId id) {  // it is not null
    if (Allocation* const a = Find(id)) return a;
    return Bad(ToText(id) + " does not exist");
  }
  [[nodiscard]] Result<Communicator*> Living(CommunicatorId id);  // likewise
  // Memory was made for a communicator, or is gone; an unknown one counts nothing.
  void CountMemory(CommunicatorId id);
  Status UncountMemory(CommunicatorId id);
  // What is the same of memory that is created here and that is imported.
  [[nodiscard]] Allocation MadeBy(const auto& e) const {
    return {.bytes = e.bytes,
            .properties = e.properties,
            .site = e.site,
            .created = e.created ? e.created : seq_,
            .tag = e.tag,
            .pool = e.pool,
            .communicator = e.communicator};
  }
  Status Add(AllocationId id, Allocation a);
  Status EraseIfDead(AllocationId id);
  // The session is running, as it must be to get anything new. A chunk of a pool needs the pool to run, whatever NCCL does.
  [[nodiscard]] Status Running(PoolId pool = {}) const;

  // [address, address + bytes) is exactly a row of adjacent mappings, each of an allocation that counts it.
  [[nodiscard]] Status CoversWhole(Address address, Bytes bytes);
  // amem_alloc's parts in that mapping were all freed.
  [[nodiscard]] Status NoParts(Address address, const Mapping& mapping);
  // A multicast object: one that was created here, or imported from a peer, which this session learns by its use.
  Multicast* FindMulticast(AllocationId id);
  // The memory that a binding refers to, and the slab that it is a part of; null where there is none of AMem's.
  struct BoundMemory {
    Allocation *part = nullptr, *slab = nullptr;
  };
  [[nodiscard]] Status FindMemory(AllocationId id, BoundMemory& memory);
  Status CountUnbound(AllocationId memory, bool released);
  Status EraseMulticast(AllocationId id);
  // A peer has let go of one of its imports of `id`, or was lost.
  void LeaveMulticast(AllocationId id, const Allocation& a, SessionId peer);

  // Whose pauses and resumes an event is about: NCCL's, or a pool's. Null: there is no such pool.
  struct Owner {
    PoolId pool;
    Scope* scope = nullptr;
    Scope* operator->() const { return scope; }
  };
  [[nodiscard]] Owner OwnerOf(PoolId pool) const { return {pool, pool ? FindIn(s_.pools, pool) : static_cast<Scope*>(&s_)}; }
  [[nodiscard]] std::string LifecycleText(const Owner& owner) const;  // "the session is running"
  [[nodiscard]] Result<Owner> InCycle(PoolId pool) const;
  // Whether this session has come to a cycle that has not begun, because others have not come yet.
  [[nodiscard]] bool Waits(PhaseKind phase, const Owner& owner) const;
  Status EndStep(const Step& step, PoolId pool, const std::string* failure);  // done unless there is a failure
  Status DoStep(const Step& step, PoolId pool);
  Status DoMappingStep(const Step& step, PoolId pool);
  Status DoAllocationStep(const Step& step, PoolId pool);
  [[nodiscard]] static Status OfPool(const Allocation& a, PoolId pool);
  Status DoRelease(const Step& step, Allocation& a);
  Status DoMulticastStep(const Step& step);
  Status DoRegionStep(const Step& step);
  // Whether the driver has that memory, or memory of that multicast object, bound at this moment.
  [[nodiscard]] bool IsBound(AllocationId id) const;
  [[nodiscard]] Status AllBound(bool bound) const;
  // All memory is gone, or back, and is so from here on.
  Status End(const Owner& owner, bool paused);
  [[nodiscard]] Status AllGone(PoolId pool) const;
  [[nodiscard]] Status AllBack(PoolId pool) const;
  void ForgetSaved(PoolId pool);
  void ForgetSavedOfKept(PoolId pool);
  // The memory under a region is about to lose that mapping: what a card still holds then pins what is left of the allocation.
  Status LoseRegions(Address address, const Mapping& mapping);
  Status AddRegion(const Registered& e);
  void ForgetKeptRegions();

  // The allocation is a part of a slab, and lies at `address`.
  [[nodiscard]] Result<Allocation*> AtItsPlace(AllocationId id, Address address, Bytes bytes) const;
  [[nodiscard]] Status IsFree(const Slab& slab, Bytes offset, Bytes bytes);
  // Takes an allocation out of its slab, if it is in one. What it may have written there is dirty from then on.
  Status RemoveFromSlab(AllocationId id, Allocation& a);
  // New memory of a slab may hold anything where no part is.
  Status MarkGapsDirty(AllocationId id, const Allocation& whole);

  State& s_;
  SequenceNumber seq_;
};

}  // namespace amem
