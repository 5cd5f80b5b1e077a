// The timeline: what a report shows is what the events say, also when most of them are not shown.
#include "replay/report/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "replay/job/names.h"
#include "replay/report/report_json.h"
#include "replay/report/timeline_parts.h"
#include "statemachine/apply.h"
#include "statemachine/plan.h"
#include "tests/replay/diagnosis/scripted_cycles.h"
#include "tests/replay/job/scripted_journal.h"
#include "tests/replay/report/read_timeline.h"
#include "tests/replay/report/report_job.h"

namespace amem {
namespace {

using test::kMiB;

// A journal that lies in memory.
class Memory final : public JournalReader {
 public:
  explicit Memory(std::vector<Event> events, SessionStatus status = SessionStatus::kClosed) : events_(std::move(events)) {
    info_.status = status;
    if (events_.empty()) return;
    info_.first = events_.front().seq;
    info_.last = events_.back().seq;
    info_.events = events_.size();
    if (const auto* opened = std::get_if<SessionOpened>(&events_.front().body)) info_.session = opened->session;
  }
  Result<JournalInfo> Info() override { return info_; }
  Result<ReadReport> Read(SequenceNumber first, SequenceNumber last, const std::function<bool(const Event&)>& visit) override {
    for (const Event& event : events_) {
      if (event.seq >= first && event.seq <= last && !visit(event)) break;
    }
    return ReadReport{};
  }
  Result<State> StateAt(std::optional<SequenceNumber> at, ReadReport*) override {
    State state = start_;
    for (const Event& event : events_) {
      if (at && event.seq > *at) break;
      AMEM_TRY(Apply(state, event));
    }
    return state;
  }

  // As if the events up to here had been dropped for a snapshot.
  void DropThrough(SequenceNumber through) {
    for (const Event& event : events_) {
      if (event.seq <= through) {
        ASSERT_TRUE(Apply(start_, event).ok());
      }
    }
    std::erase_if(events_, [&](const Event& event) { return event.seq <= through; });
    info_.first = events_.front().seq;
    info_.session = start_.session.session;
  }

 private:
  std::vector<Event> events_;
  JournalInfo info_;
  State start_;
};

using Journals = std::map<int, std::vector<Event>>;

Journals Make(const test::ReportJob& job) {
  Journals journals;
  const Status made = test::MakeReportJob(job, [&](int rank, const Event& event) { journals[rank].push_back(event); });
  EXPECT_TRUE(made.ok()) << made.message();
  return journals;
}

SessionTimeline Timeline(std::vector<Event> events, const TimelineLimits& limits = {}) {
  Memory reader(std::move(events));
  auto timeline = test::ReadTimeline(reader, limits);
  EXPECT_TRUE(timeline.ok()) << timeline.status().message();
  return *std::move(timeline);
}

test::ReportJob Small(bool fail = false) { return {.ranks = 3, .events = 4'000, .allocations = 24, .fail = fail}; }

// ---- memory over time ------------------------------------------------------------------------------------------------------

TEST(Timeline, series_equals_the_state_at_each_of_its_points) {
  for (const bool thin : {false, true}) {
    auto journals = Make(Small(true));
    for (const auto& [rank, events] : journals) {
      const SessionTimeline timeline = Timeline(events, {.points = thin ? 40U : 100'000U});
      ASSERT_TRUE(timeline.stopped.empty()) << timeline.stopped;
      ASSERT_GT(timeline.series.size(), 10U);
      State state;
      auto next = timeline.series.begin();
      for (const Event& event : events) {
        ASSERT_TRUE(Apply(state, event).ok());
        if (next == timeline.series.end() || next->seq != event.seq) continue;
        EXPECT_EQ(next->held, HeldIn(state)) << "event " << event.seq.value;
        EXPECT_EQ(next->time_ns, event.time_ns);
        ++next;
      }
      EXPECT_EQ(next, timeline.series.end()) << "a point without an event";
      EXPECT_EQ(timeline.series.back().held, HeldIn(state)) << "what is held at the end";
    }
  }
}

TEST(Timeline, every_change_is_a_point_when_there_is_room) {
  auto events = Make(Small())[0];
  const SessionTimeline timeline = Timeline(events, {.points = 100'000});
  State state;
  Held before{};
  std::uint64_t changes = 1;  // the first event
  for (const Event& event : events) {
    ASSERT_TRUE(Apply(state, event).ok());
    changes += HeldIn(state) != before ? 1 : 0;
    before = HeldIn(state);
  }
  EXPECT_EQ(timeline.series.size(), changes);
  EXPECT_EQ(timeline.changes, changes);
}

TEST(Timeline, thinned_series_keeps_the_highest_and_the_lowest_sum) {
  SeriesBuilder builder(60);
  std::mt19937 chance(7);
  Bytes highest = 0, lowest = ~Bytes{0};
  for (std::uint64_t i = 1; i <= 100'000; ++i) {
    Bytes own = 1'000'000 + chance() % 1000;
    if (i == 31'337) own = 9'000'000;  // a peak of one event
    if (i == 77'777) own = 3;          // a pause of one event
    highest = std::max(highest, own);
    lowest = std::min(lowest, own);
    builder.Add({.time_ns = i * 10, .seq = SequenceNumber{i}, .held = {own}});
  }
  const auto points = builder.Points();
  EXPECT_LE(points.size(), 60U);
  EXPECT_GE(points.size(), 25U) << "half of the room is used at least";
  const auto by_sum = [](const SeriesPoint& a, const SeriesPoint& b) { return Sum(a.held) < Sum(b.held); };
  const auto [low, high] = std::minmax_element(points.begin(), points.end(), by_sum);
  EXPECT_EQ(Sum(high->held), highest);
  EXPECT_EQ(high->seq, SequenceNumber{31'337});
  EXPECT_EQ(Sum(low->held), lowest);
  EXPECT_EQ(low->seq, SequenceNumber{77'777});
  EXPECT_EQ(points.front().seq, SequenceNumber{1});
  EXPECT_EQ(points.back().seq, SequenceNumber{100'000});
  EXPECT_TRUE(std::is_sorted(points.begin(), points.end(), [](const auto& a, const auto& b) { return a.seq < b.seq; }));
}

TEST(Timeline, a_pause_is_seen_however_long_the_job_is) {
  auto events = Make({.ranks = 3, .events = 40'000, .allocations = 24})[1];
  const SessionTimeline timeline = Timeline(events, {.points = 300});
  EXPECT_LE(timeline.series.size(), 300U);
  EXPECT_GT(timeline.changes, 2'000U);
  const auto own = static_cast<std::size_t>(MemoryClass::kOwn);
  ASSERT_GT(timeline.cycles.size(), 100U);
  for (std::size_t i = timeline.cycles.size() - 60; i < timeline.cycles.size(); ++i) {  // a quarter of the points is for them
    const Attempt& cycle = timeline.cycles[i];
    if (cycle.kind != CycleKind::kPause) continue;
    const bool seen = std::any_of(timeline.series.begin(), timeline.series.end(), [&](const SeriesPoint& p) {
      return p.held[own] == 0 && p.time_ns >= cycle.begun.time_ns && p.time_ns <= cycle.ended.time_ns + 1'000'000'000;
    });
    EXPECT_TRUE(seen) << NameOf(cycle);
  }
}

TEST(Timeline, parts_of_a_slab_count_once) {
  std::uint64_t clock = 1;
  test::Story story(0x51ab, 0, &clock);
  const AllocationId slab = story.Create(64 * kMiB);
  const Address address = story.Map(slab, 64 * kMiB);
  story.Then(SlabOpened{.slab = slab, .address = address, .dirty = {}});
  const AllocationId part = story.Create(2 * kMiB);
  story.Then(Placed{.allocation = part, .slab = slab, .offset = 4 * kMiB, .touched = false});
  const AllocationId left = story.Create(2 * kMiB);
  story.Then(Placed{.allocation = left, .slab = slab, .offset = 6 * kMiB, .touched = false});
  story.Then(Backed{.allocation = left, .handle = DriverHandle{7}});
  const SessionTimeline timeline = Timeline(story.events());
  ASSERT_TRUE(timeline.stopped.empty()) << timeline.stopped;
  EXPECT_EQ(DeviceBytes(timeline.series.back().held), 66 * kMiB);
  EXPECT_EQ(timeline.series.back().held, HeldIn(timeline.state));
  ASSERT_EQ(timeline.allocations.size(), 3U);
  EXPECT_EQ(timeline.allocations[0].kind, AllocationKind::kSlab);
  EXPECT_EQ(timeline.allocations[1].slab, slab);
  EXPECT_EQ(timeline.allocations[1].address, address + 4 * kMiB);
  EXPECT_FALSE(timeline.allocations[2].slab) << "it left the slab";
}

TEST(Timeline, allocations_say_which_communicator_they_were_made_for) {
  std::uint64_t clock = 1;
  test::Story story(0x51ab, 0, &clock);
  const CommunicatorId first{1}, second{2};
  story.Then(CommunicatorBegun{first, {}, "init", 0, 4});
  const AllocationId of_first = story.NextId();
  story.Then(AllocationCreated{of_first, 2 * kMiB, test::Story::Properties(), 0, {}, {}, {}, MemoryTag::kNccl, first});
  story.Then(CommunicatorReady{first, 0x1f2e, 0, 4, DeviceOrdinal{0}});
  story.Then(CommunicatorBegun{second, first, "split"});
  story.Then(CommunicatorEnded{second, "left out"});
  story.Create();
  story.Then(AllocationReleased{of_first});
  story.Then(CommunicatorSuspended{first, true});
  story.Then(CommunicatorEnded{first, "destroyed"});
  const SessionTimeline timeline = Timeline(story.events());
  ASSERT_TRUE(timeline.stopped.empty()) << timeline.stopped;
  ASSERT_EQ(timeline.allocations.size(), 2U);
  EXPECT_EQ(timeline.allocations[0].communicator, first);
  EXPECT_FALSE(timeline.allocations[1].communicator);
  ASSERT_EQ(timeline.communicators.size(), 2U) << "those that the state has forgotten, too";
  EXPECT_EQ(NameOf(first, timeline.communicators.at(first), timeline.communicators), "0x1f2e, 4 ranks, init, destroyed");
  EXPECT_EQ(NameOf(second, timeline.communicators.at(second), timeline.communicators),
            "communicator 2, ranks unknown, split of 0x1f2e, left out");
  const auto report = nlohmann::json::parse(ReportJson(JoinTimelines({timeline}), {}, "1", "today"));
  EXPECT_EQ(report.at("made_at"), "today");
  const auto& allocations = report["allocations"];
  const auto name = [&](std::size_t row) {
    return allocations["communicators"][allocations["columns"]["comm"][row].get<std::size_t>()];
  };
  EXPECT_EQ(name(0), "0x1f2e, 4 ranks, init, destroyed");
  EXPECT_EQ(name(1), "");
}

TEST(Timeline, journal_that_begins_with_a_snapshot_goes_on_from_its_state) {
  auto events = Make(Small())[0];
  const auto cut =
      std::find_if(events.begin(), events.end(), [](const Event& e) { return std::holds_alternative<CycleBegun>(e.body); });
  ASSERT_NE(cut, events.end());
  const SessionTimeline whole = Timeline(events);
  Memory reader(events);
  reader.DropThrough(SequenceNumber{cut->seq.value - 2});
  const auto rest = test::ReadTimeline(reader, {});
  ASSERT_TRUE(rest.ok());
  EXPECT_TRUE(rest->beginning_dropped);
  EXPECT_TRUE(rest->stopped.empty()) << rest->stopped;
  EXPECT_EQ(rest->series.back().held, whole.series.back().held);
  EXPECT_EQ(rest->cycles.size(), whole.cycles.size());
  EXPECT_EQ(rest->imports.begin()->second.bytes, whole.imports.begin()->second.bytes);
  EXPECT_EQ(rest->who.rank, 0);
}

TEST(Timeline, events_that_do_not_fit_end_the_memory_and_not_the_list) {
  auto events = Make(Small())[0];
  const std::uint64_t all = events.size();
  events.erase(events.begin() + 200);
  const SessionTimeline timeline = Timeline(events);
  EXPECT_NE(timeline.stopped.find("201"), std::string::npos) << timeline.stopped;
  EXPECT_EQ(timeline.events, all - 1);
  EXPECT_LE(timeline.series.back().seq.value, 200U);
  EXPECT_EQ(timeline.rows.back().last.value, all);
}

// ---- pauses and resumes ----------------------------------------------------------------------------------------------------

TEST(Timeline, cycles_have_their_phases_and_the_step_that_failed) {
  auto journals = Make(Small(true));
  const SessionTimeline victim = Timeline(journals[2]), other = Timeline(journals[0]);
  ASSERT_GE(victim.cycles.size(), 2U);
  const Attempt& pause = victim.cycles[victim.cycles.size() - 2];
  EXPECT_EQ(pause.kind, CycleKind::kPause);
  EXPECT_EQ(OutcomeOf(pause), Outcome::kDone);
  const std::vector<Attempt::PhaseTaken> phases = PhasesWithArrival(pause);
  ASSERT_EQ(phases.size(), 1 + PlanPause({}).phases.size()) << "the wait for the others, and those of the plan";
  EXPECT_GT(pause.begun.time_ns, pause.arrived.time_ns);
  for (const Attempt::PhaseTaken& phase : phases) {
    EXPECT_TRUE(phase.passed);
    EXPECT_LE(phase.begun.time_ns, phase.worked.time_ns);
    EXPECT_LE(phase.worked.time_ns, phase.decided.time_ns);
  }
  const auto own = static_cast<std::size_t>(MemoryClass::kOwn);
  EXPECT_GT(pause.before[own], 0U);
  EXPECT_EQ(pause.after[own], 0U);
  EXPECT_EQ(pause.steps[static_cast<std::size_t>(StepKind::kReleaseOwn)].count, 24U);

  const Attempt& resume = victim.cycles.back();
  EXPECT_EQ(resume.kind, CycleKind::kResume);
  EXPECT_EQ(OutcomeOf(resume), Outcome::kUndone);
  ASSERT_TRUE(resume.failed_step);
  EXPECT_EQ(resume.failed_step->step.kind, StepKind::kCreate);
  EXPECT_EQ(resume.failed_step->code, Code::kOutOfMemory);
  EXPECT_EQ(resume.decided->culprit, victim.info.session);
  EXPECT_EQ(OutcomeOf(other.cycles.back()), Outcome::kUndone);
  EXPECT_FALSE(other.cycles.back().failed_step);
  EXPECT_EQ(other.cycles.back().decided->culprit, victim.info.session);
  const auto noted =
      std::find_if(victim.allocations.begin(), victim.allocations.end(), [](const auto& a) { return !a.note.empty(); });
  ASSERT_NE(noted, victim.allocations.end());
  EXPECT_EQ(noted->id, resume.failed_step->step.allocation);
}

TEST(Timeline, cycle_that_never_began_names_who_did_not_come) {
  std::uint64_t clock = 1'000'000'000;
  test::Story here(0xa, 0, &clock), away(0xb, 1, &clock);
  here.Create();
  here.Then(PhaseBegun{PhaseKind::kPauseArrive});
  away.Create();
  here.Then(CycleFailed{CycleKind::kPause, 1, true, "waited 600 ms for rank 1"});
  away.Then(SessionClosed{"exit"});
  std::vector<SessionTimeline> sessions;
  sessions.push_back(Timeline(away.events()));
  sessions.push_back(Timeline(here.events()));
  const JobTimeline job = JoinTimelines(std::move(sessions));
  ASSERT_EQ(job.cycles.size(), 1U);
  EXPECT_EQ(job.cycles[0].absent, std::vector<SessionId>{away.id()});
  const Attempt& cycle = job.sessions[0].cycles[0];
  EXPECT_FALSE(cycle.begun);
  EXPECT_EQ(OutcomeOf(cycle), Outcome::kUndone);
}

TEST(Timeline, of_many_cycles_the_failed_and_the_last_stay) {
  std::uint64_t clock = 1;
  test::Story story(0xc1c1e, 0, &clock);
  for (std::uint64_t i = 1; i <= 1'000; ++i) {
    story.Then(CycleBegun{CycleKind::kPause, i, {story.id()}});
    if (i == 500) {
      story.Then(CycleFailed{CycleKind::kPause, i, true, "no"});
      continue;
    }
    story.Then(CycleDone{CycleKind::kPause, i, 1});
    story.Then(CycleBegun{CycleKind::kResume, i, {story.id()}});
    story.Then(CycleDone{CycleKind::kResume, i, 1});
  }
  const SessionTimeline timeline = Timeline(story.events(), {.cycles = 40});
  EXPECT_LE(timeline.cycles.size(), 40U);
  EXPECT_GE(timeline.cycles.size(), 30U);
  EXPECT_EQ(timeline.cycles.size() + timeline.story.forgotten.count, 1'999U);
  EXPECT_EQ(timeline.cycles.front().cycle, 1U);
  EXPECT_EQ(timeline.cycles.back().cycle, 1'000U);
  EXPECT_EQ(timeline.done.pauses, 999U);
  EXPECT_EQ(timeline.done.failures, 1U);
  EXPECT_TRUE(std::any_of(timeline.cycles.begin(), timeline.cycles.end(),
                          [](const auto& c) { return OutcomeOf(c) == Outcome::kUndone; }));
}

TEST(Timeline, the_same_pause_of_all_ranks_is_one) {
  auto journals = Make(Small(true));
  std::vector<SessionTimeline> sessions;
  for (int rank : {2, 0, 1}) sessions.push_back(Timeline(journals[rank]));
  const JobTimeline job = JoinTimelines(std::move(sessions));
  ASSERT_EQ(job.sessions.size(), 3U);
  EXPECT_EQ(job.sessions[0].who.rank, 0) << "by rank";
  EXPECT_EQ(job.cycles.size(), job.sessions[0].cycles.size());
  for (const JobCycle& cycle : job.cycles) {
    EXPECT_EQ(cycle.parts.size(), 3U);
    EXPECT_TRUE(cycle.absent.empty());
  }
  EXPECT_TRUE(job.notes.empty());
}

TEST(Timeline, hosts_are_put_on_one_clock_by_their_wall_clocks) {
  std::uint64_t clock = 1'000'000'000, other_clock = 77'000'000'000'000;
  test::Story a(0xa, 0, &clock), b(0xb, 1, &other_clock);
  auto& opened = std::get<SessionOpened>(b.events()[0].body);
  opened.host = "beta";
  opened.boot_id = "boot-2";
  opened.realtime_ns += 5'000'000'000;  // five seconds later
  std::vector<SessionTimeline> sessions;
  sessions.push_back(Timeline(a.events()));
  sessions.push_back(Timeline(b.events()));
  const JobTimeline job = JoinTimelines(std::move(sessions));
  EXPECT_EQ(static_cast<std::int64_t>(job.sessions[1].first_ns) + job.offsets_ns[1], 5'000'000'000);
  EXPECT_EQ(job.notes.size(), 1U) << "said on the page";
}

TEST(Timeline, a_host_without_a_wall_clock_begins_with_the_job_and_the_page_says_so) {
  std::uint64_t clock = 1'000'000'000, other_clock = 77'000'000'000'000;
  test::Story a(0xa, 0, &clock), b(0xb, 1, &other_clock);
  auto& opened = std::get<SessionOpened>(b.events()[0].body);
  opened.boot_id = "boot-2";
  opened.realtime_ns = 0;
  const JobTimeline job = JoinTimelines({Timeline(a.events()), Timeline(b.events())});
  EXPECT_EQ(static_cast<std::int64_t>(job.sessions[1].first_ns) + job.offsets_ns[1], 0);
  EXPECT_TRUE(job.wall_known);
  ASSERT_EQ(job.notes.size(), 2U);
  EXPECT_NE(job.notes[1].find("did not note the wall clock"), std::string::npos) << job.notes[1];
}

// ---- allocations and references --------------------------------------------------------------------------------------------

TEST(Timeline, of_many_allocations_those_alive_stay_and_the_rest_is_summed_up) {
  std::uint64_t clock = 1;
  test::Story story(0xa110c, 0, &clock);
  Bytes freed = 0;
  std::vector<AllocationId> alive;
  for (int i = 0; i < 500; ++i) {
    const Bytes bytes = static_cast<Bytes>(1 + i % 50) * kMiB;
    const AllocationId id = story.Create(bytes);
    if (i % 50 == 0) {
      alive.push_back(id);
      continue;
    }
    story.Then(AllocationReleased{.allocation = id});
    freed += bytes;
  }
  const SessionTimeline timeline = Timeline(story.events(), {.allocations = 40});
  EXPECT_EQ(timeline.allocations.size(), 40U);
  EXPECT_EQ(timeline.allocations_total, 500U);
  Bytes listed = 0;
  std::size_t there = 0;
  for (const AllocationRecord& a : timeline.allocations) {
    there += a.ended ? 0 : 1;
    listed += a.ended ? a.bytes : 0;
  }
  EXPECT_EQ(there, alive.size());
  EXPECT_EQ(listed + timeline.allocations_left_out_bytes, freed) << "nothing is lost from the sum";
}

TEST(Timeline, references_count_what_is_held_and_what_was_held_at_most) {
  test::Job job;
  job.Share();
  job.LetGo();
  job.Close();
  const SessionTimeline importer = Timeline(job.importer.events()), owner = Timeline(job.owner.events());
  const LinkRecord& held = importer.imports.at(job.owner.id());
  EXPECT_EQ(held.bytes, 0U);
  EXPECT_EQ(held.most_bytes, 2 * kMiB);
  EXPECT_EQ(held.total, 1U);
  EXPECT_EQ(owner.importers.at(job.importer.id()).most_bytes, 2 * kMiB);
  EXPECT_EQ(owner.importers.at(job.importer.id()).bytes, 0U);
}

// ---- the list of events ----------------------------------------------------------------------------------------------------

std::uint64_t Accounted(const std::vector<EventRow>& rows) {
  std::uint64_t count = 0, next = rows.empty() ? 0 : rows.front().first.value;
  for (const EventRow& row : rows) {
    EXPECT_EQ(row.first.value, next) << "no hole and no overlap";
    EXPECT_EQ(row.last.value - row.first.value + 1, row.count);
    next = row.last.value + 1;
    count += row.count;
    if (row.event) continue;
    std::uint64_t of_kinds = 0;
    for (const auto& [kind, n] : row.kinds) of_kinds += n;
    EXPECT_EQ(of_kinds, row.count);
  }
  return count;
}

TEST(Rows, all_events_are_listed_when_there_is_room) {
  const auto events = Make(Small())[0];
  const SessionTimeline timeline = Timeline(events, {.rows = 100'000});
  EXPECT_EQ(timeline.rows.size(), events.size());
  EXPECT_TRUE(std::all_of(timeline.rows.begin(), timeline.rows.end(), [](const auto& row) { return row.event.has_value(); }));
}

TEST(Rows, every_event_is_listed_or_counted_at_its_place) {
  const auto events = Make({.ranks = 3, .events = 30'000, .allocations = 24, .fail = true})[2];
  for (const std::size_t limit : {200U, 1'000U, 5'000U}) {
    const SessionTimeline timeline = Timeline(events, {.rows = limit});
    EXPECT_LE(timeline.rows.size(), limit);
    EXPECT_EQ(Accounted(timeline.rows), events.size());
  }
}

TEST(Rows, what_surrounds_a_failure_is_listed) {
  const auto events = Make({.ranks = 3, .events = 30'000, .allocations = 24, .fail = true})[2];
  const SessionTimeline timeline = Timeline(events, {.rows = 400});
  const auto failed =
      std::find_if(events.begin(), events.end(), [](const Event& e) { return std::holds_alternative<StepFailed>(e.body); });
  ASSERT_NE(failed, events.end());
  for (std::uint64_t seq = failed->seq.value - 20; seq <= failed->seq.value + 10; ++seq) {
    EXPECT_TRUE(std::any_of(timeline.rows.begin(), timeline.rows.end(),
                            [&](const EventRow& row) { return row.event && row.event->seq.value == seq; }))
        << "event " << seq;
  }
}

TEST(Rows, more_failures_than_room_are_counted_too) {
  RowBuilder builder(200);
  for (std::uint64_t i = 1; i <= 5'000; ++i)
    builder.Add({.seq = SequenceNumber{i}, .time_ns = i, .body = CycleFailed{CycleKind::kPause, i, true, "no"}});
  const auto rows = builder.Take();
  EXPECT_LE(rows.size(), 200U);
  EXPECT_EQ(Accounted(rows), 5'000U);
  EXPECT_TRUE(rows.front().event && rows.back().event) << "the first and the last stay";
}

// ---- the page --------------------------------------------------------------------------------------------------------------

// ---- votes, ends, shortages ------------------------------------------------------------------------------------------------

TEST(Timeline, a_vote_ends_the_work_of_a_phase_and_says_what_it_was) {
  auto with = Make(Small(true));
  const SessionTimeline victim = Timeline(with[2]);
  for (const Attempt::PhaseTaken& phase : victim.cycles.front().phases) {
    if (phase.phase == PhaseKind::kPauseArrive) continue;
    EXPECT_TRUE(phase.voted);
    EXPECT_TRUE(phase.voted_for);
  }
  std::size_t against = 0;
  for (const Attempt::PhaseTaken& phase : victim.cycles.back().phases) against += phase.voted && !phase.voted_for ? 1 : 0;
  EXPECT_EQ(against, 1U);
  const auto vote = std::ranges::find_if(with[2], [](const Event& e) { return std::holds_alternative<VoteCast>(e.body); });
  ASSERT_NE(vote, with[2].end());
  EXPECT_TRUE(std::ranges::any_of(victim.cycles.front().phases,
                                  [&](const Attempt::PhaseTaken& phase) { return phase.worked.time_ns == vote->time_ns; }));
}

TEST(Timeline, the_strip_has_every_pause_and_resume_in_bounded_room) {
  std::uint64_t clock = 1;
  test::Story story(0xc1c1e, 0, &clock);
  constexpr std::uint64_t kMany = 20'000;
  for (std::uint64_t i = 1; i <= kMany; ++i) {
    story.Then(CycleBegun{CycleKind::kPause, i, {story.id()}});
    const bool fails = i % 1'000 == 0;
    if (fails) story.Then(CycleFailed{CycleKind::kPause, i, true, "no"});
    if (!fails) story.Then(CycleDone{CycleKind::kPause, i, 1});
    if (!fails) story.Then(CycleBegun{CycleKind::kResume, i, {story.id()}});
    if (!fails) story.Then(CycleDone{CycleKind::kResume, i, 1});
  }
  const SessionTimeline timeline = Timeline(story.events(), {.rows = 200, .cycles = 20});
  EXPECT_EQ(timeline.cycles.size(), 20U);
  EXPECT_LE(timeline.strip.size(), SessionTimeline::kStrip);
  EXPECT_GT(timeline.strip.size(), SessionTimeline::kStrip / 4);
  std::uint64_t count = 0, failed = 0, before_ns = 0;
  for (const StripRecord& record : timeline.strip) {
    count += record.count;
    failed += record.failed;
    EXPECT_GE(record.arrived_ns, before_ns) << "in order, and none within another";
    before_ns = record.ended_ns;
  }
  EXPECT_EQ(count, 2 * kMany - kMany / 1'000);
  EXPECT_EQ(failed, kMany / 1'000);
  EXPECT_EQ(timeline.strip.front().number, 1U);
}

TEST(Timeline, a_crash_is_dated_by_the_first_who_noticed_it) {
  std::uint64_t clock = 1'000'000'000;
  test::Story dead(0xd, 0, &clock), near(0xe, 1, &clock), far(0xf, 2, &clock);
  const auto sees = [&](test::Story& by, EventBody body, std::uint64_t after_ns) {
    clock += after_ns;
    by.Then(std::move(body));
  };
  sees(near, ProcessSeen{.session = dead.id(), .pid = 1000, .state = "stopped", .where = "in the CUDA driver"}, 1'000'000'000);
  sees(near, ProcessSeen{.session = dead.id(), .pid = 1000, .state = "gone", .exit_code = 137}, 9'000'000'000);
  const std::uint64_t noticed = near.events().back().time_ns;
  sees(far, PeerConnected{.peer = dead.id(), .host = "alpha", .pid = 1000}, 0);
  sees(far, PeerLost{dead.id(), kPeerDied}, 5'000'000'000);
  std::vector<SessionTimeline> sessions;
  for (test::Story* story : {&far, &near}) sessions.push_back(Timeline(story->events()));
  sessions.push_back(Timeline(dead.events()));
  sessions.back().info.status = SessionStatus::kCrashed;
  const JobTimeline job = JoinTimelines(std::move(sessions));
  ASSERT_EQ(job.deaths.size(), 1U);
  const auto& [session, notice] = *job.deaths.begin();
  EXPECT_EQ(job.sessions[session].info.session, dead.id());
  EXPECT_EQ(job.sessions[notice.by].info.session, near.id());
  EXPECT_EQ(notice.at_ns, WrappedSum(noticed, job.offsets_ns[notice.by]));
  const std::vector<SeenRecord>& seen = job.sessions[notice.by].seen;
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_FALSE(seen[0].dead);
  EXPECT_EQ(seen[0].text, "stopped in the CUDA driver");
  EXPECT_EQ(seen[1].text, "gone, ended by signal 9");
}

TEST(Timeline, what_came_of_requests_from_outside_and_freezes_are_kept) {
  std::uint64_t clock = 1'000'000'000;
  test::Story story(0xd, 0, &clock);
  story.Then(RequestSeen{1, CycleKind::kPause, 77, 12, false});
  story.Then(SafepointReached{1, 12});
  story.Then(RequestEnded{1, CycleKind::kPause, Code::kOk, "", 4096});
  story.Then(Frozen{1'000'000, 3'000'000, 4096, ""});
  const SessionTimeline timeline = Timeline(story.events());
  const std::vector<Dated<std::string>>& results = timeline.story.outside.results;
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results[0].event, "request 1 to pause done, 4 KiB given back");
  EXPECT_EQ(results[1].event, "was frozen by the driver for 2 ms, 4 KiB moved out");
  EXPECT_EQ(results[1].at.seq, story.events().back().seq);
}

TEST(Timeline, a_session_that_closed_in_order_did_not_die) {
  std::uint64_t clock = 1'000'000'000;
  test::Story left(0xd, 0, &clock), other(0xe, 1, &clock);
  left.Then(SessionClosed{.reason = "exit", .exit_code = 1});
  other.Then(ProcessSeen{.session = left.id(), .pid = 1000, .state = "gone"});
  std::vector<SessionTimeline> sessions;
  for (test::Story* story : {&left, &other}) sessions.push_back(Timeline(story->events()));
  sessions[0].info.status = SessionStatus::kClosed;
  const JobTimeline job = JoinTimelines(std::move(sessions));
  EXPECT_TRUE(job.deaths.empty());
  EXPECT_EQ(job.sessions[0].story.closed->event.exit_code, 1);
}

TEST(Shortages, holders_are_those_of_the_same_device_at_that_moment) {
  std::uint64_t clock = 1'000'000'000;
  test::Story failed(0xa, 0, &clock), beside(0xb, 1, &clock), elsewhere(0xc, 2, &clock);
  for (test::Story* story : {&failed, &beside})  // two processes of one device, which each calls 0
    std::get<SessionOpened>(story->events()[0].body).gpu_uuids = {"GPU-shared"};
  failed.Create(4 * test::kMiB);
  beside.Create(6 * test::kMiB);
  elsewhere.Create(8 * test::kMiB);
  failed.Then(PhaseBegun{PhaseKind::kPauseArrive});
  failed.Then(CycleBegun{CycleKind::kPause, 1, {failed.id()}});
  failed.Then(StepBegun{{.kind = StepKind::kCheckMemory, .bytes = 4 * test::kMiB, .device = DeviceOrdinal{0}}});
  failed.Then(StepFailed{
      {.kind = StepKind::kCheckMemory, .bytes = 4 * test::kMiB, .device = DeviceOrdinal{0}}, Code::kOutOfMemory, 2, "full"});
  const SequenceNumber seq = failed.events().back().seq;
  failed.Then(CycleFailed{CycleKind::kPause, 1, true, "full"});
  beside.Create(16 * test::kMiB);  // too late to count
  std::map<SessionId, std::unique_ptr<Memory>> readers;
  std::vector<SessionTimeline> sessions;
  for (test::Story* story : {&failed, &beside, &elsewhere}) {
    sessions.push_back(Timeline(story->events()));
    sessions.back().info.status = SessionStatus::kLive;
    readers[story->id()] = std::make_unique<Memory>(story->events());
  }
  JobTimeline job = JoinTimelines(std::move(sessions));
  FindShortages(job, [&](std::size_t session) { return readers.at(job.sessions[session].info.session).get(); });
  ASSERT_EQ(job.shortages.size(), 1U);
  const MemoryShortage& shortage = job.shortages[0];
  EXPECT_EQ(shortage.session, 0U);
  EXPECT_EQ(shortage.seq, seq);
  EXPECT_EQ(shortage.uuid, "GPU-shared");
  ASSERT_EQ(shortage.holders.size(), 2U);
  EXPECT_EQ(shortage.holders[0].held, 4 * test::kMiB);
  EXPECT_EQ(shortage.holders[1].session, 1U);
  EXPECT_EQ(shortage.holders[1].held, 6 * test::kMiB);

  const auto without = [&](std::initializer_list<std::size_t> unread) {  // journals that cannot be opened
    job.shortages.clear();
    FindShortages(job, [&](std::size_t session) {
      return std::ranges::count(unread, session) != 0 ? nullptr : readers.at(job.sessions[session].info.session).get();
    });
    return job.shortages.empty() ? 0 : job.shortages[0].holders.size();
  };
  EXPECT_EQ(without({1}), 1U);
  EXPECT_EQ(without({0}), 0U);
}

JobTimeline SmallJob() {
  auto journals = Make(Small(true));
  std::vector<SessionTimeline> sessions;
  for (auto& [rank, events] : journals) sessions.push_back(Timeline(std::move(events)));
  return JoinTimelines(std::move(sessions));
}

TEST(ReportPage, what_a_journal_says_cannot_end_the_script_or_fill_another_place) {
  JobTimeline job = SmallJob();
  job.sessions[0].who.host = "</script><script>alert(1)</script>@DATA@";
  Verdict verdict;
  verdict.headline = "</title><b>@DATA@ & \"quotes\"";
  const std::string page =
      ReportPage("<title>@TITLE@</title>@WITHOUT_SCRIPT@<script>@DATA@</script>", job, verdict, {}, "1", "today");
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  EXPECT_EQ(page.find("<b>"), std::string::npos);
  EXPECT_NE(page.find("&lt;/title&gt;&lt;b&gt;@DATA@ &amp; &quot;quotes&quot;"), std::string::npos);
  EXPECT_EQ(page.find("</script>"), page.size() - 9) << "only the page's own end";
}

TEST(ReportPage, the_data_of_a_small_job_are_these) {
  test::CycleJob job;
  job.Pause();
  std::vector<SessionTimeline> sessions;
  for (test::Story* story : {&job.owner, &job.importer}) sessions.push_back(Timeline(story->events()));
  auto data = nlohmann::json::parse(ReportJson(JoinTimelines(std::move(sessions)), {}, "1", "today"));
  data["sessions"][0].erase("series");  // which has tests of its own
  const std::pair<const char*, const char*> expected[] = {
      {"/sessions/0", R"(
    {"id": "00000000000a11ce", "name": "rank 0", "rank": 0, "pid": 1000, "host": "alpha", "gpus": ["GPU-0"], "nccl": "2.28.9", "driver": "sim", "amem":
    "0.1.0", "layout": "direct", "content": "preserve", "status": "closed", "lifecycle": "paused", "broken": "", "stopped": "", "damaged": 0, "damage":
    "", "incomplete": "", "torn": false, "dropped": false, "events": 31, "first": 1, "start": 0, "end": 53000000, "kinds": [[0,1], [6,1], [8,1], [11,1], [13,1], [14,1],
    [16,1], [18,1], [36,1], [37,6], [38,6], [40,5], [41,4], [42,1]], "pauses": 1, "resumes": 0, "failed": 0, "most": [2097152,0,0,0,0,0,0], "peak":
    [2000000,2097152], "changes": 3, "allocations": 1, "seen": {"by": [], "threads": []}, "died": null, "refused": 0, "outside": [], "exit": -1, "as_of":
    null})"},
      {"/cycles/0", R"(
    {"kind": 0, "tag": "", "parts": [{"s": 0, "n": 1, "a": 13000000, "b": 15000000, "e": 53000000, "q": [10,31], "o": 0, "d": [2097152,0], "p":
    [[0,13000000,13000000,15000000,1,0,0], [0,17000000,19000000,23000000,1,1,0], [1,25000000,27000000,29000000,1,1,0],
    [3,31000000,37000000,43000000,1,3,0], [4,45000000,47000000,51000000,1,1,0]], "st": [[0,1,1000000], [1,1,1000000], [2,1,1000000], [4,1,1000000],
    [11,1,1000000], [12,1,1000000]]}, {"s": 1, "n": 1, "a": 14000000, "b": 16000000, "e": 54000000, "q": [7,24], "o": 0, "d": [0,0], "p":
    [[0,14000000,14000000,16000000,1,0,0], [0,20000000,22000000,24000000,1,1,0], [1,28000000,28000000,30000000,1,0,0],
    [3,38000000,42000000,44000000,1,2,0], [4,48000000,50000000,52000000,1,1,0]], "st": [[0,1,1000000], [2,1,1000000], [3,1,1000000], [11,1,1000000]]}],
    "absent": []})"},
      {"/allocations", R"(
    {"columns": {"s": [0,1], "kind": [0,1], "id": [1,1], "addr": ["7f0010000000", "7f0010000000"], "bytes": [2097152,2097152], "loc": [0,0], "site":
    [0,0], "q": [2,2], "t": [2000000,9000000], "qe": [0,0], "te": [0,0], "peer": [-1,0], "pid": [0,1], "imp": [1,0], "most": [1,0], "state": [1,1],
    "comm": [0,0], "slab": [0,0]}, "sites": [""], "locations": ["device 0"], "communicators": [""], "notes": {}, "total": 2, "left_out": 0,
    "left_out_bytes": 0})"},
      {"/strip", R"({"t": [13000000], "d": [40000000], "k": [0], "m": [1], "n": [1], "f": [0]})"}};
  for (const auto& [where, what] : expected)
    EXPECT_EQ(data[nlohmann::json::json_pointer(where)], nlohmann::json::parse(what)) << where;
}

TEST(ReportPage, a_pause_that_has_not_begun_has_no_number) {
  test::CycleJob job;
  job.Arrive(job.owner, CycleKind::kPause);
  auto data = nlohmann::json::parse(ReportJson(JoinTimelines({Timeline(job.owner.events())}), {}, "1", "today"));
  ASSERT_EQ(data["cycles"].size(), 1U);
  EXPECT_EQ(data["cycles"][0]["parts"][0]["n"], 0);
}

TEST(ReportPage, a_resume_that_failed_has_its_message_who_was_to_blame_and_the_step) {
  auto journals = Make(Small(true));
  std::vector<SessionTimeline> sessions;
  for (const int rank : {0, 2}) sessions.push_back(Timeline(journals[rank]));
  const JobTimeline job = JoinTimelines(std::move(sessions));
  auto last = nlohmann::json::parse(ReportJson(job, {}, "1", "today"))["cycles"].back()["parts"];
  ASSERT_EQ(last.size(), 2U);
  for (std::size_t s = 0; s < 2; ++s) {
    const Attempt& of = job.sessions[s].cycles.back();
    EXPECT_FALSE(of.failure.empty());
    EXPECT_EQ(last[s]["m"], of.failure);
    EXPECT_EQ(last[s]["c"], 1) << "the second of these";
    EXPECT_EQ(last[s].contains("f"), s == 1);
  }
  const auto& step = *job.sessions[1].cycles.back().failed_step;
  const nlohmann::json expected = {
      {"step", ToText(step.step)}, {"code", ToText(step.code)}, {"message", step.message}, {"seq", step.at.seq.value}};
  EXPECT_EQ(last[1]["f"], expected);
}

TEST(ReportPage, events_that_are_only_counted_name_their_kinds) {
  std::uint64_t clock = 1;
  JobTimeline job = JoinTimelines({Timeline(test::Story(0xa, 0, &clock).events())});
  EventRow row{.first = SequenceNumber{7}, .count = 2'003};
  row.kinds = {{6, 2'000}, {8, 2}, {11, 1}};
  const std::string text = "2 000 \u00d7 range reserved, 2 \u00d7 allocation created, 1 \u00d7 mapped",
                    one = ", 1 \u00d7 mapped";
  for (const auto& [kinds, named] :
       {std::pair(3U, text), {6U, text + one + one + one}, {8U, text + one + one + one + " and 2 other kinds"}}) {
    row.kinds.resize(kinds, {11, 1});
    job.sessions[0].rows = {row};
    EXPECT_EQ(nlohmann::json::parse(ReportJson(job, {}, "1", "today"))["events"]["columns"]["x"][0], named);
  }
}

TEST(ReportPage, bytes_that_are_no_text_do_not_break_the_data) {
  JobTimeline job = SmallJob();
  job.sessions[0].who.host = "\xff\xfe broken \xc3";
  EXPECT_NE(ReportJson(job, {}, "1", "today").find("broken"), std::string::npos);
}

TEST(ReportPage, lists_get_shorter_until_the_page_fits) {
  const std::size_t whole = ReportPage("@DATA@", SmallJob(), {}, {}, "1", "today").size();
  const std::size_t small = ReportPage("@DATA@", SmallJob(), {}, {.page_bytes = whole / 2}, "1", "today").size();
  EXPECT_LE(small, whole / 2);
}

TEST(ReportPage, limits_are_shared_by_the_sessions) {
  EXPECT_LE(LimitsOf(64, {}).rows * 64, ReportLimits{}.rows);
  EXPECT_LE(LimitsOf(8, {}).points, 1500U);
  EXPECT_EQ(LimitsOf(8, {}).points, 1500U);
  EXPECT_GT(LimitsOf(0, {}).rows, 0U);
}

}  // namespace
}  // namespace amem
