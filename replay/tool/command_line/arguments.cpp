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

std::vector<std::string> Argument::Names() const {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= names.size();) {
    const std::size_t end = std::min(names.find(',', begin), names.size());
    parts.push_back(names.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Argument& Arguments::Describe(const char* names, const char* value, const char* help) {
  all_.push_back({.names = names, .value = value, .help = help});
  return all_.back();
}

Argument& Arguments::Flag(const char* names, bool& target, const char* help) {
  Argument& argument = Describe(names, "", help);
  argument.take = [&target](const std::vector<std::string>&) { return target = true, std::string(); };
  return argument;
}

Argument& Arguments::Add(const char* names, const char* value, std::string& target, const char* help) {
  Argument& argument = Describe(names, value, help);
  argument.take = [&target](const std::vector<std::string>& given) { return target = given.back(), std::string(); };
  return argument;
}

Argument& Arguments::Add(const char* names, const char* value, std::filesystem::path& target, const char* help) {
  Argument& argument = Describe(names, value, help);
  argument.take = [&target](const std::vector<std::string>& given) { return target = given.back(), std::string(); };
  return argument;
}

Argument& Arguments::Add(const char* names, const char* value, std::vector<std::string>& target, const char* help) {
  Argument& argument = Describe(names, value, help);
  argument.several = true;
  argument.take = [&target](const std::vector<std::string>& given) { return target = given, std::string(); };
  return argument;
}

Argument& Arguments::Add(const char* names, const char* value, std::optional<std::uint64_t>& target, const char* help) {
  return AddNumber(names, value, help, 0, std::numeric_limits<std::uint64_t>::max(),
                   [&target](std::uint64_t number) { target = number; });
}

Argument& Arguments::AddNumber(const char* names, const char* value, const char* help, std::uint64_t least, std::uint64_t most,
                               std::function<void(std::uint64_t)> set) {
  Argument& argument = Describe(names, value, help);
  argument.take = [&argument, least, most, set = std::move(set)](const std::vector<std::string>& given) -> std::string {
    const std::optional<std::uint64_t> number = WholeNumber(given.back());
    if (!number || *number < least || *number > most) return NotANumber(argument, given.back(), least, most);
    set(*number);
    return {};
  };
  return argument;
}

}  // namespace amem::tool
