// Plays a scenario and leaves its journals:  replay_make_scenario NAME DIRECTORY
#include <cstdio>

#include "tests/replay/tool/scenario.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s NAME DIRECTORY\nscenarios:", argv[0]);
    for (const auto& name : amem::test::kScenarios) std::fprintf(stderr, " %s", name.c_str());
    std::fprintf(stderr, "\n");
    return 1;
  }
  const amem::Status played = amem::test::PlayScenario(argv[1], argv[2]);
  if (!played) std::fprintf(stderr, "%s\n", played.message().c_str());
  return played.ok() ? 0 : 1;
}
