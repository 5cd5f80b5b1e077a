// Post-mortem: what the journals of a job say, checked. The library behind `amem-replay verify`.
//
// One journal is folded event by event, so that a wrong order is found where it happened. Over all journals of a job every
// import must have its reference at the owner, and the other way round, with the same bytes and properties, and both sides must
// agree on which of them are gone. What a crash explains is a note, not a violation.
//
// Plain functions over readers; nothing is written. Safe on journals of live processes.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "replay/job/fold.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// Something that must not be, or (as a note) that a reader should know. seq 0: not about one event.
struct Violation {
  SessionId session;
  SequenceNumber seq;
  std::string text;
};

// This session's hold on a peer's allocation, from its import to the end of the local id.
struct ImportRecord {
  RemoteAllocation remote;
  Bytes bytes = 0;
  AllocationProperties properties;
  SequenceNumber seq;  // of Imported; 0: before the journal's beginning (a snapshot has it)
  std::uint64_t time_ns = 0;
  SequenceNumber dropped;  // of the event that ended it; 0: still held at the end of the journal
  std::uint64_t dropped_ns = 0;
};

// A peer's hold on an allocation of this session.
struct ReferenceRecord {
  SequenceNumber seq;  // of ReferenceAdded; 0: before the journal's beginning
  std::uint64_t time_ns = 0;
  SequenceNumber dropped;  // of ReferenceDropped or PeerLost; 0: still held at the end
  std::uint64_t dropped_ns = 0;
  bool by_peer_loss = false;
};
struct ReferenceKey {
  AllocationId allocation;  // the owner's
  SessionId by;
  AllocationId as;  // the importer's
  friend auto operator<=>(const ReferenceKey&, const ReferenceKey&) = default;
};

struct OwnRecord {  // an allocation (or multicast object) made by this session
  Bytes bytes = 0;
  AllocationProperties properties;
  bool multicast = false;  // no properties of its own to compare
  SequenceNumber seq;
};

// What was found in one journal, and the facts that VerifyJob compares with the others.
struct JournalFindings {
  JournalInfo info;
  SessionOpened who;  // wrote it; as far as the state does not say, from the journal's files
  ReadReport report;  // what could not be read; not a violation, but nothing is proved about it
  std::uint64_t events = 0;
  std::uint64_t last_ns = 0;   // time of the last event
  std::uint64_t as_of_ns = 0;  // of a live journal: what happened before is in it. Otherwise last_ns
  bool whole = false;          // folded to its end; false after the first violation of order
  State state;                 // after the last event that could be applied
  std::vector<Violation> violations;
  std::vector<Violation> notes;
  std::map<AllocationId, OwnRecord> own;
  std::map<AllocationId, ImportRecord> imports;
  std::map<ReferenceKey, std::vector<ReferenceRecord>> references;
};

// Folds the journal, checks the invariants (of a large state not after each event, but always at the end), and looks for gaps
// in the sequence. What comes after the first violation of order would be its consequences, and is not checked. A failure means
// that the journal could not be read at all. `others` observe the same fold.
Result<JournalFindings> VerifyJournal(JournalReader& reader, std::span<FoldObserver* const> others = {});

// A live journal of this boot tells what happened until `began`, when reading began; one that was packed while its process
// lived, until it was packed. That moment; 0: it has ended, or that is not known.
std::uint64_t PresentOf(const JournalInfo& info, const SessionOpened& who, const ThisHost& began);

struct JobFindings {
  std::vector<Violation> violations;
  std::vector<Violation> notes;
  std::uint64_t references = 0;  // pairs of import and reference that were compared
  // Imports that are still held and have no reference in the journal of their owner: (importer, its id).
  std::set<std::pair<SessionId, AllocationId>> unknown_to_owner;
};
// References across journals. Journals may be of different moments (a live job goes on while it is read): what one side has
// done after the other side was read is left out.
JobFindings VerifyJob(std::span<const JournalFindings> journals);
JobFindings VerifyJob(std::span<const JournalFindings* const> journals);

}  // namespace amem
