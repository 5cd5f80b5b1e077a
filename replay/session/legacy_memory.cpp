#include "replay/session/legacy_memory.h"

#include <algorithm>
#include <tuple>

#include "replay/peers/token.h"
#include "replay/session/new_memory.h"

namespace amem {

LegacyMemory::LegacyMemory(const LowerParts& parts, Coordinator& cycles, PinnedSupply& pinned, Sharing& sharing)
    : parts_(parts), driver_(parts.driver), ledger_(parts.ledger), cycles_(cycles), pinned_(pinned), sharing_(sharing) {}

void LegacyMemory::RecordRegion(AllocationId allocation, Address address, Bytes bytes, std::vector<AccessDescriptor> access,
                                const CallSite& site) {
  const Allocation* a = ledger_.Entry(allocation);
  const AllocationId part = a != nullptr && a->placed() ? allocation : AllocationId{};
  ledger_.Record(RangeReserved{address, bytes, 0, {}, 0, site, part, a == nullptr ? PoolId{} : a->pool});
  ledger_.Record(Mapped{address, bytes, 0, allocation, 0});
  ledger_.Record(AccessSet{address, bytes, std::move(access), part});
}

// Zero: it does not suit a slab, or there is none.
AllocationId LegacyMemory::NewPart(Bytes bytes, DeviceOrdinal device, const Origin& origin) {
  for (const std::uint8_t rdma : kWithAndWithoutRdma) {
    const AllocationProperties properties = PropertiesOn(device, rdma);
    const auto rounded = Rounded(driver_, bytes, properties);
    if (!rounded.ok()) continue;
    const auto part = parts_.slabs.Create(*rounded, properties, 0, origin);
    if (part.ok()) return *part;
  }
  return {};
}

Result<ChunkSpace::Chunk> LegacyMemory::NewChunk(Bytes bytes, DeviceOrdinal device, const Origin& origin) {
  constexpr Bytes kLeast = Bytes{2} << 20;  // small requests share this, as in the driver
  bytes = std::max(bytes, kLeast);
  const std::set<DeviceOrdinal> before = devices_;
  WithoutLedger apart(ledger_);
  const AllocationId part = NewPart(bytes, device, origin);
  const auto made = part ? Result<ChunkSpace::Chunk>(ChunkSpace::Chunk{})
                         : MakeChunk(driver_, ledger_, bytes, device, {MemoryTag::kNccl, {}, origin.site}, before);
  apart.End();
  AMEM_TRY(made.status());
  ChunkSpace::Chunk chunk = *made;
  if (part) {
    AMEM_ASSIGN(const Allocation* const a, ledger_.Known(part));
    chunk = {part, ledger_.state().PlaceOf(*a), a->bytes};
    RecordRegion(part, chunk.address, chunk.bytes, {ReadWrite(device)}, origin.site);
  }
  // OpenTo did not find this chunk for a device that came meanwhile. A slab was opened to its own device only.
  for (const DeviceOrdinal other : devices_)
    if (part || !before.contains(other)) Reach(other, chunk.address);
  return chunk;
}

// All of the mapping at `address`, which for a part is its slab's. Devices without a link stay apart.
void LegacyMemory::Reach(DeviceOrdinal device, Address address) {
  const auto mapping = ledger_.state().MappingAt(address);
  if (mapping == ledger_.state().mappings.end() || Allows(mapping->second.access, ReadWrite(device))) return;
  if (const auto set = GrantAccess(driver_, device, {mapping->first, mapping->second.bytes})) ledger_.Record(*set);
}

// Every device of the process with peer access may use cuMemAlloc memory, so each gets access when it is first seen.
void LegacyMemory::OpenTo(DeviceOrdinal device) {
  if (!devices_.insert(device).second) return;
  for (const auto& [on, space] : spaces_)
    for (const auto& [address, chunk] : space.chunks()) Reach(device, address);
}

// The request's communicator is not its chunk's.
Result<Address> LegacyMemory::Take(Bytes bytes, DeviceOrdinal device, const Origin& origin) {
  const auto shared = origin.alone == Alone::kNo ? spaces_[device].Take(bytes) : std::nullopt;
  if (shared) return *shared;
  Origin of_chunk = origin;
  of_chunk.communicator = {};
  AMEM_ASSIGN(const auto chunk, NewChunk(bytes, device, of_chunk));
  cycles_.Made(chunk.bytes);
  return spaces_[device].Add(chunk, bytes);
}

Result<Address> LegacyMemory::Allocate(Bytes bytes, DeviceOrdinal device, const Origin& origin, bool for_application) {
  const auto gate = parts_.calls.EnterCall();
  AMEM_TRY(parts_.calls.RefuseWhilePaused("cuMemAlloc"));
  if (TagFor(for_application, parts_.options.user_memory) == MemoryTag::kUser)
    return Status{Code::kUnsupported, std::string(ToText(KeepReason::kUser)), cuda::kNotSupported};
  if (bytes == 0) return Status{Code::kInvalid, "cuMemAlloc of zero bytes", cuda::kInvalidValue};
  if (bytes >= ChunkSpace::kTooMany) return NoSuchSize("cuMemAlloc", bytes);
  const LedgerLock lock(ledger_);
  OpenTo(device);
  auto address = Take(bytes, device, origin);
  if (address.status().code() == Code::kOutOfMemory && origin.alone == Alone::kPreferred)
    address = Take(bytes, device, origin.Anywhere());
  AMEM_TRY(address.status());
  const auto part = spaces_[device].PartAt(*address);
  const Status consistent = spaces_[device].Check();
  if (!ledger_.Check(part.has_value() && consistent.ok(), "cuMemAlloc's chunks: " + consistent.message()))
    return ledger_.Broken();
  ledger_.Record(LegacyAllocated{*address, bytes, part->chunk, part->offset, {}, origin.site, origin.communicator});
  return *address;
}

Status LegacyMemory::Free(Address address) {
  const auto gate = parts_.calls.EnterCall();
  AMEM_TRY(cycles_.AwaitCopies());
  const NotifyingLock lock(ledger_, parts_.dropped);
  if (!ledger_.state().legacy.contains(address)) return NotOurs("cuMemFree", Hex(address), "NCCL did not allocate it");
  ledger_.Record(LegacyFreed{address});
  for (auto& [device, space] : spaces_) {
    const auto given = space.Give(address);
    if (given && given->emptied) return DropRegion(given->emptied->address, given->emptied->bytes, given->part.chunk);
  }
  return {};
}

// Gives a chunk or an opened IPC handle back, with its reference.
Status LegacyMemory::DropRegion(Address address, Bytes bytes, AllocationId allocation) {
  const auto* const found = ledger_.Find(allocation);
  const AllocationId slab = found == nullptr ? AllocationId{} : found->slab;
  if (slab) {
    ledger_.Record(Unmapped{address, bytes, allocation});
  } else {
    AMEM_TRY(parts_.allocations.Unmap(address, ledger_));
    AMEM_TRY(driver_.FreeRange(address, bytes));
  }
  ledger_.Record(RangeFreed{address, bytes, slab ? allocation : AllocationId{}});
  if (ledger_.Entry(allocation) == nullptr) return ledger_.Broken();
  return parts_.allocations.Release(allocation, ledger_);
}

Result<std::array<std::byte, 64>> LegacyMemory::Export(Address address) {
  const auto gate = parts_.calls.EnterCall();
  const LedgerLock lock(ledger_);
  const auto it = ledger_.state().LegacyAt(address);
  if (it == ledger_.state().legacy.end() || !it->second.backing)
    return NotOurs("IPC handle of", Hex(address), "not memory that NCCL allocated");
  const auto& [begin, memory] = *it;
  return TokenOf(address, memory.backing, memory.offset + (address.value - begin.value));
}

Result<std::array<std::byte, 64>> LegacyMemory::TokenOf(Address address, AllocationId backing, Bytes offset, Bytes beyond) {
  AMEM_ASSIGN(Token token, parts_.tokens.For(backing, ledger_));
  token.offset = offset;
  token.beyond = static_cast<std::uint32_t>(beyond);
  ledger_.Record(LegacyExported{address, backing});
  return Encode(token);
}

Result<TagPart> LegacyMemory::OpenedAt(Address address) {
  const LedgerLock lock(ledger_);
  for (const auto& [key, chunk] : opened_)
    if (address >= chunk.address && address < chunk.address + chunk.asked)
      return TagPart{chunk.address, chunk.asked, chunk.device, true};
  return NotOurs("an opened IPC handle at", Hex(address), "there is none");
}

Result<std::array<std::byte, 64>> LegacyMemory::ExportPart(Address address) {
  constexpr Bytes kGranule = Bytes{2} << 20;
  const auto gate = parts_.calls.EnterCall();
  const LedgerLock lock(ledger_);
  for (const auto& [id, pool] : ledger_.state().pools) {
    const auto part = Containing(pool.parts, address);
    if (part == pool.parts.end()) continue;
    const auto& [begin, memory] = *part;
    const Allocation* const chunk = ledger_.Entry(memory.backing);
    // A chunk that is one part is what the importer gets to see of it: just as much as was asked for.
    const bool whole = memory.offset == 0 && chunk != nullptr && chunk->bytes - memory.bytes < kGranule;
    return TokenOf(begin, memory.backing, memory.offset, whole ? chunk->bytes - memory.bytes : 0);
  }
  return NotOurs("IPC handle of", Hex(address), "no tag has memory there");
}

Result<Address> LegacyMemory::OpenAgain(const Token& token, DeviceOrdinal device) {
  const std::pair key(token.session, token.allocation);
  AllocationId chunk;
  {
    const LedgerLock lock(ledger_);
    if (const auto* const open = FindIn(opened_, key)) chunk = open->allocation;
  }
  const InTags tag = parts_.calls.EnterTagOf(chunk);
  const NotifyingLock lock(ledger_, parts_.dropped);
  const auto* const open = FindIn(opened_, key);
  if (open == nullptr) return Address{};
  const AllocationId id = open->allocation;
  const Address base = open->address;
  if (tag.paused) return CallAdmission::RefuseInTag("cuIpcOpenMemHandle", base);
  if (tag.gates.empty()) AMEM_TRY(parts_.calls.RefuseWhilePaused("cuIpcOpenMemHandle"));
  AMEM_ASSIGN(const Token known, parts_.tokens.For(id, ledger_));
  AMEM_ASSIGN(const Mapping* const mapping, ledger_.Known(ledger_.state().mappings, base));
  if (!SameSecret(known.secret, token.secret) || token.offset >= mapping->bytes)
    return WrongCall("cuIpcOpenMemHandle", ToText(id), "its owner did not make this handle", Code::kRefused);
  Reach(device, base);
  const Address address = base + token.offset;
  if (ledger_.state().legacy_imports.contains(address)) {
    ++opened_again_[address];
  } else {
    ledger_.Record(AllocationRetained{id, base});
    ledger_.Record(LegacyImported{address, id});
  }
  return address;
}

Result<Address> LegacyMemory::Import(std::span<const std::byte, 64> handle, DeviceOrdinal device, const Origin& origin,
                                     bool of_others) {
  auto gate = parts_.calls.EnterCall();
  if (!of_others) AMEM_TRY(parts_.calls.RefuseWhilePaused("cuIpcOpenMemHandle"));
  pinned_.Busy();
  AMEM_ASSIGN(auto token, Decode(handle));
  if (const auto again = OpenAgain(token, device); !again.ok() || *again) return again;
  AMEM_ASSIGN(auto id, sharing_.ImportToken(token, origin, gate));
  LastHandle::Forget(id);  // NCCL reserves no range for it
  const InTags tag = parts_.calls.EnterTagOf(id);
  auto address = tag.paused ? Result<Address>(CallAdmission::RefuseInTag("cuIpcOpenMemHandle", Address{}))
                            : MapImport(id, device, token, origin.site);
  if (address.ok() && *address) return *address + token.offset;
  // The mapping failed, or the handle is open already: memory in a slab has one address.
  const NotifyingLock lock(ledger_, parts_.dropped);
  const auto* const found = ledger_.Find(id);
  const bool part = found != nullptr && found->placed();
  const Address open = part ? ledger_.state().PlaceOf(*found) + token.offset : Address{};
  AMEM_TRY(parts_.allocations.Release(id, ledger_));
  if (!address.ok()) return address.status();
  ++opened_again_[open];
  return open;
}

// Where the imported chunk begins. Zero: an import of it is already open at that address.
Result<Address> LegacyMemory::MapImport(AllocationId id, DeviceOrdinal device, const Token& token, const CallSite& site) {
  const Bytes offset = token.offset;
  const AccessDescriptor access = ReadWrite(device);
  const bool part = Inspect(ledger_, [&](const State& state) {
    const auto* const found = FindIn(state.allocations, id);
    return found != nullptr && found->placed();
  });
  if (part) AMEM_TRY(parts_.slabs.Open(id, std::span(&access, 1)));
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  AMEM_ASSIGN(const Allocation* const imported, ledger_.Known(id));
  const Bytes bytes = imported->bytes;
  Address address = state.PlaceOf(*imported);
  if (part) {
    if (state.legacy_imports.contains(address + offset)) return Address{};
  } else {
    AMEM_ASSIGN(auto region, MappedRegion::Map(driver_, ledger_.HandleOf(id), bytes, 0, std::span(&access, 1)));
    address = region.Detach();
    const Bytes asked = bytes - std::min<Bytes>(token.beyond, bytes);
    opened_[{imported->remote->owner, imported->remote->allocation}] = {id, address, asked, device};
  }
  RecordRegion(id, address, bytes, {access}, site);
  ledger_.Record(LegacyImported{address + offset, id});
  return address;
}

Status LegacyMemory::Close(Address address) {
  const auto gate = parts_.calls.EnterCall();
  AMEM_TRY(cycles_.AwaitCopies());
  const InTags tags = parts_.calls.EnterTags({address, 1}, "cuIpcCloseMemHandle");
  const NotifyingLock lock(ledger_, parts_.dropped);
  const State& state = ledger_.state();
  auto* const it = FindIn(state.legacy_imports, address);
  if (it == nullptr) return NotOurs("cuIpcCloseMemHandle", Hex(address), "NCCL did not open it");
  if (const auto again = opened_again_.find(address); again != opened_again_.end()) {
    if (--again->second == 0) opened_again_.erase(again);
    return {};
  }
  const AllocationId allocation = it->allocation;
  const auto* const imported = FindIn(state.allocations, allocation);
  const auto mapping = state.MappingAt(address);
  if (!ledger_.Check(mapping != state.mappings.end(), "nothing is mapped at an opened IPC handle, " + Hex(address)))
    return ledger_.Broken();
  auto [base, bytes] = std::pair{mapping->first, mapping->second.bytes};
  if (imported != nullptr && imported->placed()) std::tie(base, bytes) = std::pair{state.PlaceOf(*imported), imported->bytes};
  ledger_.Record(LegacyClosed{address});
  if (imported != nullptr && !imported->placed()) {
    const auto other = state.legacy_imports.lower_bound(base);
    if (other != state.legacy_imports.end() && other->first < base + bytes)
      return parts_.allocations.Release(allocation, ledger_);
    opened_.erase({imported->remote->owner, imported->remote->allocation});
  }
  return DropRegion(base, bytes, allocation);
}

}  // namespace amem
