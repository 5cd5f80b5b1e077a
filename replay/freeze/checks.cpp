#include "replay/freeze/checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <numeric>
#include <set>
#include <sstream>

#include "journal/base/file.h"
#include "statemachine/event.h"

namespace amem {
namespace {

Status Refusal(const char* so_far, const std::vector<std::string>& problems) {
  if (problems.empty()) return {};
  return {Code::kRefused, fmt::format("{}{}", so_far, fmt::join(problems, "; and "))};
}

// On driver 580 cuMulticastAddDevice answers 101 in every process that was restored; 610 has it mended.
constexpr int kRestoresMulticast = 610;

// A rank's memory that a pause leaves and the driver's checkpoint cannot take, or that could not be made again after it.
void FindUntakable(const RankProcess& process, const State& state, const std::string& driver,
                   std::vector<std::string>& problems) {
  Bytes multicast = 0, made_again = 0, registered = 0, renewable = 0, held = 0, shared = 0, on_host = 0, handed_out = 0;
  std::set<std::string> libraries;
  for (const auto& [id, allocation] : state.allocations) {
    if (allocation.placed()) continue;  // what is said of its slab
    if (allocation.multicast) (allocation.rebuilt() ? made_again : multicast) += allocation.bytes;
    const auto holding = LibrariesHolding(state, id);
    if (!holding.empty()) held += allocation.bytes;
    libraries.insert(holding.begin(), holding.end());
    if (allocation.pinned > allocation.held)
      registered += allocation.bytes;
    else if (allocation.renewable > 0)
      renewable += allocation.bytes;
    if (allocation.tag == MemoryTag::kUser && allocation.own() && !allocation.multicast && !allocation.on_device())
      on_host += allocation.bytes;
    const bool held_elsewhere = !allocation.own() || !allocation.importers.empty();
    if (allocation.on_device() && held_elsewhere && WhyKept(allocation) == KeepReason::kUser) shared += allocation.bytes;
    if (allocation.handed_out && allocation.handed_to.empty()) handed_out += allocation.bytes;
  }
  int branch = 0;  // of what is no number, too
  std::from_chars(driver.data(), driver.data() + driver.size(), branch);
  // 0: the process, 1: bytes, 2: kRestoresMulticast, 3: the driver, 4: libraries.
  const std::pair<Bytes, const char*> found[] = {
      {multicast,
       "{0} holds {1} in multicast objects (NVLS), which a checkpoint does not cover: run the job with NCCL_NVLS_ENABLE=0, or "
       "with driver {2} or newer AMEM_NVLS=release"},
      {branch < kRestoresMulticast ? made_again : 0,
       "{0} holds {1} in multicast objects (NVLS), and a restored process can make none again before driver {2} (this is {3}): "
       "run the job with NCCL_NVLS_ENABLE=0"},
      {registered, "a network card holds {1} of {0}: run the job with NCCL_IB_DISABLE=1, or deregister that memory"},
      {renewable,
       "a network card holds {1} of {0}: AMEM_NETWORK=renew gives that up in a pause, but no process that has a card open was "
       "seen to be checkpointed and restored yet: run the job with NCCL_IB_DISABLE=1"},
      {held,
       "{4} of {0} holds {1}: retained, exported, registered with a network card or bound to a multicast object, which a pause "
       "leaves, and the driver could not restore: let the program release it first"},
      {shared,
       "{0} shares {1} of the program's memory with another process, which a pause would leave, and the driver could not "
       "restore: run the job with AMEM_USER_MEMORY=release"},
      {handed_out,
       "{0} has given the driver's own handles of {1} to others, by fabric or to a multicast object, which a pause leaves, and "
       "the driver could not restore: run the job without that feature (NCCL_MNNVL_ENABLE=0)"},
      {on_host,
       "the program of {0} has {1} of host memory from cuMemCreate, with which the driver does not restore a process: have "
       "that memory from cuMemHostAlloc"}};
  for (const auto& [bytes, text] : found)
    if (bytes > 0)
      problems.push_back(fmt::format(fmt::runtime(text), process.name, RoundedUpBytes(bytes), kRestoresMulticast,
                                     driver.empty() ? "not known" : driver, fmt::join(libraries, ", ")));
}

// What other libraries of a process share with other processes. A pause leaves it, and the driver could not restore it.
void FindSharedOutside(const RankProcess& process, const State& state, std::vector<std::string>& problems,
                       std::vector<std::string>& notes) {
  std::vector<std::string> shares;
  for (const auto& [what, share] : state.outside) {
    const auto& [library, kind] = what;
    if (kind == OutsideKind::kLeft) continue;
    if (kind != OutsideKind::kUnseen) {
      shares.push_back(fmt::format("{} by {} ({} in {} piece{})", ToText(kind), library, RoundedUpBytes(share.bytes),
                                   share.pieces, share.pieces == 1 ? "" : "s"));
      continue;
    }
    notes.push_back(
        library.empty()
            ? fmt::format("AMem does not see whether other libraries of {} share GPU memory with other processes, which would "
                          "lose the job at the thaw: start it with `amem run` (LD_PRELOAD)",
                          process.name)
            : fmt::format("{} of {} can share GPU memory with other processes by calls that AMem does not see; if it does, the "
                          "job is lost at the thaw",
                          library, process.name));
  }
  if (shares.empty()) return;
  problems.push_back(
      fmt::format("{} (pid {}) shares GPU memory with other processes past AMem, and the driver could not restore it: {}; let "
                  "the program free or close it first, or run without that feature of the library",
                  process.name, process.pid, fmt::join(shares, ", ")));
}

// Ranks of living communicators that no session here has.
std::size_t RanksElsewhere(std::span<const Result<State>> states) {
  struct Seen {
    std::set<std::int32_t> ranks;
    std::size_t all = 0;
  };
  // By name. Those without one (grown communicators) count by their size: ranks that nobody here has are missed among several
  // of a size at most.
  std::map<std::pair<std::uint64_t, std::int32_t>, Seen> communicators;
  for (const Result<State>& state : states) {
    for (const auto& [id, communicator] : state.ok() ? state->communicators : std::map<CommunicatorId, Communicator>()) {
      if (!communicator.ready || !communicator.ended.empty()) continue;
      Seen& seen = communicators[{communicator.hash, communicator.hash == 0 ? communicator.ranks : 0}];
      seen.ranks.insert(communicator.rank);
      seen.all = static_cast<std::size_t>(std::max(communicator.ranks, 0));
    }
  }
  std::size_t most = 0;
  for (const auto& [name, seen] : communicators) most = std::max(most, seen.all - std::min(seen.all, seen.ranks.size()));
  return most;
}

void FindOthers(FreezeHost& host, std::span<const GpuInUse> gpus, std::span<const FrozenProcess> processes,
                std::vector<std::string>& problems) {
  std::set<pid_t> family;
  for (const FrozenProcess& one : processes) {
    auto siblings = host.Siblings(one.process.pid);
    if (siblings) {
      family.merge(*siblings);
    } else {
      problems.push_back(
          fmt::format("which processes were started beside {} cannot be seen: {}; give --others-stay if none of "
                      "them shares GPU memory with it",
                      one.process.name, siblings.status().message()));
    }
  }
  for (const FrozenProcess& one : processes) family.erase(one.process.pid);
  std::set<std::string> others;
  for (const GpuInUse& gpu : gpus) {
    for (const MemoryHolder& holder : gpu.holders)
      if (family.contains(holder.pid)) others.insert(fmt::format("pid {} ({})", holder.pid, holder.name));
  }
  for (const std::string& other : others) {
    problems.push_back(
        fmt::format("{} may have been started beside the ranks, uses a GPU, and is not under AMem: end it, or give "
                    "--others-stay if it shares no GPU memory with them",
                    other));
  }
}

void FindHostRoom(FreezeHost& host, std::span<const FrozenProcess> processes, Bytes needed, std::vector<std::string>& problems,
                  std::vector<std::string>& notes) {
  const auto room = processes.empty() ? std::nullopt : host.RoomFor(processes.front().process.pid);
  if (!room) {
    notes.push_back("how much host memory is available could not be read, and was not checked");
  } else if (room->bytes < needed) {
    problems.push_back(
        fmt::format("the host has not enough memory: {} on the GPUs must be kept there, and {} allows {}; end other programs, "
                    "or raise the limit",
                    RoundedUpBytes(needed), room->limited_by, RoundedBytes(room->bytes)));
  }
}

// A restored process's kernels are not preempted any more (driver 580.159.04 on an H200: two processes that took turns every
// 260 ms took 511 ms after both were restored), so one that waits for a peer stops every other process on its GPU.
void NoteSharedGpus(std::map<std::string, std::set<std::string>> users, std::span<const GpuInUse> gpus,
                    std::span<const FrozenProcess> processes, std::vector<std::string>& notes) {
  for (auto& [uuid, names] : users) {
    const auto gpu = std::ranges::find(gpus, uuid, &GpuInUse::uuid);
    for (const MemoryHolder& holder : gpu == gpus.end() ? std::vector<MemoryHolder>{} : gpu->holders) {
      if (std::ranges::none_of(processes, [&](const FrozenProcess& one) { return one.process.pid == holder.pid; }))
        names.insert(fmt::format("pid {} ({})", holder.pid, holder.name));
    }
    if (names.size() < 2) continue;
    notes.push_back(fmt::format(
        "{} share {}: after a thaw the driver does not preempt a process's kernels (seen with 580.159.04), so that a "
        "collective that waits for a rank stops the others on that GPU, and ranks that wait for each other there may "
        "end with Xid 109; give each process a GPU of its own (amem thaw --gpus)",
        fmt::join(names, " and "), uuid));
  }
}

// Of a GPU by its UUID or its index.
std::optional<std::size_t> IndexOf(const std::string& text, std::span<const std::string> gpus) {
  for (std::size_t i = 0; i < gpus.size(); ++i)
    if (text == gpus[i] || text == std::to_string(i)) return i;
  return std::nullopt;
}

}  // namespace

Result<std::set<pid_t>> ReadSiblings(pid_t pid) {
  AMEM_ASSIGN(const auto self, ReadProcessStat(pid));
  const pid_t launcher = self.parent;
  std::multimap<pid_t, pid_t> children;
  std::error_code failed;
  for (std::filesystem::directory_iterator it("/proc", failed), end; !failed && it != end; it.increment(failed)) {
    const std::string name = it->path().filename();
    pid_t child = 0;  // other entries are no numbers
    if (std::from_chars(name.data(), name.data() + name.size(), child).ec != std::errc()) continue;
    const auto stat = ReadProcessStat(child);
    if (!stat && stat.status().code() != Code::kNotFound) return stat.status();
    if (stat) children.emplace(stat->parent, child);
  }
  if (failed) return SystemFailure("read", "/proc", failed.value());
  std::set<pid_t> everybody;
  for (const auto& [parent, child] : children) everybody.insert(child);
  if (launcher <= 1) return everybody;
  std::vector<pid_t> found = {launcher};
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto [begin, end] = children.equal_range(found[i]);
    for (auto it = begin; it != end; ++it) found.push_back(it->second);
  }
  return std::set<pid_t>(found.begin(), found.end());
}

const std::string& FrozenProcess::NowAt(const std::string& gpu) const {
  const auto way = std::ranges::find(moved, gpu, &GpuPair::from);
  return way == moved.end() ? gpu : way->to;
}

std::map<pid_t, std::map<std::string, Bytes>> HeldBy(std::span<const GpuInUse> gpus) {
  std::map<pid_t, std::map<std::string, Bytes>> held;
  for (const GpuInUse& gpu : gpus)
    for (const MemoryHolder& holder : gpu.holders) held[holder.pid][gpu.uuid] += holder.bytes;
  return held;
}

Status CheckBeforeFreeze(std::span<const Result<State>> states, FreezeHost& host, std::span<const FrozenProcess> processes,
                         const FreezeAllowances& allowances, std::size_t ranks_elsewhere, std::vector<std::string>& notes) {
  std::vector<std::string> problems;
  const std::vector<GpuInUse> gpus = host.GpusInUse();
  auto held = HeldBy(gpus);
  std::map<std::string, std::set<std::string>> users;
  Bytes needed = 0;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    const RankProcess& process = processes[i].process;
    for (const auto& [uuid, bytes] : held[process.pid]) {
      users[uuid].insert(process.name);
      needed += bytes;
    }
    if (!states[i].ok()) {
      problems.push_back(fmt::format("what {} holds cannot be read: {}", process.name, states[i].status().message()));
      continue;
    }
    FindUntakable(process, *states[i], host.DriverVersion(), problems);
    FindSharedOutside(process, *states[i], problems, notes);
    if (held[process.pid].empty()) {
      const Holdings holdings = Measure(*states[i]);
      needed += holdings.own_device_resident + holdings.pools_resident + holdings.legacy_kept;
      notes.push_back(
          fmt::format("NVML does not say what {} holds on its GPUs (a container may hide it): only what AMem knows of "
                      "is checked",
                      process.name));
    }
  }
  FindHostRoom(host, processes, needed, problems, notes);
  NoteSharedGpus(std::move(users), gpus, processes, notes);
  if (!allowances.others_stay) FindOthers(host, gpus, processes, problems);
  if (const std::size_t elsewhere = std::max(ranks_elsewhere, RanksElsewhere(states));
      elsewhere > 0 && !allowances.this_host_only) {
    problems.push_back(
        fmt::format("{} of its ranks are not here: on other hosts, or not under AMem. amem freezes the "
                    "processes of this host only: give --this-host, and run it on each host with the same --at-step",
                    elsewhere));
  }
  return Refusal("nothing was touched: ", problems);
}

static bool IsParked(control::AskedJob& job, const RankProcess& process) {
  return std::ranges::any_of(job.Ranks(),
                             [&](const control::RankView& rank) { return Same(rank.process, process) && rank.is.parked; });
}

Status CheckWhilePaused(control::AskedJob& job, std::span<FrozenProcess* const> processes) {
  std::vector<std::string> problems, noted_before;
  for (const FrozenProcess* one : processes) {
    const RankProcess& process = one->process;
    AMEM_ASSIGN(const auto state, job.MemoryOf(process).Within("what " + process.name + " holds cannot be read"));
    FindSharedOutside(process, state, problems, noted_before);
    Bytes shared = 0;
    bool by_running_tags = false;
    for (const auto& [id, allocation] : state.allocations) {
      if (allocation.placed() || !allocation.resident || !allocation.on_device()) continue;
      if (allocation.own() && allocation.importers.empty()) continue;
      shared += allocation.bytes;
      by_running_tags = by_running_tags || (allocation.pool && WhyKept(allocation) == KeepReason::kNone);
    }
    if (shared > 0) {
      const char* const remedy = IsParked(job, process) ? ". The job is parked, with all its memory: resume it first"
                                 : by_running_tags
                                     ? ". Some of it is under tags of the program's that are not paused, as where a job is "
                                       "stopped between launches: resume the job, and freeze it while it runs and calls "
                                       "amem.safepoint(), without --between-launches"
                                     : "";
      problems.push_back(
          fmt::format("{} still shares {} of GPU memory with another process, and the driver could not restore it; "
                      "`amem state {}` tells which{}",
                      process.name, RoundedUpBytes(shared), process.directory.string(), remedy));
    }
  }
  return Refusal("", problems);
}

Status CheckRoom(FreezeHost& host, std::span<const FrozenProcess> processes, const std::set<pid_t>& taken,
                 std::span<const GpuPair> pairs, std::vector<std::string>& notes) {
  const std::vector<GpuInUse> gpus = host.GpusInUse();
  auto held = HeldBy(gpus);
  std::map<std::string, Bytes> needed;
  std::map<std::string, std::set<std::string>> users;
  bool known = false;
  for (const FrozenProcess& process : processes) {
    const RankProcess& plain = process.process;
    for (const auto& [uuid, bytes, was_taken] : process.gpus) {
      const auto pair = std::ranges::find(pairs, uuid, &GpuPair::from);
      const std::string& now = process.NowAt(uuid);
      const bool is_taken = taken.contains(plain.pid);
      const Bytes there = is_taken ? 0 : held[plain.pid][now];  // a paused process that the driver has not taken needs the rest
      const std::string& then = pair == pairs.end() || !is_taken ? now : pair->to;
      needed[then] += bytes - std::min(bytes, there);
      users[then].insert(plain.name);
      known = true;
    }
  }
  if (!known || gpus.empty()) {
    notes.push_back("how much each GPU must take back is not known, and the room was not checked");
    return {};
  }
  std::string text;
  for (const auto& [uuid, bytes] : needed) {
    const auto gpu = std::ranges::find(gpus, uuid, &GpuInUse::uuid);
    if (gpu == gpus.end() || gpu->memory.free >= bytes) continue;
    text += fmt::format("{}{} (GPU {}) has {} free and needs {}{}", text.empty() ? "" : "; ", uuid, gpu - gpus.begin(),
                        RoundedBytes(gpu->memory.free), RoundedUpBytes(bytes), ToText(gpu->holders, 0));
  }
  if (text.empty()) {
    NoteSharedGpus(std::move(users), gpus, processes, notes);
    return {};
  }
  return {Code::kOutOfMemory, "nothing was touched, the job stays frozen: " + text +
                                  ". Free memory there and thaw again, or give --gpus to bring it back on other GPUs"};
}

// ---- pairs -----------------------------------------------------------------------------------------------------------------

Result<std::vector<GpuPair>> ReadGpuPairs(const std::string& text, std::span<const std::string> gpus) {
  if (text.empty()) return std::vector<GpuPair>();
  std::vector<std::size_t> target(gpus.size());
  std::iota(target.begin(), target.end(), 0);
  std::istringstream parts(text + ',');  // so that a pair that is missing at the end is one as well
  std::string part;
  for (std::size_t i = 0; std::getline(parts, part, ','); ++i) {
    const auto equals = part.find('=');
    const std::string own = equals == std::string::npos ? std::to_string(i) : part.substr(0, equals);
    const auto from = IndexOf(own, gpus);
    const auto to = IndexOf(equals == std::string::npos ? part : part.substr(equals + 1), gpus);
    if (!from || !to) {
      return Status(Code::kInvalid,
                    fmt::format("--gpus: \"{}\" names no GPU of the {} here; give 0=1,1=0, or UUIDs", part, gpus.size()));
    }
    target[from.value()] = to.value();
  }
  if (std::set<std::size_t>(target.begin(), target.end()).size() != target.size()) {
    return Status(Code::kInvalid,
                  fmt::format("--gpus {}: two GPUs would come back on one; name the way of each, as in 0=1,1=0", text));
  }
  std::vector<GpuPair> pairs;
  for (std::size_t i = 0; i < gpus.size(); ++i) pairs.push_back({gpus[i], gpus[target[i]]});
  return pairs;
}

}  // namespace amem
