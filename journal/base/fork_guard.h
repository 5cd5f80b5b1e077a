// Tells a forked child from the process that made the guard, without a system call: a page that the kernel wipes in children.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

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

}  // namespace amem
