// What a program may do before, during and after a pause.
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>

#include "tests/gpu/claims.h"

namespace amem::gpu {
namespace {

// The devices on which this process has a primary context. Memory of ncclMemAlloc is open to all devices of the host, and a
// context on each would cost some 500 MiB there.
std::vector<int> Contexts(const Cuda& cuda) {
  std::vector<int> found;
  for (int device = 0; device < cuda.devices; ++device) {
    unsigned flags = 0;
    int active = 0;
    cuda.Check(cuda.PrimaryCtxGetState(device, &flags, &active), "cuDevicePrimaryCtxGetState");
    if (active != 0) found.push_back(device);
  }
  return found;
}

// Whether all that was launched has ended by itself, after five seconds at most.
bool Ends(Workload& work) {
  const Lane& lane = work.lanes()[0];
  lane.device.MakeCurrent();
  for (const double until = Now() + 5; Now() < until;) {
    if (Cuda::Get().StreamQuery(lane.stream) == CUDA_SUCCESS) return true;
    const timespec nap{0, 200'000};
    nanosleep(&nap, nullptr);
  }
  return false;
}

}  // namespace

void Communicators(Rank& rank) {
  if (rank.nccl.CommSplit == nullptr) throw Skip("this libnccl has no ncclCommSplit");
  Workload work = MakeWorkload(rank);
  Communicator first = work.Create("first", World(rank));
  Communicator short_lived = work.Create("short_lived", World(rank));
  Communicator parts = work.Split(first, "parts of first", 2);
  const auto of_first = work.Verify(first);
  work.Verify(short_lived);
  const auto of_parts = work.Verify(parts);
  work.Destroy(short_lived);
  rank.child.Barrier("one destroyed before the first cycle");
  Cycle(rank, work, "in cycle 1");
  ExpectSame(work, work.Verify(first), of_first, "first, after cycle 1");
  ExpectSame(work, work.Verify(parts), of_parts, "its split, after cycle 1");

  Communicator second = work.Create("second", World(rank));
  Communicator late_split = work.Split(second, "split of second", 2);
  const auto of_second = work.Verify(second);
  const auto of_late_split = work.Verify(late_split);
  work.Abort(second);
  rank.child.Barrier("one aborted between cycles");
  Cycle(rank, work, "in cycle 2");
  ExpectSame(work, work.Verify(first), of_first, "first, after cycle 2");
  ExpectSame(work, work.Verify(late_split), of_late_split, "split of an aborted communicator, after cycle 2");
  ExpectSame(work, of_second, of_first, "a communicator made between cycles");

  Communicator from_resumed = work.Split(first, "split after two cycles", 1);
  ExpectSame(work, work.Verify(from_resumed), of_first, "a split of a communicator that was paused twice");
  work.Abort(from_resumed);
  work.Destroy(parts);
  work.Destroy(late_split);
  work.Destroy(first);
  rank.child.Barrier("all gone");
  const Freed empty = Cycle(rank, work, "with no communicator left");
  rank.details["freed_without_communicators_mib"] = empty.LeastMib();
  Communicator last = work.Create("last", World(rank));
  ExpectSame(work, work.Verify(last), of_first, "a communicator made after all cycles");
  Cycle(rank, work, "at the end");
  ExpectSame(work, work.Verify(last), of_first, "the last communicator, after a cycle");
  work.Destroy(last);
}

void UserMemory(Rank& rank) {
  if (rank.nccl.MemAlloc == nullptr || rank.nccl.MemFree == nullptr) throw Skip("this libnccl has no ncclMemAlloc");
  const Cuda& cuda = Cuda::Get();
  Workload work = MakeWorkload(rank);
  const Lane& lane = work.lanes()[0];
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  const double without = Cycle(rank, work, "without user memory").LeastMib();
  const std::size_t most = *std::max_element(work.options().sizes.begin(), work.options().sizes.end());
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  void* memory = nullptr;
  rank.nccl.Check(rank.nccl.MemAlloc(&memory, kBytes), "ncclMemAlloc of 64 MiB");
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  const std::size_t bytes = std::min(kBytes, most * 4);
  auto* values = static_cast<float*>(lane.host);
  for (std::size_t i = 0; i < bytes / 4; ++i) values[i] = Value(lane.world_rank + 100, i);
  const std::uint64_t sum = Checksum(values, bytes);
  cuda.Check(cuda.MemsetD8Async(address, 0x5A, kBytes, lane.stream), "filling user memory");
  cuda.Check(cuda.MemcpyHtoDAsync(address, values, bytes, lane.stream), "copying into user memory");
  work.Wait("filling user memory");
  const auto read = [&](const std::string& when) {
    std::memset(lane.host, 0, bytes);
    cuda.Check(cuda.MemcpyDtoHAsync(lane.host, address, bytes, lane.stream), "reading user memory " + when);
    work.Wait("reading user memory " + when);
    rank.Expect(Checksum(lane.host, bytes) == sum, "the contents of ncclMemAlloc'd memory changed " + when);
    cuda.Check(cuda.MemcpyDtoHAsync(lane.host, address + kBytes - 256, 256, lane.stream), "reading its end");
    work.Wait("reading the end of user memory");
    const auto* end = static_cast<const unsigned char*>(lane.host);
    if (bytes < kBytes)
      rank.Expect(std::all_of(end, end + 256, [](unsigned char byte) { return byte == 0x5A; }),
                  "the end of user memory changed " + when);
  };
  read("before the pause");
  const double with = Cycle(rank, work, "with user memory").LeastMib();
  rank.details["user_mib"] = kBytes >> 20;
  rank.details["freed_more_with_it_mib"] = with - without;
  read("after the resume");
  // It must also still be memory that NCCL can use.
  const std::size_t count = std::min<std::size_t>(65'536, most);
  rank.nccl.Check(rank.nccl.AllReduce(memory, reinterpret_cast<void*>(lane.receive), count, kNcclFloat32, kNcclSum,
                                      world.handles[0], lane.stream),
                  "all-reduce out of user memory");
  work.Wait("all-reduce out of user memory", &world);
  read("after a collective that reads it");
  cuda.Check(cuda.MemcpyHtoDAsync(address, lane.host, 4, lane.stream), "writing user memory");
  ExpectSame(work, work.Verify(world), reference, "after the cycle");
  rank.nccl.Check(rank.nccl.MemFree(memory), "ncclMemFree");
  Cycle(rank, work, "with user memory freed");
  ExpectSame(work, work.Verify(world), reference, "with user memory freed");
  work.Destroy(world);
}

// The program uses its own memory while NCCL is paused, frees some of it, and destroys a communicator.
void WhilePaused(Rank& rank) {
  if (rank.nccl.MemAlloc == nullptr || rank.nccl.MemFree == nullptr) throw Skip("this libnccl has no ncclMemAlloc");
  const Cuda& cuda = Cuda::Get();
  const char* policy = std::getenv("AMEM_USER_MEMORY");
  const bool kept = policy == nullptr || std::string_view(policy) != "release";
  Workload work = MakeWorkload(rank);
  const Lane& lane = work.lanes()[0];
  Communicator world = work.Create("world", World(rank)), second = work.Create("second", World(rank));
  const auto reference = work.Verify(world);
  ExpectSame(work, work.Verify(second), reference, "on the second communicator");
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  void *used = nullptr, *freed = nullptr;
  rank.nccl.Check(rank.nccl.MemAlloc(&used, kBytes), "ncclMemAlloc of 32 MiB");
  rank.nccl.Check(rank.nccl.MemAlloc(&freed, kBytes), "ncclMemAlloc of 32 MiB more");
  const auto address = reinterpret_cast<CUdeviceptr>(used);
  const auto fill = [&](unsigned char value, const std::string& when) {
    cuda.Check(cuda.MemsetD8Async(address, value, kBytes, lane.stream), "filling user memory " + when);
    work.Wait("filling user memory " + when);
  };
  const auto expect = [&](unsigned char value, const std::string& when) {
    cuda.Check(cuda.MemcpyDtoHAsync(lane.host, address + kBytes - 4096, 4096, lane.stream), "reading user memory " + when);
    work.Wait("reading user memory " + when);
    const auto* bytes = static_cast<const unsigned char*>(lane.host);
    rank.Expect(std::all_of(bytes, bytes + 4096, [&](unsigned char byte) { return byte == value; }),
                "user memory is not what was written " + when);
  };
  fill(0x11, "before the pause");
  const std::vector<int> contexts = Contexts(cuda);
  rank.child.Barrier("before the pause");
  rank.Pause();
  rank.child.Barrier("all paused");
  if (kept) {
    expect(0x11, "while paused");
    fill(0x22, "while paused");
    expect(0x22, "while paused");
  }
  rank.nccl.Check(rank.nccl.MemFree(freed), "ncclMemFree while paused");
  work.Destroy(second);
  rank.child.Barrier("freed");
  rank.Resume();
  rank.child.Barrier("all resumed");
  rank.Expect(Contexts(cuda) == contexts, "the pause or the resume made a context on another device");
  rank.details["contexts"] = contexts.size();
  expect(kept ? 0x22 : 0x11, "after the resume");
  ExpectSame(work, work.Verify(world), reference, "after the resume");
  rank.nccl.Check(rank.nccl.MemFree(used), "ncclMemFree after the resume");
  Cycle(rank, work, "once more");
  ExpectSame(work, work.Verify(world), reference, "one cycle later");
  work.Destroy(world);
}

void RefusedWhilePaused(Rank& rank) {
  const Cuda& cuda = Cuda::Get();
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  rank.Pause();
  rank.child.Barrier("all paused");
  for (const Op op : {Op::kAllReduce, Op::kAllToAll}) {
    if (std::find(work.options().ops.begin(), work.options().ops.end(), op) == work.options().ops.end()) continue;
    rank.child.Stage(Format("trying %s while paused", OpText(op)));
    const ncclResult_t result = work.Launch(world, op, work.options().sizes.front());
    rank.Expect(result != 0 || rank.options.gpus < 2, Format("%s while paused was accepted", OpText(op)));
    rank.details[std::string(OpText(op)) + " while paused"] = rank.nccl.Describe(result);
  }
  work.lanes()[0].device.MakeCurrent();
  cuda.Check(cuda.CtxSynchronize(), "cuCtxSynchronize after the refused launches: the GPU must not have faulted");
  cuda.Check(cuda.MemsetD8Async(work.lanes()[0].receive, 0, 4096, work.lanes()[0].stream), "using own memory while paused");
  work.Wait("using own memory while paused");
  rank.child.Barrier("refused");
  rank.Resume();
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a refused launch and the resume");
  Cycle(rank, work, "once more");
  ExpectSame(work, work.Verify(world), reference, "one cycle later");
  work.Destroy(world);
}

void Idempotent(Rank& rank) {
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  const auto running = work.FreeBytes();
  rank.Resume("when nothing is paused");
  rank.child.Barrier("resumed while running");
  rank.Expect(work.FreeBytes() == running, "ncclResume of a running process changed its memory");
  ExpectSame(work, work.Verify(world), reference, "after ncclResume of a running process");
  rank.child.Barrier("checked");
  rank.Pause("the first time");
  rank.child.Barrier("all paused");
  const auto paused = work.FreeBytes();
  rank.child.Barrier("memory read");
  rank.Pause("the second time");
  rank.child.Barrier("all paused again");
  rank.Expect(work.FreeBytes() == paused, "a second ncclPause changed the memory");
  rank.child.Barrier("memory read");
  rank.Resume("the first time");
  rank.child.Barrier("all resumed");
  rank.Resume("the second time");
  rank.child.Barrier("all resumed again");
  ExpectSame(work, work.Verify(world), reference, "after two pauses and two resumes");
  // The calls of the original plugin that PyNccl wrappers also make.
  if (rank.amem.MemStats != nullptr) rank.amem.Check(rank.amem.MemStats(), rank.nccl, "ncclMemStats");
  if (rank.amem.GetGroupId != nullptr) {
    int group = -1;
    rank.amem.Check(rank.amem.GetGroupId(&group), rank.nccl, "ncclGetGroupID");
    rank.details["group"] = group;
  }
  work.Destroy(world);
}

void BeforeAnyCommunicator(Rank& rank) {
  Workload work = MakeWorkload(rank);
  rank.Pause("before NCCL was used");
  rank.Resume("before NCCL was used");
  rank.child.Barrier("paused and resumed with nothing");
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  Cycle(rank, work, "after first use");
  ExpectSame(work, work.Verify(world), reference, "after a cycle");
  work.Destroy(world);
}

void WorkInFlight(Rank& rank) {
  Workload work = MakeWorkload(rank, false, false);
  Communicator world = work.Create("world", World(rank));
  const std::size_t count = work.options().sizes.back();
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  work.Poison(world, Op::kAllReduce, count);
  for (int i = 0; i < 30; ++i) rank.nccl.Check(work.Launch(world, Op::kAllReduce, count), "all-reduce before the pause");
  const bool running = Cuda::Get().StreamQuery(work.lanes()[0].stream) == CUDA_ERROR_NOT_READY;
  if (rank.child.Maximum(running ? 0 : 1) != 0) throw Skip("the collectives ended before the pause began on some rank");
  // AMem may wait for the work, or refuse; it must not pull the memory away under it.
  const ncclResult_t paused = rank.amem.Pause(nullptr);
  const double worst = rank.child.Maximum(paused != 0 ? 1 : 0);
  rank.details["ncclPause with work in flight"] = paused == 0 ? "waited" : "refused: " + rank.amem.LastError();
  if (paused == 0) rank.Resume("after a pause with work in flight");
  rank.child.Barrier("resumed");
  rank.Expect((paused != 0) == (worst != 0), "some ranks paused and others refused: " + rank.amem.LastError());
  work.Check(world, Op::kAllReduce, count);
  ExpectSame(work, work.Verify(world), reference, "after a pause with work in flight");
  Cycle(rank, work, "with idle streams");
  ExpectSame(work, work.Verify(world), reference, "after a cycle with idle streams");
  work.Destroy(world);
}

// A small send ends without its receive: until then the message is nowhere but in NCCL's buffers.
void MessageOnItsWay(Rank& rank) {
  if (rank.nccl.Send == nullptr || rank.nccl.Recv == nullptr) throw Skip("this libnccl has no ncclSend");
  const Cuda& cuda = Cuda::Get();
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const Lane& lane = work.lanes()[0];
  const bool sender = rank.child.rank() == 0, receiver = rank.child.rank() == 1;
  const std::size_t largest = std::min<std::size_t>(65'536, work.options().sizes.back());
  const auto send = [&](std::size_t count) {
    if (!sender) return;
    rank.nccl.Check(rank.nccl.Send(reinterpret_cast<void*>(lane.send), count, kNcclFloat32, 1, world.handles[0], lane.stream),
                    Format("ncclSend of %zu floats", count));
  };
  const auto receive = [&](std::size_t count) {
    if (!receiver) return;
    rank.nccl.Check(
        rank.nccl.Recv(reinterpret_cast<void*>(lane.receive), count, kNcclFloat32, 0, world.handles[0], lane.stream),
        Format("ncclRecv of %zu floats", count));
  };
  lane.device.MakeCurrent();
  send(256);  // connects the two
  receive(256);
  work.Wait("the first message", &world);
  for (const std::size_t count : {std::size_t{256}, largest}) {
    rank.child.Barrier("ready to send");
    send(count);
    const bool under_way = rank.child.Maximum(Ends(work) ? 0 : 1) == 0;
    rank.details[Format("%zu floats", count)] =
        under_way ? "sent before the pause, received after it" : "a send waits for its receive";
    rank.child.Barrier("sent");
    if (under_way) Cycle(rank, work, Format("with %zu floats on their way", count));
    if (receiver) cuda.Check(cuda.MemsetD8Async(lane.receive, 0xEE, count * 4, lane.stream), "cuMemsetD8Async");
    receive(count);
    work.Wait(Format("a message of %zu floats", count), &world);
    if (receiver) {
      std::vector<float> got(count);
      cuda.Check(cuda.MemcpyDtoHAsync(lane.host, lane.receive, count * 4, lane.stream), "cuMemcpyDtoHAsync");
      work.Wait("reading the message");
      std::memcpy(got.data(), lane.host, count * 4);
      for (std::size_t i = 0; i < count; ++i)
        rank.Expect(got[i] == Value(0, i),
                    Format("float %zu of %zu that were on their way is %g, not %g", i, count, got[i], Value(0, i)));
    }
    rank.child.Barrier("received");
    if (!under_way) throw Skip(Format("here a send of %zu floats waits for its receive", count));
  }
  work.Destroy(world);
}

void OtherThread(Rank& rank) {
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  // A thread that never touched CUDA, as a Python server's are. The reason of a failure is the thread's own.
  const auto elsewhere = [&](ncclResult_t (*call)(ncclComm_t*), const std::string& what) {
    rank.child.Stage(what);
    std::string failure;
    std::thread([&] {
      try {
        rank.amem.Check(call(nullptr), rank.nccl, what);
      } catch (const Failure& thrown) {
        failure = thrown.what();
      }
    }).join();
    rank.Expect(failure.empty(), failure);
  };
  elsewhere(rank.amem.Pause, "ncclPause in another thread");
  rank.child.Barrier("all paused");
  elsewhere(rank.amem.Resume, "ncclResume in another thread");
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a cycle made by another thread");
  work.Destroy(world);
}

}  // namespace amem::gpu
