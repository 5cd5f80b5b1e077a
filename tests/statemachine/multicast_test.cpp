// Multicast objects that a pause releases and a resume makes anew: the plans, and what Apply accepts on the way.
#include <algorithm>

#include "folding.h"

namespace amem::testing {
namespace {

constexpr Address kObjectAt{0x7f1000000000};

// One session's part: an object, own or imported, with one device and memory bound at two offsets, and mapped.
class MulticastPlans : public ::testing::Test {
 protected:
  void Make(bool own, MemoryTag tag = MemoryTag::kMulticastReleased) {
    f.Ok(PeerConnected{kPeer, "host", 7, 0, 1});
    memory = f.Allocate(kA);
    second = f.Allocate(kB);
    object = AllocationId{f.state.next_allocation};
    if (own) {
      f.Ok(MulticastCreated{object, 2 * k2M, 2, 1, 0, {}, tag});
      f.Ok(Exported{object, 1});
      f.Ok(ReferenceAdded{object, kPeer, AllocationId{3}});
    } else {
      f.Ok(Imported{object, {kPeer, AllocationId{6}}, 2 * k2M, {}, 1, {}, {}, {}, tag});
    }
    f.Ok(MulticastDeviceAdded{object, DeviceOrdinal{0}});
    f.Ok(MulticastBound{object, 0, memory, 0, k2M, {}});
    f.Ok(MulticastBound{object, k2M, {}, 0, k2M, kB});
    f.Place(object, kObjectAt, 2 * k2M, 0);
  }
  void Do(const Plan& plan) {
    for (const PlannedPhase& phase : plan.phases) {
      f.Ok(PhaseBegun{phase.phase});
      for (const Step& step : phase.steps) {
        f.Ok(StepBegun{step});
        f.Ok(StepDone{step});
      }
    }
  }
  void Pause() {
    f.Ok(CycleBegun{CycleKind::kPause, ++cycle, {}});
    Do(PlanPause(f.state));
    f.Ok(CycleDone{CycleKind::kPause, cycle, 1});
  }
  void Resume() {
    f.Ok(CycleBegun{CycleKind::kResume, cycle, {}});
    Do(PlanResume(f.state));
    f.Ok(CycleDone{CycleKind::kResume, cycle, 1});
  }
  static std::vector<Step> StepsOn(const Plan& plan, PhaseKind kind, AllocationId id) {
    std::vector<Step> found;
    for (const PlannedPhase& phase : plan.phases) {
      if (phase.phase != kind) continue;
      std::ranges::copy_if(phase.steps, std::back_inserter(found), [&](const Step& s) { return s.allocation == id; });
    }
    return found;
  }
  static std::vector<StepKind> Kinds(const std::vector<Step>& steps) {
    std::vector<StepKind> kinds;
    for (const Step& step : steps) kinds.push_back(step.kind);
    return kinds;
  }
  using K = StepKind;

  Folding f;
  AllocationId object, memory, second;
  std::uint64_t cycle = 0;
};

TEST_F(MulticastPlans, a_pause_unmaps_unbinds_and_releases_it_before_the_memory) {
  Make(true);
  EXPECT_EQ(WhyKept(f.state.allocations.at(memory)), KeepReason::kNone);
  const Plan plan = PlanPause(f.state);
  EXPECT_EQ(Kinds(StepsOn(plan, PhaseKind::kPauseReleaseOwn, object)),
            (std::vector{K::kUnmap, K::kUnbind, K::kUnbind, K::kReleaseOwn}));
  const auto& steps = plan.phases[2].steps;
  const auto at = [&](K kind, AllocationId id) {
    return std::ranges::find_if(steps, [&](const Step& s) { return s.kind == kind && s.allocation == id; });
  };
  EXPECT_LT(at(K::kUnbind, object), at(K::kReleaseOwn, memory));
  Pause();
  EXPECT_FALSE(f.state.allocations.at(object).resident);
  EXPECT_FALSE(f.state.allocations.at(memory).resident);
}

TEST_F(MulticastPlans, a_resume_adds_devices_before_the_vote_on_imports_and_binds_and_maps_after_it) {
  for (const bool own : {true, false}) {
    f = {};
    Make(own);
    const State before = f.state;
    Pause();
    const Plan plan = PlanResume(f.state);
    const PhaseKind made = own ? PhaseKind::kResumeCreateOwn : PhaseKind::kResumeImport;
    EXPECT_EQ(Kinds(StepsOn(plan, made, object)), (std::vector{own ? K::kCreate : K::kImport, K::kAddDevice}));
    EXPECT_EQ(Kinds(StepsOn(plan, PhaseKind::kResumeVerify, object)),
              (std::vector{K::kBind, K::kBind, K::kMap, K::kSetAccess}));
    Resume();
    EXPECT_EQ(f.state.multicasts, before.multicasts);
    EXPECT_EQ(f.state.mappings, before.mappings);
  }
}

TEST_F(MulticastPlans, one_that_stays_and_what_is_bound_to_it_is_in_no_plan) {
  Make(true, MemoryTag::kNccl);
  EXPECT_EQ(WhyKept(f.state.allocations.at(memory)), KeepReason::kMulticast);
  Pause();
  EXPECT_TRUE(f.state.allocations.at(object).resident);
  EXPECT_TRUE(f.state.allocations.at(memory).resident);
  EXPECT_TRUE(StepsOn(PlanResume(f.state), PhaseKind::kResumeVerify, object).empty());
}

TEST_F(MulticastPlans, memory_bound_to_one_that_stays_as_well_stays) {
  Make(true);
  const AllocationId kept{f.state.next_allocation};
  f.Ok(MulticastCreated{kept, k2M, 2, 1, 0, {}});
  f.Ok(MulticastDeviceAdded{kept, DeviceOrdinal{0}});
  f.Ok(MulticastBound{kept, 0, memory, 0, k2M, {}});
  EXPECT_EQ(WhyKept(f.state.allocations.at(memory)), KeepReason::kMulticast);
  Pause();
  EXPECT_TRUE(f.state.allocations.at(memory).resident);
  EXPECT_FALSE(f.state.allocations.at(second).resident);
  EXPECT_FALSE(f.state.multicasts.at(object).bindings.find(0)->second.bound) << "it is unbound all the same";
  Resume();
  f.Ok(MulticastUnbound{kept, DeviceOrdinal{0}, 0, k2M});
  EXPECT_EQ(WhyKept(f.state.allocations.at(memory)), KeepReason::kNone);
}

TEST_F(MulticastPlans, an_object_that_lost_an_importer_is_replaced_by_ordinary_memory_once_it_was_released) {
  Make(true);
  constexpr SessionId kOther{0x98};
  f.Ok(PeerConnected{kOther, "host", 8, 0, 2});
  f.Ok(ReferenceAdded{object, kOther, AllocationId{3}});
  f.Ok(PeerLost{kPeer, "died"});
  EXPECT_TRUE(f.state.multicasts.at(object).incomplete);
  EXPECT_TRUE(f.state.IsSubstitute(object, f.state.allocations.at(object)));
  EXPECT_TRUE(ToSnapshotEvents(f.state).ok()) << ToSnapshotEvents(f.state).status().message();
  Pause();
  EXPECT_EQ(Kinds(StepsOn(PlanResume(f.state), PhaseKind::kResumeCreateOwn, object)), (std::vector{K::kCreate}))
      << "no device can be added to it";
}

TEST_F(MulticastPlans, an_importer_that_lets_go_of_one_of_two_imports_still_has_its_devices_there) {
  Make(true);
  f.Ok(ReferenceAdded{object, kPeer, AllocationId{4}});
  f.Ok(ReferenceDropped{object, kPeer, AllocationId{4}});
  EXPECT_FALSE(f.state.multicasts.at(object).incomplete);
  f.Ok(ReferenceDropped{object, kPeer, AllocationId{3}});
  EXPECT_TRUE(f.state.multicasts.at(object).incomplete);
}

TEST_F(MulticastPlans, the_undo_of_a_pause_drops_an_import_that_may_be_old_and_keeps_an_own_object) {
  for (const bool own : {true, false}) {
    f = {};
    Make(own);
    f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
    f.Ok(PhaseBegun{PhaseKind::kPauseSave});
    const auto steps = StepsOn(PlanResume(f.state), PhaseKind::kResumeCreateOwn, object);
    EXPECT_EQ(Kinds(steps), own ? std::vector<K>{} : (std::vector{K::kUnmap, K::kUnbind, K::kUnbind, K::kReleaseImport}));
  }
}

TEST_F(MulticastPlans, steps_out_of_order_are_refused) {
  Make(true);
  f.Ok(CycleBegun{CycleKind::kPause, 1, {}});
  const auto refused = [&](const Step& step, const std::string& part) {
    f.Ok(StepBegun{step});
    f.Refused(StepDone{step}, part);
    f.Ok(StepFailed{step, Code::kInvalid, 0, "as it should"});
  };
  const Step unbind{K::kUnbind, object, {}, k2M, DeviceOrdinal{0}, 0};
  refused({K::kReleaseOwn, object, {}, 0, {}}, "a binding to a multicast object is in force");
  refused({K::kBind, object, {}, k2M, DeviceOrdinal{0}, 0}, "bound already");
  refused({K::kUnbind, object, {}, k2M, DeviceOrdinal{1}, 0}, "not bound");
  refused({K::kUnbind, object, {}, k2M, DeviceOrdinal{0}, 5}, "never bound");
  refused({K::kUnbind, memory, {}, k2M, DeviceOrdinal{0}, 0}, "does not exist");
  refused({K::kAddDevice, object, {}, 0, DeviceOrdinal{0}}, "there already");
  f.Ok(StepBegun{{K::kSave, memory, kA, k2M, DeviceOrdinal{0}}});
  f.Ok(StepDone{{K::kSave, memory, kA, k2M, DeviceOrdinal{0}}});
  refused({K::kReleaseOwn, memory, {}, k2M, {}}, "a binding to a multicast object is in force");
  f.Ok(StepBegun{unbind});
  f.Ok(StepDone{unbind});
  refused(unbind, "not bound");
  f.Refused(CycleFailed{CycleKind::kPause, 1, true, "x"}, "memory is not bound to multicast object");
}

TEST_F(MulticastPlans, nothing_is_bound_again_before_its_devices_and_its_memory_are_there) {
  Make(true);
  Pause();
  f.Ok(CycleBegun{CycleKind::kResume, 1, {}});
  const auto attempt = [&](const Step& step) {
    f.Ok(StepBegun{step});
    return f.Try(StepDone{step});
  };
  const auto fail = [&](const Step& step) { f.Ok(StepFailed{step, Code::kInvalid, 0, "as it should"}); };
  const Step bind{K::kBind, object, {}, k2M, DeviceOrdinal{0}, 0}, create{K::kCreate, object, {}, 2 * k2M, {}};
  EXPECT_NE(attempt(bind).message().find("it is released"), std::string::npos);
  fail(bind);
  EXPECT_TRUE(attempt(create).ok());
  EXPECT_NE(attempt(bind).message().find("not all devices of this session"), std::string::npos);
  fail(bind);
  EXPECT_TRUE(attempt({K::kAddDevice, object, {}, 0, DeviceOrdinal{0}}).ok());
  EXPECT_NE(attempt(bind).message().find("has no memory yet"), std::string::npos);
  fail(bind);
}

TEST_F(MulticastPlans, steps_and_objects_have_words) {
  Make(true);
  EXPECT_EQ(ToText(Step{K::kAddDevice, AllocationId{3}, {}, 0, DeviceOrdinal{1}}), "add device 1 to multicast object 3");
  EXPECT_EQ(ToText(Step{K::kBind, AllocationId{3}, {}, k2M, DeviceOrdinal{1}, k2M}),
            "bind memory of device 1 to multicast object 3 at 2 MiB, 2 MiB");
  EXPECT_EQ(ToText(EventBody(MulticastCreated{AllocationId{3}, k2M, 2, 1, 0, {}, MemoryTag::kMulticastReleased})),
            "multicast created: allocation 3, 2 MiB, devices 2, handle types 1, tag multicast-released");
}

}  // namespace
}  // namespace amem::testing
