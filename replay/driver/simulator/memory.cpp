// The simulator's handles, exports and imports, and its addresses.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

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
  const auto key = memory->key;
  try {
    memories_.emplace(handle.value, std::move(memory));
  } catch (const std::bad_alloc&) {  // a call that fails takes nothing
    world_->DropReference(member_, key);
    throw;
  }
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

// ---- addresses: ranges, what is mapped in them, and which devices may use it

constexpr std::string_view kNotGranular = "address and size must be multiples of the granularity, and not zero";
constexpr std::string_view kPartOfMapping = "it contains a part of a mapping, and a mapping cannot be split";

static bool MapNothing(Address address, Bytes bytes) {
  return mmap(Pointer(address), bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

static int Protection(const std::vector<AccessDescriptor>& access) {
  int protection = PROT_NONE;
  for (const AccessDescriptor& one : access) {
    if ((one.flags & 1) != 0) protection |= PROT_READ;
    if ((one.flags & 2) != 0) protection |= PROT_WRITE;
  }
  return protection;
}

bool Simulator::Reserved(Address address, Bytes bytes) const {
  const std::uint64_t end = address.value + bytes;
  std::uint64_t at = address.value;
  while (at < end) {  // neighbouring ranges count as one
    const auto it = Containing(ranges_, Address{at});
    if (it == ranges_.end()) return false;
    at = it->first.value + it->second;
  }
  return true;
}

bool Simulator::Splits(Address address, Bytes bytes) const {
  for (const Address border : {address, address + bytes}) {
    const auto after = mappings_.lower_bound(border);
    if (after != mappings_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > border) return true;
  }
  return false;
}

Result<SimulatedMapping> Simulator::MappingAt(Address address) {
  const MutexLock lock(mutex_);
  const auto it = Containing(mappings_, address);
  if (it == mappings_.end()) return Status(Code::kNotFound, "nothing is mapped at " + Hex(address));
  return SimulatedMapping{it->first, it->second.bytes, it->second.memory->handle, it->second.access, it->second.memory->key};
}

Result<Address> Simulator::Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags) {
  const auto fail =
      Failing([&] { return fmt::format("cuMemAddressReserve {} bytes aligned to {} at {}", bytes, alignment, Hex(hint)); });
  AMEM_TRY(Enter(kReserve, fail));
  if (bytes == 0 || !Granular(bytes))
    return fail(cuda::kInvalidValue, "the size must be a multiple of the granularity, not zero");
  if (alignment != 0 && !std::has_single_bit(alignment))
    return fail(cuda::kInvalidValue, "the alignment must be a power of two");
  if (!Granular(hint.value)) return fail(cuda::kInvalidValue, "the hint must be a multiple of the granularity");
  if (flags != 0) return fail(cuda::kInvalidValue, "flags must be zero");
  const MutexLock lock(mutex_);
  const Bytes multiple = std::max(alignment, options_.granularity);
  const Address usable = (hint.value & (multiple - 1)) == 0 ? hint : Address{};
  const auto address =
      options_.physical ? ReserveAddresses(bytes, multiple, usable) : Result<Address>(ReserveNumbers(bytes, multiple, usable));
  if (!address.ok()) return fail(cuda::kOutOfMemory, address.status().message());
  ranges_.emplace(*address, bytes);
  return *address;
}

Address Simulator::ReserveNumbers(Bytes bytes, Bytes alignment, Address hint) {
  if (hint) {
    const auto after = ranges_.lower_bound(hint);
    const bool free_after = after == ranges_.end() || after->first.value - hint.value >= bytes;
    if (free_after && Containing(ranges_, hint) == ranges_.end()) {
      next_address_ = std::max(next_address_, hint.value + bytes);
      return hint;
    }
  }
  const std::uint64_t address = (next_address_ + alignment - 1) & ~(alignment - 1);
  next_address_ = address + bytes;
  return Address{address};
}

Result<Address> Simulator::ReserveAddresses(Bytes bytes, Bytes alignment, Address hint) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const auto number = [](void* pointer) { return AddressOf(pointer).value; };
  if (hint) {
    void* at_hint = mmap(Pointer(hint), bytes, PROT_NONE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (at_hint == Pointer(hint)) return hint;
    if (at_hint != MAP_FAILED) munmap(at_hint, bytes);  // a kernel that takes MAP_FIXED_NOREPLACE for a hint
  }
  void* anywhere = mmap(nullptr, bytes, PROT_NONE, kFlags, -1, 0);
  if (anywhere == MAP_FAILED) return Status(Code::kOutOfMemory, std::strerror(errno));
  if ((number(anywhere) & (alignment - 1)) == 0) return Address{number(anywhere)};
  munmap(anywhere, bytes);
  const Bytes more = bytes + alignment - 4096;
  void* wide = mmap(nullptr, more, PROT_NONE, kFlags, -1, 0);
  if (wide == MAP_FAILED) return Status(Code::kOutOfMemory, std::strerror(errno));
  const std::uint64_t begin = number(wide), end = begin + more;
  const std::uint64_t address = (begin + alignment - 1) & ~(alignment - 1);
  if (address > begin) munmap(wide, address - begin);
  if (end > address + bytes) munmap(Pointer(Address{address + bytes}), end - address - bytes);
  return Address{address};
}

Status Simulator::FreeRange(Address address, Bytes bytes) {
  const auto fail = Failing([&] { return "cuMemAddressFree " + InRange(address, bytes); });
  AMEM_TRY(Enter(kFreeRange, fail));
  const MutexLock lock(mutex_);
  const auto range = ranges_.find(address);
  if (range == ranges_.end() || range->second != bytes) return fail(cuda::kInvalidValue, "no such range was reserved");
  if (!Touching(mappings_, address, bytes).empty()) return fail(cuda::kInvalidValue, "something is mapped in it");
  if (options_.physical) munmap(Pointer(address), bytes);
  ranges_.erase(range);
  return {};
}

Status Simulator::Map(Address address, Bytes bytes, Bytes offset, DriverHandle handle, std::uint64_t flags) {
  const auto fail =
      Failing([&] { return fmt::format("cuMemMap {}, offset {} of {}", InRange(address, bytes), offset, OfHandle(handle)); });
  AMEM_TRY(Enter(kMap, fail));
  if (bytes == 0 || !Granular(bytes | address.value | offset)) return fail(cuda::kInvalidValue, kNotGranular);
  if (flags != 0) return fail(cuda::kInvalidValue, "flags must be zero");
  const MutexLock lock(mutex_);
  const auto memory = Find(handle);
  if (!memory) return fail(cuda::kInvalidValue, kNoSuchHandle);
  if (bytes != memory->bytes || offset != 0) return fail(cuda::kNotSupported, "a handle is mapped whole");
  if (memory->multicast && !MulticastGranular(bytes | address.value)) return fail(cuda::kInvalidValue, kNotMulticastGranular);
  if (memory->multicast && !world_->IsComplete(memory->key)) return fail(cuda::kNotReady, kIncompleteTeam);
  if (!Reserved(address, bytes)) return fail(cuda::kInvalidValue, "this range was not reserved");
  if (!Touching(mappings_, address, bytes).empty())
    return fail(cuda::kInvalidValue, "something is mapped in this range already");
  if (options_.physical) {
    if (const Status made = EnsureDescriptor(*memory); !made.ok()) return fail(cuda::kOperatingSystem, made.message());
    if (mmap(Pointer(address), bytes, PROT_NONE, MAP_FIXED | MAP_SHARED | MAP_NORESERVE, memory->descriptor.get(), 0) ==
        MAP_FAILED) {
      return fail(cuda::kOperatingSystem, Errno("mmap"));
    }
  }
  mappings_.emplace(address, Mapped{bytes, memory, {}});
  ++memory->mappings;
  return {};
}

Status Simulator::Unmap(Address address, Bytes bytes) {
  const auto fail = Failing([&] { return "cuMemUnmap " + InRange(address, bytes); });
  AMEM_TRY(Enter(kUnmap, fail));
  if (bytes == 0 || !Granular(bytes | address.value)) return fail(cuda::kInvalidValue, kNotGranular);
  const MutexLock lock(mutex_);
  if (!Reserved(address, bytes)) return fail(cuda::kInvalidValue, "this range was not reserved");
  if (Splits(address, bytes)) return fail(cuda::kInvalidValue, kPartOfMapping);
  if (options_.physical && !MapNothing(address, bytes)) return fail(cuda::kOperatingSystem, Errno("mmap"));
  const auto end = End(address, bytes);
  for (auto it = mappings_.lower_bound(address); it != end;) {
    const auto memory = std::move(it->second.memory);
    it = mappings_.erase(it);
    --memory->mappings;
    ForgetIfUnused(memory);
  }
  return {};
}

Status Simulator::SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access) {
  const auto fail =
      Failing([&] { return fmt::format("cuMemSetAccess {}, {} locations", InRange(address, bytes), access.size()); });
  AMEM_TRY(Enter(kSetAccess, fail));
  if (bytes == 0 || !Granular(bytes | address.value)) return fail(cuda::kInvalidValue, kNotGranular);
  if (access.empty()) return fail(cuda::kInvalidValue, "no location was given");
  const auto exists = [&](const AccessDescriptor& one) {
    return (one.flags <= 1 || one.flags == 3) && CheckProperties({.location = one.location}) == 0;
  };
  if (!std::ranges::all_of(access, exists)) return fail(cuda::kInvalidValue, "there is no such location, or no such access");
  const MutexLock lock(mutex_);
  if (Splits(address, bytes)) return fail(cuda::kInvalidValue, kPartOfMapping);
  const auto first = mappings_.find(address);
  const auto end = End(address, bytes);
  if (first == mappings_.end() || std::prev(end)->first + std::prev(end)->second.bytes != address + bytes)
    return fail(cuda::kInvalidValue, "it must begin with a mapping and end with one");
  for (auto it = first; it != end; ++it) {
    if (const int result = ChangeAccess(it->first, it->second, access)) {
      return fail(result, result == cuda::kNotSupported    ? "the host cannot have access to device memory"
                          : result == cuda::kInvalidDevice ? "the devices cannot reach each other's memory"
                                                           : std::strerror(errno));
    }
  }
  return {};
}

int Simulator::ChangeAccess(Address address, Mapped& mapping, std::span<const AccessDescriptor> access) const {
  const bool on_device = mapping.memory->properties.location.type == LocationType::kDevice;
  auto changed = mapping.access;
  for (const AccessDescriptor& one : access) {
    if (on_device && one.location.type != LocationType::kDevice) return cuda::kNotSupported;
    if (apart_ && one.location != mapping.memory->properties.location) return cuda::kInvalidDevice;
    MergeAccess(changed, one);
  }
  const int now = Protection(changed);
  if (options_.physical && now != Protection(mapping.access) && mprotect(Pointer(address), mapping.bytes, now) != 0)
    return cuda::kOperatingSystem;
  mapping.access = std::move(changed);
  return 0;
}

}  // namespace amem
