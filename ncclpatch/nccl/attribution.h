// Whose memory it is that NCCL allocates on this thread now.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ncclpatch/hook/redirects.h"
#include "ncclpatch/nccl/types.h"
#include "statemachine/types.h"

namespace amem::nccl {

// The communicator for which an allocation made on this thread now would be: that of NCCL's call under way, or, on a thread
// that NCCL started, that of the call that started it. Zero: not known, or one of several in a group. Asks no more of the
// thread than its own variables, and the registry for the communicator's number.
CommunicatorId CurrentCommunicator() noexcept;

// What libnccl's ways to start a thread lead to: the new one inherits this thread's current communicator.
std::span<const redirects::ThreadStart> ThreadStarts();

// ---- for the calls of this folder ----------------------------------------------------------------------------------------

// Communicators that NCCL is asked for inside a group have their addresses, and their results, at its end.
struct Pending {
  CommunicatorId id;
  ncclComm** out;
  ncclComm* written;  // NCCL wrote the address at once; null: it does at the end of the group
};

// The group that this thread has open with one libnccl.
struct Group {
  int depth = 0;
  bool several = false;      // it concerns more than one communicator
  bool settles = false;      // communicators were suspended or resumed in it
  ncclComm* comm = nullptr;  // the one that it concerns,
  CommunicatorId id;         // or the one that is being made in it
  std::vector<Pending>* pending = nullptr;
};

struct ThreadState {
  ncclComm* comm = nullptr;  // of the last call with a communicator; its memory may be freed by now, only the address counts
  CommunicatorId id;         // set: counts before `comm`
  bool inside = false;       // of a call that is being followed: NCCL's calls of its own interface are not the program's
  Group groups[redirects::kLibraries];
};
extern constinit thread_local ThreadState t_state;

// A call with this communicator begins on this thread. Some nanoseconds, no lock.
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

// For as long as it lives, this thread's calls are for one communicator and are not followed.
class Following {
 public:
  explicit Following(CommunicatorId id, ncclComm* comm = nullptr)
      : id_(t_state.id), comm_(t_state.comm), inside_(t_state.inside) {
    t_state.id = id;
    t_state.comm = comm;
    t_state.inside = true;
  }
  Following(const Following&) = delete;
  Following& operator=(const Following&) = delete;
  ~Following() {
    t_state.id = id_;
    t_state.comm = comm_;
    t_state.inside = inside_;
  }

 private:
  CommunicatorId id_;
  ncclComm* comm_;
  bool inside_;
};

}  // namespace amem::nccl
