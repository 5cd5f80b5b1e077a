// completion: what a shell needs to complete the tool's command lines.
#include <fmt/format.h>

#include <algorithm>

#include "replay/tool/command_line/command_line.h"

namespace amem::tool {
namespace {

// ---- bash ------------------------------------------------------------------------------------------------------------------

std::string BashCase(const PreparedCommand& prepared) {
  std::string options = "--help", values;
  for (const Argument& a : prepared.arguments.all()) {
    if (a.positional()) {
      if (!a.choices.empty())
        values += fmt::format("      [[ \"$word\" == -* ]] || values=\"{}\"\n", fmt::join(a.choices, " "));
      continue;
    }
    for (const std::string& name : a.Names()) options += " " + name;
    if (!a.choices.empty())
      values += fmt::format("      [ \"$before\" = {} ] && values=\"{}\"\n", a.Names().back(), fmt::join(a.choices, " "));
  }
  return fmt::format("    {})\n      options=\"{}\"\n{}      ;;\n", prepared.command->name, options, values);
}

std::string Bash(std::span<const PreparedCommand> commands) {
  std::string script =
      "# bash completion of amem-replay\n_amem_replay() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" before=\"${COMP_WORDS[COMP_CWORD-1]}\" options=\"\" values=\"\"\n"
      "  COMPREPLY=()\n  case \"$([ \"$COMP_CWORD\" = 1 ] || echo \"${COMP_WORDS[1]}\")\" in\n    \"\") options=\"--help "
      "--version";
  for (const PreparedCommand& c : commands) script += std::string(" ") + c.command->name;
  script += "\" ;;\n";
  for (const PreparedCommand& c : commands) script += BashCase(c);
  return script +
         "  esac\n  if [ -n \"$values\" ]; then\n    mapfile -t COMPREPLY < <(compgen -W \"$values\" -- \"$word\")\n"
         "  elif [ \"$COMP_CWORD\" = 1 ] || [[ \"$word\" == -* ]]; then\n"
         "    mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$word\")\n  else\n"
         "    mapfile -t COMPREPLY < <(compgen -o plusdirs -f -- \"$word\")\n  fi\n}\n"
         "complete -o filenames -F _amem_replay amem-replay\n";
}

// ---- zsh -------------------------------------------------------------------------------------------------------------------

// `text` within single quotes, with a backslash before each of `special`.
std::string Quoted(std::string_view text, std::string_view special) {
  std::string quoted;
  for (const char c : text) {
    if (c == '\'') {
      quoted += "'\\''";
      continue;
    }
    if (special.find(c) != std::string_view::npos) quoted += '\\';
    quoted += c;
  }
  return quoted;
}

std::string ZshAction(const Argument& a) {
  if (!a.choices.empty()) return fmt::format("({})", fmt::join(a.choices, " "));
  return a.completes == Completes::kDirectories ? "_files -/" : a.completes == Completes::kFiles ? "_files" : " ";
}

std::string ZshCase(const PreparedCommand& prepared) {
  std::string specs = "'(- *)'{-h,--help}'[This text]'";
  int place = 0;
  for (const Argument& a : prepared.arguments.all()) {
    const std::string help = Quoted(a.help, "[]:\\");
    if (a.positional()) {
      specs +=
          fmt::format(" \\\n        '{}:{}:{}'", a.several ? "*" : std::to_string(++place), Quoted(a.names, ":"), ZshAction(a));
      continue;
    }
    for (const std::string& name : a.Names())
      specs += fmt::format(" \\\n        '{}{}[{}]{}'", a.several ? "*" : "", name, help,
                           a.value.empty() ? "" : fmt::format(":{}:{}", Quoted(a.value, ":"), ZshAction(a)));
  }
  return fmt::format("    {})\n      _arguments {}\n      ;;\n", prepared.command->name, specs);
}

std::string Zsh(std::span<const PreparedCommand> commands) {
  std::string script =
      "#compdef amem-replay\n# zsh completion of amem-replay\n_amem_replay() {\n  local -a commands\n  commands=(\n";
  for (const PreparedCommand& c : commands)
    script += fmt::format("    '{}:{}'\n", c.command->name, Quoted(c.command->does, ":\\"));
  script +=
      "  )\n  if (( CURRENT == 2 )); then\n    _describe command commands\n    _arguments '--help[This text]' '--version[The "
      "version]'\n"
      "    return\n  fi\n  local command=$words[2]\n  shift words\n  (( CURRENT-- ))\n  case $command in\n";
  for (const PreparedCommand& c : commands) script += ZshCase(c);
  return script +
         "  esac\n}\nif [ \"$funcstack[1]\" = _amem-replay ]; then\n  _amem_replay \"$@\"\nelse\n  compdef _amem_replay "
         "amem-replay\nfi\n";
}

// ---- fish ------------------------------------------------------------------------------------------------------------------

std::string FishOption(const char* command, const Argument& a) {
  std::string line = fmt::format("complete -c amem-replay -n '__fish_seen_subcommand_from {}'", command);
  for (const std::string& name : a.Names())
    line += name.starts_with("--") ? fmt::format(" -l {}", name.substr(2)) : fmt::format(" -s {}", name.substr(1));
  if (!a.value.empty()) line += a.completes == Completes::kNothing ? " -x" : " -r -F";
  if (!a.choices.empty()) line += fmt::format(" -a '{}'", fmt::join(a.choices, " "));
  return line + fmt::format(" -d '{}'\n", Quoted(a.help, "\\"));
}

std::string Fish(std::span<const PreparedCommand> commands) {
  std::string script =
      "# fish completion of amem-replay\n"
      "complete -c amem-replay -n __fish_use_subcommand -f -l help -d 'The commands'\n"
      "complete -c amem-replay -n __fish_use_subcommand -f -l version -d 'The version'\n";
  for (const PreparedCommand& c : commands) {
    const char* name = c.command->name;
    script +=
        fmt::format("complete -c amem-replay -n __fish_use_subcommand -f -a {} -d '{}'\n", name, Quoted(c.command->does, "\\"));
    for (const Argument& a : c.arguments.all()) {
      if (!a.positional()) {
        script += FishOption(name, a);
      } else if (!a.choices.empty()) {
        script += fmt::format("complete -c amem-replay -n '__fish_seen_subcommand_from {}' -f -a '{}'\n", name,
                              fmt::join(a.choices, " "));
      }
    }
  }
  return script;
}

struct CompletionOptions {
  std::string shell;
};

int RunCompletion(const CompletionOptions& options, Output& out) {
  out << CompletionScript(options.shell, AllCommands());
  return kFine;
}

void AddOptions(Arguments& arguments, CompletionOptions& options) {
  arguments.Add("SHELL", "SHELL", options.shell, "The shell").Required().OneOf({"bash", "zsh", "fish"});
}

}  // namespace

// Made from the commands themselves, so that it cannot fall behind. fish quotes within single quotes as \', the other two as
// '\''; both are understood by all three.
std::string CompletionScript(const std::string& shell, std::span<const PreparedCommand> commands) {
  return shell == "zsh" ? Zsh(commands) : shell == "fish" ? Fish(commands) : Bash(commands);
}

Command CompletionCommand() {
  return {"completion", "Completion for a shell, to be sourced; `cmake --install` puts it where shells look",
          "  source <(amem-replay completion bash)\n"
          "  amem-replay completion zsh > ~/.zfunc/_amem-replay        with ~/.zfunc in fpath\n"
          "  amem-replay completion fish > ~/.config/fish/completions/amem-replay.fish\n",
          [](Arguments& arguments) { return SetUp<CompletionOptions>(arguments, AddOptions, RunCompletion); }, false};
}

}  // namespace amem::tool
