#include "replay/control/job_control.h"

namespace amem::control {

struct JobControl::Implementation {};
JobControl::JobControl(std::unique_ptr<Implementation> implementation) : implementation_(std::move(implementation)) {}
JobControl::JobControl(JobControl&&) noexcept = default;
JobControl& JobControl::operator=(JobControl&&) noexcept = default;
JobControl::~JobControl() = default;

Result<JobControl> JobControl::Open(std::span<const std::filesystem::path> /*session_directories*/) {
  return Status{Code::kUnsupported, "not yet"};
}
std::vector<RankLook> JobControl::Look() { return {}; }
Status JobControl::Pause(const AskOptions& /*options*/, const Progress& /*progress*/) {
  return {Code::kUnsupported, "not yet"};
}
Status JobControl::Resume(std::chrono::milliseconds /*deadline*/, const Progress& /*progress*/) {
  return {Code::kUnsupported, "not yet"};
}
Status JobControl::LeaveNote(SessionId /*session*/, const FrozenNote& /*note*/) { return {Code::kUnsupported, "not yet"}; }
std::vector<RankLook> LookAt(std::span<const std::filesystem::path> /*session_directories*/) { return {}; }

}  // namespace amem::control
