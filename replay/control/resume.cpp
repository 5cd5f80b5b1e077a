// A resume from outside: the program's tags first, each rank for itself, then NCCL's memory, all together.
#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "replay/control/job_control.h"

namespace amem::control {
namespace {

constexpr std::chrono::milliseconds kLookAgain{50};

}  // namespace

Status JobControl::Resume(std::chrono::milliseconds deadline, const Progress& progress) {
  const Deadline until = In(deadline);
  resuming_.clear();
  Refresh();
  bool tags = false;
  for (const RankLink& rank : ranks_) {
    const Phase phase = rank.standing().phase;
    tags = tags || rank.standing().asked.all_tags;
    if (!rank.heard() || (phase != Phase::kRunning && phase != Phase::kHeld && phase != Phase::kFailed))
      resuming_.push_back(&rank);
  }
  Post(Ask::kResume, tags, Stage::kTags);
  standing_ = true;  // what is paused must not be forgotten when this object goes
  if (progress) progress(fmt::format("{} of {} ranks resume", resuming_.size(), ranks_.size()));
  Status status = AwaitResumed(Stage::kTags, until);
  if (status.ok()) {
    SetStage(Stage::kNccl);
    status = AwaitResumed(Stage::kNccl, until);
  }
  if (!status.ok()) {
    // Tags that are back already are paused again, so that all stands as it did.
    if (status.code() != Code::kTimeout) Post(Ask::kPause, tags, Stage::kNccl);
    return status;
  }
  return {};  // those that were not paused have nothing to do about it when they come to their next safe point
}

Status JobControl::AwaitResumed(Stage stage, Deadline until) {
  for (;;) {
    AMEM_TRY(FirstFailure(Ask::kResume));
    const RankLink* waits_for = nullptr;
    for (const RankLink* rank : resuming_) {
      const Standing& is = rank->standing();
      // A tool that died while it told one rank after the other may have left some of them in the resume of NCCL's memory,
      // which ends when the others come to it.
      const bool speaks = IsAbout(*rank) || (stage == Stage::kTags && is.phase == Phase::kResuming);
      if (rank->alive() && !(speaks && is.stage_done >= stage)) waits_for = rank;
    }
    if (waits_for == nullptr) return {};
    if (Passed(until))
      return {Code::kTimeout,
              fmt::format("{} has not resumed in time: {}; try again", waits_for->name(), waits_for->DoingInDetail())};
    Wait(std::min(kLookAgain, LeftUntil(until)));
  }
}

}  // namespace amem::control
