#include <gtest/gtest.h>

#include <set>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {
namespace {

TEST(Text, every_kind_has_a_name_of_its_own_that_leads_back_to_it) {
  std::set<std::string_view> names;
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    EXPECT_TRUE(names.insert(KindName(kind)).second) << KindName(kind);
    EXPECT_EQ(KindOf(KindName(kind)), kind);
  }
  EXPECT_EQ(KindOf("no such kind"), std::nullopt);
}

TEST(Text, bytes_use_the_largest_unit_that_loses_nothing) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(17), "17 B");
  EXPECT_EQ(FormatBytes(4096), "4 KiB");
  EXPECT_EQ(FormatBytes(Bytes{8280} << 20), "8 280 MiB");
  EXPECT_EQ(FormatBytes(1234567), "1 234 567 B");
}

TEST(Text, amounts_that_are_compared_are_in_one_unit) {
  EXPECT_EQ(RoundedBytes(Bytes{32256} << 10), "31.5 MiB");
  EXPECT_EQ(RoundedBytes(Bytes{146591680} << 10), "139.8 GiB");
  EXPECT_EQ(RoundedBytes(Bytes{128} << 20), "128 MiB");
  EXPECT_EQ(RoundedBytes((Bytes{1} << 20) + 1), "1 MiB");
  EXPECT_EQ(RoundedBytes(Bytes{48} << 10), "48 KiB");
  EXPECT_EQ(RoundedBytes(0), "0 B");
  EXPECT_EQ(RoundedBytes((Bytes{10} << 30) - 1), "10 239.9 MiB");
  EXPECT_EQ(RoundedBytes(Bytes{10} << 30), "10 GiB");
  EXPECT_EQ(RoundedUpBytes((Bytes{10} << 30) - 1), "10 240 MiB");
  EXPECT_EQ(RoundedUpBytes((Bytes{12} << 30) + 1), "12.1 GiB");
  EXPECT_EQ(RoundedUpBytes((Bytes{13} << 30) - 1), "13 GiB");
  EXPECT_EQ(RoundedUpBytes(Bytes{98816} << 10), "96.5 MiB");
  EXPECT_EQ(RoundedUpBytes((Bytes{1} << 20) + 1), "1.1 MiB");
  EXPECT_EQ(RoundedUpBytes((Bytes{2} << 20) - 1), "2 MiB");
  EXPECT_EQ(RoundedUpBytes(Bytes{128} << 20), "128 MiB");
}

TEST(Text, an_event_is_its_kind_and_its_fields) {
  EXPECT_EQ(ToText(EventBody{Mapped{Address{0x7f00}, Bytes{2} << 20, 0, AllocationId{3}, 0}}),
            "mapped: address 0x7f00, 2 MiB, allocation 3");
  EXPECT_EQ(ToText(EventBody{AccessSet{Address{0x7f00}, 4096, {{{LocationType::kDevice, 1}, 3}}}}),
            "access set: address 0x7f00, 4 KiB, device 1 read-write");
  EXPECT_EQ(
      ToText(EventBody{StepFailed{{StepKind::kCreate, AllocationId{3}, {}, Bytes{2} << 20, {}}, Code::kOutOfMemory, 2, "no"}}),
      "step failed: create allocation 3, 2 MiB, out of memory, driver result 2, no");
}

TEST(Text, an_event_tells_what_was_set_and_what_it_is_about) {
  const Bytes kMiB = Bytes{1} << 20;
  const AllocationProperties properties{1, 1, {LocationType::kDevice, 3}, 1, 1, 2, 0};
  const std::vector<std::pair<EventBody, const char*>> all = {
      {SessionOpened{
           SessionId{0x51}, "h", 7, "b", "0.1", "13.0", "2.28.9", {"GPU-1", "GPU-2"}, -3, 2, 0, 0, "slab", "preserve"},
       "session opened: session 0x51, host h, pid 7, boot id b, amem version 0.1, driver version 13.0, nccl version 2.28.9, "
       "gpu uuids GPU-1; GPU-2, group -3, rank 2, layout slab, content preserve"},
      {SessionClosed{"exit"}, "session closed: exit"},
      {SessionBroken{"disk full"}, "session broken: disk full"},
      {GroupChanged{-1}, "group changed: group -1"},
      {GroupChanged{0}, "group changed: group 0"},
      {MulticastDeviceAdded{AllocationId{9}, DeviceOrdinal{0}}, "multicast device added: multicast 9, device 0"},
      {LibraryAttached{"libnccl.so.2", "abc", "preload", "2.28.9", 0x1000},
       "library attached: path libnccl.so.2, build id abc, way preload, nccl version 2.28.9, load address 0x1000"},
      {DriverSymbolBound{"cuMemMap", 13000, true}, "driver symbol bound: cuMemMap, cuda version 13000, replaced"},
      {DriverSymbolBound{"cuFoo", 13000, false}, "driver symbol bound: cuFoo, cuda version 13000"},
      {RangeReserved{Address{0x7f00}, kMiB, 4096, Address{0x10}, 0, {{0x12, 0x34, 0, 0, 0}}, AllocationId{4}},
       "range reserved: allocation 4, address 0x7f00, 1 MiB, alignment 4 KiB, hint 0x10, site +12,+34"},
      {AllocationCreated{AllocationId{4}, kMiB, properties, 0, {}, {}, {}},
       "allocation created: allocation 4, 1 MiB, handle types 1, device 3, compression 1, gpu direct rdma 1, usage 2"},
      {AllocationCreated{AllocationId{4}, kMiB, {}, 0, {}, {{0x12, 0, 0, 0, 0}}, {}, MemoryTag::kUser},
       "allocation created: allocation 4, 1 MiB, site +12, tag user"},
      {AllocationRetained{AllocationId{4}, Address{0x7f00}}, "allocation retained: allocation 4, address 0x7f00"},
      {AllocationRetained{AllocationId{4}, {}}, "allocation retained: allocation 4"},
      {AllocationReleased{AllocationId{4}}, "allocation released: allocation 4"},
      {Unmapped{Address{0x7f00}, kMiB, {}}, "unmapped: address 0x7f00, 1 MiB"},
      {AccessSet{Address{0x7f00}, 17, {{{LocationType::kHostNuma, 1}, 0}, {{LocationType::kHost, 0}, 7}}, {}},
       "access set: address 0x7f00, 17 B, host NUMA node 1 none; host flags 7"},
      {AccessSet{Address{0x7f00}, 17, {}, {}}, "access set: address 0x7f00, 17 B"},
      {Exported{AllocationId{4}, 8}, "exported: allocation 4, handle type 8"},
      {Imported{AllocationId{4}, {SessionId{0x51}, AllocationId{9}}, kMiB, {}, 1, {}, {}, {}},
       "imported: allocation 4, owner 0x51, owner allocation 9, 1 MiB"},
      {ReferenceAdded{AllocationId{4}, SessionId{0x51}, AllocationId{9}}, "reference added: allocation 4, by 0x51, as 9"},
      {PeerConnected{SessionId{0x51}, "h", 7, 0, -1}, "peer connected: peer 0x51, host h, pid 7"},
      {PeerLost{SessionId{0x51}, "died"}, "peer lost: peer 0x51, died"},
      {HostAllocated{Address{0x10}, 64, 0, true}, "host allocated: address 0x10, 64 B, registered"},
      {LegacyAllocated{Address{0x10}, 64, AllocationId{4}, 4096, "", {}},
       "legacy allocated: address 0x10, 64 B, backing 4, offset 4 KiB"},
      {LegacyAllocated{Address{0x10}, 64, {}, 0, "too large", {}}, "legacy allocated: address 0x10, 64 B, too large"},
      {LegacyExported{Address{0x10}, AllocationId{4}}, "legacy exported: address 0x10, backing 4"},
      {MulticastBound{AllocationId{9}, kMiB, {}, 0, 64, Address{0x10}},
       "multicast bound: multicast 9, multicast offset 1 MiB, 64 B, address 0x10"},
      {MulticastUnbound{AllocationId{9}, DeviceOrdinal{1}, kMiB, 64},
       "multicast unbound: multicast 9, device 1, multicast offset 1 MiB, 64 B"},
      {Registered{Address{0x10}, 64, "dma-buf"}, "registered: address 0x10, 64 B, dma-buf"},
      {Registered{Address{0x10}, 64, "dma-buf", {}, RegionId{2}, "mlx5_0", 1, 7},
       "registered: address 0x10, 64 B, dma-buf, region 2, card mlx5_0, domain 1, access flags 7"},
      {RegionKept{RegionId{2}, "mlx5_0: queue pair 7 has 1 send and 0 receives under way"},
       "registration kept: region 2, mlx5_0: queue pair 7 has 1 send and 0 receives under way"},
      {StepBegun{{StepKind::kDrain, {}, {}, 0, {}}}, "step begun: drain the network"},
      {StepBegun{{StepKind::kDeregister, AllocationId{3}, Address{0x10}, 64, {}, 0, RegionId{2}}},
       "step begun: deregister registration 2 of 64 B at 0x10"},
      {PassedThrough{"cuFoo", "a detail", -1}, "passed through: cuFoo, a detail, result -1"},
      {EverythingKept{"a plugin"}, "everything kept: a plugin"},
      {SharedOutside{"libone_shot.so", OutsideKind::kIpcExport, 2, kMiB},
       "shared outside: library libone_shot.so, sharing cudaIpc export, pieces 2, 1 MiB"},
      {CycleBegun{CycleKind::kPause, 3, {SessionId{1}, SessionId{2}}}, "pause 3 begun with 2 sessions"},
      {StepBegun{{StepKind::kQuiesce, {}, {}, 0, DeviceOrdinal{2}}}, "step begun: quiesce device 2"},
      {PhaseDecided{PhaseKind::kPauseSave, false, SessionId{1}, "no memory"},
       "phase decided: pause: save, not passed, culprit 0x1, no memory"},
      {CycleDone{CycleKind::kResume, 3, 2'500'000}, "resume 3 done in 2500 us"},
      {CycleFailed{CycleKind::kPause, 3, false, "why"}, "pause 3 failed and could not be undone: why"},
      {SlabOpened{AllocationId{3}, Address{0x7f00}, {}}, "slab opened: slab 3, address 0x7f00"},
      {Placed{AllocationId{4}, AllocationId{3}, kMiB, false}, "placed: allocation 4, slab 3, offset 1 MiB"},
      {Backed{AllocationId{4}, {}}, "backed: allocation 4"},
      {PartCleared{AllocationId{3}, kMiB, 64}, "part cleared: slab 3, offset 1 MiB, 64 B"},
      {CommunicatorBegun{CommunicatorId{2}, CommunicatorId{1}, "split", 0, 4},
       "communicator begun: communicator 2, parent 1, split, rank 0, ranks 4"},
      {CommunicatorBegun{CommunicatorId{2}, {}, "init all"}, "communicator begun: communicator 2, init all"},
      {CommunicatorReady{CommunicatorId{2}, 0x51, 0, 4, DeviceOrdinal{1}},
       "communicator ready: communicator 2, hash 0x51, rank 0, ranks 4, device 1"},
      {CommunicatorReady{CommunicatorId{2}, 0, 0, 4, DeviceOrdinal{1}},
       "communicator ready: communicator 2, rank 0, ranks 4, device 1"},
      {CommunicatorEnded{CommunicatorId{2}, "aborted"}, "communicator ended: communicator 2, aborted"},
      {CommunicatorSuspended{CommunicatorId{2}, true}, "communicator 2 suspended"},
      {CommunicatorSuspended{CommunicatorId{2}, false}, "communicator 2 resumed"},
      {AllocationCreated{AllocationId{4}, kMiB, {}, 0, {}, {}, {}, MemoryTag::kNccl, CommunicatorId{2}},
       "allocation created: allocation 4, 1 MiB, communicator 2"},
      {SessionClosed{"exit"}, "session closed: exit"},
      {SessionClosed{"exit", 0}, "session closed: exit, exit code 0"},
      {VoteCast{PhaseKind::kPauseSave}, "vote cast: pause: save, ok"},
      {VoteCast{PhaseKind::kPauseSave, false, Code::kDriver, "no answer"},
       "vote cast: pause: save, not ok, driver error, no answer"},
      {MemberHeard{SessionId{0x51}, CycleKind::kResume, PhaseKind::kResumeArrive}, "session 0x51 has come to the resume"},
      {MemberHeard{SessionId{0x51}, CycleKind::kResume, PhaseKind::kResumeOpen, true, false},
       "session 0x51 voted against resume: open"},
      {MemberHeard{SessionId{0x51}, CycleKind::kResume, PhaseKind::kResumeArrive, false, true, 3, 7},
       "session 0x51 (rank 3) has come to the resume"},
      {BallotShown{.kind = CycleKind::kPause,
                   .cycle = 3,
                   .ballot = agreement::Ballot::kCome,
                   .cause = agreement::Cause::kLate,
                   .by = SessionId{0x51},
                   .culprits = {SessionId{0x52}},
                   .members = 2,
                   .yes = 1,
                   .seats = {{.session = SessionId{0x51}, .rank = 0}, {.session = SessionId{0x52}, .rank = 1, .pid = 7}},
                   .message = "no vote came"},
       "ballot come of pause 3 failed, late: rank 1 (pid 7), 1 of 2 voted for, decided by rank 0: no vote came"},
      {BallotShown{.kind = CycleKind::kResume,
                   .cycle = 3,
                   .ballot = agreement::Ballot::kOpen,
                   .cause = agreement::Cause::kAllVoted,
                   .members = 2,
                   .yes = 2,
                   .first_ns = 5'000,
                   .seats = {{.session = SessionId{0x52}, .rank = 1, .vote = agreement::Vote::kYes, .voted_ns = 17'000}}},
       "ballot open of resume 3 passed, 2 of 2 voted for, the last was rank 1 12 us after the first"},
      {BallotShown{.kind = CycleKind::kResume,
                   .cycle = 3,
                   .ballot = agreement::Ballot::kMade,
                   .culprits = {SessionId{0x52}},
                   .members = 3,
                   .yes = 1,
                   .seats = {{.session = SessionId{0x52}, .end = "died"}}},
       "ballot made of resume 3 waits for session 0x52 that died, 1 of 3 voted for"},
      {ProcessSeen{SessionId{0x51}, 7, "stopped", "in do_signal_stop", "silent", -1, 2'000'000'000},
       "process of session 0x51 seen: pid 7 is stopped in do_signal_stop, it answered: silent, waited 2000 ms"},
      {ProcessSeen{SessionId{0x51}, 7, "zombie", "", "", 137},
       "process of session 0x51 seen: pid 7 is zombie, ended by signal 9"},
      {ProcessSeen{SessionId{0x51}, 7, "gone", "", "", 1}, "process of session 0x51 seen: pid 7 is gone, exit code 1"},
      {ThreadSeen{7, "python", "running", "", {"f (lib.so+0x12)", "main (exe+0x34)"}},
       "thread 7 python is running, in f (lib.so+0x12) < main (exe+0x34)"},
      {ThreadSeen{7, "", "sleeping", "in futex", {}}, "thread 7 is sleeping in futex"},
      {LaunchRefused{"cuLaunchKernel"}, "launch refused: cuLaunchKernel"},
      {LaunchRefused{"cuLaunchKernel", 12}, "launch refused: cuLaunchKernel, count 12"},
      {RequestSeen{3, CycleKind::kPause, 77, 1201, true}, "request seen: request 3, pause, by pid 77, target 1201, all tags"},
      {RequestSeen{3, CycleKind::kPause, 77}, "request seen: request 3, pause, by pid 77"},
      {RequestSeen{4, CycleKind::kResume, 78}, "request seen: request 4, resume, by pid 78"},
      {SafepointReached{3, 1201}, "safepoint reached: request 3, safepoint 1201"},
      {SafepointReached{3, 0}, "safepoint reached: request 3"},
      {RequestEnded{3, CycleKind::kPause, Code::kOk, "", 2U << 20}, "request 3 to pause done, 2 MiB given back"},
      {RequestEnded{3, CycleKind::kPause, Code::kPeerLost, "the tool has ended"},
       "request 3 to pause failed: peer lost: the tool has ended"},
      {Frozen{1'000'000, 2'501'000'000, 2U << 20, ""}, "was frozen by the driver for 2500 ms, 2 MiB moved out"},
      {FreezeStep{.goal = "frozen", .step = "begin"}, "freeze begun"},
      {FreezeStep{.goal = "frozen", .step = "lock"}, "freeze: begins to lock"},
      {FreezeStep{.goal = "running", .step = "restore", .done = true}, "thaw: made restore"},
      {FreezeStep{.goal = "running", .outcome = "stuck", .message = "why"}, "thaw ended, the process is stuck: why"},
      {Frozen{0, 1'000'000, 0, "a -> b"}, "was frozen by the driver for 1 ms, 0 B moved out, on other GPUs since: a -> b"},
      {Condensed{SequenceNumber{70}, 1, 0, {}}, "snapshot of everything up to event 70"}};
  for (const auto& [body, sentence] : all) EXPECT_EQ(ToText(body), sentence);
}

TEST(Text, of_many_that_are_waited_for_some_are_named) {
  BallotShown shown{.kind = CycleKind::kPause, .cycle = 3, .members = 100'001, .yes = 1};
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    shown.culprits.push_back(SessionId{0x100 + i});
    shown.seats.push_back({.session = SessionId{0x100 + i}, .rank = static_cast<std::int32_t>(i)});
  }
  EXPECT_EQ(ToText(shown),
            "ballot come of pause 3 waits for rank 0, rank 1, rank 2, rank 3, rank 4, rank 5, rank 6, rank 7, rank 8, rank 9, "
            "rank 10, rank 11, rank 12, rank 13, rank 14, rank 15 and 99984 more, 1 of 100001 voted for");
}

}  // namespace
}  // namespace amem
