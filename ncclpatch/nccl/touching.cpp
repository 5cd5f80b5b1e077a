// Calls with a communicator in which NCCL may allocate: they say whose call runs on this thread. Most are refused with a
// suspended communicator. Those that launch are counted, and held where a stop is asked for.
#include <tuple>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"
#include "ncclpatch/nccl/launches.h"

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

// Launches, outside a group at once. `peer`: which argument is the other rank.
template <replacements::Text Name, launches::Shape shape, std::size_t peer, class... Arguments>
struct Launching {
  static constexpr const char* kName = Name.data;
  using Function = int(Arguments...);
  template <class Real>
  static int Call(std::size_t place, Real real, Arguments... arguments) noexcept {
    const auto all = std::tuple(arguments...);
    ncclComm* const comm = std::get<ncclComm*>(all);
    const bool is_in_group = Touch(place, comm);
    if (const int answer = RefusalOf(kName, comm)) return answer;
    const auto call = [&]() noexcept { return real(arguments...); };
    launches::ThreadState& state = launches::OfThread();
    if (comm == nullptr || state.launching) return call();
    launches::Launched one{launches::FindCounted(comm, state), shape, -1, std::get<sizeof...(Arguments) - 1>(all)};
    if constexpr (shape != launches::Shape::kCollective) one.peer = std::get<peer>(all);
    if (!is_in_group) return launches::Launch(kName, {&one, 1}, call, launches::Made::kIfAllLive, state);
    const int result = launches::InGroup(one, call);
    if (Accepted(result)) Collect(place, one);
    return result;
  }
};
template <replacements::Text Name, class... Arguments>
using Collective = Launching<Name, launches::Shape::kCollective, 0, Arguments...>;

// What it launches is matched by nothing that is counted.
template <replacements::Text Name, class... Arguments>
struct Uncounted : CallWith<Name, true, Arguments...> {
  static int Before(std::size_t place, Arguments... arguments) noexcept {
    if (ncclComm* const comm = std::get<ncclComm*>(std::tuple(arguments...)); comm != nullptr)
      launches::CannotCount(comm, Name.data);
    return CallWith<Name, true, Arguments...>::Before(place, arguments...);
  }
};

// Made by all ranks of the communicator, which wait for each other.
template <replacements::Text Name, bool refused, class... Arguments>
struct Together {
  static constexpr const char* kName = Name.data;
  using Function = int(Arguments...);
  template <class Real>
  static int Call(std::size_t place, Real real, Arguments... arguments) noexcept {
    ncclComm* const comm = std::get<ncclComm*>(std::tuple(arguments...));
    Touch(place, comm);
    if (const int answer = refused ? RefusalOf(kName, comm) : kSuccess) return answer;
    const auto call = [&]() noexcept { return real(arguments...); };
    if (t_state.groups[place].is_open() || comm == nullptr) return call();
    const launches::Launched one{.counted = launches::FindCounted(comm), .on_stream = false};
    return refused ? launches::Launch(kName, {&one, 1}, call)
                   : launches::Pass(kName, comm, call);  // others may not give it back
  }
};

// Memory for the program. While a job is stopped between launches none can be had, so who asks waits as at a launch.
template <replacements::Text Name, class... Arguments>
struct ForProgram : redirects::Around<ForProgram<Name, Arguments...>, Name> {
  static int With(std::size_t /*place*/, const redirects::Pass& pass, Arguments...) {
    return t_state.is_inside() ? pass() : launches::Pass(Name.data, nullptr, pass);
  }
};
using MemAlloc = ForProgram<"ncclMemAlloc", void**, std::size_t>;
using MemFree = ForProgram<"ncclMemFree", void*>;

// DataType and operation are enumerations; windows and registrations are pointers.
using AllReduce = Collective<"ncclAllReduce", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using AllGather = Collective<"ncclAllGather", const void*, void*, std::size_t, int, ncclComm*, Stream>;
using ReduceScatter = Collective<"ncclReduceScatter", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using Broadcast = Collective<"ncclBroadcast", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using Bcast = Collective<"ncclBcast", void*, std::size_t, int, int, ncclComm*, Stream>;
using Reduce = Collective<"ncclReduce", const void*, void*, std::size_t, int, int, int, ncclComm*, Stream>;
using AlltoAll = Collective<"ncclAlltoAll", const void*, void*, std::size_t, int, ncclComm*, Stream>;
using Gather = Collective<"ncclGather", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using Scatter = Collective<"ncclScatter", const void*, void*, std::size_t, int, int, ncclComm*, Stream>;
using Send = Launching<"ncclSend", launches::Shape::kSend, 3, const void*, std::size_t, int, int, ncclComm*, Stream>;
using Recv = Launching<"ncclRecv", launches::Shape::kReceive, 3, void*, std::size_t, int, int, ncclComm*, Stream>;
using PutSignal =
    Uncounted<"ncclPutSignal", const void*, std::size_t, int, int, void*, std::size_t, int, int, unsigned, ncclComm*, Stream>;
using Signal = Uncounted<"ncclSignal", int, int, int, unsigned, ncclComm*, Stream>;
using WaitSignal = Uncounted<"ncclWaitSignal", int, void*, ncclComm*, Stream>;
using Register = Touching<"ncclCommRegister", ncclComm*, void*, std::size_t, void**>;
using Deregister = Leaving<"ncclCommDeregister", ncclComm*, void*>;
using WindowRegister = Together<"ncclCommWindowRegister", true, ncclComm*, void*, std::size_t, void**, int>;
using WindowDeregister = Together<"ncclCommWindowDeregister", false, ncclComm*, void*>;
using DevCommCreate = Uncounted<"ncclDevCommCreate", ncclComm*, const void*, void*>;
using DevCommDestroy = Leaving<"ncclDevCommDestroy", ncclComm*, const void*>;

}  // namespace

redirects::Table TouchingCalls() {
  return redirects::MakeTable<AllReduce, AllGather, ReduceScatter, Broadcast, Bcast, Reduce, AlltoAll, Gather, Scatter, Send,
                              Recv, PutSignal, Signal, WaitSignal, Register, Deregister, WindowRegister, WindowDeregister,
                              DevCommCreate, DevCommDestroy, MemAlloc, MemFree>();
}

}  // namespace amem::nccl
