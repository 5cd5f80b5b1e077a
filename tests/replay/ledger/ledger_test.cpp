// The ledger: events, state and driver handles that move forward together, and the latch that refuses pauses once they cannot.
#include "replay/ledger/ledger.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::FakeJournal, test::k2M, test::Process;

SessionOpened Opened() {
  SessionOpened who;
  who.session = SessionId{1};
  return who;
}

class LedgerTest : public ::testing::Test {
 protected:
  LedgerTest() : journal(new FakeJournal), ledger(std::unique_ptr<JournalWriter>(journal)) { ledger.Record(Opened()); }
  AllocationId Record(DriverHandle handle = DriverHandle{7}) {
    const AllocationId id = ledger.TakeAllocationId();
    ledger.SetHandle(id, handle);
    ledger.Record(AllocationCreated{id, k2M, Process::On(test::kDevice), 0, handle, {}, {}});
    return id;
  }
  [[nodiscard]] const std::string& broken() const { return ledger.state().broken; }
  [[nodiscard]] std::string LastRecorded() const { return ToText(journal->events.back().body); }

  FakeJournal* journal;  // the ledger's
  Ledger ledger;
};

// ---- recording ---------------------------------------------------------------------------------------------------------

TEST_F(LedgerTest, what_is_recorded_is_in_the_state_and_the_journal_in_one_order) {
  const AllocationId first = Record(), second = Record();
  EXPECT_NE(first, second);
  ASSERT_EQ(journal->events.size(), 3U);
  for (std::size_t i = 0; i < journal->events.size(); ++i) EXPECT_EQ(journal->events[i].seq, SequenceNumber{i + 1});
  EXPECT_LE(journal->events[1].time_ns, journal->events[2].time_ns);
  EXPECT_NE(journal->events[1].thread, 0U);
  EXPECT_EQ(ledger.state().last, SequenceNumber{3});
  EXPECT_TRUE(ledger.state().allocations.contains(second));
}

TEST_F(LedgerTest, without_a_journal_the_state_is_kept) {
  Ledger bare(nullptr);
  bare.Record(Opened());
  EXPECT_EQ(bare.state().lifecycle, Lifecycle::kRunning);
  bare.Break("for a reason");
  EXPECT_EQ(bare.state().broken, "for a reason");
}

TEST_F(LedgerTest, an_event_that_the_state_cannot_follow_breaks_the_session_and_is_told_in_the_journal) {
  ledger.Record(AllocationReleased{AllocationId{5}});
  EXPECT_NE(broken().find("refused an event that happened: allocation released: allocation 5"), std::string::npos) << broken();
  EXPECT_EQ(LastRecorded(), "session broken: " + broken());
  EXPECT_EQ(journal->events.back().seq, SequenceNumber{2}) << "the refused event took no number";
}

TEST_F(LedgerTest, the_first_reason_stays_and_nothing_is_appended_after_it) {
  ledger.Break("the first");
  ledger.Break("the second");
  EXPECT_FALSE(ledger.Check(false, "the third"));
  Record();
  EXPECT_EQ(broken(), "the first");
  EXPECT_EQ(LastRecorded(), "session broken: the first");
  EXPECT_FALSE(ledger.state().allocations.empty()) << "the state goes on, so that NCCL's calls do";
}

TEST_F(LedgerTest, a_journal_that_fails_is_lost_and_the_state_goes_on) {
  journal->fail_after = 0;
  Record();
  Record();
  EXPECT_NE(ledger.JournalLost().message().find("no space left on device"), std::string::npos);
  EXPECT_EQ(broken(), "");
  EXPECT_EQ(journal->events.size(), 1U);
  EXPECT_EQ(ledger.state().allocations.size(), 2U);
}

TEST_F(LedgerTest, a_lost_journal_begins_anew_with_the_state) {
  journal->fail_after = 0;
  journal->renew_after = 1;  // there is no room yet when the append fails
  const AllocationId lost = Record();
  Record();
  EXPECT_FALSE(ledger.JournalLost().ok()) << "nothing is tried again within NCCL's next call";
  ledger.RenewJournal();
  EXPECT_TRUE(ledger.JournalLost().ok()) << ledger.JournalLost().message();
  EXPECT_EQ(journal->snapshot, ledger.state());
  EXPECT_TRUE(journal->snapshot.allocations.contains(lost));
  Record();
  EXPECT_EQ(journal->events.back().seq.value, journal->snapshot.last.value + 1);
}

TEST_F(LedgerTest, a_snapshot_is_made_as_soon_as_it_is_due) {
  journal->snapshot_due = true;
  Record();
  EXPECT_EQ(journal->last_snapshot, ledger.state());
}

TEST_F(LedgerTest, no_snapshot_is_made_where_none_is_due_or_a_cycle_is_under_way) {
  Record();
  EXPECT_EQ(journal->last_snapshot, State{});
  ledger.Record(CycleBegun{CycleKind::kPause, 1});
  ASSERT_EQ(ledger.state().lifecycle, Lifecycle::kPausing);
  journal->snapshot_due = true;
  ledger.Record(HostAllocated{Address{0x1000}, 16, 0});
  EXPECT_EQ(journal->last_snapshot, State{}) << "a pause has something else to do";
}

TEST_F(LedgerTest, a_lost_journal_is_not_tried_anew_in_every_call) {
  journal->fail_after = 0;
  for (int i = 0; i < 5; ++i) Record();
  EXPECT_EQ(journal->renewals_tried, 1U) << "the others came within five seconds";
}

TEST_F(LedgerTest, a_journal_that_is_not_lost_is_not_begun_anew) {
  ledger.RenewJournal();
  EXPECT_EQ(journal->renewals_tried, 0U);
}

TEST_F(LedgerTest, a_broken_session_does_not_begin_its_journal_anew) {
  journal->fail_after = 0;
  Record();
  ledger.Break("for a reason");
  ledger.RenewJournal();
  EXPECT_EQ(journal->renewals_tried, 1U) << "the one of the append that failed";
}

TEST_F(LedgerTest, an_event_about_memory_that_is_only_counted_is_dropped_and_counted) {
  const Address nowhere{0x7000};
  const std::vector<EventBody> unknown = {HostFreed{nowhere}, AsyncFreed{nowhere}, Deregistered{nowhere, 16},
                                          MulticastDeviceAdded{AllocationId{50}, test::kDevice},
                                          MulticastUnbound{AllocationId{50}, test::kDevice, 0, k2M}};
  for (const EventBody& body : unknown) ledger.Record(body);
  EXPECT_EQ(broken(), "");
  EXPECT_EQ(ledger.dropped_events(), unknown.size());
  const auto& told = std::get<PassedThrough>(journal->events.back().body);
  EXPECT_EQ(told.name, "multicast unbound");
  EXPECT_EQ(told.detail.find("not counted: multicast unbound"), 0U) << told.detail;
  EXPECT_EQ(told.result, 0) << "the driver did not fail";
  ledger.Record(HostAllocated{nowhere, 16, 0});
  ledger.Record(HostAllocated{nowhere, 16, 0});
  ledger.Record(LegacyAllocated{nowhere, 16, AllocationId{}, 0, "the driver's own", {}, {}});
  ledger.Record(LegacyAllocated{nowhere, 16, AllocationId{}, 0, "the driver's own", {}, {}});
  EXPECT_EQ(broken(), "");
  EXPECT_EQ(ledger.dropped_events(), unknown.size() + 2);
}

TEST_F(LedgerTest, cuMemAlloc_memory_that_AMem_backs_is_not_only_counted) {
  ledger.Record(LegacyAllocated{Address{0x7000}, 16, AllocationId{50}, 0, "", {}, {}});
  EXPECT_NE(broken(), "");
  EXPECT_EQ(ledger.dropped_events(), 0U);
}

TEST_F(LedgerTest, a_multicast_object_that_a_pause_releases_is_not_only_counted) {
  const AllocationId released = ledger.TakeAllocationId(), stays = ledger.TakeAllocationId();
  ledger.Record(MulticastCreated{stays, k2M, 1, 1, 0, DriverHandle{8}, MemoryTag{}});
  ledger.Record(MulticastUnbound{stays, test::kDevice, 0, k2M});
  EXPECT_EQ(broken(), "");
  ledger.Record(MulticastCreated{released, k2M, 1, 1, 0, DriverHandle{9}, MemoryTag::kMulticastReleased});
  ledger.Record(MulticastUnbound{released, test::kDevice, 0, k2M});
  EXPECT_NE(broken(), "");
  EXPECT_EQ(ledger.dropped_events(), 1U);
}

// ---- may it pause? -----------------------------------------------------------------------------------------------------

TEST_F(LedgerTest, it_can_pause_unless_it_is_broken) {
  EXPECT_TRUE(ledger.CanPause().ok());
  ledger.Break("two and two are five");
  EXPECT_EQ(ledger.CanPause().code(), Code::kBroken);
  EXPECT_NE(ledger.CanPause().message().find("two and two are five"), std::string::npos) << ledger.CanPause().message();
}

TEST_F(LedgerTest, without_room_for_its_journal_it_cannot_pause_and_that_is_no_lack_of_descriptors) {
  journal->fail_after = 0;
  Record();
  EXPECT_EQ(ledger.CanPause().code(), Code::kBroken);
  EXPECT_NE(ledger.CanPause().message().find("has no journal: append"), std::string::npos) << ledger.CanPause().message();
}

TEST_F(LedgerTest, a_lack_of_descriptors_stays_one) {
  journal->fail_after = 0;
  journal->fails_with = Code::kNoDescriptors;
  Record();
  EXPECT_EQ(ledger.CanPause().code(), Code::kNoDescriptors);
}

// ---- the lock ----------------------------------------------------------------------------------------------------------

TEST_F(LedgerTest, a_free_lock_is_taken_at_once_and_keeps_others_out) {
  ASSERT_TRUE(ledger.TryLockFor(std::chrono::milliseconds(0)));
  std::thread([&] { EXPECT_FALSE(ledger.TryLockFor(std::chrono::milliseconds(0))); }).join();
  ledger.unlock();
}

TEST_F(LedgerTest, who_holds_it_is_named_however_it_was_taken) {
  std::thread([&] {
    const std::string name = ": thread " + std::to_string(::gettid());
    ASSERT_TRUE(ledger.TryLockFor(std::chrono::milliseconds(0)));
    EXPECT_NE(ledger.Held().message().find(name), std::string::npos) << ledger.Held().message();
    ledger.unlock();
  }).join();
  const LedgerLock lock(ledger);
  EXPECT_NE(ledger.Held().message().find(": thread " + std::to_string(::gettid())), std::string::npos);
}

TEST_F(LedgerTest, a_lock_that_another_holds_is_waited_for_as_long_as_asked) {
  const LedgerLock lock(ledger);
  std::thread([&] {
    const auto began = std::chrono::steady_clock::now();
    EXPECT_FALSE(ledger.TryLockFor(std::chrono::milliseconds(50)));
    EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(50));
  }).join();
}

TEST_F(LedgerTest, a_lock_that_comes_free_meanwhile_is_taken) {
  LedgerLock lock(ledger);
  std::atomic<bool> waits = false;
  std::thread other([&] {
    waits = true;
    EXPECT_TRUE(ledger.TryLockFor(std::chrono::seconds(60)));
    ledger.unlock();
  });
  while (!waits) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  lock.Unlock();
  other.join();
}

// The one who holds it goes on with what it was doing, and the cycle has ended all the same.
TEST_F(LedgerTest, a_cycle_whose_end_is_owed_has_ended_whatever_the_holder_of_the_lock_records_first) {
  ledger.Record(CycleBegun{.kind = CycleKind::kPause, .cycle = 1});
  ASSERT_EQ(ledger.Progress().first, Lifecycle::kPausing);
  ledger.RecordSoon({.kind = CycleKind::kPause, .cycle = 1, .undone = true, .message = "a call failed"});
  EXPECT_EQ(ledger.Progress(), std::pair(Lifecycle::kRunning, std::uint64_t{1}));
  ledger.Record(HostAllocated{});
  EXPECT_EQ(ledger.Progress(), std::pair(Lifecycle::kRunning, std::uint64_t{1}));
  ledger.LockAndRecord(CycleBegun{.kind = CycleKind::kPause, .cycle = 2});
  ASSERT_GE(journal->events.size(), 2U);
  EXPECT_TRUE(std::holds_alternative<CycleFailed>(journal->events[journal->events.size() - 2].body)) << "before what follows";
  EXPECT_EQ(ledger.Progress(), std::pair(Lifecycle::kPausing, std::uint64_t{2}));
  EXPECT_TRUE(broken().empty()) << broken();
}

TEST_F(LedgerTest, a_recorded_break_is_as_good_as_a_call) {
  ledger.Record(SessionBroken{"told by an event"});
  EXPECT_EQ(LastRecorded(), "session broken: told by an event");
  Record();
  EXPECT_EQ(journal->events.size(), 2U);
}

// ---- checks ------------------------------------------------------------------------------------------------------------

TEST_F(LedgerTest, a_check_that_holds_changes_nothing) {
  const AllocationId id = Record();
  EXPECT_TRUE(ledger.Check(true, "not wrong"));
  EXPECT_EQ(ledger.Entry(ledger.state().allocations, id)->bytes, k2M);
  EXPECT_TRUE(broken().empty());
}

TEST_F(LedgerTest, a_check_that_fails_latches_its_text_and_place) {
  EXPECT_FALSE(ledger.Check(false, "two and two are five"));
  EXPECT_NE(broken().find("check failed at ledger_test.cpp:"), std::string::npos) << broken();
  EXPECT_NE(broken().find(": two and two are five"), std::string::npos) << broken();
  EXPECT_EQ(ledger.Broken().code(), Code::kBroken);
  EXPECT_EQ(ledger.Broken().message(), broken());
}

TEST_F(LedgerTest, a_check_that_fails_where_the_lock_is_not_held_is_latched_by_the_next_who_holds_it) {
  ledger.BreakSoonIfCheckFailed({Code::kInvalid, "a wrong argument"});
  ledger.BreakSoonIfCheckFailed({Code::kInvalid, "check failed at copies.cpp:7: more was copied than there is"});
  EXPECT_TRUE(broken().empty()) << broken();
  const LedgerLock lock(ledger);
  EXPECT_EQ(broken(), "check failed at copies.cpp:7: more was copied than there is");
  EXPECT_EQ(LastRecorded(), "session broken: " + broken());
}

TEST_F(LedgerTest, a_missing_entry_names_its_key) {
  const State& state = ledger.state();
  const auto reason_of = [](const auto& look) {
    Ledger fresh(nullptr);
    fresh.Record(Opened());
    look(fresh);
    return fresh.state().broken;
  };
  const auto has = [](const std::string& text, const char* key) { return text.find(key) != std::string::npos; };
  EXPECT_PRED2(has, reason_of([&](Ledger& l) { EXPECT_EQ(l.Entry(state.allocations, AllocationId{9}), nullptr); }),
               "no entry for allocation 9");
  EXPECT_PRED2(has, reason_of([&](Ledger& l) { EXPECT_EQ(l.Entry(state.mappings, Address{0x2000}), nullptr); }),
               "no entry for address 0x2000");
  EXPECT_PRED2(has, reason_of([&](Ledger& l) { EXPECT_EQ(l.Entry(state.peers, SessionId{0x1f}), nullptr); }),
               "no entry for session 0x1f");
  EXPECT_PRED2(has, reason_of([&](Ledger& l) { EXPECT_EQ(l.Entry(Slab{}.parts, Bytes{0x400}), nullptr); }),
               "no entry for offset 0x400");
}

// ---- driver handles and descriptors ------------------------------------------------------------------------------------

TEST_F(LedgerTest, a_handle_is_known_until_it_is_forgotten) {
  const AllocationId id = Record();
  EXPECT_EQ(ledger.HandleOf(id), DriverHandle{7});
  EXPECT_FALSE(ledger.HandleOf(AllocationId{99}));
  ledger.SetHandle(id, DriverHandle{8});  // as after a resume
  EXPECT_EQ(ledger.HandleOf(id), DriverHandle{8});
  ledger.ForgetHandle(id);
  EXPECT_FALSE(ledger.HandleOf(id));
}

TEST_F(LedgerTest, a_device_that_was_added_to_a_rebuilt_multicast_object_is_lacking_no_more) {
  const AllocationId object{5}, other{6};
  EXPECT_EQ(ledger.RebuiltAs(object).number, 0U) << "as NCCL made it";
  ledger.SetRebuilt(object, {3, DeviceOrdinal{0}, {DeviceOrdinal{0}, DeviceOrdinal{1}}});
  ledger.SetRebuilt(other, {4, {}, {DeviceOrdinal{0}}});
  ledger.DeviceAdded(object, DeviceOrdinal{0});
  ledger.DeviceAdded(AllocationId{7}, DeviceOrdinal{0});  // of none that was rebuilt
  EXPECT_EQ(ledger.RebuiltAs(object).lacks, std::set{DeviceOrdinal{1}});
  EXPECT_EQ(ledger.RebuiltAs(object).number, 3U);
  EXPECT_TRUE(ledger.RebuiltAs(object).stands_in);
  EXPECT_EQ(ledger.RebuiltAs(other).lacks, std::set{DeviceOrdinal{0}});
  EXPECT_TRUE(ledger.RebuiltAs(AllocationId{7}).lacks.empty());
}

class LedgerExport : public LedgerTest {
 protected:
  LedgerExport() { id = Record(*simulator->Create(k2M, Process::On(test::kDevice), 0)); }
  static ino_t FileOf(const UniqueFd& descriptor) {
    struct stat status {};
    EXPECT_EQ(fstat(descriptor.get(), &status), 0);
    return status.st_ino;
  }
  std::unique_ptr<Simulator> simulator = *Simulator::Open({.devices = 1});
  AllocationId id;
};

TEST_F(LedgerExport, a_kept_descriptor_serves_the_next_importers) {
  const auto first = ledger.Export(id, *simulator, true), second = ledger.Export(id, *simulator, true);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(simulator->Calls("Export"), 1U);
  EXPECT_NE(first->get(), second->get()) << "each caller owns its copy";
  EXPECT_EQ(FileOf(*first), FileOf(*second));
  EXPECT_NE(fcntl(second->get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(LedgerExport, a_descriptor_that_is_not_kept_is_exported_each_time) {
  EXPECT_TRUE(ledger.Export(id, *simulator, false).ok());
  EXPECT_TRUE(ledger.Export(id, *simulator, false).ok());
  EXPECT_EQ(simulator->Calls("Export"), 2U);
}

TEST_F(LedgerExport, forgetting_the_handle_closes_the_descriptor) {
  { EXPECT_TRUE(ledger.Export(id, *simulator, true).ok()); }
  ASSERT_TRUE(simulator->Release(ledger.HandleOf(id)).ok());
  EXPECT_EQ(simulator->BytesInUse(test::kDevice), k2M) << "the descriptor holds the memory";
  ledger.ForgetHandle(id);
  EXPECT_EQ(simulator->BytesInUse(test::kDevice), 0U);
  EXPECT_EQ(ledger.Export(id, *simulator, true).status().code(), Code::kNotFound);
}

TEST_F(LedgerExport, a_descriptor_of_what_was_released_meanwhile_is_neither_handed_out_nor_kept) {
  const DriverHandle handle = ledger.HandleOf(id);
  bool made_anew = true;  // of the same handle, as the driver may give it again
  simulator->SetHook([&](std::string_view, std::uint64_t) {
    ledger.ForgetHandle(id);
    if (made_anew) ledger.SetHandle(id, handle);
    return 0;
  });
  for (const bool keep : {true, false, true}) EXPECT_EQ(ledger.Export(id, *simulator, keep).status().code(), Code::kNotFound);
  EXPECT_EQ(simulator->Calls("Export"), 3U);
  made_anew = false;
  EXPECT_EQ(ledger.Export(id, *simulator, true).status().code(), Code::kNotFound);
  EXPECT_EQ(ledger.Export(id, *simulator, true).status().code(), Code::kNotFound);
}

TEST_F(LedgerExport, a_failed_export_keeps_nothing_and_can_be_tried_again) {
  ASSERT_TRUE(simulator->FailNext("Export", 1, cuda::kUnknown).ok());
  EXPECT_EQ(ledger.Export(id, *simulator, true).status().driver_result(), cuda::kUnknown);
  EXPECT_TRUE(ledger.Export(id, *simulator, true).ok());
}

TEST_F(LedgerExport, of_many_that_export_at_once_one_asks_the_driver) {
  ASSERT_TRUE(simulator->SetLatency("Export", std::chrono::milliseconds(20)).ok());
  std::vector<ino_t> files(8);
  std::vector<std::thread> threads;
  for (ino_t& file : files) {
    threads.emplace_back([&] {
      const auto descriptor = ledger.Export(id, *simulator, true);
      if (descriptor.ok()) file = FileOf(*descriptor);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(simulator->Calls("Export"), 1U);
  for (const ino_t file : files) EXPECT_EQ(file, files.front());
  EXPECT_NE(files.front(), 0U);
}

}  // namespace
}  // namespace amem
