// Journals for the tests of the tool: a job of sessions that share memory, written event by event.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "statemachine/event.h"
#include "tests/replay/sizes.h"

namespace amem::test {

// The events of one session, numbered and timed as they are added: a millisecond apart on one common clock.
class Story {
 public:
  Story(std::uint64_t session, std::int32_t rank, std::uint64_t* clock) : session_(session), clock_(clock) {
    Then(SessionOpened{.session = session_,
                       .host = "alpha",
                       .pid = 1000 + rank,
                       .boot_id = "boot-1",
                       .amem_version = "0.1.0",
                       .driver_version = "sim",
                       .nccl_version = "2.28.9",
                       .gpu_uuids = {"GPU-" + std::to_string(rank)},
                       .group = 7,
                       .rank = rank,
                       .realtime_ns = 1'700'000'000'000'000'000,
                       .monotonic_ns = *clock + 1'000'000,
                       .layout = "direct",
                       .content = "preserve"});
  }

  SequenceNumber Then(EventBody body) {
    *clock_ += 1'000'000;
    events_.push_back({.seq = SequenceNumber{events_.size() + 1}, .time_ns = *clock_, .thread = 4711, .body = std::move(body)});
    return events_.back().seq;
  }

  AllocationId Create(Bytes bytes = 2 * kMiB) {
    const AllocationId id{next_++};
    Then(AllocationCreated{.allocation = id, .bytes = bytes, .properties = Properties(), .handle = DriverHandle{0xbeef}});
    return id;
  }
  Address Map(AllocationId id, Bytes bytes = 2 * kMiB) {
    const Address address{0x7f0000000000 + id.value * 0x10000000};
    Then(RangeReserved{.address = address, .bytes = bytes, .site = CallSite{{0x1234, 0x5678}}});
    Then(Mapped{.address = address, .bytes = bytes, .allocation = id});
    Then(AccessSet{.address = address, .bytes = bytes, .access = {{{LocationType::kDevice, 0}, 3}}});
    return address;
  }
  void Unmap(Address address, Bytes bytes = 2 * kMiB) {
    Then(Unmapped{.address = address, .bytes = bytes});
    Then(RangeFreed{.address = address, .bytes = bytes});
  }

  [[nodiscard]] SessionId id() const { return session_; }
  [[nodiscard]] AllocationId NextId() { return AllocationId{next_++}; }
  [[nodiscard]] std::vector<Event>& events() { return events_; }
  [[nodiscard]] const std::vector<Event>& events() const { return events_; }

  static AllocationProperties Properties() { return {.handle_types = 1, .location = {LocationType::kDevice, 0}}; }

 private:
  SessionId session_;
  std::uint64_t* clock_;
  std::vector<Event> events_;
  std::uint64_t next_ = 1;
};

// Two ranks; the second imports an allocation of the first, as NCCL does, and lets go of it.
struct Job {
  std::uint64_t clock = 1'000'000'000;
  Story owner{0xa11ce, 0, &clock};
  Story importer{0xb0b, 1, &clock};
  AllocationId shared, imported;
  Address place;

  void Share() {
    shared = owner.Create();
    owner.Map(shared);
    owner.Then(Exported{.allocation = shared});
    imported = importer.NextId();
    owner.Then(PeerConnected{.peer = importer.id(), .host = "alpha", .pid = 1001, .group = 7, .rank = 1});
    owner.Then(ReferenceAdded{.allocation = shared, .by = importer.id(), .as = imported});
    importer.Then(
        Imported{.allocation = imported, .remote = {owner.id(), shared}, .bytes = 2 * kMiB, .properties = Story::Properties()});
    place = importer.Map(imported);
  }
  void LetGo() {
    importer.Unmap(place);
    importer.Then(AllocationReleased{.allocation = imported});
    owner.Then(ReferenceDropped{.allocation = shared, .by = importer.id(), .as = imported});
  }
  void Close() {
    clock += 5'000'000'000;  // long after the last message
    importer.Then(SessionClosed{.reason = "exit"});
    owner.Then(SessionClosed{.reason = "exit"});
  }
};

}  // namespace amem::test
