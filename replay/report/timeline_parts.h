// The parts of a timeline: pauses and resumes, allocations, memory held. Each follows the events of a fold by itself and writes
// its part of a SessionTimeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "replay/report/timeline.h"

namespace amem {

// The pauses and resumes of NCCL, or of one pool, in `cycles`.
class CycleCollector {
 public:
  CycleCollector(SessionTimeline& out, std::vector<CycleRecord>& cycles, std::size_t limit, std::string tag = {});
  void Take(const Event& event, const Held& held);  // `held` after the event
  void Finish();

 private:
  void Open(CycleKind kind, std::uint64_t now_ns, const Held& held);
  bool Arrives(const Event& event, const Held& held);
  void Begin(const Event& event, const CycleBegun& begun, const Held& held);
  void Step(CycleRecord& cycle, StepKind kind, std::uint64_t now_ns);
  static void Decide(CycleRecord& cycle, const PhaseDecided& decided, std::uint64_t now_ns);
  void End(CycleRecord& cycle, const Event& event, Outcome outcome);
  static void Vote(CycleRecord& cycle, const VoteCast& vote, std::uint64_t now_ns);
  void AddToStrip(const CycleRecord& cycle);
  void Thin(std::size_t limit);

  SessionTimeline& out_;
  std::vector<CycleRecord>& cycles_;
  std::size_t limit_;
  std::string tag_;  // empty: NCCL's
  bool open_ = false;
  std::uint64_t step_ns_ = 0;
  std::uint64_t strip_width_ = 1;  // so many pauses and resumes are one record of the strip
};

// What this session saw of others' processes, of its own threads and of refused launches.
class SeenCollector {
 public:
  explicit SeenCollector(SessionTimeline& out) : out_(out) {}
  void Take(const Event& event);

 private:
  void Add(SessionId of, bool dead, const Event& event, std::string text);
  SessionTimeline& out_;
  std::uint64_t threads_ns_ = 0;  // when the threads were seen
};

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

// Keeps the sums up to date with what each event touches; where that is not known for a kind, everything is summed up anew.
class HeldCounter {
 public:
  void Recount(const State& state) { held_ = HeldIn(state); }
  void Before(const Event& event, const State& before);
  void After(const State& after);
  [[nodiscard]] const std::vector<AllocationId>& touched() const { return touched_; }
  [[nodiscard]] const Held& held() const { return held_; }

 private:
  struct Looker;
  void Touch(AllocationId id, const State& state);
  void Count(AllocationId id, const State& state, bool add);
  void Add(MemoryClass as, Bytes bytes) { held_[static_cast<std::size_t>(as)] += bytes; }
  void Remove(MemoryClass as, Bytes bytes) { held_[static_cast<std::size_t>(as)] -= bytes; }

  Held held_{};
  std::vector<AllocationId> touched_;
  bool recount_ = false;
};

}  // namespace amem
