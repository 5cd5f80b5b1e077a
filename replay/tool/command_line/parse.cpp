// CLI11 parses what the arguments describe. It takes seconds to compile, so that only this file includes it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>

#include "replay/tool/command_line/command_line.h"
#include "replay/tool/position.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

constexpr const char* kQuoteIt = "; a shell takes a # that begins a word for a comment: write --from=#17";

// Commands that are options of others now.
struct Renamed {
  const char* was;
  const char* is;
};
constexpr Renamed kRenamed[] = {{"collect", "pack HOST:[DIR]"},
                                {"completion", "--completion SHELL"},
                                {"critical-path", "why --slow"},
                                {"diff", "state --at A --to B"},
                                {"info", "ls -v"},
                                {"manual", "--man"},
                                {"refs", "top --by peer"},
                                {"run", "replay"},
                                {"status", "ls --live"},
                                {"tail", "log -f"},
                                {"trace", "report --perfetto"},
                                {"unpack", "pack -x"}};

std::string Hint(const std::string& word, const std::vector<std::string>& known) {
  const std::string meant = DidYouMean(word, known);
  return meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant);
}

// An argument with what CLI11 found of it. What an argument is told by its place has no option: CLI11 would split a place
// that is called "[a,b]", so what is left over belongs to it.
struct Found {
  const Argument* argument;
  const CLI::Option* option;
};

// CLI11 sorts the words out to the arguments; what values mean is up to the arguments, whose messages name what was given.
std::vector<Found> Register(const Arguments& arguments, CLI::App& app) {
  app.set_help_flag("-h,--help");
  app.allow_extras();  // so that all other words have found their places when the first wrong one is complained about
  std::vector<Found> found;
  for (const Argument& argument : arguments.all()) {
    if (argument.positional()) {
      found.push_back({&argument, nullptr});
      continue;
    }
    CLI::Option* option = nullptr;
    if (argument.value.empty()) {
      option = app.add_flag(argument.names)->disable_flag_override();
    } else {
      option = app.add_option(argument.names, CLI::callback_t([](const CLI::results_t&) { return true; }));
      option->expected(1);
      option->allow_extra_args(false);  // else "[a,b]" is a list, and an option takes all words behind it
    }
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    found.push_back({&argument, option});
  }
  return found;
}

// CLI11 would take the next word for the value of "--rank=", which a script writes as --rank=$RANK, and of "--last --json".
std::string ValueLeftOut(const PreparedCommand& command, std::span<const std::string> words) {
  for (std::size_t i = 0; i < words.size() && words[i] != "--"; ++i) {
    const std::string name = words[i].substr(0, words[i].find('='));
    const Argument* argument = OptionNamed(command, name);
    if (argument == nullptr) continue;
    const bool attached = name.size() != words[i].size();
    if (argument->value.empty() && attached) return fmt::format("{} takes no value", name);
    if (argument->value.empty()) continue;
    const bool left_out =
        attached ? name.size() + 1 == words[i].size() : i + 1 == words.size() || words[i + 1].starts_with("--");
    if (left_out)
      return fmt::format("{} needs a value ({}){}", name, argument->value, argument->value == kPosition ? kQuoteIt : "");
    if (!attached) ++i;
  }
  return {};
}

std::string Unknown(const PreparedCommand& command, const std::string& word) {
  const std::string name = word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2);
  std::vector<std::string> known = {"--help"};
  for (const Argument& argument : command.arguments.all()) {
    if (argument.positional()) continue;
    for (std::string& one : argument.Names()) known.push_back(std::move(one));
  }
  return fmt::format("{} has no option {}{}", command.command->name, name, Hint(name, known));
}

std::string NoChoice(const Argument& argument, const std::string& value) {
  if (argument.choices.empty() || std::ranges::find(argument.choices, value) != argument.choices.end()) return {};
  return fmt::format("{}: \"{}\" is none of {}{}", argument.Names().back(), value, fmt::join(argument.choices, ", "),
                     Hint(value, argument.choices));
}

std::string HandOver(const Found& found, const std::vector<std::string>& places) {
  const Argument& argument = *found.argument;
  const std::string name = argument.Names().back();
  const std::vector<std::string>& values = found.option == nullptr ? places : found.option->results();
  if (values.empty()) return {};
  if (argument.value.empty()) return argument.take({});
  if (values.size() > 1 && !argument.several) return fmt::format("{} is given twice", name);
  for (const std::string& value : values) {
    if (std::string wrong = NoChoice(argument, value); !wrong.empty()) return wrong;
  }
  return argument.take(values);
}

// Gives the arguments of the command what `words` have for them. Returns what is wrong with them, or an empty text.
std::string Parse(const PreparedCommand& command, std::vector<std::string> words, bool& help, bool& paged) {
  CLI::App app;
  const std::vector<Found> found = Register(command.arguments, app);
  const std::string left_out = ValueLeftOut(command, words);
  std::ranges::reverse(words);  // the order in which CLI11 takes a vector
  try {
    app.parse(std::move(words));
  } catch (const CLI::CallForHelp&) {
    help = true;
    return {};
  } catch (const CLI::ParseError& error) {
    return left_out.empty() ? error.what() : left_out;
  }
  if (!left_out.empty()) return left_out;
  std::vector<std::string> places;
  bool no_more_options = false;
  for (const std::string& word : app.remaining()) {
    if (word == "--" && !no_more_options) {
      no_more_options = true;
    } else if (no_more_options || word == "-" || !word.starts_with('-')) {
      places.push_back(word);
    } else {
      return Unknown(command, word);
    }
  }
  for (const Found& one : found) {
    if (std::string wrong = HandOver(one, places); !wrong.empty()) return wrong;
    paged = paged && (one.argument->paged || one.option->count() == 0);
  }
  return {};
}

}  // namespace

std::string DidYouMean(const std::string& word, const std::vector<std::string>& known) {
  std::string best;
  std::size_t best_distance = std::clamp<std::size_t>(word.size() / 3, 1, 3) + 1;
  for (const std::string& candidate : known) {
    // Letters put in, left out, replaced, or swapped with the next one.
    std::vector<std::vector<std::size_t>> d(word.size() + 1, std::vector<std::size_t>(candidate.size() + 1));
    for (std::size_t i = 0; i <= word.size(); ++i) d[i][0] = i;
    for (std::size_t j = 0; j <= candidate.size(); ++j) d[0][j] = j;
    for (std::size_t i = 1; i <= word.size(); ++i) {
      for (std::size_t j = 1; j <= candidate.size(); ++j) {
        d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (word[i - 1] != candidate[j - 1])});
        if (i > 1 && j > 1 && word[i - 1] == candidate[j - 2] && word[i - 2] == candidate[j - 1])
          d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
    const bool begins = word.size() > 2 && candidate.starts_with(word);
    const std::size_t distance = begins ? 0 : d[word.size()][candidate.size()];
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

const Argument* OptionNamed(const PreparedCommand& command, std::string_view name) {
  for (const Argument& argument : command.arguments.all()) {
    const std::vector<std::string> names = argument.Names();
    if (!argument.positional() && std::ranges::find(names, name) != names.end()) return &argument;
  }
  return nullptr;
}

const PreparedCommand* FindCommand(std::string_view name, std::span<const PreparedCommand> commands) {
  const auto found = std::ranges::find_if(commands, [&](const PreparedCommand& c) { return c.command->name == name; });
  return found == commands.end() ? nullptr : &*found;
}

namespace {

std::string NoCommand(const std::string& word, std::span<const PreparedCommand> commands) {
  for (const Renamed& command : kRenamed)
    if (word == command.was) return AsCalled(fmt::format("{} is `amem {}` now", word, command.is));
  std::vector<std::string> known = {"help", "--help", "--version"};
  for (const PreparedCommand& c : commands) known.emplace_back(c.command->name);
  return AsCalled(fmt::format("there is no {} \"{}\"{}; `amem help` lists them", word.starts_with('-') ? "option" : "command",
                              word, Hint(word, known)));
}

// What `amem WORD`, `amem WORD OF` prints where WORD is no command that reads or asks; nothing: it is one.
std::optional<ParsedCommandLine> ParseQuestion(const std::string& word, const std::string& of,
                                               std::span<const PreparedCommand> commands) {
  if (word == "--version" || word == "-V" || word == "version")
    return ParsedCommandLine{.print = program_name + " " AMEM_VERSION "\n"};
  if (word == "--man") return ParsedCommandLine{.print = ManualPage(commands)};
  if (word == "--completion" && (of == "bash" || of == "zsh" || of == "fish"))
    return ParsedCommandLine{.print = CompletionScript(of)};
  if (word == "--completion") return ParsedCommandLine{.wrong = "--completion: give bash, zsh or fish"};
  if (word != "help" && word != "--help" && word != "-h") return std::nullopt;
  if (of.empty()) return ParsedCommandLine{.print = HelpOfTool(commands, TextWidth())};
  if (const PreparedCommand* command = FindCommand(of, commands))
    return ParsedCommandLine{.print = HelpOf(*command, TextWidth())};
  return ParsedCommandLine{.wrong = NoCommand(of, commands)};
}

}  // namespace

ParsedCommandLine ParseCommandLine(int argc, const char* const* argv, std::span<const PreparedCommand> commands) {
  if (argc < 2) return {.print = HelpOfTool(commands, TextWidth()), .wrong = "a command is missing"};
  const std::string first = argv[1];
  if (first == "--complete") return {.print = Completions(std::span(argv + 2, argv + argc), commands)};
  if (auto question = ParseQuestion(first, argc > 2 ? argv[2] : "", commands)) return *std::move(question);
  const PreparedCommand* chosen = FindCommand(first, commands);
  if (chosen == nullptr) return {.wrong = NoCommand(first, commands)};
  bool help = false, paged = chosen->command->paged;
  const std::string wrong = Parse(*chosen, {argv + 2, argv + argc}, help, paged);
  if (help) return {.print = HelpOf(*chosen, TextWidth())};
  if (wrong.empty()) return {.chosen = chosen, .paged = paged};
  return {.wrong = AsCalled(fmt::format("{}; `amem help {}` has the options", wrong, first))};
}

}  // namespace amem::tool
