// NCCL's interface, but for the collectives.
#include "tests/stand_ins/nccl/nccl.h"

#include <dlfcn.h>
#include <sys/random.h>

#include <cstdio>
#include <cstring>

namespace stand_in {
namespace {

Result MakeComm(Comm*& made, Driver& driver, int ranks, int rank, const std::string& job) {
  made = new Comm;
  made->cu = &driver;
  made->job = job;
  made->rank = rank;
  made->ranks = ranks;
  CU(driver.device(&made->device));
  CU(driver.context(&made->context));
  return Submit(*made, {nullptr, [made = made] { return Init(*made); }, false});
}

}  // namespace

struct UniqueId {
  char internal[128];
};

EXPORT int ncclGetVersion(int* version) {
  if (version == nullptr) return kInvalidArgument;
  *version = Version();
  return kSuccess;
}

EXPORT int ncclGetUniqueId(UniqueId* id) {
  std::uint64_t random = 0;
  if (id == nullptr || getrandom(&random, sizeof random, 0) != sizeof random) return kInvalidArgument;
  std::snprintf(id->internal, sizeof id->internal, "%016llx", static_cast<unsigned long long>(random));
  return kSuccess;
}

EXPORT int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, void* /*config*/) {
  if (comm == nullptr || ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks) return kInvalidArgument;
  Driver* driver = TheDriver();
  if (driver == nullptr) return kSystem;
  Comm* made = nullptr;
  const std::string job(id.internal, strnlen(id.internal, sizeof id.internal));
  if (const Result result = MakeComm(made, *driver, ranks, rank, job); result != kSuccess) {
    Destroy(made);
    return result;
  }
  *comm = made;
  return kSuccess;
}

EXPORT int ncclCommInitRank(Comm** comm, int ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

EXPORT int ncclCommSplit(Comm* parent, int color, int key, Comm** comm, void* /*config*/) {
  if (parent == nullptr || comm == nullptr) return kInvalidArgument;
  Exchange& exchange = *parent->exchange;
  exchange.color[parent->rank] = color;
  exchange.key[parent->rank] = key;
  TRY(Meet(*parent));
  int ranks = 0, rank = 0;
  for (int other = 0; other < parent->ranks; ++other) {
    if (exchange.color[other] != color) continue;
    ++ranks;
    if (exchange.key[other] < key) ++rank;
  }
  TRY(Meet(*parent));
  const std::string job = parent->job + "-s" + std::to_string(parent->splits++) + "-" + std::to_string(color);
  return MakeComm(*comm, *parent->cu, ranks, rank, job);
}

EXPORT int ncclCommDestroy(Comm* comm) { return comm == nullptr ? kInvalidArgument : Destroy(comm); }
EXPORT int ncclCommAbort(Comm* comm) { return comm == nullptr ? kInvalidArgument : Destroy(comm, true); }

EXPORT int ncclCommUserRank(Comm* comm, int* rank) {
  *rank = comm->rank;
  return kSuccess;
}

EXPORT int ncclCommCount(Comm* comm, int* count) {
  *count = comm->ranks;
  return kSuccess;
}
EXPORT int ncclCommCuDevice(Comm* comm, int* device) {
  *device = comm->device;
  return kSuccess;
}

EXPORT int ncclCommGetAsyncError(Comm*, int* error) {
  *error = kSuccess;
  return kSuccess;
}

EXPORT int ncclMemAlloc(void** pointer, size_t bytes) {
  Driver* driver = TheDriver();
  if (driver == nullptr || pointer == nullptr) return kInvalidUsage;
  CUdevice device = 0;
  CU(driver->device(&device));
  Buffer buffer;
  TRY(Allocate(*driver, device, bytes, buffer));
  CUmemAccessDesc access{};  // for every device of the host, as NCCL does it
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  for (CUdevice other = 0; !Legacy(); ++other) {
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, other};
    if (driver->access(buffer.address, buffer.bytes, &access, 1) != CUDA_SUCCESS) break;
  }
  *pointer = reinterpret_cast<void*>(buffer.address);
  return kSuccess;
}

EXPORT int ncclMemFree(void* pointer) {
  Driver* driver = TheDriver();
  if (driver == nullptr) return kInvalidUsage;
  Buffer buffer;
  buffer.address = reinterpret_cast<CUdeviceptr>(pointer);
  CUdevice device = 0;  // NCCL makes it current
  CU(driver->about(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, buffer.address));
  return Free(*driver, buffer);
}

EXPORT const char* ncclGetErrorString(int result) {
  return result == kSuccess ? "no error" : result == kInvalidUsage ? "invalid usage" : "an error";
}

static const char* g_last_error = "";
EXPORT const char* ncclGetLastError(Comm*) { return g_last_error; }
EXPORT void stand_in_nccl_failed(const char* text) { g_last_error = text; }

// For tests: imports any descriptor as NCCL would, looks up a name, and calls back from inside this library's code.
EXPORT int stand_in_nccl_import(int descriptor) {
  Driver* driver = TheDriver();
  if (driver == nullptr) return kInvalidUsage;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver->import_handle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return result == CUDA_SUCCESS ? driver->release(handle) : result;
}

EXPORT void* stand_in_nccl_look_up(void* library, const char* name) { return dlsym(library, name); }

EXPORT int stand_in_nccl_call_back(int depth, int (*callback)()) {
  static int (*volatile self)(int, int (*)()) = &stand_in_nccl_call_back;  // volatile: each level stays a frame of its own
  const int result = depth <= 1 ? callback() : self(depth - 1, callback);
  asm volatile("" ::: "memory");
  return result;
}

}  // namespace stand_in
