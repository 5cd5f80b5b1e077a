// What a seed makes of a world.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <string_view>

#include "replay/session/session_options.h"
#include "statemachine/types.h"

namespace amem::world {

inline constexpr int kMostRanks = 4, kMostThreads = 3, kCommunicators = 3;
inline constexpr Bytes kPage = 4096, kCapacity = Bytes{4} << 30;  // of each device
#if defined(AMEM_THREAD_SANITIZED)
inline constexpr std::uint32_t kSlower = 6;
#elif defined(AMEM_SANITIZED)
inline constexpr std::uint32_t kSlower = 3;
#else
inline constexpr std::uint32_t kSlower = 1;
#endif

struct Settings {
  std::uint64_t seed = 0;
  int ranks = 1, threads = 1;
  bool faults = false;                // driver calls fail
  bool absences = false;              // ranks do not come to a pause, or the driver hangs
  bool shortages = false;             // the system denies a process address space, threads, or room on the disk of its journal
  bool starves = false;               // the program of a rank takes all descriptors now and then, and gives them back
  bool stops = false;                 // a rank's process is stopped for a while
  bool between_launches = false;      // ranks launch collectives, and are stopped between them by who asks from outside
  bool all_between_launches = false;  // so are all worlds of this run
  bool pins_ahead = true;             // of what is needed; otherwise a failed pause must leave nothing pinned
  std::chrono::milliseconds life{0};  // of this world
  SessionOptions session;
  std::filesystem::path directory;  // of the sockets, the journals and the world's memory; empty: the ranks are threads
  std::string with, without;        // Choose; and names of actions that nobody takes; "pinned": whose host memory nobody counts
  bool keep = false;                // the journals, if something is found
  std::string lose;                 // "byte", "range", "thread", "gate" or "tool" is lost on purpose, which must be found
  static constexpr std::chrono::milliseconds kLate{3000 * kSlower};
  std::chrono::milliseconds late = kLate;  // what a machine may take besides a deadline; a hang lasts longer on any

  // The most that a pause or resume may take with its undo (Deadlines).
  [[nodiscard]] std::chrono::milliseconds CycleLimit() const { return session.deadlines.call() * 17 / 8 + late; }
  [[nodiscard]] std::uint32_t timeout_ms() const { return static_cast<std::uint32_t>(session.deadlines.call().count()); }
  // Where others use the machine the program's own kernels may outlast the deadline of a world whose ranks stay away.
  [[nodiscard]] bool DeadlineMayBeTooShort() const { return absences && late > kLate; }
  [[nodiscard]] bool Without(std::string_view what) const { return without.find(what) != std::string::npos; }
  [[nodiscard]] bool CountsPinned() const { return !pins_ahead && !Without("pinned"); }
  // Any other call may wait for a pause and for a resume.
  [[nodiscard]] std::chrono::milliseconds CallLimit() const { return 2 * CycleLimit(); }
};

// `between_launches`: all worlds of processes are such, and not one in five.
Settings SettingsOf(std::uint64_t seed, bool processes, bool between_launches = false);
// Has it what those names say ("faults", "absences", "stops"), and has it not what these say ("shortages", "starves").
void Choose(Settings& settings, const std::string& with, const std::string& without);
inline SessionId SessionOf(int rank) { return SessionId{static_cast<std::uint64_t>(rank) + 0x100}; }
std::string Describe(const Settings& settings);

}  // namespace amem::world
