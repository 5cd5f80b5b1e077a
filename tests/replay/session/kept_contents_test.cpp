// Unchanged contents do not travel: of tags and of NCCL's memory, in the journal, after failures, and beside the program.
#include <gtest/gtest.h>

#include "tests/replay/session/pools_fixture.h"

namespace amem {
namespace {

using test::k2M, test::kDevice, test::kMiB, test::PoolsTest;

class KeptContents : public PoolsTest {
 protected:
  explicit KeptContents(const SessionOptions& options = {}) : PoolsTest(options) {}
  [[nodiscard]] BackupStatistics Of(PoolId pool) const {
    for (const auto& standing : pools().Snapshot()) {
      if (standing.id == pool) return standing.contents;
    }
    return {};
  }
  Status Cycle(PoolId pool) const {
    Status paused = Pause(pool);
    return paused.ok() ? Resume(pool) : paused;
  }
  [[nodiscard]] CycleDone LastPause() const {
    CycleDone last;
    for (const Event& event : a.journal->events) {
      const auto* done = std::get_if<CycleDone>(&event.body);
      if (done != nullptr && done->kind == CycleKind::kPause) last = *done;
    }
    return last;
  }
};

class DoubtedContents : public KeptContents {
 protected:
  static SessionOptions Doubting() {
    SessionOptions options;
    options.compare = true;
    return options;
  }
  DoubtedContents() : KeptContents(Doubting()) {}
};

TEST_F(KeptContents, a_tag_that_is_unchanged_does_not_travel_and_the_journal_says_so) {
  const PoolId weights = Open("weights");
  std::byte* const part = Take(weights, 8 * kMiB);
  Fill(part, 8 * kMiB, 1);
  ASSERT_TRUE(Cycle(weights).ok());
  EXPECT_EQ(LastPause().changed, 8 * kMiB);
  EXPECT_EQ(Of(weights).kept_bytes, 32 * kMiB) << "one buffer";
  const std::uint64_t copies = a.simulator->Calls("CopyToHost");
  ASSERT_TRUE(Cycle(weights).ok());
  EXPECT_EQ(a.simulator->Calls("CopyToHost"), copies);
  EXPECT_EQ(LastPause().changed, 0U);
  EXPECT_EQ(LastPause().unchanged, 8 * kMiB);
  part[3 * kMiB] ^= std::byte{1};
  ASSERT_TRUE(Pause(weights).ok());
  EXPECT_EQ(Of(weights).bytes_saved, kUnitBytes);
  EXPECT_EQ(Of(weights).bytes_unchanged, 8 * kMiB - kUnitBytes);
  EXPECT_EQ(ToText(EventBody(LastPause())).substr(ToText(EventBody(LastPause())).find(", contents")),
            ", contents: 128 KiB changed, 8 064 KiB unchanged, 0 B zero");
  ASSERT_TRUE(Resume(weights).ok());
  part[3 * kMiB] ^= std::byte{1};
  EXPECT_TRUE(Holds(part, 8 * kMiB, 1));
}

// It is sparse, so what changed lies here and there in the copy.
TEST_F(KeptContents, of_nccl_memory_only_what_changed_travels_and_in_one_call) {
  std::byte* const buffer = a.Place(a.Create());
  Fill(buffer, kMiB, 1);
  ASSERT_TRUE(a.session->Pause().ok() && a.session->Resume().ok());
  EXPECT_EQ(LastPause().changed, kMiB);
  for (const Bytes units : {0, 1, 2, 4}) {
    for (Bytes unit = 0; unit < units; ++unit) buffer[2 * unit * kUnitBytes] ^= std::byte{1};
    const std::vector<std::byte> expected(buffer, buffer + kMiB);
    const std::uint64_t gathers = a.simulator->Calls("Gather"), scatters = a.simulator->Calls("Scatter");
    ASSERT_TRUE(a.session->Pause().ok() && a.session->Resume().ok());
    EXPECT_EQ(LastPause().changed, units * kUnitBytes);
    EXPECT_EQ(LastPause().unchanged, kMiB - units * kUnitBytes);
    EXPECT_EQ(a.simulator->Calls("Gather") - gathers, units == 0 ? 0U : 1U);
    EXPECT_EQ(a.simulator->Calls("Scatter") - scatters, 1U);
    EXPECT_EQ(std::memcmp(buffer, expected.data(), kMiB), 0) << units;
  }
}

// Pages that go to their places in a copy one by one travel more slowly than packed ones.
TEST_F(KeptContents, of_nccl_memory_that_changes_all_the_time_a_copy_is_kept_only_now_and_then) {
  std::byte* const buffer = a.Place(a.Create());
  std::vector<int> with_copy;
  for (int pause = 1; pause <= 40; ++pause) {
    Fill(buffer, kMiB, pause);
    const std::size_t events = a.journal->events.size();
    ASSERT_TRUE(a.session->Pause().ok() && a.session->Resume().ok());
    EXPECT_GT(a.journal->events.size(), events);
    EXPECT_EQ(LastPause().changed, kMiB);
    EXPECT_TRUE(Holds(buffer, kMiB, pause));
    if (a.Figure({"contents", "pinned_kept_bytes"}) > 0) with_copy.push_back(pause);
  }
  EXPECT_EQ(with_copy, (std::vector{1, 17, 33}));
}

TEST_F(KeptContents, a_part_that_is_freed_and_given_out_again_at_the_same_place_brings_its_own_bytes) {
  const PoolId weights = Open("weights");
  std::byte* const first = Take(weights, k2M);
  std::byte* const second = Take(weights, k2M);
  Fill(first, k2M, 1);
  Fill(second, k2M, 2);
  ASSERT_TRUE(Cycle(weights).ok());
  ASSERT_TRUE(Give(first).ok());
  ASSERT_TRUE(Cycle(weights).ok());
  EXPECT_EQ(Of(weights).bytes_unchanged, k2M);
  ASSERT_EQ(Take(weights, k2M), first);
  Fill(first, k2M, 3);
  ASSERT_TRUE(Cycle(weights).ok());
  EXPECT_EQ(Of(weights).bytes_saved, k2M);
  EXPECT_TRUE(Holds(first, k2M, 3));
  EXPECT_TRUE(Holds(second, k2M, 2));
}

TEST_F(KeptContents, nothing_is_kept_of_what_is_discarded) {
  const PoolId cache = Open("cache", PoolPolicy::kDiscard);
  Fill(Take(cache, k2M), k2M, 1);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(Cycle(cache).ok());
  EXPECT_EQ(Of(cache).kept_bytes, 0U);
  EXPECT_EQ(a.simulator->PinnedBytes(), 0U);
}

TEST_F(KeptContents, a_pause_or_resume_that_fails_in_any_call_loses_nothing_and_believes_nothing_wrong) {
  const PoolId weights = Open("weights");
  std::byte* const part = Take(weights, 4 * kMiB);
  int seed = 1;
  for (const char* call :
       {"FindNonZero", "CopyToHost", "FinishCopies", "Unmap", "Release", "Create", "Map", "SetAccess", "CopyToDevice"}) {
    for (const std::uint64_t nth : {1, 2}) {
      Fill(part, 4 * kMiB, seed);
      ASSERT_TRUE(Cycle(weights).ok());
      Fill(part + kMiB, kMiB, ++seed);
      ASSERT_TRUE(a.simulator->FailNext(call, nth, cuda::kUnknown).ok());
      Status status = Pause(weights);
      if (StateOf(weights) == "paused") status = Resume(weights);
      a.simulator->ForgetPlannedFailures();
      ASSERT_TRUE(StateOf(weights) == "resident" || Resume(weights).ok()) << call;
      EXPECT_TRUE(Holds(part, kMiB, seed - 1) && Holds(part + kMiB, kMiB, seed)) << call << " " << nth;
      part[2 * kMiB] ^= std::byte{1};
      ASSERT_TRUE(Cycle(weights).ok());
      part[2 * kMiB] ^= std::byte{1};
      EXPECT_TRUE(Holds(part, kMiB, seed - 1) && Holds(part + kMiB, kMiB, seed)) << call << " " << nth << ", the next";
    }
  }
}

TEST_F(KeptContents, a_pause_behind_a_stream_hashes_where_the_kernels_are_there) {
  const PoolId weights = Open("weights");
  std::byte* const part = Take(weights, 4 * kMiB);
  Fill(part, 4 * kMiB, 1);
  ASSERT_TRUE(Cycle(weights).ok());
  for (const bool changed : {false, true}) {
    if (changed) part[0] ^= std::byte{1};
    ASSERT_TRUE(pools().Pause(weights, {.wait = false, .after = nullptr}).ok());
    ASSERT_TRUE(pools().Wait(weights).ok());
    EXPECT_EQ(Of(weights).bytes_saved, changed ? kUnitBytes : 0U);
    ASSERT_TRUE(Resume(weights).ok());
  }
  part[0] ^= std::byte{1};
  EXPECT_TRUE(Holds(part, 4 * kMiB, 1));
  EXPECT_EQ(a.simulator->Calls("Gather"), 0U);
}

TEST_F(KeptContents, what_a_network_card_holds_stays_and_is_saved_right_once_it_does_not) {
  const PoolId weights = Open("weights");
  std::byte* const part = Take(weights, 4 * kMiB);
  Fill(part, 4 * kMiB, 1);
  ASSERT_TRUE(Cycle(weights).ok());
  ASSERT_TRUE(a.session->records().NoteRegistration({AddressOf(part), 4 * kMiB, "ibv_reg_mr"}));
  Fill(part, 4 * kMiB, 2);
  ASSERT_TRUE(Cycle(weights).ok());
  EXPECT_TRUE(Holds(part, 4 * kMiB, 2));
  a.session->records().Note(Deregistered{AddressOf(part), 4 * kMiB});
  Fill(part + kMiB, kMiB, 3);
  ASSERT_TRUE(Cycle(weights).ok());
  EXPECT_TRUE(Holds(part, kMiB, 2) && Holds(part + kMiB, kMiB, 3));
}

TEST_F(DoubtedContents, a_change_that_the_hash_did_not_see_fails_the_pause) {
  const PoolId weights = Open("weights");
  std::byte* const part = Take(weights, kMiB);
  Fill(part, kMiB, 1);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(Cycle(weights).ok());
  a.simulator->SetHook([part](std::string_view call, std::uint64_t) {  // after the hash
    if (call == "CopyToHost") part[5] ^= std::byte{1};
    return 0;
  });
  const Status failed = Pause(weights);
  a.simulator->SetHook({});
  EXPECT_NE(failed.message().find("they differ at byte 5, and their hash is the same"), std::string::npos) << failed.message();
  EXPECT_EQ(StateOf(weights), "resident");
  ASSERT_TRUE(Cycle(weights).ok());
  part[5] ^= std::byte{1};
  EXPECT_TRUE(Holds(part, kMiB, 1));
}

}  // namespace
}  // namespace amem
