#include "tests/stand_ins/nccl/channel.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/stand_ins/cuda/control.h"

namespace stand_in {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{4} << 20;

const NetTable* FindNet(const char* name) {
  if (std::strcmp(name, "ib") == 0) return kNetIb.name == nullptr ? nullptr : &kNetIb;
  void* const plugin = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) std::fprintf(stderr, "stand-in NCCL: %s\n", dlerror());
  return plugin == nullptr ? nullptr : static_cast<const NetTable*>(dlsym(plugin, "ncclNetPlugin_v8"));
}

Result Of(const char* what, int result) {
  if (result != kSuccess) std::fprintf(stderr, "stand-in NCCL: %s of the network answered %d\n", what, result);
  return static_cast<Result>(result);
}

NetHandle HandleOf(const Comm& comm, int from, int to) {
  NetHandle handle{};
  std::snprintf(handle.name, sizeof handle.name, "stand-in-net-%s-%d-%d", comm.job.c_str(), from, to);
  return handle;
}

// ---- the thread that connects

Result Register(const Comm& comm, Channel& channel, int region, std::size_t offset, std::size_t bytes, bool by_dma_buf) {
  const NetTable& net = *comm.network->table;
  auto* const data = reinterpret_cast<char*>(channel.buffer.address) + offset;
  void** const handle = &channel.regions.at(static_cast<std::size_t>(region));
  if (!by_dma_buf) return Of("regMr", net.reg_mr(channel.comm, data, bytes, kGpuMemory, handle));
  int descriptor = -1;
  CU(comm.cu->range_handle(&descriptor, channel.buffer.address + offset, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
  const int registered = net.reg_mr_dma_buf(channel.comm, data, bytes, kGpuMemory, 0, descriptor, handle);
  close(descriptor);
  return Of("regMrDmaBuf", registered);
}

// What is sent is registered by a dma-buf, what is received by its address.
Result MakeBuffer(Comm& comm, Channel& channel, bool by_dma_buf) {
  TRY(Allocate(*comm.cu, comm.device, kBufferBytes, channel.buffer));
  TRY(Register(comm, channel, 0, 0, kSlots * kSlotBytes, by_dma_buf));
  return Register(comm, channel, 1, kSlots * kSlotBytes, kSlots * kSmall, by_dma_buf);
}

Result ConnectAll(Comm& comm) {
  Network& network = *comm.network;
  comm.cu->set_context(comm.context);
  const int before = (comm.rank + comm.ranks - 1) % comm.ranks, next = (comm.rank + 1) % comm.ranks;
  NetHandle own = HandleOf(comm, before, comm.rank), other = HandleOf(comm, comm.rank, next);
  TRY(Of("init", network.table->init(nullptr)));
  if (network.receives) TRY(Of("listen", network.table->listen(0, &own, &network.listening)));
  const auto deadline = Clock::now() + kPatience;
  for (;;) {
    void* device_handle = nullptr;
    if (network.sends && network.to_next.comm == nullptr)
      TRY(Of("connect", network.table->connect(0, &other, &network.to_next.comm, &device_handle)));
    if (network.receives && network.from_before.comm == nullptr)
      TRY(Of("accept", network.table->accept(network.listening, &network.from_before.comm, &device_handle)));
    if ((!network.sends || network.to_next.comm != nullptr) && (!network.receives || network.from_before.comm != nullptr))
      break;
    if (Clock::now() > deadline) return kRemote;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (network.sends) TRY(MakeBuffer(comm, network.to_next, !Legacy()));
  if (network.receives) TRY(MakeBuffer(comm, network.from_before, false));
  return kSuccess;
}

Result GiveUp(Comm& comm, Channel& channel) {
  Result result = kSuccess;
  for (void* const region : channel.regions)
    if (region != nullptr)
      if (const Result gone = Of("deregMr", comm.network->table->dereg_mr(channel.comm, region)); gone != kSuccess)
        result = gone;
  return result;
}

Result DisconnectAll(Comm& comm) {
  Network& network = *comm.network;
  comm.cu->set_context(comm.context);
  Result result = GiveUp(comm, network.to_next);
  if (const Result gone = GiveUp(comm, network.from_before); gone != kSuccess) result = gone;
  if (network.to_next.comm != nullptr) network.table->close_send(network.to_next.comm);
  if (network.from_before.comm != nullptr) network.table->close_receive(network.from_before.comm);
  if (network.listening != nullptr) network.table->close_listen(network.listening);
  for (Channel* const channel : {&network.to_next, &network.from_before})
    if (const Result freed = Free(*comm.cu, channel->buffer); freed != kSuccess) result = freed;
  return result;
}

template <class Work>
Result OnAThread(const Work& work) {
  Result result = kSuccess;
  std::thread([&] { result = work(); }).join();
  return result;
}

// ---- the thread that moves

void* RegionOf(const Channel& channel, std::size_t bytes) { return channel.regions[bytes <= kSmall ? 1 : 0]; }

bool ProgressSend(const NetTable& net, Channel& channel, bool& moved) {
  if (channel.begun < channel.ready.load(std::memory_order_acquire)) {
    const std::uint64_t step = channel.begun + 1;
    const std::size_t slot = Channel::Slot(step), bytes = channel.bytes.at(slot);
    if (net.isend(channel.comm, channel.At(step, bytes), static_cast<int>(bytes), 0, RegionOf(channel, bytes),
                  &channel.requests.at(slot)) != kSuccess)
      return false;
    if (channel.requests.at(slot) != nullptr) ++channel.begun, moved = true;
  }
  if (channel.ended == channel.begun) return true;
  int done = 0;
  if (net.test(channel.requests.at(Channel::Slot(channel.ended + 1)), &done, nullptr) != kSuccess) return false;
  if (done != 0) channel.taken.store(++channel.ended, std::memory_order_release), moved = true;
  return true;
}

bool BeginReceive(const NetTable& net, Channel& channel, bool& moved) {
  const std::lock_guard lock(channel.guard);
  if (channel.wanted.empty() || channel.begun - channel.taken.load(std::memory_order_acquire) == kSlots) return true;
  const std::uint64_t step = channel.begun + 1;
  const std::size_t wanted = channel.wanted.front();
  void *data = channel.At(step, wanted), *region = RegionOf(channel, wanted);
  int bytes = static_cast<int>(wanted), tag = 0;
  void*& request = channel.requests.at(Channel::Slot(step));
  if (net.irecv(channel.comm, 1, &data, &bytes, &tag, &region, &request) != kSuccess) return false;
  if (request == nullptr) return true;
  channel.wanted.pop_front();
  channel.bytes.at(Channel::Slot(step)) = wanted;
  ++channel.begun;
  return moved = true;
}

bool ProgressReceive(const NetTable& net, Channel& channel, bool& moved) {
  if (!BeginReceive(net, channel, moved)) return false;
  if (channel.ended == channel.begun) return true;
  const std::uint64_t step = channel.ended + 1;
  const std::size_t slot = Channel::Slot(step);
  int done = 0, bytes = 0;
  if (channel.requests.at(slot) != nullptr && net.test(channel.requests.at(slot), &done, &bytes) != kSuccess) return false;
  if (done == 0 && channel.requests.at(slot) != nullptr) return true;
  moved = true;
  if (!channel.flushing.at(slot) && channel.bytes.at(slot) > kSmall) {
    void *data = channel.At(step, channel.bytes.at(slot)), *region = RegionOf(channel, channel.bytes.at(slot));
    channel.flushing.at(slot) = true;
    return net.iflush(channel.comm, 1, &data, &bytes, &region, &channel.requests.at(slot)) == kSuccess;
  }
  channel.flushing.at(slot) = false;
  channel.ready.store(++channel.ended, std::memory_order_release);
  return true;
}

// A communicator that is destroyed has all its sends completed first.
bool HasEnded(const Network& network) {
  if (!network.stop || network.aborted) return network.stop;
  return network.to_next.taken == network.to_next.ready || Clock::now() > network.until;
}

void Progress(Comm* comm) {
  Network& network = *comm->network;
  comm->cu->set_context(comm->context);
  for (int idle = 0; !HasEnded(network) && !network.failed;) {
    bool moved = false;
    const bool sent = !network.sends || ProgressSend(*network.table, network.to_next, moved);
    const bool received = !network.receives || ProgressReceive(*network.table, network.from_before, moved);
    if (!sent || !received) network.failed = true;
    idle = moved ? 0 : idle + 1;
    if (idle > 20) std::this_thread::sleep_for(std::chrono::microseconds(idle > 100 ? 500 : 20));
  }
}

// ---- kernels

struct Message {
  Comm* comm;
  const float* from;
  float* to;
  std::size_t count;
  std::uint64_t step;  // its first
  bool failed;
};

bool Await(const Network& network, const std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  const auto deadline = Clock::now() + kPatience;
  while (counter.load(std::memory_order_acquire) < value) {
    if (network.failed || network.stop || Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

template <class Part>
bool EachPart(std::size_t count, std::uint64_t step, const Part& part) {
  constexpr std::size_t kMost = kSlotBytes / sizeof(float);
  for (std::size_t begin = 0; begin < count; begin += kMost, ++step)
    if (!part(begin, std::min(kMost, count - begin) * sizeof(float), step)) return false;
  return true;
}

void SendKernel(void** parameters) {
  Message& message = **static_cast<Message**>(parameters[0]);
  Network& network = *message.comm->network;
  Channel& channel = network.to_next;
  message.failed = !EachPart(message.count, message.step, [&](std::size_t begin, std::size_t bytes, std::uint64_t step) {
    if (step > kSlots && !Await(network, channel.taken, step - kSlots)) return false;
    std::memcpy(channel.At(step, bytes), message.from + begin, bytes);
    channel.bytes.at(Channel::Slot(step)) = bytes;
    channel.ready.store(step, std::memory_order_release);
    return true;
  });
}

void ReceiveKernel(void** parameters) {
  Message& message = **static_cast<Message**>(parameters[0]);
  Network& network = *message.comm->network;
  Channel& channel = network.from_before;
  message.failed = !EachPart(message.count, message.step, [&](std::size_t begin, std::size_t bytes, std::uint64_t step) {
    if (!Await(network, channel.ready, step)) return false;
    std::memcpy(message.to + begin, channel.At(step, bytes), bytes);
    channel.taken.store(step, std::memory_order_release);
    return true;
  });
}

Result Launch(Comm& comm, void (*kernel)(void**), Message& message, CUstream stream) {
  const Message* argument = &message;
  void* parameters[] = {&argument};
  HostKernel host_kernel{kernel};
  CU(comm.cu->launch(reinterpret_cast<CUfunction>(&host_kernel), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
  return message.failed ? kRemote : kSuccess;
}

std::uint64_t StepsOf(std::size_t count) { return (count * sizeof(float) + kSlotBytes - 1) / kSlotBytes; }

}  // namespace

Result ConnectNetwork(Comm& comm) {
  const char* const name = std::getenv("STAND_IN_NET");
  if (name == nullptr || comm.ranks == 1) return kSuccess;
  const NetTable* const table = FindNet(name);
  if (table == nullptr) return kSystem;
  comm.network = new Network;
  comm.network->table = table;
  comm.network->sends = !SharesHostWith(comm, (comm.rank + 1) % comm.ranks);
  comm.network->receives = !SharesHostWith(comm, (comm.rank + comm.ranks - 1) % comm.ranks);
  TRY(OnAThread([&] { return ConnectAll(comm); }));
  comm.network->progress = std::thread(&Progress, &comm);
  return kSuccess;
}

void EndProgress(Comm& comm) {
  if (comm.network == nullptr || !comm.network->progress.joinable()) return;
  comm.network->aborted = comm.aborted.load();
  comm.network->until = Clock::now() + std::chrono::seconds(10);
  comm.network->stop = true;
  comm.network->progress.join();
}

Result CloseNetwork(Comm& comm) {
  if (comm.network == nullptr) return kSuccess;
  const Result result = OnAThread([&] { return DisconnectAll(comm); });
  delete comm.network;
  comm.network = nullptr;
  return result;
}

void Want(Channel& channel, std::size_t bytes) {
  const std::lock_guard lock(channel.guard);
  channel.wanted.push_back(bytes);
}

bool SendsTo(const Comm& comm, int rank) {
  return comm.network != nullptr && comm.network->sends && rank == (comm.rank + 1) % comm.ranks;
}
bool ReceivesFrom(const Comm& comm, int rank) {
  return comm.network != nullptr && comm.network->receives && (rank + 1) % comm.ranks == comm.rank;
}

Result NetworkSend(Comm& comm, const float* data, std::size_t count, CUstream stream) {
  Channel& channel = comm.network->to_next;
  Message message{&comm, data, nullptr, count, channel.steps + 1, false};
  TRY(Launch(comm, SendKernel, message, stream));
  channel.steps += StepsOf(count);
  return kSuccess;
}

// The proxy knows of the operation before the kernel runs, as NCCL's does, and goes on with it if that is refused.
Result NetworkReceive(Comm& comm, float* data, std::size_t count, CUstream stream) {
  Channel& channel = comm.network->from_before;
  Message message{&comm, nullptr, data, count, channel.steps + 1, false};
  EachPart(count, message.step, [&](std::size_t, std::size_t bytes, std::uint64_t) { return Want(channel, bytes), true; });
  channel.steps += StepsOf(count);
  return Launch(comm, ReceiveKernel, message, stream);
}

// For a benchmark: nanoseconds of a poll (0) or a post (1).
EXPORT double stand_in_nccl_time_verbs(Comm* comm, int which) {
  if (comm->network == nullptr || comm->network->table != &kNetIb) return 0;
  return which == 0 ? TimeOfPoll(comm->network->to_next.comm) : TimeOfPost(comm->network->to_next.comm);
}

}  // namespace stand_in
