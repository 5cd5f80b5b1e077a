// The pauses and resumes of a job, phase by phase: when each rank had done its part, and who was the last.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "statemachine/event.h"

namespace amem::tool {

// One session's part in a phase. Times are of its journal.
struct PhasePart {
  PhaseKind phase{};
  bool arriving = false;  // until all had come
  std::uint64_t begun_ns = 0;
  std::uint64_t done_ns = 0;     // its own part: it had come, or its last step ended, or it voted
  std::uint64_t decided_ns = 0;  // 0: never
  std::string step;              // the longest
  std::uint64_t step_ns = 0;
};
struct SessionCycle {
  CycleKind kind{};
  std::uint64_t number = 0;  // 0: it never began
  std::vector<SessionId> members;
  std::uint64_t begun_ns = 0, ended_ns = 0;
  std::string outcome;  // "done", "failed", "not over"
  std::vector<PhasePart> parts;
};
struct SessionCycles {
  SessionOpened who;
  std::uint64_t first_ns = 0;
  ReadyCommunicators for_clock = {};
  std::vector<SessionCycle> cycles;  // oldest first
};
// Damage is reported, and the rest is used.
Result<SessionCycles> ReadCycles(JournalReader& reader, ReadReport& damage);

struct PhaseWait {
  SessionId session;
  std::uint64_t waited_ns = 0;  // from the end of its own part to that of the last one's
};
struct CyclePhase {
  std::string name;  // "arrival", "pause: save"
  std::uint64_t took_ns = 0;
  SessionId last;                // whose part ended last
  std::uint64_t cost_ns = 0;     // after the last but one
  std::vector<PhaseWait> waits;  // of all, the last one's is 0
  std::string step;              // of the last one, the longest; empty: it had none
  std::uint64_t step_ns = 0;
};
struct JobCycle {
  CycleKind kind{};
  std::uint64_t number = 0;
  std::uint64_t began_ns = 0;           // wall clock: the first one came
  std::uint64_t took_ns = 0;            // until the last one was through
  std::uint64_t members = 0, seen = 0;  // sessions, and those whose journals are here
  std::string outcome;                  // the worst of all
  std::vector<CyclePhase> phases;
};
// Tries of the same sessions at the same time are one pause or resume. Oldest first.
std::vector<JobCycle> JoinCycles(const std::vector<SessionCycles>& sessions);
std::string CycleName(const JobCycle& cycle);  // "pause 3"

}  // namespace amem::tool
