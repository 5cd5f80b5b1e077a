// The floor: what pause and resume of the reference workload's memory cost in raw driver calls, with no NCCL, no contents and
// no bookkeeping. One handle per allocation, or slabs. Nothing that releases and brings back the same memory can be faster by
// more than luck, so it is what AMem's own times are compared with, in the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/gpu/job.h"

namespace amem::gpu {

struct FloorOptions {
  // The reference workload on 4 GPUs, for each rank (FACTS): 2 and 10 MiB, a third of the former and all of the latter
  // exported.
  int private_2mib = 588;
  int shared_2mib = 592;
  int shared_10mib = 592;
  int scale = 1;     // divides the counts
  int slab_mib = 0;  // 0: one handle per allocation; else everything is cut from slabs that all peers import
};

struct FloorTimes {
  double drop_imports_ms = 0;
  double release_own_ms = 0;
  double pause_ms = 0;
  double create_own_ms = 0;
  double share_ms = 0;
  double resume_ms = 0;
};

class Floor {
 public:
  Floor(Child& child, const Device& device, const FloorOptions& options);

  // Makes everything for the first time: ranges, memory, imports. Collective, as are the next two.
  void Build();
  FloorTimes Pause();
  FloorTimes Resume();
  // Everything back to the driver.
  void TearDown();

  [[nodiscard]] std::size_t allocations() const { return own_.size(); }
  [[nodiscard]] std::size_t imports() const { return imported_.size(); }
  [[nodiscard]] std::uint64_t own_bytes() const;

 private:
  struct Piece {
    std::size_t bytes = 0;
    CUdeviceptr address = 0;
    CUmemGenericAllocationHandle handle = 0;
    int peer = -1;  // owner's side: the one importer, or -1; with slabs: -1 and all peers; importer's side: the owner
  };

  void Reserve(Piece& piece) const;
  void Place(Piece& piece) const;
  void Displace(Piece& piece) const;
  void CreateOwn();
  void Share();
  void SendBatch(int peer, const std::vector<std::size_t>& pieces, std::size_t from, std::size_t to) const;
  void ReceiveBatch(int peer, std::size_t expected, std::vector<Piece*>& into, std::size_t from) const;
  [[nodiscard]] std::vector<std::size_t> PiecesFor(int peer, int of) const;

  Child& child_;
  Device device_;
  FloorOptions options_;
  bool rdma_ = false;
  std::vector<Piece> own_;
  std::vector<Piece> imported_;
};

}  // namespace amem::gpu
