// A driver call of the program that hangs, with the ledger locked, while sessions wait for each other over sockets.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "replay/peers/unix/unix_peers.h"
#include "tests/in_thread.h"
#include "tests/replay/peers/peers_fixture.h"
#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using std::chrono::milliseconds;
using test::k2M, test::kDevice, test::kMiB;

class HangingDriverTest : public ::testing::Test {
 protected:
  struct Member {
    Member(HangingDriverTest& test, std::uint64_t id) {
      SimulatorOptions simulated;
      simulated.in_memory = test.world_;
      simulator = *Simulator::Open(simulated);
      SessionOpened who;
      who.session = SessionId{id};
      who.host = "localhost";
      who.pid = ::getpid();
      who.rank = static_cast<std::int32_t>(id) - 1;
      SessionOptions options;
      options.layout = Layout::kDirect;
      options.deadlines = kDeadlines;
      session = *Session::Start(options, *simulator, who, std::make_unique<test::FakeJournal>(),
                                [&](const PeerIdentity& self, PeerDelegate& delegate) -> Result<std::unique_ptr<Peers>> {
                                  auto peers = UnixPeers::Start(self, {test.directory_.sockets(), kDeadlines, {}}, delegate);
                                  if (!peers) return peers.status();
                                  return std::unique_ptr<Peers>(*std::move(peers));
                                });
    }
    AllocationId Make(Address& at) const {
      const AllocationId id = *session->nccl().Create(k2M, test::Process::On(kDevice), 0, {});
      at = Place(id);
      return id;
    }
    Address Place(AllocationId id) const {
      const Address address = *session->nccl().Reserve(k2M, 0, {}, 0, {});
      EXPECT_TRUE(session->nccl().Map(address, k2M, 0, id, 0).ok());
      return address;
    }
    std::unique_ptr<Simulator> simulator;
    std::unique_ptr<Session> session;
  };

  HangingDriverTest() {
    Address unused;
    auto token = a_.session->sharing().Export(a_.Make(unused));
    EXPECT_TRUE(token.ok());
    b_.Place(*b_.session->sharing().Import(token->get(), {}));
    a_.Make(victim_);
  }
  // An unmap of rank 0's hangs until GoOn.
  void Hang() {
    a_.simulator->SetHook([this](std::string_view call, std::uint64_t) {
      if (call != "Unmap") return 0;
      inside_.set_value();
      go_on_.get_future().wait();
      return 0;
    });
    unmap_ = std::thread([this] { EXPECT_TRUE(a_.session->nccl().Unmap(victim_, k2M).ok()); });
    inside_.get_future().wait();
  }
  void GoOnAndPauseWorks() {
    a_.simulator->SetHook({});
    go_on_.set_value();
    unmap_.join();
    for (const auto cycle : {&Session::Pause, &Session::Resume}) {
      auto other = test::InThread([&] { return (b_.session.get()->*cycle)(); });
      const Status here = (a_.session.get()->*cycle)(), there = other.get();
      EXPECT_TRUE(here.ok()) << here.message();
      EXPECT_TRUE(there.ok()) << there.message();
    }
  }
  static void ExpectEndsInTimeAndSays(std::future<Status>& call, std::initializer_list<const char*> texts) {
    ASSERT_EQ(call.wait_for(kDeadlines.call() * 4), std::future_status::ready);
    const Status status = call.get();
    for (const char* const text : texts)
      EXPECT_NE(status.message().find(text), std::string::npos) << text << " in: " << status.message();
  }

  static constexpr Deadlines kDeadlines{milliseconds(1000)};
  static constexpr auto kHangs = "a driver call of another thread has not returned";
  test::TemporaryDirectory directory_;
  std::shared_ptr<SimulatorWorld> world_ = *SimulatorWorld::InMemory(2, 64 * kMiB);
  Member a_{*this, 1}, b_{*this, 2};
  Address victim_;
  std::promise<void> inside_, go_on_;
  std::thread unmap_;
};

TEST_F(HangingDriverTest, a_pause_that_waits_for_a_peer_ends_although_an_unmap_hangs_meanwhile) {
  auto pause = test::InThread([this] { return a_.session->Pause(); });
  std::this_thread::sleep_for(milliseconds(200));
  Hang();
  ExpectEndsInTimeAndSays(pause, {"rank 1 (pid "});  // which does not come; what hangs here does not keep it
  GoOnAndPauseWorks();
}

TEST_F(HangingDriverTest, a_pause_of_the_peer_ends_and_names_the_rank_and_that_its_driver_hangs) {
  Hang();
  auto pause = test::InThread([this] { return b_.session->Pause(); });
  ExpectEndsInTimeAndSays(pause, {"rank 0 (pid ", kHangs, "thread "});
  GoOnAndPauseWorks();
}

TEST_F(HangingDriverTest, an_import_by_the_peer_waits_until_the_driver_is_back_and_succeeds) {
  Address unused;
  auto token = a_.session->sharing().Export(a_.Make(unused));
  ASSERT_TRUE(token.ok());
  Hang();
  auto import = test::InThread([&] { return b_.session->sharing().Import(token->get(), {}).status(); });
  EXPECT_EQ(import.wait_for(milliseconds(300)), std::future_status::timeout);
  GoOnAndPauseWorks();
  const Status imported = import.get();
  EXPECT_TRUE(imported.ok()) << imported.message();
}

}  // namespace
}  // namespace amem
