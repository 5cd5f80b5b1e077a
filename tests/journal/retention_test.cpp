// Which sessions are removed when a new one opens: never one that may live, never another host's.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "journal/session_dir.h"
#include "journal/tail.h"
#include "tests/journal/temporary.h"

namespace {

bool network_file_system = false;
int flock_error = 0;

}  // namespace

// In place of libc's: a file system that several hosts share, and one that knows no locks.
extern "C" [[gnu::visibility("default")]] int fstatfs(int fd, struct statfs* info) noexcept {
  const int rc = static_cast<int>(syscall(SYS_fstatfs, fd, info));
  if (network_file_system) info->f_type = NFS_SUPER_MAGIC;
  return rc;
}
extern "C" [[gnu::visibility("default")]] int flock(int fd, int operation) noexcept {
  if (flock_error == 0) return static_cast<int>(syscall(SYS_flock, fd, operation));
  errno = flock_error;
  return -1;
}

namespace {
std::atomic<int> g_clock_ahead_s = 0;
}  // namespace

// In place of libc's: the wall clock of a host that is ahead.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += g_clock_ahead_s;
  return result;
}

namespace amem::test {
namespace {

namespace fs = std::filesystem;

class Retention : public testing::Test {
 protected:
  TemporaryDirectory directory;
  JournalOptions options = [this] {
    JournalOptions in_files = SmallJournal(directory.path());
    in_files.tail_in_memory = false;
    return in_files;
  }();

  void TearDown() override {
    network_file_system = false;
    flock_error = 0;
  }
  std::unique_ptr<JournalWriter> Open(std::uint64_t session) {
    auto writer = JournalWriter::Open(options, SessionId{session});
    EXPECT_TRUE(writer.ok()) << writer.status().message();
    return writer ? std::move(*writer) : nullptr;
  }
  // One that crashed: its directory has no `closed`.
  void MakeCrashed(std::uint64_t session) {
    AppendNumbered(*Open(session), 1, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(12));
  }
  // The tail's header as a process of another boot, and perhaps another host, would have written it.
  void ChangeTail(std::uint64_t session, const std::function<void(TailHeader&)>& change) {
    const auto path = directory.path() / DirectoryName(SessionId{session}) / "tail";
    auto bytes = ReadFile(path);
    auto& header = *reinterpret_cast<TailHeader*>(bytes.data());
    change(header);
    header.crc = Crc32c({bytes.data(), offsetof(TailHeader, crc)});
    WriteFile(path, bytes);
  }
  void MakeEnded(std::uint64_t session, std::uint64_t events = 1) {
    auto writer = Open(session);
    AppendNumbered(*writer, 1, events);
    ASSERT_TRUE(writer->Close().ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(12));
  }
  std::vector<std::string> Left() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory.path())) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
};

TEST_F(Retention, drops_the_oldest_ended_sessions_beyond_the_number) {
  options.keep_sessions = 3;
  for (std::uint64_t session = 9; session >= 1; --session) MakeEnded(session);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000001", "0000000000000002", "0000000000000003", "0000000000000004"}));
}

TEST_F(Retention, drops_the_oldest_beyond_the_bytes) {
  for (std::uint64_t session = 1; session <= 4; ++session) MakeEnded(session, 2000);
  options.keep_bytes = 2 * (*(*JournalReader::Open(directory.path() / "0000000000000004"))->Info()).file_bytes + 100'000;
  auto writer = Open(5);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000003", "0000000000000004", "0000000000000005"}));
}

TEST_F(Retention, never_touches_a_live_session) {
  auto live = Open(1);
  AppendNumbered(*live, 1, 5);
  std::this_thread::sleep_for(std::chrono::milliseconds(12));
  options.keep_sessions = 0;
  auto writer = Open(2);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000001", "0000000000000002"}));
  ASSERT_TRUE(live->Close().ok());
  live.reset();
  auto third = Open(3);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000002", "0000000000000003"}));
}

TEST_F(Retention, follows_no_link_and_removes_nothing_of_others) {
  TemporaryDirectory elsewhere;
  {
    JournalOptions there = SmallJournal(elsewhere.path());
    auto writer = JournalWriter::Open(there, SessionId{0xaa});
    ASSERT_TRUE(writer.ok() && (*writer)->Close().ok());
  }
  MakeEnded(1);
  fs::create_directory_symlink(elsewhere.path() / "00000000000000aa", directory.path() / "00000000000000aa");
  fs::create_directory(directory.path() / "00000000000000bb");  // no data.mdb
  WriteFile(directory.path() / "00000000000000bb" / "diary", {});
  fs::create_directory(directory.path() / "notes");
  WriteFile(directory.path() / "notes" / "data.mdb", {});
  WriteFile(directory.path() / "00000000000000cc", {});
  WriteFile(directory.path() / "0000000000000001" / "precious", {});  // a journal with something else in it
  options.keep_sessions = 0;
  auto writer = Open(2);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000001", "0000000000000002", "00000000000000aa", "00000000000000bb",
                                              "00000000000000cc", "notes"}));
  EXPECT_TRUE(fs::exists(elsewhere.path() / "00000000000000aa" / "data.mdb"));
  EXPECT_TRUE(fs::exists(directory.path() / "00000000000000bb" / "diary"));
  EXPECT_TRUE(fs::exists(directory.path() / "notes" / "data.mdb"));
  EXPECT_TRUE(fs::exists(directory.path() / "0000000000000001" / "precious"));
  EXPECT_FALSE(fs::exists(directory.path() / "0000000000000001" / "data.mdb"));
}

TEST_F(Retention, leaves_the_sessions_of_another_user) {
  MakeEnded(1);
  MakeEnded(2);
  if (chown((directory.path() / "0000000000000001").c_str(), 65534, 65534) != 0)
    GTEST_SKIP() << "WAIVED: needs the right to give a directory away";
  options.keep_sessions = 0;
  auto writer = Open(3);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000001", "0000000000000003"}));
}

TEST_F(Retention, removes_what_a_killed_opening_left_behind_only_when_it_is_old) {
  for (const char* name : {".new-0000000000000007-1", ".new-0000000000000008-1"}) {
    fs::create_directory(directory.path() / name);
    WriteFile(directory.path() / name / "data.mdb", {});
  }
  fs::last_write_time(directory.path() / ".new-0000000000000007-1", fs::file_time_type::clock::now() - std::chrono::hours(2));
  auto writer = Open(1);
  EXPECT_EQ(Left(), (std::vector<std::string>{".new-0000000000000008-1", "0000000000000001"}));
}

// On a file system of a host whose clock is behind, what another process makes at this moment looks old to this one.
TEST_F(Retention, what_is_being_made_stays_where_this_hosts_clock_is_ahead) {
  fs::create_directory(directory.path() / ".new-0000000000000007-1");
  g_clock_ahead_s = 7200;
  auto writer = Open(1);
  g_clock_ahead_s = 0;
  EXPECT_EQ(Left(), (std::vector<std::string>{".new-0000000000000007-1", "0000000000000001"}));
}

TEST_F(Retention, counts_what_the_living_hold) {
  MakeEnded(1);
  MakeEnded(2, 2000);
  auto live = Open(3);
  AppendNumbered(*live, 1, 20'000);
  ASSERT_TRUE(live->Flush().ok());
  const Bytes of_live = fs::file_size(live->Directory() / "data.mdb") + fs::file_size(live->Directory() / "tail");
  options.keep_bytes = of_live + (Bytes{1} << 20);
  MakeEnded(4);
  EXPECT_EQ(Left().size(), 4U) << "there is room for the small ones";
  options.keep_bytes = of_live;
  auto writer = Open(5);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000003", "0000000000000005"}));
}

TEST_F(Retention, keeps_failed_sessions_longest) {
  MakeCrashed(1);
  {
    auto with_failure = Open(2);
    ASSERT_TRUE(with_failure->Append({SequenceNumber{1}, 1, 1, CycleFailed{CycleKind::kPause, 1, true, "no"}}).ok());
    ASSERT_TRUE(with_failure->Close().ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(12));
  }
  for (const std::uint64_t session : {3, 4, 5}) MakeEnded(session);
  options.keep_sessions = 3;
  auto writer = Open(6);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000001", "0000000000000002", "0000000000000005", "0000000000000006"}));
  options.keep_sessions = 1;
  auto last = Open(7);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000002", "0000000000000006", "0000000000000007"}));
}

TEST_F(Retention, on_a_shared_file_system_removes_only_what_this_host_made) {
  network_file_system = true;
  for (const std::uint64_t session : {1, 2, 3, 4}) MakeCrashed(session);
  MakeEnded(5);
  MakeEnded(6);
  MakeEnded(7);
  ChangeTail(2, [](TailHeader& h) { ++h.boot, ++h.host; });         // another host's, live or dead
  ChangeTail(3, [](TailHeader& h) { ++h.boot, h.host = 0; });       // of an earlier build: unknown
  ChangeTail(4, [](TailHeader& h) { ++h.boot; });                   // this host's, before it was started again
  WriteFile(directory.path() / "0000000000000006" / "closed", {});  // of an earlier build
  const std::string other = "host 1\n";
  WriteFile(directory.path() / "0000000000000007" / "closed", std::as_bytes(std::span(other)));
  options.keep_sessions = 0;
  auto writer = Open(8);
  EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000002", "0000000000000003", "0000000000000006", "0000000000000007",
                                              "0000000000000008"}));
}

TEST_F(Retention, without_locks_a_live_writer_of_this_host_or_another_stays) {
  network_file_system = true;
  for (const int error : {ENOLCK, ENOSYS, EOPNOTSUPP}) {
    flock_error = error;
    auto live = Open(1);
    auto other_host = Open(2);
    AppendNumbered(*live, 1, 5);
    ChangeTail(2, [](TailHeader& h) { ++h.boot, ++h.host; });
    MakeCrashed(3);
    ChangeTail(3, [](TailHeader& h) { ++h.process_start; });  // its process is gone
    options.keep_sessions = 0;
    auto writer = Open(4);
    EXPECT_EQ(Left(), (std::vector<std::string>{"0000000000000001", "0000000000000002", "0000000000000004"})) << error;
    EXPECT_EQ(ReadAll(live->Directory()).events.size(), 5U);
    for (auto* one : {&live, &other_host, &writer}) one->reset();
    for (const auto& entry : fs::directory_iterator(directory.path())) fs::remove_all(entry.path());
  }
}

// ---- whose directory it is ---------------------------------------------------------------------------------------------

class Squatted : public Retention {
 protected:
  // As /tmp: anyone may create entries, and remove their own.
  Squatted() { chmod(directory.path().c_str(), 01777); }
  Status Refusal(const fs::path& place) {
    options.directory = place;
    return JournalWriter::Open(options, SessionId{1}).status();
  }
};

TEST_F(Squatted, a_link_that_anyone_could_have_put_there_is_not_followed) {
  const TemporaryDirectory elsewhere;
  fs::create_directory_symlink(elsewhere.path(), directory.path() / "amem-1000");
  const Status refused = Refusal(directory.path() / "amem-1000" / "journal");
  EXPECT_EQ(refused.code(), Code::kRefused) << refused.message();
  EXPECT_NE(refused.message().find(directory.path() / "amem-1000"), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find("symbolic link"), std::string::npos) << refused.message();
  EXPECT_TRUE(fs::is_empty(elsewhere.path()));
}

TEST_F(Squatted, a_directory_of_another_user_is_not_used) {
  const fs::path place = directory.path() / "amem-1000";
  fs::create_directory(place);
  chmod(place.c_str(), 0777);
  if (chown(place.c_str(), 65534, 65534) != 0) GTEST_SKIP() << "WAIVED: needs the right to give a directory away";
  const Status refused = Refusal(place / "journal");
  EXPECT_EQ(refused.code(), Code::kRefused) << refused.message();
  EXPECT_NE(refused.message().find("belongs to user 65534"), std::string::npos) << refused.message();
  EXPECT_TRUE(fs::is_empty(place));
}

TEST_F(Squatted, own_directories_and_links_of_ones_own_choice_are_used) {
  EXPECT_TRUE(Refusal(directory.path() / "amem-1000" / "journal").ok());
  EXPECT_EQ(fs::status(directory.path() / "amem-1000").permissions(), fs::perms::owner_all);
  const TemporaryDirectory home, elsewhere;  // 0700
  fs::create_directory_symlink(elsewhere.path(), home.path() / "journal");
  EXPECT_TRUE(Refusal(home.path() / "journal").ok());
  EXPECT_TRUE(fs::exists(elsewhere.path() / "0000000000000001"));
}

}  // namespace
}  // namespace amem::test
