// Pools whose pauses and resumes are not waited for, and threads that meet in them.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/replay/session/pools_fixture.h"

namespace amem {
namespace {

using test::k2M, test::kChunk, test::kDevice, test::kMiB, test::kSecond, test::PoolsTest, test::Process;
using Work = Simulator::Work;

TEST_F(PoolsTest, a_resume_without_waiting_is_waited_for_by_the_host_or_by_a_stream) {
  Take(Open("cache"), kMiB);  // the device is known when the tag is opened
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 4 * kMiB);
  Fill(memory, 4 * kMiB, 1);
  ASSERT_TRUE(Pause(pool).ok());
  a.simulator->SetWork(Work::kCopies);  // copies are queued and do not end
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  ASSERT_TRUE(pools().WaitOn(pool, nullptr).ok()) << "the host waits until the copies are queued, and no longer";
  EXPECT_EQ(a.simulator->Calls("MakeStreamWaitForCopies"), 1U);
  EXPECT_EQ(StateOf(pool), "resuming");
  a.simulator->SetWork(Work::kNone);
  ASSERT_TRUE(pools().Wait(pool).ok());
  EXPECT_TRUE(Holds(memory, 4 * kMiB, 1));
  EXPECT_TRUE(pools().WaitOn(pool, nullptr).ok()) << "nothing to wait for";
  EXPECT_EQ(a.simulator->Calls("MakeStreamWaitForCopies"), 1U);
}

// The program's stream goes on behind the copies, so memory that it writes to must not be taken back.
TEST_F(PoolsTest, a_resume_that_fails_behind_a_stream_takes_nothing_back) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 4 * kMiB);
  Fill(memory, 4 * kMiB, 1);
  ASSERT_TRUE(Pause(pool).ok());
  std::atomic<bool> led = false;
  std::atomic<int> failing = 5;
  FailOnceLed(led, [&] { return failing-- > 0; });
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  ASSERT_TRUE(pools().WaitOn(pool, nullptr).ok());
  led = true;
  EXPECT_TRUE(pools().Wait(pool).ok()) << "it is tried again";
  EXPECT_LT(failing, 1);
  EXPECT_EQ(StateOf(pool), "resident");
  EXPECT_TRUE(Holds(memory, 4 * kMiB, 1));
}

class InAHurry : public PoolsTest {
 protected:
  InAHurry() : PoolsTest(Hurry()) { a.simulator->SetStreams(&streams_); }
  ~InAHurry() override { a.simulator->SetStreams(nullptr); }
  static SessionOptions Hurry() {
    SessionOptions options;
    options.deadlines = Deadlines(std::chrono::milliseconds(400));
    return options;
  }
  // Streams that run at once what they are given, also the copies that they wait for.
  class Prompt final : public SimulatedStreams {
    bool Capturing(std::optional<void*> /*stream*/) override { return false; }
    std::function<bool()> Submitted(std::optional<void*> /*stream*/) override {
      return [] { return true; };
    }
  };
  Prompt streams_;
};

TEST_F(InAHurry, a_resume_that_cannot_end_behind_a_stream_stays_where_it_is_and_is_ended_by_the_next_call) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 4 * kMiB);
  for (const bool by_a_pause : {false, true}) {
    Fill(memory, 4 * kMiB, 1);
    ASSERT_TRUE(Pause(pool).ok());
    std::atomic<bool> led = false, hold = true;
    FailOnceLed(led, [&] { return hold.load(); });
    ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
    ASSERT_TRUE(pools().WaitOn(pool, nullptr).ok());
    led = true;
    const Status failed = pools().Wait(pool);
    ASSERT_FALSE(failed.ok());
    EXPECT_NE(failed.message().find("the memory stays where it is; resume the tag again"), std::string::npos)
        << failed.message();
    EXPECT_EQ(StateOf(pool), "resuming");
    hold = false;
    ASSERT_TRUE(Holds(memory, 4 * kMiB, 1)) << "the stream waited for the copies";
    Fill(memory, 4 * kMiB, 2);  // the program goes on with it
    EXPECT_TRUE((by_a_pause ? Pause(pool) : Resume(pool)).ok());
    if (by_a_pause) {
      EXPECT_EQ(a.InUse(), 0U);
    }
    EXPECT_TRUE(Resume(pool).ok());
    EXPECT_TRUE(Holds(memory, 4 * kMiB, 2)) << "what it wrote meanwhile";
    a.simulator->SetHook({});
  }
}

TEST_F(PoolsTest, a_stream_cannot_wait_for_a_tag_that_nobody_resumes) {
  const PoolId pool = Open("weights");
  Take(pool, kMiB);
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_EQ(pools().WaitOn(pool, nullptr).code(), Code::kRefused);
  EXPECT_TRUE(pools().Wait(pool).ok()) << "nothing is under way";
  ASSERT_TRUE(Resume(pool).ok());
}

TEST_F(PoolsTest, a_pause_without_waiting_follows_one_stream_and_runs_no_kernels) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 4 * kMiB);
  Fill(memory, 4 * kMiB, 1);
  ASSERT_TRUE(pools().Pause(pool, {.wait = false, .after = nullptr}).ok());
  ASSERT_TRUE(pools().Wait(pool).ok());
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_EQ(a.simulator->Calls("MomentOf"), 1U);
  EXPECT_EQ(a.simulator->Calls("Follow"), 1U);
  EXPECT_EQ(a.simulator->Calls("Synchronize"), 0U);
  EXPECT_EQ(a.simulator->Calls("FindNonZero"), 0U);
  EXPECT_EQ(pools().Snapshot().front().contents.bytes_saved, 4 * kMiB) << "what was given out, and not the whole chunk";
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_EQ(a.simulator->Calls("ClearAll"), 0U);
  EXPECT_TRUE(Holds(memory, 4 * kMiB, 1));
}

TEST_F(PoolsTest, a_pool_that_holds_nothing_opens_no_context) {
  const PoolId pool = Open("weights");
  ASSERT_TRUE(pools().Pause(pool, {.wait = true, .after = nullptr}).ok());
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(a.simulator->ContextsOpened().empty());
  EXPECT_EQ(a.simulator->Calls("MomentOf"), 0U);
}

TEST_F(PoolsTest, a_failure_without_waiting_comes_at_the_wait_once) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 4 * kMiB);
  Fill(memory, 4 * kMiB, 1);
  ASSERT_TRUE(Pause(pool).ok());
  ASSERT_TRUE(a.simulator->FailNext("Map", 1, cuda::kUnknown).ok());
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  const Status failed = pools().WaitOn(pool, nullptr);
  EXPECT_EQ(failed.code(), Code::kDriver);
  EXPECT_NE(failed.message().find("stays paused, with its contents kept"), std::string::npos) << failed.message();
  EXPECT_TRUE(pools().Wait(pool).ok()) << "it was heard";
  ASSERT_TRUE(a.simulator->FailNext("Map", 1, cuda::kUnknown).ok());
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  EXPECT_FALSE(pools().Wait(pool).ok());
  EXPECT_TRUE(pools().Wait(pool).ok()) << "it was heard here, too";
  ASSERT_TRUE(a.simulator->FailNext("Map", 1, cuda::kUnknown).ok());
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  const Status still = Pause(pool);
  EXPECT_NE(still.message().find("still paused"), std::string::npos) << still.message();
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(memory, 4 * kMiB, 1));
}

TEST_F(PoolsTest, a_failure_that_nobody_heard_of_is_not_told_after_a_try_that_worked) {
  const PoolId pool = Open("weights");
  Take(pool, 4 * kMiB);
  ASSERT_TRUE(Pause(pool).ok());
  ASSERT_TRUE(a.simulator->FailNext("Map", 1, cuda::kUnknown).ok());
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  while (pools().Snapshot()[0].failure.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  EXPECT_EQ(pools().Wait(pool), Status{});
  EXPECT_EQ(StateOf(pool), "resident");
}

TEST_F(PoolsTest, what_is_asked_of_one_tag_is_done_in_that_order) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 4 * kMiB);
  Fill(memory, 4 * kMiB, 1);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(pools().Pause(pool, {.wait = false}).ok());
    ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  }
  ASSERT_TRUE(pools().Wait(pool).ok());
  EXPECT_EQ(StateOf(pool), "resident");
  EXPECT_EQ(a.session->CopyState().pools.at(pool).cycles, 20U);
  EXPECT_TRUE(Holds(memory, 4 * kMiB, 1));
}

TEST_F(PoolsTest, the_highest_priority_comes_first) {
  const PoolId first = Open("first"), low = Open("low"), as_low = Open("as low"), high = Open("high");
  for (const PoolId pool : {first, low, as_low, high}) {
    Take(pool, kMiB)[0] = std::byte{1};
    ASSERT_TRUE(Pause(pool).ok());
  }
  const auto gate = HoldAt("Create");
  ASSERT_TRUE(pools().Resume(first, {.wait = false}).ok());
  gate->AwaitReached();
  ASSERT_TRUE(pools().Resume(low, {.wait = false, .priority = -1}).ok());
  ASSERT_TRUE(pools().Resume(as_low, {.wait = false, .priority = -1}).ok());
  ASSERT_TRUE(pools().Resume(high, {.wait = false, .priority = 5}).ok());
  gate->Open();
  for (const PoolId pool : {first, low, as_low, high}) ASSERT_TRUE(pools().Wait(pool).ok());
  std::vector<PoolId> done;
  for (const Event& event : a.journal->events) {
    const auto* end = std::get_if<CycleDone>(&event.body);
    if (end != nullptr && end->kind == CycleKind::kResume) done.push_back(end->pool);
  }
  EXPECT_EQ(done, (std::vector<PoolId>{first, high, low, as_low})) << "of equals in the order of asking";
}

TEST_F(PoolsTest, memory_that_is_freed_during_a_pause_is_given_back_at_its_end) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, kMiB);
  memory[0] = std::byte{1};
  const auto gate = HoldAt("CopyToHost");
  ASSERT_TRUE(pools().Pause(pool, {.wait = false, .after = nullptr}).ok());
  gate->AwaitReached();
  EXPECT_TRUE(Give(memory).ok());
  EXPECT_EQ(Give(memory).code(), Code::kNotFound) << "it is given back, only later";
  EXPECT_EQ(pools().Allocate(pool, kMiB, kDevice).status().code(), Code::kRefused);
  gate->Open();
  ASSERT_TRUE(pools().Wait(pool).ok());
  EXPECT_TRUE(a.session->CopyState().allocations.empty());
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(PoolsTest, memory_that_is_being_freed_when_a_pause_begins_is_given_back_at_its_end) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 130 * kMiB);
  memory[0] = std::byte{1};
  const auto stream = HoldAt("AwaitMoment"), copies = HoldAt("CopyToHost");
  Status freed;
  std::thread freeing([&] { freed = Give(memory); });
  stream->AwaitReached();
  ASSERT_TRUE(pools().Pause(pool, {.wait = false, .after = nullptr}).ok());
  copies->AwaitReached();
  stream->Open();
  freeing.join();
  EXPECT_TRUE(freed.ok()) << freed.message();
  EXPECT_EQ(a.session->CopyState().pools.at(pool).parts.size(), 1U) << "the pause has it in its plan";
  copies->Open();
  ASSERT_TRUE(pools().Wait(pool).ok());
  EXPECT_TRUE(a.session->CopyState().allocations.empty());
  EXPECT_EQ(a.session->CopyState().broken, "");
}

TEST_F(PoolsTest, memory_is_allocated_after_a_resume_that_is_under_way) {
  const PoolId pool = Open("weights");
  Take(pool, kMiB)[0] = std::byte{1};
  ASSERT_TRUE(Pause(pool).ok());
  const auto gate = HoldAt("Create");
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  gate->AwaitReached();
  std::atomic<bool> taken = false;
  std::thread other([&] {
    Take(pool, kMiB);
    taken = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(taken);
  gate->Open();
  other.join();
  EXPECT_EQ(StateOf(pool), "resident");
}

TEST_F(PoolsTest, memory_whose_stream_cannot_be_waited_for_is_given_back_later) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, kMiB);
  ASSERT_TRUE(a.simulator->FailNext("MomentOf", 1, cuda::kInvalidHandle).ok());
  a.simulator->SetCapturing(true);  // so that the device cannot be asked, either
  EXPECT_TRUE(Give(memory).ok());
  EXPECT_EQ(a.InUse(), kChunk);
  a.simulator->SetCapturing(false);
  std::byte* const another = Take(pool, kMiB);
  EXPECT_EQ(a.session->CopyState().pools.at(pool).parts.size(), 1U);
  EXPECT_TRUE(Give(another).ok());
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(PoolsTest, memory_that_is_freed_during_a_resume_is_given_back_when_its_stream_lets_go_of_it) {
  const PoolId pool = Open("cache", PoolPolicy::kDiscard);
  std::byte* const memory = Take(pool, kMiB);
  ASSERT_TRUE(Pause(pool).ok());
  const auto gate = HoldAt("Create");
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  gate->AwaitReached();
  EXPECT_TRUE(Give(memory).ok());
  ASSERT_TRUE(a.simulator->FailNext("AwaitMoment", 1, cuda::kTimeout).ok());
  gate->Open();
  ASSERT_TRUE(pools().Wait(pool).ok());
  EXPECT_EQ(a.session->CopyState().pools.at(pool).parts.size(), 1U) << "its stream may still work on it";
  EXPECT_EQ(a.InUse(), kChunk);
  std::byte* const another = Take(pool, kMiB);
  EXPECT_EQ(a.session->CopyState().pools.at(pool).parts.size(), 1U) << "that of the other";
  EXPECT_TRUE(Give(another).ok());
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(PoolsTest, of_a_stream_that_is_gone_the_device_is_asked) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, kMiB);
  ASSERT_TRUE(a.simulator->FailNext("MomentOf", 1, cuda::kInvalidHandle).ok());
  EXPECT_TRUE(Give(memory).ok());
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(PoolsTest, a_session_that_ends_waits_for_what_is_under_way) {
  const PoolId pool = Open("weights");
  Take(pool, kMiB)[0] = std::byte{1};
  ASSERT_TRUE(a.simulator->SetLatency("Unmap", std::chrono::milliseconds(50)).ok());
  ASSERT_TRUE(pools().Pause(pool, {.wait = false}).ok());
  ASSERT_TRUE(pools().Wait(pool).ok());
  ASSERT_TRUE(pools().Resume(pool, {.wait = false}).ok());
  ASSERT_TRUE(pools().Wait(pool).ok());
}

TEST_F(PoolsTest, cycles_of_several_tags_and_of_nccl_run_side_by_side) {
  const PoolId one = Open("one"), two = Open("two", PoolPolicy::kDiscard);
  std::byte* const memory = Take(one, 4 * kMiB);
  std::byte* const nccl = a.Place(a.Create());
  Fill(memory, 4 * kMiB, 1);
  Fill(nccl, k2M, 2);
  Take(two, 4 * kMiB);
  const auto repeat = [&](const auto& pause, const auto& resume) {
    return std::thread([pause, resume] {
      for (int i = 0; i < 50; ++i) {
        ASSERT_TRUE(pause().ok());
        ASSERT_TRUE(resume().ok());
      }
    });
  };
  std::thread threads[] = {repeat([&] { return Pause(one); }, [&] { return Resume(one); }),
                           repeat([&] { return Pause(two); }, [&] { return Resume(two); }),
                           repeat([&] { return a.session->Pause(); }, [&] { return a.session->Resume(); }), std::thread([&] {
                             for (int i = 0; i < 200; ++i) {
                               const auto part = pools().Allocate(two, 40 * kMiB, kSecond);
                               EXPECT_TRUE(!part.ok() || pools().Free(*part, nullptr).ok());
                             }
                           })};
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Holds(memory, 4 * kMiB, 1));
  EXPECT_TRUE(Holds(nccl, k2M, 2));
}

TEST_F(PoolsTest, a_device_that_joins_during_a_pause_that_is_undone_reaches_the_memory) {
  const auto [paused, running, part] = FirstDeviceOnly();
  const auto gate = HoldAt("Synchronize");
  ASSERT_TRUE(pools().Pause(paused, {.wait = false}).ok());
  gate->AwaitReached();
  ASSERT_TRUE(a.simulator->FailNext("Unmap", 1, cuda::kUnknown).ok());
  Take(running, kMiB, kSecond);
  gate->Open();
  EXPECT_FALSE(pools().Wait(paused).ok());
  EXPECT_EQ(StateOf(paused), "resident");
  EXPECT_TRUE(BothReach(part));
  EXPECT_TRUE(Holds(part, kMiB, 1));
}

TEST_F(PoolsTest, a_stream_waits_for_the_end_of_a_resume_when_a_device_has_joined_meanwhile) {
  const auto [paused, running, part] = FirstDeviceOnly();
  ASSERT_TRUE(Pause(paused).ok());
  Take(running, kMiB, kSecond);
  ASSERT_TRUE(pools().Resume(paused, {.wait = false}).ok());
  ASSERT_TRUE(pools().WaitOn(paused, nullptr).ok());
  EXPECT_TRUE(BothReach(part));
  ASSERT_TRUE(pools().Wait(paused).ok());
}

TEST_F(PoolsTest, what_a_card_may_have_written_to_while_the_tag_was_paused_is_not_given_back_by_an_undo) {
  const PoolId pool = Open("weights");
  std::byte* const shared = Take(pool, kMiB);
  std::byte* const other = Take(pool, 130 * kMiB);
  Fill(shared, kMiB, 1);
  Fill(other, 130 * kMiB, 2);
  // The card comes when the pause is planned already, so the contents of the chunk that stays are saved.
  const auto gate = HoldAt("Synchronize");
  ASSERT_TRUE(pools().Pause(pool, {.wait = false}).ok());
  gate->AwaitReached();
  ASSERT_TRUE(a.session->records().NoteRegistration({AddressOf(shared), kMiB, "ibv_reg_mr"}));
  gate->Open();
  ASSERT_TRUE(pools().Wait(pool).ok());
  ASSERT_EQ(a.InUse(), kChunk) << "the chunk that the card uses stays";
  a.session->records().Note(Deregistered{AddressOf(shared), kMiB});
  a.simulator->SetHook({});
  ASSERT_TRUE(a.simulator->FailNext("Create", 1, cuda::kOutOfMemory).ok());
  EXPECT_FALSE(Resume(pool).ok());
  EXPECT_EQ(StateOf(pool), "paused");
  EXPECT_EQ(a.InUse(), kChunk) << "it went, and what comes back is older than what the card wrote";
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(shared, kMiB, 1));
  EXPECT_TRUE(Holds(other, 130 * kMiB, 2));
}

TEST_F(PoolsTest, host_memory_is_pinned_ahead_within_the_limit_and_given_back) {
  SessionOptions options;
  options.pool_pinned_bytes = 64 * kMiB;
  Process c(3, world, network, options);
  Pools& pools = c.session->pools();
  const PoolId one = *pools.Open("one", PoolPolicy::kPreserve), two = *pools.Open("two", PoolPolicy::kPreserve);
  ASSERT_TRUE(pools.Allocate(one, 130 * kMiB, kSecond).ok());
  for (int i = 0; i < 500 && c.Pinned() < 64 * kMiB; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(c.Pinned(), 64 * kMiB);
  ASSERT_TRUE(pools.Allocate(two, 130 * kMiB, kSecond).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(c.Pinned(), 64 * kMiB);
  c.session->devices().TrimPinned(kChunk);
  EXPECT_EQ(c.Pinned(), kChunk);
  c.JournalFolds();
}

// What pauses in the background waits in a condition for its next task, and only the parent has that thread.
TEST_F(PoolsTest, a_forked_child_ends_its_session_while_a_thread_of_the_parent_waits_for_tasks) {
#if defined(AMEM_SANITIZED)
  GTEST_SKIP() << "threads and fork do not go together there";
#endif
  const PoolId pool = Open("weights");
  Take(pool, kMiB);
  ASSERT_TRUE(pools().Pause(pool, {.wait = false}).ok());
  ASSERT_TRUE(pools().Wait(pool).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until the thread has gone from its task to its wait
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    a.session.reset();
    _exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  EXPECT_TRUE(Resume(pool).ok());
}

}  // namespace
}  // namespace amem
