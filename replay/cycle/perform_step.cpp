#include "replay/cycle/perform_step.h"

#include <fmt/format.h>
#include <unistd.h>

#include "statemachine/apply.h"
#include "statemachine/check.h"
#include "statemachine/plan.h"

namespace amem {

static Result<DriverHandle> WithoutHandle(Status status) {
  if (status.ok()) return DriverHandle{};
  return status;
}

Result<StepTarget> StepPerformer::TargetOf(const Step& step) const {
  StepTarget target;
  const State& state = side_.state();
  if (auto* const pool = FindIn(state.pools, pool_)) target.tag = pool->tag;
  if (step.allocation) {
    auto* const it = FindIn(state.allocations, step.allocation);
    if (it == nullptr) return Status{Code::kNotFound, ToText(step.allocation) + " does not exist"};
    target.handle = side_.HandleOf(step.allocation);
    target.bytes = it->bytes;
    target.properties = it->properties;
    target.flags = it->flags;
    if (step.kind != StepKind::kCreate)
      target.stands_in = side_.SubstituteOf(step.allocation);
    else if (state.IsSubstitute(step.allocation, *it))
      target.stands_in = step.device;
    if (it->rebuilt()) target.multicast = MulticastOf(step);
  }
  if (step.address && !step.region) {
    target.address = side_.Here(step.address);
    auto* const it = FindIn(state.mappings, step.address);
    if (it == nullptr) return Status{Code::kNotFound, "nothing is mapped at " + Hex(step.address)};
    target.mapping = *it;
  }
  return target;
}

MulticastTarget StepPerformer::MulticastOf(const Step& step) const {
  MulticastTarget target;
  const State& state = side_.state();
  auto* const object = FindIn(state.multicasts, step.allocation);
  if (object == nullptr) return target;
  target.devices = object->devices;
  target.lacks_device = step.kind == StepKind::kAddDevice && side_.Lacks(step.allocation, step.device);
  if (step.kind != StepKind::kBind || !object->bindings.contains(step.offset)) return target;
  for (const auto& [offset, b] : object->bindings)
    if (offset == step.offset && b.device == step.device) target.binding = b;
  auto* const memory = FindIn(state.allocations, target.binding.allocation);
  if (target.binding.address || memory == nullptr) return target;
  const Allocation& a = *memory;
  target.bound = side_.HandleOf(a.placed() ? a.slab : target.binding.allocation);
  target.bound_offset = target.binding.allocation_offset + (a.placed() ? a.offset : 0);
  return target;
}

Result<DriverHandle> StepPerformer::Perform(const Step& step, const StepTarget& target) {
  switch (step.kind) {
    case StepKind::kQuiesce:
      return WithoutHandle(driver_.Synchronize(step.device, side_.until(), [this] { return side_.IsOvertaken(); }));
    case StepKind::kCheckMemory:
      return WithoutHandle(
          CheckFreeMemory(driver_, step.device, step.bytes,
                          target.tag.empty() ? "call ncclResume again" : "resume tag " + target.tag + " again"));
    case StepKind::kUnmap:
      return WithoutHandle(driver_.Unmap(target.address, target.mapping.bytes));
    case StepKind::kReleaseImport:
    case StepKind::kReleaseOwn:
      return WithoutHandle(driver_.Release(target.handle));
    case StepKind::kCreate:
      return Create(step, target);
    case StepKind::kImport: {
      AMEM_ASSIGN(const auto shared, side_.Shared(step));
      return driver_.Import(shared.descriptor);
    }
    case StepKind::kMap:
      return WithoutHandle(Map(target));
    case StepKind::kSetAccess:
      return WithoutHandle(SetAccess(target));
    case StepKind::kAddDevice:
      // An owner that did not release its object hands out the same one, which has this session's devices already. Memory that
      // stands in for an object has no devices.
      if (!target.multicast || !target.multicast->lacks_device || target.stands_in) return DriverHandle{};
      return WithoutHandle(driver_.AddDevice(target.handle, step.device));
    case StepKind::kBind:
      return WithoutHandle(Bind(step, target));
    case StepKind::kUnbind:
      return WithoutHandle(driver_.Unbind(target.handle, step.device, step.offset, step.bytes));
    case StepKind::kVerify:
      return WithoutHandle(Verify());
    case StepKind::kScan:
    case StepKind::kSave:
    case StepKind::kBeginRestore:
    case StepKind::kRestore:
      return WithoutHandle(side_.Copy(step));
    case StepKind::kDrain:
    case StepKind::kDeregister:
    case StepKind::kRegister:
      return WithoutHandle(side_.OnNetwork(step));
  }
  return Status{Code::kInvalid, "no such step"};
}

Status CheckFreeMemory(Driver& driver, DeviceOrdinal device, Bytes needed, std::string_view then) {
  AMEM_ASSIGN(const auto memory, driver.Memory(device));
  if (memory.free >= needed) return {};
  const std::string holders = ToText(driver.MemoryHolders(device), ::getpid());
  return {Code::kOutOfMemory,
          fmt::format("device {} has {} free of {}, and {} must come back; free at least {} on it{} and {}", device.value,
                      RoundedBytes(memory.free), RoundedBytes(memory.total), RoundedUpBytes(needed),
                      RoundedUpBytes(needed - memory.free),
                      holders.empty() ? " (nvidia-smi lists the processes that hold memory)" : holders, then),
          cuda::kOutOfMemory};
}

Result<DriverHandle> StepPerformer::Create(const Step& step, const StepTarget& target) {
  const bool own_object = target.multicast && target.multicast->devices > 0;
  if (target.stands_in && own_object)  // importers get the piece too, and an imported one could not be exported
    return driver_.Create(SubstitutePiece(step.bytes), PropertiesOn(step.device), 0);
  if (target.stands_in) return CreateSubstitute(step);
  if (!target.multicast) return driver_.Create(target.bytes, target.properties, target.flags);
  return driver_.CreateMulticast({target.bytes, target.multicast->devices, target.properties.handle_types, target.flags});
}

Status StepPerformer::Bind(const Step& step, const StepTarget& target) {
  AMEM_CHECK(target.multicast.has_value(), step.allocation);
  const MulticastTarget& object = *target.multicast;
  if (object.binding.address)
    return driver_.BindAddress(target.handle, step.offset, side_.Here(object.binding.address), step.bytes);
  return driver_.BindMemory(target.handle, step.offset, object.bound, object.bound_offset, step.bytes);
}

// Nobody can expect contents of memory that stands in for a lost owner's, so a small piece is mapped repeatedly.
Result<DriverHandle> StepPerformer::CreateSubstitute(const Step& step) {
  const Bytes bytes = SubstitutePiece(step.bytes);
  UniqueFd& shared = pieces_[{step.device, bytes}];
  if (shared) return driver_.Import(shared);
  auto handle = driver_.Create(bytes, PropertiesOn(step.device), 0);
  if (!handle.ok()) return handle;
  auto exported = driver_.Export(*handle);
  if (!exported.ok()) exported = driver_.Export(*handle);  // if this fails, too, the next allocation gets a piece of its own
  if (exported.ok()) shared = *std::move(exported);
  return handle;
}

Status StepPerformer::Map(const StepTarget& target) {
  const Mapping& m = target.mapping;
  if (!target.stands_in) return driver_.Map(target.address, m.bytes, m.offset, target.handle, m.flags);
  return MapRepeatedly(driver_, target.address, m.bytes, target.handle, m.flags);
}

Status MapRepeatedly(Driver& driver, Address address, Bytes whole, DriverHandle piece, std::uint64_t flags) {
  const Bytes once = SubstitutePiece(whole);
  for (Bytes done = 0; done < whole; done += once) {
    Status mapped = driver.Map(address + done, once, 0, piece, flags);
    if (mapped.ok()) continue;
    if (done > 0) static_cast<void>(driver.Unmap(address, done));
    return mapped;
  }
  return {};
}

Status StepPerformer::SetAccess(const StepTarget& target) {
  AMEM_TRY(driver_.SetAccess(target.address, target.mapping.bytes, target.mapping.access));
  if (!target.stands_in) return {};
  std::optional<DeviceOrdinal> device;
  for (const AccessDescriptor& a : target.mapping.access) {
    if (a != ReadWrite(DeviceOrdinal{a.location.id})) continue;
    if (!device || a.location.id == target.stands_in->value) device = DeviceOrdinal{a.location.id};
  }
  if (!device) return {};
  // A kernel would take flags that the last user left there for its own.
  AMEM_TRY(driver_.Clear(*device, target.address, SubstitutePiece(target.bytes)));
  Status cleared = driver_.FinishCopies(*device, side_.until());
  // Nothing may be queued for an address that the undo will unmap.
  if (!cleared.ok()) static_cast<void>(driver_.FinishCopies(*device, side_.until()));
  return cleared;
}

// After a pause all memory must be gone. The whole state is checked only after a resume.
Status StepPerformer::Verify() const {
  const State& state = side_.state();
  if (state.LifecycleOf(pool_) == Lifecycle::kResuming) AMEM_TRY(CheckInvariants(state));
  for (const auto& [id, a] : state.allocations) {
    if (a.multicast || a.pool != pool_) continue;
    const bool has_handle = static_cast<bool>(side_.HandleOf(id));
    if (a.placed() && has_handle) return {Code::kInvalid, ToText(id) + " is part of a slab and has a driver handle"};
    if (a.placed() || a.resident == has_handle || state.StepUnderWay(id, a)) continue;
    return {Code::kInvalid, ToText(id) + (a.resident ? " should have a driver handle and has none"
                                                     : " has a driver handle and should have none")};
  }
  return {};
}

}  // namespace amem
