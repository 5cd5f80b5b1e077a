// amem-gpu-test: claims about a patched libnccl on real GPUs. Each test is a job of its own processes with a time limit of its
// own, and passes, FAILs or is SKIPPED (waived) with a reason. Exit code 0 only when nothing failed.
#include <dlfcn.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>
#include <thread>

#include "tests/gpu/workload.h"

namespace amem::gpu {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string nccl, stock, amem_lib, json, log;
  int gpus = 0, cycles = 20, leak_cycles = 200, churn = 3, churn_rounds = 20;
  double budget_s = 0;
  bool verbose = false, list = false;
  std::vector<std::string> only;
  std::vector<std::size_t> elements = kReferenceSizes;
  std::string ops = "all";
  std::string golden, pack;
  std::string child_test;  // what a rank is to run
};

// Nothing: said what is wrong, or --help was answered; `code` is the exit code then.
std::optional<Options> Parse(int argc, char** argv, int& code) {
  Options options;
  std::string churn = "3x20";
  CLI::App app(
      "Claims about a patched libnccl on real GPUs: each test is a job of processes of its own, with a time limit of its own");
  app.footer(
      "Exit codes: 0 nothing failed, 1 something failed, 2 wrong usage or NCCL_NVLS_ENABLE is not 0, 77 everything was "
      "skipped");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--nccl", options.nccl, "libnccl as amem-patch wrote it")->type_name("PATH");
  app.add_option("--stock", options.stock, "An unpatched libnccl, and")->type_name("PATH");
  app.add_option("--amem-lib", options.amem_lib, "libamem_nccl.so, for the test that preloads it; without them it is skipped")
      ->type_name("PATH");
  app.add_option("--gpus", options.gpus, "Default: all")->check(CLI::Range(0, kMaxProcesses))->type_name("N");
  app.add_option("--cycles", options.cycles, "Of the reference workload")
      ->check(CLI::Range(1, 1'000'000))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--leak-cycles", options.leak_cycles, "Of the test of two hundred cycles")
      ->check(CLI::Range(2, 1'000'000))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--churn", churn, "N communicators created, used and destroyed R times over")
      ->type_name("NxR")
      ->capture_default_str();
  app.add_option("--only", options.only, "Tests whose names contain one of these")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("A,B,...");
  app.add_flag("--list", options.list, "Names of the tests");
  app.add_option("--json", options.json, "Results for programs")->type_name("FILE");
  app.add_option("--log", options.log, "Output of all ranks is appended there")->type_name("FILE");
  CLI::Option* golden =
      app.add_option("--golden", options.golden, "Only the golden jobs: small ones whose journals go to DIR/NAME, by")
          ->type_name("DIR");
  CLI::Option* pack = app.add_option("--pack", options.pack, "COMMAND JOURNALS DIR/NAME, at the moment that they are about")
                          ->type_name("COMMAND");
  golden->needs(pack);
  pack->needs(golden);
  app.add_option("--budget", options.budget_s, "Tests that would end later than so many seconds from now are skipped")
      ->type_name("S");
  app.add_option("--elements", options.elements, "Message sizes in floats; default 256,65536,1048576,33554432")
      ->delimiter(',')
      ->check(CLI::Range(std::size_t{kMaxProcesses}, std::size_t{1} << 40))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("A,B,...");
  app.add_option("--ops", options.ops, "all, reference, or of all-reduce,all-gather,reduce-scatter,all-to-all,broadcast,ring")
      ->check([](const std::string& ops) { return ParseOps(ops) ? "" : ops + " is unknown"; })
      ->type_name("LIST")
      ->capture_default_str();
  app.add_flag("--verbose", options.verbose, "Show the output of the ranks");
  app.add_option("--run", options.child_test, "What a rank is to run")->group("");
  try {
    app.parse(argc, argv);
    if (options.list) return options;
    if (options.nccl.empty()) throw CLI::RequiredError("--nccl");
    const bool pair = sscanf(churn.c_str(), "%dx%d", &options.churn, &options.churn_rounds) == 2;
    if (!pair || options.churn < 1 || options.churn_rounds < 6)
      throw CLI::ValidationError("--churn", churn + " is not NxR with at least 1x6");
  } catch (const CLI::ParseError& why) {
    code = app.exit(why) == 0 ? kExitPass : kExitUsage;
    return std::nullopt;
  }
  return options;
}

// ---- what the tests share ------------------------------------------------------------------------------------------------

// Where one rank is killed, by amem_kill_at.so.
struct KillPoint {
  bool in_pause = false;
  const char* call = "";          // before this driver call of AMem's:
  bool last = false;              // the last of them, else the first
  unsigned long after_sends = 0;  // not before it, but when this message after it is to be sent
  double share = 0;               // of the time that a whole pause or resume takes; used where calls cannot be counted
  int victim = 0;                 // below zero: counted from the end
  bool once_more = false;         // the others resume without it before they clean up, else they clean up at once
  [[nodiscard]] int Victim(int processes) const { return victim < 0 ? processes + victim : std::min(victim, processes - 1); }
};

struct Rank {
  const Options& options;
  Child& child;
  const Nccl& nccl;
  Amem amem;
  const KillPoint* kill = nullptr;
  Json details = Json::object();  // shown beside the result

  void Expect(bool holds, const std::string& otherwise) const {
    if (!holds) throw Failure(otherwise);
  }
  void Pause(const std::string& when = "") {
    child.Stage("ncclPause " + when);
    amem.Check(amem.Pause(nullptr), nccl, "ncclPause " + when);
  }
  void Resume(const std::string& when = "") {
    child.Stage("ncclResume " + when);
    amem.Check(amem.Resume(nullptr), nccl, "ncclResume " + when);
  }
};

double MibBetween(std::uint64_t more, std::uint64_t less) {
  return (static_cast<double>(more) - static_cast<double>(less)) / (1 << 20);
}

Workload MakeWorkload(Rank& rank, bool single_process = false, bool small = true) {
  WorkloadOptions options;
  options.gpus = rank.options.gpus;
  options.single_process = single_process;
  options.ops = *ParseOps(rank.options.ops);
  options.collective_limit_s = 30;
  options.sizes = rank.options.elements;
  // LL, LL128 and a little of Simple are enough where a test is not about the protocols.
  if (small) {
    std::erase_if(options.sizes, [](std::size_t size) { return size > 1'048'576; });
    if (options.sizes.empty()) options.sizes = {256};
  }
  return Workload(rank.child, rank.nccl, options);
}

std::vector<int> World(const Rank& rank) {
  std::vector<int> world(static_cast<std::size_t>(rank.options.gpus));
  std::iota(world.begin(), world.end(), 0);
  return world;
}

void ExpectSame(const Workload& work, const std::vector<std::uint64_t>& now, const std::vector<std::uint64_t>& before,
                const std::string& when) {
  const std::string difference = Difference(now, before, work.names());
  if (!difference.empty()) throw Failure(when + ": " + difference);
}

struct Freed {
  std::vector<std::uint64_t> running, paused;
  [[nodiscard]] double LeastMib() const {
    double least = 1e18;
    for (std::size_t i = 0; i < running.size(); ++i) least = std::min(least, MibBetween(paused[i], running[i]));
    return least;
  }
};

// Pause, look at the memory with every rank paused, resume. Collective.
Freed Cycle(Rank& rank, const Workload& work, const std::string& when) {
  Freed freed;
  rank.child.Barrier("before the pause");
  freed.running = work.FreeBytes();
  rank.child.Barrier("memory read");
  rank.Pause(when);
  rank.child.Barrier("all paused");
  freed.paused = work.FreeBytes();
  rank.child.Barrier("memory read while paused");
  rank.Resume(when);
  rank.child.Barrier("all resumed");
  return freed;
}

Json Stats(const Rank& rank) {
  const std::string text = rank.amem.StatsJson();
  if (text.empty()) return nullptr;
  Json parsed = Json::parse(text, nullptr, false);
  if (parsed.is_discarded()) throw Failure("amem_stats_json gives no JSON: " + text.substr(0, 300));
  return parsed;
}

// AMem's account of a pause against the driver's: what it says it gave back must be free, and what it did not give back must
// have a reason. `freed_mib` is what cuMemGetInfo showed, over the devices of this process.
void CheckStatistics(Rank& rank, const Json& stats, double freed_mib, std::size_t devices, int cycle, const std::string& when) {
  if (!stats.is_object() || !stats.contains("released_bytes")) {
    rank.details["statistics"] = "name no released bytes; cuMemGetInfo alone was looked at";
    return;
  }
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

// ---- tests ---------------------------------------------------------------------------------------------------------------

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

void ReferenceWorkload(Rank& rank) { ReferenceCycles(rank, false, rank.options.cycles); }
void SingleProcess(Rank& rank) { ReferenceCycles(rank, true, std::min(rank.options.cycles, 5)); }
void Legacy(Rank& rank) { ReferenceCycles(rank, false, std::min(rank.options.cycles, 3)); }

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
void BoundNow(Rank& rank) { ShortCycles(rank, 2); }
void Preloaded(Rank& rank) { ShortCycles(rank, 2); }

void Communicators(Rank& rank) {
  if (rank.nccl.CommSplit == nullptr) throw Skip("this libnccl has no ncclCommSplit");
  Workload work = MakeWorkload(rank);
  Communicator first = work.Create("first", World(rank));
  Communicator doomed = work.Create("doomed", World(rank));
  Communicator parts = work.Split(first, "parts of first", 2);
  const auto of_first = work.Verify(first);
  work.Verify(doomed);
  const auto of_parts = work.Verify(parts);
  work.Destroy(doomed);
  rank.child.Barrier("one destroyed before the first cycle");
  Cycle(rank, work, "in cycle 1");
  ExpectSame(work, work.Verify(first), of_first, "first, after cycle 1");
  ExpectSame(work, work.Verify(parts), of_parts, "its split, after cycle 1");

  Communicator second = work.Create("second", World(rank));
  Communicator late_split = work.Split(second, "split of second", 2);
  const auto of_second = work.Verify(second);
  const auto of_late_split = work.Verify(late_split);
  work.Abort(second);
  rank.child.Barrier("one aborted between cycles");
  Cycle(rank, work, "in cycle 2");
  ExpectSame(work, work.Verify(first), of_first, "first, after cycle 2");
  ExpectSame(work, work.Verify(late_split), of_late_split, "split of an aborted communicator, after cycle 2");
  ExpectSame(work, of_second, of_first, "a communicator made between cycles");

  Communicator from_resumed = work.Split(first, "split after two cycles", 1);
  ExpectSame(work, work.Verify(from_resumed), of_first, "a split of a communicator that was paused twice");
  work.Abort(from_resumed);
  work.Destroy(parts);
  work.Destroy(late_split);
  work.Destroy(first);
  rank.child.Barrier("all gone");
  const Freed empty = Cycle(rank, work, "with no communicator left");
  rank.details["freed_without_communicators_mib"] = empty.LeastMib();
  Communicator last = work.Create("last", World(rank));
  ExpectSame(work, work.Verify(last), of_first, "a communicator made after all cycles");
  Cycle(rank, work, "at the end");
  ExpectSame(work, work.Verify(last), of_first, "the last communicator, after a cycle");
  work.Destroy(last);
}

void UserMemory(Rank& rank) {
  if (rank.nccl.MemAlloc == nullptr || rank.nccl.MemFree == nullptr) throw Skip("this libnccl has no ncclMemAlloc");
  const Cuda& cuda = Cuda::Get();
  Workload work = MakeWorkload(rank);
  const Lane& lane = work.lanes()[0];
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  const double without = Cycle(rank, work, "without user memory").LeastMib();
  const std::size_t most = *std::max_element(work.options().sizes.begin(), work.options().sizes.end());
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  void* memory = nullptr;
  rank.nccl.Check(rank.nccl.MemAlloc(&memory, kBytes), "ncclMemAlloc of 64 MiB");
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  const std::size_t bytes = std::min(kBytes, most * 4);
  auto* values = static_cast<float*>(lane.host);
  for (std::size_t i = 0; i < bytes / 4; ++i) values[i] = Value(lane.world_rank + 100, i);
  const std::uint64_t sum = Checksum(values, bytes);
  cuda.Check(cuda.MemsetD8Async(address, 0x5A, kBytes, lane.stream), "filling user memory");
  cuda.Check(cuda.MemcpyHtoDAsync(address, values, bytes, lane.stream), "copying into user memory");
  work.Wait("filling user memory");
  const auto read = [&](const std::string& when) {
    std::memset(lane.host, 0, bytes);
    cuda.Check(cuda.MemcpyDtoHAsync(lane.host, address, bytes, lane.stream), "reading user memory " + when);
    work.Wait("reading user memory " + when);
    rank.Expect(Checksum(lane.host, bytes) == sum, "the contents of ncclMemAlloc'd memory changed " + when);
    cuda.Check(cuda.MemcpyDtoHAsync(lane.host, address + kBytes - 256, 256, lane.stream), "reading its end");
    work.Wait("reading the end of user memory");
    const auto* end = static_cast<const unsigned char*>(lane.host);
    if (bytes < kBytes)
      rank.Expect(std::all_of(end, end + 256, [](unsigned char byte) { return byte == 0x5A; }),
                  "the end of user memory changed " + when);
  };
  read("before the pause");
  const double with = Cycle(rank, work, "with user memory").LeastMib();
  rank.details["user_mib"] = kBytes >> 20;
  rank.details["freed_more_with_it_mib"] = with - without;
  read("after the resume");
  // It must also still be memory that NCCL can use.
  const std::size_t count = std::min<std::size_t>(65'536, most);
  rank.nccl.Check(rank.nccl.AllReduce(memory, reinterpret_cast<void*>(lane.receive), count, kNcclFloat32, kNcclSum,
                                      world.handles[0], lane.stream),
                  "all-reduce out of user memory");
  work.Wait("all-reduce out of user memory", &world);
  read("after a collective that reads it");
  cuda.Check(cuda.MemcpyHtoDAsync(address, lane.host, 4, lane.stream), "writing user memory");
  ExpectSame(work, work.Verify(world), reference, "after the cycle");
  rank.nccl.Check(rank.nccl.MemFree(memory), "ncclMemFree");
  Cycle(rank, work, "with user memory freed");
  ExpectSame(work, work.Verify(world), reference, "with user memory freed");
  work.Destroy(world);
}

void RefusedWhilePaused(Rank& rank) {
  const Cuda& cuda = Cuda::Get();
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  rank.Pause();
  rank.child.Barrier("all paused");
  for (const Op op : {Op::kAllReduce, Op::kAllToAll}) {
    if (std::find(work.options().ops.begin(), work.options().ops.end(), op) == work.options().ops.end()) continue;
    rank.child.Stage(Format("trying %s while paused", OpText(op)));
    const ncclResult_t result = work.Launch(world, op, work.options().sizes.front());
    rank.Expect(result != 0 || rank.options.gpus < 2, Format("%s while paused was accepted", OpText(op)));
    rank.details[std::string(OpText(op)) + " while paused"] = rank.nccl.Describe(result);
  }
  work.lanes()[0].device.MakeCurrent();
  cuda.Check(cuda.CtxSynchronize(), "cuCtxSynchronize after the refused launches: the GPU must not have faulted");
  cuda.Check(cuda.MemsetD8Async(work.lanes()[0].receive, 0, 4096, work.lanes()[0].stream), "using own memory while paused");
  work.Wait("using own memory while paused");
  rank.child.Barrier("refused");
  rank.Resume();
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a refused launch and the resume");
  Cycle(rank, work, "once more");
  ExpectSame(work, work.Verify(world), reference, "one cycle later");
  work.Destroy(world);
}

void Idempotent(Rank& rank) {
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  const auto running = work.FreeBytes();
  rank.Resume("when nothing is paused");
  rank.child.Barrier("resumed while running");
  rank.Expect(work.FreeBytes() == running, "ncclResume of a running process changed its memory");
  ExpectSame(work, work.Verify(world), reference, "after ncclResume of a running process");
  rank.child.Barrier("checked");
  rank.Pause("the first time");
  rank.child.Barrier("all paused");
  const auto paused = work.FreeBytes();
  rank.child.Barrier("memory read");
  rank.Pause("the second time");
  rank.child.Barrier("all paused again");
  rank.Expect(work.FreeBytes() == paused, "a second ncclPause changed the memory");
  rank.child.Barrier("memory read");
  rank.Resume("the first time");
  rank.child.Barrier("all resumed");
  rank.Resume("the second time");
  rank.child.Barrier("all resumed again");
  ExpectSame(work, work.Verify(world), reference, "after two pauses and two resumes");
  // The calls of the original plugin that PyNccl wrappers also make.
  if (rank.amem.MemStats != nullptr) rank.amem.Check(rank.amem.MemStats(), rank.nccl, "ncclMemStats");
  if (rank.amem.GetGroupId != nullptr) {
    int group = -1;
    rank.amem.Check(rank.amem.GetGroupId(&group), rank.nccl, "ncclGetGroupID");
    rank.details["group"] = group;
  }
  work.Destroy(world);
}

void BeforeAnyCommunicator(Rank& rank) {
  Workload work = MakeWorkload(rank);
  rank.Pause("before NCCL was used");
  rank.Resume("before NCCL was used");
  rank.child.Barrier("paused and resumed with nothing");
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  Cycle(rank, work, "after first use");
  ExpectSame(work, work.Verify(world), reference, "after a cycle");
  work.Destroy(world);
}

void WorkInFlight(Rank& rank) {
  Workload work = MakeWorkload(rank, false, false);
  Communicator world = work.Create("world", World(rank));
  const std::size_t count = work.options().sizes.back();
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  work.Poison(world, Op::kAllReduce, count);
  for (int i = 0; i < 30; ++i) rank.nccl.Check(work.Launch(world, Op::kAllReduce, count), "all-reduce before the pause");
  // Work is still running. AMem may wait for it, or refuse; it must not pull the memory away under it.
  const ncclResult_t paused = rank.amem.Pause(nullptr);
  const double worst = rank.child.Maximum(paused != 0 ? 1 : 0);
  rank.details["ncclPause with work in flight"] = paused == 0 ? "waited" : "refused: " + rank.amem.LastError();
  if (paused == 0) rank.Resume("after a pause with work in flight");
  rank.child.Barrier("resumed");
  rank.Expect((paused != 0) == (worst != 0), "some ranks paused and others refused: " + rank.amem.LastError());
  work.Check(world, Op::kAllReduce, count);
  ExpectSame(work, work.Verify(world), reference, "after a pause with work in flight");
  Cycle(rank, work, "with idle streams");
  ExpectSame(work, work.Verify(world), reference, "after a cycle with idle streams");
  work.Destroy(world);
}

// Whether all that was launched has ended by itself, after five seconds at most.
bool Ends(Workload& work) {
  const Lane& lane = work.lanes()[0];
  lane.device.MakeCurrent();
  for (const double until = Now() + 5; Now() < until;) {
    if (Cuda::Get().StreamQuery(lane.stream) == CUDA_SUCCESS) return true;
    const timespec nap{0, 200'000};
    nanosleep(&nap, nullptr);
  }
  return false;
}

// A small send ends without its receive: until then the message is nowhere but in NCCL's buffers.
void MessageOnItsWay(Rank& rank) {
  if (rank.nccl.Send == nullptr || rank.nccl.Recv == nullptr) throw Skip("this libnccl has no ncclSend");
  const Cuda& cuda = Cuda::Get();
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const Lane& lane = work.lanes()[0];
  const bool sender = rank.child.rank() == 0, receiver = rank.child.rank() == 1;
  const std::size_t largest = std::min<std::size_t>(65'536, work.options().sizes.back());
  const auto send = [&](std::size_t count) {
    if (!sender) return;
    rank.nccl.Check(rank.nccl.Send(reinterpret_cast<void*>(lane.send), count, kNcclFloat32, 1, world.handles[0], lane.stream),
                    Format("ncclSend of %zu floats", count));
  };
  const auto receive = [&](std::size_t count) {
    if (!receiver) return;
    rank.nccl.Check(
        rank.nccl.Recv(reinterpret_cast<void*>(lane.receive), count, kNcclFloat32, 0, world.handles[0], lane.stream),
        Format("ncclRecv of %zu floats", count));
  };
  lane.device.MakeCurrent();
  send(256);  // connects the two
  receive(256);
  work.Wait("the first message", &world);
  for (const std::size_t count : {std::size_t{256}, largest}) {
    rank.child.Barrier("ready to send");
    send(count);
    const bool under_way = rank.child.Maximum(Ends(work) ? 0 : 1) == 0;
    rank.details[Format("%zu floats", count)] =
        under_way ? "sent before the pause, received after it" : "a send waits for its receive";
    rank.child.Barrier("sent");
    if (under_way) Cycle(rank, work, Format("with %zu floats on their way", count));
    if (receiver) cuda.Check(cuda.MemsetD8Async(lane.receive, 0xEE, count * 4, lane.stream), "cuMemsetD8Async");
    receive(count);
    work.Wait(Format("a message of %zu floats", count), &world);
    if (receiver) {
      std::vector<float> got(count);
      cuda.Check(cuda.MemcpyDtoHAsync(lane.host, lane.receive, count * 4, lane.stream), "cuMemcpyDtoHAsync");
      work.Wait("reading the message");
      std::memcpy(got.data(), lane.host, count * 4);
      for (std::size_t i = 0; i < count; ++i)
        rank.Expect(got[i] == Value(0, i),
                    Format("float %zu of %zu that were on their way is %g, not %g", i, count, got[i], Value(0, i)));
    }
    rank.child.Barrier("received");
    if (!under_way) throw Skip(Format("here a send of %zu floats waits for its receive", count));
  }
  work.Destroy(world);
}

void OtherThread(Rank& rank) {
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  // A thread that never touched CUDA, as a Python server's are. The reason of a failure is the thread's own.
  const auto elsewhere = [&](ncclResult_t (*call)(ncclComm_t*), const std::string& what) {
    rank.child.Stage(what);
    std::string failure;
    std::thread([&] {
      try {
        rank.amem.Check(call(nullptr), rank.nccl, what);
      } catch (const Failure& thrown) {
        failure = thrown.what();
      }
    }).join();
    rank.Expect(failure.empty(), failure);
  };
  elsewhere(rank.amem.Pause, "ncclPause in another thread");
  rank.child.Barrier("all paused");
  elsewhere(rank.amem.Resume, "ncclResume in another thread");
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a cycle made by another thread");
  work.Destroy(world);
}

void LateRank(Rank& rank) {
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  const bool late = rank.child.rank() == rank.child.processes() - 1;
  if (late) sleep(2);
  rank.Pause("with one rank two seconds late");
  if (late) sleep(2);
  rank.Resume("with one rank two seconds late");
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a cycle with a late rank");
  work.Destroy(world);
}

void AbsentRank(Rank& rank) {
  if (rank.child.processes() < 2) throw Skip("needs two processes");
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  const bool absent = rank.child.rank() == rank.child.processes() - 1;
  if (!absent) {
    rank.child.Stage("ncclPause while one rank stays away");
    const double start = Now();
    const ncclResult_t result = rank.amem.Pause(nullptr);
    const double waited = Now() - start;
    rank.Expect(result != 0, "ncclPause succeeded although a rank with shared memory did not come");
    rank.Expect(waited < 20, Format("AMEM_TIMEOUT_MS is 3000, ncclPause took %.1f s", waited));
    rank.details["after_s"] = waited;
    rank.details["message"] = rank.amem.LastError();
  }
  rank.child.Barrier("the pause failed");
  ExpectSame(work, work.Verify(world), reference, "after a pause that failed");
  Cycle(rank, work, "with everybody");
  ExpectSame(work, work.Verify(world), reference, "after a cycle with everybody");
  work.Destroy(world);
}

// Somebody takes the memory of one device while all are paused.
void OutOfMemory(Rank& rank) {
  const Cuda& cuda = Cuda::Get();
  Workload work = MakeWorkload(rank, false, false);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  rank.Pause();
  rank.child.Barrier("all paused");
  const bool culprit = rank.child.rank() == rank.child.processes() - 1;
  CUdeviceptr hog = 0;
  if (culprit) {
    work.lanes()[0].device.MakeCurrent();
    std::size_t free = 0, total = 0;
    cuda.Check(cuda.MemGetInfo(&free, &total), "cuMemGetInfo");
    cuda.Check(cuda.MemAlloc(&hog, free - (std::size_t{64} << 20)), "cuMemAlloc of all but 64 MiB");
  }
  rank.child.Barrier("one device is full");
  for (int attempt = 0; attempt < 2; ++attempt) {
    rank.child.Stage("ncclResume with one device full");
    const double start = Now();
    const ncclResult_t result = rank.amem.Resume(nullptr);
    const double seconds = Now() - start;
    const std::string message = rank.amem.LastError();
    rank.Expect(result != 0, "ncclResume succeeded although one device has no memory");
    rank.Expect(seconds < 1, Format("ncclResume took %.2f s to fail", seconds));
    rank.Expect(message.find(Format("rank %d", rank.child.processes() - 1)) != std::string::npos &&
                    message.find("must come back") != std::string::npos &&
                    message.find("call ncclResume again") != std::string::npos,
                "the message does not say who, what and what to do: " + message);
    rank.details["message"] = message;
    rank.details["failed_after_ms"] = seconds * 1000;
    rank.child.Barrier("the resume failed");
  }
  if (culprit) cuda.Check(cuda.MemFree(hog), "cuMemFree");
  rank.child.Barrier("the device is free again");
  rank.Resume("once there is memory");
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a resume that failed twice");
  Cycle(rank, work, "once more");
  ExpectSame(work, work.Verify(world), reference, "one cycle later");
  work.Destroy(world);
}

void NeverResumes(Rank& rank) {
  if (rank.child.processes() < 2) throw Skip("needs two processes");
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  rank.Pause();
  rank.child.Barrier("all paused");
  if (rank.child.rank() != rank.child.processes() - 1) {
    rank.child.Stage("ncclResume while one rank stays away");
    const double start = Now();
    const ncclResult_t result = rank.amem.Resume(nullptr);
    const double waited = Now() - start;
    const std::string message = rank.amem.LastError();
    rank.Expect(result != 0, "ncclResume succeeded although a rank with shared memory did not come");
    rank.Expect(waited < 10, Format("AMEM_TIMEOUT_MS is 3000, ncclResume took %.1f s", waited));
    rank.Expect(message.find(Format("rank %d", rank.child.processes() - 1)) != std::string::npos,
                "the message does not name who did not come: " + message);
    rank.details["after_s"] = waited;
    rank.details["message"] = message;
  }
  rank.child.Barrier("the resume failed");
  rank.Resume("with everybody");
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a resume that waited in vain");
  work.Destroy(world);
}

// Communicators that come, are used and go: what is left of them must not grow.
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
      first = last;  // after the first cycle: what a pause needs for itself, such as page tables of pinned memory, stays
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

// Connections of the last cycle close a moment after it: once nothing has changed for a while, or it is as `expected`.
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
    // A thread of the background that has come to its end is no leak.
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

// What amem_kill_at.so offers to the process it is preloaded into.
struct KillAt {
  void (*arm)(const char* call, unsigned long nth, unsigned long after_sends) = nullptr;
  unsigned long (*calls)(const char* call) = nullptr;

  static KillAt Find() {
    KillAt found;
    found.arm = reinterpret_cast<decltype(found.arm)>(dlsym(RTLD_DEFAULT, "amem_kill_at"));
    found.calls = reinterpret_cast<decltype(found.calls)>(dlsym(RTLD_DEFAULT, "amem_kill_at_calls"));
    if (found.arm == nullptr || found.calls == nullptr) throw Failure("amem_kill_at.so is not preloaded");
    return found;
  }
};

void KillMyselfIn(double seconds) {
  std::thread([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    kill(getpid(), SIGKILL);
  }).detach();
}

// Kills the victim in its next pause or resume, and gives the others' error. How often the call is made, and how long all
// takes, is known from a cycle before in which nothing happens.
void PauseOrResumeAndKill(Rank& rank) {
  const KillPoint& point = *rank.kill;
  const int victim = point.Victim(rank.child.processes());
  const bool mine = rank.child.rank() == victim;
  const char* const what = point.in_pause ? "ncclPause" : "ncclResume";
  const KillAt kill_at = KillAt::Find();
  if (!point.in_pause) rank.Pause("before a counted resume");
  rank.child.Barrier("ready to count");
  kill_at.arm("", 0, 0);
  double start = Now();
  point.in_pause ? rank.Pause("counted") : rank.Resume("counted");
  const double whole = Now() - start;
  const unsigned long calls = kill_at.calls(point.call), nth = point.last ? calls : 1;
  const bool blind = rank.child.Maximum(calls == 0 ? 1 : 0) > 0;
  point.in_pause ? rank.Resume("before the kill") : rank.Pause("before the kill");
  rank.child.Barrier("ready to be killed");
  rank.child.Stage(std::string(what) + " in which a rank is killed");
  if (mine && blind) KillMyselfIn(whole * point.share);
  if (mine && !blind) kill_at.arm(point.call, nth, point.after_sends);
  start = Now();
  const ncclResult_t result = point.in_pause ? rank.amem.Pause(nullptr) : rank.amem.Resume(nullptr);
  const double seconds = Now() - start;
  const std::string message = rank.amem.LastError();
  rank.Expect(!mine, Format("rank %d was to be killed at %s %lu, has made %lu, and is alive: %d %s", victim, point.call, nth,
                            kill_at.calls(point.call), result, message.c_str()));
  rank.child.Without(victim);
  rank.Expect(result != 0, std::string(what) + " succeeded although a rank was killed in it");
  rank.Expect(message.find(Format("rank %d", victim)) != std::string::npos, "the message does not name who died: " + message);
  const double slowest = rank.child.Maximum(seconds);
  rank.Expect(slowest < 2, Format("the error came after %.2f s", slowest));
  rank.details["killed_rank"] = victim;
  rank.details["killed_at"] = blind                   ? Format("%.0f %% of the time", 100 * point.share)
                              : point.after_sends > 0 ? Format("message %lu after %s %lu", point.after_sends, point.call, nth)
                                                      : Format("%s %lu of %lu", point.call, nth, calls);
  rank.details["failed_after_ms"] = 1000 * slowest;
  rank.details["message"] = message;
}

void KilledRank(Rank& rank) {
  const KillPoint& point = *rank.kill;
  Workload work = MakeWorkload(rank);
  rank.child.Barrier("buffers filled");
  const auto before = work.FreeBytes();
  rank.child.Barrier("memory read before start-up");
  Communicator world = work.Create("world", World(rank));
  work.Verify(world);
  rank.child.Barrier("first results");
  PauseOrResumeAndKill(rank);
  const Json stats = Stats(rank);
  const std::string now = stats.is_object() ? stats.value("lifecycle", "") : "";
  const std::string expected = point.in_pause ? "running" : "paused";
  rank.Expect(now == expected, Format("after the failure a session is '%s'", now.c_str()));
  if (point.once_more) {
    if (point.in_pause) rank.Pause("without the dead");
    rank.Resume("without the dead");
    rank.child.Barrier("resumed without the dead");
  }
  work.Abort(world);
  rank.child.Barrier("all aborted");
  rank.details["left_after_abort_mib"] = MibBetween(before[0], work.FreeBytes()[0]);
}

// ---- golden jobs: what a journal of a real run looks like, healthy and in each kind of failure ------------------------------

constexpr int kGoldenRank = 2;  // who is short of memory, dies, or stays away

int GoldenRank(const Rank& rank) { return std::min(kGoldenRank, rank.options.gpus - 1); }

// Packs the journals as they are now; all others wait. By the first rank, which nothing happens to.
void Pack(Rank& rank) {
  rank.child.Barrier("journals complete");
  if (rank.child.rank() == 0) {
    const char* journals = getenv("AMEM_JOURNAL_DIR");
    rank.Expect(journals != nullptr, "AMEM_JOURNAL_DIR is not set");
    const std::string file = rank.options.golden + "/" + rank.options.child_test;
    rank.child.Stage("packing journals");
    const int code = std::system(Format("'%s' '%s' '%s'", rank.options.pack.c_str(), journals, file.c_str()).c_str());
    rank.Expect(code == 0, Format("%s %s %s: status %d", rank.options.pack.c_str(), journals, file.c_str(), code));
  }
  rank.child.Barrier("journals packed");
}

// One more process than there are ranks, which has no GPU memory but what it takes away.
bool IsStranger(const Rank& rank) { return rank.child.rank() >= rank.options.gpus; }

struct GoldenJob {
  explicit GoldenJob(Rank& rank) : work(MakeWorkload(rank)), world(work.Create("world", World(rank))) {
    if (!IsStranger(rank)) reference = work.Verify(world);
    rank.child.Barrier("first results");
  }
  void Check(Rank& rank, const std::string& when) {
    rank.child.Barrier("before checking");
    if (!IsStranger(rank)) ExpectSame(work, work.Verify(world), reference, when);
    rank.child.Barrier("checked");
  }
  Workload work;
  Communicator world;
  std::vector<std::uint64_t> reference;
};

void GoldenHealthy(Rank& rank) {
  GoldenJob job(rank);
  for (int cycle = 1; cycle <= 2; ++cycle) {
    Cycle(rank, job.work, Format("in cycle %d", cycle));
    job.Check(rank, Format("after cycle %d", cycle));
  }
  Pack(rank);
  job.work.Destroy(job.world);
}

// Another process takes the memory while all are paused.
void GoldenOutOfMemory(Rank& rank) {
  const Cuda& cuda = Cuda::Get();
  GoldenJob job(rank);
  const bool stranger = IsStranger(rank);
  if (!stranger) rank.Pause();
  rank.child.Barrier("all paused");
  CUdeviceptr taken = 0;
  if (stranger) {
    const Device device = Device::Open(GoldenRank(rank));
    const std::size_t left = std::size_t{32} << 20;
    cuda.Check(cuda.MemAlloc(&taken, device.Memory().free_bytes - left), "cuMemAlloc of all but 32 MiB");
  }
  rank.child.Barrier("one device is full");
  if (!stranger) {
    rank.Expect(rank.amem.Resume(nullptr) != 0, "ncclResume succeeded although one device has no memory");
    rank.details["message"] = rank.amem.LastError();
  }
  Pack(rank);
  if (stranger) cuda.Check(cuda.MemFree(taken), "cuMemFree");
  rank.child.Barrier("the device is free again");
  if (!stranger) rank.Resume("once there is memory");
  job.Check(rank, "after a resume that failed");
  job.work.Destroy(job.world);
}

void GoldenKilled(Rank& rank) {
  GoldenJob job(rank);
  PauseOrResumeAndKill(rank);
  Pack(rank);
  job.work.Abort(job.world);
}

void GoldenNeverCame(Rank& rank) {
  GoldenJob job(rank);
  rank.Pause();
  rank.child.Barrier("all paused");
  if (rank.child.rank() != GoldenRank(rank)) {
    rank.child.Stage("ncclResume while one rank stays away");
    rank.Expect(rank.amem.Resume(nullptr) != 0, "ncclResume succeeded although a rank did not come");
    rank.details["message"] = rank.amem.LastError();
  }
  Pack(rank);
  rank.Resume("with everybody");
  job.Check(rank, "after a resume that waited in vain");
  job.work.Destroy(job.world);
}

// Free memory of each device, for the parent, from a process that has nothing to do with the job before.
void ReadMemory(Rank& rank) {
  rank.details["free_bytes"] = Json::array();
  for (int device = 0; device < rank.options.gpus; ++device)
    rank.details["free_bytes"].push_back(Device::Open(device).Memory().free_bytes);
}

struct Test {
  const char* name;
  void (*body)(Rank&);
  double limit_s;
  bool single_process = false;
  bool preload = false;
  bool bind_now = false;
  int least_gpus = 1;
  std::map<std::string, std::string> environment = {};
  std::optional<KillPoint> kill = std::nullopt;
  bool golden = false;
  int strangers = 0;          // processes beside the ranks
  double communicator_s = 0;  // more of limit_s for each communicator of --churn
};

Test Killing(const char* name, const KillPoint& point) { return {name, KilledRank, 90, false, false, false, 2, {}, point}; }

// Few and small buffers, for journals that are small enough to be kept for ever.
Test Golden(const char* name, void (*body)(Rank&)) {
  Test test{name, body, 60, false, false, false, 2, {}, std::nullopt, true};
  test.environment = {{"NCCL_MAX_NCHANNELS", "2"},     {"NCCL_MIN_NCHANNELS", "1"},  {"NCCL_MAX_P2P_NCHANNELS", "1"},
                      {"NCCL_MIN_P2P_NCHANNELS", "1"}, {"NCCL_BUFFSIZE", "1048576"}, {"AMEM_LAYOUT", "slab"}};
  return test;
}

std::vector<Test> GoldenTests() {
  std::vector<Test> tests{Golden("golden-healthy", GoldenHealthy), Golden("golden-out-of-memory", GoldenOutOfMemory),
                          Golden("golden-killed", GoldenKilled), Golden("golden-never-came", GoldenNeverCame)};
  tests[1].strangers = 1;
  tests[3].environment["AMEM_TIMEOUT_MS"] = "3000";
  // Between its create and its map: the others all wait for its vote, and none has begun to take its memory.
  tests[2].kill = KillPoint{.call = "cuMemMap", .share = 0.3, .victim = kGoldenRank};
  return tests;
}

constexpr const char* kReadMemory = "free memory of the devices";

const std::vector<Test>& Tests() {
  static std::vector<Test> tests{
      {"pause_before_any_communicator_is_fine", BeforeAnyCommunicator, 60},
      {"pause_twice_and_resume_when_running_change_nothing", Idempotent, 60},
      {"reference_workload_is_bit_identical_over_all_cycles", ReferenceWorkload, 240},
      {"communicators_come_and_go_before_between_and_after_cycles", Communicators, 90},
      {"user_memory_keeps_address_and_contents", UserMemory, 60},
      {"collective_while_paused_is_refused_and_works_after", RefusedWhilePaused, 60},
      {"work_in_flight_is_not_harmed", WorkInFlight, 90},
      {.name = "a_message_that_was_sent_and_not_yet_received_survives",
       .body = MessageOnItsWay,
       .limit_s = 60,
       .least_gpus = 2},
      {"any_thread_may_pause", OtherThread, 60},
      {"late_rank_is_waited_for", LateRank, 60},
      {"absent_rank_fails_the_pause_and_nothing_is_lost",
       AbsentRank,
       90,
       false,
       false,
       false,
       2,
       {{"AMEM_TIMEOUT_MS", "3000"}}},
      {"one_full_device_fails_the_resume_of_all_and_the_retry_succeeds", OutOfMemory, 90, false, false, false, 2},
      {"a_rank_that_never_resumes_is_named_and_all_can_retry",
       NeverResumes,
       90,
       false,
       false,
       false,
       2,
       {{"AMEM_TIMEOUT_MS", "3000"}}},
      Killing("a_rank_killed_in_mid_resume_fails_the_others_who_clean_up_before_it_created_anything",
              {.call = "cuMemCreate", .share = 0.1, .victim = -1}),
      Killing("a_rank_killed_in_mid_resume_fails_the_others_who_clean_up_before_its_first_import",
              {.call = "cuMemImportFromShareableHandle", .share = 0.5, .victim = 1, .once_more = true}),
      // After the last mapping is set up there are three votes: imports done, all verified, all open.
      Killing("a_rank_killed_in_mid_resume_fails_the_others_who_clean_up_before_its_last_vote",
              {.call = "cuMemSetAccess", .last = true, .after_sends = 3, .share = 0.9, .victim = 0}),
      Killing("a_rank_killed_in_mid_pause_fails_the_others_who_clean_up",
              {.in_pause = true, .call = "cuMemRelease", .last = true, .share = 0.15, .victim = -1, .once_more = true}),
      {"two_hundred_cycles_leak_nothing", ManyCycles, 180},
      {.name = "communicators_that_come_and_go_leave_nothing", .body = Churn, .limit_s = 60, .communicator_s = 1},
      {"one_process_drives_all_gpus", SingleProcess, 150, true},
      {"legacy_memory_NCCL_CUMEM_ENABLE_0", Legacy, 120, false, false, false, 1, {{"NCCL_CUMEM_ENABLE", "0"}}},
      {"libnccl_loaded_with_RTLD_NOW_as_ctypes_does", BoundNow, 60, false, false, true},
      {"libamem_preloaded_beside_a_stock_libnccl", Preloaded, 60, false, true},
  };
  static const bool complete = [] {
    for (Test& one : GoldenTests()) tests.push_back(std::move(one));
    return true;
  }();
  (void)complete;
  return tests;
}

int RunRank(const Options& options, int region_fd, int rank_number) {
  return RunChild(region_fd, rank_number, [&](Child& child) {
    if (options.child_test == kReadMemory) {
      Rank rank{options, child, {}, {}};
      ReadMemory(rank);
      return child.Result(rank.details.dump());
    }
    const auto& tests = Tests();
    const auto test = std::find_if(tests.begin(), tests.end(), [&](const Test& one) { return options.child_test == one.name; });
    if (test == tests.end()) throw Failure("no test named " + options.child_test);
    const Cuda& cuda = Cuda::Get();
    if (cuda.devices < options.gpus) throw Skip(Format("%d GPUs needed, the driver reports %d", options.gpus, cuda.devices));
    const Nccl& nccl = Nccl::Load(test->preload ? options.stock : options.nccl, test->bind_now);
    const auto amem = Amem::Find(nccl);
    if (!amem) throw Failure(nccl.path + " offers no ncclPause: is it the copy that amem-patch made?");
    Rank rank{options, child, nccl, *amem, test->kill ? &*test->kill : nullptr};
    test->body(rank);
    child.Result(rank.details.dump(-1, ' ', false, Json::error_handler_t::replace));
    child.Barrier("the end");
  });
}

// ---- the parent ----------------------------------------------------------------------------------------------------------

struct Row {
  std::string name;
  Outcome outcome;
  std::string reason;
  Json details;
  double seconds;
};

// As a new process sees it; empty when it cannot be read.
std::vector<std::uint64_t> FreeMemory(const Options& options) {
  JobSpec spec;
  spec.name = kReadMemory;
  spec.time_limit_s = 30;
  spec.arguments = {"--run", kReadMemory, "--nccl", options.nccl, "--gpus", std::to_string(options.gpus)};
  spec.log_path = options.log;
  const JobResult job = RunJob(spec);
  const Json read = job.outcome == Outcome::kPass ? Json::parse(job.results[0], nullptr, false) : Json();
  return read.is_object() ? read.value("free_bytes", std::vector<std::uint64_t>()) : std::vector<std::uint64_t>();
}

// What the dead had comes back a moment after their end. Some MiB are the driver's own.
std::string MemoryNotBack(const Options& options, const std::vector<std::uint64_t>& before) {
  std::string text;
  const double until = Now() + 5;
  do {
    const auto now = FreeMemory(options);
    if (now.empty() || now.size() != before.size()) return "free memory of the devices cannot be read";
    text.clear();
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (now[i] + (8U << 20) < before[i])
        text += Format("%sdevice %zu has %.1f MiB less than before the job", text.empty() ? "" : ", ", i,
                       MibBetween(before[i], now[i]));
    }
  } while (!text.empty() && Now() < until);
  return text;
}

// Beside this program.
std::string KillAtLibrary() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  const std::string self(path, length > 0 ? static_cast<std::size_t>(length) : 0);
  const std::string library = self.substr(0, self.rfind('/') + 1) + "amem_kill_at.so";
  return access(library.c_str(), R_OK) == 0 ? library : "";
}

Row RunTest(const Test& test, const Options& options, double budget_ends) {
  if (options.gpus < test.least_gpus) return {test.name, Outcome::kSkipped, Format("needs %d GPUs", test.least_gpus), {}, 0};
  if (test.preload && (options.stock.empty() || options.amem_lib.empty()))
    return {test.name, Outcome::kSkipped, "needs --stock and --amem-lib", {}, 0};
  if (test.kill && KillAtLibrary().empty())
    return {test.name, Outcome::kSkipped, "amem_kill_at.so is not beside this program", {}, 0};
  JobSpec spec;
  spec.name = test.name;
  spec.processes = test.single_process ? 1 : options.gpus + test.strangers;
  spec.time_limit_s = test.limit_s + test.communicator_s * options.churn * options.churn_rounds;
  if (budget_ends > 0) {
    const double left = budget_ends - Now();
    if (left < 20) return {test.name, Outcome::kSkipped, "no time left (--budget)", {}, 0};
    spec.time_limit_s = std::min(spec.time_limit_s, left);
  }
  spec.arguments = {"--run",         test.name,
                    "--nccl",        options.nccl,
                    "--gpus",        std::to_string(options.gpus),
                    "--cycles",      std::to_string(options.cycles),
                    "--leak-cycles", std::to_string(options.leak_cycles),
                    "--churn",       Format("%dx%d", options.churn, options.churn_rounds)};
  std::string elements;
  for (const std::size_t size : options.elements) elements += (elements.empty() ? "" : ",") + std::to_string(size);
  spec.arguments.insert(spec.arguments.end(), {"--elements", elements, "--ops", options.ops});
  if (!options.golden.empty())
    spec.arguments.insert(spec.arguments.end(), {"--golden", options.golden, "--pack", options.pack});
  if (!options.stock.empty()) spec.arguments.insert(spec.arguments.end(), {"--stock", options.stock});
  spec.environment = test.environment;
  // A directory for each test, so that its sessions can be checked against each other afterwards.
  if (const char* journal = getenv("AMEM_JOURNAL_DIR"); journal != nullptr && *journal != '\0')
    spec.environment["AMEM_JOURNAL_DIR"] = std::string(journal) + "/" + test.name;
  if (test.preload) spec.environment["LD_PRELOAD"] = options.amem_lib;
  spec.log_path = options.log;
  spec.verbose = options.verbose;
  std::vector<std::uint64_t> free_before;
  if (test.kill) {
    spec.environment["LD_PRELOAD"] = KillAtLibrary();
    spec.victim = test.kill->Victim(options.gpus);
    free_before = FreeMemory(options);
  }
  const JobResult job = RunJob(spec);
  Row row{test.name, job.outcome, job.reason, {}, job.seconds};
  if (row.outcome == Outcome::kPass && !job.results.empty())
    row.details = Json::parse(job.results[spec.victim == 0 ? 1 : 0], nullptr, false);
  if (test.kill && row.outcome == Outcome::kPass) {
    row.reason = MemoryNotBack(options, free_before);
    if (!row.reason.empty()) row.outcome = Outcome::kFail;
  }
  return row;
}

int Main(int argc, char** argv) {
  int region_fd = -1;
  int rank = 0;
  const bool child = IsChild(argc, argv, region_fd, rank);
  int code = kExitUsage;
  const std::optional<Options> parsed = Parse(argc, argv, code);
  if (!parsed) return code;
  Options options = *parsed;
  if (options.list) {
    for (const Test& test : Tests()) {
      if (!test.golden) printf("%s\n", test.name);
    }
    return kExitPass;
  }
  if (RefusedForNvls("amem-gpu-test")) return kExitUsage;
  if (child) return RunRank(options, region_fd, rank);

  int devices = 0;
  try {
    devices = Cuda::Get().devices;
  } catch (const Skip& skip) {
    printf("SKIPPED: %s\n", skip.what());
    return kExitSkipped;
  }
  if (options.gpus == 0) options.gpus = devices;
  const double budget_ends = options.budget_s > 0 ? Now() + options.budget_s : 0;
  std::vector<Row> rows;
  for (const Test& test : Tests()) {
    const auto wanted = [&](const std::string& part) { return std::string(test.name).find(part) != std::string::npos; };
    if (test.golden == options.golden.empty()) continue;
    if (!options.only.empty() && std::none_of(options.only.begin(), options.only.end(), wanted)) continue;
    printf("[ run  ] %s (%d GPUs)\n", test.name, options.gpus);
    fflush(stdout);
    rows.push_back(RunTest(test, options, budget_ends));
    const Row& row = rows.back();
    printf("[%-6s] %s (%.1f s)%s%s%s%s\n", OutcomeText(row.outcome), row.name.c_str(), row.seconds,
           row.reason.empty() ? "" : ": ", row.reason.c_str(), row.details.empty() ? "" : " ",
           row.details.empty() ? "" : row.details.dump().c_str());
    fflush(stdout);
  }
  int count[3] = {0, 0, 0};
  printf("\n%-60s %-8s %7s  %s\n", Format("tests on %d GPUs", options.gpus).c_str(), "result", "s", "reason");
  Json results = Json::array();
  for (const Row& row : rows) {
    ++count[static_cast<int>(row.outcome)];
    printf("%-60s %-8s %7.1f  %s\n", row.name.c_str(), OutcomeText(row.outcome), row.seconds, row.reason.c_str());
    results.push_back({{"name", row.name},
                       {"gpus", options.gpus},
                       {"outcome", OutcomeText(row.outcome)},
                       {"reason", row.reason},
                       {"details", row.details},
                       {"seconds", row.seconds}});
  }
  printf("%d passed, %d FAILED, %d skipped\n", count[0], count[1], count[2]);
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << Json{{"program", "amem-gpu-test"}, {"gpus", options.gpus}, {"tests", results}}.dump(1) << "\n";
    if (!file.flush()) {
      fprintf(stderr, "amem-gpu-test: cannot write %s\n", options.json.c_str());
      return kExitFail;
    }
  }
  if (count[1] > 0 || rows.empty()) return kExitFail;
  return count[0] > 0 ? kExitPass : kExitSkipped;
}

}  // namespace
}  // namespace amem::gpu

int main(int argc, char** argv) {
  try {
    return amem::gpu::Main(argc, argv);
  } catch (const std::exception& failure) {
    fprintf(stderr, "amem-gpu-test: %s\n", failure.what());
    return amem::gpu::kExitFail;
  }
}
