// Ranks that come late, stay away, have no memory or are killed: the others get an error in time, and can go on.
#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/gpu/claims.h"

namespace amem::gpu {
namespace {

// What amem_kill_at.so offers to the process it is preloaded into.
struct KillAt {
  void (*arm)(const char* call, unsigned long nth) = nullptr;
  unsigned long (*calls)(const char* call) = nullptr;

  static KillAt Find() {
    KillAt found;
    found.arm = reinterpret_cast<decltype(found.arm)>(dlsym(RTLD_DEFAULT, "amem_kill_at"));
    found.calls = reinterpret_cast<decltype(found.calls)>(dlsym(RTLD_DEFAULT, "amem_kill_at_calls"));
    if (found.arm == nullptr || found.calls == nullptr) throw Failure("amem_kill_at.so is not preloaded");
    return found;
  }
};

void KillMyselfIn(double seconds) {
  std::thread([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    kill(getpid(), SIGKILL);
  }).detach();
}

}  // namespace

void LateRank(Rank& rank) {
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  const bool late = rank.child.rank() == rank.child.processes() - 1;
  if (late) sleep(2);
  rank.Pause("with one rank two seconds late");
  if (late) sleep(2);
  rank.Resume("with one rank two seconds late");
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a cycle with a late rank");
  work.Destroy(world);
}

void AbsentRank(Rank& rank) {
  if (rank.child.processes() < 2) throw Skip("needs two processes");
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  const bool absent = rank.child.rank() == rank.child.processes() - 1;
  if (!absent) {
    rank.child.Stage("ncclPause while one rank stays away");
    const double start = Now();
    const ncclResult_t result = rank.amem.Pause(nullptr);
    const double waited = Now() - start;
    rank.Expect(result != 0, "ncclPause succeeded although a rank with shared memory did not come");
    rank.Expect(waited < 20, Format("AMEM_TIMEOUT_MS is 3000, ncclPause took %.1f s", waited));
    rank.details["after_s"] = waited;
    rank.details["message"] = rank.amem.LastError();
  }
  rank.child.Barrier("the pause failed");
  ExpectSame(work, work.Verify(world), reference, "after a pause that failed");
  Cycle(rank, work, "with everybody");
  ExpectSame(work, work.Verify(world), reference, "after a cycle with everybody");
  work.Destroy(world);
}

// One rank's receive has no send yet, so that its device is not idle before the other rank sends.
void DeviceThatWaits(Rank& rank) {
  if (rank.child.processes() < 2 || rank.nccl.Send == nullptr || rank.nccl.Recv == nullptr)
    throw Skip("needs two processes, and a libnccl with ncclSend");
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  const Lane& lane = work.lanes()[0];
  const bool sender = rank.child.rank() == 0, receiver = rank.child.rank() == 1;
  constexpr std::size_t kCount = 256;
  const auto send = [&] {
    if (sender)
      rank.nccl.Check(
          rank.nccl.Send(reinterpret_cast<void*>(lane.send), kCount, kNcclFloat32, 1, world.handles[0], lane.stream),
          "ncclSend");
  };
  const auto receive = [&] {
    if (receiver)
      rank.nccl.Check(
          rank.nccl.Recv(reinterpret_cast<void*>(lane.receive), kCount, kNcclFloat32, 0, world.handles[0], lane.stream),
          "ncclRecv");
  };
  lane.device.MakeCurrent();
  send();  // connects the two
  receive();
  work.Wait("the first message", &world);
  rank.child.Barrier("connected");
  receive();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const bool busy = receiver && Cuda::Get().StreamQuery(lane.stream) == CUDA_ERROR_NOT_READY;
  if (rank.child.Maximum(busy ? 1 : 0) == 0) {
    send();
    throw Skip("here a receive without its send does not keep a device busy");
  }
  rank.child.Stage("ncclPause while a receive waits for its send");
  const double start = Now();
  const ncclResult_t result = rank.amem.Pause(nullptr);
  rank.details["after_s"] = Now() - start;
  rank.details["message"] = rank.amem.LastError();
  const bool on_time = rank.child.Maximum(Now() - start) < 4.5;
  rank.child.Barrier("the pause failed");
  send();  // whatever came out of it, so that the job can end
  work.Wait("the message that was waited for", &world);
  rank.Expect(result != 0, "ncclPause succeeded although a device was not idle");
  rank.Expect(on_time, "AMEM_TIMEOUT_MS is 3000, and ncclPause took longer on some rank");
  const std::string message = rank.amem.LastError();
  rank.Expect(message.find("has not ended within") != std::string::npos && message.find("rank 1") != std::string::npos,
              "the message does not name the rank whose device was not idle: " + message);
  ExpectSame(work, work.Verify(world), reference, "after a pause that failed");
  Cycle(rank, work, "with idle devices");
  ExpectSame(work, work.Verify(world), reference, "after a cycle with idle devices");
  work.Destroy(world);
}

// Somebody takes the memory of one device while all are paused.
void OutOfMemory(Rank& rank) {
  const Cuda& cuda = Cuda::Get();
  Workload work = MakeWorkload(rank, false, false);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  rank.Pause();
  rank.child.Barrier("all paused");
  const bool culprit = rank.child.rank() == rank.child.processes() - 1;
  CUdeviceptr hog = 0;
  if (culprit) {
    work.lanes()[0].device.MakeCurrent();
    std::size_t free = 0, total = 0;
    cuda.Check(cuda.MemGetInfo(&free, &total), "cuMemGetInfo");
    cuda.Check(cuda.MemAlloc(&hog, free - (std::size_t{64} << 20)), "cuMemAlloc of all but 64 MiB");
  }
  rank.child.Barrier("one device is full");
  for (int attempt = 0; attempt < 2; ++attempt) {
    rank.child.Stage("ncclResume with one device full");
    const double start = Now();
    const ncclResult_t result = rank.amem.Resume(nullptr);
    const double seconds = Now() - start;
    const std::string message = rank.amem.LastError();
    rank.Expect(result != 0, "ncclResume succeeded although one device has no memory");
    rank.Expect(seconds < 1, Format("ncclResume took %.2f s to fail", seconds));
    rank.Expect(message.find(Format("rank %d", rank.child.processes() - 1)) != std::string::npos &&
                    message.find("must come back") != std::string::npos &&
                    message.find("call ncclResume again") != std::string::npos,
                "the message does not say who, what and what to do: " + message);
    rank.details["message"] = message;
    rank.details["failed_after_ms"] = seconds * 1000;
    rank.child.Barrier("the resume failed");
  }
  if (culprit) cuda.Check(cuda.MemFree(hog), "cuMemFree");
  rank.child.Barrier("the device is free again");
  rank.Resume("once there is memory");
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a resume that failed twice");
  Cycle(rank, work, "once more");
  ExpectSame(work, work.Verify(world), reference, "one cycle later");
  work.Destroy(world);
}

// Ranks end their rollouts minutes apart: one that lives and is paused is waited for beyond AMEM_TIMEOUT_MS.
void ResumesLate(Rank& rank) {
  if (rank.child.processes() < 2) throw Skip("needs two processes");
  constexpr double kLateS = 10;
  Workload work = MakeWorkload(rank);
  Communicator world = work.Create("world", World(rank));
  const auto reference = work.Verify(world);
  rank.child.Barrier("before the pause");
  rank.Pause();
  rank.child.Barrier("all paused");
  const bool late = rank.child.rank() == rank.child.processes() - 1;
  if (late) std::this_thread::sleep_for(std::chrono::duration<double>(kLateS));
  rank.child.Stage("ncclResume while one rank stays away");
  const double start = Now();
  rank.Resume("with one that is late");
  const double waited = Now() - start;
  rank.Expect(late || waited > kLateS - 1, Format("ncclResume took %.1f s, and one rank came %.0f s late", waited, kLateS));
  rank.details["waited_s"] = waited;
  rank.child.Barrier("all resumed");
  ExpectSame(work, work.Verify(world), reference, "after a resume that waited for a late rank");
  work.Destroy(world);
}

// Kills the victim in its next pause or resume, and gives the others' error. A cycle before it, in which nobody is killed,
// shows how often the call is made and how long the whole takes.
void PauseOrResumeAndKill(Rank& rank) {
  const KillPoint& point = *rank.kill;
  const int victim = point.Victim(rank.child.processes());
  const bool mine = rank.child.rank() == victim;
  const char* const what = point.in_pause ? "ncclPause" : "ncclResume";
  const KillAt kill_at = KillAt::Find();
  if (!point.in_pause) rank.Pause("before a counted resume");
  rank.child.Barrier("ready to count");
  kill_at.arm("", 0);
  double start = Now();
  point.in_pause ? rank.Pause("counted") : rank.Resume("counted");
  const double whole = Now() - start;
  const unsigned long calls = kill_at.calls(point.call), nth = point.last ? calls : 1;
  const bool blind = rank.child.Maximum(calls == 0 ? 1 : 0) > 0;
  point.in_pause ? rank.Resume("before the kill") : rank.Pause("before the kill");
  rank.child.Barrier("ready to be killed");
  rank.child.Stage(std::string(what) + " in which a rank is killed");
  if (mine && blind) KillMyselfIn(whole * point.share);
  if (mine && !blind) kill_at.arm(point.call, nth);
  start = Now();
  const ncclResult_t result = point.in_pause ? rank.amem.Pause(nullptr) : rank.amem.Resume(nullptr);
  const double seconds = Now() - start;
  const std::string message = rank.amem.LastError();
  rank.Expect(!mine, Format("rank %d was to be killed at %s %lu, has made %lu, and is alive: %d %s", victim, point.call, nth,
                            kill_at.calls(point.call), result, message.c_str()));
  rank.child.Without(victim);
  rank.Expect(result != 0, std::string(what) + " succeeded although a rank was killed in it");
  rank.Expect(message.find(Format("rank %d", victim)) != std::string::npos, "the message does not name who died: " + message);
  const double slowest = rank.child.Maximum(seconds);
  rank.Expect(slowest < 2, Format("the error came after %.2f s", slowest));
  rank.details["killed_rank"] = victim;
  rank.details["killed_at"] =
      blind ? Format("%.0f %% of the time", 100 * point.share) : Format("%s %lu of %lu", point.call, nth, calls);
  rank.details["failed_after_ms"] = 1000 * slowest;
  rank.details["message"] = message;
}

void KilledRank(Rank& rank) {
  const KillPoint& point = *rank.kill;
  Workload work = MakeWorkload(rank);
  rank.child.Barrier("buffers filled");
  const auto before = work.FreeBytes();
  rank.child.Barrier("memory read before start-up");
  Communicator world = work.Create("world", World(rank));
  work.Verify(world);
  rank.child.Barrier("first results");
  PauseOrResumeAndKill(rank);
  const Json stats = Stats(rank);
  const std::string now = stats.is_object() ? stats.value("lifecycle", "") : "";
  const std::string expected = point.in_pause ? "running" : "paused";
  rank.Expect(now == expected, Format("after the failure a session is '%s'", now.c_str()));
  if (point.once_more) {
    if (point.in_pause) rank.Pause("without the dead");
    rank.Resume("without the dead");
    rank.child.Barrier("resumed without the dead");
  }
  work.Abort(world);
  rank.child.Barrier("all aborted");
  rank.details["left_after_abort_mib"] = MibBetween(before[0], work.FreeBytes()[0]);
}

}  // namespace amem::gpu
