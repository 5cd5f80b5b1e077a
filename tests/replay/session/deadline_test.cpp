// What a pause waits for has an end: calls inside the gate, the device, copies. When the time is up all sessions run on.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <thread>

#include "tests/in_thread.h"
#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::k2M, test::kDevice, test::kMiB;

SessionOptions Impatient() {
  SessionOptions options;
  options.layout = Layout::kDirect;
  options.deadlines = Deadlines(std::chrono::milliseconds(400));
  return options;
}

class DeadlineTest : public test::TwoProcesses {
 protected:
  DeadlineTest() : DeadlineTest(Impatient()) {}
  explicit DeadlineTest(const SessionOptions& options) : TwoProcesses(options, 256 * kMiB) {
    const AllocationId own = a.Create();
    mine_ = a.Place(own);
    std::memset(mine_, 0x42, k2M);
    b.Place(Pass(own));
  }
  struct Failures {
    Status here, there;
  };
  // Of both sessions, in time; they run on.
  Failures BothFail() {
    const auto began = std::chrono::steady_clock::now();
    auto other = test::InThread([&] { return b.session->Pause(); });
    const Failures failed{a.session->Pause(), other.get()};
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(8));
    EXPECT_FALSE(failed.here.ok() || failed.there.ok());
    EXPECT_FALSE(a.session->paused() || b.session->paused());
    EXPECT_EQ(b.session->Progress().lifecycle, Lifecycle::kRunning);
    return failed;
  }
  void PauseWorksNow() {
    Both(&Session::Pause);
    EXPECT_EQ(a.InUse(), 0U);
    Both(&Session::Resume);
    EXPECT_EQ(mine_[k2M - 1], std::byte{0x42});
  }
  std::byte* mine_ = nullptr;
  bool in_unmap_ = false;
};

class PatientTest : public DeadlineTest {
 protected:
  PatientTest()
      : DeadlineTest([] {
          SessionOptions options = Impatient();
          options.deadlines = Deadlines(std::chrono::milliseconds(60'000));
          return options;
        }()) {}
};

// How long it waited, as it says: not so long that the others would have given up on it.
long Within(const Status& failed) {
  const std::size_t at = failed.message().find("within ");
  return at == std::string::npos ? -1 : std::strtol(failed.message().c_str() + at + 7, nullptr, 10);
}
#define EXPECT_SAYS_WITHIN_ITS_PART(status) EXPECT_TRUE(Within(status) >= 150 && Within(status) < 400) << (status).message()

#define EXPECT_SAYS(status, text) EXPECT_NE((status).message().find(text), std::string::npos) << (status).message()

// The other's device is busy, and stays so for much longer than this test takes.
TEST_F(PatientTest, a_wait_for_the_device_is_broken_off_when_another_rank_has_failed) {
  b.simulator->SetWork(Simulator::Work::kOfProgram);
  a.simulator->SetHook([](std::string_view name, std::uint64_t) { return name == "Synchronize" ? cuda::kUnknown : 0; });
  const auto began = std::chrono::steady_clock::now();
  auto other = test::InThread([&] { return b.session->Pause(); });
  const Status here = a.session->Pause(), there = other.get();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
  for (const Status& status : {here, there}) {
    EXPECT_FALSE(status.ok());
    EXPECT_SAYS(status, "rank 0 (pid ");
    EXPECT_EQ(status.driver_result(), cuda::kUnknown) << status.message();
  }
  EXPECT_FALSE(a.session->paused() || b.session->paused());
  a.simulator->SetHook({});
  b.simulator->SetWork(Simulator::Work::kNone);
  PauseWorksNow();
}

TEST_F(DeadlineTest, a_launch_that_does_not_return_fails_the_pause_of_all_in_time_and_is_named) {
  std::promise<void> inside, go_on;
  std::thread launch([&] {
    const auto entered = a.session->calls().EnterLaunch("cuLaunchKernel", reinterpret_cast<void*>(0x5150));
    EXPECT_TRUE(entered.owns_lock());
    inside.set_value();
    go_on.get_future().wait();
  });
  inside.get_future().wait();
  const auto [here, there] = BothFail();
  EXPECT_EQ(here.code(), Code::kRefused);
  EXPECT_SAYS(here, " ms: cuLaunchKernel on thread ");
  EXPECT_SAYS_WITHIN_ITS_PART(here);
  EXPECT_SAYS(here, " for stream 0x5150; it waits for device 0, ");
  EXPECT_SAYS(here, "the session runs on as before");
  EXPECT_SAYS(there, "rank 0");
  EXPECT_SAYS(there, "cuLaunchKernel");
  EXPECT_GE(a.Count<ThreadSeen>(), 2U) << "the one inside is among them";
  EXPECT_TRUE(a.session->nccl().Create(k2M, test::Process::On(kDevice), 0, {}).ok()) << "the gate is open again";
  go_on.set_value();
  launch.join();
  PauseWorksNow();
}

TEST_F(DeadlineTest, a_device_that_does_not_become_idle_fails_the_pause_of_all_in_time_and_is_named) {
  a.simulator->SetWork(Simulator::Work::kOfProgram);
  const auto [here, there] = BothFail();
  EXPECT_EQ(here.code(), Code::kRefused);
  for (const Status& failed : {here, there}) {
    EXPECT_SAYS(failed, "rank 0");
    EXPECT_SAYS(failed, "device 0: a kernel or copy that was submitted before the pause has not ended within ");
    EXPECT_SAYS_WITHIN_ITS_PART(failed);
  }
  a.simulator->SetWork(Simulator::Work::kNone);
  PauseWorksNow();
}

TEST_F(DeadlineTest, a_launch_is_refused_at_once_while_paused) {
  Both(&Session::Pause);
  EXPECT_FALSE(a.session->calls().EnterLaunch().owns_lock());
  Both(&Session::Resume);
}

// A pause that begins between the two would wait for the outer call, and the inner one for the pause.
TEST_F(DeadlineTest, a_call_inside_another_passes_a_gate_that_is_being_closed) {
  CallGate gate;
  std::shared_lock outer(gate);
  std::thread closes([&] {
    EXPECT_TRUE(gate.Close(std::chrono::seconds(20)).ok());
    gate.Open();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  { const std::shared_lock inner(gate); }
  outer.unlock();
  closes.join();
}

TEST_F(DeadlineTest, who_closes_a_gate_that_another_has_closed_keeps_calls_out) {
  CallGate gate;
  ASSERT_TRUE(gate.Close(std::chrono::seconds(1)).ok());
  std::atomic<bool> inside{false};
  std::promise<void> closed, go_on;
  std::thread second([&] {
    EXPECT_TRUE(gate.Close(std::chrono::seconds(20)).ok());
    closed.set_value();
    go_on.get_future().wait();
    gate.Open();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  gate.Open();
  std::thread call([&] {
    const std::shared_lock entered(gate);
    inside = true;
  });
  closed.get_future().wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(inside);
  go_on.set_value();
  second.join();
  call.join();
  EXPECT_TRUE(inside);
}

TEST_F(DeadlineTest, copies_that_do_not_end_in_time_fail_the_pause_and_are_undone_when_they_end) {
  a.simulator->SetWork(Simulator::Work::kCopies);
  std::atomic<int> waits{0};
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    if (call == "FinishCopies" && ++waits == 2) a.simulator->SetWork(Simulator::Work::kNone);
    return 0;
  });
  const auto [here, there] = BothFail();
  EXPECT_EQ(here.driver_result(), cuda::kTimeout);
  EXPECT_SAYS(here, "device 0: copies of contents have not ended within ");
  EXPECT_SAYS_WITHIN_ITS_PART(here);
  a.simulator->SetHook({});
  PauseWorksNow();
}

TEST_F(DeadlineTest, a_launch_that_comes_during_a_pause_waits_and_is_made_when_the_pause_has_failed) {
  std::future<bool> launch;
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    if (call != "Synchronize" || launch.valid()) return 0;
    launch = test::InThread([&] { return a.session->calls().EnterLaunch().owns_lock(); });
    EXPECT_EQ(launch.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
    return cuda::kUnknown;
  });
  BothFail();
  EXPECT_TRUE(launch.get());
  a.simulator->SetHook({});
  PauseWorksNow();
}

TEST_F(DeadlineTest, neither_a_pause_nor_an_exit_waits_for_ever_for_a_driver_call_that_hangs) {
  const AllocationId id = a.Create();
  std::promise<void> hangs, go_on;
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    if (call != "Release") return 0;
    hangs.set_value();
    go_on.get_future().wait();
    return 0;
  });
  std::thread release([&] { EXPECT_TRUE(a.session->nccl().Release(id).ok()); });
  hangs.get_future().wait();
  const Status refused = a.session->Pause();
  EXPECT_EQ(refused.code(), Code::kRefused);
  EXPECT_EQ(refused.driver_result(), cuda::kNotReady);  // a program may try again
  EXPECT_SAYS(refused, "a driver call of another thread has not returned for ");
  EXPECT_SAYS(refused, "ms: thread ");
  const Status closed = a.session->Close("exit");
  EXPECT_EQ(closed.code(), Code::kTimeout);
  EXPECT_SAYS(closed, "a driver call of another thread has not returned for ");
  go_on.set_value();
  release.join();
}

// A resume waits as long as the others take.
TEST_F(DeadlineTest, a_pause_waits_for_another_threads_resume_no_longer_than_it_may) {
  Both(&Session::Pause);
  auto resume = test::InThread([&] { return a.session->Resume(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  auto pause = test::InThread([&] { return a.session->Pause(); });
  ASSERT_EQ(pause.wait_for(std::chrono::seconds(8)), std::future_status::ready);
  const Status refused = pause.get();
  EXPECT_EQ(refused.code(), Code::kRefused);
  EXPECT_SAYS(refused, "another thread's pause or resume has not ended within 3");
  EXPECT_TRUE(b.session->Resume().ok());
  EXPECT_TRUE(resume.get().ok());
  PauseWorksNow();
}

TEST_F(DeadlineTest, a_pause_of_a_tag_ends_although_an_unmap_of_nccls_begins_to_hang_after_it) {
  const AllocationId id = a.Create();
  const Address at{reinterpret_cast<std::uint64_t>(a.Place(id))};
  const PoolId pool = *a.session->pools().Open("weights", PoolPolicy::kPreserve);
  ASSERT_TRUE(a.session->pools().Allocate(pool, kMiB, kDevice).ok());
  std::promise<void> go_on;
  std::shared_future<void> opened = go_on.get_future().share();
  std::promise<void> hangs;
  std::thread unmap;
  std::atomic<bool> begun{false};
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    if (call == "Synchronize" && !begun.exchange(true)) {
      unmap = std::thread([&] { EXPECT_TRUE(a.session->nccl().Unmap(at, k2M).ok()); });
      hangs.get_future().wait();
    } else if (call == "Unmap" && !std::exchange(in_unmap_, true)) {
      hangs.set_value();
      opened.wait();
    }
    return 0;
  });
  auto pause = test::InThread([&] { return a.session->pools().Pause(pool, {}); });
  const bool ended = pause.wait_for(std::chrono::seconds(8)) == std::future_status::ready;
  EXPECT_TRUE(ended);
  go_on.set_value();
  const Status failed = pause.get();
  EXPECT_SAYS(failed, "a driver call of another thread has not returned for ");
  unmap.join();
  a.simulator->SetHook({});
  EXPECT_TRUE(a.session->pools().Resume(pool, {}).ok());
  EXPECT_TRUE(a.session->pools().Pause(pool, {}).ok());
}

TEST_F(DeadlineTest, a_tags_pause_waits_for_no_allocation_of_another_tag_and_for_its_own_no_longer_than_it_may) {
  Pools& pools = a.session->pools();
  const PoolId weights = *pools.Open("weights", PoolPolicy::kPreserve), cache = *pools.Open("cache", PoolPolicy::kPreserve);
  ASSERT_TRUE(pools.Allocate(weights, kMiB, kDevice).ok());
  std::promise<void> hangs, go_on;
  std::atomic<bool> once{false};
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    if (call != "Create" || once.exchange(true)) return 0;
    hangs.set_value();
    go_on.get_future().wait();
    return 0;
  });
  auto allocation = test::InThread([&] { return pools.Allocate(cache, kMiB, kDevice).ok(); });
  hangs.get_future().wait();
  auto other = test::InThread([&] { return pools.Pause(weights, {}); });
  auto own = test::InThread([&] { return pools.Pause(cache, {}); });
  EXPECT_EQ(other.wait_for(std::chrono::seconds(8)), std::future_status::ready);
  EXPECT_EQ(own.wait_for(std::chrono::seconds(8)), std::future_status::ready);
  go_on.set_value();
  const Status paused = other.get(), refused = own.get();
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_EQ(refused.code(), Code::kRefused);
  EXPECT_SAYS(refused, "pause of tag cache refused: a thread takes memory of it from the driver");
  EXPECT_TRUE(allocation.get());
  EXPECT_TRUE(pools.Pause(cache, {}).ok());
}

TEST_F(DeadlineTest, the_exit_code_is_in_the_last_event) {
  EXPECT_TRUE(a.session->Close("exit", 3).ok());
  EXPECT_EQ(std::get<SessionClosed>(a.journal->events.back().body), (SessionClosed{"exit", 3}));
  EXPECT_TRUE(b.session->Close("exit").ok());
  EXPECT_EQ(std::get<SessionClosed>(b.journal->events.back().body).exit_code, -1);
}

class ResetMeanwhile : public DeadlineTest {
  void TearDown() override {  // what is paused was pinned in the context that went, so the session is broken
    for (const auto* process : {&a, &b}) EXPECT_TRUE(process->session->Close("test").ok());
  }
};

// The others may wait for the thread that resets the device.
TEST_F(ResetMeanwhile, a_reset_does_not_wait_for_a_resume_that_waits_for_others) {
  auto paused = test::InThread([&] { return b.session->Pause(); });
  ASSERT_TRUE(a.session->Pause().ok());
  ASSERT_TRUE(paused.get().ok());
  auto resumed = test::InThread([&] { return a.session->Resume(); });
  ASSERT_EQ(resumed.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  auto reset = test::InThread([&] { a.session->devices().Forget(DeviceOrdinal{kDevice.value + 1}); });
  EXPECT_EQ(reset.wait_for(std::chrono::seconds(8)), std::future_status::ready);
  EXPECT_TRUE(b.session->Resume().ok());
  EXPECT_TRUE(resumed.get().ok());
}

}  // namespace
}  // namespace amem
