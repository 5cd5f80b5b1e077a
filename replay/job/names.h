// Names: how sessions, processes, times and numbers are spelled for people. One spelling for all commands, so that what one
// prints can be looked for in what another prints.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// "rank 2 (pid 4711 on host a)"; "pid 4711 on host a" without a rank; "session 00c0ffee00c0ffee" if not even the pid is known.
std::string NameOf(const SessionOpened& opened);
// "rank 2", else "pid 4711", else the session.
std::string ShortNameOf(const SessionOpened& opened);

std::string GpuOf(const SessionOpened& opened, std::int32_t ordinal);  // its UUID; empty: unknown

// The names of all sessions of a job: those whose journals are given, and those that they met as peers.
class JobNames {
 public:
  // The first word about a session stays: add the journals' own openings before what they say of their peers.
  void Add(const SessionOpened& opened);
  void AddPeersOf(const State& state);

  [[nodiscard]] std::int32_t RankOf(SessionId session) const;              // -1: unknown
  [[nodiscard]] std::string Name(SessionId session) const;                 // as NameOf
  [[nodiscard]] std::string ShortName(SessionId session) const;            // "rank 2" while one session has it, else as Name
  [[nodiscard]] std::string Names(std::vector<SessionId> sessions) const;  // "ranks 0, 1 and 3"

 private:
  std::map<SessionId, SessionOpened> sessions_;    // of each its host, pid and rank
  std::map<std::int32_t, std::uint32_t> of_rank_;  // how many sessions have this rank
  [[nodiscard]] bool OnlyOneHas(std::int32_t rank) const;
};

// "0x1f2e, 4 ranks, split of 0x1f2d, suspended": the same in all ranks of a communicator whose hash is known. Without a hash,
// the session's own number in place of it.
std::string NameOf(CommunicatorId id, const Communicator& communicator, const std::map<CommunicatorId, Communicator>& others);

// ---- numbers and times -----------------------------------------------------------------------------------------------------

// Whether a phase takes a pause or resume back; the phases of an undo are those of the other direction.
bool IsUndo(PhaseKind phase, CycleKind of);
PhaseKind ArrivalOf(CycleKind kind);          // the phase in which sessions wait for each other to come
std::string_view PhaseWord(PhaseKind phase);  // "save", of "pause: save"

std::string Grouped(std::uint64_t number);  // "8 280": digits in groups of three
// "1 mapping", "12 345 mappings"; `many` where it is not `one` with an s.
std::string Plural(std::uint64_t number, std::string_view one, std::string_view many = {});
std::vector<std::string> InRanges(const std::vector<std::int32_t>& ascending);  // "0 to 7", "9", "11"
std::string Listed(const std::vector<std::string>& words);                      // "a", "a and b", "a, b and c"
std::string CutTo(std::string text, std::size_t bytes);                         // at most so many, and no part of a character
// Rows, the first with the headings, as lines whose columns are as wide as what is in them.
std::vector<std::string> TableLines(const std::vector<std::vector<std::string>>& rows);
std::string DurationText(std::uint64_t nanoseconds);  // "3 min 12 s", "12.3 s", "45 ms"
std::string WallText(
    std::uint64_t wall_ns);  // "2025-11-21 07:34:01.203 UTC", or "... +0100": where TZ is; "unknown time" for 0
std::string DateText(std::uint64_t wall_ns);     // likewise: "2025-11-21 07:34:01 UTC"; "unknown" for 0
std::string PreciseText(std::uint64_t wall_ns);  // likewise: "2025-11-21 07:34:01.203004", for lines of a log

}  // namespace amem
