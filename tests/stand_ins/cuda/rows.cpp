// Copies and fills of the stand-in that consist of several: rows, batches. Made of memory.cpp's, one after the other.
#include "tests/stand_ins/cuda/stand_in.h"

namespace {

struct End {
  CUmemorytype type;
  CUdeviceptr address;
};
End Of(CUmemorytype type, CUdeviceptr device, const void* host) {
  return {type, type == CU_MEMORYTYPE_HOST ? reinterpret_cast<CUdeviceptr>(host) : device};
}

CUresult CopyRow(const End& to, const End& from, std::size_t offset_to, std::size_t offset_from, std::size_t bytes) {
  const CUdeviceptr target = to.address + offset_to, source = from.address + offset_from;
  if (to.type == CU_MEMORYTYPE_HOST) return cuMemcpyDtoH(reinterpret_cast<void*>(target), source, bytes);
  if (from.type == CU_MEMORYTYPE_HOST) return cuMemcpyHtoD(target, reinterpret_cast<const void*>(source), bytes);
  return cuMemcpyDtoD(target, source, bytes);
}

bool IsPlain(CUmemorytype type) { return type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE; }

}  // namespace

// Of arrays only that there is none.
CUDA_CALL CUresult cuMemcpy2D(const CUDA_MEMCPY2D* plane) {
  STARTED_OR_RETURN(stand_in);
  if (plane == nullptr || !IsPlain(plane->srcMemoryType) || !IsPlain(plane->dstMemoryType)) return CUDA_ERROR_INVALID_VALUE;
  const End to = Of(plane->dstMemoryType, plane->dstDevice, plane->dstHost);
  const End from = Of(plane->srcMemoryType, plane->srcDevice, plane->srcHost);
  for (std::size_t row = 0; row < plane->Height; ++row) {
    const CUresult result = CopyRow(to, from, (plane->dstY + row) * plane->dstPitch + plane->dstXInBytes,
                                    (plane->srcY + row) * plane->srcPitch + plane->srcXInBytes, plane->WidthInBytes);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
CUDA_CALL CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* plane) { return cuMemcpy2D(plane); }
CUDA_CALL CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* plane, CUstream) { return cuMemcpy2D(plane); }

CUDA_CALL CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                std::size_t bytes) {
  if (to_context == nullptr || from_context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return cuMemcpyDtoD(to, from, bytes);
}
CUDA_CALL CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                     std::size_t bytes, CUstream) {
  return cuMemcpyPeer(to, to_context, from, from_context, bytes);
}

CUDA_CALL CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, std::size_t* bytes, std::size_t count,
                                      CUmemcpyAttributes* attributes, std::size_t* first, std::size_t kinds, CUstream stream) {
  STARTED_OR_RETURN(stand_in);
  if (to == nullptr || from == nullptr || bytes == nullptr || count == 0 || attributes == nullptr || first == nullptr ||
      kinds == 0 || kinds > count || stream == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < count; ++i)
    if (const CUresult result = cuMemcpyAsync(to[i], from[i], bytes[i], stream); result != CUDA_SUCCESS) return result;
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuMemsetD2D8(CUdeviceptr pointer, std::size_t pitch, unsigned char value, std::size_t width,
                                std::size_t height) {
  for (std::size_t row = 0; row < height; ++row)
    if (const CUresult result = cuMemsetD8(pointer + row * pitch, value, width); result != CUDA_SUCCESS) return result;
  return CUDA_SUCCESS;
}
