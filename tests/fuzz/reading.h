// What the commands of amem-replay do with journals, for the fuzz targets.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/job/fold.h"
#include "replay/job/jobs.h"
#include "replay/job/story/story.h"
#ifndef AMEM_FUZZ_LIBRARIES_ONLY
#include "replay/diagnosis/diagnosis.h"
#include "replay/report/report_json.h"
#include "replay/report/timeline.h"
#include "replay/report/trace.h"
#include "tests/replay/report/read_timeline.h"
#endif

namespace amem::test {

// A directory of this process, in memory where there is such a place.
inline const std::filesystem::path& FuzzDirectory() {
  static const std::filesystem::path path = [] {
    for (std::string name : {"/dev/shm/amem-fuzz-XXXXXX", "/tmp/amem-fuzz-XXXXXX"}) {
      if (::mkdtemp(name.data()) != nullptr) return std::filesystem::path(name);
    }
    std::abort();
  }();
  static const bool at_exit = std::atexit([] {
                                std::error_code ignored;
                                std::filesystem::remove_all(FuzzDirectory(), ignored);
                              }) == 0;
  static_cast<void>(at_exit);
  return path;
}

// Everything that can be made of these sessions; whatever is in them, it ends.
inline void ReadAsTheToolDoes(const std::vector<std::filesystem::path>& sessions) {
  for (const auto& session : sessions) {
    auto reader = JournalReader::Open(session);
    if (!reader.ok()) continue;
    static_cast<void>((*reader)->Info());
    static_cast<void>((*reader)->Read(SequenceNumber{1}, kToTheEnd, [](const Event&) { return true; }));
    static_cast<void>((*reader)->StateAt(std::nullopt));
    static_cast<void>(ReadStory(session));
  }
  static_cast<void>(SelectLatestJob(sessions));
#ifndef AMEM_FUZZ_LIBRARIES_ONLY
  const auto verdict = Diagnose(sessions);
  std::vector<std::unique_ptr<JournalReader>> readers;
  std::vector<SessionTimeline> timelines;
  for (const auto& session : sessions) {
    auto reader = JournalReader::Open(session);
    if (!reader.ok()) continue;
    auto timeline = ReadTimeline(**reader, LimitsOf(sessions.size(), {}));
    if (timeline.ok()) timelines.push_back(*std::move(timeline));
    readers.push_back(*std::move(reader));
  }
  if (!readers.empty()) static_cast<void>(WriteTrace(readers, [](std::string_view) {}));
  if (!timelines.empty() && verdict.ok())
    static_cast<void>(ReportPage("", JoinTimelines(std::move(timelines)), *verdict, {}, "0", ""));
#endif
}

}  // namespace amem::test
