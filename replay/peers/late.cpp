#include "replay/peers/late.h"

#include "replay/peers/peers.h"

namespace amem {
namespace {

// What a member does that has not come to a call, as its lifecycle says.
struct Doing {
  std::string what;
  bool may_come = false;  // it only has not called yet
  std::string advice;     // otherwise
};

Doing DoingOf(const CallOfSet& call, Lifecycle lifecycle) {
  const bool pause = call.kind == CycleKind::kPause;
  if (lifecycle == Lifecycle::kRunning)
    return pause ? Doing{"running", true, {}} : Doing{"running already", false, ": pause it, or let it call nothing"};
  if (lifecycle == Lifecycle::kPaused)
    return pause ? Doing{"paused already", false, ": resume it first"} : Doing{"paused", true, {}};
  if (lifecycle != Lifecycle::kPausing && lifecycle != Lifecycle::kResuming) return {};
  const char* const what = lifecycle == Lifecycle::kPausing ? "in the middle of a pause" : "in the middle of a resume";
  return {what, false, " that did not end well: call " + NameOf(CycleKind::kResume, call.tag) + " on all"};
}

}  // namespace

std::string WhatItDoes(const CallOfSet& call, Lifecycle lifecycle) {
  const Doing doing = DoingOf(call, lifecycle);
  if (doing.what.empty()) return {};
  return "is " + doing.what + (doing.may_come ? " and has not called " + NameOf(call.kind, call.tag) : doing.advice);
}

std::string AnswerOf(const CallOfSet& call, Lifecycle lifecycle) {
  const Doing doing = DoingOf(call, lifecycle);
  return doing.what + (doing.may_come ? ", has not called " + NameOf(call.kind, call.tag) : "");
}

std::string WhyLate(const ProcessSeen& seen) {
  if (seen.state == "stopped") return "is stopped (SIGSTOP?); SIGCONT lets it go on";
  if (seen.state == "zombie" || seen.state == "gone") return "has ended";
  const bool in_driver = seen.where.starts_with("in the CUDA driver");
  if (seen.state == "uninterruptible") return "cannot be interrupted" + (seen.where.empty() ? "" : " " + seen.where);
  return in_driver ? "is " + seen.where : "";
}

}  // namespace amem
