// Mutexes whose use Clang checks while it compiles, and the one order in which they may be taken.
//
// In a class:                        Mutex mutex_{LockRank::kDriverState};
//                                    std::map<Address, Bytes> ranges_ GUARDED_BY(mutex_);
//                                    bool Reserved(Address address) const REQUIRES(mutex_);
// For a block:                       const MutexLock lock(mutex_);
// With a part of the block without:  MutexLock lock(mutex_);  lock.Unlock();  ...  lock.Lock();
// Only if it is free:                if (!mutex_.try_lock()) return busy;  const MutexLock lock(mutex_, std::adopt_lock);
// Waiting for a change:              while (!done_) if (!changed_.WaitUntil(mutex_, until)) return late;
//
// Reading or writing `ranges_` without the lock, or calling Reserved without it, is then an error of Clang's; GCC sees nothing
// of it. Clang does not follow a lambda, which is a function of its own and does not know what its caller holds (so a condition
// is a loop, as above, and not a predicate), nor a lock that a function returns, nor a second name of the same mutex. There
// mutex_.AssertHeld() tells it, and builds of type Debug look whether that is true.
//
// A mutex with a rank may be taken by a thread that holds none of the same or a later rank. Builds of type Debug check that
// each time, and stop with both ranks in words (AMEM_LOCK_ORDER); other builds do not look. try_lock may take any, because it
// does not wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "journal/base/no_copies.h"

#if defined(__clang__)
#define AMEM_CHECKED_BY_CLANG(attribute) __attribute__((attribute))
#else
#define AMEM_CHECKED_BY_CLANG(attribute)
#endif
#define CAPABILITY(name) AMEM_CHECKED_BY_CLANG(capability(name))    // of a class: its objects can be held
#define SCOPED_CAPABILITY AMEM_CHECKED_BY_CLANG(scoped_lockable)    // of a class: its objects hold something while they live
#define GUARDED_BY(mutex) AMEM_CHECKED_BY_CLANG(guarded_by(mutex))  // of a member
#define REQUIRES(...) AMEM_CHECKED_BY_CLANG(requires_capability(__VA_ARGS__))        // of a function: the caller holds it
#define EXCLUDES(...) AMEM_CHECKED_BY_CLANG(locks_excluded(__VA_ARGS__))             // the caller does not hold it
#define ACQUIRE(...) AMEM_CHECKED_BY_CLANG(acquire_capability(__VA_ARGS__))          // the caller holds it from now on
#define TRY_ACQUIRE(...) AMEM_CHECKED_BY_CLANG(try_acquire_capability(__VA_ARGS__))  // ... if the answer is the first argument
#define RELEASE(...) AMEM_CHECKED_BY_CLANG(release_capability(__VA_ARGS__))
#define ASSERTS_HELD(...) AMEM_CHECKED_BY_CLANG(assert_capability(__VA_ARGS__))
#define UNCHECKED_LOCKS AMEM_CHECKED_BY_CLANG(no_thread_safety_analysis)  // of a function whose locks Clang cannot follow

namespace amem {

// From the first that a thread takes to the last. Between two of these nothing else is promised.
enum class LockRank : std::uint8_t {
  kNone = 0,  // never held while another is taken, nor taken while another is held; not checked
  kCycle,     // one pause or resume of a session at a time
  kPools,     // the session's pools
  kSlabs,     // one thread at a time opens a slab
  kExport,    // one thread at a time exports
  kLedger,    // journal and state
  // Below the ledger's: calls of the driver and of the journal, some of which are made with it.
  kDriverLanes,    // which devices have lanes of copies
  kDriverLane,     // the lanes of one device
  kDriverCopies,   // one FinishCopies at a time
  kDriverState,    // ranges, mappings, handles; the devices that are open
  kHostClaims,     // what this process is about to take of the host
  kJournalAppend,  // the journal's tail
  kJournalStore,   // its file
  kLast,           // taken last: nothing is called while it is held
};

namespace lock_order {
#ifdef AMEM_LOCK_ORDER
inline constexpr bool kChecked = true;
#else
inline constexpr bool kChecked = false;
#endif
void Taking(LockRank rank);  // ends the process if this thread holds a lock of that rank or a later one
void Taken(const void* mutex, LockRank rank);
void Released(const void* mutex);
void AssertHeld(const void* mutex);  // ends the process if this thread does not hold it
}  // namespace lock_order

class CAPABILITY("mutex") Mutex : NoCopies {
 public:
  explicit Mutex(LockRank rank = LockRank::kNone) : rank_(rank) {}

  // Lower case, so that std::unique_lock takes it as well, where nothing is to be checked.
  void lock() ACQUIRE() {
    if constexpr (lock_order::kChecked) lock_order::Taking(rank_);
    mutex_.lock();
    if constexpr (lock_order::kChecked) lock_order::Taken(this, rank_);
  }
  [[nodiscard]] bool try_lock() TRY_ACQUIRE(true) {
    if (!mutex_.try_lock()) return false;
    if constexpr (lock_order::kChecked) lock_order::Taken(this, rank_);
    return true;
  }
  void unlock() RELEASE() {
    if constexpr (lock_order::kChecked) lock_order::Released(this);
    mutex_.unlock();
  }
  // Tells Clang that it is held; builds of type Debug look whether that is true.
  void AssertHeld() const ASSERTS_HELD() {
    if constexpr (lock_order::kChecked) lock_order::AssertHeld(this);
  }

 private:
  friend class Condition;
  std::mutex mutex_;
  const LockRank rank_;
};

// Holds a mutex, or what else has its lock() and unlock(), while it lives.
template <class Lockable>
class SCOPED_CAPABILITY LockOf : NoCopies {
 public:
  explicit LockOf(Lockable& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  LockOf(Lockable& mutex, std::adopt_lock_t) REQUIRES(mutex) : mutex_(mutex) {}
  ~LockOf() RELEASE() {
    if (held_) mutex_.unlock();
  }
  void Unlock() RELEASE() {
    held_ = false;
    mutex_.unlock();
  }
  void Lock() ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Lockable& mutex_;
  bool held_ = true;
};
using MutexLock = LockOf<Mutex>;

// False: it was not free until then. Most are held for microseconds, so it yields before it naps. (ThreadSanitizer does not
// know the time limits of the standard's mutexes.)
bool TryLockUntil(auto& mutex, std::chrono::steady_clock::time_point until) UNCHECKED_LOCKS {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kAwake{100}, kNapMin{20}, kNapMax{1000};
  const auto began = Clock::now();
  auto nap = kNapMin;
  while (!mutex.try_lock()) {
    const auto now = Clock::now();
    if (now >= until) return false;
    if (now < began + kAwake) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, kNapMax);
  }
  return true;
}

// The other way round: lets go of a mutex that the caller holds, while it lives or until End.
template <class Lockable>
class SCOPED_CAPABILITY WithoutLock : NoCopies {
 public:
  explicit WithoutLock(Lockable& mutex) RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~WithoutLock() RELEASE() {
    if (!ended_) mutex_.lock();
  }
  void End() RELEASE() {
    mutex_.lock();
    ended_ = true;
  }

 private:
  Lockable& mutex_;
  bool ended_ = false;
};

// What threads wait for that hold a mutex: it is free while they wait, and theirs again afterwards.
class Condition {
 public:
  void NotifyAll() { changed_.notify_all(); }
  // These may return although nothing has changed: they belong in a loop.
  void Wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  // False: the time is over.
  template <class Clock, class Duration>
  [[nodiscard]] bool WaitUntil(Mutex& mutex, std::chrono::time_point<Clock, Duration> until) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = changed_.wait_until(lock, until) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }

 private:
  std::condition_variable changed_;
};

}  // namespace amem
