// Memory held over time, thinned out while it is collected: a step function of any length in a bounded number of points.
//
// Changes are put into buckets of so many consecutive changes; of each bucket its lowest, its highest and its last point stay,
// with their exact times. Buckets double when there are too many of them. So what happens often gets points where it happens (a
// pause of 0.3 s in a day keeps its shape), and no extreme of the sum is ever lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "replay/job/story/held.h"

namespace amem {

struct SeriesPoint {
  std::uint64_t time_ns = 0;
  SequenceNumber seq;
  Held held{};
  friend bool operator==(const SeriesPoint&, const SeriesPoint&) = default;
};

class SeriesBuilder {
 public:
  // At most `limit` points are kept, at least 12.
  explicit SeriesBuilder(std::size_t limit);
  // In order of time. A point that equals the one before it is no change.
  void Add(const SeriesPoint& point);
  // The first point, the kept ones and the last one, in order.
  [[nodiscard]] std::vector<SeriesPoint> Points() const;
  [[nodiscard]] std::uint64_t changes() const { return changes_; }
  [[nodiscard]] bool thinned() const { return width_ > 3; }  // more changes in a bucket than points

 private:
  struct Bucket {
    SeriesPoint lowest, highest, last;
    std::uint64_t count = 0;
    void Add(const Bucket& later);
  };
  void Halve();

  std::size_t limit_;  // of buckets
  std::uint64_t width_ = 1;
  std::uint64_t changes_ = 0;
  SeriesPoint first_, last_;
  std::vector<Bucket> buckets_;
};

}  // namespace amem
