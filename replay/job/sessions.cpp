#include "replay/job/sessions.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <thread>

#include "journal/journal.h"
#include "replay/job/pack.h"

namespace amem {

namespace {

void AddPack(const std::filesystem::path& pack, ScratchDirectory& scratch, bool however_large, FoundSessions& found) {
  const Result<std::filesystem::path> directory = scratch.New();
  Result<Unpacked> unpacked = directory ? Unpack(pack, *directory, however_large) : directory.status();
  if (!unpacked) return found.problems.push_back(unpacked.status().message());
  std::ranges::move(unpacked->damage, std::back_inserter(found.problems));
  std::ranges::move(unpacked->sessions, std::back_inserter(found.sessions));
}

}  // namespace

FoundSessions FindSessions(std::span<const std::filesystem::path> places, ScratchDirectory& scratch, bool however_large) {
  FoundSessions found;
  for (const auto& place : places) {
    if (IsPack(place)) {
      AddPack(place, scratch, however_large, found);
    } else if (Result<std::vector<std::filesystem::path>> listed = ListSessions(place)) {
      if (listed->empty()) {
        found.problems.push_back(
            fmt::format("no session under {}: give a session's directory (it holds data.mdb) or one that "
                        "holds several; `amem-replay ls` shows this user's",
                        place.string()));
      }
      for (auto& session : *listed) {
        if (std::ranges::find(found.sessions, session) == found.sessions.end()) found.sessions.push_back(std::move(session));
      }
    } else {
      found.problems.push_back(listed.status().message());
    }
  }
  return found;
}

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
