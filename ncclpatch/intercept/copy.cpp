// Copies and fills by NCCL: none is under way when a pause begins, and none touches paused memory.
#include <algorithm>

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

// `touches(touch, arguments...)`: whether this call touches paused memory.
template <Text Name, Text Exported, class F, auto touches>
struct Copy {
  static constexpr const char *kName = Name.data, *kExported = Exported.data;
  using Function = F;
  template <class... A>
  static CUresult Call(Function* real, A... arguments) {
    return ThroughTheGate(kName, touches, real, arguments...);
  }
};

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
template <class Copy3D>
bool TouchesVolume(Touch touch, const Copy3D* copy) {
  if (copy == nullptr) return false;
  const auto side = [&](CUmemorytype type, CUdeviceptr base, size_t pitch, size_t height, size_t z) {
    return (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED) &&
           touch(base, (z + copy->Depth) * std::max(height, copy->Height) * std::max(pitch, copy->WidthInBytes));
  };
  return side(copy->srcMemoryType, copy->srcDevice, copy->srcPitch, copy->srcHeight, copy->srcZ) ||
         side(copy->dstMemoryType, copy->dstDevice, copy->dstPitch, copy->dstHeight, copy->dstZ);
}
constexpr auto kVolume = [](Touch touch, const auto* copy, auto...) { return TouchesVolume(touch, copy); };
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

using Memcpy = Copy<"cuMemcpy", "cuMemcpy", CUresult(CUdeviceptr, CUdeviceptr, size_t), kBoth>;
using MemcpyAsync = Copy<"cuMemcpyAsync", "cuMemcpyAsync", CUresult(CUdeviceptr, CUdeviceptr, size_t, CUstream), kBoth>;
using MemcpyDtoD = Copy<"cuMemcpyDtoD", "cuMemcpyDtoD_v2", CUresult(CUdeviceptr, CUdeviceptr, size_t), kBoth>;
using MemcpyDtoDAsync =
    Copy<"cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2", CUresult(CUdeviceptr, CUdeviceptr, size_t, CUstream), kBoth>;
using MemcpyHtoD = Copy<"cuMemcpyHtoD", "cuMemcpyHtoD_v2", CUresult(CUdeviceptr, const void*, size_t), kTo>;
using MemcpyHtoDAsync =
    Copy<"cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", CUresult(CUdeviceptr, const void*, size_t, CUstream), kTo>;
using MemcpyDtoH = Copy<"cuMemcpyDtoH", "cuMemcpyDtoH_v2", CUresult(void*, CUdeviceptr, size_t), kFrom>;
using MemcpyDtoHAsync =
    Copy<"cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2", CUresult(void*, CUdeviceptr, size_t, CUstream), kFrom>;
using MemcpyPeer =
    Copy<"cuMemcpyPeer", "cuMemcpyPeer", CUresult(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t), kPeer>;
using MemcpyPeerAsync = Copy<"cuMemcpyPeerAsync", "cuMemcpyPeerAsync",
                             CUresult(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream), kPeer>;
using Memcpy2D = Copy<"cuMemcpy2D", "cuMemcpy2D_v2", CUresult(const CUDA_MEMCPY2D*), kPlane>;
using Memcpy2DUnaligned = Copy<"cuMemcpy2DUnaligned", "cuMemcpy2DUnaligned_v2", CUresult(const CUDA_MEMCPY2D*), kPlane>;
using Memcpy2DAsync = Copy<"cuMemcpy2DAsync", "cuMemcpy2DAsync_v2", CUresult(const CUDA_MEMCPY2D*, CUstream), kPlane>;
using Memcpy3D = Copy<"cuMemcpy3D", "cuMemcpy3D_v2", CUresult(const CUDA_MEMCPY3D*), kVolume>;
using Memcpy3DAsync = Copy<"cuMemcpy3DAsync", "cuMemcpy3DAsync_v2", CUresult(const CUDA_MEMCPY3D*, CUstream), kVolume>;
using Memcpy3DPeer = Copy<"cuMemcpy3DPeer", "cuMemcpy3DPeer", CUresult(const CUDA_MEMCPY3D_PEER*), kVolume>;
using Memcpy3DPeerAsync =
    Copy<"cuMemcpy3DPeerAsync", "cuMemcpy3DPeerAsync", CUresult(const CUDA_MEMCPY3D_PEER*, CUstream), kVolume>;
// The attributes' type is new in CUDA 12.8. AMem does not read them, so they are opaque here.
struct MemcpyBatchV1
    : Copy<"cuMemcpyBatchAsync", "cuMemcpyBatchAsync",
           CUresult(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, void*, size_t*, size_t, size_t*, CUstream), kBatch> {
  static constexpr int kSince = 12080, kBefore = 13000;
};
struct MemcpyBatch : Copy<"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2",
                          CUresult(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, void*, size_t*, size_t, CUstream), kBatch> {
  static constexpr int kSince = 13000;
};
using MemcpyWithAttributes = Copy<"cuMemcpyWithAttributesAsync", "cuMemcpyWithAttributesAsync",
                                  CUresult(CUdeviceptr, CUdeviceptr, size_t, void*, CUstream), kBoth>;
using Memcpy3DWithAttributes = Copy<"cuMemcpy3DWithAttributesAsync", "cuMemcpy3DWithAttributesAsync",
                                    CUresult(void*, unsigned long long, CUstream), kAnything>;
struct Memcpy3DBatchV1 : Copy<"cuMemcpy3DBatchAsync", "cuMemcpy3DBatchAsync",
                              CUresult(size_t, void*, size_t*, unsigned long long, CUstream), kAnything> {
  static constexpr int kSince = 12080, kBefore = 13000;
};
struct Memcpy3DBatch : Copy<"cuMemcpy3DBatchAsync", "cuMemcpy3DBatchAsync_v2",
                            CUresult(size_t, void*, unsigned long long, CUstream), kAnything> {
  static constexpr int kSince = 13000;
};
using MemsetD8 = Copy<"cuMemsetD8", "cuMemsetD8_v2", CUresult(CUdeviceptr, unsigned char, size_t), kFill<1>>;
using MemsetD16 = Copy<"cuMemsetD16", "cuMemsetD16_v2", CUresult(CUdeviceptr, unsigned short, size_t), kFill<2>>;
using MemsetD32 = Copy<"cuMemsetD32", "cuMemsetD32_v2", CUresult(CUdeviceptr, unsigned int, size_t), kFill<4>>;
using MemsetD8Async =
    Copy<"cuMemsetD8Async", "cuMemsetD8Async", CUresult(CUdeviceptr, unsigned char, size_t, CUstream), kFill<1>>;
using MemsetD16Async =
    Copy<"cuMemsetD16Async", "cuMemsetD16Async", CUresult(CUdeviceptr, unsigned short, size_t, CUstream), kFill<2>>;
using MemsetD32Async =
    Copy<"cuMemsetD32Async", "cuMemsetD32Async", CUresult(CUdeviceptr, unsigned int, size_t, CUstream), kFill<4>>;
using MemsetD2D8 =
    Copy<"cuMemsetD2D8", "cuMemsetD2D8_v2", CUresult(CUdeviceptr, size_t, unsigned char, size_t, size_t), kFillPlane>;
using MemsetD2D16 =
    Copy<"cuMemsetD2D16", "cuMemsetD2D16_v2", CUresult(CUdeviceptr, size_t, unsigned short, size_t, size_t), kFillPlane>;
using MemsetD2D32 =
    Copy<"cuMemsetD2D32", "cuMemsetD2D32_v2", CUresult(CUdeviceptr, size_t, unsigned int, size_t, size_t), kFillPlane>;
using MemsetD2D8Async = Copy<"cuMemsetD2D8Async", "cuMemsetD2D8Async",
                             CUresult(CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream), kFillPlane>;
using MemsetD2D16Async = Copy<"cuMemsetD2D16Async", "cuMemsetD2D16Async",
                              CUresult(CUdeviceptr, size_t, unsigned short, size_t, size_t, CUstream), kFillPlane>;
using MemsetD2D32Async = Copy<"cuMemsetD2D32Async", "cuMemsetD2D32Async",
                              CUresult(CUdeviceptr, size_t, unsigned int, size_t, size_t, CUstream), kFillPlane>;

}  // namespace

std::span<const replacements::Replacement> CopyReplacements() {
  return replacements::Table<Memcpy, MemcpyAsync, MemcpyDtoD, MemcpyDtoDAsync, MemcpyHtoD, MemcpyHtoDAsync, MemcpyDtoH,
                             MemcpyDtoHAsync, MemcpyPeer, MemcpyPeerAsync, Memcpy2D, Memcpy2DUnaligned, Memcpy2DAsync, Memcpy3D,
                             Memcpy3DAsync, Memcpy3DPeer, Memcpy3DPeerAsync, MemcpyBatchV1, MemcpyBatch, MemcpyWithAttributes,
                             Memcpy3DWithAttributes, Memcpy3DBatchV1, Memcpy3DBatch, MemsetD8, MemsetD16, MemsetD32,
                             MemsetD8Async, MemsetD16Async, MemsetD32Async, MemsetD2D8, MemsetD2D16, MemsetD2D32,
                             MemsetD2D8Async, MemsetD2D16Async, MemsetD2D32Async>();
}
}  // namespace amem::intercept
