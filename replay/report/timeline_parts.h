// The allocations of a timeline: follows the events of a fold and writes its part of a SessionTimeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "replay/report/timeline.h"

namespace amem {

class AllocationCollector {
 public:
  AllocationCollector(SessionTimeline& out, std::size_t limit);
  void StartFrom(const State& state, std::uint64_t now_ns);
  void Take(const Event& event, const State& after);
  void Check(AllocationId id, const Event& event, const State& after);  // an allocation that the event may have ended
  void Finish(const State& state);

 private:
  using Live = std::map<AllocationId, AllocationRecord>;
  using Other = std::map<std::pair<AllocationKind, Address>, AllocationRecord>;
  struct Taker;

  AllocationRecord& Begin(AllocationId id, const Allocation& a, SequenceNumber seq, std::uint64_t now_ns);
  void Begin(AllocationKind kind, Address address, Bytes bytes, SequenceNumber seq, std::uint64_t now_ns, const CallSite& site,
             CommunicatorId communicator = {});
  void BecomeSlab(AllocationId id);
  void BecomePart(AllocationId id, const State& state);
  void Place(AllocationId id, Address address);
  void End(AllocationKind kind, Address address, const Event& event);
  void End(Live::iterator it, const Event& event);
  void Ended(AllocationRecord record, const Event& event);
  void Thin(std::size_t limit);

  SessionTimeline& out_;
  std::size_t limit_;
  Live live_;
  Other other_;  // memory without an id
  std::vector<AllocationRecord> ended_;
};

}  // namespace amem
