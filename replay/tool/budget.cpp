#include "replay/tool/budget.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "replay/job/pack.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

constexpr Bytes kMemory = Bytes{256} << 20;
constexpr auto kTime = std::chrono::seconds(10);
constexpr auto kLook = std::chrono::milliseconds(10);
#ifdef AMEM_SANITIZED
constexpr Bytes kMore = 8;  // what a sanitizer takes besides
#else
constexpr Bytes kMore = 1;
#endif

Bytes MemoryNow() {
  Bytes total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<Bytes>(::getpagesize());
}

}  // namespace

void KeepWithinBudget(std::span<const std::filesystem::path> places, ScratchDirectory& scratch) {
  Bytes packs = 0;
  for (const auto& place : places) {
    std::error_code failed;
    if (IsPack(place)) packs += std::filesystem::file_size(place, failed);
  }
  if (packs == 0) return;
  const Bytes times = kMore * (1 + packs / 1'000'000);
  const Result<std::filesystem::path> unpacked = scratch.Get();
  // A quarter is left for what is allocated between two looks.
  std::thread([memory = times * kMemory / 4 * 3, time = static_cast<std::int64_t>(times) * kTime,
               directory = unpacked ? *unpacked : std::filesystem::path()] {
    const auto end = std::chrono::steady_clock::now() + time;
    for (;; std::this_thread::sleep_for(kLook)) {
      const bool too_long = std::chrono::steady_clock::now() >= end;
      if (!too_long && MemoryNow() <= memory) continue;
      Complain(too_long
                   ? fmt::format("given up after {} s, which is more than a pack of this size should take; use --force if you "
                                 "trust who made it",
                                 std::chrono::duration_cast<std::chrono::seconds>(time).count())
                   : fmt::format("given up with {} of memory taken, which is more than a pack of this size should need; use "
                                 "--force if you trust who made it",
                                 FormatBytes(MemoryNow())));
      ScratchDirectory::Remove(directory);
      ::_exit(kCannotRead);
    }
  }).detach();
}

}  // namespace amem::tool
