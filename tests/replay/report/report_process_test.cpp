// report and trace as people use them, and how they do with jobs of a million events.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "journal/base/clock.h"
#include "tests/replay/job/scripted_journal.h"
#include "tests/replay/job/written_journal.h"
#include "tests/replay/report/report_job.h"
#include "tests/replay/tool/run_tool.h"

namespace amem {
namespace {

namespace fs = std::filesystem;

using test::Contents;
using test::Ran;

class Report : public test::ToolTest {
 protected:
  Ran Run(const std::string& arguments) { return Shell("exec $TOOL report " + arguments); }
  [[nodiscard]] std::string journals() const { return (scratch_ / "journals").string(); }
  [[nodiscard]] std::string page() const { return (scratch_ / "job.html").string(); }
};

TEST_F(Report, is_one_file_with_the_verdict_in_it_and_nothing_to_fetch) {
  ASSERT_TRUE(test::WriteReportJob({.ranks = 3, .events = 3'000, .allocations = 12, .fail = true}, journals()).ok());
  const Ran ran = Run("'" + journals() + "' -o '" + page() + "'");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_NE(ran.out.find("3 sessions"), std::string::npos) << ran.out;
  const std::string text = Contents(page());
  EXPECT_NE(text.find("\"healthy\":false,\"kind\":\"out-of-memory\""), std::string::npos);
  for (const char* reference :
       {"src=", "<link", "@import", "url(http", "https://", "fetch(", "XMLHttpRequest", "@DATA@", "@SCRIPT@"}) {
    EXPECT_EQ(text.find(reference), std::string::npos) << reference;
  }
  EXPECT_NE(text.find("default-src 'none'"), std::string::npos) << "the browser is told so, too";
}

TEST_F(Report, goes_to_standard_output_when_asked) {
  ASSERT_TRUE(test::WriteReportJob({.ranks = 3, .events = 3'000, .allocations = 12}, journals()).ok());
  const Ran ran = Run("'" + journals() + "' -o -");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out.rfind("<!doctype html>", 0), 0U);
  EXPECT_NE(ran.out.find("</html>"), std::string::npos);
}

TEST_F(Report, damaged_journal_is_shown_as_far_as_it_goes) {
  ASSERT_TRUE(test::WriteReportJob({.ranks = 3, .events = 3'000, .allocations = 12}, journals()).ok());
  // One event's record is damaged wherever it is: where in the file depends on how the commits fell, and a page may be free.
  const fs::path data = fs::directory_iterator(journals())->path() / "data.mdb";
  std::string bytes = Contents(data);
  const std::string number_500("\x01\0\0\0\xf4\x01\0\0\0\0\0\0", 12);  // the kind "event", and the number
  int damaged = 0;
  for (std::size_t at = bytes.find("AMJr"); at != std::string::npos; at = bytes.find("AMJr", at + 4)) {
    if (bytes.compare(at + 12, 12, number_500) == 0) bytes[at + 30] = static_cast<char>(bytes[at + 30] ^ 0x55), ++damaged;
  }
  ASSERT_GT(damaged, 0);
  std::ofstream(data, std::ios::binary) << bytes;
  const Ran ran = Run("'" + journals() + "' -o '" + page() + "'");
  EXPECT_EQ(ran.code, 2) << ran.out << ran.err;
  EXPECT_FALSE(ran.err.empty());
  EXPECT_TRUE(fs::exists(page())) << "what can be read is shown";
}

TEST_F(Report, nothing_to_read_or_nowhere_to_write_is_said) {
  fs::create_directories(journals());
  EXPECT_EQ(Run("'" + journals() + "' -o '" + page() + "'").code, 2);
  EXPECT_FALSE(fs::exists(page()));
  ASSERT_TRUE(test::WriteReportJob({.ranks = 3, .events = 3'000, .allocations = 12}, journals()).ok());
  const Ran ran = Run("'" + journals() + "' -o '" + (scratch_ / "absent" / "job.html").string() + "'");
  EXPECT_EQ(ran.code, 2);
  EXPECT_NE(ran.err.find("No such file"), std::string::npos) << ran.err;
}

TEST_F(Report, of_8_ranks_and_many_events_is_small) {
#ifdef AMEM_BY_NIGHT
  constexpr std::uint64_t kEvents = 125'000;
#else
  constexpr std::uint64_t kEvents = 40'000;
#endif
  const test::ReportJob job{.ranks = 8, .events = kEvents, .fail = true};
  ASSERT_TRUE(test::WriteReportJob(job, journals()).ok());
  const Ran ran = Run("'" + journals() + "' -o '" + page() + "'");
  EXPECT_EQ(ran.code, 0) << ran.err;
  const auto bytes = fs::file_size(page());
  std::printf("%s%.2f s, %.0f MB at most\n", ran.out.c_str(), ran.seconds, static_cast<double>(ran.peak_kib) / 1024);
  EXPECT_LT(bytes, 5'000'000U);
#ifndef AMEM_SANITIZED  // which takes its own memory and time
  EXPECT_LT(ran.peak_kib, 500 * 1024);
  EXPECT_LT(ran.processor_seconds, 10) << "some 2 s";
#endif
}

TEST_F(Report, of_a_recorded_shortage_names_the_device_and_what_was_held) {
  const Ran ran = Run(std::string("'") + AMEM_GOLDEN + "/gpu/golden-out-of-memory-2gpus.amem' -o '" + page() + "'");
  EXPECT_EQ(ran.code, 0) << ran.err;
  // Rank 1 had to bring 128 MiB back to its second GPU, and held nothing there at that moment.
  EXPECT_HAS(Contents(page()),
             "\"shortages\":[{\"s\":1,\"q\":271,\"device\":1,\"uuid\":\"gpu-2\",\"holders\":[[1,0,134217728,0]]");
}

TEST_F(Report, of_a_pack_of_a_living_process_is_as_of_the_packing) {
  std::uint64_t clock = MonotonicNs();
  test::Story story(0x77, 5, &clock);
  story.Create();
  const auto writer = test::BeginJournal(story, journals());
  ASSERT_NE(writer, nullptr);
  ASSERT_TRUE(writer->Flush().ok());
  ASSERT_EQ(Shell("$TOOL pack '" + journals() + "' -o $S/job.amem").code, 0);
  ASSERT_TRUE(writer->Close().ok());
  const Ran ran = Run("$S/job.amem -o '" + page() + "'");
  EXPECT_EQ(ran.code, 0) << ran.err;
  const std::string text = Contents(page());
  EXPECT_HAS(text, "\"status\":\"live\"");
  EXPECT_EQ(text.find("\"as_of\":null"), std::string::npos) << "the moment of packing is known";
}

// ---- trace -----------------------------------------------------------------------------------------------------------------

class TraceTool : public test::ToolTest {
 protected:
  Ran Trace(const std::string& arguments) { return Shell("exec $TOOL report --perfetto " + arguments); }
};

TEST_F(TraceTool, takes_no_more_memory_for_a_longer_journal) {
  std::vector<long> peak_kib;
  for (const std::uint64_t events : {20'000, 100'000}) {
    const std::string job = (scratch_ / std::to_string(events)).string();
    ASSERT_TRUE(test::WriteReportJob({.ranks = 3, .events = events, .allocations = 12}, job).ok());
    for (const char* window : {"", " --from 100 --to 200"}) {
      const Ran ran = Trace("'" + job + "' -o /dev/null" + window);
      EXPECT_EQ(ran.code, 0) << ran.err;
      peak_kib.push_back(ran.peak_kib);
    }
  }
  std::printf("trace of 60 000 events: %ld KiB, in a window %ld KiB; of 300 000 events: %ld KiB, in a window %ld KiB\n",
              peak_kib[0], peak_kib[1], peak_kib[2], peak_kib[3]);
#ifndef AMEM_SANITIZED  // AddressSanitizer keeps what is freed, for a while
  EXPECT_LT(peak_kib[2], peak_kib[0] + 6 * 1024);
  EXPECT_LT(peak_kib[3], peak_kib[1] + 6 * 1024);
#endif
}

TEST_F(TraceTool, window_is_given_in_seconds_or_by_the_wall_clock) {
  const std::string job = (scratch_ / "job").string();
  ASSERT_TRUE(test::WriteReportJob({.ranks = 3, .events = 3'000, .allocations = 12}, job).ok());
  const auto slices = [&](const std::string& window) {
    const Ran ran = Trace("'" + job + "' -o '" + (scratch_ / "t.json").string() + "' " + window);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return nlohmann::json::parse(Contents(scratch_ / "t.json"))["traceEvents"].size();
  };
  const std::size_t all = slices(""), some = slices("--from 10 --to 30");
  EXPECT_LT(some, all);
  // The job began at 2025-11-21 09:30:17 of its wall clock, as make_report_job has it.
  EXPECT_EQ(slices("--from '2025-11-21 09:30:27' --to '2025-11-21T09:30:47.000Z'"), some);
  for (const char* wrong : {"--from yesterday", "--to -3", "--from 20 --to 10", "--from '2025-11-21 25:00:00 CET'"}) {
    const Ran ran = Trace("'" + job + "' -o /dev/null " + wrong);
    EXPECT_EQ(ran.code, 1) << wrong;
    EXPECT_FALSE(ran.err.empty()) << wrong;
  }
  const Ran outside = Trace("'" + job + "' -o /dev/null --from 100000");
  EXPECT_EQ(outside.code, 0);
  EXPECT_HAS(outside.err, "no event lies in that time");
}

}  // namespace
}  // namespace amem
