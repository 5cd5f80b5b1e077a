#include "journal/codec.h"

#include <capnp/message.h>
#include <kj/exception.h>

#include <cstring>
#include <exception>

#include "journal/journal.capnp.h"

namespace amem {
namespace {

// Every event's fields, once for writing and once for reading. Each function takes the C++ struct apart with a structured
// binding: a field that is added to the struct and forgotten here does not compile.

void Put(capnp::Text::Builder to, const std::string& from) { std::memcpy(to.begin(), from.data(), from.size()); }

// An empty text is left out: that is its default.
#define AMEM_PUT_TEXT(builder, Name, value)                                                        \
  do {                                                                                             \
    if (!(value).empty()) Put((builder).init##Name(static_cast<unsigned>((value).size())), value); \
  } while (false)

std::string Get(capnp::Text::Reader from) { return {from.begin(), from.size()}; }

// A message can claim a list of more elements than it has bytes; memory is not spent on such a claim.
[[noreturn]] void Reject(std::string message) { throw Status{Code::kCorrupt, std::move(message)}; }

template <class Enum>
Enum GetEnum(std::uint8_t value, Enum last, const char* what) {
  if (value > static_cast<std::uint8_t>(last))
    Reject("it has " + std::string(what) + " " + std::to_string(value) + ", and this build knows none above " +
           std::to_string(static_cast<unsigned>(last)));
  return static_cast<Enum>(value);
}
CycleKind GetCycleKind(std::uint8_t v) { return GetEnum(v, CycleKind::kResume, "cycle kind"); }
PhaseKind GetPhaseKind(std::uint8_t v) { return GetEnum(v, PhaseKind::kResumeOpen, "phase kind"); }
StepKind GetStepKind(std::uint8_t v) { return GetEnum(v, StepKind::kBeginRestore, "step kind"); }
Code GetCode(std::uint8_t v) { return GetEnum(v, Code::kBroken, "error class"); }

template <class Enum>
std::uint8_t Number(Enum value) {
  static_assert(sizeof(Enum) == 1);
  return static_cast<std::uint8_t>(value);
}

// ---- values --------------------------------------------------------------------------------------------------------------

void Put(wire::CallSite::Builder to, const CallSite& from) {
  static_assert(std::tuple_size_v<decltype(from.frames)> == 5, "journal.capnp has five frames");
  const auto& [frames] = from;
  to.setFrame0(frames[0]);
  to.setFrame1(frames[1]);
  to.setFrame2(frames[2]);
  to.setFrame3(frames[3]);
  to.setFrame4(frames[4]);
}
CallSite Get(wire::CallSite::Reader from) {
  return {{from.getFrame0(), from.getFrame1(), from.getFrame2(), from.getFrame3(), from.getFrame4()}};
}
// Most events that carry one have it; where it is all zero nothing is written.
#define AMEM_PUT_SITE(builder, value)                            \
  do {                                                           \
    if ((value) != CallSite{}) Put((builder).initSite(), value); \
  } while (false)

void Put(wire::AllocationProperties::Builder to, const AllocationProperties& from) {
  const auto& [type, handle_types, location, compression, gpu_direct_rdma, usage, reserved] = from;
  to.setType(type);
  to.setHandleTypes(handle_types);
  to.setLocationType(static_cast<std::uint32_t>(location.type));
  to.setLocationId(location.id);
  to.setCompression(compression);
  to.setGpuDirectRdma(gpu_direct_rdma);
  to.setUsage(usage);
  to.setReserved(reserved);
}
AllocationProperties Get(wire::AllocationProperties::Reader from) {
  return {from.getType(),
          from.getHandleTypes(),
          Location{static_cast<LocationType>(from.getLocationType()), from.getLocationId()},
          from.getCompression(),
          from.getGpuDirectRdma(),
          from.getUsage(),
          from.getReserved()};
}
void Put(wire::AccessDescriptor::Builder to, const AccessDescriptor& from) {
  const auto& [location, flags] = from;
  const auto& [type, id] = location;
  to.setLocationType(static_cast<std::uint32_t>(type));
  to.setLocationId(id);
  to.setFlags(flags);
}
AccessDescriptor Get(wire::AccessDescriptor::Reader from) {
  return {Location{static_cast<LocationType>(from.getLocationType()), from.getLocationId()}, from.getFlags()};
}
void Put(wire::Step::Builder to, const Step& from) {
  const auto& [kind, allocation, address, bytes, device] = from;
  to.setKind(Number(kind));
  to.setAllocation(allocation.value);
  to.setAddress(address.value);
  to.setBytes(bytes);
  to.setDevice(device.value);
}
Step Get(wire::Step::Reader from) {
  return {GetStepKind(from.getKind()), AllocationId{from.getAllocation()}, Address{from.getAddress()}, from.getBytes(),
          DeviceOrdinal{from.getDevice()}};
}

// ---- life of a session ---------------------------------------------------------------------------------------------------

void Put(wire::SessionOpened::Builder to, const SessionOpened& from) {
  const auto& [session, host, pid, boot_id, amem_version, driver_version, nccl_version, gpu_uuids, group, rank, realtime_ns,
               monotonic_ns, layout, content] = from;
  to.setSession(session.value);
  AMEM_PUT_TEXT(to, Host, host);
  to.setPid(pid);
  AMEM_PUT_TEXT(to, BootId, boot_id);
  AMEM_PUT_TEXT(to, AmemVersion, amem_version);
  AMEM_PUT_TEXT(to, DriverVersion, driver_version);
  AMEM_PUT_TEXT(to, NcclVersion, nccl_version);
  auto uuids = to.initGpuUuids(static_cast<unsigned>(gpu_uuids.size()));
  for (unsigned i = 0; i < uuids.size(); ++i) Put(uuids.init(i, static_cast<unsigned>(gpu_uuids[i].size())), gpu_uuids[i]);
  to.setGroup(group);
  to.setRank(rank);
  to.setRealtimeNs(realtime_ns);
  to.setMonotonicNs(monotonic_ns);
  AMEM_PUT_TEXT(to, Layout, layout);
  AMEM_PUT_TEXT(to, Content, content);
}
SessionOpened Get(wire::SessionOpened::Reader from) {
  std::vector<std::string> uuids;
  for (const auto uuid : from.getGpuUuids()) uuids.push_back(Get(uuid));
  return {SessionId{from.getSession()},
          Get(from.getHost()),
          from.getPid(),
          Get(from.getBootId()),
          Get(from.getAmemVersion()),
          Get(from.getDriverVersion()),
          Get(from.getNcclVersion()),
          std::move(uuids),
          from.getGroup(),
          from.getRank(),
          from.getRealtimeNs(),
          from.getMonotonicNs(),
          Get(from.getLayout()),
          Get(from.getContent())};
}
void Put(wire::SessionClosed::Builder to, const SessionClosed& from) {
  const auto& [reason] = from;
  AMEM_PUT_TEXT(to, Reason, reason);
}
SessionClosed Get(wire::SessionClosed::Reader from) { return {Get(from.getReason())}; }
void Put(wire::SessionBroken::Builder to, const SessionBroken& from) {
  const auto& [reason] = from;
  AMEM_PUT_TEXT(to, Reason, reason);
}
SessionBroken Get(wire::SessionBroken::Reader from) { return {Get(from.getReason())}; }
void Put(wire::GroupChanged::Builder to, const GroupChanged& from) {
  const auto& [group] = from;
  to.setGroup(group);
}
GroupChanged Get(wire::GroupChanged::Reader from) { return {from.getGroup()}; }
void Put(wire::LibraryAttached::Builder to, const LibraryAttached& from) {
  const auto& [path, build_id, way, nccl_version, load_address] = from;
  AMEM_PUT_TEXT(to, Path, path);
  AMEM_PUT_TEXT(to, BuildId, build_id);
  AMEM_PUT_TEXT(to, Way, way);
  AMEM_PUT_TEXT(to, NcclVersion, nccl_version);
  to.setLoadAddress(load_address);
}
LibraryAttached Get(wire::LibraryAttached::Reader from) {
  return {Get(from.getPath()), Get(from.getBuildId()), Get(from.getWay()), Get(from.getNcclVersion()), from.getLoadAddress()};
}
void Put(wire::DriverSymbolBound::Builder to, const DriverSymbolBound& from) {
  const auto& [name, cuda_version, replaced] = from;
  AMEM_PUT_TEXT(to, Name, name);
  to.setCudaVersion(cuda_version);
  to.setReplaced(replaced);
}
DriverSymbolBound Get(wire::DriverSymbolBound::Reader from) {
  return {Get(from.getName()), from.getCudaVersion(), from.getReplaced()};
}

// ---- address ranges, allocations, mappings -------------------------------------------------------------------------------

void Put(wire::RangeReserved::Builder to, const RangeReserved& from) {
  const auto& [address, bytes, alignment, hint, flags, site, allocation] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
  to.setAlignment(alignment);
  to.setHint(hint.value);
  to.setFlags(flags);
  AMEM_PUT_SITE(to, site);
  to.setAllocation(allocation.value);
}
RangeReserved Get(wire::RangeReserved::Reader from) {
  return {Address{from.getAddress()},        from.getBytes(), from.getAlignment(),
          Address{from.getHint()},           from.getFlags(), Get(from.getSite()),
          AllocationId{from.getAllocation()}};
}
void Put(wire::RangeFreed::Builder to, const RangeFreed& from) {
  const auto& [address, bytes, allocation] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
  to.setAllocation(allocation.value);
}
RangeFreed Get(wire::RangeFreed::Reader from) {
  return {Address{from.getAddress()}, from.getBytes(), AllocationId{from.getAllocation()}};
}
void Put(wire::AllocationCreated::Builder to, const AllocationCreated& from) {
  const auto& [allocation, bytes, properties, flags, handle, site, created] = from;
  to.setAllocation(allocation.value);
  to.setBytes(bytes);
  Put(to.initProperties(), properties);
  to.setFlags(flags);
  to.setHandle(handle.value);
  AMEM_PUT_SITE(to, site);
  to.setCreated(created.value);
}
AllocationCreated Get(wire::AllocationCreated::Reader from) {
  return {AllocationId{from.getAllocation()}, from.getBytes(),     Get(from.getProperties()),        from.getFlags(),
          DriverHandle{from.getHandle()},     Get(from.getSite()), SequenceNumber{from.getCreated()}};
}
void Put(wire::AllocationRetained::Builder to, const AllocationRetained& from) {
  const auto& [allocation, address] = from;
  to.setAllocation(allocation.value);
  to.setAddress(address.value);
}
AllocationRetained Get(wire::AllocationRetained::Reader from) {
  return {AllocationId{from.getAllocation()}, Address{from.getAddress()}};
}
void Put(wire::AllocationReleased::Builder to, const AllocationReleased& from) {
  const auto& [allocation] = from;
  to.setAllocation(allocation.value);
}
AllocationReleased Get(wire::AllocationReleased::Reader from) { return {AllocationId{from.getAllocation()}}; }
void Put(wire::Mapped::Builder to, const Mapped& from) {
  const auto& [address, bytes, offset, allocation, flags] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
  to.setOffset(offset);
  to.setAllocation(allocation.value);
  to.setFlags(flags);
}
Mapped Get(wire::Mapped::Reader from) {
  return {Address{from.getAddress()}, from.getBytes(), from.getOffset(), AllocationId{from.getAllocation()}, from.getFlags()};
}
void Put(wire::Unmapped::Builder to, const Unmapped& from) {
  const auto& [address, bytes, allocation] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
  to.setAllocation(allocation.value);
}
Unmapped Get(wire::Unmapped::Reader from) {
  return {Address{from.getAddress()}, from.getBytes(), AllocationId{from.getAllocation()}};
}
void Put(wire::AccessSet::Builder to, const AccessSet& from) {
  const auto& [address, bytes, access, allocation] = from;
  to.setAddress(address.value);
  to.setBytes(bytes);
  auto list = to.initAccess(static_cast<unsigned>(access.size()));
  for (unsigned i = 0; i < list.size(); ++i) Put(list[i], access[i]);
  to.setAllocation(allocation.value);
}
AccessSet Get(wire::AccessSet::Reader from) {
  std::vector<AccessDescriptor> access;
  for (const auto a : from.getAccess()) access.push_back(Get(a));
  return {Address{from.getAddress()}, from.getBytes(), std::move(access), AllocationId{from.getAllocation()}};
}

// ---- sharing -------------------------------------------------------------------------------------------------------------

void Put(wire::Exported::Builder to, const Exported& from) {
  const auto& [allocation, handle_type] = from;
  to.setAllocation(allocation.value);
  to.setHandleType(handle_type);
}
Exported Get(wire::Exported::Reader from) { return {AllocationId{from.getAllocation()}, from.getHandleType()}; }
void Put(wire::Imported::Builder to, const Imported& from) {
  const auto& [allocation, remote, bytes, properties, handle_type, handle, site, created] = from;
  const auto& [owner, owners_allocation] = remote;
  to.setAllocation(allocation.value);
  auto there = to.initRemote();
  there.setOwner(owner.value);
  there.setAllocation(owners_allocation.value);
  to.setBytes(bytes);
  Put(to.initProperties(), properties);
  to.setHandleType(handle_type);
  to.setHandle(handle.value);
  AMEM_PUT_SITE(to, site);
  to.setCreated(created.value);
}
Imported Get(wire::Imported::Reader from) {
  const auto there = from.getRemote();
  return {AllocationId{from.getAllocation()},
          RemoteAllocation{SessionId{there.getOwner()}, AllocationId{there.getAllocation()}},
          from.getBytes(),
          Get(from.getProperties()),
          from.getHandleType(),
          DriverHandle{from.getHandle()},
          Get(from.getSite()),
          SequenceNumber{from.getCreated()}};
}
void Put(wire::ReferenceAdded::Builder to, const ReferenceAdded& from) {
  const auto& [allocation, by, as] = from;
  to.setAllocation(allocation.value);
  to.setBy(by.value);
  to.setAs(as.value);
}
ReferenceAdded Get(wire::ReferenceAdded::Reader from) {
  return {AllocationId{from.getAllocation()}, SessionId{from.getBy()}, AllocationId{from.getAs()}};
}
void Put(wire::ReferenceDropped::Builder to, const ReferenceDropped& from) {
  const auto& [allocation, by, as] = from;
  to.setAllocation(allocation.value);
  to.setBy(by.value);
  to.setAs(as.value);
}
ReferenceDropped Get(wire::ReferenceDropped::Reader from) {
  return {AllocationId{from.getAllocation()}, SessionId{from.getBy()}, AllocationId{from.getAs()}};
}
void Put(wire::PeerConnected::Builder to, const PeerConnected& from) {
  const auto& [peer, host, pid, group, rank] = from;
  to.setPeer(peer.value);
  AMEM_PUT_TEXT(to, Host, host);
  to.setPid(pid);
  to.setGroup(group);
  to.setRank(rank);
}
PeerConnected Get(wire::PeerConnected::Reader from) {
  return {SessionId{from.getPeer()}, Get(from.getHost()), from.getPid(), from.getGroup(), from.getRank()};
}
void Put(wire::PeerLost::Builder to, const PeerLost& from) {
  const auto& [peer, reason] = from;
  to.setPeer(peer.value);
  AMEM_PUT_TEXT(to, Reason, reason);
}
PeerLost Get(wire::PeerLost::Reader from) { return {SessionId{from.getPeer()}, Get(from.getReason())}; }

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
  return {Address{from.getAddress()}, from.getBytes(),    AllocationId{from.getBacking()},
          from.getOffset(),           Get(from.getWhy()), Get(from.getSite())};
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
Registered Get(wire::Registered::Reader from) { return {Address{from.getAddress()}, from.getBytes(), Get(from.getHow())}; }
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
PassedThrough Get(wire::PassedThrough::Reader from) { return {Get(from.getName()), Get(from.getDetail()), from.getResult()}; }

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
  Put(to.initStep(), step);
}
StepBegun Get(wire::StepBegun::Reader from) { return {Get(from.getStep())}; }
void Put(wire::StepDone::Builder to, const StepDone& from) {
  const auto& [step] = from;
  Put(to.initStep(), step);
}
StepDone Get(wire::StepDone::Reader from) { return {Get(from.getStep())}; }
void Put(wire::StepFailed::Builder to, const StepFailed& from) {
  const auto& [step, code, driver_result, message] = from;
  Put(to.initStep(), step);
  to.setCode(Number(code));
  to.setDriverResult(driver_result);
  AMEM_PUT_TEXT(to, Message, message);
}
StepFailed Get(wire::StepFailed::Reader from) {
  return {Get(from.getStep()), GetCode(from.getCode()), from.getDriverResult(), Get(from.getMessage())};
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
  return {GetPhaseKind(from.getPhase()), from.getPassed(), SessionId{from.getCulprit()}, Get(from.getMessage())};
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
  return {GetCycleKind(from.getKind()), from.getCycle(), from.getUndone(), Get(from.getMessage())};
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

// ---- the union -----------------------------------------------------------------------------------------------------------

// clang-format off
#define AMEM_EVENT_KINDS(X)                                                                                                    \
  X(SessionOpened, SESSION_OPENED) X(SessionClosed, SESSION_CLOSED) X(SessionBroken, SESSION_BROKEN)                           \
  X(GroupChanged, GROUP_CHANGED) X(LibraryAttached, LIBRARY_ATTACHED) X(DriverSymbolBound, DRIVER_SYMBOL_BOUND)                \
  X(RangeReserved, RANGE_RESERVED) X(RangeFreed, RANGE_FREED) X(AllocationCreated, ALLOCATION_CREATED)                         \
  X(AllocationRetained, ALLOCATION_RETAINED) X(AllocationReleased, ALLOCATION_RELEASED) X(Mapped, MAPPED)                      \
  X(Unmapped, UNMAPPED) X(AccessSet, ACCESS_SET) X(Exported, EXPORTED) X(Imported, IMPORTED)                                   \
  X(ReferenceAdded, REFERENCE_ADDED) X(ReferenceDropped, REFERENCE_DROPPED) X(PeerConnected, PEER_CONNECTED)                   \
  X(PeerLost, PEER_LOST) X(HostAllocated, HOST_ALLOCATED) X(HostFreed, HOST_FREED) X(LegacyAllocated, LEGACY_ALLOCATED)        \
  X(LegacyFreed, LEGACY_FREED) X(LegacyExported, LEGACY_EXPORTED) X(LegacyImported, LEGACY_IMPORTED)                           \
  X(LegacyClosed, LEGACY_CLOSED) X(AsyncAllocated, ASYNC_ALLOCATED) X(AsyncFreed, ASYNC_FREED)                                 \
  X(MulticastCreated, MULTICAST_CREATED) X(MulticastDeviceAdded, MULTICAST_DEVICE_ADDED) X(MulticastBound, MULTICAST_BOUND)    \
  X(MulticastUnbound, MULTICAST_UNBOUND) X(Registered, REGISTERED) X(Deregistered, DEREGISTERED)                               \
  X(PassedThrough, PASSED_THROUGH) X(CycleBegun, CYCLE_BEGUN) X(StepBegun, STEP_BEGUN) X(StepDone, STEP_DONE)                  \
  X(StepFailed, STEP_FAILED) X(PhaseBegun, PHASE_BEGUN) X(PhaseDecided, PHASE_DECIDED) X(CycleDone, CYCLE_DONE)                \
  X(CycleFailed, CYCLE_FAILED) X(Condensed, CONDENSED) X(SlabOpened, SLAB_OPENED) X(Placed, PLACED) X(Backed, BACKED)          \
  X(PartCleared, PART_CLEARED)
// clang-format on

#define AMEM_COUNT(Type, NAME) +1
static_assert(0 AMEM_EVENT_KINDS(AMEM_COUNT) == kEventKinds, "a kind of event is missing here and in journal.capnp");
#undef AMEM_COUNT
#define AMEM_SAME_NUMBER(Type, NAME)                                                                                         \
  static_assert(std::is_same_v<std::variant_alternative_t<static_cast<std::size_t>(wire::Event::NAME), EventVariant>, Type>, \
                "the place of " #Type " in the schema's union is not its index in EventBody");
AMEM_EVENT_KINDS(AMEM_SAME_NUMBER)
#undef AMEM_SAME_NUMBER

struct PutBody {
  wire::Event::Builder to;
#define AMEM_PUT(Type, NAME) \
  void operator()(const Type& from) { Put(to.init##Type(), from); }
  AMEM_EVENT_KINDS(AMEM_PUT)
#undef AMEM_PUT
};

EventBody GetBody(wire::Event::Reader from) {
  switch (from.which()) {
#define AMEM_GET(Type, NAME) \
  case wire::Event::NAME:    \
    return Get(from.get##Type());
    AMEM_EVENT_KINDS(AMEM_GET)
#undef AMEM_GET
  }
  Reject("it is of kind " + std::to_string(static_cast<unsigned>(from.which())) + ", and this build knows " +
         std::to_string(kEventKinds) + " kinds: a newer AMem wrote it, read it with that one");
}

void Put(wire::Event::Builder to, const Event& from) {
  to.setSeq(from.seq.value);
  to.setTimeNs(from.time_ns);
  to.setThread(from.thread);
  std::visit(PutBody{to}, from.body);
}
void Put(wire::Journal::Builder to, const FileMeta& from) {
  const auto& [format, least_reader, session, pid, realtime_ns] = from;
  to.setFormat(format);
  to.setLeastReader(least_reader);
  to.setSession(session.value);
  to.setPid(pid);
  to.setRealtimeNs(realtime_ns);
}

constexpr std::size_t kScratchWords = 2048;

// Cap'n Proto does not look at bytes beyond the message, follows no pointer twice for ever, and reports by exception what does
// not fit the schema; no exception leaves here. What kj::Exception::what() would print is built with addr2line, in a process of
// its own, which is nothing to do to a host; getDescription() is only text.
template <class T, class Root, class Take>
Result<T> Parse(std::span<const std::byte> message, const Take& take) {
  if (message.empty() || message.size() % sizeof(capnp::word) != 0) {
    return Status{Code::kCorrupt, "it has " + std::to_string(message.size()) + " bytes, not a multiple of 8"};
  }
  try {
    const std::size_t words = message.size() / sizeof(capnp::word);
    std::vector<std::uint64_t> aligned;
    const void* start = message.data();
    if (reinterpret_cast<std::uintptr_t>(start) % alignof(std::uint64_t) != 0) {
      aligned.resize(words);
      std::memcpy(aligned.data(), start, message.size());
      start = aligned.data();
    }
    const kj::ArrayPtr<const capnp::word> segment(static_cast<const capnp::word*>(start), words);
    const kj::ArrayPtr<const capnp::word> segments[] = {segment};
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 2 * words + 64;  // every part is read once; bounds what a hostile message can make us build
    options.nestingLimit = 8;
    capnp::SegmentArrayMessageReader reader(kj::arrayPtr(segments, 1), options);
    return take(reader.getRoot<Root>());
  } catch (const Status& status) {
    return status;
  } catch (const kj::Exception& e) {
    return Status{Code::kCorrupt, std::string("it is no message of this schema: ") + e.getDescription().cStr()};
  } catch (const std::exception& e) {
    return Status{Code::kCorrupt, std::string("it cannot be decoded: ") + e.what()};
  }
}

}  // namespace

Encoder::Encoder() : scratch_(kScratchWords, 0) {}

template <class Root, class Fill>
std::span<const std::byte> Encoder::Build(const Fill& fill) {
  try {
    // The builder's destructor zeroes what it used of the first segment, so the bytes are copied out of it before.
    capnp::MallocMessageBuilder builder(kj::arrayPtr(reinterpret_cast<capnp::word*>(scratch_.data()), scratch_.size()),
                                        capnp::AllocationStrategy::FIXED_SIZE);
    fill(builder.initRoot<Root>());
    const auto segments = builder.getSegmentsForOutput();
    if (segments.size() == 1) {
      const std::size_t words = segments[0].size();
      if (large_.size() < words) large_.resize(kScratchWords);
      std::memcpy(large_.data(), segments[0].begin(), words * sizeof(capnp::word));
      return std::as_bytes(std::span(large_).first(words));
    }
    const std::size_t words = builder.getRoot<Root>().totalSize().wordCount + 1;
    if (large_.size() < words) large_.resize(words);
    std::fill_n(large_.begin(), words, 0);
    capnp::FlatMessageBuilder flat(kj::arrayPtr(reinterpret_cast<capnp::word*>(large_.data()), words));
    flat.setRoot(builder.getRoot<Root>().asReader());
    return std::as_bytes(std::span(large_).first(words));
  } catch (const kj::Exception&) {
  } catch (const std::exception&) {
  }
  // The scratch memory must be zero for the next one, whatever the builder had done.
  std::fill(scratch_.begin(), scratch_.end(), 0);
  return {};
}

std::span<const std::byte> Encoder::Encode(const Event& event) {
  return Build<wire::Event>([&](wire::Event::Builder to) { Put(to, event); });
}
std::span<const std::byte> Encoder::Encode(const FileMeta& meta) {
  return Build<wire::Journal>([&](wire::Journal::Builder to) { Put(to, meta); });
}

Result<Event> DecodeEvent(std::span<const std::byte> message) {
  return Parse<Event, wire::Event>(message, [](wire::Event::Reader from) {
    return Event{SequenceNumber{from.getSeq()}, from.getTimeNs(), from.getThread(), GetBody(from)};
  });
}

Result<FileMeta> DecodeMeta(std::span<const std::byte> message) {
  return Parse<FileMeta, wire::Journal>(message, [](wire::Journal::Reader from) {
    return FileMeta{from.getFormat(), from.getLeastReader(), SessionId{from.getSession()}, from.getPid(), from.getRealtimeNs()};
  });
}

}  // namespace amem
