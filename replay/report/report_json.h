// The report of a job as one page: the data that its page draws, and the page with that data in it.
//
// Everything a browser would have to add up over many events is added up before; lists have an upper bound, and what they leave
// out is counted in the data, so that the page can say so.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "replay/diagnosis/diagnosis.h"
#include "replay/report/timeline.h"

namespace amem {

struct ReportLimits {         // for the whole job
  std::size_t rows = 14'000;  // of the event list
  std::size_t allocations = 14'000;
  std::size_t page_bytes = 4'800'000;
};

// The limits of each of so many sessions.
TimelineLimits LimitsOf(std::size_t sessions, const ReportLimits& limits);

// The page: `page` (of replay/report/, see ReportTemplate) with the job's data in its places. `version` and `made_at` (a date
// in words) are printed at its foot. Lists get shorter until the page is as small as asked, as far as that is possible.
std::string ReportPage(std::string_view page, JobTimeline job, const Verdict& verdict, const ReportLimits& limits,
                       std::string_view version, std::string_view made_at);

// The data alone, JSON.
std::string ReportJson(const JobTimeline& job, const Verdict& verdict, std::string_view version, std::string_view made_at);

}  // namespace amem
