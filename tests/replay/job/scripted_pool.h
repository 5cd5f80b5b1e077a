// A pool in a scripted journal: its chunks, its pauses and resumes, with the steps that the real plans ask for.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "statemachine/apply.h"
#include "statemachine/plan.h"
#include "tests/replay/job/scripted_journal.h"

namespace amem::test {

inline State FoldedState(Story& story) {
  State state;
  for (const Event& event : story.events()) {
    const Status folded = Apply(state, event);
    EXPECT_TRUE(folded.ok()) << folded.message();
  }
  return state;
}

class ScriptedPool {
 public:
  ScriptedPool(Story& story, const std::string& tag, PoolPolicy policy = PoolPolicy::kPreserve)
      : story_(story), id_(static_cast<std::uint32_t>(FoldedState(story).pools.size() + 1)) {
    story_.Then(PoolOpened{.pool = id_, .tag = tag, .policy = policy});
  }

  AllocationId Chunk(Bytes bytes = 2 * kMiB) {
    const AllocationId id = story_.NextId();
    const Address address{0x7e0000000000 + id.value * 0x10000000};
    story_.Then(AllocationCreated{.allocation = id,
                                  .bytes = bytes,
                                  .properties = Story::Properties(),
                                  .handle = DriverHandle{0xf00d},
                                  .tag = MemoryTag::kUser,
                                  .pool = id_});
    story_.Then(RangeReserved{.address = address, .bytes = bytes, .pool = id_});
    story_.Then(Mapped{.address = address, .bytes = bytes, .allocation = id});
    story_.Then(AccessSet{.address = address, .bytes = bytes, .access = {{{LocationType::kDevice, 0}, 3}}});
    story_.Then(PoolAllocated{.address = address, .bytes = bytes / 2, .backing = id});
    return id;
  }
  void Begin(CycleKind kind) {
    const std::uint64_t cycle = FoldedState(story_).pools.at(id_).cycles + (kind == CycleKind::kPause ? 1 : 0);
    story_.Then(CycleBegun{.kind = kind, .cycle = cycle, .pool = id_});
  }
  // What is left of a pause or resume, until the nth step of a kind, which is begun; all of it without one.
  Step Work(CycleKind kind, std::optional<StepKind> until = {}, int nth = 1) {
    const State state = FoldedState(story_);
    const Plan plan = kind == CycleKind::kPause ? PlanPause(state, id_) : PlanResume(state, id_);
    for (const PlannedPhase& phase : plan.phases) {
      story_.Then(PhaseBegun{.phase = phase.phase, .pool = id_});
      for (const Step& step : phase.steps) {
        story_.Then(StepBegun{.step = step, .pool = id_});
        if (step.kind == until && --nth == 0) return step;
        story_.Then(StepDone{.step = step, .pool = id_});
      }
    }
    return {};
  }
  void Done(CycleKind kind) {
    story_.Then(CycleDone{.kind = kind,
                          .cycle = FoldedState(story_).pools.at(id_).cycles,
                          .duration_ns = 1000,
                          .pool = id_,
                          .changed = saved_[0],
                          .unchanged = saved_[1],
                          .zero = saved_[2]});
  }
  void NextSave(Bytes changed, Bytes unchanged, Bytes zero) { saved_ = {changed, unchanged, zero}; }  // what Done tells

  void Run(CycleKind kind) {
    Begin(kind);
    Work(kind);
    Done(kind);
  }
  // The step that is open fails, and what was done is undone.
  void Fail(CycleKind kind, const Step& step, Code code, const std::string& message) {
    story_.Then(StepFailed{.step = step, .code = code, .driver_result = 2, .message = message, .pool = id_});
    Work(kind == CycleKind::kPause ? CycleKind::kResume : CycleKind::kPause);
    const std::uint64_t cycle = FoldedState(story_).pools.at(id_).cycles;
    story_.Then(CycleFailed{.kind = kind, .cycle = cycle, .message = message, .code = code, .driver_result = 2, .pool = id_});
  }
  [[nodiscard]] PoolId id() const { return id_; }

 private:
  Story& story_;
  PoolId id_;
  std::array<Bytes, 3> saved_{};
};

}  // namespace amem::test
