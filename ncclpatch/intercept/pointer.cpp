// What NCCL asks about a pointer: ncclMemFree asks for its device, even while the memory is paused.

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

template <class T>
CUresult Answer(void* data, T value) {
  *static_cast<T*>(data) = value;
  return CUDA_SUCCESS;
}

// The driver's answer as if the memory were there. kNotFound: another attribute, which only the driver knows.
CUresult AboutPaused(Session& session, const AllocationProperties& memory, CUpointer_attribute attribute, CUdeviceptr pointer,
                     void* data) {
  const auto range = session.AddressRange(Address{pointer});
  if (!range) return CUDA_ERROR_NOT_FOUND;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return Answer<unsigned>(data, CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return Answer(data, pointer);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return Answer<int>(data, memory.location.id);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return Answer<CUdeviceptr>(data, range->first.value);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return Answer<std::size_t>(data, range->second);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return Answer<std::uint64_t>(data, memory.handle_types);
    default:
      return CUDA_ERROR_NOT_FOUND;
  }
}

struct PointerGetAttribute : Instead<PointerGetAttribute, "cuPointerGetAttribute"> {
  static CUresult With(const Pass<>& pass, void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    const CUresult result = pass();
    Session* session = Runtime::Get().started();
    if (result == CUDA_SUCCESS || data == nullptr || session == nullptr) return result;
    const auto paused = session->PausedAt(Address{pointer});
    if (!paused) return result;
    const CUresult known = AboutPaused(*session, *paused, attribute, pointer, data);
    return known == CUDA_SUCCESS ? known : result;
  }
};

}  // namespace

std::span<const replacements::Replacement> PointerReplacements() { return replacements::Table<PointerGetAttribute>(); }
}  // namespace amem::intercept
