// Prints events of one session, as lines of text or JSON.
#pragma once

#include <cstdint>
#include <map>
#include <string>

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

}  // namespace amem::tool
