// Memory held over time, thinned out while it is collected: a step function of any length in a bounded number of points.
//
// Changes are put into buckets of so many consecutive changes; of each bucket its lowest, its highest and its last point stay,
// with their exact times. Buckets double when there are too many of them. So what happens often gets points where it happens (a
// pause of 0.3 s in a day keeps its shape), and no extreme of the sum is ever lost.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "statemachine/state.h"

namespace amem {

// The classes of memory. Only bytes that are occupied now are counted: memory that a pause released counts as nothing.
enum class MemoryClass : std::uint8_t {
  kOwn = 0,   // own device memory that a pause releases; of slabs all, also what is free in them
  kOwnKept,   // own device memory that a pause leaves in place (registered with a network card, multicast)
  kImported,  // peers' device memory, held through a reference; it occupies the peer's device
  kHost,      // pinned host memory
  kPool,      // of the driver's asynchronous pools
  kDriver,    // cuMemAlloc memory that is the driver's own
  kTagged,    // chunks of pools: memory of the program under a tag
};
inline constexpr std::size_t kMemoryClasses = 7;
using Held = std::array<Bytes, kMemoryClasses>;  // by MemoryClass

Held HeldIn(const State& state);      // summed up anew
Bytes DeviceBytes(const Held& held);  // what occupies this session's device: all but imported and host
Bytes Sum(const Held& held);

// What one allocation adds to `held` now, so that the sums can be kept up to date event by event.
struct Share {
  MemoryClass as = MemoryClass::kOwn;
  Bytes bytes = 0;
};
Share ShareOf(const Allocation& allocation);

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
