// What NCCL asks about a pointer: ncclMemFree asks for its device, even while the memory is paused.

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {

bool AnswerPointer(CUpointer_attribute attribute, CUdeviceptr pointer, DeviceOrdinal device, const Extent& range, void* data) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return SetTo<unsigned>(data, CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return SetTo(data, pointer);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return SetTo<int>(data, device.value);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return SetTo<CUdeviceptr>(data, range.address.value);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return SetTo<std::size_t>(data, range.bytes);
    default:
      return false;
  }
}

namespace {

struct PointerGetAttribute : Instead<PointerGetAttribute, "cuPointerGetAttribute"> {
  static CUresult With(const Pass<>& pass, void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    const CUresult result = pass();
    Session* session = Runtime::Get().started();
    if (result == CUDA_SUCCESS || data == nullptr || session == nullptr) return result;
    const auto paused = session->PausedAt(Address{pointer});
    const auto range = paused ? session->AddressRange(Address{pointer}) : paused.status();
    if (!range) return result;
    const bool known =
        attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
            ? SetTo<std::uint64_t>(data, paused->handle_types)
            : AnswerPointer(attribute, pointer, DeviceOrdinal{paused->location.id}, {range->first, range->second}, data);
    return known ? CUDA_SUCCESS : result;
  }
};

}  // namespace

std::span<const replacements::Replacement> PointerReplacements() { return replacements::Table<PointerGetAttribute>(); }
}  // namespace amem::intercept
