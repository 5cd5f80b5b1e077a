// Symmetric windows, and memory that is suspended, with NCCL's order of calls: both map memory at addresses that were reserved
// for something else before.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/stand_ins/cuda/control.h"
#include "tests/stand_ins/nccl/nccl.h"

namespace stand_in {
namespace {

constexpr size_t kStride = size_t{64} << 20;    // of a rank in the flat range
constexpr size_t kResources = size_t{2} << 20;  // of the communicator's own window, which has the flags of its barriers

CUdeviceptr PartOf(const Comm& comm, int rank, size_t offset) {
  return comm.flat + static_cast<size_t>(rank) * kStride + offset;
}

// Maps the memory of all ranks side by side. This rank's may have an address already, or none.
Result Obtain(Comm& comm, Window window) {
  Driver& cu = *comm.cu;
  window.offset = comm.windows.empty() ? 0 : comm.windows.back().offset + comm.windows.back().bytes;
  comm.offered = window.handle;
  comm.offered_bytes = window.bytes;
  TRY(Meet(comm));
  if (comm.flat == 0) CU(cu.reserve(&comm.flat, static_cast<size_t>(comm.ranks) * kStride, size_t{2} << 20, 0, 0));
  for (int rank = 0; rank < comm.ranks; ++rank) {
    CUmemGenericAllocationHandle handle = window.handle;
    if (rank != comm.rank) TRY(ImportFrom(comm, rank, kOffered, handle));
    TRY(MapThere(cu, comm.device, handle, window.bytes, PartOf(comm, rank, window.offset)));
    if (rank != comm.rank) CU(cu.release(handle));
  }
  comm.windows.push_back(window);
  return Meet(comm);  // all have imported what this rank offers
}

Result MakeResources(Comm& comm) {
  Window window;
  window.bytes = kResources;
  const char* twice = std::getenv("STAND_IN_WINDOW");  // "twice": as NCCL 2.32, which has an address of it already
  if (twice != nullptr && std::strcmp(twice, "twice") == 0) {
    TRY(Allocate(*comm.cu, comm.device, window.bytes, comm.resources));
    CU(comm.cu->retain(&window.handle, reinterpret_cast<void*>(comm.resources.address)));
  } else {
    TRY(Create(*comm.cu, comm.device, window.bytes, window.handle));
  }
  TRY(Obtain(comm, window));
  CU(comm.cu->clear(PartOf(comm, comm.rank, 0), 0, window.bytes, nullptr));
  return Meet(comm);
}

Result FreeLast(Comm& comm) {
  const Window window = comm.windows.back();
  comm.windows.pop_back();
  for (int rank = 0; rank < comm.ranks; ++rank) CU(comm.cu->unmap(PartOf(comm, rank, window.offset), window.bytes));
  CU(comm.cu->release(window.handle));
  return kSuccess;
}

struct WindowWork {
  Comm* comm;
  size_t offset, count;  // of the input in each rank's part
  float* output;
  int* failed;
};

// A flag of each rank, in its own memory, counts up for ever: a pause that lost it would hang the next barrier.
bool Barrier(Comm& comm) {
  const std::uint64_t epoch = ++comm.epochs;
  const auto flag = [&](int rank) { return reinterpret_cast<std::atomic<std::uint64_t>*>(PartOf(comm, rank, 0)); };
  flag(comm.rank)->store(epoch, std::memory_order_release);
  const auto deadline = Clock::now() + kPatience;
  for (int rank = 0; rank < comm.ranks; ++rank) {
    while (flag(rank)->load(std::memory_order_acquire) < epoch) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

void WindowKernel(void** parameters) {
  const WindowWork& work = **static_cast<const WindowWork**>(parameters[0]);
  Comm& comm = *work.comm;
  *work.failed = Barrier(comm) ? 0 : 1;
  for (size_t i = 0; i < work.count && *work.failed == 0; ++i) {
    float sum = 0;
    for (int rank = 0; rank < comm.ranks; ++rank) sum += reinterpret_cast<const float*>(PartOf(comm, rank, work.offset))[i];
    work.output[i] = sum;
  }
  if (*work.failed == 0 && !Barrier(comm)) *work.failed = 1;
}

const Window* WindowOf(const Comm& comm, const void* send) {
  const auto address = reinterpret_cast<CUdeviceptr>(send);
  const auto it = std::find_if(comm.windows.begin(), comm.windows.end(), [&](const Window& window) {
    return window.first != 0 && address >= window.first && address < window.first + window.bytes;
  });
  return it == comm.windows.end() ? nullptr : &*it;
}

// Gives the memory of a buffer back and keeps its address.
Result GiveUp(Driver& cu, const Buffer& buffer) {
  CUmemGenericAllocationHandle handle = 0;
  CU(cu.retain(&handle, reinterpret_cast<void*>(buffer.address)));
  CU(cu.release(handle));
  CU(cu.unmap(buffer.address, buffer.bytes));
  CU(cu.release(handle));
  return kSuccess;
}

}  // namespace

bool InWindow(const Comm& comm, const void* send) { return WindowOf(comm, send) != nullptr; }

Result WindowAllReduce(Comm& comm, const float* send, float* receive, size_t count, CUstream stream) {
  const Window& window = *WindowOf(comm, send);
  int failed = 0;
  const WindowWork work{&comm, window.offset + reinterpret_cast<CUdeviceptr>(send) - window.first, count, receive, &failed};
  const WindowWork* argument = &work;
  void* parameters[] = {&argument};
  static HostKernel kernel{&WindowKernel};
  CU(comm.cu->launch(reinterpret_cast<CUfunction>(&kernel), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
  return failed != 0 ? kRemote : kSuccess;
}

Result FreeWindows(Comm& comm) {
  while (!comm.windows.empty()) TRY(FreeLast(comm));
  if (comm.resources.address != 0) {
    TRY(GiveUp(*comm.cu, comm.resources));
    CU(comm.cu->free_range(comm.resources.address, comm.resources.bytes));
  }
  if (comm.flat != 0) CU(comm.cu->free_range(comm.flat, static_cast<size_t>(comm.ranks) * kStride));
  return kSuccess;
}

EXPORT int ncclCommWindowRegister(Comm* comm, void* buffer, size_t, void** window, int /*flags*/) {
  if (comm == nullptr || window == nullptr || Legacy()) return kInvalidUsage;
  if (comm->windows.empty()) TRY(MakeResources(*comm));
  Window made;
  CU(comm->cu->range(&made.first, &made.bytes, reinterpret_cast<CUdeviceptr>(buffer)));
  CU(comm->cu->retain(&made.handle, reinterpret_cast<void*>(made.first)));
  TRY(Obtain(*comm, made));
  *window = reinterpret_cast<void*>(PartOf(*comm, comm->rank, comm->windows.back().offset));
  return kSuccess;
}

// The last one only.
EXPORT int ncclCommWindowDeregister(Comm* comm, void*) { return comm->windows.size() < 2 ? kInvalidUsage : FreeLast(*comm); }

// As the memory manager of NCCL 2.29.7 and later does in ncclCommSuspend and ncclCommResume.
EXPORT int stand_in_nccl_suspend(Comm* comm) {
  TRY(Meet(*comm));
  for (const Buffer& buffer : comm->peer) TRY(GiveUp(*comm->cu, buffer));
  for (const Buffer& buffer : comm->own) {
    const auto* contents = reinterpret_cast<const char*>(buffer.address);
    comm->offloaded.emplace_back(contents, contents + buffer.bytes);
    TRY(GiveUp(*comm->cu, buffer));
  }
  return kSuccess;
}

EXPORT int stand_in_nccl_resume(Comm* comm) {
  Driver& cu = *comm->cu;
  for (size_t i = 0; i < comm->own.size(); ++i) {
    const Buffer& buffer = comm->own[i];
    CUmemGenericAllocationHandle handle = 0;
    TRY(Create(cu, comm->device, buffer.bytes, handle));
    TRY(MapThere(cu, comm->device, handle, buffer.bytes, buffer.address));
    std::memcpy(reinterpret_cast<void*>(buffer.address), comm->offloaded[i].data(), buffer.bytes);
  }
  comm->offloaded.clear();
  TRY(Meet(*comm));
  size_t peer = 0;
  for (int i = 0; i < static_cast<int>(comm->own.size()) && comm->ranks > 1; ++i) {
    if (!IsExported(i)) continue;
    CUmemGenericAllocationHandle handle = 0;
    TRY(ImportFrom(*comm, (comm->rank + comm->ranks - 1) % comm->ranks, i, handle));
    const Buffer& buffer = comm->peer[peer++];
    TRY(MapThere(cu, comm->device, handle, buffer.bytes, buffer.address));
  }
  return Meet(*comm);
}

}  // namespace stand_in
