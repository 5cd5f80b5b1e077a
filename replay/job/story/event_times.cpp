#include "replay/job/story/event_times.h"

#include <algorithm>
#include <iterator>

#include "statemachine/event.h"

namespace amem {

void EventTimes::Add(SequenceNumber seq, std::uint64_t time_ns, std::size_t kind) {
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

std::optional<EventTimes::Earlier> EventTimes::LastUpTo(std::uint64_t time_ns) const {
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

std::optional<std::uint64_t> EventTimes::TimeOf(SequenceNumber seq) const {
  for (const std::vector<Entry>* entries : {&recent_, &older_}) {
    const auto after = std::ranges::upper_bound(*entries, seq.value, {}, &Entry::seq);
    if (after != entries->begin()) return std::prev(after)->time_ns;
  }
  return std::nullopt;
}

}  // namespace amem
