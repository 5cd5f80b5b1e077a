// The dates of a session whose host's wall clock is set while it runs, as NTP does on a machine that booted with a wrong one.
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>
#include <vector>

#include "journal/base/deadline.h"
#include "replay/job/opening.h"
#include "replay/job/pack.h"
#include "statemachine/apply.h"
#include "tests/journal/temporary.h"

namespace amem {
namespace {

constexpr std::uint64_t kOneSecond_ns = 1'000'000'000;
constexpr std::uint64_t kNoonByItsClock_ns = 1'700'000'000 * kOneSecond_ns;

class SetClock : public ::testing::Test {
 protected:
  // The session opens at noon by a clock that is an hour slow; a second later it is right.
  SetClock() {
    options_.directory = directory_.path() / "job";
    options_.clock = [this] { return Now(); };
    opened_.session = SessionId{0x51};
    opened_.host = "host";
    opened_.boot_id = "boot";
    opened_.realtime_ns = Now().realtime_ns;
    opened_.monotonic_ns = Now().monotonic_ns;
    Apply(opened_);
  }
  WallClock Now() {
    const std::lock_guard lock(mutex_);
    return clock_;
  }
  // A second later; the wall clock has moved by so many nanoseconds.
  void ASecondLater(std::uint64_t wall_ns) {
    {
      const std::lock_guard lock(mutex_);
      clock_.monotonic_ns += kOneSecond_ns;
      clock_.realtime_ns += wall_ns;
    }
    Apply(GroupChanged{.group = 1});
  }
  void Apply(EventBody body) {
    events_.push_back({.seq = SequenceNumber{events_.size() + 1}, .time_ns = Now().monotonic_ns, .thread = 1, .body = body});
    ASSERT_TRUE(amem::Apply(state_, events_.back()).ok());
  }
  void Write(JournalWriter& writer) {
    for (; written_ < events_.size(); ++written_) {
      const Status appended = writer.Append(events_[written_]);
      ASSERT_TRUE(appended.ok()) << appended.message();
    }
    ASSERT_TRUE(writer.Flush().ok());
  }
  void SetTheClock() { ASecondLater(3601 * kOneSecond_ns); }
  // When the second event was, by the journal in that directory.
  static std::uint64_t DateOfSecond(const std::filesystem::path& directory) {
    const auto reader = JournalReader::Open(directory);
    EXPECT_TRUE(reader.ok()) << reader.status().message();
    const auto opening = ReadOpening(**reader);
    EXPECT_TRUE(opening.ok()) << opening.status().message();
    const OpenedJournal one{&*opening, reader->get()};
    return ClockOf(std::span(&one, 1)).Wall(opening->who, 101 * kOneSecond_ns);
  }

  test::TemporaryDirectory directory_;
  JournalOptions options_;
  std::mutex mutex_;  // the drain's thread reads the clock
  WallClock clock_{kNoonByItsClock_ns, 100 * kOneSecond_ns};
  SessionOpened opened_;
  State state_;
  std::vector<Event> events_;
  std::size_t written_ = 0;
};

TEST_F(SetClock, gives_the_dates_of_all_events) {
  auto writer = JournalWriter::Open(options_, opened_.session);
  ASSERT_TRUE(writer.ok()) << writer.status().message();
  Write(**writer);
  SetTheClock();
  Write(**writer);
  EXPECT_EQ(DateOfSecond((*writer)->Directory()), kNoonByItsClock_ns + 3601 * kOneSecond_ns);
  ASSERT_TRUE((*writer)->Close().ok());
  EXPECT_EQ(DateOfSecond((*writer)->Directory()), kNoonByItsClock_ns + 3601 * kOneSecond_ns);
}

TEST_F(SetClock, that_only_drifts_leaves_them_as_they_are) {
  auto writer = JournalWriter::Open(options_, opened_.session);
  ASSERT_TRUE(writer.ok()) << writer.status().message();
  Write(**writer);
  ASecondLater(kOneSecond_ns + kOneSecond_ns / 2);
  Write(**writer);
  EXPECT_EQ(DateOfSecond((*writer)->Directory()), kNoonByItsClock_ns + kOneSecond_ns);
}

TEST_F(SetClock, is_in_a_pack) {
  auto writer = JournalWriter::Open(options_, opened_.session);
  ASSERT_TRUE(writer.ok()) << writer.status().message();
  Write(**writer);
  SetTheClock();
  Write(**writer);
  const auto pack = directory_.path() / "job.pack", unpacked = directory_.path() / "unpacked";
  const auto packed = Pack(std::vector{(*writer)->Directory()}, pack);
  ASSERT_TRUE(packed.ok()) << packed.status().message();
  const auto sessions = Unpack(pack, unpacked);
  ASSERT_TRUE(sessions.ok()) << sessions.status().message();
  EXPECT_EQ(DateOfSecond(unpacked / (*writer)->Directory().filename()), kNoonByItsClock_ns + 3601 * kOneSecond_ns);
}

// The journal that begins anew has no event from before, and its own first record is of the clock as it was set.
TEST_F(SetClock, before_a_journal_began_anew_is_known_from_the_new_one) {
  auto writer = JournalWriter::OpenLasting(options_, opened_.session);
  Write(*writer);
  std::filesystem::remove_all(writer->Directory());
  SetTheClock();
  ASSERT_FALSE(writer->Append({.seq = SequenceNumber{9}, .body = GroupChanged{}}).ok());
  Status renewed = writer->Renew(state_);
  for (const auto until = In(std::chrono::seconds(20)); renewed.code() == Code::kTimeout && !Passed(until);)
    renewed = writer->Renew(state_);  // the disk may be busy
  ASSERT_TRUE(renewed.ok()) << renewed.message();
  written_ = events_.size();
  Apply(GroupChanged{.group = 2});
  Write(*writer);
  EXPECT_EQ(DateOfSecond(writer->Directory()), kNoonByItsClock_ns + 3601 * kOneSecond_ns);
}

}  // namespace
}  // namespace amem
