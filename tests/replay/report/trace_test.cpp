// Traces: what viewers drop without a word, or show wrongly, is not in them.
#include "replay/report/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/replay/job/memory_reader.h"
#include "tests/replay/job/scripted_journal.h"
#include "tests/replay/report/report_job.h"

namespace amem {
namespace {

using Json = nlohmann::json;
using Sessions = std::map<int, std::vector<Event>>;

Result<TraceSummary> WriteTraceOf(const Sessions& sessions, const TraceWindow& window, std::string& text) {
  std::vector<std::unique_ptr<JournalReader>> readers;
  for (const auto& [rank, events] : sessions) {
    const SessionId session = std::get<SessionOpened>(events.front().body).session;
    readers.push_back(std::make_unique<test::MemoryReader>(events, session, SessionStatus::kClosed));
  }
  return WriteTrace(
      readers, [&](std::string_view piece) { text += piece; }, window);
}

std::vector<Json> Trace(const Sessions& sessions, const TraceWindow& window = {}) {
  std::string text;
  const auto summary = WriteTraceOf(sessions, window, text);
  EXPECT_TRUE(summary.ok()) << summary.status().message();
  return Json::parse(text)["traceEvents"];
}

std::vector<Json> TraceOfAJobThatFailed() {
  Sessions sessions;
  const Status made = test::MakeReportJob({.ranks = 3, .events = 1'500, .allocations = 24, .fail = true},
                                          [&](int rank, const Event& event) { sessions[rank].push_back(event); });
  EXPECT_TRUE(made.ok()) << made.message();
  return Trace(sessions);
}

std::int64_t Nanoseconds(const Json& microseconds) { return std::llround(microseconds.get<double>() * 1000); }

struct Span {
  std::int64_t from, to;
};
using Track = std::pair<std::int64_t, std::int64_t>;  // process, thread
Track TrackOf(const Json& e) { return {e["pid"], e["tid"]}; }

std::map<Track, std::vector<Span>> Slices(const std::vector<Json>& trace) {
  std::map<Track, std::vector<Span>> slices;
  for (const Json& e : trace) {
    if (e["ph"] != "X") continue;
    const std::int64_t from = Nanoseconds(e["ts"]);
    slices[TrackOf(e)].push_back({from, from + Nanoseconds(e["dur"])});
  }
  return slices;
}

TEST(Trace, slices_of_a_thread_lie_within_each_other_or_apart) {
  std::size_t all = 0;
  for (auto& [track, spans] : Slices(TraceOfAJobThatFailed())) {
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return a.from != b.from ? a.from < b.from : a.to > b.to; });
    std::vector<Span> around;
    for (const Span& span : spans) {
      while (!around.empty() && around.back().to <= span.from) around.pop_back();
      EXPECT_TRUE(around.empty() || span.to <= around.back().to) << track.second << " at " << span.from;
      around.push_back(span);
      ++all;
    }
  }
  EXPECT_GT(all, 500U);
}

TEST(Trace, communicators_are_marked_when_they_are_ready_suspended_resumed_and_ended) {
  std::uint64_t clock = 1'000'000;
  test::Story story(0x51ab, 0, &clock);
  const CommunicatorId id{1};
  story.Then(CommunicatorBegun{id, {}, "init", 0, 4});
  story.Then(CommunicatorReady{id, 0x1f2e, 0, 4, DeviceOrdinal{0}});
  story.Then(CommunicatorSuspended{id, true});
  story.Then(CommunicatorSuspended{id, false});
  story.Then(CommunicatorEnded{id, "aborted"});
  std::vector<std::string> marks;
  for (const Json& event : Trace({{0, story.events()}})) {
    if (event["ph"] == "i") marks.push_back(event["name"]);
  }
  EXPECT_EQ(marks, (std::vector<std::string>{"communicator ready", "communicator suspended", "communicator resumed",
                                             "communicator ended"}));
}

TEST(Trace, exports_that_follow_within_a_microsecond_do_not_cross) {
  std::uint64_t clock = 0;
  test::Story story(5, 0, &clock);
  const AllocationId id = story.Create();
  story.Then(Exported{id});
  for (std::uint64_t peer = 10; peer < 14; ++peer) {
    story.Then(ReferenceAdded{id, SessionId{peer}, AllocationId{1}});
    story.events().back().time_ns = story.events()[story.events().size() - 2].time_ns + 300;
  }
  auto slices = Slices(Trace({{0, story.events()}}));
  ASSERT_EQ(slices.size(), 1U);
  const auto& spans = slices.begin()->second;
  ASSERT_EQ(spans.size(), 4U);
  for (std::size_t i = 1; i < spans.size(); ++i) EXPECT_GE(spans[i].from, spans[i - 1].to);
}

// Perfetto leaves out arrows whose id is no number of 64 bits, and arrows that do not touch a slice.
TEST(Trace, arrows_have_numbers_and_go_from_an_export_to_a_later_import) {
  const std::vector<Json> trace = TraceOfAJobThatFailed();
  std::set<std::pair<Track, std::int64_t>> begins;
  for (const auto& [track, spans] : Slices(trace)) {
    for (const Span& span : spans) {
      if (span.to > span.from) begins.emplace(track, span.from);
    }
  }
  const std::regex number("0x[0-9a-f]{1,16}");
  std::map<std::string, const Json*> starts, ends;
  for (const Json& e : trace) {
    if (e["ph"] != "s" && e["ph"] != "f") continue;
    const std::string id = e["id"];
    EXPECT_TRUE(std::regex_match(id, number)) << id;
    EXPECT_TRUE(begins.contains({TrackOf(e), Nanoseconds(e["ts"])})) << e;
    EXPECT_TRUE((e["ph"] == "s" ? starts : ends).emplace(id, &e).second) << id << " is there twice";
  }
  EXPECT_GT(starts.size(), 20U);
  ASSERT_EQ(starts.size(), ends.size());
  for (const auto& [id, start] : starts) {
    ASSERT_TRUE(ends.contains(id)) << id;
    EXPECT_LT(Nanoseconds((*start)["ts"]), Nanoseconds((*ends[id])["ts"]));
    EXPECT_NE((*start)["pid"], (*ends[id])["pid"]);
  }
}

TEST(Trace, a_counter_changes_when_memory_does_and_not_after_the_silence_that_follows) {
  std::uint64_t clock = 0;
  test::Story story(5, 0, &clock);
  story.Create();
  story.Create(8 * test::kMiB);
  const std::uint64_t created = clock;
  clock += 3'600'000'000'000;  // an hour
  story.Create();
  const std::uint64_t begin = story.events().front().time_ns;
  std::map<std::int64_t, double> held;
  for (const Json& e : Trace({{0, story.events()}})) {
    if (e["ph"] == "C") held[Nanoseconds(e["ts"])] = e["args"]["held"];
  }
  EXPECT_EQ(held[static_cast<std::int64_t>(created - begin)], 10);
  EXPECT_EQ(held.rbegin()->second, 12);
}

TEST(Trace, a_phase_within_a_pause_is_named_without_it_and_the_wait_before_with_it) {
  std::map<std::string, std::set<std::string>> names;
  for (const Json& e : TraceOfAJobThatFailed()) {
    if (e["ph"] == "X") names[e["cat"]].insert(e["name"]);
  }
  for (const char* name : {"pause: arrive", "resume: arrive", "save", "release", "verify"}) {
    EXPECT_TRUE(names["phase"].contains(name)) << name;
  }
  EXPECT_FALSE(names["phase"].contains("pause: save"));
  EXPECT_TRUE(names["cycle"].contains("pause 1"));
}

TEST(Trace, a_tenth_of_a_mebibyte_is_not_shown_as_none) {
  std::uint64_t clock = 0;
  test::Story story(5, 0, &clock);
  story.Then(HostAllocated{Address{0x1000}, 64 << 10, 0, false});
  const auto drawn = [&] {
    std::map<std::string, std::set<double>> values;
    for (const Json& e : Trace({{0, story.events()}})) {
      if (e["ph"] == "C" && e["args"].contains("value")) values[e["name"]].insert(e["args"]["value"].get<double>());
    }
    return values;
  };
  EXPECT_EQ(drawn().at("pinned host memory (MiB)"), std::set<double>{0.062});
  EXPECT_FALSE(drawn().contains("kept in a pause (MiB)"));
  story.Create();
  story.Then(EverythingKept{"a copy of NCCL past AMem's sight"});
  EXPECT_EQ(drawn().at("kept in a pause (MiB)"), std::set<double>{2});
}

TEST(Trace, processes_have_their_pids_and_two_hosts_may_have_the_same) {
  std::uint64_t clock = 0;
  Sessions sessions;
  for (int rank = 0; rank < 3; ++rank) {
    test::Story story(5 + static_cast<std::uint64_t>(rank), rank, &clock);
    std::get<SessionOpened>(story.events().front().body).pid = rank == 0 ? 17 : 42;
    sessions[rank] = story.events();
  }
  std::map<std::string, std::int64_t> processes;
  for (const Json& e : Trace(sessions)) {
    if (e["name"] == "process_name") processes[e["args"]["name"]] = e["pid"];
  }
  ASSERT_EQ(processes.size(), 3U);
  EXPECT_EQ(processes["rank 0 (pid 17 on host alpha)"], 17);
  EXPECT_EQ(processes["rank 1 (pid 42 on host alpha)"], 42);
  ASSERT_TRUE(processes.contains("rank 2 (pid 42 on host alpha)"));
  EXPECT_NE(processes["rank 2 (pid 42 on host alpha)"], 42);
}

TEST(Trace, strings_of_a_journal_may_hold_any_bytes) {
  std::uint64_t clock = 0;
  test::Story story(5, 0, &clock);
  std::get<SessionOpened>(story.events().front().body).host = "a\tb\x01\"\\\xff\u00fc";
  story.Then(SessionBroken{"line one\nline two\xc3"});
  std::set<std::string> texts;
  for (const Json& e : Trace({{0, story.events()}})) {
    if (e["name"] == "process_name") texts.insert(e["args"]["name"]);
    if (e["ph"] == "i") texts.insert(e["args"]["detail"]);
  }
  const std::set<std::string> expected = {"rank 0 (pid 1000 on host a\tb\x01\"\\\ufffd\u00fc)", "line one\nline two\ufffd"};
  EXPECT_EQ(texts, expected) << "control bytes stay, bytes that are not UTF-8 are replaced";
}

TEST(Trace, of_a_journal_that_stops_making_sense_says_where_it_ends) {
  std::uint64_t clock = 0;
  test::Story story(5, 0, &clock);
  for (int i = 0; i < 5; ++i) story.Create();
  story.events().erase(story.events().begin() + 3);
  std::vector<std::unique_ptr<JournalReader>> readers;
  readers.push_back(std::make_unique<test::MemoryReader>(story.events(), story.id(), SessionStatus::kClosed));
  const auto summary = WriteTrace(readers, [](std::string_view) {});
  ASSERT_TRUE(summary.ok()) << summary.status().message();
  ASSERT_EQ(summary->incomplete.size(), 1U);
  EXPECT_NE(summary->incomplete[0].find("drawn only up to where event 4 is missing"), std::string::npos)
      << summary->incomplete[0];
}

TEST(Trace, of_two_boots_begins_with_the_first_event_of_either) {
  std::uint64_t clock = 90'000'000'000'000, later_clock = 1'000'000'000;  // the later boot's clock began anew
  test::Story a(5, 0, &clock), b(6, 1, &later_clock);
  auto& opened = std::get<SessionOpened>(b.events().front().body);
  opened.boot_id = "boot-2";
  opened.realtime_ns += 60'000'000'000;
  a.Then(SessionBroken{"first"});
  b.Then(SessionBroken{"second"});
  std::map<std::string, std::int64_t> at;
  for (const Json& e : Trace({{0, a.events()}, {1, b.events()}})) {
    if (e["ph"] == "i") at[e["args"]["detail"]] = Nanoseconds(e["ts"]);
  }
  EXPECT_EQ(at["first"], 1'000'000);
  EXPECT_EQ(at["second"], 60'001'000'000);
}

TEST(Trace, a_vote_is_a_mark_and_the_wait_behind_it_lies_within_its_phase) {
  std::uint64_t clock = 1'000'000'000;
  test::Story story(0x51ab, 0, &clock);
  const AllocationId id = story.Create();
  story.Then(PhaseBegun{PhaseKind::kPauseArrive});
  story.Then(CycleBegun{CycleKind::kPause, 1, {story.id()}});
  story.Then(PhaseBegun{PhaseKind::kPauseSave});  // at 4 ms after the first event
  story.Then(StepBegun{{StepKind::kSave, id}});
  story.Then(StepDone{{StepKind::kSave, id}});
  story.Then(VoteCast{.phase = PhaseKind::kPauseSave});
  story.Then(PhaseDecided{PhaseKind::kPauseSave, false, SessionId{9}, "rank 1 failed"});
  story.Then(ProcessSeen{.session = SessionId{9}, .pid = 4711, .state = "stopped"});
  for (const auto cause : {agreement::Cause::kUndecided, agreement::Cause::kAllVoted, agreement::Cause::kLate})
    story.Then(BallotShown{.kind = CycleKind::kPause, .cycle = 1, .ballot = agreement::Ballot::kCome, .cause = cause});
  story.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 failed"});
  std::set<std::pair<std::string, std::int64_t>> marks;
  std::int64_t wait_from = 0, wait_ns = 0, phase_ns = 0;
  for (const Json& e : Trace({{0, story.events()}})) {
    if (e["ph"] == "i") marks.emplace(e["name"], Nanoseconds(e["ts"]) / 1'000'000);
    if (e["ph"] != "X") continue;
    if (e["cat"] == "wait") wait_from = Nanoseconds(e["ts"]), wait_ns = Nanoseconds(e["dur"]);
    if (e["name"] == "save") phase_ns = Nanoseconds(e["dur"]);
  }
  EXPECT_TRUE(marks.contains({"vote", 7}));
  EXPECT_TRUE(marks.contains({"process seen", 9}));
  EXPECT_TRUE(marks.contains({"waits", 10}));
  EXPECT_TRUE(marks.contains({"ballot failed", 12}));
  EXPECT_FALSE(std::ranges::any_of(marks, [](const auto& mark) { return mark.second == 11; })) << "all voted";
  EXPECT_EQ(wait_from, 7'000'000);
  EXPECT_EQ(wait_ns, 1'000'000) << "from the vote to the decision";
  EXPECT_EQ(phase_ns, 4'000'000);
}

// ---- windows ---------------------------------------------------------------------------------------------------------------

// An event a millisecond: an allocation at 1, a pause that begins at 3 and is given up at 8, its phase from 4 to 7, a step from
// 5 to 6, and the end of the allocation at 9.
std::vector<Event> OnePause(std::uint64_t* clock) {
  test::Story story(0x51ab, 0, clock);
  const AllocationId id = story.Create();  // at 1 ms after the first event
  story.Then(PhaseBegun{PhaseKind::kPauseArrive});
  story.Then(CycleBegun{CycleKind::kPause, 1, {story.id()}});
  story.Then(PhaseBegun{PhaseKind::kPauseSave});
  story.Then(StepBegun{{StepKind::kSave, id}});
  story.Then(StepDone{{StepKind::kSave, id}});
  story.Then(PhaseDecided{PhaseKind::kPauseSave, false, story.id(), "given up"});
  story.Then(CycleFailed{CycleKind::kPause, 1, true, "given up"});
  story.Then(AllocationReleased{id});
  story.Then(SessionClosed{"exit"});
  return story.events();
}

TraceWindow Milliseconds(std::int64_t from, std::int64_t to) {
  return {TraceTime{from * 1'000'000, false}, TraceTime{to * 1'000'000, false}};
}

struct DrawnSlice {
  std::string name;
  std::int64_t from_ms, to_ms;
  friend auto operator<=>(const DrawnSlice&, const DrawnSlice&) = default;
};
std::set<DrawnSlice> DrawnSlices(const std::vector<Json>& trace) {
  std::set<DrawnSlice> all;
  for (const Json& e : trace) {
    if (e["ph"] != "X") continue;
    const std::int64_t from = Nanoseconds(e["ts"]);
    all.insert({e["name"], from / 1'000'000, (from + Nanoseconds(e["dur"])) / 1'000'000});
  }
  return all;
}

TEST(TraceWindow, draws_what_overlaps_it_and_cuts_what_goes_on) {
  std::uint64_t clock = 1'000'000'000;
  const std::vector<Event> events = OnePause(&clock);
  std::set<std::string> names;
  for (const DrawnSlice& s : DrawnSlices(Trace({{0, events}}))) names.insert(s.name);
  EXPECT_EQ(names.size(), 4U) << "arrival, pause, phase, step";
  std::set<DrawnSlice> drawn = DrawnSlices(Trace({{0, events}}, Milliseconds(6, 100)));
  for (const DrawnSlice& s : drawn) EXPECT_GE(s.to_ms, 6) << s.name;
  EXPECT_EQ(drawn.count({"pause 1", 3, 8}), 1U) << "it begins before the window, and is drawn from there";
  drawn = DrawnSlices(Trace({{0, events}}, Milliseconds(0, 5)));
  EXPECT_EQ(drawn.count({"pause 1", 3, 5}), 1U) << "it goes on, and is cut";
  EXPECT_EQ(drawn.count({"pause: arrive", 2, 3}), 1U);
  // Nothing is recorded between the two ends, and all that is under way is drawn nevertheless.
  TraceWindow between = Milliseconds(5, 5);
  between.from->ns += 200'000;
  between.to->ns += 400'000;
  EXPECT_EQ(DrawnSlices(Trace({{0, events}}, between)).size(), 3U) << "the pause, its phase and the step";
  for (const Json& e : Trace({{0, events}}, between)) {
    if (e["ph"] != "X") continue;
    EXPECT_EQ(Nanoseconds(e["ts"]) + Nanoseconds(e["dur"]), 5'400'000) << e["name"] << " is drawn to the window's end";
  }
}

// The pause and the resume that were made in a safe point lie in its slice, and the freeze between them.
TEST(Trace, requests_from_outside_and_freezes_are_slices) {
  std::uint64_t clock = 1'000'000'000;
  test::Story story(0x51ab, 0, &clock);
  story.Create();                                                    // at 1 ms after the first event
  story.Then(RequestSeen{3, CycleKind::kPause, 77, 12, true});       // 2
  story.Then(SafepointReached{3, 12});                               // 3
  story.Then(RequestEnded{3, CycleKind::kPause, Code::kOk, "", 1});  // 4
  const std::uint64_t paused_ns = story.events().back().time_ns;
  story.Then(RequestSeen{4, CycleKind::kResume, 78});  // 5
  story.Then(Frozen{paused_ns + 100'000, paused_ns + 900'000, 1, "a -> b"});
  story.Then(RequestEnded{4, CycleKind::kResume, Code::kOk, ""});  // 7
  story.Then(SafepointReached{5, 0});                              // 8
  story.Then(RequestEnded{5, CycleKind::kPause, Code::kPeerLost, "the tool has ended"});
  story.Then(SafepointReached{6, 90});  // 10
  story.Then(SessionClosed{"exit"});
  std::set<DrawnSlice> drawn;
  std::size_t marks = 0;
  for (const Json& e : Trace({{0, story.events()}})) {
    if (e["ph"] == "i" && (e["name"] == "request" || e["name"] == "request ended")) ++marks;
    if (e["ph"] != "X") continue;
    const std::int64_t from = Nanoseconds(e["ts"]);
    drawn.insert({e["name"], from / 100'000, (from + Nanoseconds(e["dur"])) / 100'000});
  }
  EXPECT_EQ(marks, 5U);
  EXPECT_TRUE(drawn.contains({"safe point 12", 30, 70}));
  EXPECT_TRUE(drawn.contains({"frozen", 41, 49}));
  EXPECT_TRUE(drawn.contains({"resume waits for the outside", 80, 90}));
  EXPECT_TRUE(drawn.contains({"safe point 90", 100, 110})) << "it is open at the end";
}

TEST(TraceWindow, begins_with_the_memory_that_was_held_before) {
  std::uint64_t clock = 1'000'000'000;
  const std::vector<Event> events = OnePause(&clock);
  std::vector<std::pair<std::int64_t, double>> held;
  for (const Json& e : Trace({{0, events}}, Milliseconds(4, 100))) {
    if (e["ph"] == "C" && e["args"].contains("held")) held.emplace_back(Nanoseconds(e["ts"]) / 1'000'000, e["args"]["held"]);
  }
  ASSERT_GE(held.size(), 2U);
  EXPECT_EQ(held.front(), std::pair(std::int64_t{4}, 2.0));
  EXPECT_EQ(held.back().second, 0.0);
}

TEST(TraceWindow, may_be_given_by_the_wall_clock) {
  std::uint64_t clock = 1'000'000'000;
  const std::vector<Event> events = OnePause(&clock);
  const auto& opened = std::get<SessionOpened>(events.front().body);
  const auto began = static_cast<std::int64_t>(opened.realtime_ns + events.front().time_ns - opened.monotonic_ns);
  const TraceWindow wall{TraceTime{began + 6'000'000, true}, std::nullopt};
  EXPECT_EQ(Trace({{0, events}}, wall), Trace({{0, events}}, {TraceTime{6'000'000, false}, std::nullopt}));
  std::vector<Event> without = events;
  std::get<SessionOpened>(without.front().body).realtime_ns = 0;
  std::string text;
  EXPECT_EQ(WriteTraceOf({{0, without}}, wall, text).status().code(), Code::kInvalid);
  EXPECT_EQ(WriteTraceOf({{0, events}}, Milliseconds(6, 5), text).status().code(), Code::kInvalid);
}

TEST(TraceWindow, counts_the_events_in_it_and_reads_no_further) {
  std::uint64_t clock = 1'000'000'000;
  std::vector<Event> events = OnePause(&clock);
  events.back().body = Mapped{.address = Address{1}, .bytes = 1, .allocation = AllocationId{77}};  // makes no sense there
  std::string text;
  const auto within = WriteTraceOf({{0, events}}, Milliseconds(3, 6), text);
  ASSERT_TRUE(within.ok());
  EXPECT_EQ(within->events, 4U);
  EXPECT_TRUE(within->incomplete.empty()) << within->incomplete[0];
  EXPECT_EQ(WriteTraceOf({{0, events}}, Milliseconds(3, 60), text)->incomplete.size(), 1U);
  EXPECT_EQ(WriteTraceOf({{0, events}}, Milliseconds(50, 60), text)->events, 0U);
}

}  // namespace
}  // namespace amem
