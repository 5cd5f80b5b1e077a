// Scripted journals on disk, for tests of what reads directories.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <utility>

#include "journal/journal.h"
#include "tests/replay/job/scripted_journal.h"

namespace amem::test {

// A journal in `directory` with what the story has told so far, still open; nullptr where that failed.
inline std::unique_ptr<JournalWriter> BeginJournal(const Story& story, const std::filesystem::path& directory) {
  JournalOptions options;
  options.directory = directory;
  auto writer = JournalWriter::Open(options, story.id());
  EXPECT_TRUE(writer.ok()) << writer.status().message();
  if (!writer) return nullptr;
  for (const Event& event : story.events()) {
    const Status status = (*writer)->Append(event);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  return *std::move(writer);
}

// The whole story as the journal of a process that ended in order; the session's directory, empty where that failed.
inline std::filesystem::path WriteJournal(const Story& story, const std::filesystem::path& directory) {
  const auto writer = BeginJournal(story, directory);
  if (writer == nullptr) return {};
  const Status closed = writer->Close();
  EXPECT_TRUE(closed.ok()) << closed.message();
  return writer->Directory();
}

}  // namespace amem::test
