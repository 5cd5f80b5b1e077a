#include "tests/gpu/options.h"

#include <CLI/CLI.hpp>

namespace amem::gpu {

void AddCommonOptions(CLI::App& app, CommonOptions& options) {
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--nccl", options.nccl, "The libnccl to drive")->type_name("PATH");
  app.add_option("--gpus", options.gpus, "Default: all")->check(CLI::Range(0, kMaxProcesses))->type_name("N");
  app.add_option("--json", options.json, "Write the results there, for programs")->type_name("FILE");
  app.add_option("--log", options.log, "Append the output of the ranks there")->type_name("FILE");
  app.add_option("--elements", options.elements, "Message sizes in floats; default 256,65536,1048576,33554432")
      ->delimiter(',')
      ->check(CLI::Range(std::size_t{kMaxProcesses}, std::size_t{1} << 40))  // fewer cannot be divided among the ranks
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("A,B,...");
  app.add_option("--ops", options.collectives,
                 "all, reference, or of all-reduce,all-gather,reduce-scatter,all-to-all,broadcast,ring")
      ->check([](const std::string& list) { return ParseOps(list) ? "" : list + " is unknown"; })
      ->type_name("LIST")
      ->capture_default_str();
  app.add_flag("--verbose", options.verbose, "Show the output of the ranks");
}

bool ParseCommandLine(CLI::App& app, int argc, char** argv, const std::function<void()>& check, int& code) {
  try {
    app.parse(argc, argv);
    check();
    return true;
  } catch (const CLI::ParseError& why) {
    code = app.exit(why) == 0 ? kExitPass : kExitUsage;
    return false;
  }
}

}  // namespace amem::gpu
