// The kernels of the sparse backup. No runtime library, no shared memory, no state: compiled to a fatbin where there is a CUDA
// compiler, and taken from the committed nonzero_kernels.ptx elsewhere. After any change make that file anew: nonzero_ptx.cmake
// says how, and the build insists.
#include "replay/driver/cuda/nonzero_kernels.h"

using amem::sparse::kPageBytes;
using amem::sparse::kThreads;
using amem::sparse::kUnitPages;
using amem::sparse::TableExtent;
using amem::sparse::TablePiece;

namespace {

constexpr unsigned kVectorsPerPage = kPageBytes / sizeof(uint4);
constexpr unsigned kWarp = 32;
constexpr unsigned kLoads = kVectorsPerPage / kWarp;  // of one thread for one page

// The last extent that begins at or before `unit`.
__device__ TableExtent Containing(const TableExtent* extents, unsigned count, unsigned unit) {
  unsigned low = 0, high = count;
  while (high - low > 1) {
    const unsigned middle = low + (high - low) / 2;
    if (extents[middle].first_unit <= unit) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return extents[low];
}

struct Part {
  uint4* vectors;
  unsigned pages;
};

__device__ Part PartOf(const TableExtent* extents, unsigned count, unsigned unit) {
  const TableExtent extent = Containing(extents, count, unit);
  const unsigned first = (unit - extent.first_unit) * kUnitPages;
  const unsigned left = extent.pages - first;
  const unsigned long long at = extent.address + static_cast<unsigned long long>(first) * kPageBytes;
  return {reinterpret_cast<uint4*>(at), left < kUnitPages ? left : kUnitPages};
}

}  // namespace

// Bit p of bitmap[u]: page p of unit u has a byte that is not zero. One warp a unit.
extern "C" __global__ void __launch_bounds__(kThreads)
    amem_sparse_find(const TableExtent* extents, unsigned count, unsigned units, unsigned* bitmap) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warps = gridDim.x * (kThreads / kWarp);
  for (unsigned unit = (blockIdx.x * kThreads + threadIdx.x) / kWarp; unit < units; unit += warps) {
    const Part part = PartOf(extents, count, unit);
    const uint4* at = part.vectors + lane;
    unsigned bits = 0;
    for (unsigned page = 0; page < part.pages; ++page, at += kVectorsPerPage) {
      uint4 v[kLoads];
#pragma unroll
      for (unsigned i = 0; i < kLoads; ++i) v[i] = __ldcs(at + i * kWarp);
      unsigned any = 0;
#pragma unroll
      for (unsigned i = 0; i < kLoads; ++i) any |= v[i].x | v[i].y | v[i].z | v[i].w;
      if (__any_sync(0xffffffffU, any != 0)) bits |= 1U << page;
    }
    if (lane == 0) bitmap[unit] = bits;
  }
}

// One warp a unit.
extern "C" __global__ void __launch_bounds__(kThreads)
    amem_sparse_clear(const TableExtent* extents, unsigned count, unsigned units) {
  const unsigned warps = gridDim.x * (kThreads / kWarp);
  const uint4 zero = {0, 0, 0, 0};
  for (unsigned unit = (blockIdx.x * kThreads + threadIdx.x) / kWarp; unit < units; unit += warps) {
    const Part part = PartOf(extents, count, unit);
    uint4* at = part.vectors + threadIdx.x % kWarp;
    for (unsigned page = 0; page < part.pages; ++page, at += kVectorsPerPage) {
#pragma unroll
      for (unsigned i = 0; i < kLoads; ++i) __stcs(at + i * kWarp, zero);
    }
  }
}

// gather != 0: from the pieces to the dense buffer, else back. One thread block a piece.
extern "C" __global__ void __launch_bounds__(kThreads)
    amem_sparse_copy(const TablePiece* pieces, unsigned count, unsigned long long dense, int gather) {
  constexpr unsigned kAtOnce = 4;
  for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
    const TablePiece piece = pieces[i];
    uint4* const device = reinterpret_cast<uint4*>(piece.address);
    uint4* const packed = reinterpret_cast<uint4*>(dense + static_cast<unsigned long long>(piece.first_page) * kPageBytes);
    const uint4* const from = gather != 0 ? device : packed;
    uint4* const to = gather != 0 ? packed : device;
    const unsigned vectors = piece.pages * kVectorsPerPage;
    for (unsigned at = threadIdx.x; at < vectors; at += kThreads * kAtOnce) {
      uint4 v[kAtOnce];
#pragma unroll
      for (unsigned k = 0; k < kAtOnce; ++k) {
        if (at + k * kThreads < vectors) v[k] = __ldcs(from + at + k * kThreads);
      }
#pragma unroll
      for (unsigned k = 0; k < kAtOnce; ++k) {
        if (at + k * kThreads < vectors) __stcs(to + at + k * kThreads, v[k]);
      }
    }
  }
}
