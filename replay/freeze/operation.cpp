#include "replay/freeze/operation.h"

#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <thread>

#include "journal/base/clock.h"
#include "statemachine/event.h"

namespace amem {
namespace {

std::vector<RankProcess> WithoutFigures(const std::vector<FrozenProcess>& processes) {
  std::vector<RankProcess> plain;
  plain.reserve(processes.size());
  for (const FrozenProcess& one : processes) plain.push_back(one.process);
  return plain;
}

bool Same(const RankProcess& a, const RankProcess& b) { return a.pid == b.pid && a.start_ticks == b.start_ticks; }

Bytes SumOf(const std::map<std::string, Bytes>& by_gpu) {
  Bytes sum = 0;
  for (const auto& [uuid, bytes] : by_gpu) sum += bytes;
  return sum;
}

std::string_view Doing(FreezeStep step) {
  switch (step) {
    case FreezeStep::kPause:
      return "pausing at a safe point";
    case FreezeStep::kLock:
      return "locking";
    case FreezeStep::kCheckpoint:
      return "the driver takes the rest";
    case FreezeStep::kRestore:
      return "the driver brings it back";
    case FreezeStep::kUnlock:
      return "unlocking";
    case FreezeStep::kResume:
      break;
  }
  return "resuming";
}

}  // namespace

// ---- what there is ---------------------------------------------------------------------------------------------------------

Status FreezeOperation::LookAround() {
  processes_.clear();
  for (const RankSight& sight : job_.Look()) {
    if (sight.alive) processes_.push_back({.process = sight.process, .before_pause = {}, .taken = {}});
  }
  if (processes_.empty()) return {Code::kNotFound, "no process of the job lives on this host"};
  history_ = LatestFreeze(processes_.front().process.directory.parent_path(), [&](const RankProcess& process) {
    return std::ranges::any_of(processes_, [&](const FrozenProcess& one) { return Same(one.process, process); });
  });
  if (!history_) return {};
  pairs_ = history_->pairs;
  // A session that had no process of its own at the freeze (a job that goes on with another set of ranks) is none of it.
  std::vector<FrozenProcess> known = history_->processes;
  for (const FrozenProcess& one : processes_) {
    const bool there = std::ranges::any_of(known, [&](const FrozenProcess& old) { return Same(old.process, one.process); });
    if (!there) known.push_back(one);
  }
  processes_ = std::move(known);
  return {};
}

bool FreezeOperation::Unfinished() { return history_ && (!history_->ended || history_->outcome == "stuck"); }

Status FreezeOperation::BeginNew() {
  const std::vector<GpuSight> gpus = host_.GpusInUse();
  auto held = HeldBy(gpus, WithoutFigures(processes_));
  for (FrozenProcess& one : processes_) {
    one.before_pause = std::move(held[one.process.pid]);
    one.taken.clear();
    one.moved.clear();
    one.from_ns = 0;
  }
  auto journal = FreezeJournal::Make(processes_.front().process.directory.parent_path(), processes_);
  if (!journal.ok()) return journal.status();
  journal_ = *std::move(journal);
  report_.journal = journal_->path();
  return {};
}

Status FreezeOperation::OpenOld() {
  if (!history_) return BeginNew();
  auto journal = FreezeJournal::Open(history_->path);
  if (!journal.ok()) return journal.status();
  journal_ = *std::move(journal);
  report_.journal = journal_->path();
  return AnswerRestores();
}

// Restores whose tool died before it wrote what came of them: where the contents are now is the driver's to say.
Status FreezeOperation::AnswerRestores() {
  for (FrozenProcess& one : processes_) {
    if (!one.restore_unanswered || host_.StartTicks(one.process.pid) != one.process.start_ticks) continue;
    const auto state = checkpointer_.StateOf(one.process.pid);
    if (!state.ok()) return state.status().Within(one.process.name);
    const bool made = *state == CheckpointState::kLocked || *state == CheckpointState::kRunning;
    one.restore_unanswered = false;
    if (made) {
      for (const GpuPair& pair : history_->pairs) one.moved[pair.from] = pair.to;
    }
    AMEM_TRY(journal_->EndStep(FreezeStep::kRestore, one.process.pid,
                               made ? Status() : Status(Code::kPeerLost, "the tool died before it was made")));
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
    if (host_.StartTicks(one.process.pid) != one.process.start_ticks) {
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
  AMEM_TRY(LookAround());
  // Where the last freeze has come back, or there was none, the driver is asked after the pause: it needs a tenth of a second
  // to start, and a process that it has locked does not come to a pause.
  const bool runs = !history_ || IsBack(*history_);
  if (!runs) AMEM_TRY(AskDriver());
  // Those of an earlier freeze that have ended are no part of this one.
  std::erase_if(processes_,
                [&](const FrozenProcess& one) { return host_.StartTicks(one.process.pid) != one.process.start_ticks; });
  report_.lost.clear();
  pairs_.clear();
  goal_ = FreezeGoal::kFrozen;
  if (const Status paused = PauseBeforeAsking(); !paused.ok()) return paused;
  return ToFrozen();
}

// What precedes the pause. From any thread, while no other uses the object.
Status FreezeOperation::CheckAndBegin() {
  AMEM_TRY(
      CheckBeforeFreeze(job_, host_, WithoutFigures(processes_), options_.allowances, options_.ranks_elsewhere, report_.notes));
  AMEM_TRY(BeginNew());
  return journal_->Begin(goal_, pairs_);
}

// The checks take about as long as the ranks need to come to their safe point, so both are done side by side. A rank that has
// come only waits: nothing is paused before the checks have passed and the journal has said that the pause begins.
Status FreezeOperation::PauseWhenChecked() {
  Took("checks", began_ns_);
  const std::uint64_t began = MonotonicNs();
  auto checks = std::async(std::launch::async, [this]() -> Status {
    AMEM_TRY(CheckAndBegin());
    return journal_->BeginStep(FreezeStep::kPause, 0);
  });
  std::optional<Status> passed;
  resumes_ = true;
  const Status paused = job_.Pause(options_.say, [&]() -> std::optional<Status> {
    if (!passed && checks.wait_for(std::chrono::seconds(0)) == std::future_status::ready) passed = checks.get();
    return passed;
  });
  if (!passed) passed = checks.get();
  Took(ToText(FreezeStep::kPause), began);
  if (!passed->ok()) return *passed;
  static_cast<void>(journal_->EndStep(FreezeStep::kPause, 0, paused));
  return paused.Within("the job: pause");
}

// Whether all processes run, as the driver sees it.
Status FreezeOperation::AskDriver() {
  std::size_t frozen = 0, alive = 0;
  for (const FrozenProcess& one : processes_) {
    if (host_.StartTicks(one.process.pid) != one.process.start_ticks) continue;
    const auto state = checkpointer_.StateOf(one.process.pid);
    if (!state.ok()) return state.status().Within(one.process.name);
    if (*state == CheckpointState::kFailed) {
      return {Code::kRefused,
              fmt::format("{} (pid {}) was lost by an earlier restore, and must end", one.process.name, one.process.pid)};
    }
    ++alive;
    frozen += *state != CheckpointState::kRunning ? 1U : 0U;
  }
  if (frozen == 0) return {};
  if (Unfinished() && journal_ == nullptr) {
    return {Code::kRefused,
            "a freeze or thaw of this job has not come to its end, because its tool died: amem freeze --continue "
            "finishes it, amem freeze --undo goes back"};
  }
  if (frozen == alive && journal_ == nullptr) return {Code::kRefused, "the job is frozen already; amem thaw brings it back"};
  return {Code::kRefused,
          "the driver has locked some of its processes, and not AMem: unlock them with the program that did it"};
}

// The pause of a job that is taken to run, and then the driver's word.
Status FreezeOperation::PauseBeforeAsking() {
  Status done;
  if (AllArePaused()) {
    AMEM_TRY(CheckAndBegin());
    Took("checks", began_ns_);
  } else {
    done = PauseWhenChecked();
  }
  if (!done.ok() && report_.journal.empty()) return done;  // the checks found something
  if (!done.ok()) return Ended("running", {done.code(), done.message() + ". The job runs as before", done.driver_result()});
  done = AskDriver();
  if (done.ok()) return {};
  const Status resumed = ResumeAll();
  if (!resumed.ok()) return Ended("stuck", {done.code(), done.message() + "; and then " + resumed.message()});
  const std::string undone = resumes_ ? ". The pause is undone, and " : ". Nothing was done, and ";
  return Ended(resumes_ ? "running" : "paused", {done.code(), done.message() + undone + AsBefore(), done.driver_result()});
}

Status FreezeOperation::Thaw() {
  AMEM_TRY(LookAround());
  const auto gpus = checkpointer_.Gpus();  // the driver's first answer: without it no process could be asked
  if (!gpus.ok()) return gpus.status();
  if (In(CheckpointState::kCheckpointed).empty() && In(CheckpointState::kLocked).empty() && !Unfinished()) return IsNotFrozen();
  resumes_ = true;
  const auto pairs = ReadGpuPairs(options_.gpus, *gpus);
  if (!pairs.ok()) return pairs.status();
  if (!pairs->empty() && !checkpointer_.TakesPairs()) {
    return {Code::kUnsupported, "--gpus needs a driver of CUDA 13 (580) or newer; this is " + checkpointer_.Version()};
  }
  AMEM_TRY(OpenOld());
  pairs_ = *pairs;
  // After a thaw onto other GPUs that was undone or refused half way, some processes' contents are there already.
  const bool some_moved = std::ranges::any_of(processes_, [](const FrozenProcess& one) { return !one.moved.empty(); });
  if (pairs_.empty() && some_moved) {
    for (const std::string& gpu : *gpus) pairs_.push_back({gpu, gpu});
  }
  return Towards(FreezeGoal::kRunning);
}

// What cannot be asked was not lost where no freeze has taken it.
Status FreezeOperation::IsNotFrozen() {
  const std::string doubt = report_.lost.empty() ? "" : report_.lost.front();
  if (!history_ || IsBack(*history_)) report_.lost.clear();
  if (!report_.lost.empty()) return {Code::kRefused, "nothing to thaw: " + doubt};
  return {Code::kRefused, "the job is not frozen" + (doubt.empty() ? "" : ", as far as the driver says: " + doubt)};
}

Status FreezeOperation::Continue() {
  AMEM_TRY(LookAround());
  if (!Unfinished()) return {Code::kNotFound, "no freeze or thaw of this job is unfinished"};
  if (const auto started = checkpointer_.Gpus(); !started.ok()) return started.status();
  AMEM_TRY(OpenOld());
  resumes_ = history_->goal == FreezeGoal::kRunning || history_->pauses;
  return Towards(history_->goal);
}

Status FreezeOperation::Undo() {
  AMEM_TRY(LookAround());
  if (!Unfinished()) return {Code::kNotFound, "no freeze or thaw of this job is unfinished"};
  if (const auto started = checkpointer_.Gpus(); !started.ok()) return started.status();
  AMEM_TRY(OpenOld());
  const bool to_frozen = history_->goal == FreezeGoal::kRunning;
  resumes_ = to_frozen || history_->pauses;
  if (to_frozen) pairs_.clear();
  for (const FrozenProcess& one : processes_) {
    if (!to_frozen || std::ranges::none_of(one.moved, [](const auto& way) { return way.first != way.second; })) continue;
    report_.notes.push_back(one.process.name +
                            " had come back on other GPUs already; amem thaw brings it to those that it had "
                            "at the freeze, unless --gpus says otherwise");
  }
  return Towards(to_frozen ? FreezeGoal::kFrozen : FreezeGoal::kRunning);
}

void FreezeOperation::Took(std::string_view step, std::uint64_t since_ns) {
  report_.times.push_back({std::string(step), static_cast<double>(MonotonicNs() - since_ns) / 1e6});
}

Status FreezeOperation::Ended(std::string outcome, const Status& status) {
  if (const Status written = journal_->End(outcome, status.message()); !written.ok())
    report_.notes.push_back(written.message());
  report_.outcome = std::move(outcome);
  report_.processes = processes_;
  double told = 0;
  for (const FreezeReport::Time& time : report_.times) told += time.ms;
  report_.times.push_back({"rest", std::max(0.0, static_cast<double>(MonotonicNs() - began_ns_) / 1e6 - told)});
  return status;
}

Status FreezeOperation::Towards(FreezeGoal goal) {
  goal_ = goal;
  const Processes frozen = In(CheckpointState::kCheckpointed);
  if (goal == FreezeGoal::kRunning && !frozen.empty()) {
    std::set<pid_t> taken;
    for (const FrozenProcess* one : frozen) taken.insert(one->process.pid);
    AMEM_TRY(CheckRoom(host_, processes_, taken, pairs_, report_.notes));
  }
  AMEM_TRY(journal_->Begin(goal, pairs_));
  Took("checks", began_ns_);
  return goal == FreezeGoal::kFrozen ? ToFrozen() : ToRunning();
}

// ---- there -----------------------------------------------------------------------------------------------------------------

Status FreezeOperation::ToFrozen() {
  Status done = In(CheckpointState::kRunning).empty() ? Status() : PauseAll();
  if (done.ok()) done = NoteTaken();
  if (done.ok()) {
    done = Each(FreezeStep::kLock, In(CheckpointState::kRunning),
                [this](const FrozenProcess& one) { return checkpointer_.Lock(one.process.pid, options_.lock_timeout); });
  }
  if (done.ok()) done = CheckpointAll();
  if (done.ok() && !report_.lost.empty()) done = {Code::kPeerLost, "lost on the way: " + report_.lost.front()};
  if (done.ok()) return Ended("frozen", {});

  options_.say("undoing: " + done.message());
  goal_ = FreezeGoal::kRunning;
  const Status undone = ToRunning();
  if (undone.ok())
    return {done.code(), done.message() + ". All that was done is undone, and " + AsBefore(), done.driver_result()};
  return {done.code(), fmt::format("{}. What was done could not all be undone: {}", done.message(), undone.message()),
          done.driver_result()};
}

bool FreezeOperation::AllArePaused() {
  const std::vector<RankSight> sights = job_.Look();
  return std::ranges::all_of(processes_, [&](const FrozenProcess& one) {
    return std::ranges::any_of(sights, [&](const RankSight& s) { return Same(s.process, one.process) && s.paused; });
  });
}

Status FreezeOperation::PauseAll() {
  if (AllArePaused()) return {};
  FrozenProcess all;
  all.process.name = "the job";
  const std::uint64_t began = MonotonicNs();
  resumes_ = true;
  const Status done = Step(FreezeStep::kPause, all, [this](const FrozenProcess&) { return job_.Pause(options_.say, {}); });
  Took(ToText(FreezeStep::kPause), began);
  return done;
}

Status FreezeOperation::NoteTaken() {
  const Processes running = In(CheckpointState::kRunning);
  std::vector<RankProcess> plain;
  for (const FrozenProcess* one : running) plain.push_back(one->process);
  AMEM_TRY(CheckWhilePaused(job_, plain));
  auto held = HeldBy(host_.GpusInUse(), plain);
  for (FrozenProcess* one : running) {
    one->taken = std::move(held[one->process.pid]);
    AMEM_TRY(journal_->Taken(one->process.pid, one->taken));
  }
  return {};
}

Status FreezeOperation::CheckpointAll() {
  const Processes locked = In(CheckpointState::kLocked);
  const Status done = Each(FreezeStep::kCheckpoint, locked,
                           [this](const FrozenProcess& one) { return checkpointer_.Checkpoint(one.process.pid); });
  const std::uint64_t now = MonotonicNs();
  for (FrozenProcess* one : locked) one->from_ns = now;
  return done;
}

// ---- and back --------------------------------------------------------------------------------------------------------------

Status FreezeOperation::ToRunning() {
  if (const Status restored = RestoreAll(); !restored.ok()) return restored;
  const Processes locked = In(CheckpointState::kLocked);
  const Status unlocked =
      Each(FreezeStep::kUnlock, locked, [this](const FrozenProcess& one) { return checkpointer_.Unlock(one.process.pid); });
  if (!unlocked.ok()) {
    return Ended("stuck", unlocked.Within("restored, and not all unlocked; amem thaw tries again"));
  }
  const Status resumed = ResumeAll();
  if (report_.lost.empty()) {
    if (resumed.ok()) return Ended(resumes_ ? "running" : "paused", {});
    return Ended("stuck", resumed.Within("restored and unlocked, but still paused; amem resume tries again"));
  }
  std::string lost;
  for (const std::string& one : report_.lost) lost += (lost.empty() ? "" : "; ") + one;
  const std::string others = resumed.ok() ? "the other processes run; a collective with the lost ones will not end"
                                          : "the other processes are back and unlocked, but still paused: " + resumed.message();
  return Ended("lost", {Code::kPeerLost, fmt::format("lost: {}. {}", lost, others)});
}

Status FreezeOperation::RestoreAll() {
  const Processes frozen = In(CheckpointState::kCheckpointed);
  const Status done = Each(FreezeStep::kRestore, frozen,
                           [this](const FrozenProcess& one) { return checkpointer_.Restore(one.process.pid, PairsOf(one)); });
  const std::uint64_t now = MonotonicNs();
  Processes restored;
  for (FrozenProcess* one : In(CheckpointState::kLocked)) {
    if (std::ranges::find(frozen, one) == frozen.end()) continue;
    restored.push_back(one);
    for (const GpuPair& pair : pairs_) one->moved[pair.from] = pair.to;
  }
  if (!In(CheckpointState::kCheckpointed).empty()) return StayFrozen(restored, done);
  for (const FrozenProcess* one : restored) {
    const Status noted = job_.LeaveNote(one->process.session, Frozen{one->from_ns, now, SumOf(one->taken), MovedText()});
    if (!noted.ok()) report_.notes.push_back("its journal will not tell of the freeze: " + noted.message());
  }
  return {};
}

// A restore that was refused leaves its process as it was. The others go back to it, so that the job is in one state.
Status FreezeOperation::StayFrozen(const Processes& restored, const Status& why) {
  const Status back = Each(FreezeStep::kCheckpoint, restored,
                           [this](const FrozenProcess& one) { return checkpointer_.Checkpoint(one.process.pid); });
  if (!back.ok()) {
    return Ended("stuck", {why.code(),
                           fmt::format("{}. Those that were restored could not be frozen again and stay locked: {}. amem "
                                       "thaw tries again",
                                       why.message(), back.message()),
                           why.driver_result()});
  }
  return Ended("frozen", {why.code(),
                          why.message() + ". The whole job stays frozen, with its contents kept; mend that and run amem "
                                          "thaw again",
                          why.driver_result()});
}

Status FreezeOperation::ResumeAll() {
  if (!resumes_) return {};
  FrozenProcess all;
  all.process.name = "the job";
  const std::uint64_t began = MonotonicNs();
  const Status done = Step(FreezeStep::kResume, all, [this](const FrozenProcess&) { return job_.Resume(options_.say); });
  Took(ToText(FreezeStep::kResume), began);
  return done;
}

std::vector<GpuPair> FreezeOperation::PairsOf(const FrozenProcess& process) const {
  std::vector<GpuPair> pairs = pairs_;
  for (GpuPair& pair : pairs) {
    const auto moved = process.moved.find(pair.from);
    if (moved != process.moved.end()) pair.from = moved->second;
  }
  return pairs;
}

std::string FreezeOperation::MovedText() const {
  std::string text;
  for (const GpuPair& pair : pairs_) {
    if (pair.from != pair.to) text += fmt::format("{}{} -> {}", text.empty() ? "" : ", ", pair.from, pair.to);
  }
  return text;
}

// ---- steps -----------------------------------------------------------------------------------------------------------------

Status FreezeOperation::Step(FreezeStep step, FrozenProcess& process, const std::function<Status(const FrozenProcess&)>& make) {
  const pid_t pid = process.process.pid;
  if (pid != 0 && host_.StartTicks(pid) != process.process.start_ticks) {
    return {Code::kPeerLost, fmt::format("{} (pid {}) has ended", process.process.name, pid)};
  }
  // Towards the freeze nothing is done that the journal does not tell. On the way back the job counts for more than the
  // journal.
  const Status announced = journal_->BeginStep(step, pid);
  if (!announced.ok() && goal_ == FreezeGoal::kFrozen) return announced;
  const Status done = make(process);
  static_cast<void>(journal_->EndStep(step, pid, done));
  return done.Within(fmt::format("{}: {}", process.process.name, ToText(step)));
}

Status FreezeOperation::Each(FreezeStep step, const Processes& whom, const std::function<Status(const FrozenProcess&)>& make) {
  if (whom.empty()) return {};
  options_.say(std::string(Doing(step)));
  const std::uint64_t began = MonotonicNs();
  std::vector<Status> results(whom.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < whom.size(); ++i) {
      threads.emplace_back([&, i] { results[i] = Step(step, *whom[i], make); });
    }
  }
  Took(ToText(step), began);
  const auto failed = std::ranges::find_if(results, [](const Status& one) { return !one.ok(); });
  return failed == results.end() ? Status() : *failed;
}

}  // namespace amem
