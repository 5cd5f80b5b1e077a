// cudaIpc between two processes. The other one is forked before either uses the driver, does what it is asked over a pipe, and
// answers in words, which the first one prints.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/gpu/walk/walk.h"

namespace amem::walk {
namespace {

int g_other = -1;
pid_t g_process = -1;

struct Order {
  char what = 0;  // 'o' opens, 'c' closes the nth that is open, 'r' reads, 'w' fills, 'q' ends
  unsigned nth = 0;
  std::size_t at = 0, bytes = 0;
  CUipcMemHandle handle{};
};
struct Reply {
  int result = 0;
  char wrote[120]{};
};

Reply Ask(const Order& order) {
  Reply reply{-1, {}};
  if (write(g_other, &order, sizeof order) != static_cast<ssize_t>(sizeof order) ||
      recv(g_other, &reply, sizeof reply, MSG_WAITALL) != static_cast<ssize_t>(sizeof reply))
    SayText("the other process does not answer");
  return reply;
}
void SayReply(const std::string& asked, const Order& order) {
  const Reply reply = Ask(order);
  SAY("other: " + asked, static_cast<CUresult>(reply.result), reply.wrote);
}

void Serve(int pipe) {
  static CUdeviceptr open[16] = {};
  CUcontext primary = nullptr;
  CUresult begun = CUDA_ERROR_NOT_INITIALIZED;
  Order order;
  while (recv(pipe, &order, sizeof order, MSG_WAITALL) == static_cast<ssize_t>(sizeof order) && order.what != 'q') {
    if (primary == nullptr) {  // not before it is needed: its context takes memory that other chapters would miss
      Driver::Open(Way::kRuntime);
      begun = CALL(cuInit, 0);
      if (begun == CUDA_SUCCESS) begun = CALL(cuDevicePrimaryCtxRetain, &primary, 0);
      if (begun == CUDA_SUCCESS) begun = CALL(cuCtxSetCurrent, primary);
    }
    Reply reply{begun, {}};
    CUdeviceptr& memory = open[order.nth % 16];
    std::string wrote;
    if (begun == CUDA_SUCCESS && order.what == 'o') {
      reply.result = CALL(cuIpcOpenMemHandle, &memory, order.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
      if (reply.result == CUDA_SUCCESS) {
        Know("x" + std::to_string(order.nth), memory, 1);
        CUdeviceptr base = 0;
        std::size_t bytes = 0;
        const int range = CALL(cuMemGetAddressRange, &base, &bytes, memory);
        std::uint64_t size = 0;
        CALL(cuPointerGetAttribute, &size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, memory);
        std::string same = "new";
        for (unsigned i = 0; i < 16; ++i)
          if (i != order.nth && open[i] == memory) same = "as before";
        wrote = "range " + std::to_string(range) + " of " + std::to_string(bytes) + " from " + std::to_string(memory - base) +
                " before, RANGE_SIZE " + std::to_string(size) + ", " + same;
      }
    } else if (begun == CUDA_SUCCESS && order.what == 'c') {
      reply.result = CALL(cuIpcCloseMemHandle, memory + order.at);
    } else if (begun == CUDA_SUCCESS && order.what == 'f') {
      reply.result = CALL(cuMemFree, memory);
    } else if (begun == CUDA_SUCCESS && order.what == 'g') {
      CUipcMemHandle handle{};
      reply.result = CALL(cuIpcGetMemHandle, &handle, memory);
    } else if (begun == CUDA_SUCCESS && order.what == 'r') {
      unsigned char byte = 0;
      reply.result = CALL(cuMemcpyDtoH, &byte, memory + order.at, 1);
      wrote = std::to_string(byte);
    } else if (begun == CUDA_SUCCESS && order.what == 'w') {
      reply.result = CALL(cuMemsetD8, memory + order.at, 0x77, order.bytes);
      CALL(cuStreamSynchronize, nullptr);
    }
    std::strncpy(reply.wrote, wrote.c_str(), sizeof reply.wrote - 1);
    if (write(pipe, &reply, sizeof reply) != static_cast<ssize_t>(sizeof reply)) break;
  }
}

void OneAllocation(std::size_t bytes, unsigned nth) {
  const std::string name = std::to_string(bytes);
  CUdeviceptr memory = 0;
  SAY("cuMemAlloc " + name, CALL(cuMemAlloc, &memory, bytes));
  SAY("fill", CALL(cuMemsetD8, memory, 0x42, bytes));
  SAY("cuStreamSynchronize", CALL(cuStreamSynchronize, nullptr));
  CUipcMemHandle handle{}, again{}, inside{};
  SAY("IPC handle " + name, CALL(cuIpcGetMemHandle, &handle, memory));
  SAY("IPC handle again " + name, CALL(cuIpcGetMemHandle, &again, memory),
      std::memcmp(&handle, &again, sizeof handle) == 0 ? "the same" : "another");
  SAY("IPC handle inside " + name, CALL(cuIpcGetMemHandle, &inside, memory + bytes / 2));
  CUdeviceptr own = 0;
  SAY("open it here " + name, CALL(cuIpcOpenMemHandle, &own, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  const auto order = [&](char what, std::size_t at = 0) {
    Order one;
    one.what = what;
    one.nth = nth;
    one.at = at;
    one.bytes = 1;
    one.handle = handle;
    return one;
  };
  SayReply("open " + name, order('o'));
  SayReply("read the last byte of " + name, order('r', bytes - 1));
  SayReply("read far behind " + name, order('r', bytes + (std::size_t{4} << 20)));
  SayReply("fill the last byte of " + name, order('w', bytes - 1));
  unsigned char byte = 0;
  SAY("read the last byte", CALL(cuMemcpyDtoH, &byte, memory + bytes - 1, 1), std::to_string(byte));
  SayReply("free what is open " + name, order('f'));
  SayReply("IPC handle of what is open " + name, order('g'));
  Order second = order('o');
  second.nth = nth + 1;
  SayReply("open again " + name, second);
  second.what = 'c';
  SayReply("close inside " + name, order('c', 1));
  SayReply("close once " + name, second);
  SayReply("close " + name, order('c'));
  SayReply("close once too often " + name, order('c'));
  SAY("cuMemFree " + name, CALL(cuMemFree, memory));
}

}  // namespace

bool StartOther() {
  int pipes[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pipes) != 0) return true;
  g_process = fork();
  if (g_process == 0) {
    close(pipes[0]);
    Serve(pipes[1]);
    return false;
  }
  close(pipes[1]);
  g_other = pipes[0];
  return true;
}

void Ipc() {
  Chapter("IPC");
  OneAllocation(5000, 0);
  OneAllocation(std::size_t{5'000'000}, 2);
  OneAllocation(std::size_t{20} << 20, 4);
  CUdeviceptr memory = 0;
  CUipcMemHandle handle{};
  SAY("open nothing", CALL(cuIpcOpenMemHandle, &memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  SAY("IPC handle of nothing", CALL(cuIpcGetMemHandle, &handle, 0x1000));
  SAY("close nothing", CALL(cuIpcCloseMemHandle, 0x1000));
  Order end;
  end.what = 'q';
  static_cast<void>(!write(g_other, &end, sizeof end));
  close(g_other);
  int status = 0;
  waitpid(g_process, &status, 0);
  SayText("the other process ended: " + std::to_string(status));
}

}  // namespace amem::walk
