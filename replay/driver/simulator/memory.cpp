// The simulator's handles, exports and imports.
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>

#include "replay/driver/simulator/internal.h"
#include "replay/driver/simulator/memfd.h"

namespace amem {

std::shared_ptr<Simulator::Physical> Simulator::Find(DriverHandle handle) const {
  auto* const it = FindIn(memories_, handle.value);
  return it == nullptr || (*it)->references == 0 ? nullptr : *it;
}

DriverHandle Simulator::Adopt(std::shared_ptr<Physical> memory) {
  memory->handle = DriverHandle{next_handle_++};
  memory->references = 1;
  const DriverHandle handle = memory->handle;
  memories_.emplace(handle.value, std::move(memory));
  return handle;
}

void Simulator::ForgetIfUnused(const std::shared_ptr<Physical>& memory) {
  if (memory->references != 0 || memory->mappings != 0) return;
  memories_.erase(memory->handle.value);
  world_->DropReference(member_, memory->key);
}

Status Simulator::EnsureDescriptor(Physical& memory) const {
  if (memory.descriptor) return {};
  MemfdTag tag{world_->id(), memory.key, memory.properties};
  if (memory.world_device >= 0) tag.properties.location.id = memory.world_device;
  AMEM_ASSIGN(memory.descriptor, MakeTaggedMemfd(tag, memory.bytes));
  return {};
}

Result<DriverHandle> Simulator::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) {
  const auto fail = Failing([&] {
    return fmt::format("cuMemCreate {} bytes at location type {} id {}", bytes,
                       static_cast<std::uint32_t>(properties.location.type), properties.location.id);
  });
  AMEM_TRY(Enter(kCreate, fail));
  if (const int result = CheckProperties(properties)) return fail(result, "these properties cannot be had");
  if (bytes == 0 || !Granular(bytes))
    return fail(cuda::kInvalidValue, "the size must be a multiple of the granularity, not zero");
  if (flags != 0) return fail(cuda::kInvalidValue, "flags must be zero");
  auto memory = std::make_shared<Physical>();
  memory->bytes = bytes;
  memory->properties = properties;
  if (properties.location.type == LocationType::kDevice) memory->world_device = WorldDevice(properties.location.id);
  const auto key = world_->Add(member_, memory->world_device, bytes);
  if (!key) return fail(cuda::kOutOfMemory, "the device has not enough left");
  memory->key = *key;
  const MutexLock lock(mutex_);
  return Adopt(std::move(memory));
}

Status Simulator::Release(DriverHandle handle) {
  const auto fail = Failing([&] { return "cuMemRelease " + OfHandle(handle); });
  AMEM_TRY(Enter(kRelease, fail));
  const MutexLock lock(mutex_);
  const auto memory = Find(handle);
  if (!memory) return fail(cuda::kInvalidValue, kNoSuchHandle);
  --memory->references;
  ForgetIfUnused(memory);
  return {};
}

Result<DriverHandle> Simulator::Retain(Address address) {
  const MutexLock lock(mutex_);
  const auto it = Containing(mappings_, address);
  if (it == mappings_.end())
    return SimulatedFailure(cuda::kInvalidValue, "cuMemRetainAllocationHandle " + Hex(address), "nothing is mapped there");
  ++it->second.memory->references;
  return it->second.memory->handle;
}

Result<AllocationProperties> Simulator::PropertiesOf(DriverHandle handle) {
  const MutexLock lock(mutex_);
  const auto memory = Find(handle);
  if (memory) return memory->properties;
  return SimulatedFailure(cuda::kInvalidValue, "cuMemGetAllocationPropertiesFromHandle " + OfHandle(handle), kNoSuchHandle);
}

Result<UniqueFd> Simulator::ExportAs(DriverHandle handle, std::uint32_t type) {
  const auto fail = Failing([&] { return "cuMemExportToShareableHandle " + OfHandle(handle); });
  AMEM_TRY(Enter(kExport, fail));
  const MutexLock lock(mutex_);
  const auto memory = Find(handle);
  if (!memory) return fail(cuda::kInvalidValue, kNoSuchHandle);
  if ((memory->properties.handle_types & type) == 0) {
    return fail(cuda::kInvalidValue, memory->imported ? "an imported handle cannot be exported again"
                                                      : "it was not created to be exported like that");
  }
  if (const Status made = EnsureDescriptor(*memory); !made.ok()) return fail(cuda::kOperatingSystem, made.message());
  UniqueFd copy(fcntl(memory->descriptor.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy) return fail(cuda::kOperatingSystem, Errno("duplicate the descriptor"));
  world_->MarkExported(memory->key);
  return copy;
}

Result<DriverHandle> Simulator::Import(const UniqueFd& descriptor) {
  const auto fail = Failing([&] { return fmt::format("cuMemImportFromShareableHandle descriptor {}", descriptor.get()); });
  AMEM_TRY(Enter(kImport, fail));
  const auto shared = ReadTaggedMemfd(descriptor.get());
  if (!shared) return fail(cuda::kUnknown, "this is no descriptor of device memory");
  if (shared->tag.world != world_->id()) return fail(cuda::kUnknown, "this memory belongs to another simulated world");
  auto memory = std::make_shared<Physical>();
  memory->bytes = shared->bytes;
  memory->properties = shared->tag.properties;
  memory->properties.handle_types = 0;  // as the driver does for imported handles
  memory->imported = true;
  memory->multicast = memory->properties.usage == kMulticastUsage;
  if (memory->properties.location.type == LocationType::kDevice) {
    memory->world_device = memory->properties.location.id;
    if (memory->world_device < 0 || memory->world_device >= world_->devices()) return fail(cuda::kInvalidDevice, kNoSuchDevice);
    const auto at =
        std::ranges::find(visible_, memory->world_device, [&](auto one) { return world_->DeviceNow(member_, one); });
    memory->properties.location.id = at == visible_.end() ? -1 : static_cast<std::int32_t>(at - visible_.begin());
  }
  memory->descriptor.Reset(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
  if (!memory->descriptor) return fail(cuda::kOperatingSystem, Errno("duplicate the descriptor"));
  const auto key = world_->AddReference(member_, shared->tag.key, memory->world_device, memory->bytes);
  if (!key) return fail(cuda::kOutOfMemory, "the world's table is full");
  memory->key = *key;
  const MutexLock lock(mutex_);
  return Adopt(std::move(memory));
}

}  // namespace amem
