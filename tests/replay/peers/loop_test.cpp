// The loop under a session's service: work of other threads, descriptors that come and go in one turn, processes that die.
#include "replay/peers/unix/loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <future>
#include <new>

#include "replay/peers/unix/pending_calls.h"
#include "replay/peers/unix/socket.h"
#include "tests/in_thread.h"
#include "tests/replay/peers/peers_fixture.h"

namespace amem {
namespace {

using std::chrono::milliseconds;
using Key = ServiceLoop::Key;

class LoopTest : public ::testing::Test, public ServiceLoop::Client {
 protected:
  void SetUp() override { ASSERT_TRUE(loop_.Open().ok()); }
  void TearDown() override { loop_.Stop(); }
  [[nodiscard]] std::optional<ServiceLoop::Clock::time_point> NextDeadline() const override { return deadline_; }
  void Timers(ServiceLoop::Clock::time_point now) override {
    if (deadline_ && now >= *deadline_) {
      deadline_.reset();
      expired_.set_value();
    }
  }
  void Sweep() override {}

  static UniqueFd Bell() { return UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

  std::optional<ServiceLoop::Clock::time_point> deadline_;
  std::promise<void> expired_;
  ServiceLoop loop_{*this};
};

TEST_F(LoopTest, work_runs_on_the_service_thread_and_has_run_when_run_returns) {
  ASSERT_TRUE(loop_.Start().ok());
  std::thread::id where;
  EXPECT_TRUE(loop_.Run([&] { where = std::this_thread::get_id(); }));
  EXPECT_NE(where, std::thread::id());
  EXPECT_NE(where, std::this_thread::get_id());
  int order = 0;
  loop_.Post([&] { order = 1; });
  EXPECT_TRUE(loop_.Run([&] { order = order == 1 ? 2 : -1; }));
  EXPECT_EQ(order, 2);
}

TEST_F(LoopTest, a_stopped_loop_runs_nothing_and_says_so) {
  ASSERT_TRUE(loop_.Start().ok());
  loop_.Stop();
  bool ran = false;
  EXPECT_FALSE(loop_.Run([&] { ran = true; }));
  loop_.Post([&] { ran = true; });
  EXPECT_FALSE(ran);
}

TEST_F(LoopTest, a_stop_lets_go_of_a_thread_that_waits_for_its_work) {
  ASSERT_TRUE(loop_.Start().ok());
  std::promise<void> busy, go_on;
  loop_.Post([&] {
    busy.set_value();
    go_on.get_future().wait();
  });
  busy.get_future().wait();
  auto waiting = test::InThread([&] { return loop_.Run([] {}); });
  std::this_thread::sleep_for(milliseconds(20));
  auto stopping = test::InThread([&] { loop_.Stop(); });
  std::this_thread::sleep_for(milliseconds(20));
  go_on.set_value();
  stopping.wait();
  EXPECT_FALSE(waiting.get());
}

// As when a call of the driver does not return because the GPU hangs.
TEST_F(LoopTest, a_thread_that_hangs_in_its_work_keeps_neither_a_stop_with_patience_nor_other_work_waiting) {
  ASSERT_TRUE(loop_.Start().ok());
  std::promise<void> busy, go_on;
  loop_.Post([&] {
    busy.set_value();
    go_on.get_future().wait();
  });
  busy.get_future().wait();
  bool ran = false;
  EXPECT_FALSE(loop_.Run([&] { ran = true; }, In(milliseconds(30))));
  EXPECT_FALSE(loop_.Stop(milliseconds(30)));
  EXPECT_FALSE(loop_.Run([] {}));
  go_on.set_value();
  EXPECT_TRUE(loop_.Stop());
  EXPECT_FALSE(ran) << "nobody waits for it any more";
}

TEST_F(LoopTest, work_that_hangs_is_left_behind_with_what_it_holds) {
  ASSERT_TRUE(loop_.Start().ok());
  const auto go_on = std::make_shared<std::promise<void>>();
  const auto work = [go_on, held = std::make_shared<int>(7)] {
    go_on->get_future().wait();
    return *held;
  };
  const Deadline began = Now();
  EXPECT_FALSE(loop_.Run(work, In(milliseconds(30))));
  EXPECT_LT(SinceThen(began), std::chrono::seconds(5));
  go_on->set_value();
  EXPECT_EQ(loop_.Run([] { return 3; }), 3);
}

TEST_F(LoopTest, work_without_memory_fails_alone) {
  ASSERT_TRUE(loop_.Start().ok());
  EXPECT_FALSE(loop_.Run([] { throw std::bad_alloc(); }));
  EXPECT_TRUE(loop_.Run([] {}));
}

TEST_F(LoopTest, a_descriptor_that_an_event_of_the_same_turn_removed_is_not_called) {
  const UniqueFd first = Bell(), second = Bell();
  std::atomic<int> called{0};
  Key first_key = 0, second_key = 0;
  first_key = loop_.Add(first.get(), EPOLLIN, [&](Key, std::uint32_t) {
    ++called;
    loop_.Remove(first_key);
    loop_.Remove(second_key);
  });
  second_key = loop_.Add(second.get(), EPOLLIN, [&](Key, std::uint32_t) {
    ++called;
    loop_.Remove(first_key);
    loop_.Remove(second_key);
  });
  ASSERT_NE(first_key, 0U);
  ASSERT_NE(second_key, 0U);
  SignalEvent(first.get());
  SignalEvent(second.get());
  ASSERT_TRUE(loop_.Start().ok());
  while (called == 0) std::this_thread::sleep_for(milliseconds(1));
  ASSERT_TRUE(loop_.Run([] {}));
  EXPECT_EQ(called, 1);
}

TEST_F(LoopTest, a_descriptor_that_the_kernel_does_not_take_has_no_key) {
  EXPECT_EQ(loop_.Add(-1, EPOLLIN, [](Key, std::uint32_t) {}), 0U);
}

TEST_F(LoopTest, a_deadline_ends_the_wait) {
  deadline_ = ServiceLoop::Clock::now() + milliseconds(50);
  auto expired = expired_.get_future();
  ASSERT_TRUE(loop_.Start().ok());
  EXPECT_EQ(expired.wait_for(std::chrono::seconds(10)), std::future_status::ready);
}

TEST_F(LoopTest, a_watched_process_is_told_of_once_it_has_died_and_not_after_the_watch_has_ended) {
  test::Baton live[2];
  test::Child watched([&] {
    live[0].Await();
    return 0;
  });
  test::Child forgotten([&] {
    live[1].Await();
    return 0;
  });
  std::atomic<int> deaths{0};
  std::promise<void> died;
  ProcessWatch watch, ended;
  watch.Begin(loop_, watched.pid(), [&] {
    ++deaths;
    watch.End();
    died.set_value();
  });
  ended.Begin(loop_, forgotten.pid(), [&] { ++deaths; });
  EXPECT_TRUE(watch);
  ended.End();
  EXPECT_FALSE(ended);
  ASSERT_TRUE(loop_.Start().ok());
  ASSERT_TRUE(loop_.Run([] {}));
  EXPECT_EQ(deaths, 0);
  live[1].Pass();
  EXPECT_EQ(forgotten.Wait(), 0);
  live[0].Pass();
  ASSERT_EQ(died.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_EQ(deaths, 1);
}

// ---- what the delegate is told later

TEST(PendingDelegateCallsTest, calls_wait_in_their_order_and_facts_for_all_of_them) {
  test::FakeSession session(SessionId{1});
  PendingDelegateCalls pending(session);
  bool free = false;
  std::string made;
  const auto call = [&](char name) { return [&, name] { return free && (made += name, true); }; };
  pending.Add(call('a'));
  pending.Add(call('b'));
  pending.AddFact(ProcessSeen{});
  EXPECT_FALSE(pending.Flush());
  ASSERT_TRUE(pending.again());
  EXPECT_FALSE(pending.IsDue(ServiceLoop::Clock::now() - milliseconds(1000)));
  EXPECT_TRUE(pending.IsDue(*pending.again()));
  free = true;
  EXPECT_TRUE(pending.Flush());
  EXPECT_EQ(made, "ab");
  EXPECT_TRUE(pending.empty());
  EXPECT_FALSE(pending.again());
}

// Else the loop would wake for it for ever.
TEST(PendingDelegateCallsTest, what_was_made_on_the_way_is_due_no_more) {
  test::FakeSession session(SessionId{1});
  PendingDelegateCalls pending(session);
  bool free = false;
  pending.Add([&] { return free; });
  EXPECT_FALSE(pending.Flush());
  free = true;
  EXPECT_TRUE(pending.MakeCalls());
  EXPECT_FALSE(pending.again());
}

}  // namespace
}  // namespace amem
