// The tool as people and scripts use it: a process, its output, its exit code.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "journal/journal.h"
#include "replay/job/event_json.h"
#include "tests/replay/job/scripted_journal.h"
#include "tests/replay/job/written_journal.h"
#include "tests/replay/tool/run_tool.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using test::Job;
using test::kMiB;
using test::Ran;
using test::Story;

class Tool : public test::ToolTest {
 protected:
  // $JOURNALS is the directory of the journals.
  Ran Shell(const std::string& command) {
    return ToolTest::Shell("export AMEM_JOURNAL_DIR='" + journals().string() + "'; JOURNALS=$AMEM_JOURNAL_DIR; " + command);
  }

  fs::path Write(const Story& story) { return test::WriteJournal(story, journals()); }
  std::unique_ptr<JournalWriter> Begin(const Story& story) { return test::BeginJournal(story, journals()); }
  // Writes events as a session whose process was killed.
  void WriteAndCrash(Story& story) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      auto writer = Begin(story);
      ::kill(::getpid(), SIGKILL);
    }
    ::waitpid(pid, nullptr, 0);
  }
  void WriteJob() {
    job_.Share();
    job_.LetGo();
    job_.Close();
    owner_ = Write(job_.owner);
    importer_ = Write(job_.importer);
  }

  [[nodiscard]] fs::path journals() const { return scratch_ / "journal"; }
  static bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

  Job job_;
  fs::path owner_, importer_;
};

// ---- usage -----------------------------------------------------------------------------------------------------------------

TEST_F(Tool, help_is_on_stdout_and_names_every_command_and_the_exit_codes) {
  const Ran ran = Shell("$TOOL --help");
  EXPECT_EQ(ran.code, 0);
  const std::vector<std::string> commands = {"why",    "ls",   "log", "report", "watch",  "pause",  "resume", "park",
                                             "freeze", "thaw", "top", "state",  "replay", "verify", "pack"};
  EXPECT_HAS(ran.out, "Exit codes: 0 fine, 1 wrong usage");
  for (const std::string& command : commands) {
    EXPECT_HAS(ran.out, command);
    const Ran help = Shell("$TOOL " + command + " --help");
    EXPECT_EQ(help.code, 0);
    EXPECT_HAS(help.out, "Examples:");
    EXPECT_EQ(Shell("$TOOL help " + command).out, help.out);
  }
  for (const char* question : {"help", "-h", "version", "-V", "--version"})
    EXPECT_EQ(Shell(std::string("$TOOL ") + question).code, 0) << question;
  EXPECT_LE(ran.lines().size(), 40U) << "one screen";
  EXPECT_EQ(Shell("$TOOL").out, ran.out) << "without a command, it says what there is";
  EXPECT_EQ(Shell("$TOOL").code, 1);
}

TEST_F(Tool, wrong_usage_exits_with_1_and_says_so_on_stderr) {
  WriteJob();
  for (const char* arguments :
       {"frobnicate", "log --no-such", "log $JOURNALS --from minus", "log $JOURNALS --kind no-such-kind", "state $JOURNALS",
        "state $JOURNALS --at x", "ls -v $JOURNALS --nonsense"}) {
    const Ran ran = Shell(std::string("$TOOL ") + arguments);
    EXPECT_EQ(ran.code, 1) << arguments << "\n" << ran.err;
    EXPECT_TRUE(ran.out.empty()) << arguments;
    EXPECT_FALSE(ran.err.empty()) << arguments;
  }
  EXPECT_HAS(Shell("$TOOL log $JOURNALS --kind no-such-kind").err, "allocation-created");
}

TEST_F(Tool, what_cannot_be_read_exits_with_2_and_names_it) {
  fs::create_directories(journals() / "00000000000000aa");
  std::ofstream(journals() / "00000000000000aa" / "data.mdb") << std::string(8192, 'x');
  fs::create_directories(scratch_ / "empty");
  for (const char* command : {"ls -v", "log", "state", "verify", "ls"}) {
    const Ran corrupt = Shell(std::string("$TOOL ") + command + " $JOURNALS");
    EXPECT_EQ(corrupt.code, 2) << command << "\n" << corrupt.out << corrupt.err;
    EXPECT_HAS(corrupt.err, "00000000000000aa");
    const Ran missing = Shell(std::string("$TOOL ") + command + " " + (scratch_ / "nowhere").string());
    EXPECT_EQ(missing.code, 2) << command << "\n" << missing.out << missing.err;
    EXPECT_HAS(missing.err, "nowhere");
    const Ran empty = Shell(std::string("$TOOL ") + command + " " + (scratch_ / "empty").string());
    EXPECT_EQ(empty.code, 2) << command << "\n" << empty.out << empty.err;
    if (std::string_view(command) != "verify") continue;
    for (const Ran& ran : {corrupt, missing, empty}) EXPECT_EQ(ran.out, "") << "nothing is well of which nothing is known";
  }
}

TEST_F(Tool, readable_journals_are_shown_beside_one_that_cannot_be_read) {
  WriteJob();
  fs::create_directories(journals() / "00000000000000aa");
  std::ofstream(journals() / "00000000000000aa" / "data.mdb") << std::string(8192, 'x');
  const Ran ran = Shell("$TOOL ls -v $JOURNALS");
  EXPECT_EQ(ran.code, 2);
  EXPECT_HAS(ran.out, "rank 0 (pid 1000 on host alpha)");
  EXPECT_HAS(ran.out, "rank 1 (pid 1001 on host alpha)");
}

// ---- ls --------------------------------------------------------------------------------------------------------

TEST_F(Tool, ls_v_tells_who_what_and_how_far) {
  WriteJob();
  const Ran ran = Shell("$TOOL ls -v " + owner_.string());
  EXPECT_EQ(ran.code, 0) << ran.err;
  for (const char* part : {"session    00000000000a11ce  closed", "rank 0 (pid 1000 on host alpha), group 7",
                           "2023-11-14 22:13:20 UTC", "NCCL 2.28.9", "GPU-0", "layout direct, content preserve",
                           "reference added 1", "requested 2 MiB in 1 allocation; held on devices when it ended 2 MiB"}) {
    EXPECT_HAS(ran.out, part);
  }
  EXPECT_FALSE(Has(ran.out, "multicast created 0")) << "of kinds that are not there nothing is said";
  const auto json = nlohmann::json::parse(Shell("$TOOL ls -v --json $JOURNALS").out);
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[0]["status"], "closed");
  EXPECT_EQ(json[0]["events"], json[0]["last"]);
}

TEST_F(Tool, ls_shows_live_closed_and_crashed_sessions_of_the_default_directory) {
  WriteJob();
  std::uint64_t clock = 0;
  Story crashed(0xdead, 2, &clock), live(0x11fe, 3, &clock);
  WriteAndCrash(crashed);
  const auto writer = Begin(live);
  const Ran ran = Shell("$TOOL ls");
  EXPECT_EQ(ran.code, 0) << ran.err;
  for (const std::string& line : ran.lines()) {
    if (Has(line, "000000000000dead")) {
      EXPECT_HAS(line, "crashed");
    }
    if (Has(line, "00000000000011fe")) {
      EXPECT_HAS(line, "live");
    }
    if (Has(line, "0000000000000b0b")) {
      EXPECT_HAS(line, "closed");
    }
  }
  EXPECT_EQ(ran.lines().size(), 5u) << ran.out;
}

// ---- log -------------------------------------------------------------------------------------------------------------------

TEST_F(Tool, log_prints_every_event_with_number_time_and_thread) {
  WriteJob();
  const Ran ran = Shell("$TOOL log " + owner_.string());
  EXPECT_EQ(ran.code, 0) << ran.err;
  ASSERT_EQ(ran.lines().size(), job_.owner.events().size());
  const std::string opened = ran.lines()[0], created = ran.lines()[1];
  EXPECT_EQ(opened.substr(0, 27), "     1 +0.000000s t4711  se") << opened;
  EXPECT_EQ(created, "     2 +0.002000s t4711  " + ToText(job_.owner.events()[1].body));
}

TEST_F(Tool, log_as_json_has_one_object_a_line) {
  WriteJob();
  const Ran ran = Shell("$TOOL log --json $JOURNALS");
  EXPECT_EQ(ran.code, 0) << ran.err;
  std::size_t owners = 0;
  for (const std::string& line : ran.lines()) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_TRUE(json.contains("seq") && json.contains("kind") && json.contains("time_ns"));
    owners += json["session"] == "00000000000a11ce";
  }
  EXPECT_EQ(owners, job_.owner.events().size());
  EXPECT_EQ(ran.lines().size(), job_.owner.events().size() + job_.importer.events().size());
}

TEST_F(Tool, log_filters_by_kind_number_time_and_count) {
  std::uint64_t clock = 0;
  Story story(0x5, 0, &clock);
  for (int i = 0; i < 10; ++i) story.Map(story.Create());  // 4 events each, a millisecond apart, the first at 1 ms
  const std::string log = "$TOOL log " + Write(story).string();
  const auto count = [&](const std::string& filters) {
    const Ran ran = Shell(log + " " + filters);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.lines().size();
  };
  EXPECT_EQ(count(""), 41u);
  EXPECT_EQ(count("--kind mapped"), 10u);
  EXPECT_EQ(count("--kind mapped --kind 'allocation created'"), 20u);
  EXPECT_EQ(count("--kind mapped,allocation-created,access_set"), 30u);
  EXPECT_EQ(count("--from=#11"), 31u);
  EXPECT_EQ(count("--from=#11 --to=#20"), 10u);
  EXPECT_EQ(count("--from 0.0095"), 31u);  // event 11 is 10 ms after the first, and so on
  EXPECT_EQ(count("--from 0.0095 --to 0.0195"), 10u);
  EXPECT_EQ(count("--last 7"), 7u);
  EXPECT_EQ(count("--kind mapped --last 3 --to=#20"), 3u);
  EXPECT_HAS(Shell(log + " --kind mapped --last 1").out, "allocation 10");
}

// What no golden journal holds.
TEST_F(Tool, the_state_of_other_memory_and_of_communicators_fits_its_schema) {
  std::uint64_t clock = 0;
  Story story(0x5, 0, &clock);
  const AllocationId id = story.Create();
  story.Map(id);
  story.Then(CommunicatorBegun{.communicator = CommunicatorId{1}, .how = "init", .ranks = 2});
  story.Then(CommunicatorReady{.communicator = CommunicatorId{1}, .hash = 0x1f2e, .rank = 0, .ranks = 2});
  story.Then(HostAllocated{.address = Address{0x10000}, .bytes = 4096});
  story.Then(LegacyAllocated{.address = Address{0x20000}, .bytes = 4096, .why = "kept", .communicator = CommunicatorId{1}});
  story.Then(AsyncAllocated{.address = Address{0x30000}, .bytes = 4096});
  const std::string journal = Write(story).string();
  const Ran ran = Shell("$TOOL state --json " + journal + " > $S/state && python3 -B " AMEM_JSON_SCHEMA " < $S/state");
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  const nlohmann::json state = nlohmann::json::parse(test::Contents(scratch_ / "state"));
  for (const char* list : {"communicators", "host", "legacy", "async"}) EXPECT_EQ(state[list].size(), 1U) << list;
}

TEST_F(Tool, top_tells_the_programs_memory_of_cuMemAlloc_from_nccls) {
  std::uint64_t clock = 0;
  Story story(0x5, 0, &clock);
  story.Then(LegacyAllocated{.address = Address{0x20000}, .bytes = 4096, .why = std::string(ToText(KeepReason::kUser))});
  story.Then(LegacyAllocated{.address = Address{0x30000}, .bytes = 512, .why = "too large"});
  const std::string journal = Write(story).string();
  const auto bytes = [&](const std::string& by) {
    std::map<std::string, Bytes> of;
    for (const auto& group : Shell("$TOOL top --json --by " + by + " " + journal).json()) of[group[by]] = group["bytes"];
    return of;
  };
  EXPECT_EQ(bytes("tag"), (std::map<std::string, Bytes>{{"user", 4096}, {"nccl", 512}}));
  EXPECT_EQ(bytes("communicator")["none: the program's (ncclMemAlloc)"], 4096U);
}

TEST_F(Tool, log_of_an_allocation_follows_it_to_its_addresses) {
  WriteJob();
  const Ran ran = Shell("$TOOL log --allocation 1 " + importer_.string());
  std::string kinds;
  const Ran json = Shell("$TOOL log --json --allocation 1 " + importer_.string());
  for (const std::string& line : json.lines()) kinds += nlohmann::json::parse(line)["kind"].get<std::string>() + " ";
  EXPECT_EQ(kinds, "imported mapped access-set unmapped allocation-released ");
  EXPECT_EQ(ran.lines().size(), 5u);
  EXPECT_TRUE(Shell("$TOOL log --allocation 999 " + importer_.string()).out.empty());
}

TEST_F(Tool, log_of_the_reference_workload_takes_well_under_a_second) {
  std::uint64_t clock = 0;
  Story story(0x5, 0, &clock);
#ifdef AMEM_SANITIZED
  constexpr int kAllocations = 500;
#else
  constexpr int kAllocations = 7700;  // four events each: 30 801
#endif
  for (int i = 0; i < kAllocations; ++i) story.Map(story.Create());
  const std::string session = Write(story).string();
  const Ran ran = Shell("$TOOL log " + session);
  EXPECT_EQ(ran.lines().size(), story.events().size());
  EXPECT_LT(ran.processor_seconds, 1.0);
}

TEST_F(Tool, log_ends_quietly_when_its_reader_goes) {
  std::uint64_t clock = 0;
  Story story(0x5, 0, &clock);
  for (int i = 0; i < 2000; ++i) story.Map(story.Create());
  Write(story);
  const Ran ran = Shell("set -o pipefail; $TOOL log $JOURNALS | head -n 1");
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.lines().size(), 1u);
  EXPECT_EQ(ran.err, "");
}

TEST_F(Tool, full_disk_under_the_output_is_an_error) {
  WriteJob();
  const Ran ran = Shell("$TOOL log $JOURNALS >/dev/full");
  EXPECT_EQ(ran.code, 2);
  EXPECT_HAS(ran.err, "No space left");
}

TEST_F(Tool, live_journal_can_be_read_while_it_is_written) {
  std::uint64_t clock = 0;
  Story story(0x5, 0, &clock);
  story.Map(story.Create());
  const auto writer = Begin(story);
  ASSERT_NE(writer, nullptr);
  EXPECT_EQ(Shell("$TOOL log $JOURNALS").lines().size(), story.events().size());
  EXPECT_EQ(Shell("$TOOL verify $JOURNALS").code, 0);
  story.Create();
  ASSERT_TRUE(writer->Append(story.events().back()).ok());
  EXPECT_EQ(Shell("$TOOL log $JOURNALS").lines().size(), story.events().size());
}

// ---- state -----------------------------------------------------------------------------------------------------------------

TEST_F(Tool, state_goes_back_in_time) {
  WriteJob();
  const Ran last = Shell("$TOOL state " + importer_.string());
  EXPECT_EQ(last.code, 0) << last.err;
  EXPECT_HAS(last.out, "closed");
  EXPECT_FALSE(Has(last.out, "ALLOCATIONS"));
  const Ran then = Shell("$TOOL state --at=#5 " + importer_.string());
  EXPECT_HAS(then.out, "after      event 5");
  EXPECT_HAS(then.out, "allocation 1 of session 00000000000a11ce, at 0x7f0010000000");
  const auto json = nlohmann::json::parse(Shell("$TOOL state --json --at=#5 " + importer_.string()).out);
  EXPECT_EQ(json["seq"], 5);
  EXPECT_EQ(json["allocations"].size(), 1u);
}

TEST_F(Tool, state_after_an_event_that_is_not_there_exits_with_2) {
  WriteJob();
  const Ran ran = Shell("$TOOL state --at=#100000 " + importer_.string());
  EXPECT_EQ(ran.code, 2) << ran.out;
  EXPECT_FALSE(ran.err.empty());
}

// ---- verify ----------------------------------------------------------------------------------------------------------------

TEST_F(Tool, verify_of_a_healthy_job_is_ok) {
  WriteJob();
  const Ran ran = Shell("$TOOL verify $JOURNALS");
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  const std::size_t events = job_.owner.events().size() + job_.importer.events().size();
  EXPECT_EQ(ran.lines().back(), "ok journals=2 events=" + std::to_string(events) + " references=1 violations=0");
  const auto json = nlohmann::json::parse(Shell("$TOOL verify --json $JOURNALS").out);
  EXPECT_EQ(json["ok"], true);
  EXPECT_EQ(json["journals"].size(), 2U);
  EXPECT_EQ(json["references"], 1);
}

TEST_F(Tool, verify_finds_a_wrong_order_and_exits_with_3) {
  std::uint64_t clock = 0;
  Story story(0x5, 0, &clock);
  story.Then(Unmapped{.address = Address{0x1000}, .bytes = 2 * kMiB});
  Write(story);
  const Ran ran = Shell("$TOOL verify $JOURNALS");
  EXPECT_EQ(ran.code, 3) << ran.err;
  EXPECT_HAS(ran.out, "VIOLATION: rank 0 (pid 1000 on host alpha), event 2: ");
  EXPECT_HAS(ran.out, "0x1000");
}

TEST_F(Tool, verify_finds_a_missing_reference_and_exits_with_3) {
  job_.Share();
  job_.Close();
  std::vector<Event>& events = job_.owner.events();
  std::erase_if(events, [](const Event& e) { return std::holds_alternative<ReferenceAdded>(e.body); });
  for (std::size_t i = 0; i < events.size(); ++i) events[i].seq = SequenceNumber{i + 1};
  Write(job_.owner);
  Write(job_.importer);
  const Ran ran = Shell("$TOOL verify $JOURNALS");
  EXPECT_EQ(ran.code, 3) << ran.out << ran.err;
  EXPECT_HAS(ran.out, "no reference added");
  const auto json = nlohmann::json::parse(Shell("$TOOL verify --json $JOURNALS").out);
  EXPECT_EQ(json["ok"], false);
  EXPECT_EQ(json["violations"][0]["session"], "0000000000000b0b");
}

TEST_F(Tool, verify_tells_a_crash_from_a_violation) {
  job_.Share();
  job_.owner.Then(PeerLost{.peer = job_.importer.id(), .reason = "socket closed"});
  job_.owner.Then(SessionClosed{.reason = "exit"});
  Write(job_.owner);
  WriteAndCrash(job_.importer);
  const Ran ran = Shell("$TOOL verify $JOURNALS");
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  EXPECT_HAS(ran.out, "crashed while holding 1 allocation of rank 0");
}

}  // namespace
}  // namespace amem
