// Rerun: makes the driver calls of journals again, on the simulator, and compares results. The library behind
// `amem replay`. The steps of pauses and resumes are performed by the same code as in a live session
// (replay/cycle/perform_step.h).
//
// All sessions are replayed in the order of their common clock, one call at a time. On the simulator each has a driver of its
// own, and all drivers share one simulated host; addresses are only numbers there, so that a journal of any job fits on a
// laptop. Contents are not replayed. An allocation of a session whose journal was not given comes from an absent owner
// (session.h), with memory made up for it.
//
// All sessions live in this process, where imports go from driver to driver as descriptors. Every call must have the result
// that was recorded. At the end of each phase and cycle the state must be sound, and the driver must hold what it says. The
// first difference ends it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "statemachine/event.h"

namespace amem {

struct RerunOptions {
  // The last event that is replayed, and its session (not needed with one journal).
  std::optional<SequenceNumber> until;
  SessionId until_session;
  // How much memory a device has, by number or name of RerunReport::devices, from the moment on that a pause first gave its
  // memory back: as if another program had taken the rest then. Other devices have as much as is asked for.
  std::map<std::string, Bytes> memory;
};

struct RerunDevice {
  std::string name;  // its UUID, or the host and ordinal where that is unknown
  std::vector<std::string> used_by;
  Bytes most = 0;  // held at once
  std::optional<Bytes> limit;
};

struct RerunDifference {
  SessionId session;
  SequenceNumber seq;
  std::string what;  // "result of step \"check memory device 2\"", "digest after ..."
  std::string recorded, replayed;
};

struct RerunReport {
  std::uint64_t sessions = 0, events = 0, calls = 0, steps = 0, comparisons = 0;
  std::uint64_t failures_reproduced = 0;  // steps that failed in the journal, and did so again
  std::vector<std::string> reproduced;    // the first of them, in words
  std::vector<RerunDevice> devices;
  std::map<std::string, std::uint64_t> not_replayed;  // kinds of events that have no effect on the driver, and how many
  std::optional<RerunDifference> difference;
  std::string hint;         // to the difference
  std::string try_options;  // of a replay that does what the hint says; empty: there are none
};

// A failure means that something could not be read, or that an option names what is not there.
Result<RerunReport> Rerun(std::span<const std::unique_ptr<JournalReader>> journals, const RerunOptions& options);

}  // namespace amem
