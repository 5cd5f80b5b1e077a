#include "journal/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace amem {

template <bool kBetweenProcesses>
void BasicDoorbell<kBetweenProcesses>::Ring() {
  word_.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &word_, kBetweenProcesses ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

template <bool kBetweenProcesses>
bool BasicDoorbell<kBetweenProcesses>::Wait(std::uint32_t ticket, std::optional<std::uint32_t> timeout_ms) const {
  const std::uint32_t ms = timeout_ms.value_or(0);
  const timespec timeout{static_cast<time_t>(ms / 1000), static_cast<long>(ms % 1000) * 1'000'000};
  const long rc = syscall(SYS_futex, &word_, kBetweenProcesses ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, ticket,
                          timeout_ms ? &timeout : nullptr, nullptr, 0);
  return rc == 0 || errno != ETIMEDOUT;
}

template class BasicDoorbell<false>;
template class BasicDoorbell<true>;

}  // namespace amem
