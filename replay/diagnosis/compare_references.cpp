// References across the journals of a job: what only one side knows.
#include <map>

#include "replay/diagnosis/candidate_causes.h"

namespace amem {

References CompareReferences(std::span<const SessionStory> journals) {
  References references;
  std::vector<const JournalFindings*> findings;
  std::map<SessionId, const JournalFindings*> by_session;
  for (const SessionStory& j : journals) {
    findings.push_back(&j.findings);
    by_session[j.session()] = &j.findings;
    references.impossible.insert(references.impossible.end(), j.findings.violations.begin(), j.findings.violations.end());
  }
  JobFindings job = VerifyJob(findings);
  references.compared = job.references;
  references.disagreements = std::move(job.violations);
  for (const SessionStory& j : journals) {
    for (const auto& [id, import] : j.findings.imports) {
      const auto owner = by_session.find(import.remote.owner);
      if (owner == by_session.end() || import.dropped) continue;
      if (!owner->second->references.contains({import.remote.allocation, j.session(), id}))
        references.unknown_to_owner.emplace(j.session(), id);
    }
  }
  return references;
}

}  // namespace amem
