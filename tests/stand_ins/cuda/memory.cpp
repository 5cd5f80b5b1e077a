// Memory of the stand-in that is not VMM: cuMemAlloc, its IPC handles, host memory, copies and fills.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "tests/stand_ins/cuda/stand_in.h"

using amem::Address;
using amem::Bytes;
using amem::DeviceOrdinal;
using amem::DriverHandle;
using amem::LocationType;
using amem::stand_in::At;
using amem::stand_in::HostBlock;
using amem::stand_in::LegacyBlock;
using amem::stand_in::Result;
using amem::stand_in::StandIn;

namespace {

void* Pointer(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }  // NOLINT(performance-no-int-to-ptr)

}  // namespace

CUresult amem::stand_in::MapAnywhere(StandIn& stand_in, DriverHandle handle, Bytes bytes, CUdeviceptr* pointer) {
  const auto range = stand_in.simulator->Reserve(bytes, 0, {}, 0);
  if (!range.ok()) return Result(range.status());
  amem::Status status = stand_in.simulator->Map(*range, bytes, 0, handle, 0);
  if (status.ok()) {
    std::vector<amem::AccessDescriptor> access;
    for (int device = 0; device < stand_in.devices; ++device) access.push_back({{LocationType::kDevice, device}, 3});
    status = stand_in.simulator->SetAccess(*range, bytes, access);
    if (!status.ok()) static_cast<void>(stand_in.simulator->Unmap(*range, bytes));
  }
  if (!status.ok()) static_cast<void>(stand_in.simulator->FreeRange(*range, bytes));
  *pointer = status.ok() ? range->value : 0;
  return Result(status);
}

namespace {

// Makes memory of at least that size, rounded up.
CUresult Make(StandIn& stand_in, int device, Bytes* bytes, DriverHandle* handle, CUdeviceptr* pointer) {
  const amem::AllocationProperties properties{.handle_types = 1, .location = {LocationType::kDevice, device}};
  const auto granularity = stand_in.simulator->Granularity(properties);
  if (!granularity.ok()) return Result(granularity.status());
  *bytes = (*bytes + *granularity - 1) & ~(*granularity - 1);
  const auto made = stand_in.simulator->Create(*bytes, properties, 0);
  if (!made.ok()) return Result(made.status());
  *handle = *made;
  const CUresult result = amem::stand_in::MapAnywhere(stand_in, *made, *bytes, pointer);
  if (result != CUDA_SUCCESS) static_cast<void>(stand_in.simulator->Release(*made));
  return result;
}

// As the driver, cuts the smallest requests from common memory, which goes with the last of them.
CUresult AllocateSmall(StandIn& stand_in, int device, Bytes asked, CUdeviceptr* pointer) {
  const CUcontext context = amem::stand_in::CurrentContext();
  const std::lock_guard lock(stand_in.mutex);
  auto block = std::ranges::find_if(stand_in.common, [&](const auto& one) {
    return one.second.device == device && one.second.context == context && !one.second.free.empty();
  });
  if (block == stand_in.common.end()) {
    amem::stand_in::CommonBlock made{.bytes = 1, .device = device, .context = context};
    CUdeviceptr base = 0;
    if (const CUresult result = Make(stand_in, device, &made.bytes, &made.handle, &base); result != CUDA_SUCCESS) return result;
    for (Bytes offset = 0; offset < made.bytes; offset += amem::stand_in::kSmall) made.free.insert(offset);
    block = stand_in.common.emplace(base, std::move(made)).first;
  }
  const Bytes offset = block->second.free.extract(block->second.free.begin()).value();
  *pointer = block->first + offset;
  stand_in.legacy.emplace(*pointer, LegacyBlock{.asked = asked,
                                                .bytes = amem::stand_in::kSmall,
                                                .device = device,
                                                .context = context,
                                                .offset = offset,
                                                .common = true});
  return CUDA_SUCCESS;
}

CUresult FreeSmall(StandIn& stand_in, CUdeviceptr pointer, Bytes offset) {
  const std::lock_guard lock(stand_in.mutex);
  const auto at = stand_in.common.find(pointer - offset);
  amem::stand_in::CommonBlock& block = at->second;
  block.free.insert(offset);
  if (block.free.size() * amem::stand_in::kSmall < block.bytes) return CUDA_SUCCESS;
  if (block.exported >= 0) close(block.exported);
  amem::Status status = stand_in.simulator->Unmap(At(at->first), block.bytes);
  if (status.ok()) status = stand_in.simulator->Release(block.handle);
  if (status.ok()) status = stand_in.simulator->FreeRange(At(at->first), block.bytes);
  stand_in.common.erase(at);
  return Result(status);
}

CUresult Allocate(StandIn& stand_in, int device, Bytes asked, CUdeviceptr* pointer) {
  constexpr Bytes kMost = Bytes{1} << 47;  // of addresses
  if (pointer == nullptr || asked == 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult unsafe = amem::stand_in::CheckUnsafe(stand_in); unsafe != CUDA_SUCCESS) return unsafe;
  if (asked > kMost) return CUDA_ERROR_OUT_OF_MEMORY;
  if (asked <= amem::stand_in::kSmall) return AllocateSmall(stand_in, device, asked, pointer);
  Bytes bytes = asked;
  DriverHandle handle;
  if (const CUresult result = Make(stand_in, device, &bytes, &handle, pointer); result != CUDA_SUCCESS) return result;
  const std::lock_guard lock(stand_in.mutex);
  stand_in.legacy.emplace(
      *pointer,
      LegacyBlock{
          .asked = asked, .bytes = bytes, .handle = handle, .device = device, .context = amem::stand_in::CurrentContext()});
  return CUDA_SUCCESS;
}

}  // namespace

CUresult amem::stand_in::Free(StandIn& stand_in, std::map<CUdeviceptr, LegacyBlock>& from, CUdeviceptr pointer) {
  LegacyBlock block;
  {
    const std::lock_guard lock(stand_in.mutex);
    const auto it = from.find(pointer);
    if (it == from.end()) return CUDA_ERROR_INVALID_VALUE;
    block = it->second;
    from.erase(it);
    stand_in.synchronous.erase(pointer);
  }
  if (block.common) return FreeSmall(stand_in, pointer, block.offset);
  if (block.exported >= 0) close(block.exported);
  const Address base = At(pointer - block.offset);
  amem::Status status = stand_in.simulator->Unmap(base, block.bytes);
  if (status.ok()) status = stand_in.simulator->Release(block.handle);
  if (status.ok()) status = stand_in.simulator->FreeRange(base, block.bytes);
  return Result(status);
}

std::map<CUdeviceptr, LegacyBlock>::iterator amem::stand_in::Containing(std::map<CUdeviceptr, LegacyBlock>& blocks,
                                                                        CUdeviceptr pointer) {
  auto it = blocks.upper_bound(pointer);
  if (it == blocks.begin()) return blocks.end();
  --it;
  return pointer - it->first < it->second.asked ? it : blocks.end();
}

CUresult amem::stand_in::MapAsLegacy(StandIn& stand_in, DriverHandle handle, Bytes bytes, Bytes asked, int device,
                                     CUdeviceptr* pointer) {
  const CUresult result = MapAnywhere(stand_in, handle, bytes, pointer);
  if (result != CUDA_SUCCESS) return result;
  static_cast<void>(stand_in.simulator->Retain(At(*pointer)));
  const std::lock_guard lock(stand_in.mutex);
  stand_in.legacy.emplace(
      *pointer, LegacyBlock{.asked = asked, .bytes = bytes, .handle = handle, .device = device, .context = CurrentContext()});
  return CUDA_SUCCESS;
}

bool amem::stand_in::LegacyAt(StandIn& stand_in, CUdeviceptr pointer, CUcontext* context) {
  const std::lock_guard lock(stand_in.mutex);
  for (auto* const blocks : {&stand_in.legacy, &stand_in.opened}) {
    const auto found = Containing(*blocks, pointer);
    if (found == blocks->end()) continue;
    if (context != nullptr) *context = found->second.context;
    return blocks == &stand_in.legacy;
  }
  return false;
}

void amem::stand_in::FreeAllOf(StandIn& stand_in, CUcontext context) {
  for (auto* const blocks : {&stand_in.legacy, &stand_in.opened}) {
    std::vector<CUdeviceptr> found;
    {
      const std::lock_guard lock(stand_in.mutex);
      for (const auto& [pointer, block] : *blocks)
        if (block.context == context) found.push_back(pointer);
    }
    for (const CUdeviceptr pointer : found) Free(stand_in, *blocks, pointer);
  }
  const std::lock_guard lock(stand_in.mutex);
  std::erase_if(stand_in.host, [&](const auto& block) {
    if (block.second.context != context) return false;
    if (block.second.made == nullptr) stand_in.unpinned[block.first] = block.second.bytes;
    return true;
  });
  stand_in.any_unpinned = !stand_in.unpinned.empty();
}

CUDA_CALL CUresult cuMemAlloc(CUdeviceptr* pointer, std::size_t bytes) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  return Allocate(*stand_in, device, bytes, pointer);
}

CUDA_CALL CUresult cuMemFree(CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  if (const CUresult unsafe = amem::stand_in::CheckUnsafe(*stand_in); unsafe != CUDA_SUCCESS) return unsafe;
  return pointer == 0 ? CUDA_SUCCESS : amem::stand_in::Free(*stand_in, stand_in->legacy, pointer);
}

CUDA_CALL CUresult cuMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  const auto memory = stand_in->simulator->Memory(DeviceOrdinal{device});
  if (memory.ok()) {
    *free_bytes = memory->free;
    *total = memory->total;
  }
  return Result(memory.status());
}

CUDA_CALL CUresult cuMemGetAddressRange(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  CUdeviceptr found = 0;
  std::size_t found_bytes = 0;
  const CUcontext context = amem::stand_in::CurrentContext();
  {
    const std::lock_guard lock(stand_in->mutex);
    for (auto* blocks : {&stand_in->legacy, &stand_in->opened}) {
      const auto it = amem::stand_in::Containing(*blocks, pointer);
      if (it == blocks->end()) continue;
      found = it->first;
      found_bytes = it->second.asked;
    }
    if (found == 0 && context != nullptr && context->reset) return CUDA_ERROR_CONTEXT_IS_DESTROYED;  // as measured
  }
  if (found == 0) {
    const auto mapping = stand_in->simulator->MappingAt(At(pointer));
    if (!mapping.ok() || mapping->access.empty()) return CUDA_ERROR_NOT_FOUND;  // as measured: no device has access
    found = mapping->address.value;
    found_bytes = mapping->bytes;
  }
  if (base != nullptr) *base = found;
  if (bytes != nullptr) *bytes = found_bytes;
  return CUDA_SUCCESS;
}

// Rows as measured on hardware; sizes are checked as wholes.
CUDA_CALL CUresult cuMemAllocPitch(CUdeviceptr* pointer, std::size_t* pitch, std::size_t width, std::size_t height,
                                   unsigned element) {
  constexpr std::size_t kRow = 512, kMost = std::size_t{1} << 47;
  if (pitch == nullptr || width == 0 || height == 0 || (element != 4 && element != 8 && element != 16))
    return CUDA_ERROR_INVALID_VALUE;
  if (width > kMost) return CUDA_ERROR_INVALID_VALUE;  // as measured
  if (height > kMost / ((width + kRow - 1) / kRow * kRow)) return CUDA_ERROR_OUT_OF_MEMORY;
  *pitch = (width + kRow - 1) / kRow * kRow;
  return cuMemAlloc(pointer, *pitch * height);
}

// ---- host memory -----------------------------------------------------------------------------------------------------------

namespace {
// Takes a block away. False: none of that kind is there.
bool TakeHost(StandIn& stand_in, void* pointer, bool made) {
  const std::lock_guard lock(stand_in.mutex);
  const auto it = stand_in.host.find(pointer);
  if (it == stand_in.host.end() || (it->second.made != nullptr) != made) return false;
  stand_in.host.erase(it);
  return true;
}
}  // namespace

CUDA_CALL CUresult cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned int) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  static_cast<void>(device);
  if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto buffer = stand_in->simulator->AllocatePinned(bytes);
  if (!buffer.ok()) return Result(buffer.status());
  *pointer = (*buffer)->data();
  const std::lock_guard lock(stand_in->mutex);
  stand_in->host.emplace(*pointer, HostBlock{*std::move(buffer), bytes, amem::stand_in::CurrentContext()});
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuMemAllocHost(void** pointer, std::size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }

CUDA_CALL CUresult cuMemFreeHost(void* pointer) {
  STARTED_OR_RETURN(stand_in);
  return TakeHost(*stand_in, pointer, true) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA_CALL CUresult cuMemHostRegister(void* pointer, std::size_t bytes, unsigned int) {
  STARTED_OR_RETURN(stand_in);
  if (const int fault = amem::stand_in::AskFault("HostRegister"); fault != 0) return static_cast<CUresult>(fault);
  CONTEXT_OR_RETURN(device);
  static_cast<void>(device);
  const std::lock_guard lock(stand_in->mutex);
  if (pointer == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  stand_in->unpinned.erase(pointer);
  const bool fresh = stand_in->host.emplace(pointer, HostBlock{nullptr, bytes, amem::stand_in::CurrentContext()}).second;
  return fresh ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUDA_CALL CUresult cuMemHostUnregister(void* pointer) {
  STARTED_OR_RETURN(stand_in);
  return TakeHost(*stand_in, pointer, false) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUDA_CALL CUresult cuMemHostGetDevicePointer(CUdeviceptr* device_pointer, void* pointer, unsigned int) {
  STARTED_OR_RETURN(stand_in);
  *device_pointer = reinterpret_cast<CUdeviceptr>(pointer);
  return CUDA_SUCCESS;
}

// ---- copies and fills: done when the call returns --------------------------------------------------------------------------

namespace {

// Device memory must be mapped and open to the thread's device; an address outside of every reserved range is host memory.
bool Reachable(StandIn& stand_in, int device, CUdeviceptr pointer, Bytes bytes, std::uint32_t flags, bool host_too) {
  for (; bytes > 0; host_too = false) {
    const auto mapping = stand_in.simulator->MappingAt(At(pointer));
    if (!mapping.ok()) return host_too && !stand_in.simulator->RangeAt(At(pointer)).ok();
    const bool open = std::any_of(mapping->access.begin(), mapping->access.end(), [&](const amem::AccessDescriptor& one) {
      return one.location == amem::Location{LocationType::kDevice, device} && (one.flags & flags) == flags;
    });
    if (!open) return false;
    const Bytes step = std::min<Bytes>(bytes, mapping->bytes - (pointer - mapping->address.value));
    pointer += step;
    bytes -= step;
  }
  return true;
}

// As for kernels that copy; a copy engine would copy through pages of the driver's.
bool Unpinned(StandIn& stand_in, CUdeviceptr pointer, Bytes bytes) {
  if (!stand_in.any_unpinned) return false;
  const std::lock_guard lock(stand_in.mutex);
  return std::any_of(stand_in.unpinned.begin(), stand_in.unpinned.end(), [&](const auto& block) {
    const auto begin = reinterpret_cast<CUdeviceptr>(block.first);
    return begin < pointer + bytes && pointer < begin + block.second;
  });
}

enum class Side : std::uint8_t { kHost, kDevice, kAny };

CUresult Copy(CUdeviceptr to, Side to_side, CUdeviceptr from, Side from_side, Bytes bytes) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  if (bytes == 0) return CUDA_SUCCESS;
  if (const int fault = amem::stand_in::AskFault("Copy"); fault != 0) return static_cast<CUresult>(fault);
  if (Unpinned(*stand_in, to, bytes) || Unpinned(*stand_in, from, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (to_side != Side::kHost && !Reachable(*stand_in, device, to, bytes, 3, to_side == Side::kAny))
    return CUDA_ERROR_INVALID_VALUE;
  if (from_side != Side::kHost && !Reachable(*stand_in, device, from, bytes, 1, from_side == Side::kAny)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Much of it through the memfds: through mappings each page would be a fault, and one that was never written would be made.
  constexpr Bytes kMuch = 64 * 1024;
  if (bytes >= kMuch && to_side == Side::kHost && from_side == Side::kDevice)
    return Result(
        stand_in->simulator->KernelReads(DeviceOrdinal{device}, At(from), {static_cast<std::byte*>(Pointer(to)), bytes}));
  if (bytes >= kMuch && to_side == Side::kDevice && from_side == Side::kHost)
    return Result(stand_in->simulator->KernelWrites(DeviceOrdinal{device}, At(to),
                                                    {static_cast<const std::byte*>(Pointer(from)), bytes}));
  std::memmove(Pointer(to), Pointer(from), bytes);
  return CUDA_SUCCESS;
}

CUdeviceptr Number(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

template <class T>
CUresult Fill(CUdeviceptr pointer, T value, std::size_t count) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  const Bytes bytes = count * sizeof(T);
  if (bytes == 0) return CUDA_SUCCESS;
  if (!Reachable(*stand_in, device, pointer, bytes, 3, true)) return CUDA_ERROR_INVALID_VALUE;
  constexpr Bytes kWorthAHole = 64 * 1024;
  if (value == 0 && bytes >= kWorthAHole && stand_in->simulator->MappingAt(At(pointer)).ok()) {  // gives the pages back
    amem::Status status = stand_in->simulator->Clear(DeviceOrdinal{device}, At(pointer), bytes);
    if (status.ok()) status = stand_in->simulator->FinishCopies(DeviceOrdinal{device}, amem::In(std::chrono::minutes(1)));
    return Result(status);
  }
  std::fill_n(static_cast<T*>(Pointer(pointer)), count, value);
  return CUDA_SUCCESS;
}

}  // namespace

CUDA_CALL CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return Copy(to, Side::kAny, from, Side::kAny, bytes);
}
CUDA_CALL CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream) {
  return Copy(to, Side::kAny, from, Side::kAny, bytes);
}
CUDA_CALL CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t bytes) {
  return Copy(to, Side::kDevice, Number(from), Side::kHost, bytes);
}
CUDA_CALL CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes, CUstream) {
  return Copy(to, Side::kDevice, Number(from), Side::kHost, bytes);
}
CUDA_CALL CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t bytes) {
  return Copy(Number(to), Side::kHost, from, Side::kDevice, bytes);
}
CUDA_CALL CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes, CUstream) {
  return Copy(Number(to), Side::kHost, from, Side::kDevice, bytes);
}
CUDA_CALL CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return Copy(to, Side::kDevice, from, Side::kDevice, bytes);
}
CUDA_CALL CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream) {
  return Copy(to, Side::kDevice, from, Side::kDevice, bytes);
}
CUDA_CALL CUresult cuMemsetD8(CUdeviceptr pointer, unsigned char value, std::size_t count) {
  return Fill(pointer, value, count);
}
CUDA_CALL CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, std::size_t count, CUstream) {
  return Fill(pointer, value, count);
}
CUDA_CALL CUresult cuMemsetD16(CUdeviceptr pointer, unsigned short value, std::size_t count) {
  return Fill(pointer, value, count);
}
CUDA_CALL CUresult cuMemsetD32(CUdeviceptr pointer, unsigned int value, std::size_t count) {
  return Fill(pointer, value, count);
}
CUDA_CALL CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned int value, std::size_t count, CUstream) {
  return Fill(pointer, value, count);
}

// ---- stream memory operations: done when the call returns ------------------------------------------------------------------

namespace {

template <class T>
CUresult WriteFlag(CUdeviceptr pointer, T value) {
  return pointer % sizeof value != 0 ? CUDA_ERROR_INVALID_VALUE : Fill(pointer, value, 1);
}

// Streams are not simulated, so that a flag that is not there yet would never come.
template <class T>
CUresult WaitForFlag(CUdeviceptr pointer, T value, unsigned int flags) {
  T found{};
  const CUresult result = Copy(Number(&found), Side::kHost, pointer, Side::kAny, sizeof found);
  if (result != CUDA_SUCCESS) return result;
  const bool met = flags == CU_STREAM_WAIT_VALUE_EQ ? found == value : flags == CU_STREAM_WAIT_VALUE_GEQ && found >= value;
  return met ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

CUDA_CALL CUresult cuStreamWriteValue32(CUstream, CUdeviceptr pointer, cuuint32_t value, unsigned int) {
  return WriteFlag(pointer, value);
}
CUDA_CALL CUresult cuStreamWriteValue64(CUstream, CUdeviceptr pointer, cuuint64_t value, unsigned int) {
  return WriteFlag(pointer, value);
}
CUDA_CALL CUresult cuStreamWaitValue32(CUstream, CUdeviceptr pointer, cuuint32_t value, unsigned int flags) {
  return WaitForFlag(pointer, value, flags);
}
CUDA_CALL CUresult cuStreamWaitValue64(CUstream, CUdeviceptr pointer, cuuint64_t value, unsigned int flags) {
  return WaitForFlag(pointer, value, flags);
}
CUDA_CALL CUresult cuStreamBatchMemOp(CUstream, unsigned int count, CUstreamBatchMemOpParams* operations, unsigned int) {
  for (unsigned int i = 0; i < count; ++i) {
    const auto& one = operations[i];
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    if (one.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) result = WriteFlag(one.writeValue.address, one.writeValue.value);
    if (one.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) result = WriteFlag(one.writeValue.address, one.writeValue.value64);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
