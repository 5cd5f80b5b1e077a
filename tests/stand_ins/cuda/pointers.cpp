// What the stand-in says of a pointer.
#include "tests/stand_ins/cuda/stand_in.h"

using amem::stand_in::At;

CUDA_CALL CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  const auto mapping = stand_in->simulator->MappingAt(At(pointer));
  if (!mapping.ok()) return CUDA_ERROR_INVALID_VALUE;
  const auto properties = stand_in->simulator->PropertiesOf(mapping->handle);
  const int device = properties.ok() ? properties->location.id : 0;
  CUcontext context = nullptr;
  const bool is_legacy = amem::stand_in::LegacyAt(*stand_in, pointer, &context);
  const auto legacy = [&] { return is_legacy; };
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(data) = context;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<int*>(data) = legacy() ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      *static_cast<std::uint64_t*>(data) = legacy() || !properties.ok() ? 0 : properties->handle_types;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<int*>(data) = amem::stand_in::IsManaged(*stand_in, pointer) ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) = CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(data) = pointer;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *static_cast<unsigned*>(data) = 1;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      *static_cast<CUmemoryPool*>(data) = nullptr;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: {  // of mapped memory it can be asked, and not be set
      const std::lock_guard lock(stand_in->mutex);
      *static_cast<unsigned char*>(data) = stand_in->synchronous.contains(mapping->address.value) ? 1 : 0;
      return CUDA_SUCCESS;
    }
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      *static_cast<unsigned*>(data) =
          mapping->access.empty() ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<std::uint64_t*>(data) = mapping->handle.value;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return cuMemGetAddressRange(static_cast<CUdeviceptr*>(data), nullptr, pointer);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: {  // as measured: of mapped memory that of the reserved range
      std::size_t& bytes = *static_cast<std::size_t*>(data);
      const CUresult result = cuMemGetAddressRange(nullptr, &bytes, pointer);
      const auto range = stand_in->simulator->RangeAt(At(pointer));
      if (result == CUDA_SUCCESS && !is_legacy && context == nullptr && range.ok()) bytes = range->bytes;
      return result;
    }
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUDA_CALL CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  for (unsigned i = 0; i < count; ++i) static_cast<void>(cuPointerGetAttribute(data[i], attributes[i], pointer));
  return CUDA_SUCCESS;  // also where nothing is known of the pointer
}

// Copies of the stand-in are synchronous anyway. As drivers answer (libfabric's issue 12853, UCX's 9895): mapped memory cannot
// have this.
CUDA_CALL CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  if (value == nullptr || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
  const auto mapping = stand_in->simulator->MappingAt(At(pointer));
  if (!mapping.ok()) return CUDA_ERROR_INVALID_VALUE;
  if (!amem::stand_in::LegacyAt(*stand_in, pointer, nullptr)) return CUDA_ERROR_NOT_SUPPORTED;
  const std::lock_guard lock(stand_in->mutex);
  if (*static_cast<const int*>(value) != 0)
    stand_in->synchronous.insert(mapping->address.value);
  else
    stand_in->synchronous.erase(mapping->address.value);
  return CUDA_SUCCESS;
}
