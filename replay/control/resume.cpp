// A resume from outside: the program's tags first, each rank for itself, then NCCL's memory, all together.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <thread>

#include "replay/control/asking.h"
#include "replay/control/look.h"

namespace amem::control {
namespace {

constexpr std::chrono::milliseconds kLookAgain{1};

}  // namespace

Status Asking::Resume(std::chrono::milliseconds deadline, const Progress& progress) {
  const auto until = Clock::now() + deadline;
  resuming_.clear();
  bool tags = false;
  for (const Rank& rank : ranks_) {
    const Phase phase = PhaseOf(rank);
    tags = tags || rank.page->all_tags.load() != 0;
    if (phase == Phase::kPaused || phase == Phase::kPausing || phase == Phase::kResuming) resuming_.push_back(&rank);
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
  for (const Rank& rank : ranks_) {
    rank.page->asked.store(0, std::memory_order_seq_cst);
    rank.page->stage.store(static_cast<std::uint32_t>(Stage::kCome), std::memory_order_release);
    rank.page->bell.Ring();
  }
  return {};
}

Status Asking::AwaitResumed(Stage stage, Clock::time_point until) {
  for (;;) {
    Beat();
    AMEM_TRY(FirstFailure(Ask::kResume));
    const Rank* waits_for = nullptr;
    for (const Rank* rank : resuming_) {
      // A tool that died while it told one rank after the other may have left some of them in the resume of NCCL's memory,
      // which ends when the others come to it.
      const bool speaks = IsAbout(*rank) || (stage == Stage::kTags && PhaseOf(*rank) == Phase::kResuming);
      const bool done = speaks && rank->page->stage_done.load() >= static_cast<std::uint32_t>(stage);
      if (!done && ProcessLives(rank->page.page())) waits_for = rank;
    }
    if (waits_for == nullptr) return {};
    if (Clock::now() > until)
      return {Code::kTimeout, fmt::format("{} has not resumed in time: {}; try again", NameOfRank(waits_for->page.page()),
                                          DoingInDetail(waits_for->page.page(), waits_for->directory))};
    std::this_thread::sleep_for(kLookAgain);
  }
}

}  // namespace amem::control
