// The threads that call NCCL: which call each is in, as whoever closes the gate sees it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace amem::nccl::launches {

struct Place {
  std::atomic<const char*> inside{nullptr};
  std::atomic<std::uint64_t> on{0};  // the communicator that call was made with, by its id; for messages only
  std::atomic<pid_t> thread{0};
  std::atomic<bool> taken{true};
  Place* next = nullptr;
};

Place* FirstPlace() noexcept;
// A place that no living thread has; null: there is no memory for one.
Place* TakePlace() noexcept;

bool CanMakeThreadsSeen() noexcept;
// What other threads stored before this is seen from now on, and they see what was stored here.
void MakeThreadsSeen() noexcept;

}  // namespace amem::nccl::launches
