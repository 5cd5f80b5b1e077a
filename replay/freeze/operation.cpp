#include "replay/freeze/operation.h"

#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <thread>

#include "statemachine/event.h"

namespace amem {

// What is said while a step of each process is made, from kLock on.
constexpr const char* kDoing[] = {"locking", "the driver takes the rest", "the driver brings it back", "unlocking"};

static void Move(FrozenProcess& one, const std::vector<GpuPair>& pairs) {
  for (const GpuPair& pair : pairs) {
    std::erase_if(one.moved, [&](const GpuPair& earlier) { return earlier.from == pair.from; });
    one.moved.push_back(pair);
  }
}

static Status And(const Status& why, const std::string& more) {
  return {why.code(), why.message() + more, why.driver_result()};
}

// ---- what there is ---------------------------------------------------------------------------------------------------------

Status FreezeOperation::FindProcesses() {
  processes_.clear();
  for (const control::RankView& rank : job_.Ranks()) {
    if (!rank.alive && host_.LifeOf(rank.process).HasEnded()) continue;
    if (!rank.alive) return {Code::kRefused, fmt::format("nothing was touched: {} {}", rank.process.name, rank.Doing())};
    processes_.push_back({.process = rank.process, .gpus = {}, .moved = {}});
  }
  return processes_.empty() ? Status(Code::kNotFound, "no process of the job lives on this host") : Status();
}

bool FreezeOperation::HasEnded(const FrozenProcess& one) const { return host_.LifeOf(one.process).HasEnded(); }

std::vector<Result<State>> FreezeOperation::ReadJournals() {
  std::vector<Result<State>> states(processes_.size(), Status());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < states.size(); ++i)
      threads.emplace_back([&, i] { states[i] = job_.MemoryOf(processes_[i].process); });
  }
  history_.reset();
  for (const Result<State>& state : states)
    if (state.ok() && state->freeze && (!history_ || Order(*history_) < Order(*state->freeze))) history_ = state->freeze;
  if (history_ && IsBack(*history_)) history_.reset();
  if (!history_) return states;
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (!states[i].ok() || !states[i]->freeze || states[i]->freeze->begun_ns != history_->begun_ns) continue;
    const FreezeStep& told = *states[i]->freeze;
    FrozenProcess& one = processes_[i];
    one = {one.process, told.gpus, told.moved, told.from_ns, true, told.step == ToText(StepOfFreeze::kRestore) && !told.done};
    history_->pauses |= told.pauses;
  }
  for (const FreezeMember& member : history_->members) {
    const RankProcess process{member.session, member.pid, member.start_ticks, member.name, {}};
    if (std::ranges::none_of(processes_, [&](const FrozenProcess& one) { return Same(one.process, process); }))
      processes_.push_back({.process = process, .gpus = {}, .moved = {}, .told = true});
  }
  return states;
}

Status FreezeOperation::ReadHistory() {
  AMEM_TRY(FindProcesses());
  ReadJournals();
  if (history_) pairs_ = history_->pairs;
  return {};
}

void FreezeOperation::BeginNew() {
  pairs_.clear();
  for (FrozenProcess& one : processes_) one = {.process = one.process, .gpus = {}, .moved = {}};
  journal_.BeginNew(goal_, processes_);
}

// With the figures of those that have none yet.
void FreezeOperation::Measure() {
  auto held = HeldBy(host_.GpusInUse());
  for (FrozenProcess& one : processes_)
    for (const auto& [gpu, bytes] : held[one.process.pid])
      if (!one.told) one.gpus.push_back({gpu, bytes});
}

Status FreezeOperation::GoOn() {
  history_ ? journal_.GoOnWith(*history_) : BeginNew();
  Measure();
  // Restores whose tool died before it wrote what came of them: where the contents are now is the driver's to say.
  for (FrozenProcess& one : processes_) {
    if (!one.restore_unanswered || HasEnded(one)) continue;
    AMEM_ASSIGN(const auto state, checkpointer_.StateOf(one.process.pid).Within(one.process.name));
    one.restore_unanswered = false;
    if (state == CheckpointState::kLocked || state == CheckpointState::kRunning) Move(one, history_->pairs);
    AMEM_TRY(journal_.Note(one, StepOfFreeze::kRestore, true));
  }
  return {};
}

void FreezeOperation::Lose(const FrozenProcess& process, const std::string& why) {
  const std::string text = fmt::format("{} (pid {}): {}", process.process.name, process.process.pid, why);
  if (std::ranges::find(report_.lost, text) == report_.lost.end()) report_.lost.push_back(text);
}

FreezeOperation::Processes FreezeOperation::In(CheckpointState state) {
  Processes found;
  for (FrozenProcess& one : processes_) {
    if (HasEnded(one)) {
      Lose(one, "it has ended");
      continue;
    }
    const auto now = checkpointer_.StateOf(one.process.pid);
    if (!now.ok()) {
      Lose(one, now.status().message());
    } else if (*now == CheckpointState::kFailed) {
      Lose(one, "the driver could not restore it, and its GPU state is gone; it must end");
    } else if (*now == state) {
      found.push_back(&one);
    }
  }
  return found;
}

// ---- commands --------------------------------------------------------------------------------------------------------------

Status FreezeOperation::Freeze() {
  AMEM_TRY(FindProcesses());
  goal_ = FreezeGoal::kFrozen;
  // The pause of a job that is taken to run, and then the driver's word.
  Status done;
  if (AllArePaused()) {
    AMEM_TRY(Check());
    AMEM_TRY(Begin());
    Took("checks", options_.began_ns);
  } else {
    done = PauseWhenChecked();
  }
  if (!done.ok() && !checked_) return done;  // the checks found something
  if (!done.ok()) return Ended("running", And(done, ". The job runs as before"));
  done = AskDriver();
  if (done.ok()) return ToFrozen();
  const Status resumed = ResumeAll();
  if (!resumed.ok()) return Ended("stuck", And(done, "; and then " + resumed.message()));
  const std::string undone = resumes_ ? ". The pause is undone, and " : ". Nothing was done, and ";
  return Ended(resumes_ ? "running" : "paused", And(done, undone + AsBefore()));
}

// What precedes the pause. From any thread, while no other uses the object.
Status FreezeOperation::Check() {
  const std::vector<Result<State>> states = ReadJournals();
  // Where the last freeze has come back, or there was none, the driver is asked after the pause: it needs a tenth of a second
  // to start, and a process that it has locked does not come to a pause.
  if (history_) AMEM_TRY(AskDriver());
  processes_.resize(states.size());  // those of an earlier freeze that have ended are no part of this one
  AMEM_TRY(CheckBeforeFreeze(states, host_, processes_, options_.allowances, options_.ranks_elsewhere, report_.notes));
  BeginNew();
  Measure();
  checked_ = true;
  return {};
}

// The checks take about as long as the ranks need to come to their safe point, so both are done side by side. A rank that has
// come only waits: nothing is paused before the checks have passed and the journals have said that the pause begins.
Status FreezeOperation::PauseWhenChecked() {
  Took("checks", options_.began_ns);
  const std::uint64_t began = MonotonicNs();
  auto checks = std::async(std::launch::async, [this] { return Check(); });
  std::optional<Status> passed;
  resumes_ = true;
  control::AskOptions asked = options_.asked;
  asked.may_pause = [&]() -> std::optional<Status> {
    if (passed || checks.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return passed;
    passed = checks.get();
    journal_.SetPauses();
    if (passed->ok()) passed = Begin(StepOfFreeze::kPause);
    return passed;
  };
  Status paused = job_.Pause(asked, options_.say);
  if (!passed) passed = checks.get();
  Took(ToText(StepOfFreeze::kPause), began);
  if (!passed->ok()) return *passed;
  return paused.Within("the job: pause");
}

// Whether all processes run, as the driver sees it.
Status FreezeOperation::AskDriver() {
  std::size_t frozen = 0, alive = 0;
  for (const FrozenProcess& one : processes_) {
    if (HasEnded(one)) continue;
    AMEM_ASSIGN(const auto state, checkpointer_.StateOf(one.process.pid).Within(one.process.name));
    if (state == CheckpointState::kFailed) {
      return {Code::kRefused,
              fmt::format("{} (pid {}) was lost by an earlier restore, and must end", one.process.name, one.process.pid)};
    }
    ++alive;
    frozen += state != CheckpointState::kRunning ? 1U : 0U;
  }
  if (frozen == 0) return {};
  if (Unfinished() && !checked_) {
    return {Code::kRefused,
            "a freeze or thaw of this job has not come to its end: amem freeze --continue finishes it, amem freeze --undo "
            "goes back"};
  }
  if (frozen == alive && !checked_) return {Code::kRefused, "the job is frozen already; amem thaw brings it back"};
  return {Code::kRefused,
          "the driver has locked some of its processes, and not AMem: unlock them with the program that did it"};
}

Status FreezeOperation::Thaw() {
  AMEM_TRY(ReadHistory());
  AMEM_ASSIGN(const auto gpus, checkpointer_.Gpus());  // the driver's first answer: without it no process could be asked
  if (In(CheckpointState::kCheckpointed).empty() && In(CheckpointState::kLocked).empty() && !Unfinished()) {
    const std::string doubt = report_.lost.empty() ? "" : report_.lost.front();
    if (!history_) report_.lost.clear();  // what cannot be asked was not lost where no freeze has taken it
    if (!report_.lost.empty()) return {Code::kRefused, "nothing to thaw: " + doubt};
    return {Code::kRefused, "the job is not frozen" + (doubt.empty() ? "" : ", as far as the driver says: " + doubt)};
  }
  resumes_ = true;
  AMEM_ASSIGN(const auto pairs, ReadGpuPairs(options_.gpus, gpus));
  if (!pairs.empty() && !checkpointer_.TakesPairs())
    return {Code::kUnsupported, "--gpus needs a driver of CUDA 13 (580) or newer; this is " + checkpointer_.Version()};
  AMEM_TRY(GoOn());
  pairs_ = pairs;
  // After a thaw onto other GPUs that was undone or refused half way, some processes' contents are there already.
  const bool some_moved = std::ranges::any_of(processes_, [](const FrozenProcess& one) { return !one.moved.empty(); });
  if (pairs_.empty() && some_moved) {
    for (const std::string& gpu : gpus) pairs_.push_back({gpu, gpu});
  }
  return Towards(FreezeGoal::kRunning);
}

Status FreezeOperation::Succeed(bool undo) {
  AMEM_TRY(ReadHistory());
  if (!Unfinished()) return {Code::kNotFound, "no freeze or thaw of this job is unfinished"};
  if (const auto started = checkpointer_.Gpus(); !started.ok()) return started.status();
  AMEM_TRY(GoOn());
  const bool thawed = history_->goal == ToText(FreezeGoal::kRunning);
  resumes_ = thawed || history_->pauses;
  if (thawed && undo) {
    pairs_.clear();
    for (const FrozenProcess& one : processes_) {
      if (std::ranges::none_of(one.moved, [](const GpuPair& way) { return way.from != way.to; })) continue;
      report_.notes.push_back(one.process.name +
                              " had come back on other GPUs already; amem thaw brings it to those that it had "
                              "at the freeze, unless --gpus says otherwise");
    }
  }
  return Towards(thawed != undo ? FreezeGoal::kRunning : FreezeGoal::kFrozen);
}

void FreezeOperation::Took(std::string_view step, std::uint64_t since_ns) {
  report_.times.push_back({std::string(step), static_cast<double>(MonotonicNs() - since_ns) / 1e6});
}

Status FreezeOperation::Ended(std::string outcome, const Status& status) {
  if (const Status written = journal_.End(processes_, outcome, status.message()); !written.ok())
    report_.notes.push_back("not all journals tell how it ended: " + written.message());
  report_.outcome = std::move(outcome);
  report_.processes = processes_;
  double told = 0;
  for (const FreezeReport::Time& time : report_.times) told += time.ms;
  report_.times.push_back({"rest", std::max(0.0, static_cast<double>(MonotonicNs() - options_.began_ns) / 1e6 - told)});
  return status;
}

Status FreezeOperation::Begin(StepOfFreeze first) { return journal_.BeginCommand(processes_, goal_, pairs_, first); }

Status FreezeOperation::Towards(FreezeGoal goal) {
  goal_ = goal;
  const Processes frozen = In(CheckpointState::kCheckpointed);
  if (goal == FreezeGoal::kRunning && !frozen.empty()) {
    std::set<pid_t> taken;
    for (const FrozenProcess* one : frozen) taken.insert(one->process.pid);
    AMEM_TRY(CheckRoom(host_, processes_, taken, pairs_, report_.notes));
  }
  AMEM_TRY(Begin());
  Took("checks", options_.began_ns);
  return goal == FreezeGoal::kFrozen ? ToFrozen() : ToRunning();
}

// ---- there -----------------------------------------------------------------------------------------------------------------

Status FreezeOperation::ToFrozen() {
  Status done;
  if (!In(CheckpointState::kRunning).empty() && !AllArePaused()) {
    resumes_ = true;
    journal_.SetPauses();
    done = ForAll(StepOfFreeze::kPause, [this] { return job_.Pause(options_.asked, options_.say); });
  }
  if (done.ok()) done = NoteTaken();
  if (done.ok()) {
    done = Each(StepOfFreeze::kLock, In(CheckpointState::kRunning),
                [this](const FrozenProcess& one) { return checkpointer_.Lock(one.process.pid, options_.lock_timeout); });
  }
  if (done.ok()) {
    done = Each(
        StepOfFreeze::kCheckpoint, In(CheckpointState::kLocked),
        [this](const FrozenProcess& one) { return checkpointer_.Checkpoint(one.process.pid); },
        [](FrozenProcess& one) { one.from_ns = MonotonicNs(); });
  }
  if (done.ok() && !report_.lost.empty()) done = {Code::kPeerLost, "lost on the way: " + report_.lost.front()};
  if (done.ok()) return Ended("frozen", {});

  options_.say("undoing: " + done.message());
  goal_ = FreezeGoal::kRunning;
  const Status undone = ToRunning();
  if (undone.ok()) return And(done, std::string(". All that was done is undone, and ") + AsBefore());
  return And(done, ". What was done could not all be undone: " + undone.message());
}

bool FreezeOperation::AllArePaused() {
  const std::vector<control::RankView> ranks = job_.Ranks();
  return std::ranges::all_of(processes_, [&](const FrozenProcess& one) {
    return std::ranges::any_of(ranks, [&](const control::RankView& rank) {
      return Same(rank.process, one.process) && rank.is.phase == control::Phase::kPaused;
    });
  });
}

Status FreezeOperation::NoteTaken() {
  const Processes running = In(CheckpointState::kRunning);
  AMEM_TRY(CheckWhilePaused(job_, running));
  auto held = HeldBy(host_.GpusInUse());
  for (FrozenProcess* one : running) {
    for (GpuShare& share : one->gpus) share.taken = 0;
    for (const auto& [gpu, bytes] : held[one->process.pid]) {
      const auto share = std::ranges::find(one->gpus, gpu, &GpuShare::gpu);
      share == one->gpus.end() ? void(one->gpus.push_back({gpu, 0, bytes})) : void(share->taken = bytes);
    }
  }
  return {};
}

// ---- and back --------------------------------------------------------------------------------------------------------------

Status FreezeOperation::ToRunning() {
  AMEM_TRY(RestoreAll());
  const Processes locked = In(CheckpointState::kLocked);
  const Status unlocked =
      Each(StepOfFreeze::kUnlock, locked, [this](const FrozenProcess& one) { return checkpointer_.Unlock(one.process.pid); });
  if (!unlocked.ok()) return Ended("stuck", unlocked.Within("restored, and not all unlocked; amem thaw tries again"));
  const Status resumed = ResumeAll();
  if (report_.lost.empty()) {
    if (resumed.ok()) return Ended(resumes_ ? "running" : "paused", {});
    return Ended("stuck", resumed.Within("restored and unlocked, but still paused; amem resume tries again"));
  }
  const std::string others = resumed.ok() ? "the other processes run; a collective with the lost ones will not end"
                                          : "the other processes are back and unlocked, but still paused: " + resumed.message();
  return Ended("lost", {Code::kPeerLost, fmt::format("lost: {}. {}", fmt::join(report_.lost, "; "), others)});
}

Status FreezeOperation::RestoreAll() {
  Processes restored;
  const Status done = Each(
      StepOfFreeze::kRestore, In(CheckpointState::kCheckpointed),
      [this](const FrozenProcess& one) {
        std::vector<GpuPair> pairs = pairs_;  // from where its GPUs' contents are now
        for (GpuPair& pair : pairs) pair.from = one.NowAt(pair.from);
        return checkpointer_.Restore(one.process.pid, pairs);
      },
      [&](FrozenProcess& one) {
        Move(one, pairs_);
        restored.push_back(&one);
      });
  const std::uint64_t now = MonotonicNs();
  if (!In(CheckpointState::kCheckpointed).empty()) return StayFrozen(restored, done);
  std::string moved;
  for (const auto& [from, to] : pairs_)
    if (from != to) moved += fmt::format("{}{} -> {}", moved.empty() ? "" : ", ", from, to);
  for (const FrozenProcess* one : restored) {
    Bytes taken = 0;
    for (const GpuShare& share : one->gpus) taken += share.taken;
    const Status noted = job_.LeaveNote(one->process.session, Frozen{one->from_ns, now, taken, moved});
    if (!noted.ok()) report_.notes.push_back("its journal will not tell of the freeze: " + noted.message());
  }
  return {};
}

// A restore that was refused leaves its process as it was. The others go back to it, so that the job is in one state.
Status FreezeOperation::StayFrozen(const Processes& restored, const Status& why) {
  const Status back = Each(StepOfFreeze::kCheckpoint, restored,
                           [this](const FrozenProcess& one) { return checkpointer_.Checkpoint(one.process.pid); });
  if (!back.ok())
    return Ended("stuck", And(why, ". Those that were restored could not be frozen again and stay locked: " + back.message() +
                                       ". amem thaw tries again"));
  return Ended("frozen", And(why, ". The whole job stays frozen, with its contents kept; mend that and run amem thaw again"));
}

Status FreezeOperation::ResumeAll() {
  if (!resumes_) return {};
  return ForAll(StepOfFreeze::kResume, [this] { return job_.Resume(options_.asked.deadline, options_.say); });
}

// ---- steps -----------------------------------------------------------------------------------------------------------------

Status FreezeOperation::ForAll(StepOfFreeze step, const std::function<Status()>& make) {
  const std::uint64_t began = MonotonicNs();
  const Status announced = journal_.NoteAll(processes_, step, false);
  if (!announced.ok() && goal_ == FreezeGoal::kFrozen) return announced;
  const Status done = make();
  Took(ToText(step), began);
  return done.Within(fmt::format("the job: {}", ToText(step)));
}

std::optional<Status> FreezeOperation::WhyNot(const FrozenProcess& one, StepOfFreeze step) {
  const ProcessLife life = host_.LifeOf(one.process);
  if (life.HasEnded()) return Status(Code::kPeerLost, fmt::format("{} (pid {}) has ended", one.process.name, one.process.pid));
  if (life.IsUnknown()) {  // the driver must not be asked to stop another process that has got its number
    return Status(Code::kRefused,
                  fmt::format("whether {} (pid {}) lives cannot be seen: {}", one.process.name, one.process.pid, life.why));
  }
  Status announced = journal_.Note(one, step, false);
  return announced.ok() || goal_ == FreezeGoal::kRunning ? std::nullopt : std::optional(std::move(announced));
}

Status FreezeOperation::Each(StepOfFreeze step, const Processes& whom, const std::function<Status(const FrozenProcess&)>& make,
                             const std::function<void(FrozenProcess&)>& made) {
  if (whom.empty()) return {};
  options_.say(kDoing[static_cast<std::size_t>(step) - static_cast<std::size_t>(StepOfFreeze::kLock)]);
  journal_.BeginStep(step);
  const std::uint64_t began = MonotonicNs();
  std::vector<std::optional<Status>> results;
  for (const FrozenProcess* one : whom) results.push_back(WhyNot(*one, step));
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < whom.size(); ++i) {
      if (!results[i])
        threads.emplace_back(
            [&, i] { results[i] = make(*whom[i]).Within(fmt::format("{}: {}", whom[i]->process.name, ToText(step))); });
    }
  }
  for (std::size_t i = 0; i < whom.size(); ++i) {
    if (results[i]->ok() && made) made(*whom[i]);
    static_cast<void>(journal_.Note(*whom[i], step, true));
  }
  Took(ToText(step), began);
  for (const auto& result : results) AMEM_TRY(*result);
  return {};
}

}  // namespace amem
