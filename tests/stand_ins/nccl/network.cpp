// For tests: the buffers of connections, in NCCL's order of calls and each by a path of its own. A proxy connects to a card,
// which registers host memory of the connection; then it makes the buffer and registers it, in a region for each protocol.
#include <array>

#include "tests/stand_ins/nccl/nccl.h"

namespace stand_in {
namespace {

using RegisterCall = void*(void* domain, void* address, size_t bytes, int access);

Result Make(size_t bytes, CUdeviceptr* address) {
  Driver* cu = TheDriver();
  if (cu == nullptr || address == nullptr) return kInvalidUsage;
  CUdevice device = 0;
  CU(cu->device(&device));
  Buffer buffer;
  TRY(Allocate(*cu, device, bytes, buffer));
  *address = buffer.address;
  return kSuccess;
}

Result RegisterRegions(RegisterCall* reg_mr, CUdeviceptr address, size_t each, int regions) {
  for (int i = 0; i < regions; ++i)
    if (reg_mr(nullptr, reinterpret_cast<void*>(address + i * each), each, 1) == nullptr) return kSystem;
  return kSuccess;
}

Result Connect(RegisterCall* reg_mr) {
  static std::array<char, 4096> of_connection;
  return RegisterRegions(reg_mr, reinterpret_cast<CUdeviceptr>(of_connection.data()), of_connection.size(), 1);
}

}  // namespace

// Keeps a function, and each of two that are alike, as a frame of its own.
#define APART(name) asm volatile("# " name)

EXPORT int stand_in_nccl_peer_buffer(size_t bytes, CUdeviceptr* address) {
  const Result made = Make(bytes, address);
  APART("peer");
  return made;
}
EXPORT int stand_in_nccl_small_buffer(size_t bytes, CUdeviceptr* address) {
  const Result made = Make(bytes, address);
  APART("small");
  return made;
}
EXPORT int stand_in_nccl_send_buffer(RegisterCall* reg_mr, size_t bytes, size_t region, CUdeviceptr* address) {
  TRY(Connect(reg_mr));
  TRY(Make(bytes, address));
  APART("send");
  return RegisterRegions(reg_mr, *address, region, 2);
}
EXPORT int stand_in_nccl_receive_buffer(RegisterCall* reg_mr, size_t bytes, size_t region, CUdeviceptr* address) {
  TRY(Connect(reg_mr));
  TRY(Make(bytes, address));
  APART("receive");
  return RegisterRegions(reg_mr, *address, region, 2);
}
// What connections share is made before them, and registered by a later call.
EXPORT int stand_in_nccl_shared_buffer(size_t bytes, CUdeviceptr* address) {
  const Result made = Make(bytes, address);
  APART("shared");
  return made;
}
EXPORT int stand_in_nccl_free_buffer(CUdeviceptr address, size_t bytes) {
  Buffer buffer;
  buffer.address = address;
  buffer.bytes = bytes;
  return Free(*TheDriver(), buffer);
}

}  // namespace stand_in
