// Memory pools of the stand-in: what is freed stays with its pool, as far as the pool's release threshold allows, until the
// pool is trimmed or destroyed. The driver applies the threshold when it next waits for the device, the stand-in at once.
#include <map>

#include "tests/stand_ins/cuda/stand_in.h"

struct CUmemPoolHandle_st {
  cuuint64_t threshold = 0;
  std::map<CUdeviceptr, std::size_t> used, kept;
};

namespace {

struct Pools {
  std::mutex mutex;
  std::set<CUmemoryPool> known;
  std::map<CUdevice, CUmemoryPool> of_devices;
  static Pools& Get() {
    static auto* all = new Pools;
    return *all;
  }
};

cuuint64_t Sum(const std::map<CUdeviceptr, std::size_t>& blocks) {
  cuuint64_t sum = 0;
  for (const auto& [address, bytes] : blocks) sum += bytes;
  return sum;
}

void GiveBack(CUmemPoolHandle_st& pool, cuuint64_t keep) {
  while (!pool.kept.empty() && Sum(pool.used) + Sum(pool.kept) > keep) {
    cuMemFree(pool.kept.begin()->first);
    pool.kept.erase(pool.kept.begin());
  }
}

}  // namespace

CUDA_CALL CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* properties) {
  STARTED_OR_RETURN(stand_in);
  if (pool == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Pools& pools = Pools::Get();
  const std::lock_guard lock(pools.mutex);
  *pool = *pools.known.insert(new CUmemPoolHandle_st).first;
  return CUDA_SUCCESS;
}

// What cuMemAllocAsync allocates is not in it.
CUDA_CALL CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  STARTED_OR_RETURN(stand_in);
  if (pool == nullptr || device < 0 || device >= stand_in->devices) return CUDA_ERROR_INVALID_VALUE;
  Pools& pools = Pools::Get();
  const std::lock_guard lock(pools.mutex);
  CUmemoryPool& of_device = pools.of_devices[device];
  if (of_device == nullptr) of_device = *pools.known.insert(new CUmemPoolHandle_st).first;
  *pool = of_device;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  Pools& pools = Pools::Get();
  const std::lock_guard lock(pools.mutex);
  if (pools.known.erase(pool) == 0) return CUDA_ERROR_INVALID_VALUE;
  GiveBack(*pool, 0);
  delete pool;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuMemPoolTrimTo(CUmemoryPool pool, std::size_t keep) {
  Pools& pools = Pools::Get();
  const std::lock_guard lock(pools.mutex);
  if (!pools.known.contains(pool)) return CUDA_ERROR_INVALID_VALUE;
  GiveBack(*pool, keep);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  Pools& pools = Pools::Get();
  const std::lock_guard lock(pools.mutex);
  if (!pools.known.contains(pool) || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) pool->threshold = *static_cast<cuuint64_t*>(value);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  Pools& pools = Pools::Get();
  const std::lock_guard lock(pools.mutex);
  if (!pools.known.contains(pool) || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto& answer = *static_cast<cuuint64_t*>(value);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      answer = pool->threshold;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      answer = Sum(pool->used) + Sum(pool->kept);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      answer = Sum(pool->used);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUDA_CALL CUresult cuMemAllocFromPoolAsync(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool, CUstream) {
  Pools& pools = Pools::Get();
  const std::lock_guard lock(pools.mutex);
  if (!pools.known.contains(pool) || pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (auto it = pool->kept.begin(); it != pool->kept.end(); ++it) {
    if (it->second < bytes) continue;
    *pointer = it->first;
    pool->used.insert(*it);
    pool->kept.erase(it);
    return CUDA_SUCCESS;
  }
  const CUresult result = cuMemAlloc(pointer, bytes);
  if (result == CUDA_SUCCESS) pool->used.emplace(*pointer, bytes);
  return result;
}

CUDA_CALL CUresult cuMemAllocAsync(CUdeviceptr* pointer, std::size_t bytes, CUstream) { return cuMemAlloc(pointer, bytes); }

CUDA_CALL CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream) {
  Pools& pools = Pools::Get();
  const std::lock_guard lock(pools.mutex);
  for (const CUmemoryPool pool : pools.known) {
    const auto it = pool->used.find(pointer);
    if (it == pool->used.end()) continue;
    pool->kept.insert(*it);
    pool->used.erase(it);
    GiveBack(*pool, pool->threshold);
    return CUDA_SUCCESS;
  }
  return cuMemFree(pointer);
}
