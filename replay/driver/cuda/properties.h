// CUmemAllocationProp, and what AMem knows of one: all of it, so that memory that is made anew is as it was asked for.
#pragma once

#include <cuda.h>

#include <cstring>

#include "statemachine/types.h"

namespace amem {

inline CUmemAllocationProp ToCuda(const AllocationProperties& from) {
  CUmemAllocationProp to{};
  to.type = static_cast<CUmemAllocationType>(from.type);
  to.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(from.handle_types);
  to.location.type = static_cast<CUmemLocationType>(from.location.type);
  to.location.id = from.location.id;
  to.allocFlags.compressionType = from.compression;
  to.allocFlags.gpuDirectRDMACapable = from.gpu_direct_rdma;
  to.allocFlags.usage = from.usage;
  static_assert(sizeof(to.allocFlags.reserved) == sizeof(from.reserved));
  std::memcpy(to.allocFlags.reserved, &from.reserved, sizeof(from.reserved));
  return to;
}

inline AllocationProperties FromCuda(const CUmemAllocationProp& from) {
  AllocationProperties to;
  to.type = from.type;
  to.handle_types = from.requestedHandleTypes;
  to.location = {static_cast<LocationType>(from.location.type), from.location.id};
  to.compression = from.allocFlags.compressionType;
  to.gpu_direct_rdma = from.allocFlags.gpuDirectRDMACapable;
  to.usage = from.allocFlags.usage;
  std::memcpy(&to.reserved, from.allocFlags.reserved, sizeof(to.reserved));
  return to;
}

}  // namespace amem
