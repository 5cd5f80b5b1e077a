// Two ranks that share memory, and what they record of pauses and resumes: the steps are those that the real plans ask for.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "replay/diagnosis/diagnosis.h"
#include "statemachine/apply.h"
#include "statemachine/plan.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/replay/job/scripted_journal.h"

namespace amem::test {

inline constexpr std::uint64_t kSecond = 1'000'000'000;

inline SessionStory History(Story& story, SessionStatus status, std::uint64_t as_of_ns = 0) {
  MemoryReader reader(story.events(), story.id(), status);
  Result<SessionStory> history = ReadStory(reader);
  EXPECT_TRUE(history.ok()) << history.status().message();
  EXPECT_TRUE(history->findings.violations.empty()) << history->findings.violations[0].text;
  if (as_of_ns != 0) history->findings.as_of_ns = as_of_ns;
  return *std::move(history);
}

inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
#define EXPECT_HAS(text, part) EXPECT_TRUE(::amem::test::Has(text, part)) << (text)

// The steps that are left in that phase of a pause or resume of this session.
inline std::vector<Step> PlannedSteps(Story& story, PhaseKind phase) {
  State state;
  for (const Event& event : story.events()) {
    const Status folded = Apply(state, event);
    EXPECT_TRUE(folded.ok()) << folded.message();
  }
  const Plan plan = phase < PhaseKind::kResumeArrive ? PlanPause(state) : PlanResume(state);
  const auto planned = std::ranges::find(plan.phases, phase, &PlannedPhase::phase);
  return planned == plan.phases.end() ? std::vector<Step>{} : planned->steps;
}

struct CycleJob : Job {
  CycleJob() { Share(); }

  static PhaseKind Arrival(CycleKind kind) {
    return kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive;
  }
  void Arrive(Story& story, CycleKind kind) { story.Then(PhaseBegun{Arrival(kind)}); }
  void Begin(Story& story, CycleKind kind) { story.Then(CycleBegun{kind, 1, {importer.id(), owner.id()}}); }
  void BeginAll(CycleKind kind) {
    for (Story* story : {&owner, &importer}) Arrive(*story, kind);
    for (Story* story : {&owner, &importer}) Begin(*story, kind);
  }
  void Work(Story& story, PhaseKind phase, const std::vector<Step>& steps) {
    story.Then(PhaseBegun{phase});
    for (const Step& step : steps) {
      story.Then(StepBegun{step});
      story.Then(StepDone{step});
    }
  }
  void Work(Story& story, PhaseKind phase) { Work(story, phase, PlannedSteps(story, phase)); }
  // Works until a step of that kind, which is begun.
  Step WorkInto(Story& story, PhaseKind phase, StepKind kind) {
    std::vector<Step> steps = PlannedSteps(story, phase);
    const auto at = std::ranges::find(steps, kind, &Step::kind);
    EXPECT_NE(at, steps.end()) << "no such step is planned";
    if (at == steps.end()) return {};
    const Step step = *at;
    steps.erase(at, steps.end());
    Work(story, phase, steps);
    story.Then(StepBegun{step});
    return step;
  }
  void Decide(Story& story, PhaseKind phase, SessionId culprit = {}, const std::string& message = {}) {
    story.Then(PhaseDecided{phase, !culprit, culprit, message});
  }
  void PhaseOfAll(PhaseKind phase) {
    for (Story* story : {&owner, &importer}) Work(*story, phase);
    for (Story* story : {&owner, &importer}) Decide(*story, phase);
  }
  // Both sessions learn that the phase failed, and give up.
  void GiveUp(CycleKind kind, PhaseKind phase, SessionId culprit, const std::string& message, bool undone = true) {
    for (Story* story : {&owner, &importer}) Decide(*story, phase, culprit, message);
    for (Story* story : {&owner, &importer}) story->Then(CycleFailed{kind, 1, undone, message});
  }
  void Pause() {
    BeginAll(CycleKind::kPause);
    for (const PhaseKind phase :
         {PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone}) {
      PhaseOfAll(phase);
    }
    for (Story* story : {&owner, &importer}) story->Then(CycleDone{CycleKind::kPause, 1, 1000});
  }
  void Resume() {
    BeginAll(CycleKind::kResume);
    for (const PhaseKind phase : kResumePhases) PhaseOfAll(phase);
    for (Story* story : {&owner, &importer}) story->Then(CycleDone{CycleKind::kResume, 1, 1000});
  }
  static constexpr PhaseKind kResumePhases[] = {PhaseKind::kResumeArrive, PhaseKind::kResumeCreateOwn, PhaseKind::kResumeImport,
                                                PhaseKind::kResumeVerify, PhaseKind::kResumeOpen};

  // What is read `waited_ns` after the last event.
  std::vector<SessionStory> Read(SessionStatus of_owner, SessionStatus of_importer, std::uint64_t waited_ns = 0) {
    std::vector<SessionStory> journals;
    journals.push_back(History(owner, of_owner, clock + waited_ns));
    journals.push_back(History(importer, of_importer, clock + waited_ns));
    return journals;
  }
  // The verdict must not depend on the order in which journals are given.
  Verdict Judge(SessionStatus of_owner, SessionStatus of_importer, std::uint64_t waited_ns = 0) {
    std::vector<SessionStory> journals = Read(of_owner, of_importer, waited_ns);
    Verdict verdict = Diagnose(journals);
    std::swap(journals[0], journals[1]);
    const Verdict swapped = Diagnose(journals);
    EXPECT_EQ(verdict.kind, swapped.kind);
    EXPECT_EQ(verdict.session, swapped.session);
    EXPECT_EQ(verdict.headline, swapped.headline);
    EXPECT_EQ(verdict.remedy, swapped.remedy);
    return verdict;
  }
  Verdict Live(std::uint64_t waited_ns) { return Judge(SessionStatus::kLive, SessionStatus::kLive, waited_ns); }
};

// The verdict on the journal of one session, when the others are not given.
inline Verdict JudgeAlone(Story& story, SessionStatus status, std::uint64_t as_of_ns = 0) {
  const std::vector<SessionStory> journals = {History(story, status, as_of_ns)};
  return Diagnose(journals);
}

}  // namespace amem::test
