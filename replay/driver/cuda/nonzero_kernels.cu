// The kernels of the sparse backup. No runtime library, no shared memory, no state but the key of the hash: compiled to a
// fatbin where there is a CUDA compiler, and taken from the committed nonzero_kernels.ptx elsewhere. After any change make that
// file anew: nonzero_ptx.cmake says how, and the build insists.
#include "replay/driver/cuda/nonzero_kernels.h"

using amem::ContentKey;
using amem::kHashLanes;
using amem::kHashPasses;
using amem::kHashPrime;
using amem::kLaneWords;
using amem::kPageBytes;
using amem::kSumFactors;
using amem::kUnitPages;
using amem::sparse::kThreads;
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

// Written by the host before the first look that hashes.
extern "C" {
__device__ ContentKey amem_sparse_key;
}

namespace {

using U64 = unsigned long long;
constexpr unsigned kLaneKey = kLaneWords + 2 * (kHashPasses - 1);
constexpr unsigned kAll = 0xffffffffU;
static_assert(kWarp == kHashLanes && kLoads * 4 == kLaneWords && kHashPasses == 4 && kSumFactors == 16);

__device__ U64 Folded(U64 value) { return (value & kHashPrime) + (value >> 61); }

// As in content_hash.cpp.
__device__ U64 Times(U64 factor, unsigned half) {
  const U64 low = (factor & kAll) * half, high = (factor >> 32) * half;
  const U64 sum = low + (high << 32);
  const U64 over = (high >> 32) + (sum < low ? 1 : 0);
  return Folded((sum & kHashPrime) + (sum >> 61) + (over << 3));
}

// The sum over all lanes of one of the four: of sum 2 * (lane % 2) + lane / 2 % 2.
__device__ U64 OneSum(const U64 (&sums)[kHashPasses], unsigned lane) {
  const bool odd = (lane & 1) != 0, second = (lane & 2) != 0;
  const U64 a = (odd ? sums[2] : sums[0]) + __shfl_xor_sync(kAll, odd ? sums[0] : sums[2], 1);
  const U64 b = (odd ? sums[3] : sums[1]) + __shfl_xor_sync(kAll, odd ? sums[1] : sums[3], 1);
  U64 sum = (second ? b : a) + __shfl_xor_sync(kAll, second ? a : b, 2);
#pragma unroll
  for (unsigned apart = 4; apart < kWarp; apart *= 2) sum += __shfl_xor_sync(kAll, sum, apart);
  return sum;
}

// This lane's part of a page, which begins at `at`. False: the page is zero in all lanes.
__device__ bool LoadPage(const uint4* at, uint4 (&v)[kLoads]) {
  unsigned any = 0;
#pragma unroll
  for (unsigned i = 0; i < kLoads; ++i) v[i] = __ldcs(at + i * kWarp);
#pragma unroll
  for (unsigned i = 0; i < kLoads; ++i) any |= v[i].x | v[i].y | v[i].z | v[i].w;
  return __any_sync(kAll, any != 0);
}

// Where a lane's factor lies in a row of the key. Lanes 16 to 31 repeat what those before do.
__device__ unsigned FactorOf(unsigned lane) { return (lane & 8) + (lane & 4) + 2 * (lane & 1) + (lane / 2 & 1); }

}  // namespace

// Bit p of bitmap[u]: page p of unit u has a byte that is not zero. One warp a unit.
extern "C" __global__ void __launch_bounds__(kThreads)
    amem_sparse_find(const TableExtent* extents, unsigned count, unsigned units, unsigned* bitmap) {
  const unsigned warps = gridDim.x * (kThreads / kWarp);
  for (unsigned unit = (blockIdx.x * kThreads + threadIdx.x) / kWarp; unit < units; unit += warps) {
    const Part part = PartOf(extents, count, unit);
    const uint4* at = part.vectors + threadIdx.x % kWarp;
    unsigned bits = 0;
    for (unsigned page = 0; page < part.pages; ++page, at += kVectorsPerPage) {
      uint4 v[kLoads];
      if (LoadPage(at, v)) bits |= 1U << page;
    }
    if (threadIdx.x % kWarp == 0) bitmap[unit] = bits;
  }
}

// The same, and hashes[2 * u] and the next: the unit's hash (content_hash.h).
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    amem_sparse_look(const TableExtent* extents, unsigned count, unsigned units, unsigned* bitmap, U64* hashes) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warps = gridDim.x * (kThreads / kWarp);
  unsigned k[kLaneKey];
#pragma unroll
  for (unsigned i = 0; i < kLaneKey; i += 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(&amem_sparse_key.words[lane * kLaneWords + i]);
    k[i] = two.x;
    k[i + 1] = two.y;
  }
  const auto* const factors = reinterpret_cast<const U64*>(&amem_sparse_key.factors[0][FactorOf(lane)]);
  for (unsigned unit = (blockIdx.x * kThreads + threadIdx.x) / kWarp; unit < units; unit += warps) {
    const Part part = PartOf(extents, count, unit);
    const uint4* at = part.vectors + lane;
    unsigned bits = 0;
    U64 hash = 0;  // this lane's part of it
    for (unsigned page = 0; page < part.pages; ++page, at += kVectorsPerPage) {
      uint4 v[kLoads];
      if (!LoadPage(at, v)) continue;
      bits |= 1U << page;
      U64 sums[kHashPasses] = {};
#pragma unroll
      for (unsigned i = 0; i < kLoads; ++i) {
#pragma unroll
        for (unsigned j = 0; j < kHashPasses; ++j) {
          const unsigned* const with = k + 4 * i + 2 * j;
          sums[j] += static_cast<U64>(v[i].x + with[0]) * (v[i].y + with[1]);
          sums[j] += static_cast<U64>(v[i].z + with[2]) * (v[i].w + with[3]);
        }
      }
      const U64 sum = OneSum(sums, lane);
      const unsigned half = static_cast<unsigned>((lane & 4) != 0 ? sum >> 32 : sum);
      hash = Folded(hash + Times(__ldg(factors + page * kSumFactors), half));
    }
    if ((lane & 7) == 0) hash = Folded(hash + Times(__ldg(factors + kUnitPages * kSumFactors), bits));
#pragma unroll
    for (unsigned apart = 1; apart < 8; apart *= 2) hash = Folded(hash + __shfl_xor_sync(kAll, hash, apart));
    hash = Folded(hash);
    if ((lane & 7) == 0 && lane < 16) hashes[2 * unit + lane / 8] = hash >= kHashPrime ? hash - kHashPrime : hash;
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
