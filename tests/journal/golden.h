// The journals that are kept for ever in tests/journal/golden. What each holds is written down in its expected.txt.
#pragma once

#include <string>

#include "tests/journal/temporary.h"

namespace amem::test {

inline std::string Describe(const std::filesystem::path& session) {
  std::string text;
  auto reader = JournalReader::Open(session);
  if (!reader) return reader.status().message() + "\n";
  const auto info = (*reader)->Info();
  if (!info) return info.status().message() + "\n";
  text += std::string(ToText(info->status)) + " format " + std::to_string(info->format) + " session " +
          std::to_string(info->session.value) + " events " + std::to_string(info->events) + " from " +
          std::to_string(info->first.value) + " to " + std::to_string(info->last.value) + " snapshots";
  for (const SequenceNumber s : info->snapshots) text += " " + std::to_string(s.value);
  text += "\n";
  const Contents contents = ReadAll(session);
  for (const Event& event : contents.events) text += Dump(event) + "\n";
  text += "damaged " + std::to_string(contents.report.corrupt_records) + "\n";
  return text;
}

}  // namespace amem::test
