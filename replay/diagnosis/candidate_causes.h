// CandidateCauses: everything in the journals of a job that could be the reason for what went wrong, and the choice of the
// first.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "replay/diagnosis/roster.h"

namespace amem {

struct CandidateCause {
  // How well it explains: of two, the stronger one is believed, and of equals the earlier.
  enum class Weight : std::uint8_t {
    kCause = 0,     // went wrong by itself: a step, a process, a journal
    kAbsence,       // did not do what others waited for
    kConsequence,   // went wrong, and says itself that another was the reason
    kDisagreement,  // journals that do not fit
    kEnd,           // ended without a word, at no harm to a pause or resume
  };
  Weight weight{};
  const char* kind = nullptr;  // of namespace verdict
  SessionId session;
  std::uint64_t wall_ns = 0;
  const JournalHistory* journal = nullptr;  // of `session`; null: was not given
  const Attempt* attempt = nullptr;         // that failed or hangs: of `session`, or of `witness`
  const JournalHistory* witness = nullptr;  // who waited, or told
  SequenceNumber witness_seq;
  AllocationId allocation;
  std::vector<SessionId> missing;  // that did not come
  std::uint64_t waited_ns = 0;     // the others, for it
  bool live = false;               // it is so now
  std::string text;
};

// References that one side has and the other has not, and orders that cannot be.
struct References {
  std::uint64_t compared = 0;
  std::vector<Violation> disagreements, impossible;
  std::set<std::tuple<SessionId, AllocationId>> unknown_to_owner;  // imports (importer, its id) that the owner does not know
};
References CompareReferences(std::span<const JournalHistory> journals);

std::vector<CandidateCause> FindSuspects(const Roster& cast, const References& references);
const CandidateCause* FirstDivergence(const std::vector<CandidateCause>& suspects);  // null: nothing is wrong

}  // namespace amem
