// Random correct jobs are stopped at a random moment, twice, and let go: overlapping communicators, groups of sends and
// receives, waits for the device, and barriers that are not NCCL's. Each must come to stand with every launched operation
// complete.
#include "statemachine/agreement/clocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>

namespace amem::agreement {
namespace {
namespace clocks {

using Random = std::mt19937_64;
using Ranks = std::vector<std::size_t>;

std::size_t Below(Random& random, std::size_t end) { return std::uniform_int_distribution<std::size_t>(0, end - 1)(random); }
Ranks Some(Random& random, std::size_t of, std::size_t count) {
  Ranks all(of);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

struct Operation {
  enum class Kind : std::uint8_t { kLaunch, kAwaitDevice, kBarrier };
  Kind kind{};
  std::vector<ClockId> clocks;  // of a launch
  std::size_t barrier = 0;
};

// What is varied to see that the job would notice.
struct Fault {
  bool raises_no_target = false, lets_nobody_go = false, holds_who_is_behind = false;
};

class Job {
 public:
  Job(std::uint64_t seed, Fault fault) : random_(seed), fault_(fault), ranks_(2 + Below(random_, 5)), programs_(ranks_.size()) {
    Make();
    at_.resize(ranks_.size());
    waits_.resize(ranks_.size());
  }

  // Empty, or what went wrong.
  std::string Run() {
    for (int stop = 0; stop < 2; ++stop) {
      Go(false, Below(random_, steps_ + 1));
      targets_ = TargetsOf(ranks_);
      Go(true, kEver);
      if (const std::string wrong = WrongAtAStop(); !wrong.empty()) return wrong;
    }
    Go(false, kEver);
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
      if (at_[rank] < programs_[rank].size()) return "the job does not end";
    return {};
  }
  [[nodiscard]] std::size_t once_more() const { return once_more_; }

 private:
  static constexpr std::size_t kEver = std::size_t{1} << 40;

  ClockId Clock(const Ranks& members) {
    members_.push_back(members);
    for (const std::size_t rank : members) ranks_[rank].launched[{members_.size() - 1}] = 0;
    return {members_.size() - 1};
  }
  void Add(std::size_t rank, Operation step) {
    programs_[rank].push_back(std::move(step));
    ++steps_;
  }
  void Make() {
    const std::size_t count = ranks_.size();
    std::vector<ClockId> communicators{Clock(Some(random_, count, count))};
    for (std::size_t more = Below(random_, 5); more > 0; --more)
      communicators.push_back(Clock(Some(random_, count, 2 + Below(random_, count - 1))));
    std::map<std::pair<std::size_t, std::size_t>, ClockId> pairs;
    for (std::size_t operations = 5 + Below(random_, 56); operations > 0; --operations) {
      const std::size_t kind = Below(random_, 10);
      if (kind < 6) {
        const ClockId clock = communicators[Below(random_, communicators.size())];
        for (const std::size_t rank : members_[clock.value]) Add(rank, {Operation::Kind::kLaunch, {clock}});
      } else if (kind < 8) {
        std::map<std::size_t, std::vector<ClockId>> groups;
        for (std::size_t sends = 1 + Below(random_, 3); sends > 0; --sends) {
          const Ranks ends = Some(random_, count, 2);
          const auto pair = std::pair(ends[0], ends[1]);
          if (!pairs.contains(pair)) pairs[pair] = Clock(ends);
          for (const std::size_t rank : ends) groups[rank].push_back(pairs[pair]);
        }
        for (auto& [rank, clocks] : groups) Add(rank, {Operation::Kind::kLaunch, clocks});
      } else if (kind < 9) {
        Add(Below(random_, count), {Operation::Kind::kAwaitDevice, {}});
      } else {
        const Ranks some = Some(random_, count, 2 + Below(random_, count - 1));
        for (const std::size_t rank : some) Add(rank, {Operation::Kind::kBarrier, {}, barriers_.size()});
        barriers_.push_back(some.size());
      }
    }
  }

  bool IsComplete(std::size_t rank) const {  // all that it launched has all members
    return std::ranges::all_of(ranks_[rank].launched, [&](const auto& one) {
      return std::ranges::all_of(members_[one.first.value],
                                 [&](std::size_t member) { return ranks_[member].launched.at(one.first) >= one.second; });
    });
  }
  Launch Asks(std::size_t rank, bool still) const {
    const Launch answer = MayLaunch(ranks_, rank, targets_, still && !fault_.lets_nobody_go);
    return fault_.holds_who_is_behind && answer == Launch::kFollow && rank == 0 ? Launch::kHold : answer;
  }
  bool CanMove(std::size_t rank, bool stopping, bool still) {
    ranks_[rank].held = false;
    if (at_[rank] == programs_[rank].size()) return false;
    const Operation& step = programs_[rank][at_[rank]];
    if (step.kind == Operation::Kind::kAwaitDevice) return IsComplete(rank);
    if (step.kind == Operation::Kind::kBarrier) return !waits_[rank] || barriers_[step.barrier] == 0;
    ranks_[rank].held = stopping;
    return !stopping || Asks(rank, still) != Launch::kHold;
  }
  void Move(std::size_t rank, bool stopping, bool still) {
    const Operation& step = programs_[rank][at_[rank]];
    if (step.kind == Operation::Kind::kLaunch) {
      if (stopping && Asks(rank, still) == Launch::kOnceMore) ++ranks_[rank].let_go, ++once_more_;
      Counts unraised = targets_;
      Launched(ranks_[rank], step.clocks, stopping && !fault_.raises_no_target ? targets_ : unraised);
    } else if (step.kind == Operation::Kind::kBarrier) {
      if (!waits_[rank]) --barriers_[step.barrier];
      waits_[rank] = barriers_[step.barrier] > 0;
      if (waits_[rank]) return;
    }
    ++at_[rank];
  }
  void Go(bool stopping, std::size_t most) {
    for (std::size_t moves = 0; moves < most; ++moves) {
      Ranks able;
      bool still = false;
      const auto find = [&] {
        able.clear();
        for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
          if (CanMove(rank, stopping, still)) able.push_back(rank);
      };
      find();
      if (still = able.empty() && stopping; still) {
        for (std::size_t rank = 0; rank < ranks_.size(); ++rank) CanMove(rank, stopping, still);  // who is held is seen first
        find();
      }
      if (able.empty()) return;
      Move(able[Below(random_, able.size())], stopping, still);
    }
  }
  [[nodiscard]] std::string WrongAtAStop() const {
    for (std::size_t clock = 0; clock < members_.size(); ++clock)
      for (const std::size_t member : members_[clock])
        if (ranks_[member].launched.at({clock}) != ranks_[members_[clock][0]].launched.at({clock}))
          return "an operation was launched by some of its members only";
    return Behind(ranks_, targets_).empty() ? "" : "a rank is behind and held up";
  }

  Random random_;
  Fault fault_;
  std::vector<Launcher> ranks_;
  std::vector<std::vector<Operation>> programs_;
  std::vector<Ranks> members_;         // of each clock
  std::vector<std::size_t> barriers_;  // how many have not come to each
  std::vector<std::size_t> at_;
  std::vector<char> waits_;  // at a barrier
  Counts targets_;
  std::size_t steps_ = 0, once_more_ = 0;
};

std::uint64_t Jobs(std::uint64_t by_day) {
  const char* const wanted = std::getenv("AMEM_CLOCK_JOBS");
  return wanted == nullptr ? by_day : std::strtoull(wanted, nullptr, 10);
}

// The seeds from 1 on; the first that goes wrong, and why.
std::string FirstWrong(std::uint64_t jobs, Fault fault, std::size_t* let_go = nullptr) {
  for (std::uint64_t seed = 1; seed <= jobs; ++seed) {
    Job job(seed, fault);
    if (const std::string wrong = job.Run(); !wrong.empty()) return "seed " + std::to_string(seed) + ": " + wrong;
    if (let_go != nullptr) *let_go += job.once_more() > 0 ? 1 : 0;
  }
  return {};
}

TEST(Clocks, random_jobs_come_to_stand_with_every_launched_operation_complete) {
  std::size_t let_go = 0;
  EXPECT_EQ(FirstWrong(Jobs(2'000), {}, &let_go), "");
  EXPECT_GT(let_go, 0U) << "no job had a rank that waited outside of NCCL for one that was held";
}

TEST(Clocks, each_rule_is_needed) {
  EXPECT_NE(FirstWrong(2'000, {.raises_no_target = true}), "");
  EXPECT_NE(FirstWrong(2'000, {.lets_nobody_go = true}), "");
  EXPECT_NE(FirstWrong(2'000, {.holds_who_is_behind = true}), "");
}

TEST(Clocks, a_rank_that_ended_is_behind_nothing_and_is_never_let_go) {
  std::vector<Launcher> ranks(3);
  ranks[0].launched = {{{1}, 5}, {{2}, 0}};
  ranks[1].launched = {{{1}, 3}};
  ranks[2].launched = {{{1}, 4}, {{2}, 7}};
  ranks[1].ended = true;
  const Counts targets = TargetsOf(ranks);
  EXPECT_EQ(targets, (Counts{{{1}, 5}, {{2}, 7}}));
  EXPECT_EQ(Behind(ranks, targets), (std::vector<std::size_t>{0, 2}));
  ranks[0].launched[{2}] = 7;
  ranks[0].held = ranks[1].held = true;
  EXPECT_EQ(MayLaunch(ranks, 0, targets, false), Launch::kHold);
  EXPECT_EQ(MayLaunch(ranks, 0, targets, true), Launch::kOnceMore);
  EXPECT_EQ(MayLaunch(ranks, 1, targets, true), Launch::kHold);
  EXPECT_EQ(MayLaunch(ranks, 2, targets, true), Launch::kFollow);
}

TEST(Clocks, ranks_are_let_go_in_turn) {
  std::vector<Launcher> ranks(3);
  ranks[0].launched = ranks[1].launched = {{{1}, 2}};
  ranks[2].launched = {{{1}, 1}};
  ranks[0].held = ranks[1].held = true;
  Counts targets = TargetsOf(ranks);
  EXPECT_EQ(MayLaunch(ranks, 0, targets, true), Launch::kOnceMore);
  EXPECT_EQ(MayLaunch(ranks, 1, targets, true), Launch::kHold);
  ++ranks[0].let_go;
  EXPECT_EQ(MayLaunch(ranks, 0, targets, true), Launch::kHold);
  EXPECT_EQ(MayLaunch(ranks, 1, targets, true), Launch::kOnceMore);
  const ClockId clock{1};
  Launched(ranks[1], {&clock, 1}, targets);
  EXPECT_EQ(targets.at(clock), 3U);
  EXPECT_EQ(MayLaunch(ranks, 0, targets, false), Launch::kFollow);
}

}  // namespace clocks
}  // namespace
}  // namespace amem::agreement
