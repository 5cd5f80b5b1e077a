// watch as people use it, beside processes that write their journals meanwhile.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "journal/journal.h"
#include "tests/replay/job/scripted_journal.h"
#include "tests/replay/job/written_journal.h"
#include "tests/replay/tool/run_tool.h"

namespace amem {
namespace {

using test::Job;
using test::Ran;
using test::Story;

class Watch : public test::ToolTest {
 protected:
  // The journals of both sessions, with what has happened so far.
  void Open() {
    for (Story* story : {&job_.owner, &job_.importer}) {
      writers_.push_back(test::BeginJournal(*story, scratch_ / "journal"));
      ASSERT_NE(writers_.back(), nullptr);
      written_.push_back(story->events().size());
    }
  }
  void Append() {
    std::size_t i = 0;
    for (Story* story : {&job_.owner, &job_.importer}) {
      for (; written_[i] < story->events().size(); ++written_[i])
        EXPECT_TRUE(writers_[i]->Append(story->events()[written_[i]]).ok());
      ++i;
    }
  }
  void Close() {
    for (Story* story : {&job_.owner, &job_.importer}) story->Then(SessionClosed{"exit"});
    Append();
    for (auto& writer : writers_) EXPECT_TRUE(writer->Close().ok());
  }

  Job job_;
  std::vector<std::unique_ptr<JournalWriter>> writers_;
  std::vector<std::size_t> written_;
};

TEST_F(Watch, once_shows_who_waits_for_whom) {
  job_.Share();
  Open();
  job_.owner.Then(PhaseBegun{PhaseKind::kPauseArrive});
  Append();
  const Ran ran = Shell("$TOOL watch --once $S/journal");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_HAS(ran.out, "2 sessions");
  EXPECT_HAS(ran.out, "waits for rank 1");
  EXPECT_HAS(ran.out, "<- 1 waits for it");
  EXPECT_EQ(ran.out.find('\x1b'), std::string::npos) << "nothing for a terminal where there is none";
  const Ran by_default = Shell("export AMEM_JOURNAL_DIR=$S/journal; $TOOL watch --once");
  EXPECT_HAS(by_default.out, "waits for rank 1");
  const nlohmann::json json = Shell("$TOOL watch --once --json $S/journal").json();
  EXPECT_EQ(json["sessions"][0]["waits_for"][0], "0000000000000b0b");
  Close();
}

TEST_F(Watch, of_a_job_that_goes_on_prints_changes_and_ends_with_it) {
  job_.Share();
  Open();
  std::jthread job([this] {
    const auto soon = [] { std::this_thread::sleep_for(std::chrono::milliseconds(300)); };
    soon();
    job_.owner.Then(PhaseBegun{PhaseKind::kPauseArrive});
    Append();
    soon();
    job_.owner.Then(CycleFailed{CycleKind::kPause, 1, true, "rank 1 did not come"});
    Append();
    soon();
    Close();
  });
  const Ran ran = Shell("timeout 20 $TOOL watch --interval 20 $S/journal");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_HAS(ran.out, "rank 0: running\n");
  EXPECT_HAS(ran.out, "rank 0: running, pause 1, has come, waits for rank 1\n");
  EXPECT_HAS(ran.out, "pause 1 failed: rank 1 did not come\n");
  EXPECT_HAS(ran.out, "rank 1: closed\n");
  EXPECT_LT(ran.lines().size(), 12U) << "a line for each change, and none for each look\n" << ran.out;
}

TEST_F(Watch, of_a_job_that_goes_on_ends_when_its_reader_goes) {
  job_.Share();
  Open();
  const Ran ran = Shell("set -o pipefail; timeout 10 $TOOL watch --json --interval 20 $S/journal | head -n 1");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.lines().size(), 1U);
  Close();
}

TEST_F(Watch, on_a_terminal_redraws_in_place_and_stays_within_it) {
  job_.Share();
  Open();
  winsize size{.ws_row = 24, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};
  int terminal = -1;
  const pid_t pid = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (pid == 0) {
    ::execl(AMEM_REPLAY, "amem-replay", "watch", "--interval", "30", (scratch_ / "journal").c_str(), nullptr);
    ::_exit(127);
  }
  ASSERT_GT(pid, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  Close();
  std::string text;
  char piece[4096];
  for (ssize_t n = 0; (n = ::read(terminal, piece, sizeof piece)) > 0;) text.append(piece, static_cast<std::size_t>(n));
  int status = 0;
  ::waitpid(pid, &status, 0);
  ::close(terminal);
  EXPECT_EQ(status, 0);
  EXPECT_HAS(text, "\x1b[H");
  EXPECT_HAS(text, "\x1b[J");
  std::size_t frames = 0;
  for (std::size_t at = text.find("\x1b[H"); at != std::string::npos; at = text.find("\x1b[H", at + 1)) ++frames;
  EXPECT_GT(frames, 3U);
  const std::string last = text.substr(text.rfind("\x1b[H"));
  EXPECT_HAS(last, "closed");
  std::size_t lines = 0;
  for (std::size_t from = 0, to = 0; (to = last.find("\x1b[K", from)) != std::string::npos; from = to + 3, ++lines)
    EXPECT_LE(to - from, 64U) << "no line is wider than the terminal";
  EXPECT_EQ(lines, 4U);
}

TEST_F(Watch, of_nobody_says_so) {
  const Ran nobody = Shell("export AMEM_JOURNAL_DIR=$S; $TOOL watch 999999");
  EXPECT_EQ(nobody.code, 2);
  EXPECT_HAS(nobody.err, "process 999999 has no journal");
  const Ran nowhere = Shell("$TOOL watch $S/absent");
  EXPECT_EQ(nowhere.code, 2);
  EXPECT_HAS(nowhere.err, "absent");
  EXPECT_EQ(Shell("$TOOL watch --interval 0 $S").code, 1);
}

TEST_F(Watch, once_of_the_dead_shows_where_they_ended) {
  job_.Share();
  Open();
  Close();
  const Ran live = Shell("$TOOL watch $S/journal");
  EXPECT_EQ(live.code, 2);
  EXPECT_HAS(live.err, "is live");
  const Ran once = Shell("$TOOL watch --once $S/journal");
  EXPECT_EQ(once.code, 0) << once.err;
  EXPECT_HAS(once.out, "closed");
}

}  // namespace
}  // namespace amem
