#include "replay/job/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "replay/job/event_json.h"

namespace amem {
namespace {

// In the time zone of whoever reads (TZ); `format` as strftime has it. Empty: not a time.
std::string Local(std::uint64_t wall_ns, const char* format) {
  const auto seconds = static_cast<std::time_t>(wall_ns / 1'000'000'000);
  std::tm local{};
  if (wall_ns == 0 || !::localtime_r(&seconds, &local)) return {};
  char text[40];
  return {text, std::strftime(text, sizeof text, format, &local)};
}

std::string Date(std::uint64_t wall_ns) { return Local(wall_ns, "%Y-%m-%d %H:%M:%S"); }

std::string Zone(std::uint64_t wall_ns) {
  const std::string zone = Local(wall_ns, "%z");
  return zone == "+0000" ? "UTC" : zone;
}

}  // namespace

std::string NameOf(const SessionOpened& opened) {
  if (opened.pid == 0) return ShortNameOf(opened);
  const std::string process =
      opened.host.empty() ? fmt::format("pid {}", opened.pid) : fmt::format("pid {} on host {}", opened.pid, opened.host);
  return opened.rank < 0 ? process : fmt::format("rank {} ({})", opened.rank, process);
}

std::string ShortNameOf(const SessionOpened& opened) {
  if (opened.rank >= 0) return fmt::format("rank {}", opened.rank);
  return opened.pid != 0 ? fmt::format("pid {}", opened.pid) : "session " + SessionText(opened.session);
}

std::string GpuOf(const SessionOpened& opened, std::int32_t ordinal) {
  const auto index = static_cast<std::size_t>(ordinal);
  return ordinal >= 0 && index < opened.gpu_uuids.size() ? opened.gpu_uuids[index] : GpuName();
}

void JobNames::Add(const SessionOpened& opened) {
  if (!sessions_.try_emplace(opened.session, opened).second) return;
  if (opened.rank >= 0) ++of_rank_[opened.rank];
}

void JobNames::AddPeersOf(const State& state) {
  for (const auto& [session, peer] : state.peers)
    Add({.session = session, .host = peer.host, .pid = peer.pid, .rank = peer.rank});
}

bool JobNames::OnlyOneHas(std::int32_t rank) const {
  const auto found = of_rank_.find(rank);
  return found != of_rank_.end() && found->second == 1;
}

std::int32_t JobNames::RankOf(SessionId session) const {
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? -1 : found->second.rank;
}

std::string JobNames::Name(SessionId session) const {
  const auto found = sessions_.find(session);
  return NameOf(found == sessions_.end() ? SessionOpened{.session = session} : found->second);
}

std::string JobNames::ShortName(SessionId session) const {
  const std::int32_t rank = RankOf(session);
  return OnlyOneHas(rank) ? fmt::format("rank {}", rank) : Name(session);
}

std::string JobNames::Names(std::vector<SessionId> sessions) const {
  std::ranges::sort(sessions, {}, [this](SessionId s) { return std::pair(RankOf(s), s); });
  const bool ranks =
      sessions.size() > 1 && std::ranges::all_of(sessions, [this](SessionId s) { return OnlyOneHas(RankOf(s)); });
  if (ranks) {
    std::vector<std::int32_t> numbers;
    for (const SessionId s : sessions) numbers.push_back(RankOf(s));
    return "ranks " + Listed(InRanges(numbers));
  }
  constexpr std::size_t kNamesMost = 16;
  std::vector<std::string> words;
  for (const SessionId s : sessions) {
    if (words.size() == kNamesMost && sessions.size() > kNamesMost + 1) {
      words.push_back(fmt::format("{} more", sessions.size() - kNamesMost));
      break;
    }
    words.push_back(ShortName(s));
  }
  return Listed(words);
}

std::vector<std::string> InRanges(const std::vector<std::int32_t>& ascending) {
  constexpr std::size_t kShortest = 4;  // "0 to 3"; fewer are listed
  std::vector<std::string> words;
  for (std::size_t i = 0; i < ascending.size();) {
    std::size_t end = i + 1;
    while (end < ascending.size() && ascending[end] == ascending[end - 1] + 1) ++end;
    if (end - i >= kShortest) {
      words.push_back(fmt::format("{} to {}", ascending[i], ascending[end - 1]));
    } else {
      for (std::size_t k = i; k < end; ++k) words.push_back(std::to_string(ascending[k]));
    }
    i = end;
  }
  return words;
}

// ---- numbers and times -----------------------------------------------------------------------------------------------------

std::string NameOf(CommunicatorId id, const Communicator& c, const std::map<CommunicatorId, Communicator>& others) {
  std::string name = c.hash != 0 ? Hex(c.hash) : ToText(id);
  name +=
      ", " + (c.ranks > 0 ? Plural(static_cast<std::uint64_t>(c.ranks), "rank") : std::string("ranks unknown")) + ", " + c.how;
  if (const auto parent = others.find(c.parent); parent != others.end() && parent->second.hash != 0)
    name += " of " + Hex(parent->second.hash);
  if (c.suspended) name += ", suspended";
  if (!c.ended.empty()) name += ", " + c.ended;
  return name;
}

PhaseKind ArrivalOf(CycleKind kind) { return kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive; }

std::string_view PhaseWord(PhaseKind phase) {
  const std::string_view text = ToText(phase);
  return text.substr(text.find(' ') + 1);
}

bool IsUndo(PhaseKind phase, CycleKind of) { return (phase >= PhaseKind::kResumeArrive) != (of == CycleKind::kResume); }

std::string Grouped(std::uint64_t number) {
  std::string digits = std::to_string(number);
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ' ');
  return digits;
}

std::string Plural(std::uint64_t number, std::string_view one, std::string_view many) {
  if (number == 1 || !many.empty()) return fmt::format("{} {}", Grouped(number), number == 1 ? one : many);
  return fmt::format("{} {}s", Grouped(number), one);
}

std::string Listed(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " and " : ", ";
    text += words[i];
  }
  return text;
}

std::string CutTo(std::string text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0U) == 0x80U) --bytes;
  text.resize(bytes);
  return text;
}

std::vector<std::string> TableLines(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::vector<std::string> lines;
  for (const auto& row : rows) {
    std::string& line = lines.emplace_back();
    for (std::size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}", row[i], widths[i] + 2);
    line.erase(line.find_last_not_of(' ') + 1);
  }
  return lines;
}

std::string DurationText(std::uint64_t ns) {
  const double seconds = static_cast<double>(ns) / 1e9;
  if (ns >= 60'000'000'000) return fmt::format("{} min {} s", ns / 60'000'000'000, ns / 1'000'000'000 % 60);
  if (ns >= 1'000'000'000) return fmt::format("{:.1f} s", seconds);
  return ns >= 1'000'000 ? fmt::format("{:.0f} ms", seconds * 1e3) : fmt::format("{:.0f} us", seconds * 1e6);
}

std::string WallText(std::uint64_t wall_ns) {
  const std::string date = Date(wall_ns);
  return date.empty() ? "unknown time" : fmt::format("{}.{:03} {}", date, wall_ns / 1'000'000 % 1000, Zone(wall_ns));
}

std::string PreciseText(std::uint64_t wall_ns) {
  const std::string date = Date(wall_ns);
  return date.empty() ? "unknown time" : fmt::format("{}.{:06}", date, wall_ns / 1'000 % 1'000'000);
}

std::string DateText(std::uint64_t wall_ns) {
  const std::string date = Date(wall_ns);
  return date.empty() ? "unknown" : date + " " + Zone(wall_ns);
}

}  // namespace amem
