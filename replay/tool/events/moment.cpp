#include "replay/tool/events/moment.h"

#include <cctype>
#include <charconv>
#include <ctime>
#include <string_view>
#include <utility>

namespace amem::tool {
namespace {

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// Takes a decimal number off the front; below zero: there is none.
double TakeNumber(std::string_view& text) {
  double number = -1;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (parsed.ec != std::errc() || text.front() == '-') return -1;
  text.remove_prefix(static_cast<std::size_t>(parsed.ptr - text.data()));
  return number;
}

// In seconds; below zero: not a unit.
double UnitSeconds(std::string_view unit) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1},        {"us", 1e-6},    {"ms", 1e-3}, {"s", 1},       {"sec", 1},      {"second", 1},
      {"seconds", 1}, {"m", 60},       {"min", 60},  {"minute", 60}, {"minutes", 60}, {"h", 3600},
      {"hour", 3600}, {"hours", 3600}, {"d", 86400}, {"day", 86400}, {"days", 86400}};
  for (const auto& [name, seconds] : kUnits) {
    if (name == unit) return seconds;
  }
  return -1;
}

std::optional<std::uint64_t> Nanoseconds(double seconds) {
  if (!(seconds >= 0) || seconds > 1.8e10) return std::nullopt;
  return static_cast<std::uint64_t>(seconds * 1e9);
}

// "2026-11-21", with or without a time behind it.
std::optional<GivenTime> ParseDate(std::string_view text) {
  if (text.ends_with("UTC")) text = Trimmed(text.substr(0, text.size() - 3));
  if (text.ends_with("Z")) text.remove_suffix(1);
  const std::string whole(text);
  for (const char* form : {"%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d"}) {
    std::tm parts{};
    const char* end = ::strptime(whole.c_str(), form, &parts);
    if (end == nullptr) continue;
    std::string_view rest(end);
    const double fraction = rest.starts_with('.') ? TakeNumber(rest) : 0;
    const std::time_t seconds = ::timegm(&parts);
    if (!rest.empty() || fraction < 0 || seconds < 0) continue;
    return GivenTime{true, static_cast<std::uint64_t>(seconds) * 1'000'000'000 + static_cast<std::uint64_t>(fraction * 1e9)};
  }
  return std::nullopt;
}

}  // namespace

std::optional<GivenTime> ParseTime(const std::string& text, std::uint64_t now_ns) {
  std::string_view rest = Trimmed(text);
  if (rest.empty() || rest.front() == '-' || rest.front() == '+') return std::nullopt;
  if (rest.size() > 4 && rest[4] == '-') return ParseDate(rest);
  const double number = TakeNumber(rest);
  rest = Trimmed(rest);
  const bool ago = rest.ends_with("ago") && rest.size() > 3;
  if (ago) rest = Trimmed(rest.substr(0, rest.size() - 3));
  const double unit = UnitSeconds(rest);
  if (number < 0 || unit < 0 || (ago && rest.empty())) return std::nullopt;
  const std::optional<std::uint64_t> ns = Nanoseconds(number * unit);
  if (!ns) return std::nullopt;
  return ago ? GivenTime{true, now_ns > *ns ? now_ns - *ns : 0} : GivenTime{false, *ns};
}

}  // namespace amem::tool
