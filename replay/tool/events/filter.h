// Which events of a journal are wanted.
#pragma once

#include <regex.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem::tool {

// An extended regular expression. kInvalid: it is none.
Result<std::shared_ptr<const regex_t>> CompilePattern(const std::string& text);

// The same for all sessions.
struct EventWishes {
  std::set<std::size_t> kinds;  // empty: all
  std::optional<std::uint64_t> allocation;
  std::shared_ptr<const regex_t> pattern;  // in an event's sentence; null: any
};

// Numbers of events and times of that session's journal; all ends are included.
struct EventWindow {
  std::uint64_t from = 1, to = ~std::uint64_t{0};
  std::uint64_t since_ns = 0, until_ns = ~std::uint64_t{0};
};

// Which events are about one allocation: those that name it, and those about an address while it is mapped there. Must see
// every event from where it starts.
class AllocationFollower {
 public:
  // From a state on: where the allocation is then.
  AllocationFollower(AllocationId allocation, const State& state) : wanted_(allocation) {
    for (const auto& [address, mapping] : state.mappings) {
      if (mapping.allocation == wanted_) places_[address] = mapping.bytes;
    }
    for (const auto& [address, legacy] : state.legacy) {
      if (legacy.backing == wanted_) legacy_.insert(address);
    }
  }

  bool Concerns(const Event& event) {
    return std::visit([this](const auto& body) { return About(body); }, event.body);
  }

 private:
  bool Inside(Address address) const {
    const auto after = places_.upper_bound(address);
    return after != places_.begin() && address.value - std::prev(after)->first.value < std::prev(after)->second;
  }

  bool About(const Mapped& e) {
    if (e.allocation == wanted_) places_[e.address] = e.bytes;
    return e.allocation == wanted_;
  }
  bool About(const Unmapped& e) { return places_.erase(e.address) != 0; }
  bool About(const AccessSet& e) {
    const auto next = places_.lower_bound(e.address);  // one call may cover several mappings
    return Inside(e.address) || (next != places_.end() && next->first.value - e.address.value < e.bytes);
  }
  bool About(const LegacyAllocated& e) {
    if (e.backing == wanted_) legacy_.insert(e.address);
    return e.backing == wanted_;
  }
  bool About(const LegacyFreed& e) { return legacy_.erase(e.address) != 0; }
  bool About(const MulticastBound& e) { return e.multicast == wanted_ || e.allocation == wanted_ || Inside(e.address); }
  template <class Body>
  bool About(const Body& e) {
    bool about = false;
    if constexpr (requires { e.allocation; }) {
      about = e.allocation == wanted_;
    } else if constexpr (requires { e.address; }) {
      about = Inside(e.address);
    }
    if constexpr (requires { e.backing; }) about = about || e.backing == wanted_;
    if constexpr (requires { e.multicast; }) about = about || e.multicast == wanted_;
    if constexpr (requires { e.step.allocation; }) about = about || e.step.allocation == wanted_;
    return about;
  }

  AllocationId wanted_;
  std::map<Address, Bytes> places_;
  std::set<Address> legacy_;
};

// For one session; must see every event from ReadFrom() on, in order. `wishes` outlives it.
class EventFilter {
 public:
  // `before` is what the journal's first event follows: an allocation can be followed only from there.
  EventFilter(const EventWishes& wishes, const EventWindow& window, const State& before);

  [[nodiscard]] SequenceNumber ReadFrom() const { return SequenceNumber{follower_ ? 1 : window_.from}; }
  [[nodiscard]] SequenceNumber ReadTo() const { return SequenceNumber{window_.to}; }
  bool Wants(const Event& event);

 private:
  const EventWishes& wishes_;
  const EventWindow window_;
  std::optional<AllocationFollower> follower_;
};

}  // namespace amem::tool
