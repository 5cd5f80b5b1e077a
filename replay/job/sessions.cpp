#include "replay/job/sessions.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "journal/journal.h"
#include "replay/job/pack.h"

namespace amem {

void SessionFinder::Add(std::vector<std::filesystem::path> sessions, Found& found) {
  for (auto& session : sessions) {
    if (std::ranges::find(found.sessions, session) == found.sessions.end()) found.sessions.push_back(std::move(session));
  }
}

void SessionFinder::Unpack(const std::filesystem::path& pack, Found& found) {
  const Result<std::filesystem::path> directory = scratch_.Get();
  Result<Unpacked> unpacked = directory ? amem::Unpack(pack, *directory / std::to_string(++packs_)) : directory.status();
  if (!unpacked) return found.problems.push_back(unpacked.status().message());
  std::ranges::move(unpacked->damage, std::back_inserter(found.problems));
  Add(std::move(unpacked->sessions), found);
}

SessionFinder::Found SessionFinder::Find(std::span<const std::filesystem::path> places) {
  Found found;
  for (const auto& place : places) {
    if (IsPack(place)) {
      Unpack(place, found);
    } else if (Result<std::vector<std::filesystem::path>> listed = ListSessions(place)) {
      if (listed->empty()) {
        found.problems.push_back(
            fmt::format("no session under {}: give a session's directory (it holds data.mdb) or one that "
                        "holds several; `amem-replay ls` shows this user's",
                        place.string()));
      }
      Add(*std::move(listed), found);
    } else {
      found.problems.push_back(listed.status().message());
    }
  }
  return found;
}

}  // namespace amem
