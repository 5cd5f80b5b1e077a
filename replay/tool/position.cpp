#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <string_view>
#include <utility>

#include "journal/base/clock.h"
#include "replay/job/clock.h"
#include "replay/tool/command.h"

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
  for (const auto& [name, seconds] : kUnits)
    if (name == unit) return seconds;
  return -1;
}

// Seconds since 1970. `zone`: "UTC", "+0100", "Z"; empty: local time. Below zero: it is none.
std::time_t SecondsOf(std::tm parts, std::string_view zone) {
  parts.tm_isdst = -1;
  if (zone.empty()) return ::mktime(&parts);
  std::tm offset{};
  const std::string text(zone == "UTC" ? "Z" : zone);
  const char* end = ::strptime(text.c_str(), "%z", &offset);
  return end == nullptr || *end != '\0' ? -1 : ::timegm(&parts) - offset.tm_gmtoff;
}

// "2026-11-21", with or without a time and a zone behind it.
std::optional<Position> ParseDate(std::string_view text) {
  const std::string whole(text);
  for (const char* form : {"%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d"}) {
    std::tm parts{};
    const char* end = ::strptime(whole.c_str(), form, &parts);
    if (end == nullptr) continue;
    std::string_view rest(end);
    const double fraction = rest.starts_with('.') ? TakeNumber(rest) : 0;
    const std::time_t seconds = SecondsOf(parts, Trimmed(rest));
    if (fraction < 0 || seconds < 0) continue;
    const auto ns = static_cast<std::uint64_t>(fraction * 1e9);
    return Position{.wall = true, .ns = static_cast<std::uint64_t>(seconds) * 1'000'000'000 + ns};
  }
  return std::nullopt;
}

std::optional<Position> ParseTime(std::string_view rest, std::uint64_t now_ns) {
  if (rest.empty() || rest.front() == '-' || rest.front() == '+') return std::nullopt;
  if (rest.size() > 4 && rest[4] == '-') return ParseDate(rest);
  const double number = TakeNumber(rest);
  rest = Trimmed(rest);
  const bool ago = rest.ends_with("ago") && rest.size() > 3;
  if (ago) rest = Trimmed(rest.substr(0, rest.size() - 3));
  const double unit = UnitSeconds(rest);
  if (number < 0 || unit < 0 || !(number * unit <= 1.8e10) || (ago && rest.empty())) return std::nullopt;
  const auto ns = static_cast<std::uint64_t>(number * unit * 1e9);
  return Position{.wall = ago, .ns = ago ? now_ns - std::min(now_ns, ns) : ns};
}

// `now`: the wall clock, from which "ago" counts. Nothing: it is none.
std::optional<Position> ParsePosition(const std::string& text, std::uint64_t now_ns) {
  const std::size_t mark = text.find('#');
  if (mark == std::string::npos) return ParseTime(Trimmed(text), now_ns);
  const auto seq = WholeNumber(text.substr(mark + 1)), rank = WholeNumber(text.substr(0, mark));
  if (!seq || (mark != 0 && (!rank || *rank > INT32_MAX))) return std::nullopt;
  Position position{.seq = SequenceNumber{*seq}};
  if (rank) position.rank = static_cast<std::int32_t>(*rank);
  return position;
}

constexpr const char* kPositionsKnown =
    "give an event (#17, or 2#17 of rank 2), seconds since the opening (12.5), a time ago (\"90 s ago\", \"10 min ago\", \"2 h "
    "ago\", \"1 day ago\"), or a date and time (\"2026-11-21 20:20:58\", with UTC or +0100 behind it where it is not local)";

}  // namespace

Argument& AddPosition(Arguments& arguments, const char* name, std::vector<Position>& target, const char* help) {
  return arguments.Take(name, kPosition, help, [name, &target](const std::vector<std::string>& given) -> std::string {
    for (const std::string& text : given) {
      std::optional<Position> position = ParsePosition(text, RealtimeNs());
      if (!position) return fmt::format("{}: \"{}\" is not a position: {}", name, text, kPositionsKnown);
      position->text = text;
      target.push_back(*std::move(position));
    }
    return {};
  });
}

Result<JournalReader*> JournalOf(const Position& position, std::span<const std::unique_ptr<JournalReader>> journals) {
  for (const auto& reader : journals) {
    if (!position.rank && journals.size() == 1) return reader.get();
    const Result<Opening> opening = ReadOpening(*reader);
    if (position.rank && opening && opening->who.rank == *position.rank) return reader.get();
  }
  if (position.rank) return Status{Code::kInvalid, fmt::format("there is no journal of rank {} here", *position.rank)};
  return Status{Code::kInvalid,
                fmt::format("{} of which journal? give RANK#SEQ, as in 2#{}", position.seq->value, position.seq->value)};
}

Result<SequenceNumber> EventAt(const Position& position, JournalReader& reader) {
  if (position.seq) return *position.seq;
  AMEM_ASSIGN(const auto opening, ReadOpening(reader));
  const SessionOpened& who = opening.who;
  const std::int64_t wall =
      WrappedDifference(static_cast<std::int64_t>(who.realtime_ns), static_cast<std::int64_t>(who.monotonic_ns));
  const std::int64_t until = position.wall ? WrappedDifference(static_cast<std::int64_t>(position.ns), wall)
                                           : WrappedSum(who.monotonic_ns, static_cast<std::int64_t>(position.ns));
  SequenceNumber last;
  const auto read = reader.Read(opening.info.first, kToTheEnd, [&](const Event& event) {
    const bool before = static_cast<std::int64_t>(event.time_ns) <= until;
    if (before) last = event.seq;
    return before;
  });
  if (!read) return read.status();
  if (last) return last;
  return Status{Code::kInvalid, "no event lies before that time; the first is " + std::to_string(opening.info.first.value)};
}

Result<std::optional<SequenceNumber>> EventAt(const std::vector<Position>& position, JournalReader& reader) {
  if (position.empty()) return std::optional<SequenceNumber>();
  AMEM_ASSIGN(const auto seq, EventAt(position.front(), reader));
  return std::optional(seq);
}

Result<std::uint64_t> WallTimeOf(SequenceNumber seq, JournalReader& reader) {
  AMEM_ASSIGN(const auto opening, ReadOpening(reader));
  AMEM_ASSIGN(const auto event, ReadEvent(reader, seq));
  if (event) return event->time_ns - opening.who.monotonic_ns + opening.who.realtime_ns;
  return Status{Code::kInvalid, fmt::format("there is no event {}; the last is {}", seq.value, opening.info.last.value)};
}

}  // namespace amem::tool
