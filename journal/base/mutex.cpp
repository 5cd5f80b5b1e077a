#include "journal/base/mutex.h"

#include <array>
#include <cstddef>
#include <cstdio>
#include <span>
#include <string>

#include "journal/base/lock_order.h"

namespace amem::lock_order {
namespace {

constexpr std::array<const char*, static_cast<std::size_t>(LockRank::kLast) + 1> kNames = {
    "none",        "cycle",         "pools",        "slabs",       "export",         "ledger",        "driver lanes",
    "driver lane", "driver copies", "driver state", "host claims", "journal append", "journal store", "last",
};

// Without a destructor, because threads take locks until their very end. More locks than these are not looked at.
struct HeldLock {
  const void* mutex;
  LockRank rank;
};
constexpr std::size_t kMost = 32;
thread_local std::array<HeldLock, kMost> held;
thread_local std::size_t held_count = 0;

std::span<HeldLock> HeldNow() { return std::span(held).first(held_count); }

const char* NameOf(LockRank rank) { return kNames[static_cast<std::size_t>(rank)]; }

}  // namespace

void Taking(LockRank rank) {
  if (rank == LockRank::kNone) return;
  for (const HeldLock& one : HeldNow()) {
    if (one.rank < rank) continue;
    std::fprintf(stderr, "locks out of order: a thread that holds '%s' takes '%s' (journal/base/mutex.h)\n", NameOf(one.rank),
                 NameOf(rank));
    __builtin_trap();
  }
}

void Taken(const void* mutex, LockRank rank) {
  if (held_count < kMost) held[held_count++] = {mutex, rank};
}

void Released(const void* mutex) {
  const auto now = HeldNow();
  const auto at = std::find_if(now.rbegin(), now.rend(), [&](const HeldLock& one) { return one.mutex == mutex; });
  if (at == now.rend()) return;
  std::move(at.base(), now.end(), at.base() - 1);
  --held_count;
}

void AssertHeld(const void* mutex) {
  const auto now = HeldNow();
  if (held_count == kMost || std::any_of(now.begin(), now.end(), [&](const HeldLock& one) { return one.mutex == mutex; }))
    return;
  std::fputs("a lock that should be held is not\n", stderr);
  __builtin_trap();
}

std::string Held() {
  std::string names;
  for (const HeldLock& one : HeldNow()) names += (names.empty() ? "" : ", ") + std::string(NameOf(one.rank));
  return names;
}

}  // namespace amem::lock_order
