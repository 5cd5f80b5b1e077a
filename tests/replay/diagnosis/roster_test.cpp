// The roster of a job: who shares memory with whom at a time, and up to when a journal tells.
#include "replay/diagnosis/roster.h"

#include <gtest/gtest.h>

#include "tests/replay/diagnosis/scripted_cycles.h"

namespace amem {
namespace {

using test::CycleJob;
using test::kSecond;
using test::Story;

TEST(Roster, sessions_share_memory_from_the_import_until_it_is_dropped) {
  test::Job job;
  const std::uint64_t before = job.clock;
  job.Share();
  const std::uint64_t during = job.clock;
  job.LetGo();
  const std::vector<SessionStory> journals = {test::History(job.owner, SessionStatus::kLive),
                                              test::History(job.importer, SessionStatus::kLive)};
  const Roster roster(journals);
  const auto sharing_at = [&](std::uint64_t time_ns) {
    return roster.SharingWith(job.owner.id(), roster.Wall(journals[0], time_ns));
  };
  const std::set<SessionId> both = {job.owner.id(), job.importer.id()}, alone = {job.owner.id()};
  EXPECT_EQ(sharing_at(before), alone);
  EXPECT_EQ(sharing_at(during), both);
  EXPECT_EQ(sharing_at(job.clock), alone);
}

TEST(Roster, sessions_share_memory_through_others_and_without_a_journal) {
  CycleJob job;
  Story third(0xca7, 2, &job.clock);
  const AllocationId second = job.importer.Create(), held = third.NextId();
  third.Then(PeerConnected{.peer = job.importer.id(), .host = "alpha", .pid = 1001, .group = 7, .rank = 1});
  third.Then(Imported{
      .allocation = held, .remote = {job.importer.id(), second}, .bytes = 2 * test::kMiB, .properties = Story::Properties()});
  const std::vector<SessionStory> journals = {test::History(job.owner, SessionStatus::kLive),
                                              test::History(third, SessionStatus::kLive)};
  const Roster roster(journals);
  const std::uint64_t now = roster.Wall(journals[0], job.clock);
  EXPECT_EQ(roster.Find(job.importer.id()), nullptr);
  EXPECT_EQ(roster.Find(third.id()), &journals[1]);
  // The owner's journal knows the importer, and the importer's journal would know the third.
  EXPECT_EQ(roster.SharingWith(job.owner.id(), now), (std::set<SessionId>{job.owner.id(), job.importer.id(), third.id()}));
  EXPECT_EQ(roster.names().Name(job.importer.id()), "rank 1 (pid 1001 on host alpha)");
}

TEST(Roster, a_live_journal_tells_up_to_its_reading_and_another_up_to_its_last_event) {
  CycleJob job;
  const std::vector<SessionStory> journals = job.Read(SessionStatus::kLive, SessionStatus::kCrashed, 5 * kSecond);
  const Roster roster(journals);
  EXPECT_EQ(roster.KnownUntil(journals[0]), roster.Wall(journals[0], job.clock + 5 * kSecond));
  EXPECT_EQ(roster.KnownUntil(journals[1]), roster.Wall(journals[1], journals[1].last.time_ns));
}

}  // namespace
}  // namespace amem
