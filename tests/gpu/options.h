// The options that the GPU programs have in common.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tests/gpu/workload.h"

namespace CLI {
class App;
}

namespace amem::gpu {

struct CommonOptions {
  std::string nccl, json, log;
  int gpus = 0;
  bool verbose = false;
  std::vector<std::size_t> elements = kReferenceSizes;
  std::string collectives;  // ParseOps takes it
};

// `options` has the defaults, and must outlive the parsing.
void AddCommonOptions(CLI::App& app, CommonOptions& options);

// True: the program goes on. False: it ends with `code`, because --help was answered or because the command line is wrong, and
// the reason was printed. `check` looks at what was parsed, and throws CLI::ParseError.
bool ParseCommandLine(CLI::App& app, int argc, char** argv, const std::function<void()>& check, int& code);

}  // namespace amem::gpu
