// report: a job as one page for a browser, with everything in it.
#pragma once

#include <functional>
#include <string_view>

#include "replay/tool/output.h"

namespace CLI {
class App;
}

namespace amem::tool {

inline constexpr const char* kReportHelp =
    "  amem-replay report /tmp/amem-1000/journal -o job.html     all sessions of this host\n"
    "  amem-replay report hostA/journal hostB/journal -o job.html\n"
    "The file needs no network and no other file. Long journals are summed up; the page says what it leaves out.\n";

// Gives `command` its options; when it was chosen, `run` becomes what is to be run.
void AddReport(CLI::App* command, std::function<int(Output&)>& run);

// The page without data: replay/report/page/, put together when the tool was built (replay/report/page.cmake).
std::string_view ReportTemplate();

}  // namespace amem::tool
