// The command line of the tool: which command was chosen, and whether its options make sense.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "replay/tool/command.h"
#include "replay/tool/command_line/arguments.h"

namespace amem::tool {

// A command with its options, ready to run.
struct PreparedCommand {
  const Command* command = nullptr;
  Arguments arguments;
  std::function<int(Output&)> run;
};

// All of them, in the order in which --help lists them (main.cpp).
std::span<const PreparedCommand> AllCommands();

struct ParsedCommandLine {
  const PreparedCommand* chosen = nullptr;  // null: nothing is to be run
  std::string print;                        // then this belongs on standard output (--help, --version) ...
  std::string wrong;                        // ... or this is what is wrong, with what to do
};
ParsedCommandLine ParseCommandLine(int argc, const char* const* argv, std::span<const PreparedCommand> commands);

// The known word that `word` was probably meant to be, at most two or, of long words, three letters away; empty: none.
std::string DidYouMean(const std::string& word, const std::vector<std::string>& known);

// What `amem-replay --help` and `amem-replay COMMAND --help` print, in a terminal's width.
std::string HelpOfTool(std::span<const PreparedCommand> commands);
std::string HelpOf(const PreparedCommand& command);

// The manual page, in roff; and a script for "bash", "zsh" or "fish" that makes it complete commands, options and values.
std::string ManualPage(std::span<const PreparedCommand> commands);
std::string CompletionScript(const std::string& shell, std::span<const PreparedCommand> commands);

inline constexpr const char* kExitCodes =
    "Exit codes: 0 fine, 1 wrong usage, 2 something could not be read (what could be is printed), 3 a violation, failure or "
    "difference was found.";
inline constexpr const char* kToolDoes =
    "Reads the journals of AMem: what happened to NCCL's GPU memory, and why a pause or resume failed.";

}  // namespace amem::tool
