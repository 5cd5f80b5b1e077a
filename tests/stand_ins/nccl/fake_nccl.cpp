// A small stand-in for libnccl.so.2 that uses the driver the way the real one does, for tests without a GPU.
//
// It reaches the driver through dlopen, dlsym("cuGetProcAddress_v2") and nothing else, at its first call; allocates, exports,
// imports and frees buffers in NCCL's order of calls; passes descriptors between ranks over Unix sockets from a proxy thread;
// and adds floats in a ring through mapped peer memory, in a "kernel" that goes through cuLaunchKernel. Ranks are processes.
//
//   FAKE_NCCL_BUFFERS   buffers of a communicator (default 6): 2 MiB, every third 10 MiB; two of three are exported
//   NCCL_CUMEM_ENABLE   0: cuMemAlloc and cuIpc* in place of the calls above
#include <cuda.h>
#include <dlfcn.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/stand_ins/cuda/fake_cuda.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::seconds(60);
enum Result : int {
  kSuccess = 0,
  kUnhandledCuda = 1,
  kSystem = 2,
  kInternal = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemote = 6
};

// ---- the driver, reached as NCCL does ----------------------------------------------------------------------------------

struct Driver {
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_range;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemRetainAllocationHandle) retain;
  decltype(&cuMemGetAddressRange) range;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAlloc) alloc;
  decltype(&cuMemFree) free;
  decltype(&cuIpcGetMemHandle) ipc_get;
  decltype(&cuIpcOpenMemHandle) ipc_open;
  decltype(&cuIpcCloseMemHandle) ipc_close;
  decltype(&cuCtxGetDevice) device;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuMemsetD8Async) clear;
};

Result LoadDriver(Driver& driver) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == nullptr) {
    std::fprintf(stderr, "fake NCCL: %s\n", dlerror());
    return kSystem;
  }
  const auto get = reinterpret_cast<decltype(&cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) return kSystem;
  bool complete = true;
  const auto bind = [&](const char* name, auto& function, int version = 12000) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    complete = get(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, &status) == CUDA_SUCCESS && found != nullptr && complete;
    if (found == nullptr) std::fprintf(stderr, "fake NCCL: the driver has no %s\n", name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  bind("cuMemCreate", driver.create);
  bind("cuMemRelease", driver.release);
  bind("cuMemAddressReserve", driver.reserve);
  bind("cuMemAddressFree", driver.free_range);
  bind("cuMemMap", driver.map);
  bind("cuMemUnmap", driver.unmap);
  bind("cuMemSetAccess", driver.access);
  bind("cuMemExportToShareableHandle", driver.export_handle);
  bind("cuMemImportFromShareableHandle", driver.import_handle);
  bind("cuMemRetainAllocationHandle", driver.retain);
  bind("cuMemGetAddressRange", driver.range);
  bind("cuMemGetAllocationGranularity", driver.granularity);
  bind("cuMemAlloc", driver.alloc);
  bind("cuMemFree", driver.free);
  bind("cuIpcGetMemHandle", driver.ipc_get);
  bind("cuIpcOpenMemHandle", driver.ipc_open);
  bind("cuIpcCloseMemHandle", driver.ipc_close);
  bind("cuCtxGetDevice", driver.device);
  bind("cuLaunchKernel", driver.launch);
  bind("cuMemsetD8Async", driver.clear);
  return complete ? kSuccess : kSystem;
}

Driver* TheDriver() {
  static Driver driver{};
  static const Result loaded = LoadDriver(driver);
  return loaded == kSuccess ? &driver : nullptr;
}

Result Check(const char* what, CUresult result) {
  if (result == CUDA_SUCCESS) return kSuccess;
  std::fprintf(stderr, "fake NCCL: %s answered %d\n", what, static_cast<int>(result));
  return kUnhandledCuda;
}

#define TRY(expr)                                         \
  do {                                                    \
    if (const Result r = (expr); r != kSuccess) return r; \
  } while (false)
#define CU(call) TRY(Check(#call, call))

// ---- buffers, in NCCL's order of calls ---------------------------------------------------------------------------------

bool Legacy() {
  const char* text = std::getenv("NCCL_CUMEM_ENABLE");
  return text != nullptr && std::strcmp(text, "0") == 0;
}

struct Buffer {
  CUdeviceptr address = 0;
  size_t bytes = 0;
  bool imported = false;
};

Result MapAt(Driver& cu, CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes, size_t alignment,
             CUdeviceptr& address) {
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CU(cu.reserve(&address, bytes, alignment, 0, 0));
  CU(cu.map(address, bytes, 0, handle, 0));
  CU(cu.access(address, bytes, &access, 1));
  return kSuccess;
}

Result Allocate(Driver& cu, CUdevice device, size_t bytes, Buffer& buffer) {
  buffer.bytes = bytes;
  if (Legacy()) {
    CU(cu.alloc(&buffer.address, bytes));
    return kSuccess;
  }
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  size_t granularity = 0;
  CU(cu.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  buffer.bytes = (bytes + granularity - 1) / granularity * granularity;
  CUmemGenericAllocationHandle handle = 0;
  CU(cu.create(&handle, buffer.bytes, &properties, 0));
  return MapAt(cu, device, handle, buffer.bytes, granularity, buffer.address);
}

Result Free(Driver& cu, Buffer& buffer) {
  if (buffer.address == 0) return kSuccess;
  const CUdeviceptr address = std::exchange(buffer.address, 0);
  if (Legacy()) {
    if (buffer.imported) {
      CU(cu.ipc_close(address));
    } else {
      CU(cu.free(address));
    }
    return kSuccess;
  }
  CUmemGenericAllocationHandle handle = 0;
  size_t bytes = 0;
  CU(cu.retain(&handle, reinterpret_cast<void*>(address)));
  CU(cu.release(handle));
  CU(cu.range(nullptr, &bytes, address));
  CU(cu.unmap(address, bytes));
  CU(cu.release(handle));
  CU(cu.free_range(address, bytes));
  return kSuccess;
}

// ---- passing descriptors -----------------------------------------------------------------------------------------------

struct Offer {  // what a proxy answers: how to reach one buffer
  size_t bytes = 0;
  CUipcMemHandle legacy{};
  int result = 0;
};

Result SendOffer(int socket, const Offer& offer, int descriptor) {
  iovec data{const_cast<Offer*>(&offer), sizeof offer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof offer) ? kSuccess : kSystem;
}

Result ReceiveOffer(int socket, Offer& offer, int& descriptor) {
  iovec data{&offer, sizeof offer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof offer)) return kRemote;
  descriptor = -1;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message)) std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  return static_cast<Result>(offer.result);
}

sockaddr_un AddressOf(const std::string& job, int rank, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "fake-nccl-" + job + "-" + std::to_string(rank);
  std::copy(name.begin(), name.end(), address.sun_path + 1);  // abstract: leaves no file behind
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

}  // namespace

// ---- communicators -----------------------------------------------------------------------------------------------------

struct ncclComm {
  Driver* cu = nullptr;
  std::string job;
  int rank = 0, ranks = 1, listener = -1;
  CUdevice device = 0;
  std::vector<Buffer> own, peer;
  std::thread proxy;
  std::atomic<int> served{0};
  std::atomic<bool> stop{false};
  std::uint64_t chunks = 0;  // through the ring so far, as the flags in the buffers count
};

namespace {

int BufferCount() {
  const char* text = std::getenv("FAKE_NCCL_BUFFERS");
  return text == nullptr ? 6 : std::max(1, std::atoi(text));
}
size_t BufferBytes(int index) { return (index % 3 == 1 ? size_t{10} : size_t{2}) << 20; }
bool IsExported(int index) { return index % 3 != 2; }
int ExportedCount() {
  int count = 0;
  for (int i = 0; i < BufferCount(); ++i) count += IsExported(i) ? 1 : 0;
  return count;
}

Result AnswerOne(ncclComm& comm, int socket) {
  int index = -1;
  if (recv(socket, &index, sizeof index, MSG_WAITALL) != static_cast<ssize_t>(sizeof index)) return kRemote;
  if (index < 0 || index >= static_cast<int>(comm.own.size())) return kInvalidArgument;
  const Buffer& buffer = comm.own[static_cast<size_t>(index)];
  Offer offer;
  offer.bytes = buffer.bytes;
  int descriptor = -1;
  if (Legacy()) {
    offer.result = Check("cuIpcGetMemHandle", comm.cu->ipc_get(&offer.legacy, buffer.address));
  } else {
    CUmemGenericAllocationHandle handle = 0;
    offer.result = Check("cuMemRetainAllocationHandle", comm.cu->retain(&handle, reinterpret_cast<void*>(buffer.address)));
    if (offer.result == kSuccess)
      offer.result = Check("cuMemExportToShareableHandle",
                           comm.cu->export_handle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    if (handle != 0) comm.cu->release(handle);
  }
  const Result sent = SendOffer(socket, offer, descriptor);
  if (descriptor >= 0) close(descriptor);
  if (sent == kSuccess) ++comm.served;
  return sent;
}

void RunProxy(ncclComm* comm) {
  while (!comm->stop) {
    const int socket = accept4(comm->listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) continue;
    while (!comm->stop && AnswerOne(*comm, socket) == kSuccess) {
    }
    close(socket);
  }
}

Result StartProxy(ncclComm& comm) {
  comm.listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(comm.job, comm.rank, length);
  if (bind(comm.listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 || listen(comm.listener, 16) != 0)
    return kSystem;
  comm.proxy = std::thread(&RunProxy, &comm);
  return kSuccess;
}

Result Connect(const ncclComm& comm, int rank, int& connected) {
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(comm.job, rank, length);
  const auto deadline = Clock::now() + kPatience;
  connected = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  while (connect(connected, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (Clock::now() > deadline) return kRemote;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return kSuccess;
}

Result ImportOne(ncclComm& comm, int socket, int index, Buffer& buffer) {
  Driver& cu = *comm.cu;
  Offer offer;
  int descriptor = -1;
  if (send(socket, &index, sizeof index, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof index)) return kSystem;
  TRY(ReceiveOffer(socket, offer, descriptor));
  buffer.bytes = offer.bytes;
  buffer.imported = true;
  if (Legacy()) {
    CU(cu.ipc_open(&buffer.address, offer.legacy, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    return kSuccess;
  }
  CUmemGenericAllocationHandle handle = 0;
  const CUresult imported = cu.import_handle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(descriptor);
  TRY(Check("cuMemImportFromShareableHandle", imported));
  return MapAt(cu, comm.device, handle, buffer.bytes, 0, buffer.address);
}

Result ImportAll(ncclComm& comm) {
  if (comm.ranks == 1) return kSuccess;
  int socket = -1;
  Result result = Connect(comm, (comm.rank + comm.ranks - 1) % comm.ranks, socket);
  for (int i = 0; result == kSuccess && i < static_cast<int>(comm.own.size()); ++i) {
    if (!IsExported(i)) continue;
    comm.peer.emplace_back();
    result = ImportOne(comm, socket, i, comm.peer.back());
  }
  close(socket);
  const auto deadline = Clock::now() + kPatience;
  while (result == kSuccess && comm.served < ExportedCount()) {  // until the next rank has everything
    if (Clock::now() > deadline) return kRemote;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return result;
}

Result Init(ncclComm& comm) {
  CU(comm.cu->device(&comm.device));
  for (int i = 0; i < BufferCount(); ++i) {
    comm.own.emplace_back();
    TRY(Allocate(*comm.cu, comm.device, BufferBytes(i), comm.own.back()));
    CU(comm.cu->clear(comm.own.back().address, 0, comm.own.back().bytes, nullptr));
  }
  TRY(StartProxy(comm));
  return ImportAll(comm);
}

Result Destroy(ncclComm* comm) {
  comm->stop = true;
  if (comm->listener >= 0) shutdown(comm->listener, SHUT_RDWR);
  if (comm->proxy.joinable()) comm->proxy.join();
  if (comm->listener >= 0) close(comm->listener);
  Result result = kSuccess;
  for (auto* buffers : {&comm->peer, &comm->own})
    for (Buffer& buffer : *buffers)
      if (const Result freed = Free(*comm->cu, buffer); freed != kSuccess) result = freed;
  delete comm;
  return result;
}

// ---- the ring ----------------------------------------------------------------------------------------------------------

// The first page of a rank's ring buffer. The flags live in device memory and count up for ever: a pause that lost a byte of
// them would hang the next collective.
struct RingHeader {
  std::atomic<std::uint64_t> ready;  // chunks that its owner has put there
  std::atomic<std::uint64_t> taken;  // chunks that the next rank has read
};
constexpr size_t kHeaderBytes = 4096;

struct RingWork {
  CUdeviceptr own, from;  // ring buffers of this rank and of the one before
  const float* input;
  float* output;
  std::uint64_t count, first_chunk;
  int rank, ranks, element_capacity;
  int* failed;
};

RingHeader& HeaderAt(CUdeviceptr buffer) { return *reinterpret_cast<RingHeader*>(buffer); }
float* PayloadAt(CUdeviceptr buffer) { return reinterpret_cast<float*>(buffer + kHeaderBytes); }

bool WaitFor(const std::atomic<std::uint64_t>& flag, std::uint64_t value) {
  const auto deadline = Clock::now() + kPatience;
  for (int spins = 0; flag.load(std::memory_order_acquire) < value; ++spins) {
    if (Clock::now() > deadline) return false;
    if (spins < 200) {
      std::this_thread::yield();
    } else {  // more ranks than cores: let the others work
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

// Takes the chunk that the rank before put in its buffer; `each(i, value)` sees its elements.
template <class Each>
bool Take(const RingWork& work, std::uint64_t chunk, std::uint64_t elements, const Each& each) {
  if (!WaitFor(HeaderAt(work.from).ready, chunk)) return false;
  const float* payload = PayloadAt(work.from);
  for (std::uint64_t i = 0; i < elements; ++i) each(i, payload[i]);
  HeaderAt(work.from).taken.store(chunk, std::memory_order_release);
  return true;
}

template <class Value>
bool Put(const RingWork& work, std::uint64_t chunk, std::uint64_t elements, const Value& value) {
  if (!WaitFor(HeaderAt(work.own).taken, chunk - 1)) return false;
  float* payload = PayloadAt(work.own);
  for (std::uint64_t i = 0; i < elements; ++i) payload[i] = value(i);
  HeaderAt(work.own).ready.store(chunk, std::memory_order_release);
  return true;
}

// Two laps: sums go from rank 0 to the last, then the result goes round. Every rank puts and takes exactly two chunks per part.
bool RingPart(const RingWork& work, std::uint64_t begin, std::uint64_t elements, std::uint64_t chunk) {
  const float* input = work.input + begin;
  float* output = work.output + begin;
  const bool first = work.rank == 0, last = work.rank == work.ranks - 1;
  std::vector<float> sum(input, input + elements);
  const auto add = [&](std::uint64_t i, float value) { sum[i] = value + input[i]; };
  const auto keep = [&](std::uint64_t i, float value) { sum[i] = value; };
  const auto send = [&](std::uint64_t i) { return sum[i]; };
  if (!first && !Take(work, chunk, elements, add)) return false;
  if (!Put(work, chunk, elements, send)) return false;
  if (!Take(work, first ? chunk : chunk + 1, elements, [&](std::uint64_t i, float value) {
        if (first || !last) keep(i, value);
      }))
    return false;
  if (!Put(work, chunk + 1, elements, send)) return false;
  if (first && !Take(work, chunk + 1, elements, [](std::uint64_t, float) {})) return false;
  std::copy(sum.begin(), sum.end(), output);
  return true;
}

// As a kernel gets them: pointers to its arguments. The fake libcuda runs it before cuLaunchKernel returns.
void RingKernel(void** parameters) {
  const RingWork& work = **static_cast<const RingWork**>(parameters[0]);
  std::uint64_t chunk = work.first_chunk;
  for (std::uint64_t begin = 0; begin < work.count; chunk += 2) {
    const std::uint64_t elements =
        std::min<std::uint64_t>(work.count - begin, static_cast<std::uint64_t>(work.element_capacity));
    if (!RingPart(work, begin, elements, chunk)) {
      *work.failed = 1;
      return;
    }
    begin += elements;
  }
}

}  // namespace

// ---- NCCL's interface --------------------------------------------------------------------------------------------------

#define EXPORT extern "C" __attribute__((visibility("default")))

struct ncclUniqueId {
  char internal[128];
};
using ncclComm_t = ncclComm*;

EXPORT int ncclGetVersion(int* version) {
  if (version == nullptr) return kInvalidArgument;
  *version = 22809;
  return kSuccess;
}

EXPORT int ncclGetUniqueId(ncclUniqueId* id) {
  std::uint64_t random = 0;
  if (id == nullptr || getrandom(&random, sizeof random, 0) != sizeof random) return kInvalidArgument;
  std::snprintf(id->internal, sizeof id->internal, "%016llx", static_cast<unsigned long long>(random));
  return kSuccess;
}

EXPORT int ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, void* /*config*/) {
  if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks) return kInvalidArgument;
  Driver* driver = TheDriver();
  if (driver == nullptr) return kSystem;
  auto* made = new ncclComm;
  made->cu = driver;
  made->job.assign(id.internal, strnlen(id.internal, sizeof id.internal));
  made->rank = rank;
  made->ranks = ranks;
  if (const Result result = Init(*made); result != kSuccess) {
    Destroy(made);
    return result;
  }
  *comm = made;
  return kSuccess;
}

EXPORT int ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

EXPORT int ncclCommDestroy(ncclComm_t comm) { return comm == nullptr ? kInvalidArgument : Destroy(comm); }
EXPORT int ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }

EXPORT int ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return kSuccess;
}

// Float sum only. `send` and `receive` may be any memory that the kernel can reach, host memory included. Done when it returns.
EXPORT int ncclAllReduce(const void* send, void* receive, size_t count, int /*type*/, int /*op*/, ncclComm_t comm,
                         CUstream stream) {
  if (comm == nullptr || send == nullptr || receive == nullptr) return kInvalidArgument;
  int failed = 0;
  RingWork work{};
  work.own = comm->own[0].address;
  work.from = comm->ranks == 1 ? comm->own[0].address : comm->peer[0].address;
  work.input = static_cast<const float*>(send);
  work.output = static_cast<float*>(receive);
  work.count = count;
  work.first_chunk = comm->chunks + 1;
  work.rank = comm->rank;
  work.ranks = comm->ranks;
  work.element_capacity = static_cast<int>((comm->own[0].bytes - kHeaderBytes) / sizeof(float));
  work.failed = &failed;
  const RingWork* argument = &work;
  void* parameters[] = {&argument};
  static FakeKernel kernel{&RingKernel};
  CU(comm->cu->launch(reinterpret_cast<CUfunction>(&kernel), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
  if (failed != 0) return kRemote;
  const auto capacity = static_cast<std::uint64_t>(work.element_capacity);
  comm->chunks += 2 * ((count + capacity - 1) / capacity);
  return kSuccess;
}

EXPORT int ncclMemAlloc(void** pointer, size_t bytes) {
  Driver* driver = TheDriver();
  if (driver == nullptr || pointer == nullptr) return kInvalidUsage;
  CUdevice device = 0;
  CU(driver->device(&device));
  Buffer buffer;
  TRY(Allocate(*driver, device, bytes, buffer));
  *pointer = reinterpret_cast<void*>(buffer.address);
  return kSuccess;
}

EXPORT int ncclMemFree(void* pointer) {
  Driver* driver = TheDriver();
  if (driver == nullptr) return kInvalidUsage;
  Buffer buffer;
  buffer.address = reinterpret_cast<CUdeviceptr>(pointer);
  return Free(*driver, buffer);
}

// For tests: imports any descriptor as NCCL would, and calls back from inside this library's code.
EXPORT int fakeNcclImport(int descriptor) {
  Driver* driver = TheDriver();
  if (driver == nullptr) return kInvalidUsage;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver->import_handle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return result == CUDA_SUCCESS ? driver->release(handle) : result;
}

EXPORT int fakeNcclCallBack(int depth, int (*callback)()) {
  static int (*volatile self)(int, int (*)()) = &fakeNcclCallBack;  // volatile: each level stays a frame of its own
  const int result = depth <= 1 ? callback() : self(depth - 1, callback);
  asm volatile("" ::: "memory");
  return result;
}

EXPORT const char* ncclGetErrorString(int result) { return result == 0 ? "no error" : "an error"; }
