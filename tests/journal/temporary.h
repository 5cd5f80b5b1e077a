// A directory that goes with the test.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "tests/journal/samples.h"

namespace amem::test {

#ifdef AMEM_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& where = {}) {
    std::string name = (where.empty() ? std::filesystem::temp_directory_path().string() : where) + "/amem-test-XXXXXX";
    if (mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline JournalOptions SmallJournal(const std::filesystem::path& directory) {
  JournalOptions options;
  options.directory = directory;
  options.tail_bytes = 256 << 10;
  options.map_bytes = 256 << 20;
  return options;
}

// What a reader makes of a journal.
struct Contents {
  std::vector<Event> events;
  ReadReport report;
  Status status;
};
inline Contents ReadAll(const std::filesystem::path& session_directory, std::uint64_t first = 0, std::uint64_t last = ~0ULL) {
  Contents contents;
  auto reader = JournalReader::Open(session_directory);
  if (!reader) {
    contents.status = reader.status();
    return contents;
  }
  auto report = (*reader)->Read(SequenceNumber{first}, SequenceNumber{last}, [&](const Event& event) {
    contents.events.push_back(event);
    return true;
  });
  if (report) {
    contents.report = *report;
  } else {
    contents.status = report.status();
  }
  return contents;
}

// Events 1..n, intact, in order. The text says what is wrong first; empty: nothing.
inline std::string NotNumbered(const std::vector<Event>& events, std::uint64_t first = 1) {
  for (std::size_t i = 0; i < events.size(); ++i) {
    if (events[i] != NumberedEvent(first + i)) return "event " + std::to_string(first + i) + " is " + Dump(events[i]);
  }
  return {};
}

inline void AppendNumbered(JournalWriter& writer, std::uint64_t first, std::uint64_t last) {
  for (std::uint64_t seq = first; seq <= last; ++seq) {
    const Status status = writer.Append(NumberedEvent(seq));
    ASSERT_TRUE(status.ok()) << status.message();
  }
}

inline std::vector<std::byte> ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
inline void WriteFile(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  std::filesystem::remove(path);  // ext4 writes a truncated file out at once, which takes its time
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace amem::test
