// Every invariant is violated by hand, one at a time: a state that is right is changed in one place, and CheckInvariants must
// name what is wrong with it.
#include <functional>

#include "folding.h"

namespace amem::testing {
namespace {

State Paused() {
  Folding f;
  f.state = Whole();
  f.Pause();
  return f.state;
}

struct Violation {
  const char* text;  // after "invariant: "
  std::function<void(State&)> violate;
};

Allocation& Of(State& s, AllocationId id) { return s.allocations.at(id); }
Mapping& At(State& s, Address address) { return s.mappings.at(address); }

// In the order of invariants.cpp.
const std::vector<Violation>& Running() {
  static const std::vector<Violation> all = {
      {"ranges overlap at 0x7f0000400000", [](State& s) { s.ranges.at(kA).bytes = 6 * kMiB; }},
      {"mappings overlap at 0x7f0000400000",
       [](State& s) {
         s.ranges.erase(kB);
         s.ranges.at(kA).bytes = 8 * kMiB;
         Of(s, kOwn).bytes = At(s, kA).bytes = 6 * kMiB;
       }},
      {"mapping 0x7f0000000000 lies outside any reserved range", [](State& s) { s.ranges.erase(kA); }},
      {"mapping 0x7f0000000000 lies outside any reserved range", [](State& s) { s.ranges.at(kA).bytes = kMiB; }},
      {"mapping 0x7f0000000000 is of allocation 77, which does not exist",
       [](State& s) { At(s, kA).allocation = AllocationId{77}; }},
      {"mapping 0x7f0000000000 is larger than allocation 1", [](State& s) { At(s, kA).offset = kMiB; }},
      {"mapping 0x7f0000000000 is present and allocation 1 has no memory", [](State& s) { Of(s, kOwn).resident = false; }},
      {"mapping 0x7f0000000000 is accessible and not present", [](State& s) { At(s, kA).present = false; }},
      {"allocation 5 has an id that was never given out", [](State& s) { s.next_allocation = 5; }},
      {"allocation 0 has an id that was never given out", [](State& s) { s.allocations.emplace(AllocationId{}, Of(s, kOwn)); }},
      {"allocation 5 is held by nobody", [](State& s) { Of(s, kSecond).guest_references = 0; }},
      {"allocation 1 counts 2 mappings, and has another number", [](State& s) { Of(s, kOwn).mappings = 2; }},
      {"allocation 2 is imported, and has importers",
       [](State& s) {
         Of(s, kImported).importers[Importer{kPeer, kOwn}] = 1;
       }},
      {"allocation 2 is imported, and its contents are saved", [](State& s) { Of(s, kImported).saved = true; }},
      {"allocation 1 waits for contents that are not saved", [](State& s) { Of(s, kOwn).awaiting_restore = true; }},
      {"allocation 1 has neither memory nor saved contents",
       [](State& s) {
         Of(s, kOwn).resident = false;
         At(s, kA).present = At(s, kA).accessible = false;
       }},
      {"slab 77 is no allocation", [](State& s) { s.slabs[AllocationId{77}].address = kA; }},
      {"slab 3 is not mapped at 0x7f0000000000", [](State& s) { s.slabs.at(kSlab).address = kA; }},
      {"slab 3 is not mapped at 0x7f0000900000", [](State& s) { s.slabs.at(kSlab).address = kSlabAddress + kMiB; }},
      {"slab 3 has an empty part", [](State& s) { s.slabs.at(kSlab).parts[kMiB * 7]; }},
      {"parts of slab 3 overlap",
       [](State& s) {
         s.slabs.at(kSlab).parts[kMiB] = std::exchange(s.slabs.at(kSlab).parts.at(4 * kMiB), {});
         s.slabs.at(kSlab).parts.erase(4 * kMiB);
         Of(s, kSecond).offset = kMiB;
       }},
      {"parts of slab 3 overlap", [](State& s) { s.slabs.at(kSlab).parts.at(0).push_back(kPart); }},
      {"slab 3 lists allocation 77, which is not there",
       [](State& s) { s.slabs.at(kSlab).parts.at(0).front() = AllocationId{77}; }},
      {"slab 3 lists allocation 4, which is not there", [](State& s) { Of(s, kPart).offset = kMiB; }},
      {"slab 3 lists allocation 1, which is not there", [](State& s) { s.slabs.at(kSlab).parts.at(0).front() = kOwn; }},
      {"allocation 4 and its slab are not the same session's",
       [](State& s) {
         Of(s, kPart).remote = RemoteAllocation{kPeer, kOwn};
       }},
      {"allocation 5 ends outside its slab", [](State& s) { Of(s, kSecond).bytes = 5 * kMiB; }},
      {"allocation 4 lies where nothing was cleared", [](State& s) { s.slabs.at(kSlab).dirty[kMiB] = 4096; }},
      {"allocation 4 is part of a slab, and has memory of its own", [](State& s) { Of(s, kPart).saved = true; }},
      {"allocation 4 is mapped in a range that is not reserved", [](State& s) { Of(s, kPart).reserved = 0; }},
      {"the slabs list 1 parts of 2", [](State& s) { s.slabs.at(kSlab).parts.erase(4 * kMiB); }},
      {"communicator 1 counts 1 allocations, and has another number",
       [](State& s) {
         Communicator& counted = s.communicators[CommunicatorId{1}];
         counted.memory = 1;
       }},
      {"communicator 1 has ended, and has no memory left",
       [](State& s) { s.communicators[CommunicatorId{1}].ended = "destroyed"; }},
      {"a step is open and the session is running", [](State& s) { s.cycle.open_step = Step{}; }},
      {"allocation 1 has no memory and the session is running",
       [](State& s) {
         Of(s, kOwn).resident = false;
         Of(s, kOwn).saved = true;
         At(s, kA).present = At(s, kA).accessible = false;
       }},
      {"allocation 1 has no memory and the session is running",
       [](State& s) { Of(s, kOwn).saved = Of(s, kOwn).awaiting_restore = true; }},
      {"mapping 0x7f0000000000 is absent and the session is running",
       [](State& s) { At(s, kA).present = At(s, kA).accessible = false; }},
  };
  return all;
}

const std::vector<Violation>& WhilePaused() {
  static const std::vector<Violation> all = {
      {"a step is open and the session is paused", [](State& s) { s.cycle.open_step = Step{}; }},
      {"allocation 1 has memory and the session is paused", [](State& s) { Of(s, kOwn).resident = true; }},
  };
  return all;
}

void ExpectEachNamed(const State& sound, const std::vector<Violation>& violations) {
  ASSERT_TRUE(CheckInvariants(sound).ok()) << CheckInvariants(sound).message();
  for (const Violation& violation : violations) {
    State broken = sound;
    violation.violate(broken);
    const Status status = CheckInvariants(broken);
    EXPECT_EQ(status.code(), Code::kInvalid) << violation.text;
    EXPECT_EQ(status.message(), std::string("invariant: ") + violation.text);
  }
}

TEST(Invariants, each_is_named_when_a_running_session_violates_it) { ExpectEachNamed(Whole(), Running()); }
TEST(Invariants, each_is_named_when_a_paused_session_violates_it) { ExpectEachNamed(Paused(), WhilePaused()); }

TEST(Invariants, memory_that_stays_by_right_is_no_violation_of_a_pause) {
  State state = Paused();
  Of(state, kOwn).resident = true;
  EXPECT_FALSE(CheckInvariants(state).ok());
  Of(state, kOwn).pinned = 1;
  EXPECT_TRUE(CheckInvariants(state).ok()) << CheckInvariants(state).message();
}

// ---- what Apply and the rest meet in a state that was damaged before: a checked failure, with the values -----------------

struct Damage {
  const char* text;  // of the check, with its operands
  std::function<void(State&)> damage;
  EventBody next;
};

TEST(Checks, a_damaged_state_is_told_with_values_by_the_next_event_that_meets_the_damage) {
  const std::vector<Damage> all = {
      {"a != nullptr (null != null), at, mapping.allocation = 0x7f0000000000, 1", [](State& s) { s.allocations.erase(kOwn); },
       Unmapped{kA, k2M, {}}},
      {"a->mappings > 0U (0 > 0), at, mapping.allocation = 0x7f0000000000, 1", [](State& s) { Of(s, kOwn).mappings = 0; },
       Unmapped{kA, k2M, {}}},
      {"Find(mapping.allocation) != nullptr (null != null), address, mapping.allocation = 0x7f0000000000, 1",
       [](State& s) { s.allocations.erase(kOwn); }, Registered{kA, k2M, "dma-buf"}},
      {"whole != nullptr (null != null), e.slab, e.address = 1, 0x7f0000000000", [](State& s) { s.allocations.erase(kOwn); },
       SlabOpened{kOwn, kA, {}}},
      {"whole != nullptr (null != null), e.slab = 3", [](State& s) { s.allocations.erase(kSlab); },
       Placed{kSecond, kSlab, kMiB}},
      {"slab != nullptr (null != null), id, a.slab = 5, 3", [](State& s) { s.slabs.erase(kSlab); },
       Backed{kSecond, DriverHandle{1}}},
      {"at != slab->parts.end() (... != ...), id, a.slab, a.offset = 5, 3, 4194304",
       [](State& s) { s.slabs.at(kSlab).parts.erase(4 * kMiB); }, AllocationReleased{kSecond}},
      {"s_.slabs.contains(a->slab) (false), id, a->slab = 5, 3", [](State& s) { s.slabs.erase(kSlab); },
       RangeReserved{kSlabAddress + 4 * kMiB, k2M, 0, {}, 0, {}, kSecond}},
      {"mapping != nullptr (null != null), e.allocation = 4", [](State& s) { s.mappings.erase(kSlabAddress); },
       AccessSet{kSlabAddress, k2M, {{{LocationType::kDevice, 0}, 3}}, kPart}},
      {"part != nullptr (null != null), before, next->first = 77, 0",
       [](State& s) { s.slabs.at(kSlab).parts.at(0).front() = AllocationId{77}; }, Placed{kSecond, kSlab, kMiB}},
      {"whole != nullptr (null != null), id, memory.part->slab = 4, 77", [](State& s) { Of(s, kPart).slab = AllocationId{77}; },
       MulticastBound{AllocationId{9}, 0, kPart, 0, k2M, {}}},
      {"whole != nullptr (null != null), id, memory.part->slab = 4, 77", [](State& s) { Of(s, kPart).slab = AllocationId{77}; },
       MulticastUnbound{AllocationId{9}, DeviceOrdinal{0}, kMiB, k2M}},
  };
  Folding f;
  f.state = Whole();
  f.Ok(MulticastCreated{AllocationId{9}, k2M, 1, 1, 0, {}});
  f.Ok(MulticastBound{AllocationId{9}, kMiB, kPart, 0, kMiB, {}});
  for (const Damage& each : all) {
    State state = f.state;
    each.damage(state);
    const Status status = Apply(state, Event{SequenceNumber{state.last.value + 1}, 0, 0, each.next});
    EXPECT_EQ(status.code(), Code::kInvalid) << each.text;
    EXPECT_NE(status.message().find(std::string(": ") + each.text + "; this is a defect"), std::string::npos)
        << status.message() << "\nexpected " << each.text;
    EXPECT_EQ(status.message().find(ToText(each.next) + ": check failed at apply_"), 0U) << status.message();
  }
}

TEST(Checks, a_step_that_meets_a_damaged_state_is_told) {
  Folding f;
  f.state = Paused();
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  f.Ok(StepBegun{{StepKind::kCreate, kSlab, {}, 8 * kMiB, {}}});
  State damaged = f.state;
  damaged.slabs.at(kSlab).parts.at(0).front() = AllocationId{77};
  const Step create = *f.state.cycle.open_step;
  const Status lost = Apply(damaged, Event{SequenceNumber{damaged.last.value + 1}, 0, 0, StepDone{create}});
  EXPECT_NE(lost.message().find("part != nullptr (null != null), id, offset, parts.front() = 3, 0, 77"), std::string::npos)
      << lost.message();
  EXPECT_FALSE(damaged.allocations.at(kSlab).resident);
  f.Ok(StepDone{create});
  f.Ok(StepBegun{{StepKind::kMap, kSlab, kSlabAddress, 8 * kMiB, {}}});
  damaged = f.state;
  damaged.allocations.erase(kSlab);
  const Status gone = Apply(damaged, Event{SequenceNumber{damaged.last.value + 1}, 0, 0, StepDone{*damaged.cycle.open_step}});
  EXPECT_NE(gone.message().find("step.address, m->allocation = 0x7f0000800000, 3"), std::string::npos) << gone.message();
}

TEST(Checks, a_snapshot_of_a_damaged_state_is_refused_and_questions_about_it_have_careful_answers) {
  State state = Whole();
  state.slabs.at(kSlab).parts.at(0).front() = AllocationId{77};
  const auto snapshot = ToSnapshotEvents(state);
  ASSERT_FALSE(snapshot.ok());
  EXPECT_NE(snapshot.status().message().find("id, part = 3, 77"), std::string::npos) << snapshot.status().message();
  EXPECT_EQ(state.PartAt(kSlabAddress), AllocationId{});
  EXPECT_EQ(FindRoom(state, kSlab, kMiB, kMiB), std::nullopt);
  EXPECT_EQ(FindRoom(state, AllocationId{77}, kMiB, kMiB), std::nullopt);
  state = Whole();
  state.multicasts[AllocationId{77}].devices = 2;
  EXPECT_NE(ToSnapshotEvents(state).status().message().find("id = 77"), std::string::npos);
}

}  // namespace
}  // namespace amem::testing
