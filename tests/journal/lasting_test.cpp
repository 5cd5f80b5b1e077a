// Journals that break, and go on in a fresh directory; journals that are never ended.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "journal/base/deadline.h"
#include "journal/session_dir.h"
#include "statemachine/apply.h"
#include "tests/journal/small_disk.h"
#include "tests/journal/temporary.h"

#ifndef AMEM_SANITIZED
static bool no_threads = false;
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* given) {
  if (no_threads) return EAGAIN;
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, body, given);
}
#endif

namespace amem::test {
namespace {

namespace fs = std::filesystem;

// A writer with the state that its events lead to, as a ledger keeps them.
struct Lasting {
  explicit Lasting(JournalOptions options, SessionId session = SessionId{1}) {
    options.report = [this](const std::string& message) { said.push_back(message); };
    writer = JournalWriter::OpenLasting(options, session);
  }
  Status Append() {
    const Event event = LegalEvent(state.last.value + 1);
    const Status applied = Apply(state, event);
    if (!applied) return applied;
    const Status appended = writer->Append(event);
    if (appended && writer->SnapshotDue()) return writer->Snapshot(state);
    return appended;
  }
  // Files are made by a thread of their own, which a busy machine may keep for longer than one call waits.
  Status Renew() {
    Status renewed = writer->Renew(state);
    for (const auto until = In(std::chrono::seconds(20)); renewed.code() == Code::kTimeout && !Passed(until);)
      renewed = writer->Renew(state);
    return renewed;
  }
  // What is wrong with what a reader sees; empty: nothing.
  [[nodiscard]] std::string Wrong() const {
    auto reader = JournalReader::Open(writer->Directory());
    if (!reader) return reader.status().message();
    const auto seen = (*reader)->StateAt(std::nullopt);
    if (!seen) return seen.status().message();
    return *seen == state ? "" : "the reader's state is another one";
  }
  State state;
  std::vector<std::string> said;
  std::unique_ptr<JournalWriter> writer;
};

// Fresh disks give the same inodes, and other tests run beside this one: their memory would have the same name.
SessionId OfThisProcess() { return SessionId{static_cast<std::uint64_t>(getpid()) << 16}; }

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Lasting, a_full_map_costs_no_more_than_the_events_that_did_not_fit) {
  const TemporaryDirectory directory;
  JournalOptions options = SmallJournal(directory.path());
  options.tail_bytes = 64 << 10;
  options.map_bytes = 512 << 10;
  Lasting session(options);
  int renewed = 0;
  const auto renew = [&] {
    EXPECT_EQ(session.Append().code(), Code::kIo) << "until it is renewed every append fails";
    const Status again = session.Renew();
    ASSERT_TRUE(again.ok()) << again.message();
    ++renewed;
    ASSERT_EQ(session.Wrong(), "");
  };
  for (int i = 0; i < 20'000; ++i) {
    if (!session.Append().ok()) {
      ASSERT_NO_FATAL_FAILURE(renew());
    }
  }
  // Events wait in the tail on a busy machine, and the last of them may not have fitted.
  if (!session.writer->Flush().ok()) {
    ASSERT_NO_FATAL_FAILURE(renew());
  }
  EXPECT_GT(renewed, 1);
  EXPECT_EQ(session.said.size(), 2U * static_cast<std::size_t>(renewed));
  ASSERT_TRUE(session.writer->Flush().ok());
  EXPECT_EQ(session.Wrong(), "");
  const fs::path name = directory.path() / "0000000000000001";
  EXPECT_EQ(session.writer->Directory(), name);
  EXPECT_EQ(StatusOf(name), SessionStatus::kLive);
  // The one before it is kept, and can be read by its name.
  EXPECT_EQ(*ListSessions(directory.path()), std::vector{name});
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 1 + renewed) << "and so is each before that";
  auto before = JournalReader::Open(name.string() + ".broken");
  ASSERT_TRUE(before.ok()) << before.status().message();
  EXPECT_EQ((*before)->Info()->status, SessionStatus::kBroken);
  ASSERT_TRUE(session.writer->Close().ok());
  EXPECT_EQ(session.Append().code(), Code::kRefused);
  EXPECT_EQ(session.writer->Renew(session.state).code(), Code::kRefused) << "a closed journal is not begun anew";
  // Where only the one before is left, the next does not take its place.
  fs::remove_all(name);
  ASSERT_TRUE(JournalWriter::OpenLasting(options, SessionId{1})->Append(LegalEvent(1)).ok());
  EXPECT_TRUE(fs::exists(name));
  EXPECT_TRUE(fs::exists(name.string() + ".broken"));
}

TEST(Lasting, a_full_disk_is_waited_for) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (!MountTmpfs(directory.path(), "4m")) return "cannot";
    const fs::path other = directory.path() / "other";
    std::ofstream(other) << std::string(std::size_t{4} << 20, 'x');
    JournalOptions options = SmallJournal(directory.path() / "journal");
    options.tail_bytes = 64 << 10;
    Lasting session(options);
    if (session.said.size() != 1 || !Has(session.said[0], "No space left")) return "a full disk is not told at once";
    if (!session.writer->Directory().empty()) return "there is a directory";
    if (session.Append().code() != Code::kIo) return "an append says nothing";
    if (session.writer->Renew(session.state).ok()) return "a journal began on a full disk";
    fs::remove(other);
    if (const Status renewed = session.Renew(); !renewed) return renewed.message();
    if (session.said.size() != 2 || !Has(session.said[1], "pausing works again")) return "its end is not told";
    while (session.Append().ok()) {
      if (session.state.last.value == 100) std::ofstream(other) << std::string(std::size_t{3} << 20, 'x');
      if (session.state.last.value > 200'000) return "the disk never filled up";
    }
    if (session.writer->Renew(session.state).ok()) return "a journal began on a full disk";
    fs::remove(other);
    if (const Status renewed = session.Renew(); !renewed) return renewed.message();
    for (int i = 0; i < 100; ++i) {
      if (const Status appended = session.Append(); !appended) return appended.message();
    }
    return session.Wrong();
  });
}

TEST(Lasting, a_journal_that_was_removed_is_noticed_and_begun_anew) {
  for (const char* removed : {"", "tail", "data.mdb"}) {
    const TemporaryDirectory directory;
    Lasting session(SmallJournal(directory.path()));
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(session.Append().ok());
    const fs::path own = session.writer->Directory();
    fs::remove_all(own / removed);
    const auto ask = session.writer->AskFiles();
    ASSERT_TRUE(ask);
    EXPECT_EQ(ask(In(std::chrono::seconds(20))).code(), Code::kIo) << removed;
    const Status lost = session.Append();
    EXPECT_TRUE(Has(lost.message(), "were removed")) << lost.message();
    ASSERT_TRUE(session.Renew().ok());
    ASSERT_TRUE(session.Append().ok());
    EXPECT_EQ(session.Wrong(), "") << removed;
  }
}

// Empty: the loss is noticed without a signal, and a fresh journal takes the place of the lost one.
std::string NoticedAndBegunAnew(Lasting& session, const std::string& said) {
  const auto ask = session.writer->AskFiles();
  if (ask(In(std::chrono::seconds(20))).code() != Code::kIo) return "it is not noticed";
  const Status lost = session.Append();
  if (!Has(lost.message(), said)) return "an append says: " + lost.message();
  if (const Status renewed = session.Renew(); !renewed) return renewed.message();
  if (const Status appended = session.Append(); !appended) return appended.message();
  return session.Wrong();
}

// LMDB reads data.mdb and lock.mdb through maps, where a page behind the end of the file raises SIGBUS.
TEST(Lasting, a_journal_that_was_cut_short_is_noticed_and_begun_anew) {
  for (const std::string file : {"data.mdb", "lock.mdb", "tail"}) {
    for (const int part : {0, 2}) {
      const TemporaryDirectory directory;
      SCOPED_TRACE(file + (part == 0 ? " emptied" : " halved"));
      EXPECT_FINE_IN_CHILD([&]() -> std::string {
        Lasting session(SmallJournal(directory.path()));
        for (int i = 0; i < 1000; ++i)
          if (const Status appended = session.Append(); !appended) return appended.message();
        if (const Status flushed = session.writer->Flush(); !flushed) return flushed.message();
        const fs::path cut = session.writer->Directory() / file;
        fs::resize_file(cut, part == 0 ? 0 : fs::file_size(cut) / part);
        return NoticedAndBegunAnew(session, "was cut short");
      });
    }
  }
}

// As of a server that has forgotten the file (ESTALE).
TEST(Lasting, a_journal_that_cannot_be_reached_is_noticed_and_begun_anew) {
  for (const std::string file : {"data.mdb", "tail"}) {
    const TemporaryDirectory directory;
    SCOPED_TRACE(file);
    EXPECT_FINE_IN_CHILD([&]() -> std::string {
      auto* const session = new Lasting(SmallJournal(directory.path()));  // never ends: its descriptor is not its own any more
      if (const Status appended = session->Append(); !appended) return appended.message();
      const fs::path own = session->writer->Directory() / file;
      for (int fd = 0; fd < 256; ++fd)
        if (PathOf(fd) == own && (file == "tail" || (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY)) close(fd);
      return NoticedAndBegunAnew(*session, "cannot be reached");
    });
  }
}

// Takes the pages of data.mdb out of this process and out of memory.
bool Evict(const fs::path& data) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (!line.ends_with(data.native())) continue;
    std::size_t digits = 0;
    const auto begin = std::stoul(line, &digits, 16);
    const auto end = std::stoul(line.substr(digits + 1), nullptr, 16);
    if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED) != 0) return false;
  }
  const auto file = File::OpenToRead(data);
  return file && posix_fadvise(file->fd(), 0, 0, POSIX_FADV_DONTNEED) == 0;
}

TEST(Lasting, pages_that_a_disk_does_not_give_back_are_an_error) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    // MountDisk makes the file system in this file, and takes its name away.
    const auto disk = File::Open("/dev/shm/" + directory.path().filename().string() + ".image", O_RDWR | O_CREAT);
    if (!disk || !MountDisk(directory.path(), "mkfs.ext4 -q", "24M")) return "cannot";
    Lasting session(SmallJournal(directory.path() / "journal"));
    for (int i = 0; i < 1000; ++i)
      if (const Status appended = session.Append(); !appended) return appended.message();
    if (const Status flushed = session.writer->Flush(); !flushed) return flushed.message();
    sync();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the next transaction checks the pages
    if (!Evict(session.writer->Directory() / "data.mdb") || ftruncate(disk->fd(), 0) != 0) return "cannot";
    if (const Status appended = session.Append(); !appended) return appended.message();
    const Status flushed = session.writer->Flush();
    return Has(flushed.message(), "Input/output error") ? "" : "a flush says: " + flushed.message();
  });
}

// Its process holds the files until it ends or lets go of the writer.
TEST(Lasting, a_journal_that_was_closed_is_whole_while_its_process_lives) {
  const TemporaryDirectory directory;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    Lasting session(SmallJournal(directory.path()));
    const bool closed = session.Append().ok() && session.writer->Close().ok();
    (void)!write(ready[1], closed ? "y" : "n", 1);
    pause();
    _exit(0);
  }
  char closed = 0;
  ASSERT_EQ(read(ready[0], &closed, 1), 1);
  EXPECT_EQ(closed, 'y');
  const auto sessions = ListSessions(directory.path());
  ASSERT_TRUE(sessions.ok() && sessions->size() == 1);
  const auto reader = JournalReader::Open(sessions->front());
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  const auto found = (*reader)->Read(SequenceNumber{1}, SequenceNumber{~std::uint64_t{0}}, [](const Event&) { return true; });
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found->corruption, "");
  EXPECT_EQ(StatusOf(sessions->front()), SessionStatus::kClosed);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
}

TEST(Lasting, a_journal_that_breaks_while_memory_is_paused_begins_anew_and_has_the_resume) {
  const TemporaryDirectory directory;
  Lasting session(SmallJournal(directory.path()));
  ASSERT_TRUE(session.Append().ok());
  const auto append = [&](EventBody body) {
    const Event event{SequenceNumber{session.state.last.value + 1}, 1, 1, std::move(body)};
    const Status applied = Apply(session.state, event);
    return applied ? session.writer->Append(event) : applied;
  };
  ASSERT_TRUE(append(CycleBegun{CycleKind::kPause, 1, {}}).ok());
  for (const bool paused : {false, true}) {
    if (paused) {
      ASSERT_TRUE(append(CycleDone{CycleKind::kPause, 1, 1}).ok());
    }
    EXPECT_FALSE(session.writer->Append(LegalEvent(session.state.last.value + 7)).ok());
    const Status renewed = session.Renew();
    ASSERT_TRUE(renewed.ok()) << renewed.message();
    EXPECT_EQ(session.Wrong(), "");
  }
  ASSERT_TRUE(append(CycleBegun{CycleKind::kResume, 1, {}}).ok());
  ASSERT_TRUE(append(CycleDone{CycleKind::kResume, 1, 1}).ok());
  EXPECT_EQ(session.Wrong(), "");
  EXPECT_EQ(ReadAll(session.writer->Directory()).events.size(), 2U);
}

TEST(Lasting, without_a_tail_a_session_still_lives) {
  const TemporaryDirectory directory;
  JournalOptions options = SmallJournal(directory.path());
  options.keep_sessions = 0;
  Lasting session(options);
  ASSERT_TRUE(session.Append().ok());
  ASSERT_TRUE(session.writer->Flush().ok()) << "its thread looks for the tail when it has something to do";
  const fs::path own = session.writer->Directory();
  fs::remove(own / "tail");
  EXPECT_EQ(StatusOf(own), SessionStatus::kLive);
  RemoveOldSessions(directory.path(), 0, 0);
  EXPECT_TRUE(fs::exists(own / "data.mdb")) << "which another session has removed";
  session.writer.reset();
  const SessionStatus ended = StatusOf(own);
  EXPECT_TRUE(ended == SessionStatus::kCrashed || ended == SessionStatus::kBroken)
      << ToText(ended) << ": every five seconds, too";
}

TEST(Lasting, no_later_break_deletes_what_an_earlier_one_kept) {
  const TemporaryDirectory directory;
  Lasting session(SmallJournal(directory.path()));
  for (int breaks = 0; breaks < 3; ++breaks) {
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(session.Append().ok());
    ASSERT_TRUE(session.writer->Flush().ok());
    EXPECT_FALSE(session.writer->Append(LegalEvent(session.state.last.value + 7)).ok());
    ASSERT_TRUE(session.Renew().ok());
  }
  const std::string broken = (directory.path() / "0000000000000001.broken").string();
  std::uint64_t first = 1;
  for (const char* number : {"", "-2", "-3"}) {
    const Contents kept = ReadAll(broken + number);
    ASSERT_EQ(kept.events.size(), 10U) << number << kept.status.message();
    EXPECT_EQ(kept.events.front().seq.value, first) << number;
    first += 10;
  }
}

#ifndef AMEM_SANITIZED
TEST(Lasting, two_starts_without_a_thread_erase_nothing) {
  const TemporaryDirectory directory;
  Lasting session(SmallJournal(directory.path()));
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(session.Append().ok());
  ASSERT_TRUE(session.writer->Flush().ok());
  EXPECT_FALSE(session.writer->Append(LegalEvent(77)).ok());
  for (int starts = 0; starts < 2; ++starts) {
    no_threads = true;
    EXPECT_FALSE(session.writer->Renew(session.state).ok());
    no_threads = false;
  }
  EXPECT_EQ(ReadAll(directory.path() / "0000000000000001").events.size(), 10U);
  ASSERT_TRUE(session.Renew().ok());
  EXPECT_EQ(ReadAll(directory.path() / "0000000000000001.broken").events.size(), 10U);
}
#endif

// Its file system is frozen by another process, as for a snapshot of the volume.
TEST(Lasting, appends_do_not_wait_for_a_file_system_that_stands_still) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (!MountDisk(directory.path(), "mkfs.ext4 -q", "16M")) return "cannot";
    Lasting session(SmallJournal(directory.path() / "journal"), OfThisProcess());
    if (!session.said.empty()) return session.said[0];
    if (!session.Append().ok() || !session.writer->Flush().ok()) return "it does not work before";
    const auto ask = session.writer->AskFiles();
    if (const Status answer = ask(In(std::chrono::seconds(5))); !answer) return "before: " + answer.message();
    const Frozen frozen(directory.path());
    if (!frozen.is()) return "cannot";
    std::string wrong;
    std::chrono::nanoseconds longest{0};
    const auto until = In(std::chrono::milliseconds(1500));
    for (int i = 0; i < 1000 && !Passed(until); ++i) {
      const auto began = Now();
      if (const Status appended = session.Append(); !appended) wrong = appended.message();
      longest = std::max<std::chrono::nanoseconds>(longest, Now() - began);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // The machine may be busy; a file system that stands still would take all the time.
    if (longest > std::chrono::milliseconds(500)) wrong = "an append took " + std::to_string(longest.count()) + " ns";
    const auto began = Now();
    const Status answer = ask(In(std::chrono::milliseconds(300)));
    if (answer.code() != Code::kTimeout || !Has(answer.message(), "has not answered for 3"))
      wrong = "asked: " + answer.message();
    if (Now() - began > std::chrono::seconds(2)) wrong = "the question took longer than it may";
    frozen.Thaw();
    if (!wrong.empty()) return wrong;
    if (const Status flushed = session.writer->Flush(); !flushed) return flushed.message();
    return session.Wrong();
  });
}

// More than memory has room for: the journal is lost, once, and begun anew when the file system goes on.
TEST(Lasting, a_file_system_that_stands_still_for_long_costs_one_call_two_seconds) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (!MountDisk(directory.path(), "mkfs.ext4 -q", "16M")) return "cannot";
    JournalOptions options = SmallJournal(directory.path() / "journal");
    options.tail_bytes = 16 << 10;
    Lasting session(options, OfThisProcess());
    const Frozen frozen(directory.path());
    if (!frozen.is()) return "cannot";
    const auto began = Now();
    Status lost;
    while (lost.ok() && session.state.last.value < 10'000) lost = session.Append();
    if (!Has(lost.message(), "has not answered for")) return "lost: " + lost.message();
    for (int i = 0; i < 100; ++i) (void)session.Append();
    if (session.writer->Renew(session.state).code() != Code::kTimeout) return "a journal began on a frozen disk";
    for (int i = 0; i < 100; ++i) (void)session.Append();
    if (session.writer->Renew(session.state).code() != Code::kTimeout) return "a journal began on a frozen disk at last";
    if (Now() - began > std::chrono::seconds(8)) return "it took longer than two seconds, and a fifth of one";
    frozen.Thaw();
    Status renewed = session.writer->Renew(session.state);
    for (const auto until = In(std::chrono::seconds(20)); !renewed.ok() && !Passed(until);) {
      (void)session.Append();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      renewed = session.writer->Renew(session.state);
    }
    if (!renewed) return "renewed: " + renewed.message();
    for (int i = 0; i < 100; ++i)
      if (const Status appended = session.Append(); !appended) return appended.message();
    return session.Wrong();
  });
}

TEST(Lasting, a_forked_child_begins_nothing_anew) {
  const TemporaryDirectory directory;
  const fs::path place = directory.path() / "journal";
  for (const bool lost : {false, true}) {
    if (lost) std::ofstream(place) << "in the way";
    Lasting session(SmallJournal(place));
    EXPECT_EQ(session.Append().ok(), !lost);
    if (lost) fs::remove(place);
    EXPECT_FINE_IN_CHILD([&]() -> std::string {
      if (session.Append().ok()) return "the child appended";
      return session.writer->Renew(session.state).code() == Code::kRefused ? "" : "the child began a journal";
    });
    EXPECT_EQ(fs::exists(place), !lost);
    EXPECT_EQ(session.Renew().ok(), lost);
    EXPECT_TRUE(session.Append().ok());
    session.writer.reset();
    fs::remove_all(place);
  }
}

// Every directory on the way is the one session's, and complete.
TEST(Lasting, a_journal_that_begins_with_a_snapshot_is_read_like_any_other) {
  const TemporaryDirectory directory;
  Lasting session(SmallJournal(directory.path()));
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(session.Append().ok());
  session.writer.reset();
  session.writer = JournalWriter::OpenLasting(SmallJournal(directory.path()), SessionId{1});  // which that directory refuses
  ASSERT_TRUE(session.Renew().ok());
  EXPECT_EQ(session.Wrong(), "") << "before the first event";
  auto reader = JournalReader::Open(session.writer->Directory());
  EXPECT_EQ((*reader)->Info()->events, 0U);
  ASSERT_TRUE(session.Append().ok());
  EXPECT_EQ(session.Wrong(), "");
  EXPECT_EQ((*reader)->Info()->first, SequenceNumber{11});
  EXPECT_EQ(ReadAll(session.writer->Directory()).report.corrupt_records, 0U);
}

}  // namespace
}  // namespace amem::test
