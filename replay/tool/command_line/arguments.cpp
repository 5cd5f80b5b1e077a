#include "replay/tool/command_line/arguments.h"

#include <fmt/format.h>

#include <charconv>

namespace amem::tool {
namespace {

// "--last: give a whole number from 1 on, not -5".
std::string NotANumber(const Argument& argument, const std::string& text, std::uint64_t least, std::uint64_t most) {
  const std::string bounds = most != std::numeric_limits<std::uint64_t>::max() ? fmt::format(" from {} to {}", least, most)
                             : least != 0                                      ? fmt::format(" from {} on", least)
                                                                               : " of zero or more";
  return fmt::format("{}: give a whole number{}, not \"{}\"", argument.Names().back(), bounds, text);
}

}  // namespace

std::optional<std::uint64_t> WholeNumber(const std::string& text) {
  std::uint64_t number = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  return parsed.ec == std::errc() && parsed.ptr == end ? std::optional(number) : std::nullopt;
}

std::vector<std::string> SplitAtCommas(const std::vector<std::string>& lists) {
  std::vector<std::string> words;
  for (const std::string& list : lists) {
    for (std::size_t begin = 0; begin <= list.size();) {
      const std::size_t end = std::min(list.find(',', begin), list.size());
      words.push_back(list.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return words;
}

std::vector<std::string> Argument::Names() const { return SplitAtCommas({names}); }

Argument& Arguments::Take(const char* names, const char* value, const char* help,
                          std::function<void(const std::vector<std::string>&)> take) {
  all_.push_back({.names = names, .value = value, .help = help});
  all_.back().take = [take = std::move(take)](const std::vector<std::string>& given) { return take(given), std::string(); };
  return all_.back();
}

Argument& Arguments::Flag(const char* names, bool& target, const char* help) {
  return Take(names, "", help, [&target](const std::vector<std::string>&) { target = true; });
}

Argument& Arguments::Add(const char* names, const char* value, std::vector<std::string>& target, const char* help) {
  Argument& argument = Take(names, value, help, [&target](const std::vector<std::string>& given) { target = given; });
  argument.several = true;
  return argument;
}

Argument& Arguments::Add(const char* names, const char* value, std::optional<std::uint64_t>& target, const char* help) {
  return AddNumber(names, value, help, 0, std::numeric_limits<std::uint64_t>::max(),
                   [&target](std::uint64_t number) { target = number; });
}

Argument& Arguments::AddNumber(const char* names, const char* value, const char* help, std::uint64_t least, std::uint64_t most,
                               std::function<void(std::uint64_t)> set) {
  Argument& argument = Take(names, value, help, {});
  argument.take = [&argument, least, most, set = std::move(set)](const std::vector<std::string>& given) -> std::string {
    const std::optional<std::uint64_t> number = WholeNumber(given.back());
    if (!number || *number < least || *number > most) return NotANumber(argument, given.back(), least, most);
    set(*number);
    return {};
  };
  return argument;
}

}  // namespace amem::tool
