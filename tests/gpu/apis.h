// The three libraries these programs drive, found with dlopen: nothing of CUDA, NCCL or AMem is linked, so the same binaries
// run beside any of their versions, and start on a machine that has none of them.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "tests/gpu/failure.h"

namespace amem::gpu {

// clang-format off
#define AMEM_GPU_CUDA_FUNCTIONS(X)                                                                                            \
  X(Init, cuInit) X(DriverGetVersion, cuDriverGetVersion) X(DeviceGetCount, cuDeviceGetCount) X(DeviceGet, cuDeviceGet)        \
  X(DeviceGetName, cuDeviceGetName) X(DeviceGetAttribute, cuDeviceGetAttribute) X(GetErrorName, cuGetErrorName)                \
  X(PrimaryCtxRetain, cuDevicePrimaryCtxRetain) X(CtxSetCurrent, cuCtxSetCurrent) X(CtxSynchronize, cuCtxSynchronize)          \
  X(MemGetInfo, cuMemGetInfo) X(MemAlloc, cuMemAlloc) X(MemFree, cuMemFree) X(MemHostAlloc, cuMemHostAlloc)                    \
  X(MemFreeHost, cuMemFreeHost) X(MemcpyHtoDAsync, cuMemcpyHtoDAsync) X(MemcpyDtoHAsync, cuMemcpyDtoHAsync)                    \
  X(MemsetD8Async, cuMemsetD8Async) X(StreamCreate, cuStreamCreate) X(StreamDestroy, cuStreamDestroy)                          \
  X(StreamQuery, cuStreamQuery) X(MemCreate, cuMemCreate) X(MemRelease, cuMemRelease) X(MemMap, cuMemMap)                      \
  X(MemUnmap, cuMemUnmap) X(MemSetAccess, cuMemSetAccess) X(MemAddressReserve, cuMemAddressReserve)                            \
  X(PrimaryCtxGetState, cuDevicePrimaryCtxGetState)                                                                             \
  X(MemAddressFree, cuMemAddressFree) X(MemExport, cuMemExportToShareableHandle) X(MemImport, cuMemImportFromShareableHandle)
// clang-format on

class Cuda {
 public:
  // Skip when there is no driver library or no device.
  static const Cuda& Get();

#define AMEM_GPU_DECLARE(member, function) decltype(&::function) member = nullptr;
  AMEM_GPU_CUDA_FUNCTIONS(AMEM_GPU_DECLARE)
#undef AMEM_GPU_DECLARE

  // Failure "<what>: CUDA_ERROR_… (code)".
  void Check(CUresult result, const std::string& what) const;
  [[nodiscard]] std::string Name(CUresult result) const;
  int devices = 0;

 private:
  Cuda();
};

struct MemoryInfo {
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
};

// A device's primary context, which NCCL's embedded runtime uses too.
struct Device {
  int ordinal = 0;
  CUdevice handle = 0;
  CUcontext context = nullptr;

  static Device Open(int ordinal);
  void MakeCurrent() const;
  [[nodiscard]] MemoryInfo Memory() const;
};

// The few declarations of nccl.h that are used here; they have been the same since NCCL 2.7.
using ncclComm_t = struct ncclComm*;
using ncclResult_t = int;
struct ncclUniqueId {
  char internal[128];
};
inline constexpr int kNcclFloat32 = 7;
inline constexpr int kNcclSum = 0;
inline constexpr int kNcclSuspendMemory = 1;

struct Nccl {
  // `bind_now` loads it the way Python's ctypes does.
  static const Nccl& Load(const std::string& path, bool bind_now = false);

  void* library = nullptr;
  std::string path;
  int version = 0;

  // Null where the library lacks it, but for those that every use needs.
  ncclResult_t (*GetVersion)(int*) = nullptr;
  ncclResult_t (*GetUniqueId)(ncclUniqueId*) = nullptr;
  ncclResult_t (*CommInitRank)(ncclComm_t*, int, ncclUniqueId, int) = nullptr;
  ncclResult_t (*CommSplit)(ncclComm_t, int, int, ncclComm_t*, void*) = nullptr;
  ncclResult_t (*CommDestroy)(ncclComm_t) = nullptr;
  ncclResult_t (*CommAbort)(ncclComm_t) = nullptr;
  ncclResult_t (*CommGetAsyncError)(ncclComm_t, ncclResult_t*) = nullptr;
  const char* (*GetErrorString)(ncclResult_t) = nullptr;
  const char* (*GetLastError)(ncclComm_t) = nullptr;
  ncclResult_t (*AllReduce)(const void*, void*, std::size_t, int, int, ncclComm_t, CUstream) = nullptr;
  ncclResult_t (*AllGather)(const void*, void*, std::size_t, int, ncclComm_t, CUstream) = nullptr;
  ncclResult_t (*ReduceScatter)(const void*, void*, std::size_t, int, int, ncclComm_t, CUstream) = nullptr;
  ncclResult_t (*Broadcast)(const void*, void*, std::size_t, int, int, ncclComm_t, CUstream) = nullptr;
  ncclResult_t (*Send)(const void*, std::size_t, int, int, ncclComm_t, CUstream) = nullptr;
  ncclResult_t (*Recv)(void*, std::size_t, int, int, ncclComm_t, CUstream) = nullptr;
  ncclResult_t (*GroupStart)() = nullptr;
  ncclResult_t (*GroupEnd)() = nullptr;
  ncclResult_t (*MemAlloc)(void**, std::size_t) = nullptr;
  ncclResult_t (*MemFree)(void*) = nullptr;
  // NCCL 2.27 and later; null before.
  ncclResult_t (*CommWindowRegister)(ncclComm_t, void*, std::size_t, void**, int) = nullptr;
  ncclResult_t (*CommWindowDeregister)(ncclComm_t, void*) = nullptr;
  // NCCL 2.29.7 and later; null before.
  ncclResult_t (*CommSuspend)(ncclComm_t, int) = nullptr;
  ncclResult_t (*CommResume)(ncclComm_t) = nullptr;

  void Check(ncclResult_t result, const std::string& what) const;
  [[nodiscard]] std::string Describe(ncclResult_t result) const;
  [[nodiscard]] std::string VersionText() const;
};

// The C interface of AMem, found through the (patched) libnccl as a PyNccl wrapper finds it, or process-wide when preloaded.
struct Amem {
  static std::optional<Amem> Find(const Nccl& nccl);

  ncclResult_t (*Pause)(ncclComm_t*) = nullptr;
  ncclResult_t (*Resume)(ncclComm_t*) = nullptr;
  int (*ResumeTags)(const char* const*, std::size_t, unsigned, int) = nullptr;  // amem_resume, if there
  ncclResult_t (*MemStats)() = nullptr;
  ncclResult_t (*SetGroupId)(int) = nullptr;
  ncclResult_t (*GetGroupId)(int*) = nullptr;

  // Empty when the library does not offer them.
  [[nodiscard]] std::string StatsJson() const;
  [[nodiscard]] std::string LastError() const;  // of this thread
  void Check(ncclResult_t result, const Nccl& nccl, const std::string& what) const;

 private:
  void* json_ = nullptr;
  void* last_error_ = nullptr;
};

}  // namespace amem::gpu
