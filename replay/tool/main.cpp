// amem-replay, which is also `amem` but for the commands of the Python package: reads journals, also of live processes and
// without a GPU, and asks living jobs to pause.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <filesystem>
#include <optional>

#include "replay/tool/command.h"
#include "replay/tool/command_line/command_line.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {

Command WhyCommand(), ListCommand(), LogCommand(), ReportCommand(), WatchCommand(), PauseCommand(), ResumeCommand(),
    ParkCommand();
Command FreezeCommand(), ThawCommand(), TopCommand(), StateCommand(), ReplayCommand(), VerifyCommand(), PackCommand();

namespace {

TerminalOptions terminal;

int Run(int argc, char** argv, Output& out) {
  const ParsedCommandLine parsed = ParseCommandLine(argc, argv);
  out << parsed.print;
  int code = parsed.wrong.empty() ? kFine : Complain(parsed.wrong, kUsage);
  std::optional<Pager> pager;
  if (parsed.chosen != nullptr) {
    running_command = parsed.chosen->name;
    pager.emplace(terminal, parsed.paged, out);
    code = parsed.chosen->run(out);
    Progress::End();
  }
  // A program that asked for JSON finds some on standard output whatever happened.
  const bool json = std::any_of(argv, argv + argc, [](std::string_view word) { return word == "--json"; });
  if (json && code != kFine && !out.AnythingPrinted()) PrintErrors(out, argc > 1 ? argv[1] : "", code);
  return code;
}

// What the caller has closed (>&-) would be the number of the next file that is opened, a journal's, and get what is printed.
// Using it fails as using a closed one does.
void TakeClosedDescriptors() {
  for (const int number : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(number, F_GETFD) < 0) static_cast<void>(::open("/dev/null", number == STDIN_FILENO ? O_WRONLY : O_RDONLY));
}

int Main(int argc, char** argv) {
  TakeClosedDescriptors();
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
  static const std::vector<Command> all = [] {
    std::vector<Command> commands;
    // In the order in which --help lists them, each group together.
    for (Command (*make)() :
         {WhyCommand, ListCommand, LogCommand, ReportCommand, WatchCommand, PauseCommand, ResumeCommand, ParkCommand,
          FreezeCommand, ThawCommand, TopCommand, StateCommand, ReplayCommand, VerifyCommand, PackCommand}) {
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
    return amem::tool::Complain(e.what());
  }
}
