// manual: the manual page, made from the commands themselves.
#include <fmt/format.h>

#include "replay/tool/command_line/command_line.h"

namespace amem::tool {
namespace {

// Text for roff: no line begins with a control character, hyphens stay hyphens.
std::string Roff(std::string_view text) {
  std::string escaped;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((text[i] == '.' || text[i] == '\'') && (i == 0 || text[i - 1] == '\n')) escaped += "\\&";
    if (text[i] == '\\') {
      escaped += "\\e";
    } else {
      if (text[i] == '-') escaped += '\\';
      escaped += text[i];
    }
  }
  return escaped;
}

std::string ManualOption(const Argument& a) {
  std::string names;
  for (const std::string& name : a.Names()) names += (names.empty() ? "" : ", ") + fmt::format("\\fB{}\\fR", Roff(name));
  if (!a.positional() && !a.value.empty()) names += fmt::format(" \\fI{}\\fR", Roff(a.value));
  std::string help = Roff(a.help);
  if (!a.choices.empty()) help += Roff(fmt::format(" ({})", fmt::join(a.choices, ", ")));
  return fmt::format(".TP\n{}{}\n{}{}.\n", names, a.positional() && a.several ? "..." : "", help,
                     a.several && !a.positional() ? "; may be repeated" : "");
}

std::string Synopsis(const PreparedCommand& c) {
  std::string line = fmt::format("\\fBamem\\-replay {}\\fR [\\fIOPTIONS\\fR]", Roff(c.command->name));
  for (const Argument& a : c.arguments.all()) {
    if (a.positional())
      line +=
          fmt::format(" {}\\fI{}\\fR{}{}", a.required ? "" : "[", Roff(a.names), a.several ? "..." : "", a.required ? "" : "]");
    else if (a.required)
      line += fmt::format(" \\fB{}\\fR \\fI{}\\fR", Roff(a.Names().front()), Roff(a.value));
  }
  return line + "\n";
}

struct Variable {
  const char* name;
  const char* text;
};
constexpr Variable kVariables[] = {
    {"AMEM_JOURNAL_DIR", "Where journals are when no DIR is given; the same variable tells jobs where to put them."},
    {"AMEM_PAGER, PAGER", "The pager of output on a terminal; empty or cat: none. Without either it is less, with LESS=FRX."},
    {"NO_COLOR", "Set to anything: no colours, unless --color always is given."},
    {"AMEM_SSH", "What collect runs in place of ssh; may have options, as in \"ssh -p 2222\"."},
    {"TMPDIR", "Where packs are unpacked for the time of a command."},
};

int RunManual(const bool&, Output& out) {
  out.Verbatim(ManualPage(AllCommands()));
  return kFine;
}

}  // namespace

std::string ManualPage(std::span<const PreparedCommand> commands) {
  std::string page = fmt::format(
      ".TH AMEM\\-REPLAY 1 \"\" \"AMem {}\" \"AMem\"\n.SH NAME\namem\\-replay \\- reads the journals of AMem\n.SH SYNOPSIS\n"
      "\\fBamem\\-replay\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR] [\\fIDIR\\fR...]\n.SH DESCRIPTION\n{}\n.PP\n"
      "DIR is the directory of a session, one that holds several, or a parent of such directories; a file that "
      "\\fBamem\\-replay "
      "pack\\fR wrote; or \\- for such a file on standard input. Journals of live processes can be read at any time.\n.PP\n"
      "With \\fB\\-\\-json\\fR each object has a \"schema\" and a \"version\": the JSON schema of that name is in "
      "share/amem/schemas. A version goes up when a key goes away or means something else. A command that fails without a "
      "result prints an object of the schema \"amem\\-replay/error\".\n.SH COMMANDS\n",
      AMEM_VERSION, Roff(kToolDoes));
  for (const PreparedCommand& c : commands) {
    page += fmt::format(".SS {}\n{}\n.PP\n{}.\n", Roff(c.command->name), Synopsis(c), Roff(c.command->does));
    for (const Argument& a : c.arguments.all()) {
      if (!a.common) page += ManualOption(a);
    }
    page += fmt::format(".PP\nExamples:\n.PP\n.nf\n{}.fi\n", Roff(c.command->examples));
  }
  page += ".SH OPTIONS OF EVERY COMMAND\n.TP\n\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nThe options and examples of the command.\n";
  for (const Argument& a : commands.front().arguments.all()) {
    if (a.common) page += ManualOption(a);
  }
  page += ".SH EXIT STATUS\n" + Roff(kExitCodes) + "\n.SH ENVIRONMENT\n";
  for (const Variable& v : kVariables) page += fmt::format(".TP\n\\fB{}\\fR\n{}\n", v.name, Roff(v.text));
  return page;
}

Command ManualCommand() {
  return {"manual", "The manual page, for man; `cmake --install` puts it where man looks", "  amem-replay manual | man -l -\n",
          [](Arguments& arguments) {
            return SetUp<bool>(
                arguments, [](Arguments&, bool&) {}, RunManual);
          },
          false};
}

}  // namespace amem::tool
