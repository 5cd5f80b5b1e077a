// Sessions: the directories of sessions that a command is given, whichever way they are named.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/job/output_file.h"

namespace amem {

struct FoundSessions {
  std::vector<std::filesystem::path> sessions;  // directories, each once
  std::vector<std::string> problems;            // places that hold none, or could not be read
  std::vector<std::string> damage;              // of packs that were read in part; their sessions say so themselves, too
};
// Each place is the directory of a session or a file in it, a directory that holds several, a parent of such directories or of
// packs (some levels up), or a pack (pack.h); packs are unpacked into `scratch`.
// `however_large`: see pack.h.
FoundSessions FindSessions(std::span<const std::filesystem::path> places, ScratchDirectory& scratch,
                           bool however_large = false);

// The same without unpacking: packs are among the sessions.
FoundSessions FindPlaces(std::span<const std::filesystem::path> places);

// Where a person finds that session: in its directory, or in the pack that it was unpacked from for a command.
std::string PlaceOf(const std::filesystem::path& session);

// "the pack is incomplete: " and what is missing, which names the pack.
std::string IncompletePack(const std::string& missing);
// Whether its process has ended, so that it holds no memory any more, whatever its journal says.
[[nodiscard]] constexpr bool HasEnded(SessionStatus status) {
  return status == SessionStatus::kClosed || status == SessionStatus::kCrashed;
}

// Calls `read` with each number below `count`, on several threads: every journal has files of its own.
void SideBySide(std::size_t count, const std::function<void(std::size_t)>& read);

}  // namespace amem
