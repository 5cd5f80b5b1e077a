// A futex on which one thread waits until another rings. Take a ticket, look at the condition, and wait with the ticket: a ring
// after the look is not missed. Ringing costs a system call, so ring only when a thread may be waiting.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>
#include <optional>

namespace amem {

class Doorbell {
 public:
  [[nodiscard]] std::uint32_t Ticket() const { return word_.load(std::memory_order_acquire); }
  void Ring() {
    word_.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  // Returns when the bell rang after the ticket was taken, after `timeout_ms`, when a signal handler ran, or spuriously. False:
  // it has timed out.
  bool Wait(std::uint32_t ticket, std::optional<std::uint32_t> timeout_ms = std::nullopt) const {
    const std::uint32_t ms = timeout_ms.value_or(0);
    const timespec timeout{static_cast<time_t>(ms / 1000), static_cast<long>(ms % 1000) * 1'000'000};
    const long rc = syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, ticket, timeout_ms ? &timeout : nullptr, nullptr, 0);
    return rc == 0 || errno != ETIMEDOUT;
  }

 private:
  std::atomic<std::uint32_t> word_{0};
};

}  // namespace amem
