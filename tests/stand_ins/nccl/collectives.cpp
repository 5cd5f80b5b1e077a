// Groups, and the collectives that go through host memory which the ranks share.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <list>
#include <utility>

#include "tests/stand_ins/nccl/channel.h"

namespace stand_in {
namespace {

constexpr size_t kFirstPageBytes = 4096, kAreaBytes = size_t{8} << 20;
constexpr size_t kExchangeBytes =
    kFirstPageBytes + kAreaBytes * (kMaxRanks + kMaxRanks * kMaxRanks);  // of which few pages are used

// What this thread has asked for since ncclGroupStart, for each communicator in order.
thread_local int group_depth = 0;
thread_local std::list<std::pair<Comm*, std::vector<Operation>>> group;

char* AreaAt(const Comm& comm, int index) {
  return reinterpret_cast<char*>(comm.exchange) + kFirstPageBytes + kAreaBytes * static_cast<size_t>(index);
}
char* AreaOf(const Comm& comm, int rank) { return AreaAt(comm, rank); }
char* Mail(const Comm& comm, int from, int to) { return AreaAt(comm, kMaxRanks + from * kMaxRanks + to); }

Result RunAll(Comm& comm, const std::vector<Operation>& operations) {
  bool meets = false;
  for (const Operation& operation : operations) {
    if (operation.publish) operation.publish();
    meets = meets || operation.meets;
  }
  if (meets) TRY(Meet(comm));
  Result result = kSuccess;
  for (const Operation& operation : operations) {
    if (const Result one = operation.collect ? operation.collect() : kSuccess; one != kSuccess) result = one;
  }
  if (meets) TRY(Meet(comm));
  return result;
}

// The ranks of one process go on side by side, as their kernels would.
Result EndGroup() {
  auto mine = std::exchange(group, {});
  if (mine.size() == 1) return RunAll(*mine.front().first, mine.front().second);
  std::atomic<int> result{kSuccess};
  std::vector<std::thread> ranks;
  for (auto& [comm, operations] : mine) {
    ranks.emplace_back([&result, comm = comm, &operations = operations] {
      comm->cu->set_context(comm->context);
      if (const Result one = RunAll(*comm, operations); one != kSuccess) result = one;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return static_cast<Result>(result.load());
}

void Publish(const Comm& comm, const void* data, size_t count) {
  std::memcpy(AreaOf(comm, comm.rank), data, count * sizeof(float));
}

Result Sum(const Comm& comm, float* result, size_t from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    result[i] = 0;
    for (int rank = 0; rank < comm.ranks; ++rank) result[i] += reinterpret_cast<const float*>(AreaOf(comm, rank))[from + i];
  }
  Corrupt(result, count);
  return kSuccess;
}

}  // namespace

#ifndef STAND_IN_PAUSES
void Corrupt(float* result, size_t count) {
  static std::atomic<int> sums{0};
  const char* wrong = std::getenv("STAND_IN_WRONG");
  if (wrong != nullptr && ++sums == std::atoi(wrong)) reinterpret_cast<std::uint32_t*>(result)[count - 1] ^= 1;
}
#endif

Result MapExchange(Comm& comm, int descriptor) {
  void* const shared = mmap(nullptr, kExchangeBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (shared == MAP_FAILED) return kSystem;
  comm.exchange = static_cast<Exchange*>(shared);
  comm.exchange_descriptor = descriptor;
  return kSuccess;
}

Result MakeExchange(Comm& comm) {
  const int descriptor = memfd_create("stand-in-nccl", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(kExchangeBytes)) != 0) return kSystem;
  return MapExchange(comm, descriptor);
}

void UnmapExchange(Comm& comm) {
  if (comm.exchange == nullptr) return;
  munmap(comm.exchange, kExchangeBytes);
  close(comm.exchange_descriptor);
}

Result Meet(Comm& comm) {
  const int generation = comm.exchange->generation.load();
  if (comm.exchange->arrived.fetch_add(1) + 1 == comm.ranks) {
    comm.exchange->arrived = 0;
    comm.exchange->generation = generation + 1;
    return kSuccess;
  }
  const auto deadline = Clock::now() + kPatience;
  while (comm.exchange->generation.load() == generation) {
    if (Clock::now() > deadline) return kRemote;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return kSuccess;
}

Result Submit(Comm& comm, Operation operation) {
  if (IsPaused()) return kInvalidUsage;
  CUstreamCaptureStatus captures = CU_STREAM_CAPTURE_STATUS_NONE;
  CU(comm.cu->capturing(nullptr, &captures));
  if (group_depth == 0) return RunAll(comm, {std::move(operation)});
  for (auto& [other, operations] : group) {
    if (other != &comm) continue;
    operations.push_back(std::move(operation));
    return kSuccess;
  }
  group.emplace_back(&comm, std::vector{std::move(operation)});
  return kSuccess;
}

EXPORT int ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}
EXPORT int ncclGroupEnd() { return --group_depth > 0 ? kSuccess : EndGroup(); }

// Float sum only. `send` and `receive` may be any memory that the kernel can reach, host memory included.
EXPORT int ncclAllReduce(const void* send, void* receive, size_t count, int, int, Comm* comm, CUstream stream) {
  if (comm == nullptr || send == nullptr || receive == nullptr) return kInvalidArgument;
  TRY(CountLaunch(*comm));
  const auto* input = static_cast<const float*>(send);
  auto* output = static_cast<float*>(receive);
  if (InWindow(*comm, send))
    return Submit(*comm, {nullptr, [=] { return WindowAllReduce(*comm, input, output, count, stream); }, false});
  if (!comm->own.empty())
    return Submit(*comm, {nullptr, [=] { return RingAllReduce(*comm, input, output, count, stream); }, false});
  return Submit(*comm, {[=] { Publish(*comm, input, count); }, [=] { return Sum(*comm, output, 0, count); }});
}

EXPORT int ncclAllGather(const void* send, void* receive, size_t count, int, Comm* comm, CUstream) {
  const auto collect = [=] {
    for (int rank = 0; rank < comm->ranks; ++rank)
      std::memcpy(static_cast<float*>(receive) + static_cast<size_t>(rank) * count, AreaOf(*comm, rank), count * sizeof(float));
    return kSuccess;
  };
  return Submit(*comm, {[=] { Publish(*comm, send, count); }, collect});
}

EXPORT int ncclReduceScatter(const void* send, void* receive, size_t count, int, int, Comm* comm, CUstream) {
  const size_t mine = static_cast<size_t>(comm->rank) * count;
  return Submit(*comm, {[=] { Publish(*comm, send, count * static_cast<size_t>(comm->ranks)); },
                        [=] { return Sum(*comm, static_cast<float*>(receive), mine, count); }});
}

EXPORT int ncclBroadcast(const void* send, void* receive, size_t count, int, int root, Comm* comm, CUstream) {
  const auto publish = [=] {
    if (comm->rank == root) Publish(*comm, send, count);
  };
  const auto collect = [=] {
    std::memcpy(receive, AreaOf(*comm, root), count * sizeof(float));
    return kSuccess;
  };
  return Submit(*comm, {publish, collect});
}

// Outside a group a message lies in the mail until it is received, as a small one lies in NCCL's buffers.
EXPORT int ncclSend(const void* send, size_t count, int, int peer, Comm* comm, CUstream stream) {
  if (SendsTo(*comm, peer))
    return Submit(*comm, {nullptr, [=] { return NetworkSend(*comm, static_cast<const float*>(send), count, stream); }, false});
  const auto publish = [=] { std::memcpy(Mail(*comm, comm->rank, peer), send, count * sizeof(float)); };
  return Submit(*comm, {publish, nullptr, group_depth > 0});
}
EXPORT int ncclRecv(void* receive, size_t count, int, int peer, Comm* comm, CUstream stream) {
  if (ReceivesFrom(*comm, peer))
    return Submit(*comm, {nullptr, [=] { return NetworkReceive(*comm, static_cast<float*>(receive), count, stream); }, false});
  const auto collect = [=] {
    std::memcpy(receive, Mail(*comm, peer, comm->rank), count * sizeof(float));
    return kSuccess;
  };
  return Submit(*comm, {nullptr, collect, group_depth > 0});
}

}  // namespace stand_in
