// Disks that are full, files that may not grow, directories that are none.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <fstream>

#include "statemachine/apply.h"
#include "tests/journal/small_disk.h"
#include "tests/journal/temporary.h"

namespace amem::test {
namespace {

namespace fs = std::filesystem;

bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Appends until it fails, which it must within `most` events; then everything is as the contract says. The text says what is
// not.
std::string AppendUntilBroken(const JournalOptions& options, std::uint64_t most, const std::string& expected_reason) {
  auto writer = JournalWriter::Open(options, SessionId{1});
  if (!writer) return "open: " + writer.status().message();
  Status failure;
  std::uint64_t acknowledged = 0;
  for (std::uint64_t seq = 1; seq <= most && failure.ok(); ++seq) {
    failure = (*writer)->Append(NumberedEvent(seq));
    if (failure.ok()) acknowledged = seq;
  }
  if (failure.ok()) return "nothing failed";
  if (!Contains(failure.message(), expected_reason)) return "reason: " + failure.message();
  if ((*writer)->Append(NumberedEvent(acknowledged + 1)) != failure) return "append does not repeat the reason";
  if ((*writer)->Flush() != failure) return "flush does not repeat the reason";
  if ((*writer)->Close() != failure) return "close does not repeat the reason";
  for (const bool alive : {true, false}) {
    if (!alive) writer->reset();
    const fs::path session = options.directory / "0000000000000001";
    auto reader = JournalReader::Open(session);
    if (!reader) return "reader: " + reader.status().message();
    const auto info = (*reader)->Info();
    if (!info) return "info: " + info.status().message();
    if (info->status != SessionStatus::kBroken) return "status is " + std::string(ToText(info->status));
    if (info->broken_reason.empty()) return "no reason is told";
    const Contents contents = ReadAll(session);
    if (!contents.status.ok()) return "read: " + contents.status.message();
    if (contents.events.size() < acknowledged) {
      return std::to_string(contents.events.size()) + " of " + std::to_string(acknowledged) + " are left";
    }
    if (contents.report.corrupt_records != 0) return contents.report.corruption;
    if (const std::string wrong = NotNumbered(contents.events); !wrong.empty()) return wrong;
  }
  return {};
}

TEST(Disk, a_file_in_place_of_the_directory_is_named) {
  const TemporaryDirectory directory;
  JournalOptions options = SmallJournal(directory.path() / "file");
  std::ofstream(options.directory) << "x";
  auto writer = JournalWriter::Open(options, SessionId{1});
  ASSERT_FALSE(writer.ok());
  EXPECT_EQ(writer.status().code(), Code::kIo);
  EXPECT_TRUE(Contains(writer.status().message(), options.directory)) << writer.status().message();
  EXPECT_TRUE(Contains(writer.status().message(), "Not a directory")) << writer.status().message();
  options.directory /= "below";
  EXPECT_EQ(JournalWriter::Open(options, SessionId{1}).status().code(), Code::kIo);
}

TEST(Disk, a_directory_that_is_not_writable_is_named) {
  const TemporaryDirectory directory;
  chmod(directory.path().c_str(), 0555);
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (geteuid() == 0 && seteuid(65534) != 0) return "cannot";
    auto writer = JournalWriter::Open(SmallJournal(directory.path()), SessionId{1});
    if (writer.ok()) return "it opened";
    const std::string message = writer.status().message();
    const bool good = writer.status().code() == Code::kIo && Contains(message, directory.path()) &&
                      Contains(message, "Permission denied") && Contains(message, "AMEM_JOURNAL_DIR");
    return good ? "" : message;
  });
}

TEST(Disk, no_room_for_the_tail_is_told_at_open_and_leaves_nothing) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (!MountTmpfs(directory.path(), "1m")) return "cannot";
    JournalOptions options = SmallJournal(directory.path());
    options.tail_bytes = 8 << 20;
    auto writer = JournalWriter::Open(options, SessionId{1});
    if (writer.ok()) return "it opened";
    const std::string message = writer.status().message();
    if (!Contains(message, "No space left") || !Contains(message, "tail")) return message;
    return fs::is_empty(directory.path()) ? "" : "something is left behind";
  });
}

// Room for the tail and for a few pages of the rest: every way to run out of it at open must be a failed call.
TEST(Disk, a_disk_that_fills_up_while_a_journal_is_made_never_kills) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (!MountTmpfs(directory.path(), "1m")) return "cannot";
    std::string reasons;
    for (int pages = 0; pages < 24; ++pages) {
      JournalOptions options = SmallJournal(directory.path() / "j");
      options.tail_bytes = (1 << 20) - static_cast<Bytes>(pages) * 4096;
      auto writer = JournalWriter::Open(options, SessionId{1});
      if (!writer && !Contains(writer.status().message(), "No space left")) return writer.status().message();
      if (writer) {
        Status status;
        for (std::uint64_t seq = 1; seq <= 200 && status.ok(); ++seq) status = (*writer)->Append(NumberedEvent(seq));
        (void)(*writer)->Flush();
        const Contents contents = ReadAll((*writer)->Directory());
        if (!contents.status.ok()) return contents.status.message();
      }
      writer = Status{Code::kIo, ""};
      fs::remove_all(options.directory);
    }
    return {};
  });
}

TEST(Disk, a_disk_that_fills_up_breaks_the_journal_and_loses_nothing_acknowledged) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (!MountTmpfs(directory.path(), "1m")) return "cannot";
    JournalOptions options = SmallJournal(directory.path());
    options.tail_bytes = 64 << 10;
    return AppendUntilBroken(options, 100'000, "No space left");
  });
}

// A session that goes on, whatever becomes of its journal. 0: as if it had none.
int LiveWhileTheDiskFills(const JournalOptions& options, const fs::path& filler) {
  return RunInChildQuietly([&] {
    auto writer = JournalWriter::OpenLasting(options, SessionId{1});
    State state;
    for (std::uint64_t seq = 1; seq <= 600; ++seq) {
      const Event event = LegalEvent(seq);
      (void)Apply(state, event);
      if (!writer->Append(event).ok() && seq % 50 == 0) (void)writer->Renew(state);
      if (seq % 150 == 0) (void)writer->Flush();
      if (seq % 200 == 0) FillUp(filler, 0);  // what was written is written out, so that to change it needs room again
    }
    (void)writer->Close();
  });
}

#ifdef AMEM_BY_NIGHT
constexpr unsigned kPagesFirst = 0, kPagesApart = 1;
#else
constexpr unsigned kPagesFirst = 26, kPagesApart = 31;
#endif

// A map of a file that copies on write, such as btrfs's, is one that a full disk ends the process for.
TEST(Disk, that_fills_at_any_page_of_a_life_never_ends_the_process) {
  struct Kind {
    const char *mkfs, *size;
  };
  for (const Kind& kind : {Kind{"mkfs.btrfs -q", "128M"}, {"mkfs.ext4 -q", "16M"}, {"mkfs.xfs -q", "320M"}}) {
    const TemporaryDirectory directory;
    EXPECT_FINE_IN_CHILD([&]() -> std::string {
      if (!MountDisk(directory.path(), kind.mkfs, kind.size)) return "cannot";
      JournalOptions options = SmallJournal(directory.path() / "journal");
      options.tail_bytes = 64 << 10;
      const fs::path filler = directory.path() / "filler";
      for (unsigned pages = kPagesFirst; pages < 96; pages += kPagesApart) {
        for (const bool in_memory : {true, false}) {
          options.tail_in_memory = in_memory;
          FillUp(filler, pages);
          const std::string where = std::to_string(pages) + " pages on " + kind.mkfs + (in_memory ? "" : ", by calls");
          if (const int ended = LiveWhileTheDiskFills(options, filler); ended != 0)
            return where + ": ended with " + std::to_string(ended);
          fs::remove_all(options.directory);
          fs::remove(filler);
        }
      }
      return {};
    });
  }
}

TEST(Disk, little_shared_memory_is_left_to_nccl) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (!MountTmpfs("/dev/shm", "4m")) return "cannot";
    auto writer = JournalWriter::Open(SmallJournal(directory.path()), SessionId{1});
    if (!writer) return writer.status().message();
    for (std::uint64_t seq = 1; seq <= 5000; ++seq) {
      if (const Status status = (*writer)->Append(NumberedEvent(seq)); !status) return status.message();
    }
    if (!fs::is_empty("/dev/shm/amem-" + std::to_string(geteuid()))) return "it took some of 4 MiB";
    const Contents contents = ReadAll((*writer)->Directory());
    if (contents.events.size() != 5000) return std::to_string(contents.events.size()) + " events: " + contents.status.message();
    return NotNumbered(contents.events);
  });
}

TEST(Disk, a_full_map_breaks_the_journal_and_loses_nothing_acknowledged) {
  const TemporaryDirectory directory;
  JournalOptions options = SmallJournal(directory.path());
  options.tail_bytes = 64 << 10;
  options.map_bytes = 512 << 10;
  EXPECT_EQ(AppendUntilBroken(options, 100'000, "map_bytes"), "");
}

TEST(Disk, a_limit_of_file_sizes_fails_and_does_not_kill) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    JournalOptions options = SmallJournal(directory.path());
    options.tail_bytes = 64 << 10;
    const rlimit limit{400 << 10, 400 << 10};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return "cannot";
    JournalOptions large = options;
    large.tail_bytes = 1 << 20;
    const auto refused = JournalWriter::Open(large, SessionId{2});
    if (refused.ok() || !Contains(refused.status().message(), "ulimit -f")) return "large: " + refused.status().message();
    return AppendUntilBroken(options, 100'000, "File too large");
  });
}

}  // namespace
}  // namespace amem::test
