// Random but legal call sequences through several sessions that share memory: after each the state machine and the simulator
// must agree on every handle, range and mapping, and a wrong order must be refused by name and change nothing.
//
// One seed makes one run; a failure prints seed and sequence, and AMEM_RANDOM_SEED / AMEM_RANDOM_SEQUENCES repeat it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "statemachine/account.h"
#include "tests/scenarios/start_session.h"

namespace amem {
namespace {

constexpr Bytes k2M = Bytes{2} << 20;
constexpr int kSessions = 3;

std::uint64_t FromEnvironment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// What NCCL itself would remember, kept apart from AMem's state.
struct Held {
  AllocationId allocation;
  Bytes bytes = 0;
  int references = 1;
  bool own = true;
  bool released = false;
};
struct Place {
  Bytes bytes = 0;
  AllocationId mapped;  // 0: only reserved
};

class Rank {
 public:
  Rank(int index, std::shared_ptr<SimulatorWorld> world, LocalNetwork& network, const SessionOptions& options) {
    SimulatorOptions simulated;
    simulated.in_memory = std::move(world);
    simulated.physical = false;
    auto started = test::StartInMemory(simulated, test::RankOf(index, SessionId{static_cast<std::uint64_t>(index) + 1}),
                                       options, nullptr, network);
    simulator = std::move(started.simulator);
    session = std::move(started.session);
  }

  std::unique_ptr<Simulator> simulator;
  std::unique_ptr<Session> session;
  std::vector<Held> held;
  std::map<Address, Place> places;
};

class Job {
 public:
  Job(std::uint64_t seed, Layout layout) : random_(seed), slabs_(layout == Layout::kSlab) {
    SessionOptions options;
    options.layout = layout;
    options.slab_bytes = 16 * k2M;
    const auto world = *SimulatorWorld::InMemory(2, Bytes{1} << 40);
    for (int i = 0; i < kSessions; ++i) ranks_.push_back(std::make_unique<Rank>(i, world, network_, options));
  }
  ~Job() {
    for (auto& rank : ranks_) EXPECT_TRUE(rank->session->Close("test").ok());
  }

  void RunSequence() {
    const int length = 6 + Pick(14);
    for (int i = 0; i < length && !::testing::Test::HasFailure(); ++i)
      OneCall(*ranks_[static_cast<std::size_t>(Pick(kSessions))]);
    if (Pick(200) == 0) CycleAll();
    for (auto& rank : ranks_) Compare(*rank);
    for (auto& rank : ranks_) FreeAll(*rank);
    for (auto& rank : ranks_) {
      Compare(*rank);
      const State state = rank->session->CopyState();
      EXPECT_TRUE(state.allocations.empty() && state.ranges.empty() && state.mappings.empty());
    }
  }
  std::uint64_t calls = 0, refused = 0;

 private:
  int Pick(int below) { return static_cast<int>(random_() % static_cast<std::uint64_t>(below)); }

  void Ok(const Status& status, const char* what) {
    ++calls;
    EXPECT_TRUE(status.ok()) << what << ": " << status.message();
  }

  void OneCall(Rank& r) {
    switch (Pick(10)) {
      case 0:
      case 1:
        return Create(r);
      case 2:
        return Import(r, *ranks_[static_cast<std::size_t>(Pick(kSessions))]);
      case 3:
      case 4:
        return ReserveAndMaybeMap(r);
      case 5:
        return Map(r);
      case 6:
        return Retain(r);
      case 7:
        return Release(r);
      case 8:
        return UnmapOrFree(r);
      default:
        return WrongOrder(r);
    }
  }

  void Create(Rank& r) {
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, slabs_ ? 0 : Pick(2)};
    const Bytes bytes = k2M * static_cast<Bytes>(1 + Pick(5));
    auto id = r.session->nccl().Create(bytes, properties, 0, {});
    Ok(id.status(), "create");
    r.held.push_back({*id, bytes, 1, true, false});
  }
  void Import(Rank& r, Rank& owner) {
    Held* theirs = nullptr;
    for (Held& h : owner.held) {
      if (h.own && !h.released && Pick(2) == 0) theirs = &h;
    }
    if (theirs == nullptr || &r == &owner) return;
    if (slabs_) {  // importing twice has a test of its own: the model has one mapping an address
      const RemoteAllocation remote{owner.session->CopyState().session.session, theirs->allocation};
      const State state = r.session->CopyState();
      for (const auto& [id, a] : state.allocations) {
        if (a.remote == remote) return;
      }
    }
    auto token = owner.session->sharing().Export(theirs->allocation);
    Ok(token.status(), "export");
    auto id = r.session->sharing().Import(token->get(), {});
    Ok(id.status(), "import");
    if (id.ok()) r.held.push_back({*id, theirs->bytes, 1, false, false});
  }
  void ReserveAndMaybeMap(Rank& r) {
    Held* h = Any(r);
    const Bytes bytes = h != nullptr ? h->bytes : k2M;
    auto address = r.session->nccl().Reserve(bytes, 0, {}, 0, {});
    Ok(address.status(), "reserve");
    // The place of an allocation that is mapped there already: NCCL would use one address twice, this model does not.
    if (r.places.contains(*address)) return Ok(r.session->nccl().FreeRange(*address, bytes), "free range");
    r.places[*address] = {bytes, {}};
    if (h != nullptr) MapAt(r, *address, *h);
  }
  void Map(Rank& r) {
    for (auto& [address, place] : r.places) {
      if (place.mapped) continue;
      for (Held& h : r.held) {
        if (!h.released && h.bytes == place.bytes) return MapAt(r, address, h);
      }
    }
  }
  void MapAt(Rank& r, Address address, const Held& h) {
    const Status mapped = r.session->nccl().Map(address, h.bytes, 0, h.allocation, 0);
    if (slabs_ && mapped.driver_result() == cuda::kNotSupported) {  // the one thing that slabs cannot do, and say
      EXPECT_NE(mapped.message().find("AMEM_LAYOUT=direct"), std::string::npos) << mapped.message();
      ++refused;
      return;
    }
    Ok(mapped, "map");
    r.places[address].mapped = h.allocation;
    if (Pick(4) == 0) return;
    const AccessDescriptor access{{LocationType::kDevice, Pick(2)}, Pick(3) == 0 ? 1U : 3U};
    Ok(r.session->nccl().SetAccess(address, h.bytes, std::span(&access, 1)), "set access");
  }
  void Retain(Rank& r) {
    for (auto& [address, place] : r.places) {
      if (!place.mapped || Pick(2) == 0) continue;
      auto id = r.session->nccl().Retain(address + place.bytes / 2);
      Ok(id.status(), "retain");
      EXPECT_EQ(*id, place.mapped);
      for (Held& h : r.held) {
        if (h.allocation == *id) {
          ++h.references;
          h.released = false;
        }
      }
      return;
    }
  }
  void Release(Rank& r) {
    Held* h = Any(r);
    if (h == nullptr) return;
    Ok(r.session->nccl().Release(h->allocation), "release");
    if (--h->references == 0) h->released = true;
    Sweep(r);
  }
  void UnmapOrFree(Rank& r) {
    for (auto it = r.places.begin(); it != r.places.end(); ++it) {
      if (Pick(2) == 0) continue;
      if (it->second.mapped) {
        Ok(r.session->nccl().Unmap(it->first, it->second.bytes), "unmap");
        it->second.mapped = {};
        Sweep(r);
      } else {
        Ok(r.session->nccl().FreeRange(it->first, it->second.bytes), "free range");
        r.places.erase(it);
      }
      return;
    }
  }
  // Forgets allocations that are released and mapped nowhere, as NCCL can no longer name them.
  static void Sweep(Rank& r) {
    std::erase_if(r.held, [&](const Held& h) {
      return h.released &&
             std::none_of(r.places.begin(), r.places.end(), [&](const auto& p) { return p.second.mapped == h.allocation; });
    });
  }
  Held* Any(Rank& r) {
    std::vector<Held*> live;
    for (Held& h : r.held) {
      if (!h.released) live.push_back(&h);
    }
    return live.empty() ? nullptr : live[static_cast<std::size_t>(Pick(static_cast<int>(live.size())))];
  }

  void WrongOrder(Rank& r) {
    const State before = r.session->CopyState();
    Status status;
    switch (Pick(5)) {
      case 0:
        status = r.session->nccl().Release(AllocationId{1'000'000'000});
        break;
      case 1:
        status = r.session->nccl().Unmap(Address{k2M}, k2M);
        break;
      case 2:
        status = r.session->nccl().FreeRange(Address{k2M}, k2M);
        break;
      case 3:
        for (const auto& [address, place] : r.places) {
          if (place.mapped) status = r.session->nccl().FreeRange(address, place.bytes);
        }
        break;
      default:
        for (const auto& [address, place] : r.places) {
          if (place.mapped) status = r.session->nccl().Map(address, place.bytes, 0, place.mapped, 0);
        }
    }
    ++calls;
    if (status.ok()) return;  // there was no such mistake to make
    EXPECT_FALSE(status.message().empty());
    EXPECT_NE(status.driver_result(), 0) << status.message();
    EXPECT_EQ(before, r.session->CopyState()) << status.message();
  }

  void CycleAll() {
    for (const bool pause : {true, false}) {
      std::vector<std::thread> threads;
      std::vector<Status> results(kSessions);
      for (int i = 0; i < kSessions; ++i) {
        const auto at = static_cast<std::size_t>(i);
        threads.emplace_back([&, at] { results[at] = pause ? ranks_[at]->session->Pause() : ranks_[at]->session->Resume(); });
      }
      for (auto& thread : threads) thread.join();
      for (const Status& status : results) Ok(status, pause ? "pause" : "resume");
      for (auto& rank : ranks_) Compare(*rank);
      ExpectAccounts();
      if (pause) {
        EXPECT_EQ(ranks_[0]->simulator->BytesInUse(DeviceOrdinal{0}), 0U);
        EXPECT_EQ(ranks_[0]->simulator->BytesInUse(DeviceOrdinal{1}), 0U);
      }
    }
  }

  // What the accounts of all sessions have on a device is what the simulator has given out there, and what pauses have taken is
  // the rest of what is theirs.
  void ExpectAccounts() {
    for (const DeviceOrdinal device : {DeviceOrdinal{0}, DeviceOrdinal{1}}) {
      Bytes there = 0, away = 0, own = 0;
      for (auto& rank : ranks_) {
        const State state = rank->session->CopyState();
        Account::OfDevice account = MeasureAccount(state).devices[device];
        for (const auto& share : {account.running, account.kept})
          for (const auto& [whose, bytes] : share) there += bytes;
        for (const auto& [tag, bytes] : account.taken) away += bytes;
        for (const auto& [id, a] : state.allocations)
          if (a.own() && !a.placed() && a.properties.location.id == device.value) own += a.bytes;
      }
      EXPECT_EQ(there, ranks_[0]->simulator->BytesInUse(device));
      EXPECT_EQ(there + away, own);
    }
  }

  void FreeAll(Rank& r) {
    for (auto& [address, place] : r.places) {
      if (place.mapped) Ok(r.session->nccl().Unmap(address, place.bytes), "unmap");
      Ok(r.session->nccl().FreeRange(address, place.bytes), "free range");
    }
    r.places.clear();
    for (Held& h : r.held) {
      for (; h.references > 0; --h.references) Ok(r.session->nccl().Release(h.allocation), "release");
    }
    r.held.clear();
  }

  // The independent check compares the simulator's contents with the state.
  static void Compare(Rank& r) {
    const State state = r.session->CopyState();
    EXPECT_TRUE(state.broken.empty()) << state.broken;
    const Status invariants = CheckInvariants(state);
    EXPECT_TRUE(invariants.ok()) << invariants.message();
    const SimulatorSnapshot real = r.simulator->Snapshot();
    std::map<Address, Bytes> ranges;
    for (const auto& range : real.ranges) ranges[range.address] = range.bytes;
    ASSERT_EQ(ranges.size(), state.ranges.size());
    for (const auto& [address, range] : state.ranges) EXPECT_EQ(ranges[address], range.bytes);
    std::size_t present = 0;
    for (const auto& [address, m] : state.mappings) present += m.present ? 1 : 0;
    ASSERT_EQ(real.mappings.size(), present);
    for (const auto& m : real.mappings) {
      const auto it = state.mappings.find(m.address);
      ASSERT_NE(it, state.mappings.end());
      EXPECT_EQ(it->second.bytes, m.bytes);
      EXPECT_EQ(it->second.access, m.access);
      EXPECT_EQ(r.session->nccl().Backing(it->second.allocation).first, m.handle);
    }
    std::size_t resident = 0;
    for (const auto& [id, a] : state.allocations) resident += a.resident && !a.placed() ? 1 : 0;
    ASSERT_EQ(real.handles.size(), resident);
    for (const auto& h : real.handles) EXPECT_EQ(h.references, 1U);
  }

  std::mt19937_64 random_;
  const bool slabs_;
  LocalNetwork network_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

void RunSeed(std::uint64_t seed, Layout layout) {
  seed = FromEnvironment("AMEM_RANDOM_SEED", seed);
#if defined(AMEM_THREAD_SANITIZED)
  const std::uint64_t sequences = FromEnvironment("AMEM_RANDOM_SEQUENCES", 400);
#elif defined(AMEM_SANITIZED)
  const std::uint64_t sequences = FromEnvironment("AMEM_RANDOM_SEQUENCES", 1'000);
#elif defined(AMEM_BY_NIGHT)
  const std::uint64_t sequences = FromEnvironment("AMEM_RANDOM_SEQUENCES", 100'000);
#else
  const std::uint64_t sequences = FromEnvironment("AMEM_RANDOM_SEQUENCES", 15'000);
#endif
  Job job(seed, layout);
  for (std::uint64_t i = 0; i < sequences; ++i) {
    job.RunSequence();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed << ", sequence " << i;
  }
  std::printf("seed %lu: %lu sequences, %lu calls, %lu maps refused\n", seed, sequences, job.calls, job.refused);
}

// Together four hundred thousand sequences; four tests, so that they can run side by side.
TEST(RandomSequences, state_and_simulator_agree_seed_1) { RunSeed(1, Layout::kDirect); }
TEST(RandomSequences, state_and_simulator_agree_seed_2) { RunSeed(2, Layout::kDirect); }
TEST(RandomSequences, state_and_simulator_agree_with_slabs_seed_3) { RunSeed(3, Layout::kSlab); }
TEST(RandomSequences, state_and_simulator_agree_with_slabs_seed_4) { RunSeed(4, Layout::kSlab); }

}  // namespace
}  // namespace amem
