// Memory of slabs that NCCL maps at addresses which AMem did not choose: symmetric windows, and NCCL's own suspend and resume.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/replay/session/bulk.h"
#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::Fill, test::Holds, test::k2M, test::kDevice, test::kMiB, test::Process;

constexpr Bytes kWhole = 32 * kMiB;  // of all slabs here

SessionOptions InSmallSlabs() {
  SessionOptions options;
  options.layout = Layout::kSlab;
  options.slab_bytes = kWhole;
  options.user_memory = UserMemory::kRelease;
  return options;
}

Address At(const std::byte* memory) { return Address{reinterpret_cast<std::uint64_t>(memory)}; }
std::byte* MemoryAt(Address address) { return reinterpret_cast<std::byte*>(address.value); }

bool AllZero(const std::byte* memory, Bytes bytes) {
  return memory[0] == std::byte{0} && std::memcmp(memory, memory + 1, bytes - 1) == 0;
}

class AlienAddressTest : public test::TwoProcesses {
 protected:
  AlienAddressTest() : TwoProcesses(InSmallSlabs(), 512 * kMiB) {}
  void TearDown() override {
    for (const Process* p : {&a, &b}) {
      const State state = p->session->CopyState();
      EXPECT_TRUE(state.broken.empty()) << state.broken;
      EXPECT_TRUE(CheckInvariants(state).ok()) << CheckInvariants(state).message();
    }
    TwoProcesses::TearDown();
  }

  void LeavesNothing() const {
    for (const Process* p : {&a, &b}) {
      EXPECT_EQ(p->simulator->Snapshot(), SimulatorSnapshot{});
      EXPECT_TRUE(p->session->CopyState().allocations.empty());
      EXPECT_TRUE(p->session->CopyState().ranges.empty());
    }
  }
  void Cycle() const {
    Both(&Session::Pause);
    EXPECT_EQ(a.InUse(), 0U);
    Both(&Session::Resume);
  }
  static void MapThere(const Process& p, Address address, Bytes bytes, AllocationId id) {
    const Status mapped = p.session->nccl().Map(address, bytes, 0, id, 0);
    ASSERT_TRUE(mapped.ok()) << mapped.message();
    const AccessDescriptor access{{LocationType::kDevice, kDevice.value}, 3};
    EXPECT_TRUE(p.session->nccl().SetAccess(address, bytes, std::span(&access, 1)).ok());
  }
};

// ---- symmetric windows -------------------------------------------------------------------------------------------------

// One flat range in each process, in which each rank's memory has its place.
struct Window {
  static constexpr Bytes kStride = 64 * kMiB;
  explicit Window(const Process& process) : p(process), base(*p.session->nccl().Reserve(2 * kStride, 0, {}, 0, {})) {}
  [[nodiscard]] Address Of(unsigned rank, Bytes offset) const { return base + rank * kStride + offset; }
  void Free() const { EXPECT_TRUE(p.session->nccl().FreeRange(base, 2 * kStride).ok()); }
  const Process& p;
  const Address base;
};

class WindowTest : public AlienAddressTest, public ::testing::WithParamInterface<bool> {
 protected:
  // As NCCL does: the ranks come in the order of their numbers, so that one maps its own memory first, and the other what it
  // imported from a rank that may not have mapped it yet.
  void Register(AllocationId of_a, AllocationId of_b, Bytes bytes, Bytes offset) {
    auto token_a = a.session->sharing().Export(of_a), token_b = b.session->sharing().Export(of_b);
    const auto of_a_at_b = [&] {
      const AllocationId as = *b.session->sharing().Import(token_a->get(), {});
      MapThere(b, window_b.Of(0, offset), bytes, as);
      EXPECT_TRUE(b.session->nccl().Release(as).ok());
    };
    if (GetParam()) of_a_at_b();
    MapThere(a, window_a.Of(0, offset), bytes, of_a);
    if (!GetParam()) of_a_at_b();
    const AllocationId as = *a.session->sharing().Import(token_b->get(), {});
    MapThere(a, window_a.Of(1, offset), bytes, as);
    EXPECT_TRUE(a.session->nccl().Release(as).ok());
    MapThere(b, window_b.Of(1, offset), bytes, of_b);
  }
  void Deregister(Bytes bytes, Bytes offset) const {
    for (const Window* window : {&window_a, &window_b}) {
      for (const unsigned rank : {0U, 1U}) EXPECT_TRUE(window->p.session->nccl().Unmap(window->Of(rank, offset), bytes).ok());
    }
  }
  void EachSeesWhatTheOtherWrites(Bytes bytes, Bytes offset, unsigned seed) const {
    Fill(MemoryAt(window_a.Of(0, offset)), bytes, seed);
    Fill(MemoryAt(window_b.Of(1, offset)), bytes, seed + 1);
    EXPECT_TRUE(Holds(MemoryAt(window_b.Of(0, offset)), bytes, seed));
    EXPECT_TRUE(Holds(MemoryAt(window_a.Of(1, offset)), bytes, seed + 1));
  }
  Window window_a{a}, window_b{b};
};

TEST_P(WindowTest, memory_that_has_no_address_of_its_own_lies_in_a_window_over_pauses) {
  constexpr Bytes kOffset = 8 * kMiB;
  std::byte* other = a.Place(a.Create());  // a slab that stays
  const AllocationId of_a = a.Create(5 * k2M), of_b = b.Create(5 * k2M);
  Register(of_a, of_b, 5 * k2M, kOffset);
  EXPECT_TRUE(a.session->nccl().Release(of_a).ok());
  EXPECT_TRUE(b.session->nccl().Release(of_b).ok());
  for (unsigned cycle = 0; cycle < 3; ++cycle) {
    EachSeesWhatTheOtherWrites(5 * k2M, kOffset, cycle);
    Cycle();
    EXPECT_TRUE(Holds(MemoryAt(window_a.Of(0, kOffset)), 5 * k2M, cycle));
    EXPECT_TRUE(Holds(MemoryAt(window_b.Of(0, kOffset)), 5 * k2M, cycle));
  }
  Deregister(5 * k2M, kOffset);
  window_a.Free();
  window_b.Free();
  a.Free(other, a.session->CopyState().allocations.rbegin()->first);
}

TEST_P(WindowTest, memory_of_the_program_is_at_its_first_address_and_in_the_window) {
  const AllocationId of_a = a.Create(k2M, true), of_b = b.Create(k2M, true);
  std::byte* first_a = a.Place(of_a);
  std::byte* first_b = b.Place(of_b);
  EXPECT_EQ(*a.session->nccl().Retain(At(first_a)), of_a);
  EXPECT_EQ(*b.session->nccl().Retain(At(first_b)), of_b);
  Register(of_a, of_b, k2M, 0);
  for (unsigned cycle = 0; cycle < 3; ++cycle) {
    EachSeesWhatTheOtherWrites(k2M, 0, cycle);
    Cycle();
    EXPECT_TRUE(Holds(first_a, k2M, cycle));
    EXPECT_TRUE(Holds(first_b, k2M, cycle + 1));
    Fill(first_a, k2M, cycle + 9);
    EXPECT_TRUE(Holds(MemoryAt(window_b.Of(0, 0)), k2M, cycle + 9)) << "one memory at three addresses";
  }
  Deregister(k2M, 0);
  EXPECT_TRUE(a.session->nccl().Release(of_a).ok());
  EXPECT_TRUE(b.session->nccl().Release(of_b).ok());
  a.Free(first_a, of_a);
  b.Free(first_b, of_b);
  window_a.Free();
  window_b.Free();
  LeavesNothing();
}

INSTANTIATE_TEST_SUITE_P(AnyOrder, WindowTest, ::testing::Bool());

TEST_F(AlienAddressTest, what_was_written_before_moves_along) {
  std::byte* other = a.Place(a.Create());
  const AllocationId id = a.Create();
  std::byte* memory = a.Place(id);
  Fill(memory, k2M, 1);
  EXPECT_TRUE(a.session->nccl().Unmap(At(memory), k2M).ok());  // and holds the handle
  EXPECT_TRUE(a.session->nccl().FreeRange(At(memory), k2M).ok());
  const Address elsewhere = *a.session->nccl().Reserve(2 * k2M, 0, {}, 0, {});
  MapThere(a, elsewhere + k2M, k2M, id);
  EXPECT_TRUE(Holds(MemoryAt(elsewhere + k2M), k2M, 1));
  const AllocationId next = a.Create();
  std::byte* place = a.Place(next);
  ASSERT_EQ(place, memory);
  EXPECT_TRUE(AllZero(place, k2M)) << "what it left behind was cleared";
  Cycle();
  EXPECT_TRUE(Holds(MemoryAt(elsewhere + k2M), k2M, 1));
  EXPECT_NE(other, nullptr);
}

TEST_F(AlienAddressTest, memory_for_network_cards_does_not_return_into_a_slab_without) {
  const AllocationId id = a.Create();
  std::byte* memory = a.Place(id);
  EXPECT_TRUE(a.session->nccl().Unmap(At(memory), k2M).ok());
  EXPECT_TRUE(a.session->nccl().Release(id).ok());  // and keeps the address
  AllocationProperties for_cards = Process::On(kDevice);
  for_cards.gpu_direct_rdma = 1;
  const AllocationId next = *a.session->nccl().Create(k2M, for_cards, 0, {});
  EXPECT_EQ(a.session->nccl().Map(At(memory), k2M, 0, next, 0), Status{});
  const State state = a.session->CopyState();
  const Allocation& mapped = state.allocations.at(next);
  EXPECT_EQ((mapped.placed() ? state.allocations.at(mapped.slab) : mapped).properties, for_cards);
  EXPECT_FALSE(a.session->nccl().FreeRange(At(memory), k2M).ok()) << "memory is mapped there";
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_FALSE(a.session->nccl().FreeRange(At(memory), k2M).ok()) << "the resume maps it there, which the driver does not know";
  EXPECT_TRUE(a.session->Resume().ok());
}

TEST_F(AlienAddressTest, memory_in_use_is_mapped_once_more_after_its_slab_was_cut_up) {
  std::vector<std::pair<std::byte*, AllocationId>> buffers;
  for (unsigned i = 0; i < 4; ++i) {
    const AllocationId id = a.Create(i == 1 ? 5 * k2M : k2M);
    buffers.emplace_back(a.Place(id, i == 1 ? 5 * k2M : k2M), id);
    Fill(buffers[i].first, k2M, i);
  }
  EXPECT_TRUE(a.session->nccl().Release(buffers[3].second).ok());  // only mapped
  const auto [memory, id] = buffers[2];
  EXPECT_EQ(*a.session->nccl().Retain(At(memory)), id);
  const Address elsewhere = *a.session->nccl().Reserve(8 * k2M, 0, {}, 0, {});
  MapThere(a, elsewhere + k2M, k2M, id);
  EXPECT_TRUE(a.session->CopyState().slabs.empty());
  for (unsigned cycle = 0; cycle < 2; ++cycle) {
    for (unsigned i = 0; i < 4; ++i) EXPECT_TRUE(Holds(buffers[i].first, k2M, i)) << i;
    Fill(memory, k2M, 9);
    EXPECT_TRUE(Holds(MemoryAt(elsewhere + k2M), k2M, 9));
    Fill(MemoryAt(elsewhere + k2M), k2M, 2);
    Cycle();
  }
  const AllocationId as = Pass(id);  // shared afterwards
  std::byte* theirs = b.Place(as);
  Cycle();
  EXPECT_TRUE(Holds(theirs, k2M, 2));
  b.Free(theirs, as);
  EXPECT_TRUE(a.session->nccl().Release(id).ok());
  EXPECT_TRUE(a.session->nccl().Unmap(elsewhere + k2M, k2M).ok());
  EXPECT_TRUE(a.session->nccl().FreeRange(elsewhere, 8 * k2M).ok());
  for (unsigned i = 0; i < 3; ++i) a.Free(buffers[i].first, buffers[i].second, i == 1 ? 5 * k2M : k2M);
  EXPECT_TRUE(a.session->nccl().Unmap(At(buffers[3].first), k2M).ok());
  EXPECT_TRUE(a.session->nccl().FreeRange(At(buffers[3].first), k2M).ok());
  LeavesNothing();
}

// ---- NCCL's own suspend and resume -------------------------------------------------------------------------------------

// A communicator of two ranks: each has buffers, and mappings of the other's.
class Communicator {
 public:
  struct Buffer {
    AllocationId own, as;
    std::byte *mine = nullptr, *theirs = nullptr;
    Bytes bytes = 0;
  };
  Communicator(const Process& owner, const Process& peer, std::size_t buffers, unsigned seed)
      : owner_(owner), peer_(peer), seed_(seed) {
    for (std::size_t i = 0; i < buffers; ++i) {
      Buffer buffer;
      buffer.bytes = i % 3 == 1 ? 5 * k2M : k2M;
      buffer.own = owner.Create(buffer.bytes);
      buffer.mine = owner.Place(buffer.own, buffer.bytes);
      buffer.as = Pass(buffer.own);
      buffer.theirs = peer.Place(buffer.as, buffer.bytes);
      buffers_.push_back(buffer);
    }
  }
  void Write() {
    ++seed_;
    for (std::size_t i = 0; i < buffers_.size(); ++i) Fill(buffers_[i].mine, buffers_[i].bytes, Seed(i));
  }
  void HasWhatWasWritten() const {
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      EXPECT_TRUE(Holds(buffers_[i].mine, buffers_[i].bytes, Seed(i))) << i;
      EXPECT_TRUE(Holds(buffers_[i].theirs, buffers_[i].bytes, Seed(i))) << i;
    }
  }
  // Unmaps and releases, and keeps the addresses.
  void SuspendPeer() const {
    for (const Buffer& buffer : buffers_) GiveUp(peer_, buffer.theirs, buffer.as, buffer.bytes);
  }
  void SuspendOwner() const {
    for (const Buffer& buffer : buffers_) GiveUp(owner_, buffer.mine, buffer.own, buffer.bytes);
  }
  void ResumeOwner(bool rdma = false) {
    for (Buffer& buffer : buffers_) {
      AllocationProperties properties = Process::On(kDevice);
      properties.gpu_direct_rdma = rdma ? 1 : 0;
      const auto created = owner_.session->nccl().Create(buffer.bytes, properties, 0, {});
      ASSERT_TRUE(created.ok()) << created.status().message();
      buffer.own = *created;
      Map(owner_, buffer.mine, buffer.own, buffer.bytes);
    }
  }
  void ResumePeer() {
    for (Buffer& buffer : buffers_) {
      buffer.as = Pass(buffer.own);
      Map(peer_, buffer.theirs, buffer.as, buffer.bytes);
    }
  }
  void FreeRanges() const {
    for (const Buffer& buffer : buffers_) {
      EXPECT_TRUE(owner_.session->nccl().FreeRange(At(buffer.mine), buffer.bytes).ok());
      EXPECT_TRUE(peer_.session->nccl().FreeRange(At(buffer.theirs), buffer.bytes).ok());
    }
  }
  void Destroy() const {
    SuspendPeer();
    SuspendOwner();
    FreeRanges();
  }
  [[nodiscard]] const std::vector<Buffer>& buffers() const { return buffers_; }

 private:
  [[nodiscard]] unsigned Seed(std::size_t i) const { return seed_ * 100 + static_cast<unsigned>(i); }
  AllocationId Pass(AllocationId id) const {
    auto token = owner_.session->sharing().Export(id);
    const auto imported = peer_.session->sharing().Import(token->get(), {});
    EXPECT_TRUE(imported.ok()) << imported.status().message();
    return imported.ok() ? *imported : AllocationId{};
  }
  static void GiveUp(const Process& p, std::byte* memory, AllocationId id, Bytes bytes) {
    EXPECT_TRUE(p.session->nccl().Unmap(At(memory), bytes).ok());
    EXPECT_TRUE(p.session->nccl().Release(id).ok());
  }
  static void Map(const Process& p, std::byte* memory, AllocationId id, Bytes bytes) {
    const Status mapped = p.session->nccl().Map(At(memory), bytes, 0, id, 0);
    ASSERT_TRUE(mapped.ok()) << mapped.message();
    const AccessDescriptor access{{LocationType::kDevice, kDevice.value}, 3};
    EXPECT_TRUE(p.session->nccl().SetAccess(At(memory), bytes, std::span(&access, 1)).ok());
  }

  const Process& owner_;
  const Process& peer_;
  std::vector<Buffer> buffers_;
  unsigned seed_;
};

class NativeSuspendTest : public AlienAddressTest {
 protected:
  Communicator from_a{a, b, 8, 1}, from_b{b, a, 4, 2};
  void SuspendAll() const {
    for (const Communicator* one : {&from_a, &from_b}) one->SuspendPeer();
    for (const Communicator* one : {&from_a, &from_b}) one->SuspendOwner();
  }
  void ResumeAll() {
    for (Communicator* one : {&from_a, &from_b}) one->ResumeOwner();
    for (Communicator* one : {&from_a, &from_b}) one->ResumePeer();
  }
};

TEST_F(NativeSuspendTest, gives_memory_back_and_has_it_in_slabs_again_over_pauses) {
  const Bytes held = a.InUse();
  const std::size_t slabs = a.session->CopyState().slabs.size();
  for (int round = 0; round < 3; ++round) {
    SuspendAll();
    EXPECT_EQ(a.InUse(), 0U);
    EXPECT_EQ(b.InUse(), 0U);
    EXPECT_TRUE(a.session->CopyState().allocations.empty());
    ResumeAll();
    EXPECT_EQ(a.InUse(), held);
    EXPECT_EQ(a.session->CopyState().slabs.size(), slabs) << "the peer's as well";
    for (int cycle = 0; cycle < 2; ++cycle) {
      from_a.Write();
      from_b.Write();
      Cycle();
      from_a.HasWhatWasWritten();
      from_b.HasWhatWasWritten();
    }
  }
  from_a.Destroy();
  from_b.Destroy();
  LeavesNothing();
}

TEST_F(NativeSuspendTest, of_one_communicator_leaves_another_in_the_same_slab_alone) {
  Communicator stays(a, b, 2, 3);
  stays.Write();
  const Bytes held = a.InUse();
  for (int round = 0; round < 3; ++round) {
    SuspendAll();
    stays.HasWhatWasWritten();
    Communicator passing(a, b, 6, 4);  // finds no address that is kept
    for (const auto& used : passing.buffers()) {
      for (const auto& kept : from_a.buffers())
        EXPECT_TRUE(used.mine + used.bytes <= kept.mine || kept.mine + kept.bytes <= used.mine);
    }
    passing.Destroy();
    ResumeAll();
    from_a.Write();
    Cycle();
    from_a.HasWhatWasWritten();
    stays.HasWhatWasWritten();
    EXPECT_EQ(a.InUse(), held);
  }
  for (const auto& buffer : from_a.buffers()) EXPECT_TRUE(a.session->CopyState().allocations.at(buffer.own).placed());
  from_a.Destroy();
  from_b.Destroy();
  stays.Destroy();
  LeavesNothing();
}

TEST_F(NativeSuspendTest, new_memory_is_zero_where_a_slab_stayed) {
  Communicator stays(a, b, 1, 3);
  from_a.Write();
  SuspendAll();
  ResumeAll();
  for (const auto& buffer : from_a.buffers()) EXPECT_TRUE(AllZero(buffer.mine, buffer.bytes));
}

TEST_F(NativeSuspendTest, a_resume_that_is_given_up_leaves_no_empty_slab) {
  Communicator stays(a, b, 1, 3);
  from_b.Destroy();
  from_a.SuspendPeer();
  from_a.SuspendOwner();
  const auto& first = from_a.buffers().front();
  const AllocationId id = a.Create(first.bytes);
  MapThere(a, At(first.mine), first.bytes, id);
  a.Free(first.mine, id, first.bytes);
  for (const auto& buffer : from_a.buffers()) {
    if (buffer.mine != first.mine) {
      EXPECT_TRUE(a.session->nccl().FreeRange(At(buffer.mine), buffer.bytes).ok());
    }
    EXPECT_TRUE(b.session->nccl().FreeRange(At(buffer.theirs), buffer.bytes).ok());
  }
  for (const auto& [slab, parts] : a.session->CopyState().slabs) EXPECT_FALSE(parts.parts.empty()) << slab.value;
  stays.Destroy();
  LeavesNothing();
}

TEST_F(NativeSuspendTest, and_then_destroyed_leaves_nothing) {
  SuspendAll();
  from_a.FreeRanges();
  from_b.FreeRanges();
  LeavesNothing();
}

TEST_F(NativeSuspendTest, pauses_in_between_find_nothing_to_do) {
  SuspendAll();
  Both(&Session::Pause);
  const auto refused = a.session->nccl().Create(k2M, Process::On(kDevice), 0, {});
  EXPECT_EQ(refused.status().code(), Code::kRefused);
  Both(&Session::Resume);
  ResumeAll();
  from_a.Write();
  from_a.HasWhatWasWritten();
  Both(&Session::Pause);
  SuspendAll();  // frees what is paused
  Both(&Session::Resume);
  EXPECT_EQ(a.InUse(), 0U);
  ResumeAll();
  from_a.Write();
  from_a.HasWhatWasWritten();
}

TEST_F(NativeSuspendTest, waits_for_a_peer_that_is_behind_with_its_suspend) {
  for (const Communicator* one : {&from_a, &from_b}) one->SuspendOwner();
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (const Communicator* one : {&from_a, &from_b}) one->SuspendPeer();
  });
  from_a.ResumeOwner();
  late.join();
  from_b.ResumeOwner();
  from_a.ResumePeer();
  from_b.ResumePeer();
  from_a.Write();
  from_a.HasWhatWasWritten();
}

TEST_F(NativeSuspendTest, has_handles_of_its_own_where_there_is_no_memory_for_a_slab) {
  from_b.Destroy();
  from_a.SuspendPeer();
  from_a.SuspendOwner();
  auto hog = b.simulator->Create(Bytes{512 - 60} << 20, Process::On(kDevice), 0);  // 40 MiB fit, and no two slabs
  ASSERT_TRUE(hog.ok());
  from_a.ResumeOwner();
  from_a.ResumePeer();
  const State state = a.session->CopyState();
  std::size_t placed = 0;
  for (const auto& buffer : from_a.buffers()) placed += state.allocations.at(buffer.own).placed() ? 1 : 0;
  EXPECT_GT(placed, 0U);
  EXPECT_LT(placed, from_a.buffers().size());
  for (int cycle = 0; cycle < 2; ++cycle) {
    from_a.Write();
    from_a.HasWhatWasWritten();
    from_a.SuspendPeer();
    from_a.SuspendOwner();
    from_a.ResumeOwner();
    from_a.ResumePeer();
  }
  EXPECT_TRUE(b.simulator->Release(*hog).ok());
  from_a.Write();
  Cycle();
  from_a.HasWhatWasWritten();
  from_a.Destroy();
  LeavesNothing();
}

TEST(NativeSuspend, does_not_ask_again_for_what_network_cards_need) {
  LocalNetwork network;
  const auto world = *SimulatorWorld::InMemory(2, 512 * kMiB);
  Process a(1, world, network, InSmallSlabs());
  AllocationProperties rdma = Process::On(kDevice);
  rdma.gpu_direct_rdma = 1;
  std::vector<std::pair<std::byte*, AllocationId>> buffers;
  for (int i = 0; i < 4; ++i) {
    const AllocationId id = *a.session->nccl().Create(k2M, rdma, 0, {});
    buffers.emplace_back(a.Place(id), id);
  }
  for (int i = 1; i < 4; ++i) {  // the first keeps the slab
    auto& [memory, id] = buffers[static_cast<std::size_t>(i)];
    EXPECT_TRUE(a.session->nccl().Unmap(At(memory), k2M).ok());
    EXPECT_TRUE(a.session->nccl().Release(id).ok());
    id = a.Create();
    const Status mapped = a.session->nccl().Map(At(memory), k2M, 0, id, 0);
    EXPECT_TRUE(mapped.ok()) << mapped.message();
  }
  EXPECT_EQ(a.session->CopyState().slabs.size(), 1U);
  EXPECT_TRUE(a.session->Close("test").ok());
}

}  // namespace
}  // namespace amem
