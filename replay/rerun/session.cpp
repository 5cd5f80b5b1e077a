#include "replay/rerun/session.h"

namespace amem {
namespace {

std::string Side(const Status& status) { return status.ok() ? "ok" : status.message(); }

}  // namespace

Result<UniqueFd> DescriptorOf(Result<SharedAllocation> shared) {
  if (!shared) return shared.status();
  return std::move(shared->descriptor);
}

DriverHandle RerunSession::HandleOf(AllocationId allocation) const {
  const auto it = handles_.find(allocation);
  return it == handles_.end() ? DriverHandle{} : it->second;
}

Result<SharedAllocation> RerunSession::Share(AllocationId allocation) {
  const auto it = recorded_.allocations.find(allocation);
  if (it == recorded_.allocations.end()) return Status{Code::kNotFound, ToText(allocation) + " does not exist at its owner"};
  ++counts_.calls;
  AMEM_ASSIGN(auto descriptor, driver_->Export(HandleOf(allocation)));
  return SharedAllocation{{it->second.bytes, it->second.properties, {}}, std::move(descriptor)};
}

// Where an address that was recorded is on this driver.
Address RerunSession::Here(Address recorded) const {
  auto range = elsewhere_.upper_bound(recorded);
  if (range == elsewhere_.begin()) return recorded;
  --range;
  const Bytes offset = recorded.value - range->first.value;
  return offset < range->second.bytes ? range->second.here + offset : recorded;
}

Status RerunSession::Reserve(Address at, const Range& range) {
  ++counts_.calls;
  AMEM_ASSIGN(const auto address, driver_->Reserve(range.bytes, range.alignment, at, range.flags));
  if (address == at) return {};
  if (simulator_ != nullptr) return {Code::kInvalid, "reserved at " + Hex(address.value)};
  elsewhere_[at] = {range.bytes, address};
  ++counts_.elsewhere;
  return {};
}

Status RerunSession::LeaveOnly(DeviceOrdinal device, Bytes bytes) {
  AMEM_ASSIGN(const auto memory, driver_->Memory(device));
  AllocationProperties properties;
  properties.location = {LocationType::kDevice, device.value};
  AMEM_ASSIGN(const auto granularity, driver_->Granularity(properties));
  const Bytes over = memory.total > bytes ? (memory.total - bytes) / granularity * granularity : 0;
  if (over == 0) return {};
  return driver_->Create(over, properties, 0).status();  // and never given back
}

Status RerunSession::Import(AllocationId allocation, const RemoteAllocation& remote, const Allocation& as_imported) {
  AMEM_ASSIGN(const auto descriptor, export_remote_(remote, as_imported));
  ++counts_.calls;
  AMEM_ASSIGN(const auto handle, driver_->Import(descriptor));
  handles_[allocation] = handle;
  return {};
}

Status RerunSession::Create(AllocationId allocation, Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) {
  ++counts_.calls;
  const Result<DriverHandle> handle = driver_->Create(bytes, properties, flags);
  if (handle) handles_[allocation] = *handle;
  return handle.status();
}

Status RerunSession::Drop(AllocationId allocation) {
  const auto handle = handles_.find(allocation);
  if (handle == handles_.end()) return {};
  ++counts_.calls;
  const Status released = driver_->Release(handle->second);
  handles_.erase(handle);
  return released;
}

// ---- from a snapshot -------------------------------------------------------------------------------------------------------

Status RerunSession::BuildOwn() {
  for (const auto& [address, range] : recorded_.ranges) AMEM_TRY(Reserve(address, range));
  for (const auto& [id, a] : recorded_.allocations) {
    if (!a.own() || a.multicast || !a.resident || a.placed()) continue;
    AMEM_ASSIGN(const auto handle, driver_->Create(a.bytes, a.properties, a.flags));
    handles_[id] = handle;
  }
  return Place(true);
}

Status RerunSession::BuildImports() {
  for (const auto& [id, a] : recorded_.allocations) {
    if (a.remote && a.resident && !a.placed() && !a.multicast) AMEM_TRY(Import(id, *a.remote, a));
  }
  return Place(false);
}

Status RerunSession::Place(bool own) {
  for (const auto& [address, m] : recorded_.mappings) {
    const auto it = recorded_.allocations.find(m.allocation);
    if (it == recorded_.allocations.end() || it->second.own() != own || it->second.multicast || !m.present) continue;
    AMEM_TRY(driver_->Map(Here(address), m.bytes, m.offset, HandleOf(m.allocation), m.flags));
    if (m.accessible && !m.access.empty()) AMEM_TRY(driver_->SetAccess(Here(address), m.bytes, m.access));
  }
  return {};
}

// ---- event by event --------------------------------------------------------------------------------------------------------

RerunSession::Outcome RerunSession::Take(const Event& event, bool) {
  Outcome outcome;
  outcome.event = event.seq;
  ++counts_.events;
  const PoolId pool = PoolOfCycle(event.body);
  if (std::holds_alternative<PhaseBegun>(event.body) && !pool) performer_.EndPhase();
  Status& step_result = step_results_[pool];
  if (const auto* begun = std::get_if<StepBegun>(&event.body)) {
    ++counts_.steps;
    step_result = Perform(begun->step);
  } else if (const auto* done = std::get_if<StepDone>(&event.body)) {
    outcome.what = "result of step \"" + ToText(done->step) + "\"";
    outcome.mismatch = step_result;
  } else if (const auto* failed = std::get_if<StepFailed>(&event.body)) {
    outcome.what = "result of step \"" + ToText(failed->step) + "\"";
    if (step_result.ok() && CameTooLate(*failed))
      step_result = Drop(failed->step.allocation).ok() ? Status{failed->code, failed->message} : Status{};
    outcome.reproduced = step_result.code() == failed->code;
    if (!outcome.reproduced) outcome.mismatch = {Code::kInvalid, Side(step_result)};
  } else {
    outcome.what = "result of \"" + ToText(event.body) + "\"";
    outcome.mismatch = Call(event);
  }
  if (!outcome.mismatch) return outcome;
  std::vector<AllocationId> touched;
  if (const auto* released = std::get_if<AllocationReleased>(&event.body)) touched.push_back(released->allocation);
  if (const auto* dropped = std::get_if<ReferenceDropped>(&event.body)) touched.push_back(dropped->allocation);
  if (const auto* unmapped = std::get_if<Unmapped>(&event.body)) {
    const auto end = recorded_.mappings.lower_bound(unmapped->address + unmapped->bytes);
    for (auto it = recorded_.mappings.lower_bound(unmapped->address); it != end; ++it) touched.push_back(it->second.allocation);
  }
  if (const auto* lost = std::get_if<PeerLost>(&event.body)) {
    for (const auto& [id, a] : recorded_.allocations) {
      for (const auto& [importer, count] : a.importers) {
        if (importer.by == lost->peer) touched.push_back(id);
      }
    }
  }
  outcome.mismatch = Apply(recorded_, event);
  for (const AllocationId id : touched)
    if (!recorded_.allocations.contains(id)) static_cast<void>(Drop(id));
  return outcome;
}

// In the job the owner was killed before it answered this import.
bool RerunSession::CameTooLate(const StepFailed& failed) const {
  if (failed.code != Code::kPeerLost || failed.step.kind != StepKind::kImport) return false;
  const auto a = recorded_.allocations.find(failed.step.allocation);
  return a != recorded_.allocations.end() && a->second.remote && killed_.contains(a->second.remote->owner);
}

bool RerunSession::IsMulticast(AllocationId allocation) const {
  const auto a = recorded_.allocations.find(allocation);
  return recorded_.multicasts.contains(allocation) || (a != recorded_.allocations.end() && a->second.multicast);
}

// Makes the driver's call that `event` records.
Status RerunSession::Call(const Event& event) {
  if (const auto* e = std::get_if<RangeReserved>(&event.body)) {
    if (e->allocation) return {};  // a place in a slab: the driver was not asked
    return Reserve(e->address, Range{e->bytes, e->alignment, e->hint, e->flags});
  }
  if (const auto* e = std::get_if<RangeFreed>(&event.body)) {
    if (e->allocation) return {};
    ++counts_.calls;
    const Status freed = driver_->FreeRange(Here(e->address), e->bytes);
    if (freed.ok()) elsewhere_.erase(e->address);
    return freed;
  }
  if (const auto* e = std::get_if<AllocationCreated>(&event.body)) {
    return e->handle ? Create(e->allocation, e->bytes, e->properties, e->flags) : Status{};  // Placed tells what is behind it
  }
  if (const auto* e = std::get_if<Placed>(&event.body)) return Drop(e->allocation);
  if (const auto* e = std::get_if<Backed>(&event.body)) {
    const auto it = recorded_.allocations.find(e->allocation);
    if (it == recorded_.allocations.end()) return {};
    const Allocation& a = it->second;
    return a.remote ? Import(e->allocation, *a.remote, a) : Create(e->allocation, a.bytes, a.properties, a.flags);
  }
  if (const auto* e = std::get_if<Imported>(&event.body)) {
    if (!e->handle || e->tag == MemoryTag::kMulticastReleased) return {};
    Allocation as_imported;
    as_imported.bytes = e->bytes;
    as_imported.properties = e->properties;
    return Import(e->allocation, e->remote, as_imported);
  }
  if (const auto* e = std::get_if<Mapped>(&event.body)) {
    const auto a = recorded_.allocations.find(e->allocation);
    if (a != recorded_.allocations.end() && (a->second.placed() || a->second.multicast)) return {};
    ++counts_.calls;
    const DriverHandle handle = HandleOf(e->allocation);
    if (!handle) return {Code::kNotFound, ToText(e->allocation) + " has no handle"};
    return driver_->Map(Here(e->address), e->bytes, e->offset, handle, e->flags);
  }
  if (const auto* e = std::get_if<Unmapped>(&event.body)) {
    if (e->allocation) return {};
    ++counts_.calls;
    return driver_->Unmap(Here(e->address), e->bytes);
  }
  if (const auto* e = std::get_if<AccessSet>(&event.body)) {
    if (e->allocation) return {};
    ++counts_.calls;
    const auto m = recorded_.MappingAt(e->address);
    if (m != recorded_.mappings.end() && IsMulticast(m->second.allocation)) return {};
    return driver_->SetAccess(Here(e->address), e->bytes, e->access);
  }
  return {};
}

Status RerunSession::Perform(const Step& step) {
  const auto a = recorded_.allocations.find(step.allocation);
  if (a != recorded_.allocations.end() && a->second.multicast) return {};  // left out, as all of a multicast object
  ++counts_.calls;
  AMEM_ASSIGN(const auto target, performer_.TargetOf(step));
  AMEM_ASSIGN(const auto handle, performer_.Perform(step, target));
  if (handle) handles_[step.allocation] = handle;
  if (step.kind == StepKind::kReleaseImport || step.kind == StepKind::kReleaseOwn) handles_.erase(step.allocation);
  return {};
}

Result<SharedAllocation> RerunSession::Shared(const Step& import) {
  const auto a = recorded_.allocations.find(import.allocation);
  if (a == recorded_.allocations.end() || !a->second.remote)
    return Status{Code::kNotFound, ToText(import.allocation) + " is not imported"};
  AMEM_ASSIGN(auto descriptor, export_remote_(*a->second.remote, a->second));
  return SharedAllocation{{a->second.bytes, a->second.properties, {}}, std::move(descriptor)};
}

Status RerunSession::Compare() {
  AMEM_TRY(CheckInvariants(recorded_));
  for (const auto& [id, a] : recorded_.allocations) {
    if (recorded_.StepUnderWay(id, a)) continue;  // of another pool's pause or resume: the driver is ahead by that step
    if (a.multicast || (a.resident && !a.placed()) == static_cast<bool>(HandleOf(id))) continue;
    return {Code::kInvalid, ToText(id) + (a.resident && !a.placed() ? " should have memory, and the driver has none for it"
                                                                    : " should have no memory, and the driver still has some")};
  }
  if (simulator_ == nullptr) return {};
  for (const auto& [address, m] : recorded_.mappings) {
    const auto a = recorded_.allocations.find(m.allocation);
    if (a != recorded_.allocations.end() && recorded_.StepUnderWay(a->first, a->second)) continue;
    if (IsMulticast(m.allocation) || m.present == IsMapped(address, m.bytes)) continue;
    return {Code::kInvalid,
            Hex(address.value) + (m.present ? " should be mapped, and is not" : " should not be mapped, and is")};
  }
  return {};
}

// Exactly that range, in one or several pieces: memory that stands in for a lost owner's is a small piece, mapped repeatedly.
bool RerunSession::IsMapped(Address address, Bytes bytes) const {
  Bytes mapped = 0;
  while (mapped < bytes) {
    const auto piece = simulator_->MappingAt(address + mapped);
    if (!piece.ok() || piece->address != address + mapped) return false;
    mapped += piece->bytes;
  }
  return mapped == bytes;
}

}  // namespace amem
