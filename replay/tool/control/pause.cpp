// pause and resume of a living job, from outside, and what its ranks say of themselves (ls --live).
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string_view>

#include "journal/journal.h"
#include "replay/job/names.h"
#include "replay/job/story/progress.h"
#include "replay/tool/control/request.h"

namespace amem::tool {
namespace {

constexpr std::string_view kPaused = "paused";

struct PauseOptions : RequestOptions {
  std::optional<std::uint64_t> at_step;
  bool tags = false;
};

double SecondsSince(std::chrono::steady_clock::time_point from) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
}

// Finds the job, connects to its ranks, has `ask` done, and prints what came of it. Nothing is asked of a job whose ranks are
// all in the phase `as_wanted` already.
template <class Ask>
int RunRequest(const RequestOptions& options, Output& out, std::string_view done, std::string_view as_wanted, const Ask& ask,
               Status (*refuse)(const FoundJob& job) = nullptr) {
  const Result<FoundJob> job = FindJob(options.job, Ties::kCertain);
  const Status refused = !job.ok() ? job.status() : refuse != nullptr ? refuse(*job) : Status();
  if (!refused.ok()) return ComplainOf(refused, kCannotRead);
  Result<control::JobControl> control = control::JobControl::Open(job->ranks, DefaultSocketDirectory());
  if (!control.ok()) return ComplainOf(control.status(), kCannotRead);
  auto ranks = control->Look();
  const auto as_asked = [&](const control::RankLook& rank) { return rank.phase == as_wanted && !rank.paused_by_program; };
  if (!ranks.empty() && std::ranges::all_of(ranks, as_asked)) {
    PrintRanks(out, ranks, *job,
               fmt::format("{} {} already; nothing was changed", Plural(ranks.size(), "rank is", "ranks are"), as_wanted), 0,
               options.json);
    return kFine;
  }
  const auto from = std::chrono::steady_clock::now();
  if (const Status asked = ask(*control); !asked.ok())
    return ComplainOf(asked, asked.code() == Code::kRefused ? kCannotRead : kViolationFound);
  const double seconds = SecondsSince(from);
  ranks = control->Look();
  Bytes freed = 0;
  for (const control::RankLook& rank : ranks) freed += rank.freed;
  const std::string amount = done != kPaused || freed == 0 ? "" : ", " + FormatBytes(freed) + " given back";
  PrintRanks(out, ranks, *job, fmt::format("{} {} in {:.2f} s{}", done, Plural(ranks.size(), "rank"), seconds, amount), seconds,
             options.json);
  return kFine;
}

int RunPause(const PauseOptions& options, Output& out) {
  const auto pause = [&](control::JobControl& job) {
    return job.Pause({std::chrono::seconds(options.deadline_s), options.at_step, options.tags}, PrintProgress);
  };
  return RunRequest(options, out, kPaused, options.tags ? "" : kPaused, pause);  // its tags may not be paused yet
}

Result<State> StateIn(const std::filesystem::path& session) {
  const auto reader = JournalReader::Open(session);
  return reader.ok() ? (*reader)->StateAt(std::nullopt) : Result<State>(reader.status());
}

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

// A resume would wait for the driver until its deadline.
Status RefuseFrozen(const FoundJob& job) {
  const auto freeze = FreezeOf(job);
  if (!freeze || freeze->outcome != "frozen") return {};
  return {Code::kRefused, "the job is frozen, and its calls of the driver wait: amem thaw brings it back, and lets it go on"};
}

int RunResume(const RequestOptions& options, Output& out) {
  const auto resume = [&](control::JobControl& job) {
    return job.Resume(std::chrono::seconds(options.deadline_s), PrintProgress);
  };
  return RunRequest(options, out, "resumed", "running", resume, RefuseFrozen);
}

void AddPause(Arguments& arguments, PauseOptions& options) {
  AddRequest(arguments, options);
  arguments.Add("--at-step", "N", options.at_step,
                "At the safe point of this number, which must lie ahead; of a job on many hosts the same on each");
  arguments.Flag("--tags,--all", options.tags,
                 "The program's tags as well, but for those of policy discard; under AMEM_SCOPE=all that is all its memory");
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
    if (const Result<State> state = StateIn(rank.directory); state.ok()) {
      const Holdings holdings = Measure(*state);
      rank.held = holdings.own_device_resident + holdings.pools_resident;
      rank.stays = WhatStays(*state, holdings);
    }
  PrintRanks(out, ranks, *job, "", 0, json);
  const auto freeze = json ? std::nullopt : FreezeOf(*job);
  if (freeze) out << TextOf(*freeze, true) << "\n";
  return kFine;
}

Command PauseCommand() {
  return {
      kLivingGroup,
      "pause",
      "Pauses a job at one safe point of all ranks, or not at all",
      "  amem pause                      the only living job of this user on this host\n"
      "  amem pause 4711 --deadline 300  the job of that process, or of that launcher\n"
      "  amem pause --tags               the program's tags too\n"
      "  amem pause 4711 --all           the same; under AMEM_SCOPE=all that is all memory of the job\n"
      "  amem pause 4711 4712            ranks of which nothing else says that they belong together\n"
      "Programs call amem.safepoint() once a step; one without is asked at its next own pause. Exit code 3: it was asked and "
      "did not pause, and runs as before.\n",
      [](Arguments& arguments) { return SetUp<PauseOptions>(arguments, AddPause, RunPause); },
      false};
}

Command ResumeCommand() {
  return {kLivingGroup,
          "resume",
          "Resumes a job that was paused from outside",
          "  amem resume\n"
          "  amem resume 4711\n"
          "A rank that its program had paused goes on when its program resumes it.\n",
          [](Arguments& arguments) {
            return SetUp<RequestOptions>(
                arguments, [](Arguments& a, RequestOptions& o) { AddRequest(a, o); }, RunResume);
          },
          false};
}

}  // namespace amem::tool
