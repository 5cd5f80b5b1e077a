// Rounds over Unix sockets: a thread per rank in one process.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "replay/peers/unix/socket.h"
#include "tests/replay/peers/peers_fixture.h"
#include "tests/replay/peers/scripted_leader.h"

namespace amem {
namespace {

using namespace test;
using std::chrono::milliseconds;

constexpr PhaseKind kPhases[] = {PhaseKind::kPauseArrive, PhaseKind::kPauseSave, PhaseKind::kPauseDropImports,
                                 PhaseKind::kPauseReleaseOwn, PhaseKind::kPauseGone};

class RoundTest : public ::testing::Test {
 protected:
  Rank& Join(std::int32_t rank, std::uint32_t timeout_ms = 20'000, std::int64_t group = 0) {
    ranks_.push_back(std::make_unique<Rank>(directory_, rank, timeout_ms, group));
    EXPECT_TRUE(ranks_.back()->peers) << ranks_.back()->problem.message();
    return *ranks_.back();
  }
  void JoinRing(int count, std::uint32_t timeout_ms = 20'000) {
    for (int i = 0; i < count; ++i) Join(i, timeout_ms);
    for (int i = 0; i < count; ++i)
      Share(*ranks_[static_cast<std::size_t>(i)], *ranks_[static_cast<std::size_t>((i + 1) % count)]);
  }
  static void Share(Rank& importer, Rank& owner) {
    auto shared = importer.ImportFrom(owner, AllocationId{1}, AllocationId{1000 + owner.identity.session.value});
    ASSERT_TRUE(shared) << shared.status().message();
  }
  // Runs `work` for each rank on a thread of its own.
  void Everybody(const std::function<void(Rank&, std::size_t)>& work) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks_.size(); ++i) threads.emplace_back([&, i] { work(*ranks_[i], i); });
    for (auto& thread : threads) thread.join();
  }

  TemporaryDirectory directory_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

TEST_F(RoundTest, a_session_without_neighbours_votes_alone) {
  Rank& rank = Join(0);
  const std::size_t before = DescriptorsAtRest();
  auto round = rank.Arrive(CycleKind::kPause, 1);
  ASSERT_TRUE(round);
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ((*round)->Members(), std::vector{rank.identity});
  const Decision passed = (*round)->Vote(PhaseKind::kPauseSave, {});
  EXPECT_TRUE(passed.status.ok());
  EXPECT_EQ(passed.culprit, SessionId{});
  const Decision decision = (*round)->Vote(PhaseKind::kPauseSave, {Code::kIo, "why"});
  const Status& failed = decision.status;
  EXPECT_EQ(failed.code(), Code::kIo);
  EXPECT_EQ(decision.culprit, rank.identity.session);
}

TEST_F(RoundTest, four_ranks_meet_vote_and_part_many_times) {
  JoinRing(4);
  std::atomic<int> passed{0};
  const int cycles = 25 / kFew;
  Everybody([&](Rank& rank, std::size_t) {
    for (int cycle = 1; cycle <= cycles; ++cycle) {
      for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
        auto round = rank.Arrive(kind, static_cast<std::uint64_t>(cycle));
        ASSERT_TRUE(round) << round.status().message();
        ASSERT_EQ((*round)->Members().size(), 4u);
        for (const PhaseKind phase : kPhases) {
          const Status status = (*round)->Vote(phase, {}).status;
          ASSERT_TRUE(status.ok()) << status.message();
          ++passed;
        }
      }
    }
  });
  EXPECT_EQ(passed, 4 * 2 * 5 * cycles);
}

TEST_F(RoundTest, two_hundred_rounds_leave_no_descriptor_behind) {
  JoinRing(2);
  std::size_t before = 0;
  for (int i = 0; i < 200 / kFew + 1; ++i) {
    Everybody([&](Rank& rank, std::size_t) {
      auto round = rank.Arrive(CycleKind::kPause, 1);
      ASSERT_TRUE(round) << round.status().message();
      ASSERT_TRUE((*round)->Vote(PhaseKind::kPauseSave, {}).status.ok());
    });
    if (i == 0) before = DescriptorsAtRest();
  }
  EXPECT_LE(DescriptorsAtRest(), before);
}

TEST_F(RoundTest, sets_follow_references_through_others) {
  Rank &a = Join(0), &b = Join(1), &c = Join(2);
  Share(b, a);
  Share(b, c);
  Everybody([](Rank& rank, std::size_t) {
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    EXPECT_EQ((*round)->Members().size(), 3u);
    EXPECT_TRUE(std::ranges::is_sorted((*round)->Members(), {}, &PeerIdentity::session));
    EXPECT_TRUE((*round)->Vote(PhaseKind::kPauseSave, {}).status.ok());
  });
  EXPECT_EQ(a.session.connected().size(), 1u);  // c is no peer of a: nothing is shared with it
}

TEST_F(RoundTest, sets_that_share_nothing_do_not_wait_for_each_other) {
  Rank &a = Join(0), &b = Join(1), &c = Join(2), &d = Join(3);
  Share(a, b);
  Share(c, d);
  std::thread first([&] { ASSERT_TRUE(a.Arrive(CycleKind::kPause, 1)); });
  ASSERT_TRUE(b.Arrive(CycleKind::kPause, 1));
  first.join();
}

TEST_F(RoundTest, a_set_that_grows_while_members_wait_is_found_and_the_leader_moves) {
  Rank &c = Join(0), &a = Join(1), &b = Join(2);  // c would lead
  Share(b, a);
  std::vector<std::size_t> sizes(3);
  std::vector<std::thread> threads;
  const auto arrive = [&](Rank& rank, std::size_t i) {
    threads.emplace_back([&, i] {
      auto round = rank.Arrive(CycleKind::kPause, 1);
      ASSERT_TRUE(round) << round.status().message();
      sizes[i] = (*round)->Members().size();
      EXPECT_TRUE((*round)->Vote(PhaseKind::kPauseSave, {}).status.ok());
    });
  };
  arrive(a, 0);
  std::this_thread::sleep_for(milliseconds(100));  // a waits at a for b
  Share(b, c);
  arrive(b, 1);
  std::this_thread::sleep_for(milliseconds(50));
  arrive(c, 2);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(sizes, (std::vector<std::size_t>{3, 3, 3}));
}

TEST_F(RoundTest, sharing_over_groups_is_refused_and_both_are_named) {
  Rank &a = Join(0, 5000, 1), &b = Join(1, 5000, 2), &c = Join(2, 5000, 1);
  Share(a, b);
  Share(c, a);
  for (Rank* rank : {&a, &c}) {  // c shares with b through a
    auto round = rank->Arrive(CycleKind::kPause, 1);
    ASSERT_FALSE(round);
    EXPECT_EQ(round.status().code(), Code::kRefused);
    const std::string text = round.status().message();
    for (const char* part : {"rank 0 (pid ", "of group 1", "rank 1 (pid ", "of group 2"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  b.peers->SetGroup(1);
  EXPECT_EQ(b.peers->Self().group, 1);
  Everybody([](Rank& rank, std::size_t) { EXPECT_TRUE(rank.Arrive(CycleKind::kPause, 1)); });
}

TEST_F(RoundTest, another_group_is_told_to_the_session_when_it_is_seen_and_is_the_culprit) {
  Rank& a = Join(0);
  Rank& b = Join(1);
  Share(b, a);
  const auto times = [&] {
    std::vector<std::int64_t> groups;
    for (const PeerIdentity& peer : a.session.connected()) {
      if (peer.session == b.identity.session) groups.push_back(peer.group);
    }
    return groups;
  };
  EXPECT_EQ(times(), std::vector<std::int64_t>{0});
  b.peers->SetGroup(5);
  EXPECT_EQ(a.Arrive(CycleKind::kPause, 1).status().code(), Code::kRefused);
  EXPECT_EQ(times(), (std::vector<std::int64_t>{0, 5})) << "its journal has the other's new group";
  ASSERT_EQ(a.culprits.size(), 1U);
  EXPECT_EQ(a.culprits[0].session, b.identity.session);
  EXPECT_EQ(a.Arrive(CycleKind::kPause, 1).status().code(), Code::kRefused);
  EXPECT_EQ(times().size(), 2U) << "once for each change";
}

TEST_F(RoundTest, a_refused_import_names_the_owner_that_refused) {
  Rank& a = Join(0);
  Rank& b = Join(1);
  const auto refused = b.peers->Import({a.identity.session, AllocationId{77}, {}, 0}, AllocationId{5});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.status().reported_by(), a.identity.session);
}

TEST_F(RoundTest, a_vote_about_the_loss_of_an_owner_names_the_owner_to_all) {
  JoinRing(3);
  Everybody([](Rank& rank, std::size_t i) {
    auto round = rank.Arrive(CycleKind::kResume, 1);
    ASSERT_TRUE(round) << round.status().message();
    const Status lost = Status{Code::kPeerLost, "it died"}.ReportedBy(Identity(1).session);
    const Decision decision = (*round)->Vote(PhaseKind::kResumeImport, i == 2 ? lost : Status{});
    EXPECT_EQ(decision.status.code(), Code::kPeerLost);
    EXPECT_EQ(decision.culprit, Identity(1).session);
  });
}

TEST_F(RoundTest, who_is_waited_for_is_told_by_whom_again_and_again) {
  JoinRing(3, 600);
  for (auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kPaused;
  Everybody([&](Rank& rank, std::size_t i) {
    if (i == 1) std::this_thread::sleep_for(milliseconds(1800));
    EXPECT_TRUE(rank.Arrive(CycleKind::kResume, 1).ok());
  });
  std::map<std::int32_t, int> asked;
  for (const MemberHeard& heard : ranks_[1]->session.AwaitFacts<MemberHeard>(4)) {
    EXPECT_TRUE(heard.asks);
    EXPECT_EQ(heard.kind, CycleKind::kResume) << "this session is paused";
    EXPECT_EQ(heard.pid, ::getpid());
    ++asked[heard.rank];
  }
  EXPECT_EQ(asked.size(), 2U) << "both others";
  for (const auto& [rank, times] : asked)
    EXPECT_GE(times, 2) << "so that the journal tells how long they waited: rank " << rank;
}

TEST_F(RoundTest, a_resume_waits_for_paused_peers_as_long_as_they_need_and_says_for_whom) {
  JoinRing(3, 500 * kFew);
  for (auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kPaused;
  Everybody([&](Rank& rank, std::size_t i) {
    if (i != 0) std::this_thread::sleep_for(rank.deadlines.call() * 3 * i);
    auto round = rank.Arrive(CycleKind::kResume, 1);
    ASSERT_TRUE(round) << round.status().message();
    EXPECT_EQ((*round)->Members().size(), 3U);
    EXPECT_TRUE((*round)->Vote(PhaseKind::kResumeArrive, {}).status.ok());
  });
  std::map<std::int32_t, int> seen;
  for (const ProcessSeen& fact : ranks_[0]->session.AwaitFacts<ProcessSeen>(3)) {
    EXPECT_EQ(fact.answer, "paused, has not called ncclResume");
    ++seen[fact.session == Identity(1).session ? 1 : 2];
  }
  EXPECT_GE(seen[1], 1);
  EXPECT_GE(seen[2], 2) << "for longer";
  EXPECT_LE(seen[2], 5) << "ever more seldom";
}

// As where a call of the driver, made for a peer's import, does not return.
TEST_F(RoundTest, a_leader_that_its_own_service_does_not_answer_any_more_fails_at_its_deadline) {
  JoinRing(2);
  Rank& leader = *ranks_[0];
  leader.session.import_takes = milliseconds(2500);
  std::thread importer([&] {
    (void)leader.session.AwaitFacts<MemberHeard>(1);  // it has come, and waits
    (void)ranks_[1]->peers->Import(leader.session.Export(AllocationId{2}), AllocationId{3});
  });
  const auto round = leader.peers->Arrive({CycleKind::kPause, 1, In(milliseconds(80))}, &leader.culprits);
  importer.join();
  ASSERT_FALSE(round);
  if (round.status().code() == Code::kTimeout) return;  // this machine did not let it come in time
  EXPECT_EQ(round.status().code(), Code::kRefused);
  EXPECT_NE(round.status().message().find("its service thread hangs"), std::string::npos) << round.status().message();
  EXPECT_TRUE(leader.culprits.empty());
}

// On a busy machine a look at the others can take longer than the time until the next one.
TEST_F(RoundTest, a_resume_waits_on_however_long_it_takes_to_see_for_whom) {
  JoinRing(2, 400 * kFew);
  for (auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kPaused;
  ranks_[0]->session.witness_takes = ranks_[0]->deadlines.margin() * 3;
  Everybody([&](Rank& rank, std::size_t i) {
    if (i == 1) std::this_thread::sleep_for(rank.deadlines.call() * 4);
    auto round = rank.Arrive(CycleKind::kResume, 1);
    ASSERT_TRUE(round) << round.status().message();
    (*round)->SetUntil(In(std::chrono::seconds(20)));  // the others' vote may come late on a busy machine, too
    const Status voted = (*round)->Vote(PhaseKind::kResumeArrive, {}).status;
    EXPECT_TRUE(voted.ok()) << voted.message();
  });
}

TEST_F(RoundTest, a_look_that_meets_the_deadline_blames_whoever_did_not_come) {
  JoinRing(2, 400 * kFew);
  for (auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kRunning;
  int looks = 0;
  ranks_[0]->session.BeforeNeighbours([&](Deadline until) {
    if (++looks > 1) std::this_thread::sleep_until(until + milliseconds(1));
  });
  const Status late = ranks_[0]->Arrive(CycleKind::kPause, 1).status();
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_NE(late.message().find("ms for rank 1 (pid "), std::string::npos) << late.message();
  ASSERT_EQ(ranks_[0]->culprits.size(), 1U);
  EXPECT_EQ(ranks_[0]->culprits[0].session, ranks_[1]->identity.session);
}

TEST_F(RoundTest, a_member_that_ends_between_the_last_look_and_the_deadline_is_lost_and_not_late) {
  JoinRing(2, 1000 * kFew);
  const PeerIdentity other = ranks_[1]->identity;
  ranks_[1]->session.lifecycle = Lifecycle::kRunning;
  int looks = 0;
  ranks_[0]->session.BeforeNeighbours([&](Deadline until) {
    if (++looks != 2) return;
    ranks_[1].reset();
    std::this_thread::sleep_until(until + milliseconds(1));
  });
  const Status lost = ranks_[0]->Arrive(CycleKind::kPause, 1).status();
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_EQ(lost.message(), ToText(other) + " has closed while it was waited for");
  EXPECT_EQ(ranks_[0]->culprits, std::vector{other});
}

TEST_F(RoundTest, a_call_that_had_no_time_to_look_says_so_and_blames_nobody) {
  JoinRing(2, 400 * kFew);
  ranks_[0]->session.BeforeNeighbours([](Deadline until) { std::this_thread::sleep_until(until + milliseconds(1)); });
  const Status late = ranks_[0]->Arrive(CycleKind::kPause, 1).status();
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_NE(late.message().find("had not yet learned with whom it shares memory"), std::string::npos) << late.message();
  EXPECT_TRUE(ranks_[0]->culprits.empty());
}

TEST_F(RoundTest, a_resume_does_not_wait_for_a_peer_that_runs) {
  JoinRing(2, 300 * kFew);
  ranks_[0]->session.lifecycle = Lifecycle::kPaused;
  ranks_[1]->session.lifecycle = Lifecycle::kRunning;
  const Status late = ranks_[0]->Arrive(CycleKind::kResume, 1).status();
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_NE(late.message().find("is running already"), std::string::npos) << late.message();
}

// After an undo that failed. Rank 2 shares nothing with the one that runs, and hears of it from the others.
TEST_F(RoundTest, a_resume_does_without_a_peer_that_runs_where_nothing_is_missing_to_it) {
  JoinRing(4, 1000 * kFew);
  for (auto& rank : ranks_) {
    rank->session.lifecycle = Lifecycle::kPausing;
    rank->spares = [](SessionId session) { return session == Identity(0).session; };
  }
  ranks_[0]->session.lifecycle = Lifecycle::kRunning;
  Everybody([](Rank& rank, std::size_t i) {
    if (i == 0) return;
    auto round = rank.Arrive(CycleKind::kResume, 1);
    ASSERT_TRUE(round) << round.status().message();
    EXPECT_EQ((*round)->Members(), (std::vector{Identity(1), Identity(2), Identity(3)}));
    EXPECT_TRUE((*round)->Vote(PhaseKind::kResumeOpen, {}).status.ok());
  });
  ranks_[3]->spares = [](SessionId) { return false; };
  Everybody([](Rank& rank, std::size_t i) {
    if (i == 0) return;
    const Status late = rank.Arrive(CycleKind::kResume, 2).status();
    EXPECT_EQ(late.code(), Code::kTimeout) << i;
  });
  EXPECT_NE(std::ranges::find(ranks_[3]->culprits, Identity(0)), ranks_[3]->culprits.end());
}

TEST_F(RoundTest, a_resume_that_is_not_patient_has_a_deadline) {
  JoinRing(2, 300 * kFew);
  for (auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kPaused;
  const Status late = ranks_[0]->Arrive(CycleKind::kResume, 1, false).status();
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_NE(late.message().find("is paused and has not called ncclResume"), std::string::npos) << late.message();
}

TEST_F(RoundTest, a_pause_keeps_its_deadline_whoever_is_paused) {
  JoinRing(2, 300 * kFew);
  for (auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kPaused;
  EXPECT_EQ(ranks_[0]->Arrive(CycleKind::kPause, 1).status().code(), Code::kTimeout);
}

TEST_F(RoundTest, a_round_that_begins_at_once_leaves_no_word_of_waiting) {
  JoinRing(3);
  for (auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kRunning;
  Everybody([&](Rank& rank, std::size_t) {
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round);
    EXPECT_TRUE((*round)->Vote(PhaseKind::kPauseArrive, {}).status.ok());
  });
  std::this_thread::sleep_for(milliseconds(700));
  for (auto& rank : ranks_) {
    for (const MemberHeard& heard : rank->session.Facts<MemberHeard>()) EXPECT_FALSE(heard.asks);
  }
}

TEST_F(RoundTest, whoever_does_not_come_is_named) {
  JoinRing(3, 200 * kFew);
  std::vector<Status> statuses(3);
  Everybody([&](Rank& rank, std::size_t i) {
    if (i != 1) statuses[i] = rank.Arrive(CycleKind::kPause, 1).status();
  });
  for (const std::size_t i : {0u, 2u}) {
    EXPECT_EQ(statuses[i].code(), Code::kTimeout);
    EXPECT_NE(statuses[i].message().find("waited "), std::string::npos) << statuses[i].message();
    EXPECT_NE(statuses[i].message().find("ms for rank 1 (pid "), std::string::npos) << statuses[i].message();
    EXPECT_EQ(statuses[i].message().find("rank 2 ("), std::string::npos) << statuses[i].message();
  }
  // Nothing of it is left: the next try works.
  Everybody([&](Rank& rank, std::size_t) { EXPECT_TRUE(rank.Arrive(CycleKind::kPause, 1)); });
}

TEST_F(RoundTest, a_leader_that_does_not_come_is_named_too) {
  JoinRing(2, 200 * kFew);
  const Status status = ranks_[1]->Arrive(CycleKind::kPause, 1).status();
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_NE(status.message().find("rank 0 (pid "), std::string::npos) << status.message();
}

TEST_F(RoundTest, pause_and_resume_do_not_meet) {
  JoinRing(2, 5000);
  std::vector<Status> statuses(2);
  Everybody([&](Rank& rank, std::size_t i) {
    statuses[i] = rank.Arrive(i == 0 ? CycleKind::kPause : CycleKind::kResume, 1).status();
  });
  for (const auto& status : statuses) {
    EXPECT_EQ(status.code(), Code::kInvalid) << status.message();
    EXPECT_NE(status.message().find("rank 0"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
  }
}

TEST_F(RoundTest, one_failed_vote_reaches_all_in_the_same_words_and_undoing_is_voted_too) {
  JoinRing(4);
  std::vector<Status> statuses(4);
  std::vector<SessionId> culprits(4);
  Everybody([&](Rank& rank, std::size_t i) {
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    ASSERT_TRUE((*round)->Vote(PhaseKind::kPauseArrive, {}).status.ok());
    const Status mine = i == 2 ? Status{Code::kDriver, "no such handle", 400} : Status{};
    const Decision decision = (*round)->Vote(PhaseKind::kPauseSave, mine);
    statuses[i] = decision.status;
    culprits[i] = decision.culprit;
    EXPECT_TRUE((*round)->Vote(PhaseKind::kResumeOpen, {}).status.ok());
  });
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(statuses[i], statuses[0]);
    EXPECT_EQ(culprits[i], ranks_[2]->identity.session);
  }
  EXPECT_EQ(statuses[0].code(), Code::kDriver);
  EXPECT_EQ(statuses[0].driver_result(), 400);
  EXPECT_TRUE(statuses[0].message().starts_with(ToText(ranks_[2]->identity) + " failed in phase ")) << statuses[0].message();
  EXPECT_TRUE(statuses[0].message().ends_with(": no such handle")) << statuses[0].message();
}

TEST_F(RoundTest, a_vote_that_does_not_come_is_a_timeout_for_all_and_the_late_one_hears_it) {
  JoinRing(3, 300 * kFew);
  std::vector<Status> statuses(3);
  Everybody([&](Rank& rank, std::size_t i) {
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    if (i == 1) std::this_thread::sleep_for(milliseconds(500 * kFew));
    statuses[i] = (*round)->Vote(PhaseKind::kPauseSave, {}).status;
    (void)(*round)->Vote(PhaseKind::kResumeOpen, {}).status;
  });
  for (const auto& status : statuses) {
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_EQ(status, statuses[0]);
    EXPECT_NE(status.message().find("ms for rank 1 (pid "), std::string::npos) << status.message();
  }
}

TEST_F(RoundTest, leaving_early_is_a_loss_for_those_who_vote_at_once) {
  JoinRing(3);
  const auto begun = std::chrono::steady_clock::now();
  Everybody([&](Rank& rank, std::size_t i) {
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    if (i == 0) return;  // the leader's own thread; its service goes on
    const Decision decision = (*round)->Vote(PhaseKind::kPauseSave, {});
    const Status& status = decision.status;
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_EQ(decision.culprit, ranks_[0]->identity.session);
    EXPECT_NE(status.message().find("withdrew"), std::string::npos) << status.message();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, milliseconds(5000));
}

TEST_F(RoundTest, one_round_at_a_time) {
  Rank& rank = Join(0);
  auto round = rank.Arrive(CycleKind::kPause, 1);
  ASSERT_TRUE(round);
  EXPECT_EQ(rank.Arrive(CycleKind::kPause, 1).status().code(), Code::kRefused);
  *round = nullptr;
  EXPECT_TRUE(rank.Arrive(CycleKind::kPause, 1));
}

TEST_F(RoundTest, imports_go_on_while_others_vote_and_wait) {
  JoinRing(3);
  std::atomic<bool> done{false};
  std::atomic<int> imports{0};
  std::thread importer([&] {
    for (unsigned i = 0; !done; ++i) {
      for (const std::size_t owner : {0u, 2u}) {
        ASSERT_TRUE(ranks_[1]->ImportFrom(*ranks_[owner], AllocationId{2}, AllocationId{100 + i}));
        ranks_[1]->peers->DropReference({ranks_[owner]->identity.session, AllocationId{2}}, AllocationId{100 + i});
        ++imports;
      }
    }
  });
  Everybody([&](Rank& rank, std::size_t i) {
    if (i == 2) std::this_thread::sleep_for(milliseconds(100));
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    for (int vote = 0; vote < 200 / kFew; ++vote) ASSERT_TRUE((*round)->Vote(PhaseKind::kPauseSave, {}).status.ok());
  });
  done = true;
  importer.join();
  EXPECT_GT(imports, 20);
}

TEST_F(RoundTest, a_neighbour_that_closed_is_forgotten_when_the_session_forgets_it) {
  JoinRing(3);
  for (auto& rank : ranks_) rank->session.forget_lost = true;
  ranks_[2]->peers->Stop();
  ASSERT_TRUE(ranks_[0]->session.WaitUntilLost(1) && ranks_[1]->session.WaitUntilLost(1));
  Everybody([&](Rank& rank, std::size_t i) {
    if (i == 2) return;
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    EXPECT_EQ((*round)->Members().size(), 2u);
  });
}

TEST_F(RoundTest, a_member_that_closes_while_others_wait_for_it_is_named_at_once) {
  JoinRing(3);
  std::vector<Status> statuses(3);
  const auto begun = std::chrono::steady_clock::now();
  Everybody([&](Rank& rank, std::size_t i) {
    if (i != 1) {
      statuses[i] = rank.Arrive(CycleKind::kPause, 1).status();
    } else {
      std::this_thread::sleep_for(milliseconds(100));
      rank.peers->Stop();
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, milliseconds(5000));
  for (const std::size_t i : {0u, 2u}) {
    EXPECT_EQ(statuses[i].code(), Code::kPeerLost) << statuses[i].message();
    EXPECT_NE(statuses[i].message().find("rank 1 (pid "), std::string::npos) << statuses[i].message();
  }
}

// ---- sockets that somebody removed -----------------------------------------------------------------------------------------

class RemovedSockets : public RoundTest, public ::testing::WithParamInterface<bool> {
 protected:
  // Rank 0 calls while the others live, nothing is lost, and the message says so.
  void ExpectRefusal(CycleKind kind) {
    const Status status = ranks_[0]->Arrive(kind, 1).status();
    EXPECT_EQ(status.code(), GetParam() ? Code::kRefused : Code::kTimeout) << status.message();
    for (const std::string& part : {std::string("rank 1 (pid "), std::string(": it lives, but its socket 0000000000001001"),
                                    directory_.sockets().string(), std::string("AMEM_SOCKET_DIR")})
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_EQ(ranks_[0]->culprits, std::vector{ranks_[1]->identity});
    for (const auto& rank : ranks_) {
      EXPECT_EQ(rank->session.references(), 1U) << "it would come back as zeros";
      EXPECT_TRUE(rank->session.lost().empty());
    }
  }
};

TEST_P(RemovedSockets, fail_a_pause_and_no_memory_counts_as_lost) {
  JoinRing(2, 1000 * kFew);
  directory_.RemoveSockets(GetParam());
  ExpectRefusal(CycleKind::kPause);
}

TEST_P(RemovedSockets, fail_a_resume_too_however_patient_it_is) {
  JoinRing(2, 1000 * kFew);
  for (auto& rank : ranks_) rank->session.lifecycle = Lifecycle::kPaused;
  directory_.RemoveSockets(GetParam());
  ExpectRefusal(CycleKind::kResume);
}

TEST_P(RemovedSockets, make_nobody_believe_a_loss_that_somebody_else_reports) {
  JoinRing(2);
  directory_.RemoveSockets(GetParam());
  EXPECT_FALSE(ranks_[0]->peers->AwaitLoss(ranks_[1]->identity.session, kLossPatience));
  EXPECT_TRUE(ranks_[0]->session.lost().empty());
  ranks_[1]->peers->Stop();
  if (GetParam()) return;  // its socket might have gone with the folder
  EXPECT_TRUE(ranks_[0]->session.WaitUntilLost(1));
  EXPECT_TRUE(ranks_[0]->peers->AwaitLoss(ranks_[1]->identity.session, kLossPatience));
}

TEST_P(RemovedSockets, of_a_member_that_does_not_come_leave_it_late_and_not_lost) {
  JoinRing(2, 1000 * kFew);
  ranks_[1]->session.lifecycle = Lifecycle::kRunning;
  int looks = 0;
  ranks_[0]->session.BeforeNeighbours([&](Deadline) {
    if (++looks == 2) directory_.RemoveSockets(GetParam());
  });
  const Status late = ranks_[0]->Arrive(CycleKind::kPause, 1).status();
  EXPECT_EQ(late.code(), Code::kTimeout) << late.message();
  EXPECT_NE(late.message().find("ms for rank 1 (pid "), std::string::npos) << late.message();
}

TEST_P(RemovedSockets, of_a_member_that_does_not_vote_do_not_tell_the_journal_that_it_has_gone) {
  JoinRing(3, 2000 * kFew);
  std::atomic<int> came{0};
  Everybody([&](Rank& rank, std::size_t i) {
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    ++came;
    while (came < 3) std::this_thread::sleep_for(milliseconds(1));
    if (i == 2) directory_.RemoveSockets(GetParam());
    while (i != 2 && std::filesystem::exists(directory_.sockets() / SocketName(Identity(2).session)))
      std::this_thread::sleep_for(milliseconds(1));
    while (i == 2 && came < 5) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ((*round)->Vote(PhaseKind::kPauseArrive, {}).status.code(), Code::kTimeout);
    ++came;
    while (came < 6) std::this_thread::sleep_for(milliseconds(1));
  });
  const auto seen = ranks_[1]->session.AwaitFacts<ProcessSeen>(1);
  ASSERT_FALSE(seen.empty());
  for (const ProcessSeen& one : seen) EXPECT_NE(one.state, "gone");
}

// That it closed in order cannot be told from a connection that broke: the end of its process settles it.
TEST_F(RoundTest, of_sessions_that_ended_without_their_folder_nobody_says_more_than_is_known) {
  JoinRing(2);
  directory_.RemoveSockets();
  ranks_[1]->peers->Stop();
  const Status status = ranks_[0]->Arrive(CycleKind::kPause, 1).status();
  EXPECT_EQ(status.code(), Code::kRefused) << status.message();
  EXPECT_NE(status.message().find("rank 1 (pid "), std::string::npos) << status.message();
  EXPECT_TRUE(ranks_[0]->session.lost().empty());
}

INSTANTIATE_TEST_SUITE_P(With, RemovedSockets, ::testing::Bool(), [](const auto& folder) {
  return folder.param ? std::string("their_folder") : std::string("names_only");
});

TEST_F(RoundTest, who_calls_after_the_others_were_told_of_a_loss_is_told_too_and_their_next_call_unites_them) {
  JoinRing(4);
  for (auto& rank : ranks_) rank->session.forget_lost = true;
  std::vector<Status> statuses(4);
  std::atomic<int> told{0};
  const auto begun = std::chrono::steady_clock::now();
  Everybody([&](Rank& rank, std::size_t i) {
    if (i == 1) {
      std::this_thread::sleep_for(milliseconds(100));
      return rank.peers->Stop();
    }
    while (i == 3 && told < 2) std::this_thread::sleep_for(milliseconds(1));
    statuses[i] = rank.Arrive(CycleKind::kPause, 1).status();
    ++told;
  });
  for (const std::size_t i : {0u, 2u, 3u}) {
    EXPECT_EQ(statuses[i].code(), Code::kPeerLost) << statuses[i].message();
    EXPECT_NE(statuses[i].message().find("rank 1 (pid "), std::string::npos) << statuses[i].message();
  }
  Everybody([&](Rank& rank, std::size_t i) {
    if (i == 1) return;
    if (i == 3) std::this_thread::sleep_for(milliseconds(50));
    auto round = rank.Arrive(CycleKind::kPause, 2);
    ASSERT_TRUE(round) << round.status().message();
    EXPECT_EQ((*round)->Members().size(), 3u);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, milliseconds(5000));
}

// ---- one deadline for a call -----------------------------------------------------------------------------------------------

TEST_F(RoundTest, all_votes_of_a_round_together_have_the_time_of_one_call) {
  JoinRing(2, 1500 * kFew);
  std::vector<Status> decided(2);
  Everybody([&](Rank& rank, std::size_t i) {
    const Deadline began = Now();
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    for (int phase = 0; phase < 4 && decided[i].ok(); ++phase) {
      if (i == 1) std::this_thread::sleep_for(rank.deadlines.call() * 5 / 8);
      const Decision decision = (*round)->Vote(static_cast<PhaseKind>(phase), {});
      decided[i] = decision.status;
      if (!decided[i].ok()) {
        EXPECT_EQ(decision.culprit, Identity(1).session);
      }
    }
    EXPECT_LT(SinceThen(began), rank.deadlines.call() * 3 / 2) << "rank " << i;
  });
  for (const Status& status : decided) EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
}

TEST_F(RoundTest, a_round_ends_for_all_when_the_time_of_the_first_that_came_is_up) {
  JoinRing(3, 4000 * kFew);
  std::vector<Deadline> until(3);
  const Deadline began = Now();
  Everybody([&](Rank& rank, std::size_t i) {
    if (i == 2) std::this_thread::sleep_for(rank.deadlines.call() / 2);
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    until[i] = (*round)->until();
  });
  for (const Deadline end : until) {
    EXPECT_LT(end, began + ranks_[0]->deadlines.call() * 5 / 4);
    EXPECT_GT(end, began + ranks_[0]->deadlines.call() * 3 / 4);
  }
}

TEST_F(RoundTest, who_comes_at_the_last_moment_leaves_a_round_some_time_and_a_resume_all_of_it) {
  JoinRing(2, 2000 * kFew);
  for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
    Everybody([&](Rank& rank, std::size_t i) {
      rank.session.lifecycle = kind == CycleKind::kPause ? Lifecycle::kRunning : Lifecycle::kPaused;
      if (i == 1) std::this_thread::sleep_for(rank.deadlines.call() * 7 / 8);
      auto round = rank.Arrive(kind, 1);
      ASSERT_TRUE(round) << round.status().message();
      const auto left = LeftUntil((*round)->until());
      EXPECT_GT(left, rank.deadlines.round_least() * 3 / 4) << "rank " << i;
      EXPECT_EQ(left > rank.deadlines.call() / 2, kind == CycleKind::kResume) << "rank " << i << ": " << left.count();
    });
  }
}

// ---- leaders that a test directs -------------------------------------------------------------------------------------------

// The thread that counts does not run for a while, and then reads votes of those that wait and of one that does not any more.
TEST_F(RoundTest, the_vote_of_a_member_that_has_given_up_does_not_count) {
  JoinRing(3, 800 * kFew);
  std::array<std::unique_ptr<Round>, 3> rounds;
  Everybody([&](Rank& rank, std::size_t i) {
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    rounds[i] = *std::move(round);
  });
  ranks_[0]->session.witness_takes = milliseconds(500 * kFew);
  ranks_[1]->session.witness_takes = milliseconds(1000 * kFew);  // it says what the leader did before it leaves
  std::thread waits([&] { EXPECT_EQ(rounds[2]->Vote(PhaseKind::kPauseSave, {}).status.code(), Code::kPeerLost); });
  std::this_thread::sleep_for(milliseconds(50 * kFew));
  std::thread gives_up([&] {
    rounds[1]->SetUntil(In(milliseconds(100 * kFew)));
    EXPECT_EQ(rounds[1]->Vote(PhaseKind::kPauseSave, {}).status.code(), Code::kTimeout);
    rounds[1].reset();
  });
  const Decision decision = rounds[0]->Vote(PhaseKind::kPauseSave, {});
  EXPECT_EQ(decision.status.code(), Code::kPeerLost) << decision.status.message();
  EXPECT_EQ(decision.culprit, Identity(1).session);
  EXPECT_NE(decision.status.message().find("withdrew"), std::string::npos) << decision.status.message();
  waits.join();
  gives_up.join();
}

class ScriptedLeaderTest : public RoundTest {
 protected:
  // A member of the scripted leader's set, whose session comes after the leader's.
  Rank& JoinMember(std::int32_t rank, std::uint32_t timeout_ms = 20'000) {
    Rank& member = Join(rank, timeout_ms);
    member.session.Add(Identity(0).session);
    member.session.lifecycle = Lifecycle::kPausing;
    return member;
  }
};

TEST_F(ScriptedLeaderTest, a_member_greets_a_leader_once_to_ask_and_to_arrive) {
  ScriptedLeader leader(directory_, {Identity(0), Identity(1)},
                        [](const PeerIdentity&, const VoteMessage&) { return std::vector<MessageBody>(); });
  auto round = JoinMember(1).Arrive(CycleKind::kPause, 1);
  ASSERT_TRUE(round) << round.status().message();
  EXPECT_TRUE(leader.arrived_as_it_asked());
}

TEST_F(ScriptedLeaderTest, a_decision_of_another_ballot_or_round_is_not_this_votes) {
  ScriptedLeader leader(directory_, {Identity(0), Identity(1)}, [](const PeerIdentity&, const VoteMessage& vote) {
    return std::vector<MessageBody>{
        DecisionMessage{vote.round, vote.index + 1, {}}, DecisionMessage{vote.round, vote.index - 1, {}},
        DecisionMessage{vote.round + 1, vote.index, {}},
        DecisionMessage{
            vote.round, vote.index, {Identity(0).session, {Code::kDriver, "of ballot " + std::to_string(vote.index)}}}};
  });
  Rank& member = JoinMember(1);
  auto round = member.Arrive(CycleKind::kPause, 1);
  ASSERT_TRUE(round) << round.status().message();
  for (const char* expected : {"of ballot 1", "of ballot 2", "of ballot 3"}) {
    const Decision decision = (*round)->Vote(PhaseKind::kPauseSave, {});
    const Status& decided = decision.status;
    EXPECT_EQ(decided.code(), Code::kDriver);
    EXPECT_EQ(decided.message(), expected);
    EXPECT_EQ(decision.culprit, Identity(0).session);
  }
}

TEST_F(ScriptedLeaderTest, one_that_decides_nothing_is_given_up_a_little_after_it_should_have_decided) {
  const std::uint32_t timeout_ms = 400;
  ScriptedLeader leader(directory_, {Identity(0), Identity(1)},
                        [](const PeerIdentity&, const VoteMessage&) { return std::vector<MessageBody>(); });
  Rank& member = JoinMember(1, timeout_ms);
  auto round = member.Arrive(CycleKind::kPause, 1);
  ASSERT_TRUE(round) << round.status().message();
  const auto begun = std::chrono::steady_clock::now();
  const Decision decision = (*round)->Vote(PhaseKind::kPauseSave, {});
  const Status& given_up = decision.status;
  const auto took = std::chrono::steady_clock::now() - begun;
  EXPECT_EQ(given_up.code(), Code::kTimeout);
  EXPECT_NE(given_up.message().find(" ms for rank 0 (pid "), std::string::npos) << given_up.message();
  EXPECT_EQ(decision.culprit, Identity(0).session);
  EXPECT_GE(took, milliseconds(timeout_ms - 50) + member.deadlines.margin());
  EXPECT_LT(took, milliseconds(10 * timeout_ms));
  EXPECT_TRUE((*round)->Leaderless());
  for (const Decision& unheard : {decision, (*round)->Vote(PhaseKind::kPauseReleaseOwn, {})}) {
    EXPECT_FALSE(unheard.heard);
    EXPECT_FALSE(unheard.against);
    EXPECT_EQ(unheard.absent, std::vector{Identity(0).session}) << "nothing is known of the others";
  }
}

// It was stopped before it could say what it had decided.
TEST_F(ScriptedLeaderTest, one_that_ended_the_cycle_and_told_nobody_is_heard_though_it_is_left_out) {
  ScriptedLeader leader(directory_, {Identity(0), Identity(1)},
                        [](const PeerIdentity&, const VoteMessage&) { return std::vector<MessageBody>(); });
  auto round = JoinMember(1, 400).Arrive(CycleKind::kPause, 1);
  ASSERT_TRUE(round) << round.status().message();
  EXPECT_EQ((*round)->Vote(PhaseKind::kPauseGone, {}).status.code(), Code::kTimeout);
  leader.lifecycle = Lifecycle::kPaused;
  const auto ended = (*round)->Regather();
  ASSERT_TRUE(ended) << ended.status().message();
  EXPECT_EQ(*ended, Lifecycle::kPaused);
  EXPECT_FALSE((*round)->Leaderless());
}

// It has run since before the round, and says nothing of how the round ended.
TEST_F(ScriptedLeaderTest, a_peer_that_a_round_does_without_has_not_ended_it) {
  ScriptedLeader leader(directory_, {Identity(0), Identity(1), Identity(2)},
                        [](const PeerIdentity&, const VoteMessage&) { return std::vector<MessageBody>(); });
  JoinMember(1);
  JoinMember(2);
  for (auto& rank : ranks_) rank->spares = [](SessionId session) { return session == Identity(3).session; };
  Rank& runs = JoinMember(3);
  runs.session.lifecycle = Lifecycle::kRunning;
  for (std::size_t i = 0; i < 2; ++i) ranks_[i]->session.Add(ranks_[1 - i]->identity.session);
  for (std::size_t i = 0; i < 2; ++i) ranks_[i]->session.Add(runs.identity.session);
  std::atomic<int> arrived{0};
  Everybody([&](Rank& rank, std::size_t i) {
    if (i == 2) return;
    auto round = rank.Arrive(CycleKind::kResume, 1);
    ASSERT_TRUE(round) << round.status().message();
    if (++arrived == 2) leader.Die();
    EXPECT_EQ((*round)->Vote(PhaseKind::kResumeOpen, {}).status.code(), Code::kPeerLost);
    const auto ended = (*round)->Regather();
    ASSERT_TRUE(ended) << ended.status().message();
    EXPECT_FALSE(ended->has_value()) << ToText(**ended);
    EXPECT_EQ((*round)->Members(), (std::vector{Identity(1), Identity(2)}));
  });
}

// As a process does that has no descriptor or no memory for one more connection.
TEST_F(ScriptedLeaderTest, one_that_ends_connections_and_lives_is_asked_again) {
  std::atomic<int> closed{0};
  ScriptedLeader leader(directory_, {Identity(0), Identity(1)}, {}, [&](const MessageBody& body) {
    return (std::holds_alternative<AskNeighboursMessage>(body) && closed++ < 3) ||
           (std::holds_alternative<ArriveMessage>(body) && closed++ < 9);
  });
  Rank& member = JoinMember(1);
  auto round = member.Arrive(CycleKind::kPause, 1);
  ASSERT_TRUE(round) << round.status().message();
  EXPECT_GE(closed, 9);
  EXPECT_TRUE(member.session.lost().empty());
}

TEST_F(ScriptedLeaderTest, one_that_ends_connections_until_the_deadline_lives_and_does_not_answer) {
  ScriptedLeader leader(directory_, {Identity(0), Identity(1)}, {},
                        [](const MessageBody& body) { return std::holds_alternative<AskNeighboursMessage>(body); });
  Rank& member = JoinMember(1, 2000 * kFew);
  const Status status = member.Arrive(CycleKind::kPause, 1).status();
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_NE(status.message().find("lives and does not answer: it ends the connections"), std::string::npos) << status.message();
  EXPECT_EQ(member.culprits, std::vector{PeerIdentity{.session = Identity(0).session}}) << "it has not said who it is";
}

TEST_F(ScriptedLeaderTest, one_that_hears_no_arrival_and_lives_is_late_and_not_lost) {
  ScriptedLeader leader(directory_, {Identity(0), Identity(1)}, {},
                        [](const MessageBody& body) { return std::holds_alternative<ArriveMessage>(body); });
  Rank& member = JoinMember(1, 2000 * kFew);
  const Status status = member.Arrive(CycleKind::kPause, 1).status();
  EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
  EXPECT_NE(status.message().find("rank 0 (pid "), std::string::npos) << status.message();
}

TEST_F(ScriptedLeaderTest, one_that_dies_between_its_last_decisions_leaves_a_member_that_hears_how_it_ended) {
  ScriptedLeader leader(directory_, {Identity(0), Identity(1), Identity(2)},
                        [](const PeerIdentity& member, const VoteMessage& vote) {
                          std::vector<MessageBody> decision;
                          if (member.session == Identity(1).session) decision = {DecisionMessage{vote.round, vote.index, {}}};
                          return decision;
                        });
  Rank& told = JoinMember(1);
  Rank& untold = JoinMember(2);
  told.session.Add(untold.identity.session);
  untold.session.Add(told.identity.session);
  std::atomic<bool> passed{false};
  Everybody([&](Rank& rank, std::size_t) {
    auto round = rank.Arrive(CycleKind::kPause, 1);
    ASSERT_TRUE(round) << round.status().message();
    const Decision decision = (*round)->Vote(PhaseKind::kPauseGone, {});
    const Status& status = decision.status;
    if (&rank == &told) {
      EXPECT_TRUE(status.ok()) << status.message();
      rank.session.lifecycle = Lifecycle::kPaused;
      passed = true;
      leader.Die();
      return;
    }
    EXPECT_EQ(status.code(), Code::kPeerLost) << status.message();
    EXPECT_EQ(decision.culprit, Identity(0).session);
    ASSERT_TRUE((*round)->Leaderless());
    const auto ended = (*round)->Regather();
    ASSERT_TRUE(ended) << ended.status().message();
    EXPECT_EQ(*ended, Lifecycle::kPaused);
    EXPECT_FALSE((*round)->Leaderless());
  });
  EXPECT_TRUE(passed);
}

}  // namespace
}  // namespace amem
