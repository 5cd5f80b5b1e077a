// Rerun: does again what journals say, on the simulator, and compares. The library behind `amem-replay run`.
//
// All sessions are replayed in one process, in the order of their common clock: each has a simulated driver of its own, all
// drivers share one simulated host, and imports go from driver to driver as descriptors. Addresses are only numbers there, so
// that a journal of any job fits on a laptop; contents are not replayed. What another journal would have to tell - an
// allocation of a session that was not given - comes from a stranger, who has memory of his own.
//
// Every call must have the result that was recorded. At the end of each phase and cycle, the state that the replayed results
// lead to must have the digest of the recorded one, and the driver must hold what the state says. The first difference ends it.
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
  // After this event of that session (the first journal's if there is only one) nothing is done.
  std::optional<SequenceNumber> until;
  SessionId until_session;
  // How much a device has, from the moment on that its memory was first given back by a pause: as if somebody else had taken
  // the rest then. By number or name of RerunReport::devices. Others have as much as is asked for.
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
  std::uint64_t time_ns = 0;
  std::string what;  // "result of step \"check memory device 2\"", "digest after ..."
  std::string recorded, replayed;
};

struct RerunReport {
  std::uint64_t sessions = 0, events = 0, calls = 0, steps = 0, comparisons = 0;
  std::uint64_t failures_reproduced = 0;  // steps that failed in the journal, and did so again
  std::vector<std::string> reproduced;    // the first of them, in words
  std::vector<RerunDevice> devices;
  std::map<std::string, std::uint64_t> not_replayed;  // kinds of events that have no effect on the simulator, and how many
  std::optional<RerunDifference> difference;
  std::string hint;  // to the difference: what to try
};

// A failure means that something could not be read, or that an option names what is not there.
Result<RerunReport> Rerun(std::span<const std::unique_ptr<JournalReader>> journals, const RerunOptions& options);

}  // namespace amem
