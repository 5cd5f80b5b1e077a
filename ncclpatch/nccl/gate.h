// What launches.cpp and the stop (stop.cpp) have in common: all that is counted, under one lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/hook/redirects.h"
#include "ncclpatch/nccl/launches.h"

namespace amem::nccl::launches {

using agreement::ClockId;

inline constexpr std::int32_t kNoDevice = -1;

struct Gate {
  std::uint64_t version = 0;
  agreement::Counts targets;  // as ordered, and as launches here have raised them
  agreement::Counts ordered;
  std::map<ClockId, std::int32_t> of_device;              // whose clocks they are
  std::map<std::int32_t, std::uint32_t> allowed, let_go;  // by device, as the next one
};
// Of a graph, or of what was made of one (graphs.h).
struct CapturedLaunch {
  CommunicatorId id;
  Shape shape{};
  std::int32_t peer = -1;
};
struct Captured {
  enum class Kind : std::uint8_t { kGraph, kMade, kByTheDevice };  // kByTheDevice: made so that the device may launch it
  std::vector<CapturedLaunch> launches;
  // Whether an instantiation of this graph, or of a clone, was seen; clones share the flag.
  std::shared_ptr<bool> instantiated = std::make_shared<bool>(false);
  std::uint64_t capture = 0;  // the capture by which it was filled; 0: by none, or it is a clone
  bool is_open = false;       // that capture was not seen to end; of a clone: when it was made
  bool has_parts = false;     // graphs of their own, in it
  Kind kind = Kind::kGraph;
};
struct All {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<CommunicatorId, std::unique_ptr<Counted>> by_id;
  std::map<const ncclComm*, Counted*> by_address;
  std::deque<CommunicatorId> ended;
  std::map<const void*, Captured> captured;  // by the driver's handles
  std::map<std::int32_t, int> held;          // threads, by device; also while the gate opens and they have not run yet
  Gate gate;
  std::string failed_check;  // the first one; it stays
};
inline All& TheAll() { return Forever<All>(); }

inline constinit std::atomic<bool> g_unknown{false}, g_broken{false}, g_captured_somewhere{false};
inline constinit std::atomic<bool> g_written_later{false}, g_forgot{false};
// A bit for each library: those that have launched, and those that were seen asking whether a stream is captured.
inline constinit std::atomic<std::uint32_t> g_launched{0}, g_captures_seen{0};
inline constexpr std::uint32_t kOfSomeLibrary = std::uint32_t{1} << redirects::kLibraries;

// A question from an unknown library counts if only one library has launched.
inline bool CapturesAreSeen() {
  const std::uint32_t launched = g_launched.load(), seen = g_captures_seen.load();
  return (launched & ~seen) == 0 || (std::has_single_bit(launched) && (seen & kOfSomeLibrary) != 0);
}

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

// NCCL's call that ends a communicator waits for its kernels, except in a group, in the background, or while another rank of
// this process has not ended the communicator.
inline bool MayStillRun(const All& all, const Counted& of) {
  if (!of.ended() || (of.streams.all().empty() && of.streams.unawaited() == nullptr)) return false;
  return of.lifetime.still_ends.load() != nullptr ||
         (of.member.ranks > 1 && std::ranges::any_of(all.by_id, [&](const auto& one) {
            return !one.second->ended() && one.second->member.name == of.member.name;
          }));
}

inline std::set<std::int32_t> DevicesOf(const All& all) {
  std::set<std::int32_t> devices;
  for (const auto& [id, counted] : all.by_id)
    if (!counted->ended()) devices.insert(counted->member.device);
  return devices;
}

template <class Take>
void ForEachClock(const All& all, const Take& take) {
  for (const auto& [id, counted] : all.by_id) {
    const Member& of = counted->member;
    if (of.name == 0 || of.device < 0) continue;  // it is being made
    agreement::ClockReading reading{.communicator = of.name,
                                    .from = -1,
                                    .to = -1,
                                    .rank = of.rank,
                                    .ranks = of.ranks,
                                    .device = of.device,
                                    .launched = counted->counts.collectives(),
                                    .ended = counted->ended()};
    take(reading);
    for (std::int32_t peer = 0; peer < of.ranks; ++peer) {
      for (const bool sends : {true, false}) {
        reading.launched = counted->counts.WithPeer(peer, sends);
        if (reading.launched == 0) continue;
        reading.from = sends ? of.rank : peer;
        reading.to = sends ? peer : of.rank;
        take(reading);
      }
    }
  }
}

}  // namespace amem::nccl::launches
