#include "replay/report/timeline_series.h"

#include <algorithm>

namespace amem {

SeriesBuilder::SeriesBuilder(std::size_t limit)
    : limit_(std::max<std::size_t>(4, (limit - std::min<std::size_t>(limit, 2)) / 3)) {
  buckets_.reserve(limit_);
}

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
  const auto full = [this] { return buckets_.empty() || buckets_.back().count >= width_; };
  const Bucket one{point, point, point, 1};
  if (full() && buckets_.size() == limit_) Halve();
  full() ? buckets_.push_back(one) : buckets_.back().Add(one);
}

void SeriesBuilder::Halve() {
  std::vector<Bucket> half;
  half.reserve(limit_);
  for (std::size_t i = 0; i < buckets_.size(); i += 2) {
    half.push_back(buckets_[i]);
    if (i + 1 < buckets_.size()) half.back().Add(buckets_[i + 1]);
  }
  buckets_ = std::move(half);
  width_ *= 2;
}

std::vector<SeriesPoint> SeriesBuilder::Points() const {
  std::vector<SeriesPoint> points;
  const auto add = [&points](const SeriesPoint& point) {
    if (points.empty() || points.back().seq < point.seq || points.back().time_ns < point.time_ns) points.push_back(point);
  };
  if (changes_ != 0) add(first_);
  for (const Bucket& bucket : buckets_) {
    const bool low_first = bucket.lowest.seq <= bucket.highest.seq;
    add(low_first ? bucket.lowest : bucket.highest);
    add(low_first ? bucket.highest : bucket.lowest);
    add(bucket.last);
  }
  return points;
}

}  // namespace amem
