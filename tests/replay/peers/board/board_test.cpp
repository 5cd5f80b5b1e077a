// Boards and session pages in one process: what is written is read, once and for all, and what was written over is noticed.
#include "replay/peers/board/board.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "replay/peers/board/participant.h"
#include "replay/peers/board/session_page.h"
#include "tests/journal/base/no_descriptors.h"

namespace amem::board {
namespace {

using agreement::Ballot;
using agreement::Cause;
using agreement::Vote;

const std::vector<SessionId> kThree{SessionId{11}, SessionId{12}, SessionId{13}};
bool NobodyEnded(std::size_t) { return false; }

// All bytes of a board or a page, as somebody's stray pointer might reach them.
class Bare {
 public:
  explicit Bare(int fd, bool write = true) {
    bytes_ = static_cast<std::size_t>(::lseek(fd, 0, SEEK_END));
    at_ = ::mmap(nullptr, bytes_, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  }
  ~Bare() {
    if (mapped()) ::munmap(at_, bytes_);
  }
  [[nodiscard]] bool mapped() const { return at_ != MAP_FAILED; }
  [[nodiscard]] std::span<std::byte> all() const { return {static_cast<std::byte*>(at_), bytes_}; }

 private:
  std::size_t bytes_ = 0;
  void* at_ = MAP_FAILED;
};

Board Three() {
  auto board = Board::Make("", kThree);
  EXPECT_TRUE(board) << board.status().message();
  return *std::move(board);
}

// ---- what is written is read

TEST(BoardTest, votes_and_decisions_are_read_by_all_who_map_it) {
  Board mine = Three();
  auto opened = Board::Open(mine.fd(), "", kThree);
  ASSERT_TRUE(opened) << opened.status().message();
  ASSERT_EQ(*mine.NextRound(), 1U);
  mine.CastVote(0, 1, Ballot::kCome, true);
  opened->CastVote(1, 1, Ballot::kCome, false, {Code::kOutOfMemory, "out of memory", 2});
  EXPECT_TRUE(mine.Decide(0, 1, Ballot::kCome, Cause::kVotedNo, 1));
  EXPECT_FALSE(opened->Decide(1, 1, Ballot::kCome, Cause::kAllVoted, 1)) << "a decision is final";
  for (Board* board : {&mine, &*opened}) {
    const BoardReading reading = board->Read(1, NobodyEnded);
    EXPECT_EQ(reading.seats[0].votes[0], Vote::kYes);
    EXPECT_EQ(reading.seats[1].votes[0], Vote::kNo);
    EXPECT_EQ(reading.seats[2].votes[0], Vote::kNone);
    EXPECT_EQ(reading.decisions[0], (BallotDecision{Cause::kVotedNo, 0, 1}));
    EXPECT_EQ(reading.decisions[1].cause, Cause::kUndecided);
    EXPECT_GT(reading.voted_at_ns[1][0], 0U);
    EXPECT_EQ(reading.voted_at_ns[2][0], 0U);
    EXPECT_EQ(board->StatementOf(1, Ballot::kCome, 1), (Status{Code::kOutOfMemory, "out of memory", 2}));
    EXPECT_EQ(*board->NextRound(), 2U);
  }
}

TEST(BoardTest, what_an_earlier_round_left_says_nothing_in_a_later_one) {
  Board board = Three();
  board.CastVote(0, 1, Ballot::kSaved, true);
  board.CastVote(1, 1, Ballot::kSaved, false, {Code::kIo, "why"});
  board.Decide(0, 1, Ballot::kCome, Cause::kLate, 2, {Code::kTimeout, "late"});
  const BoardReading next = board.Read(2, NobodyEnded);
  for (const auto& seat : next.seats) EXPECT_EQ(seat.votes, (agreement::Seat{}.votes));
  for (const auto& decision : next.decisions) EXPECT_EQ(decision.cause, Cause::kUndecided);
  EXPECT_EQ(board.StatementOf(1, Ballot::kSaved, 2), std::nullopt);
  board.Decide(1, 2, Ballot::kCome, Cause::kLate, 2, {Code::kTimeout, "late"});
  EXPECT_EQ(board.Read(1, NobodyEnded).decisions[0].cause, Cause::kSuperseded);
  board.CastVote(0, 2, Ballot::kCome, true);
  board.CastVote(1, 1, Ballot::kCome, true);
  EXPECT_EQ(agreement::Absent(board.Read(1, NobodyEnded).ViewOf(1), Ballot::kCome), std::vector<std::size_t>{2})
      << "member 0 is in a later round already";
  EXPECT_FALSE(board.Decide(0, 1, Ballot::kCome, Cause::kAllVoted, 0)) << "an old round decides nothing";
}

TEST(BoardTest, of_many_that_decide_at_once_one_does_and_all_read_the_same) {
  Board board = Three();
  for (RoundNumber round = 1; round <= 200; ++round) {
    std::atomic<int> ready = 0, decided = 0;
    std::vector<std::thread> members;
    std::array<BallotDecision, 3> read;
    for (std::size_t seat = 0; seat < 3; ++seat) {
      members.emplace_back([&, seat] {
        for (++ready; ready < 3;) std::this_thread::yield();
        if (board.Decide(seat, round, Ballot::kGone, seat == 0 ? Cause::kAllVoted : Cause::kLate, seat,
                         {Code::kTimeout, "late"}))
          ++decided;
        read[seat] = board.Read(round, NobodyEnded).decisions[static_cast<std::size_t>(Ballot::kGone)];
      });
    }
    for (auto& member : members) member.join();
    ASSERT_EQ(decided, 1);
    ASSERT_EQ(read[0], read[1]);
    ASSERT_EQ(read[0], read[2]);
  }
}

// Of the members that vote last at least one sees all votes, so somebody decides and nobody has to be woken by a vote.
TEST(BoardTest, whoever_votes_last_sees_all_votes) {
  Board board = Three();
  for (RoundNumber round = 1; round <= 200; ++round) {
    std::atomic<int> ready = 0, saw_all = 0;
    std::vector<std::thread> members;
    for (std::size_t seat = 0; seat < 3; ++seat) {
      members.emplace_back([&, seat] {
        for (++ready; ready < 3;) std::this_thread::yield();
        board.CastVote(seat, round, Ballot::kSaved, true);
        const BoardReading reading = board.Read(round, NobodyEnded);
        if (agreement::Absent(reading.ViewOf(seat), Ballot::kSaved).empty()) ++saw_all;
      });
    }
    for (auto& member : members) member.join();
    ASSERT_GE(saw_all, 1);
  }
}

TEST(BoardTest, a_wait_ends_with_a_decision_or_at_its_time) {
  Board board = Three();
  const std::uint32_t ticket = board.Ticket();
  const auto began = Now();
  board.AwaitChange(ticket, In(std::chrono::milliseconds(20)));
  EXPECT_GE(SinceThen(began).count(), 15);
  std::thread other([&] { board.Decide(1, 1, Ballot::kCome, Cause::kLate, 0, {Code::kTimeout, "late"}); });
  while (board.Read(1, NobodyEnded).decisions[0].cause == Cause::kUndecided)
    board.AwaitChange(ticket, In(std::chrono::minutes(5)));
  other.join();
  EXPECT_LT(SinceThen(began).count(), 60'000);
  board.AwaitChange(ticket, In(std::chrono::minutes(5)));  // it has changed since the ticket
}

TEST(BoardTest, a_long_statement_is_cut) {
  Board board = Three();
  board.CastVote(0, 1, Ballot::kOpen, false, {Code::kDriver, std::string(2000, 'x'), 999});
  const auto said = board.StatementOf(0, Ballot::kOpen, 1);
  ASSERT_TRUE(said);
  EXPECT_EQ(said->message(), std::string(kStatementBytes, 'x'));
  EXPECT_EQ(said->driver_result(), 999);
}

// A round ends for all when the time of the first member to run out of it does.
TEST(BoardTest, the_earliest_end_of_those_that_have_come_is_seen_by_all) {
  Board board = Three();
  board.SetUntil(0, 900);
  EXPECT_EQ(board.Read(1, NobodyEnded).until_ns, 0U) << "it has not come";
  board.CastVote(0, 1, Ballot::kCome, true);
  board.SetUntil(1, 700);
  board.CastVote(1, 1, Ballot::kCome, true);
  board.SetUntil(2, 0);
  board.CastVote(2, 1, Ballot::kCome, true);
  EXPECT_EQ(board.Read(1, NobodyEnded).until_ns, 700U);
  EXPECT_EQ(board.Read(2, NobodyEnded).until_ns, 0U) << "of another round";
}

TEST(BoardTest, who_keeps_its_memory_is_read_beside_the_vote_on_come_and_is_the_same_for_all) {
  Board board = Three();
  board.CastVote(0, 1, Ballot::kCome, true);
  board.CastVote(1, 1, Ballot::kCome, true, {}, true);
  EXPECT_EQ(board.Read(1, NobodyEnded).keeps, (std::vector<bool>{false, true, false}));
  EXPECT_EQ(board.Read(1, NobodyEnded).seats[1].votes[0], Vote::kYes);
  EXPECT_EQ(board.Read(2, NobodyEnded).keeps, (std::vector<bool>{false, false, false})) << "of another round";
}

TEST(BoardTest, whose_later_decisions_were_written_over_is_not_used_again) {
  const Board board = Three();
  ASSERT_TRUE(board.NextRound());
  const Bare bare(board.fd());
  bare.all()[64 + 8 * static_cast<std::size_t>(Ballot::kOpen)] = std::byte{7};
  EXPECT_EQ(board.NextRound().status().code(), Code::kCorrupt);
}

TEST(BoardTest, a_session_that_shares_with_nobody_has_a_board_in_its_own_memory) {
  const test::NoDescriptors none;
  auto board = Board::MakePrivate("kv", {SessionId{11}});
  ASSERT_TRUE(board) << board.status().message();
  EXPECT_EQ(board->fd(), -1);
  board->CastVote(0, 1, Ballot::kCome, true);
  EXPECT_TRUE(board->Decide(0, 1, Ballot::kCome, Cause::kAllVoted, 0));
  EXPECT_EQ(*board->NextRound(), 2U);
}

// ---- what is no board of this set

TEST(BoardTest, a_board_of_another_set_scope_or_version_is_refused_by_name) {
  const Board board = Three();
  EXPECT_EQ(Board::Open(board.fd(), "tag", kThree).status().code(), Code::kInvalid);
  EXPECT_EQ(Board::Open(board.fd(), "", {SessionId{11}, SessionId{12}}).status().code(), Code::kInvalid);
  const Bare bare(board.fd());
  const std::byte version = bare.all()[8];
  bare.all()[8] = std::byte{99};
  const Status other = Board::Open(board.fd(), "", kThree).status();
  EXPECT_EQ(other.code(), Code::kUnsupported);
  EXPECT_NE(other.message().find("version 99"), std::string::npos) << other.message();
  bare.all()[8] = version;
  EXPECT_TRUE(Board::Open(board.fd(), "", kThree));
  bare.all()[16] ^= std::byte{1};
  EXPECT_EQ(Board::Open(board.fd(), "", kThree).status().code(), Code::kCorrupt);
  EXPECT_EQ(Board::Make("", {}).status().code(), Code::kInvalid);
}

TEST(BoardTest, memory_that_could_shrink_is_no_board) {
  const UniqueFd fd(::memfd_create("not sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), 1 << 16), 0);
  EXPECT_EQ(Board::Open(fd.get(), "", kThree).status().code(), Code::kCorrupt);
  const Board board = Three();
  EXPECT_NE(::ftruncate(board.fd(), 0), 0) << "nor can a board";
}

// ---- what is written over

// Else the system would end the program with a signal that it does not expect.
TEST(BoardTest, a_limit_of_file_sizes_fails_and_does_not_kill) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{1024, 1024};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(1);
    const auto board = Board::Make("", kThree);
    const auto page = SessionPage::Make(SessionId{1});
    for (const std::string& said : {board.status().message(), page.status().message()})
      if (said.find("ulimit -f") == std::string::npos) ::_exit(2);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(BoardTest, words_of_chance_are_noticed) {
  std::mt19937_64 random(1);
  int votes = 0, cells = 0;
  constexpr int kWords = 200'000;
  for (int i = 0; i < kWords; ++i) {
    const std::uint64_t word = random();
    if (words::VoteIn(word, 5, 17)) ++votes;
    if (words::CellIn(word, 5, 1)) ++cells;
  }
  EXPECT_LT(votes, kWords / 1000) << "and then of any round";
  EXPECT_LT(cells, kWords / 1000);
  const std::uint64_t vote = words::Encode(words::VoteWord{3, Vote::kYes}, 5, 17);
  const std::uint64_t cell = words::Encode(words::CellWord{3, {Cause::kLate, 1, 2}}, 5, 1);
  for (int bit = 0; bit < 64; ++bit) {
    EXPECT_FALSE(words::VoteIn(vote ^ std::uint64_t{1} << bit, 5, 17)) << "bit " << bit;
    EXPECT_FALSE(words::CellIn(cell ^ std::uint64_t{1} << bit, 5, 1)) << "bit " << bit;
  }
  EXPECT_FALSE(words::VoteIn(vote, 5, 18)) << "it is another seat's";
  EXPECT_FALSE(words::VoteIn(vote, 6, 17)) << "it is another board's";
}

// Anywhere, of any kind: nothing that was not voted for ever passes, and nothing crashes.
TEST(BoardTest, a_page_that_is_written_over_never_says_that_all_have_voted) {
  std::mt19937_64 random(2);
  int noticed = 0;
  constexpr int kTimes = 3000;
  for (int i = 0; i < kTimes; ++i) {
    Board board = Three();
    board.CastVote(0, 1, Ballot::kCome, true);
    board.CastVote(1, 1, Ballot::kCome, false, {Code::kIo, "why"});
    board.Decide(2, 1, Ballot::kSaved, Cause::kLate, 0, {Code::kTimeout, "late"});
    const Bare bare(board.fd());
    const std::size_t first = random() % (bare.all().size() - 64), length = 1 + random() % 64;
    const auto value = static_cast<std::byte>(random() % 3 == 0 ? 0 : random());
    for (std::size_t at = first; at < first + length; ++at)
      bare.all()[at] = random() % 2 == 0 ? value : static_cast<std::byte>(random());
    const BoardReading reading = board.Read(1, NobodyEnded);
    for (const auto& decision : reading.decisions) {
      ASSERT_NE(decision.cause, Cause::kAllVoted);
      if (decision.cause == Cause::kDamaged) ++noticed;
    }
    ASSERT_NE(reading.seats[1].votes[0], Vote::kYes);
    ASSERT_NE(reading.seats[2].votes[0], Vote::kYes);
    if (const auto said = board.StatementOf(1, Ballot::kCome, 1)) {
      ASSERT_EQ(said->message(), "why");
    }
  }
  EXPECT_GT(noticed, kTimes / 50);
}

TEST(BoardTest, a_wiped_board_is_damaged_and_not_empty) {
  Board board = Three();
  board.Decide(0, 1, Ballot::kCome, Cause::kAllVoted, 0);
  const Bare bare(board.fd());
  std::ranges::fill(bare.all(), std::byte{0});
  for (const auto& decision : board.Read(1, NobodyEnded).decisions) EXPECT_EQ(decision.cause, Cause::kDamaged);
  EXPECT_EQ(board.NextRound().status().code(), Code::kCorrupt);
}

// ---- whole rounds, by threads of one process

class IdleHooks : public RoundHooks {
 public:
  Status Do(agreement::Work, Deadline, const std::function<bool()>&) override { return {}; }
  bool HasEnded(SessionId) override { return false; }
  bool SetHasChanged() override { return false; }
  std::string NameOf(SessionId session) override { return "session " + std::to_string(session.value); }
  std::string SeenOf(SessionId, std::chrono::milliseconds) override { return {}; }
  void OnVote(Ballot ballot, const Status& mine) override { votes.push_back({ballot, mine}); }
  void OnWait(Ballot, const BoardReading&) override {}
  void OnDecision(Ballot ballot, const BoardReading&, const Status&) override { decided.push_back(ballot); }
  std::vector<Ballot> decided;
  std::vector<std::pair<Ballot, Status>> votes;
};

CallOnBoard CallOf(CycleKind kind) { return {.kind = kind, .until = In(std::chrono::minutes(5))}; }

TEST(RoundTest, needs_no_descriptor_and_nobody_in_the_background) {
  Board board = Three();
  const test::NoDescriptors none;
  std::array<std::vector<Ballot>, 3> decided;
  std::atomic<int> failed = 0;
  std::vector<std::thread> members;
  for (std::size_t seat = 0; seat < 3; ++seat) {
    members.emplace_back([&, seat] {
      IdleHooks hooks;
      for (int i = 0; i < 100; ++i) {
        CallOnBoard call = CallOf(i % 2 == 0 ? CycleKind::kPause : CycleKind::kResume);
        const auto outcome = TakePart(board, seat, call, hooks);
        if (!outcome || outcome->failed || !outcome->status.ok()) ++failed;
      }
      decided[seat] = hooks.decided;
    });
  }
  for (auto& member : members) member.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(*board.NextRound(), 101U);
  const std::vector<Ballot> cycle{Ballot::kCome, Ballot::kIdle, Ballot::kSaved,  Ballot::kGone,
                                  Ballot::kCome, Ballot::kMade, Ballot::kJoined, Ballot::kOpen};
  for (const auto& ballots : decided) {
    ASSERT_EQ(ballots.size(), 400U);
    for (std::size_t i = 0; i < ballots.size(); ++i) ASSERT_EQ(ballots[i], cycle[i % 8]);
  }
}

TEST(RoundTest, is_not_for_a_session_that_the_others_take_for_ended) {
  class Ended final : public IdleHooks {
   public:
    bool HasEnded(SessionId session) override { return session == SessionId{12}; }
  };
  Board board = Three();
  Ended hooks;
  CallOnBoard call = CallOf(CycleKind::kPause);
  EXPECT_EQ(TakePart(board, 1, call, hooks).status().code(), Code::kRefused);
  EXPECT_EQ(TakePart(board, 0, call, hooks)->status.message(), "session 12 has ended (pause, ballot \"come\")");
}

// The others learn of the failure while they work, and break off.
TEST(RoundTest, a_failure_is_told_with_its_reason_and_breaks_off_the_work_of_others) {
  class Failing final : public IdleHooks {
   public:
    Status Do(agreement::Work work, Deadline, const std::function<bool()>&) override {
      return work == agreement::Work::kSave ? Status{Code::kOutOfMemory, "no host memory", 2} : Status{};
    }
  };
  class Working final : public IdleHooks {
   public:
    Status Do(agreement::Work work, Deadline, const std::function<bool()>& is_overtaken) override {
      while (work == agreement::Work::kSave && !is_overtaken()) std::this_thread::yield();
      return {};
    }
  };
  auto board = Board::Make("", {SessionId{11}, SessionId{12}});
  Failing failing;
  Working working;
  RoundOutcome of_other;
  std::thread other([&] {
    CallOnBoard call = CallOf(CycleKind::kPause);
    of_other = *TakePart(*board, 1, call, working);
  });
  CallOnBoard call = CallOf(CycleKind::kPause);
  RoundOutcome outcome = *TakePart(*board, 0, call, failing);
  other.join();
  for (const auto* told : {&outcome, &of_other}) {
    EXPECT_EQ(told->ending, agreement::Ending::kRunning);
    EXPECT_EQ(told->failed, Ballot::kSaved);
    EXPECT_EQ(told->culprit, SessionId{11});
    EXPECT_EQ(told->status.code(), Code::kOutOfMemory);
    EXPECT_EQ(told->status.driver_result(), 2);
    EXPECT_EQ(told->status.message(), "session 11 failed (pause, ballot \"saved\"): no host memory");
  }
  ASSERT_EQ(failing.votes.size(), 3U);
  EXPECT_EQ(failing.votes[2].second.message(), "no host memory");
  ASSERT_EQ(working.votes.size(), 2U) << "it was not asked for a vote on what had failed already";
}

// A look that has the later decision and not the earlier one, because both were made while it lasted.
TEST(RoundTest, a_decision_that_is_read_before_the_one_that_was_made_first_is_no_failure_of_an_undo) {
  auto board = Board::Make("", {SessionId{11}, SessionId{12}});
  board->CastVote(1, 1, Ballot::kCome, true);
  board->CastVote(1, 1, Ballot::kIdle, false, {Code::kDriver, "a capture runs"});
  board->Decide(1, 1, Ballot::kIdle, Cause::kVotedNo, 1);
  IdleHooks hooks;
  CallOnBoard call = CallOf(CycleKind::kPause);
  const RoundOutcome outcome = *TakePart(*board, 0, call, hooks);
  EXPECT_EQ(outcome.ending, agreement::Ending::kRunning);
  EXPECT_EQ(outcome.failed, Ballot::kIdle);
  EXPECT_EQ(outcome.status.message(), "session 12 failed (pause, ballot \"idle\"): a capture runs");
  EXPECT_TRUE(outcome.undo.ok()) << outcome.undo.message();
  EXPECT_EQ(hooks.decided, (std::vector{Ballot::kCome, Ballot::kIdle}));
}

TEST(RoundTest, of_a_pause_whose_undo_fails_too_ends_paused_and_says_why_both_failed) {
  class Failing final : public IdleHooks {
   public:
    Status Do(agreement::Work work, Deadline, const std::function<bool()>&) override {
      releases += work == agreement::Work::kRelease ? 1 : 0;
      if (work == agreement::Work::kRelease && releases == 1) return {Code::kDriver, "cannot release", 7};
      return work == agreement::Work::kMake ? Status{Code::kOutOfMemory, "no device memory", 2} : Status{};
    }
    int releases = 0;
  };
  auto board = Board::Make("", {SessionId{11}, SessionId{12}});
  Failing failing;
  IdleHooks idle;
  RoundOutcome of_other;
  std::thread other([&] {
    CallOnBoard call = CallOf(CycleKind::kPause);
    call.undo = std::chrono::minutes(1);
    of_other = *TakePart(*board, 1, call, idle);
  });
  CallOnBoard call = CallOf(CycleKind::kPause);
  call.undo = std::chrono::minutes(1);
  RoundOutcome outcome = *TakePart(*board, 0, call, failing);
  other.join();
  EXPECT_EQ(failing.releases, 2);
  for (const auto* told : {&outcome, &of_other}) {
    EXPECT_EQ(told->ending, agreement::Ending::kPaused);
    EXPECT_EQ(told->failed, Ballot::kGone);
    EXPECT_EQ(told->status.message(), "session 11 failed (pause, ballot \"gone\"): cannot release");
    EXPECT_EQ(told->undo.message(), "session 11 failed (pause, ballot \"made\"): no device memory");
    EXPECT_EQ(told->undo.code(), Code::kOutOfMemory);
  }
}

TEST(RoundTest, is_waited_for_beyond_its_time_only_while_the_absent_may_come) {
  class Patient final : public IdleHooks {
   public:
    bool MayComeYet(const std::vector<SessionId>& absent) override {
      EXPECT_EQ(absent, (std::vector{SessionId{12}}));
      return ++asked < 3;
    }
    int asked = 0;
  };
  auto board = Board::Make("", {SessionId{11}, SessionId{12}});
  Patient hooks;
  CallOnBoard call = CallOf(CycleKind::kResume);
  call.until = In(std::chrono::milliseconds(50));
  call.patient = true;
  const RoundOutcome outcome = *TakePart(*board, 0, call, hooks);
  EXPECT_EQ(outcome.ending, agreement::Ending::kPaused);
  EXPECT_EQ(outcome.status.code(), Code::kTimeout);
  EXPECT_EQ(outcome.culprit, SessionId{12});
  EXPECT_GE(hooks.asked, 3);
}

// Its session closes meanwhile, so that nobody would ever come.
TEST(RoundTest, that_is_waited_for_without_a_deadline_ends_when_the_session_does) {
  class Closing final : public IdleHooks {
   public:
    bool HasEnded(SessionId session) override { return session == SessionId{11} && ++asked > 5; }
    int asked = 0;
  };
  auto board = Board::Make("", {SessionId{11}, SessionId{12}});
  Closing hooks;
  CallOnBoard call = CallOf(CycleKind::kResume);
  call.until = Now();
  call.patient = true;
  const RoundOutcome outcome = *TakePart(*board, 0, call, hooks);
  EXPECT_EQ(outcome.ending, agreement::Ending::kPaused);
  EXPECT_EQ(outcome.status.code(), Code::kPeerLost) << outcome.status.message();
  EXPECT_EQ(outcome.culprit, SessionId{11});
}

// Wherever memory runs out, the member votes against what it has not voted on yet, and nobody waits for it.
TEST(RoundTest, of_a_member_without_memory_fails_for_all_at_once) {
  class WithoutMemory final : public IdleHooks {
   public:
    enum class In : std::uint8_t { kWork, kLook, kVote, kDecision };
    explicit WithoutMemory(In in) : in_(in) {}
    Status Do(agreement::Work work, Deadline, const std::function<bool()>&) override {
      return Lack(In::kWork, work == agreement::Work::kSave), Status{};
    }
    bool HasEnded(SessionId) override { return Lack(In::kLook, votes.size() == 2), false; }
    void OnVote(Ballot ballot, const Status& mine) override {
      votes.push_back({ballot, mine});
      Lack(In::kVote, ballot == Ballot::kSaved && mine.ok());
    }
    void OnDecision(Ballot ballot, const BoardReading&, const Status&) override {
      decided.push_back(ballot);
      Lack(In::kDecision, ballot == Ballot::kIdle);
    }

   private:
    void Lack(In in, bool now) const {
      if (in == in_ && now) throw std::bad_alloc();
    }
    const In in_;
  };
  using In = WithoutMemory::In;
  for (const In in : {In::kWork, In::kLook, In::kVote, In::kDecision}) {
    auto board = Board::Make("", {SessionId{11}, SessionId{12}});
    WithoutMemory lacking(in);
    IdleHooks idle;
    RoundOutcome of_other;
    std::thread other([&] {
      CallOnBoard call = CallOf(CycleKind::kPause);
      of_other = *TakePart(*board, 1, call, idle);
    });
    CallOnBoard call = CallOf(CycleKind::kPause);
    RoundOutcome outcome = *TakePart(*board, 0, call, lacking);
    other.join();
    for (const auto* told : {&outcome, &of_other}) {
      EXPECT_EQ(told->ending, agreement::Ending::kRunning);
      EXPECT_EQ(told->failed, Ballot::kSaved) << static_cast<int>(in);
      EXPECT_EQ(told->culprit, SessionId{11});
      EXPECT_NE(told->status.message().find("no memory left"), std::string::npos) << told->status.message();
    }
  }
}

// The words for a failure need memory, and what it is does not: a pause that failed must not end as one that succeeded.
TEST(RoundTest, that_failed_elsewhere_has_failed_for_a_member_without_memory_to_word_it) {
  class WithoutWords final : public IdleHooks {
   public:
    explicit WithoutWords(int spared) : spared_(spared) {}
    std::string NameOf(SessionId session) override {
      ++asked;
      if (spared_-- <= 0) throw std::bad_alloc();  // and from then on: when it asks for how many depends on the other's pace
      return IdleHooks::NameOf(session);
    }
    void OnDecision(Ballot ballot, const BoardReading& reading, const Status& why) override {
      IdleHooks::OnDecision(ballot, reading, why);
      if (!why.ok()) failed.push_back(ballot);
    }
    int asked = 0;
    std::vector<Ballot> failed;

   private:
    int spared_;  // names before there is no memory for one
  };
  class Failing final : public IdleHooks {
   public:
    Status Do(agreement::Work work, Deadline, const std::function<bool()>&) override {
      if (work == at) return {Code::kDriver, "a call failed"};
      if (work == then) return {Code::kDriver, "its undo failed"};
      return {};
    }
    std::optional<agreement::Work> at, then;
  };
  struct Case {
    Ballot failed;
    agreement::Work at;
    std::optional<agreement::Work> then;  // fails in the undo
    int spared;
  };
  for (const Case& one : {Case{Ballot::kSaved, agreement::Work::kSave, {}, 0},
                          Case{Ballot::kGone, agreement::Work::kRelease, agreement::Work::kMake, 1}}) {
    auto board = Board::Make("", {SessionId{11}, SessionId{12}});
    WithoutWords lacking(one.spared);
    Failing failing;
    failing.at = one.at;
    failing.then = one.then;
    std::thread other([&] {
      CallOnBoard call = CallOf(CycleKind::kPause);
      static_cast<void>(TakePart(*board, 1, call, failing));
    });
    CallOnBoard call = CallOf(CycleKind::kPause);
    const RoundOutcome outcome = *TakePart(*board, 0, call, lacking);
    other.join();
    ASSERT_GT(lacking.asked, one.spared);
    EXPECT_EQ(outcome.failed, one.failed);
    EXPECT_FALSE(outcome.status.ok());
    EXPECT_EQ(outcome.ending, one.then ? agreement::Ending::kPaused : agreement::Ending::kRunning);
    const Status& unworded = one.then ? outcome.undo : outcome.status;
    EXPECT_EQ(unworded.message(), "no memory left");
    ASSERT_FALSE(lacking.failed.empty()) << "whoever did not get the decision takes the ballot for one that passed";
    EXPECT_EQ(lacking.failed.front(), one.failed);
    EXPECT_EQ(lacking.failed.size(), one.then ? 2U : 1U);
  }
}

TEST(RoundTest, whose_set_changes_lets_all_come_again) {
  class Growing final : public IdleHooks {
   public:
    bool SetHasChanged() override { return true; }
  };
  Board board = Three();
  std::vector<std::thread> others;
  std::atomic<int> again = 0;
  for (const std::size_t seat : {1U, 2U}) {
    others.emplace_back([&, seat] {
      IdleHooks hooks;
      CallOnBoard call = CallOf(CycleKind::kPause);
      const auto outcome = TakePart(board, seat, call, hooks);
      if (outcome && outcome->again && outcome->failed == Ballot::kCome && !outcome->culprit) ++again;
    });
  }
  while (agreement::Absent(board.Read(1, NobodyEnded).ViewOf(0), Ballot::kCome).size() > 1) std::this_thread::yield();
  Growing hooks;
  CallOnBoard call = CallOf(CycleKind::kPause);
  const auto outcome = TakePart(board, 0, call, hooks);
  ASSERT_TRUE(outcome);
  EXPECT_TRUE(outcome->again);
  EXPECT_EQ(call.gave_up, (std::set<SessionId>{SessionId{12}, SessionId{13}}));
  EXPECT_EQ(outcome->status.message(), "session 11 began to share memory with others (pause, ballot \"come\")");
  for (auto& other : others) other.join();
  EXPECT_EQ(again, 2);
}

// ---- session pages

SessionFacts SomeFacts() {
  SessionFacts facts{.host = "a-host-name", .pid = 4711, .rank = 3, .group = -7, .keeps = true};
  facts.scopes.push_back({.tag = "", .lifecycle = Lifecycle::kPaused, .cycle = 9, .neighbours = {SessionId{1}, SessionId{2}}});
  facts.scopes.push_back(
      {.tag = "weights", .lifecycle = Lifecycle::kRunning, .cycle = 2, .call = CycleKind::kResume, .call_since_ns = 77});
  return facts;
}

TEST(SessionPageTest, facts_are_read_as_they_were_published) {
  auto page = SessionPage::Make(SessionId{5});
  ASSERT_TRUE(page) << page.status().message();
  auto peer = PeerPage::Open(page->fd(), SessionId{5});
  ASSERT_TRUE(peer) << peer.status().message();
  EXPECT_EQ(peer->Facts().status().code(), Code::kNotFound);
  ASSERT_TRUE(page->Publish(SomeFacts()).ok());
  auto facts = peer->Facts();
  ASSERT_TRUE(facts);
  EXPECT_EQ(*facts, SomeFacts());
  ASSERT_NE(facts->ScopeOf("weights"), nullptr);
  EXPECT_EQ(facts->ScopeOf("other"), nullptr);
  EXPECT_TRUE(peer->Life().IsUnknown()) << "nobody holds it";
  EXPECT_EQ(PeerPage::Open(page->fd(), SessionId{6}).status().code(), Code::kInvalid);
}

TEST(SessionPageTest, nobody_but_its_maker_can_write_to_it) {
  auto page = SessionPage::Make(SessionId{5});
  ASSERT_TRUE(page);
  if ((::fcntl(page->fd(), F_GET_SEALS) & 0x10) == 0) GTEST_SKIP() << "this kernel has no F_SEAL_FUTURE_WRITE";
  EXPECT_FALSE(Bare(page->fd()).mapped());
  EXPECT_TRUE(Bare(page->fd(), false).mapped());
  const char byte = 0;
  EXPECT_LT(::pwrite(page->fd(), &byte, 1, 0), 0);
}

TEST(SessionPageTest, more_than_it_has_place_for_is_refused_and_changes_nothing) {
  auto page = SessionPage::Make(SessionId{5});
  auto peer = PeerPage::Open(page->fd(), SessionId{5});
  ASSERT_TRUE(page->Publish(SomeFacts()).ok());
  SessionFacts many = SomeFacts();
  many.scopes[0].neighbours.resize(1 << 18);
  EXPECT_EQ(page->Publish(many).code(), Code::kOutOfMemory);
  EXPECT_EQ(*peer->Facts(), SomeFacts());
}

TEST(SessionPageTest, facts_are_of_one_moment_while_their_owner_publishes) {
  auto page = SessionPage::Make(SessionId{5});
  auto peer = PeerPage::Open(page->fd(), SessionId{5});
  SessionFacts facts = SomeFacts();
  facts.scopes[0].neighbours.assign(200, SessionId{1});
  facts.scopes[0].cycle = 1;
  ASSERT_TRUE(page->Publish(facts).ok());
  std::atomic<bool> end = false;
  std::thread owner([&] {
    for (std::uint64_t n = 2; !end; ++n) {
      facts.scopes[0].cycle = n;
      std::ranges::fill(facts.scopes[0].neighbours, SessionId{n});
      static_cast<void>(page->Publish(facts));
      std::this_thread::yield();
    }
  });
  std::uint64_t last = 0;
  for (int i = 0; i < 500; ++i) {
    const auto read = peer->Facts();
    if (!read) continue;  // it was published a thousand times meanwhile
    const ScopeFacts& scope = read->scopes[0];
    EXPECT_EQ(std::ranges::count(scope.neighbours, SessionId{scope.cycle}), 200);
    EXPECT_GE(scope.cycle, last);
    last = scope.cycle;
  }
  end = true;
  owner.join();
  EXPECT_GE(last, 1U);
}

TEST(SessionPageTest, the_set_is_read_from_the_pages_of_neighbours_and_theirs) {
  // 1 - 2 - 3 share, 3 has ended, 4 is behind it; 2 - 5, whose page is not here; 9 shares with nobody.
  std::map<SessionId, Sighted> pages;
  const auto shares = [&](std::uint64_t session, std::vector<SessionId> with, bool ended = false) {
    SessionFacts facts;
    facts.scopes.push_back({.tag = "t", .neighbours = std::move(with)});
    pages[SessionId{session}] = {ended, facts};
  };
  shares(1, {SessionId{2}});
  shares(2, {SessionId{1}, SessionId{3}, SessionId{5}});
  shares(3, {SessionId{2}, SessionId{4}}, true);
  shares(4, {SessionId{3}});
  shares(9, {});
  const auto page = [&](SessionId session) { return pages[session]; };
  const SharingSet set = SetOf(SessionId{1}, "t", page);
  EXPECT_EQ(set.members, (std::vector<SessionId>{SessionId{1}, SessionId{2}, SessionId{5}}));
  EXPECT_EQ(set.unknown, std::vector<SessionId>{SessionId{5}});
  EXPECT_EQ(SetOf(SessionId{1}, "other", page).members, std::vector<SessionId>{SessionId{1}});
  EXPECT_EQ(SetOf(SessionId{9}, "t", page).members, std::vector<SessionId>{SessionId{9}});
}

}  // namespace
}  // namespace amem::board
