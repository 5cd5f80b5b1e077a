#include "replay/job/postmortem.h"

#include <gtest/gtest.h>

#include "replay/job/names.h"
#include "statemachine/apply.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/replay/job/scripted_journal.h"

namespace amem {
namespace {

using test::Job;
using test::kMiB;
using test::MemoryReader;
using test::Story;

JournalFindings Findings(MemoryReader& reader) {
  Result<JournalFindings> found = VerifyJournal(reader);
  EXPECT_TRUE(found.ok()) << found.status().message();
  return *std::move(found);
}
JournalFindings Findings(Story& story, SessionStatus status = SessionStatus::kClosed) {
  MemoryReader reader(story.events(), story.id(), status);
  return Findings(reader);
}

JobFindings Verify(Job& job, SessionStatus owner = SessionStatus::kClosed, SessionStatus importer = SessionStatus::kClosed) {
  const std::vector<JournalFindings> journals = {Findings(job.owner, owner), Findings(job.importer, importer)};
  for (const JournalFindings& journal : journals) EXPECT_TRUE(journal.violations.empty()) << journal.violations[0].text;
  return VerifyJob(journals);
}

std::string Texts(const std::vector<Violation>& violations) {
  std::string all;
  for (const Violation& v : violations) all += v.text + "\n";
  return all;
}
#define EXPECT_SAYS(violations, part) EXPECT_NE(Texts(violations).find(part), std::string::npos) << Texts(violations)

// ---- one journal -----------------------------------------------------------------------------------------------------------

TEST(Postmortem, journal_of_a_whole_life_has_no_violation) {
  Job job;
  job.Share();
  job.LetGo();
  job.Close();
  const JournalFindings found = Findings(job.importer);
  EXPECT_TRUE(found.violations.empty()) << Texts(found.violations);
  EXPECT_TRUE(found.whole);
  EXPECT_EQ(found.events, job.importer.events().size());
  ASSERT_EQ(found.imports.size(), 1u);
  EXPECT_TRUE(found.imports.begin()->second.dropped);
  EXPECT_EQ(NameOf(found.who), "rank 1 (pid 1001 on host alpha)");
}

TEST(Postmortem, wrong_order_is_found_at_its_event) {
  std::uint64_t clock = 0;
  Story story(1, 0, &clock);
  const AllocationId id = story.Create();
  story.Map(id);
  const SequenceNumber wrong = story.Then(Unmapped{.address = Address{0x1000}, .bytes = 2 * kMiB});
  story.Then(SessionClosed{.reason = "exit"});
  const JournalFindings found = Findings(story);
  ASSERT_EQ(found.violations.size(), 1u) << Texts(found.violations);
  EXPECT_EQ(found.violations[0].seq, wrong);
  EXPECT_EQ(found.violations[0].session, story.id());
  EXPECT_SAYS(found.violations, "0x1000");
  EXPECT_FALSE(found.whole);
}

TEST(Postmortem, gap_in_the_sequence_is_found) {
  std::uint64_t clock = 0;
  Story story(1, 0, &clock);
  for (int i = 0; i < 5; ++i) story.Create();
  story.events().erase(story.events().begin() + 2, story.events().begin() + 4);
  const JournalFindings found = Findings(story);
  ASSERT_EQ(found.violations.size(), 1u);
  EXPECT_EQ(found.violations[0].seq.value, 5u);
  EXPECT_SAYS(found.violations, "events 3 to 4 are missing");
}

TEST(Postmortem, gap_left_by_damaged_records_is_damage_and_not_a_violation) {
  std::uint64_t clock = 0;
  Story story(1, 0, &clock);
  for (int i = 0; i < 5; ++i) story.Create();
  story.events().erase(story.events().begin() + 2);
  MemoryReader reader(story.events(), story.id(), SessionStatus::kClosed);
  reader.report.corrupt_records = 1;
  const JournalFindings found = Findings(reader);
  EXPECT_TRUE(found.violations.empty()) << Texts(found.violations);
  EXPECT_FALSE(found.whole);
  EXPECT_EQ(found.report.corrupt_records, 1u);
}

TEST(Postmortem, journal_without_its_beginning_goes_on_from_the_state_before_it) {
  Job job;
  job.Share();
  const std::size_t kept = job.importer.events().size();
  job.LetGo();
  job.Close();
  std::vector<Event> events = job.importer.events();
  State beginning;
  for (std::size_t i = 0; i < kept; ++i) ASSERT_TRUE(Apply(beginning, events[i]).ok());
  events.erase(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(kept));

  MemoryReader reader(events, job.importer.id(), SessionStatus::kClosed);
  reader.beginning = beginning;
  const std::vector<JournalFindings> journals = {Findings(reader), Findings(job.owner)};
  EXPECT_TRUE(journals[0].violations.empty()) << Texts(journals[0].violations);
  const JobFindings found = VerifyJob(journals);
  EXPECT_TRUE(found.violations.empty()) << Texts(found.violations);
  EXPECT_EQ(found.references, 1u);
}

TEST(Postmortem, crash_and_broken_journals_are_noted) {
  std::uint64_t clock = 0;
  Story story(1, 0, &clock);
  story.Then(SessionBroken{.reason = "disk full"});
  const JournalFindings found = Findings(story, SessionStatus::kCrashed);
  EXPECT_TRUE(found.violations.empty());
  EXPECT_SAYS(found.notes, "crashed");
  EXPECT_SAYS(found.notes, "disk full");
}

// ---- references between journals -------------------------------------------------------------------------------------------

TEST(PostmortemJob, references_that_agree_are_counted) {
  Job job;
  job.Share();
  job.LetGo();
  job.Close();
  const JobFindings found = Verify(job);
  EXPECT_TRUE(found.violations.empty()) << Texts(found.violations);
  EXPECT_TRUE(found.notes.empty()) << Texts(found.notes);
  EXPECT_EQ(found.references, 1u);
}

TEST(PostmortemJob, import_without_reference_at_the_owner_is_found_and_names_both) {
  Job job;
  job.Share();
  job.Close();
  std::erase_if(job.owner.events(), [](const Event& e) { return std::holds_alternative<ReferenceAdded>(e.body); });
  for (std::size_t i = 0; i < job.owner.events().size(); ++i) job.owner.events()[i].seq = SequenceNumber{i + 1};
  const JobFindings found = Verify(job);
  ASSERT_EQ(found.violations.size(), 1u) << Texts(found.violations);
  EXPECT_EQ(found.violations[0].session, job.importer.id());
  EXPECT_SAYS(found.violations, "allocation 1 of rank 0 (pid 1000 on host alpha)");
  EXPECT_SAYS(found.violations, "no reference added");
}

TEST(PostmortemJob, import_without_reference_is_found_although_the_owner_crashed) {
  Job job;
  job.Share();
  std::erase_if(job.owner.events(), [](const Event& e) { return std::holds_alternative<ReferenceAdded>(e.body); });
  for (std::size_t i = 0; i < job.owner.events().size(); ++i) job.owner.events()[i].seq = SequenceNumber{i + 1};
  EXPECT_EQ(Verify(job, SessionStatus::kCrashed).violations.size(), 1u);
}

TEST(PostmortemJob, reference_without_import_is_found) {
  Job job;
  job.Share();
  job.owner.Then(ReferenceAdded{.allocation = job.shared, .by = job.importer.id(), .as = AllocationId{99}});
  job.Close();
  const JobFindings found = Verify(job);
  ASSERT_EQ(found.violations.size(), 1u) << Texts(found.violations);
  EXPECT_EQ(found.violations[0].session, job.owner.id());
  EXPECT_SAYS(found.violations, "rank 1 (pid 1001 on host alpha) as 99, whose journal has no such import");
}

TEST(PostmortemJob, reference_without_import_is_explained_by_a_crash_of_the_importer) {
  Job job;
  job.Share();
  job.owner.Then(ReferenceAdded{.allocation = job.shared, .by = job.importer.id(), .as = AllocationId{99}});
  const JobFindings found = Verify(job, SessionStatus::kLive, SessionStatus::kCrashed);
  EXPECT_TRUE(found.violations.empty()) << Texts(found.violations);
}

TEST(PostmortemJob, reference_that_was_taken_back_needs_no_import) {
  Job job;
  job.Share();
  job.owner.Then(ReferenceAdded{.allocation = job.shared, .by = job.importer.id(), .as = AllocationId{99}});
  job.owner.Then(ReferenceDropped{.allocation = job.shared, .by = job.importer.id(), .as = AllocationId{99}});
  job.Close();
  EXPECT_TRUE(Verify(job).violations.empty());
}

TEST(PostmortemJob, other_size_or_properties_than_created_are_found) {
  Job job;
  job.Share();
  for (Event& event : job.importer.events()) {
    if (auto* imported = std::get_if<Imported>(&event.body)) {
      imported->bytes = 4 * kMiB;
      imported->properties.gpu_direct_rdma = 1;
    }
  }
  job.Close();
  const JobFindings found = Verify(job);
  EXPECT_EQ(found.violations.size(), 2u) << Texts(found.violations);
  EXPECT_SAYS(found.violations, "as 4194304 bytes, but was created with 2097152");
  EXPECT_SAYS(found.violations, "other properties");
}

TEST(PostmortemJob, allocation_that_the_owner_never_created_is_found) {
  Job job;
  job.Share();
  for (Event& event : job.importer.events()) {
    if (auto* imported = std::get_if<Imported>(&event.body)) imported->remote.allocation = AllocationId{42};
  }
  job.Close();
  const JobFindings found = Verify(job);
  EXPECT_SAYS(found.violations, "allocation 42 of rank 0");
}

TEST(PostmortemJob, reference_dropped_by_the_importer_only_is_found_at_the_owner) {
  Job job;
  job.Share();
  job.importer.Unmap(job.place);
  job.importer.Then(AllocationReleased{.allocation = job.imported});
  job.Close();
  const JobFindings found = Verify(job);
  ASSERT_EQ(found.violations.size(), 1u) << Texts(found.violations);
  EXPECT_EQ(found.violations[0].session, job.owner.id());
  EXPECT_SAYS(found.violations, "still referenced by rank 1");
}

TEST(PostmortemJob, drop_in_flight_when_the_owner_closed_is_no_violation) {
  Job job;
  job.Share();
  job.importer.Unmap(job.place);
  job.importer.Then(AllocationReleased{.allocation = job.imported});
  job.importer.Then(SessionClosed{.reason = "exit"});
  job.owner.Then(SessionClosed{.reason = "exit"});
  EXPECT_TRUE(Verify(job).violations.empty());
}

TEST(PostmortemJob, reference_dropped_by_the_owner_only_is_found_at_the_importer) {
  Job job;
  job.Share();
  job.owner.Then(ReferenceDropped{.allocation = job.shared, .by = job.importer.id(), .as = job.imported});
  job.Close();
  const JobFindings found = Verify(job);
  ASSERT_EQ(found.violations.size(), 1u) << Texts(found.violations);
  EXPECT_EQ(found.violations[0].session, job.importer.id());
  EXPECT_SAYS(found.violations, "is still held, but rank 0");
}

TEST(PostmortemJob, crash_of_the_importer_explains_references_that_the_owner_dropped) {
  Job job;
  job.Share();
  job.owner.Then(PeerLost{.peer = job.importer.id(), .reason = "socket closed"});
  const JobFindings found = Verify(job, SessionStatus::kLive, SessionStatus::kCrashed);
  EXPECT_TRUE(found.violations.empty()) << Texts(found.violations);
  EXPECT_SAYS(found.notes, "crashed while holding 1 allocation of rank 0 (pid 1000 on host alpha)");
}

TEST(PostmortemJob, peer_that_ended_in_order_may_hold_references_to_its_end) {
  Job job;
  job.Share();
  job.importer.Then(SessionClosed{.reason = "exit"});
  job.owner.Then(PeerLost{.peer = job.importer.id(), .reason = "closed"});
  job.owner.Then(SessionClosed{.reason = "exit"});
  const JobFindings found = Verify(job);
  EXPECT_TRUE(found.violations.empty()) << Texts(found.violations);
}

TEST(PostmortemJob, live_peer_that_the_owner_lost_still_maps_freed_memory) {
  Job job;
  job.Share();
  job.owner.Then(PeerLost{.peer = job.importer.id(), .reason = "socket closed"});
  job.importer.Create();  // alive, and its journal was read after that
  const JobFindings found = Verify(job, SessionStatus::kLive, SessionStatus::kLive);
  ASSERT_EQ(found.violations.size(), 1u) << Texts(found.violations);
  EXPECT_SAYS(found.violations, "when it lost this peer");
}

TEST(PostmortemJob, what_a_live_owner_did_after_it_was_read_is_left_out) {
  Job job;
  job.Share();
  std::vector<Event>& events = job.owner.events();
  std::erase_if(events, [](const Event& e) { return std::holds_alternative<ReferenceAdded>(e.body); });
  for (std::size_t i = 0; i < events.size(); ++i) events[i].seq = SequenceNumber{i + 1};
  EXPECT_TRUE(Verify(job, SessionStatus::kLive, SessionStatus::kLive).violations.empty());

  JournalFindings owner = Findings(job.owner, SessionStatus::kLive);
  owner.as_of_ns = job.clock + 1;  // reading began after the import: now it should have been there
  const std::vector<JournalFindings> journals = {owner, Findings(job.importer, SessionStatus::kLive)};
  EXPECT_EQ(VerifyJob(journals).violations.size(), 1u);
}

TEST(PostmortemJob, absent_journals_are_noted_once_for_each_pair) {
  Job job;
  job.Share();
  job.Close();
  const std::vector<JournalFindings> journals = {Findings(job.importer)};
  const JobFindings found = VerifyJob(journals);
  EXPECT_TRUE(found.violations.empty());
  ASSERT_EQ(found.notes.size(), 1u);
  EXPECT_SAYS(found.notes, "00000000000a11ce could not be compared");
}

}  // namespace
}  // namespace amem
