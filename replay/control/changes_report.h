// Tells the waiting user at intervals what each rank does, and repeats nothing that has not changed.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/deadline.h"
#include "replay/control/job.h"
#include "replay/control/rank_link.h"

namespace amem::control {

class ChangesReport {
 public:
  // `progress` outlives it; empty: nothing is reported.
  ChangesReport(const Progress& progress, std::chrono::milliseconds interval)
      : progress_(progress), interval_(interval), next_(In(interval)) {}

  // `doing`: of the rank at that place, in words; empty: there is nothing to say of it.
  template <class Doing>
  void IfDue(const std::vector<RankLink>& ranks, const Doing& doing) {
    if (!progress_ || !Passed(next_)) return;
    next_ = In(interval_);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      std::string now = doing(i);
      std::string& last = last_[ranks[i]->process.session];
      if (!now.empty() && now != last) progress_(ranks[i].name() + " " + now);
      last = std::move(now);
    }
  }

 private:
  const Progress& progress_;
  const std::chrono::milliseconds interval_;
  Deadline next_;
  std::map<SessionId, std::string> last_;  // what was said of each
};

}  // namespace amem::control
