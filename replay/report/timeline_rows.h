// Which events of a journal a person sees: all of them where there are few, else those around cycles and failures. What is not
// listed is counted, in a row of its own at its place, so that the list accounts for every event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "statemachine/event.h"

namespace amem {

// Whether an event's body is of one of these kinds.
template <class Body, class... Kinds>
inline constexpr bool kIsOneOf = (std::is_same_v<Body, Kinds> || ...);

// How much a person wants to see an event; when there is no room, the last of this list go first.
enum class Weight : std::uint8_t {
  kFailure = 0,  // something went wrong
  kLandmark,     // the life of the session; cycles begun and ended
  kPhase,        // phases of cycles
  kNear,         // close to a failure
  kBoundary,     // next to a phase's or a cycle's beginning or end
  kUnusual,      // seldom kinds: peers, symbols, multicast, registrations, calls that passed through
  kMemory,       // memory made, imported, referenced, freed
  kDetail,       // ranges, mappings, access, exports
  kStep,         // steps of cycles
};
inline constexpr std::size_t kWeights = 9;
Weight WeightOf(const EventBody& body);

struct EventRow {
  Weight weight = Weight::kDetail;
  // One event, or (when empty) `count` consecutive events that are not listed.
  std::optional<Event> event;
  SequenceNumber first, last;
  std::uint64_t begin_ns = 0, end_ns = 0;
  std::uint64_t count = 1;
  std::vector<std::pair<std::uint8_t, std::uint64_t>> kinds;  // of a count: (kind, how many), most first when taken
};

class RowBuilder {
 public:
  explicit RowBuilder(std::size_t limit);
  void Add(const Event& event);
  // At most `limit` rows, in order of sequence.
  [[nodiscard]] std::vector<EventRow> Take();
  // Leaves fewer rows, for a page that has become too large.
  static void Thin(std::vector<EventRow>& rows, std::size_t limit);

 private:
  std::size_t limit_;
  std::vector<EventRow> rows_;
  std::size_t boundary_ = 0;       // so many rows to come are next to a boundary
  std::size_t after_failure_ = 0;  // ... or follow a failure
};

}  // namespace amem
