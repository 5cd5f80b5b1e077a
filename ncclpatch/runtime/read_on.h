// Where to read on after a failed pause or resume, for the end of its message.
#pragma once

#include <filesystem>
#include <string>

namespace amem {

// "; journal DIR/SESSION; to see why: amem-replay why DIR". The command ends the message and is quoted for a shell.
std::string WhereToReadOn(const std::filesystem::path& session_directory);

}  // namespace amem
