#include <gtest/gtest.h>

#include <set>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {
namespace {

TEST(Text, every_kind_has_a_name_of_its_own_that_leads_back_to_it) {
  std::set<std::string_view> names;
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    EXPECT_TRUE(names.insert(KindName(kind)).second) << KindName(kind);
    EXPECT_EQ(KindOf(KindName(kind)), kind);
  }
  EXPECT_EQ(KindOf("no such kind"), std::nullopt);
}

TEST(Text, bytes_use_the_largest_unit_that_loses_nothing) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(17), "17 B");
  EXPECT_EQ(FormatBytes(4096), "4 KiB");
  EXPECT_EQ(FormatBytes(Bytes{8280} << 20), "8 280 MiB");
  EXPECT_EQ(FormatBytes(1234567), "1 234 567 B");
}

TEST(Text, an_event_reads_as_a_sentence) {
  EXPECT_EQ(ToText(EventBody{Mapped{Address{0x7f00}, Bytes{2} << 20, 0, AllocationId{3}, 0}}),
            "mapped 0x7f00 2 MiB of allocation 3");
  EXPECT_EQ(ToText(EventBody{AccessSet{Address{0x7f00}, 4096, {{{LocationType::kDevice, 1}, 3}}}}),
            "access to 0x7f00 4 KiB for device 1 read-write");
  EXPECT_EQ(
      ToText(EventBody{StepFailed{{StepKind::kCreate, AllocationId{3}, {}, Bytes{2} << 20, {}}, Code::kOutOfMemory, 2, "no"}}),
      "step failed: create allocation 3, 2 MiB: out of memory: no");
}

}  // namespace
}  // namespace amem
