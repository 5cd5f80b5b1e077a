// Event times: when the events of a journal happened, in bounded memory however long it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "statemachine/types.h"

namespace amem {

class EventTimes {
 public:
  // Of the next event. A gap in the numbers forgets what came before it.
  void Add(SequenceNumber seq, std::uint64_t time_ns, std::size_t kind);

  struct Earlier {
    SequenceNumber seq;
    std::uint64_t time_ns = 0;
    std::string_view kind;  // its name
    bool exact = true;      // false: a later event may fit as well, because the journal is long and not every event is kept
  };
  // The last event up to that time. Nothing: there is none.
  [[nodiscard]] std::optional<Earlier> LastUpTo(std::uint64_t time_ns) const;
  // Of that event, or of one shortly before it, likewise.
  [[nodiscard]] std::optional<std::uint64_t> TimeOf(SequenceNumber seq) const;

 private:
  struct Entry {
    std::uint64_t seq = 0, time_ns = 0;
    std::uint8_t kind = 0;
  };
  static constexpr std::size_t kMost = std::size_t{1} << 15;

  std::vector<Entry> recent_;  // the last kMost of them, or a few more
  std::vector<Entry> older_;   // every stride_-th of those before
  std::uint64_t stride_ = 1;
};

}  // namespace amem
