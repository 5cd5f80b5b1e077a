// Groups: NCCL collects calls from ncclGroupStart on and makes them at ncclGroupEnd.
#include <array>
#include <utility>
#include <vector>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/calls.h"

namespace amem::nccl {
namespace {

// The launches of this thread's open group, by library; of a group in a group they belong to the outer one.
std::array<std::vector<launches::Launched>, redirects::kLibraries>& Collected() {
  static thread_local std::array<std::vector<launches::Launched>, redirects::kLibraries> collected;
  return collected;
}

void RecordAnswers(const Group& ended, int result) noexcept {
  if (ended.Has(Effect::kEnds) && result == kSuccess) launches::GroupHasEnded();
  if (ended.pending == nullptr) return;
  for (const Pending& one : *ended.pending) {
    RecordAnswer(one.id, !Accepted(result) ? nullptr : one.written != nullptr ? one.written : *one.out, result);
    if (IsOfArguments(result)) registry::RetractPart(one.part);
  }
}

// NCCL has all of a group's launches begin after its resumes and end before its suspends, in whichever order they were called.
// If the resume fails, NCCL's part of the group fails with it, because launches are refused; the first reason is the answer. A
// group that has failed suspends nothing.
template <class Call>
int EndGroup(std::size_t place, bool launches, const Call& call) {
  Group& group = t_state.groups[place];
  if (t_state.is_inside() || !group.is_open()) return call();
  if (--group.depth > 0) return call();
  const Group ended = std::exchange(group, Group{});
  SuspendServer* const server = TheSuspendServer();
  const int resumed = ended.Has(Effect::kResumes) && server != nullptr ? server->CarryOutResumes("ncclGroupEnd") : kSuccess;
  std::vector<launches::Launched>& collected = Collected()[place];
  if (!launches) collected.clear();
  const auto end = [&]() noexcept {
    const int answer = Followed(ended.subject.made(), ended.subject.used(), call);
    RecordAnswers(ended, answer);
    return answer;
  };
  const bool only_aborts = ended.Has(Effect::kAborts) && collected.empty() && ended.pending == nullptr;
  const int result = only_aborts ? end() : launches::Launch("ncclGroupEnd", collected, end, launches::Made::kAlways);
  collected.clear();
  delete ended.pending;
  t_state.call.comm = nullptr;
  const int failed = resumed != kSuccess ? resumed : Accepted(result) ? kSuccess : result;
  if (failed != kSuccess && server != nullptr) server->UndoSuspends();
  const int paused = ended.Has(Effect::kMayPause) && server != nullptr ? server->CarryOutSuspends("ncclGroupEnd") : kSuccess;
  if (resumed != kSuccess) server->ResumeFailedFirst();
  return failed != kSuccess ? failed : paused != kSuccess ? paused : result;  // ncclInProgress is no failure
}

struct GroupStart : redirects::Around<GroupStart, "ncclGroupStart"> {
  static int With(std::size_t place, const redirects::Pass& pass) {
    const int result = pass();
    if (!t_state.is_inside() && result == kSuccess) ++t_state.groups[place].depth;
    return result;
  }
};

struct GroupEnd : redirects::Around<GroupEnd, "ncclGroupEnd"> {
  static int With(std::size_t place, const redirects::Pass& pass) { return EndGroup(place, true, pass); }
};

// Ends the group too.
struct GroupSimulateEnd : redirects::Around<GroupSimulateEnd, "ncclGroupSimulateEnd"> {
  static int With(std::size_t place, const redirects::Pass& pass, void*) { return EndGroup(place, false, pass); }
};

}  // namespace

void Collect(std::size_t place, const launches::Launched& one) noexcept {
  try {
    Collected()[place].push_back(one);
  } catch (...) {
    launches::CannotCount(nullptr, nullptr);
  }
}

redirects::Table GroupCalls() { return redirects::MakeTable<GroupStart, GroupEnd, GroupSimulateEnd>(); }

}  // namespace amem::nccl
