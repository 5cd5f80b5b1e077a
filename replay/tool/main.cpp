// amem-replay: reads journals, also of live processes and without a GPU.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <exception>

#include "replay/tool/command.h"

// The commands, in the order in which --help lists them.
#define AMEM_REPLAY_COMMANDS(COMMAND) \
  COMMAND(Why)                        \
  COMMAND(List)                       \
  COMMAND(Info)                       \
  COMMAND(Log)                        \
  COMMAND(State)                      \
  COMMAND(Verify)                     \
  COMMAND(Report)                     \
  COMMAND(Run)                        \
  COMMAND(Diff)                       \
  COMMAND(Refs)                       \
  COMMAND(Top)                        \
  COMMAND(Tail)                       \
  COMMAND(Watch)                      \
  COMMAND(Trace)                      \
  COMMAND(Pack)                       \
  COMMAND(Unpack)                     \
  COMMAND(Completion)

namespace amem::tool {

#define AMEM_DECLARE(name) Command name##Command();
AMEM_REPLAY_COMMANDS(AMEM_DECLARE)

namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 fine, 1 wrong usage, 2 something could not be read (what could be is printed), 3 a violation, failure or "
    "difference was found.";

int Run(int argc, char** argv, Output& out) {
  CLI::App app{"Reads the journals of AMem: what happened to NCCL's GPU memory, and why a pause or resume failed."};
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("amem-replay " AMEM_VERSION));
  app.footer(std::string("DIR is the directory of a session, or one that holds several.\n") + kExitCodes +
             "\n`amem-replay COMMAND --help` has the options and examples of a command.");
  std::function<int(Output&)> run;
#define AMEM_MAKE(name) name##Command(),
  for (const Command& command : {AMEM_REPLAY_COMMANDS(AMEM_MAKE)}) {
    CLI::App* parser = app.add_subcommand(command.name, command.does);
    parser->footer(std::string("Examples:\n") + command.examples + kExitCodes);
    parser->callback([&run, chosen = command.set_up(*parser)] { run = chosen; });
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kFine : kUsage;
  }
  return run(out);
}

int Main(int argc, char** argv) {
  // A reader that went away (head) then shows as EPIPE, which Output takes for a quiet end.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of file sizes (ulimit -f) fails a write then
  Output out(STDOUT_FILENO);
  const int code = Run(argc, argv, out);
  if (const Status written = out.Finish(); !written) return Complain(written.message());
  return code;
}

}  // namespace
}  // namespace amem::tool

int main(int argc, char** argv) {
  try {
    return amem::tool::Main(argc, argv);
  } catch (const std::exception& e) {  // out of memory, or a path that cannot be looked at
    amem::tool::Complain(e.what());
    return amem::tool::kCannotRead;
  }
}
