// For which communicator NCCL allocates on this thread.
#pragma once

#include <cstddef>
#include <span>
#include <tuple>
#include <vector>

#include "ncclpatch/hook/redirects.h"
#include "ncclpatch/nccl/communicators.h"
#include "ncclpatch/nccl/launches.h"
#include "statemachine/types.h"

namespace amem::nccl {

// The communicator that an allocation on this thread would be for: that of NCCL's current call, or, on a thread that NCCL
// started, of the call that started it. Zero: unknown, or one of several in a group. Reads only this thread's variables, and
// the registry for the number.
CommunicatorId CurrentCommunicator() noexcept;

// From now on threads that NCCL starts are known for what OnServiceThread says. Call it before NCCL makes a communicator.
void TellServiceThreads() noexcept;
// Whether this is a thread that NCCL started to serve a communicator's connections (its proxy), or one of those that such a
// thread started. False where that cannot be told.
//
// NCCL starts service threads while it makes a communicator: in the program's call, or on a thread that runs a part of a group
// of calls. The latter are started for other calls of a group as well, for windows for example, and by others that run the same
// function; so a thread that was started by one of NCCL's counts if its function is another one.
bool OnServiceThread() noexcept;

// Called in the program's call that ends a communicator, or takes it from its peers: before NCCL is called (`begins`), when
// whatever keeps a thread of that communicator waiting must let it go, because NCCL waits for it; and after. Must not throw.
using Ending = void (*)(CommunicatorId id, bool begins);
void SetEnding(Ending ending) noexcept;
void TellEnding(CommunicatorId id, bool begins) noexcept;

// The replacements of libnccl's ways to start a thread: the new thread inherits this one's communicator.
std::span<const redirects::ThreadStart> ThreadStarts();

// ---- for the calls of this folder

// A communicator requested inside a group gets its address and result at the group's end.
struct Pending {
  CommunicatorId id;
  ncclComm** out;
  ncclComm* written;  // NCCL wrote the address at once; null: it writes at the end of the group
};

// This thread's open group with one libnccl.
struct Group {
  int depth = 0;
  bool several = false;      // it concerns more than one communicator
  bool resumes = false;      // communicators were resumed in it
  bool settles = false;      // communicators were suspended in it, or ended
  bool aborts = false;       // or revokes: nothing may keep it waiting
  bool ends = false;         // communicators ended in it, as far as the program's calls say
  ncclComm* comm = nullptr;  // the only one that it concerns,
  CommunicatorId id;         // or the one that is made in it
  std::vector<Pending>* pending = nullptr;
};

struct ThreadState {
  ncclComm* comm = nullptr;    // of the last call; only the address counts, its memory may be freed
  CommunicatorId id;           // if set, takes precedence over `comm`
  bool inside = false;         // inside a followed call, so NCCL's calls of its own interface are not the program's
  bool making = false;         // inside a call that makes one communicator
  bool services = false;       // OnServiceThread
  const void* runs = nullptr;  // of a thread that NCCL started: which function, as far as it can be told apart
  Group groups[redirects::kLibraries];
};
extern constinit thread_local ThreadState t_state;

// A call with this communicator begins on this thread. Takes nanoseconds and no lock.
inline void Touch(std::size_t place, ncclComm* comm) noexcept {
  ThreadState& state = t_state;
  state.comm = comm;
  Group& group = state.groups[place];
  if (group.depth == 0) return;
  if (group.comm == nullptr && !group.id)
    group.comm = comm;
  else if (group.comm != comm)
    group.several = true;
}

// A launch that this thread's open group makes at its end.
void Collect(std::size_t place, const launches::Launched& one) noexcept;

// Makes a call of NCCL's, which throws nothing. Meanwhile this thread's calls belong to one communicator and are not followed.
template <class Call>
auto Followed(CommunicatorId id, ncclComm* comm, const Call& call) {
  const auto before = std::tuple(t_state.id, t_state.comm, t_state.inside);
  t_state.id = id;
  t_state.comm = comm;
  t_state.inside = true;
  const auto result = call();
  std::tie(t_state.id, t_state.comm, t_state.inside) = before;
  return result;
}

}  // namespace amem::nccl
