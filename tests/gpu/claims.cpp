#include "tests/gpu/claims.h"

#include <algorithm>
#include <numeric>

namespace amem::gpu {

double MibBetween(std::uint64_t more, std::uint64_t less) {
  return (static_cast<double>(more) - static_cast<double>(less)) / (1 << 20);
}

Workload MakeWorkload(Rank& rank, bool single_process, bool small) {
  WorkloadOptions options;
  options.gpus = rank.options.gpus;
  options.single_process = single_process;
  options.ops = *ParseOps(rank.options.collectives);
  options.collective_limit_s = 30;
  options.sizes = rank.options.elements;
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

double Freed::LeastMib() const {
  double least = 1e18;
  for (std::size_t i = 0; i < running.size(); ++i) least = std::min(least, MibBetween(paused[i], running[i]));
  return least;
}

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
  if (parsed.is_discarded()) throw Failure("amem_json gives no JSON: " + text.substr(0, 300));
  return parsed;
}

}  // namespace amem::gpu
