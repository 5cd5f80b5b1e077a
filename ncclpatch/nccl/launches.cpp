// What is counted. One lock over all but the counts; the registry's comes before it.
#include "ncclpatch/nccl/launches.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/gate.h"
#include "ncclpatch/nccl/graphs.h"
#include "ncclpatch/nccl/places.h"

namespace amem::nccl::launches {

constinit thread_local ThreadState t_launches;
constinit std::atomic<bool> g_closed{false};
constinit std::atomic<std::uint64_t> g_generation{1};

void LaunchStreams::Add(Stream stream) {
  constexpr std::size_t kMost = 8;
  static const Stream kOfThread = reinterpret_cast<Stream>(2);  // cudaStreamPerThread
  last_.store(stream, std::memory_order_relaxed);
  // For AMem's thread this is another stream than for the program's.
  if (stream == kOfThread) return CannotAwait("on a stream of its thread (cudaStreamPerThread)");
  if (Has(stream)) return;
  if (all_.size() >= kMost) return CannotAwait("on more streams than are known to last");
  all_.push_back(stream);
}

bool LaunchStreams::Remove(Stream stream) {
  if (std::erase(all_, stream) == 0) return false;
  Stream last = stream;  // another may get its handle, and is to be waited for
  last_.compare_exchange_strong(last, kNone);
  return true;
}

namespace {

using agreement::Launcher;

constexpr std::size_t kEndedKept = 64;  // communicators whose other ranks may still have them

void Learn(Counted& counted, const Communicator& known) {
  Member& member = counted.member;
  member.name = known.name;
  member.rank = known.rank;
  member.device = known.device.value;
  if (known.ranks == member.ranks || known.ranks <= 0) return;
  member.ranks = known.ranks;
  counted.counts.SetRanks(known.ranks);
}

// ---- threads

constinit Place g_last_place;  // where there is no memory for one

// At the end of its thread. A key's destructor runs after those of thread_local objects, and again if others that run beside it
// have called NCCL.
void GiveBack(void* place) {
  t_launches.place = nullptr;
  static_cast<Place*>(place)->taken.store(false, std::memory_order_release);
}

void GiveBackAtEnd(Place& place) noexcept {
  static const std::optional<pthread_key_t> key = [] {
    pthread_key_t made{};
    return pthread_key_create(&made, &GiveBack) == 0 ? std::optional(made) : std::nullopt;
  }();
  if (key) static_cast<void>(pthread_setspecific(*key, &place));  // else it is no other thread's
}

Place& FindPlace() noexcept {
  Place* const place = TakePlace();
  if (place == nullptr) g_broken.store(true);
  return place == nullptr ? g_last_place : *place;
}

// ---- under the lock

std::int32_t DeviceOf(const Launched& one) { return one.counted == nullptr ? kNoDevice : one.counted->member.device; }

ClockId ClockOf(const Launched& one) {
  const Member& of = one.counted->member;
  if (one.shape == Shape::kCollective) return agreement::ClockOf(of.name);
  const bool sends = one.shape == Shape::kSend;
  return agreement::ClockOfPair(of.name, sends ? of.rank : one.peer, sends ? one.peer : of.rank);
}

// With what other ranks launched on pairs with it, on which it has launched nothing yet.
Launcher LauncherOf(const All& all, std::int32_t device) {
  Launcher launcher;
  std::set<ClockId> elsewhere;
  ForEachClock(all, [&](const agreement::ClockReading& one) {
    const ClockId clock = agreement::ClockOf(one);
    if (one.ended) return;
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
  g_launched.fetch_or(std::uint32_t{1} << counted.member.place);
  counted.streams.Add(stream);
}

void CountClosed(All& all, std::span<const Launched> launched) {
  for (const Launched& one : launched) {
    // Nobody is to follow it on a communicator that has ended here.
    if (one.shape == Shape::kNothing || (one.counted != nullptr && !one.counted->lives())) continue;
    if (one.counted != nullptr && one.counted->member.name != 0 &&
        (one.shape == Shape::kCollective || one.peer != one.counted->member.rank)) {
      const std::int32_t device = DeviceOf(one);
      Launcher launcher = LauncherOf(all, device);
      const ClockId clock = ClockOf(one);
      agreement::Launched(launcher, {&clock, 1}, all.gate.targets);
    }
    CountOne(one);
  }
}

bool SomeEnd(std::span<const Launched> launched) {
  return std::ranges::any_of(launched, [](const Launched& one) { return one.counted != nullptr && !one.counted->lives(); });
}
void AddHeld(std::span<const Launched> launched, int threads) {
  for (const Launched& one : launched)
    if (one.counted != nullptr) one.counted->lifetime.held += threads;
}

}  // namespace

// ---- what is known -----------------------------------------------------------------------------------------------------

void Began(const Communicator& known) noexcept {
  Locked([&](All& all) {
    auto counted = std::make_unique<Counted>();
    counted->member.id = known.id;
    counted->member.place = known.place;
    Learn(*counted, known);
    all.by_id[known.id] = std::move(counted);
  });
}

void Bound(CommunicatorId id, const ncclComm* address) noexcept {
  WithCounted(id, [&](All& all, Counted& counted) {
    all.by_address[address] = &counted;
    counted.lifetime.life.store(Life::kLives);
    if (counted.member.device < 0) counted.background.Begin();  // until it is ready
    g_generation.fetch_add(1);
  });
}

void Ready(const Communicator& now) noexcept {
  WithCounted(now.id, [&](All&, Counted& counted) {
    Learn(counted, now);
    counted.background.End(counted.background.begun());
  });
}

void Unbound(const ncclComm* address) noexcept {
  Locked([&](All& all) {
    if (auto* const known = FindIn(all.by_address, address)) (*known)->lifetime.life.store(Life::kEnding);
    all.by_address.erase(address);
    g_generation.fetch_add(1);
  });
}

// Of those that have ended and for which no thread waits.
static void ForgetOldest(All& all) {
  for (auto oldest = all.ended.begin(); oldest != all.ended.end(); ++oldest) {
    const auto known = all.by_id.find(*oldest);
    if (known != all.by_id.end() && known->second->lifetime.held != 0) continue;
    if (known != all.by_id.end()) {
      if (MayStillRun(all, *known->second)) g_forgot.store(true);
      all.by_id.erase(known);
    }
    all.ended.erase(oldest);
    return;
  }
}

void Ended(CommunicatorId id) noexcept {
  WithCounted(id, [&](All& all, Counted& counted) {
    std::erase_if(all.by_address, [&](const auto& one) { return one.second == &counted; });
    g_generation.fetch_add(1);
    counted.lifetime.life.store(Life::kEnded);
    all.changed.notify_all();
    all.ended.push_back(id);
    if (all.ended.size() <= kEndedKept) return;
    ForgetOldest(all);
  });
}

void EndsLater(CommunicatorId id, bool in_group) noexcept {
  static constexpr char kInBackground = 0;
  WithCounted(id, [&](All&, Counted& counted) {
    counted.lifetime.still_ends.store(in_group ? static_cast<const void*>(&t_launches) : &kInBackground);
  });
}

void GroupHasEnded() noexcept {
  Locked([](All& all) {
    for (const auto& [id, counted] : all.by_id)
      if (counted->lifetime.still_ends.load() == &t_launches) counted->lifetime.still_ends.store(nullptr);
  });
}

// A group that was held calls NCCL all the same, as if it had done so before the end began. If it waits in there for other
// ranks, it is NCCL's abort that ends its wait.
void LetHeldLeave(CommunicatorId id) noexcept {
  constexpr std::chrono::seconds kPatience{1};
  try {
    All& all = TheAll();
    std::unique_lock lock(all.mutex);
    const auto found = all.by_id.find(id);
    if (found == all.by_id.end() || found->second->lifetime.held == 0) return;
    int& held = found->second->lifetime.held;
    all.changed.notify_all();
    ++held;  // it outlives the wait
    all.changed.wait_for(lock, kPatience, [&] { return held == 1; });
    --held;
  } catch (...) {
    g_broken.store(true);
  }
}

std::uint64_t Begun(const ncclComm* address) noexcept {
  const Counted* const counted = FindCounted(address);
  return counted == nullptr ? 0 : counted->background.begun();
}

void Finished(const ncclComm* address, std::uint64_t begun) noexcept {
  if (Counted* const counted = FindCounted(address); counted != nullptr && counted->member.device >= 0)
    counted->background.End(begun);
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

void WrittenLater() noexcept { g_written_later.store(true); }

// A thread of NCCL's may ask for a call of which this one knows nothing.
static void NoteQuestion() noexcept {
  nccl::ThreadState& state = AddressedOnce(t_state);
  const ncclComm* const comm = state.call.comm;
  const std::uint64_t generation = g_generation.load(std::memory_order_acquire);
  if (state.asked.generation == generation && state.asked.comm == comm) [[likely]]
    return;
  const Counted* const of = comm == nullptr ? nullptr : FindCounted(comm);
  const std::uint32_t whose = of == nullptr ? kOfSomeLibrary : std::uint32_t{1} << of->member.place;
  if ((g_captures_seen.load(std::memory_order_relaxed) & whose) == 0) g_captures_seen.fetch_or(whose);
  state.asked = {comm, generation};
}

void NoteCapture(bool captures, const void* graph, std::uint64_t id) noexcept {
  NoteQuestion();
  if (!captures) return;
  // Else a thread of NCCL's, which launches for a communicator that does not block.
  if (!t_launches.launching) return g_captured_somewhere.store(true);
  Capture& seen = t_launches.capture;
  seen.captures = true;
  if (graph == nullptr) return;
  seen.several = seen.several || (seen.graph != nullptr && (seen.graph != graph || seen.id != id));
  seen.graph = graph;
  seen.id = id;
}

bool IsAwaited(Stream stream) noexcept {
  bool is = false;
  Locked(
      [&](All& all) { is = std::ranges::any_of(all.by_id, [&](const auto& one) { return one.second->streams.Has(stream); }); });
  return is;
}

StreamEnding::StreamEnding(Stream stream) noexcept : stream_(stream) {
  Locked([&](All& all) {
    for (const auto& [id, counted] : all.by_id)
      if (counted->streams.Remove(stream)) of_.push_back(id);
  });
}

void StreamEnding::Done(bool is_gone, bool was_done) noexcept {
  if (is_gone && was_done) return;
  for (const CommunicatorId id : of_)
    WithCounted(id, [&](All&, Counted& counted) {
      if (is_gone)
        counted.streams.CannotAwait("on a stream that was destroyed before it was seen to be done");
      else
        AddStream(counted, stream_);
    });
}

// ---- calls -------------------------------------------------------------------------------------------------------------

Place& PlaceOfThread() noexcept {
  Place& place = FindPlace();
  if (&place != &g_last_place) {
    GiveBackAtEnd(place);
    t_launches.place = &place;
  }
  return place;
}

Entered EnterClosed(const char* call, std::span<const Launched> launched, Made made) noexcept {
  try {
    All& all = TheAll();
    std::unique_lock lock(all.mutex);
    std::set<std::int32_t> devices;
    for (const Launched& one : launched)
      if (one.shape != Shape::kNothing) devices.insert(DeviceOf(one));
    const std::set<std::int32_t> held = devices.empty() ? std::set<std::int32_t>{kNoDevice} : devices;
    if (devices.empty()) devices = DevicesOf(all), devices.insert(kNoDevice);
    for (const std::int32_t device : held) ++all.held[device];
    AddHeld(launched, 1);
    all.changed.wait(lock, [&] { return !g_closed.load() || SomeEnd(launched) || MayGo(all, devices); });
    for (const std::int32_t device : held)
      if (--all.held[device] == 0) all.held.erase(device);
    const bool ends = SomeEnd(launched);
    if (!ends || made == Made::kIfAllLive) AddHeld(launched, -1);
    if (ends) all.changed.notify_all();
    if (ends && made == Made::kIfAllLive) return Entered::kRefused;
    CountClosed(all, launched);  // the targets of a gate that was opened matter no more
    (t_launches.place != nullptr ? *t_launches.place : PlaceOfThread()).inside.store(call, std::memory_order_release);
    return ends ? Entered::kWithEnding : Entered::kCounted;
  } catch (...) {
    g_broken.store(true);
    return Entered::kCounted;
  }
}

void LeftWithEnding(std::span<const Launched> launched) noexcept {
  Locked([&](All& all) {
    AddHeld(launched, -1);
    all.changed.notify_all();
  });
}

// A target that this launch raised, and that no order has, would let a later one through the gate.
static void LowerTarget(All& all, const Launched& one) {
  const ClockId clock = ClockOf(one);
  const auto target = all.gate.targets.find(clock);
  if (target == all.gate.targets.end()) return;
  std::uint64_t most = 0;
  if (const std::uint64_t* const ordered = FindIn(all.gate.ordered, clock)) most = *ordered;
  ForEachClock(all, [&](const agreement::ClockReading& reading) {
    if (agreement::ClockOf(reading) == clock) most = std::max(most, reading.launched);
  });
  target->second = std::min(target->second, most);
}

void Undo(std::span<const Launched> launched) noexcept {
  const auto undo = [&](All* all) {
    for (const Launched& one : launched) {
      // Of one that ended, more may have been launched than is known, and not less.
      if (one.counted == nullptr || !one.counted->lives()) continue;
      AddTo(one, -1);
      if (all != nullptr && one.shape != Shape::kNothing) LowerTarget(*all, one);
    }
  };
  if (!g_closed.load()) return undo(nullptr);
  Locked([&](All& all) { undo(&all); });  // who waits at the gate sees both or neither
}

// All that a group launches on one communicator goes into one graph or into none: NCCL sees to it.
static Capture CaptureOf(const Launched& one, std::span<const Launched> launched, const Capture& seen) noexcept {
  const auto is_on = [&](const Launched& other) { return other.counted == one.counted; };
  const auto known =
      std::ranges::find_if(launched, [&](const Launched& other) { return other.capture.captures && is_on(other); });
  if (known != launched.end()) return known->capture;
  return std::ranges::all_of(launched, is_on) ? seen : Capture{.captures = seen.captures};
}

static void AfterCapture(const Launched& one, const Capture& capture, int result) noexcept {
  if (!capture.captures && one.on_stream) Locked([&](All&) { AddStream(*one.counted, one.stream); });
  if (capture.captures && !(Accepted(result) && graphs::Remember(one, capture)))
    one.counted->captured.store(graphs::kNotFollowed);
}

void AfterLaunch(std::span<const Launched> launched, int result) noexcept {
  const Capture seen = std::exchange(t_launches.capture, {});
  const auto are_captured =
      seen.captures || std::ranges::any_of(launched, [](const Launched& one) { return one.capture.captures; });
  if (are_captured) {
    for (const Launched& one : launched)
      if (one.counted != nullptr) AfterCapture(one, CaptureOf(one, launched, seen), result);
  } else {
    Locked([&](All&) {  // a graph may have many launches
      for (const Launched& one : launched)
        if (!IsOnLastStream(one)) AddStream(*one.counted, one.stream);
    });
  }
  if (result == kInProgress)
    for (const Launched& one : launched)
      if (one.counted != nullptr) one.counted->background.Begin();
  if (!Accepted(result)) Undo(launched);
}

void BeforeFork() { TheAll().mutex.lock(); }
void AfterFork() { TheAll().mutex.unlock(); }

}  // namespace amem::nccl::launches
