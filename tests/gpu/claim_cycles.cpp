// Results and memory over many cycles: bit-identical results, nothing that grows, and statistics that agree with the driver.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "tests/gpu/claims.h"

namespace amem::gpu {
namespace {

// AMem's account of a pause against the driver's: what it says it gave back must be free, and what it did not give back must
// have a reason. `freed_mib` is what cuMemGetInfo showed, over the devices of this process.
void CheckStatistics(Rank& rank, const Json& stats, double freed_mib, std::size_t devices, int cycle, const std::string& when) {
  if (!stats.is_object() || !stats.contains("released_bytes")) throw Failure(when + ": the statistics name no released bytes");
  const double released_mib = stats["released_bytes"].get<double>() / (1 << 20);
  // In the first cycle AMem may load a kernel or take scratch memory of its own, on each device; and the page tables of pinned
  // host memory lie there too, 8 bytes for 4 KiB.
  const double pinned_mib = stats.contains("contents") ? stats["contents"].value("pinned_bytes", 0.0) / (1 << 20) : 0.0;
  const double slack_mib = static_cast<double>(devices) * (cycle == 1 ? 64 + pinned_mib / 512 : 8);
  rank.Expect(freed_mib + slack_mib >= released_mib,
              Format("%s: AMem says it released %.1f MiB, cuMemGetInfo shows %.1f MiB more free", when.c_str(), released_mib,
                     freed_mib));
  double kept_mib = 0;
  if (const auto kept = stats.find("kept_bytes"); kept != stats.end() && kept->is_object()) {
    for (const auto& [reason, bytes] : kept->items()) kept_mib += bytes.get<double>() / (1 << 20);
  }
  const double backed_mib = stats.value("own_device_resident_bytes", 0.0) / (1 << 20);
  rank.Expect(std::abs(backed_mib - kept_mib) < 0.01,
              Format("%s: %.1f MiB stay on the device, %.1f MiB of them with a reason", when.c_str(), backed_mib, kept_mib));
  if (cycle <= 2) {
    rank.details[Format("cycle_%d", cycle)] = {{"cuMemGetInfo_freed_mib", freed_mib},
                                               {"amem_released_mib", released_mib},
                                               {"amem_kept", stats.value("kept_bytes", Json::object())},
                                               {"amem_legacy_kept_mib", stats.value("legacy_kept_bytes", 0.0) / (1 << 20)}};
  }
}

void ReferenceCycles(Rank& rank, bool single_process, int cycles) {
  Workload work = MakeWorkload(rank, single_process, false);
  rank.child.Barrier("buffers filled");
  const auto before = work.FreeBytes();
  rank.child.Barrier("memory read before start-up");
  work.CreateAll();
  work.RunAll();
  const auto reference = work.VerifyAll();
  rank.child.Barrier("first results");
  rank.details["results_checked_per_cycle"] = reference.size();
  std::vector<std::uint64_t> after_first;
  for (int cycle = 1; cycle <= cycles; ++cycle) {
    const std::string when = Format("in cycle %d", cycle);
    rank.child.Barrier("before the pause");
    const auto running = work.FreeBytes();
    rank.child.Barrier("memory read");
    rank.Pause(when);
    rank.child.Barrier("all paused");
    const auto paused = work.FreeBytes();
    const Json stats = Stats(rank);
    rank.child.Barrier("memory read while paused");
    rank.Resume(when);
    rank.child.Barrier("all resumed");
    ExpectSame(work, work.VerifyAll(), reference, when);
    rank.child.Barrier("results checked");
    const auto after = work.FreeBytes();
    if (cycle == 1) after_first = after;

    double freed = 0;
    double held = 0;
    double left = 0;
    for (std::size_t i = 0; i < running.size(); ++i) {
      freed += MibBetween(paused[i], running[i]);
      held += MibBetween(before[i], running[i]);
      left += MibBetween(before[i], paused[i]);
    }
    rank.Expect(freed > 0 || rank.options.gpus < 2, Format("%s: nothing was freed (%.1f MiB)", when.c_str(), freed));
    CheckStatistics(rank, stats, freed, before.size(), cycle, when);
    if (cycle == 1) {
      rank.details["held_mib"] = held;
      rank.details["freed_mib"] = freed;
      rank.details["left_while_paused_mib"] = left;
    }
    if (cycle == cycles) {
      rank.details["after_cycle_1_free_mib"] = MibBetween(after_first[0], 0);
      rank.details["after_last_cycle_free_mib"] = MibBetween(after[0], 0);
      for (std::size_t i = 0; i < after.size(); ++i)
        rank.Expect(after[i] == after_first[i],
                    Format("device %d has %.1f MiB free after cycle %d, %.1f MiB after cycle 1", work.lanes()[i].device.ordinal,
                           MibBetween(after[i], 0), cycle, MibBetween(after_first[i], 0)));
    }
  }
  work.DestroyAll();
}

void ShortCycles(Rank& rank, int cycles) {
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  for (int cycle = 1; cycle <= cycles; ++cycle) {
    const Freed freed = Cycle(rank, work, Format("in cycle %d", cycle));
    if (cycle == 1) rank.details["freed_mib"] = freed.LeastMib();
    rank.Expect(rank.options.gpus < 2 || freed.LeastMib() > 0, Format("cycle %d freed nothing", cycle));
    ExpectSame(work, work.Verify(world), reference, Format("after cycle %d", cycle));
  }
  work.Destroy(world);
}

// What a process holds that a cycle might forget to give back, by name.
using Account = std::map<std::string, std::uint64_t>;

std::uint64_t Entries(const char* directory) {
  const auto all = std::filesystem::directory_iterator(directory);
  return static_cast<std::uint64_t>(std::distance(begin(all), end(all)));
}

Account TakeAccount(const Rank& rank, const Workload& work) {
  Account account{{"descriptors", Entries("/proc/self/fd")}, {"threads", Entries("/proc/self/task")}};
  const auto free = work.FreeBytes();
  for (std::size_t i = 0; i < free.size(); ++i) account[Format("free bytes of lane %zu", i)] = free[i];
  const Json stats = Stats(rank);
  if (!stats.is_object()) return account;
  if (stats.contains("contents")) account["pinned bytes"] = stats["contents"].value("pinned_bytes", std::uint64_t{0});
  for (const char* key : {"address_ranges", "mappings", "own_allocations", "slab_bytes"})
    account[key] = stats.value(key, std::uint64_t{0});
  return account;
}

// The account once it has not changed for a while, or equals `expected`: connections close a moment after a cycle.
Account Settled(const Rank& rank, const Workload& work, const Account* expected) {
  Account account = TakeAccount(rank, work);
  double since = Now();
  const double until = since + 3;
  while (Now() < until && Now() < since + 0.3 && (expected == nullptr || account != *expected)) {
    const timespec nap{0, 10'000'000};
    nanosleep(&nap, nullptr);
    Account now = TakeAccount(rank, work);
    if (now != account) since = Now();
    account = std::move(now);
  }
  return account;
}

}  // namespace

void ReferenceWorkload(Rank& rank) { ReferenceCycles(rank, false, rank.options.cycles); }
void SingleProcess(Rank& rank) { ReferenceCycles(rank, true, std::min(rank.options.cycles, 5)); }
void Legacy(Rank& rank) { ReferenceCycles(rank, false, std::min(rank.options.cycles, 3)); }
void BoundNow(Rank& rank) { ShortCycles(rank, 2); }
void Preloaded(Rank& rank) { ShortCycles(rank, 2); }

// Communicators are created, used and destroyed over and over; the memory held must not grow.
void Churn(Rank& rank) {
  Workload work = MakeWorkload(rank);
  const int rounds = rank.options.churn_rounds, together = rank.options.churn;
  std::vector<std::uint64_t> first, last;
  double early_s = 1e9, last_s = 0;  // the best of rounds 2 to 4, and the last one without a cycle; shown, not judged
  for (int round = 0; round < rounds; ++round) {
    const double start = Now();
    std::vector<std::string> names;
    for (int i = 0; i < together; ++i) names.push_back(Format("round %d, communicator %d", round, i));
    std::vector<Communicator> all = work.CreateMany(names, std::vector<std::vector<int>>(names.size(), World(rank)));
    std::vector<std::vector<std::uint64_t>> references;
    for (Communicator& one : all) references.push_back(work.Verify(one));
    if (round % 5 == 4) Cycle(rank, work, Format("round %d", round));
    for (std::size_t i = 0; i < all.size(); ++i) ExpectSame(work, work.Verify(all[i]), references[i], "the second time");
    for (Communicator& one : all) work.Destroy(one);
    rank.child.Barrier("all destroyed");
    last = work.FreeBytes();
    if (round == 4)
      first = last;  // after the first cycle, as a pause keeps memory of its own, such as page tables of pinned memory
    if (round >= 1 && round < 4) early_s = std::min(early_s, Now() - start);
    if (round % 5 != 4) last_s = Now() - start;
    rank.child.Barrier("memory read");
  }
  rank.details["rounds"] = rounds;
  rank.details["communicators"] = together;
  rank.details["seconds_of_an_early_round"] = early_s;
  rank.details["seconds_of_the_last_round"] = last_s;
  for (std::size_t i = 0; i < first.size(); ++i) {
    double grown = MibBetween(first[i], last[i]);
    // A slab goes back when its last importer has let go of it, which may come a moment later.
    for (const double until = Now() + 3; grown >= 4 && Now() < until; grown = MibBetween(first[i], work.FreeBytes()[i])) {
      const timespec nap{0, 10'000'000};
      nanosleep(&nap, nullptr);
    }
    rank.details["grown_mib"] = grown;
    rank.Expect(grown < 4, Format("after %d rounds of %d communicators %.0f MiB more are held than after the fifth", rounds,
                                  together, grown));
  }
  rank.child.Barrier("memory compared");
}

void ManyCycles(Rank& rank) {
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  const int cycles = rank.options.leak_cycles, first = std::min(5, cycles / 2);
  Account before;
  const double start = Now();
  for (int cycle = 1; cycle <= cycles; ++cycle) {
    const std::string when = Format("in cycle %d", cycle);
    rank.Pause(when);
    rank.Resume(when);
    if (cycle <= first || cycle % 10 == 0 || cycle == cycles) ExpectSame(work, work.Verify(world), reference, when);
    rank.child.Stage("after cycle " + std::to_string(cycle));
    rank.child.Barrier("cycle done");
    if (cycle != first) continue;
    before = Settled(rank, work, nullptr);
    rank.child.Barrier("account taken");
  }
  rank.details["cycles"] = cycles;
  rank.details["ms_per_cycle"] = 1000 * (Now() - start) / cycles;
  const Account after = Settled(rank, work, &before);
  rank.details["account"] = after;
  for (const auto& [what, value] : after) {
    if (value == before[what]) continue;
    // A background thread that has ended is no leak.
    const bool fewer = value < before[what] && !what.starts_with("free bytes");
    const std::string text =
        Format("%s: %llu after cycle %d, %llu after cycle %d", what.c_str(), static_cast<unsigned long long>(value), cycles,
               static_cast<unsigned long long>(before[what]), first);
    rank.Expect(fewer, text);
    rank.details["fewer"].push_back(text);
  }
  rank.child.Barrier("accounts compared");
  work.Destroy(world);
}

}  // namespace amem::gpu
