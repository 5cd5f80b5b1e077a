// Memory that NCCL maps at addresses of its own choosing: symmetric windows, and NCCL's own suspend and resume.
#include <cstring>

#include "tests/gpu/claims.h"

namespace amem::gpu {
namespace {

constexpr std::size_t kWindowBytes = std::size_t{16} << 20;
constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC

// Sums of small whole numbers are the same in any order.
float WholeNumber(int rank, std::size_t i) { return static_cast<float>((i * 31 + static_cast<std::size_t>(rank) * 7) % 1024); }

// Two windows of the program's memory: what is added, and the sum.
class Windows {
 public:
  Windows(Rank& rank, Workload& work, Communicator& world) : rank_(rank), work_(work), world_(world) {
    for (void** memory : {&send_, &sum_}) {
      rank.nccl.Check(rank.nccl.MemAlloc(memory, kWindowBytes), "ncclMemAlloc of 16 MiB");
      void* window = nullptr;
      rank.nccl.Check(rank.nccl.CommWindowRegister(world.handles[0], *memory, kWindowBytes, &window, kSymmetric),
                      "ncclCommWindowRegister");
      windows_.push_back(window);
    }
    auto* values = static_cast<float*>(Host());
    for (std::size_t i = 0; i < Count(); ++i) values[i] = WholeNumber(Lane().world_rank, i);
    const Cuda& cuda = Cuda::Get();
    cuda.Check(cuda.MemcpyHtoDAsync(Address(send_), values, Count() * 4, Lane().stream), "filling the window");
    work.Wait("filling the window");
  }
  void Close() {
    for (auto window = windows_.rbegin(); window != windows_.rend(); ++window)
      rank_.nccl.Check(rank_.nccl.CommWindowDeregister(world_.handles[0], *window), "ncclCommWindowDeregister");
    for (void* memory : {sum_, send_}) rank_.nccl.Check(rank_.nccl.MemFree(memory), "ncclMemFree");
  }
  void Verify(const std::string& when) {
    const Cuda& cuda = Cuda::Get();
    cuda.Check(cuda.MemsetD8Async(Address(sum_), 0xEE, kWindowBytes, Lane().stream), "poisoning the sum");
    rank_.nccl.Check(rank_.nccl.AllReduce(send_, sum_, Count(), kNcclFloat32, kNcclSum, world_.handles[0], Lane().stream),
                     "all-reduce in windows " + when);
    work_.Wait("all-reduce in windows " + when, &world_);
    cuda.Check(cuda.MemcpyDtoHAsync(Host(), Address(sum_), Count() * 4, Lane().stream), "reading the sum " + when);
    work_.Wait("reading the sum " + when);
    const auto* values = static_cast<const float*>(Host());
    for (std::size_t i = 0; i < Count(); ++i) {
      float expected = 0;
      for (int rank = 0; rank < rank_.options.gpus; ++rank) expected += WholeNumber(rank, i);
      if (values[i] != expected)
        throw Failure(
            Format("element %zu of an all-reduce in windows is %g and not %g %s", i, values[i], expected, when.c_str()));
    }
  }

 private:
  [[nodiscard]] const amem::gpu::Lane& Lane() const { return work_.lanes()[0]; }
  [[nodiscard]] void* Host() const { return Lane().host; }
  [[nodiscard]] std::size_t Count() const {
    return std::min(kWindowBytes / 4, *std::max_element(work_.options().sizes.begin(), work_.options().sizes.end()));
  }
  static CUdeviceptr Address(void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

  Rank& rank_;
  Workload& work_;
  Communicator& world_;
  void *send_ = nullptr, *sum_ = nullptr;
  std::vector<void*> windows_;
};

}  // namespace

void SymmetricWindows(Rank& rank) {
  const Nccl& nccl = rank.nccl;
  if (nccl.CommWindowRegister == nullptr || nccl.CommWindowDeregister == nullptr)
    throw Skip("NCCL " + nccl.VersionText() + " has no ncclCommWindowRegister (2.27 and later have)");
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  Windows windows(rank, work, world);
  windows.Verify("before the first pause");
  for (int cycle = 1; cycle <= std::min(rank.options.cycles, 20); ++cycle) {
    Cycle(rank, work, Format("in cycle %d", cycle));
    windows.Verify(Format("after cycle %d", cycle));
    ExpectSame(work, work.Verify(world), reference, Format("outside windows, after cycle %d", cycle));
  }
  windows.Close();
  rank.details["freed_without_windows_mib"] = Cycle(rank, work, "without windows").LeastMib();
  ExpectSame(work, work.Verify(world), reference, "without windows");
  work.Destroy(world);
}

void OwnSuspend(Rank& rank) {
  const Nccl& nccl = rank.nccl;
  if (nccl.CommSuspend == nullptr || nccl.CommResume == nullptr)
    throw Skip("NCCL " + nccl.VersionText() + " has no ncclCommSuspend (2.29.7 and later have)");
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank)), other = work.Create("other", World(rank));
  const auto reference = work.Verify(world);
  ExpectSame(work, work.Verify(other), reference, "another communicator");
  const auto suspend = [&](const std::string& when) {
    rank.child.Barrier("before NCCL suspends");
    nccl.Check(nccl.CommSuspend(world.handles[0], kNcclSuspendMemory), "ncclCommSuspend " + when);
    rank.child.Barrier("suspended by NCCL");
  };
  const auto resume = [&](const std::string& when) {
    nccl.Check(nccl.CommResume(world.handles[0]), "ncclCommResume " + when);
    rank.child.Barrier("resumed by NCCL");
    ExpectSame(work, work.Verify(world), reference, when);
    ExpectSame(work, work.Verify(other), reference, when + ", the other communicator");
  };
  for (int round = 1; round <= std::min(rank.options.cycles, 5); ++round) {
    const std::string name = Format("suspended by NCCL, round %d", round);
    suspend(name);
    ExpectSame(work, work.Verify(other), reference, "the other communicator, " + name);
    resume(name);
    rank.details["freed_mib"] = Cycle(rank, work, "after " + name).LeastMib();
    ExpectSame(work, work.Verify(world), reference, "a cycle after " + name);
    suspend(name + ", once more");
    Cycle(rank, work, "while " + name);
    resume(name + ", once more");
  }
  work.Destroy(other);
  work.Destroy(world);
}

}  // namespace amem::gpu
