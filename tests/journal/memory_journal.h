// A journal that is a vector.
#pragma once

#include <filesystem>
#include <vector>

#include "journal/journal.h"

namespace amem::test {

// Appends to `events`, until `dead` says that the process of its session has died. Both outlive it.
class MemoryJournal final : public JournalWriter {
 public:
  explicit MemoryJournal(std::vector<Event>& events, const bool& dead = kLives) : events_(events), dead_(dead) {}
  Status Append(const Event& event) override {
    if (!dead_) events_.push_back(event);
    return {};
  }
  Status Flush() override { return {}; }
  bool SnapshotDue() const override { return false; }
  Status Snapshot(const State&) override { return {}; }
  Status Close() override { return {}; }
  std::filesystem::path Directory() const override { return "memory"; }

 private:
  static constexpr bool kLives = false;
  std::vector<Event>& events_;
  const bool& dead_;
};

}  // namespace amem::test
