// A session of a rerun in a process of its own, as in the job: on the simulator with memory that processes share, or on CUDA.
//
// The process reads the journal itself and is told how far to go; what it imports comes from the owner's process as a
// descriptor over Unix sockets (replay/peers/unix). It ends with the object, or with this process.
//
// Not for several threads at once. All processes must be started before this one has threads.
#pragma once

#include <sys/types.h>

#include <memory>

#include "journal/base/unique_fd.h"
#include "replay/rerun/rank.h"
#include "replay/rerun/worker.h"

namespace amem {

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
  Outcome Ask(const RerunQuestion& question);

  const pid_t pid_;
  UniqueFd socket_;
  State recorded_;  // folded here from the same journal
  SequenceNumber put_off_;
  Counts counts_;
};

}  // namespace amem
