// A journal in memory, for tests of what reads journals.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "journal/journal.h"

namespace amem::test {

// `beginning` is the state that the events go on from, as a snapshot would give it.
class MemoryReader final : public JournalReader {
 public:
  MemoryReader(std::vector<Event> events, SessionId session, SessionStatus status)
      : events_(std::move(events)), session_(session), status_(status) {}

  Result<JournalInfo> Info() override {
    JournalInfo info;
    info.session = session_;
    info.status = status_;
    info.events = events_.size();
    if (!events_.empty()) {
      info.first = events_.front().seq;
      info.last = events_.back().seq;
    }
    return info;
  }
  Result<ReadReport> Read(SequenceNumber first, SequenceNumber last, const std::function<bool(const Event&)>& visit) override {
    for (const Event& event : events_) {
      if (event.seq >= first && event.seq <= last && !visit(event)) break;
    }
    return report;
  }
  Result<State> StateAt(std::optional<SequenceNumber>, ReadReport*) override {
    return no_beginning.ok() ? Result<State>(beginning) : no_beginning;
  }

  State beginning;
  Status no_beginning;  // why the beginning cannot be read; ok: it can
  ReadReport report;

 private:
  std::vector<Event> events_;
  SessionId session_;
  SessionStatus status_;
};

}  // namespace amem::test
