// What is said when the world finds something: the finding, the seed, and what all threads did last.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "statemachine/types.h"
#include "tests/world/settings.h"

namespace amem::world {

// Says it on standard error and ends the process with kFoundExit, at once: what is broken cannot be taken apart in order.
inline constexpr int kFoundExit = 3;
[[noreturn]] void Found(const std::string& what);
// Of all worlds of this process from now on: what a finding says of them.
void SetWorld(const Settings& settings, int rank);

// Whether a call failed because its process, or one that it asked, had no descriptor.
bool WantsDescriptors(const Status& status);

// One line of the trace that a finding ends with, of the calling thread.
void Trace(const std::string& what);
void NameThread(const std::string& name);

// The calling thread is in a call that may take so long; if it takes longer, the watchdog finds it, with the stacks of all
// threads.
class Within {
 public:
  Within(const char* what, std::chrono::milliseconds limit, bool strict = false);  // strict: also while the driver hangs
  ~Within();
  // Others that are stopped do not prolong it.
  void EndsWithoutOthers();
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

 private:
  const char* const before_;
  const std::int64_t before_until_;
  const bool before_strict_;
  const std::int64_t before_stops_;
};

// The driver hangs for so long: whoever is in a call now, and is not in a pause or resume, may take so much longer.
void AllowFor(std::chrono::milliseconds hang);

void StartWatchdog();  // once a process
// For how long each rank's process has been stopped, shared with other processes. Calls may take so much longer.
void ShareStops(std::span<std::atomic<std::uint64_t>> stopped_us, int rank);
// Shared with other processes: true once one of them has found something. Then this one says what its threads did, and ends.
void Share(std::atomic<bool>& found);

}  // namespace amem::world
