// Whose memory a GPU holds: made-up GPUs and processes, of which NVML says more or less.
#include "replay/tool/gpus.h"

#include <gtest/gtest.h>

#include "replay/tool/command_line/command_line.h"

namespace amem::tool {

std::span<const Command> AllCommands() { return {}; }  // of the program's main file

namespace {

constexpr Bytes kMiB = Bytes{1} << 20;

std::vector<std::string> Said(const GpuInUse& gpu, const std::vector<ProcessOnGpu>& ours) {
  std::vector<std::string> lines;
  for (const GpuShare& share : SharesOf(gpu, ours)) lines.push_back(std::to_string(share.bytes / kMiB) + " " + share.whose);
  return lines;
}
GpuInUse Gpu(Bytes used, std::vector<MemoryHolder> holders, bool known = true) {
  return {.uuid = "GPU-a",
          .memory = {.free = 0, .total = 100000 * kMiB},
          .used = used * kMiB,
          .holders_known = known,
          .holders = std::move(holders)};
}
ProcessOnGpu Rank(Bytes nccl, Bytes paused = 0) {
  return {.pid = 7, .name = "rank 0", .tags = {{"nccl", nccl * kMiB}}, .paused = paused * kMiB};
}

using Lines = std::vector<std::string>;

TEST(Shares, a_sleeping_engine_leaves_nccl_and_its_context) {
  EXPECT_EQ(Said(Gpu(2489, {{7, 2489 * kMiB, "vllm"}}), {Rank(2000, 8000)}),
            (Lines{"2000 rank 0: tag nccl", "489 rank 0: context and modules"}));
}

TEST(Shares, what_a_process_has_beside_amem_is_said_to_be_more_than_a_context) {
  EXPECT_EQ(
      Said(Gpu(3000, {{7, 3000 * kMiB, "vllm"}}), {Rank(1000)}),
      (Lines{"2000 rank 0: context and modules (some 500 MiB), and memory that is not under AMem", "1000 rank 0: tag nccl"}));
}

TEST(Shares, other_processes_are_named_and_what_nobody_holds_is_unknown) {
  EXPECT_EQ(Said(Gpu(7000, {{7, 1500 * kMiB, "vllm"}, {9, 5000 * kMiB, "python3"}, {11, 0, "silent"}}), {Rank(1000)}),
            (Lines{"5000 process 9 (python3)", "1000 rank 0: tag nccl", "500 rank 0: context and modules",
                   "500 unknown: no process says that it holds it"}));
}

TEST(Shares, without_processes_the_rest_is_unknown_and_says_where_to_ask) {
  const std::string ask = " unknown: NVML shows no processes here, as in a container; ask on the host";
  EXPECT_EQ(Said(Gpu(1500, {}), {Rank(1000)}), (Lines{"1000 rank 0: tag nccl", "500" + ask}));
  EXPECT_EQ(Said(Gpu(1500, {}, false), {}), (Lines{"1500" + ask}));
}

TEST(Shares, an_unused_gpu_has_none) { EXPECT_TRUE(SharesOf(Gpu(0, {}), {}).empty()); }

}  // namespace
}  // namespace amem::tool
