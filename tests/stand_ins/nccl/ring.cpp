// The all-reduce: floats are added in a ring through mapped peer memory, and over the network between hosts.
#include <algorithm>

#include "tests/stand_ins/cuda/control.h"
#include "tests/stand_ins/nccl/channel.h"

namespace stand_in {
namespace {

// The first page of a rank's ring buffer. The flags live in device memory and count up for ever: a pause that lost a byte of
// them would hang the next collective.
struct RingHeader {
  std::atomic<std::uint64_t> ready;  // chunks that its owner has put there
  std::atomic<std::uint64_t> taken;  // chunks that the next rank has read
};
constexpr size_t kHeaderBytes = 4096;

// One way of the ring. Within a host it is one place in a mapped buffer.
struct Way {
  std::atomic<std::uint64_t>*ready = nullptr, *taken = nullptr;
  CUdeviceptr buffer = 0;      // of a rank of this host
  Channel* channel = nullptr;  // to (from) another host
  std::uint64_t ahead = 0;     // by how much the channel's steps are ahead of the chunks
};

struct RingWork {
  Way own, from;  // to the next rank, and from the one before
  const float* input;
  float* output;
  std::uint64_t count, first_chunk;
  int rank, ranks, element_capacity;
  const Network* network;
  int* failed;
};

RingHeader& HeaderAt(CUdeviceptr buffer) { return *reinterpret_cast<RingHeader*>(buffer); }
float* PayloadOf(const Way& way, std::uint64_t step, std::uint64_t elements) {
  if (way.channel != nullptr) return reinterpret_cast<float*>(way.channel->At(step, elements * sizeof(float)));
  return reinterpret_cast<float*>(way.buffer + kHeaderBytes);
}

bool WaitFor(const std::atomic<std::uint64_t>& flag, std::uint64_t value, const Network* network) {
  const auto deadline = Clock::now() + kPatience;
  for (int spins = 0; flag.load(std::memory_order_acquire) < value; ++spins) {
    if (Clock::now() > deadline || (network != nullptr && (network->failed || network->stop))) return false;
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
  const Way& way = work.from;
  const std::uint64_t step = chunk + way.ahead;
  if (!WaitFor(*way.ready, step, work.network)) return false;
  const float* payload = PayloadOf(way, step, elements);
  for (std::uint64_t i = 0; i < elements; ++i) each(i, payload[i]);
  way.taken->store(step, std::memory_order_release);
  return true;
}

template <class Value>
bool Put(const RingWork& work, std::uint64_t chunk, std::uint64_t elements, const Value& value) {
  const Way& way = work.own;
  const std::uint64_t step = chunk + way.ahead, places = way.channel == nullptr ? 1 : kSlots;
  if (step > places && !WaitFor(*way.taken, step - places, work.network)) return false;
  float* payload = PayloadOf(way, step, elements);
  for (std::uint64_t i = 0; i < elements; ++i) payload[i] = value(i);
  if (way.channel != nullptr) way.channel->bytes.at(Channel::Slot(step)) = elements * sizeof(float);
  way.ready->store(step, std::memory_order_release);
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

static Way WithinHost(CUdeviceptr buffer) { return {&HeaderAt(buffer).ready, &HeaderAt(buffer).taken, buffer, nullptr, 0}; }
static Way ToOtherHost(Channel& channel, std::uint64_t chunks) {
  return {&channel.ready, &channel.taken, 0, &channel, channel.steps - chunks};
}

// The proxy knows what will arrive, and how much, before the kernel runs.
static void WantChunks(Channel& channel, size_t count, size_t capacity) {
  for (size_t begin = 0; begin < count; begin += capacity)
    for (int lap = 0; lap < 2; ++lap) Want(channel, std::min(capacity, count - begin) * sizeof(float));
}

Result RingAllReduce(Comm& comm, const float* input, float* output, size_t count, CUstream stream) {
  int failed = 0;
  RingWork work{};
  Network* const network = comm.network;
  const size_t capacity = StepBytes(comm, comm.own[0].bytes - kHeaderBytes) / sizeof(float);
  const std::uint64_t chunks = 2 * ((count + capacity - 1) / capacity);
  const bool sends = network != nullptr && network->sends, receives = network != nullptr && network->receives;
  if (receives) WantChunks(network->from_before, count, capacity);
  work.own = sends ? ToOtherHost(network->to_next, comm.chunks) : WithinHost(comm.own[0].address);
  work.from = receives ? ToOtherHost(network->from_before, comm.chunks)
                       : WithinHost(comm.ranks == 1 ? comm.own[0].address : comm.peer[0].address);
  if (receives) network->from_before.steps += chunks;
  work.input = input;
  work.output = output;
  work.count = count;
  work.first_chunk = comm.chunks + 1;
  work.rank = comm.rank;
  work.ranks = comm.ranks;
  work.element_capacity = static_cast<int>(capacity);
  work.network = network;
  work.failed = &failed;
  const RingWork* argument = &work;
  void* parameters[] = {&argument};
  static HostKernel kernel{&RingKernel};
  CU(comm.cu->launch(reinterpret_cast<CUfunction>(&kernel), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
  if (failed != 0) return kRemote;
  if (sends) network->to_next.steps += chunks;
  comm.chunks += chunks;
  return kSuccess;
}

}  // namespace stand_in
