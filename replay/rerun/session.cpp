#include "replay/rerun/session.h"

namespace amem {

Result<UniqueFd> DescriptorOf(Result<SharedAllocation> shared) {
  if (!shared) return shared.status();
  return std::move(shared->descriptor);
}

Driver& RerunSession::Call() {
  ++counts_.calls;
  return *driver_;
}

DriverHandle RerunSession::HandleOf(AllocationId allocation) const {
  const auto* const handle = FindIn(handles_, allocation);
  return handle == nullptr ? DriverHandle{} : *handle;
}

std::optional<DeviceOrdinal> RerunSession::SubstituteOf(AllocationId allocation) const {
  const auto* const device = FindIn(stand_ins_, allocation);
  return device == nullptr ? std::nullopt : std::optional(*device);
}

Result<SharedAllocation> RerunSession::Share(AllocationId allocation) {
  const auto* const a = Recorded(allocation);
  if (a == nullptr) return Status{Code::kNotFound, ToText(allocation) + " does not exist at its owner"};
  AMEM_ASSIGN(auto descriptor, Call().Export(HandleOf(allocation)));
  return SharedAllocation{{a->bytes, a->properties, {}}, std::move(descriptor)};
}

Status RerunSession::Reserve(Address at, const Range& range) {
  AMEM_ASSIGN(const auto address, Call().Reserve(range.bytes, range.alignment, at, range.flags));
  return address == at ? Status() : Status{Code::kInvalid, "reserved at " + Hex(address.value)};
}

Status RerunSession::LeaveOnly(DeviceOrdinal device, Bytes bytes) {
  AMEM_ASSIGN(const auto memory, driver_->Memory(device));
  const AllocationProperties properties = PropertiesOn(device);
  AMEM_ASSIGN(const auto granularity, driver_->Granularity(properties));
  const Bytes over = memory.total > bytes ? (memory.total - bytes) / granularity * granularity : 0;
  if (over == 0) return {};
  return driver_->Create(over, properties, 0).status();  // and never given back
}

Status RerunSession::Import(AllocationId allocation, const RemoteAllocation& remote, const Allocation& as_imported) {
  AMEM_ASSIGN(const auto descriptor, export_remote_(remote, as_imported));
  AMEM_ASSIGN(handles_[allocation], Call().Import(descriptor));
  return {};
}

Status RerunSession::Create(AllocationId allocation, Bytes bytes, const AllocationProperties& properties, std::uint64_t flags) {
  AMEM_ASSIGN(handles_[allocation], Call().Create(bytes, properties, flags));
  return {};
}

Status RerunSession::Drop(AllocationId allocation) {
  const DriverHandle handle = HandleOf(allocation);
  if (!handle) return {};
  handles_.erase(allocation);
  return Call().Release(handle);
}

// ---- from a snapshot -------------------------------------------------------------------------------------------------------

Status RerunSession::BuildOwn() {
  for (const auto& [address, range] : recorded_.ranges) AMEM_TRY(Reserve(address, range));
  for (const auto& [id, a] : recorded_.allocations) {
    if (!a.own() || a.multicast || !a.resident || a.placed()) continue;
    AMEM_ASSIGN(handles_[id], driver_->Create(a.bytes, a.properties, a.flags));
  }
  return Place(true);
}

Status RerunSession::BuildImports() {
  for (const auto& [id, a] : recorded_.allocations)
    if (a.remote && a.resident && !a.placed() && !a.multicast) AMEM_TRY(Import(id, *a.remote, a));
  return Place(false);
}

Status RerunSession::Place(bool own) {
  for (const auto& [address, m] : recorded_.mappings) {
    const auto* const a = Recorded(m.allocation);
    if (a == nullptr || a->own() != own || a->multicast || !m.present) continue;
    AMEM_TRY(driver_->Map(address, m.bytes, m.offset, HandleOf(m.allocation), m.flags));
    if (m.accessible && !m.access.empty()) AMEM_TRY(driver_->SetAccess(address, m.bytes, m.access));
  }
  return {};
}

// ---- event by event --------------------------------------------------------------------------------------------------------

RerunSession::Outcome RerunSession::Take(const Event& event) {
  Outcome outcome;
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
    if (!outcome.reproduced) outcome.mismatch = {Code::kInvalid, step_result.ok() ? "ok" : step_result.message()};
  } else {
    outcome.what = "result of \"" + ToText(event.body) + "\"";
    outcome.mismatch = Repeat(event);
  }
  if (!outcome.mismatch) return outcome;
  std::vector<AllocationId> touched;
  if (const auto* released = std::get_if<AllocationReleased>(&event.body)) touched.push_back(released->allocation);
  if (const auto* dropped = std::get_if<ReferenceDropped>(&event.body)) touched.push_back(dropped->allocation);
  if (const auto* unmapped = std::get_if<Unmapped>(&event.body)) {
    for (const auto& [address, m] : Touching(recorded_.mappings, unmapped->address, unmapped->bytes))
      touched.push_back(m.allocation);
  }
  if (const auto* lost = std::get_if<PeerLost>(&event.body)) {
    for (const auto& [id, a] : recorded_.allocations) {
      for (const auto& [importer, count] : a.importers)
        if (importer.by == lost->peer) touched.push_back(id);
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
  const auto* const a = Recorded(failed.step.allocation);
  return a != nullptr && a->remote && killed_.contains(a->remote->owner);
}

bool RerunSession::IsMulticast(AllocationId allocation) const {
  const auto* const a = Recorded(allocation);
  return recorded_.multicasts.contains(allocation) || (a != nullptr && a->multicast);
}

// Makes the driver's call that `event` records.
Status RerunSession::Repeat(const Event& event) {
  if (const auto* e = std::get_if<RangeReserved>(&event.body)) {
    if (e->allocation) return {};  // a place in a slab: the driver was not asked
    return Reserve(e->address, Range{e->bytes, e->alignment, e->hint, e->flags});
  }
  if (const auto* e = std::get_if<RangeFreed>(&event.body)) {
    if (e->allocation) return {};
    return Call().FreeRange(e->address, e->bytes);
  }
  if (const auto* e = std::get_if<AllocationCreated>(&event.body)) {
    return e->handle ? Create(e->allocation, e->bytes, e->properties, e->flags) : Status{};  // Placed tells what is behind it
  }
  if (const auto* e = std::get_if<Placed>(&event.body)) return Drop(e->allocation);
  if (const auto* e = std::get_if<Backed>(&event.body)) {
    const auto* const a = Recorded(e->allocation);
    if (a == nullptr) return {};
    return a->remote ? Import(e->allocation, *a->remote, *a) : Create(e->allocation, a->bytes, a->properties, a->flags);
  }
  if (const auto* e = std::get_if<Imported>(&event.body)) {
    if (!e->handle || e->tag == MemoryTag::kMulticastReleased) return {};
    Allocation as_imported;
    as_imported.bytes = e->bytes;
    as_imported.properties = e->properties;
    return Import(e->allocation, e->remote, as_imported);
  }
  if (const auto* e = std::get_if<Mapped>(&event.body)) {
    const auto* const a = Recorded(e->allocation);
    if (a != nullptr && (a->placed() || a->multicast)) return {};
    const DriverHandle handle = HandleOf(e->allocation);
    if (!handle) return {Code::kNotFound, ToText(e->allocation) + " has no handle"};
    if (SubstituteOf(e->allocation)) return MapRepeatedly(Call(), e->address, e->bytes, handle, e->flags);
    return Call().Map(e->address, e->bytes, e->offset, handle, e->flags);
  }
  if (const auto* e = std::get_if<Unmapped>(&event.body)) {
    if (e->allocation) return {};
    return Call().Unmap(e->address, e->bytes);
  }
  if (const auto* e = std::get_if<AccessSet>(&event.body)) {
    if (e->allocation) return {};
    const auto m = recorded_.MappingAt(e->address);
    if (m != recorded_.mappings.end() && IsMulticast(m->second.allocation)) return {};
    return Call().SetAccess(e->address, e->bytes, e->access);
  }
  return {};
}

Status RerunSession::Perform(const Step& step) {
  const auto* const a = Recorded(step.allocation);
  if (a != nullptr && a->multicast) return {};  // left out, as all of a multicast object
  ++counts_.calls;
  AMEM_ASSIGN(const auto target, performer_.TargetOf(step));
  AMEM_ASSIGN(const auto handle, performer_.Perform(step, target));
  if (handle) handles_[step.allocation] = handle;
  if (handle && target.stands_in) stand_ins_[step.allocation] = *target.stands_in;
  if (step.kind == StepKind::kReleaseImport || step.kind == StepKind::kReleaseOwn) handles_.erase(step.allocation);
  return {};
}

Result<SharedAllocation> RerunSession::Shared(const Step& import) {
  const auto* const a = Recorded(import.allocation);
  if (a == nullptr || !a->remote) return Status{Code::kNotFound, ToText(import.allocation) + " is not imported"};
  AMEM_ASSIGN(auto descriptor, export_remote_(*a->remote, *a));
  return SharedAllocation{{a->bytes, a->properties, {}}, std::move(descriptor)};
}

Status RerunSession::Compare() {
  AMEM_TRY(CheckInvariants(recorded_));
  for (const auto& [id, a] : recorded_.allocations) {
    if (recorded_.StepUnderWay(id, a)) continue;  // of another pool's pause or resume: the driver is ahead by that step
    if (a.multicast || (a.resident && !a.placed()) == static_cast<bool>(HandleOf(id))) continue;
    return {Code::kInvalid, ToText(id) + (a.resident && !a.placed() ? " should have memory, and the driver has none for it"
                                                                    : " should have no memory, and the driver still has some")};
  }
  for (const auto& [address, m] : recorded_.mappings) {
    const auto* const a = Recorded(m.allocation);
    if (a != nullptr && recorded_.StepUnderWay(m.allocation, *a)) continue;
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
    const auto piece = driver_->MappingAt(address + mapped);
    if (!piece.ok() || piece->address != address + mapped) return false;
    mapped += piece->bytes;
  }
  return mapped == bytes;
}

}  // namespace amem
