// For programs that run on the stand-in libcuda.so.1: how a "kernel" is made, and what tests may ask and change.
//
// The stand-in is the simulator behind the CUDA driver's C interface. Settings, read at the first call:
//   AMEM_SIM_WORLD         file of the simulated world that the processes share; none: each process has its own
//   AMEM_SIM_DEVICES       GPUs of the world (4); 0: cuInit answers that there is no device
//   AMEM_SIM_CAPACITY_MIB  memory of each (16384)
//   AMEM_SIM_FABRIC        1: handles of type fabric may be had, which work on this host
//   CUDA_VISIBLE_DEVICES   as with CUDA, by number
//   STAND_IN_FAULT         hang: no stream ever finishes, as after a collective that hangs; hang-unmap: cuMemUnmap
//                          never returns, as behind a GPU that hangs; fork: the first cuInit forks, as libcuda does
//                          for nvidia-modprobe, on its thread and on one of its own, and fails where a child fails
//   STAND_IN_VERSION       what cuDriverGetVersion says (13000), read at each call
//   STAND_IN_AT            "CALL,NTH,ACTION": stand_in_cuda_at with these, at the first call
//   STAND_IN_LOOK_UPS      a file: each cuGetProcAddress adds a line to it, "NAME VERSION LIBRARY", where the library is
//                          the caller's; and a name that the stand-in does not have gets a function that answers
//                          CUDA_ERROR_NOT_SUPPORTED, because a stock NCCL goes no further without it
// A value that cannot be read makes cuInit fail, and the reason is on stderr.
#pragma once

#include <cstdint>

// A CUfunction is a pointer to one of these: cuLaunchKernel calls `host_function` with its kernelParams before it returns.
struct HostKernel {
  void (*host_function)(void** arguments);
};

extern "C" {
// By the name of the simulator's call ("Create"). The first is 0, or 1 if there is no such call.
int stand_in_cuda_fail_next(const char* call, std::uint64_t nth, int result);
std::uint64_t stand_in_cuda_calls(const char* call);
std::uint64_t stand_in_cuda_bytes_in_use(int device);  // by all processes of the world
std::uint64_t stand_in_cuda_contexts(int device);      // how often this process made the primary context of the device
std::uint64_t stand_in_cuda_pinned(void* context);     // bytes of host memory that are page-locked in that context
// Until it is called with 0: bit 0, the program's work in that context does not end (what waits for the context or asks its
// default stream notices); bit 1, nor does what is queued on any other stream.
void stand_in_cuda_set_busy(void* context, int busy);
// Does something that ends or stops this process, or a thread of it, as failures do: "KILL", "STOP", "SEGV", "ABRT", "TERM"
// (the signal), "exit=3", "_exit=3", "hang" (the thread does not come back), "sleep=300" (milliseconds). 0, or 1 if there is no
// such action.
int stand_in_cuda_do(const char* action);
// The same in the nth next call of that name; "*" stands for all names, "Create|Map" for two. Besides the simulator's names
// there are "Copy", "Query" (of a stream or event) and "HostRegister", "ReleasePrimary" (the last release of a primary context:
// if it "fails", it succeeds, and another thread has made the context anew at once), and "CheckpointState",
// "CheckpointLock", "CheckpointTake", "CheckpointRestore" and "CheckpointUnlock". Also "fail=2" (that call answers 2), and
// "fail-all=2" (so do all that follow). The last of these calls counts.
int stand_in_cuda_at(const char* call, std::uint64_t nth, const char* action);
}
