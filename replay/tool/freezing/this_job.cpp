#include "replay/tool/freezing/this_job.h"

#include <utility>

#include "journal/journal.h"

namespace amem::tool {

ControlledJob::ControlledJob(control::JobControl control, control::AskOptions asked)
    : control_(std::move(control)), asked_(asked) {
  asked_.all_tags = true;
}

std::vector<RankSight> ControlledJob::Look() {
  std::vector<RankSight> sights;
  for (control::RankLook& look : control_.Look()) {
    sights.push_back({.process = {.session = look.session,
                                  .pid = look.pid,
                                  .start_ticks = look.start_ticks,
                                  .name = std::move(look.rank_name),
                                  .directory = std::move(look.directory)},
                      .alive = look.alive,
                      .paused = look.paused,
                      .doing = std::move(look.doing)});
  }
  return sights;
}

Status ControlledJob::Pause(const Say& say, const MayPause& may_pause) {
  control::AskOptions asked = asked_;
  asked.may_pause = may_pause;
  return control_.Pause(asked, say);
}

Status ControlledJob::Resume(const Say& say) { return control_.Resume(asked_.deadline, say); }

Result<State> ControlledJob::MemoryOf(const RankProcess& process) {
  AMEM_ASSIGN(const auto reader, JournalReader::Open(process.directory));
  return reader->StateAt(std::nullopt);
}

std::vector<GpuSight> ThisMachine::GpusInUse() {
  std::vector<GpuSight> sights;
  for (GpuInUse& gpu : GpusByNvml(OpenNvml())) {
    sights.push_back({.uuid = std::move(gpu.uuid), .memory = gpu.memory, .used = gpu.used, .holders = std::move(gpu.holders)});
  }
  return sights;
}

}  // namespace amem::tool
