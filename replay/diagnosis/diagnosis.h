// Diagnosis: what the journals of one job say about its last pause or resume, as a verdict for people and programs. The library
// behind `amem-replay why`.
//
// The journals are put on one timeline. Then the first divergence is looked for: the earliest fact on any rank that explains
// why the last pause or resume did not complete. What other ranks record because of it is its consequence. Plain
// functions over readers; nothing is written. Journals of live processes can be read as well, and are distinguished from those
// of dead ones.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "replay/diagnosis/verdict.h"
#include "replay/job/story/story.h"
#include "statemachine/types.h"

namespace amem {

// Of journals that were read, in any order; pure.
Verdict Diagnose(std::span<const SessionStory> journals);

// Reads the journals in these session directories (ListSessions finds them) in parallel and diagnoses them; `beside`, if it is
// given, makes an observer of each fold by the index of its session. What cannot be read is in Verdict::damage, and begins the
// headline; the same holds for `unread`: what could not be read outside these directories. A failure means that nothing could
// be read at all.
using BesideEach = std::function<std::unique_ptr<FoldObserver>(std::size_t session, StoryBuilder& story)>;
Result<Verdict> Diagnose(std::span<const std::filesystem::path> sessions, std::span<const std::string> unread = {},
                         const BesideEach& beside = {});

// The same of journals that may be of several jobs (replay/job/jobs.h): a verdict on each. Those of failures come first, the
// newest first. A journal that could not be read may be of any of them.
Result<std::vector<Verdict>> DiagnoseJobs(std::span<const std::filesystem::path> sessions,
                                          std::span<const std::string> unread = {});

}  // namespace amem
