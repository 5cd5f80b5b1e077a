// For tests: folds events with running sequence numbers, and builds the usual states.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "statemachine/apply.h"
#include "statemachine/plan.h"

namespace amem::testing {

inline constexpr Bytes kMiB = Bytes{1} << 20;
inline constexpr Bytes k2M = 2 * kMiB;
inline constexpr Address kA{0x7f0000000000}, kB{0x7f0000400000}, kC{0x7f0000800000};
inline constexpr SessionId kPeer{0x99};

class Folding {
 public:
  Folding() {
    Ok(SessionOpened{SessionId{0x51}, "host", 1, "boot", "0", "13", "2.28.9", {}, 0, 0, 0, 0, "direct", "preserve"});
  }

  Status Try(EventBody body) { return Apply(state, Event{SequenceNumber{state.last.value + 1}, 0, 0, std::move(body)}); }
  void Ok(EventBody body) {
    const std::string text = ToText(body);
    const Status status = Try(std::move(body));
    ASSERT_TRUE(status.ok()) << text << ": " << status.message();
    const Status invariants = CheckInvariants(state);
    ASSERT_TRUE(invariants.ok()) << "after " << text << ": " << invariants.message();
    // A slab that is being given back is unmapped first.
    const bool slab_goes =
        std::ranges::any_of(state.slabs, [&](const auto& one) { return !state.mappings.contains(one.second.address); });
    if (state.lifecycle == Lifecycle::kClosed || slab_goes) return;
    const auto snapshot = ToSnapshotEvents(state);  // which folds them, and compares
    ASSERT_TRUE(snapshot.ok()) << "after " << text << ": " << snapshot.status().message();
  }
  // The event is refused, the message has `part`, and the state is as before.
  void Refused(EventBody body, const std::string& part) {
    const State before = state;
    const std::string text = ToText(body);
    const Status status = Try(std::move(body));
    EXPECT_EQ(status.code(), Code::kInvalid) << text;
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_EQ(before, state) << text;
  }

  // As NCCL does it: create, reserve, map, access.
  AllocationId Allocate(Address address, Bytes bytes = k2M, int device = 0, MemoryTag tag = MemoryTag::kNccl) {
    const AllocationId id{state.next_allocation};
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, device};
    Ok(AllocationCreated{id, bytes, properties, 0, {}, {}, {}, tag});
    Place(id, address, bytes, device);
    return id;
  }
  AllocationId Import(Address address, RemoteAllocation remote, Bytes bytes = k2M, MemoryTag tag = MemoryTag::kNccl) {
    const AllocationId id{state.next_allocation};
    AllocationProperties properties;
    properties.location = {LocationType::kDevice, 1};
    Ok(Imported{id, remote, bytes, properties, 1, {}, {}, {}, tag});
    Place(id, address, bytes, 0);
    return id;
  }
  void Place(AllocationId id, Address address, Bytes bytes, int device) {
    Ok(RangeReserved{address, bytes, k2M, {}, 0, {}});
    Ok(Mapped{address, bytes, 0, id, 0});
    Ok(AccessSet{address, bytes, {{{LocationType::kDevice, device}, 3}}});
  }
  // As NCCL does it: retain, release, unmap, release, address-free.
  void Free(AllocationId id, Address address, Bytes bytes = k2M) {
    Ok(AllocationRetained{id, address});
    Ok(AllocationReleased{id});
    Ok(Unmapped{address, bytes});
    Ok(AllocationReleased{id});
    Ok(RangeFreed{address, bytes});
  }
  PoolId Open(const std::string& tag, PoolPolicy policy = PoolPolicy::kPreserve) {
    const PoolId pool{static_cast<std::uint32_t>(state.pools.size() + 1)};
    Ok(PoolOpened{pool, tag, policy});
    return pool;
  }
  // As a pool takes memory from the driver.
  AllocationId AddChunk(PoolId pool, Address address, Bytes bytes = k2M, int device = 0) {
    const AllocationId id{state.next_allocation};
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, device};
    Ok(AllocationCreated{id, bytes, properties, 0, {}, {}, {}, MemoryTag::kUser, {}, pool});
    Ok(RangeReserved{address, bytes, k2M, {}, 0, {}, {}, pool});
    Ok(Mapped{address, bytes, 0, id, 0});
    Ok(AccessSet{address, bytes, {{{LocationType::kDevice, device}, 3}}});
    return id;
  }
  void DropChunk(AllocationId id, Address address, Bytes bytes = k2M) {
    Ok(Unmapped{address, bytes});
    Ok(AllocationReleased{id});
    Ok(RangeFreed{address, bytes});
  }
  void Run(const Plan& plan, PoolId pool = {}) {
    for (const PlannedPhase& phase : plan.phases) {
      Ok(PhaseBegun{phase.phase, pool});
      for (const Step& step : phase.steps) {
        Ok(StepBegun{step, pool});
        Ok(StepDone{step, pool});
      }
      if (!pool) Ok(PhaseDecided{phase.phase, true, {}, {}});
    }
  }
  [[nodiscard]] std::uint64_t CyclesOf(PoolId pool) const { return pool ? state.pools.at(pool).cycles : state.cycles; }
  void Pause(PoolId pool = {}) {
    const std::uint64_t cycle = CyclesOf(pool) + 1;
    Ok(CycleBegun{CycleKind::kPause, cycle, {}, {}, pool});
    Run(PlanPause(state, pool), pool);
    Ok(CycleDone{CycleKind::kPause, cycle, 1, pool});
  }
  void Resume(PoolId pool = {}) {
    const std::uint64_t cycle = CyclesOf(pool);
    Ok(CycleBegun{CycleKind::kResume, cycle, {}, {}, pool});
    Run(PlanResume(state, pool), pool);
    Ok(CycleDone{CycleKind::kResume, cycle, 1, pool});
  }

  State state;
};

// One of each: an own and an imported allocation, each mapped, and a slab with two parts, of which the first is mapped.
inline constexpr AllocationId kOwn{1}, kImported{2}, kSlab{3}, kPart{4}, kSecond{5}, kNobody{77};
inline constexpr Address kSlabAddress = kC;

inline AllocationProperties OnDevice(int device) {
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, device};
  return properties;
}

inline State Whole() {
  Folding f;
  f.Allocate(kA);
  f.Import(kB, {kPeer, AllocationId{5}});
  f.Allocate(kSlabAddress, 8 * kMiB);
  f.Ok(SlabOpened{kSlab, kSlabAddress, {}});
  for (const auto& [id, offset] : {std::pair{kPart, Bytes{0}}, {kSecond, 4 * kMiB}}) {
    f.Ok(AllocationCreated{id, k2M, OnDevice(0), 0, {}, {}, {}});
    f.Ok(Placed{id, kSlab, offset});
  }
  f.Ok(RangeReserved{kSlabAddress, k2M, 0, {}, 0, {}, kPart});
  f.Ok(Mapped{kSlabAddress, k2M, 0, kPart, 0});
  return f.state;
}

}  // namespace amem::testing
