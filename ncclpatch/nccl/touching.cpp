// Calls with a communicator in which NCCL may allocate: they say whose call runs on this thread. Most are refused with a
// suspended communicator.
#include <tuple>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"

namespace amem::nccl {
namespace {

// DataType and operation are enumerations; windows and registrations are pointers.
#define AMEM_CALL_WITH(type, name, suspended, ...)                          \
  struct type {                                                             \
    static constexpr const char* kName = name;                              \
    using Function = int(__VA_ARGS__);                                      \
    template <class... Arguments>                                           \
    static int Before(std::size_t place, Arguments... arguments) noexcept { \
      ncclComm* const comm = std::get<ncclComm*>(std::tuple(arguments...)); \
      Touch(place, comm);                                                   \
      return suspended;                                                     \
    }                                                                       \
  }
// Refused if the communicator is suspended.
#define AMEM_TOUCHING(type, name, ...) AMEM_CALL_WITH(type, name, RefusalOf(kName, comm), __VA_ARGS__)
// Gives something back, so it is always allowed.
#define AMEM_LEAVING(type, name, ...) AMEM_CALL_WITH(type, name, kSuccess, __VA_ARGS__)

AMEM_TOUCHING(AllReduce, "ncclAllReduce", const void*, void*, std::size_t, int, int, ncclComm*, Stream);
AMEM_TOUCHING(AllGather, "ncclAllGather", const void*, void*, std::size_t, int, ncclComm*, Stream);
AMEM_TOUCHING(ReduceScatter, "ncclReduceScatter", const void*, void*, std::size_t, int, int, ncclComm*, Stream);
AMEM_TOUCHING(Broadcast, "ncclBroadcast", const void*, void*, std::size_t, int, int, ncclComm*, Stream);
AMEM_TOUCHING(Bcast, "ncclBcast", void*, std::size_t, int, int, ncclComm*, Stream);
AMEM_TOUCHING(Reduce, "ncclReduce", const void*, void*, std::size_t, int, int, int, ncclComm*, Stream);
AMEM_TOUCHING(AlltoAll, "ncclAlltoAll", const void*, void*, std::size_t, int, ncclComm*, Stream);
AMEM_TOUCHING(Gather, "ncclGather", const void*, void*, std::size_t, int, int, ncclComm*, Stream);
AMEM_TOUCHING(Scatter, "ncclScatter", const void*, void*, std::size_t, int, int, ncclComm*, Stream);
AMEM_TOUCHING(Send, "ncclSend", const void*, std::size_t, int, int, ncclComm*, Stream);
AMEM_TOUCHING(Recv, "ncclRecv", void*, std::size_t, int, int, ncclComm*, Stream);
AMEM_TOUCHING(PutSignal, "ncclPutSignal", const void*, std::size_t, int, int, void*, std::size_t, int, int, unsigned, ncclComm*,
              Stream);
AMEM_TOUCHING(Signal, "ncclSignal", int, int, int, unsigned, ncclComm*, Stream);
AMEM_TOUCHING(WaitSignal, "ncclWaitSignal", int, void*, ncclComm*, Stream);
AMEM_TOUCHING(Register, "ncclCommRegister", ncclComm*, void*, std::size_t, void**);
AMEM_LEAVING(Deregister, "ncclCommDeregister", ncclComm*, void*);
AMEM_TOUCHING(WindowRegister, "ncclCommWindowRegister", ncclComm*, void*, std::size_t, void**, int);
AMEM_LEAVING(WindowDeregister, "ncclCommWindowDeregister", ncclComm*, void*);
AMEM_TOUCHING(DevCommCreate, "ncclDevCommCreate", ncclComm*, const void*, void*);
AMEM_LEAVING(DevCommDestroy, "ncclDevCommDestroy", ncclComm*, const void*);

#undef AMEM_LEAVING
#undef AMEM_TOUCHING
#undef AMEM_CALL_WITH

}  // namespace

redirects::Table TouchingCalls() {
  return redirects::MakeTable<AllReduce, AllGather, ReduceScatter, Broadcast, Bcast, Reduce, AlltoAll, Gather, Scatter, Send,
                              Recv, PutSignal, Signal, WaitSignal, Register, Deregister, WindowRegister, WindowDeregister,
                              DevCommCreate, DevCommDestroy>();
}

}  // namespace amem::nccl
