// Every event that Apply refuses, with the whole reason, in the order of its files. A refused event leaves the state alone.
#include "folding.h"

namespace amem::testing {
namespace {

using Events = std::vector<EventBody>;

struct Rejection {
  const char* why;  // after the event's own text
  EventBody event;
  Events before = {};  // folded into the state first
};

// 0x7f0000000000 has allocation 1, 0x7f0000400000 the imported allocation 2, 0x7f0000800000 slab 3 with 4 and 5 in it.
constexpr Address kPartAddress = kSlabAddress, kSecondAddress = kSlabAddress + 4 * kMiB, kFree{0x7f0001000000};
constexpr AllocationId kNew{6}, kMulticast{9};
constexpr DeviceOrdinal kDevice0{0}, kDevice1{1};

void ExpectEach(const State& start, const std::vector<Rejection>& rejections) {
  for (const Rejection& each : rejections) {
    Folding f;
    f.state = start;
    for (const EventBody& body : each.before) f.Ok(body);
    const State before = f.state;
    const Status status = f.Try(each.event);
    EXPECT_EQ(status.code(), Code::kInvalid) << each.why;
    EXPECT_EQ(status.message(), ToText(each.event) + ": " + each.why);
    EXPECT_EQ(before, f.state) << each.why;
  }
}

EventBody Create(AllocationId id, Bytes bytes = k2M) { return AllocationCreated{id, bytes, OnDevice(0), 0, {}, {}, {}}; }
EventBody Reserve(Address address, Bytes bytes, AllocationId part = {}) {
  return RangeReserved{address, bytes, 0, {}, 0, {}, part};
}
EventBody Map(Address address, Bytes bytes, AllocationId id, Bytes offset = 0) { return Mapped{address, bytes, offset, id, 0}; }

TEST(Rejections, of_the_life_of_a_session) {
  ExpectEach(State{}, {{"it is not open", SessionClosed{"exit"}},
                       {"the session is new", GroupChanged{3}},
                       {"its totals are damaged", Condensed{SequenceNumber{3}, 1, 0, {1, 2, 3}}}});
  ExpectEach(Whole(), {{"it is open already", SessionOpened{}},
                       {"the state is not empty", Condensed{}},
                       {"it is not open", SessionClosed{"exit"}, {SessionClosed{"exit"}}},
                       {"zero is no id", Create(AllocationId{})},
                       {"its size is zero", Create(kNew, 0)},
                       {"that id is in use", Create(kOwn)}});
}

TEST(Rejections, of_ranges_and_allocations) {
  const EventBody reserved = Reserve(kFree, k2M);
  ExpectEach(Whole(), {{"a range needs an address and a size", Reserve(kFree, 0)},
                       {"a range needs an address and a size", Reserve({}, k2M)},
                       {"overlaps the range reserved at 0x7f0000000000, which was not freed", Reserve(kA + kMiB, k2M)},
                       {"overlaps the range reserved at 0x7f0000800000, which was not freed",
                        Reserve(Address{0x7f0000700000}, kMiB + kMiB / 2)},
                       {"it is not reserved", RangeFreed{kSecondAddress, k2M, kSecond}},
                       {"allocation 4 is still mapped there", RangeFreed{kPartAddress, k2M, kPart}},
                       {"no range is reserved there", RangeFreed{kFree, k2M, {}}},
                       {"its size is 2 MiB, not 1 MiB", RangeFreed{kFree, kMiB, {}}, {reserved}},
                       {"something is still mapped at 0x7f0000000000", RangeFreed{kA, k2M, {}}},
                       {"allocation 77 does not exist", AllocationRetained{kNobody, kA}},
                       {"it is not mapped anywhere", AllocationRetained{kSecond, kSecondAddress}},
                       {"allocation 77 does not exist", AllocationReleased{kNobody}},
                       {"all references were released before", AllocationReleased{kOwn}, {AllocationReleased{kOwn}}}});
}

TEST(Rejections, of_mappings) {
  const EventBody reserved = Reserve(kFree, k2M), second = Reserve(kSecondAddress, k2M, kSecond);
  const std::vector<AccessDescriptor> other{{{LocationType::kDevice, 1}, 3}};
  ExpectEach(Whole(), {{"allocation 77 does not exist", Map(kFree, k2M, kNobody)},
                       {"a part of a slab is mapped whole", Map(kSecondAddress, k2M, kSecond, 4096), {second}},
                       {"the address range is not reserved", Map(kSecondAddress, k2M, kSecond)},
                       {"that range is mapped already", Map(kPartAddress, k2M, kPart)},
                       {"allocation 4 is 2 MiB at 0x7f0000800000", Map(kA + kMiB, k2M, kPart)},
                       {"2 MiB from offset 1 MiB is outside its 2 MiB", Map(kFree, k2M, kOwn, kMiB), {reserved}},
                       {"0 B from offset 0 B is outside its 2 MiB", Map(kFree, 0, kOwn), {reserved}},
                       {"the address range is not reserved", Map(kFree, k2M, kOwn)},
                       {"the address range is not reserved", Map(kFree + kMiB, k2M, kOwn), {reserved}},
                       {"that range is mapped already (at 0x7f0000000000)", Map(kA, k2M, kOwn)},
                       {"allocation 5 is not mapped", Unmapped{kSecondAddress, k2M, kSecond}},
                       {"that slab has 2 allocations", Unmapped{kSlabAddress, 8 * kMiB, {}}},
                       {"nothing is mapped at 0x7f0001000000", Unmapped{kFree, k2M, {}}},
                       {"1 MiB would cut a mapping in two", Unmapped{kA, kMiB, {}}},
                       {"0 B would cut a mapping in two", Unmapped{kA, 0, {}}},
                       {"its slab has no such access for device 1", AccessSet{kPartAddress, k2M, other, kPart}},
                       {"its slab has no such access for device 1",
                        AccessSet{kPartAddress, k2M, other, kPart},
                        {AccessSet{kSlabAddress, 8 * kMiB, {{{LocationType::kDevice, 1}, 1}}, {}}}},  // only to read
                       {"nothing is mapped at 0x7f0001000000", AccessSet{kFree, k2M, other, {}}},
                       {"allocation 1 is not part of a slab", AccessSet{kA, k2M, other, kOwn}},
                       {"allocation 77 does not exist", AccessSet{kA, k2M, other, kNobody}}});
}

TEST(Rejections, of_sharing) {
  ExpectEach(Whole(), {{"allocation 77 does not exist", Exported{kNobody, 1}},
                       {"it names no owner", Imported{kNew, {kPeer, {}}, k2M, {}, 1, {}, {}, {}}},
                       {"it names no owner", Imported{kNew, {{}, kOwn}, k2M, {}, 1, {}, {}, {}}},
                       {"allocation 77 does not exist", ReferenceAdded{kNobody, kPeer, kOwn}},
                       {"it is itself imported", ReferenceAdded{kImported, kPeer, kOwn}},
                       {"it was never exported", ReferenceAdded{kOwn, kPeer, kOwn}},
                       {"allocation 77 does not exist", ReferenceDropped{kNobody, kPeer, kOwn}},
                       {"that session holds none as allocation 2",
                        ReferenceDropped{kOwn, kPeer, kImported},
                        {Exported{kOwn, 1}, ReferenceAdded{kOwn, kPeer, kOwn}}},
                       {"it was never connected", PeerLost{kPeer, "died"}}});
}

TEST(Rejections, of_other_kinds_of_memory) {
  const Events multicast{MulticastCreated{kMulticast, k2M, 2, 1, 0, {}}};
  const Events bound{multicast[0], MulticastBound{kMulticast, 0, kOwn, 0, kMiB, {}}};
  const EventBody host = HostAllocated{kFree, 64, 0, false}, legacy = LegacyAllocated{kFree, 64, {}, 0, "why", {}};
  ExpectEach(Whole(), {{"it is known already", host, {host}},
                       {"none is known there", HostFreed{kFree}},
                       {"allocation 77 does not exist", LegacyAllocated{kFree, 64, kNobody, 0, "", {}}},
                       {"that address is allocated already", legacy, {legacy}},
                       {"nothing is allocated there", LegacyFreed{kFree}},
                       {"allocation 77 does not exist", LegacyExported{kFree, kNobody}},
                       {"allocation 77 does not exist", LegacyImported{kFree, kNobody}},
                       {"one is open there", LegacyImported{kFree, kImported}, {LegacyImported{kFree, kOwn}}},
                       {"none is open there", LegacyClosed{kFree}},
                       {"none is known there", AsyncFreed{kFree}},
                       {"it does not exist", MulticastDeviceAdded{kMulticast, kDevice0}},
                       {"it does not exist", MulticastBound{kMulticast, 0, kOwn, 0, kMiB, {}}},
                       {"allocation 77 does not exist", MulticastBound{kMulticast, 0, kNobody, 0, 1, {}}, multicast},
                       {"it does not exist", MulticastUnbound{kMulticast, kDevice0, 0, kMiB}},
                       {"nothing is bound at offset 1 MiB", MulticastUnbound{kMulticast, kDevice0, kMiB, kMiB}, bound},
                       {"device 1 has nothing bound there", MulticastUnbound{kMulticast, kDevice1, 0, kMiB}, bound},
                       {"it was not registered", Deregistered{kA, k2M}},
                       {"it gives no reason", EverythingKept{}}});
}

TEST(Rejections, of_slabs) {
  Folding f;
  f.state = Whole();
  f.Allocate(kFree);  // allocation 6
  const AllocationId empty = f.Allocate(kFree + k2M, 4 * kMiB);
  f.Ok(SlabOpened{empty, kFree + k2M, {{0, kMiB}}});
  f.Ok(Create(AllocationId{8}));
  const AllocationId eighth{8};
  const Events unmapped{Unmapped{kFree + k2M, 4 * kMiB, {}}};
  ExpectEach(f.state,
             {{"it is not mapped at 0x7f0000000000", SlabOpened{kNew, kA, {}}},
              {"it is not mapped at 0x7f0000000000", SlabOpened{kNobody, kA, {}}},
              {"it is not mapped whole", SlabOpened{kNew, kFree, {}}, {Unmapped{kFree, k2M, {}}, Map(kFree, kMiB, kNew)}},
              {"it is one already", SlabOpened{kSlab, kSlabAddress, {}}},
              {"there is no such allocation, or no such slab", Placed{kNobody, kSlab, 0}},
              {"there is no such allocation, or no such slab", Placed{eighth, kOwn, 0}},
              {"there is no such allocation, or no such slab", Placed{kSlab, empty, 0}},
              {"that slab is not mapped", Placed{eighth, empty, k2M}, unmapped},
              {"it is in use where it is", Placed{kPart, kSlab, 6 * kMiB}},
              {"it ends outside", Placed{eighth, kSlab, 7 * kMiB}},
              {"they are not the same session's",
               Placed{AllocationId{9}, kSlab, k2M},
               {Imported{AllocationId{9}, {kPeer, AllocationId{6}}, k2M, {}, 1, {}, {}, {}}}},
              {"allocation 5 is there", Placed{eighth, kSlab, 3 * kMiB}},
              {"allocation 4 is there", Placed{eighth, kSlab, kMiB}},
              {"what was there before was not cleared", Placed{eighth, empty, 0}},
              {"it is not part of a slab", Backed{kOwn, {}}},
              {"it is not part of a slab", Backed{kNobody, {}}},
              {"it is in use where it is", Backed{kPart, {}}},
              {"it does not exist", PartCleared{kNobody, 0, 1}}});
}

TEST(Rejections, of_communicators) {
  Folding f;
  f.state = Whole();
  const CommunicatorId first{1}, gone{2}, none{7};
  f.Ok(CommunicatorBegun{first, {}, "init", 0, 2});
  f.Ok(CommunicatorBegun{gone, {}, "init", 0, 2});
  f.Ok(CommunicatorEnded{gone, "failed"});
  ExpectEach(f.state, {{"zero is no id", CommunicatorBegun{{}, {}, "init"}},
                       {"that id is in use", CommunicatorBegun{first, {}, "init"}},
                       {"it was not begun, or has ended", CommunicatorReady{none}},
                       {"it was not begun, or has ended", CommunicatorReady{gone}},
                       {"it was not begun, or has ended", CommunicatorEnded{gone, "destroyed"}},
                       {"it was not begun, or has ended", CommunicatorSuspended{none, true}},
                       {"it was not begun, or has ended", CommunicatorSuspended{gone, false}}});
}

TEST(Rejections, of_a_part_of_another_sessions_slab) {
  Folding f;
  const AllocationId slab = f.Import(kA, {kPeer, AllocationId{5}}, 8 * kMiB), part{f.state.next_allocation};
  f.Ok(SlabOpened{slab, kA, {}});
  f.Ok(Imported{part, {SessionId{0x98}, AllocationId{6}}, k2M, {}, 1, {}, {}, {}});
  f.Refused(Placed{part, slab, 0}, "they are not the same session's");
}

// A part of a slab has the slab's mapping, and can never be opened as a slab: it has no mapping of its own.
TEST(Rejections, of_a_part_that_would_be_a_slab) {
  State state = Whole();
  state.allocations.at(kOwn).slab = kSlab;
  const Status status = Apply(state, Event{SequenceNumber{state.last.value + 1}, 0, 0, SlabOpened{kOwn, kA, {}}});
  EXPECT_EQ(status.message(), "slab opened: slab 1, address 0x7f0000000000: it is itself a part of a slab");
}

// While a session runs all its memory is there, by the invariants. Should a state that is broken lack some, it does not get
// worse.
TEST(Rejections, of_memory_that_is_missing_while_the_session_runs) {
  State state = Whole();
  state.ranges[kFree] = state.ranges.at(kA);
  state.allocations.at(kOwn).resident = false;
  state.mappings.at(kA).present = false;
  ExpectEach(state,
             {{"its memory is released", Map(kFree, k2M, kOwn)}, {"its memory is released", AccessSet{kA, k2M, {}, {}}}});
}

TEST(Rejections, of_cycles) {
  const Step map{StepKind::kMap, kOwn, kA, k2M, {}}, other{StepKind::kMap, kImported, kB, k2M, {}};
  const EventBody pause = CycleBegun{CycleKind::kPause, 1, {}};
  ExpectEach(
      Whole(),
      {{"the session is running", CycleBegun{CycleKind::kResume, 1, {}}},
       {"no pause or resume is under way, the session is running", StepBegun{map}},
       {"no pause or resume is under way, the session is running", StepDone{map}},
       {"no pause or resume is under way, the session is running", StepFailed{map, Code::kDriver, 1, ""}},
       {"no pause or resume is under way, the session is running", PhaseBegun{PhaseKind::kPauseSave}},
       {"no pause or resume is under way, the session is running", PhaseDecided{PhaseKind::kPauseSave, true, {}, ""}},
       {"no pause or resume is under way, the session is running", CycleDone{CycleKind::kPause, 1, 1}},
       {"no pause or resume is under way, the session is running", CycleFailed{CycleKind::kResume, 1, true, ""}},
       {"the step before it (map allocation 1 at 0x7f0000000000, 2 MiB) "
        "is neither done nor failed",
        StepBegun{other},
        {pause, StepBegun{map}}},
       {"that step was not begun", StepDone{other}, {pause, StepBegun{map}}},
       {"that step was not begun", StepFailed{other, Code::kDriver, 1, ""}, {pause}},
       {"another cycle is under way", CycleDone{CycleKind::kPause, 2, 1}, {pause}},
       {"another cycle is under way", CycleDone{CycleKind::kResume, 1, 1}, {pause}},
       {"step map allocation 1 at 0x7f0000000000, 2 MiB is open", CycleDone{CycleKind::kPause, 1, 1}, {pause, StepBegun{map}}},
       {"allocation 1 still has memory", CycleDone{CycleKind::kPause, 1, 1}, {pause}}});
  Folding f;
  f.state = Whole();
  f.Pause();
  f.Refused(CycleBegun{CycleKind::kPause, 2, {}}, "the session is paused");
  f.Refused(Mapped{kFree, k2M, 0, kOwn, 0}, "the session is paused");
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  f.Refused(CycleDone{CycleKind::kResume, 1, 1}, "allocation 1 has no memory");
}

// A step, applied to a running session on its way into a pause, after some others.
struct WrongStep {
  const char* message;  // after "step done: " and the step
  Step step;
  std::vector<Step> before = {};
};

TEST(Rejections, of_cycles_of_a_pool_that_does_not_exist) {
  const PoolId nobody{7};
  const Step step{StepKind::kUnmap, kOwn};
  for (const EventBody& body : std::initializer_list<EventBody>{
           StepBegun{step, nobody}, StepDone{step, nobody}, StepFailed{step, Code::kDriver, 1, "no", {}, nobody},
           PhaseBegun{PhaseKind::kPauseArrive, nobody}, CycleBegun{CycleKind::kPause, 1, {}, {}, nobody},
           CycleDone{CycleKind::kPause, 1, 1, nobody}, [&] {
             CycleFailed failed{CycleKind::kPause, 1, true, "no", Code::kDriver};
             failed.pool = nobody;
             return failed;
           }()})
    Folding().Refused(body, "pool 7 does not exist");
}

TEST(Rejections, of_what_slabs_are_made_of_while_paused) {
  for (const EventBody& body :
       std::initializer_list<EventBody>{SlabOpened{kOwn, kA, {}}, Placed{kOwn, AllocationId{2}, 0}, Backed{kOwn}}) {
    Folding f;
    f.Allocate(kA);
    f.Pause();
    f.Refused(body, "the session is paused");
  }
}

TEST(Rejections, of_steps) {
  const auto on = [](StepKind kind, AllocationId id, Address address = {}) { return Step{kind, id, address, 0, {}}; };
  const Step unmap = on(StepKind::kUnmap, kOwn, kA), save = on(StepKind::kSave, kOwn),
             release = on(StepKind::kReleaseOwn, kOwn);
  const Step create = on(StepKind::kCreate, kOwn), map = on(StepKind::kMap, kOwn, kA), restore = on(StepKind::kRestore, kOwn);
  const std::vector<Step> gone{unmap, save, release};
  const std::vector<WrongStep> all = {
      {"there is no such mapping", on(StepKind::kUnmap, kOwn, kFree)},
      {"that address belongs to allocation 1", on(StepKind::kUnmap, kImported, kA)},
      {"it is unmapped already", unmap, {unmap}},
      {"it is mapped already", map},
      {"allocation 1 has no memory yet", map, gone},
      {"it is not mapped", on(StepKind::kSetAccess, kOwn, kA), {unmap}},
      {"allocation 77 does not exist", on(StepKind::kSave, kNobody)},
      {"it is part of a slab, which is released and made whole", on(StepKind::kSave, kPart)},
      {"it is imported, and its owner saves it", on(StepKind::kSave, kImported)},
      {"it has no contents to save", save, {unmap, save, release, create}},
      {"it has no contents to save", save, gone},
      {"it has no memory, or no saved contents", restore},
      {"it has no memory, or no saved contents", restore, gone},
      {"it is imported", on(StepKind::kReleaseOwn, kImported)},
      {"it is own", on(StepKind::kReleaseImport, kOwn)},
      {"it is released already", release, gone},
      {"its contents were not saved", release, {unmap}},
      {"it is own", on(StepKind::kImport, kOwn)},
      {"it is imported", on(StepKind::kCreate, kImported)},
      {"it has memory already", create},
      {"not a step on an allocation", on(static_cast<StepKind>(99), kOwn)},
  };
  for (const WrongStep& each : all) {
    Folding f;
    f.state = Whole();
    f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
    for (const Step& step : each.before) {
      f.Ok(StepBegun{step});
      f.Ok(StepDone{step});
    }
    f.Ok(StepBegun{each.step});
    f.Refused(StepDone{each.step}, "step done: " + ToText(each.step) + ": " + each.message);
  }
}

TEST(Rejections, of_memory_that_must_stay) {
  Folding f;
  f.state = Whole();
  f.Ok(Registered{kA, k2M, "dma-buf"});
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  for (const StepKind kind : {StepKind::kUnmap, StepKind::kSave}) {
    const Step step{kind, kOwn, kA, k2M, {}};
    f.Ok(StepBegun{step});
    f.Ok(StepDone{step});
  }
  const Step release{StepKind::kReleaseOwn, kOwn, {}, k2M, {}};
  f.Ok(StepBegun{release});
  f.Refused(StepDone{release}, "it must stay: registered with a network card");
}

TEST(Rejections, of_a_resume_that_left_something_out) {
  Folding f;
  f.state = Whole();
  f.Pause();
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  Plan plan = PlanResume(f.state);
  const auto run_without = [&](StepKind left_out) {
    Folding g = f;
    Plan partial = plan;
    for (PlannedPhase& phase : partial.phases)
      std::erase_if(phase.steps, [&](const Step& step) { return step.kind == left_out && step.allocation == kOwn; });
    g.Run(partial);
    g.Refused(CycleDone{CycleKind::kResume, 1, 1}, left_out == StepKind::kRestore
                                                       ? "the contents of allocation 1 were not restored"
                                                       : "0x7f0000000000 is not mapped with access");
  };
  run_without(StepKind::kRestore);
  run_without(StepKind::kSetAccess);
}

}  // namespace
}  // namespace amem::testing
