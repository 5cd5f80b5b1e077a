// Wrong use of two sessions that share memory: it is refused with a message that names the reason, it changes nothing, and the
// right call works afterwards. Right use for a thousand cycles leaves nothing behind.
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "tests/replay/session/session_process.h"

namespace amem::test {
namespace {

std::size_t EntriesOf(const char* directory) {
  const auto entries = std::filesystem::directory_iterator(directory);
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

class TwoRanks : public ::testing::Test {
 protected:
  void Both(Status (Session::*cycle)()) {
    Status second;
    std::thread other([&] { second = (b.session.get()->*cycle)(); });
    const Status first = (a.session.get()->*cycle)();
    other.join();
    ASSERT_TRUE(first.ok()) << first.message();
    ASSERT_TRUE(second.ok()) << second.message();
  }
  std::shared_ptr<SimulatorWorld> world = *SimulatorWorld::InMemory(2, Bytes{256} << 20);
  LocalNetwork network;
  static SessionOptions Direct() {
    SessionOptions options;
    options.layout = Layout::kDirect;
    options.deadlines = Deadlines(std::chrono::milliseconds(500));
    return options;
  }
  Process a{1, world, network, Direct()}, b{2, world, network, Direct()};
};

using ManyCycles = TwoRanks;
using WrongUse = TwoRanks;

TEST_F(ManyCycles, a_thousand_cycles_leave_nothing_behind) {
#ifdef AMEM_SANITIZED
  constexpr int kCycles = 100;
#else
  constexpr int kCycles = 1000;
#endif
  const AllocationId own = a.Create();
  std::byte* mine = a.Place(own);
  auto token = a.session->sharing().Export(own);
  ASSERT_TRUE(token.ok());
  auto imported = b.session->sharing().Import(token->get(), {});
  ASSERT_TRUE(imported.ok());
  b.Place(*imported);
  mine[5] = std::byte{5};
  Both(&Session::Pause);
  Both(&Session::Resume);
  const std::size_t descriptors = EntriesOf("/proc/self/fd"), threads = EntriesOf("/proc/self/task");
  const std::size_t ranges = a.simulator->Snapshot().ranges.size() + b.simulator->Snapshot().ranges.size();
  const std::uint64_t pinned = a.simulator->Calls("AllocatePinned") + b.simulator->Calls("AllocatePinned");
  const Bytes in_use = a.InUse();
  for (int i = 0; i < kCycles; ++i) {
    Both(&Session::Pause);
    ASSERT_EQ(a.InUse(), 0U);
    Both(&Session::Resume);
    if (i % 10 == 0) {
      a.journal->events.clear();
      b.journal->events.clear();
    }
  }
  EXPECT_EQ(EntriesOf("/proc/self/fd"), descriptors);
  EXPECT_EQ(EntriesOf("/proc/self/task"), threads);
  EXPECT_EQ(a.simulator->Snapshot().ranges.size() + b.simulator->Snapshot().ranges.size(), ranges);
  EXPECT_EQ(a.simulator->Calls("AllocatePinned") + b.simulator->Calls("AllocatePinned"), pinned);
  EXPECT_EQ(a.InUse(), in_use);
  EXPECT_EQ(mine[5], std::byte{5});
}

TEST_F(WrongUse, a_pause_during_a_stream_capture_is_refused_for_all_and_works_after_it) {
  const AllocationId own = a.Create();
  a.Place(own);
  auto token = a.session->sharing().Export(own);
  ASSERT_TRUE(b.session->sharing().Import(token->get(), {}).ok());
  a.simulator->SetCapturing(true);
  Status second;
  std::thread other([&] { second = b.session->Pause(); });
  const Status first = a.session->Pause();
  other.join();
  for (const Status& refused : {first, second}) {
    EXPECT_FALSE(refused.ok());
    EXPECT_NE(refused.message().find("a stream capture is running"), std::string::npos) << refused.message();
    EXPECT_NE(refused.message().find("rank 0"), std::string::npos) << refused.message();
  }
  EXPECT_FALSE(a.session->paused() || b.session->paused());
  a.simulator->SetCapturing(false);
  Both(&Session::Pause);
  Both(&Session::Resume);
}

TEST_F(WrongUse, pauses_called_by_four_threads_at_once_are_one_pause) {
  a.Place(a.Create());
  std::vector<std::thread> threads;
  std::array<Status, 4> statuses;
  for (Status& status : statuses) threads.emplace_back([&] { status = a.session->Pause(); });
  for (auto& thread : threads) thread.join();
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(a.Count<CycleBegun>(), 1U);
  EXPECT_TRUE(a.session->Resume().ok());
}

TEST_F(WrongUse, allocating_and_reading_statistics_during_pauses_disturbs_neither) {
  std::atomic<bool> ended{false};
  std::thread creates([&] {
    for (int i = 0; i < 200; ++i) {
      AllocationProperties properties;
      properties.handle_types = 1;
      properties.location = {LocationType::kDevice, 0};
      auto id = a.session->nccl().Create(k2M, properties, 0, {});
      if (!id.ok()) {  // the session is paused at this moment
        EXPECT_EQ(id.status().code(), Code::kRefused) << id.status().message();
        std::this_thread::yield();
        continue;
      }
      EXPECT_TRUE(a.session->nccl().Release(*id).ok());
    }
    ended = true;
  });
  std::thread reads([&] {
    while (!ended) EXPECT_FALSE(a.session->statistics().Json().empty());
  });
  while (!ended) {
    EXPECT_TRUE(a.session->Pause().ok());
    EXPECT_TRUE(a.session->Resume().ok());
  }
  creates.join();
  reads.join();
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(WrongUse, a_resume_that_only_one_rank_calls_times_out_and_can_be_called_again) {
  const AllocationId own = a.Create();
  a.Place(own);
  auto token = a.session->sharing().Export(own);
  ASSERT_TRUE(b.session->sharing().Import(token->get(), {}).ok());
  Both(&Session::Pause);
  const Status alone = a.session->ResumeInTime();  // b does not call it
  EXPECT_EQ(alone.code(), Code::kTimeout) << alone.message();
  EXPECT_TRUE(a.session->paused());
  EXPECT_TRUE(b.session->Pause().ok());  // it is paused
  Both(&Session::Resume);
}

}  // namespace
}  // namespace amem::test
