// CLI11 parses what the arguments describe. It takes seconds to compile, so that only this file includes it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "replay/tool/command_line/command_line.h"

namespace amem::tool {
namespace {

std::string Hint(const std::string& word, const std::vector<std::string>& known) {
  const std::string meant = DidYouMean(word, known);
  return meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant);
}

// An argument with what CLI11 found of it. An argument that takes any number of places has no option: CLI11 would split a place
// that is called "[a,b]", so what is left over belongs to it.
struct Found {
  const Argument* argument;
  const CLI::Option* option;
};

bool TakesPlaces(const Argument& argument) { return argument.positional() && argument.several; }

// CLI11 sorts the words out to the arguments; what values mean is up to the arguments, whose messages name what was given.
std::vector<Found> Register(const Arguments& arguments, CLI::App& app) {
  app.set_help_flag("-h,--help");
  app.allow_extras();  // so that all other words have found their places when the first wrong one is complained about
  std::vector<Found> found;
  for (const Argument& argument : arguments.all()) {
    if (TakesPlaces(argument)) {
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

const Argument* OptionNamed(const PreparedCommand& command, const std::string& name) {
  for (const Argument& argument : command.arguments.all()) {
    const std::vector<std::string> names = argument.Names();
    if (!argument.positional() && std::ranges::find(names, name) != names.end()) return &argument;
  }
  return nullptr;
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
    if (left_out) return fmt::format("{} needs a value ({})", name, argument->value);
    if (!attached) ++i;
  }
  return {};
}

std::string Unknown(const PreparedCommand& command, const std::string& word) {
  if (word == "-" || !word.starts_with('-')) return fmt::format("\"{}\" is one too many", word);
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
  if (values.empty()) return argument.required ? fmt::format("{} is missing: {}", name, argument.help) : "";
  if (argument.value.empty()) return argument.take({});
  if (values.size() > 1 && !argument.several) return fmt::format("{} is given twice", name);
  for (const std::string& value : values) {
    if (std::string wrong = NoChoice(argument, value); !wrong.empty()) return wrong;
  }
  return argument.take(values);
}

// Gives the arguments of the command what `words` have for them. Returns what is wrong with them, or an empty text.
std::string Parse(const PreparedCommand& command, std::vector<std::string> words, bool& help) {
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
  const bool takes_places = std::ranges::any_of(found, [](const Found& one) { return TakesPlaces(*one.argument); });
  std::vector<std::string> places;
  bool no_more_options = false;
  for (const std::string& word : app.remaining()) {
    if (word == "--" && !no_more_options) {
      no_more_options = true;
    } else if (takes_places && (no_more_options || word == "-" || !word.starts_with('-'))) {
      places.push_back(word);
    } else {
      return Unknown(command, word);
    }
  }
  for (const Found& one : found) {
    if (std::string wrong = HandOver(one, places); !wrong.empty()) return wrong;
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

ParsedCommandLine ParseCommandLine(int argc, const char* const* argv, std::span<const PreparedCommand> commands) {
  if (argc < 2) return {.wrong = "a command is missing; `amem-replay --help` lists them"};
  const std::string first = argv[1];
  if (first == "--version") return {.print = "amem-replay " AMEM_VERSION "\n"};
  if (first == "--help" || first == "-h") return {.print = HelpOfTool(commands)};
  const auto chosen = std::ranges::find_if(commands, [&](const PreparedCommand& c) { return c.command->name == first; });
  if (chosen == commands.end()) {
    std::vector<std::string> known = {"--help", "--version"};
    for (const PreparedCommand& c : commands) known.emplace_back(c.command->name);
    return {.wrong = fmt::format("there is no {} \"{}\"{}; `amem-replay --help` lists them",
                                 first.starts_with('-') ? "option" : "command", first, Hint(first, known))};
  }
  bool help = false;
  const std::string wrong = Parse(*chosen, {argv + 2, argv + argc}, help);
  if (help) return {.print = HelpOf(*chosen)};
  if (wrong.empty()) return {.chosen = &*chosen};
  return {.wrong = fmt::format("{}; `amem-replay {} --help` has the options", wrong, first)};
}

}  // namespace amem::tool
