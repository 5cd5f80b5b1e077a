// How the freezes of some sessions stand, for those who ask why a job does nothing, or has died.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace amem {

// A sentence without a full stop for the last freeze beside each of these session directories that concerns them: of a job that
// is frozen, half frozen, lost at a thaw, or whose processes ended meanwhile. Nothing of one that came back. Pids are looked up
// on this host.
std::vector<std::string> FreezeStandings(std::span<const std::filesystem::path> session_directories);

}  // namespace amem
