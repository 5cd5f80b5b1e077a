// Pools on the simulator: what the program gets, what a pause and a resume of a tag do to memory, and what failures leave.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "tests/replay/session/pools_fixture.h"

namespace amem {
namespace {

using test::k2M, test::kChunk, test::kDevice, test::kMiB, test::kSecond, test::PoolsTest, test::Process;

// The program doubts what AMem does (AMEM_VERIFY).
SessionOptions Doubting() {
  SessionOptions options;
  options.compare = true;
  return options;
}
class Doubts : public test::PoolsTest {
 protected:
  Doubts() : PoolsTest(Doubting()) {}
  // What is read back after the copies of a resume are done is not what they brought.
  void ReadWrongly(std::byte* memory) const {
    a.simulator->SetHook([memory](std::string_view call, std::uint64_t) {
      if (call == "CopyToHost") memory[kMiB - 1] ^= std::byte{1};
      return 0;
    });
  }
};

TEST_F(Doubts, a_resume_that_does_not_bring_all_bytes_of_a_tag_back_fails) {
  const PoolId pool = Open("weights");
  std::byte* const part = Take(pool, kMiB);
  Fill(part, kMiB, 1);
  ASSERT_TRUE(Pause(pool).ok());
  ReadWrongly(part);
  const Status failed = Resume(pool);
  EXPECT_NE(failed.message().find("they differ at byte 1048575"), std::string::npos) << failed.message();
  EXPECT_EQ(StateOf(pool), "paused");
  a.simulator->SetHook({});
  EXPECT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(part, kMiB, 1));
}

TEST_F(Doubts, a_resume_that_does_not_bring_all_bytes_of_nccl_back_fails) {
  std::byte* const buffer = a.Place(a.Create());
  const AllocationId never_mapped = a.Create();
  std::memset(buffer, 0x44, kMiB);
  ASSERT_TRUE(a.session->Pause().ok());
  ReadWrongly(buffer);
  const Status failed = a.session->Resume();
  EXPECT_NE(failed.message().find("they differ at byte 1048575"), std::string::npos) << failed.message();
  EXPECT_TRUE(a.session->paused());
  a.simulator->SetHook({});
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_EQ(buffer[kMiB - 1], std::byte{0x44});
  EXPECT_TRUE(a.session->nccl().Release(never_mapped).ok());
}

// An allocator above the pool may have memory of it in reserve, and hand it out.
TEST_F(PoolsTest, one_that_is_paused_cannot_be_entered_and_one_that_a_thread_is_inside_cannot_be_paused) {
  const PoolId pool = Open("weights");
  ASSERT_TRUE(pools().Enter(pool).ok() && pools().Enter(pool).ok());
  for (const bool wait : {true, false}) {
    const Status inside = pools().Pause(pool, {.wait = wait});
    EXPECT_EQ(inside.code(), Code::kRefused);
    EXPECT_NE(inside.message().find("a thread is inside the tag"), std::string::npos) << inside.message();
  }
  pools().Leave(pool);
  EXPECT_FALSE(Pause(pool).ok()) << "it was entered twice";
  pools().Leave(pool);
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_EQ(pools().Enter(pool).message(), "tag weights is paused; resume it before memory is allocated in it");
  EXPECT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(pools().Enter(pool).ok());
  pools().Leave(pool);
}

TEST_F(PoolsTest, a_chunk_is_given_back_only_when_the_copies_of_a_resume_that_could_not_be_undone_are_done) {
  const PoolId pool = Open("weights");
  std::byte* const part = Take(pool, kMiB);
  Fill(part, kMiB, 1);
  ASSERT_TRUE(Pause(pool).ok());
  a.simulator->SetHook([](std::string_view call, std::uint64_t) { return call == "FinishCopies" ? cuda::kUnknown : 0; });
  EXPECT_EQ(Resume(pool).code(), Code::kBroken);
  ASSERT_GT(a.simulator->QueuedCopies(kDevice), 0U);
  EXPECT_TRUE(Give(part).ok());
  EXPECT_TRUE(a.simulator->MappingAt(AddressOf(part)).ok()) << "a copy to what is not mapped would end the context";
  a.simulator->SetHook({});
  EXPECT_TRUE(Resume(pool).ok());
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(PoolsTest, a_pause_of_a_tag_gives_its_memory_back_and_a_resume_brings_the_same_bytes_to_the_same_addresses) {
  const PoolId weights = Open("weights");
  std::byte* const large = Take(weights, 130 * kMiB);
  std::byte* const small = Take(weights, 4 * kMiB + 512);
  Fill(large, 130 * kMiB, 1);
  Fill(small, 4 * kMiB, 2);
  for (int cycle = 0; cycle < 3; ++cycle) {
    EXPECT_EQ(a.InUse(), 130 * kMiB + kChunk);
    ASSERT_TRUE(Pause(weights).ok());
    EXPECT_EQ(a.InUse(), 0U);
    EXPECT_EQ(StateOf(weights), "paused");
    ASSERT_TRUE(Resume(weights).ok());
    EXPECT_TRUE(Holds(large, 130 * kMiB, 1));
    EXPECT_TRUE(Holds(small, 4 * kMiB, 2));
  }
  EXPECT_EQ(a.session->CopyState().lifecycle, Lifecycle::kRunning);
}

TEST_F(PoolsTest, dense_memory_travels_by_the_copy_engines_and_zeros_do_not_travel) {
  const PoolId weights = Open("weights");
  std::byte* const dense = Take(weights, 128 * kMiB);
  Take(weights, 128 * kMiB);  // never touched
  Fill(dense, 128 * kMiB, 1);
  ASSERT_TRUE(Pause(weights).ok());
  EXPECT_EQ(a.simulator->Calls("Gather"), 0U);
  EXPECT_GT(a.simulator->Calls("CopyToHost"), 0U);
  EXPECT_EQ(pools().Snapshot().front().contents.bytes_saved, 128 * kMiB);
  const std::uint64_t cleared = a.simulator->Calls("ClearAll");
  ASSERT_TRUE(Resume(weights).ok());
  EXPECT_EQ(a.simulator->Calls("Scatter"), 0U);
  EXPECT_EQ(a.simulator->Calls("ClearAll"), cleared + 1) << "what was zero is cleared";
  EXPECT_TRUE(Holds(dense, 128 * kMiB, 1));
}

TEST_F(PoolsTest, what_was_freed_is_not_saved_with_what_lies_before_it) {
  const PoolId weights = Open("weights");
  std::vector<std::byte*> parts;
  for (int i = 0; i < 4; ++i) Fill(parts.emplace_back(Take(weights, k2M)), k2M, i);
  ASSERT_EQ(parts[3], parts[0] + 3 * k2M);
  for (const std::size_t freed : {2, 3}) ASSERT_TRUE(Give(parts[freed]).ok());
  ASSERT_TRUE(Pause(weights).ok());
  EXPECT_EQ(pools().Snapshot().front().contents.bytes_saved, 2 * k2M);
  ASSERT_TRUE(Resume(weights).ok());
  for (const int kept : {0, 1}) EXPECT_TRUE(Holds(parts[static_cast<std::size_t>(kept)], k2M, kept));
}

TEST_F(PoolsTest, sparse_memory_is_not_copied_whole) {
  const PoolId weights = Open("weights");
  std::byte* const sparse = Take(weights, 128 * kMiB);
  sparse[5] = std::byte{5};
  sparse[100 * kMiB] = std::byte{6};
  ASSERT_TRUE(Pause(weights).ok());
  EXPECT_EQ(pools().Snapshot().front().contents.bytes_saved, 2 * 4096U);
  ASSERT_TRUE(Resume(weights).ok());
  EXPECT_EQ(sparse[5], std::byte{5});
  EXPECT_EQ(sparse[100 * kMiB], std::byte{6});
}

TEST_F(PoolsTest, discarded_memory_is_not_looked_at) {
  const PoolId cache = Open("kv_cache", PoolPolicy::kDiscard);
  std::byte* const memory = Take(cache, 200 * kMiB);
  memory[0] = std::byte{1};
  ASSERT_TRUE(Pause(cache).ok());
  EXPECT_EQ(a.InUse(), 0U);
  ASSERT_TRUE(Resume(cache).ok());
  memory[0] = std::byte{2};  // is there
  for (const char* call : {"FindNonZero", "CopyToHost", "CopyToDevice", "Gather", "AllocatePinned"})
    EXPECT_EQ(a.simulator->Calls(call), 0U) << call;
}

TEST_F(PoolsTest, small_requests_share_chunks_and_an_empty_chunk_goes_back) {
  const PoolId pool = Open("weights");
  std::byte* const first = Take(pool, 2 * kMiB);
  std::byte* const second = Take(pool, 512);
  std::byte* const nothing = Take(pool, 0);
  EXPECT_EQ(a.simulator->Calls("Create"), 1U);
  EXPECT_EQ(a.InUse(), kChunk);
  EXPECT_EQ(Give(first + 512).code(), Code::kNotFound) << "no part begins there";
  EXPECT_TRUE(Give(first).ok());
  EXPECT_EQ(Give(first).code(), Code::kNotFound);
  EXPECT_TRUE(Give(second).ok());
  EXPECT_EQ(a.InUse(), kChunk);
  EXPECT_TRUE(Give(nothing).ok());
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_TRUE(a.simulator->Snapshot().ranges.empty());
  EXPECT_TRUE(a.session->CopyState().allocations.empty());
}

TEST_F(PoolsTest, memory_can_be_freed_while_its_tag_is_paused) {
  const PoolId pool = Open("weights");
  std::byte* const kept = Take(pool, 6 * kMiB);
  std::byte* const freed = Take(pool, 6 * kMiB);
  std::byte* const alone = Take(pool, 128 * kMiB);
  Fill(kept, 6 * kMiB, 3);
  Fill(alone, 128 * kMiB, 4);
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_TRUE(Give(freed).ok());
  EXPECT_TRUE(Give(alone).ok());
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_EQ(a.InUse(), kChunk) << "the other chunk does not come back";
  EXPECT_TRUE(Holds(kept, 6 * kMiB, 3));
  EXPECT_TRUE(Give(kept).ok());
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(PoolsTest, memory_is_not_allocated_while_the_tag_is_paused) {
  const PoolId pool = Open("weights");
  Take(pool, kMiB);
  ASSERT_TRUE(Pause(pool).ok());
  const auto refused = pools().Allocate(pool, kMiB, kDevice);
  EXPECT_EQ(refused.status().code(), Code::kRefused);
  EXPECT_NE(refused.status().message().find("weights is paused"), std::string::npos);
  ASSERT_TRUE(Resume(pool).ok());
  Take(pool, kMiB);
}

TEST_F(PoolsTest, where_memory_is_short_chunks_are_smaller_and_then_it_is_an_error) {
  const PoolId pool = Open("weights");
  Take(pool, 496 * kMiB);
  Take(pool, 10 * kMiB);  // of 16 that are left
  EXPECT_EQ(a.InUse(), 512 * kMiB);
  const auto refused = pools().Allocate(pool, 20 * kMiB, kDevice);
  EXPECT_EQ(refused.status().code(), Code::kOutOfMemory) << refused.status().message();
  EXPECT_NE(refused.status().message().find("weights"), std::string::npos);
  Take(pool, 4 * kMiB);
  EXPECT_EQ(a.session->CopyState().broken, "");
}

TEST_F(PoolsTest, in_a_whole_pool_each_allocation_is_one_of_its_own) {
  const PoolId pool = *pools().Open("program", PoolPolicy::kPreserve, true);
  std::byte* const first = Take(pool, 2 * kMiB);
  std::byte* const second = Take(pool, 5'000'000);
  EXPECT_EQ(a.InUse(), 8 * kMiB);
  const State state = a.session->CopyState();
  EXPECT_EQ(state.pools.at(pool).parts.at(AddressOf(second)).bytes, 5'000'000U) << "what was asked for";
  EXPECT_EQ(state.MappingAt(AddressOf(second))->second.bytes, 6 * kMiB);
  EXPECT_TRUE(pools().Free(AddressOf(first), std::nullopt).ok());
  EXPECT_EQ(a.InUse(), 6 * kMiB);
  EXPECT_TRUE(pools().Free(AddressOf(second), std::nullopt).ok());
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_EQ(a.session->CopyState().broken, "");
}

TEST_F(PoolsTest, sizes_that_no_device_has_are_refused_before_they_are_added_to_anything) {
  const PoolId pools_of[] = {Open("weights"), *pools().Open("program", PoolPolicy::kPreserve, true)};
  constexpr Bytes kNone = 0;
  for (const PoolId pool : pools_of)
    for (const Bytes bytes : {kNone - 1, kNone - 512, kNone - 513, kNone - 2 * kMiB, Bytes{1} << 63, Bytes{1} << 50})
      EXPECT_EQ(pools().Allocate(pool, bytes, kDevice).status().code(), Code::kOutOfMemory) << bytes;
  EXPECT_EQ(a.session->legacy().Allocate(kNone - 1, kDevice, {}).status().code(), Code::kOutOfMemory);
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_EQ(a.session->CopyState().broken, "");
}

TEST_F(PoolsTest, what_is_taken_in_advance_is_a_sixteenth_of_what_is_free_at_most) {
  const PoolId pool = Open("weights");
  Take(pool, 130 * kMiB);
  Take(pool, 130 * kMiB);
  Take(pool, kMiB);  // by what the pool holds it would be 128 MiB
  EXPECT_EQ(a.InUse(), 260 * kMiB + kChunk);
}

TEST_F(PoolsTest, tags_are_independent_of_each_other_and_of_nccl) {
  const PoolId weights = Open("weights"), cache = Open("cache", PoolPolicy::kDiscard);
  std::byte* const w = Take(weights, 4 * kMiB);
  std::byte* const c = Take(cache, 4 * kMiB);
  std::byte* const nccl = a.Place(a.Create());
  Fill(w, 4 * kMiB, 1);
  Fill(c, 4 * kMiB, 2);
  Fill(nccl, k2M, 3);
  ASSERT_TRUE(Pause(weights).ok());
  EXPECT_TRUE(Holds(c, 4 * kMiB, 2));
  EXPECT_TRUE(Holds(nccl, k2M, 3));
  ASSERT_TRUE(a.session->Pause().ok());
  EXPECT_TRUE(Holds(c, 4 * kMiB, 2)) << "a pause of NCCL leaves tags alone";
  ASSERT_TRUE(Resume(weights).ok()) << "while NCCL is paused";
  EXPECT_TRUE(Holds(w, 4 * kMiB, 1));
  ASSERT_TRUE(Pause(cache).ok());
  ASSERT_TRUE(a.session->Resume().ok());
  EXPECT_TRUE(Holds(nccl, k2M, 3));
  EXPECT_EQ(StateOf(cache), "paused");
  ASSERT_TRUE(Resume(cache).ok());
}

TEST_F(PoolsTest, both_calls_may_be_repeated) {
  const PoolId pool = Open("weights");
  Fill(Take(pool, kMiB), kMiB, 1);
  EXPECT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Pause(pool).ok());
  EXPECT_TRUE(Pause(pool).ok());
  EXPECT_TRUE(Resume(pool).ok());
  EXPECT_EQ(a.Count<CycleBegun>(), 2U);
}

TEST_F(PoolsTest, a_tag_keeps_its_policy_and_an_unknown_tag_names_the_known) {
  const PoolId weights = Open("weights");
  EXPECT_EQ(Open("weights"), weights);
  EXPECT_EQ(pools().Open("weights", PoolPolicy::kDiscard).status().code(), Code::kInvalid);
  for (const char* own : {"nccl", "user", ""})
    EXPECT_EQ(pools().Open(own, PoolPolicy::kPreserve).status().code(), Code::kInvalid);
  const auto unknown = pools().Find("wieghts");
  EXPECT_EQ(unknown.status().code(), Code::kNotFound);
  EXPECT_NE(unknown.status().message().find("known: weights, nccl"), std::string::npos) << unknown.status().message();
}

TEST_F(PoolsTest, several_devices_reach_each_others_memory) {
  const PoolId pool = Open("weights");
  std::byte* const first = Take(pool, kMiB, kDevice);
  std::byte* const second = Take(pool, kMiB, kSecond);
  EXPECT_TRUE(BothReach(first) && BothReach(second));
  Fill(first, kMiB, 1);
  Fill(second, kMiB, 2);
  ASSERT_TRUE(Pause(pool).ok());
  EXPECT_EQ(a.InUse() + a.simulator->BytesInUse(kSecond), 0U);
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(first, kMiB, 1));
  EXPECT_TRUE(Holds(second, kMiB, 2));
  EXPECT_TRUE(BothReach(second));
}

TEST_F(PoolsTest, a_device_that_joins_while_a_tag_is_paused_reaches_its_memory_after_the_resume) {
  const auto [paused, running, part] = FirstDeviceOnly();
  ASSERT_TRUE(Pause(paused).ok());
  Take(running, kMiB, kSecond);
  ASSERT_TRUE(Resume(paused).ok());
  EXPECT_TRUE(BothReach(part));
  EXPECT_TRUE(Holds(part, kMiB, 1));
  // From then on it is as any other access: a pause and a resume bring it back.
  ASSERT_TRUE(Pause(paused).ok());
  ASSERT_TRUE(Resume(paused).ok());
  EXPECT_TRUE(BothReach(part));
  EXPECT_TRUE(a.session->CopyState().broken.empty());
}

TEST_F(PoolsTest, memory_by_tag_is_json) {
  const PoolId pool = Open("weights");
  Take(pool, 3 * kMiB);
  a.Place(a.Create());
  ASSERT_TRUE(Pause(pool).ok());
  const auto memory = nlohmann::json::parse(a.session->statistics().MemoryJson());
  EXPECT_EQ(memory["schema"], 1);
  ASSERT_EQ(memory["tags"].size(), 3U);
  const auto& weights = memory["tags"][0];
  EXPECT_EQ(weights["tag"], "weights");
  EXPECT_EQ(weights["policy"], "preserve");
  EXPECT_EQ(weights["state"], "paused");
  EXPECT_EQ(weights["bytes"], kChunk);
  EXPECT_EQ(weights["resident_bytes"], 0);
  EXPECT_EQ(weights["parts"], 1);
  EXPECT_EQ(weights["devices"], nlohmann::json::array({0}));
  EXPECT_TRUE(weights["last_pause_ms"].is_number());
  EXPECT_TRUE(weights["last_resume_ms"].is_null());
  EXPECT_EQ(memory["tags"][1]["tag"], "nccl");
  EXPECT_EQ(memory["tags"][1]["part_bytes"], k2M);
  EXPECT_EQ(memory["tags"][2]["tag"], "user");
}

TEST_F(PoolsTest, memory_of_NCCL_and_of_its_allocator_is_json_while_it_runs_and_while_it_is_paused) {
  a.Place(a.Create(3 * k2M), 3 * k2M);
  a.Place(a.Create(k2M, true));
  const auto of = [&](std::size_t place) { return nlohmann::json::parse(a.session->statistics().MemoryJson())["tags"][place]; };
  for (const bool paused : {false, true, false}) {
    const auto nccl = of(0), user = of(1);
    EXPECT_EQ(nccl["tag"], "nccl");
    EXPECT_EQ(nccl["policy"], "preserve");
    EXPECT_EQ(nccl["state"], paused ? "paused" : "resident");
    EXPECT_EQ(nccl["part_bytes"], 3 * k2M);
    EXPECT_GE(nccl["bytes"].get<Bytes>(), 3 * k2M) << "the slab's";
    EXPECT_EQ(nccl["resident_bytes"], paused ? nlohmann::json(0) : nccl["bytes"]);
    EXPECT_EQ(nccl["kept_bytes"], 0);
    EXPECT_EQ(nccl["parts"], 1);
    EXPECT_EQ(nccl["devices"], nlohmann::json::array({0}));
    EXPECT_EQ(nccl["failure"], "");
    EXPECT_EQ(user["tag"], "user");
    EXPECT_EQ(user["policy"], "keep");
    EXPECT_EQ(user["bytes"], k2M);
    EXPECT_EQ(user["resident_bytes"], k2M) << "it is the program's";
    EXPECT_EQ(user["kept_bytes"], k2M);
    EXPECT_TRUE(user["last_pause_ms"].is_null());
    ASSERT_TRUE((paused ? a.session->Resume() : a.session->Pause()).ok());
  }
  EXPECT_TRUE(of(0)["last_pause_ms"].is_number() && of(0)["last_resume_ms"].is_number());
  ASSERT_TRUE(a.session->Resume().ok());
}

// ---- failures --------------------------------------------------------------------------------------------------------------

TEST_F(PoolsTest, statistics_list_tags) {
  const PoolId pool = Open("weights");
  Take(pool, 3 * kMiB);
  ASSERT_TRUE(Pause(pool).ok());
  const auto tag = nlohmann::json::parse(a.session->statistics().Json())["tags"]["weights"];
  EXPECT_EQ(tag, (nlohmann::json{{"bytes", kChunk}, {"released_bytes", kChunk}, {"kept_bytes", 0}, {"lifecycle", "paused"}}));
  const std::string text = a.session->statistics().Text();
  EXPECT_NE(text.find("  tag weights          32 MiB in 1 chunks, 0 MiB of it on the device now, paused\n"), std::string::npos)
      << text;
}

TEST_F(PoolsTest, every_call_of_a_pause_and_a_resume_may_fail_and_nothing_is_lost) {
  const PoolId pool = Open("weights");
  std::byte* const dense = Take(pool, kMiB);
  std::byte* const large = Take(pool, 128 * kMiB);
  Fill(dense, kMiB, 1);
  large[7] = std::byte{7};
  int failed = 0;
  for (const std::string_view call : Simulator::kCalls) {
    for (std::uint64_t nth = 1; nth <= 3; ++nth) {
      for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
        const bool pausing = kind == CycleKind::kPause;
        if (!pausing) {
          ASSERT_TRUE(Pause(pool).ok());
        }
        ASSERT_TRUE(a.simulator->FailNext(call, nth, call == "Create" ? cuda::kOutOfMemory : cuda::kUnknown).ok());
        const Status status = pausing ? Pause(pool) : Resume(pool);
        a.simulator->ForgetPlannedFailures();
        if (!status.ok()) {
          ++failed;
          EXPECT_NE(status.message().find("of tag weights: "), std::string::npos) << status.message();
          EXPECT_EQ(StateOf(pool), pausing ? "resident" : "paused") << call << " " << nth << ": " << status.message();
          if (pausing) {
            ASSERT_TRUE(Pause(pool).ok()) << call;
          }
        }
        const Status resumed = Resume(pool);
        ASSERT_TRUE(resumed.ok()) << resumed.message();
        ASSERT_TRUE(Holds(dense, kMiB, 1)) << call << " " << nth;
        ASSERT_EQ(large[7], std::byte{7}) << call << " " << nth;
        ASSERT_EQ(a.session->CopyState().broken, "") << call;
      }
    }
  }
  EXPECT_GT(failed, 20);
}

// A thread of AMem's would end the program with an exception.
TEST_F(PoolsTest, where_the_system_has_no_memory_left_a_pause_and_a_resume_fail_and_nothing_is_lost) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 32 * kMiB);
  Fill(memory, 32 * kMiB, 3);
  const std::thread::id here = std::this_thread::get_id();
  std::atomic<bool> elsewhere = false;
  for (const std::string_view call : {"Unmap", "Release", "Create", "Map", "SetAccess"}) {
    const CycleKind kind = call == "Unmap" || call == "Release" ? CycleKind::kPause : CycleKind::kResume;
    if (kind == CycleKind::kResume) {
      ASSERT_TRUE(Pause(pool).ok());
    }
    std::atomic<bool> once = false;
    a.simulator->SetHook([&](std::string_view made, std::uint64_t) -> int {
      if (made != call || once.exchange(true)) return 0;
      if (std::this_thread::get_id() != here) elsewhere = true;
      throw std::bad_alloc();
    });
    ASSERT_TRUE((kind == CycleKind::kPause ? pools().Pause(pool, {.wait = false, .after = nullptr})
                                           : pools().Resume(pool, {.wait = false}))
                    .ok());
    const Status status = pools().Wait(pool);
    a.simulator->SetHook({});
    EXPECT_TRUE(once) << call;
    EXPECT_NE(status.message().find("no memory left"), std::string::npos) << call << ": " << status.message();
    EXPECT_EQ(StateOf(pool), kind == CycleKind::kPause ? "resident" : "paused") << call;
    ASSERT_TRUE(Pause(pool).ok()) << call;
    const Status resumed = Resume(pool);
    ASSERT_TRUE(resumed.ok()) << call << ": " << resumed.message();
    ASSERT_TRUE(Holds(memory, 32 * kMiB, 3)) << call;
    ASSERT_EQ(a.session->CopyState().broken, "") << call;
  }
  EXPECT_TRUE(elsewhere) << "no thread of AMem's own was tried";
}

// What the thread does after a pause that failed, too.
TEST_F(PoolsTest, memory_that_is_given_back_late_waits_where_the_system_has_no_memory_left) {
  const PoolId pool = Open("weights");
  std::byte* const stays = Take(pool, 2 * kMiB);
  std::byte* const late = Take(pool, 32 * kMiB);
  const auto waits = [](std::string_view call) { return call == "AwaitMoment" || call == "Synchronize"; };
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) { return waits(call) ? cuda::kNotReady : 0; });
  ASSERT_TRUE(Give(late).ok());
  std::atomic<int> thrown = 0;
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) -> int {
    if (!waits(call)) return 0;
    ++thrown;
    throw std::bad_alloc();
  });
  ASSERT_TRUE(a.simulator->FailNext("Unmap", 1, cuda::kUnknown).ok());
  ASSERT_TRUE(pools().Pause(pool, {.wait = false, .after = nullptr}).ok());
  EXPECT_FALSE(pools().Wait(pool).ok());
  a.simulator->SetHook({});
  EXPECT_EQ(thrown, 1);
  EXPECT_EQ(StateOf(pool), "resident");
  ASSERT_TRUE(Pause(pool).ok());
  ASSERT_TRUE(Resume(pool).ok());
  ASSERT_TRUE(Give(stays).ok());
  EXPECT_EQ(a.session->CopyState().pools.at(pool).parts.size(), 0U) << "the next cycle gave it back";
}

TEST_F(PoolsTest, a_resume_without_room_leaves_the_tag_paused_and_says_how_much_is_missing) {
  const PoolId pool = Open("weights");
  std::byte* const memory = Take(pool, 200 * kMiB);
  Fill(memory, 200 * kMiB, 1);
  ASSERT_TRUE(Pause(pool).ok());
  const auto taken = a.simulator->Create(400 * kMiB, Process::On(kDevice), 0);
  const Status refused = Resume(pool);
  EXPECT_EQ(refused.code(), Code::kOutOfMemory);
  EXPECT_NE(refused.message().find("200 MiB must come back"), std::string::npos) << refused.message();
  EXPECT_NE(refused.message().find("resume tag weights again"), std::string::npos) << refused.message();
  EXPECT_EQ(StateOf(pool), "paused");
  ASSERT_TRUE(a.simulator->Release(*taken).ok());
  ASSERT_TRUE(Resume(pool).ok());
  EXPECT_TRUE(Holds(memory, 200 * kMiB, 1));
}

TEST_F(PoolsTest, without_a_journal_a_tag_is_not_paused) {
  const PoolId pool = Open("weights");
  Take(pool, kMiB);
  a.journal->fail_after = 0;
  const Status refused = Pause(pool);
  EXPECT_EQ(refused.code(), Code::kBroken);
  EXPECT_NE(refused.message().find("no journal"), std::string::npos) << refused.message();
  a.journal->fail_after = -1;
  a.journal->renew_after = 0;
  EXPECT_TRUE(Pause(pool).ok());
  EXPECT_TRUE(Resume(pool).ok());
}

TEST_F(PoolsTest, all_pools_together_keep_no_more_host_memory_than_is_asked_for) {
  const PoolId one = Open("one"), two = Open("two");
  for (const PoolId pool : {one, two}) {
    Fill(Take(pool, 64 * kMiB), 64 * kMiB, 1);
    ASSERT_TRUE(Pause(pool).ok());
    ASSERT_TRUE(Resume(pool).ok());
  }
  ASSERT_GE(a.Pinned(), 64 * kMiB);
  a.session->devices().TrimPinned(32 * kMiB);
  EXPECT_LE(a.Pinned(), 32 * kMiB);
}

// As tags alternate, what one of them does not use just now serves the other.
TEST_F(PoolsTest, a_host_without_memory_left_still_pauses_a_tag_while_another_has_some_that_is_idle) {
  SessionOptions options;
  options.pool_pinned_bytes = options.pinned_bytes = 0;
  Process c(3, world, network, options);
  Pools& pools = c.session->pools();
  std::map<PoolId, std::byte*> parts;
  for (const char* tag : {"actor", "critic"}) {
    const PoolId pool = *pools.Open(tag, PoolPolicy::kPreserve);
    parts[pool] = reinterpret_cast<std::byte*>(pools.Allocate(pool, 64 * kMiB, kSecond)->value);
    Fill(parts[pool], 64 * kMiB, static_cast<int>(pool.value));
  }
  const AllocationId nccl = c.Create();
  std::memset(c.Place(nccl), 0x5a, k2M);
  ASSERT_TRUE(pools.Pause(parts.begin()->first, {}).ok());
  ASSERT_TRUE(pools.Resume(parts.begin()->first, {}).ok());
  c.simulator->SetHook([](std::string_view call, std::uint64_t) { return call == "AllocatePinned" ? cuda::kOutOfMemory : 0; });
  const Bytes pinned = c.Pinned();
  for (const auto& [pool, part] : parts) {
    const Status paused = pools.Pause(pool, {});
    ASSERT_TRUE(paused.ok()) << paused.message();
    ASSERT_TRUE(pools.Resume(pool, {}).ok());
    EXPECT_TRUE(Holds(part, 64 * kMiB, static_cast<int>(pool.value)));
  }
  const Status paused = c.session->Pause();
  EXPECT_TRUE(paused.ok()) << "and NCCL's memory: " << paused.message();
  EXPECT_TRUE(c.session->Resume().ok());
  EXPECT_EQ(c.Pinned(), pinned);
}

}  // namespace
}  // namespace amem
