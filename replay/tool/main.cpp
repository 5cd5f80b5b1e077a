// amem-replay, which is also `amem` but for the commands of the Python package: reads journals, also of live processes and
// without a GPU, and asks living jobs to pause.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <filesystem>

#include "replay/tool/command.h"
#include "replay/tool/command_line/command_line.h"
#include "replay/tool/terminal/terminal.h"

// The commands, in the order in which --help lists them, each group together.
// clang-format off
#define AMEM_REPLAY_COMMANDS(COMMAND)                                                \
  COMMAND(Why) COMMAND(List) COMMAND(Log) COMMAND(Report)                            \
  COMMAND(Watch) COMMAND(Pause) COMMAND(Resume) COMMAND(Freeze) COMMAND(Thaw)        \
  COMMAND(Top) COMMAND(State)                                                        \
  COMMAND(Replay) COMMAND(Verify)                                                    \
  COMMAND(Pack)
// clang-format on

namespace amem::tool {

#define AMEM_DECLARE(name) Command name##Command();
AMEM_REPLAY_COMMANDS(AMEM_DECLARE)

namespace {

TerminalOptions terminal;

// A program that asked for JSON finds some on standard output whatever happened.
int WithErrors(int argc, char** argv, Output& out, int code) {
  const bool json = std::any_of(argv, argv + argc, [](std::string_view word) { return word == "--json"; });
  if (json && code != kFine && !out.AnythingPrinted()) PrintErrors(out, argc > 1 ? argv[1] : "", code);
  return code;
}

int Run(int argc, char** argv, Output& out) {
  const ParsedCommandLine parsed = ParseCommandLine(argc, argv);
  out << parsed.print;
  if (!parsed.wrong.empty()) return WithErrors(argc, argv, out, Complain(parsed.wrong, kUsage));
  if (parsed.chosen == nullptr) return kFine;
  running_command = parsed.chosen->name;
  const Pager pager(terminal, parsed.paged, out);
  const int code = parsed.chosen->run(out);
  Progress::End();
  return WithErrors(argc, argv, out, code);
}

int Main(int argc, char** argv) {
  // A reader that went away (head) then shows as EPIPE, which Output takes for a quiet end.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of file sizes (ulimit -f) fails a write then
  program_name = argc > 0 && std::filesystem::path(argv[0]).filename() == "amem" ? "amem" : "amem-replay";
  Output out(STDOUT_FILENO);
  const int code = Run(argc, argv, out);
  if (const Status written = out.Finish(); !written) return Complain(written.message());
  return code;
}

}  // namespace

std::span<const Command> AllCommands() {
#define AMEM_MAKE(name) name##Command,
  static const std::vector<Command> all = [] {
    std::vector<Command> commands;
    for (Command (*make)() : {AMEM_REPLAY_COMMANDS(AMEM_MAKE)}) {
      commands.push_back(make());
      AddTerminalOptions(commands.back().arguments, terminal);
    }
    return commands;
  }();
  return all;
}

}  // namespace amem::tool

int main(int argc, char** argv) {
  try {
    return amem::tool::Main(argc, argv);
  } catch (const std::exception& e) {  // out of memory, or a path that cannot be looked at
    amem::tool::Complain(e.what());
    return amem::tool::kCannotRead;
  }
}
