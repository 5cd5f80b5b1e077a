// The rank's side of requests from outside: comes to the step that was agreed on, waits there, and does what is asked.
//
// What a rank does for a request is done by the thread that came to the safe point (or to the program's own resume), and by no
// other. The state is the object's and not that thread's, so that a wait that was left for a signal handler is gone on with.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "replay/control/page.h"
#include "statemachine/event.h"

namespace amem::control {

// What is done to the rank's memory. Each is called by one thread at a time.
class Actions {
 public:
  virtual ~Actions() = default;
  // The program's tags that are resident, but for those whose contents a pause would forget. On failure none is paused.
  virtual Status PauseTags() = 0;
  virtual Status ResumeTags() = 0;  // those that PauseTags has paused; none: ok
  // Together with all ranks that share memory; on failure nothing has changed.
  virtual Status PauseNccl() = 0;
  virtual Status ResumeNccl() = 0;
  virtual Bytes Held() = 0;  // GPU memory that is resident now
  virtual void Note(EventBody event) = 0;
};

class RankControl {
 public:
  RankControl(MappedPage page, Actions& actions) : page_(std::move(page)), actions_(actions) {}

  // The program came to its `step`th safe point. True: something is asked, and Serve must be called.
  bool Came(std::uint64_t step) {
    Page& page = page_.page();
    std::uint64_t last = page.steps.load(std::memory_order_relaxed);
    // Both ends are sequentially consistent (page.h). Of several threads the one that is ahead has told.
    while (last < step && !page.steps.compare_exchange_weak(last, step, std::memory_order_seq_cst)) {
    }
    return page.asked.load(std::memory_order_seq_cst) != 0;
  }
  void CameAt(std::uint64_t coarse_ns) { page_->last_step_ns.store(coarse_ns, std::memory_order_relaxed); }
  // Before the page is shown to other threads: safe points that were passed without it.
  void BeginAt(std::uint64_t step) { page_->steps.store(step, std::memory_order_seq_cst); }

  // Waits for as long as a request holds the caller. With `return_soon` it returns false after a tenth of a second, and the
  // caller, an interpreter that has to run its signal handlers, is to call again.
  bool ServeAtStep(std::uint64_t step, bool return_soon) { return Serve(step, return_soon); }

  // Around the program's own pauses and resumes.
  void OwnPauseHolds();
  // True: it may resume now. Waits while a request stands, so that the memory stays away until the resume from outside.
  bool MayResume(bool return_soon);
  void OwnResumeEnded(bool resumed);

 private:
  enum class Mode { kIdle, kWaiting, kPaused };
  enum class Next { kGoOn, kAgain, kWait };
  static constexpr std::uint64_t kOwnResume = 0;  // a step that no safe point has

  bool Serve(std::uint64_t step, bool return_soon);
  Next Look(std::uint64_t step);
  Next LookIdle(std::uint64_t request, std::uint64_t step);
  Next LookWaiting(Stage stage);
  Next LookPaused(std::uint64_t request);
  Next ResumeAsAsked(std::uint64_t request);
  Next Arrive(std::uint64_t request, std::uint64_t step, bool own_pause);
  Next PauseNow();
  Next StayPaused(const Status& why);
  Next GiveUp(const Status& why, Phase phase);
  void See(std::uint64_t request, CycleKind kind);
  void TellFrozen();
  void Begin(std::uint64_t request, Phase phase);
  void Report(Phase phase, Stage done);
  void ReportFailure(const Status& why);
  [[nodiscard]] bool ToolLives() const;
  [[nodiscard]] bool AnotherIsTold() const;

  MappedPage page_;
  Actions& actions_;
  std::mutex serving_;  // over all below: one thread does what is asked
  Mode mode_ = Mode::kIdle;
  std::uint64_t about_ = 0;                 // the request of kWaiting and kPaused
  std::atomic<std::uint64_t> settled_ = 0;  // nothing more is to be done about this one
  std::uint64_t seen_ = 0;                  // is in the journal
  std::uint64_t note_told_ = 0;
  bool own_pause_ = false;  // of kWaiting and kPaused: NCCL's memory is away because of the program, which brings it back
  std::uint64_t held_before_ = 0;
  bool tags_done_ = false;    // of `about_`: paused, or back
  bool nccl_paused_ = false;  // by a request
};

}  // namespace amem::control
