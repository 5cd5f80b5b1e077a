#include "replay/freeze/freeze_journal.h"

#include <fmt/format.h>

#include <utility>

#include "journal/base/clock.h"
#include "statemachine/check.h"
#include "statemachine/event.h"

namespace amem {

void FreezeJournal::BeginNew(FreezeGoal goal, const std::vector<FrozenProcess>& processes) {
  is_ = {};
  is_.begun_ns = RealtimeNs();
  is_.goal = ToText(goal);
  for (const FrozenProcess& one : processes)
    is_.members.push_back({one.process.session, one.process.pid, one.process.start_ticks, one.process.name});
}

Status FreezeJournal::BeginCommand(const std::vector<FrozenProcess>& processes, FreezeGoal goal,
                                   const std::vector<GpuPair>& pairs, StepOfFreeze first) {
  AMEM_CHECK(!processes.empty());  // else no journal would have it, and no other tool could go on
  ++is_.command;
  is_.goal = ToText(goal);
  is_.pairs = pairs;
  is_.outcome.clear();
  is_.message.clear();
  return NoteAll(processes, first, false);
}

Status FreezeJournal::End(const std::vector<FrozenProcess>& processes, const std::string& outcome, const std::string& message) {
  is_.outcome = outcome;
  is_.message = message;
  return NoteAll(processes, last_, true);
}

Status FreezeJournal::Note(const FrozenProcess& process, StepOfFreeze step, bool done) {
  FreezeStep told = is_;
  told.step = ToText(step);
  told.done = done;
  told.from_ns = process.from_ns;
  told.gpus = process.gpus;
  told.moved = process.moved;
  const Status noted =
      host_.LifeOf(process.process).HasEnded() ? Status() : job_.LeaveNote(process.process.session, std::move(told));
  return noted.Within(fmt::format("{}: its journal", process.process.name));
}

Status FreezeJournal::NoteAll(const std::vector<FrozenProcess>& processes, StepOfFreeze step, bool done) {
  last_ = step;
  Status all;
  for (const FrozenProcess& one : processes) {
    const Status noted = Note(one, step, done);
    if (all.ok()) all = noted;
  }
  return all;
}

}  // namespace amem
