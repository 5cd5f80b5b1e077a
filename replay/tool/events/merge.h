// The wanted events of one or more journals in one order of time, in memory that does not grow with their length.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <utility>
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
  // What live journals have got since Take returned nothing can be taken then. False: there is nothing new.
  bool ReadOn();
  // What could not be read, for people; complete once Take has returned nothing.
  [[nodiscard]] const std::vector<std::string>& problems() const { return problems_; }
  [[nodiscard]] Result<JournalInfo> InfoOf(std::size_t source);

 private:
  struct Source;
  void Fill(std::size_t number);  // the source's own events ahead, and the queue with the first of them

  std::vector<std::unique_ptr<Source>> sources_;
  // When each source that has an event ahead goes on, the earliest first. Equal times go by the order in which the journals
  // were given, so that the outcome is always the same.
  std::priority_queue<std::pair<std::int64_t, std::size_t>, std::vector<std::pair<std::int64_t, std::size_t>>, std::greater<>>
      queue_;
  std::vector<std::string> problems_;
};

}  // namespace amem::tool
