// A futex on which one thread waits until another rings. Take a ticket, look at the condition, and wait with the ticket: a ring
// after the look is not missed. Ringing costs a system call, so ring only when a thread may be waiting.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace amem {

// kBetweenProcesses: it lies in memory that processes share. Four bytes, and zero is a fresh one.
template <bool kBetweenProcesses>
class BasicDoorbell {
 public:
  [[nodiscard]] std::uint32_t Ticket() const { return word_.load(std::memory_order_acquire); }
  void Ring();
  // Returns when the bell rang after the ticket was taken, after `timeout_ms`, when a signal handler ran, or spuriously. False:
  // it has timed out.
  bool Wait(std::uint32_t ticket, std::optional<std::uint32_t> timeout_ms = std::nullopt) const;

 private:
  std::atomic<std::uint32_t> word_{0};
};

using Doorbell = BasicDoorbell<false>;
using SharedDoorbell = BasicDoorbell<true>;

}  // namespace amem
