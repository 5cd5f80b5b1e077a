#include "ncclpatch/nccl/places.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

namespace amem::nccl::launches {

static constinit std::atomic<Place*> g_places{nullptr};

Place* FirstPlace() noexcept { return g_places.load(std::memory_order_acquire); }

static Place* Own(Place* place) noexcept {
  if (place != nullptr) place->thread.store(static_cast<pid_t>(::syscall(SYS_gettid)), std::memory_order_relaxed);
  return place;
}

Place* TakePlace() noexcept {
  for (Place* place = FirstPlace(); place != nullptr; place = place->next) {
    bool taken = false;
    if (place->taken.compare_exchange_strong(taken, true, std::memory_order_acq_rel)) return Own(place);
  }
  auto* const made = new (std::nothrow) Place;
  if (made == nullptr) return nullptr;
  made->next = g_places.load(std::memory_order_relaxed);
  while (!g_places.compare_exchange_weak(made->next, made, std::memory_order_acq_rel)) {
  }
  return Own(made);
}

bool CanMakeThreadsSeen() noexcept {
  static const bool can = ::syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  return can;
}

void MakeThreadsSeen() noexcept {
  if (CanMakeThreadsSeen()) static_cast<void>(::syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0));
}

}  // namespace amem::nccl::launches
