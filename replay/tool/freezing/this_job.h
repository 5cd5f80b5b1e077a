// The job and the machine that a freeze works on, as the tool sees them: sessions by their sockets, GPUs by NVML.
#pragma once

#include <optional>
#include <thread>
#include <vector>

#include "journal/base/process_stat.h"
#include "replay/control/job_control.h"
#include "replay/driver/cuda/nvml.h"
#include "replay/freeze/host.h"
#include "replay/freeze/job.h"

namespace amem::tool {

// Nobody else can ask the job for as long as it lives.
class ControlledJob final : public FreezableJob {
 public:
  // `asked.all_tags` is set: what AMem can take out at the link's speed need not go the driver's way.
  ControlledJob(control::JobControl control, control::AskOptions asked);

  std::vector<RankSight> Look() override;
  Status Pause(const Say& say, const MayPause& may_pause) override;
  Status Resume(const Say& say) override;
  Status LeaveNote(SessionId session, EventBody note) override { return control_.LeaveNote(session, std::move(note)); }
  Result<State> MemoryOf(const RankProcess& process) override;

 private:
  control::JobControl control_;
  control::AskOptions asked_;
};

class ThisMachine final : public FreezeHost {
 public:
  ThisMachine() : nvml_([] { GpusByNvml(OpenNvml()); }) {}  // starts NVML beside everything else
  std::vector<GpuSight> GpusInUse() override;
  std::optional<HostRoom> RoomFor(pid_t pid) override { return HostMemoryAvailable("/", std::to_string(pid)); }
  std::uint64_t StartTicks(pid_t pid) override { return amem::StartTicks(pid); }
  std::vector<pid_t> Siblings(pid_t pid) override { return ReadSiblings(pid); }
  std::string DriverVersion() override { return ReadDriverVersion(); }

 private:
  std::jthread nvml_;
};

}  // namespace amem::tool
