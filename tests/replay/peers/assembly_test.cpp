// Sessions that find each other's pages and boards by their sockets, and carry out rounds on them: as threads of one process,
// and as processes that fork, end, or damage their page.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <fstream>
#include <thread>

#include "replay/peers/unix/pages.h"
#include "tests/in_thread.h"
#include "tests/journal/base/no_descriptors.h"
#include "tests/replay/peers/call_on_board.h"

namespace amem {
namespace {

using namespace test;
using agreement::Ballot;
using agreement::Ending;
using std::chrono::milliseconds;

class AssemblyTest : public ::testing::Test {
 protected:
  // Each imports from the one before it, so the first and the last of more than three know each other through others only.
  void Chain(std::size_t count, std::uint32_t timeout_ms = 20'000) {
    for (std::size_t i = 0; i < count; ++i) {
      ranks_.push_back(std::make_unique<Rank>(directory_, static_cast<std::int32_t>(i), timeout_ms));
      ASSERT_TRUE(ranks_.back()->peers) << ranks_.back()->problem.message();
      if (i == 0) continue;
      ASSERT_TRUE(ranks_[i]->ImportFrom(*ranks_[i - 1], AllocationId{i}, AllocationId{10 + i}));
    }
  }
  std::vector<board::RoundOutcome> AllCall(CycleKind kind, milliseconds time = milliseconds(20'000)) {
    std::vector<board::RoundOutcome> outcomes(ranks_.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      threads.emplace_back([&, i] { outcomes[i] = CallOnBoards(*ranks_[i]->peers, kind, time); });
    for (auto& thread : threads) thread.join();
    return outcomes;
  }
  TemporaryDirectory directory_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

TEST_F(AssemblyTest, two_sessions_that_share_memory_pause_and_resume_on_one_board) {
  Chain(2);
  for (int cycle = 0; cycle < 3; ++cycle) {
    for (const auto& outcome : AllCall(CycleKind::kPause))
      EXPECT_EQ(outcome.ending, Ending::kPaused) << outcome.status.message();
    for (const auto& outcome : AllCall(CycleKind::kResume))
      EXPECT_EQ(outcome.ending, Ending::kRunning) << outcome.status.message();
  }
  const auto a = ranks_[0]->peers->Assemble(CycleKind::kPause, ""), b = ranks_[1]->peers->Assemble(CycleKind::kPause, "");
  ASSERT_TRUE(a->Find(In(milliseconds(5000))).ok());
  ASSERT_TRUE(b->Find(In(milliseconds(5000))).ok());
  EXPECT_EQ(a->board().id(), b->board().id()) << "it is used again for the same set";
  EXPECT_EQ(a->Members(), b->Members());
  EXPECT_EQ(a->Members(), (std::vector{ranks_[0]->identity, ranks_[1]->identity}));
}

// Another thread may hold its ledger just then, in a driver call that takes long.
TEST_F(AssemblyTest, how_a_call_has_ended_is_on_its_page_also_if_the_session_cannot_say) {
  Chain(2);
  for (const auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kRunning;
  for (const auto& outcome : AllCall(CycleKind::kPause)) ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  const SessionId first = ranks_[0]->identity.session;
  const auto reader = ranks_[1]->peers->Assemble(CycleKind::kPause, "");
  ASSERT_TRUE(reader->Find(In(milliseconds(5000))).ok());
  ASSERT_EQ(reader->FactsOf(first).lifecycle, Lifecycle::kRunning);
  for (const Lifecycle last : {Lifecycle::kPaused, Lifecycle::kRunning}) {
    ranks_[0]->session.lifecycle = Lifecycle::kNew;  // it is not known
    ranks_[0]->peers->Assemble(CycleKind::kPause, "")->EndedAs({last, 7});
    EXPECT_EQ(reader->FactsOf(first).lifecycle, last);
    EXPECT_EQ(reader->FactsOf(first).cycle, 7U);
  }
}

TEST_F(AssemblyTest, four_sessions_of_which_some_know_each_other_through_others_only_find_one_board) {
  Chain(4);
  for (const auto& outcome : AllCall(CycleKind::kPause)) {
    EXPECT_EQ(outcome.ending, Ending::kPaused) << outcome.status.message();
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
  }
  const auto first = ranks_[0]->peers->Assemble(CycleKind::kResume, "");
  ASSERT_TRUE(first->Find(In(milliseconds(5000))).ok());
  EXPECT_EQ(first->Members().size(), 4U);
  EXPECT_EQ(first->FactsOf(ranks_[3]->identity.session).neighbours, std::vector{ranks_[2]->identity.session});
}

TEST_F(AssemblyTest, a_session_that_shares_with_nobody_has_a_board_of_its_own) {
  Chain(1);
  EXPECT_EQ(AllCall(CycleKind::kPause)[0].ending, Ending::kPaused);
}

// What a page says is as old as its session's last call.
TEST_F(AssemblyTest, a_session_shares_memory_if_it_says_so_or_one_that_has_come) {
  Chain(3);
  for (const auto& outcome : AllCall(CycleKind::kPause)) ASSERT_EQ(outcome.ending, Ending::kPaused);
  const SessionId middle = ranks_[1]->identity.session, last = ranks_[2]->identity.session;
  const auto first = ranks_[0]->peers->Assemble(CycleKind::kResume, "");
  ASSERT_TRUE(first->Find(In(milliseconds(5000))).ok());
  EXPECT_EQ(first->Members().size(), 3U);
  EXPECT_TRUE(first->SharesNow({middle}));
  EXPECT_TRUE(first->SharesNow({last}));
  // It lets go of what it shares and resumes by itself, while the one between them has not come.
  ranks_[2]->session.Remove(middle);
  EXPECT_EQ(CallOnBoards(*ranks_[2]->peers, CycleKind::kResume, milliseconds(5000)).ending, Ending::kRunning);
  ASSERT_TRUE(first->Find(In(milliseconds(5000))).ok());
  EXPECT_EQ(first->Members().size(), 3U);
  EXPECT_FALSE(first->SharesNow({last}));
  EXPECT_EQ(first->SharesNow({last, middle}), middle);
  auto alone = ranks_[2]->peers->Assemble(CycleKind::kPause, "");
  ASSERT_TRUE(alone->Find(In(milliseconds(5000))).ok());
  const Status beside = first->Find(In(milliseconds(5000)));
  EXPECT_TRUE(beside.ok()) << "what it calls by itself is no mixture: " << beside.message();
  alone.reset();
  const auto second = ranks_[1]->peers->Assemble(CycleKind::kResume, "");
  ASSERT_TRUE(second->Find(In(milliseconds(5000))).ok());
  EXPECT_TRUE(first->SharesNow({last})) << "who has come says so";
  ranks_[1]->session.Remove(last);
  ASSERT_TRUE(second->Find(In(milliseconds(5000))).ok());
  ASSERT_TRUE(first->Find(In(milliseconds(5000))).ok());
  EXPECT_EQ(first->Members().size(), 2U);
}

// Each of those that left says so of the other, and they are beside the rest all the same.
TEST_F(AssemblyTest, sessions_that_left_together_share_memory_with_each_other_only) {
  Chain(4);
  for (const auto& outcome : AllCall(CycleKind::kPause)) ASSERT_EQ(outcome.ending, Ending::kPaused);
  const SessionId second = ranks_[1]->identity.session, third = ranks_[2]->identity.session,
                  fourth = ranks_[3]->identity.session;
  const auto first = ranks_[0]->peers->Assemble(CycleKind::kResume, "");
  ASSERT_TRUE(first->Find(In(milliseconds(5000))).ok());
  EXPECT_EQ(first->SharesNow({fourth}), fourth) << "each has said so of the one before it";
  ranks_[2]->session.Remove(second);
  auto other = test::InThread([&] { return CallOnBoards(*ranks_[3]->peers, CycleKind::kResume, milliseconds(5000)); });
  EXPECT_EQ(CallOnBoards(*ranks_[2]->peers, CycleKind::kResume, milliseconds(5000)).ending, Ending::kRunning);
  EXPECT_EQ(other.get().ending, Ending::kRunning);
  ASSERT_TRUE(first->Find(In(milliseconds(5000))).ok());
  ASSERT_EQ(first->Members().size(), 4U) << "the second has not come";
  EXPECT_EQ(first->SharesNow({third, fourth}), std::nullopt);
  EXPECT_EQ(first->SharesNow({third, second}), second);
  const auto third_call = ranks_[2]->peers->Assemble(CycleKind::kPause, ""),
             fourth_call = ranks_[3]->peers->Assemble(CycleKind::kPause, "");
  ASSERT_TRUE(third_call->Find(In(milliseconds(5000))).ok());
  ASSERT_TRUE(fourth_call->Find(In(milliseconds(5000))).ok());
  EXPECT_EQ(third_call->Members().size(), 2U);
  const Status beside = first->Find(In(milliseconds(5000)));
  EXPECT_TRUE(beside.ok()) << "what they call is no mixture: " << beside.message();
}

// Another one would leave some members on the old one.
TEST_F(AssemblyTest, boards_of_the_living_stay_however_many_there_are) {
  SharedPageTable table(SessionId{1});
  const std::vector<SessionId> living{SessionId{1}, SessionId{2}}, dying{SessionId{1}, SessionId{3}};
  ASSERT_TRUE(table.HandOut("first", living, SessionId{2}, 0));
  ASSERT_TRUE(table.HandOut("first", dying, SessionId{3}, 0));
  const std::uint64_t first = table.Find("first", living)->id();
  for (int i = 0; i < 70; ++i) ASSERT_TRUE(table.HandOut("tag " + std::to_string(i), living, SessionId{2}, 0));
  ASSERT_NE(table.Find("first", living), nullptr);
  EXPECT_EQ(table.Find("first", living)->id(), first);
  table.NoteEnd(SessionId{3});
  ASSERT_TRUE(table.HandOut("one more", living, SessionId{2}, 0));
  EXPECT_EQ(table.Find("first", dying), nullptr);
  EXPECT_NE(table.Find("first", living), nullptr);
  // Whoever asks may not have seen that end yet.
  ASSERT_TRUE(table.HandOut("for the dying", dying, SessionId{3}, 0));
  EXPECT_NE(table.Find("for the dying", dying), nullptr);
}

TEST_F(AssemblyTest, each_scope_has_a_board) {
  Chain(2);
  const auto nccl = ranks_[0]->peers->Assemble(CycleKind::kPause, ""),
             tag = ranks_[0]->peers->Assemble(CycleKind::kPause, "kv");
  ASSERT_TRUE(nccl->Find(In(milliseconds(5000))).ok());
  ASSERT_TRUE(tag->Find(In(milliseconds(5000))).ok());
  EXPECT_NE(nccl->board().id(), tag->board().id());
}

TEST_F(AssemblyTest, a_session_that_begins_to_share_while_others_wait_is_a_member) {
  Chain(3);
  auto late = std::make_unique<Rank>(directory_, 7);
  const Token token = ranks_[2]->session.Export(AllocationId{90});
  board::RoundOutcome outcome;
  std::thread joins([&] {
    std::this_thread::sleep_for(milliseconds(300));  // the others wait for the last member meanwhile
    ASSERT_TRUE(late->peers->Import(token, AllocationId{91}));
    late->session.Add(token.session);
    outcome = CallOnBoards(*late->peers, CycleKind::kPause, milliseconds(20'000));
  });
  auto last = std::move(ranks_.back());
  ranks_.pop_back();
  board::RoundOutcome of_last;
  std::thread comes([&] {
    std::this_thread::sleep_for(milliseconds(600));
    of_last = CallOnBoards(*last->peers, CycleKind::kPause, milliseconds(20'000));
  });
  for (const auto& of : AllCall(CycleKind::kPause)) EXPECT_EQ(of.ending, Ending::kPaused) << of.status.message();
  joins.join();
  comes.join();
  EXPECT_EQ(outcome.ending, Ending::kPaused) << outcome.status.message();
  EXPECT_EQ(of_last.ending, Ending::kPaused) << of_last.status.message();
  const auto look = late->peers->Assemble(CycleKind::kResume, "");
  ASSERT_TRUE(look->Find(In(milliseconds(5000))).ok());
  EXPECT_EQ(look->Members().size(), 4U);
}

TEST_F(AssemblyTest, a_member_of_another_group_is_refused_by_name) {
  Chain(2);
  ranks_[1]->peers->SetGroup(5);
  const auto outcomes = AllCall(CycleKind::kPause, milliseconds(5000));
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.status.code(), Code::kRefused) << outcome.status.message();
  EXPECT_NE(outcomes[0].status.message().find("of group 0 shares memory with rank 1"), std::string::npos)
      << outcomes[0].status.message();
  EXPECT_EQ(outcomes[0].status.reported_by(), ranks_[1]->identity.session);
}

TEST_F(AssemblyTest, one_of_another_group_that_shares_memory_no_more_refuses_nobody) {
  Chain(3);
  for (const auto& outcome : AllCall(CycleKind::kPause)) ASSERT_EQ(outcome.ending, Ending::kPaused);
  ranks_[2]->session.Remove(ranks_[1]->identity.session);  // whose page says otherwise until its next call
  EXPECT_EQ(CallOnBoards(*ranks_[2]->peers, CycleKind::kResume, milliseconds(5000)).ending, Ending::kRunning);
  ranks_[2]->peers->SetGroup(5);
  const auto first = ranks_[0]->peers->Assemble(CycleKind::kResume, "");
  const Status found = first->Find(In(milliseconds(5000)));
  ASSERT_TRUE(found.ok()) << found.message();
  EXPECT_EQ(first->Members().size(), 3U);
}

// All members of a call that a death has failed are to see that it has; who shares memory only since then was none.
TEST_F(AssemblyTest, a_call_that_failed_by_a_death_fails_for_those_who_shared_memory_then_and_for_no_new_neighbour) {
  Chain(2);
  for (const std::int32_t rank : {2, 3}) ranks_.push_back(std::make_unique<Rank>(directory_, rank));
  Rank &first = *ranks_[0], &newcomer = *ranks_[2], &member = *ranks_[3];
  const SessionId dead = ranks_[1]->identity.session;
  ASSERT_TRUE(member.ImportFrom(first, AllocationId{20}, AllocationId{21}));
  ranks_[1]->peers->Stop();
  first.session.Remove(dead);
  {
    const auto fails = first.peers->Assemble(CycleKind::kPause, "");
    ASSERT_TRUE(fails->Find(In(milliseconds(5000))).ok());
    fails->FailedBy(dead);
  }
  ASSERT_TRUE(newcomer.ImportFrom(first, AllocationId{30}, AllocationId{31}));
  const Status of_new = newcomer.peers->Assemble(CycleKind::kPause, "")->Find(In(milliseconds(5000)));
  EXPECT_TRUE(of_new.ok()) << of_new.message();
  const Status of_member = member.peers->Assemble(CycleKind::kPause, "")->Find(In(milliseconds(5000)));
  EXPECT_EQ(of_member.code(), Code::kPeerLost) << of_member.message();
  EXPECT_NE(of_member.message().find("has failed: call it again on all that are left"), std::string::npos);
}

TEST_F(AssemblyTest, a_member_that_does_not_come_is_named_and_nothing_has_happened) {
  Chain(2);
  const auto outcome = CallOnBoards(*ranks_[0]->peers, CycleKind::kPause, milliseconds(300));
  EXPECT_EQ(outcome.ending, Ending::kRunning);
  EXPECT_EQ(outcome.failed, Ballot::kCome);
  EXPECT_EQ(outcome.status.code(), Code::kTimeout);
  EXPECT_EQ(outcome.culprit, ranks_[1]->identity.session);
  EXPECT_NE(outcome.status.message().find("for rank 1 (pid "), std::string::npos) << outcome.status.message();
}

TEST_F(AssemblyTest, a_session_that_closes_while_it_is_waited_for_has_ended) {
  Chain(2);
  std::thread closes([&] {
    std::this_thread::sleep_for(milliseconds(200));
    ranks_[1]->peers->Stop();
  });
  const auto outcome = CallOnBoards(*ranks_[0]->peers, CycleKind::kPause, milliseconds(20'000));
  closes.join();
  EXPECT_EQ(outcome.status.code(), Code::kPeerLost) << outcome.status.message();
  EXPECT_EQ(outcome.culprit, ranks_[1]->identity.session);
  EXPECT_EQ(CallOnBoards(*ranks_[0]->peers, CycleKind::kPause, milliseconds(5000)).ending, Ending::kPaused)
      << "its end is known when the next call begins, so it is no member";
}

TEST_F(AssemblyTest, a_damaged_board_is_replaced_for_all_members) {
  Chain(2);
  for (const auto& outcome : AllCall(CycleKind::kPause)) EXPECT_EQ(outcome.ending, Ending::kPaused);
  std::uint64_t before = 0;
  {
    const auto look = ranks_[1]->peers->Assemble(CycleKind::kResume, "");
    ASSERT_TRUE(look->Find(In(milliseconds(5000))).ok());
    before = look->board().id();
    // The bytes of the header, which follow from nothing that a test may name.
    for (const auto& map : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code ignored;
      if (std::filesystem::read_symlink(map.path(), ignored).string().find("memfd:amem-board") == std::string::npos) continue;
      const UniqueFd fd(::open(map.path().c_str(), O_RDWR | O_CLOEXEC));
      const std::array<std::uint64_t, 8> noise{1, 2, 3, 4, 5, 6, 7, 8};
      ASSERT_EQ(::pwrite(fd.get(), noise.data(), sizeof noise, 0), static_cast<ssize_t>(sizeof noise));
    }
  }
  for (const auto& outcome : AllCall(CycleKind::kResume))
    EXPECT_EQ(outcome.ending, Ending::kRunning) << outcome.status.message();
  const auto look = ranks_[1]->peers->Assemble(CycleKind::kPause, "");
  ASSERT_TRUE(look->Find(In(milliseconds(5000))).ok());
  EXPECT_NE(look->board().id(), before);
}

TEST_F(AssemblyTest, a_board_is_handed_out_by_the_lowest_of_its_set_to_its_members_only) {
  SharedPageTable table(SessionId{5});
  const std::vector<SessionId> set{SessionId{5}, SessionId{6}};
  EXPECT_TRUE(table.HandOut("", set, SessionId{6}, 0));
  EXPECT_EQ(table.HandOut("", set, SessionId{7}, 0).status().code(), Code::kInvalid) << "no member";
  EXPECT_EQ(table.HandOut("", {SessionId{4}, SessionId{5}}, SessionId{4}, 0).status().code(), Code::kInvalid)
      << "not the lowest";
  EXPECT_EQ(table.HandOut("", {SessionId{6}, SessionId{5}}, SessionId{6}, 0).status().code(), Code::kInvalid) << "not sorted";
  EXPECT_EQ(table.HandOut("", {}, SessionId{6}, 0).status().code(), Code::kInvalid);
  const auto one = table.Find("", set);
  ASSERT_TRUE(table.HandOut("", set, SessionId{6}, 12345));
  EXPECT_EQ(table.Find("", set), one);
  ASSERT_TRUE(table.HandOut("", set, SessionId{6}, one->id()));
  EXPECT_NE(table.Find("", set), one);
}

// Whoever waits is woken at once, and not by its own next look, which comes after a quarter of a second.
TEST_F(AssemblyTest, the_end_of_a_member_wakes_all_that_wait_on_its_boards_and_no_others) {
  SharedPageTable table(SessionId{5});
  const std::vector<SessionId> with{SessionId{5}, SessionId{6}}, without{SessionId{5}, SessionId{7}};
  ASSERT_TRUE(table.HandOut("", with, SessionId{6}, 0));
  ASSERT_TRUE(table.HandOut("", without, SessionId{7}, 0));
  const auto board = table.Find("", with), other = table.Find("", without);
  const std::uint32_t ticket = board->Ticket(), others_ticket = other->Ticket();
  const Deadline began = Now();
  std::thread ends([&] {
    std::this_thread::sleep_for(milliseconds(50));
    table.NoteEnd(SessionId{6});
  });
  board->AwaitChange(ticket, In(milliseconds(20'000)));
  ends.join();
  EXPECT_LT(SinceThen(began), milliseconds(10'000));
  EXPECT_NE(board->Ticket(), ticket);
  EXPECT_EQ(other->Ticket(), others_ticket);
}

TEST_F(AssemblyTest, a_pause_and_a_resume_at_once_are_refused_on_both_sides_and_name_each_other) {
  Chain(2);
  std::array<board::RoundOutcome, 2> outcomes;
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(100));
    outcomes[1] = CallOnBoards(*ranks_[1]->peers, CycleKind::kResume, milliseconds(20'000));
  });
  outcomes[0] = CallOnBoards(*ranks_[0]->peers, CycleKind::kPause, milliseconds(20'000));
  other.join();
  for (const auto& [at, said] : {std::pair(0, "came for a pause while a resume was begun by rank 1 (pid "),
                                 std::pair(1, "came for a resume while a pause was begun by rank 0 (pid ")}) {
    const Status& status = outcomes[static_cast<std::size_t>(at)].status;
    EXPECT_EQ(status.code(), Code::kInvalid) << status.message();
    EXPECT_NE(status.message().find(said), std::string::npos) << status.message();
  }
}

// ---- pages that do not come ------------------------------------------------------------------------------------------------

TEST_F(AssemblyTest, what_is_no_page_or_another_sessions_is_not_read) {
  SharedPageTable table(SessionId{5});
  const SessionId peer{6};
  EXPECT_EQ(table.PageOf(peer).status().code(), Code::kNotFound);
  table.Take(peer, {}, false);
  EXPECT_EQ(table.PageOf(peer).status().code(), Code::kUnsupported);
  table.Take(peer, {}, true);
  EXPECT_EQ(table.PageOf(peer).status().code(), Code::kNoDescriptors);
  std::vector<UniqueFd> wrong;
  wrong.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  table.Take(peer, wrong, false);
  EXPECT_EQ(table.PageOf(peer).status().code(), Code::kCorrupt);
  auto others = board::SessionPage::Make(SessionId{7});
  wrong.front().Reset(::fcntl(others->fd(), F_DUPFD_CLOEXEC, 0));
  table.Take(peer, wrong, false);
  EXPECT_EQ(table.PageOf(peer).status().code(), Code::kInvalid);
  auto page = board::SessionPage::Make(peer);
  wrong.front().Reset(::fcntl(page->fd(), F_DUPFD_CLOEXEC, 0));
  table.Take(peer, wrong, false);
  EXPECT_TRUE(table.PageOf(peer));
  table.Take(peer, {}, false);
  EXPECT_TRUE(table.PageOf(peer)) << "the first that can be read stays";
}

// As in a process whose program had opened all that it may when its session began.
TEST_F(AssemblyTest, a_page_for_which_there_was_no_descriptor_is_made_by_the_next_call) {
  std::optional<SharedPageTable> table;
  {
    const NoDescriptors none;
    table.emplace(SessionId{5});
    table->Hold();
    EXPECT_FALSE(table->WhyNone().ok());
    EXPECT_EQ(table->fd(), -1);
  }
  table->Hold();
  EXPECT_TRUE(table->WhyNone().ok()) << table->WhyNone().message();
  EXPECT_GE(table->fd(), 0);
  table->LetGo();
}

// As those do who tidy /tmp up: the folder goes, or what is in it. What was exchanged before needs no socket.
class RemovedSockets : public AssemblyTest, public ::testing::WithParamInterface<bool> {
 protected:
  void NothingIsLost() {
    for (const auto& rank : ranks_) EXPECT_TRUE(rank->session.lost().empty());
    EXPECT_EQ(ranks_[0]->session.references(), 1U) << "it would come back as zeros";
  }
};
INSTANTIATE_TEST_SUITE_P(With, RemovedSockets, ::testing::Bool(), [](const auto& folder) {
  return folder.param ? std::string("their_folder") : std::string("names_only");
});

TEST_P(RemovedSockets, keep_nobody_from_pausing_who_has_paused_before) {
  Chain(2);
  for (const auto& outcome : AllCall(CycleKind::kPause)) EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
  for (const auto& outcome : AllCall(CycleKind::kResume)) EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
  directory_.RemoveSockets(GetParam());
  for (const auto& outcome : AllCall(CycleKind::kPause)) EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
  NothingIsLost();
}

TEST_P(RemovedSockets, fail_a_first_pause_and_no_memory_counts_as_lost) {
  Chain(2);
  directory_.RemoveSockets(GetParam());
  const Status status = CallOnBoards(*ranks_[1]->peers, CycleKind::kPause, milliseconds(1000 * kFew)).status;
  EXPECT_EQ(status.code(), GetParam() ? Code::kRefused : Code::kTimeout) << status.message();
  for (const std::string& part : {std::string("rank 0 (pid "), std::string(": it lives, but its socket 0000000000001000"),
                                  directory_.sockets().string(), std::string("AMEM_SOCKET_DIR")})
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  EXPECT_EQ(status.reported_by(), ranks_[0]->identity.session);
  NothingIsLost();
}

TEST_P(RemovedSockets, make_nobody_believe_a_loss_that_somebody_else_reports) {
  Chain(2);
  directory_.RemoveSockets(GetParam());
  EXPECT_FALSE(ranks_[0]->peers->AwaitLoss(ranks_[1]->identity.session, kLossPatience));
  NothingIsLost();
  ranks_[1]->peers->Stop();
  EXPECT_TRUE(ranks_[0]->peers->AwaitLoss(ranks_[1]->identity.session, kLossPatience)) << "its page says so";
  EXPECT_TRUE(ranks_[0]->session.WaitUntilLost(1));
}

// ---- processes -------------------------------------------------------------------------------------------------------------

constexpr int kMostProcesses = 4;
struct AssemblyDesk {  // what the processes of one test share
  std::array<Token, kMostProcesses> tokens{};
  std::array<std::atomic<int>, 3> came{};  // at each barrier
  std::array<std::array<char, 500>, kMostProcesses> said{};
  std::array<std::atomic<int>, kMostProcesses> code{}, ending{};
  std::array<std::atomic<std::uint64_t>, kMostProcesses> culprit{};
  std::atomic<pid_t> forked{0};
};

class AssemblyProcessTest : public ::testing::Test {
 protected:
  AssemblyProcessTest()
      : desk_(new (::mmap(nullptr, sizeof(AssemblyDesk), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                  AssemblyDesk) {}
  ~AssemblyProcessTest() override { ::munmap(desk_, sizeof *desk_); }

  void MeetAll(std::size_t barrier, int count) const {
    ++desk_->came[barrier];
    while (desk_->came[barrier] < count) ::usleep(1000);
  }
  [[nodiscard]] bool AllCame(std::size_t barrier, int count) const {
    for (int i = 0; i < 20'000 && desk_->came[barrier] < count; ++i) ::usleep(1000);
    return desk_->came[barrier] >= count;
  }
  // In a child: a rank that shares memory with the one before it, the first with the last.
  std::unique_ptr<Rank> Join(int rank, int count) const {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    auto self = std::make_unique<Rank>(directory_, rank);
    if (!self->peers) ::_exit(90);
    desk_->tokens[static_cast<std::size_t>(rank)] = self->session.Export(AllocationId{1});
    MeetAll(0, count);
    const Token& before = desk_->tokens[static_cast<std::size_t>((rank + count - 1) % count)];
    if (!self->ImportPatiently(before, AllocationId{10})) ::_exit(91);
    self->session.Add(before.session);
    MeetAll(1, count);
    return self;
  }
  void Call(Rank& self, CycleKind kind, milliseconds time = milliseconds(20'000),
            const std::function<void(const board::BoardReading&)>& before_wait = {}) const {
    const auto outcome = CallOnBoards(*self.peers, kind, time, {}, before_wait);
    const auto at = static_cast<std::size_t>(self.identity.rank);
    std::snprintf(desk_->said[at].data(), desk_->said[at].size(), "%s", outcome.status.message().c_str());
    desk_->culprit[at] = outcome.culprit ? outcome.culprit.value : outcome.status.reported_by().value;
    desk_->ending[at] = static_cast<int>(outcome.ending);
    desk_->code[at] = static_cast<int>(outcome.status.code());
  }
  void ExpectFailed(std::size_t rank, Code code, int culprit, const char* what) const {
    EXPECT_EQ(desk_->code[rank], static_cast<int>(code)) << desk_->said[rank].data();
    EXPECT_EQ(desk_->culprit[rank], Identity(culprit).session.value) << desk_->said[rank].data();
    EXPECT_NE(std::string(desk_->said[rank].data()).find(what), std::string::npos) << desk_->said[rank].data();
  }

  TemporaryDirectory directory_;
  AssemblyDesk* desk_;
};

TEST_F(AssemblyProcessTest, four_processes_pause_and_resume) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 4; ++rank) {
    children.push_back(std::make_unique<Child>([this, rank] {
      const auto self = Join(rank, 4);
      for (int cycle = 0; cycle < 5; ++cycle) {
        Call(*self, CycleKind::kPause);
        if (desk_->ending[static_cast<std::size_t>(rank)] != static_cast<int>(Ending::kPaused)) return 2;
        Call(*self, CycleKind::kResume);
        if (desk_->ending[static_cast<std::size_t>(rank)] != static_cast<int>(Ending::kRunning)) return 3;
      }
      MeetAll(2, 4);
      return 0;
    }));
  }
  for (std::size_t rank = 0; rank < 4; ++rank) EXPECT_EQ(children[rank]->Wait(), 0) << desk_->said[rank].data();
}

TEST_F(AssemblyProcessTest, a_killed_member_has_ended_for_all_at_once_also_while_a_child_that_it_forked_lives) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.push_back(std::make_unique<Child>([this, rank] {
      const auto self = Join(rank, 3);
      if (rank == 2) {
        const pid_t forked = ::fork();
        if (forked == 0) {
          ::prctl(PR_SET_PDEATHSIG, 0);
          ::pause();
        }
        desk_->forked = forked;
        MeetAll(2, 3);
        ::pause();
      }
      MeetAll(2, 3);
      Call(*self, CycleKind::kPause);
      return 0;
    }));
  }
  ASSERT_TRUE(AllCame(2, 3));
  ::usleep(200'000);
  const Deadline killed = Now();
  children[2]->Kill(SIGKILL);
  EXPECT_EQ(children[0]->Wait(), 0);
  EXPECT_EQ(children[1]->Wait(), 0);
  EXPECT_LT(SinceThen(killed), milliseconds(5000)) << "long before the deadline of the call";
  for (std::size_t rank = 0; rank < 2; ++rank) ExpectFailed(rank, Code::kPeerLost, 2, "rank 2 (pid ");
  EXPECT_EQ(::kill(desk_->forked, 0), 0) << "the forked child lives";
  ::kill(desk_->forked, SIGKILL);
}

// The last one finds a set without the dead, and so another board than those that wait.
TEST_F(AssemblyProcessTest, a_member_killed_after_it_came_fails_those_that_wait_and_whoever_comes_later) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 4; ++rank) {
    children.push_back(std::make_unique<Child>([this, rank] {
      const auto self = Join(rank, 4);
      if (rank == 2) MeetAll(2, 2);
      Call(*self, CycleKind::kPause, milliseconds(20'000), [rank](const board::BoardReading& reading) {
        const auto came =
            std::ranges::count_if(reading.seats, [](const auto& seat) { return seat.votes[0] == agreement::Vote::kYes; });
        if (rank == 3 && came == 3) ::raise(SIGKILL);
      });
      MeetAll(2, 5);
      return 0;
    }));
  }
  children[3]->Wait();
  ++desk_->came[2];
  for (const std::size_t rank : {0U, 1U, 2U}) {
    EXPECT_EQ(children[rank]->Wait(), 0);
    ExpectFailed(rank, Code::kPeerLost, 3, "rank 3 (pid ");
  }
}

TEST_F(AssemblyProcessTest, the_end_of_a_forked_child_is_no_end_of_its_session) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(std::make_unique<Child>([this, rank] {
      auto self = Join(rank, 2);
      if (rank == 1) {
        const pid_t forked = ::fork();
        if (forked == 0) {
          self.reset();  // as at the end of a process
          ::_exit(0);
        }
        int status = 0;
        ::waitpid(forked, &status, 0);
      }
      MeetAll(2, 2);
      Call(*self, CycleKind::kPause);
      MeetAll(2, 4);
      return 0;
    }));
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(children[rank]->Wait(), 0);
    EXPECT_EQ(desk_->ending[rank], static_cast<int>(Ending::kPaused)) << desk_->said[rank].data();
  }
}

TEST_F(AssemblyProcessTest, a_stopped_member_lives_and_is_late) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(std::make_unique<Child>([this, rank] {
      const auto self = Join(rank, 2);
      Call(*self, CycleKind::kPause);  // so that all is known of each other
      Call(*self, CycleKind::kResume);
      MeetAll(2, 2);
      if (rank == 1) ::raise(SIGSTOP);
      Call(*self, CycleKind::kPause, milliseconds(1000));
      return 0;
    }));
  }
  ASSERT_TRUE(AllCame(2, 2));
  EXPECT_EQ(children[0]->Wait(), 0);
  ExpectFailed(0, Code::kTimeout, 1, "for rank 1 (pid ");
  children[1]->Kill(SIGKILL);
}

// As of a process that is killed for want of memory, after its memory has been taken: its lock names a thread that the kernel
// does not know for its own, and so does not mark.
TEST_F(AssemblyProcessTest, a_killed_member_has_ended_whose_lock_looks_held) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(std::make_unique<Child>([this, rank] {
      const auto self = Join(rank, 2);
      if (rank == 1) {
        std::ifstream maps("/proc/self/maps");
        for (std::string line; std::getline(maps, line);) {
          unsigned long begin = 0, end = 0;
          if (line.find("memfd:amem-session") == std::string::npos || line.find(" rw-s ") == std::string::npos) continue;
          if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2) ::_exit(92);
          auto* const life = reinterpret_cast<board::LifeWords*>(begin + 24);  // after magic, version and session
          life->holder = 1;
          life->lock.__data.__lock = 1;
        }
        MeetAll(2, 2);
        ::pause();
      }
      MeetAll(2, 2);
      Call(*self, CycleKind::kPause, milliseconds(20'000), [this](const board::BoardReading&) { desk_->forked = 1; });
      return 0;
    }));
  }
  for (int i = 0; i < 20'000 && desk_->forked == 0; ++i) ::usleep(1000);  // it waits
  children[1]->Kill(SIGKILL);
  EXPECT_EQ(children[0]->Wait(), 0);
  ExpectFailed(0, Code::kPeerLost, 1, "rank 1 (pid ");
}

// The page can be written by its owner only, so that is who does it.
TEST_F(AssemblyProcessTest, a_page_that_was_written_over_fails_the_call_and_its_session_is_named) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(std::make_unique<Child>([this, rank] {
      const auto self = Join(rank, 2);
      if (rank == 1) {
        std::ifstream maps("/proc/self/maps");
        for (std::string line; std::getline(maps, line);) {
          unsigned long begin = 0, end = 0;
          if (line.find("memfd:amem-session") == std::string::npos || line.find(" rw-s ") == std::string::npos) continue;
          if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2) ::_exit(92);
          // Beyond the header and the lock, in both copies of the facts, of which the second begins a mebibyte further.
          for (const unsigned long copy : {begin, begin + (1UL << 20)})
            for (unsigned long at = copy + 112; at < copy + 2048; ++at) *reinterpret_cast<char*>(at) ^= 0x5a;
        }
      }
      MeetAll(2, 2);
      if (rank == 0) Call(*self, CycleKind::kPause, milliseconds(3000));
      MeetAll(2, 4);
      return 0;
    }));
  }
  for (auto& child : children) EXPECT_EQ(child->Wait(), 0);
  ExpectFailed(0, Code::kCorrupt, 1, "what this session says of itself has been written over");
}

TEST_F(AssemblyProcessTest, a_limit_of_file_sizes_ends_no_process_and_a_call_says_that_it_is_too_low) {
  Child child([this] {
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    Rank self(directory_, 0);
    if (!self.peers) return 2;
    Call(self, CycleKind::kPause, milliseconds(3000));
    return 0;
  });
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_NE(std::string(desk_->said[0].data()).find("ulimit -f"), std::string::npos) << desk_->said[0].data();
}

// As where seccomp denies memfd_create.
TEST_F(AssemblyProcessTest, a_session_without_a_page_shares_memory_and_a_round_with_it_says_why_not) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(std::make_unique<Child>([this, rank] {
      if (rank == 1) {
        sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
                                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
        const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
        ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
      }
      Rank self(directory_, rank);
      if (!self.peers) return 1;
      if (rank == 0) desk_->tokens[0] = self.session.Export(AllocationId{1});
      MeetAll(0, 2);
      if (rank == 1 && !self.ImportPatiently(desk_->tokens[0], AllocationId{10})) return 2;
      if (rank == 1) self.session.Add(desk_->tokens[0].session);
      MeetAll(1, 2);
      Call(self, CycleKind::kPause, milliseconds(3000));
      MeetAll(2, 2);
      return 0;
    }));
  }
  for (auto& child : children) EXPECT_EQ(child->Wait(), 0);
  ExpectFailed(0, Code::kUnsupported, 1, "it sent no page with its hello");
  EXPECT_NE(std::string(desk_->said[1].data()).find("this session has no shared page: shared pages: memfd_create"),
            std::string::npos)
      << desk_->said[1].data();
}

// ---- checks --------------------------------------------------------------------------------------------------------------

TEST(OwnPage, does_not_say_what_cannot_be_true) {
  SharedPageTable pages(SessionId{2});
  const auto publish = [&](std::vector<SessionId> neighbours, SessionId lost = {}) {
    board::ScopeFacts facts{.tag = "weights"};
    facts.neighbours = std::move(neighbours);
    facts.lost = lost;
    return pages.Publish(std::move(facts)).code();
  };
  EXPECT_EQ(publish({SessionId{1}, SessionId{2}}), Code::kInvalid) << "nobody is its own neighbour";
  EXPECT_EQ(publish({SessionId{3}, SessionId{1}}), Code::kInvalid);
  EXPECT_EQ(publish({SessionId{1}}, SessionId{9}), Code::kInvalid) << "when was it lost?";
  EXPECT_TRUE(pages.OwnFacts().scopes.empty());
  EXPECT_EQ(publish({SessionId{1}, SessionId{3}}), Code::kOk);
}

}  // namespace
}  // namespace amem
