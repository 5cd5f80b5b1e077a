#include "replay/job/sessions.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <thread>
#include <utility>

#include "journal/base/file.h"
#include "journal/journal.h"
#include "replay/job/pack.h"

namespace amem {

namespace {

constexpr const char* kUnpackedFrom = "unpacked-from";  // a file beside the sessions in scratch

void AddPack(const std::filesystem::path& pack, ScratchDirectory& scratch, bool however_large, FoundSessions& found) {
  const Result<std::filesystem::path> directory = scratch.New();
  Result<Unpacked> unpacked = directory ? Unpack(pack, *directory, however_large) : directory.status();
  if (!unpacked) return found.problems.push_back(unpacked.status().message());
  if (const auto from = File::Open(*directory / kUnpackedFrom, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW))
    static_cast<void>(from->Write(PackName(pack)));  // without it the directory is named in its place
  // Where there is no session to say it, nothing of the pack could be read.
  auto& damage = unpacked->sessions.empty() ? found.problems : found.damage;
  std::ranges::transform(unpacked->damage, std::back_inserter(damage), IncompletePack);
  std::ranges::move(unpacked->sessions, std::back_inserter(found.sessions));
}

// Folders of hosts and of jobs lie above those of sessions, not much more. A place that holds very much else is not searched.
constexpr int kLevelsDown = 4;
constexpr std::size_t kFoldersMost = 20'000;

// What lies in a folder that is no session's: sessions, packs, or folders to look in. Links are not followed.
class Search {
 public:
  explicit Search(FoundSessions& found) : found_(found) {}

  Status In(const std::filesystem::path& folder, int levels = kLevelsDown) {
    AMEM_ASSIGN(auto listed, ListSessions(folder));
    std::ranges::for_each(listed, [this](auto& session) { AddOnce(std::move(session)); });
    if (!listed.empty()) return {};
    std::error_code failed;
    std::vector<std::filesystem::path> below;
    for (std::filesystem::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed)) {
      std::error_code ignored;
      if (entry->is_symlink(ignored)) continue;
      if (entry->is_directory(ignored) || entry->path().extension() == ".amem") below.push_back(entry->path());
    }
    std::ranges::sort(below);
    for (const auto& path : below) {
      std::error_code ignored;
      if (++folders_ > kFoldersMost) break;
      if (!std::filesystem::is_directory(path, ignored)) {
        if (IsPack(path)) AddOnce(path);
      } else if (levels > 0) {
        if (Status looked = In(path, levels - 1); !looked) found_.problems.push_back(looked.message());
      }
    }
    return {};
  }

 private:
  void AddOnce(std::filesystem::path session) {
    if (std::ranges::find(found_.sessions, session) == found_.sessions.end()) found_.sessions.push_back(std::move(session));
  }

  FoundSessions& found_;
  std::size_t folders_ = 0;
};

// Whether a session found earlier lies there.
bool Holds(std::span<const std::filesystem::path> sessions, const std::filesystem::path& place) {
  const std::string folder = (place / "").string();
  return std::ranges::any_of(sessions, [&](const auto& s) { return s == place || s.string().starts_with(folder); });
}

// A file of a session's directory stands for the directory.
std::filesystem::path Meant(const std::filesystem::path& place) {
  const bool file_of_session = place.filename() == "data.mdb" || place.filename() == "lock.mdb" || place.filename() == "tail";
  std::error_code failed;
  if (!file_of_session || std::filesystem::is_directory(place, failed)) return place;
  return place.has_parent_path() ? place.parent_path() : std::filesystem::path(".");
}

}  // namespace

FoundSessions FindPlaces(std::span<const std::filesystem::path> places) {
  FoundSessions found;
  for (const auto& given : places) {
    const std::filesystem::path place = Meant(given);
    if (IsPack(place)) {
      found.sessions.push_back(place);
      continue;
    }
    std::error_code ignored;
    if (std::filesystem::exists(place, ignored) && !std::filesystem::is_directory(place, ignored)) {
      found.problems.push_back(place.string() + " is neither a pack (`amem pack` makes one) nor a directory of journals");
      continue;
    }
    const std::size_t before = found.sessions.size();
    const Status searched = Search(found).In(place);
    if (!searched) {
      found.problems.push_back(searched.message());
    } else if (found.sessions.size() == before && !Holds(found.sessions, place)) {
      found.problems.push_back(fmt::format(
          "no session under {}: give a session's directory (it holds data.mdb), one that holds several, or a parent "
          "of such directories; `amem ls` shows this user's",
          place.string()));
    }
  }
  return found;
}

FoundSessions FindSessions(std::span<const std::filesystem::path> places, ScratchDirectory& scratch, bool however_large) {
  FoundSessions found = FindPlaces(places);
  for (auto& place : std::exchange(found.sessions, {}))
    IsPack(place) ? AddPack(place, scratch, however_large, found) : found.sessions.push_back(std::move(place));
  return found;
}

std::string PlaceOf(const std::filesystem::path& session) {
  const std::string pack = ReadSmallFile(session.parent_path() / kUnpackedFrom);
  return pack.empty() ? session.string() : pack;
}

std::string IncompletePack(const std::string& missing) { return "the pack is incomplete: " + missing; }

void SideBySide(std::size_t count, const std::function<void(std::size_t)>& read) {
  constexpr std::size_t kThreadsMost = 16;
  const std::size_t enough = std::min({count, kThreadsMost, std::size_t{std::max(1U, std::thread::hardware_concurrency())}});
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) read(i);
  };
  std::vector<std::jthread> threads;
  while (threads.size() + 1 < enough) threads.emplace_back(work);
  work();
}

}  // namespace amem
