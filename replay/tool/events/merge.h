// The wanted events of many journals in one order of time, in memory that does not grow with their length.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/tool/events/filter.h"

namespace amem::tool {

class EventMerge {
 public:
  EventMerge();
  ~EventMerge();
  EventMerge(const EventMerge&) = delete;
  EventMerge& operator=(const EventMerge&) = delete;

  // Sources are numbered from 0 in the order in which they are added. `offset_ns` puts the journal's times on the common clock.
  Status Add(const std::filesystem::path& session, std::unique_ptr<JournalReader> reader, std::int64_t offset_ns,
             EventFilter filter, const EventWishes& wishes);

  struct Next {
    std::size_t source = 0;
    Event event;
  };
  std::optional<Next> Take();  // nothing: there are no more
  // What could not be read, for people; complete once Take has returned nothing.
  [[nodiscard]] const std::vector<std::string>& problems() const { return problems_; }

 private:
  struct Source;
  void Fill(Source& source);

  std::vector<std::unique_ptr<Source>> sources_;
  std::vector<std::size_t> heap_;  // sources that have an event, the earliest first
  std::vector<std::string> problems_;
};

}  // namespace amem::tool
