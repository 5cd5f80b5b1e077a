// A session of a rerun in a process of its own, as in the job: on the simulator with memory that processes share, or on CUDA.
//
// The process reads the journal itself and is told how far to go; what it imports comes from the owner's process as a
// descriptor over Unix sockets (replay/unix_peers.h). It ends with the object, or with this process.
//
// Not for several threads at once; make all of them before this process has threads.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "journal/base/unique_fd.h"
#include "journal/journal.h"
#include "replay/peers/peers.h"
#include "replay/rerun/rank.h"

namespace amem {

struct RerunProcessOptions {
  std::filesystem::path journal;      // the session's directory
  PeerIdentity self;                  // of the session that is replayed
  std::set<SessionId> job;            // whose processes can be asked; others' memory is made up
  std::set<SessionId> killed;         // of these
  Secret secret{};                    // of this rerun
  std::filesystem::path scratch;      // of this rerun: sockets, and the simulated host
  std::vector<std::int32_t> devices;  // of the host, by the session's ordinals
  std::int32_t devices_of_host = 0;   // the simulated one has one more, for absent owners
  Bytes capacity = 0;                 // of each simulated device
  bool cuda = false;
  std::optional<std::string> visible;  // CUDA_VISIBLE_DEVICES, as it was set for the whole rerun
};

class RerunProcess final : public RerunRank {
 public:
  static Result<std::unique_ptr<RerunProcess>> Start(const RerunProcessOptions& options, State start);
  ~RerunProcess() override;

  Status BuildOwn() override;
  Status BuildImports() override;
  Outcome Take(const Event& event, bool now) override;
  Outcome Settle() override;
  Status Compare() override;
  Status LeaveOnly(DeviceOrdinal device, Bytes bytes) override;
  [[nodiscard]] const State& recorded() const override { return recorded_; }
  [[nodiscard]] Counts counts() const override { return counts_; }

 private:
  RerunProcess(pid_t pid, UniqueFd socket, State start) : pid_(pid), socket_(std::move(socket)), recorded_(std::move(start)) {}
  struct Answer;
  Result<Answer> Ask(const std::string& question);
  Status AskFor(const std::string& question);

  const pid_t pid_;
  UniqueFd socket_;
  State recorded_;  // as this process reads it
  SequenceNumber put_off_;
  Counts counts_;
};

}  // namespace amem
