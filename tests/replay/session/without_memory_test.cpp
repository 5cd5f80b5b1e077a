// A pause or resume for which there is no memory at one moment, at each moment in turn: the session then runs or is paused,
// nobody waits for it, and the next pauses and resumes work.
#include "tests/without_memory.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <set>

#include "journal/base/no_memory.h"
#include "replay/cycle/network.h"
#include "replay/driver/cuda/cuda_driver.h"
#include "tests/in_thread.h"
#include "tests/journal/temporary.h"
#include "tests/replay/session/session_process.h"
#include "tests/scenarios/start_session.h"

namespace amem {
namespace {

using test::k2M, test::kDevice, test::kMiB, test::Process, test::WithoutMemory;

// A card that is always quiet.
class Card final : public Network {
 public:
  std::vector<Kept> Drain(const std::vector<RegionId>&, Deadline) override { return shut = true, std::vector<Kept>(); }
  Status Deregister(RegionId region) override {
    registered.erase(region);
    return {};
  }
  Status Register(RegionId region) override {
    registered.insert(region);
    return {};
  }
  void Open() override { shut = false; }

  std::set<RegionId> registered;
  bool shut = false;
};

// The next call, on a thread of its own, returns.
bool LetsIn(CallGate& gate) {
  auto call =
      std::make_unique<std::future<bool>>(test::InThread([&gate] { return gate.Enter("cuMemcpy", nullptr).owns_lock(); }));
  if (call->wait_for(std::chrono::seconds(5)) == std::future_status::ready) return call->get();
  static_cast<void>(call.release());  // its end would wait for the thread
  return false;
}

// A session as a process has it, with files for its journal and sockets for its peers.
struct Rank {
  Rank(const std::filesystem::path& directory, const std::shared_ptr<SimulatorWorld>& world, std::uint64_t id) {
    SimulatorOptions simulated;
    simulated.in_memory = world;
    simulator = *Simulator::Open(simulated);
    test::RankProcessOptions options;
    options.directory = directory;
    options.lasting = true;
    options.journal.tail_bytes = 256 << 10;  // it is made many times
    options.session.slab_bytes = 2 * k2M;
    options.session.network = &card;
    session = *test::StartOn(*simulator, options, test::RankOf(static_cast<std::int32_t>(id) - 1, SessionId{id}));
  }
  ~Rank() { EXPECT_TRUE(session->Close("test").ok()); }

  AllocationId Create(Alone alone = Alone::kNo) const {
    Origin origin;
    origin.alone = alone;
    return *session->nccl().Create(k2M, Process::On(kDevice), 0, origin);
  }
  std::byte* Place(AllocationId id) const {
    const Address address = *session->nccl().Reserve(k2M, 0, {}, 0, {});
    EXPECT_TRUE(session->nccl().Map(address, k2M, 0, id, 0).ok());
    const AccessDescriptor access{{LocationType::kDevice, kDevice.value}, 3};
    EXPECT_TRUE(session->nccl().SetAccess(address, k2M, std::span(&access, 1)).ok());
    return reinterpret_cast<std::byte*>(address.value);
  }
  void Register(const std::byte* memory) {
    const RegionId region{card.registered.size() + 1};
    card.registered.insert(region);
    EXPECT_TRUE(session->records().NoteRegistration({.address = Address{reinterpret_cast<std::uint64_t>(memory)},
                                                     .bytes = k2M,
                                                     .how = "ibv_reg_mr",
                                                     .region = region,
                                                     .card = "card"}));
  }
  Card card;
  std::unique_ptr<Simulator> simulator;
  std::unique_ptr<Session> session;
};

class WithoutMemoryTest : public ::testing::Test {
 protected:
  // `call` is made again and again, with ever more memory before there is none, until it has all that it asks for. `mend` after
  // each: it fails the test if that has left anything behind.
  template <class Call, class Mend>
  void Each(const Call& call, const Mend& mend, std::uint64_t least = 20,
            std::initializer_list<std::uint64_t> in_a_row = {1, 3}) {
    for (const std::uint64_t most : in_a_row) {
      std::uint64_t spared = 0;
      for (bool refused = true; refused; ++spared) {
        Status status;
        {
          const WithoutMemory none(spared, most);
          status = OrNoMemory(call);
          refused = WithoutMemory::HasRefused();
        }
        SCOPED_TRACE(fmt::format("after {} allocations {} fail: {}", spared, most, status.message()));
        mend(status);
        if (HasFatalFailure()) return;
        ASSERT_LT(spared, 10'000U);
      }
      EXPECT_GT(spared, least) << "nothing was refused";
    }
  }

  test::TemporaryDirectory directory_;
  std::shared_ptr<SimulatorWorld> world_ = *SimulatorWorld::InMemory(1, 64 * kMiB);
};

class OfOneSession : public WithoutMemoryTest {
 protected:
  OfOneSession() {
    rank_.Register(buffer_);
    std::memset(buffer_, 0x42, k2M);
    std::memset(in_slab_, 0x17, k2M);
  }
  // Everything is as it was before, and works.
  void Check(const Status& status, Lifecycle asked) {
    Session& session = *rank_.session;
    const Lifecycle now = session.Progress().lifecycle;
    ASSERT_EQ(session.CopyState().broken, "");
    if (status.ok()) {
      ASSERT_EQ(now, asked);
    }
    ASSERT_TRUE(LetsIn(rank_.session->calls().GateOf({})));
    ASSERT_EQ(session.paused(), now != Lifecycle::kRunning);
    if (now == Lifecycle::kRunning) {
      ASSERT_FALSE(rank_.card.shut);
    }
    if (asked == Lifecycle::kPaused) Resume();
    Pause();
    if (asked == Lifecycle::kPaused) Resume();
  }
  void Pause() {
    const Status paused = rank_.session->PauseOfIdleHosts();
    ASSERT_TRUE(paused.ok()) << paused.message();
    ASSERT_EQ(rank_.simulator->BytesInUse(kDevice), 0U);
    ASSERT_TRUE(rank_.card.registered.empty());
  }
  void Resume() {
    const Status resumed = rank_.session->ResumeInTime();
    ASSERT_TRUE(resumed.ok()) << resumed.message();
    ASSERT_FALSE(rank_.session->paused());
    ASSERT_FALSE(rank_.card.shut);
    ASSERT_EQ(rank_.card.registered.size(), 1U);
    ASSERT_EQ(buffer_[k2M - 1], std::byte{0x42});
    ASSERT_EQ(in_slab_[k2M - 1], std::byte{0x17});
    const AllocationId more = rank_.Create();
    ASSERT_TRUE(rank_.session->nccl().Release(more).ok());
  }

  Rank rank_{directory_.path(), world_, 1};
  std::byte* const buffer_ = rank_.Place(rank_.Create(Alone::kPreferred));
  std::byte* const in_slab_ = rank_.Place(rank_.Create());
};

TEST_F(OfOneSession, a_pause_leaves_it_running_or_paused) {
  Each([&] { return rank_.session->PauseOfIdleHosts(); }, [&](const Status& status) { Check(status, Lifecycle::kPaused); });
}

TEST_F(OfOneSession, a_resume_leaves_it_running_or_paused) {
  ASSERT_NO_FATAL_FAILURE(Pause());
  Each([&] { return rank_.session->ResumeInTime(); },
       [&](const Status& status) {
         ASSERT_EQ(rank_.session->CopyState().broken, "");
         ASSERT_TRUE(LetsIn(rank_.session->calls().GateOf({})));
         const Lifecycle now = rank_.session->Progress().lifecycle;
         ASSERT_EQ(status.ok(), now == Lifecycle::kRunning) << ToText(now);
         ASSERT_EQ(rank_.session->paused(), now != Lifecycle::kRunning);
         ASSERT_NO_FATAL_FAILURE(Resume());
         ASSERT_NO_FATAL_FAILURE(Pause());
       });
  ASSERT_NO_FATAL_FAILURE(Resume());
}

TEST_F(OfOneSession, a_tag_is_resident_or_paused_and_its_contents_come_back) {
  Pools& pools = rank_.session->pools();
  const PoolId tag = *pools.Open("weights", PoolPolicy::kPreserve);
  auto* const memory = reinterpret_cast<std::byte*>((*pools.Allocate(tag, k2M, kDevice)).value);
  std::memset(memory, 0x33, k2M);
  const auto run = [&](CycleKind kind) {
    const Status status =
        kind == CycleKind::kPause ? pools.Pause(tag, {.after = std::nullopt}) : pools.Resume(tag, {.patient = false});
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(pools.IsResident(tag), kind == CycleKind::kResume);
    ASSERT_TRUE(LetsIn(rank_.session->calls().GateOf(tag)));
    if (kind == CycleKind::kResume) {
      ASSERT_EQ(memory[k2M - 1], std::byte{0x33});
    }
  };
  for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
    Each(
        [&] {
          return kind == CycleKind::kPause ? pools.Pause(tag, {.after = std::nullopt}) : pools.Resume(tag, {.patient = false});
        },
        [&](const Status&) {
          ASSERT_EQ(rank_.session->CopyState().broken, "");
          ASSERT_TRUE(LetsIn(rank_.session->calls().GateOf(tag)));
          ASSERT_NO_FATAL_FAILURE(run(CycleKind::kResume));
          ASSERT_NO_FATAL_FAILURE(run(CycleKind::kPause));
          if (kind == CycleKind::kPause) {
            ASSERT_NO_FATAL_FAILURE(run(CycleKind::kResume));
          }
        });
    ASSERT_NO_FATAL_FAILURE(run(kind));
  }
  ASSERT_NO_FATAL_FAILURE(run(CycleKind::kResume));
}

class ItsJournal : public OfOneSession {
 protected:
  // After a pause, before which a journal that has broken begins anew.
  void CheckJournal() {
    ASSERT_NO_FATAL_FAILURE(Pause());
    ASSERT_NO_FATAL_FAILURE(Resume());
    auto reader = JournalReader::Open(rank_.session->records().JournalDirectory());
    ASSERT_TRUE(reader.ok()) << reader.status().message();
    const auto seen = (*reader)->StateAt(std::nullopt);
    ASSERT_TRUE(seen.ok()) << seen.status().message();
    ASSERT_EQ(*seen, rank_.session->CopyState());
  }
};

TEST_F(ItsJournal, has_every_event_or_begins_anew) {
  Each(
      [&] {
        rank_.session->records().Note(PassedThrough{"cuMemPoolCreate", "it is not followed", 0});
        return Status{};
      },
      [&](const Status&) { CheckJournal(); }, 1);
}

TEST_F(ItsJournal, that_was_removed_begins_anew) {
  Each(
      [&] {
        {
          const test::WithMemory some;
          std::filesystem::remove_all(rank_.session->records().JournalDirectory());
        }
        return rank_.session->PauseOfIdleHosts();
      },
      [&](const Status&) {
        if (rank_.session->paused()) {
          ASSERT_NO_FATAL_FAILURE(Resume());
        }
        CheckJournal();
      },
      20, {2});
}

// The stand-in for the driver has no memory for its own things then, either, which the real one does not say by an exception.
TEST_F(WithoutMemoryTest, a_first_copy_on_a_device_leaves_later_ones_as_they_are) {
  constexpr DeviceOrdinal kGpu{0};
  setenv("AMEM_SIM_DEVICES", "1", 1);
  setenv("AMEM_SIM_CAPACITY_MIB", "64", 1);
  void* const library = dlopen(AMEM_STAND_IN_CUDA, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  std::unique_ptr<CudaDriver> driver;
  Address at;
  std::unique_ptr<PinnedBuffer> pinned;
  const auto begin_anew = [&] {  // one on which nothing was ever copied
    pinned.reset();
    driver = *CudaDriver::Load([&](const char* name) { return dlsym(library, name); });
    const auto handle = *driver->Create(k2M, Process::On(kGpu), 0);
    at = *driver->Reserve(k2M, 0, {}, 0);
    ASSERT_TRUE(driver->Map(at, k2M, 0, handle, 0).ok());
    const AccessDescriptor access{{LocationType::kDevice, kGpu.value}, 3};
    ASSERT_TRUE(driver->SetAccess(at, k2M, std::span(&access, 1)).ok());
    ASSERT_TRUE(driver->Release(handle).ok());
    pinned = *driver->AllocatePinned(k2M);
  };
  const auto gather = [&] {
    const Extent extent{at, k2M, pinned->data()};
    return driver->Gather(kGpu, std::span(&extent, 1));
  };
  const auto finish = [&] { return driver->FinishCopies(kGpu, In(std::chrono::seconds(10))); };
  begin_anew();
  Each(
      gather,
      [&](const Status&) {
        const Status finished = finish(), again = gather(), both = finish();
        ASSERT_TRUE(finished.ok() && again.ok() && both.ok()) << finished.message() << again.message() << both.message();
        ASSERT_TRUE(driver->Unmap(at, k2M).ok());
        ASSERT_TRUE(driver->FreeRange(at, k2M).ok());
        begin_anew();
      },
      5);
}

TEST(CallGateTest, that_could_not_be_closed_lets_calls_in_also_without_memory_to_say_who_is_inside) {
  CallGate gate;
  auto call = gate.Enter("cuMemcpy", nullptr);
  test::InThread([&] {
    const WithoutMemory none;
    static_cast<void>(OrNoMemory([&] { return gate.Close(std::chrono::milliseconds(1)); }));
  }).get();
  call.unlock();
  EXPECT_TRUE(LetsIn(gate));
}

}  // namespace
}  // namespace amem
