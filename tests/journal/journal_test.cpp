// What journal.h promises, with writer and reader in one process.
#include "journal/journal.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "journal/session_dir.h"
#include "journal/tail.h"
#include "statemachine/apply.h"
#include "tests/journal/base/no_descriptors.h"
#include "tests/journal/temporary.h"

namespace {

std::atomic<int> data_syncs{0};

}  // namespace

// In place of libc's: the call with which LMDB makes what was committed survive the operating system.
extern "C" [[gnu::visibility("default")]] int fdatasync(int fd) {
  ++data_syncs;
  return static_cast<int>(syscall(SYS_fdatasync, fd));
}

namespace amem::test {
namespace {

namespace fs = std::filesystem;

class Journal : public testing::Test {
 protected:
  TemporaryDirectory directory;
  JournalOptions options = SmallJournal(directory.path());

  std::unique_ptr<JournalWriter> Open(std::uint64_t session = 1) {
    auto writer = JournalWriter::Open(options, SessionId{session});
    EXPECT_TRUE(writer.ok()) << writer.status().message();
    return writer ? std::move(*writer) : nullptr;
  }
  // All that was appended is in LMDB.
  static bool IsDrained(const JournalWriter& writer) {
    const auto tail = ReadTail(writer.Directory() / "tail");
    return tail.ok() && tail->copy.empty();
  }
  static JournalInfo Info(const fs::path& path) {
    auto reader = JournalReader::Open(path);
    EXPECT_TRUE(reader.ok()) << reader.status().message();
    auto info = (*reader)->Info();
    EXPECT_TRUE(info.ok()) << info.status().message();
    return *info;
  }
};

TEST_F(Journal, every_kind_of_event_comes_back_from_tail_and_store) {
  auto writer = Open();
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    ASSERT_TRUE(writer->Append({SequenceNumber{kind + 1}, kind, 5, Sample(kind)}).ok());
  }
  for (const bool flushed : {false, true}) {
    if (flushed) {
      ASSERT_TRUE(writer->Flush().ok());
      EXPECT_TRUE(IsDrained(*writer));
    }
    const Contents contents = ReadAll(writer->Directory());
    ASSERT_EQ(contents.events.size(), kEventKinds) << contents.status.message();
    for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
      EXPECT_EQ(contents.events[kind], (Event{SequenceNumber{kind + 1}, kind, 5, Sample(kind)}));
    }
  }
}

TEST_F(Journal, a_reader_beside_the_writer_sees_each_event_at_once) {
  auto writer = Open();
  auto reader = JournalReader::Open(writer->Directory());
  ASSERT_TRUE(reader.ok());
  for (std::uint64_t seq = 1; seq <= 300; ++seq) {
    ASSERT_TRUE(writer->Append(NumberedEvent(seq)).ok());
    if (seq % 50 == 0) {
      ASSERT_TRUE(writer->Flush().ok());
    }
    std::uint64_t last = 0;
    ASSERT_TRUE((*reader)
                    ->Read(SequenceNumber{1}, kToTheEnd,
                           [&](const Event& e) {
                             EXPECT_EQ(e.seq.value, ++last);
                             return true;
                           })
                    .ok());
    ASSERT_EQ(last, seq);
  }
}

TEST_F(Journal, a_range_and_an_early_end_are_kept_to) {
  auto writer = Open();
  AppendNumbered(*writer, 1, 500);
  ASSERT_TRUE(writer->Flush().ok());
  AppendNumbered(*writer, 501, 520);
  for (const auto& [first, last] :
       {std::pair<std::uint64_t, std::uint64_t>{1, 1}, {100, 200}, {490, 510}, {505, 505}, {520, 9999}}) {
    const Contents contents = ReadAll(writer->Directory(), first, last);
    ASSERT_EQ(contents.events.size(), std::min<std::uint64_t>(last, 520) - first + 1);
    EXPECT_EQ(NotNumbered(contents.events, first), "");
    EXPECT_EQ(contents.report.corrupt_records, 0U) << contents.report.corruption;
  }
  EXPECT_TRUE(ReadAll(writer->Directory(), 521).events.empty());
  EXPECT_TRUE(ReadAll(writer->Directory(), 20, 10).events.empty());
  auto reader = JournalReader::Open(writer->Directory());
  int seen = 0;
  ASSERT_TRUE((*reader)->Read(SequenceNumber{1}, kToTheEnd, [&](const Event&) { return ++seen < 7; }).ok());
  EXPECT_EQ(seen, 7);
}

TEST_F(Journal, a_full_tail_makes_the_appender_wait_and_loses_nothing) {
  options.tail_bytes = 16 << 10;
  auto writer = Open();
  const std::uint64_t n = kSanitized ? 3000 : 30'000;
  AppendNumbered(*writer, 1, n);
  const Contents contents = ReadAll(writer->Directory());
  EXPECT_EQ(contents.events.size(), n);
  EXPECT_EQ(NotNumbered(contents.events), "");
}

TEST_F(Journal, an_event_larger_than_the_tail_is_stored_in_its_place) {
  options.tail_bytes = 16 << 10;
  auto writer = Open();
  std::vector<Event> expected;
  for (std::uint64_t seq = 1; seq <= 60; ++seq) {
    expected.push_back(NumberedEvent(seq));
    if (seq % 20 == 0) expected.back().body = PassedThrough{"large", std::string(100'000 + seq, 'z'), 1};
    ASSERT_TRUE(writer->Append(expected.back()).ok());
  }
  EXPECT_TRUE(ReadAll(writer->Directory()).events == expected);
}

TEST_F(Journal, close_marks_the_directory_and_ends_the_writing) {
  auto writer = Open();
  AppendNumbered(*writer, 1, 10);
  EXPECT_EQ(Info(writer->Directory()).status, SessionStatus::kLive);
  ASSERT_TRUE(writer->Close().ok());
  ASSERT_TRUE(writer->Close().ok());
  EXPECT_EQ(writer->Append(NumberedEvent(11)).code(), Code::kRefused);
  const JournalInfo info = Info(writer->Directory());
  EXPECT_EQ(info.status, SessionStatus::kClosed);
  EXPECT_EQ(info.last, SequenceNumber{10});
  EXPECT_EQ(info.events, 10U);
  EXPECT_EQ(info.pid, getpid());
  EXPECT_EQ(info.format, kJournalFormat);
  EXPECT_GT(info.file_bytes, 0U);
  EXPECT_FALSE(fs::exists(writer->Directory() / "tail"));
  writer.reset();
  EXPECT_EQ(ReadAll(directory.path() / "0000000000000001").events.size(), 10U);
}

TEST_F(Journal, close_makes_everything_survive_the_operating_system) {
  auto writer = Open();
  AppendNumbered(*writer, 1, 100);
  ASSERT_TRUE(writer->Flush().ok());
  const int before = data_syncs;
  ASSERT_TRUE(writer->Close().ok());
  EXPECT_GT(data_syncs, before);
}

TEST_F(Journal, a_writer_destroyed_without_close_leaves_a_crashed_session) {
  auto writer = Open();
  AppendNumbered(*writer, 1, 10);
  const fs::path path = writer->Directory();
  writer.reset();
  const JournalInfo info = Info(path);
  EXPECT_EQ(info.status, SessionStatus::kCrashed);
  EXPECT_EQ(info.last, SequenceNumber{10});
  const Contents contents = ReadAll(path);
  EXPECT_EQ(contents.events.size(), 10U);
  EXPECT_FALSE(contents.report.torn_tail);
}

TEST_F(Journal, a_reader_outlives_the_writer) {
  auto writer = Open();
  AppendNumbered(*writer, 1, 10);
  auto reader = JournalReader::Open(writer->Directory());
  ASSERT_TRUE(reader.ok());
  AppendNumbered(*writer, 11, 20);
  ASSERT_TRUE(writer->Close().ok());
  writer.reset();
  std::uint64_t last = 0;
  ASSERT_TRUE((*reader)->Read(SequenceNumber{1}, kToTheEnd, [&](const Event& e) { return (last = e.seq.value) != 0; }).ok());
  EXPECT_EQ(last, 20U);
}

TEST_F(Journal, files_are_for_their_owner_only) {
  options.directory = directory.path() / "made" / "by the way";
  auto writer = Open();
  AppendNumbered(*writer, 1, 1);
  ASSERT_TRUE(writer->Close().ok());
  struct stat st {};
  for (fs::path path = writer->Directory(); path != directory.path(); path = path.parent_path()) {
    ASSERT_EQ(stat(path.c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 0777, 0700U) << path;
  }
  for (const auto& entry : fs::directory_iterator(writer->Directory())) {
    ASSERT_EQ(stat(entry.path().c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 077, 0U) << entry.path();
  }
}

TEST_F(Journal, a_number_that_does_not_follow_breaks_the_journal) {
  auto writer = Open();
  AppendNumbered(*writer, 1, 5);
  const Status wrong = writer->Append(NumberedEvent(7));
  EXPECT_EQ(wrong.code(), Code::kInvalid);
  EXPECT_NE(wrong.message().find("event 7"), std::string::npos);
  EXPECT_EQ(writer->Append(NumberedEvent(6)), wrong);
  EXPECT_EQ(writer->Flush(), wrong);
  EXPECT_EQ(writer->Close(), wrong);
  const JournalInfo info = Info(writer->Directory());
  EXPECT_EQ(info.status, SessionStatus::kBroken);
  EXPECT_EQ(info.broken_reason, wrong.message());
  EXPECT_EQ(ReadAll(writer->Directory()).events.size(), 5U);
}

// As on a disk without inodes: there is no file that says so.
TEST_F(Journal, that_it_is_broken_is_told_by_its_tail_where_no_file_can_be_made) {
  auto writer = Open();
  const fs::path session = writer->Directory();
  AppendNumbered(*writer, 1, 5);
  Status wrong;
  {
    const NoDescriptors none;
    wrong = writer->Append(NumberedEvent(7));
    writer.reset();
  }
  EXPECT_FALSE(fs::exists(session / "broken")) << "it tells nothing of the tail otherwise";
  EXPECT_EQ(Info(session).status, SessionStatus::kBroken);
  EXPECT_EQ(Info(session).broken_reason, wrong.message());
}

TEST_F(Journal, many_threads_may_append_in_turn) {
  auto writer = Open();
  std::mutex turn;
  std::uint64_t seq = 0;
  std::vector<std::thread> threads;
  const std::uint64_t n = kSanitized ? 500 : 5000;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < n; ++i) {
        const std::lock_guard lock(turn);
        EXPECT_TRUE(writer->Append(NumberedEvent(++seq)).ok());
      }
    });
  }
  for (auto& t : threads) t.join();
  const Contents contents = ReadAll(writer->Directory());
  EXPECT_EQ(contents.events.size(), 8 * n);
  EXPECT_EQ(NotNumbered(contents.events), "");
}

TEST_F(Journal, threads_read_flush_and_look_while_one_appends) {
  auto writer = Open();
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> appended{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      while (!stop) {
        const std::uint64_t before = appended;
        const Contents contents = ReadAll(writer->Directory(), before > 100 ? before - 100 : 1);
        EXPECT_TRUE(contents.status.ok()) << contents.status.message();
        EXPECT_EQ(contents.report.corrupt_records, 0U) << contents.report.corruption;
        EXPECT_TRUE(before == 0 || (!contents.events.empty() && contents.events.back().seq.value >= before));
        if (t == 0) {
          EXPECT_TRUE(writer->Flush().ok());
        }
      }
    });
  }
  for (std::uint64_t seq = 1; seq <= (kSanitized ? 3000U : 50'000U); ++seq) {
    ASSERT_TRUE(writer->Append(NumberedEvent(seq)).ok());
    appended = seq;
  }
  stop = true;
  for (auto& t : threads) t.join();
}

TEST_F(Journal, an_idle_journal_is_drained_soon_without_being_asked) {
  auto writer = Open();
  for (int round = 0; round < 3; ++round) {
    AppendNumbered(*writer, static_cast<std::uint64_t>(round) * 3 + 1, static_cast<std::uint64_t>(round) * 3 + 3);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!IsDrained(*writer) && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    EXPECT_TRUE(IsDrained(*writer));
  }
}

// ---- forked children ---------------------------------------------------------------------------------------------------

template <class Body>
int InChild(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(Journal, a_forked_child_is_refused_and_changes_nothing) {
  auto writer = Open();
  AppendNumbered(*writer, 1, 10);
  auto reader = JournalReader::Open(writer->Directory());
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(InChild([&] {
              if (writer->Append(NumberedEvent(11)).code() != Code::kRefused) return 1;
              if (writer->Flush().code() != Code::kRefused) return 2;
              if (writer->Close().code() != Code::kRefused) return 3;
              if (writer->Snapshot(State{}).code() != Code::kRefused) return 4;
              writer.reset();
              (*reader).reset();
              return 0;
            }),
            0);
  AppendNumbered(*writer, 11, 2000);
  ASSERT_TRUE(writer->Flush().ok());
  std::uint64_t last = 0;
  ASSERT_TRUE((*reader)->Read(SequenceNumber{1}, kToTheEnd, [&](const Event& e) { return (last = e.seq.value) != 0; }).ok());
  EXPECT_EQ(last, 2000U);
  ASSERT_TRUE(writer->Close().ok());
}

TEST_F(Journal, a_forked_child_may_read_its_parents_journal_and_write_its_own) {
#ifdef AMEM_THREAD_SANITIZED
  GTEST_SKIP() << "WAIVED: thread sanitizer has no threads in the child of a process with threads";
#endif
  auto writer = Open();
  AppendNumbered(*writer, 1, 10);
  ASSERT_TRUE(writer->Flush().ok());
  EXPECT_EQ(InChild([&] {
              if (ReadAll(writer->Directory()).events.size() != 10) return 1;
              auto own = JournalWriter::Open(options, SessionId{2});
              if (!own || !(*own)->Append(NumberedEvent(1)).ok()) return 2;
              return (*own)->Close().ok() ? 0 : 3;
            }),
            0);
  AppendNumbered(*writer, 11, 20);
  ASSERT_TRUE(writer->Close().ok());
  EXPECT_EQ(ReadAll(writer->Directory()).events.size(), 20U);
  EXPECT_EQ(ReadAll(directory.path() / "0000000000000002").events.size(), 1U);
}

// ---- snapshots -----------------------------------------------------------------------------------------------------------

class Snapshots : public Journal {
 protected:
  std::vector<State> states{State{}};  // after each event
  void Run(JournalWriter& writer, std::uint64_t last) {
    for (std::uint64_t seq = states.size(); seq <= last; ++seq) {
      State state = states.back();
      ASSERT_TRUE(Apply(state, LegalEvent(seq)).ok());
      ASSERT_TRUE(writer.Append(LegalEvent(seq)).ok());
      states.push_back(std::move(state));
      if (writer.SnapshotDue()) {
        const Status status = writer.Snapshot(states.back());
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_FALSE(writer.SnapshotDue());
      }
    }
  }
};

TEST_F(Snapshots, the_state_at_any_event_is_told) {
  auto writer = Open();
  Run(*writer, 200);
  auto reader = JournalReader::Open(writer->Directory());
  ASSERT_TRUE(reader.ok());
  for (std::uint64_t seq = 0; seq <= 200; ++seq) {
    const auto state = (*reader)->StateAt(SequenceNumber{seq});
    ASSERT_TRUE(state.ok()) << state.status().message();
    ASSERT_TRUE(*state == states[seq]) << seq;
  }
  const auto last = (*reader)->StateAt(std::nullopt);
  ASSERT_TRUE(last.ok());
  EXPECT_TRUE(*last == states.back());
  const auto beyond = (*reader)->StateAt(SequenceNumber{201});
  EXPECT_EQ(beyond.status().code(), Code::kNotFound) << beyond.status().message();
}

TEST_F(Snapshots, let_old_events_go_and_stand_for_them) {
  options.snapshot_every = 100;
  auto writer = Open();
  Run(*writer, 950);
  ASSERT_TRUE(writer->Close().ok());
  const JournalInfo info = Info(writer->Directory());
  EXPECT_EQ(info.snapshots, (std::vector{SequenceNumber{800}, SequenceNumber{900}}));
  EXPECT_EQ(info.first, SequenceNumber{801});
  EXPECT_EQ(info.last, SequenceNumber{950});
  EXPECT_EQ(info.events, 150U);
  auto reader = JournalReader::Open(writer->Directory());
  for (std::uint64_t seq = 800; seq <= 950; ++seq) {
    const auto state = (*reader)->StateAt(SequenceNumber{seq});
    ASSERT_TRUE(state.ok()) << state.status().message();
    ASSERT_TRUE(*state == states[seq]) << seq;
  }
  const auto gone = (*reader)->StateAt(SequenceNumber{700});
  ASSERT_FALSE(gone.ok());
  EXPECT_NE(gone.status().message().find("let go"), std::string::npos) << gone.status().message();
  const Contents contents = ReadAll(writer->Directory());
  EXPECT_EQ(contents.events.front().seq, SequenceNumber{801});
  EXPECT_EQ(contents.report.corrupt_records, 0U) << contents.report.corruption;
}

// Appends up to event `last`, with snapshots when they are due, and without keeping the states.
void RunOn(JournalWriter& writer, State& state, std::uint64_t last) {
  for (std::uint64_t seq = state.last.value + 1; seq <= last; ++seq) {
    ASSERT_TRUE(Apply(state, LegalEvent(seq)).ok());
    ASSERT_TRUE(writer.Append(LegalEvent(seq)).ok());
    if (writer.SnapshotDue()) {
      ASSERT_TRUE(writer.Snapshot(state).ok());
    }
  }
  ASSERT_TRUE(writer.Flush().ok());
}

TEST_F(Snapshots, let_go_of_more_events_than_one_commit_removes) {
  options.snapshot_every = 9000;  // one commit removes 8 192
  auto writer = Open();
  State state;
  RunOn(*writer, state, 18'200);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const auto first = [&] { return Info(writer->Directory()).first; };
  while (first() != SequenceNumber{9001} && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_EQ(first(), SequenceNumber{9001});
  EXPECT_EQ(Info(writer->Directory()).events, 9200U);
}

TEST_F(Snapshots, keep_the_file_from_growing) {
  options.snapshot_every = 1000;
  auto writer = Open();
  State state;
  const auto run = [&](std::uint64_t last) { RunOn(*writer, state, last); };
  const std::uint64_t step = 10'000;
  run(step);
  const Bytes early = Info(writer->Directory()).file_bytes;
  run(step * (kSanitized ? 2 : 10));
  EXPECT_LE(Info(writer->Directory()).file_bytes, early * 2);
}

TEST_F(Snapshots, of_a_state_that_cannot_be_condensed_are_put_off_and_break_nothing) {
  options.snapshot_every = 10;
  auto writer = Open();
  State state;
  for (std::uint64_t seq = 1; seq <= 10; ++seq) {
    Event event = LegalEvent(seq);
    if (seq == 10) event.body = SessionClosed{"exit", 0};
    ASSERT_TRUE(Apply(state, event).ok());
    ASSERT_TRUE(writer->Append(event).ok());
  }
  ASSERT_TRUE(writer->SnapshotDue());
  EXPECT_EQ(writer->Snapshot(state).code(), Code::kInvalid);
  EXPECT_FALSE(writer->SnapshotDue());
  EXPECT_TRUE(writer->Flush().ok());
  EXPECT_EQ(Info(writer->Directory()).status, SessionStatus::kLive);
}

// ---- directories -----------------------------------------------------------------------------------------------------------

TEST_F(Journal, sessions_are_listed_newest_first) {
  for (const std::uint64_t session : {3, 1, 2}) {
    auto writer = Open(session);
    AppendNumbered(*writer, 1, session);
    ASSERT_TRUE(writer->Close().ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(12));
  }
  fs::create_directory(directory.path() / "something else");
  fs::create_directory(directory.path() / "00000000000000ff");  // empty
  const auto sessions = ListSessions(directory.path());
  ASSERT_TRUE(sessions.ok());
  std::vector<std::string> names;
  for (const auto& s : *sessions) names.push_back(s.filename());
  EXPECT_EQ(names, (std::vector<std::string>{"0000000000000002", "0000000000000001", "0000000000000003"}));
  const auto one = ListSessions(sessions->front());
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(*one, std::vector{sessions->front()});
  EXPECT_EQ(ListSessions(directory.path() / "nothing").status().code(), Code::kNotFound);
}

TEST_F(Journal, a_session_is_written_once) {
  auto writer = Open();
  ASSERT_TRUE(writer->Close().ok());
  const auto again = JournalWriter::Open(options, SessionId{1});
  EXPECT_EQ(again.status().code(), Code::kRefused) << again.status().message();
  EXPECT_EQ(JournalWriter::Open(options, SessionId{}).status().code(), Code::kInvalid);
}

TEST_F(Journal, what_is_no_journal_is_refused_with_its_name) {
  const auto nothing = JournalReader::Open(directory.path());
  EXPECT_EQ(nothing.status().code(), Code::kNotFound);
  EXPECT_NE(nothing.status().message().find(directory.path()), std::string::npos);
  const fs::path path = directory.path() / "0000000000000001";
  fs::create_directory(path);
  for (const std::size_t size : {0, 10, 5000, 100'000}) {
    WriteFile(path / "data.mdb", std::vector<std::byte>(size, std::byte{'x'}));
    const auto rubbish = JournalReader::Open(path);
    EXPECT_FALSE(rubbish.ok()) << size;
    EXPECT_NE(rubbish.status().message().find("data.mdb"), std::string::npos) << rubbish.status().message();
  }
}

}  // namespace
}  // namespace amem::test
