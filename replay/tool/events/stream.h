// The wanted events of one or more journals, printed in one order of time, in memory that does not grow with their length.
#pragma once

#include <regex.h>

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "replay/tool/output.h"
#include "statemachine/state.h"

namespace amem::tool {

// ---- which events are wanted ------------------------------------------------------------------------------------------------

struct EventWishes {
  std::set<std::size_t> kinds;  // empty: all
  std::optional<std::uint64_t> allocation;
  std::shared_ptr<const regex_t> pattern;  // an extended regular expression, in an event's sentence; null: any
  // Numbers of events and times of that session's journal; all ends are included.
  std::uint64_t from = 1, to = ~std::uint64_t{0};
  std::uint64_t since_ns = 0, until_ns = ~std::uint64_t{0};
};

// Which events are about one allocation: those that name it, and those about an address while it is mapped there. Must see
// every event from where it starts.
class AllocationFollower {
 public:
  // From a state on: where the allocation is then.
  AllocationFollower(AllocationId allocation, const State& state) : wanted_(allocation) {
    for (const auto& [address, mapping] : state.mappings)
      if (mapping.allocation == wanted_) places_[address] = mapping.bytes;
    for (const auto& [address, legacy] : state.legacy)
      if (legacy.backing == wanted_) legacy_.insert(address);
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

// For one session; must see every event from ReadFrom() on, in order.
class EventFilter {
 public:
  // `before` is what the journal's first event follows: an allocation can be followed only from there.
  EventFilter(EventWishes wishes, const State& before) : wishes_(std::move(wishes)) {
    if (wishes_.allocation) follower_.emplace(AllocationId{*wishes_.allocation}, before);
  }

  [[nodiscard]] SequenceNumber ReadFrom() const { return SequenceNumber{follower_ ? 1 : wishes_.from}; }
  [[nodiscard]] SequenceNumber ReadTo() const { return SequenceNumber{wishes_.to}; }
  bool Wants(const Event& event) {
    if (follower_ && !follower_->Concerns(event)) return false;
    if (event.seq.value < wishes_.from || event.time_ns < wishes_.since_ns || event.time_ns > wishes_.until_ns) return false;
    if (!wishes_.kinds.empty() && !wishes_.kinds.contains(event.body.index())) return false;
    return !wishes_.pattern || ::regexec(wishes_.pattern.get(), ToText(event.body).c_str(), 0, nullptr, 0) == 0;
  }

 private:
  const EventWishes wishes_;
  std::optional<AllocationFollower> follower_;
};

// ---- how they are printed ---------------------------------------------------------------------------------------------------

struct PrinterOptions {
  bool json = false;
  bool wall = false;                // dates in place of seconds since `origin_ns`; "wall_ns" in JSON
  std::string name;                 // "rank 2": before each line; in JSON "journal_rank"; empty: of one journal alone
  std::uint64_t origin_ns = 0;      // of the session's clock
  std::int64_t wall_offset_ns = 0;  // added to a time of the session's clock gives nanoseconds since 1970
};

class EventPrinter {
 public:
  EventPrinter(Output& out, const SessionOpened& who, PrinterOptions options);
  void Print(const Event& event) { options_.json ? PrintJson(event) : PrintText(event); }
  [[nodiscard]] std::int64_t Wall(const Event& event) const { return WrappedSum(event.time_ns, options_.wall_offset_ns); }

 private:
  void PrintText(const Event& event);  // "    17 +0.003215s t4711  mapped: address 0x7f00, 2 MiB, allocation 3"
  void PrintJson(const Event& event);
  bool TakesBack(const EventBody& body);  // a phase of the undo of the pause or resume that is under way

  Output& out_;
  const PrinterOptions options_;
  const SessionId session_;
  const std::int32_t rank_;
  std::map<PoolId, CycleKind> cycles_;  // under way
  std::string head_;                    // of a line: its memory is used again
};

class EventStream {
 public:
  void Add(const std::filesystem::path& session, std::unique_ptr<JournalReader> reader, EventFilter filter,
           EventPrinter printer);
  // Prints what there is; of that the last ones only, if `last` is given. What cannot be read is complained about.
  void Print(std::optional<std::uint64_t> last, const Output& out);
  // What live journals have got since can be printed then. False: there is nothing new.
  bool ReadOn();
  [[nodiscard]] Result<JournalInfo> FirstInfo() { return sources_.front().reader->Info(); }
  [[nodiscard]] std::uint64_t wanted() const { return wanted_; }  // events up to now

 private:
  struct Source {
    std::filesystem::path directory;
    std::unique_ptr<JournalReader> reader;
    EventFilter filter;
    EventPrinter printer;
    SequenceNumber next = filter.ReadFrom();
    std::deque<Event> ahead = {};
    bool ended = false, told = false;  // told: what could not be read was complained about

    [[nodiscard]] std::int64_t Time() const { return printer.Wall(ahead.front()); }
  };
  void Fill(std::size_t number);  // the source's own events ahead, and the queue with the first of them

  std::deque<Source> sources_;  // references to its elements stay
  // When each source that has an event ahead goes on, the earliest first. Equal times go by the order in which the journals
  // were given, so that the outcome is always the same.
  std::priority_queue<std::pair<std::int64_t, std::size_t>, std::vector<std::pair<std::int64_t, std::size_t>>, std::greater<>>
      queue_;
  std::uint64_t wanted_ = 0;
};

}  // namespace amem::tool
