// Processes that append are killed, and what they were told is safe must be there.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <random>
#include <thread>

#include "statemachine/apply.h"
#include "tests/journal/temporary.h"

namespace amem::test {
namespace {

// Memory that a child writes and its parent reads after the child's death.
struct Shared {
  std::atomic<std::uint64_t> acknowledged{0};  // Append returned ok for it
  std::atomic<std::uint64_t> snapshots{0};
  std::atomic<bool> failed{false};
};

class Victim {
 public:
  template <class Body>
  explicit Victim(const Body& body) {
    shared_ = new (mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared;
    pid_ = fork();
    if (pid_ == 0) {
      body(*shared_);
      _exit(0);
    }
  }
  ~Victim() {
    if (pid_ > 0) Kill();
    munmap(shared_, sizeof(Shared));
  }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;
  // Waits for the first event.
  void Started() const {
    while (shared().acknowledged == 0 && !shared().failed) std::this_thread::yield();
  }
  void Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  [[nodiscard]] const Shared& shared() const { return *shared_; }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  Shared* shared_;
  pid_t pid_ = 0;
};

template <class MakeEvent>
void AppendForEver(JournalWriter& writer, Shared& shared, const MakeEvent& make) {
  for (std::uint64_t seq = 1;; ++seq) {
    if (!writer.Append(make(seq)).ok()) break;
    shared.acknowledged.store(seq, std::memory_order_release);
  }
  shared.failed = true;
}

void Pause(std::mt19937_64& random, unsigned at_most_us) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % at_most_us));
}

constexpr int kKills = kSanitized ? 30 : 200;

TEST(Crash, nothing_appended_is_lost_when_killed_at_any_instant) {
  std::mt19937_64 random(1);
  const TemporaryDirectory directory;
  std::uint64_t total = 0;
  int torn = 0;
  for (int kill = 0; kill < kKills; ++kill) {
    JournalOptions options = SmallJournal(directory.path());
    options.tail_bytes = kill % 3 == 0 ? 16 << 10 : kill % 3 == 1 ? 128 << 10 : 1 << 20;
    options.tail_in_memory = kill % 4 != 0;
    options.keep_sessions = 4;
    const SessionId session{static_cast<std::uint64_t>(kill) + 1};
    Victim victim([&](Shared& shared) {
      auto writer = JournalWriter::Open(options, session);
      if (writer) AppendForEver(**writer, shared, NumberedEvent);
      shared.failed = true;
    });
    victim.Started();
    Pause(random, 5000);
    victim.Kill();
    ASSERT_FALSE(victim.shared().failed);
    const auto sessions = ListSessions(directory.path());
    ASSERT_TRUE(sessions.ok());
    const auto contents = ReadAll(sessions->front());
    ASSERT_TRUE(contents.status.ok()) << contents.status.message();
    ASSERT_GE(contents.events.size(), victim.shared().acknowledged.load()) << "kill " << kill;
    ASSERT_EQ(NotNumbered(contents.events), "") << "kill " << kill;
    ASSERT_EQ(contents.report.corrupt_records, 0U) << contents.report.corruption;
    total += contents.events.size();
    torn += contents.report.torn_tail ? 1 : 0;
  }
  RecordProperty("events", static_cast<int>(total));
  RecordProperty("torn", torn);
  std::printf("%d kills, %llu events, %d killed inside an append\n", kKills, static_cast<unsigned long long>(total), torn);
}

TEST(Crash, snapshots_and_removal_survive_a_kill) {
  std::mt19937_64 random(2);
  const TemporaryDirectory directory;
  std::uint64_t snapshots = 0;
  int trimmed = 0;
  for (int kill = 0; kill < kKills / 4; ++kill) {
    JournalOptions options = SmallJournal(directory.path());
    options.tail_bytes = 64 << 10;
    options.snapshot_every = 200;
    options.keep_sessions = 4;
    const SessionId session{static_cast<std::uint64_t>(kill) + 1};
    Victim victim([&](Shared& shared) {
      auto writer = JournalWriter::Open(options, session);
      State state;
      for (std::uint64_t seq = 1; writer && Apply(state, LegalEvent(seq)).ok() && (*writer)->Append(LegalEvent(seq)).ok();
           ++seq) {
        shared.acknowledged = seq;
        if (!(*writer)->SnapshotDue()) continue;
        if (!(*writer)->Snapshot(state).ok()) break;
        ++shared.snapshots;
      }
      shared.failed = true;
    });
    victim.Started();
    // Half of them long enough, on a machine of any speed, for events to be removed.
    while (kill % 2 == 1 && victim.shared().snapshots < 4 && !victim.shared().failed) ::usleep(1000);
    Pause(random, 40'000);
    victim.Kill();
    ASSERT_FALSE(victim.shared().failed);
    snapshots += victim.shared().snapshots;

    const auto sessions = ListSessions(directory.path());
    ASSERT_TRUE(sessions.ok());
    auto reader = JournalReader::Open(sessions->front());
    ASSERT_TRUE(reader.ok()) << reader.status().message();
    const auto info = (*reader)->Info();
    ASSERT_TRUE(info.ok());
    EXPECT_EQ(info->status, SessionStatus::kCrashed);
    ASSERT_GE(info->last.value, victim.shared().acknowledged.load());
    ASSERT_GE(info->snapshots.size(), std::min<std::uint64_t>(victim.shared().snapshots, 2));
    trimmed += info->first.value > 1 ? 1 : 0;

    State expected;
    for (std::uint64_t seq = 1; seq <= info->last.value; ++seq) ASSERT_TRUE(Apply(expected, LegalEvent(seq)).ok());
    ReadReport report;
    const auto state = (*reader)->StateAt(std::nullopt, &report);
    ASSERT_TRUE(state.ok()) << state.status().message();
    EXPECT_TRUE(*state == expected);
    EXPECT_EQ(report.corrupt_records, 0U) << report.corruption;
    const auto contents = ReadAll(sessions->front());
    ASSERT_EQ(contents.events.size(), info->last.value - info->first.value + 1);
    for (const Event& event : contents.events) ASSERT_EQ(event, LegalEvent(event.seq.value));
  }
  EXPECT_GT(snapshots, 0U);
  EXPECT_GT(trimmed, 0);
}

TEST(Crash, a_killed_writer_is_told_from_a_live_and_a_closed_one) {
  const TemporaryDirectory directory;
  const JournalOptions options = SmallJournal(directory.path());
  Victim victim([&](Shared& shared) {
    auto writer = JournalWriter::Open(options, SessionId{1});
    if (writer) AppendForEver(**writer, shared, NumberedEvent);
  });
  victim.Started();
  auto reader = JournalReader::Open(directory.path() / "0000000000000001");
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  auto info = (*reader)->Info();
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->status, SessionStatus::kLive);
  EXPECT_EQ(info->pid, victim.pid());
  victim.Kill();
  info = (*reader)->Info();
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->status, SessionStatus::kCrashed);
  EXPECT_EQ(info->session, SessionId{1});
  EXPECT_EQ(info->first, SequenceNumber{1});
  EXPECT_EQ(info->events, info->last.value);
}

// A reader in another process that reads while the writer does what it can, and whose reading must not disturb it.
TEST(Crash, readers_of_a_live_journal_see_what_was_appended_when_they_began) {
  const TemporaryDirectory directory;
  JournalOptions options = SmallJournal(directory.path());
  options.snapshot_every = 300;  // often, so that it overtakes the reader
  Victim victim([&](Shared& shared) {
    auto writer = JournalWriter::Open(options, SessionId{1});
    State state;
    for (std::uint64_t seq = 1; writer && Apply(state, LegalEvent(seq)).ok() && (*writer)->Append(LegalEvent(seq)).ok();
         ++seq) {
      shared.acknowledged = seq;
      if ((*writer)->SnapshotDue() && !(*writer)->Snapshot(state).ok()) break;
    }
    shared.failed = true;
  });
  victim.Started();
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kSanitized ? 1500 : 700);
  auto kept = JournalReader::Open(directory.path() / "0000000000000001");
  ASSERT_TRUE(kept.ok());
  int rounds = 0, overtaken = 0;
  for (; std::chrono::steady_clock::now() < until; ++rounds) {
    const std::uint64_t before = victim.shared().acknowledged;
    auto fresh = JournalReader::Open(directory.path() / "0000000000000001");
    ASSERT_TRUE(fresh.ok()) << fresh.status().message();
    JournalReader& reader = rounds % 2 == 0 ? **kept : **fresh;
    std::uint64_t next = before > 200 ? before - 200 : 1;
    std::uint64_t missing = 0;  // the last one that should have come
    const auto report = reader.Read(SequenceNumber{next}, kToTheEnd, [&](const Event& event) {
      EXPECT_GE(event.seq.value, next);
      EXPECT_EQ(event, LegalEvent(event.seq.value));
      if (event.seq.value > next) missing = event.seq.value - 1;
      next = event.seq.value + 1;
      return !HasFailure();
    });
    if (next <= before) missing = before;
    ASSERT_TRUE(report.ok()) << report.status().message();
    ASSERT_EQ(report->corrupt_records, 0U) << report->corruption;
    ASSERT_FALSE(report->torn_tail);
    ASSERT_FALSE(HasFailure());
    const auto info = reader.Info();
    ASSERT_TRUE(info.ok()) << info.status().message();
    ASSERT_LT(missing, info->first.value) << "which is not let go";
    overtaken += missing != 0 ? 1 : 0;
    const auto state = reader.StateAt(std::nullopt);
    ASSERT_TRUE(state.ok()) << state.status().message();
    ASSERT_GE(state->last.value, before);
  }
  ASSERT_FALSE(victim.shared().failed);
  std::printf("%d rounds beside %llu appends, overtaken in %d\n", rounds,
              static_cast<unsigned long long>(victim.shared().acknowledged.load()), overtaken);
}

}  // namespace
}  // namespace amem::test
