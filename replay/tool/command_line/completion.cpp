// --complete: what the last word of a command line can be, for shells. The program itself knows its commands and options, so
// the scripts only ask it.
#include <fmt/format.h>

#include "replay/tool/command_line/command_line.h"

namespace amem::tool {
namespace {

// %s is the program. Where it has no answer, the shell completes the names of files.
constexpr const char* kBash =
    "_%s() {\n"
    "  local IFS=$'\\n'\n"
    "  COMPREPLY=($(compgen -W \"$(%s --complete \"${COMP_WORDS[@]:1:COMP_CWORD}\" 2>/dev/null | cut -f1)\" -- "
    "\"${COMP_WORDS[COMP_CWORD]}\"))\n"
    "}\n"
    "complete -o default -F _%s %s\n";
constexpr const char* kZsh =
    "#compdef %s\n"
    "_%s() {\n"
    "  local -a found\n"
    "  found=(${(f)\"$(%s --complete \"${(@)words[2,CURRENT]}\" 2>/dev/null)\"})\n"
    "  (( $#found )) && compadd -l -d found -- ${found%%$'\\t'*} || _files\n"
    "}\n"
    "if [ \"$funcstack[1]\" = _%s ]; then _%s \"$@\"; else compdef _%s %s; fi\n";
constexpr const char* kFish = "complete -c %s -a '(%s --complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'\n";

std::string CompleteOptions(const Command& command) {
  std::string lines = "--help\tThis command's options and examples\n";
  for (const Argument& a : command.arguments.all()) {
    if (a.positional()) continue;
    for (const std::string& name : a.Names()) lines += fmt::format("{}\t{}\n", name, a.help);
  }
  return lines;
}

}  // namespace

std::string CompletionScript(const std::string& shell) {
  std::string script = shell == "zsh" ? kZsh : shell == "fish" ? kFish : kBash;
  for (std::size_t at = 0; (at = script.find("%s", at)) != std::string::npos;) script.replace(at, 2, program_name);
  return script;
}

std::string Completions(std::span<const char* const> words) {
  const std::string_view last = words.empty() ? "" : words.back();
  if (words.size() < 2 || std::string_view(words[0]) == "help") {
    std::string lines = "help\tThe commands, or one of them\n";
    for (const auto& [name, does] : PackageCommands()) lines += fmt::format("{}\t{}\n", name, does);
    for (const Command& c : AllCommands()) lines += fmt::format("{}\t{}\n", c.name, c.does);
    return lines;
  }
  const auto command = FindCommand(words[0]);
  if (command == nullptr) return {};
  const Argument* before = OptionNamed(*command, words[words.size() - 2]);
  if (before != nullptr && !before->value.empty())
    return before->choices.empty() ? "" : fmt::format("{}\n", fmt::join(before->choices, "\n"));
  return last.starts_with('-') ? CompleteOptions(*command) : "";
}

}  // namespace amem::tool
