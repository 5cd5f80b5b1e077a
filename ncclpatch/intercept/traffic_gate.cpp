#include "ncclpatch/intercept/traffic_gate.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "ncclpatch/nccl/attribution.h"

namespace amem::intercept {
namespace {

using namespace std::chrono_literals;

// Of all gates.
struct Waiting {
  std::mutex mutex;
  std::condition_variable changed;  // a gate is open again, or a thread is joined
};

}  // namespace

// All at once, so that each has all the time.
std::map<TrafficGate*, std::string> TrafficGate::Shut(const std::set<TrafficGate*>& gates, Deadline until) {
  std::map<TrafficGate*, std::string> why;
  std::set<TrafficGate*> open = gates;
  for (TrafficGate* const gate : gates) gate->BeginsToWait();
  for (const auto began = std::chrono::steady_clock::now();;) {
    // Before the gates are asked, so that none is given up by what it did earlier.
    const Wait wait{.took = std::chrono::steady_clock::now() - began, .ends = Passed(until)};
    std::erase_if(open, [&](TrafficGate* gate) { return gate->ShutOrGiveUp(wait, &why[gate]); });
    if (open.empty()) return why;
    std::this_thread::sleep_for(200us);
  }
}

// A proxy that joins the thread which sends has it complete the sends of a communicator that is destroyed; behind a shut gate
// they would be refused.
TrafficGate::Traffic TrafficGate::Busy() {
  if (nccl::AServiceThreadJoins()) return {"a communicator is being ended, whose sends may be under way"};
  return UnderWay();
}

bool TrafficGate::ShutOrGiveUp(const Wait& wait, std::string* why) {
  constexpr auto kShort = 50ms;
  Traffic traffic = Busy();
  if (traffic.what.empty()) traffic = ShutIfQuiet();
  if (traffic.what.empty()) return true;
  if (wait.ends) WaitedInVain(wait.took);
  if (!traffic.for_ever && !wait.ends && !(traffic.as_before && wait.took >= kShort)) return false;
  *why = traffic.what;
  return true;
}

TrafficGate::Traffic TrafficGate::ShutIfQuiet() {
  constexpr int kTries = 20;  // a thread may be on its way to the wait, or out
  Traffic traffic;
  const bool was_shut = shut_.exchange(true);
  for (int tries = 0; tries < kTries; ++tries) {
    traffic = Busy();
    if (traffic.what.empty()) return {};
    std::this_thread::sleep_for(50us);
  }
  if (!was_shut) Reopen();  // else what an earlier call has deregistered must not be used
  return traffic;
}

void TrafficGate::Reopen() {
  Waiting& waiting = Forever<Waiting>();
  {
    const std::lock_guard lock(waiting.mutex);
    if (!shut_.exchange(false)) return;
  }
  waiting.changed.notify_all();
}

bool TrafficGate::AwaitReopening() {
  Waiting& waiting = Forever<Waiting>();
  std::unique_lock lock(waiting.mutex);
  waiting.changed.wait(lock, [&] { return !IsShut() || nccl::IsJoined(::pthread_self()); });
  return !IsShut();
}

void TrafficGate::ThreadIsJoined() noexcept {
  Waiting& waiting = Forever<Waiting>();
  { const std::lock_guard lock(waiting.mutex); }  // a thread that has just asked waits before it is notified
  waiting.changed.notify_all();
}

}  // namespace amem::intercept
