// What each session of a job does at this moment: whether it runs or is paused, in which phase of a pause or resume it is, how
// far, and for whom it waits. `amem watch` draws it: as a picture of ranks and phases for a terminal, a line for each change,
// and JSON.
//
// Plain values, of one moment of a story; no clock, and nothing is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "replay/job/clock.h"
#include "replay/job/fold.h"
#include "replay/job/story/job_cycles.h"
#include "replay/job/story/story.h"

namespace amem {

struct SessionActivity {
  SessionOpened who;
  SessionStatus status = SessionStatus::kLive;
  Lifecycle lifecycle = Lifecycle::kNew;
  Bytes held = 0;                // own device memory that is occupied now, that of pools too; of a process that has ended none
  Bytes released = 0;            // own device memory that a pause has given back, likewise
  std::vector<SessionId> peers;  // that it is connected with
  std::vector<SessionId> lost_peers;  // that it was connected with
  std::string trouble;                // why the rest is not known any more; empty: it is

  std::optional<Attempt> attempt;             // a pause or resume that it has come to and that has not ended here
  Progress progress;                          // in that
  std::optional<Attempt> ended;               // the last one that ended
  std::uint64_t last_ns = 0, since_ns = 0;    // of the last event; when it began what it does
  [[nodiscard]] std::string failure() const;  // of the last one that ended; empty: it was done
};
SessionActivity ActivityOf(const Folded& folded, const SessionStory& story, SessionStatus status);

// The sessions at one moment. `now` is the clock of this host: what ran on another boot is shown as of its last event.
struct JobPicture {
  std::vector<SessionActivity> sessions;           // in the order in which they are drawn
  std::vector<std::vector<SessionId>> waits_for;   // of each, by id; empty where it waits for nobody
  std::map<SessionId, std::size_t> waited_for_by;  // by how many
  ThisHost now;
  JobPicture(std::vector<SessionActivity> activities, ThisHost moment);
};

struct PictureSize {
  std::size_t columns = 0, rows = 0;  // 0: no limit
};
// A table of sessions and phases, a row a line; lines are cut to the columns. Where rows are left out, those stay of which
// somebody waits for, that have ended, or that failed, and the last line says how many are not shown.
std::vector<std::string> PictureLines(const JobPicture& picture, PictureSize size = {});

// "rank 2: pausing, pause 3, save, 12 of 40 steps done, waits for rank 0": one line, without times. The same words as long as
// nothing but time has gone by; steps are left out when `with_steps` is false.
std::string ActivitySentence(const JobPicture& picture, std::size_t index, bool with_steps);

// One object; sizes in bytes, times in seconds. And its form (replay/job/json_form.h).
nlohmann::ordered_json PictureJson(const JobPicture& picture, std::uint64_t wall_ns);
nlohmann::ordered_json PictureForm();

}  // namespace amem
