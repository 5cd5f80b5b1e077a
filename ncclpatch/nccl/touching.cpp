// Calls with a communicator, in which NCCL may allocate: they only say whose call is under way on this thread.
#include <type_traits>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"

namespace amem::nccl {
namespace {

template <class First, class... Rest>
ncclComm* CommIn(First first, Rest... rest) {
  if constexpr (std::is_same_v<First, ncclComm*>)
    return first;
  else
    return CommIn(rest...);
}

// DataType and operation are enumerations; a window and a registration are pointers.
#define AMEM_TOUCHING(type, name, ...)                                       \
  struct type {                                                              \
    static constexpr const char* kName = name;                               \
    using Function = int(__VA_ARGS__);                                       \
    template <class... Arguments>                                            \
    static void Before(std::size_t place, Arguments... arguments) noexcept { \
      Touch(place, CommIn(arguments...));                                    \
    }                                                                        \
  }

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
AMEM_TOUCHING(Deregister, "ncclCommDeregister", ncclComm*, void*);
AMEM_TOUCHING(WindowRegister, "ncclCommWindowRegister", ncclComm*, void*, std::size_t, void**, int);
AMEM_TOUCHING(WindowDeregister, "ncclCommWindowDeregister", ncclComm*, void*);
AMEM_TOUCHING(DevCommCreate, "ncclDevCommCreate", ncclComm*, const void*, void*);
AMEM_TOUCHING(DevCommDestroy, "ncclDevCommDestroy", ncclComm*, const void*);

#undef AMEM_TOUCHING

}  // namespace

redirects::Table TouchingCalls() {
  return redirects::MakeTable<AllReduce, AllGather, ReduceScatter, Broadcast, Bcast, Reduce, AlltoAll, Gather, Scatter, Send,
                              Recv, PutSignal, Signal, WaitSignal, Register, Deregister, WindowRegister, WindowDeregister,
                              DevCommCreate, DevCommDestroy>();
}

}  // namespace amem::nccl
