// freeze and thaw: a job leaves its GPUs whole, contexts and all, and comes back.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "journal/base/clock.h"
#include "journal/base/process_sight.h"
#include "replay/driver/checkpointer.h"
#include "replay/driver/cuda/nvml.h"
#include "replay/freeze/operation.h"
#include "replay/job/names.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"
#include "replay/tool/control/request.h"
#include "statemachine/event.h"

namespace amem::tool {
namespace {

struct FreezeCommandOptions : RequestOptions {
  std::string gpus;
  bool go_on = false, undo = false, this_host = false, others_stay = false;
};

class ThisMachine final : public FreezeHost {
 public:
  ThisMachine() : nvml_([] { GpusByNvml(OpenNvml()); }) {}  // starts NVML beside everything else
  std::vector<GpuInUse> GpusInUse() override { return GpusByNvml(OpenNvml()); }
  std::optional<HostRoom> RoomFor(pid_t pid) override { return HostMemoryAvailable("/", std::to_string(pid)); }
  ProcessLife LifeOf(const RankProcess& process) override { return amem::LifeOf({process.pid, process.start_ticks}); }
  Result<std::set<pid_t>> Siblings(pid_t pid) override { return ReadSiblings(pid); }
  std::string DriverVersion() override { return FirstLineOf("/sys/module/nvidia/version"); }  // of the kernel's module

 private:
  std::jthread nvml_;
};

constexpr std::string_view kOutcomes[] = {"frozen", "running", "paused", "lost", "stuck", "untouched"};
// Of the times: all steps but "begin", and what was before and between them.
constexpr auto kSteps = [] {
  std::array<std::string_view, std::size(kNamesOfStepOfFreeze) + 1> words{"checks", "rest"};
  std::ranges::copy(std::span(kNamesOfStepOfFreeze).subspan(1), words.begin() + 2);
  return words;
}();

struct FrozenGpuRow {
  GpuShare share;
};
template <class To>
void WriteFields(To& to, const FrozenGpuRow& row) {
  to("uuid", row.share.gpu);
  to("before", row.share.before, "Bytes that the process held there before the pause");
  to("taken", row.share.taken, "Bytes that were left for the driver to take");
}

struct FrozenRow {
  FrozenProcess one;
};
template <class To>
void WriteFields(To& to, const FrozenRow& row) {
  std::vector<FrozenGpuRow> gpus;
  for (const GpuShare& share : row.one.gpus) gpus.push_back({share});
  to("session", row.one.process.session);
  to("name", row.one.process.name);
  to("pid", AtLeast<0>{row.one.process.pid});
  to("gpus", gpus);
}

struct TimeRow {
  FreezeReport::Time time;
};
template <class To>
void WriteFields(To& to, const TimeRow& row) {
  to("step", OneOf<kSteps>{row.time.step}, "checks: all that came before the first step; rest: what was between the steps");
  to("ms", row.time.ms);
}

struct GpuRow {
  std::string uuid;
  Bytes used = 0, total = 0;
};
template <class To>
void WriteFields(To& to, const GpuRow& row) {
  to("uuid", row.uuid);
  to("used", row.used);
  to("total", row.total);
}

struct FreezeAnswer {
  static constexpr const char* kSchema = "freeze";
  static constexpr const char* kTitle = "amem freeze --json, amem thaw --json";
  static constexpr const char* kMeaning =
      "What became of a freeze or a thaw. With exit code 2, nothing was found to act on: error.schema.json.";
  FreezeReport report{};
  Status status{};
  std::vector<GpuInUse> gpus{};
};
template <class To>
void WriteFields(To& to, const FreezeAnswer& answer) {
  const FreezeReport& report = answer.report;
  std::vector<FrozenRow> processes;
  std::vector<TimeRow> times;
  std::vector<GpuRow> gpus;
  for (const FrozenProcess& one : report.processes) processes.push_back({one});
  for (const FreezeReport::Time& time : report.times) times.push_back({time});
  for (const GpuInUse& gpu : answer.gpus) gpus.push_back({gpu.uuid, gpu.used, gpu.memory.total});
  to("ok", answer.status.ok(), "What was wanted is done");
  to("outcome", OneOf<kOutcomes>{report.outcome.empty() ? "untouched" : std::string_view(report.outcome)},
     "How the job is now. paused: as it was before the freeze; lost: a process is lost, the others are back; stuck: half done, "
     "the "
     "message tells what to run; untouched: as it was");
  to("message", answer.status.message(), "Of a failure: which process, which step, what the driver said, and what to do");
  to("processes", processes);
  to("times", times,
     "Steps in the order in which they were made, so that the sum is the whole; one of several processes takes as long as the "
     "slowest");
  to("gpus", gpus, "All GPUs that NVML shows, afterwards");
  to("lost", report.lost);
  to("notes", report.notes, "What could not be checked");
}

void PrintText(Output& out, const FreezeReport& report, std::span<const GpuInUse> gpus) {
  for (const std::string& note : report.notes) out << "note: " << note << "\n";
  for (const std::string& lost : report.lost) out.Styled(Output::Style::kBad, "LOST: ") << lost << "\n";
  if (report.outcome.empty()) return;
  out << fmt::format("{}: {}", report.outcome, Plural(report.processes.size(), "process", "processes"));
  double sum = 0;
  std::string steps;
  for (const FreezeReport::Time& time : report.times) {
    sum += time.ms;
    steps += fmt::format("{}{} {:.0f} ms", steps.empty() ? "" : ", ", time.step, time.ms);
  }
  out << fmt::format(" in {:.0f} ms ({})\n", sum, steps);
  for (const GpuInUse& gpu : gpus) {
    Bytes before = 0;
    for (const FrozenProcess& one : report.processes) {
      const auto held = std::ranges::find(one.gpus, gpu.uuid, &GpuShare::gpu);
      before += held == one.gpus.end() ? 0 : held->before;
    }
    if (before == 0) continue;
    out << fmt::format("  GPU {}  the job held {}; now {} of {} are in use\n", &gpu - gpus.data(), RoundedUpBytes(before),
                       RoundedUpBytes(gpu.used), RoundedBytes(gpu.memory.total));
  }
}

int Finish(const FreezeCommandOptions& options, const FreezeReport& report, const Status& status, ThisMachine& machine,
           Output& out) {
  const std::vector<GpuInUse> gpus = machine.GpusInUse();
  options.json ? PrintAnswer(out, FreezeAnswer{report, status, gpus}) : PrintText(out, report, gpus);
  return status.ok() ? kFine : ComplainOf(status, kViolationFound);
}

// Both commands: `forward` where neither --continue nor --undo is given.
int Perform(const FreezeCommandOptions& options, Status (FreezeOperation::*forward)(), Output& out) {
  if (options.go_on && options.undo) return Complain("give --continue or --undo, not both", kUsage);
  if (const std::string wrong = WhatIsWrong(options); !wrong.empty()) return Complain(wrong, kUsage);
  const std::uint64_t began_ns = MonotonicNs();
  ::unsetenv("CUDA_VISIBLE_DEVICES");          // of this shell; pairs must name every GPU that the job may use
  auto checkpointer = OpenCudaCheckpointer();  // the driver starts while the job is looked for
  ThisMachine machine;
  const Result<FoundJob> found = FindJob(options.job, Ties::kCertain);
  if (!found.ok()) return ComplainOf(found.status(), kCannotRead);
  if (!checkpointer.ok()) return Finish(options, {}, checkpointer.status().Within("nothing was touched"), machine, out);
  auto control = control::JobControl::Open(found->ranks, DefaultSocketDirectory());
  if (!control.ok()) return Finish(options, {}, control.status().Within("nothing was touched"), machine, out);
  FreezeOptions how{.asked = {.deadline = std::chrono::seconds(options.deadline_s),
                              .at_step = options.at_step,
                              .all_tags = true,
                              .where = WhereOf(options),
                              .tags_at_safepoint_only = true},
                    .allowances = {.this_host_only = options.this_host, .others_stay = options.others_stay},
                    .ranks_elsewhere = found->elsewhere,
                    .gpus = options.gpus,
                    .began_ns = began_ns};
  if (!options.json) how.say = Note;
  FreezeOperation operation(*control, **checkpointer, machine, std::move(how));
  const auto command = options.go_on ? &FreezeOperation::Continue : options.undo ? &FreezeOperation::Undo : forward;
  const Status done = (operation.*command)();
  return Finish(options, operation.report(), done, machine, out);
}

void AddCommon(Arguments& arguments, FreezeCommandOptions& options) {
  AddRequest(arguments, options, "How long the ranks may take to come to the pause, or to resume; default: 60");
  arguments.Flag("--continue", options.go_on, "Complete a freeze or thaw whose command died");
  arguments.Flag("--undo", options.undo, "Undo a freeze or thaw whose command died");
  AddJson(arguments, options.json);
}

void AddFreeze(Arguments& arguments, FreezeCommandOptions& options) {
  AddCommon(arguments, options);
  arguments.Add("--at-step", "N", options.at_step,
                "The safe point to pause at, if it is still to come: the same N on each host");
  AddWhere(arguments, options);
  arguments.Flag("--this-host", options.this_host, "Freeze only this host's processes; those on other hosts are frozen there");
  arguments.Flag("--others-stay", options.others_stay, "Processes beside the ranks that use GPUs stay as they are");
}

void AddThaw(Arguments& arguments, FreezeCommandOptions& options) {
  AddCommon(arguments, options);
  arguments.Add("--gpus", "OLD=NEW,...", options.gpus,
                "Bring it back on other GPUs of the same model: pairs of indices or UUIDs, as 0=1,1=0; those not named stay");
}

int RunFreeze(const FreezeCommandOptions& options, Output& out) { return Perform(options, &FreezeOperation::Freeze, out); }
int RunThaw(const FreezeCommandOptions& options, Output& out) { return Perform(options, &FreezeOperation::Thaw, out); }

}  // namespace

Json FreezeSchema() { return WithoutOtherKeys(SchemaOf<FreezeAnswer>()); }

Command FreezeCommand() {
  return WithOptions<FreezeCommandOptions>(
      {kLivingGroup, "freeze", "Takes a job off its GPUs, contexts and all",
       "  amem freeze 4711                  the job of that process, or of that launcher\n"
       "  amem freeze 4711 --json --deadline 120\n"
       "  amem freeze 4711 --undo           after the death of the tool: the job runs as before\n",
       false},
      AddFreeze, RunFreeze);
}

Command ThawCommand() {
  return WithOptions<FreezeCommandOptions>({kLivingGroup, "thaw", "Brings a frozen job back onto its GPUs, or onto others",
                                            "  amem thaw 4711\n"
                                            "  amem thaw 4711 --gpus 0=1,1=0     GPUs 0 and 1 change places\n",
                                            false},
                                           AddThaw, RunThaw);
}

}  // namespace amem::tool
