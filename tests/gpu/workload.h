// The reference workload: 4 world communicators and 2 pair communicators, and on each the collectives a training job uses, at
// sizes that reach NCCL's LL, LL128 and Simple protocols. Works for any number of GPUs, one process per GPU or one for all.
//
// Data are pseudo-random and a function of (world rank, index), so every result can be computed anywhere: each verified run
// poisons the output, compares samples of it with the computed result, and returns one checksum over every byte of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpu/job.h"

namespace amem::gpu {

enum class Op : std::uint8_t { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast, kRing };
const char* OpText(Op op);
// "all-reduce,broadcast", "reference" or "all"; nullopt when a name is unknown.
std::optional<std::vector<Op>> ParseOps(const std::string& list);

inline const std::vector<Op> kReferenceOps{Op::kAllReduce, Op::kAllGather, Op::kReduceScatter, Op::kAllToAll};
inline const std::vector<Op> kAllOps{Op::kAllReduce, Op::kAllGather, Op::kReduceScatter,
                                     Op::kAllToAll,  Op::kBroadcast, Op::kRing};
inline const std::vector<std::size_t> kReferenceSizes{256, 65'536, 1'048'576, 33'554'432};

// Element `index` of what world rank `rank` sends; in [-1, 1).
float Value(int rank, std::size_t index);
// 64 bits over all bytes; several GB/s.
std::uint64_t Checksum(const void* data, std::size_t bytes);
// The same purpose with several threads; another value.
std::uint64_t ChecksumOfLarge(const void* data, std::size_t bytes);

// A GPU that this process drives, with its buffers.
struct Lane {
  int world_rank = 0;
  Device device;
  CUstream stream = nullptr;
  CUdeviceptr send = 0;
  CUdeviceptr receive = 0;
  void* host = nullptr;  // pinned
};

struct Communicator {
  std::string name;
  std::vector<int> members;         // world ranks, in the communicator's order
  std::vector<ncclComm_t> handles;  // by lane; null where the lane is no member
};

struct WorkloadOptions {
  int gpus = 0;                 // of the whole job
  bool single_process = false;  // this process drives them all
  std::vector<Op> ops = kReferenceOps;
  std::vector<std::size_t> sizes = kReferenceSizes;
  double collective_limit_s = 60;  // longer means hung
  int worlds = 0;                  // so many communicators of all ranks and no others; 0: the reference set
  std::size_t room = 0;            // floats in each buffer, if the largest of `sizes` is smaller
};

class Workload {
 public:
  // Opens the devices and fills the buffers. Collective (each rank of the job calls it).
  Workload(Child& child, const Nccl& nccl, WorkloadOptions options);

  [[nodiscard]] const std::vector<Lane>& lanes() const { return lanes_; }
  [[nodiscard]] const WorkloadOptions& options() const { return options_; }

  // The reference set of communicators. Collective.
  void CreateAll();
  void DestroyAll();
  [[nodiscard]] std::vector<Communicator>& communicators() { return communicators_; }

  // For communicators beside the reference set. Collective over the whole job.
  // World ranks of each, the same lists on all ranks.
  std::vector<Communicator> CreateMany(const std::vector<std::string>& names, const std::vector<std::vector<int>>& members);
  Communicator Create(const std::string& name, const std::vector<int>& members);
  // Disjoint communicators made at once; returned is the one this lane is in (single process: each lane its own).
  Communicator Split(Communicator& parent, const std::string& name, int groups);
  void Destroy(Communicator& communicator);
  void Abort(Communicator& communicator);

  // Every op at every size on every communicator, without checks. Start-up is timed with it.
  void RunAll();
  // The same one at a time, outputs poisoned before and checked after; one checksum for each result of each lane.
  std::vector<std::uint64_t> VerifyAll();
  // What the results of the last VerifyAll or Verify are of, in the same order.
  [[nodiscard]] const std::vector<std::string>& names() const { return names_; }
  std::vector<std::uint64_t> Verify(Communicator& communicator);

  // Starts one op on the streams. The first bad NCCL result, 0 when all is well.
  ncclResult_t Launch(Communicator& communicator, Op op, std::size_t count);
  // Microseconds that one op takes where many are queued one after the other, the median of several such rows. Collective.
  double SteadyState(Communicator& communicator, Op op, std::size_t count);
  // Waits for the streams; Failure when they hang or fault, naming `what`.
  void Wait(const std::string& what, const Communicator* communicator = nullptr);
  // Checks the last result of `op` that is in the receive buffers; poisons nothing.
  std::vector<std::uint64_t> Check(Communicator& communicator, Op op, std::size_t count);
  void Poison(Communicator& communicator, Op op, std::size_t count);

  // Free memory of each lane's device.
  [[nodiscard]] std::vector<std::uint64_t> FreeBytes() const;

 private:
  std::vector<std::uint64_t> VerifyMore(Communicator& communicator);

  Child& child_;
  const Nccl& nccl_;
  WorkloadOptions options_;
  std::vector<Lane> lanes_;
  std::vector<Communicator> communicators_;
  std::vector<std::string> names_;
};

// "" when equal; else how many differ and which comes first.
std::string Difference(const std::vector<std::uint64_t>& now, const std::vector<std::uint64_t>& before,
                       const std::vector<std::string>& names);

}  // namespace amem::gpu
