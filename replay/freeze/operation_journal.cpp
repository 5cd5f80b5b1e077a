#include "replay/freeze/operation_journal.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "journal/base/clock.h"
#include "journal/base/crc32c.h"
#include "journal/base/file.h"

namespace amem {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kJournalVersion = 1;
constexpr std::size_t kCrcDigits = 8;

std::string CrcOf(std::string_view text) { return fmt::format("{:08x}", Crc32c(std::as_bytes(std::span(text)))); }
std::string Dump(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }

Json ToJson(const FrozenProcess& one) {
  return {{"session", fmt::format("{:016x}", one.process.session.value)},
          {"pid", one.process.pid},
          {"start_ticks", one.process.start_ticks},
          {"name", one.process.name},
          {"directory", one.process.directory.string()},
          {"before_pause", one.before_pause}};
}

FrozenProcess ProcessFrom(const Json& json) {
  FrozenProcess one;
  const std::string session = json.at("session");
  std::from_chars(session.data(), session.data() + session.size(), one.process.session.value, 16);
  one.process.pid = json.at("pid");
  one.process.start_ticks = json.at("start_ticks");
  one.process.name = json.at("name");
  one.process.directory = json.at("directory").get<std::string>();
  one.before_pause = json.at("before_pause").get<std::map<std::string, Bytes>>();
  return one;
}

std::vector<GpuPair> PairsFrom(const Json& json) {
  std::vector<GpuPair> pairs;
  for (const Json& pair : json) pairs.push_back({pair.at(0), pair.at(1)});
  return pairs;
}

void ApplyLine(const Json& line, FreezeHistory& history) {
  const std::string what = line.at("what");
  const auto process = [&]() -> FrozenProcess* {
    const pid_t pid = line.at("pid");
    const auto it = std::ranges::find_if(history.processes, [&](const FrozenProcess& one) { return one.process.pid == pid; });
    return it == history.processes.end() ? nullptr : &*it;
  };
  if (what == "operation") {
    if (line.at("version") != kJournalVersion) throw std::runtime_error("it is of another version");
    history.begun_ns = line.at("realtime_ns");
    for (const Json& one : line.at("processes")) history.processes.push_back(ProcessFrom(one));
  } else if (what == "begin") {
    history.goal = line.at("goal") == ToText(FreezeGoal::kFrozen) ? FreezeGoal::kFrozen : FreezeGoal::kRunning;
    history.pairs = PairsFrom(line.at("gpus"));
    history.ended = false;
    history.outcome.clear();
  } else if (what == "taken") {
    if (FrozenProcess* one = process()) one->taken = line.at("bytes").get<std::map<std::string, Bytes>>();
  } else if (what == "step" || what == "failed") {
    history.pauses |= line.at("step") == ToText(FreezeStep::kPause);
    FrozenProcess* const one = process();
    if (line.at("step") == ToText(FreezeStep::kRestore) && one != nullptr) one->restore_unanswered = what == "step";
  } else if (what == "done") {
    const std::string step = line.at("step");
    FrozenProcess* const one = process();
    if (step == ToText(FreezeStep::kCheckpoint) && one != nullptr) one->from_ns = line.at("at_ns");
    if (step == ToText(FreezeStep::kRestore) && one != nullptr) {
      one->restore_unanswered = false;
      for (const GpuPair& pair : history.pairs) one->moved[pair.from] = pair.to;
    }
  } else if (what == "end") {
    history.ended = true;
    history.outcome = line.at("outcome");
  }
}

}  // namespace

std::string_view ToText(FreezeGoal goal) { return goal == FreezeGoal::kFrozen ? "frozen" : "running"; }

std::string_view ToText(FreezeStep step) {
  switch (step) {
    case FreezeStep::kPause:
      return "pause";
    case FreezeStep::kLock:
      return "lock";
    case FreezeStep::kCheckpoint:
      return "checkpoint";
    case FreezeStep::kRestore:
      return "restore";
    case FreezeStep::kUnlock:
      return "unlock";
    case FreezeStep::kResume:
      break;
  }
  return "resume";
}

namespace {

// Operations that came to their end, on sessions whose journals are gone as well.
void RemoveForgotten(const std::filesystem::path& directory) {
  std::error_code error;
  std::vector<std::filesystem::path> forgotten;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("freeze-") || !name.ends_with(".journal")) continue;
    const auto history = ReadFreezeJournal(entry.path());
    const auto gone = [&](const FrozenProcess& one) { return !std::filesystem::exists(one.process.directory, error); };
    if (history.ok() && history->ended && std::ranges::all_of(history->processes, gone)) forgotten.push_back(entry.path());
  }
  for (const auto& path : forgotten) std::filesystem::remove(path, error);
}

}  // namespace

// ---- writing ---------------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<FreezeJournal>> FreezeJournal::Make(const std::filesystem::path& directory,
                                                           std::span<const FrozenProcess> processes) {
  RemoveForgotten(directory);
  std::uint64_t id = 0;
  static_cast<void>(getrandom(&id, sizeof id, 0));  // so few bytes are never refused
  const auto path = directory / fmt::format("freeze-{:016x}.journal", id);
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) return SystemFailure("make the journal of the freeze", path, errno);
  std::unique_ptr<FreezeJournal> journal(new FreezeJournal(path, std::move(file)));
  Json all = Json::array();
  for (const FrozenProcess& one : processes) all.push_back(ToJson(one));
  AMEM_TRY(journal->Write(Dump({{"what", "operation"},
                                {"version", kJournalVersion},
                                {"realtime_ns", RealtimeNs()},
                                {"by_pid", ::getpid()},
                                {"processes", std::move(all)}})));
  const UniqueFd folder(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder || ::fsync(folder.get()) != 0) return SystemFailure("keep the journal of the freeze", directory, errno);
  return journal;
}

Result<std::unique_ptr<FreezeJournal>> FreezeJournal::Open(const std::filesystem::path& path) {
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW));
  if (!file) return SystemFailure("open the journal of the freeze", path, errno);
  std::unique_ptr<FreezeJournal> journal(new FreezeJournal(path, std::move(file)));
  // A line that was torn stays apart from what follows; empty lines are nothing.
  AMEM_TRY(journal->Write(""));
  return journal;
}

Status FreezeJournal::Write(const std::string& json) {
  const std::string line = json.empty() ? "\n" : CrcOf(json) + " " + json + "\n";
  const std::lock_guard lock(mutex_);
  if (::write(file_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()) || ::fdatasync(file_.get()) != 0) {
    return SystemFailure("write the journal of the freeze", path_, errno);
  }
  return {};
}

Status FreezeJournal::Begin(FreezeGoal goal, std::span<const GpuPair> pairs) {
  Json gpus = Json::array();
  for (const GpuPair& pair : pairs) gpus.push_back({pair.from, pair.to});
  return Write(Dump({{"what", "begin"},
                     {"goal", ToText(goal)},
                     {"gpus", std::move(gpus)},
                     {"by_pid", ::getpid()},
                     {"at_ns", MonotonicNs()}}));
}

Status FreezeJournal::BeginStep(FreezeStep step, pid_t pid) {
  return Write(Dump({{"what", "step"}, {"step", ToText(step)}, {"pid", pid}, {"at_ns", MonotonicNs()}}));
}

Status FreezeJournal::EndStep(FreezeStep step, pid_t pid, const Status& result) {
  Json line = {{"what", result.ok() ? "done" : "failed"}, {"step", ToText(step)}, {"pid", pid}, {"at_ns", MonotonicNs()}};
  if (!result.ok()) line["message"] = result.message();
  return Write(Dump(line));
}

Status FreezeJournal::Taken(pid_t pid, const std::map<std::string, Bytes>& bytes) {
  return Write(Dump({{"what", "taken"}, {"pid", pid}, {"bytes", bytes}}));
}

Status FreezeJournal::End(std::string_view outcome, std::string_view message) {
  return Write(Dump({{"what", "end"}, {"outcome", outcome}, {"message", message}, {"at_ns", MonotonicNs()}}));
}

// ---- reading ---------------------------------------------------------------------------------------------------------------

Result<FreezeHistory> ReadFreezeJournal(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) return SystemFailure("read the journal of the freeze", path, errno);
  FreezeHistory history;
  history.path = path;
  std::size_t number = 0, damaged = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.empty()) continue;
    const std::string_view json = std::string_view(line).substr(std::min(line.size(), kCrcDigits + 1));
    if (line.size() <= kCrcDigits || line.substr(0, kCrcDigits) != CrcOf(json)) {
      // The tool that wrote it died in it, and what it announced was not begun.
      damaged = number;
      continue;
    }
    try {
      ApplyLine(Json::parse(json), history);
    } catch (const std::exception& e) {
      return Status(Code::kCorrupt, fmt::format("the journal of the freeze {}, line {}: {}", path.string(), number, e.what()));
    }
  }
  if (history.processes.empty()) {
    return Status(Code::kCorrupt, fmt::format("the journal of the freeze {} names no process{}", path.string(),
                                              damaged != 0 ? "; its first line is damaged" : ""));
  }
  return history;
}

std::optional<FreezeHistory> LatestFreeze(const std::filesystem::path& directory,
                                          const std::function<bool(const RankProcess&)>& concerned) {
  std::optional<FreezeHistory> latest;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("freeze-") || !name.ends_with(".journal")) continue;
    auto history = ReadFreezeJournal(entry.path());
    if (!history.ok() || (latest && latest->begun_ns > history->begun_ns)) continue;
    if (std::ranges::any_of(history->processes, concerned, &FrozenProcess::process)) latest = *std::move(history);
  }
  return latest;
}

}  // namespace amem
