#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "replay/tool/command_line/command_line.h"

namespace amem::tool {
namespace {

std::string Hint(const std::string& word, const std::vector<std::string>& known) {
  const std::string meant = DidYouMean(word, known);
  return meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant);
}

// The words behind a command, sorted out to the arguments that they belong to.
class Sorter {
 public:
  explicit Sorter(const PreparedCommand& command) : command_(command) {}

  [[nodiscard]] bool help() const { return help_; }
  // Returns what is wrong, or an empty text.
  std::string Sort(std::span<const std::string> words) {
    bool options = true;
    for (std::size_t i = 0; i < words.size() && !help_; ++i) {
      const std::string& word = words[i];
      if (!options || !word.starts_with('-') || word == "-") {
        places_.push_back(word);
      } else if (word == "--") {
        options = false;
      } else if (std::string wrong = Option(words, i); !wrong.empty()) {
        return wrong;
      }
    }
    return help_ ? "" : Places();
  }
  [[nodiscard]] std::string HandOver() const {
    for (const Argument& argument : command_.arguments.all()) {
      const auto given = given_.find(&argument);
      if (given == given_.end()) {
        if (argument.required) return fmt::format("{} is missing: {}", argument.Names().back(), argument.help);
        continue;
      }
      for (const std::string& value : given->second) {
        if (std::string wrong = NoChoice(argument, value); !wrong.empty()) return wrong;
      }
      if (std::string wrong = argument.take(given->second); !wrong.empty()) return wrong;
    }
    return {};
  }

 private:
  static std::string NoChoice(const Argument& argument, const std::string& value) {
    if (argument.choices.empty() || std::ranges::find(argument.choices, value) != argument.choices.end()) return {};
    return fmt::format("{}: \"{}\" is none of {}{}", argument.Names().back(), value, fmt::join(argument.choices, ", "),
                       Hint(value, argument.choices));
  }

  // "--name", "--name=value", "-o value", "-ovalue".
  std::string Option(std::span<const std::string> words, std::size_t& i) {
    const std::string& word = words[i];
    const bool is_long = word.starts_with("--");
    const std::size_t equals = is_long ? word.find('=') : std::string::npos;
    const std::string name = is_long ? word.substr(0, equals) : word.substr(0, 2);
    if (name == "--help" || name == "-h") return help_ = true, std::string();
    std::vector<std::string> known = {"--help"};
    for (const Argument& argument : command_.arguments.all()) {
      if (argument.positional()) continue;
      const std::vector<std::string> names = argument.Names();
      if (std::ranges::find(names, name) != names.end()) {
        const bool attached = is_long ? equals != std::string::npos : word.size() > 2;
        return Value(argument, name, attached, attached ? word.substr(is_long ? equals + 1 : 2) : "", words, i);
      }
      known.insert(known.end(), names.begin(), names.end());
    }
    return fmt::format("{} has no option {}{}", command_.command->name, name, Hint(name, known));
  }

  std::string Value(const Argument& argument, const std::string& name, bool attached, const std::string& value,
                    std::span<const std::string> words, std::size_t& i) {
    std::vector<std::string>& given = given_[&argument];
    if (argument.value.empty()) return attached ? fmt::format("{} takes no value", name) : "";
    if (!given.empty() && !argument.several) return fmt::format("{} is given twice", name);
    if (attached) return given.push_back(value), "";
    if (i + 1 == words.size() || words[i + 1].starts_with("--"))
      return fmt::format("{} needs a value ({})", name, argument.value);
    given.push_back(words[++i]);
    return {};
  }

  std::string Places() {
    std::size_t next = 0;
    for (const Argument& argument : command_.arguments.all()) {
      if (!argument.positional()) continue;
      const std::size_t end = argument.several ? places_.size() : std::min(next + 1, places_.size());
      if (next < end)
        given_[&argument].assign(places_.begin() + static_cast<std::ptrdiff_t>(next),
                                 places_.begin() + static_cast<std::ptrdiff_t>(end));
      next = end;
    }
    return next == places_.size() ? "" : fmt::format("\"{}\" is one too many", places_[next]);
  }

  const PreparedCommand& command_;
  std::map<const Argument*, std::vector<std::string>> given_;
  std::vector<std::string> places_;
  bool help_ = false;
};

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
  const std::vector<std::string> words(argv + 2, argv + argc);
  Sorter sorter(*chosen);
  std::string wrong = sorter.Sort(words);
  if (sorter.help()) return {.print = HelpOf(*chosen)};
  if (wrong.empty()) wrong = sorter.HandOver();
  if (wrong.empty()) return {.chosen = &*chosen};
  return {.wrong = fmt::format("{}; `amem-replay {} --help` has the options", wrong, first)};
}

}  // namespace amem::tool
