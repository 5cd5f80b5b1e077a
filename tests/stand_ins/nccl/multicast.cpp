// NVLS: a multicast object of all ranks, to which each binds memory of its own, in NCCL's order of calls.
#include <cstdlib>

#include "tests/stand_ins/nccl/nccl.h"

namespace stand_in {
namespace {

constexpr size_t kBytes = size_t{4} << 20;

std::uint64_t& Count(const Comm& comm) { return *reinterpret_cast<std::uint64_t*>(comm.multicast.memory.address + kBytes - 8); }

}  // namespace

Result ConnectMulticast(Comm& comm) {
  if (std::getenv("STAND_IN_NVLS") == nullptr || Legacy() || comm.ranks < 2) return kSuccess;
  Driver& cu = *comm.cu;
  Multicast& multicast = comm.multicast;
  if (comm.rank == 0) {
    CUmulticastObjectProp properties{};
    properties.numDevices = static_cast<unsigned>(comm.ranks);
    properties.size = kBytes;
    properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CU(cu.multicast_create(&multicast.object, &properties));
    comm.offered = multicast.object;
    comm.offered_bytes = kBytes;
  }
  TRY(Meet(comm));
  if (comm.rank != 0) TRY(ImportFrom(comm, 0, kOffered, multicast.object));
  CU(cu.multicast_add(multicast.object, comm.device));
  TRY(Meet(comm));  // memory can be bound once all devices are there
  CUmemGenericAllocationHandle handle = 0;
  multicast.memory.bytes = kBytes;
  CU(cu.reserve(&multicast.memory.address, kBytes, 0, 0, 0));  // before there is memory for it, as only here in NCCL
  TRY(Create(cu, comm.device, kBytes, handle));
  TRY(MapThere(cu, comm.device, handle, kBytes, multicast.memory.address));
  CU(cu.clear(multicast.memory.address, 0, kBytes, nullptr));
  CU(cu.multicast_bind(multicast.object, 0, handle, 0, kBytes, 0));
  TRY(MapAt(cu, comm.device, multicast.object, kBytes, 0, multicast.address));
  return Meet(comm);
}

Result CountLaunch(Comm& comm) {
  if (comm.multicast.memory.address == 0) return kSuccess;
  return ++Count(comm) == ++comm.multicast.launches ? kSuccess : kInternal;
}

Result FreeMulticast(Comm& comm) {
  Driver& cu = *comm.cu;
  Multicast& multicast = comm.multicast;
  if (multicast.address != 0) {
    CU(cu.unmap(multicast.address, kBytes));
    CU(cu.free_range(multicast.address, kBytes));
    CU(cu.multicast_unbind(multicast.object, comm.device, 0, kBytes));
  }
  if (multicast.object != 0) CU(cu.release(multicast.object));
  return multicast.memory.address == 0 ? kSuccess : Free(cu, multicast.memory);
}

}  // namespace stand_in
