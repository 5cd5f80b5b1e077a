#include <utility>

#include "journal/codec_values.h"
#include "journal/journal.capnp.h"

// Every event's fields, once for writing and once for reading. Each function takes the C++ struct apart with a structured
// binding: a field that is added to the struct and forgotten here does not compile.
namespace amem::codec {

// ---- other kinds of memory -----------------------------------------------------------------------------------------------

void Put(wire::HostAllocated::Builder to, const HostAllocated& from) {
  const auto& [address, bytes, flags, registered] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
  to.setFlags(flags);
  to.setRegistered(registered);
}
HostAllocated Get(wire::HostAllocated::Reader from) {
  return {Address{from.getAddress()}, from.getBytes(), from.getFlags(), from.getRegistered()};
}
void Put(wire::HostFreed::Builder to, const HostFreed& from) {
  const auto& [address] = from;
  to.setAddress(address.value);
}
HostFreed Get(wire::HostFreed::Reader from) { return {Address{from.getAddress()}}; }
void Put(wire::LegacyAllocated::Builder to, const LegacyAllocated& from) {
  const auto& [address, bytes, backing, offset, why, site] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
  to.setBacking(backing.value);
  to.setOffset(offset);
  AMEM_PUT_TEXT(to, Why, why);
  AMEM_PUT_SITE(to, site);
}
LegacyAllocated Get(wire::LegacyAllocated::Reader from) {
  return {Address{from.getAddress()}, from.getBytes(),        AllocationId{from.getBacking()},
          from.getOffset(),           GetText(from.getWhy()), GetSite(from.getSite())};
}
void Put(wire::LegacyFreed::Builder to, const LegacyFreed& from) {
  const auto& [address] = from;
  to.setAddress(address.value);
}
LegacyFreed Get(wire::LegacyFreed::Reader from) { return {Address{from.getAddress()}}; }
void Put(wire::LegacyExported::Builder to, const LegacyExported& from) {
  const auto& [address, backing] = from;
  to.setAddress(address.value);
  to.setBacking(backing.value);
}
LegacyExported Get(wire::LegacyExported::Reader from) { return {Address{from.getAddress()}, AllocationId{from.getBacking()}}; }
void Put(wire::LegacyImported::Builder to, const LegacyImported& from) {
  const auto& [address, allocation] = from;
  to.setAddress(address.value);
  to.setAllocation(allocation.value);
}
LegacyImported Get(wire::LegacyImported::Reader from) {
  return {Address{from.getAddress()}, AllocationId{from.getAllocation()}};
}
void Put(wire::LegacyClosed::Builder to, const LegacyClosed& from) {
  const auto& [address] = from;
  to.setAddress(address.value);
}
LegacyClosed Get(wire::LegacyClosed::Reader from) { return {Address{from.getAddress()}}; }
void Put(wire::AsyncAllocated::Builder to, const AsyncAllocated& from) {
  const auto& [address, bytes] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
}
AsyncAllocated Get(wire::AsyncAllocated::Reader from) { return {Address{from.getAddress()}, from.getBytes()}; }
void Put(wire::AsyncFreed::Builder to, const AsyncFreed& from) {
  const auto& [address] = from;
  to.setAddress(address.value);
}
AsyncFreed Get(wire::AsyncFreed::Reader from) { return {Address{from.getAddress()}}; }
void Put(wire::MulticastCreated::Builder to, const MulticastCreated& from) {
  const auto& [allocation, bytes, devices, handle_types, flags, handle] = from;
  to.setAllocation(allocation.value);
  to.setBytes(bytes);
  to.setDevices(devices);
  to.setHandleTypes(handle_types);
  to.setFlags(flags);
  to.setHandle(handle.value);
}
MulticastCreated Get(wire::MulticastCreated::Reader from) {
  return {AllocationId{from.getAllocation()}, from.getBytes(), from.getDevices(), from.getHandleTypes(), from.getFlags(),
          DriverHandle{from.getHandle()}};
}
void Put(wire::MulticastDeviceAdded::Builder to, const MulticastDeviceAdded& from) {
  const auto& [multicast, device] = from;
  to.setMulticast(multicast.value);
  to.setDevice(device.value);
}
MulticastDeviceAdded Get(wire::MulticastDeviceAdded::Reader from) {
  return {AllocationId{from.getMulticast()}, DeviceOrdinal{from.getDevice()}};
}
void Put(wire::MulticastBound::Builder to, const MulticastBound& from) {
  const auto& [multicast, multicast_offset, allocation, allocation_offset, bytes, address] = from;
  to.setMulticast(multicast.value);
  to.setMulticastOffset(multicast_offset);
  to.setAllocation(allocation.value);
  to.setAllocationOffset(allocation_offset);
  to.setBytes(bytes);
  to.setAddress(address.value);
}
MulticastBound Get(wire::MulticastBound::Reader from) {
  return {AllocationId{from.getMulticast()}, from.getMulticastOffset(), AllocationId{from.getAllocation()},
          from.getAllocationOffset(),        from.getBytes(),           Address{from.getAddress()}};
}
void Put(wire::MulticastUnbound::Builder to, const MulticastUnbound& from) {
  const auto& [multicast, device, multicast_offset, bytes] = from;
  to.setMulticast(multicast.value);
  to.setDevice(device.value);
  to.setMulticastOffset(multicast_offset);
  to.setBytes(bytes);
}
MulticastUnbound Get(wire::MulticastUnbound::Reader from) {
  return {AllocationId{from.getMulticast()}, DeviceOrdinal{from.getDevice()}, from.getMulticastOffset(), from.getBytes()};
}
void Put(wire::Registered::Builder to, const Registered& from) {
  const auto& [address, bytes, how] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
  AMEM_PUT_TEXT(to, How, how);
}
Registered Get(wire::Registered::Reader from) { return {Address{from.getAddress()}, from.getBytes(), GetText(from.getHow())}; }
void Put(wire::Deregistered::Builder to, const Deregistered& from) {
  const auto& [address, bytes] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
}
Deregistered Get(wire::Deregistered::Reader from) { return {Address{from.getAddress()}, from.getBytes()}; }
void Put(wire::PassedThrough::Builder to, const PassedThrough& from) {
  const auto& [name, detail, result] = from;
  AMEM_PUT_TEXT(to, Name, name);
  AMEM_PUT_TEXT(to, Detail, detail);
  to.setResult(result);
}
PassedThrough Get(wire::PassedThrough::Reader from) {
  return {GetText(from.getName()), GetText(from.getDetail()), from.getResult()};
}

// ---- pause and resume ----------------------------------------------------------------------------------------------------

void Put(wire::CycleBegun::Builder to, const CycleBegun& from) {
  const auto& [kind, cycle, members] = from;
  to.setKind(Number(kind));
  to.setCycle(cycle);
  auto list = to.initMembers(static_cast<unsigned>(members.size()));
  for (unsigned i = 0; i < list.size(); ++i) list.set(i, members[i].value);
}
CycleBegun Get(wire::CycleBegun::Reader from) {
  std::vector<SessionId> members;
  for (const std::uint64_t m : from.getMembers()) members.emplace_back(m);
  return {GetCycleKind(from.getKind()), from.getCycle(), std::move(members)};
}
void Put(wire::StepBegun::Builder to, const StepBegun& from) {
  const auto& [step] = from;
  PutStep(to.initStep(), step);
}
StepBegun Get(wire::StepBegun::Reader from) { return {GetStep(from.getStep())}; }
void Put(wire::StepDone::Builder to, const StepDone& from) {
  const auto& [step] = from;
  PutStep(to.initStep(), step);
}
StepDone Get(wire::StepDone::Reader from) { return {GetStep(from.getStep())}; }
void Put(wire::StepFailed::Builder to, const StepFailed& from) {
  const auto& [step, code, driver_result, message] = from;
  PutStep(to.initStep(), step);
  to.setCode(Number(code));
  to.setDriverResult(driver_result);
  AMEM_PUT_TEXT(to, Message, message);
}
StepFailed Get(wire::StepFailed::Reader from) {
  return {GetStep(from.getStep()), GetCode(from.getCode()), from.getDriverResult(), GetText(from.getMessage())};
}
void Put(wire::PhaseBegun::Builder to, const PhaseBegun& from) {
  const auto& [phase] = from;
  to.setPhase(Number(phase));
}
PhaseBegun Get(wire::PhaseBegun::Reader from) { return {GetPhaseKind(from.getPhase())}; }
void Put(wire::PhaseDecided::Builder to, const PhaseDecided& from) {
  const auto& [phase, passed, culprit, message] = from;
  to.setPhase(Number(phase));
  to.setPassed(passed);
  to.setCulprit(culprit.value);
  AMEM_PUT_TEXT(to, Message, message);
}
PhaseDecided Get(wire::PhaseDecided::Reader from) {
  return {GetPhaseKind(from.getPhase()), from.getPassed(), SessionId{from.getCulprit()}, GetText(from.getMessage())};
}
void Put(wire::CycleDone::Builder to, const CycleDone& from) {
  const auto& [kind, cycle, duration_ns] = from;
  to.setKind(Number(kind));
  to.setCycle(cycle);
  to.setDurationNs(duration_ns);
}
CycleDone Get(wire::CycleDone::Reader from) { return {GetCycleKind(from.getKind()), from.getCycle(), from.getDurationNs()}; }
void Put(wire::CycleFailed::Builder to, const CycleFailed& from) {
  const auto& [kind, cycle, undone, message] = from;
  to.setKind(Number(kind));
  to.setCycle(cycle);
  to.setUndone(undone);
  AMEM_PUT_TEXT(to, Message, message);
}
CycleFailed Get(wire::CycleFailed::Reader from) {
  return {GetCycleKind(from.getKind()), from.getCycle(), from.getUndone(), GetText(from.getMessage())};
}
void Put(wire::Condensed::Builder to, const Condensed& from) {
  const auto& [through, next_allocation, cycles, totals] = from;
  to.setThrough(through.value);
  to.setNextAllocation(next_allocation);
  to.setCycles(cycles);
  auto list = to.initTotals(static_cast<unsigned>(totals.size()));
  for (unsigned i = 0; i < list.size(); ++i) list.set(i, totals[i]);
}
Condensed Get(wire::Condensed::Reader from) {
  std::vector<std::uint64_t> totals;
  for (const std::uint64_t n : from.getTotals()) totals.push_back(n);
  return {SequenceNumber{from.getThrough()}, from.getNextAllocation(), from.getCycles(), std::move(totals)};
}

// ---- slabs ---------------------------------------------------------------------------------------------------------------

void Put(wire::SlabOpened::Builder to, const SlabOpened& from) {
  const auto& [slab, address, dirty] = from;
  to.setSlab(slab.value);
  to.setAddress(address.value);
  auto list = to.initDirty(static_cast<unsigned>(dirty.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    list[i].setOffset(dirty[i].offset);
    list[i].setBytes(dirty[i].bytes);
  }
}
SlabOpened Get(wire::SlabOpened::Reader from) {
  SlabOpened to{AllocationId{from.getSlab()}, Address{from.getAddress()}, {}};
  for (const auto d : from.getDirty()) to.dirty.push_back({d.getOffset(), d.getBytes()});
  return to;
}
void Put(wire::Placed::Builder to, const Placed& from) {
  const auto& [allocation, slab, offset, touched] = from;
  to.setAllocation(allocation.value);
  to.setSlab(slab.value);
  to.setOffset(offset);
  to.setTouched(touched);
}
Placed Get(wire::Placed::Reader from) {
  return {AllocationId{from.getAllocation()}, AllocationId{from.getSlab()}, from.getOffset(), from.getTouched()};
}
void Put(wire::Backed::Builder to, const Backed& from) {
  const auto& [allocation, handle] = from;
  to.setAllocation(allocation.value);
  to.setHandle(handle.value);
}
Backed Get(wire::Backed::Reader from) { return {AllocationId{from.getAllocation()}, DriverHandle{from.getHandle()}}; }
void Put(wire::PartCleared::Builder to, const PartCleared& from) {
  const auto& [slab, offset, bytes] = from;
  to.setSlab(slab.value);
  to.setOffset(offset);
  to.setBytes(bytes);
}
PartCleared Get(wire::PartCleared::Reader from) { return {AllocationId{from.getSlab()}, from.getOffset(), from.getBytes()}; }

}  // namespace amem::codec
