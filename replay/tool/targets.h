// What a command is given to read, made into directories of sessions (Targets in command.h).
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "replay/job/scratch_directory.h"
#include "replay/tool/command.h"

namespace amem::tool {

// Where the targets are, as FindSessions of replay/job takes it: what is on standard input is a file in `scratch`, and a pid, a
// job or a session's id the directories of its sessions. What is none of these is complained about.
std::vector<std::filesystem::path> PlacesOf(const Targets& targets, ScratchDirectory& scratch);

// From now on the process ends, with a message and kCannotRead, when it takes more than 256 MiB of memory or 10 s, each for
// every megabyte of the packs among `places`: a pack of a megabyte can hold journals that take hours to fold or gigabytes to
// draw, by accident or because somebody made it so. Without a pack nothing is watched. `scratch` is removed then, too.
void KeepWithinBudget(std::span<const std::filesystem::path> places, ScratchDirectory& scratch);

// What is on standard input, as a file in `scratch`. kInvalid: standard input is a terminal, or not what `pack` writes.
Result<std::filesystem::path> PackFromStandardInput(ScratchDirectory& scratch);

// The sessions of those ranks; complains where there is none.
std::vector<std::filesystem::path> OfRanks(std::vector<std::filesystem::path> sessions, const std::vector<std::string>& ranks);

// Whether its process lives. Of a pack only whether it lived then can be known.
bool LivesNow(const JournalInfo& info);
std::string_view StatusText(const JournalInfo& info);  // "packed" where it lived when it was packed

// What the journals take on disk; what cannot be looked at counts as nothing.
Bytes BytesOf(std::span<const std::filesystem::path> sessions);

// Whether the launcher calls the job so, in a variable that tells jobs apart.
bool LaunchedAs(const SessionOpened& who, const std::string& id);
bool DescendsFrom(std::int32_t pid, std::uint64_t ancestor);

}  // namespace amem::tool
