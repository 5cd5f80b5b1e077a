// Ranks' processes that are stopped (SIGSTOP) for a while, shorter or longer than a pause waits, and go on.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <random>
#include <vector>

#include "replay/driver/simulator/world.h"
#include "tests/world/page.h"
#include "tests/world/settings.h"

namespace amem::world {

// One at a time, at random moments. Owned by whoever started them; one thread.
class Stops {
 public:
  // `memory` is the driver of all, whose lock a stopped process must not hold. Without settings.stops nothing happens.
  Stops(const Settings& settings, std::shared_ptr<Page> page, std::shared_ptr<SimulatorWorld> memory);
  // Begins or ends one when it is time. `ranks`: their processes, 0 for those that have ended.
  void Advance(const std::vector<pid_t>& ranks);

 private:
  void Begin(const std::vector<pid_t>& ranks);
  void End();
  [[nodiscard]] bool HoldsNothing() const;

  const Settings settings_;
  const std::shared_ptr<Page> page_;
  const std::shared_ptr<SimulatorWorld> memory_;
  std::mt19937_64 random_;
  pid_t stopped_ = 0;
  std::size_t rank_ = 0;
  std::chrono::steady_clock::time_point next_, counted_;
};

}  // namespace amem::world
