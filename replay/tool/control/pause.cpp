// pause and resume of a living job, from outside, and what its ranks say of themselves (ls --live).
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "journal/base/clock.h"
#include "replay/job/names.h"
#include "replay/job/story/job_cycles.h"
#include "replay/tool/control/request.h"

namespace amem::tool {
namespace {

struct PauseOptions : RequestOptions {
  std::optional<std::uint64_t> at_step;
  bool tags = false;
};

// What is not the program's memory under a tag is left by a pause with --all, too: other libraries' by their name or, with
// AMEM_SCOPE=all, by the function that made it.
std::vector<control::Staying> WhatStays(const State& state, const Holdings& holdings) {
  std::vector<control::Staying> stays;
  const auto add = [&](std::string what, std::optional<std::uint64_t> pieces, Bytes bytes) {
    if (bytes != 0 || pieces) stays.push_back({std::move(what), pieces, bytes});
  };
  for (const auto& [reason, bytes] : holdings.kept)
    if (reason != KeepReason::kNone) add(std::string(ToText(reason)), {}, bytes);
  for (const auto& [id, pool] : MeasurePools(state))
    for (const auto& [reason, bytes] : pool.kept)
      add(fmt::format("tag {}: {}", state.pools.at(id).tag, ToText(reason)), {}, bytes);
  add("NCCL's cuMemAlloc", {}, holdings.legacy_kept);
  add("NCCL's driver pools", {}, holdings.async);
  for (const auto& [what, share] : state.outside) {
    if (what.second == OutsideKind::kUnseen) continue;
    const bool left = what.second == OutsideKind::kLeft;
    add(left ? what.first : fmt::format("{} by {}", ToText(what.second), what.first), share.pieces, share.bytes);
  }
  return stays;
}

// How a freeze of the job stands, as its journals say. Nothing: nothing is left of one.
std::optional<FreezeStep> FreezeOf(const FoundJob& job) {
  std::optional<FreezeStep> last;
  for (const control::RankPlace& rank : job.ranks) {
    const Result<State> state = StateIn(rank.directory);
    if (state.ok() && state->freeze && (!last || Order(*last) < Order(*state->freeze))) last = state->freeze;
  }
  return last && IsBack(*last) ? std::nullopt : last;
}

// Finds the job, connects to its ranks, has them pause, or without `pause` resume, and prints what came of it. Nothing is asked
// of a job whose ranks all stand as is wanted already.
int RunRequest(const RequestOptions& options, const PauseOptions* pause, Output& out) {
  const Result<FoundJob> job = FindJob(options.job, Ties::kCertain);
  if (!job.ok()) return ComplainOf(job.status(), kCannotRead);
  if (const auto freeze = pause == nullptr ? FreezeOf(*job) : std::nullopt; freeze && freeze->outcome == "frozen")
    return Complain("the job is frozen, and its calls of the driver wait: amem thaw brings it back, and lets it go on");
  Result<control::JobControl> control = control::JobControl::Open(job->ranks, DefaultSocketDirectory());
  if (!control.ok()) return ComplainOf(control.status(), kCannotRead);
  auto ranks = control->Look();
  const control::Phase wanted = pause != nullptr ? control::Phase::kPaused : control::Phase::kRunning;
  const auto as_wanted = [&](const control::RankLook& rank) {
    return rank.heard && rank.is.phase == wanted && !rank.paused_by_program();
  };
  const bool tags = pause != nullptr && pause->tags;  // they may not be paused yet
  if (!ranks.empty() && !tags && std::ranges::all_of(ranks, as_wanted)) {
    PrintRanks(out, ranks, *job,
               fmt::format("{} {} already; nothing was changed", Plural(ranks.size(), "rank is", "ranks are"), ToText(wanted)),
               0, options.json);
    return kFine;
  }
  const std::chrono::seconds deadline(options.deadline_s);
  const std::uint64_t began_ns = MonotonicNs();
  const Status asked =
      pause != nullptr ? control->Pause({deadline, pause->at_step, tags}, Note) : control->Resume(deadline, Note);
  if (!asked.ok()) return ComplainOf(asked, asked.code() == Code::kRefused ? kCannotRead : kViolationFound);
  const double seconds = static_cast<double>(MonotonicNs() - began_ns) / 1e9;
  ranks = control->Look();
  Bytes freed = 0;
  for (const control::RankLook& rank : ranks) freed += rank.is.freed;
  PrintRanks(out, ranks, *job,
             fmt::format("{} {} in {:.2f} s{}", pause != nullptr ? "paused" : "resumed", Plural(ranks.size(), "rank"), seconds,
                         pause == nullptr || freed == 0 ? "" : ", " + FormatBytes(freed) + " given back"),
             seconds, options.json);
  return kFine;
}

int RunPause(const PauseOptions& options, Output& out) { return RunRequest(options, &options, out); }
int RunResume(const RequestOptions& options, Output& out) { return RunRequest(options, nullptr, out); }

void AddResume(Arguments& arguments, RequestOptions& options) {
  AddRequest(arguments, options, "Give up after so many seconds, and leave the job as it was; default: 60");
  AddJson(arguments, options.json);
}

void AddPause(Arguments& arguments, PauseOptions& options) {
  AddResume(arguments, options);
  arguments.Add("--at-step", "N", options.at_step,
                "At the safe point of this number, which must lie ahead; of a job on many hosts the same on each");
  arguments.Flag("--tags,--all", options.tags,
                 "The program's tags as well, with all contents; under AMEM_SCOPE=all that is all its memory");
}

}  // namespace

int PrintLive(const std::vector<std::string>& names, bool json, Output& out) {
  const Result<FoundJob> job = FindJob(names, Ties::kProbable);
  if (!job.ok()) return ComplainOf(job.status(), kCannotRead);
  auto ranks = control::LookAt(job->ranks, DefaultSocketDirectory());
  if (ranks.empty())
    return Complain(
        "the job's processes take no requests: their libamem_nccl.so is older than this program, or they are another "
        "user's");
  for (control::RankLook& rank : ranks)
    if (const Result<State> state = StateIn(rank.process.directory); state.ok()) {
      const Holdings holdings = Measure(*state);
      rank.is.held = holdings.own_device_resident + holdings.pools_resident;
      rank.stays = WhatStays(*state, holdings);
    }
  PrintRanks(out, ranks, *job, "", 0, json);
  const auto freeze = json ? std::nullopt : FreezeOf(*job);
  if (freeze) out << TextOf(*freeze, true) << "\n";
  return kFine;
}

Command PauseCommand() {
  return WithOptions<PauseOptions>(
      {kLivingGroup, "pause", "Pauses a job at one safe point of all ranks, or not at all",
       "  amem pause                      the only living job of this user on this host\n"
       "  amem pause 4711 --deadline 300  the job of that process, or of that launcher\n"
       "  amem pause --tags               the program's tags too\n"
       "  amem pause 4711 --all           the same; under AMEM_SCOPE=all that is all memory of the job\n"
       "  amem pause 4711 4712            ranks of which nothing else says that they belong together\n"
       "Programs call amem.safepoint() once a step; one without is asked at its next own pause. Exit code 3: it was asked and "
       "did not pause, and runs as before.\n",
       false},
      AddPause, RunPause);
}

Command ResumeCommand() {
  return WithOptions<RequestOptions>({kLivingGroup, "resume", "Resumes a job that was paused from outside",
                                      "  amem resume\n"
                                      "  amem resume 4711\n"
                                      "A rank that its program had paused goes on when its program resumes it.\n",
                                      false},
                                     AddResume, RunResume);
}

}  // namespace amem::tool
