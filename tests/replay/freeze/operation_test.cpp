// Freezes and thaws on a fake job: the order, the refusals, what is undone, and the death of the tool at every moment.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "journal/base/process_sight.h"
#include "tests/journal/base/no_descriptors.h"
#include "tests/replay/freeze/frozen_world.h"

namespace amem::test {
namespace {

using enum CheckpointState;

TEST(Freeze, takes_all_processes_and_brings_them_back) {
  FrozenWorld world;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  EXPECT_TRUE(world.AllAre(kCheckpointed, true));
  EXPECT_EQ(world.report.outcome, "frozen");
  EXPECT_EQ(world.report.processes.at(1).gpus, (std::vector<GpuShare>{{"GPU-1", kOnGpu, kLeftByPause}}));
  const Status again = world.Do(&FreezeOperation::Freeze);
  EXPECT_NE(again.message().find("frozen already"), std::string::npos) << again.message();
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status());
  EXPECT_TRUE(world.AllAre(kRunning, false));
  EXPECT_EQ(world.report.outcome, "running");
  EXPECT_EQ(world.shared->notes, kFakeRanks);
  EXPECT_NE(world.Do(&FreezeOperation::Thaw).message().find("not frozen"), std::string::npos);
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status()) << "and a second time";
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status());
}

TEST(Freeze, times_are_the_whole_and_so_are_those_of_a_thaw) {
  FrozenWorld world;
  for (const auto operation : {&FreezeOperation::Freeze, &FreezeOperation::Thaw}) {
    const std::uint64_t began = MonotonicNs();
    ASSERT_EQ(world.Do(operation), Status());
    const double whole = static_cast<double>(MonotonicNs() - began) / 1e6;
    double sum = 0;
    for (const auto& time : world.report.times) sum += time.ms;
    EXPECT_EQ(world.report.times.front().step, "checks");
    EXPECT_EQ(world.report.times.back().step, "rest");
    EXPECT_LE(sum, whole);
    EXPECT_GT(sum, 0.9 * whole - 5);
  }
}

TEST(Freeze, checks_while_the_ranks_come) {
  FrozenWorld world;
  world.looks_when_asked = true;
  const std::uint64_t began = MonotonicNs();
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  EXPECT_TRUE(world.saw_asked);
  EXPECT_LT(MonotonicNs() - began, 4'000'000'000U) << "the checks ended before the ranks were asked";
}

TEST(Freeze, whose_ranks_do_not_come_leaves_a_job_that_runs) {
  FrozenWorld world;
  world.does_not_come = true;  // which is known before the checks have ended
  const Status late = world.Do(&FreezeOperation::Freeze);
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_NE(late.message().find("rank 1 did not come"), std::string::npos) << late.message();
  EXPECT_NE(late.message().find("The job runs as before"), std::string::npos) << late.message();
  EXPECT_EQ(world.report.outcome, "running");
  world.does_not_come = false;
  EXPECT_EQ(world.Do(&FreezeOperation::Freeze), Status()) << "second try";
}

TEST(Freeze, that_the_driver_refuses_after_the_pause_lets_the_job_go_on) {
  FrozenWorld world;
  world.shared->ranks[1].state = static_cast<int>(kLocked);  // by another program
  const Status refused = world.Do(&FreezeOperation::Freeze);
  EXPECT_NE(refused.message().find("and not AMem"), std::string::npos) << refused.message();
  EXPECT_EQ(world.shared->made[static_cast<std::size_t>(FakeCall::kLock)], 0);
  EXPECT_EQ(world.shared->made[static_cast<std::size_t>(FakeCall::kResume)], 1);
}

TEST(Freeze, of_a_paused_job_leaves_the_pause_to_it) {
  FrozenWorld world;
  world.shared->paused = true;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  EXPECT_EQ(world.shared->made[static_cast<std::size_t>(FakeCall::kPause)], 0);
}

// ---- what fails is undone --------------------------------------------------------------------------------------------------

TEST(Freeze, that_fails_at_any_step_leaves_a_job_that_runs) {
  for (const FakeCall call : {FakeCall::kPause, FakeCall::kLock, FakeCall::kCheckpoint}) {
    for (int nth = 1; nth <= (call == FakeCall::kPause ? 1 : kFakeRanks); ++nth) {
      FrozenWorld world;
      world.Fail(call, nth, 999);
      const Status failed = world.Do(&FreezeOperation::Freeze);
      EXPECT_FALSE(failed.ok());
      EXPECT_NE(failed.message().find("the driver said 999"), std::string::npos) << failed.message();
      EXPECT_NE(failed.message().find("he job runs as before"), std::string::npos) << failed.message();
      EXPECT_TRUE(world.AllAre(kRunning, false)) << failed.message();
      ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status()) << "a second try";
      EXPECT_TRUE(world.AllAre(kCheckpointed, true));
    }
  }
}

TEST(Freeze, that_fails_leaves_a_pause_that_was_there_before) {
  for (const FakeCall call : {FakeCall::kLock, FakeCall::kCheckpoint}) {
    for (int nth = 1; nth <= kFakeRanks; ++nth) {
      FrozenWorld world;
      world.shared->paused = true;
      world.Fail(call, nth, 999);
      const Status failed = world.Do(&FreezeOperation::Freeze);
      EXPECT_NE(failed.message().find("the job is paused as before"), std::string::npos) << failed.message();
      EXPECT_TRUE(world.AllAre(kRunning, true)) << failed.message();
      EXPECT_EQ(world.report.outcome, "paused");
      ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status()) << "a second try";
      ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status());
      EXPECT_TRUE(world.AllAre(kRunning, false)) << "a thaw is asked for a job that runs";
    }
  }
  FrozenWorld world;
  world.shared->paused = true;
  world.shared->ranks[1].state = static_cast<int>(kLocked);  // by another program
  EXPECT_NE(world.Do(&FreezeOperation::Freeze).message().find("the job is paused as before"), std::string::npos);
  EXPECT_TRUE(world.shared->paused);
}

TEST(Freeze, of_a_paused_job_whose_tool_died_is_undone_to_the_pause) {
  int undone = 0;
  for (int nth = 1;; ++nth) {
    FrozenWorld world;
    world.shared->paused = true;
    if (!world.DiesIn(&FreezeOperation::Freeze, nth)) break;
    const Status undo = world.Do(&FreezeOperation::Undo);
    if (undo.code() == Code::kNotFound) continue;  // nobody was told yet, or all were told of the end
    ASSERT_EQ(undo, Status()) << "killed at " << nth;
    EXPECT_TRUE(world.AllAre(kRunning, true)) << "killed at " << nth;
    ++undone;
  }
  EXPECT_EQ(undone, 2 * 8 * kFakeRanks - 2);
}

TEST(Thaw, of_a_job_that_the_driver_does_not_know_is_refused_and_nothing_is_called_lost) {
  FrozenWorld world;
  world.unknown_to_the_driver = true;
  const Status refused = world.Do(&FreezeOperation::Thaw);
  EXPECT_EQ(refused.message().find("the job is not frozen, as far as the driver says: rank 0"), 0U) << refused.message();
  EXPECT_TRUE(world.report.lost.empty());
}

TEST(Thaw, that_a_gpu_refuses_leaves_the_whole_job_frozen) {
  for (int nth = 1; nth <= kFakeRanks; ++nth) {
    FrozenWorld world;
    ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
    world.Fail(FakeCall::kRestore, nth, 2);
    const Status failed = world.Do(&FreezeOperation::Thaw);
    EXPECT_NE(failed.message().find("stays frozen"), std::string::npos) << failed.message();
    EXPECT_TRUE(world.AllAre(kCheckpointed, true));
    EXPECT_EQ(world.report.outcome, "frozen");
    ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status()) << "a second try";
    EXPECT_TRUE(world.AllAre(kRunning, false));
  }
}

TEST(Thaw, onto_other_gpus_that_stopped_half_way_ends_where_it_was_to) {
  FrozenWorld world;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  const FreezeOptions moved{.gpus = "0=1,1=2,2=0"};
  world.Fail(FakeCall::kRestore, 2, 2);
  EXPECT_FALSE(world.Do(&FreezeOperation::Thaw, moved).ok()) << "two have moved, and are frozen again";
  EXPECT_TRUE(world.AllAre(kCheckpointed, true));
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw, moved), Status());
  for (int rank = 0; rank < kFakeRanks; ++rank) {
    EXPECT_EQ(world.shared->ranks[static_cast<std::size_t>(rank)].gpu, (rank + 1) % kFakeRanks);
  }
}

TEST(Thaw, onto_other_gpus_whose_tool_died_is_continued_onto_them) {
  int continued = 0;
  for (int nth = 1;; ++nth) {
    FrozenWorld world;
    ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
    if (!world.DiesIn(&FreezeOperation::Thaw, nth, {.gpus = "0=1,1=2,2=0"})) break;
    const Status done = world.Do(&FreezeOperation::Continue);
    if (done.code() == Code::kNotFound) continue;  // nobody was told yet, or all were told of the end
    ASSERT_EQ(done, Status()) << "killed at " << nth;
    for (int rank = 0; rank < kFakeRanks; ++rank) {
      EXPECT_EQ(world.shared->ranks[static_cast<std::size_t>(rank)].gpu, (rank + 1) % kFakeRanks) << "killed at " << nth;
    }
    ++continued;
  }
  EXPECT_GT(continued, kFakeRanks);
}

TEST(Thaw, onto_other_gpus_that_was_undone_comes_back_on_the_old_ones) {
  const FreezeOptions moved{.gpus = "0=1,1=2,2=0"};
  bool told = false;
  for (int nth = 1;; ++nth) {
    FrozenWorld world;
    ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
    if (!world.DiesIn(&FreezeOperation::Thaw, nth, moved)) break;
    const Status undone = world.Do(&FreezeOperation::Undo);
    if (undone.code() == Code::kNotFound) continue;  // nobody was told yet, or all were told of the end
    ASSERT_EQ(undone, Status()) << "killed at " << nth;
    for (const std::string& note : world.report.notes) told = told || note.find("other GPUs already") != std::string::npos;
    ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status()) << "killed at " << nth;
    for (int rank = 0; rank < kFakeRanks; ++rank) {
      EXPECT_EQ(world.shared->ranks[static_cast<std::size_t>(rank)].gpu, rank) << "killed at " << nth;
    }
  }
  EXPECT_TRUE(told);
}

TEST(Thaw, of_a_job_that_changed_its_gpus_at_an_earlier_one_stays_where_it_ran) {
  FrozenWorld world;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw, {.gpus = "0=1,1=2,2=0"}), Status());
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status());
  for (int rank = 0; rank < kFakeRanks; ++rank) {
    EXPECT_EQ(world.shared->ranks[static_cast<std::size_t>(rank)].gpu, (rank + 1) % kFakeRanks);
  }
}

TEST(Thaw, whose_unlock_or_resume_fails_can_be_tried_again) {
  for (const FakeCall call : {FakeCall::kUnlock, FakeCall::kResume}) {
    FrozenWorld world;
    ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
    world.Fail(call, 1, 999);
    EXPECT_FALSE(world.Do(&FreezeOperation::Thaw).ok());
    EXPECT_EQ(world.report.outcome, "stuck");
    ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status());
    EXPECT_TRUE(world.AllAre(kRunning, false));
  }
}

TEST(Thaw, says_which_process_the_driver_lost_and_brings_back_the_others) {
  FrozenWorld world;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  world.shared->ranks[1].shares = true;
  const Status lost = world.Do(&FreezeOperation::Thaw);
  EXPECT_EQ(world.report.outcome, "lost");
  ASSERT_EQ(world.report.lost.size(), 1U);
  EXPECT_NE(world.report.lost[0].find("rank 1"), std::string::npos) << world.report.lost[0];
  EXPECT_NE(lost.message().find("still paused"), std::string::npos) << lost.message();
  EXPECT_EQ(world.shared->ranks[0].state, 0);
  EXPECT_EQ(world.shared->ranks[2].state, 0);
}

TEST(Thaw, of_a_job_that_lost_a_rank_meanwhile_brings_back_the_others) {
  FrozenWorld world;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  world.End(2);
  EXPECT_EQ(world.Do(&FreezeOperation::Thaw).code(), Code::kPeerLost);
  EXPECT_EQ(world.report.outcome, "lost");
  EXPECT_NE(world.report.lost.at(0).find("rank 2"), std::string::npos);
  EXPECT_EQ(world.shared->ranks[0].state, 0);
  EXPECT_FALSE(world.shared->paused);
}

TEST(Thaw, never_touches_a_process_that_got_the_number_of_a_rank) {
  FrozenWorld world;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  world.shared->ranks[2].start = 5'000'000;  // another process, which happens to be checkpointed
  EXPECT_FALSE(world.Do(&FreezeOperation::Undo).ok());
  EXPECT_FALSE(world.Do(&FreezeOperation::Thaw).ok());
  EXPECT_EQ(world.shared->ranks[2].state, static_cast<int>(kCheckpointed));
}

// ---- checks ----------------------------------------------------------------------------------------------------------------

void ExpectUntouched(FrozenWorld& world, const std::string& reason, FreezeOptions options = {}) {
  const Status refused = world.Do(&FreezeOperation::Freeze, std::move(options));
  EXPECT_FALSE(refused.ok());
  EXPECT_NE(refused.message().find("nothing was touched"), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find(reason), std::string::npos) << refused.message();
  EXPECT_TRUE(world.AllAre(kRunning, false));
  for (const auto& made : world.shared->made) EXPECT_EQ(made, 0);
}

TEST(FreezeChecks, refuse_what_the_driver_cannot_take) {
  {
    FrozenWorld world;
    world.multicast = true;
    ExpectUntouched(world, "NCCL_NVLS_ENABLE=0, or with driver 610");
  }
  for (const char* driver : {"580.159.04", "609.99", ""}) {
    FrozenWorld world;
    world.multicast = true;
    world.user_memory = MemoryTag::kMulticastReleased;
    world.driver = driver;
    ExpectUntouched(world, "can make none again before driver 610");
    world.driver = "610.21";
    EXPECT_TRUE(world.Do(&FreezeOperation::Freeze).ok());
  }
  {
    FrozenWorld world;
    world.registered = true;
    ExpectUntouched(world, "run the job with NCCL_IB_DISABLE=1, or deregister that memory");
  }
  {
    FrozenWorld world;
    world.renewable = true;
    ExpectUntouched(world, "no process that has a card open was seen to be checkpointed and restored yet");
  }
  {
    FrozenWorld world;
    world.handed_out = true;
    ExpectUntouched(world, "has given the driver's own handles of");
    world.handed_to = "libone.so";
    ExpectUntouched(world, "libone.so of");
  }
  {
    FrozenWorld world;
    world.user_memory = MemoryTag::kUser;
    world.location = LocationType::kHostNuma;
    ExpectUntouched(world, "cuMemHostAlloc");
  }
  FrozenWorld world;
  world.user_memory = MemoryTag::kUser;
  world.imported = true;
  ExpectUntouched(world, "AMEM_USER_MEMORY=release");
}

TEST(FreezeChecks, refuse_by_name_what_other_libraries_share) {
  const decltype(State::outside) shares = {{{"libone_shot.so", OutsideKind::kIpcExport}, {2, Bytes{3} << 20}},
                                           {{"nvshmem.so", OutsideKind::kHandleImport}, {1, Bytes{512} << 20}}};
  FrozenWorld world;
  world.outside = shares;
  ExpectUntouched(
      world,
      "rank 1 (pid 4000001) shares GPU memory with other processes past AMem, and the driver could not restore it: "
      "cudaIpc export by libone_shot.so (3 MiB in 2 pieces), cuMem handle import by nvshmem.so (512 MiB in 1 piece)");

  FrozenWorld late;  // it was shared while the ranks came to their safe point
  late.outside_later = shares;
  const Status refused = late.Do(&FreezeOperation::Freeze);
  EXPECT_NE(refused.message().find("cudaIpc export by libone_shot.so"), std::string::npos) << refused.message();
  EXPECT_TRUE(late.AllAre(kRunning, false));
  EXPECT_EQ(late.shared->made[static_cast<std::size_t>(FakeCall::kLock)], 0);
}

TEST(FreezeChecks, say_where_shared_memory_would_not_be_seen) {
  FrozenWorld world;
  world.outside = {{{"", OutsideKind::kUnseen}, {1, 0}}, {{"libuct_cuda.so", OutsideKind::kUnseen}, {1, 0}}};
  EXPECT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  const std::string notes = world.report.notes.at(0) + world.report.notes.at(1);
  EXPECT_NE(notes.find("start it with `amem run` (LD_PRELOAD)"), std::string::npos) << notes;
  EXPECT_NE(notes.find("libuct_cuda.so of rank 1 can share GPU memory"), std::string::npos) << notes;
}

TEST(FreezeChecks, memory_that_is_shared_in_spite_of_the_pause_is_not_given_to_the_driver) {
  FrozenWorld world;
  world.shared->ranks[1].shares = true;
  const Status refused = world.Do(&FreezeOperation::Freeze);
  EXPECT_NE(refused.message().find("still shares " + RoundedUpBytes(2 * kOnGpu) + " of GPU memory"), std::string::npos)
      << refused.message();
  EXPECT_TRUE(world.AllAre(kRunning, false));
  EXPECT_EQ(world.shared->made[static_cast<std::size_t>(FakeCall::kLock)], 0);
}

TEST(FreezeChecks, a_parked_job_that_shares_memory_is_to_be_resumed_first) {
  FrozenWorld world;
  world.shared->ranks[1].shares = true;
  world.shared->paused = world.parked = true;
  const std::string said = world.Do(&FreezeOperation::Freeze).message();
  EXPECT_NE(said.find("The job is parked, with all its memory: resume it first"), std::string::npos) << said;
  EXPECT_TRUE(world.AllAre(kRunning, true)) << "and stays parked";
}

TEST(FreezeChecks, memory_of_the_program_that_is_shared_has_to_leave_at_a_safe_point) {
  FrozenWorld world;
  world.shared->ranks[1].shares = true;
  const auto refused_with_remedy = [&world] {
    const std::string said = world.Do(&FreezeOperation::Freeze).message();
    EXPECT_NE(said.find("still shares"), std::string::npos) << said;
    return said.find("amem.safepoint(), without --between-launches") != std::string::npos;
  };
  EXPECT_FALSE(refused_with_remedy()) << "it is under no tag";
  world.tag = PoolId{3};
  EXPECT_TRUE(refused_with_remedy());
  world.kept = true;
  EXPECT_FALSE(refused_with_remedy()) << "a pause at a safe point leaves it as well";
}

TEST(FreezeChecks, host_memory_must_hold_what_is_on_the_gpus) {
  FrozenWorld world;
  world.shared->host_room = 3 * kOnGpu - 1;
  ExpectUntouched(world, "the host has not enough memory");
  world.shared->host_room = 3 * kOnGpu;
  EXPECT_EQ(world.Do(&FreezeOperation::Freeze), Status()) << "second try";
}

TEST(FreezeChecks, a_process_beside_the_ranks_that_uses_a_gpu_must_be_allowed) {
  FrozenWorld world;
  world.siblings = {FrozenWorld::kFirstPid, 99};
  world.shared->taken_by_others = Bytes{1} << 30;
  ExpectUntouched(world, "pid 99 (vllm)");
  EXPECT_EQ(world.Do(&FreezeOperation::Freeze, {.allowances = {.others_stay = true}}), Status());
}

TEST(FreezeChecks, processes_beside_the_ranks_that_cannot_be_seen_must_be_allowed) {
  FrozenWorld world;
  world.siblings_unseen = true;
  ExpectUntouched(world, "which processes were started beside rank 0 cannot be seen: too many open files");
  EXPECT_EQ(world.Do(&FreezeOperation::Freeze, {.allowances = {.others_stay = true}}), Status());
}

TEST(FreezeChecks, a_process_of_which_it_cannot_be_seen_whether_it_lives_is_neither_touched_nor_lost) {
  FrozenWorld world;
  world.unseen = FrozenWorld::kFirstPid + 1;
  const Status done = world.Do(&FreezeOperation::Freeze);
  EXPECT_EQ(done.code(), Code::kRefused);
  EXPECT_NE(done.message().find("whether rank 1 (pid"), std::string::npos) << done.message();
  EXPECT_TRUE(world.AllAre(kRunning, false)) << done.message();
  EXPECT_TRUE(world.report.lost.empty());
}

TEST(FreezeChecks, whoever_shares_a_gpu_with_a_restored_process_is_named) {
  FrozenWorld world;
  const auto notes = [&] { return fmt::format("{}", fmt::join(world.report.notes, "\n")); };
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  EXPECT_EQ(notes(), "");
  world.shared->taken_by_others = Bytes{1} << 30;
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status());
  EXPECT_NE(notes().find("pid 99 (vllm) and rank 1 share GPU-1: after a thaw the driver does not preempt"), std::string::npos)
      << notes();
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  EXPECT_NE(notes().find("pid 99 (vllm) and rank 1 share GPU-1"), std::string::npos) << "and before it leaves: " << notes();
  world.two_others = true;
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status());
  EXPECT_NE(notes().find("pid 98 (sglang) and pid 99 (vllm) and rank 1 share GPU-1"), std::string::npos) << notes();
}

TEST(FreezeChecks, where_NVML_says_nothing_what_AMem_knows_is_checked_and_that_is_said) {
  FrozenWorld world;
  world.hides_gpus = true;
  world.shared->host_room = 3 * kOnGpu - 1;
  ExpectUntouched(world, "the host has not enough memory");
  world.shared->host_room = 3 * kOnGpu;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  ASSERT_EQ(world.report.notes.size(), std::size_t{kFakeRanks});
  EXPECT_EQ(world.report.notes[2].find("NVML does not say what rank 2 holds"), 0U) << world.report.notes[2];
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status());
  ASSERT_EQ(world.report.notes.size(), 1U);
  EXPECT_NE(world.report.notes[0].find("the room was not checked"), std::string::npos) << world.report.notes[0];
}

TEST(FreezeChecks, ranks_on_other_hosts_must_be_allowed) {
  FrozenWorld world;
  world.ranks_elsewhere = true;
  ExpectUntouched(world, "--this-host");
  EXPECT_EQ(world.Do(&FreezeOperation::Freeze, {.allowances = {.this_host_only = true}}), Status());
}

TEST(FreezeChecks, ranks_on_other_hosts_must_be_allowed_of_a_communicator_without_a_name_too) {
  FrozenWorld all_here;
  all_here.is_grown = true;
  EXPECT_EQ(all_here.Do(&FreezeOperation::Freeze), Status());
  FrozenWorld world;
  world.is_grown = world.ranks_elsewhere = true;
  ExpectUntouched(world, "--this-host");
  EXPECT_EQ(world.Do(&FreezeOperation::Freeze, {.allowances = {.this_host_only = true}}), Status());
}

TEST(FreezeChecks, a_thaw_waits_for_room_on_the_gpu) {
  FrozenWorld world;
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  world.shared->taken_by_others = kGpuTotal - kOnGpu + 1;
  const Status full = world.Do(&FreezeOperation::Thaw);
  EXPECT_EQ(full.code(), Code::kOutOfMemory);
  EXPECT_NE(full.message().find("vllm"), std::string::npos) << full.message();
  EXPECT_TRUE(world.AllAre(kCheckpointed, true));
  EXPECT_EQ(world.shared->made[static_cast<std::size_t>(FakeCall::kRestore)], 0);
  world.shared->taken_by_others = 0;
  ASSERT_EQ(world.Do(&FreezeOperation::Thaw), Status()) << "second try";
}

TEST(FreezeChecks, pairs_of_gpus_are_permutations) {
  const std::vector<std::string> gpus = {"GPU-a", "GPU-b", "GPU-c"};
  const auto swapped = ReadGpuPairs("0=1,GPU-b=GPU-a", gpus);
  ASSERT_TRUE(swapped.ok());
  EXPECT_EQ(*swapped, (std::vector<GpuPair>{{"GPU-a", "GPU-b"}, {"GPU-b", "GPU-a"}, {"GPU-c", "GPU-c"}}));
  EXPECT_EQ(*ReadGpuPairs("1,0", gpus), *swapped);
  EXPECT_TRUE(ReadGpuPairs("", gpus)->empty());
  for (const char* wrong : {"0=1", "0=3", "x=1", "0=1,1=1", "1,0,2,3", "1,0,"})
    EXPECT_FALSE(ReadGpuPairs(wrong, gpus).ok()) << wrong;
}

// ---- the death of the tool -------------------------------------------------------------------------------------------------

using Command = Status (FreezeOperation::*)();

// Each moment of `first`, and then `second` in a new tool. Returns how many moments there were. Before the first rank was told
// of it there is nothing to go on with, and after the last one was told how it ended.
int KillEverywhere(bool frozen_before, Command first, Command second, bool frozen_after) {
  int nth = 1, nothing = 0;
  for (;; ++nth) {
    FrozenWorld world;
    if (frozen_before) {
      EXPECT_EQ(world.Do(&FreezeOperation::Freeze), Status());
    }
    if (!world.DiesIn(first, nth)) break;
    const Status done = world.Do(second);
    const bool frozen = world.AllAre(kCheckpointed, true);
    if (done.code() == Code::kNotFound) {
      EXPECT_EQ(frozen, (first == &FreezeOperation::Freeze) == (nothing++ == 1)) << "killed at " << nth;
    } else {
      EXPECT_EQ(done, Status()) << "killed at " << nth << ": " << done.message();
      EXPECT_TRUE(world.AllAre(frozen_after ? kCheckpointed : kRunning, frozen_after)) << "killed at " << nth;
    }
    EXPECT_EQ(world.Do(frozen ? &FreezeOperation::Thaw : &FreezeOperation::Freeze), Status()) << "killed at " << nth;
  }
  EXPECT_EQ(nothing, 2);
  return nth - 1;
}

TEST(FreezeKill, a_freeze_killed_anywhere_is_finished_or_undone) {
  // Told that it begins; lock and checkpoint with what is told before and after; told that it ended.
  EXPECT_EQ(KillEverywhere(false, &FreezeOperation::Freeze, &FreezeOperation::Continue, true), 2 * (1 + 8 * kFakeRanks));
  KillEverywhere(false, &FreezeOperation::Freeze, &FreezeOperation::Undo, false);
}

TEST(FreezeKill, a_thaw_killed_anywhere_is_finished_or_undone) {
  EXPECT_EQ(KillEverywhere(true, &FreezeOperation::Thaw, &FreezeOperation::Continue, false), 2 * (1 + 10 * kFakeRanks));
  KillEverywhere(true, &FreezeOperation::Thaw, &FreezeOperation::Undo, true);
}

TEST(FreezeKill, without_an_unfinished_operation_there_is_nothing_to_continue) {
  FrozenWorld world;
  EXPECT_EQ(world.Do(&FreezeOperation::Continue).code(), Code::kNotFound);
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  EXPECT_EQ(world.Do(&FreezeOperation::Undo).code(), Code::kNotFound);
}

TEST(FreezeKill, where_the_driver_does_not_start_nothing_is_done_and_that_is_said) {
  FrozenWorld world;
  ASSERT_TRUE(world.DiesIn(&FreezeOperation::Freeze, 6 * kFakeRanks));
  world.driver_starts = false;
  const int calls = world.shared->calls;
  for (const Command command : {&FreezeOperation::Continue, &FreezeOperation::Undo, &FreezeOperation::Thaw}) {
    const Status refused = world.Do(command);
    EXPECT_EQ(refused.code(), Code::kDriver);
    EXPECT_NE(refused.message().find("CUDA_ERROR_NO_DEVICE"), std::string::npos) << refused.message();
    EXPECT_EQ(world.shared->calls, calls);
  }
  world.driver_starts = true;
  EXPECT_EQ(world.Do(&FreezeOperation::Undo), Status());
  EXPECT_TRUE(world.AllAre(kRunning, false));
}

// ---- what the ranks' journals are told --------------------------------------------------------------------------------------

TEST(FreezeTold, of_the_pause_before_it_is_made) {
  FrozenWorld world;
  const std::uint64_t before_ns = RealtimeNs();
  int told = 0;
  world.when_pausing = [&] {
    for (std::uint64_t session = 1; session <= kFakeRanks; ++session) {
      const auto step = world.Told(SessionId{session});
      ASSERT_TRUE(step);
      EXPECT_EQ(step->goal + " " + step->step, "frozen pause");
      EXPECT_EQ(step->members.size(), std::size_t{kFakeRanks});
      EXPECT_EQ(step->gpus.front().before, kOnGpu);
      EXPECT_TRUE(step->begun_ns >= before_ns && step->begun_ns <= RealtimeNs()) << "by it a freeze is told from another";
      told += step->pauses && !step->done ? 1 : 0;
    }
  };
  ASSERT_EQ(world.Do(&FreezeOperation::Freeze), Status());
  EXPECT_EQ(told, kFakeRanks);
}

TEST(FreezeTold, a_freeze_that_a_journal_does_not_take_is_undone) {
  int refused = 0;
  for (int nth = 1; nth <= 8 * kFakeRanks; ++nth) {
    FrozenWorld world;
    world.Fail(FakeCall::kTell, nth, 5);
    const Status done = world.Do(&FreezeOperation::Freeze);
    EXPECT_TRUE(world.AllAre(done.ok() ? kCheckpointed : kRunning, done.ok()))
        << "refused at " << nth << ": " << done.message();
    if (done.ok()) continue;
    ++refused;
    EXPECT_NE(done.message().find("its journal"), std::string::npos) << done.message();
  }
  EXPECT_EQ(refused, 3 * kFakeRanks) << "told of the pause, of the lock, and of the checkpoint before each is made";
}

// ---- the machine -----------------------------------------------------------------------------------------------------------

TEST(FreezeHost, a_process_is_told_by_its_start) {
  EXPECT_GT(StartTicks(getpid()), 0U);
  EXPECT_EQ(StartTicks(FrozenWorld::kFirstPid + 400'000), 0U);
  const auto siblings = ReadSiblings(getpid());
  EXPECT_TRUE(siblings && siblings->contains(getpid()));
}

// As every rank of `docker run IMAGE torchrun` has: its parent is the first process here, which also gets those whose parent
// has ended.
TEST(FreezeHost, whoever_may_have_been_started_beside_a_rank_of_the_first_process_is_seen) {
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  const pid_t launcher = fork();
  if (launcher == 0) {
    const pid_t rank = fork();
    if (rank != 0) _exit(write(told[1], &rank, sizeof rank) == sizeof rank ? 0 : 1);
    pause();
  }
  pid_t rank = 0;
  ASSERT_EQ(read(told[0], &rank, sizeof rank), static_cast<ssize_t>(sizeof rank));
  ASSERT_EQ(waitpid(launcher, nullptr, 0), launcher);
  const auto siblings = ReadSiblings(rank);
  kill(rank, SIGKILL);
  ASSERT_TRUE(siblings) << siblings.status().message();
  EXPECT_TRUE(siblings->contains(getpid()));
  for (const int end : told) close(end);
}

TEST(FreezeHost, what_cannot_be_seen_is_not_taken_for_nobody) {
  const NoDescriptors none;
  EXPECT_EQ(ReadSiblings(getpid()).status().code(), Code::kNoDescriptors);
}

}  // namespace
}  // namespace amem::test
