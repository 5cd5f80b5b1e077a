// Tells a forked child from the process that made the guard, without a system call: a page that the kernel wipes in children.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace amem {

class ForkGuard {
 public:
  ForkGuard();
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;
  [[nodiscard]] bool InChild() const { return page_ != nullptr ? *page_ == 0 : IsOtherProcess(); }

 private:
  [[nodiscard]] bool IsOtherProcess() const;
  volatile std::uint64_t* page_ = nullptr;  // null where the kernel cannot do it (before 4.14); then process ids are compared
  pid_t process_;
};

}  // namespace amem
