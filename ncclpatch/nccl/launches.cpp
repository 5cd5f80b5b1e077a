// What is counted, and how a stop is carried out here. One lock over all but the counts; the registry's comes before it.
#include "ncclpatch/nccl/launches.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>

#include "ncclpatch/nccl/attribution.h"

namespace amem::nccl::launches {

constinit thread_local ThreadState t_launches;
constinit std::atomic<bool> g_closed{false};
constinit std::atomic<std::uint64_t> g_generation{1};

namespace {

using agreement::ClockId;
using agreement::Launcher;

constexpr std::int32_t kNoDevice = -1;
constexpr std::size_t kMostClocks = 1500;  // that one message has room for
constexpr std::size_t kEndedKept = 64;     // communicators whose other ranks may still have them

const Stream kStreamOfThread = reinterpret_cast<Stream>(2);  // cudaStreamPerThread

struct Gate {
  std::uint64_t version = 0;
  agreement::Counts targets;
  std::map<ClockId, std::int32_t> of_device;              // whose clocks they are
  std::map<std::int32_t, std::uint32_t> allowed, let_go;  // by device, as the next one
  std::map<std::int32_t, int> held;
};
struct All {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<CommunicatorId, std::unique_ptr<Counted>> by_id;
  std::map<const ncclComm*, Counted*> by_address;
  std::deque<CommunicatorId> ended;
  Gate gate;
};
All& TheAll() { return Forever<All>(); }

constinit std::atomic<bool> g_unknown{false}, g_broken{false}, g_captures_seen{false}, g_captured_somewhere{false};
constinit std::atomic<bool> g_launched{false};

// If memory or the lock cannot be had, the process cannot be stopped so any more.
template <class Body>
void Locked(const Body& body) noexcept {
  try {
    All& all = TheAll();
    const std::lock_guard lock(all.mutex);
    body(all);
  } catch (...) {
    g_broken.store(true);
  }
}
template <class Body>
void WithCounted(CommunicatorId id, const Body& body) noexcept {
  Locked([&](All& all) {
    if (const auto found = all.by_id.find(id); found != all.by_id.end()) body(all, *found->second);
  });
}

void Learn(Counted& counted, const Communicator& known) {
  counted.clock = known.clock;
  counted.rank = known.rank;
  counted.device = known.device.value;
  if (known.ranks == counted.ranks || known.ranks <= 0) return;
  counted.ranks = known.ranks;
  counted.pairs = std::vector<Count>(2 * static_cast<std::size_t>(known.ranks));
}

// ---- threads

struct Place {
  std::atomic<const char*> inside{nullptr};
  std::atomic<bool> taken{true};
  Place* next = nullptr;
};
constinit std::atomic<Place*> g_places{nullptr};
constinit Place g_last_place;  // where there is no memory for one

struct GivesBack {
  Place* place = nullptr;
  ~GivesBack() {
    if (place == nullptr) return;
    t_launches.inside = nullptr;
    place->taken.store(false, std::memory_order_release);
  }
};

Place& FindPlace() noexcept {
  for (Place* place = g_places.load(std::memory_order_acquire); place != nullptr; place = place->next) {
    bool taken = false;
    if (place->taken.compare_exchange_strong(taken, true, std::memory_order_acq_rel)) return *place;
  }
  auto* const made = new (std::nothrow) Place;
  if (made == nullptr) {
    g_broken.store(true);
    return g_last_place;
  }
  made->next = g_places.load(std::memory_order_relaxed);
  while (!g_places.compare_exchange_weak(made->next, made, std::memory_order_acq_rel)) {
  }
  return *made;
}

bool CanMakeThreadsSeen() noexcept {
  static const bool can = ::syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  return can;
}
// What other threads stored before this is seen from now on, and they see what was stored here.
void MakeThreadsSeen() noexcept {
  if (CanMakeThreadsSeen()) static_cast<void>(::syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0));
}

// ---- under the lock

std::int32_t DeviceOf(const Launched& one) { return one.counted == nullptr ? kNoDevice : one.counted->device; }

std::set<std::int32_t> DevicesOf(const All& all) {
  std::set<std::int32_t> devices;
  for (const auto& [id, counted] : all.by_id)
    if (!counted->ended.load(std::memory_order_relaxed)) devices.insert(counted->device);
  return devices;
}

ClockId ClockOf(const Launched& one) {
  const Counted& of = *one.counted;
  if (one.shape == Shape::kCollective) return agreement::ClockOf(of.clock);
  const bool sends = one.shape == Shape::kSend;
  return agreement::ClockOfPair(of.clock, sends ? of.rank : one.peer, sends ? one.peer : of.rank);
}

template <class Take>
void ForEachClock(const All& all, const Take& take) {
  for (const auto& [id, counted] : all.by_id) {
    const Counted& of = *counted;
    if (of.clock == 0 || of.device < 0) continue;  // it is being made
    agreement::ClockReading reading{.communicator = of.clock,
                                    .from = -1,
                                    .to = -1,
                                    .rank = of.rank,
                                    .ranks = of.ranks,
                                    .device = of.device,
                                    .launched = of.collectives.value(),
                                    .ended = of.ended.load(std::memory_order_relaxed)};
    take(reading);
    for (std::int32_t peer = 0; peer < of.ranks; ++peer) {
      for (const bool sends : {true, false}) {
        const auto at = static_cast<std::size_t>(sends ? peer : of.ranks + peer);
        reading.launched = of.pairs[at].value();
        if (reading.launched == 0) continue;
        reading.from = sends ? of.rank : peer;
        reading.to = sends ? peer : of.rank;
        take(reading);
      }
    }
  }
}

// With what other ranks launched on pairs with it, on which it has launched nothing yet.
Launcher LauncherOf(const All& all, std::int32_t device) {
  Launcher launcher;
  std::set<ClockId> elsewhere;
  ForEachClock(all, [&](const agreement::ClockReading& one) {
    const ClockId clock = agreement::ClockOf(one);
    if (one.device == device)
      launcher.launched[clock] = one.launched;
    else
      elsewhere.insert(clock);
  });
  for (const auto& [clock, of] : all.gate.of_device)
    if (of == device && !elsewhere.contains(clock)) launcher.launched.try_emplace(clock, 0);
  return launcher;
}

bool MayGo(All& all, const std::set<std::int32_t>& devices) {
  for (const std::int32_t device : devices)
    if (agreement::IsBehind(LauncherOf(all, device), all.gate.targets)) return true;
  for (const std::int32_t device : devices) {
    std::uint32_t& let_go = all.gate.let_go[device];
    if (all.gate.allowed[device] <= let_go) continue;
    ++let_go;
    return true;
  }
  return false;
}

void AddStream(Counted& counted, Stream stream) {
  counted.last_stream.store(stream, std::memory_order_relaxed);
  // For AMem's thread this is another stream than for the program's.
  if (stream == kStreamOfThread) return counted.unawaited.store("on a stream of its thread (cudaStreamPerThread)");
  if (std::ranges::find(counted.streams, stream) != counted.streams.end()) return;
  if (counted.streams.size() >= Counted::kStreams) return counted.unawaited.store("on more streams than are known to last");
  counted.streams.push_back(stream);
}

void CountClosed(All& all, std::span<const Launched> launched) {
  for (const Launched& one : launched) {
    if (one.counted != nullptr && one.counted->clock != 0 &&
        (one.shape == Shape::kCollective || one.peer != one.counted->rank)) {
      const std::int32_t device = DeviceOf(one);
      Launcher launcher = LauncherOf(all, device);
      const ClockId clock = ClockOf(one);
      agreement::Launched(launcher, {&clock, 1}, all.gate.targets);
    }
    CountOne(one);
    if (one.counted != nullptr && one.on_stream) AddStream(*one.counted, one.stream);
  }
}

std::string NameOf(const Counted& of) {
  char text[64];
  std::snprintf(text, sizeof text, "communicator 0x%llx (%d ranks)", static_cast<unsigned long long>(of.clock), of.ranks);
  return text;
}

std::string WhyNot(const All& all) {
  if (g_broken.load()) return "what it launches could not be counted, for lack of memory";
  if (!CanMakeThreadsSeen()) return "this kernel has no membarrier, without which launches cannot be held";
  if (g_unknown.load()) return "it has a communicator that was made before AMem was there";
  if (g_captured_somewhere.load()) return "launches of NCCL's were captured into a CUDA graph, whose own launches are not seen";
  std::set<std::tuple<std::uint64_t, std::int32_t>> places;
  for (const auto& [id, counted] : all.by_id) {
    const Counted& of = *counted;
    if (of.ended.load()) continue;
    if (const char* const call = of.uncounted.load()) return std::string(call) + " on " + NameOf(of) + " is not counted";
    if (of.captured.load())
      return "launches of " + NameOf(of) + " were captured into a CUDA graph, whose own launches are not seen";
    if (const char* const where = of.unawaited.load()) return NameOf(of) + " has launched " + where;
    if (of.clock == 0 && of.ranks != 1)
      return "a communicator of " + std::to_string(of.ranks) + " ranks has no name that they share";
    if (of.clock != 0 && !places.emplace(of.clock, of.device).second)
      return NameOf(of) + " has two ranks on one GPU of this process";
  }
  if (g_launched.load() && !g_captures_seen.load())
    return "NCCL's questions whether a stream is captured are not seen, so launches may be in CUDA graphs";
  return "";
}

std::string Inside(const All& all) {
  for (const Place* place = g_places.load(std::memory_order_acquire); place != nullptr; place = place->next)
    if (const char* const call = place->inside.load(std::memory_order_acquire)) return call;
  for (const auto& [id, counted] : all.by_id)
    if (counted->goes_on.load() && !counted->ended.load())
      return "a call that goes on in the background for " + NameOf(*counted);
  return "";
}

agreement::LaunchReading ReadLocked(const All& all) {
  agreement::LaunchReading reading;
  reading.why_not = WhyNot(all);
  if (!g_closed.load()) return reading;
  reading.version = all.gate.version;
  reading.inside = Inside(all);  // first: what is not inside has been counted
  ForEachClock(all, [&](const agreement::ClockReading& one) { reading.clocks.push_back(one); });
  if (reading.clocks.size() > kMostClocks) {
    reading.why_not =
        "it launches on " + std::to_string(reading.clocks.size()) + " communicators and pairs of ranks, more than can be told";
    reading.clocks.clear();
  }
  std::set<std::int32_t> devices = DevicesOf(all);
  for (const auto& [device, count] : all.gate.held) devices.insert(device);
  for (const std::int32_t device : devices) {
    const int* const held = FindIn(all.gate.held, device);
    const std::uint32_t* const let_go = FindIn(all.gate.let_go, device);
    reading.seats.push_back(
        {.device = device, .held = held != nullptr && *held > 0, .let_go = let_go == nullptr ? 0 : *let_go});
  }
  return reading;
}

}  // namespace

// ---- what is known
// -----------------------------------------------------------------------------------------------------------

void Began(const Communicator& known) noexcept {
  Locked([&](All& all) {
    auto counted = std::make_unique<Counted>();
    counted->id = known.id;
    Learn(*counted, known);
    all.by_id[known.id] = std::move(counted);
  });
}

void Bound(CommunicatorId id, const ncclComm* address) noexcept {
  WithCounted(id, [&](All& all, Counted& counted) {
    all.by_address[address] = &counted;
    if (counted.device < 0) counted.goes_on.store(true);  // until it is ready
    g_generation.fetch_add(1);
  });
}

void Ready(const Communicator& now) noexcept {
  WithCounted(now.id, [&](All&, Counted& counted) {
    Learn(counted, now);
    counted.goes_on.store(false);
  });
}

void Unbound(const ncclComm* address) noexcept {
  Locked([&](All& all) {
    all.by_address.erase(address);
    g_generation.fetch_add(1);
  });
}

void Ended(CommunicatorId id) noexcept {
  WithCounted(id, [&](All& all, Counted& counted) {
    std::erase_if(all.by_address, [&](const auto& one) { return one.second == &counted; });
    g_generation.fetch_add(1);
    counted.ended.store(true);
    all.ended.push_back(id);
    if (all.ended.size() <= kEndedKept) return;
    all.by_id.erase(all.ended.front());
    all.ended.pop_front();
  });
}

void Finished(const ncclComm* address) noexcept {
  if (Counted* const counted = FindCounted(address); counted != nullptr && counted->device >= 0) counted->goes_on.store(false);
}

Counted* LearnCounted(const ncclComm* address) noexcept {
  ThreadState& state = t_launches;
  const std::uint64_t now = g_generation.load(std::memory_order_acquire);
  if (state.generation != now) std::ranges::fill(state.found, ThreadState::Found{});
  state.generation = now;
  Counted* found = nullptr;
  Locked([&](All& all) {
    if (auto* const known = FindIn(all.by_address, address)) found = *known;
  });
  state.found[(reinterpret_cast<std::uintptr_t>(address) >> 12U) % std::size(state.found)] = {address, found};
  return found;
}

void CannotCount(const ncclComm* address, const char* call) noexcept {
  if (Counted* const counted = address == nullptr ? nullptr : FindCounted(address))
    counted->uncounted.store(call);
  else
    g_unknown.store(true);
}

void NoteCapture(bool captures) noexcept {
  g_captures_seen.store(true, std::memory_order_relaxed);
  if (!captures) return;
  if (t_launches.launching)
    t_launches.captures = true;
  else  // a thread of NCCL's, which launches for a communicator that does not block
    g_captured_somewhere.store(true);
}

void NoteStream(Counted& counted, Stream stream) noexcept {
  g_launched.store(true, std::memory_order_relaxed);
  Locked([&](All&) { AddStream(counted, stream); });
}

// ---- calls
// -------------------------------------------------------------------------------------------------------------------

std::atomic<const char*>& PlaceOfThread() noexcept {
  static thread_local GivesBack gives_back;
  Place& place = FindPlace();
  if (&place != &g_last_place) {
    gives_back.place = &place;
    t_launches.inside = &place.inside;
  }
  return place.inside;
}

void EnterClosed(const char* call, std::span<const Launched> launched) noexcept {
  try {
    All& all = TheAll();
    std::unique_lock lock(all.mutex);
    std::set<std::int32_t> devices;
    for (const Launched& one : launched) devices.insert(DeviceOf(one));
    const std::set<std::int32_t> held = devices.empty() ? std::set<std::int32_t>{kNoDevice} : devices;
    if (devices.empty()) devices = DevicesOf(all), devices.insert(kNoDevice);
    for (const std::int32_t device : held) ++all.gate.held[device];
    all.changed.wait(lock, [&] { return !g_closed.load() || MayGo(all, devices); });
    for (const std::int32_t device : held) --all.gate.held[device];
    if (g_closed.load()) {
      CountClosed(all, launched);
    } else {
      for (const Launched& one : launched) CountOne(one);
      for (const Launched& one : launched)
        if (one.counted != nullptr && one.on_stream) AddStream(*one.counted, one.stream);
    }
    if (!launched.empty()) g_launched.store(true, std::memory_order_relaxed);
    (t_launches.inside != nullptr ? *t_launches.inside : PlaceOfThread()).store(call, std::memory_order_release);
  } catch (...) {
    g_broken.store(true);
  }
}

void Undo(std::span<const Launched> launched) noexcept {
  for (const Launched& one : launched)
    if (one.counted != nullptr) AddTo(one, -1);
}

void AfterLaunch(std::span<const Launched> launched, int result) noexcept {
  const bool captured = std::exchange(t_launches.captures, false);
  for (const Launched& one : launched) {
    if (one.counted == nullptr) continue;
    if (captured) one.counted->captured.store(true);
    if (result == kInProgress) one.counted->goes_on.store(true);
  }
  if (!Accepted(result)) Undo(launched);
}

// ---- the stop
// ----------------------------------------------------------------------------------------------------------------

agreement::LaunchReading Read() {
  All& all = TheAll();
  const std::lock_guard lock(all.mutex);
  return ReadLocked(all);
}

agreement::LaunchReading Hold(const agreement::LaunchOrder& order) {
  All& all = TheAll();
  const std::lock_guard lock(all.mutex);
  Gate& gate = all.gate;
  if (!g_closed.load()) {
    gate = {};
    g_closed.store(true);
    MakeThreadsSeen();
  }
  for (const agreement::LaunchTarget& target : order.targets) {
    std::uint64_t& count = gate.targets[ClockId{target.clock}];
    count = std::max(count, target.count);
    gate.of_device[ClockId{target.clock}] = target.device;
  }
  for (const agreement::LaunchSeat& seat : order.seats) gate.allowed[seat.device] = seat.let_go;
  gate.version = order.version;
  all.changed.notify_all();
  return ReadLocked(all);
}

void LetGo() {
  All& all = TheAll();
  const std::lock_guard lock(all.mutex);
  g_closed.store(false);
  all.changed.notify_all();
}

std::vector<std::pair<DeviceOrdinal, Stream>> Streams() {
  All& all = TheAll();
  const std::lock_guard lock(all.mutex);
  std::set<std::pair<std::int32_t, Stream>> streams;
  for (const auto& [id, counted] : all.by_id)
    if (!counted->ended.load())
      for (const Stream stream : counted->streams) streams.emplace(counted->device, stream);
  std::vector<std::pair<DeviceOrdinal, Stream>> found;
  for (const auto& [device, stream] : streams) found.emplace_back(DeviceOrdinal{device}, stream);
  return found;
}

void BeforeFork() { TheAll().mutex.lock(); }
void AfterFork() { TheAll().mutex.unlock(); }

}  // namespace amem::nccl::launches
