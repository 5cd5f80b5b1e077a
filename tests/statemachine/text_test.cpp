#include <gtest/gtest.h>

#include <set>

#include "statemachine/amounts.h"
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
  EXPECT_EQ(RoundedBytes(Bytes{146591680} << 10), "143 155.9 MiB");
  EXPECT_EQ(RoundedBytes(Bytes{128} << 20), "128 MiB");
  EXPECT_EQ(RoundedBytes((Bytes{1} << 20) + 1), "1 MiB");
  EXPECT_EQ(RoundedBytes(Bytes{48} << 10), "48 KiB");
  EXPECT_EQ(RoundedBytes(0), "0 B");
  EXPECT_EQ(RoundedUpBytes(Bytes{98816} << 10), "96.5 MiB");
  EXPECT_EQ(RoundedUpBytes((Bytes{1} << 20) + 1), "1.1 MiB");
  EXPECT_EQ(RoundedUpBytes((Bytes{2} << 20) - 1), "2 MiB");
  EXPECT_EQ(RoundedUpBytes(Bytes{128} << 20), "128 MiB");
}

TEST(Text, an_event_reads_as_a_sentence) {
  EXPECT_EQ(ToText(EventBody{Mapped{Address{0x7f00}, Bytes{2} << 20, 0, AllocationId{3}, 0}}),
            "mapped 0x7f00 2 MiB of allocation 3");
  EXPECT_EQ(ToText(EventBody{AccessSet{Address{0x7f00}, 4096, {{{LocationType::kDevice, 1}, 3}}}}),
            "access to 0x7f00 4 KiB for device 1 read-write");
  EXPECT_EQ(
      ToText(EventBody{StepFailed{{StepKind::kCreate, AllocationId{3}, {}, Bytes{2} << 20, {}}, Code::kOutOfMemory, 2, "no"}}),
      "step failed: create allocation 3, 2 MiB: out of memory: no");
}

TEST(Text, each_kind_of_event_has_a_sentence_of_its_own) {
  const Bytes kMiB = Bytes{1} << 20;
  const AllocationProperties properties{1, 1, {LocationType::kDevice, 3}, 1, 1, 2, 0};
  const std::vector<std::pair<EventBody, const char*>> all = {
      {SessionOpened{
           SessionId{0x51}, "h", 7, "b", "0.1", "13.0", "2.28.9", {"GPU-1", "GPU-2"}, -3, 2, 0, 0, "slab", "preserve"},
       "session 0x51 opened by rank 2, pid 7 on h, group -3, driver 13.0, NCCL 2.28.9, 2 GPUs, layout slab, content preserve, "
       "AMem 0.1"},
      {SessionClosed{"exit"}, "session closed: exit"},
      {SessionBroken{"disk full"}, "session broken: disk full"},
      {GroupChanged{-1}, "group is now -1"},
      {LibraryAttached{"libnccl.so.2", "abc", "preload", "2.28.9", 0x1000},
       "attached (preload) to libnccl.so.2, NCCL 2.28.9, build abc, loaded at 0x1000"},
      {DriverSymbolBound{"cuMemMap", 13000, true}, "NCCL asked for cuMemMap of CUDA 13000"},
      {DriverSymbolBound{"cuFoo", 13000, false}, "NCCL asked for cuFoo of CUDA 13000, which passes through"},
      {RangeReserved{Address{0x7f00}, kMiB, 4096, Address{0x10}, 0, {{0x12, 0x34, 0, 0, 0}}, AllocationId{4}},
       "range reserved 0x7f00 1 MiB aligned to 4 KiB asked at 0x10 of allocation 4 in its slab at +12,+34"},
      {AllocationCreated{AllocationId{4}, kMiB, properties, 0, {}, {}, {}},
       "allocation 4 created, 1 MiB on device 3, handle types 0x1, GPUDirect RDMA, compression 1, usage 0x2"},
      {AllocationCreated{AllocationId{4}, kMiB, {}, 0, {}, {{0x12, 0, 0, 0, 0}}, {}, MemoryTag::kUser},
       "allocation 4 created, 1 MiB on location type 0 for the program (ncclMemAlloc) at +12"},
      {AllocationRetained{AllocationId{4}, Address{0x7f00}}, "allocation 4 retained by address 0x7f00"},
      {AllocationRetained{AllocationId{4}, {}}, "allocation 4 retained"},
      {AllocationReleased{AllocationId{4}}, "allocation 4 released"},
      {Unmapped{Address{0x7f00}, kMiB, {}}, "unmapped 0x7f00 1 MiB"},
      {AccessSet{Address{0x7f00}, 17, {{{LocationType::kHostNuma, 1}, 0}, {{LocationType::kHost, 0}, 7}}, {}},
       "access to 0x7f00 17 B for host NUMA node 1 none, host flags 7"},
      {AccessSet{Address{0x7f00}, 17, {}, {}}, "access to 0x7f00 17 B for no device"},
      {Exported{AllocationId{4}, 8}, "allocation 4 exported, handle type 8"},
      {Imported{AllocationId{4}, {SessionId{0x51}, AllocationId{9}}, kMiB, {}, 1, {}, {}, {}},
       "allocation 4 imported, 1 MiB of allocation 9 of session 0x51 on location type 0"},
      {ReferenceAdded{AllocationId{4}, SessionId{0x51}, AllocationId{9}},
       "reference to allocation 4 added by session 0x51 as allocation 9"},
      {PeerConnected{SessionId{0x51}, "h", 7, 0, -1}, "peer 0x51 connected: pid 7 on h, group 0"},
      {PeerLost{SessionId{0x51}, "died"}, "peer 0x51 lost: died"},
      {HostAllocated{Address{0x10}, 64, 0, true}, "host memory registered 0x10 64 B"},
      {LegacyAllocated{Address{0x10}, 64, AllocationId{4}, 4096, "", {}},
       "cuMemAlloc 0x10 64 B in allocation 4 at offset 4 KiB"},
      {LegacyAllocated{Address{0x10}, 64, {}, 0, "too large", {}}, "cuMemAlloc 0x10 64 B kept by the driver: too large"},
      {LegacyExported{Address{0x10}, AllocationId{4}}, "IPC handle made of 0x10 in allocation 4"},
      {MulticastBound{AllocationId{9}, kMiB, {}, 0, 64, Address{0x10}},
       "address 0x10 64 B bound to multicast object 9 at 1 MiB"},
      {MulticastUnbound{AllocationId{9}, DeviceOrdinal{1}, kMiB, 64}, "device 1 64 B unbound from multicast object 9 at 1 MiB"},
      {Registered{Address{0x10}, 64, "dma-buf"}, "registered for RDMA (dma-buf) 0x10 64 B"},
      {PassedThrough{"cuFoo", "a detail", -1}, "cuFoo passed through: a detail, result -1"},
      {EverythingKept{"a plugin"}, "from now on all memory stays: a plugin"},
      {CycleBegun{CycleKind::kPause, 3, {SessionId{1}, SessionId{2}}}, "pause 3 begun with 2 sessions"},
      {StepBegun{{StepKind::kQuiesce, {}, {}, 0, DeviceOrdinal{2}}}, "step begun: quiesce device 2"},
      {PhaseDecided{PhaseKind::kPauseSave, false, SessionId{1}, "no memory"}, "phase pause: save failed: no memory"},
      {CycleDone{CycleKind::kResume, 3, 2'500'000}, "resume 3 done in 2500 us"},
      {CycleFailed{CycleKind::kPause, 3, false, "why"}, "pause 3 failed and could not be undone: why"},
      {SlabOpened{AllocationId{3}, Address{0x7f00}, {}}, "slab 3 opened at 0x7f00"},
      {Placed{AllocationId{4}, AllocationId{3}, kMiB, false}, "allocation 4 placed in slab 3 at offset 1 MiB"},
      {Backed{AllocationId{4}, {}}, "allocation 4 left its slab for memory of its own"},
      {PartCleared{AllocationId{3}, kMiB, 64}, "slab 3 cleared at offset 1 MiB, 64 B"},
      {CommunicatorBegun{CommunicatorId{2}, CommunicatorId{1}, "split", 0, 4},
       "communicator 2 begun by split of communicator 1 as rank 0 of 4"},
      {CommunicatorBegun{CommunicatorId{2}, {}, "init all"}, "communicator 2 begun by init all"},
      {CommunicatorReady{CommunicatorId{2}, 0x51, 0, 4, DeviceOrdinal{1}},
       "communicator 2 ready, rank 0 of 4 on device 1, hash 0x51"},
      {CommunicatorReady{CommunicatorId{2}, 0, 0, 4, DeviceOrdinal{1}},
       "communicator 2 ready, rank 0 of 4 on device 1, hash unknown"},
      {CommunicatorEnded{CommunicatorId{2}, "aborted"}, "communicator 2 ended: aborted"},
      {CommunicatorSuspended{CommunicatorId{2}, true}, "communicator 2 suspended"},
      {CommunicatorSuspended{CommunicatorId{2}, false}, "communicator 2 resumed"},
      {AllocationCreated{AllocationId{4}, kMiB, {}, 0, {}, {}, {}, MemoryTag::kNccl, CommunicatorId{2}},
       "allocation 4 created, 1 MiB on location type 0 for communicator 2"},
      {SessionClosed{"exit"}, "session closed: exit"},
      {SessionClosed{"exit", 0}, "session closed: exit, exit code 0"},
      {VoteCast{PhaseKind::kPauseSave}, "voted for pause: save"},
      {VoteCast{PhaseKind::kPauseSave, false, Code::kDriver, "no answer"},
       "voted against pause: save: driver error: no answer"},
      {MemberHeard{SessionId{0x51}, CycleKind::kResume, PhaseKind::kResumeArrive}, "session 0x51 has come to the resume"},
      {MemberHeard{SessionId{0x51}, CycleKind::kResume, PhaseKind::kResumeOpen, true, false},
       "session 0x51 voted against resume: open"},
      {MemberHeard{SessionId{0x51}, CycleKind::kResume, PhaseKind::kResumeArrive, false, true, 3, 7},
       "session 0x51 (rank 3) has come to the resume"},
      {ProcessSeen{SessionId{0x51}, 7, "stopped", "in do_signal_stop", "silent", -1, 2'000'000'000},
       "process of session 0x51 seen: pid 7 is stopped in do_signal_stop, it answered: silent, waited 2000 ms"},
      {ProcessSeen{SessionId{0x51}, 7, "zombie", "", "", 137},
       "process of session 0x51 seen: pid 7 is zombie, ended by signal 9"},
      {ProcessSeen{SessionId{0x51}, 7, "gone", "", "", 1}, "process of session 0x51 seen: pid 7 is gone, exit code 1"},
      {ThreadSeen{7, "python", "running", "", {"f (lib.so+0x12)", "main (exe+0x34)"}},
       "thread 7 python is running, in f (lib.so+0x12) < main (exe+0x34)"},
      {ThreadSeen{7, "", "sleeping", "in futex", {}}, "thread 7 is sleeping in futex"},
      {LaunchRefused{"cuLaunchKernel"}, "cuLaunchKernel refused, memory is paused"},
      {LaunchRefused{"cuLaunchKernel", 12}, "cuLaunchKernel refused, memory is paused (12 times)"},
      {RequestSeen{3, CycleKind::kPause, 77, 1201, true},
       "asked from outside (request 3, by pid 77) to pause with all tags at safe point 1201"},
      {RequestSeen{3, CycleKind::kPause, 77},
       "asked from outside (request 3, by pid 77) to pause at a safe point that is not agreed on yet"},
      {RequestSeen{4, CycleKind::kResume, 78}, "asked from outside (request 4, by pid 78) to resume"},
      {SafepointReached{3, 1201}, "waits in safe point 1201 for request 3"},
      {SafepointReached{3, 0}, "waits in the program's own resume for request 3"},
      {RequestEnded{3, CycleKind::kPause, Code::kOk, "", 2U << 20}, "request 3 to pause done, 2 MiB given back"},
      {RequestEnded{3, CycleKind::kPause, Code::kPeerLost, "the tool has ended"},
       "request 3 to pause failed: peer lost: the tool has ended"},
      {Frozen{1'000'000, 2'501'000'000, 2U << 20, ""}, "was frozen by the driver for 2500 ms, 2 MiB moved out"},
      {Frozen{0, 1'000'000, 0, "a -> b"}, "was frozen by the driver for 1 ms, 0 B moved out, on other GPUs since: a -> b"},
      {Condensed{SequenceNumber{70}, 1, 0, {}}, "snapshot of everything up to event 70"}};
  for (const auto& [body, sentence] : all) EXPECT_EQ(ToText(body), sentence);
}

}  // namespace
}  // namespace amem
