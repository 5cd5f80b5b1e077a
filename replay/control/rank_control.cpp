#include "replay/control/rank_control.h"

#include <algorithm>
#include <string>
#include <thread>

#include "journal/base/clock.h"
#include "journal/base/process_stat.h"

namespace amem::control {
namespace {

constexpr int kTries = 20;
constexpr std::chrono::milliseconds kSlice{100};  // how soon the death of the tool is seen

Stage StageOf(const Page& page) {
  return static_cast<Stage>(std::min(page.stage.load(std::memory_order_acquire), static_cast<std::uint32_t>(Stage::kNccl)));
}
Ask AskOf(const Page& page) { return static_cast<Ask>(page.kind.load(std::memory_order_acquire)); }

}  // namespace

bool RankControl::ToolLives() const {
  return page_.LockedByAnother() && MonotonicNs() < page_->void_after_ns.load(std::memory_order_acquire);
}

// The tool died between its last word to one rank and that to another. The one that it told first decides for all.
bool RankControl::AnotherIsTold() const {
  const std::string first = GetText(page_->told_first, sizeof page_->told_first);
  if (first.empty() || StageOf(page_.page()) != Stage::kTags) return false;
  const auto page = MappedPage::Open(first);
  return page.ok() && (*page)->asked.load(std::memory_order_seq_cst) == about_ && AskOf(page->page()) == Ask::kPause &&
         StageOf(page->page()) == Stage::kNccl && StartTicks((*page)->pid) == (*page)->start_ticks;
}

bool RankControl::Serve(std::uint64_t step, bool return_soon) {
  std::unique_lock serving(serving_, std::defer_lock);
  // Another thread may be inside for as long as the job is paused.
  for (int tries = 0; !serving.try_lock(); ++tries) {
    if (return_soon && tries >= kTries) return false;
    std::this_thread::sleep_for(kSlice / kTries);
  }
  for (;;) {
    const std::uint32_t ticket = page_->bell.Ticket();
    const Next next = Look(step);
    if (next == Next::kGoOn) return true;
    if (next == Next::kAgain) continue;
    page_->bell.Wait(ticket, static_cast<std::uint32_t>(kSlice.count()));
    if (return_soon && Look(step) == Next::kWait) return false;
  }
}

RankControl::Next RankControl::Look(std::uint64_t step) {
  const std::uint64_t request = page_->asked.load(std::memory_order_seq_cst);
  if (mode_ == Mode::kPaused) return LookPaused(request);
  if (mode_ == Mode::kWaiting) {
    Stage stage = StageOf(page_.page());
    // Looked at again: a stage that belongs to a later request was written after `asked` had changed.
    if (request != about_ || page_->asked.load(std::memory_order_seq_cst) != about_)
      return GiveUp({Code::kRefused, "the request was withdrawn"}, Phase::kRunning);
    if (stage != Stage::kNccl && !ToolLives()) {
      if (!AnotherIsTold())
        return GiveUp({Code::kPeerLost, "the program that asked has ended, or does not answer"}, Phase::kRunning);
      stage = Stage::kNccl;
    }
    return LookWaiting(stage);
  }
  if (request == 0 || request == settled_) {
    if (page_->phase.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(Phase::kHeld))
      Report(Phase::kRunning, Stage::kCome);
    return Next::kGoOn;
  }
  return LookIdle(request, step);
}

RankControl::Next RankControl::LookIdle(std::uint64_t request, std::uint64_t step) {
  const Ask ask = AskOf(page_.page());
  if (ask != Ask::kPause) {  // a resume, and nothing is paused
    Begin(request, Phase::kRunning);
    settled_ = request;
    TellFrozen();
    Report(Phase::kRunning, Stage::kNccl);
    return Next::kGoOn;
  }
  const Stage stage = StageOf(page_.page());
  Begin(request, Phase::kRunning);
  if (stage == Stage::kCome && !ToolLives()) {
    settled_ = request;
    Report(Phase::kRunning, Stage::kCome);
    return Next::kGoOn;
  }
  const std::uint64_t target = page_->target.load(std::memory_order_acquire);
  // Inside its own pause a program may come to safe points whose numbers the others have not agreed on, and need not.
  const bool own = page_->own_pause.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(OwnPause::kPaused);
  if (step == kOwnResume || own) return Arrive(request, step, true);
  if (stage == Stage::kCome && (target == 0 || step > target)) {
    page_->at.store(step, std::memory_order_relaxed);
    Report(Phase::kHeld, Stage::kCome);
    return Next::kWait;
  }
  if (step == target) return Arrive(request, step, false);
  Report(Phase::kRunning, Stage::kCome);
  return Next::kGoOn;
}

RankControl::Next RankControl::Arrive(std::uint64_t request, std::uint64_t step, bool own_pause) {
  See(request, CycleKind::kPause);
  actions_.Note(SafepointReached{request, step});
  mode_ = Mode::kWaiting;
  about_ = request;
  own_pause_ = own_pause;
  tags_done_ = false;
  nccl_paused_ = false;
  held_before_ = actions_.Held();
  page_->at.store(step, std::memory_order_relaxed);
  page_->at_ns.store(MonotonicNs(), std::memory_order_relaxed);
  page_->held_bytes.store(held_before_, std::memory_order_relaxed);
  Report(Phase::kArrived, Stage::kCome);
  return Next::kAgain;
}

RankControl::Next RankControl::LookWaiting(Stage stage) {
  if (stage == Stage::kCome) return Next::kWait;
  if (!tags_done_) {
    Report(Phase::kPausing, Stage::kCome);
    if (page_->all_tags.load(std::memory_order_acquire) != 0)
      if (const Status paused = actions_.PauseTags(); !paused.ok()) return GiveUp(paused, Phase::kFailed);
    tags_done_ = true;
    Report(Phase::kPausing, Stage::kTags);
    return Next::kAgain;
  }
  return stage == Stage::kTags ? Next::kWait : PauseNow();
}

RankControl::Next RankControl::PauseNow() {
  if (!own_pause_) {
    if (const Status paused = actions_.PauseNccl(); !paused.ok()) return GiveUp(paused, Phase::kFailed);
    nccl_paused_ = true;
  }
  mode_ = Mode::kPaused;
  const Bytes held = actions_.Held();
  const Bytes freed = held_before_ - std::min(held_before_, held);
  page_->held_bytes.store(held, std::memory_order_relaxed);
  page_->freed_bytes.store(freed, std::memory_order_relaxed);
  actions_.Note(RequestEnded{about_, CycleKind::kPause, Code::kOk, "", freed});
  Report(Phase::kPaused, Stage::kNccl);
  return Next::kWait;
}

// The rank goes on as before the request. Where its tags do not come back, it must not: it stays, and a resume from outside can
// mend it.
RankControl::Next RankControl::GiveUp(const Status& why, Phase phase) {
  settled_ = about_;
  if (const Status undone = actions_.ResumeTags(); !undone.ok()) {
    mode_ = Mode::kPaused;
    return StayPaused({undone.code(), why.message() + "; then its tags could not be resumed: " + undone.message()});
  }
  mode_ = Mode::kIdle;
  actions_.Note(RequestEnded{about_, CycleKind::kPause, why.code(), why.message()});
  if (phase == Phase::kFailed) ReportFailure(why);
  Report(phase, Stage::kCome);
  return phase == Phase::kFailed ? Next::kGoOn : Next::kAgain;
}

RankControl::Next RankControl::LookPaused(std::uint64_t request) {
  if (request == 0 || request == about_) return Next::kWait;
  if (AskOf(page_.page()) == Ask::kResume) return ResumeAsAsked(request);
  See(request, CycleKind::kPause);
  about_ = request;
  Begin(request, Phase::kPausing);
  if (page_->all_tags.load(std::memory_order_acquire) != 0)
    if (const Status paused = actions_.PauseTags(); !paused.ok()) return StayPaused(paused);
  tags_done_ = true;
  page_->held_bytes.store(actions_.Held(), std::memory_order_relaxed);
  actions_.Note(RequestEnded{request, CycleKind::kPause, Code::kOk, ""});
  Report(Phase::kPaused, Stage::kNccl);
  return Next::kWait;
}

RankControl::Next RankControl::ResumeAsAsked(std::uint64_t request) {
  if (seen_ != request) {
    See(request, CycleKind::kResume);
    TellFrozen();
    tags_done_ = false;
    Begin(request, Phase::kResuming);
  }
  if (!tags_done_) {
    if (const Status resumed = actions_.ResumeTags(); !resumed.ok()) {
      about_ = request;
      return StayPaused(resumed);
    }
    tags_done_ = true;
    Report(Phase::kResuming, Stage::kTags);
  }
  // Others may have been told already to bring NCCL's memory back, so that this goes on when the tool has died.
  if (StageOf(page_.page()) != Stage::kNccl && ToolLives()) return Next::kWait;
  about_ = request;
  if (nccl_paused_)
    if (const Status resumed = actions_.ResumeNccl(); !resumed.ok()) return StayPaused(resumed);
  nccl_paused_ = false;
  mode_ = Mode::kIdle;
  settled_ = request;
  page_->held_bytes.store(actions_.Held(), std::memory_order_relaxed);
  actions_.Note(RequestEnded{request, CycleKind::kResume, Code::kOk, ""});
  Report(Phase::kRunning, Stage::kNccl);
  return Next::kGoOn;
}

RankControl::Next RankControl::StayPaused(const Status& why) {
  actions_.Note(RequestEnded{about_, CycleKind::kResume, why.code(), why.message()});
  ReportFailure(why);
  Report(Phase::kPaused, Stage::kCome);
  return Next::kWait;
}

void RankControl::See(std::uint64_t request, CycleKind kind) {
  if (seen_ == request) return;
  seen_ = request;
  const Page& page = page_.page();
  actions_.Note(RequestSeen{request, kind, page.by_pid.load(std::memory_order_relaxed),
                            kind == CycleKind::kPause ? page.target.load(std::memory_order_relaxed) : 0,
                            page.all_tags.load(std::memory_order_relaxed) != 0});
}

void RankControl::TellFrozen() {
  const Page& page = page_.page();
  const std::uint64_t note = page.note.load(std::memory_order_acquire);
  if (note == note_told_) return;
  note_told_ = note;
  actions_.Note(Frozen{page.note_from_ns.load(std::memory_order_relaxed), page.note_to_ns.load(std::memory_order_relaxed),
                       page.note_bytes.load(std::memory_order_relaxed), GetText(page.note_gpus, sizeof page.note_gpus)});
}

// The tool reads `about` first, so that it takes nothing that is about an earlier request for an answer to this one.
void RankControl::Begin(std::uint64_t request, Phase phase) {
  if (page_->about.load(std::memory_order_relaxed) == request) return;
  page_->code.store(0, std::memory_order_relaxed);
  Report(phase, Stage::kCome);
  page_->about.store(request, std::memory_order_release);
}

void RankControl::Report(Phase phase, Stage done) {
  page_->stage_done.store(static_cast<std::uint32_t>(done), std::memory_order_relaxed);
  page_->phase.store(static_cast<std::uint32_t>(phase), std::memory_order_release);
}

void RankControl::ReportFailure(const Status& why) {
  PutText(page_->message, sizeof page_->message, why.message());
  page_->code.store(static_cast<std::uint32_t>(why.code()), std::memory_order_relaxed);
}

void RankControl::OwnPauseHolds() {
  page_->own_pause.store(static_cast<std::uint32_t>(OwnPause::kPaused), std::memory_order_seq_cst);
}

// The tool takes a rank whose own pause holds for one that has come. So the rank first says that it resumes and looks then
// whether it is asked; the tool asks first and looks then. Where a request has paused the rank, and another thread of the
// program resumes, that thread waits as well.
bool RankControl::MayResume(bool return_soon) {
  const bool own = page_->own_pause.load(std::memory_order_relaxed) != static_cast<std::uint32_t>(OwnPause::kNo);
  for (;;) {
    if (own) page_->own_pause.store(static_cast<std::uint32_t>(OwnPause::kResuming), std::memory_order_seq_cst);
    const std::uint64_t request = page_->asked.load(std::memory_order_seq_cst);
    if (request == 0 || request == settled_.load()) return true;
    if (own) page_->own_pause.store(static_cast<std::uint32_t>(OwnPause::kPaused), std::memory_order_seq_cst);
    if (!Serve(kOwnResume, return_soon)) return false;
  }
}

void RankControl::OwnResumeEnded(bool resumed) {
  page_->own_pause.store(static_cast<std::uint32_t>(resumed ? OwnPause::kNo : OwnPause::kPaused), std::memory_order_seq_cst);
}

}  // namespace amem::control
