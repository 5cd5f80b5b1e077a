// Which events of a journal are wanted.
#pragma once

#include <regex.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem::tool {

// An extended regular expression.
class Pattern {
 public:
  // kInvalid: it is none.
  static Result<std::shared_ptr<const Pattern>> Compile(const std::string& text);
  ~Pattern();
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;
  [[nodiscard]] bool Matches(const std::string& text) const;

 private:
  explicit Pattern(const regex_t& compiled) : compiled_(compiled) {}
  regex_t compiled_;
};

// The same for all sessions.
struct EventWishes {
  std::array<bool, kEventKinds> kinds{};
  std::optional<std::uint64_t> allocation;
  std::uint64_t from = 1, to = ~std::uint64_t{0};  // sequence numbers, both included
  std::shared_ptr<const Pattern> pattern;          // in an event's sentence; null: any
};

class AllocationFollower;

// For one session; must see every event from ReadFrom() on, in order. `wishes` outlives it.
class EventFilter {
 public:
  // `since_ns` and `until_ns` are times of that session's journal, both included.
  EventFilter(const EventWishes& wishes, std::uint64_t since_ns, std::uint64_t until_ns);
  EventFilter(EventFilter&&) noexcept;
  ~EventFilter();

  // An allocation can be followed only from the journal's beginning, whose state is `before`.
  [[nodiscard]] SequenceNumber ReadFrom() const;
  void StartFrom(const State& before);
  bool Wants(const Event& event);

 private:
  const EventWishes& wishes_;
  std::unique_ptr<AllocationFollower> follower_;
  std::uint64_t since_ns_, until_ns_;
};

}  // namespace amem::tool
