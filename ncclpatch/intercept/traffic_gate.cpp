#include "ncclpatch/intercept/traffic_gate.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/nccl/attribution.h"

namespace amem::intercept {
namespace {

using namespace std::chrono_literals;

// Of all gates.
struct Waiting {
  std::mutex mutex;  // guards the others
  std::condition_variable changed;
  int shut = 0;  // so many gates are
  struct Ending {
    CommunicatorId id;
    bool ended = false;
  };
  std::vector<Ending> ending;

  // Of a thread whose communicator is not known, none may be kept.
  [[nodiscard]] bool May(CommunicatorId id) const {
    return std::ranges::none_of(ending, [&](const Ending& one) { return !id || !one.id || one.id == id; });
  }
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

bool TrafficGate::ShutOrGiveUp(const Wait& wait, std::string* why) {
  constexpr auto kShort = 50ms;
  Traffic traffic = UnderWay();
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
  {
    Waiting& waiting = Forever<Waiting>();
    const std::lock_guard lock(waiting.mutex);
    if (!shut_.exchange(true)) ++waiting.shut;
  }
  for (int tries = 0; tries < kTries; ++tries) {
    traffic = UnderWay();
    if (traffic.what.empty()) return {};
    std::this_thread::sleep_for(50us);
  }
  Reopen();
  return traffic;
}

void TrafficGate::Reopen() {
  Waiting& waiting = Forever<Waiting>();
  {
    const std::lock_guard lock(waiting.mutex);
    if (!shut_.exchange(false)) return;
    if (--waiting.shut == 0) std::erase_if(waiting.ending, [](const auto& one) { return one.ended; });
  }
  waiting.changed.notify_all();
}

bool TrafficGate::AwaitReopening() {
  Waiting& waiting = Forever<Waiting>();
  const CommunicatorId communicator = nccl::CurrentCommunicator();
  std::unique_lock lock(waiting.mutex);
  waiting.changed.wait(lock, [&] { return !IsShut() || !waiting.May(communicator); });
  return !IsShut();
}

void TrafficGate::Ending(CommunicatorId id, bool begins) {
  Waiting& waiting = Forever<Waiting>();
  {
    const std::lock_guard lock(waiting.mutex);
    const auto known = std::ranges::find_if(waiting.ending, [&](const auto& one) { return one.id == id && !one.ended; });
    if (begins)
      waiting.ending.push_back({id});
    else if (known != waiting.ending.end() && waiting.shut == 0)
      waiting.ending.erase(known);
    else if (known != waiting.ending.end())
      known->ended = true;
  }
  waiting.changed.notify_all();
}

}  // namespace amem::intercept
