// Standings for people and programs: a picture of ranks and phases for a terminal, a line for each change, and JSON.
#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "replay/job/clock.h"
#include "replay/report/standing.h"

namespace amem {

// The sessions at one moment. `now` is the clock of this host: what ran on another boot is shown as of its last event.
struct StandingPicture {
  std::vector<Standing> sessions;                  // in the order in which they are drawn
  std::vector<std::vector<SessionId>> waits_for;   // parallel to `sessions`
  std::map<SessionId, std::size_t> waited_for_by;  // by how many
  ThisHost now;
  StandingPicture(std::vector<Standing> standings, ThisHost moment);
};

struct PictureSize {
  std::size_t columns = 0, rows = 0;  // 0: no limit
};
// A table of sessions and phases, a row a line; lines are cut to the columns. Where rows are left out, those stay of which
// somebody waits for, that have ended, or that failed, and the last line says how many are not shown.
std::vector<std::string> PictureLines(const StandingPicture& picture, PictureSize size = {});

// "rank 2: pausing, pause 3, save, 12 of 40 steps done, waits for rank 0": one line, without times. The same words as long as
// nothing but time has gone by; steps are left out when `with_steps` is false.
std::string StandingSentence(const StandingPicture& picture, std::size_t index, bool with_steps);

// One object; sizes in bytes, times in seconds.
nlohmann::ordered_json PictureJson(const StandingPicture& picture, std::uint64_t wall_ns);

}  // namespace amem
