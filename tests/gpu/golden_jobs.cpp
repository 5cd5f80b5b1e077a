// Small jobs whose journals are kept: healthy, and one of each kind of failure.
#include <algorithm>
#include <cstdlib>

#include "tests/gpu/claims.h"

namespace amem::gpu {
namespace {

int GoldenRank(const Rank& rank) { return std::min(kGoldenRank, rank.options.gpus - 1); }

// Rank 0, which survives every golden job, packs the journals as they are now; the other ranks wait.
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

// The job has one process more than ranks. It is no part of NCCL's job, and only takes GPU memory away.
bool IsOutsider(const Rank& rank) { return rank.child.rank() >= rank.options.gpus; }

struct GoldenJob {
  explicit GoldenJob(Rank& rank) : work(MakeWorkload(rank)), world(work.Create("world", World(rank))) {
    if (!IsOutsider(rank)) reference = work.Verify(world);
    rank.child.Barrier("first results");
  }
  void Check(Rank& rank, const std::string& when) {
    rank.child.Barrier("before checking");
    if (!IsOutsider(rank)) ExpectSame(work, work.Verify(world), reference, when);
    rank.child.Barrier("checked");
  }
  Workload work;
  Communicator world;
  std::vector<std::uint64_t> reference;
};

}  // namespace

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
  const bool outsider = IsOutsider(rank);
  if (!outsider) rank.Pause();
  rank.child.Barrier("all paused");
  CUdeviceptr taken = 0;
  if (outsider) {
    const Device device = Device::Open(GoldenRank(rank));
    const std::size_t left = std::size_t{32} << 20;
    cuda.Check(cuda.MemAlloc(&taken, device.Memory().free_bytes - left), "cuMemAlloc of all but 32 MiB");
  }
  rank.child.Barrier("one device is full");
  if (!outsider) {
    rank.Expect(rank.amem.Resume(nullptr) != 0, "ncclResume succeeded although one device has no memory");
    rank.details["message"] = rank.amem.LastError();
  }
  Pack(rank);
  if (outsider) cuda.Check(cuda.MemFree(taken), "cuMemFree");
  rank.child.Barrier("the device is free again");
  if (!outsider) rank.Resume("once there is memory");
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
  if (rank.amem.ResumeTags == nullptr) throw Skip("needs amem_resume");
  GoldenJob job(rank);
  rank.Pause();
  rank.child.Barrier("all paused");
  if (rank.child.rank() != GoldenRank(rank)) {
    rank.child.Stage("ncclResume while one rank stays away");
    constexpr unsigned kInTime = 4;  // AMEM_IN_TIME: a plain resume waits for a rank that is paused as long as it takes
    const char* const nccl = "nccl";
    rank.Expect(rank.amem.ResumeTags(&nccl, 1, kInTime, 0) != 0, "amem_resume succeeded although a rank did not come");
    rank.details["message"] = rank.amem.LastError();
  }
  Pack(rank);
  rank.Resume("with everybody");
  job.Check(rank, "after a resume that waited in vain");
  job.work.Destroy(job.world);
}

}  // namespace amem::gpu
