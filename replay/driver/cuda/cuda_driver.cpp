#include "replay/driver/cuda/cuda_driver.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>

#include "replay/driver/cuda/core.h"
#include "replay/driver/cuda/idle_wait.h"
#include "replay/driver/cuda/nonzero.h"
#include "replay/driver/cuda/nvml.h"
#include "replay/driver/cuda/properties.h"
#include "replay/driver/result_names.h"

namespace amem {
namespace {

std::string Where(const Location& location) {
  return fmt::format("location type {} id {}", static_cast<std::uint32_t>(location.type), location.id);
}
std::string Where(const AllocationProperties& properties) {
  return fmt::format("{}, handle types {}", Where(properties.location), properties.handle_types);
}
std::string OfDevice(DeviceOrdinal device) { return "device " + std::to_string(device.value); }

constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

CUmulticastObjectProp ToCuda(const MulticastProperties& properties) {
  CUmulticastObjectProp prop{};
  prop.numDevices = properties.devices;
  prop.size = properties.bytes;
  prop.handleTypes = properties.handle_types;
  prop.flags = properties.flags;
  return prop;
}

}  // namespace

Result<std::unique_ptr<CudaDriver>> CudaDriver::Load(const Resolve& resolve) {
  AMEM_ASSIGN(auto core, Core::Make(resolve));
  return std::unique_ptr<CudaDriver>(new CudaDriver(std::move(core)));
}

Result<std::unique_ptr<CudaDriver>> CudaDriver::LoadSystem() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed, because its threads and handles outlive us
  if (library == nullptr) {
    const char* why = dlerror();
    return Status(Code::kUnsupported, std::string("load the CUDA driver: ") + (why ? why : "libcuda.so.1 is not there") +
                                          "; this host may have no GPU");
  }
  return Load([library](const char* symbol) { return dlsym(library, symbol); });
}

CudaDriver::CudaDriver(std::shared_ptr<Core> core, bool is_lane)
    : core_(std::move(core)),
      idle_(std::make_unique<IdleWait>(core_)),
      nonzero_(std::make_unique<NonZeroCopier>(*this, core_)),
      is_lane_(is_lane) {}
CudaDriver::~CudaDriver() = default;

Result<DriverHandle> CudaDriver::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) {
  const CUmemAllocationProp prop = ToCuda(properties);
  CUmemGenericAllocationHandle handle = 0;
  AMEM_TRY(core_->Call([&] { return fmt::format("cuMemCreate {} bytes at {}", bytes, Where(properties)); },
                       core_->calls.mem_create, &handle, bytes, &prop, flags));
  if (properties.location.type == LocationType::kDevice) core_->shared->has_memory.store(properties.location.id);
  return DriverHandle{handle};
}

Status CudaDriver::Release(DriverHandle handle) {
  return core_->Call([&] { return "cuMemRelease " + OfHandle(handle); }, core_->calls.mem_release, handle.value);
}

Result<Address> CudaDriver::Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags) {
  CUdeviceptr address = 0;
  AMEM_TRY(
      core_->Call([&] { return fmt::format("cuMemAddressReserve {} bytes aligned to {} at {}", bytes, alignment, Hex(hint)); },
                  core_->calls.mem_reserve, &address, bytes, alignment, hint.value, flags));
  return Address{address};
}

Status CudaDriver::FreeRange(Address address, Bytes bytes) {
  return core_->Call([&] { return "cuMemAddressFree " + InRange(address, bytes); }, core_->calls.mem_address_free,
                     address.value, bytes);
}

Status CudaDriver::Map(Address address, Bytes bytes, Bytes offset, DriverHandle handle, std::uint64_t flags) {
  return core_->Call(
      [&] { return fmt::format("cuMemMap {}, offset {} of {}", InRange(address, bytes), offset, OfHandle(handle)); },
      core_->calls.mem_map, address.value, bytes, offset, handle.value, flags);
}

Status CudaDriver::Unmap(Address address, Bytes bytes) {
  return core_->Call([&] { return "cuMemUnmap " + InRange(address, bytes); }, core_->calls.mem_unmap, address.value, bytes);
}

Status CudaDriver::SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) {
  std::vector<CUmemAccessDesc> descriptors;
  for (const AccessDescriptor& one : access) {
    CUmemAccessDesc& descriptor = descriptors.emplace_back();
    descriptor.location.type = static_cast<CUmemLocationType>(one.location.type);
    descriptor.location.id = one.location.id;
    descriptor.flags = static_cast<CUmemAccess_flags>(one.flags);
  }
  const auto tried = [&] {
    std::string text = "cuMemSetAccess " + InRange(address, bytes);
    for (const AccessDescriptor& one : access) text += fmt::format(", access {} for {}", one.flags, Where(one.location));
    return text;
  };
  return core_->Call(tried, core_->calls.mem_set_access, address.value, bytes, descriptors.data(), descriptors.size());
}

Result<UniqueFd> CudaDriver::Export(DriverHandle handle) {
  int fd = -1;
  AMEM_TRY(core_->Call([&] { return "cuMemExportToShareableHandle " + OfHandle(handle); }, core_->calls.mem_export, &fd,
                       handle.value, kDescriptor, 0));
  fcntl(fd, F_SETFD, FD_CLOEXEC);  // a child of the process must not keep GPU memory alive
  return UniqueFd(fd);
}

Result<DriverHandle> CudaDriver::Import(const UniqueFd& descriptor) {
  CUmemGenericAllocationHandle handle = 0;
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor.get()));  // NOLINT(performance-no-int-to-ptr)
  AMEM_TRY(core_->Call([&] { return fmt::format("cuMemImportFromShareableHandle descriptor {}", descriptor.get()); },
                       core_->calls.mem_import, &handle, shareable, kDescriptor));
  return DriverHandle{handle};
}

Result<Bytes> CudaDriver::Granularity(const AllocationProperties& properties) {
  const CUmemAllocationProp prop = ToCuda(properties);
  std::size_t granularity = 0;
  AMEM_TRY(core_->Call([&] { return "cuMemGetAllocationGranularity at " + Where(properties); }, core_->calls.mem_granularity,
                       &granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return Bytes{granularity};
}

Result<MemoryInfo> CudaDriver::Memory(DeviceOrdinal device) {
  AMEM_ASSIGN(const auto opened, core_->Open(device));
  InContext current(core_->calls, opened.context);
  std::size_t free = 0, total = 0;
  current.Call(core_->calls.mem_info, &free, &total);
  if (current.ok()) return MemoryInfo{.free = free, .total = total};
  return core_->Failure(current.result(), "cuMemGetInfo " + OfDevice(device));
}

std::vector<MemoryHolder> CudaDriver::MemoryHolders(DeviceOrdinal device) {
  const auto uuid = DeviceUuid(device);
  return uuid.ok() ? HoldersByNvml(OpenNvml(), *uuid) : std::vector<MemoryHolder>();
}

Result<int> CudaDriver::DeviceCount() { return core_->Devices(); }

Result<std::string> CudaDriver::DeviceUuid(DeviceOrdinal device) {
  const auto tried = [&] { return "cuDeviceGetUuid " + OfDevice(device); };
  CUdevice cuda_device = 0;
  CUuuid uuid{};
  AMEM_TRY(core_->Call(tried, core_->calls.device_get, &cuda_device, device.value));
  AMEM_TRY(core_->Call(tried, core_->calls.device_uuid, &uuid, cuda_device));
  return GpuUuid(uuid.bytes);
}

std::string CudaDriver::Version() {
  int version = 0;
  if (core_->calls.driver_version(&version) != CUDA_SUCCESS) return {};
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

Status CudaDriver::Synchronize(DeviceOrdinal device, Deadline until, const std::function<bool()>& breaks_off) {
  return idle_->Await(device, until, breaks_off);
}
void CudaDriver::NoteStream(const char* call, void* stream) { idle_->NoteStream(call, stream); }
void CudaDriver::ForgetContext(DeviceOrdinal device) { core_->Forget(device); }
Driver::Released CudaDriver::ReleaseContext(DeviceOrdinal device, const std::function<int()>& release) {
  return core_->Release(device, release);
}

Status CudaDriver::OnStream(DeviceOrdinal device, const char* call, Address address, Bytes bytes,
                            const std::function<int(void* stream)>& submit) {
  AMEM_ASSIGN(const auto opened, core_->Open(device));
  InContext current(core_->calls, opened.context);
  current.Call([&] { return static_cast<CUresult>(submit(opened.stream)); });
  if (current.ok()) return {};
  return core_->Failure(current.result(), fmt::format("{} {}, {}", call, OfDevice(device), InRange(address, bytes)));
}

Status CudaDriver::CopyToHost(DeviceOrdinal device, std::byte* to, Address from, Bytes bytes) {
  if (is_lane_) {
    Status queued = nonzero_->On(device).CopyWhole({from, bytes, to}, true);
    if (queued.code() != Code::kUnsupported) return queued;
  }
  return OnStream(device, "cuMemcpyDtoHAsync", from, bytes, [&](void* stream) -> int {
    return core_->calls.copy_to_host(to, from.value, bytes, static_cast<CUstream>(stream));
  });
}

Status CudaDriver::CopyToDevice(DeviceOrdinal device, Address to, const std::byte* from, Bytes bytes) {
  if (is_lane_) {
    Status queued = nonzero_->On(device).CopyWhole({to, bytes, const_cast<std::byte*>(from)}, false);
    if (queued.code() != Code::kUnsupported) return queued;
  }
  return OnStream(device, "cuMemcpyHtoDAsync", to, bytes, [&](void* stream) -> int {
    return core_->calls.copy_to_device(to.value, from, bytes, static_cast<CUstream>(stream));
  });
}

Status CudaDriver::Clear(DeviceOrdinal device, Address address, Bytes bytes) {
  return OnStream(device, "cuMemsetD8Async", address, bytes, [&](void* stream) -> int {
    return core_->calls.fill(address.value, 0, bytes, static_cast<CUstream>(stream));
  });
}

Status CudaDriver::FinishCopies(DeviceOrdinal device, Deadline until) {
  const Deadline began = Now();
  bool late = false;
  Status whole = OnStream(device, "cuStreamSynchronize", {}, 0, [&](void* stream) -> int {
    const CUresult result = core_->AwaitStream(until, static_cast<CUstream>(stream));
    late = result == CUDA_ERROR_NOT_READY;
    return result;
  });
  if (late) return CopiesNotDone(device, began);
  Status parts = nonzero_->Finish(device, until);
  return whole.ok() ? parts : whole;
}

bool CudaDriver::CanScanNow(DeviceOrdinal device) { return nonzero_->On(device).CanScanNow(); }

Result<NonZero> CudaDriver::FindNonZero(DeviceOrdinal device, std::span<const Extent> extents, const ContentKey* key,
                                        Deadline until) {
  return nonzero_->On(device).FindNonZero(extents, key, until);
}

Status CudaDriver::Gather(DeviceOrdinal device, std::span<const Extent> extents) {
  return nonzero_->On(device).Move(extents, true);
}

Status CudaDriver::Scatter(DeviceOrdinal device, std::span<const Extent> extents) {
  return nonzero_->On(device).Move(extents, false);
}

Status CudaDriver::ClearAll(DeviceOrdinal device, std::span<const Extent> extents) {
  return nonzero_->On(device).ClearAll(extents);
}

Result<std::uint64_t> CudaDriver::Mark(DeviceOrdinal device) { return nonzero_->On(device).Mark(); }
Status CudaDriver::Await(DeviceOrdinal device, std::uint64_t mark, Deadline until) {
  // 0: this device has no lanes, and what is queued on it has no marks.
  return mark == 0 ? FinishCopies(device, until) : nonzero_->On(device).Await(mark, until);
}

// ---- multicast objects, for AMEM_NVLS=release

Result<DriverHandle> CudaDriver::CreateMulticast(const MulticastProperties& properties) {
  const CUmulticastObjectProp prop = ToCuda(properties);
  CUmemGenericAllocationHandle handle = 0;
  AMEM_TRY(core_->Call(
      [&] { return fmt::format("cuMulticastCreate {} bytes for {} devices", properties.bytes, properties.devices); },
      core_->calls.multicast_create, &handle, &prop));
  return DriverHandle{handle};
}

Status CudaDriver::AddDevice(DriverHandle multicast, DeviceOrdinal device) {
  const auto tried = [&] { return fmt::format("cuMulticastAddDevice device {} to {}", device.value, OfHandle(multicast)); };
  CUdevice found = 0;
  AMEM_TRY(core_->Call(tried, core_->calls.device_get, &found, device.value));
  return core_->Call(tried, core_->calls.multicast_add_device, multicast.value, found);
}

Status CudaDriver::BindMemory(DriverHandle multicast, Bytes offset, DriverHandle memory, Bytes memory_offset, Bytes bytes) {
  return core_->Call([&] { return OfBinding("cuMulticastBindMem", multicast, offset, bytes); },
                     core_->calls.multicast_bind_memory, multicast.value, offset, memory.value, memory_offset, bytes, 0);
}

Status CudaDriver::BindAddress(DriverHandle multicast, Bytes offset, Address address, Bytes bytes) {
  return core_->Call([&] { return OfBinding("cuMulticastBindAddr", multicast, offset, bytes); },
                     core_->calls.multicast_bind_address, multicast.value, offset, address.value, bytes, 0);
}

Status CudaDriver::Unbind(DriverHandle multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) {
  const auto tried = [&] { return OfBinding("cuMulticastUnbind", multicast, offset, bytes); };
  CUdevice found = 0;
  AMEM_TRY(core_->Call(tried, core_->calls.device_get, &found, device.value));
  return core_->Call(tried, core_->calls.multicast_unbind, multicast.value, found, offset, bytes);
}

Result<Bytes> CudaDriver::MulticastGranularity() {
  const CUmulticastObjectProp prop = ToCuda({Bytes{2} << 20, 2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0});
  std::size_t granularity = 0;
  AMEM_TRY(core_->Call([] { return "cuMulticastGetGranularity"; }, core_->calls.multicast_granularity, &granularity, &prop,
                       CU_MULTICAST_GRANULARITY_MINIMUM));
  return Bytes{granularity};
}

}  // namespace amem
