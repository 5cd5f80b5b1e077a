// The seeded world: random jobs. Communicators come and go, some with a multicast object, ranks write through each other's
// memory, and have tensors under tags; they pause, resume, fail and die; every wait, time-out and order of messages follows
// from the seed, and nothing waits in real time. After each cycle memory and contents must be what a model says that knows
// nothing of AMem; at the end all memory is free and all journals verify.
//
// A failure prints its seed; AMEM_WORLD_SEED=seed runs that job alone, AMEM_WORLD_JOBS=count runs longer (a night: 10000000).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "journal/journal.h"
#include "replay/job/postmortem.h"
#include "replay/peers/token.h"
#include "tests/journal/memory_journal.h"
#include "tests/replay/driver/simulated.h"
#include "tests/replay/job/memory_reader.h"
#include "tests/scenarios/baton.h"
#include "tests/scenarios/death.h"
#include "tests/scenarios/multicast_calls.h"
#include "tests/scenarios/start_session.h"

#ifdef AMEM_THREAD_SANITIZED
// A rank that dies in the middle of a call still holds the locks of that call. A real process would take them with it.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();
const char* __tsan_default_suppressions() { return "deadlock:amem::LocalNetwork::Kill\n"; }
#endif

namespace amem::test {
namespace {

constexpr Bytes kPage = 4096;
constexpr int kMostRanks = 4;
constexpr std::uint32_t kTimeout = 200;

struct Buffer {  // a place in one rank's address space
  AllocationId allocation;
  std::byte* data = nullptr;
  Bytes bytes = 0;
  [[nodiscard]] Address address() const { return Address{reinterpret_cast<std::uint64_t>(data)}; }
};

struct Rank {
  std::unique_ptr<Simulator> simulator;
  std::unique_ptr<Session> session;
  std::vector<Event> events;
  bool alive = true;  // once false, `silent` is true: the journal takes nothing more from a dead process
  bool silent = false;
  std::uint64_t calls_left = 0;  // until it is killed in a driver call; 0: it is not
  std::uint64_t steps_left = 0;  // until it is killed where it talks to peers
};

struct Shared {  // one rank's buffer in a communicator, mapped by the next rank
  int owner = 0, importer = 0;
  Buffer own, import;
  bool freed_by_owner = false;
  std::uint64_t version = 0;
  bool replaced = false;  // the owner is dead, and the importer has paused since: all zero
};

// A multicast object over some ranks, the first of whom made it, and memory of each that is bound to it in one or two pieces.
struct Team {
  struct Member {
    int rank = 0;
    Buffer memory, object;
    Bytes first = 0;  // of the memory, bound by its handle; the rest by address
    std::uint64_t version = 0;
  };
  std::vector<Member> members;
  bool whole = true;  // no member has died or left
};

// A pool of one rank, with its parts.
struct Tag {
  int rank = 0;
  PoolId pool;
  bool preserves = true, paused = false;
  Bytes held = 0;  // that the device had less when its parts were made: a pause gives back so much
  struct Part {
    Buffer memory;
    std::uint64_t version = 0;  // 0: contents were discarded
  };
  std::vector<Part> parts;
};

class World {
 public:
  World(std::uint64_t seed, Baton& baton) : random_(seed), baton_(baton), network_(&baton) {
    ranks_.resize(static_cast<std::size_t>(1 + Pick(kMostRanks)));
    slab_ = Pick(2) == 0;
    // Room for two chunks of pools, which take 32 MiB at once, and for all else.
    memory_ = *SimulatorWorld::InMemory(kMostRanks, Bytes{80} << 20);
    for (std::size_t i = 0; i < ranks_.size(); ++i) Start(i);
  }

  void Run() {
    Join();
    const int length = 3 + Pick(8);
    for (int i = 0; i < length && !::testing::Test::HasFailure(); ++i) {
      switch (Pick(10)) {
        case 8:
        case 9:
          for (int times = 1 + Pick(6); times > 0 && !::testing::Test::HasFailure(); --times) UseTag();
          break;
        case 0:
        case 1:
          Join();
          break;
        case 2:
          Leave();
          break;
        case 3:
        case 4:
          Collective();
          break;
        case 5:
          if (Pick(8) == 0) Kill(static_cast<std::size_t>(Pick(static_cast<int>(ranks_.size()))));
          break;
        default:
          Cycle();
      }
    }
    if (!::testing::Test::HasFailure()) End();
  }
  std::uint64_t cycles = 0, failed = 0, deaths = 0, timeouts = 0, tag_cycles = 0, tag_failures = 0;
  bool had_multicast = false;

 private:
  int Pick(int below) { return static_cast<int>(random_() % static_cast<std::uint64_t>(below)); }
  Rank& At(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  void Start(std::size_t i) {
    Rank& r = ranks_[i];
    SimulatorOptions simulated;
    simulated.in_memory = memory_;
    simulated.granularity = kPage;
    SessionOpened who = test::RankOf(static_cast<int>(i), SessionId{i + 1});
    who.pid = static_cast<std::int32_t>(i) + 100;
    SessionOptions options;
    options.layout = slab_ ? Layout::kSlab : Layout::kDirect;
    options.slab_bytes = 32 * kPage;
    options.nvls = Nvls::kRelease;
    auto started =
        test::StartInMemory(simulated, who, options, std::make_unique<test::MemoryJournal>(r.events, r.silent), network_);
    r.simulator = std::move(started.simulator);
    r.session = std::move(started.session);
    r.simulator->SetHook([this, i](std::string_view, std::uint64_t) { return Driver(i); });
  }
  int Driver(std::size_t i) {
    Rank& r = ranks_[i];
    if (r.calls_left > 0 && --r.calls_left == 0) Die(i);
    return r.alive ? 0 : test::DeadEnd();
  }
  void Step(int i) {
    Rank& r = At(i);
    if (r.steps_left > 0 && --r.steps_left == 0) Die(static_cast<std::size_t>(i));
    if (!r.alive) test::DeadEnd();
  }
  void Die(std::size_t i) {
    Rank& r = ranks_[i];
    if (!r.alive) return;
    r.alive = false;
    r.silent = true;
    ++deaths;
    network_.Kill(SessionId{i + 1});
  }
  void RemoveDead(std::size_t i) {  // the process is gone, with all it held
    Rank& r = ranks_[i];
    r.session.reset();
    r.simulator.reset();
  }
  void Kill(std::size_t i) {
    if (!ranks_[i].alive || Living().size() < 2) return;
    Die(i);
    RemoveDead(i);
  }
  std::vector<int> Living() {
    std::vector<int> living;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (ranks_[i].alive) living.push_back(static_cast<int>(i));
    }
    return living;
  }

  // ---- what NCCL would do ----

  static void Ok(const Status& status, const char* what) { ASSERT_TRUE(status.ok()) << what << ": " << status.message(); }

  Buffer Place(Rank& r, int rank, AllocationId id, Bytes bytes) {
    auto address = r.session->nccl().Reserve(bytes, 0, {}, 0, {});
    Ok(address.status(), "reserve");
    Ok(r.session->nccl().Map(*address, bytes, 0, id, 0), "map");
    const AccessDescriptor access{{LocationType::kDevice, rank}, 3};
    Ok(r.session->nccl().SetAccess(*address, bytes, std::span(&access, 1)), "set access");
    return {id, reinterpret_cast<std::byte*>(address->value), bytes};
  }
  static void FreeBuffer(Rank& r, Buffer& buffer) {
    auto id = r.session->nccl().Retain(buffer.address());
    Ok(id.status(), "retain");
    Ok(r.session->nccl().Release(buffer.allocation), "release");
    Ok(r.session->nccl().Unmap(buffer.address(), buffer.bytes), "unmap");
    Ok(r.session->nccl().FreeRange(buffer.address(), buffer.bytes), "free range");
    Ok(r.session->nccl().Release(buffer.allocation), "release");
    buffer = {};
  }
  // A communicator of some ranks, in a ring.
  void Join() {
    std::vector<int> members;
    for (const int rank : Living()) {
      if (Pick(4) != 0) members.push_back(rank);
    }
    const std::size_t n = members.size();
    std::vector<Shared> communicator;
    for (std::size_t i = 0; i < n; ++i) {
      const int owner = members[i], importer = members[(i + 1) % n];
      AllocationProperties properties;
      properties.handle_types = 1;
      properties.location = {LocationType::kDevice, owner};
      const Bytes bytes = kPage * static_cast<Bytes>(1 + Pick(6));
      auto id = At(owner).session->nccl().Create(bytes, properties, 0, {});
      ASSERT_TRUE(id.ok()) << id.status().message();
      Shared shared{owner, importer, Place(At(owner), owner, *id, bytes), {}, false, 0, false};
      if (owner != importer) {
        auto token = At(owner).session->sharing().Export(*id);
        ASSERT_TRUE(token.ok()) << token.status().message();
        auto imported = At(importer).session->sharing().Import(token->get(), {});
        ASSERT_TRUE(imported.ok()) << imported.status().message();
        shared.import = Place(At(importer), importer, *imported, bytes);
      }
      Write(shared.own, shared.version = ++versions_);
      communicator.push_back(std::move(shared));
    }
    // Sometimes the owner frees its mapping at once, as NCCL does with a buffer that only the peer needs.
    if (n > 1 && Pick(4) == 0) {
      FreeBuffer(At(communicator[0].owner), communicator[0].own);
      communicator[0].freed_by_owner = true;
    }
    if (n > 0) communicators_.push_back(std::move(communicator));
    if (n > 0 && Pick(2) == 0) MakeTeam(members);
  }
  // NCCL's order: one rank makes the object, the others import it, all add their devices; then all bind, and map it.
  void MakeTeam(const std::vector<int>& members) {
    const auto count = static_cast<std::uint32_t>(members.size());
    const Bytes bytes = kPage * static_cast<Bytes>(1 + Pick(4));
    auto object = Calls(members[0]).Create(bytes, count);
    ASSERT_TRUE(object.ok()) << object.status().message();
    Team team;
    for (const int rank : members) {
      AllocationId id = *object;
      if (rank != members[0]) {
        auto token = At(members[0]).session->sharing().Export(*object);
        ASSERT_TRUE(token.ok()) << token.status().message();
        auto imported = At(rank).session->sharing().Import(token->get(), {});
        ASSERT_TRUE(imported.ok()) << imported.status().message();
        id = *imported;
      }
      Ok(Calls(rank).AddDevice(id, DeviceOrdinal{rank}), "add device");
      AllocationProperties properties;
      properties.handle_types = 1;
      properties.location = {LocationType::kDevice, rank};
      auto memory = At(rank).session->nccl().Create(bytes, properties, 0, {});
      ASSERT_TRUE(memory.ok()) << memory.status().message();
      Team::Member member{rank, Place(At(rank), rank, *memory, bytes), {}, kPage * static_cast<Bytes>(Pick(5)), ++versions_};
      member.first = std::min(member.first, bytes);
      member.object.allocation = id;
      Write(member.memory, member.version);
      team.members.push_back(member);
    }
    for (Team::Member& m : team.members) {
      const AllocationId id = m.object.allocation;
      if (m.first > 0) Ok(Calls(m.rank).Bind(id, 0, m.memory.allocation, 0, m.first), "bind");
      if (m.first < bytes)
        Ok(Calls(m.rank).BindAddress(id, m.first, m.memory.address() + m.first, bytes - m.first), "bind by address");
      m.object = Place(At(m.rank), m.rank, id, bytes);
    }
    teams_.push_back(std::move(team));
    had_multicast = true;
  }
  MulticastCalls Calls(int rank) { return {*At(rank).session, *At(rank).simulator}; }
  void LeaveTeam(Team& team, Team::Member& m) {
    team.whole = false;
    if (!At(m.rank).alive || !m.object.allocation) return;
    const Bytes bytes = m.memory.bytes;
    const AllocationId id = m.object.allocation;
    if (m.first > 0) Ok(Calls(m.rank).Unbind(id, DeviceOrdinal{m.rank}, 0, m.first), "unbind");
    if (m.first < bytes) Ok(Calls(m.rank).Unbind(id, DeviceOrdinal{m.rank}, m.first, bytes - m.first), "unbind the rest");
    FreeBuffer(At(m.rank), m.memory);
    FreeBuffer(At(m.rank), m.object);
  }
  // One member alone, or all of them.
  void LeaveATeam() {
    if (teams_.empty()) return;
    const auto which = teams_.begin() + Pick(static_cast<int>(teams_.size()));
    if (Pick(4) == 0)
      return LeaveTeam(*which, which->members[static_cast<std::size_t>(Pick(static_cast<int>(which->members.size())))]);
    for (Team::Member& m : which->members) LeaveTeam(*which, m);
    teams_.erase(which);
  }
  void CheckTeams(const std::string& when) {
    for (Team& team : teams_) {
      for (const Team::Member& m : team.members) team.whole = team.whole && At(m.rank).alive;
      for (const Team::Member& m : team.members) {
        if (!At(m.rank).alive || !m.memory.allocation) continue;
        EXPECT_TRUE(Holds(m.memory, m.version)) << when << ": bound memory of rank " << m.rank;
        if (!team.whole) continue;
        std::vector<Reached> expected;
        for (const Team::Member& other : team.members) {
          const auto mapping = At(other.rank).simulator->MappingAt(other.memory.address());
          ASSERT_TRUE(mapping.ok()) << when;
          expected.push_back({other.rank, *MemoryAt(*At(other.rank).simulator, other.memory.address()),
                              other.memory.address().value - mapping->address.value});
        }
        EXPECT_EQ(Reach(*At(m.rank).simulator, m.object.address()), expected) << when << ": the object of rank " << m.rank;
      }
    }
  }
  void Leave() {
    LeaveATeam();
    if (communicators_.empty()) return;
    const auto which = communicators_.begin() + Pick(static_cast<int>(communicators_.size()));
    for (Shared& s : *which) Free(s);
    communicators_.erase(which);
  }
  void Free(Shared& s) {
    if (At(s.importer).alive && s.import.allocation) FreeBuffer(At(s.importer), s.import);
    if (At(s.owner).alive && s.own.allocation) FreeBuffer(At(s.owner), s.own);
  }
  static void Write(const Buffer& buffer, std::uint64_t version) {
    for (Bytes at = 0; at < buffer.bytes; at += 64) buffer.data[at] = static_cast<std::byte>(version * 7 + at / 64 + 1);
  }
  static bool Holds(const Buffer& buffer, std::uint64_t version) {
    for (Bytes at = 0; at < buffer.bytes; at += 64) {
      if (buffer.data[at] != (version == 0 ? std::byte{0} : static_cast<std::byte>(version * 7 + at / 64 + 1))) return false;
    }
    return true;
  }
  // Each rank writes through its own or its imported mapping, and both ranks of the pair see it.
  void Collective() {
    CheckContents("before a collective");
    for (auto& communicator : communicators_) {
      for (Shared& s : communicator) {
        if (!At(s.owner).alive) continue;  // one piece of memory may stand in for all that it had
        const bool by_importer = At(s.importer).alive && s.import.allocation && (s.freed_by_owner || Pick(2) == 0);
        if (!by_importer && s.freed_by_owner) continue;
        s.version = ++versions_;
        Write(by_importer ? s.import : s.own, s.version);
      }
    }
    for (Team& team : teams_) {
      for (Team::Member& m : team.members) {
        if (At(m.rank).alive && m.memory.allocation) Write(m.memory, m.version = ++versions_);
      }
    }
    CheckContents("after a collective");
  }
  void CheckContents(const std::string& when) {
    CheckTeams(when);
    for (const Tag& tag : tags_) CheckTag(tag, when);
    for (auto& communicator : communicators_) {
      for (Shared& s : communicator) {
        if (At(s.owner).alive && s.own.allocation) {
          EXPECT_TRUE(Holds(s.own, s.version)) << when << ": rank " << s.owner;
        }
        if (!At(s.importer).alive || !s.import.allocation) continue;
        // A lost owner's memory may be replaced in the cycle in which it dies, and must be after a whole one.
        const bool same = !s.replaced && Holds(s.import, s.version);
        EXPECT_TRUE(same || (!At(s.owner).alive && Holds(s.import, 0)))
            << when << ": rank " << s.importer << " of rank " << s.owner << "'s";
      }
    }
  }

  // ---- tensors under tags ----

  // What tags occupy of a device: of a rank that has died, nothing.
  Bytes TagBytes(int device) {
    Bytes bytes = 0;
    for (const Tag& tag : tags_) bytes += tag.rank == device && At(tag.rank).alive && !tag.paused ? tag.held : 0;
    return bytes;
  }
  void CheckTag(const Tag& tag, const std::string& when) {
    if (!At(tag.rank).alive || tag.paused) return;
    for (const Tag::Part& part : tag.parts) {
      if (part.version == 0) continue;
      EXPECT_TRUE(Holds(part.memory, part.version)) << when << ": a tensor of rank " << tag.rank;
    }
  }
  void UseTag() {
    const auto living = Living();
    const int rank = living[static_cast<std::size_t>(Pick(static_cast<int>(living.size())))];
    std::vector<Tag*> own;
    for (Tag& tag : tags_) {
      if (tag.rank == rank) own.push_back(&tag);
    }
    if (own.size() < 2 && (own.empty() || Pick(3) == 0)) {
      const std::string name = own.empty() ? "weights" : "kv_cache";
      const bool preserves = own.empty();
      auto pool = At(rank).session->pools().Open(name, preserves ? PoolPolicy::kPreserve : PoolPolicy::kDiscard);
      ASSERT_TRUE(pool.ok()) << pool.status().message();
      tags_.push_back({.rank = rank, .pool = *pool, .preserves = preserves});
      return AddPart(tags_.back());
    }
    Tag& tag = *own[static_cast<std::size_t>(Pick(static_cast<int>(own.size())))];
    switch (Pick(6)) {
      case 0:
        return AddPart(tag);
      case 1:
        return FreePart(tag);
      default:
        return PauseOrResumeTag(tag);
    }
  }
  void AddPart(Tag& tag) {
    const Bytes before = InUse(tag.rank), bytes = kPage * static_cast<Bytes>(1 + Pick(6));
    auto address = At(tag.rank).session->pools().Allocate(tag.pool, bytes, DeviceOrdinal{tag.rank});
    if (tag.paused) {
      EXPECT_EQ(address.status().code(), Code::kRefused) << "memory of a tag that is paused";
      return;
    }
    ASSERT_TRUE(address.ok()) << address.status().message();
    tag.held += InUse(tag.rank) - before;
    Tag::Part part{{{}, reinterpret_cast<std::byte*>(address->value), bytes}, ++versions_};
    Write(part.memory, part.version);
    tag.parts.push_back(part);
  }
  // Also while it is paused.
  void FreePart(Tag& tag) {
    if (tag.parts.empty() || !At(tag.rank).alive) return;
    const auto part = tag.parts.begin() + Pick(static_cast<int>(tag.parts.size()));
    const Bytes before = InUse(tag.rank);
    Ok(At(tag.rank).session->pools().Free(part->memory.address(), nullptr), "free a tensor");
    tag.parts.erase(part);
    if (!tag.paused) tag.held -= before - InUse(tag.rank);
    if (tag.parts.empty()) tag.held = 0;
    if (!tag.paused && tag.parts.empty()) {
      EXPECT_NE(before, InUse(tag.rank)) << "the last chunk was not given back";
    }
  }
  // What goes wrong, if anything.
  std::string PlanFaultOfTag(const Tag& tag) {
    static constexpr std::array kCalls = {"Create",         "Release",     "Map",    "Unmap",   "SetAccess",    "Memory",
                                          "AllocatePinned", "FindNonZero", "Gather", "Scatter", "FinishCopies", "Synchronize"};
    switch (Pick(5)) {
      case 0: {
        const char* call = kCalls[static_cast<std::size_t>(Pick(kCalls.size()))];
        const auto nth = static_cast<std::uint64_t>(1 + Pick(3));
        static_cast<void>(At(tag.rank).simulator->FailNext(call, nth, Pick(2) == 0 ? cuda::kOutOfMemory : 304));
        return std::string(call) + " " + std::to_string(nth) + " fails";
      }
      case 1:
        if (Living().size() < 2 || Pick(4) != 0) return {};
        At(tag.rank).calls_left = static_cast<std::uint64_t>(1 + Pick(12));
        return "it dies in a driver call";
      default:
        return {};
    }
  }
  void PauseOrResumeTag(Tag& tag) {
    Rank& r = At(tag.rank);
    const bool pause = !tag.paused;
    const std::string what = PlanFaultOfTag(tag);
    SCOPED_TRACE(std::string(pause ? "pause" : "resume") + " of a tag of rank " + std::to_string(tag.rank) + ", " + what);
    const Bytes others = InUse(tag.rank) - (tag.paused ? 0 : tag.held);
    const auto run = [&] { return pause ? r.session->pools().Pause(tag.pool, {}) : r.session->pools().Resume(tag.pool, {}); };
    Status status = run();
    ++tag_cycles;
    r.calls_left = 0;
    if (!r.alive) return RemoveDead(static_cast<std::size_t>(tag.rank));
    r.simulator->ForgetPlannedFailures();
    if (!status.ok()) {
      ++tag_failures;
      EXPECT_FALSE(what.empty()) << "nothing went wrong: " << status.message();
      const Lifecycle now = r.session->CopyState().LifecycleOf(tag.pool);
      EXPECT_EQ(now, pause ? Lifecycle::kRunning : Lifecycle::kPaused) << status.message();
      EXPECT_EQ(InUse(tag.rank), others + (pause ? tag.held : 0)) << status.message();
      CheckTag(tag, "after a failure");
      status = run();
    }
    EXPECT_TRUE(status.ok()) << "the second try: " << status.message();
    tag.paused = pause;
    EXPECT_EQ(InUse(tag.rank), others + (pause ? 0 : tag.held));
    for (Tag::Part& part : tag.parts) {
      if (tag.preserves || pause) continue;
      Write(part.memory, part.version = ++versions_);  // what was there is gone
    }
    CheckTag(tag, "after a pause or resume of a tag");
    CheckBooks(pause);
  }

  // ---- pause and resume ----

  // The sets that share memory, as the model knows them.
  std::vector<std::set<int>> Sets() {
    std::vector<std::set<int>> sets;
    for (const int rank : Living()) sets.push_back({rank});
    const auto of = [&](int rank) { return std::ranges::find_if(sets, [&](const auto& set) { return set.contains(rank); }); };
    for (const auto& communicator : communicators_) {
      for (const Shared& s : communicator) {
        if (!s.import.allocation || !At(s.owner).alive || !At(s.importer).alive) continue;
        const auto a = of(s.owner), b = of(s.importer);
        if (a == b) continue;
        a->insert(b->begin(), b->end());
        sets.erase(b);
      }
    }
    for (const Team& team : teams_) {
      for (const Team::Member& m : team.members) {
        const int owner = team.members[0].rank;
        if (!m.object.allocation || !At(owner).alive || !At(m.rank).alive) continue;
        const auto a = of(owner), b = of(m.rank);
        if (a == b) continue;
        a->insert(b->begin(), b->end());
        sets.erase(b);
      }
    }
    return sets;
  }
  Lifecycle LifecycleOf(int rank) { return At(rank).session->Progress().lifecycle; }

  // All living ranks but `absent` call it. The ranks of a set that shares memory must agree.
  std::map<int, Status> All(bool pause, int absent = -1) {
    auto sets = Sets();
    std::map<int, Status> results;
    std::vector<std::function<void()>> work(kMostRanks);
    std::vector<int> delays(kMostRanks);
    for (const int rank : Living()) {
      if (rank == absent) continue;
      Status& result = results[rank];
      delays[static_cast<std::size_t>(rank)] = Pick(4) == 0 ? Pick(static_cast<int>(kTimeout) / 2) : 0;
      work[static_cast<std::size_t>(rank)] = [this, rank, pause, &result] {
        result = test::UntilDeath([&] { return pause ? At(rank).session->Pause() : At(rank).session->ResumeInTime(); });
      };
    }
    baton_.Run(random_(), std::move(work), delays, [this](int rank) { Step(rank); });
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].calls_left = ranks_[i].steps_left = 0;
      if (!ranks_[i].alive && ranks_[i].session) RemoveDead(i);
    }
    // Who called after the death of a rank through whom alone it shared memory with others is in another set than these.
    sets = Sets();
    for (const auto& set : sets) {
      std::set<Lifecycle> ends;
      std::string words;
      for (const int rank : set) {
        if (!At(rank).alive || rank == absent) continue;
        ends.insert(LifecycleOf(rank));
        words += "rank " + std::to_string(rank) + ", " + std::string(ToText(LifecycleOf(rank))) + ": " +
                 results[rank].message() + "\n";
      }
      EXPECT_LE(ends.size(), 1U) << "a set that shares memory ended in different ways:\n" << words;
    }
    return results;
  }
  void AllOk(bool pause, const std::string& what) {
    for (const auto& [rank, status] : All(pause)) {
      if (!At(rank).alive) continue;
      EXPECT_TRUE(status.ok()) << what << ", rank " << rank << ": " << status.message();
    }
  }

  // Chooses what goes wrong in the next pause or resume, if anything, and describes it.
  std::string PlanFault(int& absent) {
    const auto living = Living();
    const int victim = living[static_cast<std::size_t>(Pick(static_cast<int>(living.size())))];
    switch (Pick(6)) {
      case 0: {
        static constexpr std::array kCalls = {
            "Create",         "Release",     "Map",      "Unmap",           "SetAccess", "Export",       "Import",
            "Memory",         "Gather",      "Scatter",  "Reserve",         "FreeRange", "FinishCopies", "FindNonZero",
            "AllocatePinned", "Synchronize", "ClearAll", "CreateMulticast", "AddDevice", "BindMemory",   "BindAddress",
            "Unbind"};
        const char* call = kCalls[static_cast<std::size_t>(Pick(kCalls.size()))];
        const int result = Pick(2) == 0 ? cuda::kOutOfMemory : 304;  // as when descriptors run out
        const auto nth = static_cast<std::uint64_t>(1 + Pick(4));
        static_cast<void>(At(victim).simulator->FailNext(call, nth, result));
        return std::string(call) + " " + std::to_string(nth) + " of rank " + std::to_string(victim) + " fails";
      }
      case 1:
        if (living.size() < 2) return {};
        At(victim).calls_left = static_cast<std::uint64_t>(1 + Pick(30));
        return "rank " + std::to_string(victim) + " dies in a driver call";
      case 2:
        if (living.size() < 2) return {};
        At(victim).steps_left = static_cast<std::uint64_t>(1 + Pick(10));
        return "rank " + std::to_string(victim) + " dies while it talks";
      case 3:
        absent = victim;
        return "rank " + std::to_string(victim) + " does not call";
      default:
        return {};
    }
  }

  // Brings all living ranks to the same lifecycle after a fault; no further fault is planned.
  void Recover(bool pause, const std::string& what) {
    bool half = false;
    for (const int rank : Living())
      half = half || (LifecycleOf(rank) != Lifecycle::kRunning && LifecycleOf(rank) != Lifecycle::kPaused);
    if (half) AllOk(false, "resume after " + what);
    AllOk(pause, std::string(pause ? "pause" : "resume") + " after " + what);
  }

  void PauseOrResume(bool pause) {
    int absent = -1;
    const std::string what = PlanFault(absent);
    SCOPED_TRACE((pause ? "pause, " : "resume, ") + what);
    const auto results = All(pause, absent);
    ++cycles;
    for (const auto& [rank, status] : results) {
      if (!At(rank).alive) continue;
      failed += status.ok() ? 0 : 1;
      timeouts += status.code() == Code::kTimeout ? 1 : 0;
      EXPECT_TRUE(status.ok() || !what.empty()) << "nothing went wrong, and rank " << rank << " says: " << status.message();
      if (!status.ok() && absent >= 0) {
        EXPECT_EQ(status.code(), Code::kTimeout) << status.message();
        EXPECT_NE(status.message().find("rank " + std::to_string(absent)), std::string::npos) << status.message();
      }
    }
    // A planned fault that did not happen must not happen later.
    for (const int rank : Living()) At(rank).simulator->ForgetPlannedFailures();
    Recover(pause, what);
    CheckBooks(pause);
  }
  void Cycle() {
    PauseOrResume(true);
    if (::testing::Test::HasFailure()) return;
    for (const int rank : Living()) {
      EXPECT_EQ(LifecycleOf(rank), Lifecycle::kPaused);
    }
    for (int device = 0; device < kMostRanks; ++device)
      EXPECT_EQ(InUse(device), TagBytes(device)) << "paused, device " << device;
    MarkReplaced();
    if (Pick(6) == 0) Leave();  // also while paused
    if (Pick(3) == 0) UseTag();
    PauseOrResume(false);
    for (const int rank : Living()) {
      EXPECT_EQ(LifecycleOf(rank), Lifecycle::kRunning);
    }
    CheckContents("after a cycle");
    CheckMemory();
  }
  // Memory that a dead rank had shared is gone once its importers have paused.
  void MarkReplaced() {
    for (auto& communicator : communicators_) {
      for (Shared& s : communicator) {
        if (At(s.owner).alive || !At(s.importer).alive || !s.import.allocation) continue;
        s.replaced = true;
      }
    }
  }

  // ---- books ----

  Bytes InUse(int device) { return memory_->InUse(device); }
  // Without slabs and deaths the model knows every page; otherwise it knows a lower bound.
  void CheckMemory() {
    std::map<int, Bytes> expected;
    bool exact = !slab_;
    for (const auto& communicator : communicators_) {
      for (const Shared& s : communicator) {
        if (!At(s.owner).alive) exact = exact && !(At(s.importer).alive && s.import.allocation);
        if (!At(s.owner).alive) continue;
        const bool held = s.own.allocation || (At(s.importer).alive && s.import.allocation);
        if (held) expected[s.owner] += s.own.bytes != 0 ? s.own.bytes : s.import.bytes;
      }
    }
    for (const Team& team : teams_) {
      exact = exact && team.whole;
      for (const Team::Member& m : team.members) {
        if (At(m.rank).alive && m.memory.allocation) expected[m.rank] += m.memory.bytes;
      }
    }
    for (int device = 0; device < kMostRanks; ++device) {
      expected[device] += TagBytes(device);
      if (exact) {
        EXPECT_EQ(InUse(device), expected[device]) << "device " << device;
      } else {
        EXPECT_GE(InUse(device), expected[device]) << "device " << device;
      }
    }
  }
  void CheckBooks(bool pause) {
    for (const int rank : Living()) {
      Rank& r = At(rank);
      const State state = r.session->CopyState();
      EXPECT_TRUE(state.broken.empty()) << state.broken;
      const Status invariants = CheckInvariants(state);
      EXPECT_TRUE(invariants.ok()) << invariants.message();
      std::size_t resident = 0;
      for (const auto& [id, a] : state.allocations) resident += a.resident && !a.placed() ? 1 : 0;
      const SimulatorSnapshot real = r.simulator->Snapshot();
      EXPECT_EQ(real.handles.size(), resident) << (pause ? "paused" : "running") << ", rank " << rank << "\n" << ToText(real);
      EXPECT_EQ(real.ranges.size(), state.ranges.size()) << "rank " << rank;
    }
  }

  void End() {
    for (auto& communicator : communicators_) {
      for (Shared& s : communicator) Free(s);
    }
    for (Team& team : teams_) {
      for (Team::Member& m : team.members) LeaveTeam(team, m);
    }
    for (Tag& tag : tags_) {
      while (At(tag.rank).alive && !tag.parts.empty()) FreePart(tag);
    }
    for (int device = 0; device < kMostRanks; ++device) EXPECT_EQ(InUse(device), 0U) << "all freed, device " << device;
    for (const int rank : Living()) {
      const State state = At(rank).session->CopyState();
      EXPECT_TRUE(state.allocations.empty() && state.ranges.empty() && state.mappings.empty()) << "rank " << rank;
    }
    for (const int rank : Living()) EXPECT_TRUE(At(rank).session->Close("exit").ok());
    std::vector<JournalFindings> findings;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      test::MemoryReader reader(ranks_[i].events, SessionId{i + 1},
                                ranks_[i].alive ? SessionStatus::kClosed : SessionStatus::kCrashed);
      auto found = VerifyJournal(reader);
      ASSERT_TRUE(found.ok()) << found.status().message();
      for (const Violation& v : found->violations) ADD_FAILURE() << "rank " << i << ", event " << v.seq.value << ": " << v.text;
      findings.push_back(*std::move(found));
    }
    for (const Violation& v : VerifyJob(findings).violations)
      ADD_FAILURE() << "session " << v.session.value << ", event " << v.seq.value << ": " << v.text;
  }

  std::mt19937_64 random_;
  Baton& baton_;
  bool slab_ = false;
  std::shared_ptr<SimulatorWorld> memory_;
  LocalNetwork network_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<Shared>> communicators_;
  std::vector<Team> teams_;
  std::vector<Tag> tags_;
  std::uint64_t versions_ = 0;
};

std::uint64_t FromEnvironment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

void RunJobs(std::uint64_t first) {
  Baton baton(kMostRanks);
#ifdef AMEM_SANITIZED
  constexpr std::uint64_t kJobs = 300;
#elif defined(AMEM_BY_NIGHT)
  constexpr std::uint64_t kJobs = 10'000;
#else
  constexpr std::uint64_t kJobs = 200;
#endif
  const std::uint64_t one = FromEnvironment("AMEM_WORLD_SEED", 0);
  const std::uint64_t jobs = one != 0 ? 1 : FromEnvironment("AMEM_WORLD_JOBS", 4 * kJobs) / 4;
  std::uint64_t cycles = 0, failed = 0, deaths = 0, timeouts = 0, with_multicast = 0;
  std::uint64_t tag_cycles = 0, tag_failures = 0;
  for (std::uint64_t i = 0; i < jobs; ++i) {
    const std::uint64_t seed = one != 0 ? one : first * 1'000'000'007 + i;
    if (std::getenv("AMEM_WORLD_PRINT") != nullptr) std::fprintf(stderr, "seed %lu\n", seed);
    World world(seed, baton);
    world.Run();
    cycles += world.cycles;
    failed += world.failed;
    deaths += world.deaths;
    timeouts += world.timeouts;
    with_multicast += world.had_multicast ? 1 : 0;
    tag_cycles += world.tag_cycles;
    tag_failures += world.tag_failures;
    ASSERT_FALSE(::testing::Test::HasFailure()) << "AMEM_WORLD_SEED=" << seed << " (job " << i << ")";
  }
  if (jobs >= 100) {  // so many have every kind of fault
    EXPECT_GT(failed, 0U);
    EXPECT_GT(timeouts, 0U);
    EXPECT_GT(deaths, 0U);
    EXPECT_GT(with_multicast, jobs / 2);
    EXPECT_GT(tag_cycles, jobs / 4);
    EXPECT_GT(tag_failures, 0U);
  }
  std::printf(
      "%lu jobs: %lu pauses and resumes, of whose calls %lu failed, %lu of them by time-out; %lu deaths; %lu jobs had "
      "multicast objects; %lu pauses and resumes of tags, of which %lu failed\n",
      jobs, cycles, failed, timeouts, deaths, with_multicast, tag_cycles, tag_failures);
}

// Four, so that they can run side by side.
TEST(World, jobs_of_seed_1) { RunJobs(1); }
TEST(World, jobs_of_seed_2) { RunJobs(2); }
TEST(World, jobs_of_seed_3) { RunJobs(3); }
TEST(World, jobs_of_seed_4) { RunJobs(4); }

}  // namespace
}  // namespace amem::test
