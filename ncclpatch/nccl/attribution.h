// For which communicator NCCL allocates on this thread.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
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
void TrackServiceThreads() noexcept;
// Whether this is a thread that NCCL started to serve a communicator's connections (its proxy), or one of those that such a
// thread started. False where that cannot be told.
//
// NCCL starts service threads while it makes a communicator: in the program's call, or on a thread that runs a part of a group
// of calls. The latter are started for other calls of a group as well, for windows for example, and by others that run the same
// function; so a thread that was started by one of NCCL's counts if its function is another one.
bool OnServiceThread() noexcept;

// NCCL ends a communicator, however the program asks for that, by joining the threads that serve it: the calling thread joins
// the proxy, which joins the thread that sends. So whatever makes a thread wait must let it go once it is joined; which
// communicator it belongs to, and whether others share it, does not matter. Known after TrackServiceThreads. Any thread.
bool IsJoined(pthread_t thread) noexcept;
// Whether a thread that OnServiceThread joins another one: what a communicator has begun is being completed, or given up.
bool AServiceThreadJoins() noexcept;
// Called after each beginning of a join, on the thread that joins.
void SetJoinObserver(void (*observer)() noexcept) noexcept;

// The replacements of libnccl's ways to start a thread, which inherits this one's communicator, and to join one.
std::span<const redirects::ThreadCall> ThreadCalls();

// ---- for the calls of this folder

// A communicator requested inside a group gets its address and result at the group's end.
struct Pending {
  CommunicatorId id;
  ncclComm** out;
  ncclComm* written;  // NCCL wrote the address at once; null: it writes at the end of the group
  registry::CountedPart part;
};

// The one communicator that the calls of a group are about; none if they are about several.
class Subject {
 public:
  constexpr void Add(ncclComm* used) noexcept {
    if (IsNone())
      used_ = used;
    else if (used_ != used)
      several_ = true;
  }
  constexpr void Add(CommunicatorId made) noexcept {
    if (IsNone())
      made_ = made;
    else
      several_ = true;
  }
  [[nodiscard]] constexpr ncclComm* used() const noexcept { return several_ ? nullptr : used_; }
  [[nodiscard]] constexpr CommunicatorId made() const noexcept { return several_ ? CommunicatorId{} : made_; }

 private:
  [[nodiscard]] constexpr bool IsNone() const noexcept { return used_ == nullptr && !made_; }

  ncclComm* used_ = nullptr;
  CommunicatorId made_;
  bool several_ = false;
};

// What the calls of a group do to communicators when it ends.
enum class Effect : std::uint8_t {
  kResumes = 1,   // some are resumed
  kMayPause = 2,  // some are suspended, or the last ended for which suspended ones wait
  kAborts = 4,    // some are aborted or revoked, for which nothing may wait
  kEnds = 8,      // some end, as far as the program's calls say
};

// This thread's open group with one libnccl.
struct Group {
  int depth = 0;
  std::uint8_t effects = 0;
  Subject subject;
  std::vector<Pending>* pending = nullptr;

  [[nodiscard]] constexpr bool is_open() const noexcept { return depth > 0; }
  constexpr void Add(Effect effect) noexcept {
    if (is_open()) effects |= static_cast<std::uint8_t>(effect);
  }
  [[nodiscard]] constexpr bool Has(Effect effect) const noexcept { return (effects & static_cast<std::uint8_t>(effect)) != 0; }
};

// How far a thread is inside NCCL, whose calls of its own interface are not the program's.
enum class Inside : std::uint8_t { kNothing, kCall, kMaking };  // kMaking: a call that makes one communicator

// The call of NCCL's that a thread is in, or its last one.
struct CallUnderWay {
  ncclComm* comm = nullptr;  // only the address counts, its memory may be freed
  CommunicatorId id;         // if set, takes precedence over `comm`
  Inside inside = Inside::kNothing;
};

// Of a thread that NCCL started.
struct Origin {
  const void* runs = nullptr;  // which function, as far as it can be told apart; null: the program's thread
  bool services = false;       // OnServiceThread
};

// NCCL's last question on this thread whether a stream is captured, which has been noted.
struct AskedOfCapture {
  const ncclComm* comm = nullptr;
  std::uint64_t generation = 0;  // of addresses (launches.h)
};

struct ThreadState {
  CallUnderWay call;
  AskedOfCapture asked;
  Origin origin;
  Group groups[redirects::kLibraries];

  [[nodiscard]] bool is_inside() const noexcept { return call.inside != Inside::kNothing; }
};
extern constinit thread_local ThreadState t_state;

// A call with this communicator begins on this thread: whether inside a group. Takes nanoseconds and no lock.
inline bool Touch(std::size_t place, ncclComm* comm) noexcept {
  ThreadState& state = AddressedOnce(t_state);
  state.call.comm = comm;
  Group& group = state.groups[place];
  if (group.is_open()) group.subject.Add(comm);
  return group.is_open();
}

// A launch that this thread's open group makes at its end.
void Collect(std::size_t place, const launches::Launched& one) noexcept;

// Makes a call of NCCL's, which throws nothing. Meanwhile this thread's calls belong to one communicator and are not followed.
template <class Call>
auto Followed(CommunicatorId id, ncclComm* comm, const Call& call, Inside inside = Inside::kCall) {
  const CallUnderWay before = t_state.call;
  t_state.call = {comm, id, std::max(inside, before.inside)};
  const auto result = call();
  t_state.call = before;
  return result;
}

}  // namespace amem::nccl
