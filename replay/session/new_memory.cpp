#include "replay/session/new_memory.h"

#include <spdlog/fmt/fmt.h>

namespace amem {

Result<Bytes> Rounded(Driver& driver, Bytes bytes, const AllocationProperties& properties) {
  AMEM_ASSIGN(const auto granularity, driver.Granularity(properties));
  return (bytes + granularity - 1) / granularity * granularity;
}

Status NoSuchSize(const char* call, Bytes bytes) {
  return {Code::kOutOfMemory, fmt::format("{} {} bytes: no device has so many", call, bytes), cuda::kOutOfMemory};
}

namespace {

struct NewMemory {
  OwnedHandle handle;
  AllocationProperties properties;
  Bytes bytes;
};

Result<NewMemory> CreateMemory(Driver& driver, Bytes bytes, DeviceOrdinal device) {
  Status failure;
  for (const std::uint8_t rdma : kWithAndWithoutRdma) {
    const AllocationProperties properties = PropertiesOn(device, rdma);
    const auto size = Rounded(driver, bytes, properties);
    failure = size.status();
    if (!size.ok()) continue;
    const auto handle = driver.Create(*size, properties, 0);
    if (handle.ok()) return NewMemory{OwnedHandle(driver, *handle), properties, *size};
    failure = handle.status();
    if (failure.code() == Code::kOutOfMemory) break;
  }
  return failure;
}

}  // namespace

std::optional<AccessSet> GrantAccess(Driver& driver, DeviceOrdinal device, const Extent& memory) {
  const AccessDescriptor access = ReadWrite(device);
  if (!driver.SetAccess(memory.address, memory.bytes, std::span(&access, 1)).ok()) return std::nullopt;
  return AccessSet{memory.address, memory.bytes, {access}, {}};
}

Result<ChunkSpace::Chunk> MakeChunk(Driver& driver, Ledger& ledger, Bytes bytes, DeviceOrdinal device, const ChunkOwner& owner,
                                    const std::set<DeviceOrdinal>& others) {
  AMEM_ASSIGN(auto memory, CreateMemory(driver, bytes, device));
  const AccessDescriptor access = ReadWrite(device);
  AMEM_ASSIGN(auto region, MappedRegion::Map(driver, memory.handle.get(), memory.bytes, 0, std::span(&access, 1)));
  ChunkSpace::Chunk chunk{{}, region.Detach(), memory.bytes};
  std::vector<AccessSet> reached{{chunk.address, chunk.bytes, {access}, {}}};
  for (const DeviceOrdinal other : others)
    if (auto set = other == device ? std::nullopt : GrantAccess(driver, other, {chunk.address, chunk.bytes}))
      reached.push_back(*set);
  const DriverHandle handle = memory.handle.Detach();
  const LedgerLock lock(ledger);
  chunk.allocation = ledger.TakeAllocationId();
  ledger.SetHandle(chunk.allocation, handle);
  ledger.Record(AllocationCreated{
      chunk.allocation, chunk.bytes, memory.properties, 0, handle, owner.site, {}, owner.tag, {}, owner.pool});
  ledger.Record(RangeReserved{chunk.address, chunk.bytes, 0, {}, 0, owner.site, {}, owner.pool});
  ledger.Record(Mapped{chunk.address, chunk.bytes, 0, chunk.allocation, 0});
  for (AccessSet& set : reached) ledger.Record(std::move(set));
  return chunk;
}

}  // namespace amem
