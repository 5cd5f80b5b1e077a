#include "tests/gpu/workload.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <numeric>
#include <thread>

namespace amem::gpu {

namespace {

constexpr unsigned char kPoison = 0xAB;
constexpr std::size_t kSamples = 4096;

// What one member of a communicator ends up with.
std::size_t ResultCount(Op op, std::size_t count, std::size_t members) {
  const std::size_t part = count / members;
  switch (op) {
    case Op::kAllGather:
    case Op::kAllToAll:
      return part * members;
    case Op::kReduceScatter:
      return part;
    case Op::kAllReduce:
    case Op::kBroadcast:
    case Op::kRing:
      return count;
  }
  return 0;
}

// The exact result at one index, and how far a sum of floats may be from it.
double Expected(Op op, std::size_t count, const std::vector<int>& members, std::size_t me, std::size_t index, double& slack) {
  const std::size_t size = members.size();
  const std::size_t part = count / size;
  slack = 0;
  const auto sum = [&](std::size_t at) {
    double total = 0;
    for (const int rank : members) total += static_cast<double>(Value(rank, at));
    slack = 2e-7 * static_cast<double>(size * size);
    return total;
  };
  switch (op) {
    case Op::kAllReduce:
      return sum(index);
    case Op::kReduceScatter:
      return sum(me * part + index);
    case Op::kAllGather:
      return static_cast<double>(Value(members[index / part], index % part));
    case Op::kAllToAll:
      return static_cast<double>(Value(members[index / part], me * part + index % part));
    case Op::kBroadcast:
      return static_cast<double>(Value(members[0], index));
    case Op::kRing:
      return static_cast<double>(Value(members[(me + size - 1) % size], index));
  }
  return 0;
}

void CheckSamples(const Communicator& communicator, Op op, std::size_t count, int world_rank, const float* result) {
  const auto& members = communicator.members;
  const auto me = static_cast<std::size_t>(std::find(members.begin(), members.end(), world_rank) - members.begin());
  const std::size_t total = ResultCount(op, count, members.size());
  const std::size_t samples = std::min(total, kSamples);
  for (std::size_t i = 0; i < samples; ++i) {
    // Evenly spread, first and last element included.
    const std::size_t index = samples == total ? i : i * (total - 1) / (samples - 1);
    double slack = 0;
    const double expected = Expected(op, count, members, me, index, slack);
    const auto got = static_cast<double>(result[index]);
    if (std::abs(got - expected) <= slack) continue;  // false for NaN too
    throw Failure(Format("wrong result: %s of %zu floats on %s, rank %d, element %zu of %zu: got %.9g, expected %.9g%s",
                         OpText(op), count, communicator.name.c_str(), world_rank, index, total, got, expected,
                         std::memcmp(&result[index], "\xAB\xAB\xAB\xAB", 4) == 0 ? " (never written)" : ""));
  }
}

std::uint64_t Mix(std::uint64_t x) {
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ULL;
  x ^= x >> 29;
  return x;
}

// One thread for each lane; the first failure is thrown here.
template <class Body>
void ForLanes(std::vector<Lane>& lanes, const Body& body) {
  if (lanes.size() == 1) {
    body(0);
    return;
  }
  std::vector<std::exception_ptr> failures(lanes.size());
  std::vector<std::thread> threads;
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    threads.emplace_back([&, lane] {
      try {
        body(lane);
      } catch (...) {
        failures[lane] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

const char* OpText(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "all-reduce";
    case Op::kAllGather:
      return "all-gather";
    case Op::kReduceScatter:
      return "reduce-scatter";
    case Op::kAllToAll:
      return "all-to-all";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kRing:
      return "ring";
  }
  return "?";
}

std::optional<std::vector<Op>> ParseOps(const std::string& list) {
  if (list == "all") return kAllOps;
  if (list == "reference") return kReferenceOps;
  std::vector<Op> ops;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t comma = std::min(list.find(',', at), list.size());
    const std::string name = list.substr(at, comma - at);
    const auto op = std::find_if(kAllOps.begin(), kAllOps.end(), [&](Op one) { return name == OpText(one); });
    if (op == kAllOps.end()) return std::nullopt;
    ops.push_back(*op);
    at = comma + 1;
  }
  return ops;
}

float Value(int rank, std::size_t index) {
  std::uint32_t x = static_cast<std::uint32_t>(index) * 0x9E3779B1U ^ static_cast<std::uint32_t>(rank + 1) * 0x85EBCA6BU;
  x ^= x >> 15;
  x *= 0x2C1B3C6DU;
  x ^= x >> 12;
  x *= 0x297A2D39U;
  x ^= x >> 15;
  return static_cast<float>(static_cast<std::int32_t>(x >> 8) - (1 << 23)) * (1.0F / static_cast<float>(1 << 23));
}

std::uint64_t Checksum(const void* data, std::size_t bytes) {
  constexpr std::size_t kLanes = 8;  // independent chains hide the multiplier's latency
  std::uint64_t sums[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] = 0x9E3779B97F4A7C15ULL * (lane + 1);
  const auto* at = static_cast<const unsigned char*>(data);
  std::size_t left = bytes;
  while (left >= kLanes * 8) {
    std::uint64_t words[kLanes];
    std::memcpy(words, at, sizeof words);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] = (sums[lane] ^ words[lane]) * 0xFF51AFD7ED558CCDULL;
      sums[lane] ^= sums[lane] >> 31;
    }
    at += sizeof words;
    left -= sizeof words;
  }
  std::uint64_t total = Mix(bytes);
  for (const std::uint64_t sum : sums) total = Mix(total ^ sum) + sum;
  for (; left > 0; --left, ++at) total = Mix(total ^ *at);
  return total;
}

// By chunks of a fixed size, so that the result does not depend on how many threads there are.
std::uint64_t ChecksumOfLarge(const void* data, std::size_t bytes) {
  constexpr std::size_t kChunk = std::size_t{8} << 20;
  const std::size_t chunks = (bytes + kChunk - 1) / kChunk;
  std::vector<std::uint64_t> sums(chunks);
  const std::size_t workers = std::min<std::size_t>(chunks, std::clamp(std::thread::hardware_concurrency() / 8, 1U, 8U));
  const auto work = [&](std::size_t first) {
    for (std::size_t i = first; i < chunks; i += workers)
      sums[i] = Checksum(static_cast<const char*>(data) + i * kChunk, std::min(kChunk, bytes - i * kChunk));
  };
  std::vector<std::thread> threads;
  for (std::size_t worker = 1; worker < workers; ++worker) threads.emplace_back(work, worker);
  work(0);
  for (std::thread& thread : threads) thread.join();
  return Checksum(sums.data(), sums.size() * sizeof sums[0]);
}

Workload::Workload(Child& child, const Nccl& nccl, WorkloadOptions options)
    : child_(child), nccl_(nccl), options_(std::move(options)) {
  const Cuda& cuda = Cuda::Get();
  if (options_.gpus > cuda.devices) throw Skip(Format("%d GPUs needed, the driver reports %d", options_.gpus, cuda.devices));
  const std::size_t floats = *std::max_element(options_.sizes.begin(), options_.sizes.end());
  const std::size_t room = std::max(floats, options_.room);
  for (int rank = 0; rank < options_.gpus; ++rank) {
    if (!options_.single_process && rank != child.rank()) continue;
    Lane lane;
    lane.world_rank = rank;
    child.Stage(Format("opening device %d", rank));
    lane.device = Device::Open(rank);
    cuda.Check(cuda.StreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    cuda.Check(cuda.MemAlloc(&lane.send, room * 4), Format("cuMemAlloc of %zu bytes", room * 4));
    cuda.Check(cuda.MemAlloc(&lane.receive, room * 4), Format("cuMemAlloc of %zu bytes", room * 4));
    cuda.Check(cuda.MemHostAlloc(&lane.host, floats * 4, CU_MEMHOSTALLOC_PORTABLE),
               Format("cuMemHostAlloc of %zu bytes", floats * 4));
    lanes_.push_back(lane);
  }
  child.Stage("filling the buffers");
  ForLanes(lanes_, [&](std::size_t index) {
    Lane& lane = lanes_[index];
    lane.device.MakeCurrent();
    auto* values = static_cast<float*>(lane.host);
    for (std::size_t i = 0; i < floats; ++i) values[i] = Value(lane.world_rank, i);
    cuda.Check(cuda.MemcpyHtoDAsync(lane.send, lane.host, floats * 4, lane.stream), "cuMemcpyHtoDAsync of the input");
  });
  Wait("filling the buffers");
}

// ---- communicators -------------------------------------------------------------------------------------------------------

std::vector<Communicator> Workload::CreateMany(const std::vector<std::string>& names,
                                               const std::vector<std::vector<int>>& members) {
  if (lanes_.size() > 1 && nccl_.GroupStart == nullptr) throw Skip("this libnccl has no ncclGroupStart");
  std::vector<int> makers;
  for (const auto& ranks : members) makers.push_back(options_.single_process ? 0 : ranks.front());
  child_.Stage("exchanging ids of " + names.front() + "…");
  const auto ids = child_.ExchangeIds(makers, [&] {
    ncclUniqueId id{};
    nccl_.Check(nccl_.GetUniqueId(&id), "ncclGetUniqueId");
    return id;
  });
  std::vector<Communicator> made;
  for (std::size_t i = 0; i < names.size(); ++i) {
    Communicator communicator{names[i], members[i], std::vector<ncclComm_t>(lanes_.size(), nullptr)};
    child_.Stage("creating communicator " + names[i]);
    const bool group = lanes_.size() > 1;
    if (group) nccl_.Check(nccl_.GroupStart(), "ncclGroupStart");
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      const auto place = std::find(members[i].begin(), members[i].end(), lanes_[lane].world_rank);
      if (place == members[i].end()) continue;
      lanes_[lane].device.MakeCurrent();
      nccl_.Check(nccl_.CommInitRank(&communicator.handles[lane], static_cast<int>(members[i].size()), ids[i],
                                     static_cast<int>(place - members[i].begin())),
                  "ncclCommInitRank of " + names[i]);
    }
    if (group) nccl_.Check(nccl_.GroupEnd(), "ncclGroupEnd after ncclCommInitRank of " + names[i]);
    made.push_back(std::move(communicator));
  }
  return made;
}

void Workload::CreateAll() {
  std::vector<std::string> names;
  std::vector<std::vector<int>> members;
  std::vector<int> world(static_cast<std::size_t>(options_.gpus));
  std::iota(world.begin(), world.end(), 0);
  for (int i = 0; i < (options_.worlds > 0 ? options_.worlds : 4); ++i) {
    names.push_back(Format("world%d", i));
    members.push_back(world);
  }
  // Neighbours, then the halves against each other: {0,1},{2,3} and {0,2},{1,3} for four. With two GPUs both are {0,1}.
  const int half = options_.worlds > 0 ? 0 : options_.gpus / 2;
  for (int i = 0; i < half; ++i) {
    names.push_back(Format("neighbours%d", i));
    members.push_back({2 * i, 2 * i + 1});
  }
  for (int i = 0; i < half; ++i) {
    names.push_back(Format("halves%d", i));
    members.push_back({i, i + half});
  }
  communicators_ = CreateMany(names, members);
}

Communicator Workload::Create(const std::string& name, const std::vector<int>& members) {
  return CreateMany({name}, {members}).front();
}

Communicator Workload::Split(Communicator& parent, const std::string& name, int groups) {
  if (nccl_.CommSplit == nullptr) throw Skip("this libnccl has no ncclCommSplit");
  if (options_.single_process) throw Skip("splits are tested with one process per GPU");
  child_.Stage("splitting " + parent.name);
  const auto place = std::find(parent.members.begin(), parent.members.end(), lanes_[0].world_rank);
  if (place == parent.members.end()) return {name, {}, {nullptr}};
  const auto size = static_cast<int>(parent.members.size());
  const auto me = static_cast<int>(place - parent.members.begin());
  const int color = me * groups / size;
  Communicator child{name, {}, {nullptr}};
  for (int i = 0; i < size; ++i) {
    if (i * groups / size == color) child.members.push_back(parent.members[static_cast<std::size_t>(i)]);
  }
  lanes_[0].device.MakeCurrent();
  nccl_.Check(nccl_.CommSplit(parent.handles[0], color, me, &child.handles[0], nullptr), "ncclCommSplit of " + parent.name);
  return child;
}

void Workload::Destroy(Communicator& communicator) {
  child_.Stage("destroying " + communicator.name);
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (communicator.handles[lane] == nullptr) continue;
    lanes_[lane].device.MakeCurrent();
    nccl_.Check(nccl_.CommDestroy(communicator.handles[lane]), "ncclCommDestroy of " + communicator.name);
    communicator.handles[lane] = nullptr;
  }
}

void Workload::Abort(Communicator& communicator) {
  child_.Stage("aborting " + communicator.name);
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (communicator.handles[lane] == nullptr) continue;
    lanes_[lane].device.MakeCurrent();
    nccl_.Check(nccl_.CommAbort(communicator.handles[lane]), "ncclCommAbort of " + communicator.name);
    communicator.handles[lane] = nullptr;
  }
}

void Workload::DestroyAll() {
  for (Communicator& communicator : communicators_) Destroy(communicator);
  communicators_.clear();
}

// ---- collectives ---------------------------------------------------------------------------------------------------------

ncclResult_t Workload::Launch(Communicator& communicator, Op op, std::size_t count) {
  const std::size_t size = communicator.members.size();
  const std::size_t part = count / size;
  const bool group = lanes_.size() > 1 || op == Op::kAllToAll || op == Op::kRing;
  const void* functions[] = {reinterpret_cast<const void*>(nccl_.AllReduce),     reinterpret_cast<const void*>(nccl_.AllGather),
                             reinterpret_cast<const void*>(nccl_.ReduceScatter), reinterpret_cast<const void*>(nccl_.Send),
                             reinterpret_cast<const void*>(nccl_.Broadcast),     reinterpret_cast<const void*>(nccl_.Send)};
  if (functions[static_cast<std::size_t>(op)] == nullptr || (group && nccl_.GroupStart == nullptr))
    throw Skip(Format("this libnccl has no %s", OpText(op)));
  ncclResult_t first = group ? nccl_.GroupStart() : 0;
  const auto note = [&](ncclResult_t result) {
    if (first == 0) first = result;
  };
  for (std::size_t index = 0; index < lanes_.size(); ++index) {
    const ncclComm_t comm = communicator.handles[index];
    if (comm == nullptr) continue;
    const Lane& lane = lanes_[index];
    lane.device.MakeCurrent();
    const void* send = Pointer(lane.send);
    void* receive = Pointer(lane.receive);
    const auto me = static_cast<std::size_t>(
        std::find(communicator.members.begin(), communicator.members.end(), lane.world_rank) - communicator.members.begin());
    switch (op) {
      case Op::kAllReduce:
        note(nccl_.AllReduce(send, receive, count, kNcclFloat32, kNcclSum, comm, lane.stream));
        break;
      case Op::kAllGather:
        note(nccl_.AllGather(send, receive, part, kNcclFloat32, comm, lane.stream));
        break;
      case Op::kReduceScatter:
        note(nccl_.ReduceScatter(send, receive, part, kNcclFloat32, kNcclSum, comm, lane.stream));
        break;
      case Op::kBroadcast:
        note(nccl_.Broadcast(send, receive, count, kNcclFloat32, 0, comm, lane.stream));
        break;
      case Op::kAllToAll:
        for (std::size_t peer = 0; peer < size; ++peer) {
          note(nccl_.Send(Pointer(lane.send + peer * part * 4), part, kNcclFloat32, static_cast<int>(peer), comm, lane.stream));
          note(nccl_.Recv(Pointer(lane.receive + peer * part * 4), part, kNcclFloat32, static_cast<int>(peer), comm,
                          lane.stream));
        }
        break;
      case Op::kRing:
        note(nccl_.Send(send, count, kNcclFloat32, static_cast<int>((me + 1) % size), comm, lane.stream));
        note(nccl_.Recv(receive, count, kNcclFloat32, static_cast<int>((me + size - 1) % size), comm, lane.stream));
        break;
    }
  }
  if (group) note(nccl_.GroupEnd());
  return first;
}

double Workload::SteadyState(Communicator& communicator, Op op, std::size_t count) {
  const std::string what = Format("%s of %zu floats, many in a row", OpText(op), count);
  child_.Stage(what);
  constexpr int kRows = 7;
  const int in_row = count <= 8192 ? 100 : count <= 1 << 20 ? 30 : count <= 1 << 25 ? 8 : 3;
  std::vector<double> rows;
  for (int row = -1; row < kRows; ++row) {  // the first warms up
    child_.Barrier("before a row of collectives");
    const double start = Now();
    for (int i = 0; i < in_row; ++i) nccl_.Check(Launch(communicator, op, count), what);
    Wait(what, &communicator);
    if (row >= 0) rows.push_back(1e6 * (Now() - start) / in_row);
  }
  std::nth_element(rows.begin(), rows.begin() + kRows / 2, rows.end());
  return rows[kRows / 2];
}

void Workload::Wait(const std::string& what, const Communicator* communicator) {
  const Cuda& cuda = Cuda::Get();
  const double start = Now();
  double next_look = start + 1;
  for (std::size_t index = 0; index < lanes_.size(); ++index) {
    const Lane& lane = lanes_[index];
    lane.device.MakeCurrent();
    for (;;) {
      const CUresult result = cuda.StreamQuery(lane.stream);
      if (result == CUDA_SUCCESS) break;
      if (result != CUDA_ERROR_NOT_READY)
        throw Failure(Format("%s on device %d: %s", what.c_str(), lane.device.ordinal, cuda.Name(result).c_str()));
      const double now = Now();
      if (now > next_look && communicator != nullptr && communicator->handles[index] != nullptr &&
          nccl_.CommGetAsyncError != nullptr) {
        next_look = now + 1;
        ncclResult_t async = 0;
        nccl_.CommGetAsyncError(communicator->handles[index], &async);
        if (async != 0 && async != 7) throw Failure(what + ": asynchronous error: " + nccl_.Describe(async));
      }
      if (now - start > options_.collective_limit_s || now > child_.deadline())
        throw Failure(Format("%s on device %d hangs: not done after %.0f s", what.c_str(), lane.device.ordinal, now - start));
      if (now - start > 0.01) {
        const timespec nap{0, 200'000};
        nanosleep(&nap, nullptr);
      }
    }
  }
}

void Workload::RunAll() {
  for (Communicator& communicator : communicators_) {
    child_.Stage("collectives on " + communicator.name);
    for (const Op op : options_.ops) {
      for (const std::size_t count : options_.sizes) {
        nccl_.Check(Launch(communicator, op, count),
                    Format("%s of %zu floats on %s", OpText(op), count, communicator.name.c_str()));
      }
    }
    Wait("collectives on " + communicator.name, &communicator);
  }
}

void Workload::Poison(Communicator& communicator, Op op, std::size_t count) {
  const Cuda& cuda = Cuda::Get();
  const std::size_t bytes = 4 * ResultCount(op, count, communicator.members.size());
  for (std::size_t index = 0; index < lanes_.size(); ++index) {
    if (communicator.handles[index] == nullptr) continue;
    lanes_[index].device.MakeCurrent();
    cuda.Check(cuda.MemsetD8Async(lanes_[index].receive, kPoison, bytes, lanes_[index].stream),
               "cuMemsetD8Async of the output");
  }
}

std::vector<std::uint64_t> Workload::Check(Communicator& communicator, Op op, std::size_t count) {
  const Cuda& cuda = Cuda::Get();
  const std::size_t bytes = 4 * ResultCount(op, count, communicator.members.size());
  const std::string what = Format("%s of %zu floats on %s", OpText(op), count, communicator.name.c_str());
  for (std::size_t index = 0; index < lanes_.size(); ++index) {
    if (communicator.handles[index] == nullptr) continue;
    lanes_[index].device.MakeCurrent();
    cuda.Check(cuda.MemcpyDtoHAsync(lanes_[index].host, lanes_[index].receive, bytes, lanes_[index].stream),
               "cuMemcpyDtoHAsync of the output of " + what);
  }
  Wait(what, &communicator);
  std::vector<std::uint64_t> sums(lanes_.size(), 0);
  ForLanes(lanes_, [&](std::size_t index) {
    if (communicator.handles[index] == nullptr) return;
    CheckSamples(communicator, op, count, lanes_[index].world_rank, static_cast<const float*>(lanes_[index].host));
    sums[index] = ChecksumOfLarge(lanes_[index].host, bytes);
  });
  std::vector<std::uint64_t> mine;
  for (std::size_t index = 0; index < lanes_.size(); ++index) {
    if (communicator.handles[index] != nullptr) mine.push_back(sums[index]);
  }
  return mine;
}

std::vector<std::uint64_t> Workload::Verify(Communicator& communicator) {
  names_.clear();
  return VerifyMore(communicator);
}

std::vector<std::uint64_t> Workload::VerifyMore(Communicator& communicator) {
  std::vector<std::uint64_t> sums;
  for (const Op op : options_.ops) {
    for (const std::size_t count : options_.sizes) {
      const std::string what = Format("%s of %zu floats on %s", OpText(op), count, communicator.name.c_str());
      child_.Stage("checking " + what);
      Poison(communicator, op, count);
      nccl_.Check(Launch(communicator, op, count), what);
      const auto result = Check(communicator, op, count);
      sums.insert(sums.end(), result.begin(), result.end());
      names_.insert(names_.end(), result.size(), what);
    }
  }
  return sums;
}

std::vector<std::uint64_t> Workload::VerifyAll() {
  std::vector<std::uint64_t> sums;
  names_.clear();
  for (Communicator& communicator : communicators_) {
    const auto more = VerifyMore(communicator);
    sums.insert(sums.end(), more.begin(), more.end());
  }
  return sums;
}

std::string Difference(const std::vector<std::uint64_t>& now, const std::vector<std::uint64_t>& before,
                       const std::vector<std::string>& names) {
  if (now.size() != before.size()) return Format("%zu results in place of %zu", now.size(), before.size());
  std::size_t differ = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i] == before[i]) continue;
    if (differ++ == 0) first = i;
  }
  if (differ == 0) return {};
  return Format("%zu of %zu results are not bit-identical to those before, the first is %s", differ, now.size(),
                first < names.size() ? names[first].c_str() : "?");
}

std::vector<std::uint64_t> Workload::FreeBytes() const {
  std::vector<std::uint64_t> bytes;
  for (const Lane& lane : lanes_) bytes.push_back(lane.device.Memory().free_bytes);
  return bytes;
}

}  // namespace amem::gpu
