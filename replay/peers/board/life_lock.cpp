#include "replay/peers/board/life_lock.h"

#include <linux/futex.h>

#include <cerrno>
#include <cstddef>

#include "journal/base/file.h"

namespace amem::board {
namespace {

// The kernel's futex is the first word of glibc's mutex.
std::uint32_t KernelWord(const LifeWords& words) {
  static_assert(offsetof(pthread_mutex_t, __data.__lock) == 0 && sizeof words.lock.__data.__lock == 4);
  return __atomic_load_n(reinterpret_cast<const std::uint32_t*>(&words.lock), __ATOMIC_SEQ_CST);
}

Status LifeLockFailed(const char* what, int error) {
  return {CodeOfErrno(error), "the lock that says that this session lives: " + std::string(what) + ": " + ErrnoText(error)};
}

}  // namespace

Result<LifeHolder> LifeHolder::Hold(LifeWords& words) {
  pthread_mutexattr_t how;
  if (const int error = ::pthread_mutexattr_init(&how); error != 0) return LifeLockFailed("attributes", error);
  ::pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
  int error = ::pthread_mutex_init(&words.lock, &how);
  ::pthread_mutexattr_destroy(&how);
  if (error != 0) return LifeLockFailed("init", error);
  // Nobody else has it yet. It is not waited for, because this thread takes other locks under it for as long as it lives.
  if (error = ::pthread_mutex_trylock(&words.lock); error != 0) return LifeLockFailed("lock", error);
  words.holder = KernelWord(words) & FUTEX_TID_MASK;
  return LifeHolder(&words);
}

LifeHolder::~LifeHolder() {
  if (words_ == nullptr) return;
  if (words_->holder != (KernelWord(*words_) & FUTEX_TID_MASK)) return;  // damaged; glibc would not know what to do
  words_->closed = LifeWords::kClosed;
  ::pthread_mutex_unlock(&words_->lock);
}

ProcessLife LifeIn(const LifeWords& words, int pidfd) {
  using Is = ProcessLife::Is;
  const std::uint32_t word = KernelWord(words) & ~static_cast<std::uint32_t>(FUTEX_WAITERS);
  const std::uint32_t holder = words.holder;
  // The kernel marks nothing in memory that it took from a process before that ended: of one killed for want of memory.
  if (holder != 0 && word == holder)
    return pidfd >= 0 && LifeOf({}, pidfd).HasEnded() ? ProcessLife{Is::kEnded, "pidfd"} : ProcessLife{Is::kAlive, {}};
  if (holder != 0 && word == FUTEX_OWNER_DIED) return {Is::kEnded, "lock"};
  if (holder != 0 && word == 0 && words.closed == LifeWords::kClosed) return {Is::kEnded, "lock"};
  ProcessLife life{Is::kUnknown, {}};
  if (pidfd >= 0) life = LifeOf({}, pidfd);
  if (life.HasEnded()) life.why = "pidfd";
  if (life.IsUnknown()) life.why = holder == 0 && word == 0 ? "its page was never held" : "its page has been written over";
  return life;
}

}  // namespace amem::board
