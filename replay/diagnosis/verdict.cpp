#include "replay/diagnosis/verdict.h"

#include <array>

namespace amem {
namespace {

constexpr std::array<std::string_view, kVerdictKinds> kKinds = {
    "healthy",    "step-failed", "out-of-memory", "rank-died",      "ended-without-closing", "never-arrived",
    "stalled",    "refused",     "half-done",     "broken-session", "references-disagree",   "impossible-order",
    "unreadable", "rank-left",   "launch-refused"};
constexpr std::array<std::string_view, 3> kRoles = {"context", "cause", "consequence"};

}  // namespace

std::string_view ToText(VerdictKind kind) { return kKinds.at(static_cast<std::size_t>(kind)); }
std::string_view ToText(Evidence::Role role) { return kRoles.at(static_cast<std::size_t>(role)); }

}  // namespace amem
