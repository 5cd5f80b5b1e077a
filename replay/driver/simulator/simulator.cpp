#include "replay/driver/simulator/simulator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <numeric>

#include "replay/driver/simulator/internal.h"
#include "replay/driver/simulator/memfd.h"

namespace amem {
namespace {

constexpr std::uint32_t kPosixDescriptor = 1, kFabric = 8;  // CUmemAllocationHandleType
constexpr std::uint64_t kFirstHandle = 0x5100000001;        // unlike ids and addresses, so that a mix-up shows
constexpr std::uint64_t kFirstNumberedAddress = 0x500000000000;

constexpr std::string_view kNoSuchHandle = "nobody has this handle (released, or never made)";
constexpr std::string_view kNotGranular = "address and size must be multiples of the granularity, and not zero";
constexpr std::string_view kPartOfMapping = "it contains a part of a mapping, and a mapping cannot be split";
constexpr std::string_view kNoSuchDevice = "there is no such device";

void* Pointer(Address address) { return reinterpret_cast<void*>(address.value); }  // NOLINT(performance-no-int-to-ptr)

bool MapNothing(Address address, Bytes bytes) {
  return mmap(Pointer(address), bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

int Protection(const std::vector<AccessDescriptor>& access) {
  int protection = PROT_NONE;
  for (const AccessDescriptor& one : access) {
    if ((one.flags & 1) != 0) protection |= PROT_READ;
    if ((one.flags & 2) != 0) protection |= PROT_WRITE;
  }
  return protection;
}

void Merge(std::vector<AccessDescriptor>& into, const AccessDescriptor& change) {
  const auto at =
      std::lower_bound(into.begin(), into.end(), change, [](const auto& a, const auto& b) { return a.location < b.location; });
  const bool present = at != into.end() && at->location == change.location;
  if (change.flags == 0) {
    if (present) into.erase(at);
  } else if (present) {
    at->flags = change.flags;
  } else {
    into.insert(at, change);
  }
}

}  // namespace

// ---- life ------------------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<Simulator>> Simulator::Open(SimulatorOptions options) {
  if (!std::has_single_bit(options.granularity) || options.granularity < 4096) {
    return Status(Code::kInvalid, "simulator with a granularity of " + std::to_string(options.granularity) +
                                      " bytes: give a power of two, at least 4096");
  }
  std::shared_ptr<SimulatorWorld> world = options.in_memory;
  if (!options.world.empty()) {
    auto opened = SimulatorWorld::Open(options.world, options.devices, options.capacity_per_device);
    if (!opened.ok()) return opened.status();
    world = *opened;
  } else if (!world) {
    auto made = SimulatorWorld::InMemory(options.devices, options.capacity_per_device);
    if (!made.ok()) return made.status();
    world = *made;
  }
  for (const std::int32_t device : options.visible) {
    if (device < 0 || device >= world->devices()) {
      return Status(Code::kInvalid, "simulator with device " + std::to_string(device) + " visible: the world has " +
                                        std::to_string(world->devices()));
    }
  }
  const auto member = world->Attach();
  if (!member.ok()) return member.status();
  return std::unique_ptr<Simulator>(new Simulator(std::move(options), std::move(world), *member));
}

Simulator::Simulator(SimulatorOptions options, std::shared_ptr<SimulatorWorld> world, std::uint32_t member)
    : options_(std::move(options)),
      world_(std::move(world)),
      member_(member),
      pid_(getpid()),
      visible_(options_.visible),
      next_handle_(kFirstHandle),
      next_address_(kFirstNumberedAddress),
      pinned_(std::make_shared<PinnedRegistry>()),
      faults_(std::make_unique<Faults>()) {
  if (!visible_.empty()) return;
  visible_.resize(static_cast<std::size_t>(world_->devices()));
  std::iota(visible_.begin(), visible_.end(), 0);
}

Simulator::~Simulator() {
  if (getpid() != pid_) return;  // a forked child owns none of this
  if (options_.physical) {
    for (const auto& [address, bytes] : ranges_) munmap(Pointer(address), bytes);
  }
  mappings_.clear();
  memories_.clear();
  world_->Detach(member_);
}

int Simulator::Enter(Call call) {
  const std::uint64_t count = counts_[call].fetch_add(1, std::memory_order_relaxed) + 1;
  if (getpid() != pid_) return cuda::kNotInitialized;
  return armed_.load(std::memory_order_relaxed) ? EnterSlow(call, count) : 0;
}

// ---- helpers ---------------------------------------------------------------------------------------------------------------

std::int32_t Simulator::WorldDevice(std::int32_t ordinal) const {
  return ordinal >= 0 && static_cast<std::size_t>(ordinal) < visible_.size() ? visible_[static_cast<std::size_t>(ordinal)] : -1;
}

std::int32_t Simulator::OrdinalOf(std::int32_t world_device) const {
  const auto at = std::find(visible_.begin(), visible_.end(), world_device);
  return at == visible_.end() ? -1 : static_cast<std::int32_t>(at - visible_.begin());
}

int Simulator::CheckProperties(const AllocationProperties& properties) const {
  if (properties.type != 1 || (properties.handle_types & ~(kPosixDescriptor | kFabric)) != 0) return cuda::kInvalidValue;
  if ((properties.handle_types & kFabric) != 0) return cuda::kNotPermitted;  // as without access to an IMEX channel
  switch (properties.location.type) {
    case LocationType::kDevice:
      return WorldDevice(properties.location.id) < 0 ? cuda::kInvalidDevice : 0;
    case LocationType::kHost:
    case LocationType::kHostNuma:
    case LocationType::kHostNumaCurrent:
      return 0;
    case LocationType::kInvalid:
      break;
  }
  return cuda::kInvalidValue;
}

bool Simulator::AccessExists(const AccessDescriptor& access) const {
  const bool known = access.flags == 0 || access.flags == 1 || access.flags == 3;
  return known && CheckProperties({.location = access.location}) == 0;
}

std::shared_ptr<Simulator::Physical> Simulator::Find(DriverHandle handle) const {
  const auto it = memories_.find(handle.value);
  return it == memories_.end() || it->second->references == 0 ? nullptr : it->second;
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
  auto made = MakeTaggedMemfd(tag, memory.bytes);
  if (!made.ok()) return made.status();
  memory.descriptor = *std::move(made);
  return {};
}

bool Simulator::Reserved(Address address, Bytes bytes) const {
  const std::uint64_t end = address.value + bytes;
  std::uint64_t at = address.value;
  while (at < end) {  // neighbouring ranges count as one
    auto it = ranges_.upper_bound(Address{at});
    if (it == ranges_.begin()) return false;
    --it;
    if (at - it->first.value >= it->second) return false;
    at = it->first.value + it->second;
  }
  return true;
}

bool Simulator::Splits(Address address, Bytes bytes) const {
  const auto splits_at = [&](Address border) {
    auto it = mappings_.lower_bound(border);
    if (it == mappings_.begin()) return false;
    --it;
    return it->first.value + it->second.bytes > border.value;
  };
  return splits_at(address) || splits_at(address + bytes);
}

// ---- memory ----------------------------------------------------------------------------------------------------------------

Result<DriverHandle> Simulator::Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result,
                            "cuMemCreate " + std::to_string(bytes) + " bytes at location type " +
                                std::to_string(static_cast<std::uint32_t>(properties.location.type)) + " id " +
                                std::to_string(properties.location.id),
                            why);
  };
  if (const int result = Enter(kCreate)) return fail(result, WhyNotEntered(pid_));
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
  const std::lock_guard lock(mutex_);
  return Adopt(std::move(memory));
}

Status Simulator::Release(DriverHandle handle) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuMemRelease " + OfHandle(handle), why);
  };
  if (const int result = Enter(kRelease)) return fail(result, WhyNotEntered(pid_));
  const std::lock_guard lock(mutex_);
  const auto memory = Find(handle);
  if (!memory) return fail(cuda::kInvalidValue, kNoSuchHandle);
  --memory->references;
  ForgetIfUnused(memory);
  return {};
}

Result<DriverHandle> Simulator::Retain(Address address) {
  const std::lock_guard lock(mutex_);
  auto it = mappings_.upper_bound(address);
  if (it == mappings_.begin() || address.value - (--it)->first.value >= it->second.bytes) {
    return SimulatedFailure(cuda::kInvalidValue, "cuMemRetainAllocationHandle " + Hex(address.value),
                            "nothing is mapped there");
  }
  ++it->second.memory->references;
  return it->second.memory->handle;
}

Result<AllocationProperties> Simulator::PropertiesOf(DriverHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto memory = Find(handle);
  if (memory) return memory->properties;
  return SimulatedFailure(cuda::kInvalidValue, "cuMemGetAllocationPropertiesFromHandle " + OfHandle(handle), kNoSuchHandle);
}

// ---- addresses -------------------------------------------------------------------------------------------------------------

Result<Address> Simulator::Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result,
                            "cuMemAddressReserve " + std::to_string(bytes) + " bytes aligned to " + std::to_string(alignment) +
                                " at " + Hex(hint.value),
                            why);
  };
  if (const int result = Enter(kReserve)) return fail(result, WhyNotEntered(pid_));
  if (bytes == 0 || !Granular(bytes))
    return fail(cuda::kInvalidValue, "the size must be a multiple of the granularity, not zero");
  if (alignment != 0 && !std::has_single_bit(alignment))
    return fail(cuda::kInvalidValue, "the alignment must be a power of two");
  if (!Granular(hint.value)) return fail(cuda::kInvalidValue, "the hint must be a multiple of the granularity");
  if (flags != 0) return fail(cuda::kInvalidValue, "flags must be zero");
  const std::lock_guard lock(mutex_);
  const auto address = ReserveAddresses(bytes, std::max(alignment, options_.granularity), hint);
  if (!address.ok()) return fail(cuda::kOutOfMemory, address.status().message());
  ranges_.emplace(*address, bytes);
  return *address;
}

Result<Address> Simulator::ReserveAddresses(Bytes bytes, Bytes alignment, Address hint) {
  const bool usable_hint = hint && (hint.value & (alignment - 1)) == 0;
  if (!options_.physical) {
    if (usable_hint) {
      const auto after = ranges_.lower_bound(hint);
      const bool free_after = after == ranges_.end() || after->first.value - hint.value >= bytes;
      const bool free_before =
          after == ranges_.begin() || std::prev(after)->first.value + std::prev(after)->second <= hint.value;
      if (free_after && free_before) {
        next_address_ = std::max(next_address_, hint.value + bytes);
        return hint;
      }
    }
    const std::uint64_t address = (next_address_ + alignment - 1) & ~(alignment - 1);
    next_address_ = address + bytes;
    return Address{address};
  }
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const auto number = [](void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); };
  if (usable_hint) {
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
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuMemAddressFree " + InRange(address, bytes), why);
  };
  if (const int result = Enter(kFreeRange)) return fail(result, WhyNotEntered(pid_));
  const std::lock_guard lock(mutex_);
  const auto range = ranges_.find(address);
  if (range == ranges_.end() || range->second != bytes) return fail(cuda::kInvalidValue, "no such range was reserved");
  if (Splits(address, bytes) || mappings_.lower_bound(address) != End(address, bytes)) {
    return fail(cuda::kInvalidValue, "something is mapped in it");
  }
  if (options_.physical) munmap(Pointer(address), bytes);
  ranges_.erase(range);
  return {};
}

Status Simulator::Map(Address address, Bytes bytes, Bytes offset, DriverHandle handle, std::uint64_t flags) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(
        result, "cuMemMap " + InRange(address, bytes) + ", offset " + std::to_string(offset) + " of " + OfHandle(handle), why);
  };
  if (const int result = Enter(kMap)) return fail(result, WhyNotEntered(pid_));
  if (bytes == 0 || !Granular(bytes | address.value | offset)) return fail(cuda::kInvalidValue, kNotGranular);
  if (flags != 0) return fail(cuda::kInvalidValue, "flags must be zero");
  const std::lock_guard lock(mutex_);
  const auto memory = Find(handle);
  if (!memory) return fail(cuda::kInvalidValue, kNoSuchHandle);
  if (bytes != memory->bytes || offset != 0) return fail(cuda::kNotSupported, "a handle is mapped whole");
  if (!Reserved(address, bytes)) return fail(cuda::kInvalidValue, "this range was not reserved");
  if (Splits(address, bytes) || mappings_.lower_bound(address) != End(address, bytes)) {
    return fail(cuda::kInvalidValue, "something is mapped in this range already");
  }
  if (options_.physical) {
    if (const Status made = EnsureDescriptor(*memory); !made.ok()) return fail(cuda::kOperatingSystem, made.message());
    if (mmap(Pointer(address), bytes, PROT_NONE, MAP_FIXED | MAP_SHARED | MAP_NORESERVE, memory->descriptor.get(), 0) ==
        MAP_FAILED) {
      return fail(cuda::kOperatingSystem, std::string("mmap: ") + std::strerror(errno));
    }
  }
  ++memory->mappings;
  mappings_.emplace(address, Mapped{bytes, memory, {}});
  return {};
}

Status Simulator::Unmap(Address address, Bytes bytes) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuMemUnmap " + InRange(address, bytes), why);
  };
  if (const int result = Enter(kUnmap)) return fail(result, WhyNotEntered(pid_));
  if (bytes == 0 || !Granular(bytes | address.value)) return fail(cuda::kInvalidValue, kNotGranular);
  const std::lock_guard lock(mutex_);
  if (!Reserved(address, bytes)) return fail(cuda::kInvalidValue, "this range was not reserved");
  if (Splits(address, bytes)) return fail(cuda::kInvalidValue, kPartOfMapping);
  if (options_.physical && !MapNothing(address, bytes)) {
    return fail(cuda::kOperatingSystem, std::string("mmap: ") + std::strerror(errno));
  }
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
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(
        result, "cuMemSetAccess " + InRange(address, bytes) + ", " + std::to_string(access.size()) + " locations", why);
  };
  if (const int result = Enter(kSetAccess)) return fail(result, WhyNotEntered(pid_));
  if (bytes == 0 || !Granular(bytes | address.value)) return fail(cuda::kInvalidValue, kNotGranular);
  if (access.empty()) return fail(cuda::kInvalidValue, "no location was given");
  if (!std::all_of(access.begin(), access.end(), [&](const AccessDescriptor& one) { return AccessExists(one); })) {
    return fail(cuda::kInvalidValue, "there is no such location, or no such access");
  }
  const std::lock_guard lock(mutex_);
  if (Splits(address, bytes)) return fail(cuda::kInvalidValue, kPartOfMapping);
  const auto first = mappings_.find(address);
  const auto end = End(address, bytes);
  if (first == mappings_.end() || std::prev(end)->first + std::prev(end)->second.bytes != address + bytes) {
    return fail(cuda::kInvalidValue, "it must begin with a mapping and end with one");
  }
  for (auto it = first; it != end; ++it) {
    if (const int result = ChangeAccess(it->first, it->second, access)) {
      return fail(result,
                  result == cuda::kNotSupported ? "the host cannot have access to device memory" : std::strerror(errno));
    }
  }
  return {};
}

int Simulator::ChangeAccess(Address address, Mapped& mapping, std::span<const AccessDescriptor> access) const {
  const bool on_device = mapping.memory->properties.location.type == LocationType::kDevice;
  auto changed = mapping.access;
  for (const AccessDescriptor& one : access) {
    if (on_device && one.location.type != LocationType::kDevice) return cuda::kNotSupported;
    Merge(changed, one);
  }
  const int now = Protection(changed);
  if (options_.physical && now != Protection(mapping.access) && mprotect(Pointer(address), mapping.bytes, now) != 0) {
    return cuda::kOperatingSystem;
  }
  mapping.access = std::move(changed);
  return 0;
}

// ---- sharing ---------------------------------------------------------------------------------------------------------------

Result<UniqueFd> Simulator::Export(DriverHandle handle) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuMemExportToShareableHandle " + OfHandle(handle), why);
  };
  if (const int result = Enter(kExport)) return fail(result, WhyNotEntered(pid_));
  const std::lock_guard lock(mutex_);
  const auto memory = Find(handle);
  if (!memory) return fail(cuda::kInvalidValue, kNoSuchHandle);
  if ((memory->properties.handle_types & kPosixDescriptor) == 0) {
    return fail(cuda::kInvalidValue, memory->imported ? "an imported handle cannot be exported again"
                                                      : "it was not created to be exported as a descriptor");
  }
  if (const Status made = EnsureDescriptor(*memory); !made.ok()) return fail(cuda::kOperatingSystem, made.message());
  UniqueFd copy(fcntl(memory->descriptor.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy) return fail(cuda::kOperatingSystem, std::string("duplicate the descriptor: ") + std::strerror(errno));
  world_->MarkExported(memory->key);
  return copy;
}

Result<DriverHandle> Simulator::Import(const UniqueFd& descriptor) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuMemImportFromShareableHandle descriptor " + std::to_string(descriptor.get()), why);
  };
  if (const int result = Enter(kImport)) return fail(result, WhyNotEntered(pid_));
  const auto shared = ReadTaggedMemfd(descriptor.get());
  if (!shared) return fail(cuda::kUnknown, "this is no descriptor of device memory");
  if (shared->tag.world != world_->id()) return fail(cuda::kUnknown, "this memory belongs to another simulated world");
  auto memory = std::make_shared<Physical>();
  memory->bytes = shared->bytes;
  memory->properties = shared->tag.properties;
  memory->properties.handle_types = 0;  // as the driver says of imported handles
  memory->imported = true;
  if (memory->properties.location.type == LocationType::kDevice) {
    memory->world_device = memory->properties.location.id;
    if (memory->world_device < 0 || memory->world_device >= world_->devices()) return fail(cuda::kInvalidDevice, kNoSuchDevice);
    memory->properties.location.id = OrdinalOf(memory->world_device);
  }
  memory->descriptor.Reset(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
  if (!memory->descriptor)
    return fail(cuda::kOperatingSystem, std::string("duplicate the descriptor: ") + std::strerror(errno));
  const auto key = world_->AddReference(member_, shared->tag.key, memory->world_device, memory->bytes);
  if (!key) return fail(cuda::kOutOfMemory, "the world's table is full");
  memory->key = *key;
  const std::lock_guard lock(mutex_);
  return Adopt(std::move(memory));
}

// ---- devices ---------------------------------------------------------------------------------------------------------------

Result<Bytes> Simulator::Granularity(const AllocationProperties& properties) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuMemGetAllocationGranularity", why);
  };
  if (const int result = Enter(kGranularity)) return fail(result, WhyNotEntered(pid_));
  if (const int result = CheckProperties(properties)) return fail(result, "these properties cannot be had");
  return options_.granularity;
}

Result<MemoryInfo> Simulator::Memory(DeviceOrdinal device) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuMemGetInfo device " + std::to_string(device.value), why);
  };
  if (const int result = Enter(kMemory)) return fail(result, WhyNotEntered(pid_));
  const std::int32_t world_device = WorldDevice(device.value);
  if (world_device < 0) return fail(cuda::kInvalidDevice, kNoSuchDevice);
  const Bytes total = world_->capacity(), used = world_->InUse(world_device);
  return MemoryInfo{.free = total - std::min(total, used), .total = total};
}

Result<int> Simulator::DeviceCount() {
  if (const int result = Enter(kDeviceCount)) return SimulatedFailure(result, "cuDeviceGetCount", WhyNotEntered(pid_));
  return static_cast<int>(visible_.size());
}

Result<std::string> Simulator::DeviceUuid(DeviceOrdinal device) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuDeviceGetUuid device " + std::to_string(device.value), why);
  };
  if (const int result = Enter(kDeviceUuid)) return fail(result, WhyNotEntered(pid_));
  const std::int32_t world_device = WorldDevice(device.value);
  if (world_device < 0) return fail(cuda::kInvalidDevice, kNoSuchDevice);
  std::string last = std::to_string(world_device);
  return "GPU-51000000-0000-4000-8000-" + std::string(12 - last.size(), '0') + last;
}

Status Simulator::Synchronize(DeviceOrdinal device) {
  const auto fail = [&](int result, std::string_view why) {
    return SimulatedFailure(result, "cuCtxSynchronize device " + std::to_string(device.value), why);
  };
  if (const int result = Enter(kSynchronize)) return fail(result, WhyNotEntered(pid_));
  if (WorldDevice(device.value) < 0) return fail(cuda::kInvalidDevice, kNoSuchDevice);
  if (capturing_) return fail(cuda::kCaptureUnsupported, "a stream capture is running; end it first");
  return {};
}

}  // namespace amem
