// The events and the changes of memory of which a timeline keeps some.
#include <algorithm>

#include "replay/report/timeline_parts.h"

namespace amem {
namespace {

constexpr std::size_t kWeights = static_cast<std::size_t>(Weight::kStep) + 1;
constexpr std::size_t kBeforeFailure = 60, kAfterFailure = 20;  // rows listed around a failure
constexpr std::size_t kAtBoundary = 3;                          // ... and on each side of a phase's beginning or end
constexpr std::size_t kAtEnds = 40;                             // ... at the beginning and the end of a journal

template <class Body>
Weight WeightOfBody(const Body&) {
  if (kIsOneOf<Body, SessionBroken, StepFailed, CycleFailed, PeerLost, LaunchRefused>) return Weight::kFailure;
  if (kIsOneOf<Body, PhaseBegun, ProcessSeen>) return Weight::kPhase;
  if (kIsOneOf<Body, ThreadSeen>) return Weight::kNear;
  if (kIsOneOf<Body, MemberHeard>) return Weight::kBoundary;
  if (kIsOneOf<Body, CycleBegun, CycleDone, PoolOpened, SessionOpened, SessionClosed, LibraryAttached, GroupChanged,
               CommunicatorBegun, CommunicatorReady, CommunicatorEnded, CommunicatorSuspended, RequestSeen, SafepointReached,
               Frozen, FreezeStep, EverythingKept, SharedOutside>)
    return Weight::kLandmark;
  if (kIsOneOf<Body, StepBegun, StepDone>) return Weight::kStep;
  if (kIsOneOf<Body, AllocationCreated, AllocationReleased, Imported, ReferenceAdded, ReferenceDropped, HostAllocated,
               HostFreed, LegacyAllocated, LegacyFreed, AsyncAllocated, AsyncFreed, PoolAllocated, PoolFreed>)
    return Weight::kMemory;
  if (kIsOneOf<Body, RangeReserved, RangeFreed, Mapped, Unmapped, AccessSet, Exported, AllocationRetained, Placed, PartCleared>)
    return Weight::kDetail;
  return Weight::kUnusual;
}
Weight WeightOfBody(const RequestEnded& e) { return e.code == Code::kOk ? Weight::kLandmark : Weight::kFailure; }
Weight WeightOfBody(const VoteCast& e) { return e.ok ? Weight::kBoundary : Weight::kFailure; }
Weight WeightOfBody(const BallotShown& e) { return agreement::IsFailure(e.cause) ? Weight::kFailure : Weight::kBoundary; }
Weight WeightOfBody(const PhaseDecided& e) { return e.passed ? Weight::kPhase : Weight::kFailure; }

void Raise(EventRow& row, Weight weight) {
  if (row.event) row.weight = std::min(row.weight, weight);
}

// `row` and what follows it become one count.
void Absorb(EventRow& row, EventRow&& next) {
  const auto add = [&row](std::uint8_t kind, std::uint64_t count) {
    const auto known = std::find_if(row.kinds.begin(), row.kinds.end(), [kind](const auto& k) { return k.first == kind; });
    if (known != row.kinds.end()) {
      known->second += count;
    } else {
      row.kinds.emplace_back(kind, count);
    }
  };
  const auto list = [&add](const EventRow& of) {
    if (of.event) add(static_cast<std::uint8_t>(of.event->body.index()), 1);
  };
  list(row);
  row.event.reset();
  row.weight = Weight::kStep;
  list(next);
  for (const auto& [kind, count] : next.kinds) add(kind, count);
  row.last = next.last;
  row.end_ns = next.end_ns;
  row.count += next.count;
}

// Replaces the rows for which `drop` is true by counts; neighbouring counts become one. A single event between two rows that
// stay is kept, because a count of one would take as much room.
template <class Drop>
void Collapse(std::vector<EventRow>& rows, const Drop& drop) {
  std::vector<EventRow> kept;
  kept.reserve(rows.size());
  bool open = false;  // the last kept row is a count, which takes more
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool counted = !rows[i].event || drop(i, rows[i]);
    if (counted && open) {
      Absorb(kept.back(), std::move(rows[i]));
    } else {
      kept.push_back(std::move(rows[i]));
      open = counted;
    }
  }
  rows = std::move(kept);
}

}  // namespace

RowBuilder::RowBuilder(std::size_t limit) : limit_(std::max<std::size_t>(limit, 4 * kAtEnds)) {}

void RowBuilder::Add(const Event& event) {
  EventRow row{.weight = std::visit([](const auto& e) { return WeightOfBody(e); }, event.body),
               .event = event,
               .first = event.seq,
               .last = event.seq,
               .begin_ns = event.time_ns,
               .end_ns = event.time_ns};
  const bool edge = row.weight <= Weight::kPhase;
  if (edge) {
    const std::size_t back = row.weight == Weight::kFailure ? kBeforeFailure : kAtBoundary;
    const Weight as = row.weight == Weight::kFailure ? Weight::kNear : Weight::kBoundary;
    for (std::size_t i = rows_.size(); i > 0 && rows_.size() - i < back; --i) Raise(rows_[i - 1], as);
    boundary_ = kAtBoundary;
    if (row.weight == Weight::kFailure) after_failure_ = kAfterFailure;
  } else if (after_failure_ > 0) {
    --after_failure_;
    Raise(row, Weight::kNear);
  } else if (boundary_ > 0) {
    --boundary_;
    Raise(row, Weight::kBoundary);
  }
  rows_.push_back(std::move(row));
  if (rows_.size() >= 3 * limit_) Thin(rows_, limit_);
}

void RowBuilder::Thin(std::vector<EventRow>& rows, std::size_t limit) {
  for (std::size_t worst = kWeights - 1; worst > static_cast<std::size_t>(Weight::kPhase) && rows.size() > limit; --worst) {
    const std::size_t end = rows.size() - std::min(rows.size(), kBeforeFailure + kAtEnds);
    Collapse(rows, [&](std::size_t i, const EventRow& row) {
      return i >= kAtEnds && i < end && static_cast<std::size_t>(row.weight) >= worst;
    });
  }
  if (rows.size() <= limit) return;
  // Only important rows are left, and still too many: the oldest behind the first quarter go.
  const std::size_t excess = rows.size() - limit + 1, from = std::min(limit / 4, rows.size() - excess);
  Collapse(rows, [&](std::size_t i, const EventRow&) { return i >= from && i < from + excess; });
}

std::vector<EventRow> RowBuilder::Take() {
  Thin(rows_, limit_);
  for (EventRow& row : rows_)
    std::stable_sort(row.kinds.begin(), row.kinds.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return std::exchange(rows_, {});
}

SeriesBuilder::SeriesBuilder(std::size_t limit)
    : buckets_(std::max<std::size_t>(4, (limit - std::min<std::size_t>(limit, 2)) / 3)) {}

void SeriesBuilder::Bucket::Add(const Bucket& later) {
  if (Sum(later.lowest.held) < Sum(lowest.held)) lowest = later.lowest;
  if (Sum(later.highest.held) > Sum(highest.held)) highest = later.highest;
  last = later.last;
  count += later.count;
}

void SeriesBuilder::Add(const SeriesPoint& point) {
  if (changes_ == 0) first_ = point;
  if (changes_ != 0 && point.held == last_.held) return;
  last_ = point;
  ++changes_;
  buckets_.Add({point, point, point, 1});
}

std::vector<SeriesPoint> SeriesBuilder::Points() const {
  std::vector<SeriesPoint> points;
  const auto add = [&points](const SeriesPoint& point) {
    if (points.empty() || points.back().seq < point.seq) points.push_back(point);
  };
  if (changes_ != 0) add(first_);
  for (const Bucket& bucket : buckets_.all()) {
    const bool low_first = bucket.lowest.seq <= bucket.highest.seq;
    add(low_first ? bucket.lowest : bucket.highest);
    add(low_first ? bucket.highest : bucket.lowest);
    add(bucket.last);
  }
  return points;
}

}  // namespace amem
