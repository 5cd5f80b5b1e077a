// How a stop is carried out here: the gate is closed and opened, and what was counted is told.
#include <algorithm>
#include <cstdio>
#include <tuple>

#include "ncclpatch/nccl/gate.h"
#include "ncclpatch/nccl/places.h"
#include "statemachine/check.h"

namespace amem::nccl::launches {
namespace {

constexpr std::size_t kMostClocks = 1500;  // that one message has room for
constexpr std::size_t kMostThreads = 4;    // that a message tells of

std::string NameOf(const Counted& counted) {
  const Member& of = counted.member;
  char text[64];
  std::snprintf(text, sizeof text, "communicator 0x%llx (%d ranks)", static_cast<unsigned long long>(of.name), of.ranks);
  return text;
}

// What holds whenever the lock is free: who has an address lives, who has ended is known, and a device that is held has
// threads.
Status Check(const All& all) {
  std::set<const Counted*> living;
  for (const auto& [id, counted] : all.by_id) {
    AMEM_CHECK(counted->member.id == id);
    AMEM_CHECK(counted->lifetime.held >= 0, id);
    if (!counted->ended()) living.insert(counted.get());
  }
  for (const auto& [address, counted] : all.by_address) AMEM_CHECK(living.contains(counted), living.size());
  for (const CommunicatorId id : all.ended) {
    const auto known = all.by_id.find(id);
    AMEM_CHECK(known != all.by_id.end(), id);
    AMEM_CHECK(known->second->ended(), id);
  }
  for (const auto& [device, threads] : all.held) AMEM_CHECK(threads > 0, device);
  return {};
}

// Without memory nothing is checked: the gate must open all the same, and the next stop checks again.
void CheckAndNote(All& all) noexcept {
  if (!all.failed_check.empty()) return;
  try {
    if (const Status status = Check(all); !status.ok()) all.failed_check = status.message();
  } catch (...) {
  }
}

// A stream may be gone with its communicator, so that only those of living ones are waited for.
std::string WhyEndedOneCounts(const All& all) {
  if (g_forgot.load()) return "many communicators have ended of which it is not known whether their kernels have";
  std::set<std::pair<std::int32_t, Stream>> awaited;
  for (const auto& [id, counted] : all.by_id)
    if (!counted->ended())
      for (const Stream stream : counted->streams.all()) awaited.emplace(counted->member.device, stream);
  for (const auto& [id, counted] : all.by_id) {
    const Counted& of = *counted;
    if (!MayStillRun(all, of)) continue;
    const auto is_awaited = [&](const Stream stream) { return awaited.contains({of.member.device, stream}); };
    if (of.streams.unawaited() != nullptr || !std::ranges::all_of(of.streams.all(), is_awaited))
      return NameOf(of) + " has ended, but perhaps not yet what it launched";
  }
  return "";
}

bool SomeLive(const All& all, const Captured& captured) {
  return std::ranges::any_of(captured.launches, [&](const CapturedLaunch& one) {
    const auto of = all.by_id.find(one.id);
    return of != all.by_id.end() && !of->second->ended();
  });
}

std::string WhyNot(const Counted& of) {
  if (const char* const call = of.uncounted.load()) return std::string(call) + " on " + NameOf(of) + " is not counted";
  if (const char* const why_not = of.captured.load())
    return "launches of " + NameOf(of) + " were captured into a CUDA graph" + why_not;
  if (const char* const where = of.streams.unawaited()) return NameOf(of) + " has launched " + where;
  if (of.member.name == 0 && of.member.ranks != 1)
    return "a communicator of " + std::to_string(of.member.ranks) + " ranks has no name that they share";
  return "";
}

std::string WhyNot(const All& all) {
  if (!all.failed_check.empty()) return "what it launches is not known for sure, because AMem is wrong: " + all.failed_check;
  if (g_broken.load()) return "what it launches could not be counted, for lack of memory";
  if (!CanMakeThreadsSeen()) return "this kernel has no membarrier, without which launches cannot be held";
  if (g_unknown.load())
    return g_written_later.load()
               ? "it has a communicator that NCCL made in the background (blocking = 0) and whose address it wrote "
                 "after the call, where AMem does not see it"
               : "it has a communicator that was made before AMem was there";
  if (g_captured_somewhere.load())
    return "launches of NCCL's were captured into a CUDA graph on a thread of NCCL's, or by a call that is not counted";
  std::set<std::tuple<std::uint64_t, std::int32_t>> places;
  for (const auto& [id, counted] : all.by_id) {
    const Counted& of = *counted;
    if (of.ended()) continue;
    if (std::string why_not = WhyNot(of); !why_not.empty()) return why_not;
    if (of.member.name != 0 && !places.emplace(of.member.name, of.member.device).second)
      return NameOf(of) + " has two ranks on one GPU of this process";
  }
  for (const auto& [handle, captured] : all.captured)
    if (!*captured.instantiated && SomeLive(all, captured))
      return "launches of NCCL's were captured into a CUDA graph that nobody was seen to instantiate";
  if (!CapturesAreSeen())
    return "NCCL's questions whether a stream is captured are not seen, so launches may be in CUDA graphs";
  return WhyEndedOneCounts(all);
}

std::string Inside(const All& all) {
  for (const Place* place = FirstPlace(); place != nullptr; place = place->next)
    if (const char* const call = place->inside.load(std::memory_order_acquire)) {
      const auto on = all.by_id.find(CommunicatorId{place->on.load(std::memory_order_relaxed)});
      return on == all.by_id.end() || on->second->member.name == 0 ? call : std::string(call) + " on " + NameOf(*on->second);
    }
  for (const auto& [id, counted] : all.by_id)
    if (counted->background.goes_on() && !counted->ended())
      return "a call that goes on in the background for " + NameOf(*counted);
  return "";
}

std::vector<std::uint32_t> Threads() {
  std::vector<std::uint32_t> threads;
  for (const Place* place = FirstPlace(); place != nullptr && threads.size() < kMostThreads; place = place->next)
    if (const pid_t thread = place->thread.load(); thread != 0 && place->taken.load())
      threads.push_back(static_cast<std::uint32_t>(thread));
  return threads;
}

agreement::LaunchReading ReadLocked(const All& all) {
  agreement::LaunchReading reading;
  reading.why_not = WhyNot(all);
  if (!g_closed.load()) return reading;
  reading.version = all.gate.version;
  reading.inside = Inside(all);  // first: what is not inside has been counted
  reading.threads = Threads();
  ForEachClock(all, [&](const agreement::ClockReading& one) { reading.clocks.push_back(one); });
  if (reading.clocks.size() > kMostClocks) {
    reading.why_not =
        "it launches on " + std::to_string(reading.clocks.size()) + " communicators and pairs of ranks, more than can be told";
    reading.clocks.clear();
  }
  std::set<std::int32_t> devices = DevicesOf(all);
  for (const auto& [device, count] : all.held) devices.insert(device);
  for (const std::int32_t device : devices) {
    const int* const held = FindIn(all.held, device);
    const std::uint32_t* const let_go = FindIn(all.gate.let_go, device);
    reading.seats.push_back(
        {.device = device, .held = held != nullptr && *held > 0, .let_go = let_go == nullptr ? 0 : *let_go});
  }
  return reading;
}

}  // namespace

agreement::LaunchReading Read() {
  All& all = TheAll();
  const std::lock_guard lock(all.mutex);
  return ReadLocked(all);
}

agreement::LaunchReading Hold(const agreement::LaunchOrder& order) {
  All& all = TheAll();
  const std::lock_guard lock(all.mutex);
  Gate& gate = all.gate;
  CheckAndNote(all);
  if (!g_closed.load()) {
    gate = {};
    g_closed.store(true);
    MakeThreadsSeen();
  }
  if (order.version != gate.version) gate.of_device.clear();  // what has ended is in it no more
  for (const agreement::LaunchTarget& target : order.targets) {
    for (agreement::Counts* const counts : {&gate.targets, &gate.ordered}) {
      std::uint64_t& count = (*counts)[ClockId{target.clock}];
      count = std::max(count, target.count);
    }
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
  CheckAndNote(all);
}

int HeldNow() {
  All& all = TheAll();
  const std::lock_guard lock(all.mutex);
  int threads = 0;
  for (const auto& [device, held] : all.held) threads += held;
  return threads;
}

std::vector<std::pair<DeviceOrdinal, Stream>> Streams() {
  All& all = TheAll();
  const std::lock_guard lock(all.mutex);
  std::set<std::pair<std::int32_t, Stream>> streams;
  for (const auto& [id, counted] : all.by_id)
    if (!counted->ended())
      for (const Stream stream : counted->streams.all()) streams.emplace(counted->member.device, stream);
  std::vector<std::pair<DeviceOrdinal, Stream>> found;
  for (const auto& [device, stream] : streams) found.emplace_back(DeviceOrdinal{device}, stream);
  return found;
}

}  // namespace amem::nccl::launches
