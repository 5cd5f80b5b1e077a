// Contents of allocations while their memory is given back: pinned host memory that is kept for the next cycle.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "replay/driver.h"
#include "statemachine/types.h"

namespace amem {

class Backup {
 public:
  explicit Backup(Driver& driver) : driver_(driver) {}

  // Queues the copy of [address, address + bytes) as the contents of `allocation`; done after Finish(). The address must be
  // mapped with access for `device`.
  Status Save(AllocationId allocation, DeviceOrdinal device, Address address, Bytes bytes);
  // Queues the copy back; the contents stay saved until ForgetAll.
  Status Restore(AllocationId allocation, DeviceOrdinal device, Address address);
  Status Finish();  // waits for all queued copies
  void ForgetAll();  // the memory stays pinned for the next cycle
  [[nodiscard]] bool Has(AllocationId allocation) const { return saved_.contains(allocation); }
  [[nodiscard]] Bytes pinned_bytes() const { return pinned_bytes_; }

 private:
  struct Piece {
    std::byte* host = nullptr;
    Bytes bytes = 0;
  };
  Result<std::byte*> Room(Bytes bytes);

  Driver& driver_;
  std::vector<std::unique_ptr<PinnedBuffer>> buffers_;  // filled in order; emptied all at once
  std::size_t filling_ = 0;
  Bytes filled_ = 0;
  Bytes pinned_bytes_ = 0;
  std::map<AllocationId, Piece> saved_;
  std::set<DeviceOrdinal> busy_;  // with queued copies
};

}  // namespace amem
