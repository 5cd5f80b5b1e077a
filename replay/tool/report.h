// The page that the report command fills.
#pragma once

#include <string_view>

namespace amem::tool {

// The page without data: replay/report/page/, put together when the tool was built (replay/report/page.cmake).
std::string_view ReportTemplate();

}  // namespace amem::tool
