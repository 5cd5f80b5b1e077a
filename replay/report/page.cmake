# Makes the page of `amem-replay report` from the files in replay/report/page/: one text with the styles and scripts in it, as a C++ source.
#   cmake -DFOLDER=... -DOUTPUT=... -DSCRIPTS=a.js,b.js -P replay/report/page.cmake
file(READ ${FOLDER}/page.html page)
file(READ ${FOLDER}/style.css style)
set(code "")
string(REPLACE "," ";" names "${SCRIPTS}")
foreach(name IN LISTS names)
  file(READ ${FOLDER}/${name} part)
  string(APPEND code "${part}\n")
endforeach()
if(code MATCHES "</script" OR style MATCHES "</style")
  message(FATAL_ERROR "a script or style of the report ends its own element")
endif()
string(REPLACE "@STYLE@" "${style}" page "${page}")
string(REPLACE "@SCRIPT@" "${code}" page "${page}")
if(page MATCHES "\\)AMEM_PAGE\"")
  message(FATAL_ERROR "the report's page holds the end of the C++ string it is put in")
endif()
file(WRITE ${OUTPUT}
     "// Generated from replay/report/page/ by replay/report/page.cmake.\n#include <string_view>\nnamespace amem::tool {\n"
     "std::string_view ReportTemplate() {\n  return R\"AMEM_PAGE(${page})AMEM_PAGE\";\n}\n}  // namespace amem::tool\n")
