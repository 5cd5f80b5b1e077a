// All commands read a job alike: they name its ranks the same, and agree on when things happened, although its hosts have
// clocks of their own.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/replay/report/report_job.h"
#include "tests/replay/tool/run_tool.h"

namespace amem {
namespace {

using Json = nlohmann::json;
using test::Ran;

constexpr int kRanks = 3, kVictim = 2;
const std::string kVictimsName = "rank 2 (pid 20080 on host node-2)";

class Agreement : public test::ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    const Status made = test::WriteReportJob({.ranks = kRanks, .events = 1'500, .allocations = 12, .fail = true, .hosts = true},
                                             scratch_ / "journals");
    ASSERT_TRUE(made.ok()) << made.message();
    ASSERT_EQ(Shell("$TOOL pack $S/journals -o $S/job.amem").code, 0);
    why_ = Shell("$TOOL why --json $S/job.amem").json();
    ASSERT_TRUE(why_.is_object());
    const Ran trace = Shell("$TOOL report --perfetto $S/job.amem -o $S/trace.json");
    ASSERT_EQ(trace.code, 0) << trace.err;
    trace_ = Json::parse(test::Contents(scratch_ / "trace.json"))["traceEvents"].get<std::vector<Json>>();
    const std::string page = Shell("$TOOL report $S/job.amem -o -").out;
    const std::string begin = "id=\"data\">";
    const std::size_t at = page.find(begin) + begin.size();
    report_ = Json::parse(page.substr(at, page.find("</script>", at) - at), nullptr, false);
    ASSERT_TRUE(report_.is_object());
  }

  Json why_, report_;
  std::vector<Json> trace_;
};

TEST_F(Agreement, all_commands_name_a_rank_the_same) {
  EXPECT_EQ(why_["process"], kVictimsName);
  EXPECT_EQ(report_["verdict"]["process"], kVictimsName);
  std::map<std::string, std::int64_t> tracks;
  for (const Json& e : trace_) {
    if (e["name"] == "process_name") tracks[e["args"]["name"]] = e["pid"];
  }
  EXPECT_EQ(tracks.size(), 3U);
  EXPECT_EQ(tracks[kVictimsName], 20080);
  EXPECT_HAS(Shell("$TOOL log $S/job.amem --kind session-opened").out, ", " + kVictimsName + "\n");
  EXPECT_HAS(Shell("$TOOL verify $S/job.amem").out, kVictimsName + ", closed");
  EXPECT_HAS(Shell("$TOOL ls -v $S/job.amem").out, kVictimsName + ", group");
  EXPECT_HAS(Shell("$TOOL replay $S/job.amem").out, kVictimsName);
  // Where there is one session of a rank, its number is enough.
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::string name = "rank " + std::to_string(rank);
    EXPECT_EQ(report_["sessions"][static_cast<std::size_t>(rank)]["name"], name);
    EXPECT_HAS(Shell("$TOOL top --by peer $S/job.amem").out, "\n" + name + " ");
    EXPECT_HAS(Shell("$TOOL top --by peer $S/job.amem").out, "shared with " + name + "\n");
    EXPECT_HAS(Shell("$TOOL replay --json $S/job.amem").json()["devices"].dump(), "\"" + name + "\"");
  }
}

// The failed step: when `why`, the trace and the report say that it happened, and what the log of its own journal says.
TEST_F(Agreement, all_commands_say_the_same_of_when_a_step_failed) {
  const std::uint64_t seq = why_["seq"], failed_ns = why_["realtime_ns"];
  std::int64_t traced_ns = 0;
  for (const Json& e : trace_) {
    if (e["ph"] == "i" && e["name"] == "step failed" && e["args"]["event"] == seq)
      traced_ns = std::llround(e["ts"].get<double>() * 1000);
  }
  ASSERT_NE(traced_ns, 0);
  const Json& evidence = report_["verdict"]["evidence"];
  const auto cause =
      std::find_if(evidence.begin(), evidence.end(), [&](const Json& e) { return e["q"] == seq && e["s"] == kVictim; });
  ASSERT_NE(cause, evidence.end()) << evidence;
  EXPECT_EQ((*cause)["t"], traced_ns);
  const std::uint64_t began_ms = report_["job"]["began_ms"];
  EXPECT_EQ(failed_ns / 1'000'000, (began_ms * 1'000'000 + static_cast<std::uint64_t>(traced_ns)) / 1'000'000);
  // The event as a row of the report, and in the log, whose times count from the session's own opening.
  const Json& rows = report_["events"]["columns"];
  std::uint64_t at_seq = 0;
  std::int64_t at_ns = 0, row_ns = -1;
  for (std::size_t i = 0, session = 0; i < rows["s"].size(); ++i) {
    if (rows["s"][i] != session) {
      session = rows["s"][i];
      at_seq = 0;
      at_ns = 0;
    }
    at_seq += rows["q"][i].get<std::uint64_t>();
    at_ns += rows["t"][i].get<std::int64_t>();
    if (session == kVictim && at_seq == seq) row_ns = at_ns;
  }
  EXPECT_EQ(row_ns, traced_ns);
  const Json log = Json::parse(Shell("$TOOL log --json --kind step-failed $S/job.amem").out, nullptr, false);
  const Json info = Shell("$TOOL ls --json $S/job.amem").json();
  for (const Json& session : info) {
    if (session["opened"]["rank"] != kVictim) continue;
    const std::uint64_t opened = session["opened"]["realtime_ns"], ticks = session["opened"]["monotonic_ns"];
    EXPECT_EQ(log["time_ns"].get<std::uint64_t>() - ticks + opened, failed_ns);
  }
}

// Each rank's part of a pause begins on its own host's clock; put together, they overlap.
TEST_F(Agreement, the_parts_of_a_pause_on_three_hosts_are_one_pause) {
  ASSERT_FALSE(report_["cycles"].empty());
  for (const Json& cycle : report_["cycles"]) {
    EXPECT_EQ(cycle["parts"].size(), 3U);
    EXPECT_TRUE(cycle["absent"].empty());
  }
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> span;  // of the first pause, over all tracks
  for (const Json& e : trace_) {
    if (e["ph"] != "X" || e["name"] != "pause 1") continue;
    const auto from = std::llround(e["ts"].get<double>() * 1000), to = from + std::llround(e["dur"].get<double>() * 1000);
    auto& [first, last] = span.try_emplace("pause 1", from, to).first->second;
    EXPECT_LT(from, last);
    EXPECT_GT(to, first);
    first = std::min<std::int64_t>(first, from);
    last = std::max<std::int64_t>(last, to);
  }
  EXPECT_EQ(span.size(), 1U);
}

}  // namespace
}  // namespace amem
