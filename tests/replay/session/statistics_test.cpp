// What the statistics say of memory, by call site, by peer and by tag.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using nlohmann::json;
using test::k2M, test::kMiB, test::Process;

class StatisticsTest : public test::TwoProcesses {
 protected:
  StatisticsTest() : TwoProcesses({.layout = Layout::kDirect}, 256 * kMiB) {}
  static json Of(const Process& process) { return json::parse(process.session->StatisticsJson()); }
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

}  // namespace
}  // namespace amem
