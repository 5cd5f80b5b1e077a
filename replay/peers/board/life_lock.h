// Whether a session lives: a robust lock in its page, which one of its threads holds for as long as the session lives. The
// kernel marks the lock when that thread ends: by SIGKILL, exit or exec of its process, also while a forked child lives on, and
// not while the process is stopped. So whoever maps the page sees it by one load, without a descriptor, a pid or /proc, in any
// namespace. The kernel marks nothing where it has no robust futexes, or where the OOM killer reclaimed the process's memory
// before that thread ended: then the lock seems held, and only a pidfd, or a socket on which nobody listens, shows the end.
//
// The holder writes; all others only load. A value that can be neither a holder's nor an end's is damage, and says nothing
// about the session.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "journal/base/no_copies.h"
#include "journal/base/process_sight.h"
#include "statemachine/types.h"

namespace amem::board {

struct LifeWords {  // in a shared page, zero at first
  pthread_mutex_t lock;
  std::atomic<std::uint32_t> holder;  // what the kernel's word in `lock` is while it is held: the holder's thread id
  std::atomic<std::uint32_t> closed;  // kClosed: let go of in order
  static constexpr std::uint32_t kClosed = 0xc105ed;
};

// Takes the lock for the calling thread, which must also release it. A session's service thread holds it.
class LifeHolder : NoCopies {
 public:
  static Result<LifeHolder> Hold(LifeWords& words);
  LifeHolder(LifeHolder&& other) noexcept : words_(other.words_) { other.words_ = nullptr; }
  LifeHolder& operator=(LifeHolder&&) = delete;
  ~LifeHolder();

 private:
  explicit LifeHolder(LifeWords* words) : words_(words) {}
  LifeWords* words_;
};

// Ended: also if it was let go of in order. Unknown: it was never held, or is damaged. `pidfd`, if there is one (-1: none),
// decides then, and where the lock is still held. Waits for nobody.
ProcessLife LifeIn(const LifeWords& words, int pidfd = -1);

}  // namespace amem::board
