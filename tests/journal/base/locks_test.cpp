// What Clang must refuse: compiled once for each BREACH, and once without any (../CMakeLists.txt). It is never run.
#include "journal/base/mutex.h"

namespace amem {

class Ranges {
 public:
  void Add() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    ++count_;
    Grow();
  }
  bool AddLater() {
    MutexLock lock(mutex_);
    lock.Unlock();
#if BREACH == 1
    ++count_;
#endif
    lock.Lock();
    while (count_ == 0) changed_.Wait(mutex_);
    return count_ > 1;
  }
  bool AddIfFree() {
    if (!mutex_.try_lock()) return false;
    const MutexLock lock(mutex_, std::adopt_lock);
    Grow();
    return true;
  }
  void AddInside() {
#if BREACH == 2
    Grow();
#endif
#if BREACH == 3
    const MutexLock lock(mutex_);
    Add();
#endif
#if BREACH == 4
    mutex_.lock();
#endif
#if BREACH == 5
    changed_.Wait(mutex_);
#endif
    mutex_.AssertHeld();
    Grow();
  }

 private:
  void Grow() REQUIRES(mutex_) { ++count_; }

  Mutex mutex_;
  Condition changed_;
  int count_ GUARDED_BY(mutex_) = 0;
};

void Use(Ranges& ranges) {
  ranges.Add();
  ranges.AddInside();
  static_cast<void>(ranges.AddLater() && ranges.AddIfFree());
}

}  // namespace amem
