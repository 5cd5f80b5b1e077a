// The command line of the tool: which command was chosen, and whether its options make sense.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "replay/tool/command.h"
#include "replay/tool/command_line/arguments.h"

namespace amem::tool {

// All of them with their options, in the order in which --help lists them (main.cpp).
std::span<const Command> AllCommands();

struct ParsedCommandLine {
  const Command* chosen = nullptr;  // null: nothing is to be run
  bool paged = true;
  std::string print;  // then this belongs on standard output (--help, --version) ...
  std::string wrong;  // ... and this is what is wrong, with what to do
};
ParsedCommandLine ParseCommandLine(int argc, const char* const* argv);

// Null: there is none.
const Command* FindCommand(std::string_view name);
const Argument* OptionNamed(const Command& command, std::string_view name);

// What `amem --help` and `amem help COMMAND` print.
std::string HelpOfTool(std::size_t width);
std::string HelpOf(const Command& command, std::size_t width);
std::string ManualPage();  // the same in roff, for man

// A script with which "bash", "zsh" or "fish" asks `amem --complete WORD...`, and the answer: what the last of the words can
// be, each on a line, with a tab and what it does. The answer is empty where the name of a file belongs.
std::string CompletionScript(const std::string& shell);
std::string Completions(std::span<const char* const> words);

}  // namespace amem::tool
