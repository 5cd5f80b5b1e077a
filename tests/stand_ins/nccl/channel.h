// Of a communicator whose neighbours are on other hosts: a buffer of GPU memory to send from and one to receive into, in
// several places each, and two threads as NCCL's proxy has them. One connects, makes the buffers, registers them and gives them
// up; the other moves what kernels have filled.
//
//   STAND_IN_RANKS_PER_HOST  how many ranks share a host
//   STAND_IN_NET             what ranks of different hosts send through: "ib", or the file of a network plugin
#pragma once

#include <array>
#include <deque>
#include <mutex>

#include "tests/stand_ins/nccl/nccl.h"
#include "tests/stand_ins/nccl/net.h"

namespace stand_in {

constexpr std::size_t kSlots = 4, kSlotBytes = std::size_t{512} << 10;
constexpr std::size_t kSmall = 16384;  // messages up to this size have places and a region of their own, and need no flush

// Steps are counted from 1. A step of a sender is filled by a kernel (`ready`) and sent (`taken`); one of a receiver arrives
// (`ready`) and is read by a kernel (`taken`). The counters are in host memory, as NCCL's.
struct Channel {
  std::atomic<std::uint64_t> ready{0}, taken{0};
  std::array<std::size_t, kSlots> bytes{};
  Buffer buffer;
  std::uint64_t steps = 0;  // of which kernels know

  // Of the proxy's threads:
  void* comm = nullptr;
  std::array<void*, 2> regions{};  // of large and of small messages
  std::array<void*, kSlots> requests{};
  std::array<bool, kSlots> flushing{};
  std::uint64_t begun = 0, ended = 0;
  std::mutex guard;
  std::deque<std::size_t> wanted;  // of a receiver: sizes of the steps that operations wait for

  [[nodiscard]] static std::size_t Slot(std::uint64_t step) { return (step - 1) % kSlots; }
  [[nodiscard]] char* At(std::uint64_t step, std::size_t size) const {
    const std::size_t offset = size <= kSmall ? kSlots * kSlotBytes + Slot(step) * kSmall : Slot(step) * kSlotBytes;
    return reinterpret_cast<char*>(buffer.address) + offset;
  }
};

struct Network {
  const NetTable* table = nullptr;
  void* listening = nullptr;
  Channel to_next, from_before;
  bool sends = false, receives = false;  // whether that neighbour is on another host
  std::thread progress;
  std::atomic<bool> stop{false}, failed{false};
  bool aborted = false;                         // with `stop`: at once,
  std::chrono::steady_clock::time_point until;  // or at the latest then
};

Result ConnectNetwork(Comm& comm);  // where STAND_IN_NET says so; needs all ranks
// Ends the thread that sends. What kernels have put there to be sent is sent first, unless the communicator is aborted.
void EndProgress(Comm& comm);
Result CloseNetwork(Comm& comm);  // after that

// How large a message of one step may be.
inline std::size_t StepBytes(const Comm& comm, std::size_t otherwise) {
  return comm.network == nullptr ? otherwise : kSlotBytes;
}
void Want(Channel& channel, std::size_t bytes);  // an operation will receive that
// Whether a message to (from) that rank goes over the network.
bool SendsTo(const Comm& comm, int rank);
bool ReceivesFrom(const Comm& comm, int rank);
// A kernel that puts a message into the buffer and does not wait until it is sent; or that waits until one has arrived.
Result NetworkSend(Comm& comm, const float* data, std::size_t count, CUstream stream);
Result NetworkReceive(Comm& comm, float* data, std::size_t count, CUstream stream);

}  // namespace stand_in
