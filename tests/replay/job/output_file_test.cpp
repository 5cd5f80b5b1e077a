#include "replay/job/output_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "tests/journal/temporary.h"

namespace amem::test {
namespace {

namespace fs = std::filesystem;

std::string Contents(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(OutputFile, a_link_stays_a_link_and_the_file_that_it_leads_to_is_replaced_as_a_whole) {
  const TemporaryDirectory directory;
  const fs::path file = directory.path() / "file", link = directory.path() / "link";
  std::ofstream(file) << "before";
  fs::create_symlink(file, link);
  for (const bool commits : {false, true}) {
    {
      auto out = OutputFile::Open(link);
      ASSERT_TRUE(out.ok()) << out.status().message();
      out->Write("after");
      EXPECT_EQ(Contents(file), "before");
      if (commits) {
        EXPECT_TRUE(out->Commit().ok());
      }
    }
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_EQ(Contents(file), commits ? "after" : "before");
    EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 2) << "nothing unfinished is left";
  }
}

}  // namespace
}  // namespace amem::test
