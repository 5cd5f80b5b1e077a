// The state machine: events in any order are applied or refused. A refused one changes nothing, and is never a failed check;
// the invariants hold in every state that is reached; and from it, plans, digest and snapshot can be made.
#include <cstdio>
#include <cstdlib>

#include "statemachine/apply.h"
#include "statemachine/plan.h"

namespace {

using namespace amem;

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}
  [[nodiscard]] bool left() const { return at_ < end_; }
  std::uint64_t Take(std::uint64_t below) { return left() ? *at_++ % below : 0; }
  AllocationId Allocation() { return AllocationId{Take(8)}; }
  Address Place() { return Address{0x7f0000000000 + Take(12) * kUnit}; }
  Bytes Size() { return Take(4) * kUnit; }
  PoolId Pool() { return PoolId{static_cast<std::uint32_t>(Take(4) < 2 ? 0 : 1 + Take(2))}; }
  SessionId Session() { return SessionId{1 + Take(3)}; }
  AllocationProperties Properties() {
    AllocationProperties properties;
    properties.location = {Take(4) == 0 ? LocationType::kHost : LocationType::kDevice, static_cast<std::int32_t>(Take(2))};
    return properties;
  }

 private:
  static constexpr Bytes kUnit = Bytes{2} << 20;
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

Step AnyStep(Input& in, const State& state) {
  if (in.Take(4) != 0) {  // one that is planned
    const PoolId pool = in.Pool();
    for (const Plan& plan : {PlanPause(state, pool), PlanResume(state, pool)}) {
      if (in.Take(2) == 0) continue;
      std::vector<Step> steps;
      for (const auto& phase : plan.phases) steps.insert(steps.end(), phase.steps.begin(), phase.steps.end());
      if (!steps.empty()) return steps[in.Take(steps.size())];
    }
  }
  return {static_cast<StepKind>(in.Take(14)), in.Allocation(), in.Place(), in.Size(), DeviceOrdinal{0}};
}

// That memory is unmapped before it is released is the plan's promise: Apply would have to look through all mappings.
Step InOrder(const Step& step, const State& state) {
  if (step.kind != StepKind::kReleaseOwn && step.kind != StepKind::kReleaseImport) return step;
  for (const auto& [address, m] : state.mappings) {
    if (m.allocation == step.allocation && m.present) return {StepKind::kUnmap, step.allocation, address, 0, {}};
  }
  return step;
}

Cycle CycleOf(PoolId id, const State& state) {
  const auto pool = state.pools.find(id);
  return pool == state.pools.end() ? state.cycle : pool->second.cycle;
}
EventBody StepDoneOf(PoolId pool, const State& state) {
  return StepDone{CycleOf(pool, state).open_step.value_or(Step{}), pool};
}
EventBody CycleDoneOf(PoolId pool, const State& state) {
  const Cycle cycle = CycleOf(pool, state);
  return CycleDone{cycle.kind, cycle.number, 0, pool};
}

EventBody AnyEvent(Input& in, const State& state) {
  const AllocationId fresh{state.next_allocation};
  switch (in.Take(29)) {
    case 0:
      return RangeReserved{in.Place(), in.Size(), 0, {}, 0, {}, in.Take(4) == 0 ? in.Allocation() : AllocationId{}};
    case 1:
      return RangeFreed{in.Place(), in.Size(), in.Take(4) == 0 ? in.Allocation() : AllocationId{}};
    case 2:
    case 3:
      return AllocationCreated{fresh, in.Size(), in.Properties(), 0, {}, {}, {}, {}, {}, in.Pool()};
    case 4:
      return AllocationRetained{in.Allocation(), in.Place()};
    case 5:
      return AllocationReleased{in.Allocation()};
    case 6:
    case 7:
      return Mapped{in.Place(), in.Size(), 0, in.Allocation(), 0};
    case 8:
      return Unmapped{in.Place(), in.Size(), in.Take(4) == 0 ? in.Allocation() : AllocationId{}};
    case 9:
      return AccessSet{in.Place(), in.Size(), {{{LocationType::kDevice, 0}, 3}}, {}};
    case 10:
      return Exported{in.Allocation(), 1};
    case 11:
      return Imported{fresh, {in.Session(), in.Allocation()}, in.Size(), in.Properties(), 1, {}, {}, {}};
    case 12:
      return ReferenceAdded{in.Allocation(), in.Session(), in.Allocation()};
    case 13:
      return ReferenceDropped{in.Allocation(), in.Session(), in.Allocation()};
    case 14:
      return PeerConnected{in.Session(), "h", 1, 0, 0};
    case 15:
      return PeerLost{in.Session(), "died"};
    case 16:
      return Registered{in.Place(), in.Size(), "dma-buf"};
    case 17:
      return Deregistered{in.Place(), in.Size()};
    case 18:
      return CycleBegun{.kind = static_cast<CycleKind>(in.Take(2)), .cycle = in.Take(4), .pool = in.Pool()};
    case 19:
    case 20:
      return StepBegun{InOrder(AnyStep(in, state), state), in.Pool()};
    case 21:
    case 22:
      return StepDoneOf(in.Pool(), state);
    case 23:
      return PhaseBegun{static_cast<PhaseKind>(in.Take(10)), in.Pool()};
    case 24:
      return CycleDoneOf(in.Pool(), state);
    case 25:
      return CycleFailed{
          .kind = state.cycle.kind, .cycle = state.cycle.number, .undone = in.Take(2) == 0, .message = "f", .pool = in.Pool()};
    case 26:
      return PoolOpened{in.Pool(), std::string(1, static_cast<char>('a' + in.Take(2))), static_cast<PoolPolicy>(in.Take(2)), 0};
    case 27:
      return in.Take(2) == 0 ? EventBody{PoolAllocated{in.Place(), in.Size(), DeviceOrdinal{0}, in.Allocation(), 0}}
                             : EventBody{PoolFreed{in.Place()}};
    default:
      return in.Take(2) == 0 ? EventBody{SlabOpened{in.Allocation(), in.Place(), {}}}
                             : EventBody{Placed{in.Allocation(), in.Allocation(), in.Size(), false}};
  }
}

[[noreturn]] void Fail(const char* problem, const Event& event, const Status& status) {
  std::fprintf(stderr, "%s: event %lu, %s: %s\n", problem, event.seq.value, ToText(event.body).c_str(),
               status.message().c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 600) return 0;
  Input in(data, size);
  State state;
  if (!Apply(state, {SequenceNumber{1}, 0, 0, SessionOpened{SessionId{9}, "h"}}).ok()) std::abort();
  while (in.left()) {
    const Event event{SequenceNumber{state.last.value + 1}, 0, 0, AnyEvent(in, state)};
    State after = state;
    const Status applied = Apply(after, event);
    if (!applied.ok()) {
      if (after != state) Fail("a refused event changed the state", event, applied);
      if (applied.message().starts_with("check failed")) Fail("a check failed", event, applied);
      continue;
    }
    if (const Status sound = CheckInvariants(after); !sound.ok()) Fail("an invariant is broken", event, sound);
    state = std::move(after);
  }
  static_cast<void>(Digest(state));
  static_cast<void>(PlanPause(state));
  static_cast<void>(PlanResume(state));
  for (const auto& [pool, holdings] : MeasurePools(state)) {
    static_cast<void>(PlanPause(state, pool));
    static_cast<void>(PlanResume(state, pool));
  }
  static_cast<void>(Measure(state));
  static_cast<void>(ToSnapshotEvents(state));
  return 0;
}
