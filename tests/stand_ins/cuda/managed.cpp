// Managed memory of the stand-in, which is the device's like all other, and advice, which is for managed memory alone.
#include "tests/stand_ins/cuda/stand_in.h"

bool amem::stand_in::IsManaged(StandIn& stand_in, CUdeviceptr pointer) {
  const std::lock_guard lock(stand_in.mutex);
  const auto found = Containing(stand_in.legacy, pointer);
  return found != stand_in.legacy.end() && found->second.managed;
}

namespace {

CUresult OfManaged(CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  return amem::stand_in::IsManaged(*stand_in, pointer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;  // as measured
}

}  // namespace

CUDA_CALL CUresult cuMemAllocManaged(CUdeviceptr* pointer, std::size_t bytes, unsigned flags) {
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = cuMemAlloc(pointer, bytes);
  if (result != CUDA_SUCCESS) return result;
  STARTED_OR_RETURN(stand_in);
  const std::lock_guard lock(stand_in->mutex);
  stand_in->legacy.at(*pointer).managed = true;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuMemAdvise(CUdeviceptr pointer, std::size_t, CUmem_advise, CUmemLocation) { return OfManaged(pointer); }
CUDA_CALL CUresult cuMemPrefetchAsync(CUdeviceptr pointer, std::size_t, CUmemLocation, unsigned, CUstream) {
  return OfManaged(pointer);
}

// Of its attributes that nobody has given any advice.
CUDA_CALL CUresult cuMemRangeGetAttribute(void* data, std::size_t bytes, CUmem_range_attribute attribute, CUdeviceptr pointer,
                                          std::size_t) {
  if (data == nullptr || bytes != sizeof(int) || attribute != CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY)
    return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = OfManaged(pointer);
  if (result == CUDA_SUCCESS) *static_cast<int*>(data) = 0;
  return result;
}
