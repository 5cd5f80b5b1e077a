// Rerun: does again what journals say, on the simulator or on GPUs, and compares. The library behind `amem-replay run`.
//
// All sessions are replayed in the order of their common clock, one call at a time. On the simulator each has a driver of its
// own, and all drivers share one simulated host; addresses are only numbers there, so that a journal of any job fits on a
// laptop. Contents are not replayed. What another journal would have to tell - an allocation of a session that was not given -
// comes from an absent owner (absent_owner.h), with memory made up for it.
//
// All sessions live in this process, where imports go from driver to driver as descriptors; or each in a process of its own,
// as in the job, where the descriptors go over Unix sockets. On GPUs they always do; device N of the journals is device N here,
// and an address range that the driver will not reserve where it was lies elsewhere, and is counted.
//
// Every call must have the result that was recorded. At the end of each phase and cycle the state must be sound, equal in both
// processes by its digest if there are two, and the driver must hold what it says. The first difference ends it.
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
  bool processes = false;                           // one per session
  bool cuda = false;                                // on this host's GPUs; with processes
  std::optional<std::string> cuda_visible_devices;  // the variable, if it is set
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
  std::uint64_t elsewhere = 0;                        // address ranges
  std::map<std::string, std::uint64_t> not_replayed;  // kinds of events that have no effect on the driver, and how many
  std::optional<RerunDifference> difference;
  std::string hint;  // to the difference: what to try
};

// A failure means that something could not be read, or that an option names what is not there.
Result<RerunReport> Rerun(std::span<const std::unique_ptr<JournalReader>> journals, const RerunOptions& options);

}  // namespace amem
