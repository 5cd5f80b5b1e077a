// Jobs: which of many sessions belong together. A directory of journals keeps those of earlier jobs, and of jobs that run
// beside each other; journals of one job come from several hosts.
//
// Sessions are one job when they met (connected as peers, shared memory, were members of one pause or resume), when they were
// ranks of one communicator, or when the same launcher started them. Clocks decide only about sessions that nothing else ties
// to any other: those that opened within a minute of each other, under ranks that are all different. That is good enough to
// explain journals; who is to be asked for something is decided by certain ties alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "replay/job/story/story.h"
#include "statemachine/event.h"

namespace amem {

// What ties a session to others.
struct JobTies {
  SessionOpened who;
  bool live = false;
  std::uint64_t last_ns = 0;  // up to when it is known to have lived, on the clock of its events
  std::set<SessionId> met;
  std::map<SessionId, Peer> shares_with;         // those that it is connected with and shares NCCL's memory with now
  std::vector<CommunicatorReady> communicators;  // those with a hash
  std::string launch;  // not empty: sessions with the same one are ranks of one start by one launcher; not in the journal
  std::filesystem::path directory = {};  // of its journal, if that was read for this
};
JobTies TiesOf(const SessionStory& history);
// Of a journal that is not read otherwise. A failure means that its state could not be computed.
Result<JobTies> ReadTies(const std::filesystem::path& session);
// Of several, side by side. Those that cannot be read are put into `unreadable`.
std::vector<JobTies> ReadTies(std::span<const std::filesystem::path> sessions, std::vector<std::filesystem::path>& unreadable);

// kCertain: having met, a communicator, a launch. kProbable: the launcher's words and the clocks as well.
enum class Ties : std::uint8_t { kCertain, kProbable };

// The sessions of each job, as indices into `sessions`; the job that went on for longest first.
std::vector<std::vector<std::size_t>> GroupIntoJobs(std::span<const JobTies> sessions, Ties ties = Ties::kProbable);

// Journals that cannot be read count as the latest job's own, so that their damage is reported.
struct JobSelection {
  std::vector<std::filesystem::path> latest;
  std::vector<std::filesystem::path> earlier;
};
JobSelection SelectLatestJob(std::span<const std::filesystem::path> sessions);

}  // namespace amem
