// A futex one thread waits at and others ring. Take a ticket, look at the condition, wait with the ticket: a ring between the
// look and the wait is not missed. Ringing costs a system call, so ring only when somebody may be waiting.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace amem {

class Doorbell {
 public:
  [[nodiscard]] std::uint32_t Ticket() const { return word_.load(std::memory_order_acquire); }
  void Ring();
  // Returns once it rang after the ticket was taken, after `timeout_ms`, or for no reason at all. False: certainly timed out.
  bool Wait(std::uint32_t ticket, std::optional<std::uint32_t> timeout_ms = std::nullopt) const;

 private:
  std::atomic<std::uint32_t> word_{0};
};

}  // namespace amem
