// The all-reduce: floats are added in a ring through mapped peer memory.
#include <algorithm>

#include "tests/stand_ins/cuda/control.h"
#include "tests/stand_ins/nccl/nccl.h"

namespace stand_in {
namespace {

// The first page of a rank's ring buffer. The flags live in device memory and count up for ever: a pause that lost a byte of
// them would hang the next collective.
struct RingHeader {
  std::atomic<std::uint64_t> ready;  // chunks that its owner has put there
  std::atomic<std::uint64_t> taken;  // chunks that the next rank has read
};
constexpr size_t kHeaderBytes = 4096;

struct RingWork {
  CUdeviceptr own, from;  // ring buffers of this rank and of the one before
  const float* input;
  float* output;
  std::uint64_t count, first_chunk;
  int rank, ranks, element_capacity;
  int* failed;
};

RingHeader& HeaderAt(CUdeviceptr buffer) { return *reinterpret_cast<RingHeader*>(buffer); }
float* PayloadAt(CUdeviceptr buffer) { return reinterpret_cast<float*>(buffer + kHeaderBytes); }

bool WaitFor(const std::atomic<std::uint64_t>& flag, std::uint64_t value) {
  const auto deadline = Clock::now() + kPatience;
  for (int spins = 0; flag.load(std::memory_order_acquire) < value; ++spins) {
    if (Clock::now() > deadline) return false;
    if (spins < 200) {
      std::this_thread::yield();
    } else {  // more ranks than cores: let the others work
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

// Takes the chunk that the rank before put in its buffer; `each(i, value)` sees its elements.
template <class Each>
bool Take(const RingWork& work, std::uint64_t chunk, std::uint64_t elements, const Each& each) {
  if (!WaitFor(HeaderAt(work.from).ready, chunk)) return false;
  const float* payload = PayloadAt(work.from);
  for (std::uint64_t i = 0; i < elements; ++i) each(i, payload[i]);
  HeaderAt(work.from).taken.store(chunk, std::memory_order_release);
  return true;
}

template <class Value>
bool Put(const RingWork& work, std::uint64_t chunk, std::uint64_t elements, const Value& value) {
  if (!WaitFor(HeaderAt(work.own).taken, chunk - 1)) return false;
  float* payload = PayloadAt(work.own);
  for (std::uint64_t i = 0; i < elements; ++i) payload[i] = value(i);
  HeaderAt(work.own).ready.store(chunk, std::memory_order_release);
  return true;
}

// Two laps: sums go from rank 0 to the last, then the result goes round. Every rank puts and takes exactly two chunks per part.
bool RingPart(const RingWork& work, std::uint64_t begin, std::uint64_t elements, std::uint64_t chunk) {
  const float* input = work.input + begin;
  float* output = work.output + begin;
  const bool first = work.rank == 0, last = work.rank == work.ranks - 1;
  std::vector<float> sum(input, input + elements);
  const auto add = [&](std::uint64_t i, float value) { sum[i] = value + input[i]; };
  const auto keep = [&](std::uint64_t i, float value) { sum[i] = value; };
  const auto send = [&](std::uint64_t i) { return sum[i]; };
  if (!first && !Take(work, chunk, elements, add)) return false;
  if (!Put(work, chunk, elements, send)) return false;
  if (!Take(work, first ? chunk : chunk + 1, elements, [&](std::uint64_t i, float value) {
        if (first || !last) keep(i, value);
      }))
    return false;
  if (!Put(work, chunk + 1, elements, send)) return false;
  if (first && !Take(work, chunk + 1, elements, [](std::uint64_t, float) {})) return false;
  std::copy(sum.begin(), sum.end(), output);
  return true;
}

// As a kernel gets them: pointers to its arguments. The stand-in libcuda runs it before cuLaunchKernel returns.
void RingKernel(void** parameters) {
  const RingWork& work = **static_cast<const RingWork**>(parameters[0]);
  std::uint64_t chunk = work.first_chunk;
  for (std::uint64_t begin = 0; begin < work.count; chunk += 2) {
    const std::uint64_t elements =
        std::min<std::uint64_t>(work.count - begin, static_cast<std::uint64_t>(work.element_capacity));
    if (!RingPart(work, begin, elements, chunk)) {
      *work.failed = 1;
      return;
    }
    begin += elements;
  }
}

}  // namespace

Result RingAllReduce(Comm& comm, const float* input, float* output, size_t count, CUstream stream) {
  int failed = 0;
  RingWork work{};
  work.own = comm.own[0].address;
  work.from = comm.ranks == 1 ? comm.own[0].address : comm.peer[0].address;
  work.input = input;
  work.output = output;
  work.count = count;
  work.first_chunk = comm.chunks + 1;
  work.rank = comm.rank;
  work.ranks = comm.ranks;
  work.element_capacity = static_cast<int>((comm.own[0].bytes - kHeaderBytes) / sizeof(float));
  work.failed = &failed;
  const RingWork* argument = &work;
  void* parameters[] = {&argument};
  static HostKernel kernel{&RingKernel};
  CU(comm.cu->launch(reinterpret_cast<CUfunction>(&kernel), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
  if (failed != 0) return kRemote;
  const auto capacity = static_cast<std::uint64_t>(work.element_capacity);
  comm.chunks += 2 * ((count + capacity - 1) / capacity);
  return kSuccess;
}

}  // namespace stand_in
