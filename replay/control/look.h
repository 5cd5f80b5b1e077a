// What is said of a rank, from its page, /proc and its journal.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>

#include "replay/control/page.h"

namespace amem::control {

std::string NameOfRank(const Page& page);  // "rank 2", or "pid 4711"
bool ProcessLives(const Page& page);       // seen from this pid namespace
// From the page alone: "paused, waits in safe point 12".
std::string Doing(const Page& page, bool alive);
// What a rank that did not come does: its main thread, the last events of its journal, a pause or resume under way. Takes some
// milliseconds, with a long journal more.
std::string DoingInDetail(const Page& page, const std::filesystem::path& directory);

}  // namespace amem::control
