// Which command was chosen, and what its arguments are given.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <deque>
#include <map>
#include <optional>

#include "replay/tool/command_line/command_line.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {

std::optional<std::uint64_t> WholeNumber(const std::string& text) {
  std::uint64_t number = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  return parsed.ec == std::errc() && parsed.ptr == end ? std::optional(number) : std::nullopt;
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::vector<std::string> Argument::Names() const { return Split(names, ','); }

std::string Arguments::NotANumber(const std::string& name, const std::string& text, std::uint64_t least, std::uint64_t most) {
  const std::string bounds = most != std::numeric_limits<std::uint64_t>::max() ? fmt::format(" from {} to {}", least, most)
                             : least != 0                                      ? fmt::format(" from {} on", least)
                                                                               : " of zero or more";
  return fmt::format("{}: give a whole number{}, not \"{}\"", name, bounds, text);
}

namespace {

constexpr const char* kQuoteIt = "; a shell takes a # that begins a word for a comment: write --from=#17";

// What other tools call such a command.
constexpr std::pair<const char*, const char*> kElsewhere[] = {
    {"cat", "log"},    {"diff", "state --to"},  {"events", "log"},   {"grep", "log"},
    {"info", "ls -v"}, {"list", "ls"},          {"ps", "ls --live"}, {"show", "log"},
    {"stats", "top"},  {"status", "ls --live"}, {"summary", "why"},  {"tail", "log -f"}};

constexpr std::pair<const char*, const char*> kOptionsElsewhere[] = {{"--since", "--from"}, {"--until", "--to"}};

// The known word that `word` was probably meant to be, at most two or, of long words, three letters away; empty: none.
std::string Hint(const std::string& word, const std::vector<std::string>& known) {
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
    if (distance >= best_distance) continue;
    best = candidate;
    best_distance = distance;
  }
  return best.empty() ? "" : fmt::format(" (did you mean {}?)", best);
}

std::string Unknown(const Command& command, const std::string& word) {
  const std::string name = word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2);
  std::vector<std::string> known = {"--help"};
  for (const Argument& argument : command.arguments.all()) {
    if (argument.positional()) continue;
    for (std::string& one : argument.Names()) known.push_back(std::move(one));
  }
  for (const auto& [there, here] : kOptionsElsewhere)
    if (name == there && std::ranges::find(known, here) != known.end())
      return fmt::format("{} has no option {} (did you mean {}?)", command.name, name, here);
  return fmt::format("{} has no option {}{}", command.name, name, Hint(name, known));
}

std::string HandOver(const Argument& argument, const std::vector<std::string>& values) {
  if (argument.value.empty()) return argument.take({});
  const std::string name = argument.Names().back();
  const std::vector<std::string>& known = argument.choices;
  if (values.size() > 1 && !argument.several) return fmt::format("{} is given twice", name);
  for (const std::string& value : values)
    if (!known.empty() && std::ranges::find(known, value) == known.end())
      return fmt::format("{}: \"{}\" is none of {}{}", name, value, fmt::join(known, ", "), Hint(value, known));
  return argument.take(values);
}

// What a command line has for the arguments of a command.
struct Given {
  std::map<const Argument*, std::vector<std::string>> values;  // of a flag an empty text
  bool help = false;
  std::string unknown;  // the first option that the command does not have
};

// Sorts out the words of a command line: "--name value", "--name=value", "-n value", "-nvalue", several flags as "-fv", and
// places, which are all words behind "--". Returns what is wrong, or an empty text; an unknown option is not, so that it does
// not hide the others.
class WordSorter {
 public:
  WordSorter(const Command& command, const std::vector<std::string>& words, Given& given)
      : command_(command), ahead_(words.begin(), words.end()), given_(given) {}

  std::string Sort() {
    std::string wrong;
    bool no_more_options = false;
    while (wrong.empty() && !ahead_.empty()) {
      const std::string word = std::move(ahead_.front());
      ahead_.pop_front();
      if (word == "--" && !no_more_options)
        no_more_options = true;
      else
        wrong = no_more_options || word == "-" || !word.starts_with('-') ? TakePlace(word) : TakeOption(word);
    }
    return wrong;
  }

 private:
  std::string TakePlace(const std::string& word) {
    const auto place = std::ranges::find_if(command_.arguments.all(), &Argument::positional);
    if (place == command_.arguments.all().end()) return fmt::format("{} takes no \"{}\"", command_.name, word);
    // As of a variable of a script that is not set: it would mean what the command takes where no name is given.
    if (word.empty()) return fmt::format("{}: an empty name names nothing; leave it out for the default", place->value);
    given_.values[&*place].push_back(word);
    return {};
  }
  std::string TakeOption(const std::string& word) {
    const std::string name = word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2);
    const std::string attached = word.substr(name.size());
    const Argument* argument = OptionNamed(command_, name);
    const bool help = name == "--help" || name == "-h";
    if (argument == nullptr && !help) {
      if (given_.unknown.empty()) given_.unknown = word;
      return {};
    }
    if (!help && !argument->value.empty()) return TakeValue(*argument, name, attached);
    if (attached.starts_with('=')) return fmt::format("{} takes no value", name);
    if (!attached.empty()) ahead_.push_front("-" + attached);
    given_.help |= help;
    if (!help) given_.values[argument].emplace_back();
    return {};
  }
  std::string TakeValue(const Argument& argument, const std::string& name, const std::string& attached) {
    // "--rank=", which a script writes as --rank=$RANK, and "--last --json" have none.
    const bool none = attached.empty() ? ahead_.empty() || ahead_.front().starts_with("--") : attached == "=";
    if (none) return fmt::format("{} needs a value ({}){}", name, argument.value, argument.value == kPosition ? kQuoteIt : "");
    std::vector<std::string>& values = given_.values[&argument];
    if (!attached.empty()) {
      values.push_back(attached.substr(name.starts_with("--") ? 1 : 0));
      return {};
    }
    values.push_back(std::move(ahead_.front()));
    ahead_.pop_front();
    return {};
  }

  const Command& command_;
  std::deque<std::string> ahead_;
  Given& given_;
};

// Gives the arguments of the command what `words` have for them.
ParsedCommandLine Parse(const Command& command, const std::vector<std::string>& words) {
  ParsedCommandLine parsed{.chosen = &command, .paged = command.paged};
  Given given;
  std::string wrong = WordSorter(command, words, given).Sort();
  if (wrong.empty() && given.help) return {.print = HelpOf(command, TextWidth())};
  if (wrong.empty() && !given.unknown.empty()) wrong = Unknown(command, given.unknown);
  for (const Argument& argument : command.arguments.all()) {
    const auto found = given.values.find(&argument);
    if (!wrong.empty() || found == given.values.end()) continue;
    wrong = HandOver(argument, found->second);
    parsed.paged = parsed.paged && argument.paged;
  }
  if (wrong.empty()) return parsed;
  return {.wrong = AsCalled(fmt::format("{}; `amem help {}` has the options", wrong, command.name))};
}

std::string NoCommand(const std::string& word) {
  for (const auto& [there, here] : kElsewhere)
    if (word == there)
      return AsCalled(fmt::format("there is no command \"{}\" (did you mean {}?); `amem help` lists them", word, here));
  std::vector<std::string> known = {"help", "--help", "--version"};
  for (const Command& c : AllCommands()) known.emplace_back(c.name);
  return AsCalled(fmt::format("there is no {} \"{}\"{}; `amem help` lists them", word.starts_with('-') ? "option" : "command",
                              word, Hint(word, known)));
}

// What `amem WORD`, `amem WORD OF` prints where WORD is no command that reads or asks; nothing: it is one.
std::optional<ParsedCommandLine> ParseQuestion(const std::string& word, const std::string& of) {
  if (word == "--version" || word == "-V" || word == "version")
    return ParsedCommandLine{.print = program_name + " " AMEM_VERSION "\n"};
  if (word == "--man") return ParsedCommandLine{.print = ManualPage()};
  if (word == "--completion" && (of == "bash" || of == "zsh" || of == "fish"))
    return ParsedCommandLine{.print = CompletionScript(of)};
  if (word == "--completion") return ParsedCommandLine{.wrong = "--completion: give bash, zsh or fish"};
  if (word != "help" && word != "--help" && word != "-h") return std::nullopt;
  if (of.empty() || of == "help") return ParsedCommandLine{.print = HelpOfTool(TextWidth())};
  if (const Command* command = FindCommand(of)) return ParsedCommandLine{.print = HelpOf(*command, TextWidth())};
  return ParsedCommandLine{.wrong = NoCommand(of)};
}

}  // namespace

const Argument* OptionNamed(const Command& command, std::string_view name) {
  for (const Argument& argument : command.arguments.all()) {
    const std::vector<std::string> names = argument.Names();
    if (!argument.positional() && std::ranges::find(names, name) != names.end()) return &argument;
  }
  return nullptr;
}

const Command* FindCommand(std::string_view name) {
  for (const Command& command : AllCommands())
    if (command.name == name) return &command;
  return nullptr;
}

ParsedCommandLine ParseCommandLine(int argc, const char* const* argv) {
  if (argc < 2) return {.print = HelpOfTool(TextWidth()), .wrong = "a command is missing"};
  const std::string first = argv[1];
  if (first == "--complete") return {.print = Completions(std::span(argv + 2, argv + argc))};
  if (auto question = ParseQuestion(first, argc > 2 ? argv[2] : "")) return *std::move(question);
  const Command* chosen = FindCommand(first);
  return chosen == nullptr ? ParsedCommandLine{.wrong = NoCommand(first)} : Parse(*chosen, {argv + 2, argv + argc});
}

}  // namespace amem::tool
