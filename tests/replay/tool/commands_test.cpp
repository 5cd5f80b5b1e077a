// The commands of amem-replay about whole jobs: replay, state, top, log -f, report, pack, completion, and why of damaged
// journals.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "tests/replay/job/scripted_journal.h"
#include "tests/replay/job/scripted_pool.h"
#include "tests/replay/job/written_journal.h"
#include "tests/replay/tool/run_tool.h"
#include "tests/replay/tool/scenario.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using test::Contents;
using test::Ran;
using test::Story;

// The jobs are played once, and read by all tests.
class Commands : public test::ToolTest {
 protected:
  static void SetUpTestSuite() {
    jobs_ = NewDirectory();
    for (const char* name : {"healthy", "out_of_memory"}) {
      const Status played = test::PlayScenario(name, jobs_ / name);
      ASSERT_TRUE(played.ok()) << played.message();
    }
  }
  static void TearDownTestSuite() { fs::remove_all(jobs_); }

  // $OK and $OOM are the journals of the two jobs.
  Ran Shell(const std::string& command) {
    return ToolTest::Shell("OK='" + (jobs_ / "healthy/journal").string() + "' OOM='" +
                           (jobs_ / "out_of_memory/journal").string() + "'; export TMPDIR=$S; " + command);
  }
  static bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

  static fs::path jobs_;
};
fs::path Commands::jobs_;

// ---- ls
// ----------------------------------------------------------------------------------------------------------------------

TEST_F(Commands, ls_says_that_a_living_session_waits_for_others_on_a_board) {
  using agreement::Cause;
  enum class Then : std::uint8_t { kNothing, kFails, kPoolIsPaused, kPoolFails, kCloses, kIsCopied };
  const auto listed = [&](Cause last, Then then) {
    std::uint64_t clock = 1'000'000'000;
    Story story(0x77, 0, &clock);
    test::ScriptedPool pool(story, "kv");
    BallotShown shown{.cycle = 1, .board = 0xb0, .round = 1, .culprits = {SessionId{0x78}}, .members = 2, .yes = 1};
    shown.seats = {{.session = SessionId{0x78}, .rank = 1}};
    story.Then(shown);
    shown.cause = last;
    story.Then(shown);
    if (then == Then::kFails) story.Then(CycleFailed{.cycle = 1});
    if (then == Then::kPoolIsPaused) pool.Run(CycleKind::kPause);
    if (then == Then::kPoolFails) story.Then(CycleFailed{.cycle = 1, .pool = pool.id()});
    const fs::path journal = scratch_ / fmt::format("{}-{}", static_cast<int>(last), static_cast<int>(then));
    const auto writer = test::BeginJournal(story, journal);
    EXPECT_TRUE((then == Then::kCloses ? writer->Close() : writer->Flush()).ok());
    if (then == Then::kIsCopied) {
      fs::copy(journal, journal.string() + ".copy", fs::copy_options::recursive);
      return Shell("$TOOL ls -v '" + journal.string() + ".copy'; $TOOL ls '" + journal.string() + ".copy'").out;
    }
    return Shell("$TOOL ls -v '" + journal.string() + "'; $TOOL ls '" + journal.string() + "'").out;
  };
  for (const Then then : {Then::kNothing, Then::kPoolIsPaused, Then::kPoolFails}) {
    const std::string waits = listed(Cause::kUndecided, then);
    EXPECT_HAS(waits, "waits      ballot come of pause 1 waits for rank 1");
    EXPECT_HAS(waits, "running, waits");
  }
  for (const std::string& waits_not : {listed(Cause::kLate, Then::kNothing), listed(Cause::kUndecided, Then::kFails),
                                       listed(Cause::kUndecided, Then::kCloses)})
    EXPECT_FALSE(Has(waits_not, "waits") || Has(waits_not, "may wait")) << waits_not;
  const std::string copied = listed(Cause::kUndecided, Then::kIsCopied);
  EXPECT_HAS(copied, "may wait   ballot come of pause 1 waits for rank 1");
  EXPECT_HAS(copied, "running, may wait");
}

// ---- replay ----------------------------------------------------------------------------------------------------------------

TEST_F(Commands, run_replays_a_healthy_job_without_a_difference) {
  const Ran ran = Shell("$TOOL replay --json $OK");
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  const Json report = ran.json();
  EXPECT_EQ(report["same"], true);
  EXPECT_EQ(report["sessions"], 4);
  EXPECT_EQ(report["devices"].size(), 4U);
  EXPECT_EQ(report["devices"][2]["most_bytes"], Bytes{36} << 20);
  EXPECT_GT(report["comparisons"], 60);
}

TEST_F(Commands, run_reproduces_an_out_of_memory_with_as_little_memory_and_not_with_more) {
  const Ran little = Shell("$TOOL replay --json $OOM --memory 2=20MiB");
  EXPECT_EQ(little.code, 0) << little.out << little.err;
  EXPECT_EQ(little.json()["failures_reproduced"], 1);
  EXPECT_EQ(little.json()["same"], true);
  const Ran enough = Shell("$TOOL replay $OOM --memory SIM-2=64MiB");
  EXPECT_EQ(enough.code, 3) << enough.err;
  EXPECT_HAS(enough.out, "first difference: rank 2");
  EXPECT_HAS(enough.out, "recorded  check memory device 2, 36 MiB: device 2 has 16 MiB free");
  EXPECT_HAS(enough.out, "replayed  ok");
  EXPECT_HAS(enough.out, "--memory 2=");
}

TEST_F(Commands, run_shows_where_less_memory_would_have_failed) {
  const Ran ran = Shell("$TOOL replay --json $OK --memory 1=20MiB");
  EXPECT_EQ(ran.code, 3) << ran.err;
  EXPECT_HAS(std::string(ran.json()["difference"]["what"]), "check memory device 1");
  EXPECT_HAS(std::string(ran.json()["difference"]["replayed"]), "20 MiB free");
}

TEST_F(Commands, run_stops_where_it_is_told_and_refuses_what_it_does_not_understand) {
  const Ran ran = Shell("$TOOL replay --json $OK --to 1#60");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_LT(ran.json()["events"], Shell("$TOOL replay --json $OK").json()["events"]);
  for (const char* wrong : {"--to 9#60", "--to=#60", "--to x", "--memory 9=1G", "--memory 2", "--memory 2=lots"}) {
    const Ran refused = Shell(std::string("$TOOL replay $OK ") + wrong);
    EXPECT_EQ(refused.code, 1) << wrong << refused.out;
    EXPECT_FALSE(refused.err.empty());
  }
}

TEST_F(Commands, run_of_one_journal_does_without_the_others) {
  const Ran ran = Shell("$TOOL replay $(ls -d $OK/*1)");
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  EXPECT_HAS(ran.out, "replayed 1 session, ");
}

// A journal that says that what cannot be happened: the replay of the calls finds it.
TEST_F(Commands, run_finds_a_result_that_cannot_be) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x77, 0, &clock);
  const AllocationId id = story.Create();
  story.Then(RangeReserved{.address = Address{0x7f0000000000}, .bytes = 4 * test::kMiB});
  story.Then(Mapped{.address = Address{0x7f0000000000}, .bytes = test::kMiB, .allocation = id});  // a handle is mapped whole
  test::WriteJournal(story, scratch_ / "journal");
  const Ran ran = Shell("$TOOL replay $S/journal");
  EXPECT_EQ(ran.code, 3) << ran.err;
  EXPECT_HAS(ran.out, "event 4: result of \"mapped: address 0x7f0000000000");
  EXPECT_HAS(ran.out, "CUDA_ERROR_NOT_SUPPORTED");
}

// Two hosts whose wall clocks differ by an hour: what both of them made at once tells how they stand.
TEST_F(Commands, log_puts_hosts_together_by_the_communicators_that_they_made) {
  constexpr std::uint64_t kHour_ns = 3'600'000'000'000;
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    std::uint64_t clock = 1'000'000'000;
    Story story(0x70 + rank, static_cast<std::int32_t>(rank), &clock);
    auto& opened = std::get<SessionOpened>(story.events()[0].body);
    opened.boot_id = "boot " + std::to_string(rank);
    opened.monotonic_ns = story.events()[0].time_ns;
    opened.realtime_ns = (400'000 + rank) * kHour_ns;
    story.Then(CommunicatorReady{
        .communicator = CommunicatorId{1}, .hash = 0xabc, .rank = static_cast<std::int32_t>(rank), .ranks = 2});
    test::WriteJournal(story, scratch_ / "hosts");
  }
  const Ran ran = Shell(
      "$TOOL log --merge --wall --kind communicator-ready $S/hosts | cut -d: -f1 | grep -o '20[0-9-]* [0-9]*' | sort -u | wc "
      "-l");
  EXPECT_EQ(ran.out, "1\n") << Shell("$TOOL log --merge --wall $S/hosts").out;
}

TEST_F(Commands, log_reads_more_journals_than_a_process_may_have_open) {
  constexpr std::uint64_t kSessions = 40;
  std::uint64_t clock = 1'000'000'000;
  for (std::uint64_t i = 0; i < kSessions; ++i) {
    Story story(0x100 + i, static_cast<std::int32_t>(i), &clock);
    story.Create();
    test::WriteJournal(story, scratch_ / "many");
  }
  const Ran ran = Shell("ulimit -n 40; $TOOL log $S/many | grep -c 'allocation created: allocation 1,'");
  EXPECT_EQ(ran.out, std::to_string(kSessions) + "\n") << ran.err;
  EXPECT_EQ(ran.err, "");
}

// ---- state, top ----------------------------------------------------------------------------------------------------

TEST_F(Commands, state_tells_what_changed_between_two_events) {
  const Ran same = Shell("$TOOL state $(ls -d $OK/*1) --at=#40 --to=#40");
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_HAS(same.out, "no difference");
  const Ran ran = Shell("$TOOL state $(ls -d $OK/*1) --at=#20 --to=#107");
  EXPECT_EQ(ran.code, 3) << ran.err;
  EXPECT_HAS(ran.out, "~ lifecycle: running  ->  pausing");
  EXPECT_HAS(ran.out, "+ allocation 9: 10 MiB on device 1, own, saved");
  EXPECT_HAS(ran.out, "~ pauses begun: 0  ->  1");
  const Ran json = Shell("$TOOL state --json $(ls -d $OK/*1) --at=#20 --to=#107");
  EXPECT_EQ(json.json()["differences"].size() + 2, std::count(ran.out.begin(), ran.out.end(), '\n') - 1U);
  EXPECT_EQ(Shell("$TOOL state $(ls -d $OK/*1) --at x --to=#107").code, 1);
  EXPECT_EQ(Shell("$TOOL state $OK --to=#5").code, 1) << "of which session?";
  const Ran two = Shell("$TOOL state $(ls -d $OK/*1) $(ls -d $OK/*1) --at=#20 --to=#107");
  EXPECT_EQ(two.out, ran.out);
}

TEST_F(Commands, refs_are_the_ring_that_the_job_made) {
  const Json graph = Shell("$TOOL top --by peer --json $OK").json();
  ASSERT_EQ(graph["references"].size(), 4U);
  for (const Json& edge : graph["references"]) {
    EXPECT_EQ(edge["allocations"], 3);
    EXPECT_EQ(edge["bytes"], Bytes{6} << 20);
    EXPECT_EQ(edge["known_to_importer"], true);
  }
  const Ran dot = Shell("$TOOL top --dot $OK");
  EXPECT_HAS(dot.out, "digraph references {");
  // Who closed first may be marked as lost by the others.
  EXPECT_HAS(dot.out, "\"5e55000000000001\" -> \"5e55000000000000\" [label=\"3, 6 MiB");
  EXPECT_HAS(Shell("$TOOL top --by peer $(ls -d $OK/*1)").out, "not given");
}

TEST_F(Commands, tags_are_shown_by_top_state_info_log_why_and_run) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x77, 0, &clock);
  test::ScriptedPool weights(story, "weights");
  const AllocationId chunk = weights.Chunk(6 * test::kMiB);
  story.Map(story.Create());
  for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume, CycleKind::kPause}) weights.Run(kind);
  story.Then(SessionClosed{.reason = "exit"});
  test::WriteJournal(story, scratch_ / "tags");
  const Json top = Shell("$TOOL top --by tag --json $S/tags").json();
  ASSERT_EQ(top.size(), 2U) << top.dump();
  EXPECT_EQ(top[0]["tag"], "weights");
  EXPECT_EQ(top[0]["bytes"], 6 * test::kMiB);
  EXPECT_EQ(top[0]["backed_bytes"], 0);
  EXPECT_EQ(top[1]["tag"], "nccl");
  EXPECT_EQ(top[1]["backed_bytes"], 2 * test::kMiB);
  EXPECT_HAS(Shell("$TOOL state $S/tags").out,
             "weights (preserve) paused, 2 pauses begun, 1 chunk 6 MiB, held on devices when it ended 0 B");
  const Ran state = Shell("$TOOL state --json $S/tags");
  EXPECT_EQ(state.json()["pools"][0]["lifecycle"], "paused");
  const Ran schema = Shell("$TOOL state --json $S/tags > $S/state && python3 -B " AMEM_JSON_SCHEMA " < $S/state");
  EXPECT_EQ(schema.code, 0) << schema.out << schema.err;
  EXPECT_HAS(Shell("$TOOL ls -v $S/tags").out, "weights (preserve) paused, 2 pauses begun, 1 chunk 6 MiB");
  EXPECT_HAS(Shell("$TOOL log $S/tags --allocation " + std::to_string(chunk.value)).out, "pool allocated");
  EXPECT_EQ(Shell("$TOOL why --json $S/tags").json()["healthy"], true);
  const Ran run = Shell("$TOOL replay --json $S/tags");
  EXPECT_EQ(run.json()["same"], true) << run.out << run.err;
}

// Why it took so long, or so little: by each command that tells about a pause, from the one story.
TEST_F(Commands, what_a_pause_copied_is_told) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x77, 0, &clock);
  story.Map(story.Create());
  test::ScriptedPool weights(story, "weights");
  weights.Chunk(6 * test::kMiB);
  weights.NextSave(6 * test::kMiB, 0, 0);
  weights.Run(CycleKind::kPause);
  weights.NextSave(0, 0, 0);
  weights.Run(CycleKind::kResume);
  weights.NextSave(test::kMiB, 3 * test::kMiB, 2 * test::kMiB);
  weights.Run(CycleKind::kPause);
  const std::uint64_t seq = story.events().back().seq.value;
  story.Then(SessionClosed{.reason = "exit"});
  test::WriteJournal(story, scratch_ / "moved");
  const Json expected = {{"changed_bytes", test::kMiB}, {"unchanged_bytes", 3 * test::kMiB}, {"zero_bytes", 2 * test::kMiB}};
  const char* text = "1 MiB copied, 3 MiB unchanged, 2 MiB zero";

  Json why = Shell("$TOOL why --json $S/moved").json();
  ASSERT_EQ(why["contents"].size(), 1U) << why.dump();
  EXPECT_EQ(why["contents"][0], Json({{"tag", "weights"}, {"cycle", 2}, {"processes", 1}, {"contents", expected}}));
  EXPECT_HAS(Shell("$TOOL why $S/moved").out, std::string("Note: of tag weights in pause 2 (1 process): ") + text + ".");

  Json top = Shell("$TOOL top --json $S/moved").json();
  EXPECT_EQ(top[0]["last_pause"], expected) << top.dump();
  EXPECT_EQ(top[1]["last_pause"], nullptr) << "NCCL's memory was never paused";
  EXPECT_HAS(Shell("$TOOL top $S/moved").out, text);
  EXPECT_HAS(Shell("$TOOL top $S/moved '--at=#" + std::to_string(seq - 1) + "'").out, "6 MiB copied, 0 B unchanged, 0 B zero");

  ASSERT_EQ(Shell("$TOOL report $S/moved -o $S/moved.html").code, 0);
  EXPECT_HAS(Contents(scratch_ / "moved.html"), R"("x":[1048576,3145728,2097152])");
}

TEST_F(Commands, ls_live_does_not_leave_out_a_rank_in_silence) {
  const Ran ran = Shell("$TOOL ls --live --rank 0");
  EXPECT_EQ(ran.code, 1) << ran.out;
  EXPECT_HAS(ran.err, "--rank is not for --live, which asks all ranks of a job");
}

// A process that has ended has no /proc any more.
TEST_F(Commands, ls_names_the_program_of_the_dead) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x77, 0, &clock), older(0x78, 1, &clock);
  std::get<SessionOpened>(story.events()[0].body).program = "python3 train.py";
  test::WriteJournal(story, scratch_ / "named");
  test::WriteJournal(older, scratch_ / "older");
  const std::string both = Shell("$TOOL ls $S/named $S/older").out;
  EXPECT_HAS(both, "PROGRAM");
  EXPECT_HAS(both, "  python3 train.py  ");
  EXPECT_EQ(Shell("$TOOL ls $S/older").out.find("PROGRAM"), std::string::npos) << "its build did not record it";
  EXPECT_HAS(Shell("$TOOL ls -v $S/named").out, "program    python3 train.py");
  EXPECT_EQ(Shell("$TOOL ls --json $S/named").json()[0]["opened"]["program"], "python3 train.py");
}

TEST_F(Commands, top_sums_by_site_peer_size_and_age) {
  const Json by_site = Shell("$TOOL top --by site --json $OK").json();
  ASSERT_EQ(by_site.size(), 2U);
  EXPECT_EQ(by_site[0]["site"], "libnccl+46b260 < +4471f2");
  EXPECT_EQ(by_site[0]["bytes"], Bytes{120} << 20);
  EXPECT_EQ(by_site[0]["count"], 12);
  EXPECT_EQ(Shell("$TOOL top --by size --json $OK").json()[1]["size"], "2 MiB");
  EXPECT_EQ(Shell("$TOOL top --by age --json $OK").json()[0]["age"], "under 1 s");
  EXPECT_GE(Shell("$TOOL top --by peer --json $OK").json()["peers"].size(), 5U);  // owners may have seen others leave
  EXPECT_EQ(Shell("$TOOL top --by colour $OK").code, 1);
}

TEST_F(Commands, top_says_what_network_cards_hold_and_what_of_it_a_pause_gives_up) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x79, 0, &clock);
  const Address buffer = story.Map(story.Create()), other = story.Map(story.Create()), third = story.Map(story.Create());
  story.Then(Registered{buffer, 2 * test::kMiB, "dma-buf", {}, RegionId{1}, "mlx5_0", 1, 7, 0, {}});
  story.Then(Registered{.address = other, .bytes = test::kMiB, .how = "dma-buf", .card = "mlx5_0", .pins = "a window"});
  story.Then(Registered{.address = third, .bytes = test::kMiB, .how = "network plugin"});
  test::WriteJournal(story, scratch_ / "cards");
  const Json top = Shell("$TOOL top --by card --json $S/cards").json();
  ASSERT_EQ(top.size(), 3U) << top.dump();
  EXPECT_EQ(top[0]["card"], "mlx5_0: a pause gives it up");
  EXPECT_EQ(top[0]["bytes"], 2 * test::kMiB);
  EXPECT_EQ(top[0]["count"], 1);
  EXPECT_EQ(top[1]["card"], "a card, stays: network plugin");
  EXPECT_EQ(top[2]["card"], "mlx5_0, stays: a window");
  EXPECT_HAS(Shell("$TOOL top --by card $S/cards").out, "NETWORK CARD");
  const std::string why = Shell("$TOOL why $S/cards").out;
  EXPECT_HAS(why, "Note: of rank 0 mlx5_0 holds 1 MiB in 1 region that a pause leaves: a window.");
  EXPECT_EQ(why.find("network plugin"), why.npos) << "of an unknown card nothing new is known";
}

// ---- trace -----------------------------------------------------------------------------------------------------------------

TEST_F(Commands, trace_has_a_track_for_each_rank_slices_arrows_and_counters) {
  const Ran ran = Shell("$TOOL report --perfetto $OK -o $S/trace.json");
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Json trace = Json::parse(Contents(scratch_ / "trace.json"), nullptr, false);
  ASSERT_TRUE(trace.is_object());
  std::map<std::string, int> phases;
  std::set<std::string> starts, ends, processes;
  std::set<std::int64_t> counted;  // processes that have a counter of memory; how often it is drawn is a matter of time
  int cycles = 0;
  for (const Json& e : trace["traceEvents"]) {
    ++phases[e["ph"]];
    if (e["ph"] == "C") counted.insert(e["pid"].get<std::int64_t>());
    if (e["ph"] == "s") starts.insert(e["id"]);
    if (e["ph"] == "f") ends.insert(e["id"]);
    if (e["name"] == "process_name") processes.insert(e["args"]["name"]);
    if (e["ph"] == "X" && e["cat"] == "cycle") ++cycles;
    EXPECT_TRUE(e["ph"] != "X" || e["dur"] >= 0) << e;
  }
  EXPECT_EQ(processes.size(), 4U);
  EXPECT_EQ(cycles, 16);
  EXPECT_EQ(starts.size(), 12U);
  EXPECT_EQ(starts, ends);
  EXPECT_EQ(counted.size(), 4U);
  const Ran failed = Shell("$TOOL report --perfetto $OOM -o $S/trace.json");
  EXPECT_EQ(failed.code, 0);
  EXPECT_HAS(Contents(scratch_ / "trace.json"), "\"name\":\"step failed\"");
}

// ---- pack ------------------------------------------------------------------------------------------------------------------

TEST_F(Commands, a_pack_says_the_same_as_the_journals) {
  ASSERT_EQ(Shell("$TOOL pack $OOM -o $S/job.amem").code, 0);
  EXPECT_LT(fs::file_size(scratch_ / "job.amem"), 20'000U);
  for (const char* command : {"log", "verify", "why", "why --json", "replay", "top --by peer", "top"}) {
    // Sessions may be listed in another order, and where they lie is another place, which commands to paste name; all else is
    // the same, word for word.
    const auto ran = [&](const std::string& place) {
      return Shell(std::string("$TOOL ") + command + " " + place +
                   " > $S/said; code=$?; sed -E '/^  amem-replay /d; s|[^ \"]*/(5e55[0-9a-f]{12})|\\1|g' " +
                   "$S/said | LC_ALL=C sort; exit $code");
    };
    const Ran directory = ran("$OOM"), pack = ran("$S/job.amem");
    EXPECT_EQ(directory.code, pack.code) << command;
    EXPECT_EQ(directory.out, pack.out) << command;
    EXPECT_FALSE(pack.out.empty()) << command;
  }
  for (const char* command : {"ls -v", "ls --json", "verify --json"}) {
    const Ran told = Shell("$TOOL " + std::string(command) + " $S/job.amem");
    EXPECT_HAS(told.out, (scratch_ / "job.amem").string());
    EXPECT_FALSE(Has(told.out, "/amem-replay-")) << "where it was unpacked for a moment";
  }
  const Ran unpacked = Shell("$TOOL pack -x $S/job.amem -o $S/journals && $TOOL state --json $S/journals/5e55000000000002");
  EXPECT_EQ(unpacked.code, 0) << unpacked.err;
  EXPECT_HAS(unpacked.out, Shell("$TOOL state --json $OOM/5e55000000000002").out);
  EXPECT_FALSE(Has(Shell("ls $S").out, "amem-replay-")) << "what was unpacked is still there";
}

TEST_F(Commands, an_anonymous_pack_has_no_names_and_the_same_verdict) {
  ASSERT_EQ(Shell("$TOOL pack $OOM -o $S/job.amem --anonymous").code, 0);
  const std::string log = Shell("$TOOL log $S/job.amem; $TOOL why $S/job.amem; $TOOL ls --json $S/job.amem").out;
  const std::string events = Shell("$TOOL log --json $S/job.amem").out;
  for (const std::string* told : {&log, &events}) {
    EXPECT_FALSE(Has(*told, "alpha"));
    EXPECT_FALSE(Has(*told, "SIM-"));
    EXPECT_HAS(*told, "host-1");
  }
  const Json why = Shell("$TOOL why --json $S/job.amem").json();
  EXPECT_EQ(why["kind"], "out-of-memory");
  EXPECT_EQ(why["rank"], 2);
}

TEST_F(Commands, a_damaged_pack_exits_with_2_and_says_so) {
  ASSERT_EQ(
      Shell(
          "$TOOL pack $OK -o $S/job.amem && head -c 4000 $S/job.amem > $S/cut.amem && head -c 600 /dev/urandom > $S/noise.amem")
          .code,
      0);
  const Ran cut = Shell("$TOOL why $S/cut.amem");
  EXPECT_EQ(cut.code, 2) << cut.out;
  EXPECT_HAS(cut.err, "cut short");
  EXPECT_EQ(Shell("$TOOL pack -x $S/noise.amem -o $S/x").code, 2);
  EXPECT_EQ(Shell("$TOOL why $S/noise.amem").code, 2);
}

TEST_F(Commands, a_pack_is_for_its_owner_alone_and_goes_through_a_pipe) {
  const Ran ran =
      Shell("umask 0; $TOOL pack $OOM -o $S/job.amem && stat -c %a $S/job.amem; $TOOL pack $OOM -o - | $TOOL why --json -");
  EXPECT_HAS(ran.out, "\n600\n");
  EXPECT_HAS(ran.out, "\"kind\": \"out-of-memory\"");
  const Ran empty = Shell("$TOOL why - < /dev/null");
  EXPECT_EQ(empty.code, 2);
  EXPECT_HAS(empty.err, "it is empty");
  EXPECT_HAS(Shell("head -c 3000 /dev/zero | $TOOL why -").err, "not what `amem-replay pack` writes");
  const Ran listed = Shell("$TOOL pack $OOM -o - | $TOOL ls --json -");
  EXPECT_EQ(listed.json()[0]["directory"], "standard input") << listed.out;
}

TEST_F(Commands, a_pack_of_another_host_is_made_there) {
  const Ran ran = Shell("$TOOL pack node1: $OOM -o $S/job.amem");
  EXPECT_EQ(ran.code, 1);
  EXPECT_HAS(ran.err, "`ssh node1 amem pack -o - > node1.amem`");
  EXPECT_FALSE(fs::exists(scratch_ / "job.amem"));
}

// What is printed would go into the first file that is opened in the place of a closed descriptor.
TEST_F(Commands, output_that_is_closed_is_an_error_and_no_journal_gets_it) {
  ASSERT_EQ(Shell("cp -r $OOM $S/journal; cat $S/journal/*/data.mdb | sha256sum > $S/before").code, 0);
  const Ran ran =
      Shell("$TOOL ls $S/journal >&-; echo $?; cat $S/journal/*/data.mdb | sha256sum | diff - $S/before && echo same");
  EXPECT_EQ(ran.out, "2\nsame\n");
  EXPECT_HAS(ran.err, "write to standard output");
  const Ran head = Shell("$TOOL report $OOM -o - 2> >(cat >&2) | head -c 5; echo ${PIPESTATUS[0]}");
  EXPECT_EQ(head.out, "<!doc0\n");
  EXPECT_FALSE(Has(head.err, "write")) << head.err;
}

// ---- why of what is not whole ----------------------------------------------------------------------------------------------

TEST_F(Commands, why_says_what_could_not_be_read_and_exits_with_2) {
  ASSERT_EQ(Shell("cp -r $OOM $S/journal && head -c 5000 /dev/urandom | dd of=$S/journal/5e55000000000000/data.mdb bs=1 seek=0 "
                  "conv=notrunc")
                .code,
            0);
  const Ran ran = Shell("$TOOL why $S/journal");
  EXPECT_EQ(ran.code, 2) << ran.out;
  EXPECT_TRUE(ran.out.starts_with("A journal ")) << ran.out;
  EXPECT_HAS(ran.out, "Resume 1 failed on rank 2");
  EXPECT_HAS(ran.err, "5e55000000000000");
}

// The reader of a pack that was cut, or damaged in the middle, may miss whatever explains the rest. `filler` keeps the ranks'
// events apart, in blocks of their own.
class IncompletePack : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    std::uint64_t clock = 1'000'000'000;
    Story filler(0xf111e6, 9, &clock);
    for (std::uint64_t i = 1; i < 8'000; ++i) filler.Then(HostAllocated{Address{i * i << 12}, i * 4096, 0, false});
    test::WriteJournal(filler, scratch_ / "filler");
    const std::string oom = "$OOM/5e5500000000000";
    const Ran packed = Shell("$TOOL pack " + oom + "0 " + oom + "1 $S/filler " + oom + "2 " + oom + "3 -o $S/job.amem");
    ASSERT_EQ(packed.code, 0) << packed.err;
    whole_ = Contents(scratch_ / "job.amem");
    ASSERT_EQ(Why(whole_)["kind"], "out-of-memory");
  }
  Json Why(const std::string& pack) {
    std::ofstream(scratch_ / "bad.amem", std::ios::binary) << pack;
    return Shell("$TOOL why --json $S/bad.amem").json();
  }
  // Returns whether a part was read.
  bool SaysSoFirst(const std::string& pack, const std::string& how) {
    const Json why = Why(pack);
    EXPECT_FALSE(Has(why.dump(), "Nothing is wrong")) << how;
    if (why["schema"] == "amem-replay/error") return false;
    for (const Json& verdict : {why, why["other_jobs"].empty() ? why : why["other_jobs"][0]}) {
      EXPECT_TRUE(std::string(verdict["headline"]).starts_with("The pack is incomplete: "))
          << how << ": " << verdict["headline"];
      EXPECT_TRUE(verdict["healthy"].is_null()) << how;
    }
    EXPECT_FALSE(why["damage"].empty()) << how;
    return true;
  }
  std::string whole_;
};

TEST_F(IncompletePack, that_was_cut_says_so_before_anything_else) {
  int read = 0;
  for (const std::size_t percent : {10, 30, 50, 60, 70, 80, 85, 90, 95, 98, 99})
    read += SaysSoFirst(whole_.substr(0, whole_.size() * percent / 100), std::to_string(percent) + " %") ? 1 : 0;
  EXPECT_GT(read, 5) << "the cuts must leave something to read";
  EXPECT_TRUE(SaysSoFirst(whole_.substr(0, whole_.size() - 1), "all but the last byte, where nothing is lost that matters"));
}

TEST_F(IncompletePack, with_noise_in_it_says_so_before_anything_else) {
  std::minstd_rand random(7);
  for (const std::size_t percent : {40, 50, 60, 70, 80, 90, 97}) {
    std::string noisy = whole_;
    for (std::size_t at = noisy.size() * percent / 100, i = 0; i < 600 && at + i < noisy.size(); ++i)
      noisy[at + i] = static_cast<char>(random());
    SaysSoFirst(noisy, std::to_string(percent) + " %");  // or reads nothing
  }
}

TEST_F(IncompletePack, is_no_good_news_for_any_command) {
  std::ofstream(scratch_ / "cut.amem", std::ios::binary) << whole_.substr(0, whole_.size() * 9 / 10);
  const Ran why = Shell("$TOOL why $S/cut.amem");
  EXPECT_TRUE(why.out.starts_with("The pack is incomplete: ")) << why.out;
  EXPECT_EQ(why.code, 2);
  EXPECT_HAS(Shell("$TOOL ls $S/cut.amem").out, ", incomplete");
  EXPECT_TRUE(Shell("$TOOL ls -v $S/cut.amem").out.starts_with("incomplete"));
  EXPECT_HAS(std::string(Shell("$TOOL ls --json $S/cut.amem").json()[0]["incomplete"]), "cut short");
  const Ran verify = Shell("$TOOL verify --json $S/cut.amem");
  EXPECT_TRUE(verify.json()["ok"].is_null() || verify.json()["ok"] == false) << verify.out;
  EXPECT_EQ(Shell("$TOOL report --all $S/cut.amem -o $S/page.html").code, 2);
  EXPECT_HAS(Contents(scratch_ / "page.html"), "\"healthy\":null");
  EXPECT_HAS(Contents(scratch_ / "page.html"), "<title>AMem: The pack is incomplete");
  // Also when it was unpacked before, or packed again.
  ASSERT_EQ(Shell("$TOOL pack -x $S/cut.amem -o $S/unpacked; $TOOL pack $S/unpacked -o $S/again.amem").code, 2);
  for (const char* place : {"unpacked", "again.amem"}) {
    const Ran later = Shell("$TOOL why $S/" + std::string(place));
    EXPECT_TRUE(later.out.starts_with("The pack is incomplete: ")) << later.out;
    EXPECT_HAS(std::string(Shell("$TOOL ls --json $S/" + std::string(place)).json()[0]["incomplete"]), "cut short");
  }
}

TEST_F(IncompletePack, that_gives_nothing_at_all_is_not_passed_over_beside_others) {
  std::ofstream(scratch_ / "cut.amem", std::ios::binary) << whole_.substr(0, 20);
  const Json why = Shell("$TOOL why --json $OK $S/cut.amem").json();
  EXPECT_TRUE(why["healthy"].is_null()) << why;
  EXPECT_HAS(std::string(why["headline"]), "The pack is incomplete: ");
}

TEST_F(IncompletePack, of_a_journal_that_could_not_be_packed_says_so) {
  ASSERT_EQ(Shell("cp -r $OOM $S/journal && head -c 50000 /dev/zero > $S/journal/5e55000000000002/data.mdb; rm -f "
                  "$S/journal/5e55000000000002/tail; $TOOL pack $S/journal -o $S/part.amem")
                .code,
            2);
  const Json why = Shell("$TOOL why --json $S/part.amem").json();
  EXPECT_TRUE(why["healthy"].is_null()) << why;
  EXPECT_HAS(std::string(why["headline"]), "The pack is incomplete: ");
  EXPECT_HAS(std::string(why["headline"]), "was not packed");
}

// The failure lies behind the damage.
TEST_F(Commands, why_reads_on_behind_damage) {
  ASSERT_EQ(Shell("cp -r $OOM $S/journal").code, 0);
  const fs::path data = scratch_ / "journal/5e55000000000002/data.mdb";
  std::string bytes = Contents(data);
  // An event's record is found by its number, and one byte of it is turned: "AMJr", checksum, length, kind 1, number 20. Pages
  // that LMDB has done with may hold it, too.
  bool damaged = false;
  for (std::size_t at = bytes.find("AMJr"); at != std::string::npos; at = bytes.find("AMJr", at + 4)) {
    if (bytes.compare(at + 12, 12, std::string("\x01\0\0\0\x14\0\0\0\0\0\0\0", 12)) != 0) continue;
    bytes[at + 30] = static_cast<char>(bytes[at + 30] ^ 0x55);
    damaged = true;
  }
  ASSERT_TRUE(damaged);
  std::ofstream(data, std::ios::binary) << bytes;
  const Ran ran = Shell("$TOOL why --json $S/journal");
  EXPECT_EQ(ran.code, 2) << ran.out;
  EXPECT_EQ(ran.json()["kind"], "out-of-memory") << ran.out;
  EXPECT_EQ(ran.json()["rank"], 2);
  EXPECT_EQ(ran.json()["damage"].size(), 1U);
}

TEST_F(Commands, why_of_a_journal_and_its_copy_uses_one) {
  ASSERT_EQ(Shell("cp -r $OK $S/copy").code, 0);
  const Ran ran = Shell("$TOOL why $OK $S/copy");
  EXPECT_EQ(ran.code, 0) << "nothing is missing";
  EXPECT_HAS(ran.out, "other copies");
  EXPECT_HAS(Shell("$TOOL why --json $OK $S/copy").out, "\"journals\": 4");
}

TEST_F(Commands, why_of_some_ranks_only_names_those_that_are_missing) {
  const Ran ran = Shell("$TOOL why $OOM/5e55000000000000 $OOM/5e55000000000001");
  EXPECT_EQ(ran.code, 3) << ran.err;
  EXPECT_HAS(ran.out, "rank 2");
  EXPECT_HAS(ran.out, "was not given");
}

TEST_F(Commands, why_tells_job_by_job_and_the_failure_first) {
  ASSERT_EQ(Shell("$TOOL pack $OOM -o $S/job.amem && $TOOL pack -x $S/job.amem -o $S/journals").code, 0);
  // A later job, which has nothing to do with the first.
  std::uint64_t clock = 1'000'000'000;
  Story story(0x77, 0, &clock);
  std::get<SessionOpened>(story.events()[0].body).realtime_ns = 4'000'000'000'000'000'000;
  story.Create();
  story.Then(SessionClosed{"exit"});
  test::WriteJournal(story, scratch_ / "journals");
  const Ran both = Shell("$TOOL why $S/journals");
  EXPECT_EQ(both.code, 3) << both.out;
  EXPECT_HAS(both.out, "Resume 1 failed on rank 2");
  EXPECT_HAS(both.out, "Another job (1 process on host alpha, since ");
  const Json json = Shell("$TOOL why --json $S/journals").json();
  EXPECT_EQ(json["kind"], "out-of-memory");
  EXPECT_EQ(json["totals"]["journals"], 4);
  ASSERT_EQ(json["other_jobs"].size(), 1u);
  EXPECT_EQ(json["other_jobs"][0]["kind"], "healthy");
  EXPECT_EQ(Shell("$TOOL why --all $S/journals").code, 3);
}

// ---- log -f ---------------------------------------------------------------------------------------------------------------

TEST_F(Commands, log_f_follows_a_live_session_to_its_end) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x77, 5, &clock);
  const auto writer = test::BeginJournal(story, scratch_ / "journal");
  ASSERT_NE(writer, nullptr);
  std::jthread job([&] {
    for (int i = 0; i < 20; ++i) {
      story.Create();
      EXPECT_TRUE(writer->Append(story.events().back()).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(15));
    }
    story.Then(SessionClosed{"exit"});
    EXPECT_TRUE(writer->Append(story.events().back()).ok());
    EXPECT_TRUE(writer->Close().ok());
  });
  // Where it starts late, as under a sanitizer, it begins with what was there before.
  const Ran ran = Shell("timeout 20 $TOOL log -f --last 100 --interval 20 $S/journal");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_HAS(ran.out, "# rank 5");
  for (int id = 1; id <= 20; ++id) EXPECT_HAS(ran.out, "allocation created: allocation " + std::to_string(id) + ",");
  EXPECT_HAS(ran.out, "session closed: exit");
  EXPECT_HAS(ran.out, "has ended");
}

TEST_F(Commands, log_f_of_nobody_says_so) {
  const Ran ran = Shell("export AMEM_JOURNAL_DIR=$OK; $TOOL log -f 999999");
  EXPECT_EQ(ran.code, 2);
  EXPECT_HAS(ran.err, "process 999999 has no journal");
}

// ---- completion ------------------------------------------------------------------------------------------------------------

TEST_F(Commands, completion_of_amem_has_the_commands_of_the_package) {
  const Ran ran = Shell("ln -s $TOOL $S/amem; $S/amem --complete ''; $S/amem --completion bash; $S/amem --man | head -1");
  for (const char* word : {"run\t", "doctor\t", "demo\t", "why\t", "complete -o default -F _amem amem", ".TH amem 1"})
    EXPECT_HAS(ran.out, word);
  EXPECT_FALSE(Has(Shell("$TOOL --complete ''").out, "doctor"));
}

TEST_F(Commands, completion_knows_every_command_option_and_value) {
  const Ran ran = Shell(
      "cd $S; PATH=$(dirname $TOOL):$PATH; source <($TOOL --completion bash); complete_for() { COMP_WORDS=(amem-replay "
      "\"$@\"); "
      "COMP_CWORD=$#; _amem-replay; printf '%s ' \"${COMPREPLY[@]}\"; echo; }; complete_for ''; complete_for wh; complete_for "
      "replay --m; complete_for top --by ''; complete_for why ''");
  EXPECT_EQ(ran.code, 0) << ran.err;
  const std::vector<std::string> lines = ran.lines();
  ASSERT_EQ(lines.size(), 5U) << ran.out;
  for (const char* command : {"why", "ls", "log", "state", "verify", "replay", "top", "pack", "help"})
    EXPECT_HAS(lines[0], command);
  EXPECT_EQ(lines[1], "why ");
  EXPECT_EQ(lines[2], "--memory ");
  EXPECT_EQ(lines[3], "tag communicator peer card site size age ");
  EXPECT_EQ(lines[4], " ") << "the shell's own files";
}

// ---- what a command is given
// -------------------------------------------------------------------------------------------------

// Two jobs in one directory: of ranks 0 and 1, with the pids 1000 and 1001, and of another program.
TEST_F(Commands, a_pid_a_jobs_id_or_a_session_means_its_job_for_every_command) {
  test::Job job;
  for (Story* story : {&job.owner, &job.importer})
    std::get<SessionOpened>(story->events()[0].body).launcher = {"SLURM_JOB_ID=77"};
  job.Share();
  job.LetGo();
  job.Close();
  const fs::path owner = test::WriteJournal(job.owner, scratch_ / "home");
  const fs::path importer = test::WriteJournal(job.importer, scratch_ / "home");
  std::uint64_t clock = 1'000'000'000;
  Story other(0x77, 5, &clock);
  std::get<SessionOpened>(other.events()[0].body).realtime_ns = 4'000'000'000'000'000'000;
  std::get<SessionOpened>(other.events()[0].body).pid = 9999;
  for (int i = 0; i < 2; ++i) other.Create();
  other.Then(SessionClosed{"exit"});
  test::WriteJournal(other, scratch_ / "home");
  const std::string home = "export AMEM_JOURNAL_DIR=$S/home; $TOOL ";
  const std::string both = owner.string() + " " + importer.string();
  for (const char* command : {"why", "ls", "ls -v", "verify", "replay", "top", "top --by peer", "watch --once --json"}) {
    const auto sorted = [&](const std::string& targets) {  // the time of a picture aside
      return Shell(home + command + " " + targets + " | sed -E 's/\"at_ns\":[0-9]+//; s/_wall_ns\":[0-9]+//' | sort").out;
    };
    for (const char* target : {"1000", "1001", "77"})
      EXPECT_EQ(sorted(target).size(), sorted(both).size()) << command << " " << target;
    EXPECT_NE(sorted("1000"), sorted("9999")) << command;
  }
  EXPECT_EQ(Shell(home + "log 1001").out, Shell("$TOOL log " + importer.string()).out) << "a process alone";
  EXPECT_HAS(Shell(home + "ls -v 77").out, "SLURM_JOB_ID=77");
  EXPECT_EQ(Shell(home + "state 1001").out, Shell("$TOOL state " + importer.string()).out);
  EXPECT_EQ(Shell(home + "state " + owner.filename().string()).out, Shell("$TOOL state " + owner.string()).out);
  EXPECT_EQ(Shell(home + "state 77 --rank 1").out, Shell("$TOOL state " + importer.string()).out);
  EXPECT_EQ(Shell(home + "pack 77 -o $S/job.amem >&2 && $TOOL ls $S/job.amem | wc -l").out, "3\n") << "two and the heading";
  const std::vector<std::string> listed = Shell(home + "ls").lines();
  ASSERT_EQ(listed.size(), 5U);
  EXPECT_TRUE(listed[2].empty() || listed[3].empty()) << "between the two jobs";
  const Ran nobody = Shell(home + "why 4242");
  EXPECT_EQ(nobody.code, 2);
  EXPECT_HAS(nobody.err, "process 4242 has no journal");
  EXPECT_HAS(Shell(home + "ls nothing-of-this-name").err, "no file or directory here, and no job or session");
}

TEST_F(Commands, ranks_are_chosen_in_one_way) {
  for (const char* command : {"why", "ls", "ls -v", "log", "top", "verify", "replay", "watch --once"}) {
    const Ran one = Shell(std::string("$TOOL ") + command + " $OK --rank 1 | sed s/20..-..-.....*UTC,//");
    EXPECT_EQ(one.out, Shell(std::string("$TOOL ") + command + " $(ls -d $OK/*1) | sed s/20..-..-.....*UTC,//").out) << command;
    EXPECT_EQ(Shell(std::string("$TOOL ") + command + " $OK --rank 9").code, 2) << command;
  }
  EXPECT_EQ(Shell("$TOOL ls $OK --rank 0,2 | tail -n +2 | wc -l").out, "2\n");
  EXPECT_EQ(Shell("$TOOL ls $OK --rank 5e55000000000003 | tail -n +2 | wc -l").out, "1\n");
  EXPECT_EQ(Shell("$TOOL ls $OK --rank x").code, 1);
}

TEST_F(Commands, positions_are_events_or_times_in_every_command) {
  const std::string one = " $(ls -d $OK/*1) ";
  // An event that shares its nanosecond with none of its neighbours, and half a nanosecond later.
  std::vector<std::uint64_t> times;
  for (const std::string& line : Shell("$TOOL log --json" + one + "--from=#59").lines())
    times.push_back(Json::parse(line)["time_ns"].get<std::uint64_t>());
  std::size_t i = 1;
  while (i + 1 < times.size() && (times[i - 1] == times[i] || times[i] == times[i + 1])) ++i;
  ASSERT_LT(i + 1, times.size());
  const std::uint64_t ns = times[i] - Shell("$TOOL ls --json" + one).json()[0]["opened"]["monotonic_ns"].get<std::uint64_t>();
  std::string fraction = std::to_string(ns % 1'000'000'000);
  fraction.insert(0, 9 - fraction.size(), '0');
  const std::string then = std::to_string(ns / 1'000'000'000) + "." + fraction + "5 ",
                    event = "=#" + std::to_string(59 + i) + " ";
  EXPECT_EQ(Shell("$TOOL log" + one + "--to " + then).out, Shell("$TOOL log" + one + "--to" + event).out);
  EXPECT_EQ(Shell("$TOOL log" + one + "--from=#10 --from " + then + "--to" + event + "| wc -l").out, "1\n") << "both count";
  EXPECT_EQ(Shell("$TOOL state" + one + "--at " + then).out, Shell("$TOOL state" + one + "--at" + event).out);
  EXPECT_EQ(Shell("$TOOL top" + one + "--at " + then).out, Shell("$TOOL top" + one + "--at" + event).out);
  EXPECT_EQ(Shell("$TOOL replay" + one + "--json --to " + then).out, Shell("$TOOL replay" + one + "--json --to" + event).out);
  EXPECT_EQ(Shell("$TOOL replay $OK --json --to 1#60").code, 0);
  for (const char* unit :
       {"s", "sec", "second", "seconds", "m", "min", "minute", "minutes", "h", "hour", "hours", "d", "day", "days"})
    EXPECT_EQ(Shell("$TOOL log" + one + "--to '900 " + unit + "'").out, Shell("$TOOL log" + one).out) << unit;
  const auto slices = [&](const std::string& from) {
    EXPECT_EQ(Shell("$TOOL report --perfetto $OK -o $S/trace.json " + from).code, 0) << from;
    return Json::parse(Contents(scratch_ / "trace.json"))["traceEvents"].size();
  };
  EXPECT_LT(slices("--from 1#60"), slices(""));
  EXPECT_EQ(Shell("$TOOL log" + one + "--from 1#60").out, Shell("$TOOL log" + one + "--from=#60").out);
  const auto merged = Shell("$TOOL log $OK --merge --from 1#60 --to 1#999999").lines();
  ASSERT_FALSE(merged.empty());
  EXPECT_HAS(merged.front(), "rank 1       60 ") << "of the others what came after it";
  for (const char* wrong : {"log --from '#x'", "log --from 9#17", "log --from 2#30 --to 2#17", "state --at nine",
                            "top --at yesterday", "report --from 1", "report --perfetto --from '#5'", "log -f --to 3"})
    EXPECT_EQ(Shell(std::string("$TOOL ") + wrong + " $OK").code, 1) << wrong;
  EXPECT_HAS(Shell("$TOOL log $OK --from #17").err, "write --from=#17");
  EXPECT_HAS(Shell("$TOOL state" + one + "--at 2000-01-01").err, "no event lies before that time; the first is 1");
}

TEST_F(Commands, a_pack_of_a_living_job_is_known_as_one) {
  std::uint64_t clock = 1'000'000'000;
  Story story(0x77, 5, &clock);
  story.Create();
  const auto writer = test::BeginJournal(story, scratch_ / "journal");
  EXPECT_HAS(Shell("$TOOL ls $S/journal").out, "live");
  ASSERT_EQ(Shell("$TOOL pack $S/journal -o $S/job.amem").code, 0);
  const Ran listed = Shell("$TOOL ls $S/job.amem");
  EXPECT_HAS(listed.out, " packed ");
  EXPECT_FALSE(Has(listed.out, "live")) << listed.out;
  const Ran followed = Shell("timeout 10 $TOOL log -f $S/job.amem");
  EXPECT_EQ(followed.code, 0) << "it does not wait for a process that it cannot see";
  EXPECT_HAS(followed.out, "has ended");
  EXPECT_EQ(Shell("$TOOL watch --once $S/job.amem").code, 0);
  EXPECT_EQ(Shell("timeout 10 $TOOL watch $S/job.amem").code, 2) << "nobody lives in it";
  EXPECT_HAS(Shell("$TOOL ls -v $S/job.amem").out, "0077  packed");
  EXPECT_EQ(Shell("$TOOL ls --json $S/job.amem").json()[0]["status"], "packed");
  EXPECT_EQ(Shell("$TOOL ls --json $S/journal").json()[0]["status"], "live");
  const Json why = Shell("$TOOL why --json $S/job.amem").json();
  EXPECT_EQ(why["live"], false);
  EXPECT_HAS(why["summary"].get<std::string>(), "1 process lived when the journals were packed; they held 2 MiB");
  EXPECT_EQ(Shell("$TOOL why --json $S/journal").json()["live"], true);
}

TEST_F(Commands, a_cause_is_told_once_and_lines_fit) {
  const Ran why = Shell("$TOOL why $OOM");
  const std::string cause = "36 MiB must come back";  // in the summary, in "To do" it is said otherwise
  std::size_t told = 0;
  for (std::size_t at = why.out.find(cause); at != std::string::npos; at = why.out.find(cause, at + 1)) ++told;
  EXPECT_EQ(told, 1U) << why.out;
  EXPECT_HAS(why.out, "CAUSE       step failed: check memory device 2, 36 MiB\n");
  const Ran help =
      Shell("for c in why ls log report watch pause resume freeze thaw top state replay verify pack; do $TOOL help $c; done");
  for (const std::string& line : help.lines()) EXPECT_LE(line.size(), 100U) << line;
  for (const std::string& line : why.lines())  // a command stays whole, to be pasted
    EXPECT_TRUE(line.size() <= 100U || line.starts_with("  amem-replay log ")) << line;
}

TEST_F(Commands, phases_of_an_undo_say_so) {
  const Ran log = Shell("$TOOL log $OOM --rank 2");
  EXPECT_HAS(log.out, "undo, phase begun: pause: save");
  EXPECT_FALSE(Has(log.out, "undo, phase begun: resume")) << log.out;
}

TEST_F(Commands, a_state_of_several_sessions_names_a_rank_to_choose) {
  const Ran ran = Shell("$TOOL pack $OK -o $S/job.amem >&2; $TOOL state $S/job.amem");
  EXPECT_EQ(ran.code, 1);
  EXPECT_HAS(ran.err, "there are 4 sessions, and state is about one: give --rank, as in --rank ");
  EXPECT_FALSE(Has(ran.err, "/tmp/amem-replay-")) << "it is gone when this is read";
}

TEST_F(Commands, sizes_have_names_and_a_failure_is_told_once) {
  const Ran all = Shell("$TOOL ls -v $OOM");
  EXPECT_HAS(all.out, "memory     requested ");
  EXPECT_HAS(all.out, "; held on devices when it ended ");
  EXPECT_HAS(all.out, "failure    the same\n");
}

// They hold nothing any more, whatever their journals end with.
TEST_F(Commands, memory_of_processes_that_have_ended_is_not_held) {
  const std::string killed = AMEM_GOLDEN "/sim_killed_in_pause.amem";
  EXPECT_EQ(Shell("$TOOL ls " + killed + " | awk 'NR > 1 {print $7}'").out, "-\n-\n-\n-\n");
  for (const Json& session : Shell("$TOOL watch --once --json " + killed).json()["sessions"])
    EXPECT_EQ(session["held_bytes"], 0) << session;
  EXPECT_HAS(Shell("$TOOL state --rank 2 " + killed).out, "held on devices when it ended 32 MiB");
  EXPECT_HAS(Shell("$TOOL state --rank 2 --at=#80 " + killed).out, "held on devices then ");
  EXPECT_HAS(Shell("$TOOL top " + killed).out, "HELD AT THE END");
  EXPECT_HAS(Shell("$TOOL top --at=#80 " + killed).out, "HELD THEN");
  // One lives, and one has ended with as much.
  std::uint64_t clock = 1'000'000'000;
  Story lives(0x1, 0, &clock), dead(0x2, 1, &clock);
  lives.Create();
  dead.Create();
  const auto writer = test::BeginJournal(lives, scratch_ / "both");
  test::WriteJournal(dead, scratch_ / "both");
  const Ran top = Shell("$TOOL top $S/both");
  EXPECT_HAS(top.out, "4 MiB      100 %  2      2 MiB     nccl");
  EXPECT_HAS(top.out, "1 process has ended and holds nothing any more");
}

// A process that is killed still counts as alive while the driver takes down its memory.
TEST_F(Commands, verify_takes_what_followed_from_a_death_for_no_violation) {
  const Ran verified = Shell("$TOOL verify " AMEM_GOLDEN "/gpu/golden-killed-2gpus.amem");
  EXPECT_EQ(verified.code, 0) << verified.out;
  EXPECT_HAS(verified.out, "crashed while holding 5 allocations of rank 0");
}

TEST_F(Commands, help_of_help_a_short_last_and_the_beginning_of_an_id_are_understood) {
  EXPECT_EQ(Shell("$TOOL help help").out, Shell("$TOOL help").out);
  EXPECT_HAS(Shell("$TOOL help").out, "--completion");
  EXPECT_EQ(Shell("$TOOL log $OK --rank 1 -n 5 | wc -l").out, "5\n");
  std::uint64_t clock = 1'000'000'000;
  Story story(0xfeed'5e55'0000'0001, 0, &clock);
  test::WriteJournal(story, scratch_ / "home");
  EXPECT_HAS(Shell("AMEM_JOURNAL_DIR=$S/home $TOOL ls feed5").out, "feed5e5500000001");
}

TEST_F(Commands, a_journal_directory_that_is_set_is_not_to_be_set) {
  const Ran none = Shell("AMEM_JOURNAL_DIR=$S/nowhere $TOOL ls");
  EXPECT_HAS(none.err, "AMEM_JOURNAL_DIR names it");
  EXPECT_FALSE(Has(none.err, "set AMEM_JOURNAL_DIR")) << none.err;
  EXPECT_FALSE(Has(Shell("mkdir -p $S/empty; AMEM_JOURNAL_DIR=$S/empty $TOOL why 4194999").err, "set AMEM_JOURNAL_DIR"));
}

TEST_F(Commands, many_copies_of_journals_are_told_in_one_line) {
  const Ran why = Shell("for i in 1 2 3; do cp -r $OK $S/copy$i; done; $TOOL why $S/copy*");
  std::size_t lines = 0;
  for (std::size_t at = why.out.find("other copies"); at != std::string::npos; at = why.out.find("other copies", at + 1))
    ++lines;
  EXPECT_EQ(lines, 1U) << why.out;
  EXPECT_FALSE(Has(why.out, "another copy")) << why.out;
}

TEST_F(Commands, dates_are_local_unless_they_have_a_zone) {
  const std::string wall = "$(TZ=UTC $TOOL log $OK --rank 1 --wall --from=#60 --to=#60 | awk '$1 == 60 {print $2 \" \" $3}')";
  const auto events = [&](const std::string& zone, const std::string& behind) {
    return Shell("w=\"" + wall + "\"; TZ=" + zone + " $TOOL log $OK --rank 1 --to \"${w}" + behind + "\" | wc -l").out;
  };
  const std::string all = events("UTC", "");
  EXPECT_GT(std::stoi(all), 50);
  EXPECT_EQ(events("EST5", " UTC"), all);
  EXPECT_EQ(events("EST5", "Z"), all);
  EXPECT_EQ(events("EST5", " +0000"), all);
  EXPECT_EQ(events("CET-1", ""), "0\n") << "an hour earlier";
  EXPECT_EQ(events("CET-1", " -05:00"), Shell("$TOOL log $OK --rank 1 | wc -l").out);
  EXPECT_EQ(Shell("$TOOL log $OK --from '2026-11-21 20:20:58 nowhere'").code, 1);
}

TEST_F(Commands, what_is_asked_in_vain_says_so) {
  const Ran nothing = Shell("$TOOL log $OK --allocation 999");
  EXPECT_EQ(nothing.code, 0);
  EXPECT_HAS(nothing.err, "No event of 4 sessions matches.");
  EXPECT_EQ(Shell("$TOOL log --json $OK --allocation 999").err, "") << "for programs nothing is an answer";
  const Ran file = Shell("echo text > $S/file; $TOOL why $S/file");
  EXPECT_EQ(file.code, 2);
  EXPECT_HAS(file.err, "file is neither a pack (`amem-replay pack` makes one) nor a directory of journals");
}

TEST_F(Commands, a_word_that_other_tools_have_is_told_what_it_is_here) {
  for (const auto& [word, meant] :
       {std::pair("list", "ls"), {"show", "log"}, {"cat", "log"}, {"grep", "log"}, {"summary", "why"}}) {
    const Ran ran = Shell(std::string("$TOOL ") + word);
    EXPECT_EQ(ran.code, 1);
    EXPECT_HAS(ran.err, std::string("there is no command \"") + word + "\" (did you mean " + meant + "?)");
  }
}

TEST_F(Commands, it_calls_itself_by_the_name_by_which_it_was_called) {
  const Ran ran = Shell("ln -s $TOOL $S/amem; $S/amem help why; $S/amem help; $S/amem frobnicate");
  EXPECT_HAS(ran.out, "Usage: amem why ");
  EXPECT_HAS(ran.out, "  amem why 4711");
  EXPECT_HAS(ran.out, "  doctor ");
  EXPECT_FALSE(Has(ran.out + ran.err, "amem-replay"));
  EXPECT_HAS(ran.err, "amem: there is no command \"frobnicate\"; `amem help` lists them");
  const Ran other = Shell("$TOOL help why; $TOOL help");
  EXPECT_HAS(other.out, "  amem-replay why 4711");
  EXPECT_FALSE(Has(other.out, "  doctor "));
}

TEST_F(Commands, output_has_a_name_by_default) {
  EXPECT_EQ(Shell("cd $S; $TOOL pack $OK && $TOOL pack -x job.amem && $TOOL report --perfetto $OK && $TOOL report $OK").code,
            0);
  EXPECT_EQ(Shell("cd $S; ls -d *; ls job | wc -l").out, "amem-report.html\namem-trace.json\nerr\njob\njob.amem\nout\n4\n");
}

}  // namespace
}  // namespace amem
