// Memory held: how much a session occupies, by class, kept up to date event by event.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// The classes of memory. Only bytes that are occupied now are counted: memory that a pause released counts as nothing.
enum class MemoryClass : std::uint8_t {
  kOwn = 0,   // own device memory that a pause releases; of slabs all, also what is free in them
  kOwnKept,   // own device memory that a pause leaves in place (registered with a network card, multicast)
  kImported,  // peers' device memory, held through a reference; it occupies the peer's device
  kHost,      // pinned host memory
  kPool,      // of the driver's asynchronous pools
  kDriver,    // cuMemAlloc memory that is the driver's own
  kTagged,    // chunks of pools: memory of the program under a tag
};
inline constexpr std::size_t kMemoryClasses = 7;
using Held = std::array<Bytes, kMemoryClasses>;  // by MemoryClass

Held HeldIn(const State& state);      // summed up anew
Bytes DeviceBytes(const Held& held);  // what occupies this session's device: all but imported and host
Bytes Sum(const Held& held);

// Keeps the sums up to date with what each event touches; where that is not known for a kind, everything is summed up anew.
class HeldCounter {
 public:
  void Recount(const State& state) { held_ = HeldIn(state); }
  void Before(const Event& event, const State& before);
  void After(const State& after);
  [[nodiscard]] const std::vector<AllocationId>& touched() const { return touched_; }
  [[nodiscard]] const Held& held() const { return held_; }

 private:
  struct Looker;
  void Touch(AllocationId id, const State& state);
  void Count(AllocationId id, const State& state, bool add);
  void Add(MemoryClass as, Bytes bytes) { held_[static_cast<std::size_t>(as)] += bytes; }
  void Remove(MemoryClass as, Bytes bytes) { held_[static_cast<std::size_t>(as)] -= bytes; }

  Held held_{};
  std::vector<AllocationId> touched_;
  bool recount_ = false;
};

}  // namespace amem
