// Journals of every format version that was ever released must be readable for ever. If this fails, the reader is wrong: never
// change a file under golden/. A field added since shows its default, and expected.txt may be given that.
#include "tests/journal/golden.h"

#include <gtest/gtest.h>

namespace amem::test {
namespace {

namespace fs = std::filesystem;

TEST(Golden, journals_of_every_version_say_what_they_said) {
  std::size_t checked = 0;
  for (const auto& version : fs::directory_iterator(AMEM_GOLDEN_DIRECTORY)) {
    for (const auto& session : fs::directory_iterator(version.path())) {
      const auto bytes = ReadFile(session.path() / "expected.txt");
      const std::string expected(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      ASSERT_FALSE(expected.empty()) << session.path();
      EXPECT_EQ(Describe(session.path()), expected) << session.path();
      ++checked;
    }
  }
  EXPECT_GE(checked, 2U);
}

TEST(Golden, the_state_of_a_trimmed_journal_is_told) {
  auto reader = JournalReader::Open(fs::path(AMEM_GOLDEN_DIRECTORY) / "v1" / "closed");
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  const auto state = (*reader)->StateAt(std::nullopt);
  ASSERT_TRUE(state.ok()) << state.status().message();
  EXPECT_EQ(state->last, SequenceNumber{70});
  EXPECT_EQ(state->allocations.size(), 9U);
  EXPECT_EQ(state->next_allocation, 19U);
  EXPECT_FALSE((*reader)->StateAt(SequenceNumber{20}).ok());
}

TEST(Golden, nothing_is_written_beside_them) {
  for (const auto& session : fs::directory_iterator(fs::path(AMEM_GOLDEN_DIRECTORY) / "v1")) {
    (void)Describe(session.path());
    EXPECT_FALSE(fs::exists(session.path() / "lock.mdb"));
  }
}

}  // namespace
}  // namespace amem::test
