// A pause from outside: agrees on a step, waits until all have come to it, and has it carried out.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <thread>

#include "replay/control/asking.h"
#include "replay/control/look.h"

namespace amem::control {
namespace {

constexpr std::chrono::milliseconds kLook{1}, kLookForDead{50};
constexpr std::chrono::milliseconds kMostBetween{500};
constexpr std::chrono::seconds kTell{1};
// Beyond the deadline, for ranks that have begun to pause: each of them has a deadline of its own (AMEM_TIMEOUT_MS).
constexpr std::chrono::seconds kToPause{600}, kToUndo{60};

}  // namespace

Status Asking::Pause(const AskOptions& options, const Progress& progress) {
  const auto until = Clock::now() + options.deadline;
  const bool was_paused = std::ranges::any_of(ranks_, [](const Rank& rank) { return PhaseOf(rank) == Phase::kPaused; });
  Post(Ask::kPause, options.all_tags, Stage::kCome);
  Status come = AgreeOnStep(options);
  if (come.ok()) come = AwaitAll(options, progress);
  if (!come.ok() || Clock::now() > until) {
    Status why = come.ok() ? DidNotCome(options.deadline) : come;
    Withdraw();
    return why;
  }
  if (progress) progress("all have come; they pause");
  SetStage(Stage::kTags);
  if (const Status tags = AwaitStage(Stage::kTags, until + kToPause); !tags.ok()) return was_paused ? tags : UndoPause(tags);
  SetStage(Stage::kNccl);
  if (const Status nccl = AwaitStage(Stage::kNccl, until + kToPause); !nccl.ok()) return was_paused ? nccl : UndoPause(nccl);
  return {};
}

// Those that are paused already, by a request or by their program, have no say: they pass no safe point meanwhile.
Status Asking::AgreeOnStep(const AskOptions& options) {
  std::uint64_t least = 1;
  for (const Rank& rank : ranks_) {
    const Page& page = rank.page.page();
    if (HasCome(rank) || PhaseOf(rank) == Phase::kPaused) continue;
    const bool held = Has(rank, Phase::kHeld);
    const std::uint64_t next = held ? page.at.load() : page.steps.load(std::memory_order_seq_cst) + 1;
    if (options.at_step && *options.at_step < next)
      return {Code::kRefused, fmt::format("{} has come to safe point {} already; choose a later one than {}", NameOfRank(page),
                                          next - 1, *options.at_step)};
    least = std::max(least, next);
  }
  target_ = options.at_step.value_or(least);
  for (const Rank& rank : ranks_) {
    rank.page->target.store(target_, std::memory_order_release);
    rank.page->bell.Ring();
  }
  return {};
}

// A program's own resume is made by all its ranks. Where some of them had begun it before the request, and others wait for the
// request, these must be let go, or those would wait for them in vain.
Asking::Coming Asking::Look() const {
  bool all = true, resuming = false, at_resume = false;
  for (const Rank& rank : ranks_) {
    const OwnPause own = OwnPauseOf(rank);
    resuming = resuming || own == OwnPause::kResuming;
    at_resume = at_resume || own == OwnPause::kPaused;
    if (Has(rank, Phase::kHeld) && rank.page->at.load() > target_) return Coming::kOnceMore;
    all = all && HasCome(rank);
  }
  if (resuming && at_resume) return Coming::kOnceMore;
  return all ? Coming::kAll : Coming::kNotYet;
}

Status Asking::AwaitAll(const AskOptions& options, const Progress& progress) {
  const auto from = Clock::now();
  auto told = from, looked = from;
  std::chrono::milliseconds between = 10 * kLook;  // requests that are put again
  for (;;) {
    Beat();
    const auto allowed = options.may_pause ? options.may_pause() : Status();
    if (allowed && !allowed->ok()) return *allowed;
    const Coming coming = Look();
    if (coming == Coming::kAll && allowed) return {};
    const auto now = Clock::now();
    if (now - looked > kLookForDead) {
      looked = now;
      for (const Rank& rank : ranks_)
        if (!ProcessLives(rank.page.page()))
          return {Code::kPeerLost, NameOfRank(rank.page.page()) + " has ended before it paused; nothing was paused"};
    }
    if (now - from > options.deadline) return DidNotCome(options.deadline);
    if (coming == Coming::kOnceMore) {
      Withdraw();
      std::this_thread::sleep_for(between);
      between = std::min(2 * between, kMostBetween);
      Post(Ask::kPause, options.all_tags, Stage::kCome);
      AMEM_TRY(AgreeOnStep(options));
    }
    if (progress && now - told > kTell) {
      told = now;
      for (const Rank& rank : ranks_)
        if (!HasCome(rank)) progress(fmt::format("{} {}", NameOfRank(rank.page.page()), Doing(rank.page.page(), true)));
    }
    std::this_thread::sleep_for(kLook);
  }
}

Status Asking::AwaitStage(Stage stage, Clock::time_point until) {
  for (;;) {
    Beat();
    AMEM_TRY(FirstFailure(Ask::kPause));
    bool all = true;
    for (const Rank& rank : ranks_) {
      if (HasDone(rank, stage)) continue;
      all = false;
      if (!ProcessLives(rank.page.page()))
        return {Code::kPeerLost, NameOfRank(rank.page.page()) + " has ended while it paused"};
    }
    if (all) return {};
    if (Clock::now() > until) return {Code::kTimeout, "some ranks neither pause nor fail; `amem status` shows what they do"};
    std::this_thread::sleep_for(kLook);
  }
}

// Where ranks that share no memory differ, those that have paused resume.
Status Asking::UndoPause(const Status& why) {
  const auto until = Clock::now() + kToPause;
  for (const Rank& rank : ranks_) rank.page->stage.store(static_cast<std::uint32_t>(Stage::kTags), std::memory_order_release);
  standing_ = false;
  Withdraw();
  // Every rank is to have ended its part first: a pause of NCCL's memory fails on all ranks that share any.
  const auto busy = [&](const Rank& rank) { return Has(rank, Phase::kPausing) && ProcessLives(rank.page.page()); };
  while (std::ranges::any_of(ranks_, busy) && Clock::now() < until) {
    Beat();
    std::this_thread::sleep_for(kLook);
  }
  if (std::ranges::none_of(ranks_, [&](const Rank& rank) { return PhaseOf(rank) == Phase::kPaused; })) return why;
  const Status back = Resume(kToUndo, {});
  if (back.ok()) return why;
  return {why.code(), why.message() + "; then not all that had paused could be resumed: " + back.message()};
}

Status Asking::DidNotCome(std::chrono::milliseconds deadline) const {
  std::string all;
  for (const Rank& rank : ranks_) {
    if (HasCome(rank)) continue;
    all += fmt::format("{}{}: {}", all.empty() ? "" : "\n", NameOfRank(rank.page.page()),
                       DoingInDetail(rank.page.page(), rank.directory));
  }
  if (all.empty()) all = "all came in the end";
  return {Code::kTimeout, fmt::format("not all ranks came to safe point {} within {:.1f} s, and nothing was paused\n{}",
                                      target_, static_cast<double>(deadline.count()) / 1e3, all)};
}

}  // namespace amem::control
