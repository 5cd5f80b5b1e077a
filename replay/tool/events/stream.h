// The wanted events of one or more journals, printed in one order of time, in memory that does not grow with their length.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "replay/tool/events/filter.h"
#include "replay/tool/output.h"
#include "statemachine/event.h"

namespace amem::tool {

struct PrinterOptions {
  bool json = false;
  bool wall = false;                // dates in place of seconds since `origin_ns`; "wall_ns" in JSON
  bool several = false;             // `name` before each line, "journal_rank" in JSON
  std::string name;                 // "rank 2"
  std::uint64_t origin_ns = 0;      // of the session's clock
  std::int64_t wall_offset_ns = 0;  // added to a time of the session's clock gives nanoseconds since 1970
};

class EventPrinter {
 public:
  EventPrinter(Output& out, const SessionOpened& who, PrinterOptions options);
  void Print(const Event& event) { options_.json ? PrintJson(event) : PrintText(event); }

 private:
  void PrintText(const Event& event);  // "    17 +0.003215s t4711  mapped: address 0x7f00, 2 MiB, allocation 3"
  void PrintJson(const Event& event);
  bool TakesBack(const EventBody& body);  // a phase of the undo of the pause or resume that is under way

  Output& out_;
  const PrinterOptions options_;
  const std::string session_;
  const std::int32_t rank_;
  std::map<PoolId, CycleKind> cycles_;  // under way
  std::string head_;                    // of a line: its memory is used again
};

class EventStream {
 public:
  // `offset_ns` puts the journal's times on the common clock.
  void Add(const std::filesystem::path& session, std::unique_ptr<JournalReader> reader, std::int64_t offset_ns,
           EventFilter filter, EventPrinter printer);
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
    std::int64_t offset_ns = 0;
    EventFilter filter;
    EventPrinter printer;
    SequenceNumber next = filter.ReadFrom();
    std::deque<Event> ahead = {};
    bool ended = false, told = false;  // told: what could not be read was complained about

    [[nodiscard]] std::int64_t Time() const { return WrappedSum(ahead.front().time_ns, offset_ns); }
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
