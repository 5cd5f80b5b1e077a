// Random correct jobs are stopped by LaunchStop through messages that come late: processes that hold their launches as the last
// order that has come to them says, and one who leads. All must come to stand, with every launched operation complete.
#include "statemachine/agreement/launches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <set>

namespace amem::agreement {
namespace {
namespace launches {

using Random = std::mt19937_64;
std::size_t Below(Random& random, std::size_t end) { return std::uniform_int_distribution<std::size_t>(0, end - 1)(random); }

struct One {  // a launch on one clock
  std::size_t communicator = 0;
  std::int32_t from = -1, to = -1;
};
struct Operation {
  std::vector<One> launches;  // none: a barrier that is not NCCL's
  std::size_t barrier = 0;
};

// A process with one rank, as ncclpatch counts and holds.
struct Process {
  std::map<std::size_t, std::int32_t> rank_in;  // of each communicator
  std::map<std::tuple<std::size_t, std::int32_t, std::int32_t>, std::uint64_t> launched;
  std::vector<Operation> program;
  std::size_t at = 0;
  bool waits = false;  // at a barrier
  LaunchOrder order;   // the last that came; version 0: launches are not held
  Counts targets;
  std::uint32_t let_go = 0;
  std::deque<LaunchOrder> on_the_way;

  [[nodiscard]] Counts Mine() const {
    Counts mine;
    for (const auto& [clock, count] : launched) {
      const auto [communicator, from, to] = clock;
      mine[from < 0 ? ClockOf(communicator + 1) : ClockOfPair(communicator + 1, from, to)] = count;
    }
    for (const LaunchTarget& target : order.targets) mine.try_emplace(ClockId{target.clock}, 0);
    return mine;
  }
  [[nodiscard]] bool MayGo() const {
    if (order.version == 0 || IsBehind({.launched = Mine(), .held = true}, targets)) return true;
    return !order.seats.empty() && order.seats.front().let_go > let_go;
  }
  void Take() {
    order = on_the_way.front();
    on_the_way.pop_front();
    for (const LaunchTarget& target : order.targets)
      targets[ClockId{target.clock}] = std::max(targets[ClockId{target.clock}], target.count);
  }
};

class World {
 public:
  explicit World(std::uint64_t seed) : random_(seed), processes_(2 + Below(random_, 4)) {
    const std::size_t count = processes_.size();
    for (std::size_t made = 1 + Below(random_, 4); made > 0; --made) {
      std::vector<std::size_t> members(count);
      for (std::size_t i = 0; i < count; ++i) members[i] = i;
      std::shuffle(members.begin(), members.end(), random_);
      members.resize(members_.empty() ? count : 2 + Below(random_, count - 1));
      for (std::size_t i = 0; i < members.size(); ++i) {
        processes_[members[i]].rank_in[members_.size()] = static_cast<std::int32_t>(i);
        processes_[members[i]].launched[{members_.size(), -1, -1}] = 0;
      }
      members_.push_back(members);
    }
    for (std::size_t operations = 5 + Below(random_, 40); operations > 0; --operations) {
      const std::size_t communicator = Below(random_, members_.size());
      const auto& members = members_[communicator];
      switch (Below(random_, 4)) {
        case 0: {
          barriers_.push_back(members.size());
          for (const std::size_t rank : members) processes_[rank].program.push_back({{}, barriers_.size() - 1});
          break;
        }
        case 1: {  // a group of sends and receives
          std::map<std::size_t, std::vector<One>> groups;
          for (std::size_t pairs = 1 + Below(random_, 3); pairs > 0; --pairs) {
            const std::size_t from = Below(random_, members.size()),
                              to = (from + 1 + Below(random_, members.size() - 1)) % members.size();
            const One one{communicator, static_cast<std::int32_t>(from), static_cast<std::int32_t>(to)};
            groups[members[from]].push_back(one);
            groups[members[to]].push_back(one);
          }
          for (auto& [rank, group] : groups) processes_[rank].program.push_back({group});
          break;
        }
        default:
          for (const std::size_t rank : members) processes_[rank].program.push_back({{{communicator}}});
      }
    }
  }

  // Empty, or what went wrong.
  std::string Run() {
    for (std::size_t moves = Below(random_, 60); moves > 0; --moves) MoveOne();
    LaunchStop stop;
    for (Process& process : processes_) process.on_the_way.push_back({.version = 1});
    std::vector<LaunchReading> known(processes_.size());
    for (std::size_t turn = 0, idle = 0; turn < 20'000; ++turn) {
      const bool moved = MoveOne();
      const std::size_t one = Below(random_, processes_.size());
      if (!processes_[one].on_the_way.empty() && Below(random_, 2) == 0) processes_[one].Take();
      const std::size_t heard = Below(random_, processes_.size());
      const LaunchReading now = Read(heard);
      idle = moved || now != known[heard] ? 0 : idle + 1;
      known[heard] = now;
      const auto next = stop.Consider(known, idle > 8 * processes_.size());
      if (next == LaunchStop::Next::kMissing) return "some are missing: " + stop.missing();
      if (next == LaunchStop::Next::kStopped) return Complete();
      if (next != LaunchStop::Next::kOrder) continue;
      idle = 0;
      for (std::size_t i = 0; i < processes_.size(); ++i) processes_[i].on_the_way.push_back(stop.OrderOf(i));
    }
    std::string why = "they do not come to stand";
    for (std::size_t i = 0; i < processes_.size(); ++i) why += "; " + stop.WhyNotAtTargets(i, known[i]);
    return why;
  }

 private:
  bool MoveOne() {
    std::vector<Process*> able;
    for (Process& process : processes_) {
      if (process.at == process.program.size()) continue;
      const Operation& next = process.program[process.at];
      if (next.launches.empty() ? !process.waits || barriers_[next.barrier] == 0 : process.MayGo()) able.push_back(&process);
    }
    if (able.empty()) return false;
    Process& process = *able[Below(random_, able.size())];
    const Operation& next = process.program[process.at];
    if (next.launches.empty()) {
      if (!process.waits) --barriers_[next.barrier];
      process.waits = barriers_[next.barrier] > 0;
      process.at += process.waits ? 0 : 1;
      return true;
    }
    if (process.order.version != 0 && !IsBehind({.launched = process.Mine(), .held = true}, process.targets)) ++process.let_go;
    for (const One& one : next.launches) {
      const std::uint64_t count = ++process.launched[{one.communicator, one.from, one.to}];
      std::uint64_t& target =
          process.targets[one.from < 0 ? ClockOf(one.communicator + 1) : ClockOfPair(one.communicator + 1, one.from, one.to)];
      if (process.order.version != 0) target = std::max(target, count);
    }
    ++process.at;
    return true;
  }
  [[nodiscard]] LaunchReading Read(std::size_t of) const {
    const Process& process = processes_[of];
    LaunchReading reading{.version = process.order.version};
    if (reading.version == 0) return reading;
    for (const auto& [clock, count] : process.launched) {
      const auto [communicator, from, to] = clock;
      reading.clocks.push_back({.communicator = communicator + 1,
                                .from = from,
                                .to = to,
                                .rank = process.rank_in.at(communicator),
                                .ranks = static_cast<std::int32_t>(members_[communicator].size()),
                                .device = 0,
                                .launched = count});
    }
    const bool launches = process.at < process.program.size() && !process.program[process.at].launches.empty();
    reading.seats.push_back({.device = 0, .held = launches && !process.MayGo(), .let_go = process.let_go});
    return reading;
  }
  [[nodiscard]] std::string Complete() const {
    for (std::size_t communicator = 0; communicator < members_.size(); ++communicator) {
      std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::uint64_t>> counts;
      for (const Process& process : processes_) {
        for (const auto& [clock, count] : process.launched)
          if (std::get<0>(clock) == communicator) counts[{std::get<1>(clock), std::get<2>(clock)}].push_back(count);
      }
      for (const auto& [pair, all] : counts) {
        const std::size_t members = pair.first < 0 ? members_[communicator].size() : 2;
        if (all.size() != members || std::ranges::count(all, all.front()) != static_cast<std::ptrdiff_t>(members))
          return "an operation was launched by some of its members only";
      }
    }
    for (const Process& process : processes_) {
      const bool launches = process.at < process.program.size() && !process.program[process.at].launches.empty();
      if (launches && process.MayGo()) return "a process may still launch";
    }
    return {};
  }

  Random random_;
  std::vector<Process> processes_;
  std::vector<std::vector<std::size_t>> members_;  // of each communicator, by rank
  std::vector<std::size_t> barriers_;
};

TEST(LaunchStop, random_jobs_come_to_stand_over_messages_that_come_late) {
  const char* const wanted = std::getenv("AMEM_CLOCK_JOBS");
  const std::uint64_t jobs = wanted == nullptr ? 1'000 : std::strtoull(wanted, nullptr, 10);
  for (std::uint64_t seed = 1; seed <= jobs; ++seed) ASSERT_EQ(World(seed).Run(), "") << "seed " << seed;
}

LaunchReading Reading(std::uint64_t version, std::int32_t rank, std::uint64_t launched, bool held = false) {
  LaunchReading reading{.version = version};
  reading.clocks.push_back({.communicator = 9, .rank = rank, .ranks = 2, .device = 0, .launched = launched});
  reading.seats.push_back({.device = 0, .held = held});
  return reading;
}

TEST(LaunchStop, a_rank_of_a_communicator_that_nobody_asks_is_missing) {
  LaunchStop stop;
  EXPECT_EQ(stop.Consider(std::vector{Reading(1, 0, 4)}, false), LaunchStop::Next::kOrder);
  EXPECT_EQ(stop.Consider(std::vector{Reading(2, 0, 4)}, false), LaunchStop::Next::kMissing);
  EXPECT_NE(stop.missing().find("only 1 of them"), std::string::npos) << stop.missing();
}

TEST(LaunchStop, a_rank_is_missing_also_where_one_of_those_asked_has_let_go_of_the_communicator) {
  for (const std::size_t ended : {0, 1}) {
    std::vector<LaunchReading> of_three{Reading(1, 0, 4), Reading(1, 1, 4)};
    for (LaunchReading& one : of_three) one.clocks.front().ranks = 3;
    of_three[ended].clocks.front().ended = true;
    EXPECT_EQ(LaunchStop::Incomplete(of_three).size(), 1U) << "rank " << ended << " has ended, and the other launches still";
    of_three[1 - ended].clocks.front().ended = true;
    EXPECT_TRUE(LaunchStop::Incomplete(of_three).empty()) << "none of those asked launches on it";
  }
}

TEST(LaunchStop, who_is_behind_is_named_with_its_communicator) {
  LaunchStop stop;
  const std::vector both{Reading(1, 0, 4), Reading(1, 1, 3)};
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kOrder);
  EXPECT_EQ(stop.WhyNotAtTargets(0, both[0]), "");
  EXPECT_EQ(stop.WhyNotAtTargets(1, both[1]), "has made 3 of 4 launches on communicator 0x9 (2 ranks)");
}

TEST(LaunchStop, a_rank_inside_a_call_does_not_stand_and_a_held_one_is_let_go_for_it) {
  LaunchStop stop;
  std::vector both{Reading(1, 0, 4, true), Reading(1, 1, 4)};
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kOrder);
  both = {Reading(2, 0, 4, true), Reading(2, 1, 4)};
  both[1].inside = "ncclCommDestroy";
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kWait);
  EXPECT_EQ(stop.Consider(both, true), LaunchStop::Next::kOrder);
  ASSERT_EQ(stop.OrderOf(0).seats.size(), 1U);
  EXPECT_EQ(stop.OrderOf(0).seats.front().let_go, 1U);
  // It is not needed any more: the allowance is taken back before anybody stands.
  both = {Reading(3, 0, 4, true), Reading(3, 1, 4)};
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kOrder);
  both = {Reading(4, 0, 4, true), Reading(4, 1, 4)};
  EXPECT_EQ(stop.OrderOf(0).seats.front().let_go, 0U);
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kStopped);
}

TEST(LaunchStop, a_rank_that_becomes_a_member_of_a_clock_is_told_a_target_that_others_know_already) {
  LaunchStop stop;
  std::vector both{Reading(1, 0, 4), Reading(1, 1, 4)};
  both[0].clocks.push_back({.communicator = 10, .rank = 0, .ranks = 2, .device = 0, .launched = 1});
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kOrder);
  for (LaunchReading& reading : both) reading.version = 2;
  both[1].clocks.push_back({.communicator = 10, .rank = 1, .ranks = 2, .device = 0, .launched = 0});  // it has been made there
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kOrder);
  EXPECT_EQ(stop.OrderOf(1).targets.size(), 2U);
}

TEST(LaunchStop, the_receiver_of_a_first_send_is_behind_although_it_has_no_count) {
  LaunchStop stop;
  std::vector both{Reading(1, 0, 4), Reading(1, 1, 4)};
  both[0].clocks.push_back({.communicator = 9, .from = 0, .to = 1, .rank = 0, .ranks = 2, .device = 0, .launched = 1});
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kOrder);
  EXPECT_EQ(stop.OrderOf(1).targets.size(), 2U);
  for (LaunchReading& reading : both) reading.version = 2;
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kWait);
  EXPECT_NE(stop.WhyNotAtTargets(1, both[1]), "");
}

// As after an abort, which leaves the ranks with different counts.
TEST(LaunchStop, a_communicator_that_ended_everywhere_keeps_nobody_and_one_that_lives_elsewhere_is_a_target) {
  LaunchStop stop;
  std::vector both{Reading(1, 0, 4), Reading(1, 1, 3)};
  const auto with_version = [&](std::uint64_t version) {
    for (LaunchReading& reading : both) reading.version = version;
    return both;
  };
  both[0].clocks.push_back({.communicator = 9, .from = 0, .to = 1, .rank = 0, .ranks = 2, .device = 0, .launched = 1});
  for (ClockReading& one : both[0].clocks) one.ended = true;
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kOrder);
  EXPECT_EQ(stop.OrderOf(0).targets, std::vector<LaunchTarget>());
  ASSERT_EQ(stop.OrderOf(1).targets.size(), 2U);
  EXPECT_EQ(stop.OrderOf(1).targets[0].count + stop.OrderOf(1).targets[1].count, 5U);
  EXPECT_EQ(stop.Consider(with_version(2), true), LaunchStop::Next::kWait);
  EXPECT_EQ(stop.WhyNotAtTargets(0, both[0]), "");
  EXPECT_EQ(stop.WhyNotAtTargets(1, both[1]), "has made 3 of 4 launches on communicator 0x9 (2 ranks)");
  both[1].clocks[0].ended = true;
  EXPECT_EQ(stop.Consider(both, false), LaunchStop::Next::kOrder);
  EXPECT_EQ(stop.Consider(with_version(3), false), LaunchStop::Next::kStopped);
  EXPECT_EQ(stop.WhyNotAtTargets(1, both[1]), "");
}

}  // namespace launches
}  // namespace
}  // namespace amem::agreement
