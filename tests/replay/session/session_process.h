// A session on a simulator of its own, with a journal that a test can read; several share a world and a network.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "replay/driver/simulator/simulator.h"
#include "replay/session/session.h"
#include "tests/stand_ins/peers/local_peers.h"

namespace amem::test {

inline constexpr Bytes kMiB = Bytes{1} << 20;
inline constexpr Bytes k2M = 2 * kMiB;
inline constexpr DeviceOrdinal kDevice{0};

class FakeJournal final : public JournalWriter {
 public:
  Status Append(const Event& event) override {
    if (fail_after-- == 0)
      return failure = {fails_with, "append to journal: no space left on device; free some and restart the job"};
    if (!failure.ok()) return failure;
    events.push_back(event);
    return {};
  }
  Status Flush() override { return {}; }
  bool SnapshotDue() const override { return snapshot_due; }
  Status Snapshot(const State& state) override {
    last_snapshot = state;
    return {};
  }
  Status Renew(const State& state) override {
    ++renewals_tried;
    if (renew_after-- != 0) return failure;
    snapshot = state;
    events.clear();
    return failure = {};
  }
  Status Close() override { return {}; }
  std::filesystem::path Directory() const override { return "fake"; }

  std::vector<Event> events;
  std::int64_t fail_after = -1;
  std::int64_t renew_after = -1;  // so many attempts fail before one succeeds; -1: all fail
  std::size_t renewals_tried = 0;
  Code fails_with = Code::kIo;
  Status failure;
  bool snapshot_due = false;
  State snapshot, last_snapshot;  // which the events begin with; which was made last
};

struct Process {
  Process(std::uint64_t id, const std::shared_ptr<SimulatorWorld>& world, LocalNetwork& network, const SessionOptions& options,
          std::shared_ptr<SimulatedHost> host = nullptr) {
    SimulatorOptions simulated;
    simulated.host = std::move(host);
    simulated.in_memory = world;
    simulator = *Simulator::Open(simulated);
    SessionOpened who;
    who.session = SessionId{id};
    who.host = "localhost";
    who.rank = static_cast<std::int32_t>(id) - 1;
    auto writer = std::make_unique<FakeJournal>();
    journal = writer.get();
    session =
        *Session::Start(options, *simulator, who, std::move(writer), [&](const PeerIdentity& self, PeerDelegate& delegate) {
          return Result<std::unique_ptr<Peers>>(network.Join(self, delegate));
        });
  }

  static AllocationProperties On(DeviceOrdinal device) {
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, device.value};
    return properties;
  }
  AllocationId Create(Bytes bytes = k2M, bool for_application = false) const {
    return *session->nccl().Create(bytes, On(kDevice), 0, {}, for_application);
  }
  // As NCCL does after a create or import: reserve, map, let the device in.
  std::byte* Place(AllocationId id, Bytes bytes = k2M) const {
    const Address address = *session->nccl().Reserve(bytes, 0, {}, 0, {});
    EXPECT_TRUE(session->nccl().Map(address, bytes, 0, id, 0).ok());
    const AccessDescriptor access{{LocationType::kDevice, kDevice.value}, 3};
    EXPECT_TRUE(session->nccl().SetAccess(address, bytes, std::span(&access, 1)).ok());
    return reinterpret_cast<std::byte*>(address.value);
  }
  template <class Kind>
  std::size_t Count() const {
    std::size_t n = 0;
    for (const Event& e : journal->events) n += std::holds_alternative<Kind>(e.body) ? 1 : 0;
    return n;
  }
  // The journal alone leads to the state that the session has.
  void JournalFolds() const {
    State state = journal->snapshot;
    for (const Event& e : journal->events) {
      const Status status = Apply(state, e);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    EXPECT_EQ(state, session->CopyState());
  }
  // As NCCL does to free.
  void Free(std::byte* memory, AllocationId id, Bytes bytes = k2M) const {
    const Address address{reinterpret_cast<std::uint64_t>(memory)};
    EXPECT_TRUE(session->nccl().Unmap(address, bytes).ok());
    EXPECT_TRUE(session->nccl().Release(id).ok());
    EXPECT_TRUE(session->nccl().FreeRange(address, bytes).ok());
  }
  Bytes InUse() const { return simulator->BytesInUse(kDevice); }
  // Figure({"tags", "user", "bytes"}): a number of the statistics. By hand, because a library for JSON is slow to compile.
  std::uint64_t Figure(std::initializer_list<std::string_view> path) const {
    const std::string json = session->statistics().Json();
    std::size_t at = 0;
    for (const std::string_view name : path) {
      const std::string member = "\"" + std::string(name) + "\":";
      at = json.find(member, at);
      if (at == json.npos) throw std::out_of_range(member + " is not in " + json);
      at += member.size();
    }
    return std::stoull(json.substr(at));
  }
  Bytes Pinned() const { return Figure({"contents", "pinned_bytes"}); }

  std::unique_ptr<Simulator> simulator;
  std::unique_ptr<Session> session;
  FakeJournal* journal = nullptr;
};

// Two of them, each with a device.
class TwoProcesses : public ::testing::Test {
 protected:
  TwoProcesses(const SessionOptions& options, Bytes of_each_device)
      : world(*SimulatorWorld::InMemory(2, of_each_device)), a(1, world, network, options), b(2, world, network, options) {}
  void TearDown() override {
    for (Process* p : {&a, &b}) {
      p->JournalFolds();
      EXPECT_TRUE(p->session->Close("test").ok());
    }
  }

  // b gets a's allocation the way NCCL passes it on.
  AllocationId Pass(AllocationId id) const {
    auto token = a.session->sharing().Export(id);
    EXPECT_TRUE(token.ok()) << token.status().message();
    auto imported = b.session->sharing().Import(token->get(), {});
    EXPECT_TRUE(imported.ok()) << imported.status().message();
    return *imported;
  }
  void Both(Status (Session::*cycle)()) const {
    Status first, second;
    std::thread other([&] { second = (b.session.get()->*cycle)(); });
    first = (a.session.get()->*cycle)();
    other.join();
    EXPECT_TRUE(first.ok()) << first.message();
    EXPECT_TRUE(second.ok()) << second.message();
  }
  // Three pauses and resumes of private and of shared memory, of which `held` bytes are in use while running.
  void CyclesBringTheSameBytesToTheSameAddresses(Bytes held) {
    const AllocationId shared = a.Create(5 * k2M);
    std::byte* mine = a.Place(shared, 5 * k2M);
    std::byte* theirs = b.Place(Pass(shared), 5 * k2M);
    std::byte* private_to_b = b.Place(b.Create());
    for (Bytes i = 0; i < 5 * k2M; ++i) mine[i] = static_cast<std::byte>(i * 31 >> 3);
    std::memset(private_to_b, 0x5a, k2M);
    const std::vector<std::byte> before(mine, mine + 5 * k2M);
    for (int cycle = 0; cycle < 3; ++cycle) {
      EXPECT_EQ(a.InUse(), held);
      Both(&Session::Pause);
      EXPECT_EQ(a.InUse(), 0U);
      EXPECT_TRUE(a.session->paused());
      Both(&Session::Resume);
      EXPECT_EQ(std::memcmp(mine, before.data(), before.size()), 0);
      EXPECT_EQ(private_to_b[k2M - 1], std::byte{0x5a});
      theirs[7] = std::byte{42};  // peers see each other's writes again
      EXPECT_EQ(mine[7], std::byte{42});
      mine[7] = before[7];
    }
  }

  std::shared_ptr<SimulatorWorld> world;
  LocalNetwork network;
  Process a, b;
};

}  // namespace amem::test
