// Tags in reports and traces: their pauses and resumes are shown beside NCCL's, and are none of NCCL's.
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "replay/report/report_json.h"
#include "replay/report/timeline.h"
#include "replay/report/trace.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/replay/job/scripted_pool.h"
#include "tests/replay/report/activity_after.h"
#include "tests/replay/report/read_timeline.h"

namespace amem {
namespace {

using TagsJson = nlohmann::json;

// NCCL's pause is under way while a tag is paused, and a resume of the tag fails afterwards.
struct TagsJob {
  std::uint64_t clock = 1'000'000'000;
  test::Story story{0x51ab, 0, &clock};
  test::ScriptedPool weights{story, "weights"};
  AllocationId nccl = story.Create(2 * test::kMiB);

  TagsJob() {
    story.Map(nccl);
    weights.Chunk(6 * test::kMiB);
    story.Then(PhaseBegun{.phase = PhaseKind::kPauseArrive});
    story.Then(CycleBegun{.kind = CycleKind::kPause, .cycle = 1, .members = {story.id()}});
    story.Then(PhaseBegun{.phase = PhaseKind::kPauseSave});
    weights.Run(CycleKind::kPause);
    story.Then(PhaseDecided{.phase = PhaseKind::kPauseSave, .passed = false, .culprit = story.id(), .message = "given up"});
    story.Then(CycleFailed{.kind = CycleKind::kPause, .cycle = 1, .message = "given up"});
    weights.Begin(CycleKind::kResume);
    const Step step = weights.Work(CycleKind::kResume, StepKind::kCreate);
    weights.Fail(CycleKind::kResume, step, Code::kOutOfMemory, "out of memory");
    story.Then(SessionClosed{"exit"});
  }
  std::unique_ptr<JournalReader> Reader() {
    return std::make_unique<test::MemoryReader>(story.events(), story.id(), SessionStatus::kClosed);
  }
  JobTimeline Timeline() {
    auto timeline = test::ReadTimeline(*Reader(), {});
    EXPECT_TRUE(timeline.ok()) << timeline.status().message();
    std::vector<SessionTimeline> sessions;
    sessions.push_back(*std::move(timeline));
    return JoinTimelines(std::move(sessions));
  }
};

TEST(Tags, a_timeline_has_their_pauses_and_resumes_apart_from_those_of_nccl) {
  TagsJob job;
  const JobTimeline timeline = job.Timeline();
  const SessionTimeline& session = timeline.sessions[0];
  std::map<std::pair<std::string, CycleKind>, Outcome> outcomes;
  for (const Attempt& cycle : session.cycles) outcomes[{cycle.tag, cycle.kind}] = OutcomeOf(cycle);
  const std::map<std::pair<std::string, CycleKind>, Outcome> expected = {{{"", CycleKind::kPause}, Outcome::kUndone},
                                                                         {{"weights", CycleKind::kPause}, Outcome::kDone},
                                                                         {{"weights", CycleKind::kResume}, Outcome::kUndone}};
  EXPECT_EQ(outcomes, expected);
  EXPECT_EQ(session.done.failures, 1u) << "NCCL's only";
  EXPECT_EQ(session.done.pauses, 0u);
  EXPECT_EQ(session.strip.size(), 1u);
  EXPECT_EQ(timeline.cycles.size(), 3u);
  for (const JobCycle& cycle : timeline.cycles) EXPECT_TRUE(cycle.absent.empty());
}

TEST(Tags, memory_under_a_tag_is_a_class_of_its_own) {
  TagsJob job;
  const SessionTimeline session = job.Timeline().sessions[0];
  const auto tagged = static_cast<std::size_t>(MemoryClass::kTagged), own = static_cast<std::size_t>(MemoryClass::kOwn);
  EXPECT_EQ(session.most[tagged], 6 * test::kMiB);
  EXPECT_EQ(session.most[own], 2 * test::kMiB);
  EXPECT_EQ(session.series.back().held[tagged], 0u) << "it is paused";
  for (const SeriesPoint& point : session.series) EXPECT_LE(DeviceBytes(point.held), 8 * test::kMiB);
}

TEST(Tags, the_pages_data_names_them) {
  TagsJob job;
  const TagsJson data = TagsJson::parse(ReportJson(job.Timeline(), {}, "1", "now"));
  std::multiset<std::string> of;
  for (const TagsJson& cycle : data["cycles"]) of.insert(cycle["tag"]);
  EXPECT_EQ(of, (std::multiset<std::string>{"", "weights", "weights"}));
  bool listed = false;
  for (const TagsJson& name : data["allocations"]["communicators"]) listed = listed || name == "tag weights";
  EXPECT_TRUE(listed);
}

TEST(Tags, a_trace_draws_each_on_a_row_of_its_own) {
  TagsJob job;
  std::vector<std::unique_ptr<JournalReader>> readers;
  readers.push_back(job.Reader());
  std::string text;
  const auto summary = WriteTrace(readers, [&](std::string_view piece) { text += piece; });
  ASSERT_TRUE(summary.ok()) << summary.status().message();
  EXPECT_TRUE(summary->incomplete.empty());
  std::map<std::int64_t, std::string> rows;
  std::map<std::string, std::int64_t> row_of;
  std::set<std::string> counters;
  const TagsJson trace = TagsJson::parse(text);
  for (const TagsJson& e : trace["traceEvents"]) {
    if (e["ph"] == "M" && e["name"] == "thread_name") rows[e["tid"]] = e["args"]["name"];
    if (e["ph"] == "X" && e["cat"] == "cycle") row_of[e["name"]] = e["tid"];
    if (e["ph"] == "C") counters.insert(e["name"]);
  }
  ASSERT_TRUE(row_of.contains("pause 1 of weights"));
  ASSERT_TRUE(row_of.contains("resume 1 of weights"));
  EXPECT_EQ(rows[row_of["pause 1 of weights"]], "tag weights");
  EXPECT_EQ(row_of["pause 1 of weights"], row_of["resume 1 of weights"]);
  EXPECT_NE(row_of["pause 1 of weights"], row_of["pause 1"]);
  EXPECT_TRUE(counters.contains("tag weights (MiB)"));
}

TEST(Tags, votes_on_a_tag_that_ranks_share_are_drawn_on_its_row) {
  std::uint64_t clock = 1'000'000'000;
  test::Story story(0x51ab, 0, &clock);
  const test::ScriptedPool weights(story, "weights");
  story.Then(CycleBegun{.kind = CycleKind::kPause, .cycle = 1, .members = {story.id()}, .pool = weights.id()});
  story.Then(PhaseBegun{.phase = PhaseKind::kPauseArrive, .pool = weights.id()});
  story.Then(VoteCast{.phase = PhaseKind::kPauseArrive, .pool = weights.id()});
  story.Then(PhaseDecided{.phase = PhaseKind::kPauseArrive, .pool = weights.id()});
  std::vector<std::unique_ptr<JournalReader>> readers;
  readers.push_back(std::make_unique<test::MemoryReader>(story.events(), story.id(), SessionStatus::kClosed));
  std::string text;
  ASSERT_TRUE(WriteTrace(readers, [&](std::string_view piece) { text += piece; }).ok());
  std::map<std::string, std::int64_t> row_of;
  const TagsJson trace = TagsJson::parse(text);
  for (const TagsJson& e : trace["traceEvents"]) {
    if (e["ph"] == "X") row_of[e["name"]] = e["tid"];
  }
  ASSERT_TRUE(row_of.contains("pause 1 of weights"));
  EXPECT_EQ(row_of["waiting for the others"], row_of["pause 1 of weights"]);
}

TEST(Tags, who_stands_where_is_about_nccl_and_memory_held_about_all) {
  TagsJob job;
  const auto failed = std::ranges::find_if(job.story.events(), [](const Event& event) {
    return std::holds_alternative<CycleFailed>(event.body);  // NCCL's pause
  });
  const SessionActivity now = test::ActivityAfter({job.story.events().begin(), failed}, SessionStatus::kLive);
  ASSERT_TRUE(now.trouble.empty()) << now.trouble;
  ASSERT_TRUE(now.attempt.has_value());
  EXPECT_EQ(now.attempt->kind, CycleKind::kPause);
  EXPECT_EQ(now.attempt->phases.size(), 1u);
  EXPECT_EQ(now.held, 2 * test::kMiB);
  EXPECT_EQ(now.released, 6 * test::kMiB);
}

}  // namespace
}  // namespace amem
