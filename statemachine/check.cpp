#include "statemachine/check.h"

namespace amem::check {

Status Failed(std::string_view expression, std::string_view file, int line, const std::string& operands, std::string_view names,
              const std::string& values) {
  const std::string place = std::string(file.substr(file.rfind('/') + 1)) + ":" + std::to_string(line);
  std::string text = "check failed at " + place + ": " + std::string(expression) + " (" + operands + ")";
  if (!names.empty()) text += ", " + std::string(names) + " = " + values;
  return {Code::kInvalid, text + "; this is a defect of AMem, report it with the journal"};
}

}  // namespace amem::check
