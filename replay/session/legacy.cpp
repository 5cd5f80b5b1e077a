// cuMemAlloc and its IPC handles. AMem makes such memory out of allocations and mappings of its own, so that a pause can take
// it.
#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "replay/driver/mapped_region.h"
#include "replay/peers/token.h"
#include "replay/session/failures.h"
#include "replay/session/session.h"

namespace amem {
namespace {

struct NewMemory {
  OwnedHandle handle;
  AllocationProperties properties;
  Bytes bytes;
};

// At least `bytes`, reachable for network cards, as cuMemAlloc memory is, where the device can do that.
Result<NewMemory> CreateMemory(Driver& driver, Bytes bytes, DeviceOrdinal device) {
  AllocationProperties properties;
  properties.handle_types = 1;
  properties.location = {LocationType::kDevice, device.value};
  Status failure;
  for (const std::uint8_t rdma : {std::uint8_t{1}, std::uint8_t{0}}) {
    properties.gpu_direct_rdma = rdma;
    const auto granularity = driver.Granularity(properties);
    failure = granularity.status();
    if (!granularity.ok()) continue;
    const Bytes rounded = (bytes + *granularity - 1) / *granularity * *granularity;
    const auto handle = driver.Create(rounded, properties, 0);
    if (handle.ok()) return NewMemory{OwnedHandle(driver, *handle), properties, rounded};
    failure = handle.status();
    if (failure.code() == Code::kOutOfMemory) break;
  }
  return failure;
}

AccessDescriptor ReadWrite(DeviceOrdinal device) { return {{LocationType::kDevice, device.value}, 3}; }

}  // namespace

void Session::RecordRegion(AllocationId allocation, Address address, Bytes bytes, std::vector<AccessDescriptor> access,
                           const CallSite& site) {
  ledger_.Record(RangeReserved{address, bytes, 0, {}, 0, site, {}});
  ledger_.Record(Mapped{address, bytes, 0, allocation, 0});
  ledger_.Record(AccessSet{address, bytes, std::move(access), {}});
}

Result<LegacyBlock> Session::NewLegacyBlock(Bytes bytes, DeviceOrdinal device, const CallSite& site) {
  auto memory = CreateMemory(driver_, std::max(bytes, LegacyPool::kBlockBytes), device);
  if (!memory.ok()) return memory.status();
  std::vector<AccessDescriptor> access;
  for (const DeviceOrdinal d : legacy_devices_) access.push_back(ReadWrite(d));
  auto region = MappedRegion::Map(driver_, memory->handle.get(), memory->bytes, 0, access);
  if (!region.ok()) return region.status();
  const LegacyBlock block{region->Keep(), memory->bytes, ledger_.TakeAllocationId(), device};
  const DriverHandle handle = memory->handle.Keep();
  ledger_.SetHandle(block.allocation, handle);
  ledger_.Record(AllocationCreated{block.allocation, block.bytes, memory->properties, 0, handle, site, {}});
  RecordRegion(block.allocation, block.address, block.bytes, std::move(access), site);
  return block;
}

// cuMemAlloc memory is within reach of every device of the process that has peer access, so each device is let in when it is
// first seen.
void Session::OpenLegacyTo(DeviceOrdinal device) {
  if (!legacy_devices_.insert(device).second) return;
  const AccessDescriptor access = ReadWrite(device);
  for (const auto& [address, entry] : legacy_.blocks()) {
    // Devices without a link to each other stay apart, as they would with cuMemAlloc.
    if (driver_.SetAccess(address, entry.block.bytes, std::span(&access, 1)).ok()) {
      ledger_.Record(AccessSet{address, entry.block.bytes, {access}, {}});
    }
  }
}

Result<Address> Session::LegacyAllocate(Bytes bytes, DeviceOrdinal device, const CallSite& site, bool for_application) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("cuMemAlloc"));
  if (TagOf(for_application) == MemoryTag::kUser)
    return Status{Code::kUnsupported, std::string(ToText(KeepReason::kUser)), cuda::kNotSupported};
  if (bytes == 0) return WrongCall("cuMemAlloc of zero bytes");
  const auto lock = ledger_.Lock();
  OpenLegacyTo(device);
  if (!LegacyPool::IsLarge(bytes)) {
    if (const auto place = legacy_.Take(bytes, device)) return RecordLegacy(place->first, place->second, bytes, site);
  }
  auto block = NewLegacyBlock(bytes, device, site);
  if (!block.ok()) return block.status();
  return RecordLegacy(*block, legacy_.AddBlock(*block, bytes), bytes, site);
}

Address Session::RecordLegacy(const LegacyBlock& block, Address address, Bytes bytes, const CallSite& site) {
  ledger_.Record(LegacyAllocated{address, bytes, block.allocation, address.value - block.address.value, {}, site});
  return address;
}

Status Session::LegacyFree(Address address) {
  const std::shared_lock gate(gate_);
  const Locked lock(*this);
  if (!ledger_.state().legacy.contains(address))
    return NotOurs(fmt::format("cuMemFree {}: NCCL did not allocate it", Hex(address.value)));
  ledger_.Record(LegacyFreed{address});
  const auto empty = legacy_.Give(address);
  return empty ? DropLegacyRegion(empty->address, empty->bytes, empty->allocation) : Status{};
}

// Gives a block or an opened IPC handle back, with the reference that NCCL's call stood for.
Status Session::DropLegacyRegion(Address address, Bytes bytes, AllocationId allocation) {
  AMEM_TRY(UnmapOne(address));
  AMEM_TRY(driver_.FreeRange(address, bytes));
  ledger_.Record(RangeFreed{address, bytes, {}});
  const Allocation* a = ledger_.Entry(ledger_.state().allocations, allocation);
  if (a == nullptr) return ledger_.Broken();
  if (a->guest_references == 1 && a->importers.empty()) {
    AMEM_TRY(ReleaseHandle(allocation));
    if (a->remote) dropped_.push_back({*a->remote, allocation});
    secrets_.erase(allocation);
  }
  ledger_.Record(AllocationReleased{allocation});
  return {};
}

Result<std::array<std::byte, 64>> Session::LegacyExport(Address address) {
  const std::shared_lock gate(gate_);
  const auto lock = ledger_.Lock();
  const auto block = legacy_.BlockAt(address);
  if (!block) return NotOurs(fmt::format("IPC handle of {}: not memory that NCCL allocated", Hex(address.value)));
  auto secret = SecretOf(block->allocation);
  if (!secret.ok()) return secret.status();
  ledger_.Record(LegacyExported{address, block->allocation});
  return Encode(Token{peers_->Self().session, block->allocation, *secret, address.value - block->address.value});
}

Result<Address> Session::LegacyImport(std::span<const std::byte, 64> handle, DeviceOrdinal device, const CallSite& site) {
  const std::shared_lock gate(gate_);
  AMEM_TRY(RefuseWhilePaused("cuIpcOpenMemHandle"));
  auto token = Decode(handle);
  if (!token.ok()) return token.status();
  auto id = ImportToken(*token, 1, site);
  if (!id.ok()) return id.status();
  const Locked lock(*this);
  const Allocation* imported = ledger_.Entry(ledger_.state().allocations, *id);
  if (imported == nullptr) return ledger_.Broken();
  const AccessDescriptor access = ReadWrite(device);
  const Bytes bytes = imported->bytes;
  auto region = MappedRegion::Map(driver_, ledger_.HandleOf(*id), bytes, 0, std::span(&access, 1));
  if (!region.ok()) {
    static_cast<void>(ReleaseHandle(*id));
    ledger_.Record(AllocationReleased{*id});
    dropped_.push_back({{token->session, token->allocation}, *id});
    return region.status();
  }
  const Address address = region->Keep();
  RecordRegion(*id, address, bytes, {access}, site);
  ledger_.Record(LegacyImported{address + token->offset, *id});
  return address + token->offset;
}

Status Session::LegacyClose(Address address) {
  const std::shared_lock gate(gate_);
  const Locked lock(*this);
  const State& state = ledger_.state();
  const auto it = state.legacy_imports.find(address);
  if (it == state.legacy_imports.end())
    return NotOurs(fmt::format("cuIpcCloseMemHandle {}: NCCL did not open it", Hex(address.value)));
  const AllocationId allocation = it->second;
  const auto mapping = state.MappingAt(address);
  if (!ledger_.Check(mapping != state.mappings.end(), "nothing is mapped at an opened IPC handle, " + Hex(address.value)))
    return ledger_.Broken();
  const auto [base, bytes] = std::pair{mapping->first, mapping->second.bytes};
  ledger_.Record(LegacyClosed{address});
  return DropLegacyRegion(base, bytes, allocation);
}

}  // namespace amem
