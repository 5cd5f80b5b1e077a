// --help and --man: the commands, and the options of each. --complete: what the last word of a command line can be, for shells;
// the program itself knows its commands and options, so the scripts only ask it.
#include <fmt/format.h>

#include "replay/tool/command_line/command_line.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 fine, 1 wrong usage, 2 something could not be read (what could be is printed), 3 a violation, failure or "
    "difference was found, or a job that was asked did not do it.";
constexpr std::size_t kOptionColumn = 26;
constexpr std::size_t kManualWidth = 76;  // man indents what it shows, and a terminal has 80 columns

// "  --last N        Only the last N", broken at `width` and indented behind the names.
std::string HelpLine(const std::string& names, const std::string& text, std::size_t column, std::size_t width) {
  std::string line = "  " + names;
  const std::string indent = "\n" + std::string(column, ' ');
  line.resize(std::max(line.size() + 2, column), ' ');
  if (line.size() > column) line += indent;
  return fmt::format("{}{}\n", line, fmt::join(BrokenIntoLines(text, width - std::min(width - 20, column)), indent));
}

std::string HelpLine(const Argument& argument, std::size_t width) {
  std::string name = argument.names + (argument.several ? "..." : ""), text = argument.help;
  if (!argument.positional())
    name = fmt::format("{}{}{}{}", argument.names.starts_with("--") ? "    " : "", fmt::join(argument.Names(), ", "),
                       argument.value.empty() ? "" : " ", argument.value);
  if (!argument.choices.empty()) text += fmt::format(" ({})", fmt::join(argument.choices, ", "));
  if (argument.several && !argument.positional()) text += "; may be repeated";
  return HelpLine(name, text + ".", kOptionColumn, width);
}

std::string Paragraph(std::string_view text, std::size_t width) {
  return fmt::format("{}\n", fmt::join(BrokenIntoLines(text, width), "\n"));
}

std::string OptionsOf(const Command& command, std::size_t width, bool common) {
  std::string usage = fmt::format("Usage: {} {} [OPTIONS]", program_name, command.name), options;
  for (const Argument& a : command.arguments.all()) {
    if (a.positional()) usage += fmt::format(" [{}{}]", a.names, a.several ? "..." : "");
    if (common || !a.common) options += HelpLine(a, width);
  }
  return usage + "\n\n" + options;
}

// "  amem why 4711    the job of that process", with the comment below where both are too wide.
std::string Example(const std::string& line, std::size_t width) {
  const std::size_t gap = line.find("  ", 2);
  if (line.size() <= width || gap == std::string::npos) return line + "\n";
  const std::string comment = line.substr(line.find_first_not_of(' ', gap));
  return fmt::format("{}\n      {}\n", line.substr(0, gap), fmt::join(BrokenIntoLines(comment, width - 6), "\n      "));
}

std::string ExamplesOf(const Command& command, std::size_t width) {
  std::string lines = "\nExamples:\n";
  for (const std::string& line : Split(AsCalled(command.examples), '\n'))
    if (!line.empty()) lines += line.starts_with(' ') ? Example(line, width) : Paragraph(line, width);
  return lines;
}

// As roff has it: a line that begins with a control character does not, and hyphens stay hyphens.
std::string Verbatim(std::string_view text) {
  std::string roff = ".nf\n";
  for (const char c : text) {
    if ((c == '.' || c == '\'') && roff.back() == '\n') roff += "\\&";
    if (c == '\\' || c == '-') roff += '\\';
    roff += c == '\\' ? 'e' : c;
  }
  return roff + ".fi\n";
}

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

struct Listed {
  const char* group;
  std::string name, does;
};

// All commands; called amem also those of the Python package, which starts this program for all others (_command.py).
std::vector<Listed> ListedCommands() {
  std::vector<Listed> all;
  if (program_name == "amem")
    all = {{"To begin", "run", "Starts a command with AMem in it: `amem run -- torchrun train.py`"},
           {"To begin", "doctor", "Says what keeps AMem from working on this machine"},
           {"To begin", "demo", "Four processes pause and resume on a simulated GPU"}};
  for (const Command& c : AllCommands()) all.push_back({c.group, c.name, c.does});
  return all;
}

}  // namespace

std::string HelpOfTool(std::size_t width) {
  std::string help = fmt::format("Usage: {} COMMAND [OPTIONS] [TARGET...]\n", program_name), last;
  for (const auto& [group, name, does] : ListedCommands()) {
    if (last != group) help += fmt::format("\n{}\n", group);
    last = group;
    help += HelpLine(name, does + ".", 11, width);
  }
  return help + "\n" +
         Paragraph(
             AsCalled("TARGET: a pid, a launcher's id of a job, a session, a directory of journals, a pack, or - for a pack "
                      "on standard input; without any it is AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal. `amem help "
                      "COMMAND` has options and examples, `amem --man` a manual page, and `amem --completion bash` (zsh, fish) "
                      "a script for that shell."),
             width) +
         Paragraph(kExitCodes, width);
}

std::string HelpOf(const Command& command, std::size_t width) {
  return Paragraph(std::string(command.does) + ".", width) + "\n" + OptionsOf(command, width, true) +
         HelpLine("-h, --help", "This text.", kOptionColumn, width) + ExamplesOf(command, width) + "\n" +
         Paragraph(kExitCodes, width);
}

std::string ManualPage() {
  std::string page = fmt::format(
      ".TH {0} 1 \"\" \"AMem {1}\" \"AMem\"\n.SH NAME\n{0} \\- pauses and resumes NCCL's GPU memory, and reads its "
      "journals\n.SH SYNOPSIS\n",
      program_name, AMEM_VERSION);
  page += Verbatim(HelpOfTool(kManualWidth));
  for (const Command& c : AllCommands())
    page += fmt::format(".SH {}\n{}.\n.PP\n", c.name, c.does) +
            Verbatim(OptionsOf(c, kManualWidth, false) + ExamplesOf(c, kManualWidth));
  page += ".SH OPTIONS OF EVERY COMMAND\n";
  std::string common;
  for (const Argument& a : AllCommands().front().arguments.all())
    if (a.common) common += HelpLine(a, kManualWidth);
  return page + Verbatim(common) +
         ".SH JSON\nWith \\-\\-json each object has a \"schema\" and a \"version\": the JSON schema of that name is in "
         "share/amem/schemas.\n.SH ENVIRONMENT\nAMEM_JOURNAL_DIR (where journals are), PAGER, NO_COLOR, TMPDIR (where packs "
         "are unpacked).\n";
}

std::string CompletionScript(const std::string& shell) {
  std::string script = shell == "zsh" ? kZsh : shell == "fish" ? kFish : kBash;
  for (std::size_t at = 0; (at = script.find("%s", at)) != std::string::npos;) script.replace(at, 2, program_name);
  return script;
}

std::string Completions(std::span<const char* const> words) {
  const std::string_view last = words.empty() ? "" : words.back();
  if (words.size() < 2 || std::string_view(words[0]) == "help") {
    std::string lines = "help\tThe commands, or one of them\n";
    for (const auto& [group, name, does] : ListedCommands()) lines += fmt::format("{}\t{}\n", name, does);
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
