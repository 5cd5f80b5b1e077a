#include "ncclpatch/nccl/attribution.h"

#include <pthread.h>

#include <memory>
#include <new>

#include "ncclpatch/nccl/communicators.h"

namespace amem::nccl {

constinit thread_local ThreadState t_state;

namespace {

using Routine = void* (*)(void*);
struct Start {
  Routine routine;
  void* argument;
  CommunicatorId id;
};

void* Run(void* argument) {
  const Start start = *std::unique_ptr<Start>(static_cast<Start*>(argument));
  t_state.id = start.id;
  return start.routine(start.argument);
}

int CreateThread(pthread_t* thread, const pthread_attr_t* attributes, Routine routine, void* argument) noexcept {
  const CommunicatorId id = replacements::inert.load(std::memory_order_relaxed) ? CommunicatorId{} : CurrentCommunicator();
  Start* start = id ? new (std::nothrow) Start{routine, argument, id} : nullptr;
  if (start == nullptr) return pthread_create(thread, attributes, routine, argument);
  const int result = pthread_create(thread, attributes, &Run, start);
  if (result != 0) delete start;
  return result;
}

}  // namespace

CommunicatorId CurrentCommunicator() noexcept { return t_state.id ? t_state.id : registry::IdOf(t_state.comm); }

void* ThreadStart() { return reinterpret_cast<void*>(&CreateThread); }

}  // namespace amem::nccl
