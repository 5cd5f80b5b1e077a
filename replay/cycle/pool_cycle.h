// Pauses and resumes of one pool: its plans, carried out here alone, with copies in a lane of its own. No other session takes
// part, so there are no votes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "replay/cycle/backup.h"
#include "replay/cycle/executor.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "statemachine/plan.h"

namespace amem {

// Pause and Resume are for one thread at a time, everything else for any.
class PoolCycle {
 public:
  // All must outlive it. `pool` is open.
  static Result<std::unique_ptr<PoolCycle>> Open(Ledger& ledger, Driver& driver, Peers& peers, PoolId pool);

  // Both do nothing where the pool stands so already, and can be called again after a failure: what was done has been undone
  // then as far as the driver allowed, no contents are lost, and the message names the tag.
  //
  // `after` null: waits until the devices of the pool are idle, and looks for what is not zero. Else contents are copied whole,
  // without kernels, after that moment of a stream; no other stream is waited for.
  Status Pause(const StreamMoment* after = nullptr);
  // `queued` is called once all memory is back and all copies to it are queued (Lead).
  Status Resume(const std::function<void()>& queued = {});
  // Lets a stream wait for the copies that are queued now.
  Status Lead(void* stream);
  // What the stream holds now. On the pool's first device, if the thread has no current context. Of a pool that holds nothing
  // it stands for nothing.
  Result<std::unique_ptr<StreamMoment>> MomentOf(void* stream);

  // Host memory, as of Backup.
  [[nodiscard]] Bytes Expected(Bytes contents) const { return backup_.Expected(contents); }
  void Prepare(Bytes bytes) { backup_.Prepare(bytes); }
  void Busy() { backup_.Busy(); }
  void Trim(Bytes keep) { backup_.Trim(keep); }  // not during Pause or Resume
  [[nodiscard]] BackupStatistics Contents() const { return backup_.Statistics(); }
  [[nodiscard]] Bytes pinned_bytes() const { return backup_.pinned_bytes(); }
  // Of the last that succeeded; 0: none has.
  [[nodiscard]] std::uint64_t pause_ns() const { return pause_ns_; }
  [[nodiscard]] std::uint64_t resume_ns() const { return resume_ns_; }

 private:
  PoolCycle(Ledger& ledger, Driver& driver, Peers& peers, PoolId pool, std::unique_ptr<Copier> lane);

  struct Begun {
    std::uint64_t number = 0;
    std::string tag;
  };
  // nullopt: it stands so already.
  std::optional<Begun> Begin(CycleKind kind);
  Status Run(CycleKind kind, const StreamMoment* after, const std::function<void()>& queued);
  Status RunPhases(CycleKind kind, const StreamMoment* after, const std::function<void()>& queued);
  Status RunPhase(const PlannedPhase& planned, const StreamMoment* after);
  Status Undo(CycleKind failed);
  Status GiveUp(CycleKind kind, const Begun& begun, const Status& why);
  [[nodiscard]] Plan MakePlan(CycleKind kind);
  [[nodiscard]] std::vector<DeviceOrdinal> Devices();

  Ledger& ledger_;
  const PoolId pool_;
  const std::unique_ptr<Copier> lane_;
  Backup backup_;
  Executor executor_;
  std::atomic<std::uint64_t> pause_ns_ = 0, resume_ns_ = 0;
};

}  // namespace amem
