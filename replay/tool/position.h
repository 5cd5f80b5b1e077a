// Positions in journals as people give them: "#1200", "2#1200", "12.5", "90 s", "10 min ago", "2026-11-21 20:20:58".
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/tool/command_line/arguments.h"

namespace amem::tool {

struct Position {
  std::string text;                   // as it was given
  std::optional<std::int32_t> rank;   // of RANK#SEQ: whose journal
  std::optional<SequenceNumber> seq;  // nothing: it is a time
  bool wall = false;                  // nanoseconds since 1970; else nanoseconds since the opening
  std::uint64_t ns = 0;
};

inline constexpr const char* kPosition = "POSITION";  // how --help calls one
// An option that takes one. Dates and times are local, unless a zone is behind them.
Argument& AddPosition(Arguments& arguments, const char* name, std::vector<Position>& target, const char* help);

// The journal that a position is in: that of its rank, or the only one. kInvalid: it does not say.
Result<JournalReader*> JournalOf(const Position& position, std::span<const std::unique_ptr<JournalReader>> journals);
// The last event that is not behind the position. kInvalid: all are.
Result<SequenceNumber> EventAt(const Position& position, JournalReader& reader);
// Likewise of an option's only position; nothing: it was not given.
Result<std::optional<SequenceNumber>> EventAt(const std::vector<Position>& position, JournalReader& reader);
// The same in nanoseconds since 1970.
Result<std::uint64_t> WallTimeOf(SequenceNumber seq, JournalReader& reader);

}  // namespace amem::tool
