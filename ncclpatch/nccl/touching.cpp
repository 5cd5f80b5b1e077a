// Calls with a communicator in which NCCL may allocate: they say whose call runs on this thread. Most are refused with a
// suspended communicator.
#include <tuple>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"

namespace amem::nccl {
namespace {

template <replacements::Text Name, bool refused, class... Arguments>
struct CallWith {
  static constexpr const char* kName = Name.data;
  using Function = int(Arguments...);
  static int Before(std::size_t place, Arguments... arguments) noexcept {
    ncclComm* const comm = std::get<ncclComm*>(std::tuple(arguments...));
    Touch(place, comm);
    return refused ? RefusalOf(kName, comm) : kSuccess;
  }
};
// Refused if the communicator is suspended.
template <replacements::Text Name, class... Arguments>
using Touching = CallWith<Name, true, Arguments...>;
// Gives something back, so it is always allowed.
template <replacements::Text Name, class... Arguments>
using Leaving = CallWith<Name, false, Arguments...>;

// DataType and operation are enumerations; windows and registrations are pointers.
using AllReduce = Touching<"ncclAllReduce", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using AllGather = Touching<"ncclAllGather", const void*, void*, std::size_t, int, ncclComm*, Stream>;
using ReduceScatter = Touching<"ncclReduceScatter", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using Broadcast = Touching<"ncclBroadcast", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using Bcast = Touching<"ncclBcast", void*, std::size_t, int, int, ncclComm*, Stream>;
using Reduce = Touching<"ncclReduce", const void*, void*, std::size_t, int, int, int, ncclComm*, Stream>;
using AlltoAll = Touching<"ncclAlltoAll", const void*, void*, std::size_t, int, ncclComm*, Stream>;
using Gather = Touching<"ncclGather", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using Scatter = Touching<"ncclScatter", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using Send = Touching<"ncclSend", const void*, std::size_t, int, int, ncclComm*, Stream>;
using Recv = Touching<"ncclRecv", void*, std::size_t, int, int, ncclComm*, Stream>;
using PutSignal =
    Touching<"ncclPutSignal", const void*, std::size_t, int, int, void*, std::size_t, int, int, unsigned, ncclComm*, Stream>;
using Signal = Touching<"ncclSignal", int, int, int, unsigned, ncclComm*, Stream>;
using WaitSignal = Touching<"ncclWaitSignal", int, void*, ncclComm*, Stream>;
using Register = Touching<"ncclCommRegister", ncclComm*, void*, std::size_t, void**>;
using Deregister = Leaving<"ncclCommDeregister", ncclComm*, void*>;
using WindowRegister = Touching<"ncclCommWindowRegister", ncclComm*, void*, std::size_t, void**, int>;
using WindowDeregister = Leaving<"ncclCommWindowDeregister", ncclComm*, void*>;
using DevCommCreate = Touching<"ncclDevCommCreate", ncclComm*, const void*, void*>;
using DevCommDestroy = Leaving<"ncclDevCommDestroy", ncclComm*, const void*>;

}  // namespace

redirects::Table TouchingCalls() {
  return redirects::MakeTable<AllReduce, AllGather, ReduceScatter, Broadcast, Bcast, Reduce, AlltoAll, Gather, Scatter, Send,
                              Recv, PutSignal, Signal, WaitSignal, Register, Deregister, WindowRegister, WindowDeregister,
                              DevCommCreate, DevCommDestroy>();
}

}  // namespace amem::nccl
