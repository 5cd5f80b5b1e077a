#include <utility>

#include "journal/codec_values.h"
#include "journal/journal.capnp.h"

// Every event's fields, once for writing and once for reading. Each function takes the C++ struct apart with a structured
// binding: a field that is added to the struct and forgotten here does not compile.
namespace amem::codec {

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
  for (unsigned i = 0; i < uuids.size(); ++i) PutText(uuids.init(i, static_cast<unsigned>(gpu_uuids[i].size())), gpu_uuids[i]);
  to.setGroup(group);
  to.setRank(rank);
  to.setRealtimeNs(realtime_ns);
  to.setMonotonicNs(monotonic_ns);
  AMEM_PUT_TEXT(to, Layout, layout);
  AMEM_PUT_TEXT(to, Content, content);
}
SessionOpened Get(wire::SessionOpened::Reader from) {
  std::vector<std::string> uuids;
  for (const auto uuid : from.getGpuUuids()) uuids.push_back(GetText(uuid));
  return {SessionId{from.getSession()},
          GetText(from.getHost()),
          from.getPid(),
          GetText(from.getBootId()),
          GetText(from.getAmemVersion()),
          GetText(from.getDriverVersion()),
          GetText(from.getNcclVersion()),
          std::move(uuids),
          from.getGroup(),
          from.getRank(),
          from.getRealtimeNs(),
          from.getMonotonicNs(),
          GetText(from.getLayout()),
          GetText(from.getContent())};
}
void Put(wire::SessionClosed::Builder to, const SessionClosed& from) {
  const auto& [reason] = from;
  AMEM_PUT_TEXT(to, Reason, reason);
}
SessionClosed Get(wire::SessionClosed::Reader from) { return {GetText(from.getReason())}; }
void Put(wire::SessionBroken::Builder to, const SessionBroken& from) {
  const auto& [reason] = from;
  AMEM_PUT_TEXT(to, Reason, reason);
}
SessionBroken Get(wire::SessionBroken::Reader from) { return {GetText(from.getReason())}; }
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
  return {GetText(from.getPath()), GetText(from.getBuildId()), GetText(from.getWay()), GetText(from.getNcclVersion()),
          from.getLoadAddress()};
}
void Put(wire::DriverSymbolBound::Builder to, const DriverSymbolBound& from) {
  const auto& [name, cuda_version, replaced] = from;
  AMEM_PUT_TEXT(to, Name, name);
  to.setCudaVersion(cuda_version);
  to.setReplaced(replaced);
}
DriverSymbolBound Get(wire::DriverSymbolBound::Reader from) {
  return {GetText(from.getName()), from.getCudaVersion(), from.getReplaced()};
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
          Address{from.getHint()},           from.getFlags(), GetSite(from.getSite()),
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
  PutProperties(to.initProperties(), properties);
  to.setFlags(flags);
  to.setHandle(handle.value);
  AMEM_PUT_SITE(to, site);
  to.setCreated(created.value);
}
AllocationCreated Get(wire::AllocationCreated::Reader from) {
  return {AllocationId{from.getAllocation()}, from.getBytes(),         GetProperties(from.getProperties()), from.getFlags(),
          DriverHandle{from.getHandle()},     GetSite(from.getSite()), SequenceNumber{from.getCreated()}};
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
  for (unsigned i = 0; i < list.size(); ++i) PutAccess(list[i], access[i]);
  to.setAllocation(allocation.value);
}
AccessSet Get(wire::AccessSet::Reader from) {
  std::vector<AccessDescriptor> access;
  for (const auto a : from.getAccess()) access.push_back(GetAccess(a));
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
  PutProperties(to.initProperties(), properties);
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
          GetProperties(from.getProperties()),
          from.getHandleType(),
          DriverHandle{from.getHandle()},
          GetSite(from.getSite()),
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
  return {SessionId{from.getPeer()}, GetText(from.getHost()), from.getPid(), from.getGroup(), from.getRank()};
}
void Put(wire::PeerLost::Builder to, const PeerLost& from) {
  const auto& [peer, reason] = from;
  to.setPeer(peer.value);
  AMEM_PUT_TEXT(to, Reason, reason);
}
PeerLost Get(wire::PeerLost::Reader from) { return {SessionId{from.getPeer()}, GetText(from.getReason())}; }

}  // namespace amem::codec
