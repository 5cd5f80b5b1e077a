// Slabs on the simulator: each hazard of cutting NCCL's allocations from larger ones, by name.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "replay/peers/token.h"
#include "tests/replay/session/session_process.h"

namespace amem {
namespace {

using test::k2M, test::kDevice, test::kMiB, test::Process;

constexpr Bytes kSlab = 32 * kMiB;  // of all slabs here

SessionOptions Slabs() {
  SessionOptions options;
  options.layout = Layout::kSlab;
  options.slab_bytes = kSlab;
  return options;
}

class SlabTest : public test::TwoProcesses {
 protected:
  SlabTest() : TwoProcesses(Slabs(), 512 * kMiB) {}
  void TearDown() override {
    for (const Process* p : {&a, &b}) {
      const State state = p->session->CopyState();
      EXPECT_TRUE(state.broken.empty()) << state.broken;
      EXPECT_TRUE(CheckInvariants(state).ok()) << CheckInvariants(state).message();
    }
    TwoProcesses::TearDown();
  }
  static Address At(const std::byte* memory) { return Address{reinterpret_cast<std::uint64_t>(memory)}; }
  static bool AllZero(const std::byte* memory, Bytes bytes = k2M) {
    for (Bytes i = 0; i < bytes; ++i) {
      if (memory[i] != std::byte{0}) return false;
    }
    return true;
  }
};

TEST_F(SlabTest, the_driver_sees_one_allocation_for_many) {
  std::vector<std::byte*> places;
  for (int i = 0; i < 16; ++i) places.push_back(a.Place(a.Create()));
  EXPECT_EQ(a.simulator->Snapshot().handles.size(), 1U);
  EXPECT_EQ(a.simulator->Snapshot().mappings.size(), 1U);
  EXPECT_EQ(a.InUse(), kSlab);
  for (std::size_t i = 1; i < places.size(); ++i) EXPECT_EQ(places[i], places[i - 1] + k2M);
  a.Place(a.Create());  // the seventeenth
  EXPECT_EQ(a.simulator->Snapshot().handles.size(), 2U);
  const Holdings held = Measure(a.session->CopyState());
  EXPECT_EQ(held.own_device, 17 * k2M);
  EXPECT_EQ(held.own_device_resident, 2 * kSlab);
  EXPECT_EQ(held.slabs_free, 2 * kSlab - 17 * k2M);
}

TEST_F(SlabTest, a_peer_imports_a_slab_once_for_all_its_parts) {
  std::vector<std::byte*> mine, theirs;
  for (int i = 0; i < 8; ++i) {
    const AllocationId id = a.Create();
    mine.push_back(a.Place(id));
    theirs.push_back(b.Place(Pass(id)));
  }
  EXPECT_EQ(b.simulator->Snapshot().handles.size(), 1U);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i][i] = static_cast<std::byte>(i + 1);
    EXPECT_EQ(theirs[i][i], static_cast<std::byte>(i + 1));
  }
}

TEST_F(SlabTest, a_cycle_brings_the_same_bytes_to_the_same_addresses) { CyclesBringTheSameBytesToTheSameAddresses(2 * kSlab); }

// ---- the guess of the reservation --------------------------------------------------------------------------------------

TEST_F(SlabTest, a_wrong_guess_ends_in_a_handle_of_its_own) {
  const Address early = *a.session->nccl().Reserve(k2M, 0, {}, 0, {});  // before there is anything to guess
  const AllocationId id = a.Create();
  EXPECT_TRUE(a.session->nccl().Map(early, k2M, 0, id, 0).ok());
  const AccessDescriptor access{{LocationType::kDevice, 0}, 3};
  EXPECT_TRUE(a.session->nccl().SetAccess(early, k2M, std::span(&access, 1)).ok());
  reinterpret_cast<std::byte*>(early.value)[5] = std::byte{5};
  const State state = a.session->CopyState();
  EXPECT_FALSE(state.allocations.at(id).placed());
  EXPECT_EQ(a.Count<Backed>(), 1U);
  EXPECT_TRUE(state.slabs.empty()) << "the slab that nobody uses any more went back";
  EXPECT_EQ(a.InUse(), k2M);
  Both(&Session::Pause);
  EXPECT_EQ(a.InUse(), 0U);
  Both(&Session::Resume);
  EXPECT_EQ(reinterpret_cast<std::byte*>(early.value)[5], std::byte{5});
}

TEST_F(SlabTest, a_range_that_was_guessed_for_another_handle_serves_the_one_that_comes) {
  const AllocationId first = a.Create(), second = a.Create();
  const Address range = *a.session->nccl().Reserve(k2M, 0, {}, 0, {});  // the guess says: for the second
  EXPECT_TRUE(a.session->nccl().Map(range, k2M, 0, first, 0).ok());
  const State state = a.session->CopyState();
  EXPECT_EQ(state.PlaceOf(state.allocations.at(first)), range);
  EXPECT_FALSE(state.allocations.at(second).placed());
  EXPECT_EQ(a.Count<Backed>(), 1U) << "the slab was not cut up";
  std::byte* other = a.Place(second);
  other[0] = std::byte{2};
  reinterpret_cast<std::byte*>(range.value)[0] = std::byte{1};
  EXPECT_EQ(other[0], std::byte{2});
}

TEST_F(SlabTest, an_allocation_in_use_is_mapped_once_more_where_another_was_expected) {
  const AllocationId first = a.Create();
  std::byte* memory = a.Place(first);
  const AllocationId second = a.Create();
  const Address range = *a.session->nccl().Reserve(k2M, 0, {}, 0, {});  // the guess says: for the second
  const Status mapped = a.session->nccl().Map(range, k2M, 0, first, 0);
  ASSERT_TRUE(mapped.ok()) << mapped.message();
  const AccessDescriptor access{{LocationType::kDevice, 0}, 3};
  EXPECT_TRUE(a.session->nccl().SetAccess(range, k2M, std::span(&access, 1)).ok());
  memory[1] = std::byte{1};
  EXPECT_EQ(reinterpret_cast<std::byte*>(range.value)[1], std::byte{1});
  std::byte* other = a.Place(second);
  other[1] = std::byte{2};
  EXPECT_EQ(memory[1], std::byte{1});
}

TEST_F(SlabTest, a_guess_that_cannot_be_mended_is_refused_with_the_remedy) {
  const AllocationId id = a.Create();
  std::byte* there = a.Place(id);
  const AllocationId as = Pass(id);  // so the slab cannot be cut up
  const Address elsewhere = *a.session->nccl().Reserve(k2M, 0, {}, 0, {});
  const State before = a.session->CopyState();
  const Status refused = a.session->nccl().Map(elsewhere, k2M, 0, id, 0);
  EXPECT_EQ(refused.driver_result(), cuda::kNotSupported);
  EXPECT_NE(refused.message().find("AMEM_LAYOUT=direct"), std::string::npos) << refused.message();
  EXPECT_EQ(a.session->CopyState(), before);
  EXPECT_TRUE(a.session->nccl().FreeRange(elsewhere, k2M).ok());
  EXPECT_TRUE(b.session->nccl().Release(as).ok());
  a.Free(there, id);
}

TEST_F(SlabTest, an_alignment_that_the_place_has_not_is_a_wrong_guess) {
  a.Place(a.Create());
  const AllocationId id = a.Create();
  const State state = a.session->CopyState();
  const std::uint64_t place = state.PlaceOf(state.allocations.at(id)).value;
  const Bytes alignment = 2 * (place & -place);  // whatever address the slab got
  const Address range = *a.session->nccl().Reserve(k2M, alignment, {}, 0, {});
  EXPECT_EQ(range.value % alignment, 0U);
  EXPECT_TRUE(a.session->nccl().Map(range, k2M, 0, id, 0).ok());
  EXPECT_FALSE(a.session->CopyState().allocations.at(id).placed());
}

// ---- one handle, several mappings --------------------------------------------------------------------------------------

TEST_F(SlabTest, a_second_mapping_of_a_handle_is_the_same_memory_until_the_last_goes) {
  const AllocationId id = a.Create();
  std::byte* memory = a.Place(id);
  EXPECT_EQ(*a.session->nccl().Retain(At(memory) + 100), id);
  std::byte* again = a.Place(id);
  EXPECT_EQ(again, memory);
  memory[9] = std::byte{9};
  a.Free(memory, id);
  EXPECT_EQ(again[9], std::byte{9});
  EXPECT_EQ(a.session->CopyState().allocations.at(id).mappings, 1U);
  a.Free(again, id);
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(SlabTest, one_allocation_imported_twice_is_one_memory_and_two_references) {
  const AllocationId id = a.Create();
  std::byte* mine = a.Place(id);
  const AllocationId first = Pass(id);
  std::byte* one = b.Place(first);
  const AllocationId second = Pass(id);
  std::byte* two = b.Place(second);
  mine[3] = std::byte{3};
  EXPECT_EQ(one[3], std::byte{3});
  EXPECT_EQ(two[3], std::byte{3});
  EXPECT_EQ(a.session->CopyState().allocations.at(id).importers.size(), 1U);
  EXPECT_EQ(b.session->CopyState().allocations.at(first).guest_references, 2U);
  b.Free(one, first);
  EXPECT_EQ(two[3], std::byte{3});
  b.Free(two, second);
  EXPECT_TRUE(a.session->CopyState().allocations.at(id).importers.empty());
  EXPECT_TRUE(b.session->CopyState().slabs.empty());
}

// As ncclMemFree does it: retain by the address, release, unmap, free the range, release.
TEST_F(SlabTest, two_threads_that_free_what_both_imported_give_back_each_its_own) {
  const AllocationId id = a.Create();
  a.Place(id);
  const Address one = At(b.Place(Pass(id))), two = At(b.Place(Pass(id)));
  const AllocationId by_one = *b.session->nccl().Retain(one), by_two = *b.session->nccl().Retain(two);
  for (const AllocationId retained : {by_one, by_two}) EXPECT_TRUE(b.session->nccl().Release(retained).ok());
  for (const Address at : {one, two}) EXPECT_TRUE(b.session->nccl().Unmap(at, k2M).ok());
  for (const Address at : {one, two}) EXPECT_TRUE(b.session->nccl().FreeRange(at, k2M).ok());
  for (const AllocationId retained : {by_one, by_two}) EXPECT_TRUE(b.session->nccl().Release(retained).ok());
  EXPECT_TRUE(b.session->CopyState().allocations.empty());
  EXPECT_TRUE(a.session->CopyState().allocations.at(id).importers.empty());
}

// ---- freeing -----------------------------------------------------------------------------------------------------------

TEST_F(SlabTest, a_freed_place_is_not_used_again_while_a_peer_refers_to_it) {
  a.Place(a.Create());  // keeps the slab
  const AllocationId id = a.Create();
  std::byte* mine = a.Place(id);
  const AllocationId theirs = Pass(id);
  std::byte* seen = b.Place(theirs);
  a.Free(mine, id);
  std::byte* next = a.Place(a.Create());
  EXPECT_NE(next, mine);
  seen[0] = std::byte{0xEE};  // a peer that was aborted may still write
  EXPECT_TRUE(AllZero(next));
  b.Free(seen, theirs);
  EXPECT_EQ(a.Place(a.Create()), mine);
}

TEST_F(SlabTest, a_place_that_is_used_again_is_zero) {
  a.Place(a.Create());
  const AllocationId id = a.Create();
  std::byte* mine = a.Place(id);
  std::memset(mine, 0xFF, k2M);
  a.Free(mine, id);
  std::byte* next = a.Place(a.Create());
  ASSERT_EQ(next, mine);
  EXPECT_TRUE(AllZero(next));
  EXPECT_EQ(a.Count<PartCleared>(), 1U);
}

TEST_F(SlabTest, room_whose_clearing_has_failed_is_cleared_again_before_it_is_used) {
  a.Place(a.Create());
  const AllocationId id = a.Create();
  std::byte* mine = a.Place(id);
  std::memset(mine, 0xFF, k2M);
  a.Free(mine, id);
  for (const char* call : {"Clear", "FinishCopies"}) {
    a.simulator->SetHook([call](std::string_view name, std::uint64_t) { return name == call ? cuda::kUnknown : 0; });
    EXPECT_EQ(a.session->nccl().Create(k2M, Process::On(kDevice), 0, {}).status().driver_result(), cuda::kUnknown) << call;
    a.simulator->SetHook({});
    EXPECT_EQ(a.Count<PartCleared>(), 0U) << call;
  }
  std::byte* next = a.Place(a.Create());
  EXPECT_EQ(next, mine);
  EXPECT_TRUE(AllZero(next));
}

TEST_F(SlabTest, what_is_free_across_a_cycle_is_cleared_before_it_is_used) {
  a.Place(a.Create());
  Both(&Session::Pause);
  Both(&Session::Resume);
  const State state = a.session->CopyState();
  EXPECT_EQ(state.slabs.begin()->second.dirty, (std::map<Bytes, Bytes>{{k2M, kSlab - k2M}}));
  EXPECT_TRUE(AllZero(a.Place(a.Create())));
  EXPECT_EQ(a.Count<PartCleared>(), 1U);
}

TEST_F(SlabTest, a_slab_whose_last_part_goes_while_room_in_it_is_cleared_stays) {
  const AllocationId last = a.Create();
  std::byte* memory = a.Place(last);
  const AllocationId used = a.Create();
  a.Free(a.Place(used), used);  // the room that is cleared next
  bool freed = false;
  a.simulator->SetHook([&](std::string_view call, std::uint64_t) {
    if (call != "Clear" || std::exchange(freed, true)) return 0;
    EXPECT_TRUE(a.session->nccl().Unmap(At(memory), k2M).ok());
    EXPECT_TRUE(a.session->nccl().Release(last).ok());
    return 0;
  });
  const AllocationId next = a.Create();
  a.simulator->SetHook({});
  EXPECT_TRUE(freed);
  EXPECT_TRUE(a.session->nccl().FreeRange(At(memory), k2M).ok());
  EXPECT_TRUE(a.session->CopyState().allocations.at(next).placed());
  EXPECT_EQ(a.InUse(), kSlab);
  EXPECT_TRUE(AllZero(a.Place(next)));
}

TEST_F(SlabTest, a_slab_that_empties_goes_back_also_at_its_importers) {
  std::vector<std::pair<std::byte*, AllocationId>> mine, theirs;
  for (int i = 0; i < 3; ++i) {
    const AllocationId id = a.Create();
    mine.emplace_back(a.Place(id), id);
    const AllocationId as = Pass(id);
    theirs.emplace_back(b.Place(as), as);
  }
  for (const auto& [memory, id] : mine) a.Free(memory, id);
  EXPECT_EQ(a.InUse(), kSlab);
  for (const auto& [memory, id] : theirs) b.Free(memory, id);
  EXPECT_EQ(a.InUse(), 0U);
  for (Process* p : {&a, &b}) {
    EXPECT_TRUE(p->simulator->Snapshot().ranges.empty());
    EXPECT_TRUE(p->session->CopyState().allocations.empty());
  }
}

TEST_F(SlabTest, a_dead_peers_references_free_the_place) {
  a.Place(a.Create());
  const AllocationId id = a.Create();
  std::byte* mine = a.Place(id);
  Pass(id);
  a.Free(mine, id);
  a.session->peer_answers().OnPeerConnected({SessionId{2}, "localhost", 1, 0, 1});
  a.session->peer_answers().OnPeerLost({SessionId{2}, "localhost", 1, 0, 1}, "killed");
  EXPECT_EQ(a.Place(a.Create()), mine);
}

TEST_F(SlabTest, everything_can_be_freed_while_paused) {
  const AllocationId own = a.Create(), kept = a.Create();
  std::byte* memory = a.Place(own);
  EXPECT_TRUE(a.session->nccl().Release(kept).ok());
  EXPECT_TRUE(a.session->Pause().ok());
  EXPECT_EQ(*a.session->nccl().Retain(At(memory)), own);
  EXPECT_TRUE(a.session->nccl().Release(own).ok());
  a.Free(memory, own);
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_TRUE(a.simulator->Snapshot().ranges.empty());
  EXPECT_EQ(a.InUse(), 0U);
}

TEST_F(SlabTest, thousands_of_communicators_that_come_and_go_leave_no_holes_that_grow) {
  struct Held {
    std::byte* memory = nullptr;
    AllocationId id;
    Bytes bytes = 0;
  };
  std::vector<std::vector<Held>> alive;
  Bytes most = 0, most_late = 0;
  std::mt19937_64 random(1);
  const auto pick = [&](std::uint64_t below) { return random() % below; };
#ifdef AMEM_SANITIZED
  constexpr int kRounds = 300;
#else
  constexpr int kRounds = 3000;
#endif
  for (int round = 0; round < kRounds; ++round) {
    std::vector<Held> communicator;
    for (std::uint64_t i = 0, n = 4 + pick(8); i < n; ++i) {
      const Bytes bytes = pick(3) == 0 ? 5 * k2M : k2M;
      const AllocationId id = a.Create(bytes);
      communicator.push_back({a.Place(id, bytes), id, bytes});
    }
    alive.push_back(std::move(communicator));
    if (alive.size() > 6) {
      const auto gone = alive.begin() + static_cast<std::ptrdiff_t>(pick(alive.size()));
      for (const Held& h : *gone) a.Free(h.memory, h.id, h.bytes);
      alive.erase(gone);
    }
    (round < kRounds / 2 ? most : most_late) = std::max(round < kRounds / 2 ? most : most_late, a.InUse());
  }
  EXPECT_LE(most_late, most + kSlab);
  Bytes held = 0;
  for (const auto& communicator : alive) {
    for (const Held& h : communicator) held += h.bytes;
  }
  EXPECT_LE(a.InUse(), 2 * held + 2 * kSlab);
  for (const auto& communicator : alive) {
    for (const Held& h : communicator) a.Free(h.memory, h.id, h.bytes);
  }
  EXPECT_EQ(a.InUse(), 0U);
}

// A peer that imports a's memory, of which the test sees every message.
class ImportingPeer {
 public:
  ImportingPeer(const Process& owner, AllocationId part) : owner_(*owner.session), part_(part) {
    const auto descriptor = owner_.sharing().Export(part);
    const auto shared = owner_.peer_answers().OnImport(self_, AllocationId{1}, *ReadTokenDescriptor(descriptor->get()));
    EXPECT_TRUE(shared.ok() && shared->part);
    slab_ = shared->part->slab;
    EXPECT_TRUE(
        owner_.peer_answers().OnImport(self_, AllocationId{2}, Token{SessionId{1}, slab_, shared->part->secret, 0}).ok());
  }
  void DropPart() { owner_.peer_answers().OnReferenceDropped(self_, part_, AllocationId{1}); }
  void DropSlab() { owner_.peer_answers().OnReferenceDropped(self_, slab_, AllocationId{2}); }

 private:
  Session& owner_;
  const PeerIdentity self_{SessionId{9}, "localhost", 1, 0, 8};
  AllocationId part_, slab_;
};

TEST_F(SlabTest, a_slab_without_parts_stays_until_its_importer_has_let_go_of_the_slab_itself) {
  const AllocationId id = a.Create();
  std::byte* memory = a.Place(id);
  ImportingPeer peer(a, id);
  a.Free(memory, id);
  peer.DropPart();
  EXPECT_TRUE(a.session->CopyState().slabs.begin()->second.parts.empty());
  EXPECT_EQ(a.InUse(), kSlab);
  peer.DropSlab();
  EXPECT_EQ(a.InUse(), 0U);
  EXPECT_TRUE(a.session->CopyState().slabs.empty());
}

TEST_F(SlabTest, more_access_for_a_device_that_has_some_is_asked_of_the_driver) {
  std::byte* first = a.Place(a.Create());
  std::byte* second = a.Place(a.Create());
  const AccessDescriptor read{{LocationType::kDevice, 1}, 1}, write{{LocationType::kDevice, 1}, 3};
  EXPECT_TRUE(a.session->nccl().SetAccess(At(first), k2M, std::span(&read, 1)).ok());
  const std::uint64_t before = a.simulator->Calls("SetAccess");
  EXPECT_TRUE(a.session->nccl().SetAccess(At(second), k2M, std::span(&write, 1)).ok());
  EXPECT_EQ(a.simulator->Calls("SetAccess"), before + 1);
  EXPECT_TRUE(a.session->nccl().SetAccess(At(first), k2M, std::span(&read, 1)).ok());
  EXPECT_EQ(a.simulator->Calls("SetAccess"), before + 1) << "it has that and more";
  const auto mapping = a.simulator->MappingAt(At(second));
  EXPECT_EQ(mapping->access, (std::vector<AccessDescriptor>{{{LocationType::kDevice, 0}, 3}, write}));
}

TEST_F(SlabTest, a_driver_error_in_any_call_that_opens_a_slab_leaves_nothing_behind) {
  for (const char* call : {"Create", "Reserve", "Map", "SetAccess"}) {
    ASSERT_TRUE(a.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    EXPECT_EQ(a.session->nccl().Create(k2M, Process::On(kDevice), 0, {}).status().driver_result(), cuda::kUnknown) << call;
    EXPECT_EQ(a.simulator->Snapshot(), SimulatorSnapshot{}) << call;
    EXPECT_TRUE(a.session->CopyState().allocations.empty()) << call;
  }
  const AllocationId id = a.Create();
  a.Place(id);
  auto token = a.session->sharing().Export(id);
  for (const char* call : {"Import", "Reserve", "Map"}) {
    ASSERT_TRUE(b.simulator->FailNext(call, 1, cuda::kUnknown).ok());
    EXPECT_EQ(b.session->sharing().Import(token->get(), {}).status().driver_result(), cuda::kUnknown) << call;
    EXPECT_EQ(b.simulator->Snapshot(), SimulatorSnapshot{}) << call;
    const State owner = a.session->CopyState();
    for (const auto& [own, allocation] : owner.allocations) EXPECT_TRUE(allocation.importers.empty()) << call;
  }
}

TEST(BrokenSlab, a_slab_that_the_state_does_not_have_breaks_the_session_and_nccl_gets_its_memory) {
  LocalNetwork network;
  Process a(1, *SimulatorWorld::InMemory(2, 512 * kMiB), network, Slabs());
  const AllocationId part = a.Create();
  const State before = a.session->CopyState();
  const auto& [slab, parts] = *before.slabs.begin();
  for (const EventBody& event : {EventBody{AllocationReleased{part}}, EventBody{Unmapped{parts.address, kSlab, {}}},
                                 EventBody{RangeFreed{parts.address, kSlab, {}}}, EventBody{AllocationReleased{slab}}})
    a.session->records().Note(event);  // which nobody told the slabs
  ASSERT_TRUE(a.session->CopyState().broken.empty()) << a.session->CopyState().broken;
  EXPECT_TRUE(a.session->nccl().Create(k2M, Process::On(kDevice), 0, {}).ok());
  const std::string broken = a.session->CopyState().broken;
  EXPECT_NE(broken.find("check failed at slabs.cpp:"), std::string::npos) << broken;
  EXPECT_NE(broken.find("no entry for " + ToText(slab)), std::string::npos) << broken;
  EXPECT_EQ(a.session->Pause().code(), Code::kBroken);
  EXPECT_TRUE(a.session->Close("test").ok());
}

// ---- what stays direct -------------------------------------------------------------------------------------------------

TEST_F(SlabTest, users_memory_is_the_drivers_own) {
  const AllocationId id = a.Create(k2M, true);
  EXPECT_FALSE(a.session->CopyState().allocations.at(id).placed());
  EXPECT_EQ(a.InUse(), k2M);
}

// As with PXN: a's buffer is held by a's card, and b's GPU writes to it.
TEST_F(SlabTest, a_buffer_of_a_card_stays_alone_at_its_owner_and_comes_back_to_its_importer) {
  a.Place(a.Create());
  Origin of_card;
  of_card.alone = Alone::kPreferred;
  const AllocationId id = *a.session->nccl().Create(5 * k2M, Process::On(kDevice), 0, of_card);
  std::byte* const mine = a.Place(id, 5 * k2M);
  std::byte* const theirs = b.Place(Pass(id), 5 * k2M);
  ASSERT_TRUE(a.session->records().NoteRegistration({At(mine) + 4096, 8 * kMiB, "ibv_reg_mr"}));
  for (int cycle = 0; cycle < 2; ++cycle) {
    Both(&Session::Pause);
    EXPECT_EQ(a.InUse(), 5 * k2M) << "its own handle, and no slab";
    mine[k2M] = std::byte{7};  // by the card
    Both(&Session::Resume);
    EXPECT_EQ(theirs[k2M], std::byte{7}) << "one memory still";
    theirs[k2M] = std::byte{9};
    EXPECT_EQ(mine[k2M], std::byte{9});
  }
  EXPECT_EQ(a.Figure({"registered", "slabs"}), 0U);
  EXPECT_EQ(a.Figure({"registered", "bytes"}), 8 * kMiB);
}

// Without AMem the device would have that room for it.
TEST_F(SlabTest, a_buffer_of_a_card_takes_room_in_a_slab_where_the_device_has_no_other) {
  a.Place(a.Create());
  EXPECT_TRUE(a.session->legacy().Allocate(8, kDevice, {}).ok());
  Origin of_card;
  of_card.alone = Alone::kPreferred;
  a.simulator->SetHook([](std::string_view call, std::uint64_t) { return call == "Create" ? cuda::kOutOfMemory : 0; });
  const auto id = a.session->nccl().Create(k2M, Process::On(kDevice), 0, of_card);
  ASSERT_TRUE(id.ok()) << id.status().message();
  EXPECT_TRUE(a.session->CopyState().allocations.at(*id).placed());
  EXPECT_TRUE(a.session->legacy().Allocate(8, kDevice, of_card).ok());
  of_card.alone = Alone::kNeeded;
  EXPECT_EQ(a.session->nccl().Create(k2M, Process::On(kDevice), 0, of_card).status().code(), Code::kOutOfMemory);
  a.simulator->SetHook({});
}

// A card of the importer's would hold pages that the owner gives up.
TEST_F(SlabTest, an_import_that_a_card_holds_refuses_the_pause_and_says_what_to_do) {
  std::byte* const mine = a.Place(a.Create());
  const AllocationId id = a.Create();
  a.Place(id);
  std::byte* const theirs = b.Place(Pass(id));
  ASSERT_TRUE(b.session->records().NoteRegistration({At(theirs), k2M, "ibv_reg_mr"}));
  Status refused, other;
  std::thread owner([&] { other = a.session->Pause(); });
  refused = b.session->Pause();
  owner.join();
  for (const Status& one : {refused, other})
    EXPECT_NE(one.message().find("register it in the process that owns it"), std::string::npos) << one.message();
  mine[0] = theirs[0] = std::byte{1};  // nothing left
  b.session->records().Note(Deregistered{At(theirs), k2M});
  Both(&Session::Pause);
  Both(&Session::Resume);
}

TEST_F(SlabTest, a_part_that_a_card_holds_keeps_its_slab_which_is_counted) {
  std::byte* const first = a.Place(a.Create());
  a.Place(a.Create());
  ASSERT_TRUE(a.session->records().NoteRegistration({At(first), 64 << 10, "ibv_reg_mr"}));
  ASSERT_TRUE(a.session->Pause().ok());
  EXPECT_EQ(a.InUse(), kSlab);
  EXPECT_EQ(a.Figure({"registered", "slabs"}), 1U);
  EXPECT_EQ(a.Figure({"registered", "regions"}), 1U);
  EXPECT_NE(a.session->statistics().Text().find("0 MiB in 1 regions, and 1 slabs whole around some"), std::string::npos);
  ASSERT_TRUE(a.session->Resume().ok());
}

TEST_F(SlabTest, mixed_properties_are_kept_apart) {
  a.Place(a.Create());
  AllocationProperties rdma = Process::On(kDevice), host = Process::On(kDevice), compressed = Process::On(kDevice);
  rdma.gpu_direct_rdma = 1;
  host.location = {LocationType::kHost, 0};
  compressed.compression = 1;
  const AllocationId with_rdma = *a.session->nccl().Create(k2M, rdma, 0, {});
  State state = a.session->CopyState();
  EXPECT_EQ(state.slabs.size(), 2U);
  EXPECT_EQ(state.allocations.at(state.allocations.at(with_rdma).slab).properties, rdma);
  const auto in_host = a.session->nccl().Create(k2M, host, 0, {});
  if (in_host.ok()) {
    EXPECT_FALSE(a.session->CopyState().allocations.at(*in_host).placed());
  }
  const auto with_compression = a.session->nccl().Create(k2M, compressed, 0, {});
  if (with_compression.ok()) {
    EXPECT_FALSE(a.session->CopyState().allocations.at(*with_compression).placed());
  }
  EXPECT_EQ(a.session->CopyState().slabs.size(), 2U);
}

TEST_F(SlabTest, with_several_devices_in_one_process_what_follows_is_direct) {
  const AllocationId before = a.Create();
  const AllocationId other = *a.session->nccl().Create(k2M, Process::On(DeviceOrdinal{1}), 0, {});
  const AllocationId after = a.Create();
  const State state = a.session->CopyState();
  EXPECT_TRUE(state.allocations.at(before).placed());
  EXPECT_FALSE(state.allocations.at(other).placed());
  EXPECT_FALSE(state.allocations.at(after).placed());
}

TEST_F(SlabTest, access_of_another_device_is_set_on_the_slab_once) {
  const AccessDescriptor other{{LocationType::kDevice, 1}, 3};
  for (int i = 0; i < 3; ++i) {
    std::byte* memory = a.Place(a.Create());
    EXPECT_TRUE(a.session->nccl().SetAccess(At(memory), k2M, std::span(&other, 1)).ok());
  }
  std::size_t on_driver = 0;
  for (const Event& e : a.journal->events) {
    const auto* set = std::get_if<AccessSet>(&e.body);
    on_driver += set != nullptr && !set->allocation ? 1 : 0;
  }
  EXPECT_EQ(on_driver, 2U);  // its own device when it was opened, and the other
}

TEST_F(SlabTest, a_large_allocation_is_the_drivers_own) {
  const AllocationId id = a.Create(kSlab);
  EXPECT_FALSE(a.session->CopyState().allocations.at(id).placed());
}

TEST_F(SlabTest, a_nearly_full_device_gets_smaller_slabs_and_then_none) {
  auto hog = b.simulator->Create(Bytes{502} << 20, Process::On(kDevice), 0);
  ASSERT_TRUE(hog.ok());
  const AllocationId id = a.Create();  // 10 MiB are free, and no 32
  EXPECT_TRUE(a.session->CopyState().allocations.at(id).placed());
  EXPECT_LE(a.InUse(), Bytes{502 + 10} << 20);
  const AllocationId direct = a.Create();
  EXPECT_TRUE(direct);
  EXPECT_TRUE(b.simulator->Release(*hog).ok());
}

TEST_F(SlabTest, a_part_of_a_paused_slab_is_refused_to_importers_and_a_wrong_secret_opens_nothing) {
  const AllocationId id = a.Create();
  auto token = a.session->sharing().Export(id);
  auto forged = MakeTokenDescriptor(Token{SessionId{1}, id, *RandomSecret(), 0});
  EXPECT_EQ(b.session->sharing().Import(forged->get(), {}).status().code(), Code::kRefused);
  EXPECT_TRUE(a.session->Pause().ok());
  const auto refused = b.session->sharing().Import(token->get(), {});
  EXPECT_EQ(refused.status().code(), Code::kRefused);
  EXPECT_NE(refused.status().message().find("paused at its owner"), std::string::npos) << refused.status().message();
  EXPECT_TRUE(a.session->Resume().ok());
  EXPECT_TRUE(b.session->sharing().Import(token->get(), {}).ok());
}

// ---- the journal -------------------------------------------------------------------------------------------------------

TEST_F(SlabTest, a_snapshot_says_all_there_is_about_slabs) {
  std::byte* first = a.Place(a.Create());
  const AllocationId id = a.Create();
  std::byte* second = a.Place(id);
  const AllocationId as = Pass(id);
  b.Place(as);
  Pass(id);
  a.Place(a.Create(5 * k2M), 5 * k2M);
  EXPECT_EQ(At(second), At(first) + k2M);
  for (Process* p : {&a, &b}) {
    const State state = p->session->CopyState();
    const auto events = ToSnapshotEvents(state);
    ASSERT_TRUE(events.ok()) << events.status().message();
  }
}

}  // namespace
}  // namespace amem
