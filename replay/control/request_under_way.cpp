#include "replay/control/request_under_way.h"

#include <algorithm>
#include <utility>

#include "journal/base/clock.h"
#include "statemachine/check.h"

namespace amem::control {

constexpr const char* kWithdrawn = "the request was withdrawn";

void RequestUnderWay::Begin(SessionId self, Actions& actions) {
  self_ = self;
  actions_ = &actions;
}

void RequestUnderWay::LetLaunchesGo() {
  actions_->LetLaunchesGo();
  number_.holds_launches = 0;
  desk_.ChangeStatus([](RankStatus& mine) {
    mine.launches = {};
    mine.parked = false;
  });
}

RequestUnderWay::Next RequestUnderWay::HoldLaunches(const Order& order, OwnPause own) {
  // What was counted and let go for an earlier stop says nothing of this one.
  if (std::exchange(number_.holds_launches, order.request) != order.request) actions_->LetLaunchesGo();
  const agreement::LaunchReading reading = actions_->HoldLaunches(order.launches);
  if (order.launches.stands && reading.why_not.empty()) {
    desk_.ChangeStatus(
        [&](RankStatus& mine) { mine.launches = {.version = reading.version}; });  // what it counted matters no more
    return Arrive(order, 0, own, own == OwnPause::kPaused);
  }
  desk_.Report(Phase::kHeld, Stage::kCome, [&](RankStatus& mine) {
    mine.at = 0;
    mine.launches = reading;
  });
  return Next::kWait;
}

// What no order and no failure can cause.
Status RequestUnderWay::Check() const {
  AMEM_CHECK(actions_ != nullptr);
  if (mode_ != Mode::kIdle) AMEM_CHECK(number_.about > 0U);
  if (mode_ != Mode::kPaused) AMEM_CHECK(nccl_ == Nccl::kHere, number_.about);  // nobody runs without NCCL's memory
  if (own_pause_ && mode_ == Mode::kPaused)
    AMEM_CHECK(nccl_ == Nccl::kHere, number_.about);  // the program's own pause is not ours to end
  if (mode_ != Mode::kIdle)
    AMEM_CHECK(number_.journaled >= number_.about, number_.about);  // nothing is done that a journal does not have
  return {};
}

// A rank whose state is not true takes no part any more, and says so to each request; one that is paused stays paused, because
// its memory may be away.
std::optional<RequestUnderWay::Next> RequestUnderWay::UnlessWhole(const Order& order) {
  if (broken_.ok()) broken_ = Check();
  if (broken_.ok()) return {};
  const bool pauses = order.ask == Ask::kPause;
  if (actions_ != nullptr && order.request != 0 && std::exchange(number_.journaled, order.request) != order.request)
    actions_->Note(
        RequestEnded{order.request, pauses ? CycleKind::kPause : CycleKind::kResume, broken_.code(), broken_.message()});
  const bool stays = mode_ == Mode::kPaused;
  if (!stays) desk_.MarkDone(order.request);
  desk_.Report(stays ? Phase::kPaused : Phase::kFailed, Stage::kCome, [&](RankStatus& mine) {
    mine.about = order.request != 0 ? order.request : mine.about;
    mine.failure = broken_;
  });
  return stays ? Next::kWait : Next::kGoOn;
}

RequestUnderWay::Next RequestUnderWay::Advance(const Order& order, std::uint64_t step) {
  if (const auto broken = UnlessWhole(order)) return *broken;
  if (mode_ == Mode::kPaused) return AdvancePaused(order);
  if (mode_ == Mode::kWaiting) return AdvanceWaiting(order);
  if (order.request != 0 && step != kOwnPause) return AdvanceIdle(order, step);
  desk_.ChangeStatus([](RankStatus& mine) {
    if (mine.phase != Phase::kFailed) mine.phase = Phase::kRunning;
  });
  return Next::kGoOn;
}

RequestUnderWay::Next RequestUnderWay::AdvanceIdle(const Order& order, std::uint64_t step) {
  desk_.Begin(order.request, Phase::kRunning);
  const bool resumes = order.ask == Ask::kResume;  // and nothing is paused
  if (resumes || (order.stage == Stage::kCome && !desk_.ToolLives())) {
    desk_.MarkDone(order.request);
    desk_.Report(Phase::kRunning, resumes ? Stage::kNccl : Stage::kCome);
    return Next::kGoOn;
  }
  // Inside its own pause a program may come to safe points whose numbers the others have not agreed on, and need not.
  const OwnPause own = desk_.OwnPauseNow();
  // Others are paused, and are to pause again what has come back; of this rank, which runs, nobody has waited for it to come.
  const bool is_new = std::exchange(number_.seen, order.request) != order.request;
  if (is_new && order.stage != Stage::kCome && own != OwnPause::kPaused) {
    desk_.MarkDone(order.request);
    desk_.Report(Phase::kRunning, Stage::kCome);
    return Next::kGoOn;
  }
  if (step == kBetweenLaunches) return order.launches.version != 0 ? HoldLaunches(order, own) : Next::kGoOn;
  if (own == OwnPause::kPaused) return Arrive(order, step, own, true);
  if (step == kOwnResume) return Next::kGoOn;  // it would resume what is not paused any more, and comes for no request
  if (order.stage == Stage::kCome && (order.target == 0 || step > order.target)) {
    desk_.Report(Phase::kHeld, Stage::kCome, [step](RankStatus& mine) { mine.at = step; });
    return Next::kWait;
  }
  if (step == order.target) return Arrive(order, step, own, false);
  desk_.Report(Phase::kRunning, Stage::kCome);
  return Next::kGoOn;
}

// While another thread of the program pauses or resumes NCCL's memory, that comes first.
RequestUnderWay::Next RequestUnderWay::Arrive(const Order& order, std::uint64_t step, OwnPause own, bool own_pause) {
  held_before_ = actions_->Held();
  const bool comes = desk_.Arrive(own, [&](RankStatus& mine) {
    mine.at = step;
    mine.at_ns = MonotonicNs();
    mine.held = held_before_;
  });
  if (!comes) return Next::kWait;
  mode_ = Mode::kWaiting;
  number_.about = order.request;
  own_pause_ = own_pause;
  tags_done_ = false;
  nccl_ = Nccl::kHere;
  JournalRequestOnce(order);
  actions_->Note(SafepointReached{order.request, step});
  return Next::kAgain;
}

// Up to which stage the request may be carried out. kTimeout: that is not known yet; another failure: it is void.
Result<Stage> RequestUnderWay::StageOf(const Order& order) {
  if (order.stage == Stage::kNccl || desk_.ToolLives()) return order.stage;
  // The tool may have died between its order to one rank and that to another. The rank that got it first decides for all.
  const bool asks = order.stage == Stage::kTags && order.told_first != SessionId() && order.told_first != self_;
  const auto first = asks ? actions_->Ask(order.told_first) : Result<RankStatus>(Status(Code::kPeerLost, "nobody"));
  // It is stopped, or cannot be asked now, for lack of descriptors for example: which order it got is not known yet.
  if (!first && first.status().code() != Code::kPeerLost) return Status{Code::kTimeout, first.status().message()};
  const bool told =
      first && first->asked.request == order.request && first->asked.ask == Ask::kPause && first->asked.stage == Stage::kNccl;
  if (told) return Stage::kNccl;
  return Status{Code::kPeerLost, "the program that asked has ended, or does not answer"};
}

RequestUnderWay::Next RequestUnderWay::AdvanceWaiting(const Order& order) {
  if (order.request != number_.about) return GiveUp({Code::kRefused, kWithdrawn}, Phase::kRunning);
  const Result<Stage> stage = StageOf(order);
  if (!stage) return stage.status().code() == Code::kTimeout ? Next::kWait : GiveUp(stage.status(), Phase::kRunning);
  if (*stage == Stage::kCome) return Next::kWait;
  if (!tags_done_) {
    desk_.Report(Phase::kPausing, Stage::kCome);
    if (order.all_tags)
      if (const Status paused = actions_->PauseTags(); !paused.ok()) return GiveUp(paused, Phase::kFailed);
    tags_done_ = true;
    desk_.Report(Phase::kPausing, Stage::kTags);
    return Next::kAgain;
  }
  return *stage == Stage::kTags ? Next::kWait : PauseNow(order);
}

RequestUnderWay::Next RequestUnderWay::PauseNow(const Order& order) {
  const bool between = order.launches.version != 0, parks = order.launches.parks;
  if (!own_pause_) {
    if (between)
      if (const Status idle = actions_->AwaitLaunches(); !idle.ok()) return GiveUp(idle, Phase::kFailed);
    if (const auto next = parks ? std::nullopt : UnlessNcclPauses()) return *next;
  }
  mode_ = Mode::kPaused;
  const Bytes held = actions_->Held();
  const Bytes freed = held_before_ - std::min(held_before_, held);
  actions_->Note(RequestEnded{number_.about, CycleKind::kPause, Code::kOk, "", freed});
  desk_.Report(Phase::kPaused, Stage::kNccl, [&](RankStatus& mine) {
    mine.held = held;
    mine.freed = freed;
    mine.parked = parks;
  });
  return Next::kWait;
}

// A pause that the program has made meanwhile is for the program to end.
std::optional<RequestUnderWay::Next> RequestUnderWay::UnlessNcclPauses() {
  const Status paused = actions_->PauseNccl();
  nccl_ = Nccl::kPaused;
  if (paused.ok()) return {};
  const bool away = actions_->NcclIsAway() && desk_.OwnPauseNow() == OwnPause::kNo;
  nccl_ = away ? Nccl::kInDoubt : Nccl::kHere;
  return away ? StayAway(paused) : GiveUp(paused, Phase::kFailed);
}

// The undo of the pause failed too, on all ranks that share memory. What the program would launch now is refused, so it waits
// here like after a pause, and a resume from outside mends it, which brings the tags back first.
RequestUnderWay::Next RequestUnderWay::StayAway(const Status& why) {
  desk_.MarkDone(number_.about);
  mode_ = Mode::kPaused;
  return StayPaused(CycleKind::kPause, why);
}

// The rank goes on as before the request. Where its tags do not come back, it must not: it stays, and a resume from outside can
// mend it.
RequestUnderWay::Next RequestUnderWay::GiveUp(const Status& why, Phase phase) {
  const Status undone = actions_->ResumeTags();
  desk_.MarkDone(number_.about);
  if (!undone.ok()) {
    mode_ = Mode::kPaused;
    return StayPaused(CycleKind::kResume,
                      {undone.code(), why.message() + "; then its tags could not be resumed: " + undone.message()});
  }
  mode_ = Mode::kIdle;
  actions_->Note(RequestEnded{number_.about, CycleKind::kPause, why.code(), why.message()});
  desk_.Report(phase, Stage::kCome, [&](RankStatus& mine) {
    if (phase == Phase::kFailed) mine.failure = why;
  });
  return phase == Phase::kFailed ? Next::kGoOn : Next::kAgain;
}

Status RequestUnderWay::PauseMoreTags() {
  if (number_.holds_launches != 0)
    return {Code::kRefused, "it is stopped between two launches, and until the next one its program runs on and uses its tags"};
  return actions_->PauseTags();
}

RequestUnderWay::Next RequestUnderWay::AdvancePaused(const Order& order) {
  if (number_.again != 0 && order.request != number_.again) StayAsBefore({Code::kRefused, kWithdrawn});
  if (order.request == 0 || order.request == number_.about) {
    if (!desk_.HasAnswered(number_.about)) SayWhatIsSo(order);
    return Next::kWait;
  }
  return order.ask == Ask::kResume ? ResumeAsAsked(order) : PauseAgain(order);
}

// It is paused, so it has come; what it has still to do is done with the others, who may not come.
RequestUnderWay::Next RequestUnderWay::PauseAgain(const Order& order) {
  if (number_.again == 0) {
    JournalRequestOnce(order);
    number_.again = order.request;
    tags_done_ = false;
    desk_.ChangeStatus([&](const RankStatus& mine) { failed_before_ = mine.failure; });
    desk_.Begin(order.request, Phase::kPaused);
  }
  const Result<Stage> stage = StageOf(order);
  if (!stage && stage.status().code() != Code::kTimeout) {
    desk_.MarkDone(order.request);
    StayAsBefore(stage.status());
  }
  if (!stage || *stage == Stage::kCome) return Next::kWait;
  if (!tags_done_) {
    if (order.all_tags)
      if (const Status paused = PauseMoreTags(); !paused.ok()) return EndAgain(order), StayPaused(CycleKind::kPause, paused);
    tags_done_ = true;
    desk_.Report(Phase::kPaused, Stage::kTags);
    return Next::kAgain;
  }
  if (*stage == Stage::kTags) return Next::kWait;
  EndAgain(order);
  if (nccl_ == Nccl::kInDoubt) {
    desk_.Report(Phase::kPausing, Stage::kTags);
    if (const auto next = UnlessNcclPauses()) return *next;
  }
  actions_->Note(RequestEnded{order.request, CycleKind::kPause, Code::kOk, ""});
  desk_.Report(Phase::kPaused, Stage::kNccl, [held = actions_->Held()](RankStatus& mine) { mine.held = held; });
  return Next::kWait;
}

// Of a rank that is paused and has not come to say so, because an exception ended the turn.
void RequestUnderWay::SayWhatIsSo(const Order& order) {
  const bool as_asked = order.request == number_.about && order.ask == Ask::kPause && tags_done_ && nccl_ != Nccl::kInDoubt;
  desk_.Report(Phase::kPaused, as_asked ? Stage::kNccl : Stage::kCome, [&](RankStatus& mine) {
    if (!as_asked && mine.failure.ok()) mine.failure = {Code::kOutOfMemory, "the host has too little memory to say why"};
    if (as_asked) mine.parked = order.launches.parks;
  });
}

void RequestUnderWay::EndAgain(const Order& order) {
  number_.about = order.request;
  number_.again = 0;
}

// A second pause has come to nothing. What of its tags has gone comes back with the others.
void RequestUnderWay::StayAsBefore(const Status& why) {
  actions_->Note(RequestEnded{std::exchange(number_.again, 0), CycleKind::kPause, why.code(), why.message()});
  desk_.Report(Phase::kPaused, Stage::kCome, [&](RankStatus& mine) { mine.failure = failed_before_; });
}

RequestUnderWay::Next RequestUnderWay::ResumeAsAsked(const Order& order) {
  if (number_.journaled != order.request) {
    JournalRequestOnce(order);
    tags_done_ = false;
    desk_.Begin(order.request, Phase::kResuming);
  }
  if (!tags_done_) {
    if (const Status resumed = actions_->ResumeTags(); !resumed.ok())
      return number_.about = order.request, StayPaused(CycleKind::kResume, resumed);
    tags_done_ = true;
    desk_.Report(Phase::kResuming, Stage::kTags);
  }
  // Others may have the order already to bring NCCL's memory back, so that this goes on when the tool has died.
  if (order.stage != Stage::kNccl && desk_.ToolLives()) return Next::kWait;
  if (nccl_ != Nccl::kHere) {
    nccl_ = Nccl::kInDoubt;
    if (const Status resumed = actions_->ResumeNccl(); !resumed.ok())
      return number_.about = order.request, StayPaused(CycleKind::kResume, resumed);
  }
  nccl_ = Nccl::kHere;
  number_.about = order.request;
  mode_ = Mode::kIdle;
  actions_->Note(RequestEnded{order.request, CycleKind::kResume, Code::kOk, ""});
  desk_.MarkDone(order.request);
  desk_.Report(Phase::kRunning, Stage::kNccl, [held = actions_->Held()](RankStatus& mine) { mine.held = held; });
  return Next::kGoOn;
}

RequestUnderWay::Next RequestUnderWay::StayPaused(CycleKind failed, const Status& why) {
  actions_->Note(RequestEnded{number_.about, failed, why.code(), why.message()});
  desk_.Report(Phase::kPaused, Stage::kCome, [&](RankStatus& mine) { mine.failure = why; });
  return Next::kWait;
}

void RequestUnderWay::JournalRequestOnce(const Order& order) {
  if (std::exchange(number_.journaled, order.request) == order.request) return;
  const bool pauses = order.ask == Ask::kPause;
  actions_->Note(RequestSeen{order.request, pauses ? CycleKind::kPause : CycleKind::kResume, order.by_pid,
                             pauses ? order.target : 0, order.all_tags});
}

}  // namespace amem::control
