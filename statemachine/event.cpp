#include "statemachine/event.h"

#include <utility>

namespace amem {

EventBody::EventBody(None) : EventVariant(std::in_place_type<RangeFreed>) {}
template <class Kind>
[[gnu::noinline]] void EventBody::Become(Kind&& kind) {
  emplace<Kind>(std::move(kind));
}

namespace {

// Never called. It is here so that the compiler instantiates Become for every kind.
template <class... Kinds>
[[gnu::used]] void MakeOneOfEach(std::variant<Kinds...>&) {
  (static_cast<void>(EventBody(Kinds{})), ...);
}
[[gnu::used]] void MakeAll(EventVariant& all) { MakeOneOfEach(all); }

}  // namespace

EventBody::EventBody() = default;
EventBody::EventBody(const EventBody&) = default;
EventBody::EventBody(EventBody&&) noexcept = default;
// By copying and moving as above: a variant's own assignment is twice as much code for each kind, and none is assigned to
// often.
EventBody& EventBody::operator=(const EventBody& other) { return *this = EventBody(other); }
EventBody& EventBody::operator=(EventBody&& other) noexcept {
  if (this == &other) return *this;
  std::destroy_at(this);
  return *std::construct_at(this, std::move(other));
}
EventBody::~EventBody() = default;

PoolId PoolOfCycle(const EventBody& body) {
  using OfCycle = std::variant<CycleBegun, PhaseBegun, StepBegun, StepDone, StepFailed, CycleDone, CycleFailed>;
  const auto pool_of = []<class Kind>(const Kind& e) {
    if constexpr (kIsAlternative<Kind, OfCycle>) return e.pool;
    return PoolId{};
  };
  return std::visit(pool_of, static_cast<const EventVariant&>(body));
}

bool operator==(const EventBody& a, const EventBody& b) {
  return static_cast<const EventVariant&>(a) == static_cast<const EventVariant&>(b);
}

}  // namespace amem
