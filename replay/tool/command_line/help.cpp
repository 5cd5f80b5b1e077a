// --help: the commands, and the options of each.
#include <fmt/format.h>

#include "replay/tool/command_line/command_line.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

// "  --last N        Only the last N", broken at `width` and indented behind the names.
std::string HelpLine(const std::string& names, const std::string& text, std::size_t column, std::size_t width) {
  std::string line = "  " + names;
  line.resize(std::max(line.size() + 2, column), ' ');
  if (line.size() > column) line += "\n" + std::string(column, ' ');
  const std::vector<std::string> rows = BrokenIntoLines(text, width - std::min(width - 20, column));
  for (std::size_t i = 0; i < rows.size(); ++i) line += (i == 0 ? "" : std::string(column, ' ')) + rows[i] + "\n";
  return line;
}

std::string HelpName(const Argument& argument) {
  std::string text = argument.positional() ? argument.names + (argument.several ? "..." : "") : "";
  if (!argument.positional()) {
    text = argument.names.starts_with("--") ? "    " : "";
    for (const std::string& name : argument.Names()) text += (text.size() > 1 && text.back() != ' ' ? ", " : "") + name;
    if (!argument.value.empty()) text += " " + argument.value;
  }
  return text;
}

std::string HelpText(const Argument& argument) {
  std::string text = argument.help;
  if (!argument.choices.empty()) text += fmt::format(" ({})", fmt::join(argument.choices, ", "));
  if (argument.several && !argument.positional()) text += "; may be repeated";
  return text + ".";
}

}  // namespace

std::string HelpOfTool(std::span<const PreparedCommand> commands) {
  const std::size_t width = TextWidth();
  std::string help;
  for (const std::string& row : BrokenIntoLines(kToolDoes, width)) help += row + "\n";
  help += "\nUsage: amem-replay COMMAND [OPTIONS] [DIR...]\n\nCommands:\n";
  for (const PreparedCommand& c : commands) help += HelpLine(c.command->name, std::string(c.command->does) + ".", 18, width);
  for (const char* paragraph :
       {"DIR is the directory of a session, one that holds several, or a parent of such directories; a file that `amem-replay "
        "pack` wrote; or - for such a file on standard input. Without any it is AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal.",
        kExitCodes, "`amem-replay COMMAND --help` has the options and examples of a command, `man amem-replay` all of them."}) {
    help += "\n";
    for (const std::string& row : BrokenIntoLines(paragraph, width)) help += row + "\n";
  }
  return help;
}

std::string HelpOf(const PreparedCommand& command) {
  const std::size_t width = TextWidth();
  std::string help, usage = fmt::format("Usage: amem-replay {} [OPTIONS]", command.command->name);
  for (const std::string& row : BrokenIntoLines(std::string(command.command->does) + ".", width)) help += row + "\n";
  for (const Argument& a : command.arguments.all()) {
    if (a.positional())
      usage += fmt::format(" {}{}{}{}", a.required ? "" : "[", a.names, a.several ? "..." : "", a.required ? "" : "]");
    else if (a.required)
      usage += fmt::format(" {} {}", a.Names().front(), a.value);
  }
  help += "\n" + usage + "\n\n";
  for (const Argument& a : command.arguments.all()) help += HelpLine(HelpName(a), HelpText(a), 26, width);
  help += HelpLine("-h, --help", "This text.", 26, width);
  help += std::string("\nExamples:\n") + command.command->examples + "\n";
  for (const std::string& row : BrokenIntoLines(kExitCodes, width)) help += row + "\n";
  return help;
}

}  // namespace amem::tool
