// Positions in journals as people give them: "#1200", "2#1200", "12.5", "90 s", "10 min ago", "2026-11-21 20:20:58".
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "journal/journal.h"

namespace amem::tool {

class Arguments;

struct Position {
  std::optional<std::int32_t> rank;   // of RANK#SEQ: whose journal
  std::optional<SequenceNumber> seq;  // nothing: it is a time
  bool wall = false;                  // nanoseconds since 1970; else nanoseconds since the opening
  std::uint64_t ns = 0;
};

// `now`: the wall clock, from which "ago" counts. Dates and times are local, unless a zone is behind them. Nothing: it is none.
std::optional<Position> ParsePosition(const std::string& text, std::uint64_t now_ns);

inline constexpr const char* kPosition = "POSITION";  // how --help calls one
inline constexpr const char* kPositionsKnown =
    "give an event (#17, or 2#17 of rank 2), seconds since the opening (12.5), a time ago (\"90 s ago\", \"10 min ago\", \"2 h "
    "ago\", \"1 day ago\"), or a date and time (\"2026-11-21 20:20:58\", with UTC or +0100 behind it where it is not local)";

// As ParsePosition, with what is wrong in words: "--from: ...".
Result<Position> UnderstandPosition(const char* option, const std::string& text);

// The journal that a position is in: that of its rank, or the only one. kInvalid: it does not say.
Result<JournalReader*> JournalOf(const Position& position, std::span<const std::unique_ptr<JournalReader>> journals);
// The last event that is not behind the position. kInvalid: all are.
Result<SequenceNumber> EventAt(const Position& position, JournalReader& reader);
// The same in nanoseconds since 1970.
Result<std::uint64_t> WallTimeOf(SequenceNumber seq, JournalReader& reader);

}  // namespace amem::tool
