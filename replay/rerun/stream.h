// The events of several journals in the order of their common clock, read as they are needed.
#pragma once

#include <deque>

#include "journal/journal.h"
#include "statemachine/event.h"

namespace amem {

class EventStream {  // of one journal
 public:
  EventStream(JournalReader& reader, SequenceNumber from, SequenceNumber to)
      : reader_(reader), next_(from.value), to_(to.value) {}

  // Null at the end, or when reading failed (status()).
  const Event* Peek();
  void Pop() { waiting_.pop_front(); }
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  static constexpr std::uint64_t kAtOnce = 4096;
  JournalReader& reader_;
  std::uint64_t next_, to_;
  std::deque<Event> waiting_;
  Status status_;
};

}  // namespace amem
