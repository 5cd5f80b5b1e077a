// Contexts of the driver, for AMem's own calls.
#pragma once

#include <cuda.h>

#include "ncclpatch/hook/hook.h"
#include "statemachine/types.h"

namespace amem {

CUcontext CurrentContext();  // this thread's; null: none
// Makes none. Null: this process has none.
CUcontext PrimaryContext(DeviceOrdinal device);
void ForgetPrimaryContext(DeviceOrdinal device);  // it is being destroyed

template <class Body>
CUresult InContext(CUcontext context, const Body& body) {
  static const auto push = AMEM_DRIVER(cuCtxPushCurrent);
  static const auto pop = AMEM_DRIVER(cuCtxPopCurrent);
  CUresult result = push(context);
  if (result != CUDA_SUCCESS) return result;
  result = body();
  pop(&context);
  return result;
}

}  // namespace amem
