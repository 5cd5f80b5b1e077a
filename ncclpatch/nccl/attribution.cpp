#include "ncclpatch/nccl/attribution.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#define AMEM_START_STANDARD_THREAD "_ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE"
extern "C" void amem_start_standard_thread(void*, std::unique_ptr<std::thread::_State>*,
                                           void (*)()) __asm__(AMEM_START_STANDARD_THREAD);
// std::thread::join, the thread by address.
#define AMEM_JOIN_STANDARD_THREAD "_ZNSt6thread4joinEv"
extern "C" void amem_join_standard_thread(std::thread*) __asm__(AMEM_JOIN_STANDARD_THREAD);

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

// A join under way, in a list of all. It lives on the stack of the thread that joins.
class Join {
 public:
  explicit Join(pthread_t thread) noexcept : thread_(thread), by_service_(OnServiceThread()) {
    {
      const std::lock_guard lock(g_mutex);
      next_ = g_first;
      if (next_ != nullptr) next_->previous_ = this;
      g_first = this;
    }
    if (auto* const observer = g_observer.load()) observer();
  }
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  ~Join() {
    const std::lock_guard lock(g_mutex);
    (previous_ != nullptr ? previous_->next_ : g_first) = next_;
    if (next_ != nullptr) next_->previous_ = previous_;
  }

  template <class Wanted>
  [[nodiscard]] static bool Any(const Wanted& wanted) noexcept {
    const std::lock_guard lock(g_mutex);
    for (const Join* one = g_first; one != nullptr; one = one->next_)
      if (std::invoke(wanted, *one)) return true;
    return false;
  }
  static void SetObserver(void (*observer)() noexcept) noexcept { g_observer.store(observer); }
  [[nodiscard]] bool IsOf(pthread_t thread) const noexcept { return pthread_equal(thread_, thread) != 0; }
  [[nodiscard]] bool by_service() const noexcept { return by_service_; }

 private:
  static constinit std::mutex g_mutex;  // guards the list
  static constinit Join* g_first;
  static constinit std::atomic<void (*)() noexcept> g_observer;
  const pthread_t thread_;
  const bool by_service_;
  Join *next_ = nullptr, *previous_ = nullptr;
};
constinit std::mutex Join::g_mutex;
constinit Join* Join::g_first = nullptr;
constinit std::atomic<void (*)() noexcept> Join::g_observer{nullptr};

bool Tracks() noexcept {
  return g_tracks_services.load(std::memory_order_relaxed) && !replacements::inert.load(std::memory_order_relaxed);
}

int JoinThread(pthread_t thread, void** result) {
  if (!Tracks()) return pthread_join(thread, result);
  const Join join(thread);
  return pthread_join(thread, result);
}
void JoinStandardThread(std::thread* thread) {
  if (!Tracks()) return thread->join();
  const Join join(thread->native_handle());
  thread->join();
}

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

bool IsJoined(pthread_t thread) noexcept {
  return Join::Any([&](const Join& one) { return one.IsOf(thread); });
}
bool AServiceThreadJoins() noexcept { return Join::Any(&Join::by_service); }
void SetJoinObserver(void (*observer)() noexcept) noexcept { Join::SetObserver(observer); }

std::span<const redirects::ThreadCall> ThreadCalls() {
  static const auto call = [](const char* name, auto* plain, auto* replacement) {
    return redirects::ThreadCall{name, reinterpret_cast<void*>(plain), reinterpret_cast<void*>(replacement)};
  };
  static const std::array all = {call("pthread_create", &pthread_create, &CreateThread),
                                 call(AMEM_START_STANDARD_THREAD, &amem_start_standard_thread, &StartStandardThread),
                                 call("pthread_join", &pthread_join, &JoinThread),
                                 call(AMEM_JOIN_STANDARD_THREAD, &amem_join_standard_thread, &JoinStandardThread)};
  return all;
}

}  // namespace amem::nccl
