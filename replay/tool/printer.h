// Prints events of one session, as lines of text or JSON.
#pragma once

#include <cstdint>
#include <string>

#include "replay/tool/output.h"
#include "statemachine/event.h"

namespace amem::tool {

class EventPrinter {
 public:
  // `prefix` comes before each line of text, for output about several sessions.
  EventPrinter(Output& out, bool json, SessionId session, std::uint64_t opened_ns, std::string prefix = {});
  void Print(const Event& event) { json_ ? PrintJson(event) : PrintText(event); }

 private:
  void PrintText(const Event& event);  // "    17 +0.003215s t4711  mapped 0x7f00 2 MiB of allocation 3"
  void PrintJson(const Event& event);

  Output& out_;
  const bool json_;
  const std::string session_, prefix_;
  const std::uint64_t opened_ns_;
};

}  // namespace amem::tool
