// The tool's side of a request against ranks that do and say what the test wants: real sockets, played by a thread.
#include "replay/control/job_control.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "journal/base/clock.h"
#include "journal/base/no_copies.h"
#include "journal/base/process_sight.h"
#include "replay/peers/unix/unix_peers.h"
#include "tests/journal/temporary.h"
#include "tests/replay/control/ranks.h"

namespace amem::control {
namespace {

using amem::test::TemporaryDirectory;
using std::chrono::milliseconds;
using test::Has, test::kLong;

constexpr milliseconds kBriefly{60};

// A rank without a program: what it was told, and what it says of itself.
class Played final : public RequestServer {
 public:
  Order order;  // both with the lock
  RankStatus is;

  void OnOrder(const Order& given) override {
    const std::lock_guard lock(mutex_);
    if (given.request != 0) order = given;
    is.last_request = std::max(is.last_request, given.request);
  }
  void OnToolGone() override {}
  RankStatus CurrentStatus() override {
    const std::lock_guard lock(mutex_);
    RankStatus now = is;
    if (order.ask != Ask::kNothing) now.asked = order;
    return now;
  }
  void NotifyOfChanges(std::function<void()> tell) override {
    const std::lock_guard lock(mutex_);
    tell_ = std::move(tell);
  }
  template <class Change>
  void With(const Change& change) {
    const std::lock_guard lock(mutex_);
    const RankStatus before = is;
    change(*this);
    if (tell_ && before != is) tell_();
  }

  void Say(Phase phase, Stage done = Stage::kCome) {
    is.phase = phase;
    is.stage_done = done;
    is.about = order.request;
  }
  void Fail(Phase phase, const std::string& why) {
    is.failure = {Code::kOutOfMemory, why};
    Say(phase);
  }
  [[nodiscard]] bool Is(Ask ask, Stage stage) const { return order.ask == ask && order.stage == stage; }
  // Does as it is asked, at once.
  void Obey() {
    if (Is(Ask::kPause, Stage::kCome)) Say(Phase::kArrived);
    if (Is(Ask::kPause, Stage::kTags)) Say(Phase::kPausing, Stage::kTags);
    if (Is(Ask::kPause, Stage::kNccl)) Say(Phase::kPaused, Stage::kNccl);
    // As a rank does, one that runs has nothing to resume.
    if (Is(Ask::kResume, Stage::kTags) && is.phase != Phase::kRunning) Say(Phase::kResuming, Stage::kTags);
    if (Is(Ask::kResume, Stage::kNccl)) Say(Phase::kRunning, Stage::kNccl);
  }

 private:
  std::mutex mutex_;
  std::function<void()> tell_;
};

struct Noting : test::Alone {
  bool OnWitnessed(std::span<const EventBody> facts, milliseconds) override {
    const std::lock_guard lock(mutex);
    if (busy-- > 0) return false;
    witnessed.insert(witnessed.end(), facts.begin(), facts.end());
    return true;
  }
  std::mutex mutex;
  std::vector<EventBody> witnessed;
  std::atomic<int> busy{0};  // so many calls come in vain
};

// The ranks of a job. While a tool is at work, `play` is called for each again and again, with its lock.
class PlayedRanks : public testing::Test {
 protected:
  using Play = std::function<void(std::size_t rank, Played& played)>;

  void Make(std::size_t count) {
    for (std::size_t rank = 0; rank < count; ++rank) {
      places.push_back({test::NewSession(), directory.path() / std::to_string(rank), static_cast<std::int32_t>(rank)});
      ranks.push_back(std::make_unique<Played>());
      const PeerIdentity self{.session = places.back().session, .host = "here", .pid = ::getpid(), .rank = places.back().rank};
      UnixPeersOptions options{.socket_directory = sockets(), .deadlines = {}, .expected_uid = {}};
      options.requests = ranks.back().get();
      auto started = UnixPeers::Start(self, options, alone);
      ASSERT_TRUE(started.ok()) << started.status().message();
      peers.push_back(*std::move(started));
    }
  }
  // Ends what is played where it goes out of scope: `played` uses what a test declared before it.
  struct Playing : NoCopies {
    explicit Playing(PlayedRanks& played) : ranks(played) {}
    ~Playing() { ranks.Stop(); }
    PlayedRanks& ranks;
  };
  [[nodiscard]] Playing Begin(Play played) {
    play = std::move(played);
    player = std::thread([this] {
      while (!stop) {
        for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
          ranks[rank]->With([&](Played& one) { play(rank, one); });
          if (ends[rank].exchange(false)) peers[rank]->Stop();
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    return Playing(*this);
  }
  void Stop() {
    stop = true;
    if (player.joinable()) player.join();
    stop = false;
  }
  [[nodiscard]] std::filesystem::path sockets() const { return directory.path() / "sockets"; }
  [[nodiscard]] Result<JobControl> Open() const { return JobControl::Open(places, sockets()); }
  [[nodiscard]] RankStatus Of(std::size_t rank) const { return ranks[rank]->CurrentStatus(); }
  [[nodiscard]] Order OrderOf(std::size_t rank) const {
    Order order;
    ranks[rank]->With([&](const Played& one) { order = one.order; });
    return order;
  }
  // What was given last may still be on its way.
  [[nodiscard]] bool IsWithdrawn(std::size_t rank) const {
    return test::Ranks::Becomes([&] { return Of(rank).asked.request == 0; });
  }
  void Set(std::size_t rank, const std::function<void(RankStatus&)>& change) {
    ranks[rank]->With([&](Played& one) { change(one.is); });
  }

  TemporaryDirectory directory;
  Noting alone;
  std::vector<RankPlace> places;
  std::vector<std::unique_ptr<Played>> ranks;
  std::vector<std::unique_ptr<UnixPeers>> peers;
  std::array<std::atomic<bool>, 8> ends{};  // the process of that rank is to end
  Play play;
  std::atomic<bool> stop = false;
  std::thread player;
};

// ---- a step --------------------------------------------------------------------------------------------------------------

// The step that is agreed on among ranks that stand so; nothing is paused.
class Steps : public PlayedRanks {
 protected:
  void SetUp() override { Make(3); }
  Status Ask(std::optional<std::uint64_t> at_step = {}) {
    auto job = Open();
    if (!job.ok()) return job.status();
    AskOptions options{.deadline = kLong, .at_step = at_step};
    options.may_pause = [&]() -> std::optional<Status> {
      targets.clear();
      for (std::size_t rank = 0; rank < 3; ++rank) targets.push_back(Of(rank).asked.target);
      if (std::ranges::find(targets, 0U) != targets.end()) return std::nullopt;
      return Status{Code::kUnsupported, "seen enough"};
    };
    return job->Pause(options);
  }
  std::vector<std::uint64_t> targets;
};

TEST_F(Steps, the_step_is_the_next_one_of_the_rank_that_is_ahead) {
  Set(0, [](RankStatus& is) { is.steps = 5; });
  Set(1, [](RankStatus& is) { is.steps = 9; });
  EXPECT_EQ(Ask().message(), "seen enough");
  EXPECT_EQ(targets, (std::vector<std::uint64_t>{10, 10, 10}));
}

TEST_F(Steps, a_program_that_has_not_begun_comes_to_its_first) {
  EXPECT_EQ(Ask().message(), "seen enough");
  EXPECT_EQ(targets.at(0), 1U);
}

TEST_F(Steps, what_is_paused_has_no_say) {
  Set(0, [](RankStatus& is) { is.steps = 5; });
  Set(1, [](RankStatus& is) { is.steps = 90, is.phase = Phase::kPaused; });
  Set(2, [](RankStatus& is) { is.steps = 80, is.own_pause = OwnPause::kPaused; });
  EXPECT_EQ(Ask().message(), "seen enough");
  EXPECT_EQ(targets.at(0), 6U);
}

TEST_F(Steps, one_that_is_named_may_be_the_next_and_no_earlier) {
  Set(1, [](RankStatus& is) { is.steps = 9; });
  EXPECT_EQ(Ask(10).message(), "seen enough");
  EXPECT_EQ(targets.at(2), 10U);
  const Status early = Ask(9);
  EXPECT_EQ(early.code(), Code::kRefused);
  EXPECT_TRUE(Has(early.message(), "rank 1 has reached safe point 9 already; choose a later one than 9")) << early.message();
  for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(IsWithdrawn(rank));
}

// ---- coming --------------------------------------------------------------------------------------------------------------

TEST_F(PlayedRanks, one_that_is_held_past_the_step_is_asked_once_more_for_its_own) {
  Make(2);
  Set(0, [](RankStatus& is) { is.steps = 4; });
  std::atomic<std::uint64_t> last = 0;
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 1 || !one.Is(Ask::kPause, Stage::kCome)) return one.Obey();
    last = one.order.request;
    if (one.order.target == 0) return;
    one.is.steps = 7;  // it had got so far when it saw the request
    one.is.at = std::max<std::uint64_t>(one.order.target, 7);
    one.Say(one.order.target >= 7 ? Phase::kArrived : Phase::kHeld);
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong});
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_GE(last, 2U);
  EXPECT_GE(OrderOf(0).target, 7U);
}

TEST_F(PlayedRanks, a_request_that_does_not_fit_is_put_again_more_and_more_seldom) {
  Make(1);
  const auto playing = Begin([&](std::size_t, Played& one) {
    one.is.at = one.order.target + 1;
    one.Say(Phase::kHeld);
    if (one.order.target == 0) one.is.phase = Phase::kRunning;
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job->Pause({.deadline = milliseconds(300)}).code(), Code::kTimeout);
  EXPECT_GE(Of(0).last_request, 2U);
  EXPECT_LE(Of(0).last_request, 7U) << "after 10 ms, 20, 40 and so on";
}

TEST_F(PlayedRanks, who_does_not_come_is_named_and_nobody_else) {
  Make(3);
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank != 1) one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  Status late;
  for (milliseconds deadline = kBriefly; deadline < kLong; deadline *= 2) {  // on a busy machine the others need longer
    const auto began = std::chrono::steady_clock::now();
    late = job->Pause({.deadline = deadline});
    EXPECT_GE(std::chrono::steady_clock::now() - began, deadline);
    if (!Has(late.message(), "rank 0") && !Has(late.message(), "rank 2")) break;
  }
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_TRUE(Has(late.message(), "rank 1: runs, and has not called amem.safepoint()")) << late.message();
  EXPECT_FALSE(Has(late.message(), "rank 0") || Has(late.message(), "rank 2")) << late.message();
  for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(IsWithdrawn(rank));
}

TEST_F(PlayedRanks, what_a_rank_does_is_told_again_only_when_it_does_something_else) {
  Make(2);
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank != 1) one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  std::map<std::string, int> told;
  const Status late = job->Pause({.deadline = milliseconds(500), .progress_every = milliseconds(100)},
                                 [&](const std::string& line) { ++told[line]; });
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_FALSE(told.empty());
  for (const auto& [line, times] : told) EXPECT_EQ(times, 1) << line;
}

TEST_F(PlayedRanks, nothing_is_paused_while_the_caller_does_not_know) {
  Make(1);
  std::atomic<bool> told = false;
  const auto playing = Begin([&](std::size_t, Played& one) {
    told = told || one.Is(Ask::kPause, Stage::kTags);
    one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  AskOptions options{.deadline = kBriefly};
  options.may_pause = [] { return std::optional<Status>(); };
  EXPECT_EQ(job->Pause(options).code(), Code::kTimeout);
  EXPECT_FALSE(told);
}

TEST_F(PlayedRanks, one_that_ends_before_it_comes_ends_the_request) {
  Make(2);
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0) return one.Obey();
    if (one.Is(Ask::kPause, Stage::kCome)) ends[1] = true;
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status lost = job->Pause({.deadline = kLong});
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_EQ(lost.message(), "rank 1 has lost contact with this program before it paused; nothing was paused");
  EXPECT_TRUE(IsWithdrawn(0));
}

TEST_F(PlayedRanks, a_resume_of_the_program_that_some_have_begun_is_let_through) {
  Make(2);
  Set(0, [](RankStatus& is) { is.own_pause = OwnPause::kPaused; });
  Set(1, [](RankStatus& is) { is.own_pause = OwnPause::kResuming; });
  std::atomic<int> requests = 0;
  std::uint64_t seen = 0;
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0 && one.order.ask != Ask::kNothing && one.order.request != std::exchange(seen, one.order.request)) ++requests;
    if (requests < 2) return;
    one.is.own_pause = OwnPause::kNo;  // both are through
    one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong});
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_GE(requests, 2);
}

TEST_F(PlayedRanks, a_pause_of_the_program_that_some_have_begun_is_let_through) {
  Make(2);
  Set(0, [](RankStatus& is) { is.own_pause = OwnPause::kPausing; });
  std::atomic<int> requests = 0;
  std::uint64_t seen = 0;
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 1 && one.order.ask != Ask::kNothing && one.order.request != std::exchange(seen, one.order.request)) ++requests;
    if (rank == 1) return one.Obey();  // its own pause waits
    if (requests >= 2) one.is.own_pause = OwnPause::kPaused;
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong});
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_GE(requests, 2);
}

TEST_F(PlayedRanks, one_that_resumes_by_itself_while_no_other_waits_to_is_left_in_peace) {
  Make(2);
  for (const OwnPause own : {OwnPause::kResuming, OwnPause::kPaused}) {
    Set(0, [&](RankStatus& is) { is.own_pause = own; });
    auto job = Open();
    ASSERT_TRUE(job.ok());
    const std::uint64_t before = Of(1).last_request;
    EXPECT_EQ(job->Pause({.deadline = kBriefly}).code(), Code::kTimeout);
    EXPECT_EQ(Of(1).last_request, before + 1);
  }
}

// ---- stages --------------------------------------------------------------------------------------------------------------

TEST_F(PlayedRanks, NCCL_is_paused_when_all_tags_are_and_not_before) {
  Make(3);
  std::atomic<bool> slow_is_done = false, too_early = false;
  const auto slow_until = std::chrono::steady_clock::now() + milliseconds(150);
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (one.Is(Ask::kPause, Stage::kNccl) && !slow_is_done) too_early = true;
    if (rank == 2 && one.Is(Ask::kPause, Stage::kTags)) {
      if (std::chrono::steady_clock::now() < slow_until) return one.Say(Phase::kPausing, Stage::kCome);
      slow_is_done = true;
    }
    one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status paused = job->Pause({.deadline = kLong, .all_tags = true});
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_TRUE(slow_is_done);
  EXPECT_FALSE(too_early);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(OrderOf(rank).all_tags);
    EXPECT_EQ(OrderOf(rank).told_first, places[0].session);
    EXPECT_EQ(OrderOf(rank).by_pid, ::getpid());
  }
}

TEST_F(PlayedRanks, a_pause_is_no_pause_before_the_rank_says_that_it_is_paused) {
  Make(1);
  const auto until = std::chrono::steady_clock::now() + milliseconds(100);
  const auto playing = Begin([&](std::size_t, Played& one) {
    if (one.Is(Ask::kPause, Stage::kNccl) && std::chrono::steady_clock::now() < until)
      return one.Say(Phase::kPausing, Stage::kNccl);
    one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  EXPECT_TRUE(job->Pause({.deadline = kLong}).ok());
  EXPECT_EQ(Of(0).phase, Phase::kPaused);
}

TEST_F(PlayedRanks, tags_that_fail_on_one_withdraw_the_request_from_all) {
  Make(2);
  std::atomic<bool> failed = false;
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 1 && one.Is(Ask::kPause, Stage::kTags)) {
      failed = true;
      return one.Fail(Phase::kFailed, "no room");
    }
    if (failed && one.order.ask == Ask::kNothing) return one.Say(Phase::kRunning);
    one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status status = job->Pause({.deadline = kLong, .all_tags = true});
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_EQ(status.message(), "rank 1: no room");
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(IsWithdrawn(rank));
}

TEST_F(PlayedRanks, NCCL_that_fails_on_one_is_resumed_where_it_was_paused) {
  Make(2);
  std::atomic<bool> resumed = false;
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 1 && one.Is(Ask::kPause, Stage::kNccl)) {
      if (Of(0).phase == Phase::kPaused) one.Fail(Phase::kFailed, "no room");
      return;
    }
    if (rank == 0 && one.Is(Ask::kResume, Stage::kNccl)) resumed = true;
    if (rank == 0 || one.is.phase != Phase::kFailed) one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status status = job->Pause({.deadline = kLong});
  EXPECT_EQ(status.message(), "rank 1: no room");
  EXPECT_EQ(resumed, true);
  EXPECT_EQ(Of(0).phase, Phase::kRunning);
}

TEST_F(PlayedRanks, that_stay_paused_because_an_undo_failed_are_resumed_and_the_message_says_so) {
  Make(2);
  const auto playing = Begin([](std::size_t, Played& one) {
    // One whose request is withdrawn, because the other one has failed, before it is told of that stage runs on.
    if (one.order.ask == Ask::kNothing && one.is.phase == Phase::kPausing) return one.Say(Phase::kRunning);
    if (!one.Is(Ask::kPause, Stage::kNccl)) return one.Obey();
    if (one.is.phase != Phase::kPaused) one.Fail(Phase::kPaused, "no room; undoing it failed too");
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status status = job->Pause({.deadline = kLong});
  EXPECT_TRUE(Has(status.message(), ": no room; undoing it failed too; then all were resumed")) << status.message();
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(Of(rank).phase, Phase::kRunning);
}

TEST_F(PlayedRanks, one_that_ends_while_it_pauses_is_named) {
  Make(2);
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 1 && one.Is(Ask::kPause, Stage::kTags)) {
      ends[1] = true;
      return;
    }
    if (rank == 0 && one.order.ask == Ask::kNothing) return one.Say(Phase::kRunning);
    one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status lost = job->Pause({.deadline = kLong, .all_tags = true});
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_EQ(lost.message(), "rank 1 has lost contact with this program while it paused");
}

// This program was stopped for so long that a rank took it for dead.
TEST_F(PlayedRanks, one_that_has_given_up_ends_the_pause) {
  Make(2);
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 1 && one.Is(Ask::kPause, Stage::kTags)) {
      one.order.ask = Ask::kNothing;
      return one.Say(Phase::kRunning);
    }
    if (one.order.ask == Ask::kNothing) return one.Say(Phase::kRunning);
    one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status lost = job->Pause({.deadline = kLong});
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_TRUE(Has(lost.message(), "rank 1 got no message from this command for 30 s")) << lost.message();
  EXPECT_TRUE(test::Ranks::Becomes([&] { return Of(0).phase == Phase::kRunning; }));
}

// Of one that is stopped between launches the program runs, and nobody knows what it uses.
TEST_F(PlayedRanks, that_are_paused_between_launches_are_not_asked_for_their_tags) {
  Make(2);
  std::atomic<bool> asked = false;
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    asked = asked || (one.order.ask == Ask::kPause && one.order.all_tags);
    if (rank == 1 && one.order.ask == Ask::kPause) return one.Say(Phase::kPaused, one.order.stage);
    one.Obey();
  });
  Set(1, [](RankStatus& is) {
    is.phase = Phase::kPaused;
    is.launches.version = 3;
  });
  const Status refused = Open()->Pause({.deadline = kLong, .all_tags = true});
  EXPECT_EQ(refused.code(), Code::kRefused) << refused.message();
  EXPECT_TRUE(Has(refused.message(), "rank 1 is paused between two launches")) << refused.message();
  EXPECT_EQ(Of(0).last_request, 0U) << "nobody is asked";
  const Status frozen = Open()->Pause({.deadline = kLong, .all_tags = true, .tags_at_safepoint_only = true});
  EXPECT_TRUE(frozen.ok()) << frozen.message();
  EXPECT_FALSE(asked) << "who takes all memory anyway takes the tags with it";
  Set(1, [](RankStatus& is) { is.parked = true; });
  const Status parked = Open()->Pause({.deadline = kLong});
  EXPECT_EQ(parked.code(), Code::kRefused);
  EXPECT_TRUE(Has(parked.message(), "the job is parked: resume it first")) << parked.message();
}

// Rank 1 waits in its own pause or resume for rank 0, which waits for the request.
TEST_F(PlayedRanks, a_stop_between_launches_lets_through_what_some_programs_have_begun) {
  Make(2);
  for (const OwnPause under_way : {OwnPause::kResuming, OwnPause::kPausing}) {
    const bool resumes = under_way == OwnPause::kResuming;
    Set(0, [&](RankStatus& is) { is.own_pause = resumes ? OwnPause::kPaused : OwnPause::kNo; });
    Set(1, [&](RankStatus& is) { is.own_pause = under_way; });
    std::atomic<int> requests = 0;
    std::uint64_t seen = OrderOf(0).request;
    const auto playing = Begin([&](std::size_t rank, Played& one) {
      // Also one that is withdrawn when this comes to it.
      if (rank == 0 && one.order.request != std::exchange(seen, one.order.request)) ++requests;
      if (requests >= 2) one.is.own_pause = OwnPause::kNo;
      if (!one.Is(Ask::kPause, Stage::kCome)) return one.Obey();
      one.is.launches = {.version = one.order.launches.version};
      const bool comes = one.order.launches.stands && (rank == 0 || one.is.own_pause == OwnPause::kNo);
      one.Say(comes ? Phase::kArrived : Phase::kHeld);
    });
    auto job = Open();
    ASSERT_TRUE(job.ok());
    const Status paused = job->Pause({.deadline = milliseconds(3'000), .where = Where::kBetweenLaunches});
    EXPECT_TRUE(paused.ok()) << paused.message();
    EXPECT_GE(requests, 2);
    EXPECT_TRUE(job->Resume(kLong).ok());
  }
}

// As where sets that share no memory each decided for themselves. One that is paused says nothing of launches.
class SomePaused : public PlayedRanks {
 protected:
  void SetUp() override {
    Make(2);
    Set(0, [](RankStatus& is) { is.phase = Phase::kPaused; });
  }
  Status Stop(std::int32_t ranks) {
    const auto playing = Begin([&](std::size_t rank, Played& one) {
      if (one.order.ask != Ask::kPause) return;
      if (rank == 0) return one.Say(Phase::kPaused, one.order.stage);
      if (!one.Is(Ask::kPause, Stage::kCome)) return one.Obey();
      agreement::LaunchReading reading{.version = one.order.launches.version};
      reading.seats = {{.device = 0}};
      reading.clocks = {{.communicator = 5, .rank = 0, .ranks = ranks, .device = 0, .launched = 7}};
      one.is.launches = reading;
      one.Say(one.order.launches.stands ? Phase::kArrived : Phase::kHeld);
    });
    return Open()->Pause({.deadline = kLong, .where = Where::kBetweenLaunches});
  }
};

TEST_F(SomePaused, do_not_keep_the_others_from_stopping_between_launches) {
  const Status paused = Stop(1);
  EXPECT_TRUE(paused.ok()) << paused.message();
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(Of(rank).phase, Phase::kPaused);
}

TEST_F(SomePaused, are_named_where_the_others_launch_with_them) {
  const Status refused = Stop(2);
  EXPECT_EQ(refused.code(), Code::kRefused);
  EXPECT_TRUE(Has(refused.message(), "communicator 0x5 (2 ranks): only 1 of them are asked")) << refused.message();
  EXPECT_TRUE(Has(refused.message(), "rank 0 is paused already, and does not say what it launched: resume the job first"))
      << refused.message();
}

TEST_F(SomePaused, are_not_said_to_run_on_and_nothing_is_said_of_their_launches) {
  const Status late = Open()->Pause({.deadline = milliseconds(200), .where = Where::kBetweenLaunches});
  EXPECT_EQ(late.code(), Code::kTimeout) << "nobody answers";
  Set(0, [](RankStatus& is) { is.phase = Phase::kPaused; });
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0 && one.order.ask == Ask::kPause) one.Say(Phase::kPaused);
  });
  const Status one_late = Open()->Pause({.deadline = milliseconds(200), .where = Where::kBetweenLaunches});
  EXPECT_TRUE(Has(one_late.message(), "nothing was paused, and those that ran run on")) << one_late.message();
  EXPECT_TRUE(Has(one_late.message(), "rank 1 has not closed its launch gate")) << one_late.message();
  EXPECT_FALSE(Has(one_late.message(), "rank 0")) << one_late.message();
}

// ---- a resume ------------------------------------------------------------------------------------------------------------

class PausedRanks : public PlayedRanks {
 protected:
  void SetUp() override {
    Make(2);
    {
      const auto playing = Begin([](std::size_t, Played& one) { one.Obey(); });
      ASSERT_TRUE(Open()->Pause({.deadline = kLong, .all_tags = true}).ok());
    }
    for (std::size_t rank = 0; rank < 2; ++rank) ASSERT_NE(Of(rank).asked.request, 0U) << "a pause stands without its tool";
  }
};

TEST_F(PausedRanks, resume_tags_first_and_NCCL_when_all_have_theirs) {
  std::atomic<bool> both = false, too_early = false;
  const auto until = std::chrono::steady_clock::now() + milliseconds(100);
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (one.Is(Ask::kResume, Stage::kNccl) && !both) too_early = true;
    if (rank == 1 && one.Is(Ask::kResume, Stage::kTags)) {
      if (std::chrono::steady_clock::now() < until) return;
      both = true;
    }
    one.Obey();
  });
  std::vector<std::string> said;
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status resumed = job->Resume(kLong, [&](const std::string& sentence) { said.push_back(sentence); });
  EXPECT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_TRUE(both);
  EXPECT_FALSE(too_early);
  EXPECT_EQ(said, std::vector<std::string>{"2 of 2 ranks resume"});
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(Of(rank).phase, Phase::kRunning);
}

TEST_F(PausedRanks, whoever_runs_already_is_not_waited_for) {
  Set(1, [](RankStatus& is) { is.phase = Phase::kRunning; });
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0) one.Obey();
  });
  const Status resumed = Open()->Resume(kLong);
  EXPECT_TRUE(resumed.ok()) << resumed.message();
}

TEST_F(PausedRanks, one_that_ends_an_earlier_resume_meanwhile_need_not_come_to_a_safe_point) {
  Set(1, [](RankStatus& is) { is.phase = Phase::kResuming; });  // about the pause: of that resume this test gives no order
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0) return one.Obey();
    if (one.order.ask == Ask::kResume) one.is.phase = Phase::kRunning;
  });
  const Status resumed = Open()->Resume(kLong);
  EXPECT_TRUE(resumed.ok()) << resumed.message();
}

TEST_F(PausedRanks, a_pause_waits_once_for_one_that_stays_in_an_earlier_resume) {
  Set(1, [](RankStatus& is) { is.phase = Phase::kResuming; });
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0) one.Obey();
  });
  constexpr milliseconds kDeadline(1'000);
  const auto from = std::chrono::steady_clock::now();
  EXPECT_EQ(Open()->Pause({.deadline = kDeadline}).code(), Code::kTimeout);
  EXPECT_LT(std::chrono::steady_clock::now() - from, 2 * kDeadline) << "and not as long for the resume as for the pause";
}

TEST_F(PausedRanks, that_do_not_answer_are_named_and_may_be_asked_again) {
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0) one.Obey();
  });
  {
    auto job = Open();
    ASSERT_TRUE(job.ok());
    const auto began = std::chrono::steady_clock::now();
    const Status late = job->Resume(kBriefly);
    EXPECT_GE(std::chrono::steady_clock::now() - began, kBriefly);
    EXPECT_EQ(late.code(), Code::kTimeout);
    EXPECT_TRUE(Has(late.message(), "rank 1 has not resumed in time: is paused")) << late.message();
  }
  EXPECT_NE(Of(1).asked.request, 0U) << "it is not forgotten when the tool goes";
  Stop();
  const auto resuming = Begin([](std::size_t, Played& one) { one.Obey(); });
  EXPECT_TRUE(Open()->Resume(kLong).ok());
}

TEST_F(PausedRanks, one_whose_resume_fails_keeps_all_paused_and_its_message_is_told) {
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 1 && one.order.ask == Ask::kResume) return one.Fail(Phase::kPaused, "no room");
    one.Obey();
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Status failed = job->Resume(kLong);
  EXPECT_EQ(failed.code(), Code::kOutOfMemory);
  EXPECT_EQ(failed.message(), "rank 1: no room");
  EXPECT_TRUE(test::Ranks::Becomes([&] {
    const Order order = OrderOf(0);
    return order.ask == Ask::kPause && order.stage == Stage::kNccl && order.all_tags;
  })) << "tags that are back are paused again";
}

// As where sets that share no memory each resumed for themselves.
TEST_F(PausedRanks, one_that_runs_when_the_resume_of_another_fails_is_asked_for_no_pause) {
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0 || !one.Is(Ask::kResume, Stage::kNccl)) return one.Obey();
    if (Of(0).phase == Phase::kRunning && one.is.failure.ok()) one.Fail(Phase::kPaused, "no room");
  });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job->Resume(kLong).message(), "rank 1: no room");
  EXPECT_TRUE(test::Ranks::Becomes([&] { return OrderOf(1).ask == Ask::kPause && OrderOf(1).stage == Stage::kNccl; }));
  EXPECT_EQ(OrderOf(0).ask, Ask::kResume);
  EXPECT_EQ(Of(0).phase, Phase::kRunning);
}

TEST_F(PausedRanks, one_that_has_ended_is_not_waited_for) {
  const auto playing = Begin([&](std::size_t rank, Played& one) {
    if (rank == 0) return one.Obey();
    if (one.Is(Ask::kResume, Stage::kTags)) ends[1] = true;
  });
  EXPECT_TRUE(Open()->Resume(kLong).ok());
}

// ---- opening -------------------------------------------------------------------------------------------------------------

TEST_F(PlayedRanks, numbers_go_on_where_an_earlier_tool_ended) {
  Make(2);
  Set(1, [](RankStatus& is) { is.last_request = 9; });
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const auto playing = Begin([](std::size_t, Played& one) { one.Obey(); });
  ASSERT_TRUE(job->Pause({.deadline = kLong}).ok());
  EXPECT_EQ(OrderOf(0).request, 10U);
}

TEST_F(PlayedRanks, nothing_is_asked_before_what_a_tool_that_died_has_left_has_come_to_its_end) {
  Make(2);
  for (const Phase phase : {Phase::kHeld, Phase::kArrived, Phase::kPausing}) {
    Set(1, [&](RankStatus& is) { is.phase = phase; });
    std::atomic<bool> ended = false;
    std::thread later([&] {
      std::this_thread::sleep_for(milliseconds(80));
      ended = true;
      Set(1, [](RankStatus& is) { is.phase = Phase::kPaused; });
    });
    EXPECT_TRUE(Open().ok());
    EXPECT_TRUE(ended) << ToText(phase);
    later.join();
  }
  for (const Phase phase : {Phase::kRunning, Phase::kPaused, Phase::kResuming, Phase::kFailed}) {
    Set(1, [&](RankStatus& is) { is.phase = phase; });
    EXPECT_TRUE(Open().ok());
  }
}

TEST_F(PlayedRanks, a_job_whose_processes_have_ended_is_not_found) {
  Make(1);
  peers[0]->Stop();
  EXPECT_EQ(Open().status().code(), Code::kNotFound);
}

TEST_F(PlayedRanks, one_asks_at_a_time_and_others_may_look) {
  Make(2);
  {
    const auto first = Open();
    ASSERT_TRUE(first.ok()) << first.status().message();
    const auto second = Open();
    EXPECT_EQ(second.status().code(), Code::kRefused);
    EXPECT_TRUE(Has(second.status().message(), "rank 0: another request is under way, by pid " + std::to_string(::getpid())))
        << second.status().message();
    EXPECT_EQ(RanksAt(places, sockets()).size(), 2U);
  }
  EXPECT_TRUE(Open().ok());
}

// Whatever it had not read yet.
TEST_F(PlayedRanks, what_a_tool_sent_just_before_it_ended_counts) {
  Make(1);
  const ToolSockets tool(sockets());
  for (std::uint64_t request = 1; request <= 300; ++request) {
    {
      auto link = RankLink::Connect(tool, places[0]);
      ASSERT_TRUE(link.ok() && link->has_value()) << link.status().message();
      for (std::uint64_t target = 0; target < 5; ++target)
        (*link)->Give({.request = request, .ask = Ask::kPause, .stage = Stage::kNccl, .target = target});
      if (request % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(request));
      ASSERT_TRUE((*link)->has_room());
    }
    ASSERT_TRUE(test::Ranks::Becomes([&] { return OrderOf(0).request == request && OrderOf(0).target == 4; }))
        << OrderOf(0).request << " of " << request << ", message " << OrderOf(0).target;
  }
}

// Its process lives, and so it may have been told what this one asks about.
TEST_F(PlayedRanks, one_that_breaks_the_connection_off_is_not_taken_for_one_that_has_ended) {
  const auto folder = OpenSocketDirectory(sockets());
  ASSERT_TRUE(folder.ok());
  const SessionId session = test::NewSession();
  const auto listener = ListenAt(folder->get(), session);
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  std::thread rank([&] {
    pollfd polled{listener->get(), POLLIN, 0};
    ::poll(&polled, 1, 20'000);
    const UniqueFd tool(::accept(listener->get(), nullptr, nullptr));
    char byte = 0;
    for (int hello_and_question = 0; hello_and_question < 2; ++hello_and_question) ::recv(tool.get(), &byte, 1, 0);
  });
  const auto status = StatusOf(ToolSockets(sockets()), session);
  rank.join();
  EXPECT_EQ(status.status().code(), Code::kTimeout) << status.status().message();
}

TEST_F(PlayedRanks, an_order_that_a_rank_has_no_room_for_is_given_when_it_has) {
  Make(1);
  const ToolSockets tool(sockets());
  auto link = RankLink::Connect(tool, places[0]);
  ASSERT_TRUE(link.ok() && link->has_value()) << link.status().message();
  RankLink& rank = **link;
  std::uint64_t target = 0;
  ranks[0]->With([&](Played&) {  // which takes none meanwhile
    while (rank.has_room() && target < 100'000)
      rank.Give({.request = 1, .ask = Ask::kPause, .stage = Stage::kCome, .target = ++target});
  });
  EXPECT_FALSE(rank.has_room());
  Await({&rank, 1}, In(kLong), [&] { return rank.answered() || !rank->alive; });
  EXPECT_EQ(OrderOf(0).target, target);
}

TEST_F(PlayedRanks, a_freeze_is_noted_by_the_session_that_is_named) {
  Make(2);
  auto job = Open();
  ASSERT_TRUE(job.ok());
  const Frozen frozen{5, 9, 77, "a -> b"};
  alone.busy = 3;  // the session's own thread has the journal meanwhile
  ASSERT_TRUE(job->LeaveNote(places[1].session, frozen).ok());
  const std::lock_guard lock(alone.mutex);
  EXPECT_EQ(alone.witnessed, std::vector<EventBody>{frozen});
  EXPECT_EQ(job->LeaveNote(SessionId{3}, {}).code(), Code::kNotFound);
}

// ---- what is said --------------------------------------------------------------------------------------------------------

class WhatIsSaid : public PlayedRanks {
 protected:
  void SetUp() override { Make(1); }
  std::string Of(Phase phase) {
    Set(0, [&](RankStatus& is) { is.phase = phase; });
    return RanksAt(places, sockets()).at(0).Doing();
  }
};

TEST_F(WhatIsSaid, of_each_phase) {
  Set(0, [](RankStatus& is) { is.failure = {Code::kOutOfMemory, "no room"}; });
  EXPECT_EQ(Of(Phase::kRunning),
            "runs, and has not called amem.safepoint(): its program has to do so once a step, or pause by itself; "
            "it can be stopped between launches: --between-launches");
  Set(0, [](RankStatus& is) {
    is.steps = 1;
    is.last_step_ns = MonotonicNs() - 3'000'000'000;
  });
  EXPECT_TRUE(Has(Of(Phase::kRunning), "runs, and has made 1 safe point, the last one 3.")) << Of(Phase::kRunning);
  Set(0, [](RankStatus& is) { is.steps = 2; });
  const std::string failed = Of(Phase::kFailed);
  EXPECT_TRUE(Has(failed, "runs, and has made 2 safe points, the last one 3.")) << failed;
  EXPECT_TRUE(Has(failed, "s ago; its last pause failed: no room")) << failed;
  Set(0, [](RankStatus& is) {
    is.failure = {};
    is.at = 12;
    is.at_ns = MonotonicNs() + kLong.count();
  });
  EXPECT_EQ(Of(Phase::kHeld), "waits in safe point 12 until a step is agreed on");
  EXPECT_TRUE(Has(Of(Phase::kArrived), "waits in safe point 12 for the others, came 0."));
  EXPECT_EQ(Of(Phase::kPausing), "pauses");
  EXPECT_EQ(Of(Phase::kResuming), "resumes");
  EXPECT_EQ(Of(Phase::kPaused), "is paused, waits in safe point 12 for a resume");
  Set(0, [](RankStatus& is) {
    is.failure = {Code::kOutOfMemory, "no room"};
    is.at = 0;
  });
  EXPECT_EQ(Of(Phase::kPaused), "is paused, waits in its program's own resume for a resume; the last one failed: no room");
  Set(0, [](RankStatus& is) { is.own_pause = OwnPause::kPaused; });
  EXPECT_EQ(Of(Phase::kRunning), "is paused by its program");
}

TEST_F(WhatIsSaid, of_a_rank_is_what_it_tells) {
  Set(0, [](RankStatus& is) {
    is.steps = 8;
    is.held = 100;
    is.freed = 50;
    is.own_pause = OwnPause::kPaused;
  });
  const RankView look = RanksAt(places, sockets()).at(0);
  EXPECT_EQ(look.process.session, places[0].session);
  EXPECT_EQ(look.process.name, "rank 0");
  EXPECT_EQ(look.process.directory, places[0].directory);
  EXPECT_TRUE(look.alive && look.paused_by_program());
  EXPECT_EQ(look.process.pid, ::getpid());
  EXPECT_EQ(look.process.start_ticks, StartTicks(::getpid()));
  EXPECT_EQ(look.is.steps, 8U);
  EXPECT_EQ(look.is.held, 100U);
  EXPECT_EQ(look.is.freed, 50U);
  EXPECT_EQ(look.phase(), "running");
}

}  // namespace
}  // namespace amem::control
