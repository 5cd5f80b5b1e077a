// Multicast objects under a session: what a pause does with them in both settings of AMEM_NVLS and both layouts, and that no
// allocation lies where it could not be bound.
#include <gtest/gtest.h>

#include "tests/replay/driver/simulated.h"
#include "tests/replay/session/session_process.h"
#include "tests/scenarios/multicast_calls.h"

namespace amem {
namespace {

constexpr Bytes kPiece = Bytes{8} << 20;  // the granularity of multicast objects here, four times that of memory

struct MulticastSetting {
  Nvls nvls;
  Layout layout;
};

// One process with two devices of its own, which are the whole team.
class MulticastSession : public ::testing::TestWithParam<MulticastSetting> {
 protected:
  void SetUp() override {
    SimulatorOptions simulated;
    simulated.in_memory = *SimulatorWorld::InMemory(2, Bytes{1} << 30);
    simulated.multicast_granularity = kPiece;
    simulator = *Simulator::Open(simulated);
    SessionOptions options;
    options.nvls = GetParam().nvls;
    options.layout = GetParam().layout;
    options.slab_bytes = Bytes{64} << 20;
    SessionOpened who;
    who.session = SessionId{1};
    session = *Session::Start(options, *simulator, who, nullptr, [&](const PeerIdentity& self, PeerDelegate& delegate) {
      return Result<std::unique_ptr<Peers>>(network.Join(self, delegate));
    });
    calls.emplace(*session, *simulator);
    object = *calls->Create(2 * kPiece, 2);
    for (const int device : {0, 1}) ASSERT_TRUE(calls->AddDevice(object, DeviceOrdinal{device}).ok());
  }
  void TearDown() override {
    const State state = session->CopyState();
    EXPECT_TRUE(state.broken.empty()) << state.broken;
    EXPECT_TRUE(CheckInvariants(state).ok()) << CheckInvariants(state).message();
  }
  [[nodiscard]] AllocationId Create(Bytes bytes, bool for_application = false) const {
    return *session->nccl().Create(bytes, test::Process::On(DeviceOrdinal{0}), 0, {}, for_application);
  }
  [[nodiscard]] Address Place(AllocationId id, Bytes bytes) const {
    const Address address = *session->nccl().Reserve(bytes, id == object ? kPiece : 0, {}, 0, {});
    EXPECT_TRUE(session->nccl().Map(address, bytes, 0, id, 0).ok());
    const AccessDescriptor access{{LocationType::kDevice, 0}, 3};
    EXPECT_TRUE(session->nccl().SetAccess(address, bytes, std::span(&access, 1)).ok());
    return address;
  }
  [[nodiscard]] bool released() const { return GetParam().nvls == Nvls::kRelease; }
  [[nodiscard]] bool Resident(AllocationId id) const { return session->CopyState().allocations.at(id).resident; }

  LocalNetwork network;
  std::unique_ptr<Simulator> simulator;
  std::unique_ptr<Session> session;
  std::optional<test::MulticastCalls> calls;
  AllocationId object;
};

TEST_P(MulticastSession, whatever_nccl_created_before_memory_lies_where_it_can_be_bound) {
  for (const Bytes before : {Bytes{2} << 20, Bytes{6} << 20, Bytes{10} << 20}) {
    static_cast<void>(Place(Create(before), before));
    const AllocationId memory = Create(kPiece);
    const Address at = Place(memory, kPiece);
    const Status bound = calls->Bind(object, 0, memory, 0, kPiece);
    ASSERT_TRUE(bound.ok()) << bound.message();
    ASSERT_TRUE(calls->Unbind(object, DeviceOrdinal{0}, 0, kPiece).ok());
    if (GetParam().layout == Layout::kSlab) {
      const Status by_address = calls->BindAddress(object, 0, at, kPiece);
      ASSERT_TRUE(by_address.ok()) << by_address.message();
      ASSERT_TRUE(calls->Unbind(object, DeviceOrdinal{0}, 0, kPiece).ok());
    }
  }
}

TEST_P(MulticastSession, a_pause_keeps_or_releases_the_object_and_what_is_bound_and_the_same_is_bound_afterwards) {
  const AllocationId memory = Create(kPiece);
  const Address at = Place(memory, kPiece);
  *reinterpret_cast<int*>(at.value) = 17;  // NOLINT(performance-no-int-to-ptr)
  ASSERT_TRUE(calls->Bind(object, kPiece, memory, 0, kPiece).ok());
  const Address mapped = Place(object, 2 * kPiece);
  const auto reached = Reach(*simulator, mapped + kPiece);
  ASSERT_EQ(reached.size(), 1U);
  for (int cycle = 0; cycle < 2; ++cycle) {
    ASSERT_TRUE(session->Pause().ok());
    EXPECT_EQ(Resident(object), !released());
    EXPECT_EQ(simulator->BytesInUse(DeviceOrdinal{0}) == 0, released());
    ASSERT_TRUE(session->Resume().ok());
    EXPECT_EQ(*reinterpret_cast<int*>(at.value), 17);  // NOLINT(performance-no-int-to-ptr)
    const auto again = Reach(*simulator, mapped + kPiece);
    ASSERT_EQ(again.size(), 1U);
    EXPECT_EQ(again[0].memory, *MemoryAt(*simulator, at));
    EXPECT_EQ(again[0].offset, reached[0].offset);
  }
}

TEST_P(MulticastSession, memory_that_was_bound_before_it_had_an_address_does_not_move_afterwards) {
  const AllocationId memory = Create(kPiece);
  ASSERT_TRUE(calls->Bind(object, 0, memory, 0, kPiece).ok());
  EXPECT_FALSE(session->CopyState().allocations.at(memory).placed()) << "it has a handle of its own";
  const Address mapped = Place(object, 2 * kPiece);
  const Address at = Place(memory, kPiece);
  EXPECT_EQ(Reach(*simulator, mapped).at(0).memory, *MemoryAt(*simulator, at));
}

TEST_P(MulticastSession, the_programs_memory_stays_and_is_bound_again_to_the_new_object) {
  const AllocationId user = Create(kPiece, true);
  const Address at = Place(user, kPiece);
  ASSERT_TRUE(calls->Bind(object, 0, user, 0, kPiece).ok());
  const Address mapped = Place(object, 2 * kPiece);
  ASSERT_TRUE(session->Pause().ok());
  EXPECT_TRUE(Resident(user));
  EXPECT_EQ(Resident(object), !released());
  ASSERT_TRUE(session->Resume().ok());
  EXPECT_EQ(Reach(*simulator, mapped).at(0).memory, *MemoryAt(*simulator, at));
}

TEST_P(MulticastSession, a_pause_that_could_not_unbind_foreign_memory_is_refused_and_says_what_to_do) {
  const DriverHandle foreign = *simulator->Create(kPiece, test::Process::On(DeviceOrdinal{1}), 0);
  const Address at = *simulator->Reserve(kPiece, kPiece, {}, 0);
  ASSERT_TRUE(simulator->Map(at, kPiece, 0, foreign, 0).ok());
  ASSERT_TRUE(calls->BindAddress(object, 0, at, kPiece).ok());
  const Status paused = session->Pause();
  EXPECT_EQ(paused.ok(), !released()) << paused.message();
  if (!released()) return;
  EXPECT_NE(paused.message().find("set AMEM_NVLS=keep"), std::string::npos) << paused.message();
}

INSTANTIATE_TEST_SUITE_P(Settings, MulticastSession,
                         ::testing::Values(MulticastSetting{Nvls::kKeep, Layout::kDirect},
                                           MulticastSetting{Nvls::kKeep, Layout::kSlab},
                                           MulticastSetting{Nvls::kRelease, Layout::kDirect},
                                           MulticastSetting{Nvls::kRelease, Layout::kSlab}),
                         [](const auto& setting) {
                           return std::string(setting.param.nvls == Nvls::kKeep ? "keep" : "release") +
                                  (setting.param.layout == Layout::kSlab ? "_slab" : "_direct");
                         });

TEST(MulticastSessions, what_stands_in_for_an_object_is_mapped_by_whoever_imports_it_after_that) {
  const auto world = *SimulatorWorld::InMemory(2, Bytes{1} << 30);
  LocalNetwork network;
  SessionOptions options;
  options.nvls = Nvls::kRelease;
  const test::Process a(1, world, network, options), b(2, world, network, options), c(3, world, network, options);
  test::MulticastCalls of_a(*a.session, *a.simulator), of_b(*b.session, *b.simulator);
  constexpr Bytes kObject = 96 * test::kMiB;  // three times a piece of 32 MiB
  const AllocationId object = *of_a.Create(kObject, 2);
  const auto token = a.session->sharing().Export(object);
  ASSERT_TRUE(of_a.AddDevice(object, DeviceOrdinal{0}).ok());
  ASSERT_TRUE(of_b.AddDevice(*b.session->sharing().Import(token->get(), {}), DeviceOrdinal{1}).ok());
  std::thread other([&] { EXPECT_TRUE(b.session->Pause().ok()); });
  EXPECT_TRUE(a.session->Pause().ok());
  other.join();
  network.Kill(SessionId{2});
  ASSERT_TRUE(a.session->Resume().ok());
  std::byte* const at_a = a.Place(object, kObject);
  std::byte* const at_c = c.Place(*c.session->sharing().Import(token->get(), {}), kObject);
  at_a[0] = std::byte{7};
  EXPECT_EQ(at_c[kObject - 32 * test::kMiB], std::byte{7});
}

}  // namespace
}  // namespace amem
