// The simulator's multicast objects. Stores to a mapped object do not reach the bound memory.
#include <fmt/format.h>

#include "replay/driver/simulator/internal.h"

namespace amem {

constexpr std::string_view kNoMulticast = "that handle is no multicast object";

Result<Bytes> Simulator::MulticastGranularity() {
  AMEM_TRY(Enter(kMulticastGranularity, Failing([] { return "cuMulticastGetGranularity"; })));
  return options_.multicast_granularity;
}

Result<DriverHandle> Simulator::CreateMulticast(const MulticastProperties& wanted) {
  const auto fail =
      Failing([&] { return fmt::format("cuMulticastCreate {} bytes for {} devices", wanted.bytes, wanted.devices); });
  AMEM_TRY(Enter(kCreateMulticast, fail));
  if (wanted.devices == 0 || wanted.devices > static_cast<std::uint32_t>(world_->devices()))
    return fail(cuda::kInvalidValue, "there are not as many devices, or none was asked for");
  if (wanted.bytes == 0 || !MulticastGranular(wanted.bytes)) return fail(cuda::kInvalidValue, kNotMulticastGranular);
  if (wanted.flags != 0) return fail(cuda::kInvalidValue, "flags must be zero");
  AllocationProperties properties;
  properties.handle_types = wanted.handle_types;
  properties.location = {LocationType::kHost, 0};
  if (const int result = CheckProperties(properties)) return fail(result, "such handles cannot be had");
  properties.usage = kMulticastUsage;
  auto memory = std::make_shared<Physical>();
  memory->bytes = wanted.bytes;
  memory->properties = properties;
  memory->multicast = true;
  const auto key = world_->AddMulticast(member_, wanted.devices, wanted.bytes);
  if (!key) return fail(cuda::kOutOfMemory, "the world's table is full");
  memory->key = *key;
  const MutexLock lock(mutex_);
  return Adopt(std::move(memory));
}

Status Simulator::AddDevice(DriverHandle multicast, DeviceOrdinal device) {
  const auto fail =
      Failing([&] { return fmt::format("cuMulticastAddDevice device {} to {}", device.value, OfHandle(multicast)); });
  AMEM_TRY(EnterOn(device, kAddDevice, fail));
  const MutexLock lock(mutex_);
  const auto object = Find(multicast);
  if (!object || !object->multicast) return fail(cuda::kInvalidValue, kNoMulticast);
  const int result = world_->AddDevice(object->key, WorldDevice(device.value));
  return result == 0 ? Status{} : fail(result, "the device was added before, or as many as it was made for");
}

std::pair<int, std::string_view> Simulator::Bind(DriverHandle multicast, Bytes offset, const std::shared_ptr<Physical>& memory,
                                                 Bytes memory_offset, Bytes bytes) {
  const auto object = Find(multicast);
  if (!object || !object->multicast) return {cuda::kInvalidValue, kNoMulticast};
  if (!memory || memory->multicast) return {cuda::kInvalidValue, kNoSuchHandle};
  if (memory->world_device < 0) return {cuda::kInvalidDevice, "only memory of a device can be bound"};
  if (bytes == 0 || !MulticastGranular(bytes | offset | memory_offset)) return {cuda::kInvalidValue, kNotMulticastGranular};
  if (memory_offset > memory->bytes || bytes > memory->bytes - memory_offset)
    return {cuda::kInvalidValue, "the memory ends before"};
  const bool shareable = object->imported || object->properties.handle_types != 0;
  if (shareable && memory->properties.handle_types == 0)
    return {cuda::kInvalidValue, "an object that can be shared takes only memory that can be shared"};
  const int result = world_->Bind(member_, object->key, {memory->world_device, offset, bytes, memory->key, memory_offset});
  return {result, result == cuda::kNotReady ? kIncompleteTeam : "another device, overlapping, or outside of the object"};
}

Status Simulator::BindMemory(DriverHandle multicast, Bytes offset, DriverHandle handle, Bytes memory_offset, Bytes bytes) {
  const auto fail = Failing([&] { return OfBinding("cuMulticastBindMem", multicast, offset, bytes); });
  AMEM_TRY(Enter(kBindMemory, fail));
  const MutexLock lock(mutex_);
  const auto [result, why] = Bind(multicast, offset, Find(handle), memory_offset, bytes);
  return result == 0 ? Status{} : fail(result, why);
}

Status Simulator::BindAddress(DriverHandle multicast, Bytes offset, Address address, Bytes bytes) {
  const auto fail = Failing([&] { return OfBinding("cuMulticastBindAddr", multicast, offset, bytes); });
  AMEM_TRY(Enter(kBindAddress, fail));
  const MutexLock lock(mutex_);
  if (!MulticastGranular(address.value)) return fail(cuda::kInvalidValue, kNotMulticastGranular);
  const auto mapping = Containing(mappings_, address);
  if (mapping == mappings_.end()) return fail(cuda::kInvalidValue, "nothing is mapped there");
  const Bytes memory_offset = address.value - mapping->first.value;
  const auto [result, why] = Bind(multicast, offset, mapping->second.memory, memory_offset, bytes);
  return result == 0 ? Status{} : fail(result, why);
}

Status Simulator::Unbind(DriverHandle multicast, DeviceOrdinal device, Bytes offset, Bytes bytes) {
  const auto fail = Failing([&] { return OfBinding("cuMulticastUnbind", multicast, offset, bytes); });
  AMEM_TRY(EnterOn(device, kUnbind, fail));
  const MutexLock lock(mutex_);
  const auto object = Find(multicast);
  if (!object || !object->multicast) return fail(cuda::kInvalidValue, kNoMulticast);
  const int result = world_->Unbind(member_, object->key, WorldDevice(device.value), offset, bytes);
  return result == 0 ? Status{} : fail(result, "this process has not bound just that");
}

}  // namespace amem
