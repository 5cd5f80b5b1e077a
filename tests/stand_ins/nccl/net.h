// A network as NCCL knows one: the functions of a plugin's table ncclNetPlugin_v8, in their order. NCCL's own, over a card's
// verbs, is kNetIb; STAND_IN_NET names it ("ib") or a plugin's file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stand_in {

constexpr int kHostMemory = 1, kGpuMemory = 2;  // NCCL_PTR_HOST, NCCL_PTR_CUDA

// All give an ncclResult_t and wait for nothing. Where nothing can be done yet, the communicator or request is null. A request
// is over when `test` has said so once.
struct NetTable {
  const char* name;
  int (*init)(void* log);
  int (*devices)(int* count);
  int (*properties)(int device, void* properties);
  int (*listen)(int device, void* handle, void** listening);
  int (*connect)(int device, void* handle, void** sending, void** device_handle);
  int (*accept)(void* listening, void** receiving, void** device_handle);
  int (*reg_mr)(void* comm, void* data, std::size_t bytes, int type, void** region);
  int (*reg_mr_dma_buf)(void* comm, void* data, std::size_t bytes, int type, std::uint64_t offset, int descriptor,
                        void** region);
  int (*dereg_mr)(void* comm, void* region);
  int (*isend)(void* sending, void* data, int bytes, int tag, void* region, void** request);
  int (*irecv)(void* receiving, int count, void** data, int* bytes, int* tags, void** regions, void** request);
  int (*iflush)(void* receiving, int count, void** data, int* bytes, void** regions, void** request);
  int (*test)(void* request, int* done, int* bytes);
  int (*close_send)(void* sending);
  int (*close_receive)(void* receiving);
  int (*close_listen)(void* listening);
  int (*device_mr)(void* comm, void* region, void** device_region);
  int (*consumed)(void* receiving, int count, void* request);
};

// What `listen` fills in for the other end's `connect`; here it is the caller who gives the name, which both ends know.
struct NetHandle {
  char name[96];
  void* connecting;  // the other end's, between two calls of connect; null at first
};

extern const NetTable kNetIb;

// What one call costs, in nanoseconds, on a connection of kNetIb's: polling a queue with nothing in it, or posting a send that
// the card refuses, on a queue pair that is not connected. The least of several rounds.
double TimeOfPoll(void* connection);
double TimeOfPost(void* connection);

}  // namespace stand_in
