// amem-world: worlds by seed, one after the other, until the time is over or one of them finds something.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>

#include "tests/world/findings.h"
#include "tests/world/world.h"

int main(int argc, char** argv) {
  using namespace amem::world;
  CLI::App app(
      "Random worlds on the simulator. A finding prints the seed of its world; --seed SEED --worlds 1 --times 20 repeats it.");
  std::uint64_t seed = 1, worlds = ~0ULL, times = 1;
  double seconds = 10;
  std::uint64_t late_ms = 0;
  bool processes = false, verbose = false;
  std::string without, lose;
  app.add_option("--seed", seed, "of the first world; the next has the next");
  app.add_option("--seconds", seconds, "no world begins after these");
  app.add_option("--worlds", worlds, "at most");
  app.add_option("--times", times, "each world, because threads do not meet in the same way twice");
  app.add_option("--without", without, "names of actions that nobody takes; pinned: whose host memory nobody counts");
  app.add_option("--lose", lose, "byte, range or thread: is lost on purpose, and must be found")
      ->check(CLI::IsMember({"byte", "range", "thread"}));
  app.add_option("--late", late_ms, "milliseconds that the machine may take besides a deadline; more where others work on it");
  app.add_flag("--processes", processes, "ranks are processes, and some are killed");
  app.add_flag("--verbose", verbose, "one line a world");
  int rank = -1;
  std::string directory;
  app.add_option("--rank", rank, "for itself")->group("");
  app.add_option("--directory", directory, "for itself")->group("");
  CLI11_PARSE(app, argc, argv);
  if (rank >= 0) {
    Settings settings = SettingsOf(seed, true);
    settings.directory = directory;
    settings.without = without;
    if (late_ms != 0) settings.late = std::chrono::milliseconds(late_ms);
    RunAsProcess(settings, rank);
    return 0;
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::uint64_t run = 0;
  for (; run < worlds && (worlds != ~0ULL || std::chrono::steady_clock::now() < until); ++run) {
    Settings settings = SettingsOf(seed + run, processes);
    settings.without = without;
    if (late_ms != 0) settings.late = std::chrono::milliseconds(late_ms);
    settings.lose = lose;
    if (verbose) std::fprintf(stderr, "seed %lu: %s\n", settings.seed, Describe(settings).c_str());
    for (std::uint64_t i = 0; i < times; ++i) {
      if (!processes) RunThreads(settings);
      if (processes && !RunProcesses(settings, argv[0])) return kFoundExit;
    }
  }
  std::printf("%lu worlds from seed %lu on, nothing found\n", run, seed);
  return run > 0 ? 0 : 1;
}
