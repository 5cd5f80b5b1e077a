// What a timeline is collected by, event by event, in memory that does not grow with the journal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "replay/report/timeline.h"

namespace amem {

// A list of any length in a bounded number of entries. Each takes so many in a row, and twice as many when there are too many.
template <class Entry>
class Bundles {
 public:
  explicit Bundles(std::size_t limit) : limit_(limit) {}
  void Add(const Entry& one) {
    if (Full() && all_.size() == limit_) {
      for (std::size_t i = 0; i < all_.size(); ++i) i % 2 == 0 ? void(all_[i / 2] = all_[i]) : all_[i / 2].Add(all_[i]);
      all_.resize((all_.size() + 1) / 2);
      width_ *= 2;
    }
    Full() ? all_.push_back(one) : all_.back().Add(one);
  }
  [[nodiscard]] const std::vector<Entry>& all() const { return all_; }
  [[nodiscard]] std::uint64_t width() const { return width_; }

 private:
  [[nodiscard]] bool Full() const { return all_.empty() || all_.back().count >= width_; }

  const std::size_t limit_;
  std::uint64_t width_ = 1;
  std::vector<Entry> all_;
};

// Memory held over time, thinned out while it is collected: a step function of any length in a bounded number of points.
//
// Changes are put into buckets of so many consecutive changes; of each bucket its lowest, its highest and its last point stay,
// with their exact times. Buckets double when there are too many of them. So what happens often gets points where it happens (a
// pause of 0.3 s in a day keeps its shape), and no extreme of the sum is ever lost.
class SeriesBuilder {
 public:
  // At most `limit` points are kept, at least 12.
  explicit SeriesBuilder(std::size_t limit);
  // In order of time. A point that equals the one before it is no change.
  void Add(const SeriesPoint& point);
  // The first point, the kept ones and the last one, in order.
  [[nodiscard]] std::vector<SeriesPoint> Points() const;
  [[nodiscard]] std::uint64_t changes() const { return changes_; }
  [[nodiscard]] bool thinned() const { return buckets_.width() > 3; }  // more changes in a bucket than points

 private:
  struct Bucket {
    SeriesPoint lowest, highest, last;
    std::uint64_t count = 0;
    void Add(const Bucket& later);
  };

  std::uint64_t changes_ = 0;
  SeriesPoint first_, last_;
  Bundles<Bucket> buckets_;
};

// Which events of a journal a person sees: all of them where there are few, else those around cycles and failures. What is not
// listed is counted, in a row of its own at its place, so that the list accounts for every event.
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

// Allocations, and the memory that sessions hold of each other.
class AllocationCollector {
 public:
  AllocationCollector(SessionTimeline& out, std::size_t limit);
  void StartFrom(const State& state, std::uint64_t now_ns);
  void Take(const Event& event, const State& after);
  void Check(AllocationId id, const Event& event, const State& after);  // an allocation that the event may have ended
  void Finish(const State& state);

 private:
  // Memory with an id by that, other by its kind and address.
  using Live = std::map<std::tuple<AllocationId, AllocationKind, Address>, AllocationRecord>;
  struct Taker;

  AllocationRecord& Begin(AllocationRecord record);
  AllocationRecord* Find(AllocationId id) { return FindIn(live_, {id, {}, {}}); }  // null: there is none
  void BecomeSlab(AllocationId id);
  void BecomePart(AllocationId id, const State& state);
  void Place(AllocationId id, Address address);
  void End(Live::iterator it, const Event& event);
  void Thin(std::size_t limit);

  SessionTimeline& out_;
  std::size_t limit_;
  Live live_;
  std::vector<AllocationRecord> ended_;
};

}  // namespace amem
