// What cuMemAlloc and its kin answer.
#include <array>
#include <string>

#include "tests/gpu/walk/walk.h"

namespace amem::walk {
namespace {

// Attributes whose value is a number of some width, zeroed before.
std::string Attribute(CUpointer_attribute attribute, CUdeviceptr at, CUresult& result) {
  std::uint64_t value = 0;
  result = CALL(cuPointerGetAttribute, &value, attribute, at);
  return std::to_string(value);
}
void SayAttributes(const std::string& name, CUdeviceptr at) {
  constexpr std::array kNumbers = {std::pair{"MEMORY_TYPE", CU_POINTER_ATTRIBUTE_MEMORY_TYPE},
                                   std::pair{"IS_MANAGED", CU_POINTER_ATTRIBUTE_IS_MANAGED},
                                   std::pair{"DEVICE_ORDINAL", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL},
                                   std::pair{"LEGACY_IPC", CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE},
                                   std::pair{"RANGE_SIZE", CU_POINTER_ATTRIBUTE_RANGE_SIZE},
                                   std::pair{"MAPPED", CU_POINTER_ATTRIBUTE_MAPPED},
                                   std::pair{"HANDLE_TYPES", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES},
                                   std::pair{"SYNC_MEMOPS", CU_POINTER_ATTRIBUTE_SYNC_MEMOPS},
                                   std::pair{"ACCESS_FLAGS", CU_POINTER_ATTRIBUTE_ACCESS_FLAGS},
                                   std::pair{"MEMPOOL", CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE}};
  for (const auto& [text, attribute] : kNumbers) {
    CUresult result{};
    const std::string value = Attribute(attribute, at, result);
    SAY(name + " " + text, result, value);
  }
  CUcontext context = nullptr, current = nullptr;
  CUresult result = CALL(cuPointerGetAttribute, &context, CU_POINTER_ATTRIBUTE_CONTEXT, at);
  CALL(cuCtxGetCurrent, &current);
  SAY(name + " CONTEXT", result, context == current ? "current" : context == nullptr ? "none" : "another");
  CUdeviceptr address = 0;
  result = CALL(cuPointerGetAttribute, &address, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at);
  SAY(name + " RANGE_START", result, Where(address));
  address = 0;
  result = CALL(cuPointerGetAttribute, &address, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, at);
  SAY(name + " DEVICE_POINTER", result, Where(address));
}

void OneSize(std::size_t bytes) {
  const std::string name = std::to_string(bytes);
  CUdeviceptr memory = 0;
  const CUresult made = CALL(cuMemAlloc, &memory, bytes);
  SAY("cuMemAlloc " + name, made, "aligned to 512: " + std::to_string(memory % 512 == 0));
  if (made != CUDA_SUCCESS) return;
  Know("a", memory, bytes);
  SayRange(name, memory);
  SayRange(name + " last byte", memory + bytes - 1);
  SayAttributes(name, memory + bytes / 2);
  unsigned char byte = 0;
  SAY("fill " + name, CALL(cuMemsetD8, memory, 0x5a, bytes));
  SAY("read last byte of " + name, CALL(cuMemcpyDtoH, &byte, memory + bytes - 1, 1), std::to_string(byte));
  SAY("fill from within to far beyond " + name, CALL(cuMemsetD8, memory, 1, bytes + (std::size_t{1} << 40)));
  CUmemGenericAllocationHandle handle = 0;
  SAY("cuMemRetainAllocationHandle " + name, CALL(cuMemRetainAllocationHandle, &handle, Pointer(memory)));
  const CUmemAccessDesc open{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  SAY("cuMemSetAccess " + name, CALL(cuMemSetAccess, memory, bytes, &open, 1));
  const int on = 1;
  SAY("set SYNC_MEMOPS " + name, CALL(cuPointerSetAttribute, &on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory));
  const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, 0};
  unsigned long long flags = 0;
  SAY("cuMemGetAccess " + name, CALL(cuMemGetAccess, &flags, &location, memory), std::to_string(flags));
  SAY("free inside " + name, CALL(cuMemFree, memory + bytes / 2 + 1));
  SAY("cuMemUnmap " + name, CALL(cuMemUnmap, memory, bytes));
  SAY("cuMemUnmap the whole of " + name, CALL(cuMemUnmap, memory, (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB)));
  SAY("cuMemAddressFree " + name, CALL(cuMemAddressFree, memory, (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB)));
  SAY("cuMemFree " + name, CALL(cuMemFree, memory));
  SAY("cuMemFree twice " + name, CALL(cuMemFree, memory));
  Forget(memory);
}

}  // namespace

void Sizes() {
  Chapter("sizes");
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{512}, std::size_t{5000}, kMiB, kMiB + 1, 2 * kMiB - 1, 2 * kMiB,
                                  2 * kMiB + 1, std::size_t{5'000'000}, 20 * kMiB, 40 * kMiB + 4096})
    OneSize(bytes);
  // Freed memory is nobody's.
  CUdeviceptr memory = 0;
  SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, 20 * kMiB));
  SAY("cuMemFree", CALL(cuMemFree, memory));
  SayRange("of what is freed", memory + kMiB);
  unsigned char byte = 0;
  SAY("copy from what is freed", CALL(cuMemcpyDtoH, &byte, memory + kMiB, 1));
  CUresult result{};
  const std::string type = Attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory + kMiB, result);
  SAY("MEMORY_TYPE of what is freed", result, type);
  // Each has an id of its own.
  CUdeviceptr pair[2] = {};
  std::uint64_t ids[3] = {};
  for (CUdeviceptr& one : pair) SAY("cuMemAlloc", CALL(cuMemAlloc, &one, 4 * kMiB));
  SAY("BUFFER_ID", CALL(cuPointerGetAttribute, &ids[0], CU_POINTER_ATTRIBUTE_BUFFER_ID, pair[0]));
  SAY("BUFFER_ID", CALL(cuPointerGetAttribute, &ids[1], CU_POINTER_ATTRIBUTE_BUFFER_ID, pair[0] + kMiB),
      ids[0] == ids[1] ? "the same" : "another");
  SAY("BUFFER_ID of another", CALL(cuPointerGetAttribute, &ids[2], CU_POINTER_ATTRIBUTE_BUFFER_ID, pair[1]),
      ids[0] == ids[2] ? "the same" : "another");
  // All attributes at once.
  std::uint64_t values[3] = {};
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                 CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* data[] = {&values[0], &values[1], &values[2]};
  SAY("cuPointerGetAttributes", CALL(cuPointerGetAttributes, 3, names, data, pair[0]),
      std::to_string(values[0]) + " " + std::to_string(values[1]) + " " + std::to_string(values[2]));
  SAY("copy between two", CALL(cuMemcpyDtoD, pair[0], pair[1], 4 * kMiB));
  SAY("copy as unified", CALL(cuMemcpy, pair[0], pair[1], 4 * kMiB));
  for (const CUdeviceptr one : pair) SAY("cuMemFree", CALL(cuMemFree, one));
}

void WrongSizes() {
  Chapter("wrong sizes");
  const std::size_t none = 0;
  for (const std::size_t below : {std::size_t{1}, std::size_t{4}, std::size_t{511}, std::size_t{512}, std::size_t{513},
                                  std::size_t{4096}, kMiB, 2 * kMiB - 1, 2 * kMiB, 4 * kMiB}) {
    CUdeviceptr memory = 0;
    SAY("cuMemAlloc of minus " + std::to_string(below), CALL(cuMemAlloc, &memory, none - below));
  }
  CUdeviceptr memory = 0, first = 0, second = 0;
  SAY("cuMemAlloc of 2^63", CALL(cuMemAlloc, &memory, std::size_t{1} << 63));
  SAY("cuMemAlloc of 2^50", CALL(cuMemAlloc, &memory, std::size_t{1} << 50));
  SAY("cuMemAlloc of 0", CALL(cuMemAlloc, &memory, 0));
  SAY("cuMemAlloc to null", CALL(cuMemAlloc, nullptr, kMiB));
  std::size_t pitch = 0;
  SAY("cuMemAllocPitch of minus 1 by 2", CALL(cuMemAllocPitch, &memory, &pitch, none - 1, 2, 4));
  SAY("cuMemAllocPitch of 1 MiB by minus 1", CALL(cuMemAllocPitch, &memory, &pitch, kMiB, none - 1, 4));
  SAY("cuMemAllocPitch of 0 by 4", CALL(cuMemAllocPitch, &memory, &pitch, 0, 4, 4));
  SAY("cuMemAllocPitch of 4 by 0", CALL(cuMemAllocPitch, &memory, &pitch, 4, 0, 4));
  SAY("cuMemAllocPitch with elements of 3", CALL(cuMemAllocPitch, &memory, &pitch, 4, 4, 3));
  SAY("cuMemAlloc", CALL(cuMemAlloc, &first, 4 * kMiB));
  SAY("cuMemAlloc", CALL(cuMemAlloc, &second, 4 * kMiB));
  SAY("fill", CALL(cuMemsetD8, first, 1, 4 * kMiB));
  SAY("fill", CALL(cuMemsetD8, second, 2, 4 * kMiB));
  unsigned char byte = 0;
  SAY("read", CALL(cuMemcpyDtoH, &byte, first, 1), std::to_string(byte));
  SayText(std::string("they lie apart: ") + (first + 4 * kMiB <= second || second + 4 * kMiB <= first ? "yes" : "no"));
  SAY("cuMemFree", CALL(cuMemFree, first));
  SAY("cuMemFree", CALL(cuMemFree, second));
  SAY("cuMemFree of 0", CALL(cuMemFree, 0));
  SAY("cuMemFree of nothing", CALL(cuMemFree, 0x1000));
}

void Pitched() {
  Chapter("pitched");
  for (const auto& one : {std::pair<std::size_t, std::size_t>{1000, 7}, {4096, 1024}, {100'000, 333}}) {
    const std::size_t width = one.first, height = one.second;
    CUdeviceptr memory = 0;
    std::size_t pitch = 0;
    const std::string name = std::to_string(width) + " by " + std::to_string(height);
    SAY("cuMemAllocPitch " + name, CALL(cuMemAllocPitch, &memory, &pitch, width, height, 4), std::to_string(pitch));
    Know("p", memory, pitch * height);
    SayRange(name, memory + pitch * height - 1);
    SAY("fill " + name, CALL(cuMemsetD8, memory, 3, pitch * height));
    SAY("cuMemFree " + name, CALL(cuMemFree, memory));
    SAY("cuMemFree twice " + name, CALL(cuMemFree, memory));
    Forget(memory);
  }
  CUdeviceptr memory = 0;
  std::size_t pitch = 0;
  SAY("cuMemAllocPitch", CALL(cuMemAllocPitch, &memory, &pitch, 8192, 512, 16));
  SAY("cuMemFreeAsync", CALL(cuMemFreeAsync, memory, nullptr));
}

void Frees() {
  Chapter("frees");
  for (const std::size_t bytes : {std::size_t{4096}, 20 * kMiB}) {
    CUdeviceptr memory = 0;
    const std::string name = std::to_string(bytes);
    SAY("cuMemAlloc " + name, CALL(cuMemAlloc, &memory, bytes));
    SAY("cuMemFreeAsync inside " + name, CALL(cuMemFreeAsync, memory + 512, nullptr));
    SAY("cuMemFreeAsync " + name, CALL(cuMemFreeAsync, memory, nullptr));
    SAY("cuStreamSynchronize", CALL(cuStreamSynchronize, nullptr));
    SAY("cuMemFreeAsync twice " + name, CALL(cuMemFreeAsync, memory, nullptr));
    SAY("cuMemFree twice " + name, CALL(cuMemFree, memory));
    SayRange("of what is freed " + name, memory);
    CUdeviceptr async = 0;
    SAY("cuMemAllocAsync " + name, CALL(cuMemAllocAsync, &async, bytes, nullptr));
    SAY("cuMemFree of that " + name, CALL(cuMemFree, async));
    SAY("cuMemAllocAsync " + name, CALL(cuMemAllocAsync, &async, bytes, nullptr));
    SAY("cuMemFreeAsync of that " + name, CALL(cuMemFreeAsync, async, nullptr));
  }
}

void FreeMemory() {
  Chapter("free memory");
  std::size_t before = 0, during = 0, after = 0, total = 0;
  CUdeviceptr memory = 0, small = 0;
  SAY("cuMemAlloc", CALL(cuMemAlloc, &small, 64));  // for which the driver makes room that it keeps, and so for a kernel
  SAY("fill", CALL(cuMemsetD8, small, 1, 64));
  SAY("cuStreamSynchronize", CALL(cuStreamSynchronize, nullptr));
  SAY("cuMemGetInfo", CALL(cuMemGetInfo, &before, &total), before <= total ? "free is within all" : "free is more than all");
  for (const std::size_t bytes : {20 * kMiB, 256 * kMiB}) {
    SAY("cuMemAlloc", CALL(cuMemAlloc, &memory, bytes));
    SAY("cuMemGetInfo", CALL(cuMemGetInfo, &during, &total), "less by " + std::to_string((before - during) / kMiB) + " MiB");
    SAY("cuMemFree", CALL(cuMemFree, memory));
    SAY("cuMemGetInfo", CALL(cuMemGetInfo, &after, &total), "less by " + std::to_string((before - after) / kMiB) + " MiB");
  }
  SAY("cuMemFree", CALL(cuMemFree, small));
}

}  // namespace amem::walk
