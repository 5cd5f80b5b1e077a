// The text of a verdict: which explainer tells which kind, and what is said when no cause was found.
#pragma once

#include "replay/diagnosis/candidate_causes.h"
#include "replay/diagnosis/roster.h"
#include "replay/diagnosis/verdict.h"

namespace amem {

void Explain(const Roster& roster, const CandidateCause& cause, Verdict& verdict);
// Tells what was considered, in order.
void Consider(const Roster& roster, const std::vector<CandidateCause>& candidates, Verdict& verdict);
void ExplainHealth(const Roster& roster, Verdict& verdict);
// Nothing is wrong in what could be read, and verdict.damage says what could not be read.
void ExplainUnreadable(Verdict& verdict);

}  // namespace amem
