// A verdict as JSON, for programs that read `amem-replay why --json`. What is not known is null.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "replay/diagnosis/verdict.h"

namespace amem {

nlohmann::ordered_json ToJson(const Verdict& verdict);

}  // namespace amem
