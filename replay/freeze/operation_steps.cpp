// What the ranks' journals tell of a freeze, and the steps that are told there.
#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "replay/freeze/operation.h"
#include "statemachine/event.h"

namespace amem {

// What is said while a step of each process is made, from kLock on.
constexpr const char* kDoing[] = {"locking", "the driver takes the rest", "the driver brings it back", "unlocking"};

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

Status FreezeOperation::Note(const FrozenProcess& process, StepOfFreeze step, bool done) {
  FreezeStep told = is_;
  told.step = ToText(step);
  told.done = done;
  told.from_ns = process.from_ns;
  told.gpus = process.gpus;
  told.moved = process.moved;
  const Status noted = HasEnded(process) ? Status() : job_.LeaveNote(process.process.session, std::move(told));
  return noted.Within(fmt::format("{}: its journal", process.process.name));
}

Status FreezeOperation::NoteAll(StepOfFreeze step, bool done) {
  last_ = step;
  Status all;
  for (const FrozenProcess& one : processes_) {
    const Status noted = Note(one, step, done);
    if (all.ok()) all = noted;
  }
  return all;
}

Status FreezeOperation::ForAll(StepOfFreeze step, const std::function<Status()>& make) {
  const std::uint64_t began = MonotonicNs();
  const Status announced = NoteAll(step, false);
  if (!announced.ok() && goal_ == FreezeGoal::kFrozen) return announced;
  const Status done = make();
  Took(ToText(step), began);
  return done.Within(fmt::format("the job: {}", ToText(step)));
}

// Announces a step. Nothing: it may be made.
std::optional<Status> FreezeOperation::WhyNot(const FrozenProcess& one, StepOfFreeze step) {
  if (HasEnded(one)) return Status(Code::kPeerLost, fmt::format("{} (pid {}) has ended", one.process.name, one.process.pid));
  Status announced = Note(one, step, false);
  return announced.ok() || goal_ == FreezeGoal::kRunning ? std::nullopt : std::optional(std::move(announced));
}

Status FreezeOperation::Each(StepOfFreeze step, const Processes& whom, const std::function<Status(const FrozenProcess&)>& make,
                             const std::function<void(FrozenProcess&)>& made) {
  if (whom.empty()) return {};
  options_.say(kDoing[static_cast<std::size_t>(step) - static_cast<std::size_t>(StepOfFreeze::kLock)]);
  last_ = step;
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
    static_cast<void>(Note(*whom[i], step, true));
  }
  Took(ToText(step), began);
  for (const auto& result : results) AMEM_TRY(*result);
  return {};
}

}  // namespace amem
