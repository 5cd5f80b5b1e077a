// Tells a forked child from the process that made the guard, without a system call: a page that the kernel wipes in children.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "journal/base/no_copies.h"

namespace amem {

class ForkGuard : NoCopies {
 public:
  ForkGuard() {
    void* page = mmap(nullptr, PageBytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    if (madvise(page, PageBytes(), MADV_WIPEONFORK) != 0) {
      munmap(page, PageBytes());
      return;
    }
    page_ = static_cast<volatile std::uint64_t*>(page);
    *page_ = 1;
  }
  ~ForkGuard() {
    if (page_ != nullptr) munmap(const_cast<std::uint64_t*>(page_), PageBytes());
  }
  [[nodiscard]] bool InChild() const { return page_ != nullptr ? *page_ == 0 : getpid() != process_; }

 private:
  static std::size_t PageBytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }
  volatile std::uint64_t* page_ = nullptr;  // null where the kernel cannot do it (before 4.14); then process ids are compared
  const pid_t process_ = getpid();
};

// Holds what belongs to threads of the process that made it: the threads, or a condition in which they wait. A forked child
// never destroys it, since to destroy a condition is to wait until nobody is in it any more, and a thread has to be joined.
template <class Held>
class ForgottenInChild : NoCopies {
 public:
  template <class... Arguments>
  explicit ForgottenInChild(const ForkGuard& fork, Arguments&&... arguments)  // the guard must outlive it
      : fork_(fork), held_(std::make_unique<Held>(std::forward<Arguments>(arguments)...)) {}
  ~ForgottenInChild() {
    if (fork_.InChild()) static_cast<void>(held_.release());
  }
  Held* operator->() const { return held_.get(); }
  Held& operator*() const { return *held_; }

 private:
  const ForkGuard& fork_;
  std::unique_ptr<Held> held_;
};

}  // namespace amem
