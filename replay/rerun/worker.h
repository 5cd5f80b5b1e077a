// The process of one session of a rerun: replays its journal as far as it is told. Questions and answers are packets of a
// socket; both ends are of the same build.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "journal/base/unique_fd.h"
#include "replay/peers/peers.h"
#include "replay/rerun/rank.h"
#include "statemachine/state.h"

namespace amem {

// What the process is told at its start.
struct RerunProcessOptions {
  std::filesystem::path journal;      // the session's directory
  PeerIdentity self;                  // of the session that is replayed
  std::set<SessionId> job;            // sessions with a process of this rerun; memory of others is made up
  std::set<SessionId> killed;         // those of them that were killed
  Secret secret{};                    // of this rerun
  std::filesystem::path scratch;      // of this rerun: sockets, and the simulated host
  std::vector<std::int32_t> devices;  // numbers on the host, by the session's ordinals
  std::int32_t devices_of_host = 0;   // the simulated one has one more, for absent owners
  Bytes capacity = 0;                 // of each simulated device
  bool cuda = false;
  std::optional<std::string> visible;  // CUDA_VISIBLE_DEVICES, as it was set for the whole rerun
};

struct RerunQuestion {
  enum class What : std::uint8_t { kBuildOwn, kBuildImports, kTake, kCompare, kLeaveOnly, kEnd } what{};
  std::uint64_t number = 0;  // the last event to take, the digest to compare, the bytes to leave
  DeviceOrdinal device;      // where
};
struct RerunAnswer : RerunRank::Outcome {
  RerunRank::Counts counts;
};
std::string ToText(const RerunAnswer& answer);
std::optional<RerunAnswer> ReadAnswer(std::string_view text);

// Answers until the other end closes. `start` is the state after which the replay begins.
void ServeRerun(const RerunProcessOptions& options, State start, UniqueFd socket);

}  // namespace amem
