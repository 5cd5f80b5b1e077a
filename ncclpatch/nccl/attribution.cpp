#include "ncclpatch/nccl/attribution.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#define AMEM_START_STANDARD_THREAD "_ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE"
extern "C" void amem_start_standard_thread(void*, std::unique_ptr<std::thread::_State>*,
                                           void (*)()) __asm__(AMEM_START_STANDARD_THREAD);

namespace amem::nccl {

constinit thread_local ThreadState t_state;

namespace {

using Routine = void* (*)(void*);
struct Start {
  Routine routine;
  void* argument;
  CommunicatorId id;
  Origin origin;
};

constinit std::atomic<bool> g_tracks_services{false};
constinit std::atomic<Ending> g_ending{nullptr};

// Of a thread that this one is about to start.
bool Services(const void* runs) noexcept {
  if (!g_tracks_services.load(std::memory_order_relaxed)) return false;
  const void* const starter = t_state.origin.runs;
  return starter == nullptr ? t_state.call.inside == Inside::kMaking : starter != runs;
}

void* Run(void* argument) {
  const Start start = *std::unique_ptr<Start>(static_cast<Start*>(argument));
  t_state.call.id = start.id;
  t_state.origin = start.origin;
  return start.routine(start.argument);
}

int CreateThread(pthread_t* thread, const pthread_attr_t* attributes, Routine routine, void* argument) noexcept {
  const CommunicatorId id = replacements::inert.load(std::memory_order_relaxed) ? CommunicatorId{} : CurrentCommunicator();
  const bool marks = id || g_tracks_services.load(std::memory_order_relaxed);
  const auto* const runs = reinterpret_cast<const void*>(routine);
  Start* start = marks ? new (std::nothrow) Start{routine, argument, id, {runs, Services(runs)}} : nullptr;
  if (start == nullptr) return pthread_create(thread, attributes, routine, argument);
  const int result = pthread_create(thread, attributes, &Run, start);
  if (result != 0) delete start;
  return result;
}

// If libstdc++ is an object of its own, std::thread calls pthread_create in there, and libnccl only calls this.
struct InheritingState final : std::thread::_State {
  InheritingState(std::unique_ptr<std::thread::_State> state, CommunicatorId communicator)
      : own(std::move(state)), id(communicator) {}
  void _M_run() override {
    t_state.call.id = id;
    t_state.origin = origin;
    own->_M_run();
  }
  std::unique_ptr<std::thread::_State> own;
  CommunicatorId id;
  Origin origin;
};

// std::thread::_M_start_thread(the thread, the state by address, depend).
void StartStandardThread(void* thread, std::unique_ptr<std::thread::_State>* state, void (*depend)()) {
  const CommunicatorId id = replacements::inert.load(std::memory_order_relaxed) ? CommunicatorId{} : CurrentCommunicator();
  const bool marks = id || g_tracks_services.load(std::memory_order_relaxed);
  auto* inheriting = marks && *state != nullptr ? new (std::nothrow) InheritingState(nullptr, id) : nullptr;
  if (inheriting == nullptr) return amem_start_standard_thread(thread, state, depend);
  // The type of what the thread runs, which says less than the function does: two of one type are taken for the same.
  std::memcpy(&inheriting->origin.runs, static_cast<const void*>(state->get()), sizeof inheriting->origin.runs);
  inheriting->origin.services = Services(inheriting->origin.runs);
  inheriting->own = std::move(*state);
  std::unique_ptr<std::thread::_State> wrapped(inheriting);
  amem_start_standard_thread(thread, &wrapped, depend);
}

}  // namespace

CommunicatorId CurrentCommunicator() noexcept {
  const CallUnderWay& call = t_state.call;
  return call.id ? call.id : registry::IdOf(call.comm);
}

void TrackServiceThreads() noexcept { g_tracks_services.store(true); }
bool OnServiceThread() noexcept { return t_state.origin.services; }

void SetEnding(Ending ending) noexcept { g_ending.store(ending); }
void NotifyEnding(CommunicatorId id, bool begins) noexcept {
  if (const Ending ending = g_ending.load()) ending(id, begins);
}

std::span<const redirects::ThreadStart> ThreadStarts() {
  static const std::array all = {
      redirects::ThreadStart{"pthread_create", reinterpret_cast<void*>(&pthread_create),
                             reinterpret_cast<void*>(&CreateThread)},
      redirects::ThreadStart{AMEM_START_STANDARD_THREAD, reinterpret_cast<void*>(&amem_start_standard_thread),
                             reinterpret_cast<void*>(&StartStandardThread)}};
  return all;
}

}  // namespace amem::nccl
