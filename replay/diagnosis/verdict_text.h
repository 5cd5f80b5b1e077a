// Words of a diagnosis: fills a Verdict from the suspect that was chosen.
#pragma once

#include "replay/diagnosis/candidate_causes.h"
#include "replay/diagnosis/diagnosis.h"
#include "replay/diagnosis/roster.h"

namespace amem {

void Describe(const Roster& cast, const CandidateCause& suspect, Verdict& verdict);
void DescribeHealth(const Roster& cast, Verdict& verdict);
// Nothing is wrong with what could be read, and not all could be.
void DescribeUnreadable(Verdict& verdict);

}  // namespace amem
