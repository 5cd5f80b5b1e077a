// Every event that Apply refuses, with the whole message, in the order of its files. A refused event leaves the state alone.
#include "folding.h"

namespace amem::testing {
namespace {

using Events = std::vector<EventBody>;

struct Rejection {
  const char* message;
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
    EXPECT_EQ(status.code(), Code::kInvalid) << each.message;
    EXPECT_EQ(status.message(), each.message);
    EXPECT_EQ(before, f.state) << each.message;
  }
}

EventBody Create(AllocationId id, Bytes bytes = k2M) { return AllocationCreated{id, bytes, OnDevice(0), 0, {}, {}, {}}; }
EventBody Reserve(Address address, Bytes bytes, AllocationId part = {}) {
  return RangeReserved{address, bytes, 0, {}, 0, {}, part};
}
EventBody Map(Address address, Bytes bytes, AllocationId id, Bytes offset = 0) { return Mapped{address, bytes, offset, id, 0}; }

TEST(Rejections, of_the_life_of_a_session) {
  ExpectEach(State{}, {{"close session: it is not open", SessionClosed{"exit"}},
                       {"change group: the session is new", GroupChanged{3}},
                       {"load snapshot: its totals are damaged", Condensed{SequenceNumber{3}, 1, 0, {1, 2, 3}}}});
  ExpectEach(Whole(), {{"open session: it is open already", SessionOpened{}},
                       {"load snapshot: the state is not empty", Condensed{}},
                       {"close session: it is not open", SessionClosed{"exit"}, {SessionClosed{"exit"}}},
                       {"create allocation 0: zero is no id", Create(AllocationId{})},
                       {"create allocation 6: its size is zero", Create(kNew, 0)},
                       {"create allocation 1: that id is in use", Create(kOwn)}});
}

TEST(Rejections, of_ranges_and_allocations) {
  const EventBody reserved = Reserve(kFree, k2M);
  ExpectEach(
      Whole(),
      {{"reserve 0x7f0001000000: a range needs an address and a size", Reserve(kFree, 0)},
       {"reserve 0x0: a range needs an address and a size", Reserve({}, k2M)},
       {"reserve 0x7f0000100000: overlaps the range reserved at 0x7f0000000000, which was not freed", Reserve(kA + kMiB, k2M)},
       {"reserve 0x7f0000700000: overlaps the range reserved at 0x7f0000800000, which was not freed",
        Reserve(Address{0x7f0000700000}, kMiB + kMiB / 2)},
       {"free range 0x7f0000c00000: it is not reserved", RangeFreed{kSecondAddress, k2M, kSecond}},
       {"free range 0x7f0000800000: allocation 4 is still mapped there", RangeFreed{kPartAddress, k2M, kPart}},
       {"free range 0x7f0001000000: no range is reserved there", RangeFreed{kFree, k2M, {}}},
       {"free range 0x7f0001000000: its size is 2 MiB, not 1 MiB", RangeFreed{kFree, kMiB, {}}, {reserved}},
       {"free range 0x7f0000000000: something is still mapped at 0x7f0000000000", RangeFreed{kA, k2M, {}}},
       {"retain allocation 77: it does not exist", AllocationRetained{kNobody, kA}},
       {"retain allocation 5 by 0x7f0000c00000: it is not mapped anywhere", AllocationRetained{kSecond, kSecondAddress}},
       {"release allocation 77: it does not exist", AllocationReleased{kNobody}},
       {"release allocation 1: all references were released before", AllocationReleased{kOwn}, {AllocationReleased{kOwn}}}});
}

TEST(Rejections, of_mappings) {
  const EventBody reserved = Reserve(kFree, k2M), second = Reserve(kSecondAddress, k2M, kSecond);
  const std::vector<AccessDescriptor> other{{{LocationType::kDevice, 1}, 3}};
  ExpectEach(
      Whole(),
      {{"map 0x7f0001000000 of allocation 77: the allocation does not exist", Map(kFree, k2M, kNobody)},
       {"map 0x7f0000c00000 of allocation 5: a part of a slab is mapped whole",
        Map(kSecondAddress, k2M, kSecond, 4096),
        {second}},
       {"map 0x7f0000c00000 of allocation 5: the address range is not reserved", Map(kSecondAddress, k2M, kSecond)},
       {"map 0x7f0000800000 of allocation 4: that range is mapped already", Map(kPartAddress, k2M, kPart)},
       {"map 0x7f0000100000 of allocation 4: allocation 4 is 2 MiB at 0x7f0000800000", Map(kA + kMiB, k2M, kPart)},
       {"map 0x7f0001000000 of allocation 1: 2 MiB from offset 1 MiB is outside its 2 MiB",
        Map(kFree, k2M, kOwn, kMiB),
        {reserved}},
       {"map 0x7f0001000000 of allocation 1: 0 B from offset 0 B is outside its 2 MiB", Map(kFree, 0, kOwn), {reserved}},
       {"map 0x7f0001000000 of allocation 1: the address range is not reserved", Map(kFree, k2M, kOwn)},
       {"map 0x7f0001100000 of allocation 1: the address range is not reserved", Map(kFree + kMiB, k2M, kOwn), {reserved}},
       {"map 0x7f0000000000 of allocation 1: that range is mapped already (at 0x7f0000000000)", Map(kA, k2M, kOwn)},
       {"unmap 0x7f0000c00000: allocation 5 is not mapped", Unmapped{kSecondAddress, k2M, kSecond}},
       {"unmap 0x7f0000800000: that slab has 2 allocations", Unmapped{kSlabAddress, 8 * kMiB, {}}},
       {"unmap 0x7f0001000000: nothing is mapped at 0x7f0001000000", Unmapped{kFree, k2M, {}}},
       {"unmap 0x7f0000000000: 1 MiB would cut a mapping in two", Unmapped{kA, kMiB, {}}},
       {"unmap 0x7f0000000000: 0 B would cut a mapping in two", Unmapped{kA, 0, {}}},
       {"set access to 0x7f0000800000: its slab has no such access for device 1", AccessSet{kPartAddress, k2M, other, kPart}},
       {"set access to 0x7f0000800000: its slab has no such access for device 1",
        AccessSet{kPartAddress, k2M, other, kPart},
        {AccessSet{kSlabAddress, 8 * kMiB, {{{LocationType::kDevice, 1}, 1}}, {}}}},  // only to read
       {"set access to 0x7f0001000000: nothing is mapped at 0x7f0001000000", AccessSet{kFree, k2M, other, {}}},
       {"set access to 0x7f0000000000: allocation 1 is not part of a slab", AccessSet{kA, k2M, other, kOwn}},
       {"set access to 0x7f0000000000: allocation 77 does not exist", AccessSet{kA, k2M, other, kNobody}}});
}

TEST(Rejections, of_sharing) {
  ExpectEach(Whole(),
             {{"export allocation 77: it does not exist", Exported{kNobody, 1}},
              {"import allocation 6: it names no owner", Imported{kNew, {kPeer, {}}, k2M, {}, 1, {}, {}, {}}},
              {"import allocation 6: it names no owner", Imported{kNew, {{}, kOwn}, k2M, {}, 1, {}, {}, {}}},
              {"add reference of session 0x99 to allocation 77: it does not exist", ReferenceAdded{kNobody, kPeer, kOwn}},
              {"add reference of session 0x99 to allocation 2: it is itself imported", ReferenceAdded{kImported, kPeer, kOwn}},
              {"add reference of session 0x99 to allocation 1: it was never exported", ReferenceAdded{kOwn, kPeer, kOwn}},
              {"drop reference of session 0x99 to allocation 77: it does not exist", ReferenceDropped{kNobody, kPeer, kOwn}},
              {"drop reference of session 0x99 to allocation 1: that session holds none as allocation 2",
               ReferenceDropped{kOwn, kPeer, kImported},
               {Exported{kOwn, 1}, ReferenceAdded{kOwn, kPeer, kOwn}}},
              {"lose peer 0x99: it was never connected", PeerLost{kPeer, "died"}}});
}

TEST(Rejections, of_other_kinds_of_memory) {
  const Events multicast{MulticastCreated{kMulticast, k2M, 2, 1, 0, {}}};
  const Events bound{multicast[0], MulticastBound{kMulticast, 0, kOwn, 0, kMiB, {}}};
  const EventBody host = HostAllocated{kFree, 64, 0, false}, legacy = LegacyAllocated{kFree, 64, {}, 0, "why", {}};
  ExpectEach(Whole(),
             {{"host memory at 0x7f0001000000 is known already", host, {host}},
              {"free host memory 0x7f0001000000: none is known there", HostFreed{kFree}},
              {"cuMemAlloc 0x7f0001000000: allocation 77 does not exist", LegacyAllocated{kFree, 64, kNobody, 0, "", {}}},
              {"cuMemAlloc 0x7f0001000000: that address is allocated already", legacy, {legacy}},
              {"cuMemFree 0x7f0001000000: nothing is allocated there", LegacyFreed{kFree}},
              {"IPC handle of 0x7f0001000000: allocation 77 does not exist", LegacyExported{kFree, kNobody}},
              {"open IPC handle at 0x7f0001000000: allocation 77 does not exist", LegacyImported{kFree, kNobody}},
              {"open IPC handle at 0x7f0001000000: one is open there",
               LegacyImported{kFree, kImported},
               {LegacyImported{kFree, kOwn}}},
              {"close IPC handle at 0x7f0001000000: none is open there", LegacyClosed{kFree}},
              {"free pool memory 0x7f0001000000: none is known there", AsyncFreed{kFree}},
              {"add device to multicast object 9: it does not exist", MulticastDeviceAdded{kMulticast, kDevice0}},
              {"bind memory to multicast object 9: it does not exist", MulticastBound{kMulticast, 0, kOwn, 0, kMiB, {}}},
              {"bind memory to multicast object 9: allocation 77 does not exist",
               MulticastBound{kMulticast, 0, kNobody, 0, 1, {}}, multicast},
              {"unbind memory from multicast object 9: it does not exist", MulticastUnbound{kMulticast, kDevice0, 0, kMiB}},
              {"unbind memory from multicast object 9: nothing is bound at offset 1 MiB",
               MulticastUnbound{kMulticast, kDevice0, kMiB, kMiB}, bound},
              {"unbind memory from multicast object 9: device 1 has nothing bound there",
               MulticastUnbound{kMulticast, kDevice1, 0, kMiB}, bound},
              {"deregister 0x7f0000000000: it was not registered", Deregistered{kA, k2M}},
              {"keep everything: without a reason", EverythingKept{}}});
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
  ExpectEach(
      f.state,
      {{"open slab 6: it is not mapped at 0x7f0000000000", SlabOpened{kNew, kA, {}}},
       {"open slab 77: it is not mapped at 0x7f0000000000", SlabOpened{kNobody, kA, {}}},
       {"open slab 6: it is not mapped whole", SlabOpened{kNew, kFree, {}}, {Unmapped{kFree, k2M, {}}, Map(kFree, kMiB, kNew)}},
       {"open slab 3: it is one already", SlabOpened{kSlab, kSlabAddress, {}}},
       {"place allocation 77 in slab 3: there is no such allocation, or no such slab", Placed{kNobody, kSlab, 0}},
       {"place allocation 8 in slab 1: there is no such allocation, or no such slab", Placed{eighth, kOwn, 0}},
       {"place allocation 3 in slab 7: there is no such allocation, or no such slab", Placed{kSlab, empty, 0}},
       {"place allocation 8 in slab 7: that slab is not mapped", Placed{eighth, empty, k2M}, unmapped},
       {"place allocation 4 in slab 3: it is in use where it is", Placed{kPart, kSlab, 6 * kMiB}},
       {"place allocation 8 in slab 3: it ends outside", Placed{eighth, kSlab, 7 * kMiB}},
       {"place allocation 9 in slab 3: they are not the same session's",
        Placed{AllocationId{9}, kSlab, k2M},
        {Imported{AllocationId{9}, {kPeer, AllocationId{6}}, k2M, {}, 1, {}, {}, {}}}},
       {"place allocation 8 in slab 3: allocation 5 is there", Placed{eighth, kSlab, 3 * kMiB}},
       {"place allocation 8 in slab 3: allocation 4 is there", Placed{eighth, kSlab, kMiB}},
       {"place allocation 8 in slab 7: what was there before was not cleared", Placed{eighth, empty, 0}},
       {"back allocation 1 by itself: it is not part of a slab", Backed{kOwn, {}}},
       {"back allocation 77 by itself: it is not part of a slab", Backed{kNobody, {}}},
       {"back allocation 4 by itself: it is in use where it is", Backed{kPart, {}}},
       {"clear part of slab 77: it does not exist", PartCleared{kNobody, 0, 1}}});
}

TEST(Rejections, of_communicators) {
  Folding f;
  f.state = Whole();
  const CommunicatorId first{1}, gone{2}, none{7};
  f.Ok(CommunicatorBegun{first, {}, "init", 0, 2});
  f.Ok(CommunicatorBegun{gone, {}, "init", 0, 2});
  f.Ok(CommunicatorEnded{gone, "failed"});
  ExpectEach(f.state, {{"begin communicator: zero is no id", CommunicatorBegun{{}, {}, "init"}},
                       {"begin communicator 1: that id is in use", CommunicatorBegun{first, {}, "init"}},
                       {"communicator 7 ready: it was not begun, or has ended", CommunicatorReady{none}},
                       {"communicator 2 ready: it was not begun, or has ended", CommunicatorReady{gone}},
                       {"end communicator 2: it was not begun, or has ended", CommunicatorEnded{gone, "destroyed"}},
                       {"suspend communicator 7: it was not begun, or has ended", CommunicatorSuspended{none, true}},
                       {"resume communicator 2: it was not begun, or has ended", CommunicatorSuspended{gone, false}}});
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
  EXPECT_EQ(status.message(), "open slab 1: it is itself a part of a slab");
}

// While a session runs all its memory is there, by the invariants. Should a state that is broken lack some, it does not get
// worse.
TEST(Rejections, of_memory_that_is_missing_while_the_session_runs) {
  State state = Whole();
  state.ranges[kFree] = state.ranges.at(kA);
  state.allocations.at(kOwn).resident = false;
  state.mappings.at(kA).present = false;
  ExpectEach(state, {{"map 0x7f0001000000 of allocation 1: its memory is released", Map(kFree, k2M, kOwn)},
                     {"set access to 0x7f0000000000: its memory is released", AccessSet{kA, k2M, {}, {}}}});
}

TEST(Rejections, of_cycles) {
  const Step map{StepKind::kMap, kOwn, kA, k2M, {}}, other{StepKind::kMap, kImported, kB, k2M, {}};
  const EventBody pause = CycleBegun{CycleKind::kPause, 1, {}};
  ExpectEach(
      Whole(),
      {{"begin resume 1: the session is running", CycleBegun{CycleKind::kResume, 1, {}}},
       {"begin step map allocation 1 at 0x7f0000000000, 2 MiB: no pause or resume is under way, the session is running",
        StepBegun{map}},
       {"finish step map allocation 1 at 0x7f0000000000, 2 MiB: no pause or resume is under way, the session is running",
        StepDone{map}},
       {"fail step map allocation 1 at 0x7f0000000000, 2 MiB: no pause or resume is under way, the session is running",
        StepFailed{map, Code::kDriver, 1, ""}},
       {"begin phase pause: save: no pause or resume is under way, the session is running", PhaseBegun{PhaseKind::kPauseSave}},
       {"decide phase pause: save: no pause or resume is under way, the session is running",
        PhaseDecided{PhaseKind::kPauseSave, true, {}, ""}},
       {"finish pause 1: no pause or resume is under way, the session is running", CycleDone{CycleKind::kPause, 1, 1}},
       {"fail resume 1: no pause or resume is under way, the session is running", CycleFailed{CycleKind::kResume, 1, true, ""}},
       {"begin step map allocation 2 at 0x7f0000400000, 2 MiB: the step before it (map allocation 1 at 0x7f0000000000, 2 MiB) "
        "is neither done nor failed",
        StepBegun{other},
        {pause, StepBegun{map}}},
       {"finish step map allocation 2 at 0x7f0000400000, 2 MiB: that step was not begun",
        StepDone{other},
        {pause, StepBegun{map}}},
       {"fail step map allocation 2 at 0x7f0000400000, 2 MiB: that step was not begun",
        StepFailed{other, Code::kDriver, 1, ""},
        {pause}},
       {"finish pause 2: another cycle is under way", CycleDone{CycleKind::kPause, 2, 1}, {pause}},
       {"finish resume 1: another cycle is under way", CycleDone{CycleKind::kResume, 1, 1}, {pause}},
       {"finish pause 1: step map allocation 1 at 0x7f0000000000, 2 MiB is open",
        CycleDone{CycleKind::kPause, 1, 1},
        {pause, StepBegun{map}}},
       {"finish pause 1: allocation 1 still has memory", CycleDone{CycleKind::kPause, 1, 1}, {pause}}});
  Folding f;
  f.state = Whole();
  f.Pause();
  f.Refused(CycleBegun{CycleKind::kPause, 2, {}}, "begin pause 2: the session is paused");
  f.Refused(Mapped{kFree, k2M, 0, kOwn, 0}, "map 0x7f0001000000 of allocation 1: the session is paused");
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  f.Refused(CycleDone{CycleKind::kResume, 1, 1}, "finish resume 1: allocation 1 has no memory");
}

// A step, applied to a running session on its way into a pause, after some others.
struct WrongStep {
  const char* message;  // after "finish step " and the step
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
      {"the allocation does not exist", on(StepKind::kSave, kNobody)},
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
    f.Refused(StepDone{each.step}, "finish step " + ToText(each.step) + ": " + each.message);
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
                                                       ? "finish resume 1: the contents of allocation 1 were not restored"
                                                       : "finish resume 1: 0x7f0000000000 is not mapped with access");
  };
  run_without(StepKind::kRestore);
  run_without(StepKind::kSetAccess);
}

}  // namespace
}  // namespace amem::testing
