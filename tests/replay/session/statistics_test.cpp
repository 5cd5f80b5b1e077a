// What the statistics say of memory, by call site, by peer and by tag.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "statemachine/account.h"
#include "tests/replay/session/pools_fixture.h"

namespace amem {
namespace {

using nlohmann::json;
using test::k2M, test::kMiB, test::Process;

class StatisticsTest : public test::TwoProcesses {
 protected:
  StatisticsTest() : TwoProcesses({.layout = Layout::kDirect}, 256 * kMiB) {}
  static json Of(const Process& process) { return json::parse(process.session->statistics().Json()); }
};

TEST_F(StatisticsTest, what_is_lent_and_what_is_borrowed_are_summed_by_peer) {
  a.Place(a.Create(3 * k2M), 3 * k2M);
  for (const Bytes bytes : {k2M, 2 * k2M}) {
    const AllocationId mine = a.Create(bytes);
    a.Place(mine, bytes);
    b.Place(Pass(mine), bytes);
  }
  const json lender = Of(a)["peers"], borrower = Of(b)["peers"];
  ASSERT_EQ(lender.size(), 1U) << lender;
  ASSERT_EQ(borrower.size(), 1U) << borrower;
  EXPECT_EQ(lender[0]["lent_bytes"], 3 * k2M);
  EXPECT_EQ(lender[0]["imported_bytes"], 0);
  EXPECT_EQ(lender[0]["rank"], 1);
  EXPECT_TRUE(lender[0]["connected"]);
  EXPECT_EQ(borrower[0]["lent_bytes"], 0);
  EXPECT_EQ(borrower[0]["imported_bytes"], 3 * k2M);
  EXPECT_EQ(borrower[0]["rank"], 0);
}

TEST_F(StatisticsTest, memory_is_summed_by_the_place_that_asked_for_it) {
  a.Create(k2M);
  a.Create(2 * k2M);
  const json sites = Of(a)["call_sites"];
  ASSERT_EQ(sites.size(), 1U) << Of(a);
  EXPECT_EQ(sites[0]["allocations"], 2);
  EXPECT_EQ(sites[0]["bytes"], 3 * k2M);
  EXPECT_TRUE(Of(b)["call_sites"].empty());
}

TEST_F(StatisticsTest, memory_of_the_program_that_stays_is_told_apart_from_NCCLs_that_goes) {
  a.Place(a.Create(3 * k2M), 3 * k2M);
  a.Place(a.Create(k2M, true));
  for (const bool paused : {false, true}) {
    const json tags = Of(a)["tags"];
    EXPECT_EQ(tags["nccl"], (json{{"bytes", 3 * k2M}, {"released_bytes", paused ? 3 * k2M : 0}, {"kept_bytes", 0}})) << tags;
    EXPECT_EQ(tags["user"], (json{{"bytes", k2M}, {"released_bytes", 0}, {"kept_bytes", k2M}})) << tags;
    ASSERT_TRUE((paused ? a.session->Resume() : a.session->Pause()).ok());
  }
}

// {kind: {bytes, stays}}
json KindsOf(const json& statistics) {
  json kinds = json::object();
  for (const json& one : statistics["kinds"]) kinds[one["kind"].get<std::string>()] = {one["bytes"], one["stays"]};
  return kinds;
}

TEST_F(StatisticsTest, memory_is_told_by_what_it_is_for_and_why_it_stays) {
  a.Place(a.Create(3 * k2M), 3 * k2M);
  const AllocationId lent = a.Create(2 * k2M);
  a.Place(lent, 2 * k2M);
  b.Place(Pass(lent), 2 * k2M);
  a.Place(a.Create(k2M, true));
  const json none = json::object();
  for (const bool paused : {false, true}) {
    const json kinds = KindsOf(Of(a));
    EXPECT_EQ(kinds["private (channels, scratch)"], json({3 * k2M, none})) << kinds;
    EXPECT_EQ(kinds["peer buffers and windows"], json({2 * k2M, none})) << kinds;
    EXPECT_EQ(kinds["user buffers"], json({k2M, json{{"the program's own (ncclMemAlloc)", k2M}}})) << kinds;
    EXPECT_TRUE(Of(b)["kinds"].empty()) << "what it imported is its owner's";
    Both(paused ? &Session::Resume : &Session::Pause);
  }
}

class KindsInSlabs : public test::TwoProcesses {
 protected:
  KindsInSlabs() : TwoProcesses({.layout = Layout::kSlab}, 256 * kMiB) {}
};

TEST_F(KindsInSlabs, the_rest_of_a_slab_is_a_kind_and_each_byte_of_the_driver_counts_once) {
  a.Place(a.Create(k2M), k2M);
  const json statistics = json::parse(a.session->statistics().Json());
  const json kinds = KindsOf(statistics);
  const Bytes rest = kinds["unused parts of slabs"][0];
  EXPECT_EQ(rest + k2M, statistics["slab_bytes"].get<Bytes>()) << kinds;
  EXPECT_EQ(kinds["private (channels, scratch)"][0], k2M);
}

// The account is held against the simulator's own count of what each device has.
class AccountTest : public test::PoolsTest {
 protected:
  static Bytes Sum(const std::map<std::string, Bytes>& shares) {
    Bytes sum = 0;
    for (const auto& [whose, bytes] : shares) sum += bytes;
    return sum;
  }
  Account::OfDevice Now(DeviceOrdinal device = test::kDevice) const {
    return a.session->Inspect(&MeasureAccount).devices[device];
  }
  // All of `before` is taken or there.
  void ExpectAll(Bytes before, DeviceOrdinal device = test::kDevice) const {
    const Account::OfDevice now = Now(device);
    EXPECT_EQ(Sum(now.taken) + Sum(now.running) + Sum(now.kept), before);
    EXPECT_EQ(Sum(now.running) + Sum(now.kept), a.simulator->BytesInUse(device));
  }
};

TEST_F(AccountTest, what_was_taken_and_what_is_left_are_what_was_used) {
  const PoolId weights = Open("weights"), cache = Open("cache", PoolPolicy::kDiscard);
  Take(weights, 3 * kMiB);
  Take(weights, 5 * kMiB, test::kSecond);
  std::byte* const held = Take(cache, kMiB);
  a.Place(a.Create(3 * k2M), 3 * k2M);
  a.Place(a.Create(k2M, true));
  ASSERT_TRUE(a.session->records().NoteRegistration({AddressOf(held), kMiB, "ibv_reg_mr", "libucs.so"}));
  const Bytes first = a.InUse(), second = a.simulator->BytesInUse(test::kSecond);
  ExpectAll(first);
  EXPECT_TRUE(Now().taken.empty());
  ASSERT_TRUE(a.session->Pause().ok());
  ExpectAll(first);
  EXPECT_GE(Now().taken.at("nccl"), 3 * k2M);
  EXPECT_FALSE(Now().running.contains("nccl"));
  EXPECT_EQ(Now().kept.at("the program's own (ncclMemAlloc)"), k2M);
  ASSERT_TRUE(Pause(weights).ok());
  ASSERT_TRUE(Pause(cache).ok());
  ExpectAll(first);
  ExpectAll(second, test::kSecond);
  EXPECT_EQ(Sum(Now(test::kSecond).taken), second) << "all of it, on a device where nobody holds any";
  EXPECT_GE(Now().kept.at("tag cache: held by libucs.so"), kMiB);
  const json said = json::parse(a.session->statistics().AccountJson())["devices"];
  ASSERT_EQ(said.size(), 2U) << said;
  EXPECT_EQ(said[0]["used_bytes"], a.InUse());
  EXPECT_EQ(said[0]["taken"], json(Now().taken));
  EXPECT_EQ(said[0]["kept"], json(Now().kept));
  for (const PoolId tag : {cache, weights}) ASSERT_TRUE(Resume(tag).ok());
  ASSERT_TRUE(a.session->Resume().ok());
  EXPECT_TRUE(Now().taken.empty());
  ExpectAll(first);
}

TEST_F(AccountTest, the_kinds_of_nccls_memory_are_what_the_account_has_under_its_tags) {
  Take(Open("weights"), 3 * kMiB);
  a.Place(a.Create(3 * k2M), 3 * k2M);
  a.Place(a.Create(k2M, true));
  const auto expect_equal = [&] {
    const Account account = a.session->Inspect(&MeasureAccount);
    const Account::OfDevice all = OfAllDevices(account);
    Bytes kinds = 0, stays = 0, of_tags = 0;
    for (const auto& [kind, sum] : account.kinds) kinds += sum.bytes, stays += Sum(sum.stays);
    for (const auto& shares : {all.taken, all.running})
      for (const char* const tag : {"nccl", "user"}) of_tags += shares.contains(tag) ? shares.at(tag) : 0;
    EXPECT_EQ(kinds, of_tags + Sum(all.kept));
    EXPECT_EQ(stays, Sum(all.kept));
    EXPECT_EQ(account.kinds.at("user buffers").bytes, k2M);
  };
  expect_equal();
  ASSERT_TRUE(a.session->Pause().ok());
  expect_equal();
}

TEST_F(AccountTest, imported_memory_is_its_owners) {
  const AllocationId mine = a.Create(k2M);
  a.Place(mine);
  b.Place(Pass(mine));
  const Account::OfDevice theirs = b.session->Inspect(&MeasureAccount).devices[test::kDevice];
  EXPECT_EQ(Sum(theirs.running) + Sum(theirs.kept), 0U);
  ExpectAll(a.InUse());
}

}  // namespace
}  // namespace amem
