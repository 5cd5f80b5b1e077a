// Journals and packs that somebody made to do harm, or that are damaged beyond reason: every command ends, soon, with an exit
// code of its own, within bounds of memory and disk, and nothing reaches the terminal but text.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <zstd.h>

#include <climits>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "journal/codec.h"
#include "tests/replay/job/scripted_journal.h"
#include "tests/replay/job/written_journal.h"
#include "tests/replay/tool/run_tool.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using test::Contents;
using test::Ran;
using test::Story;

constexpr const char* kCommands[] = {"why",
                                     "why --json",
                                     "ls",
                                     "ls -v",
                                     "ls --json",
                                     "log",
                                     "log --json",
                                     "verify",
                                     "top --by peer",
                                     "top",
                                     "replay",
                                     "replay --json",
                                     "state",
                                     "state --json",
                                     "report -o $S/page.html",
                                     "report --perfetto -o $S/trace.json",
                                     "pack -o $S/again.amem"};
#ifdef AMEM_SANITIZED
constexpr long kMore = 8;  // what a sanitizer takes besides
#else
constexpr long kMore = 1;
#endif
#if defined(AMEM_BY_NIGHT) && !defined(AMEM_SANITIZED)
constexpr std::uint64_t kManyEvents = 150'000;
#else
constexpr std::uint64_t kManyEvents = 20'000;
#endif

// A pack written by hand.
class PackFile {
 public:
  PackFile& Session(std::uint64_t id) {
    return Block(1, nlohmann::json{{"session", id}, {"pid", 7}, {"status", "closed"}}.dump());
  }
  PackFile& Event(const amem::Event& event) {
    const auto message = encoder_.Encode(event);
    return Block(3, {reinterpret_cast<const char*>(message.data()), message.size()});
  }
  PackFile& Block(std::uint32_t kind, std::string_view payload) {
    const std::uint32_t header[2] = {kind, static_cast<std::uint32_t>(payload.size())};
    blocks_.append(reinterpret_cast<const char*>(header), sizeof header).append(payload);
    return *this;
  }
  // The file's size.
  std::size_t Write(const fs::path& file) const {
    std::string packed(ZSTD_compressBound(blocks_.size()), '\0');
    packed.resize(ZSTD_compress(packed.data(), packed.size(), blocks_.data(), blocks_.size(), 9));
    std::ofstream(file, std::ios::binary) << std::string_view("AMEMPACK\1\0\0\0", 12) << packed;
    return packed.size();
  }

 private:
  Encoder encoder_;
  std::string blocks_;
};

class Hostile : public test::ToolTest {
 protected:
  Ran Shell(const std::string& command) const { return ToolTest::Shell("mkdir -p $S/tmp; export TMPDIR=$S/tmp; " + command); }
  void WriteJournal(const Story& story) const { test::WriteJournal(story, scratch_ / "journal"); }
  // What must hold of every command, whatever it reads.
  void EndsWell(const Ran& ran, const std::string& command) const {
    EXPECT_TRUE(ran.code == 0 || ran.code == 2 || ran.code == 3) << command << ": " << ran.code << "\n" << ran.err;
    EXPECT_NE(ran.out + ran.err, "") << command << " said nothing";
    for (const std::string* text : {&ran.out, &ran.err}) {
      for (const char c : *text) {
        ASSERT_TRUE(c == '\n' || c == '\t' || static_cast<unsigned char>(c) >= 0x20) << command << ": " << static_cast<int>(c);
        ASSERT_NE(c, 0x7f) << command;
      }
      ASSERT_EQ(text->find("\xc2\x9b"), std::string::npos) << command << ": a control sequence of one character";
    }
  }
  // `state` is about one session.
  void AllEndWell(const std::string& place, bool of_one = true) const {
    for (const std::string command : kCommands) {
      if (!of_one && command.starts_with("state")) continue;
      const std::size_t blank = command.find(' ');
      const Ran ran =
          Shell("$TOOL " + command.substr(0, blank) + " " + place + (blank == command.npos ? "" : command.substr(blank)));
      EndsWell(ran, command);
    }
  }
  void WithinBudget(const fs::path& pack) const {
    ASSERT_LT(fs::file_size(pack), 1'000'000U);
    for (const std::string command : kCommands) {
      const std::size_t blank = command.find(' ');
      const Ran ran = Shell("$TOOL " + command.substr(0, blank) + " " + pack.string() +
                            (blank == command.npos ? "" : command.substr(blank)));
      EXPECT_TRUE(ran.code == 0 || ran.code == 2 || ran.code == 3) << command << ": " << ran.code << "\n" << ran.err;
      EXPECT_TRUE(ran.out + ran.err != "" || command == "top") << command << " said nothing";
      EXPECT_LT(ran.peak_kib, kMore * (256 << 10)) << command;
      EXPECT_LT(ran.processor_seconds, static_cast<double>(kMore) * 12) << command;
      EXPECT_TRUE(fs::is_empty(scratch_ / "tmp")) << command << " left what it unpacked";
    }
  }
  std::uint64_t clock = 1'000'000'000;
};

TEST_F(Hostile, a_pack_of_one_huge_block_is_refused) {
  {  // its memory must be gone before the tool is started, which begins as a copy of this process
    PackFile pack;
    pack.Session(1).Block(3, std::string(std::size_t{400} << 20, '\0'));
    ASSERT_LT(pack.Write(scratch_ / "bomb.amem"), 60'000U);
  }
  const Ran ran = Shell("$TOOL why $S/bomb.amem");
  EXPECT_EQ(ran.code, 2);
  EXPECT_HAS(ran.err, "--force");
  EXPECT_LT(ran.peak_kib, kMore * (64 << 10));
}

TEST_F(Hostile, a_pack_of_many_sessions_fills_no_disk) {
  PackFile pack;
  for (std::uint64_t id = 1; id <= 60'000; ++id) pack.Session(id);
  ASSERT_LT(pack.Write(scratch_ / "bomb.amem"), 1'000'000U);
  const Ran ran = Shell("(ulimit -f 100000; timeout 20 $TOOL why $S/bomb.amem); code=$?; du -sk $S/tmp | cut -f1; exit $code");
  EXPECT_EQ(ran.code, 2) << ran.err.substr(0, 1000);
  EXPECT_HAS(ran.err, "--force");
  EXPECT_LT(std::stol(ran.out), 100);
}

// It stands still in the middle until its time is up, so that it unpacks while what it unpacked is removed.
TEST_F(Hostile, a_pack_that_is_given_up_leaves_no_files) {
  PackFile pack;
  for (std::uint64_t id = 1; id <= 60'000; ++id) pack.Session(id);
  pack.Write(scratch_ / "bomb.amem");
  const Ran ran = Shell(
      "$TOOL why $S/bomb.amem & tool=$!; while kill -0 $tool && [ -z \"$(ls -A $S/tmp/*/)\" ]; do sleep 0.01; done; "
      "kill -STOP $tool; sleep 10.5; kill -CONT $tool; wait $tool; code=$?; ls $S/tmp | wc -l; exit $code");
  EXPECT_EQ(ran.code, 2) << ran.err.substr(0, 1000);
  EXPECT_EQ(ran.out, "0\n");
}

TEST_F(Hostile, damage_without_end_is_told_in_some_lines) {
  PackFile pack;
  pack.Session(1);
  for (int i = 0; i < 100'000; ++i) pack.Block(3, "no event");
  pack.Write(scratch_ / "bomb.amem");
  const Ran ran = Shell("$TOOL ls $S/bomb.amem");
  EXPECT_EQ(ran.code, 2);
  EXPECT_LT(ran.err.size(), 100'000U);
  EXPECT_HAS(ran.err, "more");
}

TEST_F(Hostile, a_pack_of_many_small_events_stays_within_the_budget) {
  PackFile pack;
  pack.Session(0xa11ce);
  Story story(0xa11ce, 0, &clock);
  pack.Event(story.events()[0]);
  for (std::uint64_t i = 2; i < kManyEvents; ++i)
    pack.Event({SequenceNumber{i}, clock, 1, HostAllocated{Address{i << 12}, 4096, 0, false}});
  pack.Write(scratch_ / "many.amem");
  WithinBudget(scratch_ / "many.amem");
}

#ifdef AMEM_BY_NIGHT  // the ten seconds that the tool takes
TEST_F(Hostile, a_pack_that_takes_for_ever_is_given_up) {
  PackFile pack;
  pack.Session(0xa11ce);
  Story story(0xa11ce, 0, &clock);
  for (int i = 0; i < 20'000; ++i) story.Create();
  for (int i = 0; i < 20'000; ++i) {  // each is looked for in all allocations
    story.Then(PeerConnected{SessionId{5}, "alpha", 1, 0, 0});
    story.Then(PeerLost{SessionId{5}, "died"});
  }
  for (const Event& event : story.events()) pack.Event(event);
  pack.Write(scratch_ / "slow.amem");
  const Ran ran = Shell("$TOOL why $S/slow.amem");
  EXPECT_TRUE(ran.code == 2 || ran.code == 0) << ran.code;
  EXPECT_NE(ran.out + ran.err, "") << "it said nothing";
  EXPECT_LT(ran.processor_seconds, static_cast<double>(kMore) * 12);
  EXPECT_TRUE(ran.code == 0 || ran.err.find("--force") != std::string::npos) << ran.err;
  EXPECT_TRUE(fs::is_empty(scratch_ / "tmp"));
}
#endif

// Text is looked at by eight characters at once.
TEST_F(Hostile, a_control_character_at_any_place_of_a_text_is_shown_and_not_sent) {
  constexpr std::size_t kLength = 19;
  const std::vector<std::pair<std::string, std::string>> controls = {{"\x1b", "\\x1b"},          {"\x01", "\\x01"},
                                                                     {"\x7f", "\\x7f"},          {"\x80", "\\x80"},
                                                                     {"\xc2\x9b", "\\xc2\\x9b"}, {"\xff", "\\xff"}};
  Story story(0x77, 0, &clock);
  for (std::size_t at = 0; at <= kLength; ++at) {
    for (const auto& [raw, shown] : controls)
      story.Then(PassedThrough{.name = "x", .detail = std::string(at, '<') + raw + std::string(kLength - at, '>')});
  }
  WriteJournal(story);
  const Ran ran = Shell("$TOOL log $S/journal");
  EndsWell(ran, "log");
  for (std::size_t at = 0; at <= kLength; ++at) {
    for (const auto& [raw, shown] : controls)
      EXPECT_HAS(ran.out, std::string(at, '<') + shown + std::string(kLength - at, '>'));
  }
  const std::string plain(100, '~');
  Story tame(0x78, 0, &clock);
  tame.Then(PassedThrough{.name = "x", .detail = " " + plain + "\tend \u00e9"});
  WriteJournal(tame);
  EXPECT_HAS(Shell("$TOOL log $S/journal").out, " " + plain + "\tend \u00e9");
}

TEST_F(Hostile, headers_of_the_wrong_types_are_no_reason_to_fall) {
  for (const char* header :
       {R"({"session":"x","pid":[1],"status":3})", R"({"session":-5,"pid":1e300,"as_of_ns":"now","status":"live"})", R"([])",
        R"({"session":1,"status":null,"broken_reason":{}})", "{"}) {
    PackFile().Block(1, header).Write(scratch_ / "odd.amem");
    EndsWell(Shell("$TOOL why $S/odd.amem"), header);
  }
}

TEST_F(Hostile, a_device_with_a_number_beyond_reason_is_refused_at_once) {
  for (const std::int32_t ordinal : {INT_MAX, INT_MAX - 1, 100'000, INT_MIN, -1}) {
    Story story(0x77, 0, &clock);
    AllocationProperties far = Story::Properties();
    far.location.id = ordinal;
    story.Then(AllocationCreated{.allocation = AllocationId{1}, .bytes = 2 << 20, .properties = far});
    WriteJournal(story);
    const Ran ran = Shell("timeout 10 $TOOL replay $S/journal");
    EndsWell(ran, std::to_string(ordinal));
    EXPECT_TRUE(ordinal < 0 || ran.err.find("device " + std::to_string(ordinal)) != std::string::npos) << ran.err;
    fs::remove_all(scratch_ / "journal");
  }
}

TEST_F(Hostile, what_could_control_a_terminal_does_not_reach_it) {
  Story story(0x77, 0, &clock);
  const std::string evil =
      "evil\x1b]0;owned\x07\x1b[2J\x7f\xc2\x9b"
      "31m\x9b"
      "1m\r";
  auto& opened = std::get<SessionOpened>(story.events()[0].body);
  opened.host = opened.driver_version = opened.layout = opened.boot_id = evil;
  opened.gpu_uuids = {evil};
  story.Then(LibraryAttached{evil, evil, evil, evil, 1});
  story.Then(PassedThrough{evil, evil, 1});
  story.Then(PeerConnected{SessionId{5}, evil, 1, 0, 0});
  story.Create();
  story.Then(CycleBegun{CycleKind::kPause, 1, {story.id(), SessionId{5}}});
  story.Then(CycleFailed{CycleKind::kPause, 1, true, evil});
  story.Then(PeerLost{SessionId{5}, evil});
  story.Then(SessionClosed{evil});
  WriteJournal(story);
  std::ofstream(scratch_ / "journal/0000000000000077/broken") << evil;
  AllEndWell("$S/journal");
  EXPECT_HAS(Shell("$TOOL log $S/journal").out, "evil\\x1b]0;owned\\x07");
  EXPECT_EQ(
      nlohmann::json::parse(Shell("$TOOL ls --json $S/journal").out)[0]["opened"]["layout"].get<std::string>().substr(0, 5),
      "evil\x1b")
      << "JSON has rules of its own";
}

// Whoever fills a directory may put links and pipes there, in the place of any file that a reader opens.
TEST_F(Hostile, links_lead_to_no_file_of_the_readers_and_pipes_hold_nobody_up) {
  std::ofstream(scratch_ / "secret") << "live 123456\nthe reader's own\n";
  Story story(0x77, 0, &clock);
  story.Create();
  for (const char* file :
       {"unpacked-from", "77/status", "77/broken", "77/closed", "77/incomplete", "77/tail", "77/data.mdb", "77/lock.mdb"}) {
    const std::string name = file, there = name.starts_with("77/") ? "0000000000000077/" + name.substr(3) : name;
    const std::string at = "$S/journal/" + there;
    for (const std::string& put : {"ln -sf $S/secret " + at, "mkfifo " + at}) {
      fs::remove_all(scratch_ / "journal");
      WriteJournal(story);
      const Ran ran =
          Shell("rm -f " + at + "; " + put +
                "; for command in 'ls -v' 'ls --json' 'verify --json' why; do timeout 20 $TOOL $command $S/journal; "
                "[ $? = 124 ] && echo HANGS $command; done; true");
      EXPECT_EQ(ran.out.find("HANGS"), std::string::npos) << put << ran.out;
      EXPECT_EQ((ran.out + ran.err).find("the reader's own"), std::string::npos) << put << "\n" << ran.out << ran.err;
      EXPECT_NE(ran.out + ran.err, "") << put;
      EXPECT_EQ(Contents(scratch_ / "secret"), "live 123456\nthe reader's own\n") << put;
    }
  }
}

TEST_F(Hostile, a_link_to_a_session_of_the_readers_own_is_not_taken_in) {
  Story own(0x77, 0, &clock), theirs(0x78, 1, &clock);
  const fs::path mine = test::WriteJournal(own, scratch_ / "mine");
  test::WriteJournal(theirs, scratch_ / "theirs");
  fs::create_symlink(mine, scratch_ / "theirs" / mine.filename());
  EXPECT_EQ(Shell("$TOOL ls --json $S/theirs").json().size(), 1U);
  EXPECT_EQ(Shell("$TOOL ls --json $S/theirs/0000000000000077").json().size(), 1U) << "named by the reader";
}

TEST_F(Hostile, a_library_that_a_journal_names_may_be_a_pipe) {
  Story story(0x77, 0, &clock);
  story.Then(LibraryAttached{(scratch_ / "pipe").string(), "77", "preload", "2.28.9", 1});
  story.Map(story.Create());
  WriteJournal(story);
  EXPECT_EQ(Shell("mkfifo $S/pipe; timeout 20 $TOOL top --by site $S/journal").code, 0);
}

TEST_F(Hostile, times_from_anywhere_overflow_nothing) {
  const std::uint64_t times[] = {~0ULL, 1, 1ULL << 63, (1ULL << 63) - 1, 0, (1ULL << 63) + 1, 1ULL << 62};
  for (std::uint64_t session = 1; session <= 3; ++session) {
    Story story(session, static_cast<std::int32_t>(session), &clock);
    auto& opened = std::get<SessionOpened>(story.events()[0].body);
    opened.boot_id = "boot " + std::to_string(session);
    opened.realtime_ns = times[session];
    opened.monotonic_ns = times[session + 1];
    const AllocationId id = story.Create();
    story.Map(id);
    for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
      story.Then(PhaseBegun{PhaseKind::kPauseArrive});
      story.Then(CycleBegun{kind, 1, {story.id()}});
      story.Then(CycleDone{kind, 1, ~0ULL});
    }
    story.Then(HostAllocated{Address{1}, ~0ULL >> 1, 0, false});
    story.Then(HostAllocated{Address{1ULL << 63}, ~0ULL >> 1, 0, false});
    story.Then(PeerLost{SessionId{session % 3 + 1}, "died"});
    for (std::size_t i = 0; i < story.events().size(); ++i) story.events()[i].time_ns = times[(i + session) % std::size(times)];
    WriteJournal(story);
  }
  AllEndWell("$S/journal", false);
  EndsWell(Shell("$TOOL state $S/journal/0000000000000002"), "state");
}

// ---- -o --------------------------------------------------------------------------------------------------------------------

class OutputOption : public Hostile {
 protected:
  void SetUp() override {
    Hostile::SetUp();
    Story story(0x77, 0, &clock);
    story.Create();
    WriteJournal(story);
  }
};

TEST_F(OutputOption, minus_is_standard_output_for_every_command) {
  for (const auto& [command, begins] : {std::pair{"pack", "AMEMPACK"}, {"report --perfetto", "{"}, {"report", "<!"}}) {
    for (const char* name : {"-", "/dev/stdout"}) {
      const Ran ran = Shell(std::string("cd $S; $TOOL ") + command + " journal -o " + name + " | cat");
      EXPECT_TRUE(ran.out.starts_with(begins)) << command << " " << ran.out.substr(0, 20);
      EXPECT_HAS(ran.err, "1 session");
      EXPECT_FALSE(fs::exists(scratch_ / "-"));
    }
  }
  const Ran ran = Shell("$TOOL pack $S/journal -o - > $S/x.amem && $TOOL why $S/x.amem");
  EXPECT_EQ(ran.code, 0) << ran.err;
}

TEST_F(OutputOption, what_is_no_file_is_written_to_and_stays) {
  for (const char* command : {"pack", "report --perfetto", "report"}) {
    const std::string to = std::string("$TOOL ") + command + " $S/journal -o ";
    const Ran pipe =
        Shell("mkfifo $S/pipe; cat $S/pipe > $S/read & " + to + "$S/pipe; wait; test -p $S/pipe; echo $?; rm $S/pipe");
    EXPECT_HAS(pipe.out, "0\n");
    EXPECT_GT(fs::file_size(scratch_ / "read"), 50U) << command;
    const Ran link = Shell("ln -sf target $S/link; rm -f $S/target; " + to + "$S/link && " + to +
                           "$S/link && test -L $S/link && test -s $S/target && ls $S | grep -c unfinished; true");
    EXPECT_HAS(link.out, "0\n");
    const Ran device =
        Shell("mknod $S/full c 1 7 || exit 77; " + to + "$S/full; code=$?; test -c $S/full || exit 99; rm $S/full; exit $code");
    if (device.code == 77) continue;  // only root makes devices
    EXPECT_EQ(device.code, 2) << command << device.err;
    EXPECT_HAS(device.err, "No space left");
  }
}

TEST_F(OutputOption, a_file_that_cannot_be_written_whole_stays_as_it_was) {
  const Ran ran = Shell(
      "echo before > $S/job.amem; (ulimit -f 0; $TOOL pack $S/journal -o $S/job.amem 2> >(cat >&2)); echo code $?; cat "
      "$S/job.amem; ls $S");
  EXPECT_HAS(ran.out, "code 2\nbefore\n");
  EXPECT_EQ(ran.out.find("unfinished"), std::string::npos) << ran.out;
}

}  // namespace
}  // namespace amem
