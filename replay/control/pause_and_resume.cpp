// A pause from outside: agrees on a step, waits until all have come to it, and has it carried out. A resume: the program's tags
// first, each rank for itself, then NCCL's memory, all together.
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "replay/control/changes_report.h"
#include "replay/control/job_control.h"
#include "statemachine/check.h"

namespace amem::control {

constexpr std::chrono::milliseconds kAskTheCaller{1};
// For ranks that have begun to pause: each of them has a deadline of its own (AMEM_TIMEOUT_MS).
constexpr std::chrono::seconds kToPause{600}, kToUndo{60};

Status JobControl::Pause(const AskOptions& options, const Progress& progress) {
  const auto one_is = [&](Phase phase) {
    return std::ranges::any_of(ranks_, [&](const RankLink& rank) { return rank->is.phase == phase; });
  };
  const Deadline until = In(options.deadline);
  AskAll(ranks_);
  // A tool that died may have sent its order to some ranks only. Those wait inside that resume for the others, and come to
  // nothing else before it has ended, well or not.
  if (one_is(Phase::kResuming)) static_cast<void>(Resume(options.deadline, progress));
  const bool was_paused = one_is(Phase::kPaused);
  AMEM_ASSIGN(const bool tags, TakesTags(options));
  AMEM_ASSIGN(const bool between, StopsBetweenLaunches(options));
  agreement::LaunchOrder closes;
  if (between) closes = {.version = 1, .stands = false, .parks = options.parks};
  Post(Ask::kPause, tags && !between, Stage::kCome, closes);
  const Status come = between ? StopLaunches(options, closes, until, progress) : AwaitAll(options, tags, until, progress);
  if (!come.ok()) {
    Withdraw();
    return come;
  }
  if (progress) progress(options.parks ? "all ranks have stopped" : "all ranks have stopped, and pause now");
  for (const Stage stage : {Stage::kTags, Stage::kNccl}) {
    AMEM_CHECK(order_.stage < stage, order_.request);  // an order that was sent is not taken back
    AMEM_CHECK(order_.ask == Ask::kPause, order_.request);
    SetStage(stage);
    if (const Status done = AwaitStage(stage); !done.ok()) return was_paused ? done : UndoPause(done);
  }
  return {};
}

// A program that was stopped between launches runs on until its next one. Whoever pauses it again takes no more than NCCL's
// memory from it, and a job that is parked has been promised that.
Result<bool> JobControl::TakesTags(const AskOptions& options) const {
  bool takes = options.all_tags;
  for (const RankLink& rank : ranks_) {
    const RankStatus& is = rank->is;
    if (is.phase != Phase::kPaused || is.launches.version == 0) continue;
    if (is.parked && !options.parks) return Status{Code::kRefused, "the job is parked: resume it first; nothing was changed"};
    if (takes && !options.tags_at_safepoint_only)
      return Status{Code::kRefused,
                    fmt::format("{} is paused between two launches, and until the next one its program runs on and uses its "
                                "tags: resume the job, and pause it at a safe point; nothing was changed",
                                rank.name())};
    takes = false;
  }
  return takes;
}

// Those that are paused already, by a request or by their program, have no say: they pass no safe point meanwhile.
Status JobControl::AgreeOnStep(const AskOptions& options) {
  std::uint64_t least = 1;
  for (const RankLink& rank : ranks_) {
    const RankStatus& is = rank->is;
    if (HasCome(rank) || is.phase == Phase::kPaused) continue;
    const std::uint64_t next = Has(rank, Phase::kHeld) ? is.at : is.steps + 1;
    if (options.at_step && *options.at_step < next)
      return {Code::kRefused, fmt::format("{} has reached safe point {} already; choose a later one than {}", rank.name(),
                                          next - 1, *options.at_step)};
    least = std::max(least, next);
  }
  order_.target = options.at_step.value_or(least);
  GiveAll();
  return {};
}

// A program's own pause or resume is made by all its ranks. Where some of them had begun it before the request, and others wait
// for the request, these must be let go, or those would wait for them in vain.
bool JobControl::SomeWaitForOthers() const {
  bool resuming = false, at_resume = false, pausing = false, arrived = false;
  for (const RankLink& rank : ranks_) {
    const OwnPause own = rank->is.own_pause;
    resuming = resuming || own == OwnPause::kResuming;
    at_resume = at_resume || own == OwnPause::kPaused;
    pausing = pausing || own == OwnPause::kPausing;
    arrived = arrived || (Has(rank, Phase::kArrived) && own == OwnPause::kNo);  // else its own pause is made already
  }
  return (resuming && at_resume) || (pausing && arrived);
}

void JobControl::PostOnceMore(bool tags, const agreement::LaunchOrder& launches, std::chrono::milliseconds& between) {
  Withdraw();
  Await(ranks_, In(between), [] { return false; });
  between = std::min(2 * between, kMostBetween);
  Post(Ask::kPause, tags, Stage::kCome, launches);
}

JobControl::Coming JobControl::HowTheyCome() const {
  bool all = true;
  for (const RankLink& rank : ranks_) {
    if (HasGivenUp(rank) || (Has(rank, Phase::kHeld) && rank->is.at > order_.target)) return Coming::kOnceMore;
    all = all && HasCome(rank);
  }
  if (SomeWaitForOthers()) return Coming::kOnceMore;
  return all ? Coming::kAll : Coming::kNotYet;
}

Status JobControl::AwaitAll(const AskOptions& options, bool tags, Deadline until, const Progress& progress) {
  ChangesReport report(progress, options.progress_every);
  std::chrono::milliseconds between = kFirstBetween;
  for (;;) {
    const auto allowed = options.may_pause ? options.may_pause() : Status();
    if (allowed && !allowed->ok()) return *allowed;
    for (const RankLink& rank : ranks_)
      if (!rank->alive) return {Code::kPeerLost, rank.name() + " " + rank->lost + " before it paused; nothing was paused"};
    AMEM_TRY(FirstFailure(Ask::kPause));
    if (order_.target == 0 && AllAnswered()) AMEM_TRY(AgreeOnStep(options));
    // Of a rank that has not answered it is not known yet how it takes the step.
    const Coming coming = order_.target != 0 && AllAnswered() ? HowTheyCome() : Coming::kNotYet;
    if (coming == Coming::kAll && allowed) return {};
    if (Passed(until)) return DidNotCome(options.deadline);
    if (coming == Coming::kOnceMore) PostOnceMore(tags, {}, between);
    report.IfDue(ranks_, [&](std::size_t i) { return HasCome(ranks_[i]) ? std::string() : ranks_[i]->Doing(); });
    Wait(std::min(allowed ? kSlice : kAskTheCaller, LeftUntil(until)));
  }
}

Status JobControl::AwaitStage(Stage stage) {
  AMEM_ASSIGN(const auto waits_for, AwaitRanks(Ask::kPause, In(kToPause), [&](const RankLink& rank) -> Result<bool> {
                if (HasDone(rank, stage)) return true;
                if (!rank->alive) return Status{Code::kPeerLost, rank.name() + " " + rank->lost + " while it paused"};
                if (!HasGivenUp(rank)) return false;
                return LostContact(rank);
              }));
  if (waits_for == nullptr) return {};
  return {Code::kTimeout, "some ranks neither pause nor fail; `amem ls --live` shows what they do"};
}

// Where ranks that share no memory differ, those that have paused resume.
Status JobControl::UndoPause(const Status& why) {
  irrevocable_ = false;
  Withdraw();
  // Every rank is to have ended its part first: a pause of NCCL's memory fails on all ranks that share any.
  const auto busy = [&](const RankLink& rank) { return rank->alive && (!rank.answered() || Has(rank, Phase::kPausing)); };
  for (const Deadline until = In(kToPause); std::ranges::any_of(ranks_, busy) && !Passed(until);) Wait(kSlice);
  const auto paused = [](const RankLink& rank) { return rank->alive && rank->is.phase == Phase::kPaused; };
  if (std::ranges::none_of(ranks_, paused)) return why;
  // Those say in `why` that they stay paused.
  const bool not_undone =
      std::ranges::any_of(ranks_, [&](const RankLink& rank) { return paused(rank) && !rank->is.failure.ok(); });
  const Status back = Resume(kToUndo, {});
  if (back.ok()) return not_undone ? Status{why.code(), why.message() + "; then all were resumed", why.driver_result()} : why;
  return {why.code(), why.message() + "; then not all that had paused could be resumed: " + back.message()};
}

Status JobControl::DidNotCome(std::chrono::milliseconds deadline) const {
  std::string all;
  for (const RankLink& rank : ranks_) {
    const bool waits = HasCome(rank) || (order_.target == 0 && Has(rank, Phase::kHeld));
    if (waits && rank.answered()) continue;
    all += fmt::format("{}{}: {}", all.empty() ? "" : "\n", rank.name(), rank.DoingInDetail());
  }
  if (all.empty()) all = "all reached it after the deadline";
  const std::string step = order_.target == 0 ? "a safe point" : fmt::format("safe point {}", order_.target);
  return {Code::kTimeout, fmt::format("not all ranks came to {} within {:.1f} s, and nothing was paused\n{}", step,
                                      static_cast<double>(deadline.count()) / 1e3, all)};
}

// Where sets that share no memory differ, one may have resumed; it has nothing to do with this, and nobody would end a request
// that it had.
void JobControl::PauseAgainWhatIsPaused(bool tags) {
  Await(ranks_, Now(), [] { return false; });  // what they have said last
  order_ = {.request = order_.request + 1, .ask = Ask::kPause, .stage = Stage::kNccl, .all_tags = tags};
  irrevocable_ = true;
  order_.by_pid = ::getpid();
  for (RankLink& rank : ranks_)
    if (!Runs(rank)) rank.Give(order_);
}

// ---- resume ----------------------------------------------------------------------------------------------------------------

Status JobControl::Resume(std::chrono::milliseconds deadline, const Progress& progress) {
  const Deadline until = In(deadline);
  AskAll(ranks_);
  bool tags = false;
  std::set<SessionId> resuming;  // those that are waited for
  for (const RankLink& rank : ranks_) {
    tags = tags || rank->is.asked.all_tags;
    if (!Runs(rank)) resuming.insert(rank->process.session);
  }
  Post(Ask::kResume, tags, Stage::kTags);
  irrevocable_ = true;  // what is paused must not be forgotten when this object goes
  if (progress) progress(fmt::format("{} of {} ranks resume", resuming.size(), ranks_.size()));
  for (const Stage stage : {Stage::kTags, Stage::kNccl}) {
    if (stage == Stage::kNccl) SetStage(stage);
    const auto waits_for = AwaitRanks(Ask::kResume, until, [&](const RankLink& rank) -> Result<bool> {
      // A tool that died while it sent its order to one rank after the other may have left some of them in the resume of NCCL's
      // memory, which ends when the others come to it.
      const bool speaks = IsAbout(rank) || (stage == Stage::kTags && rank->is.phase == Phase::kResuming);
      const bool waited_for = rank->alive && resuming.contains(rank->process.session);
      // One that has ended the earlier resume meanwhile sees this one at its next safe point, which may be late.
      const bool runs = rank->heard && rank->is.phase == Phase::kRunning;
      return !waited_for || runs || (speaks && rank->is.stage_done >= stage);
    });
    if (waits_for && *waits_for == nullptr) continue;
    // Tags that are back already are paused again, so that everything is paused as before.
    if (!waits_for && waits_for.status().code() != Code::kTimeout) PauseAgainWhatIsPaused(tags);
    if (!waits_for) return waits_for.status();
    const RankLink& late = **waits_for;
    return {Code::kTimeout, fmt::format("{} has not resumed in time: {}; try again", late.name(), late.DoingInDetail())};
  }
  return {};  // those that were not paused have nothing to do about it when they come to their next safe point
}

}  // namespace amem::control
