// One session of a rerun, replayed in this process (session.h) or in one of its own: on the simulator with memory that
// processes share, or on CUDA.
//
// That process reads the journal itself and is told how far to go; what it imports comes from the owner's process as a
// descriptor over Unix sockets (replay/peers/unix). Questions and answers are packets of a socket; both ends are of the same
// build.
#pragma once

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "journal/base/unique_fd.h"
#include "replay/peers/peers.h"
#include "statemachine/state.h"

namespace amem {

class RerunRank {
 public:
  virtual ~RerunRank() = default;

  // Builds what the session began with, from its snapshot: own memory of all sessions first, so that it can be imported.
  virtual Status BuildOwn() = 0;
  virtual Status BuildImports() = 0;

  struct Outcome {
    Status failure;           // of the replay itself, which cannot go on; not the result of a call
    SequenceNumber event;     // the one that all below is about
    Status mismatch;          // the event cannot follow, or its result differs; the message is the replayed side
    std::string what;         // was compared: "result of step ..."
    bool reproduced = false;  // a failure that was recorded happened again
  };
  // Replays an event. Without `now` the event may be put off until a later Take or Settle, which then returns its outcome.
  virtual Outcome Take(const Event& event, bool now) = 0;
  virtual Outcome Settle() = 0;
  // OK: the state is sound, and the driver holds what the state says.
  virtual Status Compare() = 0;
  // Takes all memory of the device but this, as if another program held it.
  virtual Status LeaveOnly(DeviceOrdinal device, Bytes bytes) = 0;

  [[nodiscard]] virtual const State& recorded() const = 0;
  struct Counts {
    std::uint64_t events = 0, calls = 0, steps = 0;
    std::uint64_t elsewhere = 0;  // address ranges that the driver would not reserve where they were
  };
  [[nodiscard]] virtual Counts counts() const = 0;
};

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

// The process ends with the object, or with this process. Not for several threads at once. All processes must be started before
// this one has threads. `start` is the state after which the replay begins.
Result<std::unique_ptr<RerunRank>> StartRerunProcess(const RerunProcessOptions& options, State start);
// What it does: answers until the other end closes.
void ServeRerun(const RerunProcessOptions& options, State start, UniqueFd socket);

}  // namespace amem
