// Replays of whole journals, each of which is in memory.
#include "replay/rerun/rerun.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "statemachine/apply.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/replay/job/scripted_journal.h"

namespace amem {
namespace {

using test::kMiB, test::MemoryReader, test::Story;

Result<RerunReport> RerunOf(std::unique_ptr<MemoryReader> reader) {
  std::vector<std::unique_ptr<JournalReader>> journals;
  journals.push_back(std::move(reader));
  return Rerun(journals, {});
}

TEST(Rerun, a_journal_that_begins_with_a_snapshot_goes_on_from_its_state) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0xa, 0, &clock);
  const AllocationId early = story.Create();
  const Address place = story.Map(early);
  State beginning;
  for (const Event& event : story.events()) ASSERT_TRUE(Apply(beginning, event).ok());
  const std::size_t dropped = story.events().size();
  story.Unmap(place);
  story.Then(AllocationReleased{.allocation = early});
  story.Create(4 * kMiB);
  story.Then(SessionClosed{.reason = "exit"});
  auto reader = std::make_unique<MemoryReader>(
      std::vector<Event>(story.events().begin() + static_cast<std::ptrdiff_t>(dropped), story.events().end()), story.id(),
      SessionStatus::kClosed);
  reader->beginning = beginning;
  const auto report = RerunOf(std::move(reader));
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_FALSE(report->difference) << report->difference->what << ": " << report->difference->replayed;
  EXPECT_EQ(report->events, story.events().size() - dropped);
  ASSERT_EQ(report->devices.size(), 1U);
  EXPECT_EQ(report->devices[0].most, 4 * kMiB);
}

TEST(Rerun, more_devices_than_the_simulator_has_are_refused_with_both_numbers) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0xa, 0, &clock);
  AllocationProperties properties = Story::Properties();
  properties.location.id = 63;
  story.Then(AllocationCreated{
      .allocation = story.NextId(), .bytes = 2 * kMiB, .properties = properties, .handle = DriverHandle{0xbeef}});
  const auto report = RerunOf(std::make_unique<MemoryReader>(story.events(), story.id(), SessionStatus::kClosed));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), Code::kUnsupported);
  EXPECT_NE(report.status().message().find("the journals use 64 devices, and the simulator has 63"), std::string::npos)
      << report.status().message();
}

}  // namespace
}  // namespace amem
