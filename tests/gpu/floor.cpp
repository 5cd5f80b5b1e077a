#include "tests/gpu/floor.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace amem::gpu {

namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;
constexpr std::size_t kBatch = 128;  // descriptors in one message; the kernel's limit is 253

double Milliseconds(double from, double to) { return 1e3 * (to - from); }

}  // namespace

Floor::Floor(Child& child, const Device& device, const FloorOptions& options)
    : child_(child), device_(device), options_(options) {
  const Cuda& cuda = Cuda::Get();
  if (cuda.MemCreate == nullptr || cuda.MemMap == nullptr || cuda.MemExport == nullptr)
    throw Skip("this driver has no virtual memory management calls");
  int value = 0;
  // As NCCL asks for it: where the device can, memory is RDMA capable.
  if (cuda.DeviceGetAttribute != nullptr &&
      cuda.DeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device.handle) ==
          CUDA_SUCCESS)
    rdma_ = value != 0;
  const auto scaled = [&](int count) { return count / std::max(1, options.scale); };
  if (options.slab_mib > 0) {
    const std::size_t total = static_cast<std::size_t>(scaled(options.private_2mib) + scaled(options.shared_2mib)) * 2 +
                              static_cast<std::size_t>(scaled(options.shared_10mib)) * 10;
    const auto slab = static_cast<std::size_t>(options.slab_mib);
    own_.assign((total + slab - 1) / slab, Piece{slab * kMib});
    for (int peer = 0; peer < child.processes(); ++peer) {
      if (peer == child.rank()) continue;
      for (const std::size_t i : PiecesFor(child.rank(), peer)) imported_.push_back({own_[i].bytes, 0, 0, peer});
    }
    return;
  }
  // The two shared kinds alternate, as NCCL's connections make them.
  const int shared = std::max(scaled(options.shared_2mib), scaled(options.shared_10mib));
  for (int i = 0; i < shared; ++i) {
    if (i < scaled(options.shared_2mib)) own_.push_back({2 * kMib});
    if (i < scaled(options.shared_10mib)) own_.push_back({10 * kMib});
  }
  const std::size_t exported = own_.size();
  for (int i = 0; i < scaled(options.private_2mib); ++i) own_.push_back({2 * kMib});
  const int others = child.processes() - 1;
  if (others == 0) return;
  // Two by two, usually a 2 MiB and a 10 MiB one, they go to the peers in turn. Every rank has the same list, so each knows
  // what the others send it.
  for (std::size_t i = 0; i < exported; ++i) own_[i].peer = static_cast<int>(i / 2) % others;  // turned into a rank below
  for (int round = 1; round <= others; ++round) {
    const int owner = (child.rank() - round + child.processes()) % child.processes();
    for (const std::size_t i : PiecesFor(child.rank(), owner)) imported_.push_back({own_[i].bytes, 0, 0, owner});
  }
}

// Indices into rank `of`'s list of the pieces that `peer` imports. Every rank has the same list, with the roles changed.
std::vector<std::size_t> Floor::PiecesFor(int peer, int of) const {
  std::vector<std::size_t> pieces;
  const int distance = (peer - of + child_.processes()) % child_.processes() - 1;
  for (std::size_t i = 0; i < own_.size(); ++i) {
    if (options_.slab_mib > 0 || own_[i].peer == distance) pieces.push_back(i);
  }
  return pieces;
}

std::uint64_t Floor::own_bytes() const {
  std::uint64_t total = 0;
  for (const Piece& piece : own_) total += piece.bytes;
  return total;
}

void Floor::Reserve(Piece& piece) const {
  const Cuda& cuda = Cuda::Get();
  cuda.Check(cuda.MemAddressReserve(&piece.address, piece.bytes, 0, 0, 0),
             Format("cuMemAddressReserve of %zu bytes", piece.bytes));
}

void Floor::Place(Piece& piece) const {
  const Cuda& cuda = Cuda::Get();
  cuda.Check(cuda.MemMap(piece.address, piece.bytes, 0, piece.handle, 0), Format("cuMemMap of %zu bytes", piece.bytes));
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device_.ordinal;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  cuda.Check(cuda.MemSetAccess(piece.address, piece.bytes, &access, 1), Format("cuMemSetAccess of %zu bytes", piece.bytes));
}

void Floor::Displace(Piece& piece) const {
  const Cuda& cuda = Cuda::Get();
  cuda.Check(cuda.MemUnmap(piece.address, piece.bytes), Format("cuMemUnmap of %zu bytes", piece.bytes));
  cuda.Check(cuda.MemRelease(piece.handle), "cuMemRelease");
  piece.handle = 0;
}

void Floor::CreateOwn() {
  const Cuda& cuda = Cuda::Get();
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device_.ordinal;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.allocFlags.gpuDirectRDMACapable = rdma_ ? 1 : 0;
  for (Piece& piece : own_) {
    cuda.Check(cuda.MemCreate(&piece.handle, piece.bytes, &properties, 0), Format("cuMemCreate of %zu bytes", piece.bytes));
    Place(piece);
  }
}

void Floor::SendBatch(int peer, const std::vector<std::size_t>& pieces, std::size_t from, std::size_t to) const {
  const Cuda& cuda = Cuda::Get();
  std::vector<int> descriptors;
  for (std::size_t i = from; i < to; ++i) {
    int descriptor = -1;
    cuda.Check(cuda.MemExport(&descriptor, own_[pieces[i]].handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle");
    descriptors.push_back(descriptor);
  }
  std::uint64_t first = from;
  iovec content{&first, sizeof first};
  std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  if (sendmsg(child_.Socket(peer), &message, MSG_NOSIGNAL) < 0)
    throw Failure(Format("sending %zu descriptors to rank %d: %s", descriptors.size(), peer, strerror(errno)));
  for (const int descriptor : descriptors) close(descriptor);
}

void Floor::ReceiveBatch(int peer, std::size_t expected, std::vector<Piece*>& into, std::size_t from) const {
  const Cuda& cuda = Cuda::Get();
  pollfd ready{child_.Socket(peer), POLLIN, 0};
  const auto wait_ms = static_cast<int>(1e3 * std::max(0.1, child_.deadline() - Now()));
  if (poll(&ready, 1, wait_ms) != 1) throw Failure(Format("no descriptors from rank %d until the time limit", peer));
  std::uint64_t first = 0;
  iovec content{&first, sizeof first};
  std::vector<char> control(CMSG_SPACE(kBatch * sizeof(int)));
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = recvmsg(child_.Socket(peer), &message, MSG_CMSG_CLOEXEC);
  if (got == 0) throw Aborted(Format("rank %d closed its socket", peer));
  if (got != sizeof first) throw Failure(Format("receiving descriptors from rank %d: %s", peer, strerror(errno)));
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  const std::size_t count = header == nullptr ? 0 : (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  if (count != expected || first != from)
    throw Failure(Format("rank %d sent %zu descriptors from %llu on, expected %zu from %zu on", peer, count,
                         static_cast<unsigned long long>(first), expected, from));
  std::vector<int> descriptors(count);
  std::memcpy(descriptors.data(), CMSG_DATA(header), count * sizeof(int));
  for (std::size_t i = 0; i < count; ++i) {
    Piece& piece = *into[from + i];
    cuda.Check(cuda.MemImport(&piece.handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptors[i])),
                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
    close(descriptors[i]);
    if (piece.address == 0) Reserve(piece);
    Place(piece);
  }
}

// In each round this rank sends to the one `round` after it and receives from the one `round` before it, batch by batch in
// turn, so at most one batch is ever on its way to anybody and no buffer can fill up.
void Floor::Share() {
  const int processes = child_.processes();
  for (int round = 1; round < processes; ++round) {
    const int to = (child_.rank() + round) % processes;
    const int from = (child_.rank() - round + processes) % processes;
    const std::vector<std::size_t> mine = PiecesFor(to, child_.rank());
    std::vector<Piece*> theirs;
    for (Piece& piece : imported_) {
      if (piece.peer == from) theirs.push_back(&piece);
    }
    for (std::size_t at = 0; at < std::max(mine.size(), theirs.size()); at += kBatch) {
      if (at < mine.size()) SendBatch(to, mine, at, std::min(mine.size(), at + kBatch));
      if (at < theirs.size()) ReceiveBatch(from, std::min(theirs.size(), at + kBatch) - at, theirs, at);
    }
  }
}

void Floor::Build() {
  child_.Stage("floor: building");
  for (Piece& piece : own_) Reserve(piece);
  CreateOwn();
  child_.Barrier("floor: own built");
  Share();
  child_.Barrier("floor: built");
}

FloorTimes Floor::Pause() {
  FloorTimes times;
  child_.Stage("floor: pause");
  child_.Barrier("floor: before the pause");
  const double start = Now();
  for (Piece& piece : imported_) Displace(piece);
  const double dropped = Now();
  child_.Barrier("floor: imports dropped");
  const double release = Now();
  for (Piece& piece : own_) Displace(piece);
  const double end = Now();
  times.drop_imports_ms = Milliseconds(start, dropped);
  times.release_own_ms = Milliseconds(release, end);
  times.pause_ms = Milliseconds(start, end);
  child_.Barrier("floor: paused");
  return times;
}

FloorTimes Floor::Resume() {
  FloorTimes times;
  child_.Stage("floor: resume");
  child_.Barrier("floor: before the resume");
  const double start = Now();
  CreateOwn();
  const double created = Now();
  Share();
  const double end = Now();
  times.create_own_ms = Milliseconds(start, created);
  times.share_ms = Milliseconds(created, end);
  times.resume_ms = Milliseconds(start, end);
  child_.Barrier("floor: resumed");
  return times;
}

void Floor::TearDown() {
  const Cuda& cuda = Cuda::Get();
  child_.Stage("floor: taking down");
  for (std::vector<Piece>* pieces : {&imported_, &own_}) {
    for (Piece& piece : *pieces) {
      if (piece.handle != 0) Displace(piece);
      cuda.Check(cuda.MemAddressFree(piece.address, piece.bytes), "cuMemAddressFree");
    }
    child_.Barrier("floor: taken down");
  }
}

}  // namespace amem::gpu
