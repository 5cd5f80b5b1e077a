#include "replay/tool/events/filter.h"

namespace amem::tool {

EventFilter::EventFilter(const EventWishes& wishes, const EventWindow& window, const State& before)
    : wishes_(wishes), window_(window) {
  if (wishes.allocation) follower_.emplace(AllocationId{*wishes.allocation}, before);
}

bool EventFilter::Wants(const Event& event) {
  if (follower_ && !follower_->Concerns(event)) return false;
  if (event.seq.value < window_.from || event.time_ns < window_.since_ns || event.time_ns > window_.until_ns) return false;
  if (!wishes_.kinds.empty() && !wishes_.kinds.contains(event.body.index())) return false;
  return !wishes_.pattern || ::regexec(wishes_.pattern.get(), ToText(event.body).c_str(), 0, nullptr, 0) == 0;
}

Result<std::shared_ptr<const regex_t>> CompilePattern(const std::string& text) {
  auto compiled = std::make_unique<regex_t>();
  if (const int failed = ::regcomp(compiled.get(), text.c_str(), REG_EXTENDED | REG_NOSUB); failed != 0) {
    char why[200];
    ::regerror(failed, compiled.get(), why, sizeof why);
    return Status{Code::kInvalid, "\"" + text + "\" is not a regular expression as grep -E has them: " + why};
  }
  return std::shared_ptr<const regex_t>(compiled.release(), [](regex_t* pattern) {
    ::regfree(pattern);
    delete pattern;
  });
}

}  // namespace amem::tool
