// Event times: when the events of a journal happened, in bounded memory however long it is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>
#include <vector>

#include "statemachine/event.h"

namespace amem {

class EventTimes {
 public:
  // Of the next event. A gap in the numbers forgets what came before it.
  void Add(SequenceNumber seq, std::uint64_t time_ns, std::size_t kind) {
    if (!recent_.empty() && recent_.back().seq + 1 != seq.value) {
      recent_.clear();
      older_.clear();
      stride_ = 1;
    }
    if (recent_.size() == 2 * kMost) {
      for (std::size_t i = 0; i < kMost; ++i) {
        if (recent_[i].seq % stride_ == 0) older_.push_back(recent_[i]);
      }
      recent_.erase(recent_.begin(), recent_.begin() + static_cast<std::ptrdiff_t>(kMost));
      while (older_.size() > kMost) {
        stride_ *= 2;
        std::erase_if(older_, [this](const Entry& entry) { return entry.seq % stride_ != 0; });
      }
    }
    recent_.push_back({seq.value, time_ns, static_cast<std::uint8_t>(kind)});
  }

  struct Earlier {
    SequenceNumber seq;
    std::uint64_t time_ns = 0;
    std::string_view kind;  // its name
    bool exact = true;      // false: a later event may fit as well, because the journal is long and not every event is kept
  };
  // The last event up to that time. Nothing: there is none.
  [[nodiscard]] std::optional<Earlier> LastUpTo(std::uint64_t time_ns) const {
    // Threads note their times before they wait for their turn to record, so that neighbours may be out of order by a little.
    const auto find = [time_ns](const std::vector<Entry>& entries) -> const Entry* {
      for (std::size_t i = entries.size(); i > 0; --i) {
        if (entries[i - 1].time_ns <= time_ns) return &entries[i - 1];
      }
      return nullptr;
    };
    const auto told = [](const Entry& entry, bool exact) {
      return Earlier{SequenceNumber{entry.seq}, entry.time_ns, KindName(entry.kind), exact};
    };
    if (const Entry* entry = find(recent_)) return told(*entry, true);
    if (const Entry* entry = find(older_)) return told(*entry, stride_ == 1);
    return std::nullopt;
  }
  // Of that event, or of one shortly before it, likewise.
  [[nodiscard]] std::optional<std::uint64_t> TimeOf(SequenceNumber seq) const {
    for (const std::vector<Entry>* entries : {&recent_, &older_}) {
      const auto after = std::ranges::upper_bound(*entries, seq.value, {}, &Entry::seq);
      if (after != entries->begin()) return std::prev(after)->time_ns;
    }
    return std::nullopt;
  }

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
