// amem-world: worlds by seed, one after the other, until the time is over or one of them finds something.
#include <getopt.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

#include "tests/world/findings.h"
#include "tests/world/world.h"

namespace {

// By getopt: CLI11 would be half of what this program takes to compile, in each stage of `./run test`.
constexpr char kHelp[] =
    "Random worlds on the simulator. A finding prints the seed of its world; --seed SEED --worlds 1 --times 20 repeats it.\n"
    "  --seed N       of the first world; the next has the next\n"
    "  --seconds S    no world begins after these (default: 10)\n"
    "  --worlds N     at most\n"
    "  --times N      each world, because threads do not meet in the same way twice\n"
    "  --with X,..    what each world has: faults, absences, stops\n"
    "  --without X,.. shortages or starves: no world has that; names of actions that nobody takes; pinned: whose host memory "
    "nobody counts\n"
    "  --lose WHAT    byte, range, thread, gate or tool: is lost on purpose, and must be found\n"
    "  --late MS      that the machine may take besides a deadline; more where others work on it\n"
    "  --processes    ranks are processes, and some are killed\n"
    "  --between-launches  all are jobs that are stopped between launches, and not one in five\n"
    "  --keep         the journals of processes, if something is found, and says where\n"
    "  --verbose      one line a world\n";
constexpr option With(const char* name) { return {name, required_argument, nullptr, 0}; }
constexpr option Flag(const char* name) { return {name, no_argument, nullptr, 0}; }
constexpr option kOptions[] = {With("seed"),
                               With("seconds"),
                               With("worlds"),
                               With("times"),
                               With("with"),
                               With("without"),
                               With("lose"),
                               With("late"),
                               Flag("processes"),
                               Flag("verbose"),
                               Flag("keep"),
                               Flag("help"),
                               Flag("between-launches"),
                               With("directory"),  // for itself
                               With("rank"),
                               {}};

}  // namespace

int main(int argc, char** argv) {
  using namespace amem::world;
  std::map<std::string, std::string> given;
  int found = 0, index = 0;
  while ((found = getopt_long(argc, argv, "", kOptions, &index)) == 0)
    given[kOptions[index].name] = optarg == nullptr ? "" : optarg;
  const auto number = [&](const char* name, std::uint64_t unset) {
    return given.contains(name) ? std::stoull(given[name]) : unset;
  };
  const std::uint64_t seed = number("seed", 1), worlds = number("worlds", ~0ULL), times = number("times", 1),
                      late_ms = number("late", 0);
  const double seconds = given.contains("seconds") ? std::stod(given["seconds"]) : 10;
  const bool processes = given.contains("processes"), verbose = given.contains("verbose"),
             between = given.contains("between-launches"), help = given.contains("help");
  const std::string with = given["with"], without = given["without"], lose = given["lose"], directory = given["directory"];
  const int rank = given.contains("rank") ? std::stoi(given["rank"]) : -1;
  if (help || found != -1 || optind != argc ||
      !(lose.empty() || lose == "byte" || lose == "range" || lose == "thread" || lose == "gate" || lose == "tool")) {
    std::fputs(kHelp, help ? stdout : stderr);
    return help ? 0 : 1;
  }
  if (rank >= 0) {
    Settings settings = SettingsOf(seed, true, between);
    settings.directory = directory;
    Choose(settings, with, without);
    settings.lose = lose;
    if (late_ms != 0) settings.late = std::chrono::milliseconds(late_ms);
    RunAsProcess(settings, rank);
    return 0;
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::uint64_t run = 0;
  for (; run < worlds && (worlds != ~0ULL || std::chrono::steady_clock::now() < until); ++run) {
    Settings settings = SettingsOf(seed + run, processes, between);
    Choose(settings, with, without);
    if (late_ms != 0) settings.late = std::chrono::milliseconds(late_ms);
    settings.lose = lose;
    settings.keep = given.contains("keep");
    if (verbose) std::fprintf(stderr, "seed %lu: %s\n", settings.seed, Describe(settings).c_str());
    for (std::uint64_t i = 0; i < times; ++i) {
      if (!processes) RunThreads(settings);
      if (processes && !RunProcesses(settings, argv[0])) return kFoundExit;
    }
  }
  std::printf("%lu worlds from seed %lu on, nothing found\n", run, seed);
  return run > 0 ? 0 : 1;
}
