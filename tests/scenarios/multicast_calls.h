// NCCL's calls on multicast objects, for tests whose ranks have a session and a simulator: each is made on the driver and
// recorded as ncclpatch/intercept/multicast.cpp does it.
#pragma once

#include "replay/driver/simulator/simulator.h"
#include "replay/session/session.h"

namespace amem::test {

class MulticastCalls {
 public:
  MulticastCalls(Session& session, Simulator& simulator) : session_(session), simulator_(simulator) {}

  Result<AllocationId> Create(Bytes bytes, std::uint32_t devices) {
    const auto gate = session_.calls().EnterCall();
    const auto made = simulator_.CreateMulticast({bytes, devices, 1, 0});
    if (!made.ok()) return made.status();
    return session_.nccl().NoteMulticast({{}, bytes, devices, 1, 0, *made});
  }
  Status AddDevice(AllocationId object, DeviceOrdinal device) {
    const auto gate = session_.calls().EnterCall();
    AMEM_TRY(simulator_.AddDevice(session_.nccl().Backing(object).first, device));
    session_.records().Note(MulticastDeviceAdded{object, device});
    return {};
  }
  Status Bind(AllocationId object, Bytes offset, AllocationId memory, Bytes memory_offset, Bytes bytes) {
    const auto gate = session_.calls().EnterCall();
    session_.nccl().PrepareBind(memory);
    const auto [handle, begin] = session_.nccl().Backing(memory);
    AMEM_TRY(simulator_.BindMemory(session_.nccl().Backing(object).first, offset, handle, begin + memory_offset, bytes));
    session_.records().Note(MulticastBound{object, offset, memory, memory_offset, bytes, {}});
    return {};
  }
  Status BindAddress(AllocationId object, Bytes offset, Address address, Bytes bytes) {
    const auto gate = session_.calls().EnterCall();
    AMEM_TRY(simulator_.BindAddress(session_.nccl().Backing(object).first, offset, address, bytes));
    session_.records().Note(MulticastBound{object, offset, {}, 0, bytes, address});
    return {};
  }
  Status Unbind(AllocationId object, DeviceOrdinal device, Bytes offset, Bytes bytes) {
    const auto gate = session_.calls().EnterCall();
    if (session_.nccl().ForgetUnbound(object, device, offset, bytes)) return {};
    AMEM_TRY(simulator_.Unbind(session_.nccl().Backing(object).first, device, offset, bytes));
    session_.records().Note(MulticastUnbound{object, device, offset, bytes});
    return {};
  }

 private:
  Session& session_;
  Simulator& simulator_;
};

}  // namespace amem::test
