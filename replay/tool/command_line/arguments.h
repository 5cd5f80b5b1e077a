// The options of a command, described once. Parsing, --help, the manual page and what shells complete follow from it.
#pragma once

#include <concepts>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace amem::tool {

std::vector<std::string> SplitAtCommas(const std::vector<std::string>& lists);  // "a,b" and "a" "b" are the same
std::optional<std::uint64_t> WholeNumber(const std::string& text);              // nothing: it is none

struct Argument {
  std::string names;  // "--all", "-o,--output"; without hyphens it is told by its place
  std::string value;  // "SEQ"; empty: a flag
  std::string help;
  std::vector<std::string> choices;  // empty: any
  bool several = false;              // it may be given more than once
  bool common = false;               // every command has it
  bool paged = true;                 // false: with it the command goes on for long
  // Takes what was given, one text for each time; of a flag, none. Returns what is wrong with it, or an empty text.
  std::function<std::string(const std::vector<std::string>&)> take;

  Argument& OneOf(std::vector<std::string> known) { return choices = std::move(known), *this; }
  [[nodiscard]] bool positional() const { return !names.starts_with('-'); }
  [[nodiscard]] std::vector<std::string> Names() const;  // each with its hyphens
};

// What is given goes to the target, which must live until the command has run; without it the target keeps its default.
class Arguments {
 public:
  Argument& Flag(const char* names, bool& target, const char* help);
  // Text or a path: the last one given.
  template <class Text>
  requires std::is_assignable_v<Text&, const std::string&> Argument& Add(const char* names, const char* value, Text& target,
                                                                         const char* help) {
    return Take(names, value, help, [&target](const std::vector<std::string>& given) { target = given.back(); });
  }
  Argument& Add(const char* names, const char* value, std::vector<std::string>& target, const char* help);
  Argument& Add(const char* names, const char* value, std::optional<std::uint64_t>& target, const char* help);
  // A whole number that fits the target, from `least` on.
  template <std::unsigned_integral Number>
  Argument& Add(const char* names, const char* value, Number& target, const char* help, Number least = 0) {
    return AddNumber(names, value, help, least, std::numeric_limits<Number>::max(),
                     [&target](std::uint64_t number) { target = static_cast<Number>(number); });
  }

  [[nodiscard]] const std::deque<Argument>& all() const { return all_; }

 private:
  Argument& AddNumber(const char* names, const char* value, const char* help, std::uint64_t least, std::uint64_t most,
                      std::function<void(std::uint64_t)> set);
  Argument& Take(const char* names, const char* value, const char* help,
                 std::function<void(const std::vector<std::string>&)> take);

  std::deque<Argument> all_;  // references to its elements stay
};

}  // namespace amem::tool
