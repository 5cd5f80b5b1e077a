// Calls by NCCL that read or write device memory: copies, fills, stream memory operations, kernels. None is under way when a
// pause begins, and none touches paused memory.
#include <algorithm>

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

// What each shape of arguments touches. A trailing stream does not matter.
constexpr auto kBoth = [](Touch touch, CUdeviceptr to, CUdeviceptr from, size_t bytes, auto...) {
  return touch(to, bytes) || touch(from, bytes);
};
constexpr auto kPeer = [](Touch touch, CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, auto...) {
  return touch(to, bytes) || touch(from, bytes);
};
constexpr auto kTo = [](Touch touch, CUdeviceptr to, const void*, size_t bytes, auto...) { return touch(to, bytes); };
constexpr auto kFrom = [](Touch touch, void*, CUdeviceptr from, size_t bytes, auto...) { return touch(from, bytes); };
constexpr auto kPlane = [](Touch touch, const CUDA_MEMCPY2D* copy, auto...) {
  if (copy == nullptr) return false;
  const auto side = [&](CUmemorytype type, CUdeviceptr base, size_t pitch, size_t y) {
    return (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED) &&
           touch(base, (y + copy->Height) * std::max(pitch, copy->WidthInBytes));
  };
  return side(copy->srcMemoryType, copy->srcDevice, copy->srcPitch, copy->srcY) ||
         side(copy->dstMemoryType, copy->dstDevice, copy->dstPitch, copy->dstY);
};
constexpr auto kVolume = [](Touch touch, const auto* copy, auto...) {
  if (copy == nullptr) return false;
  const auto side = [&](CUmemorytype type, CUdeviceptr base, size_t pitch, size_t height, size_t z) {
    return (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED) &&
           touch(base, (z + copy->Depth) * std::max(height, copy->Height) * std::max(pitch, copy->WidthInBytes));
  };
  return side(copy->srcMemoryType, copy->srcDevice, copy->srcPitch, copy->srcHeight, copy->srcZ) ||
         side(copy->dstMemoryType, copy->dstDevice, copy->dstPitch, copy->dstHeight, copy->dstZ);
};
constexpr auto kBatch = [](Touch touch, CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, auto...) {
  for (size_t i = 0; to != nullptr && from != nullptr && bytes != nullptr && i < count; ++i)
    if (touch(to[i], bytes[i]) || touch(from[i], bytes[i])) return true;
  return false;
};
// Shapes whose operands AMem cannot read: refused while anything is paused.
constexpr auto kAnything = [](auto...) { return true; };
template <std::size_t kWidth>
constexpr auto kFill = [](Touch touch, CUdeviceptr to, auto, size_t count, auto...) { return touch(to, count * kWidth); };
constexpr auto kFillPlane = [](Touch touch, CUdeviceptr to, size_t pitch, auto, size_t, size_t height, auto...) {
  return touch(to, pitch * height);
};

// The attributes' type is new in CUDA 12.8. AMem does not read them, so they are opaque here.
using MemcpyBatchV1 =
    Gated<kBatch, CUresult(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, void*, size_t*, size_t, size_t*, CUstream),
          "cuMemcpyBatchAsync", "cuMemcpyBatchAsync", 12080, 13000>;
using MemcpyBatch = Gated<kBatch, CUresult(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, void*, size_t*, size_t, CUstream),
                          "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", 13000>;
using MemcpyWithAttributes =
    Gated<kBoth, CUresult(CUdeviceptr, CUdeviceptr, size_t, void*, CUstream), "cuMemcpyWithAttributesAsync">;
using Memcpy3DWithAttributes = Gated<kAnything, CUresult(void*, unsigned long long, CUstream), "cuMemcpy3DWithAttributesAsync">;
using Memcpy3DBatchV1 = Gated<kAnything, CUresult(size_t, void*, size_t*, unsigned long long, CUstream), "cuMemcpy3DBatchAsync",
                              "cuMemcpy3DBatchAsync", 12080, 13000>;
using Memcpy3DBatch = Gated<kAnything, CUresult(size_t, void*, unsigned long long, CUstream), "cuMemcpy3DBatchAsync",
                            "cuMemcpy3DBatchAsync_v2", 13000>;

// A stream writes a flag in device memory, or waits for one.
template <class Value>
constexpr auto kFlag = [](Touch touch, CUstream, CUdeviceptr flag, auto...) { return touch(flag, sizeof(Value)); };

// An operation that AMem does not know is refused while anything is paused.
bool Touches(Touch touch, const CUstreamBatchMemOpParams& operation) {
  switch (operation.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      return touch(operation.writeValue.address, sizeof(cuuint64_t));
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
    case CU_STREAM_MEM_OP_BARRIER:
      return false;
    default:
      return true;
  }
}
constexpr auto kOperations = [](Touch touch, CUstream, unsigned count, const CUstreamBatchMemOpParams* operations, auto...) {
  return operations != nullptr &&
         std::any_of(operations, operations + count, [&](const auto& operation) { return Touches(touch, operation); });
};

// A kernel or graph may touch anything.
constexpr auto kLaunch = [](Touch touch, auto...) { return !BesideAPause(touch.session); };

// cuda.h calls it deprecated, which is an error where it is named.
using LaunchMultiDevice =
    Gated<kLaunch, CUresult(CUDA_LAUNCH_PARAMS*, unsigned, unsigned), "cuLaunchCooperativeKernelMultiDevice">;

}  // namespace

std::span<const replacements::Replacement> GatedReplacements() {
  return replacements::Table<
      AMEM_GATED(kBoth, cuMemcpy), AMEM_GATED(kBoth, cuMemcpyAsync), AMEM_GATED(kBoth, cuMemcpyDtoD),
      AMEM_GATED(kBoth, cuMemcpyDtoDAsync), AMEM_GATED(kTo, cuMemcpyHtoD), AMEM_GATED(kTo, cuMemcpyHtoDAsync),
      AMEM_GATED(kFrom, cuMemcpyDtoH), AMEM_GATED(kFrom, cuMemcpyDtoHAsync), AMEM_GATED(kPeer, cuMemcpyPeer),
      AMEM_GATED(kPeer, cuMemcpyPeerAsync), AMEM_GATED(kPlane, cuMemcpy2D), AMEM_GATED(kPlane, cuMemcpy2DUnaligned),
      AMEM_GATED(kPlane, cuMemcpy2DAsync), AMEM_GATED(kVolume, cuMemcpy3D), AMEM_GATED(kVolume, cuMemcpy3DAsync),
      AMEM_GATED(kVolume, cuMemcpy3DPeer), AMEM_GATED(kVolume, cuMemcpy3DPeerAsync), MemcpyBatchV1, MemcpyBatch,
      MemcpyWithAttributes, Memcpy3DWithAttributes, Memcpy3DBatchV1, Memcpy3DBatch, AMEM_GATED(kFill<1>, cuMemsetD8),
      AMEM_GATED(kFill<2>, cuMemsetD16), AMEM_GATED(kFill<4>, cuMemsetD32), AMEM_GATED(kFill<1>, cuMemsetD8Async),
      AMEM_GATED(kFill<2>, cuMemsetD16Async), AMEM_GATED(kFill<4>, cuMemsetD32Async), AMEM_GATED(kFillPlane, cuMemsetD2D8),
      AMEM_GATED(kFillPlane, cuMemsetD2D16), AMEM_GATED(kFillPlane, cuMemsetD2D32), AMEM_GATED(kFillPlane, cuMemsetD2D8Async),
      AMEM_GATED(kFillPlane, cuMemsetD2D16Async), AMEM_GATED(kFillPlane, cuMemsetD2D32Async),
      AMEM_GATED(kFlag<cuuint32_t>, cuStreamWriteValue32), AMEM_GATED(kFlag<cuuint64_t>, cuStreamWriteValue64),
      AMEM_GATED(kFlag<cuuint32_t>, cuStreamWaitValue32), AMEM_GATED(kFlag<cuuint64_t>, cuStreamWaitValue64),
      AMEM_GATED(kOperations, cuStreamBatchMemOp), AMEM_GATED(kLaunch, cuLaunchKernel), AMEM_GATED(kLaunch, cuLaunchKernelEx),
      AMEM_GATED(kLaunch, cuLaunchCooperativeKernel), LaunchMultiDevice, AMEM_GATED(kLaunch, cuGraphLaunch)>();
}
}  // namespace amem::intercept
