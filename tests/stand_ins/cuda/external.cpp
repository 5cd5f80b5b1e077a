// Memory of graphics libraries and sparse arrays, as far as they take handles of cuMemCreate.
#include <csignal>

#include "tests/stand_ins/cuda/stand_in.h"

using amem::DriverHandle;
using amem::stand_in::Result;

struct CUextMemory_st {
  DriverHandle handle;
  std::size_t bytes = 0;
};
struct CUarray_st {
  bool sparse = false;
};

// The descriptor becomes the driver's.
CUDA_CALL CUresult cuImportExternalMemory(CUexternalMemory* external, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC* wanted) {
  STARTED_OR_RETURN(stand_in);
  if (external == nullptr || wanted == nullptr || wanted->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
    return CUDA_ERROR_INVALID_VALUE;
  amem::UniqueFd descriptor(wanted->handle.fd);
  const auto imported = stand_in->simulator->Import(descriptor);
  if (!imported.ok()) {
    static_cast<void>(descriptor.Release());
    return CUDA_ERROR_INVALID_HANDLE;
  }
  *external = new CUextMemory_st{*imported, wanted->size};
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr* pointer, CUexternalMemory external,
                                                   const CUDA_EXTERNAL_MEMORY_BUFFER_DESC* part) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  if (pointer == nullptr || external == nullptr || part == nullptr || part->offset != 0 || part->size > external->bytes)
    return CUDA_ERROR_INVALID_VALUE;
  return amem::stand_in::MapAsLegacy(*stand_in, external->handle, external->bytes, part->size, device, pointer);
}

CUDA_CALL CUresult cuDestroyExternalMemory(CUexternalMemory external) {
  STARTED_OR_RETURN(stand_in);
  if (external == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult result = Result(stand_in->simulator->Release(external->handle));
  delete external;
  return result;
}

CUDA_CALL CUresult cuArray3DCreate(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR* shape) {
  STARTED_OR_RETURN(stand_in);
  if (array == nullptr || shape == nullptr || shape->Width == 0) return CUDA_ERROR_INVALID_VALUE;
  *array = new CUarray_st{(shape->Flags & CUDA_ARRAY3D_SPARSE) != 0};
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuArrayDestroy(CUarray array) {
  if (array == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  delete array;
  return CUDA_SUCCESS;
}

// As measured: the driver believes the handle, and a number that is none ends the process.
CUDA_CALL CUresult cuMemMapArrayAsync(CUarrayMapInfo* list, unsigned count, CUstream) {
  STARTED_OR_RETURN(stand_in);
  if (list == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    if (list[i].resourceType != CU_RESOURCE_TYPE_ARRAY || !list[i].resource.array->sparse) return CUDA_ERROR_INVALID_VALUE;
    if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP &&
        !stand_in->simulator->PropertiesOf(DriverHandle{list[i].memHandle.memHandle}).ok())
      raise(SIGSEGV);
  }
  return CUDA_SUCCESS;
}
