// completion: what a shell needs to complete the tool's command lines.
#include <CLI/CLI.hpp>

#include "replay/tool/command.h"

namespace amem::tool {
namespace {

struct CompletionOptions {
  std::string shell;
  CLI::App* tool = nullptr;
};

// Made from the commands themselves, so that it cannot fall behind.
int RunCompletion(const CompletionOptions& options, Output& out) {
  out << "_amem_replay() {\n  local word=\"${COMP_WORDS[COMP_CWORD]}\" options=\"\"\n  COMPREPLY=()\n"
         "  case \"$([ \"$COMP_CWORD\" = 1 ] || echo \"${COMP_WORDS[1]}\")\" in\n    \"\") options=\"--help --version";
  const std::vector<CLI::App*> commands = options.tool->get_subcommands({});
  for (const CLI::App* command : commands) out << " " << command->get_name();
  out << "\";;\n";
  for (const CLI::App* command : commands) {
    out << "    " << command->get_name() << ") options=\"";
    for (const CLI::Option* option : command->get_options()) {
      for (const std::string& name : option->get_lnames()) out << "--" << name << " ";
    }
    out << "\";;\n";
  }
  out << "  esac\n  if [ \"$COMP_CWORD\" = 1 ] || [[ \"$word\" == -* ]]; then\n"
         "    mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$word\")\n  else\n"
         "    mapfile -t COMPREPLY < <(compgen -o plusdirs -f -- \"$word\")\n  fi\n}\n"
         "complete -o filenames -F _amem_replay amem-replay\n";
  return kFine;
}

void AddOptions(CLI::App& app, CompletionOptions& options) {
  options.tool = app.get_parent();
  app.add_option("SHELL", options.shell, "bash")->required()->check(CLI::IsMember({"bash"}));
}

}  // namespace

Command CompletionCommand() {
  return {"completion", "Completion for a shell, to be sourced", "  source <(amem-replay completion bash)\n",
          [](CLI::App& app) { return SetUp<CompletionOptions>(app, AddOptions, RunCompletion); }};
}

}  // namespace amem::tool
