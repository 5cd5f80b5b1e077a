// The options of a command, described once. Parsing, --help, the manual page and what shells complete follow from it.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace amem::tool {

std::vector<std::string> Split(const std::string& text, char separator);  // at each: one part more than there are of it
std::optional<std::uint64_t> WholeNumber(const std::string& text);        // nothing: it is none

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
  Argument& Flag(const char* names, bool& target, const char* help) {
    return Take(names, "", help, [&target](const auto&) { return target = true, std::string(); });
  }
  // Text or a path: the last one given; a list: all of them; else a whole number that fits the target, from `least` on.
  template <class Target>
  Argument& Add(const char* names, const char* value, Target& target, const char* help, std::uint64_t least = 0) {
    if constexpr (std::is_assignable_v<Target&, const std::string&>) {
      return Take(names, value, help, [&target](const auto& given) { return target = given.back(), std::string(); });
    } else if constexpr (std::is_same_v<Target, std::vector<std::string>>) {
      Argument& list = Take(names, value, help, [&target](const auto& given) { return target = given, std::string(); });
      return list.several = true, list;
    } else {
      using Number = typename decltype(std::optional(target))::value_type;
      return Take(names, value, help, [&target, least, name = Split(names, ',').back()](const auto& given) {
        constexpr std::uint64_t kMost = std::numeric_limits<Number>::max();
        const std::optional<std::uint64_t> number = WholeNumber(given.back());
        if (!number || *number < least || *number > kMost) return NotANumber(name, given.back(), least, kMost);
        return target = static_cast<Number>(*number), std::string();
      });
    }
  }

  // An argument that takes what was given in a way of its own.
  Argument& Take(const char* names, const char* value, const char* help, decltype(Argument::take) take) {
    all_.push_back({.names = names, .value = value, .help = help, .choices = {}, .take = std::move(take)});
    return all_.back();
  }

  [[nodiscard]] const std::vector<Argument>& all() const { return all_; }

 private:
  // "--last: give a whole number from 1 on, not -5".
  static std::string NotANumber(const std::string& name, const std::string& text, std::uint64_t least, std::uint64_t most);
  std::vector<Argument> all_;
};

}  // namespace amem::tool
