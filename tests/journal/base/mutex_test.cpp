// The order of locks, where it is checked: in builds of type Debug. What Clang refuses: locks_test.cpp.
#include "journal/base/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace amem {
namespace {

TEST(Mutex, is_held_by_one_thread_at_a_time) {
  Mutex mutex;
  const auto taken_elsewhere = [&] {
    bool taken = false;
    std::thread([&] {
      if (!mutex.try_lock()) return;
      taken = true;
      mutex.unlock();
    }).join();
    return taken;
  };
  MutexLock lock(mutex);
  EXPECT_FALSE(taken_elsewhere());
  lock.Unlock();
  EXPECT_TRUE(taken_elsewhere());
  lock.Lock();
  EXPECT_FALSE(taken_elsewhere());
}

TEST(Condition, lets_another_thread_in_while_it_waits_and_ends_when_the_time_is_over) {
  Mutex mutex;
  Condition changed;
  bool done = false;
  const MutexLock lock(mutex);
  std::thread other([&] {
    const MutexLock theirs(mutex);
    done = true;
    changed.NotifyAll();
  });
  while (!done) changed.Wait(mutex);
  other.join();
  EXPECT_FALSE(changed.WaitUntil(mutex, std::chrono::steady_clock::now() + std::chrono::milliseconds(1)));
}

#ifdef AMEM_LOCK_ORDER

using MutexDeathTest = testing::Test;

TEST(MutexDeathTest, a_lock_that_is_taken_after_a_later_one_ends_the_process_and_names_both) {
  Mutex ledger(LockRank::kLedger), driver(LockRank::kDriverState);
  {
    const MutexLock first(ledger);
    const MutexLock second(driver);  // the order of the list
  }
  const MutexLock first(driver);
  EXPECT_DEATH(const MutexLock second(ledger), "a thread that holds 'driver state' takes 'ledger'");
}

TEST(MutexDeathTest, a_thread_may_not_hold_two_of_one_rank) {
  Mutex one(LockRank::kSlabs), other(LockRank::kSlabs);
  const MutexLock first(one);
  EXPECT_DEATH(const MutexLock second(other), "a thread that holds 'slabs' takes 'slabs'");
}

TEST(MutexDeathTest, the_order_is_that_of_what_is_held_now_whichever_was_given_back_first) {
  Mutex ledger(LockRank::kLedger), driver(LockRank::kDriverState), last(LockRank::kLast);
  MutexLock first(ledger);
  MutexLock second(driver);
  MutexLock third(last);
  second.Unlock();
  EXPECT_DEATH(const MutexLock again(driver), "a thread that holds 'last' takes 'driver state'");
  third.Unlock();
  second.Lock();
  first.Unlock();
  EXPECT_DEATH(const MutexLock again(ledger), "a thread that holds 'driver state' takes 'ledger'");
}

TEST(MutexDeathTest, try_lock_takes_any_and_what_is_taken_after_it_is_looked_at) {
  Mutex ledger(LockRank::kLedger), driver(LockRank::kDriverState), slabs(LockRank::kSlabs);
  const MutexLock first(driver);
  if (!ledger.try_lock()) FAIL() << "nobody holds it";
  const MutexLock second(ledger, std::adopt_lock);
  EXPECT_DEATH(const MutexLock third(slabs), "takes 'slabs'");
}

TEST(MutexDeathTest, what_this_thread_holds_another_does_not) {
  Mutex mutex;
  const MutexLock lock(mutex);
  mutex.AssertHeld();
  EXPECT_DEATH(std::thread([&] { mutex.AssertHeld(); }).join(), "a lock that should be held is not");
}

#endif

}  // namespace
}  // namespace amem
