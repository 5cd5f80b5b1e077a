#include "statemachine/event.h"

namespace amem {

EventBody::EventBody() = default;
EventBody::EventBody(const EventBody&) = default;
EventBody::EventBody(EventBody&&) noexcept = default;
EventBody& EventBody::operator=(const EventBody&) = default;
EventBody& EventBody::operator=(EventBody&&) noexcept = default;
EventBody::~EventBody() = default;

bool operator==(const EventBody& a, const EventBody& b) {
  return static_cast<const EventVariant&>(a) == static_cast<const EventVariant&>(b);
}

}  // namespace amem
