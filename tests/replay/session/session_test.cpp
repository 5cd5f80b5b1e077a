// The session on the simulator: what NCCL sees, what the journal says, what a pause and a resume do to memory.
#include "replay/session/session.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <future>
#include <thread>
#include <utility>

#include "replay/peers/token.h"
#include "tests/in_thread.h"
#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::k2M, test::kDevice, test::kMiB, test::Process;

// What happens to NCCL's allocations, without slabs between them and the driver.
SessionOptions Direct() {
  SessionOptions options;
  options.layout = Layout::kDirect;
  return options;
}

class SessionTest : public test::TwoProcesses {
 protected:
  SessionTest() : TwoProcesses(Direct(), 256 * kMiB) {}
};

class BrokenSession : public SessionTest {
 protected:
  void TearDown() override {  // the journal of a broken session does not go on
    for (const Process* p : {&a, &b}) EXPECT_TRUE(p->session->Close("test").ok());
  }
};

TEST_F(SessionTest, an_import_is_journaled_on_both_sides) {
  const AllocationId own = a.Create();
  const AllocationId theirs = Pass(own);
  EXPECT_EQ(a.Count<Exported>(), 1U);
  EXPECT_EQ(a.Count<ReferenceAdded>(), 1U);
  EXPECT_EQ(b.Count<Imported>(), 1U);
  EXPECT_EQ(b.session->CopyState().allocations.at(theirs).remote, (RemoteAllocation{SessionId{1}, own}));
  EXPECT_TRUE(b.session->nccl().Release(theirs).ok());
  EXPECT_EQ(a.Count<ReferenceDropped>(), 1U);
}

TEST_F(SessionTest, a_pause_gives_all_memory_back_and_a_resume_brings_the_same_bytes_to_the_same_addresses) {
  CyclesBringTheSameBytesToTheSameAddresses(6 * k2M);
}

// The two may be about to become one set, whose pauses would wait for each other.
TEST_F(SessionTest, an_import_that_waits_for_an_owner_in_a_pause_holds_up_no_pause_of_its_own_session) {
  const AllocationId id = a.Create();
  a.Place(id);
  const auto token = a.session->sharing().Export(id);
  ASSERT_TRUE(token.ok());
  std::promise<void> in_a_pause, go_on;
  a.simulator->SetHook([&, first = true](std::string_view call, std::uint64_t) mutable {
    if (call != "Synchronize" || !std::exchange(first, false)) return 0;
    in_a_pause.set_value();
    go_on.get_future().wait();
    return 0;
  });
  auto pause = test::InThread([&] { return a.session->Pause(); });
  in_a_pause.get_future().wait();
  timespec used{};
  auto import = test::InThread([&] {
    Status status = b.session->sharing().Import(token->get(), {}).status();
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return status;
  });
  while (!a.session->CopyState().peers.contains(SessionId{2})) std::this_thread::yield();  // it has asked
  const Status paused = b.session->Pause();
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_EQ(import.wait_for(std::chrono::seconds(0)), std::future_status::timeout) << "it waits for the end of a's pause";
  EXPECT_TRUE(b.session->Resume().ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  go_on.set_value();
  EXPECT_TRUE(pause.get().ok());
  EXPECT_EQ(import.get().code(), Code::kRefused) << "it is paused at its owner";
  EXPECT_LT(used.tv_sec * 1'000 + used.tv_nsec / 1'000'000, 20) << "milliseconds of a processor, while it waits";
  EXPECT_TRUE(a.session->Resume().ok());
}

// A cycle may wait for other ranks, and those for the thread that makes the call.
TEST_F(SessionTest, the_release_of_a_context_waits_for_no_pause) {
  const AllocationId id = a.Create();
  std::byte* const memory = a.Place(id);
  std::future<int> released;
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    if (call == "Unmap" && !released.valid()) {
      released = test::InThread([&] { return a.session->devices().ReleaseContext(kDevice, [] { return 7; }).result; });
      EXPECT_EQ(released.wait_for(std::chrono::seconds(5)), std::future_status::ready);
    }
    return 0;
  });
  EXPECT_TRUE(a.session->Pause().ok());
  a.simulator->SetHook({});
  ASSERT_TRUE(released.valid());
  EXPECT_EQ(released.get(), 7);
  EXPECT_TRUE(a.session->Resume().ok());
  a.Free(memory, id);
}

TEST_F(BrokenSession, a_reset_of_a_device_with_memory_of_nccls_is_why_later_pauses_are_refused) {
  a.Place(a.Create());
  a.session->devices().Forget(DeviceOrdinal{kDevice.value + 1});
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_TRUE(a.session->Resume().ok());
  a.session->devices().Forget(kDevice);
  const Status refused = a.session->Pause();
  EXPECT_EQ(refused.code(), Code::kBroken);
  EXPECT_NE(refused.message().find("the program reset device 0 (cudaDeviceReset) while 2 MiB there were AMem's or NCCL's"),
            std::string::npos)
      << refused.message();
}

TEST_F(BrokenSession, a_release_of_a_context_with_memory_of_nccls_is_why_later_pauses_are_refused) {
  a.Place(a.Create());
  EXPECT_EQ(a.session->devices().ReleaseContext(kDevice, [] { return 0; }).result, 0);
  const Status refused = a.session->Pause();
  EXPECT_EQ(refused.code(), Code::kBroken);
  EXPECT_NE(
      refused.message().find("the program gave up the primary context of device 0 (cuDevicePrimaryCtxRelease) while 2 MiB "
                             "there were AMem's or NCCL's"),
      std::string::npos)
      << refused.message();
}

TEST_F(BrokenSession, a_reset_of_a_device_while_a_tag_is_paused_frees_its_memory_and_is_why_later_pauses_are_refused) {
  Pools& pools = a.session->pools();
  const PoolId tag = *pools.Open("weights", PoolPolicy::kPreserve);
  const Address memory = *pools.Allocate(tag, k2M, kDevice);
  std::memset(reinterpret_cast<void*>(memory.value), 1, k2M);
  ASSERT_TRUE(pools.Pause(tag, {}).ok());
  a.session->devices().Forget(kDevice);
  EXPECT_TRUE(a.session->CopyState().pools.at(tag).parts.empty());
  EXPECT_TRUE(pools.Resume(tag, {}).ok());
  EXPECT_NE(pools.Pause(tag, {}).message().find("while contents of paused memory were in host memory that was pinned there"),
            std::string::npos);
}

TEST_F(SessionTest, contents_of_memory_that_its_owner_never_mapped_survive) {
  const AllocationId own = a.Create();
  std::byte* theirs = b.Place(Pass(own));
  std::memset(theirs, 0x77, k2M);
  Both(&Session::Pause);
  Both(&Session::Resume);
  EXPECT_EQ(theirs[0], std::byte{0x77});
  EXPECT_EQ(theirs[k2M - 1], std::byte{0x77});
}

TEST_F(SessionTest, memory_freed_by_its_owner_lives_until_the_peer_lets_go) {
  const AllocationId own = a.Create();
  const AllocationId theirs = Pass(own);
  EXPECT_TRUE(a.session->nccl().Release(own).ok());
  EXPECT_EQ(a.InUse(), k2M);
  Both(&Session::Pause);
  EXPECT_EQ(a.InUse(), 0U);
  Both(&Session::Resume);
  EXPECT_TRUE(b.session->nccl().Release(theirs).ok());
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_TRUE(a.session->CopyState().allocations.empty());
}

TEST_F(SessionTest, everything_can_be_freed_while_paused) {
  const AllocationId own = a.Create();
  std::byte* mine = a.Place(own);
  EXPECT_TRUE(a.session->Pause().ok());
  const Address address{reinterpret_cast<std::uint64_t>(mine)};
  EXPECT_EQ(*a.session->nccl().Retain(address), own);
  EXPECT_TRUE(a.session->nccl().Release(own).ok());
  EXPECT_TRUE(a.session->nccl().Unmap(address, k2M).ok());
  EXPECT_TRUE(a.session->nccl().Release(own).ok());
  EXPECT_TRUE(a.session->nccl().FreeRange(address, k2M).ok());
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_TRUE(a.simulator->Snapshot().ranges.empty());
}

TEST_F(SessionTest, what_needs_memory_is_refused_while_paused) {
  const AllocationId own = a.Create(), not_mapped = a.Create();
  const Address address{reinterpret_cast<std::uint64_t>(a.Place(own))};
  const Address range = *a.session->nccl().Reserve(k2M, 0, {}, 0, {});
  const auto token = b.session->sharing().Export(b.Create());
  const auto handle = b.session->legacy().Export(*b.session->legacy().Allocate(8, kDevice, {}));
  const AccessDescriptor access{{LocationType::kDevice, kDevice.value}, 3};
  EXPECT_TRUE(a.session->Pause().ok());
  const State paused = a.session->CopyState();
  const std::pair<const char*, Status> refused[] = {
      {"create", a.session->nccl().Create(k2M, Process::On(kDevice), 0, {}).status()},
      {"reserve", a.session->nccl().Reserve(k2M, 0, {}, 0, {}).status()},
      {"map", a.session->nccl().Map(range, k2M, 0, not_mapped, 0)},
      {"set access", a.session->nccl().SetAccess(address, k2M, std::span(&access, 1))},
      {"import", a.session->sharing().Import(token->get(), {}).status()},
      {"cuMemAlloc", a.session->legacy().Allocate(8, kDevice, {}).status()},
      {"cuIpcOpenMemHandle", a.session->legacy().Import(*handle, kDevice, {}).status()},
  };
  for (const auto& [call, status] : refused) {
    EXPECT_EQ(status.code(), Code::kRefused) << call;
    EXPECT_EQ(status.driver_result(), cuda::kIllegalState) << call;
    EXPECT_NE(status.message().find(call), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("call ncclResume"), std::string::npos) << call;
  }
  EXPECT_EQ(a.session->CopyState(), paused) << "nothing was recorded";
  EXPECT_TRUE(a.session->Resume().ok());
}

TEST_F(SessionTest, a_copy_touches_paused_memory_if_any_of_its_bytes_does) {
  const AllocationId own = a.Create();
  const Address address{reinterpret_cast<std::uint64_t>(a.Place(own))};
  EXPECT_TRUE(a.session->Pause().ok());
  const auto touches = [&](std::uint64_t at, Bytes bytes) { return a.session->calls().TouchesPaused(Address{at}, bytes); };
  EXPECT_TRUE(touches(address.value + kMiB, 1));
  EXPECT_TRUE(touches(address.value + k2M - 1, 1));
  EXPECT_TRUE(touches(address.value - 1, 2)) << "begins before it and reaches into it";
  EXPECT_TRUE(touches(address.value - k2M, 3 * k2M)) << "contains it";
  EXPECT_FALSE(touches(address.value - 1, 1));
  EXPECT_FALSE(touches(address.value + k2M, 1));
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_FALSE(touches(address.value, k2M));
}

TEST_F(SessionTest, memory_comes_back_after_a_pause_only_for_a_session_that_holds_a_reference) {
  const AllocationId own = a.Create();
  const AllocationId as = Pass(own);
  const PeerIdentity importer{SessionId{2}, "localhost", 1, 0, 1}, other{SessionId{7}, "localhost", 1, 0, 6};
  EXPECT_TRUE(a.session->peer_answers().OnReimport(importer, {own, as}).ok());
  const auto unauthenticated = a.session->peer_answers().OnReimport(other, {own, as});
  EXPECT_EQ(unauthenticated.status().code(), Code::kRefused);
  EXPECT_NE(unauthenticated.status().message().find("holds no reference"), std::string::npos);
  EXPECT_EQ(a.session->peer_answers().OnReimport(importer, {own, AllocationId{as.value + 1}}).status().code(), Code::kRefused);
  EXPECT_EQ(a.session->peer_answers().OnReimport(importer, {AllocationId{99}, as}).status().code(), Code::kRefused);
  EXPECT_TRUE(b.session->nccl().Release(as).ok());
  EXPECT_EQ(a.session->peer_answers().OnReimport(importer, {own, as}).status().code(), Code::kRefused)
      << "after it was dropped";
}

// ---- checks that stay on -----------------------------------------------------------------------------------------------

// Events that nothing on the driver stands behind take the state away from under the session; its next call on that memory
// must notice, answer, and refuse pauses from then on.
class BrokenBooks : public SessionTest {
 protected:
  void TearDown() override {
    const State state = a.session->CopyState();
    EXPECT_NE(state.broken.find("check failed at "), std::string::npos) << state.broken;
    EXPECT_NE(state.broken.find(expected), std::string::npos) << state.broken;
    const Status refused = a.session->Pause();
    EXPECT_EQ(refused.code(), Code::kBroken);
    EXPECT_NE(refused.message().find(expected), std::string::npos) << refused.message();
    EXPECT_EQ(a.Count<SessionBroken>(), 1U);
    EXPECT_TRUE(a.session->Close("test").ok());
    EXPECT_TRUE(b.session->Close("test").ok());
  }
  std::string expected;
};

TEST_F(BrokenBooks, an_opened_ipc_handle_without_a_mapping) {
  const AllocationId id = a.Create();
  a.session->records().Note(LegacyImported{Address{0x5000}, id});
  expected = "nothing is mapped at an opened IPC handle, 0x5000";
  EXPECT_EQ(a.session->legacy().Close(Address{0x5000}).code(), Code::kBroken);
}

TEST_F(BrokenBooks, a_block_of_cuMemAlloc_that_is_not_mapped) {
  const Address address = *a.session->legacy().Allocate(8, kDevice, {});
  a.session->records().Note(Unmapped{address, k2M, {}});
  expected = "no entry for address " + Hex(address.value);
  EXPECT_EQ(a.session->legacy().Free(address).code(), Code::kBroken);
}

TEST_F(BrokenBooks, a_block_of_cuMemAlloc_whose_allocation_is_gone) {
  const Address address = *a.session->legacy().Allocate(8, kDevice, {});
  const AllocationId id = a.session->CopyState().legacy.at(address).backing;
  a.session->records().Note(AllocationReleased{id});  // the mapping holds it, until LegacyFree unmaps it
  expected = "no entry for " + ToText(id);
  EXPECT_EQ(a.session->legacy().Free(address).code(), Code::kBroken);
}

TEST_F(SessionTest, pause_and_resume_are_idempotent) {
  a.Place(a.Create());
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_EQ(a.Count<CycleBegun>(), 1U);
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_EQ(a.Count<CycleBegun>(), 2U);
}

TEST_F(SessionTest, out_of_memory_on_resume_says_what_is_needed_and_can_be_tried_again) {
  std::byte* mine = a.Place(a.Create(50 * k2M), 50 * k2M);
  mine[123] = std::byte{9};
  EXPECT_TRUE(a.session->Pause().ok());
  auto hog = b.simulator->Create(Bytes{200} << 20, {1, 0, {LocationType::kDevice, 0}, 0, 0, 0, 0}, 0);
  ASSERT_TRUE(hog.ok());
  const Status failed = a.session->Resume();
  EXPECT_EQ(failed.code(), Code::kOutOfMemory);
  EXPECT_NE(failed.message().find("device 0 has 56 MiB free of 256 MiB, and 100 MiB must come back"), std::string::npos)
      << failed.message();
  EXPECT_NE(failed.message().find("stays paused, with its contents kept"), std::string::npos) << failed.message();
  EXPECT_TRUE(a.session->paused());
  EXPECT_TRUE(b.simulator->Release(*hog).ok());
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_EQ(mine[123], std::byte{9});
}

// Communicators and tensors come and go; what is held at a time is little.
TEST_F(SessionTest, host_memory_is_not_pinned_for_what_was_freed) {
  SessionOptions options = Direct();
  options.user_memory = UserMemory::kRelease;
  Process c(3, world, network, options);
  const PoolId pool = *c.session->pools().Open("activations", PoolPolicy::kPreserve);
  for (int round = 0; round < 12; ++round) {
    const AllocationId nccl = c.Create(64 * kMiB), program = c.Create(64 * kMiB, true);
    const Address legacy = *c.session->legacy().Allocate(64 * kMiB, kDevice, {}, false);
    const Address part = *c.session->pools().Allocate(pool, 32 * kMiB, kDevice);
    EXPECT_TRUE(c.session->pools().Free(part, nullptr).ok());
    EXPECT_TRUE(c.session->legacy().Free(legacy).ok());
    for (const AllocationId id : {nccl, program}) EXPECT_TRUE(c.session->nccl().Release(id).ok());
  }
  // As long as something is pinned ahead, it is for what was held at once.
  Bytes pinned = 0, before = 0;
  do {
    before = std::exchange(pinned, c.Pinned());
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  } while (pinned == 0 || pinned != before);
  EXPECT_LE(pinned, 256 * kMiB);
}

TEST_F(SessionTest, host_memory_goes_back_in_a_pause_when_what_is_held_has_shrunk_for_good) {
  SessionOptions options = Direct();
  options.user_memory = UserMemory::kRelease;
  options.unpins_for = 0;
  Process c(3, world, network, options);
  const AllocationId large = c.Create(192 * kMiB, true);
  for (int i = 0; i < 10'000 && c.Pinned() < 192 * kMiB; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(c.session->nccl().Release(large).ok());
  std::memset(c.Place(c.Create()), 0x5a, k2M);
  for (int pause = 0; pause < 3; ++pause) {
    EXPECT_GE(c.Pinned(), 192 * kMiB) << "it may come again, pause " << pause;
    ASSERT_TRUE(c.session->Pause().ok());
    ASSERT_TRUE(c.session->Resume().ok());
  }
  EXPECT_LE(c.Pinned(), 96 * kMiB);
}

constexpr Bytes kLeftFree = 256 * kMiB;  // for everything else on the host

TEST_F(SessionTest, a_pause_that_needs_more_than_the_host_has_is_refused_before_anything_is_pinned) {
  SessionOptions options = Direct();
  options.pinned_bytes = options.pool_pinned_bytes = 0;
  const auto host = std::make_shared<SimulatedHost>(kLeftFree + 64 * kMiB);
  Process c(3, world, network, options, host);
  const PoolId pool = *c.session->pools().Open("weights", PoolPolicy::kPreserve);
  const Address part = *c.session->pools().Allocate(pool, 96 * kMiB, kDevice);
  auto* const bytes = reinterpret_cast<std::byte*>(part.value);
  std::memset(bytes, 1, 96 * kMiB);
  const Status failed = c.session->pools().Pause(pool, {});
  ASSERT_EQ(failed.code(), Code::kOutOfMemory) << failed.message();
  for (const char* text : {"pin 96 MiB of host memory", "320 MiB are left by the simulated host", "the tag runs on as before"})
    EXPECT_NE(failed.message().find(text), std::string::npos) << failed.message();
  EXPECT_EQ(c.simulator->Calls("AllocatePinned"), 0U);
  // The guess is too much where most is zero, which is found before it is refused.
  std::memset(bytes + 32 * kMiB, 0, 64 * kMiB);
  const Status paused = c.session->pools().Pause(pool, {});
  ASSERT_TRUE(paused.ok()) << paused.message();
  ASSERT_TRUE(c.session->pools().Resume(pool, {}).ok());
  EXPECT_EQ(bytes[0], std::byte{1});
  EXPECT_FALSE(host->exhausted);
}

TEST_F(SessionTest, a_pause_that_fails_gives_back_what_it_pinned_and_no_more) {
  SessionOptions options = Direct();
  options.pinned_bytes = options.pool_pinned_bytes = 0;
  Process c(3, world, network, options);
  const AllocationId id = c.Create(64 * kMiB);
  std::memset(c.Place(id, 64 * kMiB), 0x33, 64 * kMiB);
  ASSERT_TRUE(c.simulator->FailNext("Release", 1, cuda::kUnknown).ok());
  EXPECT_FALSE(c.session->Pause().ok());
  EXPECT_GT(c.simulator->Calls("AllocatePinned"), 0U);
  EXPECT_EQ(c.Pinned(), 0U);
  ASSERT_TRUE(c.session->Pause().ok());
  ASSERT_TRUE(c.session->Resume().ok());
  const Bytes kept = c.Pinned();
  EXPECT_GE(kept, 64 * kMiB);
  ASSERT_TRUE(c.simulator->FailNext("Release", 1, cuda::kUnknown).ok());
  EXPECT_FALSE(c.session->Pause().ok());
  EXPECT_EQ(c.Pinned(), kept);
}

// They share no memory with each other, and all have looked before the first one takes anything.
TEST_F(SessionTest, ranks_that_pause_at_once_do_not_count_on_the_same_memory_of_the_host) {
  constexpr Bytes kEach = 32 * kMiB;
  const auto file = std::filesystem::temp_directory_path() / fmt::format("amem-claims-{}", getpid());
  SessionOptions options = Direct();
  options.pinned_bytes = options.pool_pinned_bytes = 0;
  options.host_claims = file;
  const auto host = std::make_shared<SimulatedHost>(kLeftFree + 2 * kEach + kEach / 2);
  std::vector<std::unique_ptr<Process>> ranks;
  for (std::uint64_t id = 3; id < 7; ++id) {
    ranks.push_back(std::make_unique<Process>(id, world, network, options, host));
    std::memset(ranks.back()->Place(ranks.back()->Create(kEach), kEach), 0x33, kEach);
    ASSERT_TRUE(ranks.back()->simulator->SetLatency("AllocatePinned", std::chrono::milliseconds(100)).ok());
  }
  std::vector<Status> paused(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) threads.emplace_back([&, i] { paused[i] = ranks[i]->session->Pause(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(host->exhausted) << "a rank would have been killed";
  std::size_t succeeded = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    succeeded += paused[i].ok() ? 1 : 0;
    if (paused[i].ok()) continue;
    EXPECT_EQ(paused[i].code(), Code::kOutOfMemory) << paused[i].message();
    EXPECT_EQ(ranks[i]->Pinned(), 0U);
  }
  EXPECT_GE(succeeded, 1U);
  EXPECT_LE(succeeded, 2U);
  std::filesystem::remove(file);
}

// What ranks of several hosts do before they agree that all are idle.
TEST_F(SessionTest, idle_devices_can_be_awaited_without_a_pause) {
  a.Place(a.Create());
  const std::uint64_t before = a.simulator->Calls("Synchronize");
  EXPECT_TRUE(a.session->devices().AwaitIdle().ok());
  EXPECT_EQ(a.simulator->Calls("Synchronize"), before + 1);
  ASSERT_TRUE(a.simulator->FailNext("Synchronize", 1, cuda::kUnknown).ok());
  EXPECT_FALSE(a.session->devices().AwaitIdle().ok());
  EXPECT_FALSE(a.session->paused());
  EXPECT_TRUE(a.session->devices().AwaitIdle().ok());
}

TEST_F(SessionTest, a_driver_error_in_any_call_of_a_pause_leaves_the_session_running_with_its_contents) {
  std::byte* mine = a.Place(a.Create());
  std::memset(mine, 0x33, k2M);
  for (const char* call : {"Synchronize", "AllocatePinned", "FindNonZero", "Gather", "FinishCopies", "Unmap", "Release"}) {
    ASSERT_TRUE(a.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    const Status failed = a.session->Pause();
    EXPECT_FALSE(failed.ok()) << call;
    EXPECT_NE(failed.message().find("runs on as before"), std::string::npos) << failed.message();
    EXPECT_FALSE(a.session->paused());
    EXPECT_EQ(mine[k2M - 1], std::byte{0x33}) << call;
  }
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_TRUE(a.session->Resume().ok());
}

TEST_F(SessionTest, a_driver_error_in_any_call_of_a_resume_leaves_the_session_paused_and_it_can_be_tried_again) {
  std::byte* mine = a.Place(a.Create());
  std::memset(mine, 0x33, k2M);
  EXPECT_TRUE(a.session->Pause().ok());
  for (const char* call : {"Memory", "Create", "Map", "SetAccess", "Scatter", "FinishCopies"}) {
    ASSERT_TRUE(a.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    const Status failed = a.session->Resume();
    EXPECT_FALSE(failed.ok()) << call;
    EXPECT_NE(failed.message().find("stays paused"), std::string::npos) << failed.message();
    EXPECT_TRUE(a.session->paused());
    EXPECT_EQ(a.InUse(), 0U) << call;
  }
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_EQ(mine[k2M - 1], std::byte{0x33});
}

TEST_F(SessionTest, it_stays_paused_where_a_pause_could_not_be_undone_and_not_in_the_middle_of_one) {
  std::byte* mine = a.Place(a.Create());
  a.Place(a.Create());
  std::memset(mine, 0x33, k2M);
  bool between = false, left = true;
  a.simulator->SetHook([&, unmapped = 0](std::string_view call, std::uint64_t) mutable {
    if (call == "Unmap" && ++unmapped == 1) {
      between = a.session->paused();
      left = test::InThread([&] { return a.session->StaysPaused(); }).get();
    }
    return call == "Create" || (call == "Unmap" && unmapped > 1) ? cuda::kUnknown : 0;
  });
  EXPECT_EQ(a.session->Pause().code(), Code::kBroken);
  a.simulator->SetHook({});
  EXPECT_TRUE(between);
  EXPECT_FALSE(left);
  EXPECT_TRUE(a.session->StaysPaused());
  ASSERT_TRUE(a.session->Resume().ok());
  EXPECT_FALSE(a.session->StaysPaused());
  EXPECT_EQ(mine[k2M - 1], std::byte{0x33});
}

TEST_F(SessionTest, a_broken_journal_refuses_the_next_pause_and_names_the_reason) {
  a.Place(a.Create());
  a.journal->fail_after = 0;
  const AllocationId more = a.Create();  // NCCL still gets the driver's answer
  EXPECT_TRUE(more);
  const Status refused = a.session->Pause();
  EXPECT_EQ(refused.code(), Code::kBroken);
  EXPECT_NE(refused.message().find("no space left"), std::string::npos) << refused.message();
  EXPECT_FALSE(a.session->paused());
  a.journal->events = {};  // what is left of it no longer folds to the state; not what this test is about
  static_cast<void>(a.session->Close("test"));
  a.~Process();
  new (&a) Process(3, world, network, Direct());
}

TEST_F(SessionTest, a_rank_without_a_journal_shares_memory_and_refuses_the_pause_of_its_set_by_name) {
  a.journal->fail_after = 0;
  const AllocationId shared = a.Create();
  a.Place(shared);
  std::byte* theirs = b.Place(Pass(shared));
  theirs[3] = std::byte{3};
  for (Process* p : {&a, &b}) {
    Status other;
    std::thread calling([&] { other = (p == &a ? b : a).session->Pause(); });
    const Status refused = p->session->Pause();
    calling.join();
    EXPECT_EQ(refused.code(), Code::kBroken);
    EXPECT_NE(refused.message().find("no space left on device"), std::string::npos) << refused.message();
    const bool named = refused.message().find("rank 0") != std::string::npos;
    EXPECT_TRUE(named || p == &a) << refused.message();
    EXPECT_FALSE(p->session->paused());
  }
  EXPECT_NE(a.session->statistics().Json().find("no_journal_because"), std::string::npos);
  a.journal->renew_after = 0;  // there is room again
  Both(&Session::Pause);
  Both(&Session::Resume);
  EXPECT_EQ(theirs[3], std::byte{3});
  EXPECT_EQ(a.session->statistics().Json().find("no_journal_because"), std::string::npos);
}

TEST_F(SessionTest, a_wrong_secret_opens_nothing) {
  const AllocationId own = a.Create();
  ASSERT_TRUE(a.session->sharing().Export(own).ok());
  auto forged = MakeTokenDescriptor(Token{SessionId{1}, own, *RandomSecret(), 0});
  ASSERT_TRUE(forged.ok());
  auto imported = b.session->sharing().Import(forged->get(), {});
  EXPECT_EQ(imported.status().code(), Code::kRefused);
  EXPECT_NE(imported.status().message().find("secret"), std::string::npos) << imported.status().message();
  EXPECT_EQ(a.Count<ReferenceAdded>(), 0U);
}

TEST_F(SessionTest, an_import_that_the_owners_driver_does_not_export_leaves_no_reference) {
  const AllocationId own = a.Create();
  const auto descriptor = a.session->sharing().Export(own);
  ASSERT_TRUE(a.simulator->FailNext("Export", 1, cuda::kUnknown).ok());
  const auto shared = a.session->peer_answers().OnImport({SessionId{9}, "localhost", 1, 0, 8}, AllocationId{1},
                                                         *ReadTokenDescriptor(descriptor->get()));
  EXPECT_EQ(shared.status().driver_result(), cuda::kUnknown);
  EXPECT_TRUE(a.session->CopyState().allocations.at(own).importers.empty());
}

TEST_F(SessionTest, a_foreign_descriptor_is_refused_by_name) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  const UniqueFd read_end{pipe_ends[0]}, write_end{pipe_ends[1]};
  auto imported = b.session->sharing().Import(read_end.get(), {});
  EXPECT_EQ(imported.status().code(), Code::kInvalid);
  EXPECT_NE(imported.status().message().find("pipe"), std::string::npos) << imported.status().message();
}

TEST_F(SessionTest, small_legacy_allocations_share_a_block_and_survive_a_cycle) {
  const Address first = *a.session->legacy().Allocate(8, kDevice, {}),
                second = *a.session->legacy().Allocate(2432, kDevice, {});
  const Address large = *a.session->legacy().Allocate(3 * kMiB, kDevice, {});
  EXPECT_EQ(a.InUse(), 3 * k2M);
  EXPECT_EQ(second.value % 512, 0U);
  EXPECT_EQ(*a.session->nccl().AddressRange(second + 5), (std::pair{second, Bytes{2432}}));
  auto handle = a.session->legacy().Export(second);
  ASSERT_TRUE(handle.ok()) << handle.status().message();
  auto opened = b.session->legacy().Import(*handle, kDevice, {});
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  reinterpret_cast<std::byte*>(second.value)[17] = std::byte{17};
  Both(&Session::Pause);
  EXPECT_EQ(a.InUse(), 0U);
  Both(&Session::Resume);
  EXPECT_EQ(reinterpret_cast<std::byte*>(opened->value)[17], std::byte{17});
  EXPECT_TRUE(b.session->legacy().Close(*opened).ok());
  for (const Address address : {first, second, large}) EXPECT_TRUE(a.session->legacy().Free(address).ok());
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_TRUE(a.session->CopyState().ranges.empty());
  EXPECT_EQ(a.session->legacy().Free(first).code(), Code::kNotFound);
}

TEST_F(SessionTest, cuMemAlloc_memory_lies_on_the_device_that_is_current) {
  constexpr DeviceOrdinal kOther{1};
  const Address here = *a.session->legacy().Allocate(8, kDevice, {}), there = *a.session->legacy().Allocate(8, kOther, {});
  const Address here_again = *a.session->legacy().Allocate(8, kDevice, {});
  const State state = a.session->CopyState();
  const auto device_of = [&](Address address) {
    return state.allocations.at(state.legacy.at(address).backing).properties.location.id;
  };
  EXPECT_EQ(device_of(here), kDevice.value);
  EXPECT_EQ(device_of(there), kOther.value);
  EXPECT_EQ(device_of(here_again), kDevice.value);
  EXPECT_EQ(a.simulator->BytesInUse(kOther), k2M);
  // As with cuMemAlloc, every device of the process that was seen may reach all of it.
  for (const Address address : {here, there}) {
    const auto mapping = a.simulator->MappingAt(address);
    ASSERT_TRUE(mapping.ok());
    EXPECT_EQ(mapping->access.size(), 2U);
  }
  for (const Address address : {here, there, here_again}) EXPECT_TRUE(a.session->legacy().Free(address).ok());
}

TEST_F(SessionTest, a_driver_error_in_any_call_of_cuMemAlloc_leaves_nothing_behind) {
  for (const char* call : {"Reserve", "Map", "SetAccess"}) {
    ASSERT_TRUE(a.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    EXPECT_EQ(a.session->legacy().Allocate(8, kDevice, {}).status().driver_result(), cuda::kUnknown) << call;
    EXPECT_EQ(a.simulator->Snapshot(), SimulatorSnapshot{}) << call;
  }
  const auto handle = a.session->legacy().Export(*a.session->legacy().Allocate(8, kDevice, {}));
  for (const char* call : {"Import", "Reserve", "Map", "SetAccess"}) {
    ASSERT_TRUE(b.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    EXPECT_EQ(b.session->legacy().Import(*handle, kDevice, {}).status().driver_result(), cuda::kUnknown) << call;
    EXPECT_EQ(b.simulator->Snapshot(), SimulatorSnapshot{}) << call;
    EXPECT_TRUE(b.session->CopyState().allocations.empty()) << call;
    EXPECT_TRUE(a.session->CopyState().allocations.begin()->second.importers.empty()) << call;
  }
}

TEST_F(SessionTest, a_free_that_the_driver_refuses_can_be_taken_back) {
  const HostAllocated host{Address{0x1000}, 64, 3, true};
  const AsyncAllocated async{Address{0x2000}, 128};
  const LegacyAllocated unmanaged{Address{0x3000}, 256, {}, 0, "no context", {}};
  for (const EventBody& event : {EventBody{host}, EventBody{async}, EventBody{unmanaged}}) a.session->records().Note(event);
  const State before = a.session->CopyState();
  EXPECT_EQ(a.session->records().NoteFree(HostFreed{host.address}), host);
  EXPECT_EQ(a.session->records().NoteFree(AsyncFreed{async.address}), async);
  EXPECT_EQ(a.session->records().NoteFree(LegacyFreed{unmanaged.address}), unmanaged);
  State after = a.session->CopyState();
  EXPECT_TRUE(after.host.empty() && after.async.empty() && after.legacy.empty());
  EXPECT_EQ(a.session->records().NoteFree(HostFreed{host.address}), std::nullopt) << "it is not known any more";
  const Address managed = *a.session->legacy().Allocate(8, kDevice, {});
  EXPECT_EQ(a.session->records().NoteFree(LegacyFreed{managed}), std::nullopt) << "AMem backs it, and LegacyFree frees it";
  EXPECT_TRUE(a.session->legacy().Free(managed).ok());
  for (const EventBody& event : {EventBody{host}, EventBody{async}, EventBody{unmanaged}}) a.session->records().Note(event);
  after = a.session->CopyState();
  EXPECT_EQ(std::tie(after.host, after.async, after.legacy), std::tie(before.host, before.async, before.legacy));
}

// The numbers that follow a key in JSON text, in order.
std::vector<double> NumbersOf(const std::string& json, const std::string& key) {
  std::vector<double> numbers;
  const std::string quoted = "\"" + key + "\":";
  for (std::size_t at = json.find(quoted); at != std::string::npos; at = json.find(quoted, at + 1))
    numbers.push_back(std::stod(json.substr(at + quoted.size())));
  return numbers;
}

TEST_F(SessionTest, statistics_tell_when_each_phase_was_voted_on_and_decided_in_the_same_time_for_all) {
  Pass(a.Create());
  Both(&Session::Pause);
  Both(&Session::Resume);
  const std::string of_a = a.session->statistics().Json(), of_b = b.session->statistics().Json();
  const auto voted_a = NumbersOf(of_a, "voted_at_ms"), voted_b = NumbersOf(of_b, "voted_at_ms");
  const auto decided_a = NumbersOf(of_a, "decided_at_ms"), decided_b = NumbersOf(of_b, "decided_at_ms");
  ASSERT_EQ(voted_a.size(), 6U) << of_a;
  ASSERT_EQ(voted_b.size(), voted_a.size());
  for (std::size_t i = 0; i < voted_a.size(); ++i) {  // nobody knows a decision before all have voted
    EXPECT_GE(std::min(decided_a[i], decided_b[i]), std::max(voted_a[i], voted_b[i])) << i;
  }
}

// ---- imports while the owner pauses or resumes --------------------------------------------------------------------------

// b imports from a, which is alone in its round, when a's simulator is asked for `call` the next time.
class ImportInARoundTest : public SessionTest {
 protected:
  Result<AllocationId> ImportAt(const char* call, Status (Session::*cycle)()) {
    Result<AllocationId> imported(AllocationId{});
    std::thread importer;
    a.simulator->SetHook([&](std::string_view name, std::uint64_t) {
      if (name != call || importer.joinable()) return 0;
      importer = std::thread([&] { imported = b.session->sharing().Import(token->get(), {}); });
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      return 0;
    });
    const Status done = (a.session.get()->*cycle)();
    EXPECT_TRUE(done.ok()) << done.message();
    EXPECT_TRUE(importer.joinable()) << call;
    importer.join();
    a.simulator->SetHook({});
    return imported;
  }
  const AllocationId id = a.Create();
  std::byte* const memory = a.Place(id);
  const Result<UniqueFd> token = a.session->sharing().Export(id);
};

TEST_F(ImportInARoundTest, of_a_pause_is_refused_and_of_a_resume_waits_for_its_end) {
  for (const char* call : {"Synchronize", "FindNonZero", "Unmap", "Release"}) {
    memory[7] = std::byte{7};
    const auto refused = ImportAt(call, &Session::Pause);
    EXPECT_EQ(refused.status().code(), Code::kRefused) << call;
    EXPECT_NE(refused.status().message().find("call ncclResume there"), std::string::npos) << refused.status().message();
    EXPECT_TRUE(a.session->CopyState().allocations.at(id).importers.empty()) << call;
    const auto imported = ImportAt(std::string_view(call) == "Unmap" ? "Map" : "Create", &Session::Resume);
    ASSERT_TRUE(imported.ok()) << imported.status().message();
    std::byte* theirs = b.Place(*imported);
    EXPECT_EQ(theirs[7], std::byte{7}) << "the memory that the owner has after the resume";
    Both(&Session::Pause);
    Both(&Session::Resume);
    theirs[7] = std::byte{8};
    EXPECT_EQ(memory[7], std::byte{8});
    b.Free(theirs, *imported);
  }
}

// A member that still works when the others run on already, because the pause has failed.
TEST_F(ImportInARoundTest, of_a_pause_that_fails_waits_for_its_end_however_long_that_takes) {
  Result<AllocationId> imported(AllocationId{});
  std::thread importer;
  a.simulator->SetHook([&](std::string_view name, std::uint64_t) {
    if (name != "FindNonZero") return 0;
    importer = std::thread([&] { imported = b.session->sharing().Import(token->get(), {}); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // longer than a pause takes
    return cuda::kUnknown;
  });
  EXPECT_FALSE(a.session->Pause().ok());
  a.simulator->SetHook({});
  ASSERT_TRUE(importer.joinable());
  importer.join();
  EXPECT_TRUE(imported.ok()) << imported.status().message();
}

TEST_F(SessionTest, statistics_name_what_is_held) {
  a.Place(a.Create(), k2M);
  a.session->records().Note(Registered{Address{1}, 1, "dma-buf"});
  const std::string json = a.session->statistics().Json();
  EXPECT_NE(json.find("\"own_device_bytes\":2097152"), std::string::npos) << json;
  EXPECT_NE(json.find("\"lifecycle\":\"running\""), std::string::npos) << json;
}

}  // namespace
}  // namespace amem
