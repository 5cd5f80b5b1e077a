// How long the pauses and resumes of one scope took: the last of each kind, and the sums of all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "statemachine/agreement/agreement.h"
#include "statemachine/plan.h"

namespace amem {

struct PhaseTime {
  PhaseKind phase{};
  std::uint64_t work_ns = 0;
  std::uint64_t wait_ns = 0;
  // CLOCK_MONOTONIC, which all processes of a host share. What a vote costs, apart from waiting for the slowest member: the
  // latest decided_at of all sessions minus the latest voted_at.
  std::uint64_t voted_at_ns = 0, decided_at_ns = 0;
};
struct CycleReport {  // of the last pause or resume
  std::uint64_t cycle = 0;
  std::uint64_t total_ns = 0;
  std::vector<PhaseTime> phases;
  std::size_t members = 0;
};

struct CycleTotals {  // of all pauses, or all resumes, of this session
  struct Phase {
    std::uint64_t work_ns = 0, wait_ns = 0;  // including cycles that failed later
    std::uint64_t failures = 0;              // whoever caused them
  };
  std::uint64_t done = 0, total_ns = 0;  // successful ones
  std::map<PhaseKind, Phase> phases;
};

// Thread-safe.
class CycleReports {
 public:
  [[nodiscard]] CycleReport Last(CycleKind kind) const {
    const std::lock_guard lock(mutex_);
    return (kind == CycleKind::kPause ? pauses_ : resumes_).last;
  }
  [[nodiscard]] CycleTotals Totals(CycleKind kind) const {
    const std::lock_guard lock(mutex_);
    return (kind == CycleKind::kPause ? pauses_ : resumes_).totals;
  }
  void AddDone(CycleKind kind, CycleReport report) {
    const std::lock_guard lock(mutex_);
    OfKind& of = kind == CycleKind::kPause ? pauses_ : resumes_;
    AddPhases(kind, report, of.totals);
    ++of.totals.done;
    of.totals.total_ns += report.total_ns;
    of.last = std::move(report);
  }
  // It failed in the last phase of its report; without phases, while it waited for all to arrive.
  void AddFailed(CycleKind kind, const CycleReport& report) {
    const std::lock_guard lock(mutex_);
    OfKind& of = kind == CycleKind::kPause ? pauses_ : resumes_;
    ++of.totals.phases[AddPhases(kind, report, of.totals)].failures;
  }

 private:
  struct OfKind {
    CycleReport last;
    CycleTotals totals;
  };
  // Returns the last phase.
  static PhaseKind AddPhases(CycleKind kind, const CycleReport& report, CycleTotals& totals) {
    PhaseKind last = PhaseOf(kind, agreement::Ballot::kCome);
    for (const PhaseTime& time : report.phases) {
      last = time.phase;
      totals.phases[last].work_ns += time.work_ns;
      totals.phases[last].wait_ns += time.wait_ns;
    }
    return last;
  }

  mutable std::mutex mutex_;  // guards both
  OfKind pauses_, resumes_;
};

}  // namespace amem
