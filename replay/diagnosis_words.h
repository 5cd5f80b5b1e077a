// Words of a diagnosis: fills a Verdict from the suspect that was chosen.
#pragma once

#include "replay/diagnosis.h"
#include "replay/diagnosis_cast.h"
#include "replay/diagnosis_suspects.h"

namespace amem {

void Describe(const Cast& cast, const Suspect& suspect, Verdict& verdict);
void DescribeHealth(const Cast& cast, Verdict& verdict);
// Nothing is wrong with what could be read, and not all could be.
void DescribeUnreadable(Verdict& verdict);

}  // namespace amem
