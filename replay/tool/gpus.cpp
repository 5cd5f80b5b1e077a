#include "replay/tool/gpus.h"

#include <fmt/format.h>

#include <algorithm>

#include "replay/job/names.h"
#include "statemachine/account.h"

namespace amem::tool {

// A driver context with the modules of PyTorch and NCCL takes 450 to 550 MiB; what exceeds this is something else as well.
constexpr Bytes kContextAtMost = Bytes{640} << 20;

// By the GPU's UUID.
static std::map<std::string, ProcessOnGpu> OnGpus(const State& state) {
  const SessionOpened& who = state.session;
  std::map<std::string, ProcessOnGpu> found;
  for (const std::string& uuid : who.gpu_uuids) found[uuid] = {.pid = who.pid, .name = ShortNameOf(who), .tags = {}};
  for (const auto& [id, a] : state.allocations) {
    const auto device = static_cast<std::size_t>(a.properties.location.id);
    if (!a.own() || !a.on_device() || a.placed() || a.multicast || device >= who.gpu_uuids.size()) continue;
    ProcessOnGpu& here = found[who.gpu_uuids[device]];
    (a.resident ? here.tags[TagOf(state, a)] : here.paused) += a.bytes;
  }
  return found;
}

static void PrintGpu(const GpuInUse& gpu, const std::vector<ProcessOnGpu>& ours, Output& out) {
  out << gpu.uuid << ": " << FormatBytes(gpu.used) << " of " << FormatBytes(gpu.memory.total) << " in use, "
      << FormatBytes(gpu.memory.free) << " free\n";
  for (const GpuShare& share : SharesOf(gpu, ours)) {
    const Bytes percent = gpu.used == 0 ? 0 : share.bytes * 100 / gpu.used;
    out << fmt::format("  {:<12}{:3} %  {}\n", FormatBytes(share.bytes), percent, share.whose);
  }
  for (const ProcessOnGpu& process : ours) {
    if (process.paused != 0)
      out << "  " << process.name << ": " << FormatBytes(process.paused) << " more are paused, and not there\n";
  }
}

std::vector<GpuShare> SharesOf(const GpuInUse& gpu, const std::vector<ProcessOnGpu>& ours) {
  std::vector<GpuShare> shares;
  for (const ProcessOnGpu& process : ours) {
    Bytes known = 0;
    for (const auto& [tag, bytes] : process.tags) {
      shares.push_back({process.name + ": tag " + tag, bytes});
      known += bytes;
    }
    const auto holder = std::ranges::find(gpu.holders, process.pid, &MemoryHolder::pid);
    const Bytes rest = holder != gpu.holders.end() && holder->bytes > known ? holder->bytes - known : 0;
    const char* const more = rest <= kContextAtMost ? "" : " (some 500 MiB), and memory that is not under AMem";
    if (rest != 0) shares.push_back({process.name + ": context and modules" + more, rest});
  }
  for (const MemoryHolder& holder : gpu.holders) {
    if (std::ranges::find(ours, holder.pid, &ProcessOnGpu::pid) == ours.end() && holder.bytes != 0)
      shares.push_back({fmt::format("process {} ({})", holder.pid, holder.name), holder.bytes});
  }
  std::ranges::stable_sort(shares, std::greater<>(), &GpuShare::bytes);
  Bytes explained = 0;
  for (const GpuShare& share : shares) explained += share.bytes;
  if (gpu.used > explained) {
    const bool seen = gpu.holders_known && !gpu.holders.empty();
    const char* const why =
        seen ? "no process says that it holds it" : "NVML shows no processes here, as in a container; ask on the host";
    shares.push_back({fmt::format("unknown: {}", why), gpu.used - explained});
  }
  return shares;
}

int PrintGpus(const std::vector<std::filesystem::path>& sessions, Output& out) {
  const std::vector<GpuInUse> gpus = GpusByNvml(OpenNvml());
  if (gpus.empty()) return Complain("top --gpu: NVIDIA's management library (libnvidia-ml.so.1) is not there or shows no GPU");
  std::map<std::string, std::vector<ProcessOnGpu>> ours;
  ForEachJournal(sessions, [&](JournalReader& reader, ReadReport& damage) -> Status {
    AMEM_ASSIGN(const auto info, reader.Info());
    if (info.status != SessionStatus::kLive) return {};
    AMEM_ASSIGN(const auto state, reader.StateAt(std::nullopt, &damage));
    for (auto& [uuid, process] : OnGpus(state))
      if (!process.tags.empty() || process.paused != 0) ours[uuid].push_back(std::move(process));
    return {};
  });
  for (const GpuInUse& gpu : gpus) PrintGpu(gpu, ours[gpu.uuid], out);
  return ReadAll();
}

}  // namespace amem::tool
