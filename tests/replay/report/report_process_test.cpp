// report as people use it, and how it does with a job of a million events.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

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

TEST_F(Report, of_8_ranks_and_a_million_events_is_small) {
  const test::ReportJob job{.ranks = 8, .events = 125'000, .fail = true};
  ASSERT_TRUE(test::WriteReportJob(job, journals()).ok());
  const Ran ran = Run("'" + journals() + "' -o '" + page() + "'");
  EXPECT_EQ(ran.code, 0) << ran.err;
  const auto bytes = fs::file_size(page());
  std::printf("%s%.2f s, %.0f MB at most\n", ran.out.c_str(), ran.seconds, static_cast<double>(ran.peak_kib) / 1024);
  EXPECT_LT(bytes, 5'000'000U);
  EXPECT_LT(ran.peak_kib, 500 * 1024);
  EXPECT_LT(ran.processor_seconds, 10) << "some 2 s";
}

}  // namespace
}  // namespace amem
