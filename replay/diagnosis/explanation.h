// Explanation: a verdict on one candidate cause while it is being written. Every explainer below adds recorded facts to the
// verdict, sentences to its summary, and the events that prove them to its evidence.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replay/diagnosis/cause_search.h"

namespace amem {

struct Explanation {
  const Roster& roster;
  const CandidateCause& cause;
  Verdict& verdict;
  const JobNames& names = roster.names();
  const SessionStory* story = roster.Find(cause.session);  // null: its journal was not given

  [[nodiscard]] std::uint64_t Wall(const SessionStory& journal, const Moment& at) const {
    return roster.Wall(journal, at.time_ns);
  }
  void Say(const std::string& sentence);
  void AddEvidence(const SessionStory& journal, const Moment& at, Evidence::Role role, std::string text);
  void AddBeginning(const SessionStory& journal);  // of the attempt, if it began
  void TakeStep(const SessionStory& journal, const Step& step);
  void Recommend(Remedy::Action action, Remedy::Outlook outlook = {});  // about the session of the cause

  [[nodiscard]] Remedy::Caller Caller() const;         // of pauses and resumes
  [[nodiscard]] std::string Call() const;              // of the attempt: "ncclPause", "amem.pause()"
  [[nodiscard]] std::string Cycle() const;             // "resume 3", "resume 3 of tag weights"; empty without
  [[nodiscard]] std::string CycleOfAll() const;        // "Resume 3 (4 processes)"
  [[nodiscard]] std::string HowItEnded() const;        // " failed", " hangs", " did not complete"
  [[nodiscard]] std::vector<SessionId> Named() const;  // the session of the cause, and those to which the same happened
  [[nodiscard]] std::string NamesOfAll() const;        // "rank 2", "ranks 2 and 3"
  void SaySight(SessionId session);                    // what was seen of its process
  void RecommendForStopped();                          // instead of what was recommended, if the process is stopped
  // "allocation 7 (10 MiB on device 2, made at libnccl+1234)".
  [[nodiscard]] std::string AllocationText(const SessionStory& journal, AllocationId id) const;
  // "3 steps were done there and 2 left; the next was ..."
  [[nodiscard]] std::string ProgressText(const SessionStory& journal, const Progress& progress) const;
};

// That the cause has what the explainer of its kind takes for granted. No journal makes it fail, a wrong search does.
Status CheckCause(const Explanation&);

// One for each kind of verdict.
void ExplainFailedStep(Explanation&);  // kStepFailed and kOutOfMemory: a failed step, or a vote of no without one
void ExplainDied(Explanation&);
void ExplainEnded(Explanation&);
void ExplainNeverArrived(Explanation&);
void ExplainStalled(Explanation&);
void ExplainRefused(Explanation&);
void ExplainHalfDone(Explanation&);
void ExplainBroken(Explanation&);
void ExplainReferences(Explanation&);
void ExplainImpossible(Explanation&);
void ExplainLeft(Explanation&);
void ExplainLaunchRefused(Explanation&);
void ExplainNotUnderAmem(Explanation&);
void ExplainReported(Explanation&);  // any of these, when only others tell of it
// What to do about a failure with that code at a step of that kind, or without a step.
Remedy::Action ActionForFailure(Code code, int driver_result, std::optional<StepKind> step, Remedy::Action otherwise);
// Whether it is for a context that is lost, or memory that is faulty, so that no call is to be repeated.
bool EndsTheJob(Remedy::Action action);

void Explain(const Roster& roster, const CandidateCause& cause, Verdict& verdict);
// Lists all candidates, in the order in which they are believed.
void Consider(const Roster& roster, const std::vector<CandidateCause>& candidates, Verdict& verdict);
void ExplainHealth(const Roster& roster, Verdict& verdict);
// Begins the headline with what could not be read, if verdict.damage has any of that; such a job is not called healthy.
void SayWhatIsMissing(Verdict& verdict);

// What the failure of an attempt did to its other members.
void ExplainConsequences(Explanation&);
// What the others tried, or completed, after a process had died outside of any attempt.
void ExplainLaterAttempts(Explanation&);
// Where all processes have ended, a remedy that repeats a call or examines a process is for the next run.
void RecommendForTheDead(Explanation&);
// Whether the journal came out of a pack of a living process: its present is that of the pack.
bool WasPacked(const SessionStory& journal);
// "Now rank 0 is paused with its contents kept and rank 1 has ended.", or of when they were packed; empty when it is not known.
std::string PresentState(const Roster& roster);

// Of a text that may begin with a name of the driver's, which keeps its spelling.
std::string Capitalized(std::string text);
std::string Sentence(std::string text);        // capitalized, with a full stop
std::string EventText(SequenceNumber seq);     // " (event 17)"; empty for 0
std::string ExitText(std::int32_t exit_code);  // "it exited with code 1"; 128 + N: by signal N

}  // namespace amem
