// A communicator's start and end: its buffers, and the proxy that passes their descriptors to the next rank.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/stand_ins/nccl/channel.h"

namespace stand_in {
namespace {

struct Offer {  // the proxy's answer for one buffer
  size_t bytes = 0;
  CUipcMemHandle legacy{};
  int result = 0;
};

Result SendOffer(int socket, const Offer& offer, int descriptor) {
  iovec data{const_cast<Offer*>(&offer), sizeof offer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof offer) ? kSuccess : kSystem;
}

Result ReceiveOffer(int socket, Offer& offer, int& descriptor) {
  iovec data{&offer, sizeof offer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof offer)) return kRemote;
  descriptor = -1;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message)) std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  return static_cast<Result>(offer.result);
}

sockaddr_un AddressOf(const std::string& job, int rank, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "stand-in-nccl-" + job + "-" + std::to_string(rank);
  std::copy(name.begin(), name.end(), address.sun_path + 1);  // abstract: leaves no file behind
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int BufferCount() {
  const char* text = std::getenv("STAND_IN_BUFFERS");
  return text == nullptr ? DefaultBuffers() : std::max(0, std::atoi(text));
}
size_t BufferBytes(int index) { return (index % 3 == 1 ? size_t{6} : size_t{2}) << 20; }
constexpr int kTheExchange = -1;  // asked for in place of a buffer
int OffersOf(const Comm& comm) {  // how many descriptors the next rank asks for
  const int next = (comm.rank + 1) % comm.ranks;
  int count = next == 0 ? 0 : 1;
  if (!SharesHostWith(comm, next)) return count;
  for (int i = 0; i < BufferCount(); ++i) count += IsExported(i) ? 1 : 0;
  return count;
}

// The descriptor of a buffer, exported for this one answer.
Result Export(Comm& comm, const Buffer& buffer, Offer& offer, int& descriptor) {
  offer.bytes = buffer.bytes;
  if (Legacy()) return Check("cuIpcGetMemHandle", comm.cu->ipc_get(&offer.legacy, buffer.address));
  CUmemGenericAllocationHandle handle = 0;
  TRY(Check("cuMemRetainAllocationHandle", comm.cu->retain(&handle, reinterpret_cast<void*>(buffer.address))));
  const Result exported = Check("cuMemExportToShareableHandle",
                                comm.cu->export_handle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  comm.cu->release(handle);
  return exported;
}

Result ExportOffered(Comm& comm, Offer& offer, int& descriptor) {
  offer.bytes = comm.offered_bytes;
  return Check("cuMemExportToShareableHandle",
               comm.cu->export_handle(&descriptor, comm.offered, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

// This rank's own descriptor of the exchange, which it may still be waiting for.
int AwaitExchange(const Comm& comm) {
  while (comm.exchange_descriptor < 0 && !comm.stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return dup(comm.exchange_descriptor);
}

Result AnswerOne(Comm& comm, int socket) {
  int index = 0;
  if (recv(socket, &index, sizeof index, MSG_WAITALL) != static_cast<ssize_t>(sizeof index)) return kRemote;
  if (index < kOffered || index >= static_cast<int>(comm.own.size())) return kInvalidArgument;
  Offer offer;
  int descriptor = -1;
  if (index == kTheExchange) {
    descriptor = AwaitExchange(comm);
  } else if (index == kOffered) {
    offer.result = ExportOffered(comm, offer, descriptor);
  } else {
    offer.result = Export(comm, comm.own[static_cast<size_t>(index)], offer, descriptor);
  }
  const Result sent = SendOffer(socket, offer, descriptor);
  if (descriptor >= 0) close(descriptor);
  if (sent == kSuccess && index != kOffered) ++comm.served;
  return sent;
}

void RunProxy(Comm* comm) {
  while (!comm->stop) {
    const int socket = accept4(comm->listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) continue;
    const int before = comm->served;
    while (!comm->stop && AnswerOne(*comm, socket) == kSuccess) {
    }
    close(socket);
    if (comm->served > before && comm->served < OffersOf(*comm)) comm->next_failed = true;
  }
  EndProgress(*comm);  // as NCCL's, whichever way the communicator ends
}

Result StartProxy(Comm& comm) {
  comm.listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(comm.job, comm.rank, length);
  if (bind(comm.listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 || listen(comm.listener, 16) != 0)
    return kSystem;
  comm.proxy = std::thread(&RunProxy, &comm);
  return kSuccess;
}

Result Connect(const Comm& comm, int rank, int& connected) {
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(comm.job, rank, length);
  const auto deadline = Clock::now() + kPatience;
  connected = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  while (connect(connected, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (comm.next_failed || Clock::now() > deadline) return kRemote;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return kSuccess;
}

Result Ask(int socket, int index, Offer& offer, int& descriptor) {
  if (send(socket, &index, sizeof index, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof index)) return kSystem;
  return ReceiveOffer(socket, offer, descriptor);
}

Result ImportExchange(Comm& comm, int socket) {
  Offer offer;
  int descriptor = -1;
  TRY(Ask(socket, kTheExchange, offer, descriptor));
  return MapExchange(comm, descriptor);
}

Result ImportOne(Comm& comm, int socket, int index, Buffer& buffer) {
  Driver& cu = *comm.cu;
  Offer offer;
  int descriptor = -1;
  TRY(Ask(socket, index, offer, descriptor));
  buffer.bytes = offer.bytes;
  buffer.imported = true;
  if (Legacy()) {
    CU(cu.ipc_open(&buffer.address, offer.legacy, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    return kSuccess;
  }
  CUmemGenericAllocationHandle handle = 0;
  const CUresult imported = cu.import_handle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(descriptor);
  TRY(Check("cuMemImportFromShareableHandle", imported));
  return MapAt(cu, comm.device, handle, buffer.bytes, 0, buffer.address);
}

Result ImportAll(Comm& comm) {
  if (comm.ranks == 1) return kSuccess;
  int socket = -1;
  const int before = (comm.rank + comm.ranks - 1) % comm.ranks;
  Result result = Connect(comm, before, socket);
  if (result == kSuccess && comm.rank != 0) result = ImportExchange(comm, socket);
  for (int i = 0; result == kSuccess && i < static_cast<int>(comm.own.size()); ++i) {
    if (!IsExported(i) || !SharesHostWith(comm, before)) continue;
    comm.peer.emplace_back();
    result = ImportOne(comm, socket, i, comm.peer.back());
  }
  close(socket);
  const auto deadline = Clock::now() + kPatience;
  while (result == kSuccess && comm.served < OffersOf(comm)) {  // until the next rank has everything
    if (comm.next_failed || Clock::now() > deadline) return kRemote;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return result;
}

}  // namespace

bool IsExported(int index) { return index % 3 != 2; }

bool SharesHostWith(const Comm& comm, int other) {
  const char* text = std::getenv("STAND_IN_RANKS_PER_HOST");
  const int ranks = text == nullptr ? 0 : std::atoi(text);
  return ranks <= 0 || comm.rank / ranks == other / ranks;
}

Result ImportFrom(Comm& comm, int rank, int index, CUmemGenericAllocationHandle& handle) {
  int socket = -1, descriptor = -1;
  Offer offer;
  Result result = Connect(comm, rank, socket);
  if (result == kSuccess) result = Ask(socket, index, offer, descriptor);
  close(socket);
  if (result != kSuccess) return result;
  const CUresult imported = comm.cu->import_handle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                                   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(descriptor);
  return Check("cuMemImportFromShareableHandle", imported);
}

Result Init(Comm& comm) {
  for (int i = 0; i < BufferCount(); ++i) {
    comm.own.emplace_back();
    TRY(Allocate(*comm.cu, comm.device, BufferBytes(i), comm.own.back()));
    CU(comm.cu->clear(comm.own.back().address, 0, comm.own.back().bytes, nullptr));
  }
  TRY(Hold(comm));
  if (comm.rank == 0) TRY(MakeExchange(comm));
  TRY(StartProxy(comm));
  TRY(ImportAll(comm));
  TRY(ConnectMulticast(comm));
  return ConnectNetwork(comm);
}

Result Destroy(Comm* comm, bool aborted) {
  comm->aborted = aborted;
  comm->stop = true;
  if (comm->listener >= 0) shutdown(comm->listener, SHUT_RDWR);
  if (comm->proxy.joinable()) comm->proxy.join();
  const Result disconnected = CloseNetwork(*comm);
  if (comm->listener >= 0) close(comm->listener);
  UnmapExchange(*comm);
  LetGo(*comm);
  Result result = FreeWindows(*comm);
  if (const Result freed = FreeMulticast(*comm); freed != kSuccess) result = freed;
  if (disconnected != kSuccess) result = disconnected;
  for (auto* buffers : {&comm->peer, &comm->own})
    for (Buffer& buffer : *buffers)
      if (const Result freed = Free(*comm->cu, buffer); freed != kSuccess) result = freed;
  delete comm;
  return result;
}

}  // namespace stand_in
