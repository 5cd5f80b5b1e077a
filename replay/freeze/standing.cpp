#include "replay/freeze/standing.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <map>
#include <optional>
#include <set>

#include "journal/base/process_stat.h"
#include "replay/freeze/host.h"
#include "replay/freeze/operation_journal.h"

namespace amem {
namespace {

std::optional<SessionId> SessionOf(const std::filesystem::path& directory) {
  const std::string name = directory.filename();
  SessionId session;
  const auto parsed = std::from_chars(name.data(), name.data() + name.size(), session.value, 16);
  return parsed.ec == std::errc() ? std::optional(session) : std::nullopt;
}

// Its sessions are elsewhere, as those of a pack are: where they ran they may have gone on since.
bool IsCopy(const FreezeHistory& history) {
  std::error_code gone;
  const std::filesystem::path home = history.processes.front().process.directory.parent_path();
  return !std::filesystem::equivalent(home, history.path.parent_path(), gone) || gone;
}

// Of those whose number is another process's now, or nobody's.
std::string EndedMeanwhile(const FreezeHistory& history) {
  std::string gone;
  for (const FrozenProcess& one : history.processes) {
    if (StartTicks(one.process.pid) == one.process.start_ticks) continue;
    gone += fmt::format("{}{} (pid {})", gone.empty() ? "" : ", ", one.process.name, one.process.pid);
  }
  return gone;
}

std::string SentenceOf(const FreezeHistory& history) {
  if (IsBack(history)) return {};
  const bool copy = IsCopy(history);
  const auto begun =
      std::chrono::time_point<std::chrono::system_clock, std::chrono::nanoseconds>(std::chrono::nanoseconds(history.begun_ns));
  const std::string when = fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", std::chrono::floor<std::chrono::seconds>(begun));
  std::string text;
  if (!history.ended) {
    text = fmt::format(
        "a {} that was begun with the freeze at {} {}: unless its tool is still at work, amem freeze --continue "
        "finishes it, and amem freeze --undo goes back",
        history.goal == FreezeGoal::kFrozen ? "freeze" : "thaw", when,
        copy ? "had not come to its end when this copy of its journal was made" : "has not come to its end");
  } else if (history.outcome == "frozen") {
    text = fmt::format(
        "the job was frozen at {}: the driver keeps its GPU memory in host memory, and its calls wait; amem thaw "
        "brings it back",
        when);
  } else if (history.outcome == "lost") {
    text = fmt::format("at the thaw after the freeze at {} a process was lost, and the others came back without it", when);
  } else {
    text = fmt::format("the thaw after the freeze at {} stopped half way; amem thaw tries again", when);
  }
  if (copy) return text + "; " + history.path.filename().string() + " has the steps";
  const std::string gone = EndedMeanwhile(history);
  if (!gone.empty()) text += "; ended meanwhile, with what it had on GPUs: " + gone;
  return text + "; " + history.path.string() + " has the steps";
}

}  // namespace

std::vector<std::string> FreezeStandings(std::span<const std::filesystem::path> session_directories) {
  std::map<std::filesystem::path, std::set<SessionId>> folders;
  for (const auto& directory : session_directories) {
    if (const auto session = SessionOf(directory)) folders[directory.parent_path()].insert(*session);
  }
  std::vector<std::string> sentences;
  for (const auto& [folder, sessions] : folders) {
    const auto last =
        LatestFreeze(folder, [&sessions = sessions](const RankProcess& process) { return sessions.contains(process.session); });
    std::string sentence = last ? SentenceOf(*last) : "";
    if (!sentence.empty()) sentences.push_back(std::move(sentence));
  }
  return sentences;
}

}  // namespace amem
